"""The command line: a parser with the commands of `jchop._cli`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from jchop._cli._blame import add_blame
from jchop._cli._checkpoint import add_convert
from jchop._cli._compare import add_compare
from jchop._cli._completion import add_completion, words_by_command
from jchop._cli._doctor import add_doctor
from jchop._cli._info import run_formats, run_info
from jchop._cli._ptq import add_ptq
from jchop._cli._quantize import add_quantize_and_inspect
from jchop._cli._round import CARRIER_NUMPY_DTYPES, run_round
from jchop._cli._study import add_study
from jchop._cli._text import bold, parse_seed, printable
from jchop._cli._tune import add_tune
from jchop._common.checks import close_names_hint
from jchop.formats.rounding import Overflow, Rounding


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name. Default: the arguments of the process.

    Returns:
        The exit status: 0; 2 after an error, which is one line on standard error; 130 after an interrupt.

    Example:
        >>> from jchop.__main__ import main
        >>> main(["round", "0.1", "--to", "e5m2"])
        to float8_e5m2, carrier float64
        value  rounded  code  binary      abs. error  rel. error
        --------------------------------------------------------
        0.1    0.09375  0x2e  0 01011 10     0.00625      0.0625
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if sys.stdout is None:
            raise ValueError("standard output is closed")
        try:
            options = _command_parser().parse_args([_shield_negative_number(argument) for argument in arguments])
            options.run(options)
        except SystemExit as stop:  # --help and --version
            if stop.code:
                raise
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        _discard_stdout()  # its reader, such as head, has closed the pipe
        return 141  # 128 + SIGPIPE, as in the shell
    except KeyboardInterrupt:
        _print_to_stderr("\njchop: interrupted")
        return 130
    except OSError as error:
        _discard_stdout()
        where = f"{error.filename}: " if error.filename else ""
        _print_to_stderr(_error_line(f"{where}{error.strerror or error}"))
    except MemoryError as error:
        _print_to_stderr(_error_line(f"not enough memory. {error}"))
    except (ValueError, TypeError, OverflowError, RecursionError, ModuleNotFoundError) as error:
        _print_to_stderr(_error_line(str(error)))
    return 2


def _error_line(message: str) -> str:
    return bold("jchop: error:", sys.stderr) + " " + printable(" ".join(message.split()))


def _print_to_stderr(line: str) -> None:
    """A line on standard error, unless it is closed: then print would write to standard output."""
    if sys.stderr is not None:
        print(line, file=sys.stderr)


def _discard_stdout() -> None:
    """Discards buffered output for a standard output that cannot be written, so that it raises no error at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # it is not a file of the system
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _shield_negative_number(argument: str) -> str:
    """Adds a space before a negative number: argparse would treat -1e9, -inf or -0x1p3 as an option."""
    return f" {argument}" if re.match(r"-(\.?[0-9]|inf|nan)", argument, re.IGNORECASE) else argument


class _CommandParser(argparse.ArgumentParser):
    """A parser that raises exceptions for errors, so that all of them are reported in one place."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Arguments that no command knows are an error of the command before them."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = next(name for name in args if name in words_by_command(self))
            near = close_names_hint(unknown[0].split("=")[0], filter(None, words_by_command(self)[name]))
            raise ValueError(f"unrecognized arguments: {' '.join(unknown)}{near} (see {self.prog} {name} --help)")
        return options

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}{self._near(message)} (see {self.prog} --help)")

    def _near(self, message: str) -> str:
        """The names that the first unknown choice of a message is close to."""
        choice = re.search(r"argument (\S+): invalid choice: '([^']*)'", message)
        if choice is None:
            return ""
        actions = (a for a in self._actions if choice[1] in (*a.option_strings, str(a.metavar), a.dest))
        return close_names_hint(choice[2], map(str, next((a.choices for a in actions), None) or ()))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes help or version; argparse ignores an output that cannot be written."""
        print(message, end="", file=file)


def _command_parser() -> argparse.ArgumentParser:
    description = "Rounds numbers, and the parameters of a neural network, to low-precision formats."
    parser = _CommandParser(prog="jchop", description=description)
    parser.add_argument("-V", "--version", action="version", version=f"jchop {_jchop_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    plain = argparse.RawDescriptionHelpFormatter

    command = commands.add_parser("formats", help="list the named formats")
    command.add_argument("--json", action="store_true", help="print JSON in place of the table")
    command.set_defaults(run=run_formats)

    command = commands.add_parser("info", help="show the properties of one format, its bit layout, its values")
    command.add_argument("format", metavar="FORMAT", help="a name or pattern: e4m3fn, bfloat16, e6m9, fixed4.4, ...")
    command.add_argument("--plot", metavar="FILE.png", type=Path, help="draw its values (needs matplotlib)")
    command.add_argument("--json", action="store_true", help="print JSON in place of the tables")
    command.set_defaults(run=run_info)

    command = commands.add_parser(
        "round",
        help="round numbers, or a .npy array, to a format",
        formatter_class=plain,
        description="Rounds numbers to a format and shows value, code and error.",
        epilog="examples:\n"
        "  jchop round 0.1 1e9 --to e5m2 --rounding up\n"
        "  seq 1 20 | jchop round --to e2m1fn:saturate\n"
        "  jchop round weights.npy --to e4m3fn --rounding stochastic --seed 0 --out rounded.npy",
    )
    command.add_argument(
        "values", metavar="X", nargs="*", help="numbers, or one .npy file; - or nothing: standard input"
    )
    command.add_argument("--to", metavar="SPEC", required=True, help="format, or a whole spec such as e5m2:up:saturate")
    command.add_argument("--rounding", metavar="MODE", help=", ".join(mode.value for mode in Rounding))
    command.add_argument("--overflow", metavar="RULE", help=", ".join(rule.value for rule in Overflow))
    command.add_argument("--random-bits", metavar="N", type=int, help="random bits for each stochastic rounding")
    command.add_argument("--seed", metavar="N", type=parse_seed, help="seed of random bits; stochastic modes need it")
    command.add_argument(
        "--carrier",
        choices=CARRIER_NUMPY_DTYPES,
        help="type of the numbers before and after; default float64, and for a .npy file its own type",
    )
    command.add_argument("--out", metavar="FILE.npy", type=Path, help="write the rounded array there")
    command.add_argument("--force", action="store_true", help="replace FILE.npy if it exists")
    command.add_argument("--json", action="store_true", help="print JSON in place of the table")
    command.set_defaults(run=run_round)

    add_quantize_and_inspect(commands)
    add_convert(commands)
    add_ptq(commands)
    add_compare(commands)

    add_blame(commands)
    add_tune(commands)
    add_study(commands)
    add_doctor(commands)
    add_completion(commands, parser)
    return parser


def _jchop_version() -> str:
    try:
        return version("jchop")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
