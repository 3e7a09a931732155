"""``jchop study``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jchop._cli._command import Command, argument, flag
from jchop._cli._text import check_folder, printable
from jchop._cli._user_function import imports_from_here, load_arguments, load_function
from jchop._common.checks import split_outside_brackets
from jchop._common.files import require_extra
from jchop.study._function_study import FUNCTION_FORMATS, FUNCTION_MODES, run_function, save_function
from jchop.study._progress import ProgressBar
from jchop.study._run import DATASETS, FORMATS, MODES


def _run_study(options: argparse.Namespace) -> None:
    check_folder("--out", options.out)
    if options.function is not None:
        _run_function_study(options)
        return
    for option, value in (("--data", options.data), ("--budget-seconds", options.budget_seconds)):
        if value is not None:
            raise ValueError(f"{option} {value} belongs to the study of a function: jchop study MODULE:FUNCTION")
    require_extra("jchop study", "study", ("flax", "optax", "sklearn", "matplotlib"))
    from jchop import study

    result = study.run(
        options.dataset or "digits",
        formats=split_items(options.formats or study.FORMATS),
        modes=split_items(options.modes or study.MODES),
        seeds=10 if options.seeds is None else options.seeds,
        epochs=options.epochs,
        activations=options.activations,
        seed=options.seed,
        progress=_progress_bar(),
    )
    paths = study.save(result, options.out)
    if options.json:
        print(paths[1].read_text(encoding="utf-8"), end="")
        return
    print(study.table(result))
    _print_files(paths, result.seconds)


def _run_function_study(options: argparse.Namespace) -> None:
    """The study of a function of the user."""
    require_extra("jchop study", "plot", ("matplotlib",))
    for option, is_set in (
        ("--dataset", options.dataset is not None),
        ("--epochs", options.epochs is not None),
        ("--activations", options.activations),
    ):
        if is_set:
            raise ValueError(f"{option} belongs to the study of a network, without MODULE:FUNCTION")
    if options.data is None:
        raise ValueError("--data FILE.npz is needed: the arguments of the function")
    with imports_from_here():
        function = load_function("FUNCTION", options.function)
        result = run_function(
            function,
            *load_arguments("--data", options.data, function),
            formats=split_items(options.formats or FUNCTION_FORMATS),
            modes=split_items(options.modes or FUNCTION_MODES),
            seeds=3 if options.seeds is None else options.seeds,
            seed=options.seed,
            budget_seconds=options.budget_seconds,
            progress=_progress_bar(),
        )
    paths = save_function(result, options.out)
    if options.json:
        print(result.to_json(indent=1))
        return
    print("\n".join(map(printable, str(result).splitlines())))
    _print_files(paths, result.seconds)


def _progress_bar() -> ProgressBar | None:
    return ProgressBar(sys.stderr) if sys.stderr is not None else None


def _print_files(paths: Sequence[Path], seconds: float) -> None:
    print(f"\nFiles: {printable(', '.join(map(str, paths)))} ({seconds:.0f} s)")


def split_items(words: Sequence[str]) -> list[str]:
    """Texts between commas and spaces outside of parentheses and brackets."""
    return [item for item in split_outside_brackets(" ".join(words), ", \t\n\r") if item]


def _lists_text(of_network: Sequence[str], of_function: Sequence[str]) -> str:
    return f"default {' '.join(of_network)}; of a function: {' '.join(of_function)}"


STUDY = Command(
    "study",
    _run_study,
    "round your own function, or a small network trained on real data, to every format in every mode",
    (
        argument("function", nargs="?"),
        argument("--data"),
        argument("--budget-seconds", "S", "begin no format after this time", type=float),
        argument("--dataset", help="default digits (images)", choices=DATASETS),
        argument("--formats", "TEXT", _lists_text(FORMATS, FUNCTION_FORMATS), nargs="+"),
        argument("--modes", "TEXT", _lists_text(MODES, FUNCTION_MODES), nargs="+"),
        argument("--seeds", "N", "draws of each stochastic mode; default 10, of a function 3", type=int),
        argument("--epochs", "N", "passes over the training data; default by data set", type=int),
        flag("--activations", "round the activations, too"),
        argument("--seed", help="seed of split, training and rounding; default 0", default=0),
        argument("--out", "DIR", "the folder of the files; default jchop-study", type=Path,
                 default=Path("jchop-study")),
        argument("--json"),
    ),
    "With MODULE:FUNCTION: runs your function on the arrays of --data with every operation rounded,\n"
    "prints its errors, and writes study.csv, study.json, study.png and study.html, a page for a mail.\n"
    "Without: trains a small classifier, evaluates it with its parameters rounded to each format in each\n"
    "mode, prints the table and writes study.csv, study.json and study.png.",
    "examples:\n  jchop study model:apply --data inputs.npz --formats e4m3fn,e5m2,bfloat16 --out my-study\n"
    "  jchop study --formats q43,e6m9,fixed4.4 --modes nearest_even,stochastic --out my-study",
)  # fmt: skip
