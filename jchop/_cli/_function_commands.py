"""``jchop blame``, ``tune``, ``study`` and ``ptq``: a function of the user, ``module:function``, and its arguments."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import inspect
import os
import pkgutil
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from jchop._cli import _command as cli
from jchop._cli._file_commands import parse_rule
from jchop._common.checks import check, close_names_hint, place_in_errors, short_repr, split_outside_brackets
from jchop._common.files import open_regular_file, require_extra
from jchop._program.step import is_library_file
from jchop._spec.spec import as_spec
from jchop._storage import load, save
from jchop.study._function_study import FUNCTION_FORMATS, FUNCTION_MODES, run_function
from jchop.study._run import DATASETS, FORMATS, MODES, ProgressBar, run


@contextlib.contextmanager
def imports_from_here() -> Iterator[None]:
    """Has imports find modules of the current folder: the module of a function, and the modules that it imports."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def load_function(option: str, text: str) -> Callable[..., Any]:
    """The function of ``module:function``; modules of the current folder are found, too.

    It takes arguments that are by keyword alone as positional ones, too, after the others. A call raises ValueError if
    JAX cannot trace the function, or the function raises an error.

    Args:
        option: name of the argument of the command, for errors.
        text: the argument as it was written.

    Raises:
        ValueError: for a text of another form, a name that cannot be imported, or an object that is no function.
    """
    module, colon, name = text.partition(":")
    if not (colon and name) or not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        raise ValueError(f"{option} {text!r} must be MODULE:FUNCTION, as 'model:apply' for a function of model.py")
    try:
        with imports_from_here():
            function = pkgutil.resolve_name(text)
    except Exception as error:  # also the errors of the module
        if isinstance(error, SyntaxError):
            reason = f"{error.filename}, line {error.lineno}: {error.msg}"
        elif module in sys.modules:
            reason = f"{error}{close_names_hint(name, vars(sys.modules[module]))}"
        else:
            reason = f"{error}{close_names_hint(module, (path.stem for path in Path().glob('*.py')))}"
        raise ValueError(f"{option} {text!r} cannot be loaded: {reason}") from None
    check(callable(function), f"{option} {text!r} is {type(function).__name__}, and no function")

    positional_count, keywords = _keyword_only_arguments(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from jax.errors import JAXIndexError, JAXTypeError

        try:
            keyword_values = dict(zip(keywords, args[positional_count:], strict=False))
            positional = args[:positional_count] + args[positional_count + len(keywords) :]
            return function(*positional, **keyword_values, **kwargs)
        except (JAXIndexError, JAXTypeError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ValueError(
                f"{option} {text!r} cannot be traced by JAX: {reason}; "
                "use jax.numpy and jax.lax in place of float, int, if, while, x[mask] and NumPy"
            ) from None
        except Exception as error:
            frames, detail = traceback.extract_tb(error.__traceback__), f": {error}" if str(error) else ""
            own = [f" at {os.path.basename(f.filename)}:{f.lineno}" for f in frames if not is_library_file(f.filename)]
            name = f"{type(error).__name__}{own[-1] if own else ''}"
            raise ValueError(f"{option} {text!r} raised {name}{detail}") from None

    return call


def _keyword_only_arguments(function: Callable[..., Any]) -> tuple[int, list[str]]:
    """How many arguments come before those by keyword alone, and the names of these."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # as of functions in C
        return 0, []
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):  # which takes all that is positional
        return 0, []
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters), keywords


#: Compressed arrays in memory may take so many bytes, or else so many times the bytes of their file.
_MAX_ARRAY_BYTES, _MAX_EXPANSION = 1 << 26, 64


def load_arrays(option: str, path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name; ValueError for another file, or one without arrays."""
    with open_regular_file(path, f"{option} {path}") as file:
        try:
            _check_npz(file)
            with np.load(file, allow_pickle=False) as arrays:
                arrays_by_name = {name: arrays[name] for name in arrays.files}
            if others := [name for name, array in arrays_by_name.items() if not isinstance(array, np.ndarray)]:
                raise ValueError(f"{short_repr(others[0])} in it is no array")
        except Exception as error:  # of damaged files zipfile, zlib and NumPy raise errors of any kind
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"{option} {path} must be a .npz file of arrays, as numpy.savez writes it: {reason}"
            ) from None
    check(arrays_by_name, f"{option} {path} has no array")
    return arrays_by_name


def _check_npz(file: BufferedReader) -> None:
    """Refuses a file that is no archive of numpy.savez, and arrays whose memory is out of proportion to the file."""
    head = file.read(6)
    file.seek(0)
    check(head != b"\x93NUMPY", "it is a single array")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    for member in members:
        ok = not member.flag_bits & 1 and member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        check(ok, f"{short_repr(member.filename)} in it is encrypted, or compressed in another way than deflate")
    size = sum(member.file_size for member in members)
    most = max(_MAX_ARRAY_BYTES, _MAX_EXPANSION * os.fstat(file.fileno()).st_size)
    check(size <= most, f"its arrays take {size} bytes, over {_MAX_EXPANSION} times those of the file; use numpy.savez")
    file.seek(0)


def load_arguments(option: str, path: Path, function: Callable[..., Any]) -> tuple[Any, ...]:
    """The arrays of a .npz file as the arguments of a function, in their order."""
    arrays = load_arrays(option, path)
    return tuple(arrays[name] for name in argument_order(list(arrays), function, f"{option} {path}"))


def argument_order(names: Sequence[str], function: Callable[..., Any], file: str, *, after: int = 0) -> list[str]:
    """The names of arrays in the order of the arguments: by name, or arrays without names in their order.

    Args:
        names: of the arrays; ``arr_0`` and so on if they have none.
        function: takes them as positional arguments.
        file: the argument of the command with its value, for errors.
        after: how many arguments come before. Default 0.

    Raises:
        ValueError: for arrays that are not the first arguments.
    """
    default_names = [f"arr_{i}" for i in range(len(names))]
    if sorted(names) == sorted(default_names):
        return default_names
    parameters = list(inspect.signature(function).parameters)[after:]
    order = [name for name in parameters if name in names]
    if len(order) < len(names) or order != parameters[: len(order)]:
        place = " after the parameters" if after else ""
        raise ValueError(
            f"{file} has the arrays {', '.join(sorted(names))}, and the function takes {', '.join(parameters)}{place}; "
            "save them under these names, the first ones, or without names"
        )
    return order


# -- blame and report --------------------------------------------------------------------------------------------------


def _run_emulated(tool: str, options: argparse.Namespace, **own: Any) -> None:
    """Runs a tool that looks into an emulated function."""
    cli.check_pictures(options)
    from jchop._emulate.emulate import emulate

    spec = as_spec(options.to, "--to")
    key = cli.key_of_seed_option(options.seed, [spec])
    with imports_from_here():
        function = load_function("FUNCTION", options.function)
        if getattr(options, "output", None) is not None:
            own["output"] = load_function("--output", options.output)
        args = load_arguments("--data", options.data, function)
        report = getattr(emulate(function, spec), tool)(*args, key=key, max_turns=options.max_turns, **own)
    if (options.plot or options.html) and not report.rows:
        raise ValueError(f"FUNCTION {options.function} makes no error in {options.to}, so there is nothing to draw")
    _show_report(options, report, f"{options.function} in {options.to}")


def _show_report(options: argparse.Namespace, report: Any, title: str) -> None:
    """Prints a report, and writes its picture and its page."""
    cli.print_report(report, options.json)
    cli.write_pictures(options, lambda: report.plot(title=title), title, report, dpi=100)


def _emulated_command(name: str, help: str, shows: str, turns: str, drawn: str, *more: Any, **own: Any) -> cli.Command:
    """A command that runs a report of `emulate`: its help, and the words for what it shows and draws."""
    arguments = (
        cli.argument("function"),
        cli.argument("--data", required=True),
        cli.argument("--to", "SPEC", "the rounding, such as bfloat16 or e4m3:saturate", required=True),
        *more,
        cli.argument("--seed"),
        cli.argument("--max-turns", "N", turns, type=int),
        cli.argument("--json"),
        cli.argument("--plot", help=f"draw {drawn} (needs matplotlib)"),
        cli.argument("--html"),
    )
    return cli.Command(
        name, functools.partial(_run_emulated, name, **own), help, arguments,
        "Runs your function on the arrays of --data with every operation rounded, beside the same\n"
        f"function without rounding, and shows {shows}, by line.",
        f"examples:\n  jchop {name} model:loss --data inputs.npz --to bfloat16\n"
        f"  jchop {name} model:solve --data inputs.npz --to e5m10:stochastic --seed 0 --html {name}.html",
    )  # fmt: skip


BLAME = _emulated_command(
    "blame", "divide the error of your own function in a format among its operations",
    "the part of each operation in the error of the result",
    "the turns of a while loop whose parts are shown; without it, a loop of more than 1000 is an error", "the parts",
    cli.argument("--output", "MODULE:FUNCTION", "a function of the result to a number; default: the number, or the "
                 "norm of the error"),
)  # fmt: skip
REPORT = _emulated_command(
    "report", "show ranges, overflows, cancellation and errors of the operations of your own function in a format",
    "what each operation loses", "the most turns of a while loop; default 10000", "errors and losses",
    trace_values=True,
)  # fmt: skip


def _run_tune(options: argparse.Namespace) -> None:
    cli.check_pictures(options)
    from jchop._insight.tune import tune

    menu: list[Any] = [item for item in split_outside_brackets(options.menu, ", \t") if item]
    with imports_from_here():
        function = load_function("FUNCTION", options.function)
        metric = options.metric if ":" not in options.metric else load_function("--metric", options.metric)
        inputs = [load_arguments("--data", path, function) for path in options.data]
        extra_inputs = [load_arguments("--held-out", path, function) for path in options.held_out]
        limits = {name: getattr(options, name) for name in ("cost", "by", "evaluations", "seconds", "max_turns")}
        tuning = tune(
            function, [None if item == "carrier" else item for item in menu], inputs, options.tolerance,
            metric=metric, held_out=extra_inputs, progress=cli.terminal_progress_bar(), **limits,
        )  # fmt: skip
    _show_report(options, tuning, f"{options.function} within {options.tolerance:g}")
    if options.by == "scope" and len(tuning.rows) == 1 and not options.json:
        print("the function has one scope; --by equation gives each operation a format of its own")


TUNE = cli.Command(
    "tune",
    _run_tune,
    "find the cheapest formats for the parts of your own function within a tolerance",
    (
        cli.argument("function"),
        cli.argument("--data", nargs="+", required=True,
                 help="its arguments, one file for each input: arrays by name, or without names"),
        cli.argument("--tolerance", "X", "the largest error allowed", type=float, required=True),
        cli.argument("--menu", "SPECS", "formats with commas between them; carrier is no rounding", required=True),
        cli.argument("--cost", help="bits (of a site, the mean) or bytes (of all results)", default="bits"),
        cli.argument("--by", help="scope or equation: the parts with a format of their own", default="scope"),
        cli.argument("--metric", default="relative",
                 help="relative, absolute or largest; or MODULE:FUNCTION of the result and the carrier's result"),
        cli.argument("--held-out", "FILE.npz", "inputs that are only reported", type=Path, nargs="+", default=[]),
        cli.argument("--evaluations", "N", "the most measurements; 2000", type=int, default=2000),
        cli.argument("--seconds", "X", "the most seconds of the search", type=float),
        cli.argument("--max-turns", "N", "the most turns of a while loop", type=int, default=10_000),
        cli.argument("--json"),
        cli.argument("--plot", help="draw the formats (needs matplotlib)"),
        cli.argument("--html"),
    ),
    "Finds a format of the menu for each part of your function, so that the error on the arrays of\n"
    "--data stays within the tolerance, and shows them with the rules for jchop.emulate (--json).",
    "examples:\n  jchop tune model:solve --data x.npz --tolerance 1e-3 --menu bfloat16,e5m10,tf32,carrier\n"
    "  jchop tune model:loss --data a.npz b.npz --held-out c.npz --tolerance 0.01 --menu e4m3,bfloat16,tf32 "
    "--html tune.html",
)  # fmt: skip


# -- study -------------------------------------------------------------------------------------------------------------


#: The options that belong to the study of a network alone, and the ones for a function alone.
_NETWORK_OPTIONS, _FUNCTION_OPTIONS = ("dataset", "epochs", "activations"), ("data", "budget_seconds")


def _run_study(options: argparse.Namespace) -> None:
    cli.check_folder("--out", options.out)
    of_function = options.function is not None
    kind = "a network, without MODULE:FUNCTION" if of_function else "a function: jchop study MODULE:FUNCTION"
    for name in _NETWORK_OPTIONS if of_function else _FUNCTION_OPTIONS:
        value = getattr(options, name)
        check(value is None or value is False, f"--{name.replace('_', '-')} belongs to the study of {kind}")
    formats, modes, seeds = (FUNCTION_FORMATS, FUNCTION_MODES, 3) if of_function else (FORMATS, MODES, 10)
    grid = {
        "formats": cli.split_items(options.formats or formats),
        "modes": cli.split_items(options.modes or modes),
        "seeds": seeds if options.seeds is None else options.seeds,
        "seed": options.seed,
        "progress": ProgressBar(sys.stderr) if sys.stderr is not None else None,
    }
    if of_function:
        require_extra("jchop study", "plot", ("matplotlib",))
        check(options.data is not None, "--data FILE.npz is needed: the arguments of the function")
        with imports_from_here():
            function = load_function("FUNCTION", options.function)
            inputs = load_arguments("--data", options.data, function)
            result: Any = run_function(function, *inputs, budget_seconds=options.budget_seconds, **grid)
    else:
        require_extra("jchop study", "study", ("flax", "optax", "sklearn", "matplotlib"))
        result = run(options.dataset or "digits", epochs=options.epochs, activations=options.activations, **grid)
    paths = result.save(options.out)
    cli.print_report(result, options.json)
    if not options.json:
        print(f"\nFiles: {cli.printable(', '.join(map(str, paths)))} ({result.seconds:.0f} s)")


def _lists_text(of_network: Sequence[str], of_function: Sequence[str]) -> str:
    return f"default {' '.join(of_network)}; of a function: {' '.join(of_function)}"


STUDY = cli.Command(
    "study",
    _run_study,
    "round your own function, or a small network trained on real data, to every format in every mode",
    (
        cli.argument("function", nargs="?"),
        cli.argument("--data"),
        cli.argument("--budget-seconds", "S", "begin no format after this time", type=float),
        cli.argument("--dataset", help="default digits (images)", choices=DATASETS),
        cli.argument("--formats", "TEXT", _lists_text(FORMATS, FUNCTION_FORMATS), nargs="+"),
        cli.argument("--modes", "TEXT", _lists_text(MODES, FUNCTION_MODES), nargs="+"),
        cli.argument("--seeds", "N", "draws of each stochastic mode; default 10, of a function 3", type=int),
        cli.argument("--epochs", "N", "passes over the training data; default by data set", type=int),
        cli.flag("--activations", "round the activations, too"),
        cli.argument("--seed", help="seed of split, training and rounding; default 0", default=0),
        cli.argument("--out", "DIR", "the folder of the files; default jchop-study", type=Path,
                 default=Path("jchop-study")),
        cli.argument("--json"),
    ),
    "With MODULE:FUNCTION: runs your function on the arrays of --data with every operation rounded,\n"
    "and prints its errors. Without: trains a small classifier, evaluates it with its parameters rounded to\n"
    "each format in each mode, and prints the table.\n"
    "Writes study.csv, study.json, study.png and study.html, a page for a mail.",
    "examples:\n  jchop study model:apply --data inputs.npz --formats e4m3fn,e5m2,bfloat16 --out my-study\n"
    "  jchop study --formats q43,e6m9,fixed4.4 --modes nearest_even,stochastic --out my-study",
)  # fmt: skip


# -- ptq ---------------------------------------------------------------------------------------------------------------


#: The steps that ``--method`` may name.
PTQ_STEPS = (
    *("sequential", "smooth", "awq", "rotate", "correct_error", "sparse"),
    *("clip", "hqq", "gptq", "sign_round", "correct_biases"),
)
NEAREST_METHOD = "nearest"


def _run_ptq(options: argparse.Namespace) -> None:
    from jchop import ptq
    from jchop._quantized.products.rule import Rule
    from jchop._quantized.quantize_fn import quantize_fn
    from jchop.ptq._quantize import pack_with_data
    from jchop.ptq._records import discard_run

    cli.check_suffix("--out", options.out, ".safetensors")
    cli.check_new_file("--out", options.out, options.force)
    cli.check_pictures(options)
    folder = options.resume or options.out.with_name(options.out.name + ".run")
    cli.check_folder("--resume", folder)
    rules = [Rule(r.pattern, weight=r.spec, activation=options.activation) for r in map(parse_rule, options.rule)]
    steps = _parse_steps(options.method, ptq)
    function = load_function("FUNCTION", options.function)
    specs = [spec for rule in rules for spec in (rule.weight, rule.activation) if spec is not None]
    key = cli.key_of_seed_option(options.seed, specs)
    params = load(options.weights)
    batches = _load_batches(options.data, function, options.batch)
    quantized_function = quantize_fn(function, rules, key=key)

    def print_batch(step: int) -> None:
        cli.print_note(f"data: batch {(step - 1) % len(batches) + 1} of {len(batches)}")

    weights, report = pack_with_data(
        quantized_function, params, batches, steps, key, print_batch, folder, options.memory, _print_weight_progress
    )
    save(options.out, weights)
    discard_run(folder)
    options.json = options.report == "json"
    print(report.to_json(indent=1) if options.json else report)
    if not options.json:
        cli.print_written(options.out)
    cli.write_pictures(options, report.plot)


def _print_weight_progress(row: Any, stage: int, total: int) -> None:
    decibels = "" if np.isnan(row.before) else f": {row.before:.2f} dB to nearest, {row.after:.2f} dB"
    cli.print_note(cli.printable(f"stage {stage} of {total}: {row.path}{decibels}"))


# -- arguments ---------------------------------------------------------------------------------------------------------


def _parse_steps(text: str, ptq: Any) -> list[Any]:
    """The steps of a text such as ``correct_error(0.5), gptq(order='plain')``."""
    if text.strip() == NEAREST_METHOD:
        return []
    message = (
        f"--method {text!r} must be {NEAREST_METHOD}, or steps of {', '.join(PTQ_STEPS)}, as 'correct_error(0.5), gptq'"
    )
    try:
        calls = ast.parse(f"[{text}]", mode="eval").body
    except (SyntaxError, ValueError):
        raise ValueError(message) from None
    steps = []
    for call in calls.elts if isinstance(calls, ast.List) else [calls]:
        name = call.func if isinstance(call, ast.Call) else call
        if not (isinstance(name, ast.Name) and name.id in PTQ_STEPS):
            raise ValueError(message)
        with place_in_errors(f"--method {text!r}", (ValueError, TypeError)):
            args = [ast.literal_eval(arg) for arg in call.args] if isinstance(call, ast.Call) else []
            keywords = call.keywords if isinstance(call, ast.Call) else []
            steps.append(getattr(ptq, name.id)(*args, **{str(k.arg): ast.literal_eval(k.value) for k in keywords}))
    return steps


def _load_batches(path: Path, function: Callable[..., Any], batch_size: int) -> list[tuple[Any, ...]]:
    """The arrays of a file as arguments after the parameters, cut along their first axis."""
    check(batch_size >= 1, f"--batch {batch_size} must be at least 1")
    arrays = load_arrays("DATA", path)
    order = argument_order(list(arrays), function, f"DATA {path}", after=1)
    lengths = {name: array.shape[:1] for name, array in arrays.items()}
    if len(set(lengths.values())) > 1 or () in lengths.values():
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise ValueError(f"DATA {path}: the arrays must have first axes of one length, that of samples: {shapes}")
    count = arrays[order[0]].shape[0]
    check(count, f"DATA {path} has no sample")
    return [tuple(arrays[name][start : start + batch_size] for name in order) for start in range(0, count, batch_size)]


PTQ = cli.Command(
    "ptq",
    _run_ptq,
    "quantize the parameters of a JAX function with data",
    (
        cli.argument("function", help="a function of a pytree of parameters and data"),
        cli.argument("weights", "WEIGHTS.safetensors", type=Path),
        cli.argument("data", "DATA.npz", "arrays named as the arguments after the parameters, or without names",
                     type=Path),
        cli.argument("--rule", help="parts of paths, as 'blocks' or '!norm', with a format or spec; may be repeated"),
        cli.argument("--activation", "SPEC", "the rounding of inputs of the rules' products"),
        cli.argument("--method", "STEPS", default="clip, gptq",
                 help=f"{NEAREST_METHOD}, or steps in order: {', '.join(PTQ_STEPS)}, with arguments; "
                 "default clip, gptq"),
        cli.argument("--batch", "N", "samples that are run at once; default 32", type=int, default=32),
        cli.argument("--seed"),
        cli.argument("--out", "OUT.safetensors", type=Path, required=True),
        cli.argument("--force"),
        cli.argument("--memory", "SIZE", "the most memory for statistics, as 4GiB; default no limit"),
        cli.argument("--resume", "DIR", "the folder of the unfinished run; default OUT.run", type=Path),
        cli.argument("--report", help="on standard output", choices=("table", "json"), default="table"),
        ("--json", {"dest": "report", "action": "store_const", "const": "json", "help": "the same as --report json"}),
        cli.argument("--plot", help="draw the report (needs matplotlib)"),
    ),
    "Runs data through FUNCTION(params, ...), rounds the weights of its products by what it sees, and\n"
    "writes a new file. A run that was killed continues when the command is given again.",
    "example:\n  jchop ptq model:apply weights.safetensors data.npz --rule 'blocks=int4(group=128)' \\\n"
    "      --method 'correct_error, gptq' --out packed.safetensors",
)  # fmt: skip
