"""``jchop tune``."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jchop._cli._text import check_suffix, printable, terminal_progress_bar
from jchop._cli._user_function import argument_order, imports_from_here, load_arrays, load_function
from jchop._common.checks import split_outside_brackets
from jchop._common.files import require_extra, write_atomically
from jchop._common.text.html import image, page


def run_tune(options: argparse.Namespace) -> None:
    for option, path, suffix in (("--plot", options.plot, ".png"), ("--html", options.html, ".html")):
        if path is not None:
            check_suffix(option, path, suffix)
            require_extra(option, "plot", ("matplotlib",))
    from jchop._insight.tune import tune

    menu: list[Any] = [item for item in split_outside_brackets(options.menu, ", \t") if item]
    with imports_from_here():
        function = load_function("FUNCTION", options.function)
        metric = options.metric if ":" not in options.metric else load_function("--metric", options.metric)
        inputs = [_load_arguments("--data", path, function) for path in options.data]
        extra_inputs = [_load_arguments("--held-out", path, function) for path in options.held_out]
        tuning = tune(
            function,
            inputs,
            options.tolerance,
            [None if item == "carrier" else item for item in menu],
            cost=options.cost,
            by=options.by,
            metric=metric,
            held_out=extra_inputs,
            evaluations=options.evaluations,
            seconds=options.seconds,
            max_turns=options.max_turns,
            progress=terminal_progress_bar(),
        )
    if options.json:
        print(json.dumps(tuning.as_dict(), indent=1, allow_nan=False))
    else:
        print("\n".join(map(printable, str(tuning).splitlines())))
    if options.plot is None and options.html is None:
        return
    from jchop.plot import tune as draw

    title = f"{options.function} within {options.tolerance:g}"
    picture = io.BytesIO()
    draw(tuning, title=title).savefig(picture, format="png", dpi=100)
    contents = (picture.getvalue(), page(title, image(picture.getvalue(), title), tuning._repr_html_()).encode())
    for path, content in zip((options.plot, options.html), contents, strict=True):
        if path is not None:
            write_atomically(path, lambda file, content=content: file.write(content))
            if not options.json:
                print(f"wrote {printable(str(path))}")


def _load_arguments(option: str, path: Path, function: Callable[..., Any]) -> tuple[Any, ...]:
    arrays = load_arrays(option, path)
    return tuple(arrays[name] for name in argument_order(list(arrays), function, f"{option} {path}"))


def add_tune(commands: argparse._SubParsersAction) -> None:
    """The command, with its options."""
    command = commands.add_parser(
        "tune",
        help="find the cheapest formats for the parts of your own function within a tolerance",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Finds a format of the menu for each part of your function, so that the error on the arrays of\n"
        "--data stays within the tolerance, and shows them with the rules for jchop.emulate (--json).",
        epilog="examples:\n  jchop tune model:solve --data x.npz --tolerance 1e-3 --menu bfloat16,e5m10,tf32,carrier\n"
        "  jchop tune model:loss --data a.npz b.npz --held-out c.npz --tolerance 0.01 --menu e4m3,bfloat16,tf32 "
        "--html tune.html",
    )
    command.add_argument("function", metavar="MODULE:FUNCTION", help="a function that JAX can trace")
    command.add_argument(
        "--data",
        metavar="FILE.npz",
        type=Path,
        nargs="+",
        required=True,
        help="its arguments, one file for each input: arrays by name, or without names",
    )
    command.add_argument("--tolerance", metavar="X", type=float, required=True, help="the largest error allowed")
    command.add_argument(
        "--menu", metavar="SPECS", required=True, help="formats with commas between them; carrier is no rounding"
    )
    command.add_argument("--cost", default="bits", help="bits (of a site, the mean) or bytes (of all results)")
    command.add_argument("--by", default="scope", help="scope or equation: the parts with a format of their own")
    command.add_argument(
        "--metric",
        default="relative",
        help="relative, absolute or largest; or MODULE:FUNCTION of the result and the carrier's result",
    )
    command.add_argument(
        "--held-out", metavar="FILE.npz", type=Path, nargs="+", default=[], help="inputs that are only reported"
    )
    command.add_argument("--evaluations", metavar="N", type=int, default=2000, help="the most measurements; 2000")
    command.add_argument("--seconds", metavar="X", type=float, help="the most seconds of the search")
    command.add_argument("--max-turns", metavar="N", type=int, default=10_000, help="the most turns of a while loop")
    command.add_argument("--json", action="store_true", help="print JSON in place of the table")
    command.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the formats (needs matplotlib)")
    command.add_argument("--html", metavar="FILE.html", type=Path, help="write one page for a mail (needs matplotlib)")
    command.set_defaults(run=run_tune)
