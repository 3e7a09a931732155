"""``jchop blame``."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

from jchop._cli._text import check_suffix, key_of_seed_option, parse_seed, printable
from jchop._cli._user_function import argument_order, imports_from_here, load_arrays, load_function
from jchop._common.files import require_extra, write_atomically
from jchop._common.text.html import image, page
from jchop._spec.spec import as_spec


def run_blame(options: argparse.Namespace) -> None:
    for option, path, suffix in (("--plot", options.plot, ".png"), ("--html", options.html, ".html")):
        if path is not None:
            check_suffix(option, path, suffix)
            require_extra(option, "plot", ("matplotlib",))
    from jchop._insight.reports.blame import blame
    from jchop._insight.reports.report import emulate

    spec = as_spec(options.to, "--to")
    key = key_of_seed_option(options.seed, [spec])
    with imports_from_here():
        function = load_function("FUNCTION", options.function)
        output = None if options.output is None else load_function("--output", options.output)
        arrays = load_arrays("--data", options.data)
        args = [arrays[name] for name in argument_order(list(arrays), function, f"--data {options.data}")]
        report = blame(emulate(function, spec), *args, output=output, key=key, max_turns=options.max_turns)
    pictures = (options.plot, options.html)
    if any(pictures) and not report.rows:
        raise ValueError(f"FUNCTION {options.function} makes no error in {options.to}, so there is nothing to draw")
    if options.json:
        print(json.dumps(report.as_dict(), indent=1, allow_nan=False))
    else:
        print("\n".join(map(printable, str(report).splitlines())))
    if not any(pictures):
        return
    from jchop.plot import blame as draw

    title = f"{options.function} in {options.to}"
    picture = io.BytesIO()
    draw(report, title=title).savefig(picture, format="png", dpi=100)
    contents = (picture.getvalue(), page(title, image(picture.getvalue(), title), report._repr_html_()).encode())
    for path, content in zip(pictures, contents, strict=True):
        if path is not None:
            write_atomically(path, lambda file, content=content: file.write(content))
            if not options.json:
                print(f"wrote {printable(str(path))}")


def add_blame(commands: argparse._SubParsersAction) -> None:
    """The command, with its options."""
    command = commands.add_parser(
        "blame",
        help="divide the error of your own function in a format among its operations",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Runs your function on the arrays of --data with every operation rounded, beside the same\n"
        "function without rounding, and shows the part of each operation in the error of the result, by line.",
        epilog="examples:\n  jchop blame model:loss --data inputs.npz --to bfloat16\n"
        "  jchop blame model:solve --data inputs.npz --to e5m10:stochastic --seed 0 --html blame.html",
    )
    command.add_argument("function", metavar="MODULE:FUNCTION", help="a function that JAX can trace")
    command.add_argument(
        "--data", metavar="FILE.npz", type=Path, required=True, help="its arguments: arrays by name, or without names"
    )
    command.add_argument("--to", metavar="SPEC", required=True, help="the rounding, such as bfloat16 or e4m3:saturate")
    command.add_argument(
        "--output",
        metavar="MODULE:FUNCTION",
        help="a function of the result to a number; default: the number, or the norm of the error",
    )
    command.add_argument("--seed", metavar="N", type=parse_seed, help="seed of random bits; stochastic modes need it")
    command.add_argument(
        "--max-turns",
        metavar="N",
        type=int,
        help="the turns of a while loop whose parts are shown; without it, a loop of more than 1000 is an error",
    )
    command.add_argument("--json", action="store_true", help="print JSON in place of the table")
    command.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the parts (needs matplotlib)")
    command.add_argument("--html", metavar="FILE.html", type=Path, help="write one page for a mail (needs matplotlib)")
    command.set_defaults(run=run_blame)
