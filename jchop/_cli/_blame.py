"""``jchop blame``."""

from __future__ import annotations

import argparse

from jchop._cli._command import (
    Command,
    argument,
    check_pictures,
    print_report,
    print_written,
    write_pictures,
)
from jchop._cli._text import key_of_seed_option
from jchop._cli._user_function import imports_from_here, load_arguments, load_function
from jchop._spec.spec import as_spec


def _run_blame(options: argparse.Namespace) -> None:
    check_pictures(options)
    from jchop._insight.reports.blame import blame
    from jchop._insight.reports.emulate import emulate

    spec = as_spec(options.to, "--to")
    key = key_of_seed_option(options.seed, [spec])
    with imports_from_here():
        function = load_function("FUNCTION", options.function)
        output = None if options.output is None else load_function("--output", options.output)
        args = load_arguments("--data", options.data, function)
        report = blame(emulate(function, spec), *args, output=output, key=key, max_turns=options.max_turns)
    if (options.plot or options.html) and not report.rows:
        raise ValueError(f"FUNCTION {options.function} makes no error in {options.to}, so there is nothing to draw")
    print_report(report, options.json)
    title = f"{options.function} in {options.to}"

    def draw() -> object:
        from jchop.plot import blame as draw_parts

        return draw_parts(report, title=title)

    write_pictures(options, draw, title, report, dpi=100)
    if not options.json:
        print_written(options.plot, options.html)


BLAME = Command(
    "blame",
    _run_blame,
    "divide the error of your own function in a format among its operations",
    (
        argument("function"),
        argument("--data", required=True),
        argument("--to", "SPEC", "the rounding, such as bfloat16 or e4m3:saturate", required=True),
        argument("--output", "MODULE:FUNCTION", "a function of the result to a number; default: the number, or the "
                 "norm of the error"),
        argument("--seed"),
        argument("--max-turns", "N", "the turns of a while loop whose parts are shown; without it, a loop of more than "
                 "1000 is an error", type=int),
        argument("--json"),
        argument("--plot", help="draw the parts (needs matplotlib)"),
        argument("--html"),
    ),
    "Runs your function on the arrays of --data with every operation rounded, beside the same\n"
    "function without rounding, and shows the part of each operation in the error of the result, by line.",
    "examples:\n  jchop blame model:loss --data inputs.npz --to bfloat16\n"
    "  jchop blame model:solve --data inputs.npz --to e5m10:stochastic --seed 0 --html blame.html",
)  # fmt: skip
