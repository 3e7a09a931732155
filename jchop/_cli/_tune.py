"""``jchop tune``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jchop._cli._command import (
    Command,
    argument,
    check_pictures,
    print_report,
    print_written,
    write_pictures,
)
from jchop._cli._text import terminal_progress_bar
from jchop._cli._user_function import imports_from_here, load_arguments, load_function
from jchop._common.checks import split_outside_brackets


def _run_tune(options: argparse.Namespace) -> None:
    check_pictures(options)
    from jchop._insight.tune import tune

    menu: list[Any] = [item for item in split_outside_brackets(options.menu, ", \t") if item]
    with imports_from_here():
        function = load_function("FUNCTION", options.function)
        metric = options.metric if ":" not in options.metric else load_function("--metric", options.metric)
        inputs = [load_arguments("--data", path, function) for path in options.data]
        extra_inputs = [load_arguments("--held-out", path, function) for path in options.held_out]
        limits = {name: getattr(options, name) for name in ("cost", "by", "evaluations", "seconds", "max_turns")}
        tuning = tune(
            function, inputs, options.tolerance, [None if item == "carrier" else item for item in menu],
            metric=metric, held_out=extra_inputs, progress=terminal_progress_bar(), **limits,
        )  # fmt: skip
    print_report(tuning, options.json)
    title = f"{options.function} within {options.tolerance:g}"

    def draw() -> object:
        from jchop.plot import tune as draw_formats

        return draw_formats(tuning, title=title)

    write_pictures(options, draw, title, tuning, dpi=100)
    if not options.json:
        print_written(options.plot, options.html)


TUNE = Command(
    "tune",
    _run_tune,
    "find the cheapest formats for the parts of your own function within a tolerance",
    (
        argument("function"),
        argument("--data", nargs="+", required=True,
                 help="its arguments, one file for each input: arrays by name, or without names"),
        argument("--tolerance", "X", "the largest error allowed", type=float, required=True),
        argument("--menu", "SPECS", "formats with commas between them; carrier is no rounding", required=True),
        argument("--cost", help="bits (of a site, the mean) or bytes (of all results)", default="bits"),
        argument("--by", help="scope or equation: the parts with a format of their own", default="scope"),
        argument("--metric", default="relative",
                 help="relative, absolute or largest; or MODULE:FUNCTION of the result and the carrier's result"),
        argument("--held-out", "FILE.npz", "inputs that are only reported", type=Path, nargs="+", default=[]),
        argument("--evaluations", "N", "the most measurements; 2000", type=int, default=2000),
        argument("--seconds", "X", "the most seconds of the search", type=float),
        argument("--max-turns", "N", "the most turns of a while loop", type=int, default=10_000),
        argument("--json"),
        argument("--plot", help="draw the formats (needs matplotlib)"),
        argument("--html"),
    ),
    "Finds a format of the menu for each part of your function, so that the error on the arrays of\n"
    "--data stays within the tolerance, and shows them with the rules for jchop.emulate (--json).",
    "examples:\n  jchop tune model:solve --data x.npz --tolerance 1e-3 --menu bfloat16,e5m10,tf32,carrier\n"
    "  jchop tune model:loss --data a.npz b.npz --held-out c.npz --tolerance 0.01 --menu e4m3,bfloat16,tf32 "
    "--html tune.html",
)  # fmt: skip
