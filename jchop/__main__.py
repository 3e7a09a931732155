"""The command line: a parser with the commands of `jchop._cli`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jchop._cli._command import bold, print_note, printable
from jchop._cli._completion import COMPLETION, words_by_command
from jchop._cli._file_commands import COMPARE, CONVERT, INSPECT, QUANTIZE
from jchop._cli._function_commands import BLAME, PTQ, REPORT, STUDY, TUNE
from jchop._cli._info import DOCTOR, FORMAT_LIST, INFO
from jchop._cli._round import ROUND
from jchop._common.checks import check, close_names_hint
from jchop._common.files import distribution_version

COMMANDS = (
    *(FORMAT_LIST, INFO, ROUND, QUANTIZE, INSPECT, CONVERT, PTQ),
    *(COMPARE, REPORT, BLAME, TUNE, STUDY, DOCTOR, COMPLETION),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name. Default: the arguments of the process.

    Returns:
        The exit status: 0; 1 after a check that found faults; 2 after an error, which is one line on standard error;
        130 after an interrupt.

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
        check(sys.stdout is not None, "standard output is closed")
        try:
            options = _command_parser().parse_args([_shield_negative_number(argument) for argument in arguments])
            status = options.run(options)
        except SystemExit as stop:  # --help and --version
            if stop.code:
                raise
            status = 0
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:
        _discard_stdout()  # its reader, such as head, has closed the pipe
        return 141  # 128 + SIGPIPE, as in the shell
    except KeyboardInterrupt:
        print_note("\njchop: interrupted")
        return 130
    except OSError as error:
        _discard_stdout()
        where = f"{error.filename}: " if error.filename else ""
        _print_error(f"{where}{error.strerror or error}")
    except MemoryError as error:
        _print_error(f"not enough memory. {error}")
    except (ValueError, TypeError, OverflowError, RecursionError, ModuleNotFoundError) as error:
        _print_error(str(error))
    return 2


def _print_error(message: str) -> None:
    print_note(bold("jchop: error:", sys.stderr) + " " + printable(" ".join(message.split())))


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
            table = words_by_command(options.commands)
            name = next(name for name in args if name in table)
            near = close_names_hint(unknown[0].split("=")[0], filter(None, table[name]))
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
    version = f"jchop {distribution_version('jchop') or '(not installed)'}"
    parser.add_argument("-V", "--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    parser.set_defaults(commands=COMMANDS)
    for command in COMMANDS:
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
