"""``jchop ptq``."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jchop._cli._command import Command, argument, check_pictures, flag, print_written, write_pictures
from jchop._cli._file_commands import parse_rule
from jchop._cli._text import check_folder, check_new_file, check_suffix, key_of_seed_option, print_note, printable
from jchop._cli._user_function import argument_order, load_arrays, load_function
from jchop._common.checks import check
from jchop.storage import load_safetensors, save_safetensors
from jchop.storage._files.safetensors import TensorFile
from jchop.storage._save import TREE_KEY

#: The steps that ``--method`` may name.
PTQ_STEPS = (
    *("smooth", "awq", "rotate", "correct_error", "sparse"),
    *("clip", "hqq", "gptq", "sign_round", "correct_biases"),
)
NEAREST_METHOD = "nearest"


def _run_ptq(options: argparse.Namespace) -> None:
    from jchop import ptq
    from jchop._quantized.products.rule import Rule
    from jchop._quantized.quantize_fn import quantize_fn
    from jchop.ptq._quantize import calibrate_params
    from jchop.ptq._records import discard_run

    check_suffix("--out", options.out, ".safetensors")
    check_new_file("--out", options.out, options.force)
    check_pictures(options)
    folder = options.resume or options.out.with_name(options.out.name + ".run")
    check_folder("--resume", folder)
    rules = [Rule(r.pattern, weight=r.spec, activation=options.activation) for r in map(parse_rule, options.rule)]
    steps = _parse_steps(options.method, ptq)
    function = load_function("FUNCTION", options.function)
    specs = [spec for rule in rules for spec in (rule.weight, rule.activation) if spec is not None]
    key = key_of_seed_option(options.seed, specs)
    params = _load_parameters(options.weights)
    batches = _load_batches(options.data, function, options.batch)
    sequential = True if options.sequential else None
    quantized_function = quantize_fn(function, rules, key=key)
    weights, report = calibrate_params(
        quantized_function, params, batches, steps, sequential, key,
        _batch_progress(len(batches)), folder, _print_weight_progress, options.memory,
    )  # fmt: skip
    save_safetensors(options.out, weights)
    discard_run(folder)
    options.json = options.report == "json"
    print(report.to_json(indent=1) if options.json else report)
    if not options.json:
        print_written(options.out)
    write_pictures(options, report.plot)


# -- progress ----------------------------------------------------------------------------------------------------------


def _batch_progress(count: int) -> Callable[[int], None]:
    def show_step(step: int) -> None:
        print_note(f"data: batch {(step - 1) % count + 1} of {count}")

    return show_step


def _print_weight_progress(row: Any, stage: int, total: int) -> None:
    decibels = "" if np.isnan(row.before) else f": {row.before:.2f} dB to nearest, {row.after:.2f} dB"
    print_note(printable(f"stage {stage} of {total}: {row.path}{decibels}"))


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
        try:
            args = [ast.literal_eval(arg) for arg in call.args] if isinstance(call, ast.Call) else []
            keywords = call.keywords if isinstance(call, ast.Call) else []
            steps.append(getattr(ptq, name.id)(*args, **{str(k.arg): ast.literal_eval(k.value) for k in keywords}))
        except (ValueError, TypeError) as error:
            raise ValueError(f"--method {text!r}: {error}") from None
    return steps


def _load_parameters(path: Path) -> Any:
    """The pytree of a checkpoint: in its dicts and lists if the file has a record of them, else a dict by name."""
    with TensorFile(path) as file:
        has_tree = TREE_KEY in file.metadata
    return load_safetensors(path, nested=has_tree)


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


PTQ = Command(
    "ptq",
    _run_ptq,
    "quantize the parameters of a JAX function with data",
    (
        argument("function", help="a function of a pytree of parameters and data"),
        argument("weights", "WEIGHTS.safetensors", type=Path),
        argument("data", "DATA.npz", "arrays named as the arguments after the parameters, or not at all", type=Path),
        argument("--rule", help="parts of paths, as 'blocks' or '!norm', and their format or spec; may be repeated"),
        argument("--activation", "SPEC", "the rounding of inputs of the rules' products"),
        argument("--method", "STEPS", default="gptq",
                 help=f"{NEAREST_METHOD}, or steps in order: {', '.join(PTQ_STEPS)}, with arguments; default gptq"),
        flag("--sequential", "weight after weight, with inputs of rounded ones"),
        argument("--batch", "N", "samples that are run at once; default 32", type=int, default=32),
        argument("--seed"),
        argument("--out", "OUT.safetensors", type=Path, required=True),
        argument("--force"),
        argument("--memory", "SIZE", "the most memory for statistics, as 4GiB; default no limit"),
        argument("--resume", "DIR", "the folder of the unfinished run; default OUT.run", type=Path),
        argument("--report", help="on standard output", choices=("table", "json"), default="table"),
        ("--json", {"dest": "report", "action": "store_const", "const": "json", "help": "the same as --report json"}),
        argument("--plot", help="draw the report (needs matplotlib)"),
    ),
    "Runs data through FUNCTION(params, ...), rounds the weights of its products by what it sees, and\n"
    "writes a new file. A run that was killed continues when the command is given again.",
    "example:\n  jchop ptq model:apply weights.safetensors data.npz --rule 'blocks=int4(group=128)' \\\n"
    "      --method 'correct_error, gptq' --out packed.safetensors",
)  # fmt: skip
