"""Commands as rows, and what several of them take, check, print and write."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jchop._cli._text import check_suffix, parse_seed, printable
from jchop._common.files import require_extra, write_atomically
from jchop._common.text.html import image, page

#: An argument of a command: its name and the fields of `add_argument`.
CommandArgument = tuple[str, dict[str, Any]]
#: The fields of the arguments that several commands have.
_SHARED_FIELDS: dict[str, dict[str, Any]] = {
    "function": {"metavar": "MODULE:FUNCTION", "help": "a function that JAX can trace"},
    "--data": {"metavar": "FILE.npz", "type": Path, "help": "its arguments: arrays by name, or without names"},
    "--rule": {"metavar": "PATTERN=SPEC", "action": "append", "required": True},
    "--seed": {"metavar": "N", "type": parse_seed, "help": "seed of random bits; stochastic modes need it"},
    "--force": {"action": "store_true", "help": "replace OUT if it exists"},
    "--json": {"action": "store_true", "help": "print JSON in place of the table"},
    "--plot": {"metavar": "FILE.png", "type": Path},
    "--html": {"metavar": "FILE.html", "type": Path, "help": "write one page for a mail (needs matplotlib)"},
}


def argument(name: str, metavar: str | None = None, help: str | None = None, **fields: Any) -> CommandArgument:
    """An argument, with the fields that it shares with those of other commands where none are given."""
    own = {"metavar": metavar, "help": help} | fields
    return name, _SHARED_FIELDS.get(name, {}) | {key: value for key, value in own.items() if value is not None}


def flag(name: str, help: str) -> CommandArgument:
    """An option without a value."""
    return argument(name, help=help, action="store_true")


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Args:
        name: as it is typed.
        run: does it.
        help: a line in the list of commands.
        arguments: in their order.
        description: a paragraph above its arguments.
        epilog: examples below them.
    """

    name: str
    run: Callable[[argparse.Namespace], None]
    help: str
    arguments: Sequence[CommandArgument]
    description: str | None = None
    epilog: str | None = None

    def add_to(self, commands: Any) -> None:
        """Adds it to the commands of a parser."""
        texts = {"help": self.help, "description": self.description, "epilog": self.epilog}
        parser = commands.add_parser(self.name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
        for name, fields in self.arguments:
            parser.add_argument(name, **fields)
        parser.set_defaults(run=self.run)


# -- what is printed and written ---------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Prints a value as strict JSON."""
    print(json.dumps(value, indent=1, allow_nan=False))


def print_report(report: Any, as_json: bool) -> None:
    """Prints a report as its tables, or as JSON."""
    if as_json:
        print_json(report.as_dict())
    else:
        print("\n".join(map(printable, str(report).splitlines())))


def print_written(path: Path) -> None:
    """Prints the path of a file that was written."""
    print(f"wrote {printable(str(path))}")


def check_pictures(options: argparse.Namespace) -> None:
    """Refuses, before any work, a picture or a page that cannot be drawn or written."""
    for option, path, suffix in (("--plot", options.plot, ".png"), ("--html", _page_path(options), ".html")):
        if path is not None:
            check_suffix(option, path, suffix)
            require_extra(option, "plot", ("matplotlib",))


def write_pictures(
    options: argparse.Namespace, draw: Callable[[], Any], title: str = "", report: Any = None, dpi: Any = "figure"
) -> None:
    """Writes the picture of ``--plot``, and the page of ``--html``; prints their paths, but beside JSON.

    Args:
        options: of the command.
        draw: makes the figure; it is called if a file is asked for.
        title: of the page.
        report: of the page, below the picture; it has a form in HTML.
        dpi: of the picture. Default: that of the figure.
    """
    page_path = _page_path(options)
    if options.plot is None and page_path is None:
        return
    picture = io.BytesIO()
    draw().savefig(picture, format="png", dpi=dpi)
    if options.plot is not None:
        write_atomically(options.plot, lambda file: file.write(picture.getvalue()))
    if page_path is not None:
        content = page(title, image(picture.getvalue(), title), report._repr_html_()).encode()
        write_atomically(page_path, lambda file: file.write(content))
    for path in () if options.json else (options.plot, page_path):
        if path is not None:
            print_written(path)


def _page_path(options: argparse.Namespace) -> Path | None:
    return getattr(options, "html", None)
