"""Commands as rows, and the arguments, checks, prints and files that several share: tables, numbers as text, pages."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from jchop._common.checks import check, split_outside_brackets
from jchop._common.files import require_extra, write_atomically
from jchop._common.html import image, page
from jchop._common.text import REPORT_WIDTH, table_lines
from jchop.formats import ElementFormat, FloatFormat
from jchop.formats._base import Dyadic
from jchop.study._run import ProgressBar, png_bytes


def print_rows(rows: Sequence[Sequence[str]], align: str, as_json: bool) -> None:
    """Prints a table; or its rows as JSON, by the names in its head."""
    print(json.dumps(rows_as_dicts(rows, align), indent=1) if as_json else text_table(rows, align))


def rows_as_dicts(rows: Sequence[Sequence[str]], align: str) -> list[dict[str, Any]]:
    """The rows of a table as dicts by its head: cells of columns aligned by > are numbers; "-" and "" are None.

    Example:
        >>> rows_as_dicts([("name", "bytes"), ("7", "1,024"), ("b", "-")], "<>")
        [{'name': '7', 'bytes': 1024}, {'name': 'b', 'bytes': None}]
    """
    return [dict(zip(rows[0], map(_json_cell, row, align), strict=True)) for row in rows[1:]]


def _json_cell(text: str, alignment: str) -> Any:
    digits = text.replace(",", "")
    if alignment == ">" and re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", digits):
        return json.loads(digits)
    return None if text in ("", "-") else text


def bold(text: str, stream: Any) -> str:
    """The text in bold if the stream is a terminal."""
    return f"\x1b[1m{text}\x1b[0m" if stream is not None and stream.isatty() else text


def output_width() -> int:
    """The characters of a line: the width of the terminal, or the variable COLUMNS; 100 in a pipe or a file."""
    return shutil.get_terminal_size((REPORT_WIDTH, 24)).columns


def text_table(rows: Sequence[Sequence[str]], align: str, rule: bool = True, optional: Sequence[str] = ()) -> str:
    """A table with columns aligned by `align`, one of < and > for each, and a line under the first row.

    It fits `output_width`: columns of `optional` are left out, and texts are cut in the middle. Cells may hold names
    from files, so they are made printable.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    lines = table_lines(cells, align, output_width(), optional, "COLUMNS=200 or --json")
    return "\n".join([bold(lines[0], sys.stdout), "-" * max(map(len, lines)), *lines[1:]] if rule else lines)


def facts_table(facts: Mapping[str, str]) -> str:
    """Facts by name, without a line under the first one."""
    return text_table([(f"  {name}", text) for name, text in facts.items()], "<<", rule=False)


def printable(text: str) -> str:
    """The text with unprintable characters escaped, because a terminal would interpret control characters."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def print_note(line: str) -> None:
    """Prints a line of printable text on standard error, unless that is closed: then it would go to standard output."""
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


class PercentProgress:
    """Shows progress in percent on standard error.

    Args:
        stage: name of the work.
    """

    def __init__(self, stage: str) -> None:
        self._stage, self._percent = stage, 0
        self._bar = ProgressBar(sys.stderr) if sys.stderr is not None else None  # None: the shell has closed it

    def __call__(self, name: str, count: int, total: int) -> None:
        percent_done = 100 * count // total if total else 100
        for percent in range(self._percent + 1, percent_done + 1):
            if self._bar is not None:
                self._bar(self._stage, percent, 100, printable(name))
        self._percent = max(percent_done, self._percent)


def terminal_progress_bar() -> ProgressBar | None:
    """Progress on standard error, if that is a terminal."""
    return ProgressBar(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None


def short_decimal(value: float | Fraction | None) -> str:
    """At most four significant digits if the exact decimal is long."""
    if value is None:
        return "-"
    if isinstance(value, Fraction):
        return str(Dyadic(value))
    exact = shortest_decimal(value)
    return exact if len(exact) <= 8 else f"{value:.4g}"


def shortest_decimal(value: Any) -> str:
    """The shortest decimal that converts to the same number of its type."""
    text = str(value) if isinstance(value, np.generic) else repr(value)
    return text.removesuffix(".0")


def integer_digits(value: float | Fraction) -> str:
    """All digits of an integer of at most 64 bits; nothing for another value."""
    return str(int(value)) if abs(value) < 2**64 and value % 1 == 0 else ""


def fact_text(value: float | Fraction | None) -> str:
    if value is None:
        return "none"
    exact = integer_digits(value) or ("" if isinstance(value, Fraction) else shortest_decimal(value))
    if exact and value % 1 == 0 and (abs(value) < 1e6 or value % 2 == 1):
        return exact
    return f"{exact}  = {Dyadic(value)}" if exact else str(Dyadic(value))


def json_value(value: Any) -> Any:
    """A value in the types of strict JSON; a text for NaN, infinities and fractions that are not exact in float64."""
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else str(Dyadic(value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def code_texts(fmt: ElementFormat, code: int) -> tuple[str, str]:
    """A code in hexadecimal, and its bits with spaces between fields."""
    digits, ends = f"{code:0{fmt.bits}b}", [0, fmt.bits]
    if isinstance(fmt, FloatFormat):
        ends[1:1] = fmt.signed, fmt.signed + fmt.exp_bits
    fields = (digits[start:end] for start, end in itertools.pairwise(ends))
    return f"0x{code:0{-(-fmt.bits // 4)}x}", " ".join(filter(None, fields))


def parse_seed(text: str) -> int:
    """The seed of an option: an argument of `jax.random.key`, for every value of jax_enable_x64."""
    text = text.strip()  # a negative number comes with a space
    if not re.fullmatch(r"-?[0-9]{1,19}", text) or not -(2**63) <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from -2^63 to 2^63 - 1")
    return int(text)


def key_of_seed_option(seed: int | None, specs: Iterable[Any]) -> Any:
    """The key of ``--seed``, or None without one.

    Raises:
        ValueError: without a seed, for a `Spec` that rounds stochastically.
    """
    if seed is not None:
        import jax

        return jax.random.key(seed)
    for spec in specs:
        if spec.rounding.stochastic:
            raise ValueError(f"{spec} rounds stochastically and needs --seed N; the same seed gives the same result")
    return None


def split_items(words: Sequence[str]) -> list[str]:
    """Texts between commas and spaces outside of parentheses and brackets."""
    return [item for item in split_outside_brackets(" ".join(words), ", \t\n\r") if item]


def check_suffix(option: str, path: Path, suffix: str) -> None:
    """Refuses, before any work, a file that cannot be written or has another suffix."""
    check(path.suffix.lower() == suffix, f"{option} {path} must end in {suffix}")
    check(path.absolute().parent.is_dir(), f"{option} {path}: there is no folder {path.parent}")


def check_new_file(option: str, path: Path, force: bool) -> None:
    """Refuses, before any work, to replace a file without ``--force``."""
    check(not path.exists() or force, f"{option} {path} exists; --force replaces it")


def check_folder(option: str, path: Path) -> None:
    """Refuses, before any work, a folder that cannot be created or written to."""
    ancestor = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not (ancestor.is_dir() and os.access(ancestor, os.W_OK)):
        raise ValueError(f"{option} {path}: {ancestor} is not a folder that can be written to")


# -- commands and their arguments --------------------------------------------------------------------------------------


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
    """An argument. Fields that are not given are the ones that commands share under its name."""
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
    run: Callable[[argparse.Namespace], int | None]
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


# -- the printed texts and the written files ---------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Prints a value as strict JSON."""
    print(json.dumps(value, indent=1, allow_nan=False))


def print_report(report: Any, as_json: bool) -> None:
    """Prints a report as its tables, or as JSON."""
    if as_json:
        print_json(report.as_dict())
    else:
        print("\n".join(map(printable, report.table(output_width()).splitlines())))


def print_written(path: Path) -> None:
    """Prints the path of a file that was written."""
    print(f"wrote {printable(str(path))}")


def check_pictures(options: argparse.Namespace) -> None:
    """Refuses, before any work, a picture or a page that cannot be drawn or written."""
    for option, suffix in (("plot", ".png"), ("html", ".html")):
        if (path := getattr(options, option, None)) is not None:
            check_suffix(f"--{option}", path, suffix)
            require_extra(f"--{option}", "plot", ("matplotlib",))


def write_pictures(
    options: argparse.Namespace, draw: Callable[[], Any], title: str = "", report: Any = None, dpi: Any = "figure"
) -> None:
    """Writes the picture of ``--plot``, and the page of ``--html``; prints their paths, but beside JSON.

    Args:
        options: of the command.
        draw: makes the figure; it is called if a file is asked for.
        title: of the page.
        report: of the page, below the picture; it has a form in HTML.
        dpi: of the picture. Default: the figure's own.
    """
    page_path = getattr(options, "html", None)
    if options.plot is None and page_path is None:
        return
    picture = png_bytes(draw(), dpi)
    contents = {} if options.plot is None else {options.plot: picture}
    if page_path is not None:
        contents[page_path] = page(title, image(picture, title), report._repr_html_()).encode()
    for path, content in contents.items():
        write_atomically(path, lambda file, content=content: file.write(content))
    for path in () if options.json else contents:
        print_written(path)
