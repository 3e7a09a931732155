"""The command line: ``jchop formats``, ``jchop info``, ``jchop round`` and ``jchop study``."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from jchop.formats import ALIASES, CATALOGUE, ElementFormat, FloatFormat, UniformFormat, parse_format
from jchop.rounding import Overflow, Rounding
from jchop.spec import Spec, parse
from jchop.study._files import require_extra, write_atomically
from jchop.study._run import DATASETS, FORMATS, MODES

CARRIERS = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; default those of the process.

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
        options = _parser().parse_args([_shield(argument) for argument in arguments])
        options.run(options)
        sys.stdout.flush()
        return 0
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    except BrokenPipeError:
        # The reader, such as head, has gone. What Python still holds for it must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as the shell reports it
    except KeyboardInterrupt:
        print("\njchop: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"jchop: error: {where}{error.strerror or error}", file=sys.stderr)
    except (ValueError, ModuleNotFoundError) as error:
        print("jchop: error: " + " ".join(str(error).split()), file=sys.stderr)
    return 2


def _shield(argument: str) -> str:
    """A space before a negative number: argparse would take -1e9 or -inf for an option."""
    try:
        float(argument)
    except ValueError:
        return argument
    return f" {argument}" if argument.startswith("-") else argument


class _Parser(argparse.ArgumentParser):
    """Errors become exceptions, so that all of them are reported in one place."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    description = "What happens to numbers, and to a neural network, in a low-precision format."
    parser = _Parser(prog="jchop", description=description)
    parser.add_argument("--version", action="version", version=f"jchop {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    plain = argparse.RawDescriptionHelpFormatter

    command = commands.add_parser("formats", help="list the named formats")
    command.set_defaults(run=_formats)

    command = commands.add_parser("info", help="show the facts of one format, its bit layout, its values")
    command.add_argument("format", metavar="FORMAT", help="a name or pattern: e4m3fn, bfloat16, e6m9, fixed4.4, ...")
    command.add_argument("--plot", metavar="FILE.png", type=Path, help="draw its values (needs matplotlib)")
    command.set_defaults(run=_info)

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
    command.add_argument("--seed", metavar="N", type=int, help="of the random bits; stochastic modes need it")
    command.add_argument(
        "--carrier",
        choices=CARRIERS,
        help="what holds the numbers before and after; default float64, and for a .npy file its own type",
    )
    command.add_argument("--out", metavar="FILE.npy", type=Path, help="write the rounded array there")
    command.set_defaults(run=_round)

    command = commands.add_parser(
        "study",
        help="train a small network on real data, then round it to every format in every mode",
        formatter_class=plain,
        description="Trains a small classifier, evaluates it with its parameters rounded to each format in each mode,\n"
        "prints the table and writes study.csv, study.json and study.png.",
        epilog="example:\n  jchop study --formats q43,e6m9,fixed4.4 --modes nearest_even,stochastic --out my-study",
    )
    command.add_argument("--dataset", choices=DATASETS, default="digits", help="default digits (images)")
    for option, defaults in (("--formats", FORMATS), ("--modes", MODES)):
        command.add_argument(option, nargs="+", metavar="TEXT", default=defaults, help=f"default {' '.join(defaults)}")
    command.add_argument("--seeds", type=int, metavar="N", default=10, help="draws of each stochastic mode; default 10")
    command.add_argument("--epochs", type=int, metavar="N", help="passes over the training data; default by data set")
    command.add_argument("--activations", action="store_true", help="round the activations, too")
    command.add_argument("--seed", type=int, metavar="N", default=0, help="of split, training and rounding; default 0")
    command.add_argument("--out", metavar="DIR", type=Path, default=Path("jchop-study"), help="default jchop-study")
    command.set_defaults(run=_study)
    return parser


def _version() -> str:
    try:
        return version("jchop")
    except PackageNotFoundError:
        return "(not installed)"


# -- text -------------------------------------------------------------------------------------------------------------
def _table(rows: Sequence[Sequence[str]], align: str, rule: bool = True) -> str:
    """Columns aligned as `align` says, one of < and > for each, with a rule under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]] if rule else lines)


def _short(value: float | Fraction | None) -> str:
    """At most four significant digits where the exact decimal is long."""
    if value is None:
        return "-"
    if isinstance(value, Fraction):
        return _power(value)
    exact = _exact(value)
    return exact if len(exact) <= 8 else f"{value:.4g}"


def _exact(value: Any) -> str:
    """The shortest decimal that reads back as the same number of its type."""
    text = str(value) if isinstance(value, np.generic) else repr(value)
    return text.removesuffix(".0")


def _power(value: float | Fraction) -> str:
    """The value as c * 2^k with an odd integer c."""
    exact = Fraction(value)
    exponent = _two_exponent(exact.numerator) - _two_exponent(exact.denominator)
    odd = exact / Fraction(2) ** exponent
    sign = "-" if odd < 0 else ""
    return f"{sign}2^{exponent}" if abs(odd) == 1 else f"{odd} * 2^{exponent}"


def _two_exponent(number: int) -> int:
    """How often 2 divides a positive or negative integer."""
    return (number & -number).bit_length() - 1


def _fact(value: float | Fraction | None) -> str:
    if value is None:
        return "none"
    if value == 0 or isinstance(value, Fraction):
        return _power(value) if value else "0"
    exact = _exact(value)
    return exact if value % 1 == 0 and abs(value) < 1e6 else f"{exact}  = {_power(value)}"


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _binary(fmt: ElementFormat, code: int) -> str:
    """A code bit by bit, its fields apart."""
    digits = f"{code:0{fmt.bits}b}"
    if not isinstance(fmt, FloatFormat):
        return digits
    exponent = fmt.signed + fmt.exp_bits
    return " ".join(filter(None, (digits[: fmt.signed], digits[fmt.signed : exponent], digits[exponent:])))


def _hexadecimal(fmt: ElementFormat, code: int) -> str:
    return f"0x{code:0{-(-fmt.bits // 4)}x}"


# -- formats, info ----------------------------------------------------------------------------------------------------
def _formats(options: argparse.Namespace) -> None:
    widths, facts, specials = "bits exp frac bias p", ("max", "min normal", "min subn.", "roundoff"), "inf nan -0"
    rows = [("name", *widths.split(), *facts, *specials.split(), "also")]
    for name, fmt in CATALOGUE.items():
        rows.append(
            (
                name,
                *map(str, (fmt.bits, fmt.exp_bits, fmt.sig_bits, fmt.bias, fmt.precision)),
                *map(_short, (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.unit_roundoff)),
                *map(_yes, (fmt.has_inf, fmt.has_nan, fmt.has_negative_zero)),
                " ".join(other for other, main in ALIASES.items() if main == name),
            )
        )
    print(_table(rows, "<" + ">" * 12 + "<"))
    print("\nPatterns: e5m10 e5m3fn e5m3fnuz fixed4.4 ufixed4.4 int8 uint4 binary8p3se codebook(-1,0,0.5)")


def _info(options: argparse.Namespace) -> None:
    fmt = parse_format(options.format)
    if options.plot:
        _check_suffix("--plot", options.plot, ".png")
        require_extra("--plot", "plot", ("matplotlib",))
        from jchop.plot import value_grid

        picture = value_grid(fmt)
    text = getattr(fmt, "text", str(fmt))
    print(f"{fmt}" + (f"  ({text})" if text != str(fmt) else ""))
    print(_layout(fmt))
    print(_table(_facts(fmt), "<<", rule=False))
    print()
    print(_table([("code", "binary", "value", "which"), *_notable(fmt)], "<<><"))
    if options.plot:
        write_atomically(options.plot, lambda file: picture.savefig(file, format="png"))
        print(f"\nwrote {options.plot}")


def _layout(fmt: ElementFormat) -> str:
    """The fields of a code, highest bit first."""
    if isinstance(fmt, FloatFormat):
        fields = [("sign", int(fmt.signed)), ("exponent", fmt.exp_bits), ("fraction", fmt.sig_bits)]
    else:
        uniform = isinstance(fmt, UniformFormat)
        fields = [(("two's complement" if fmt.signed else "unsigned") if uniform else "index", fmt.bits)]
    boxes, top = [], fmt.bits
    for name, width in fields:
        if width:
            place = f"bit {top - 1}" if width == 1 else f"bits {top - 1}..{top - width}"
            size = max(len(name), len(place))
            boxes.append((name.center(size), place.center(size), "-" * (size + 2)))
            top -= width
    edge = "  +" + "+".join(box[2] for box in boxes) + "+"
    return "\n".join(["", edge, *("  | " + " | ".join(box[line] for box in boxes) + " |" for line in (0, 1)), edge, ""])


def _facts(fmt: ElementFormat) -> list[tuple[str, str]]:
    numbers = ("max", "min", "smallest_normal", "smallest_subnormal", "smallest", "eps", "unit_roundoff")
    facts = [("bits", str(fmt.bits)), ("precision", _or_none(fmt.precision))]
    if isinstance(fmt, FloatFormat):
        facts += [("bias", str(fmt.bias)), ("exponents", f"{fmt.emin} to {fmt.emax}")]
    facts += [(name.replace("_", " "), _fact(getattr(fmt, name))) for name in numbers]
    facts += [("infinities", _yes(fmt.has_inf)), ("NaN", _yes(fmt.has_nan)), ("-0", _yes(fmt.has_negative_zero))]
    return [("  " + name, value) for name, value in facts]


def _or_none(value: object) -> str:
    return "none" if value is None else str(value)


def _notable(fmt: ElementFormat) -> list[tuple[str, str, str, str]]:
    """The codes worth knowing, with their values; those that the format lacks are left out."""
    candidates = {
        "zero": 0.0,
        "minus zero": -0.0 if fmt.has_negative_zero else None,
        "smallest positive": fmt.smallest,
        "smallest normal": fmt.smallest_normal,
        "one": 1.0,
        "largest": fmt.max,
        "lowest": fmt.min,
        "infinity": math.inf if fmt.has_inf else None,
        "NaN": math.nan if fmt.has_nan else None,
    }
    names: dict[int, list[str]] = {}
    for name, value in candidates.items():
        code = None if value is None else fmt.code_of(value)
        if code is not None:
            names.setdefault(code, []).append(name)
    return [
        (_hexadecimal(fmt, code), _binary(fmt, code), _short(fmt.value_of(code)), ", ".join(which))
        for code, which in names.items()
    ]


# -- round ------------------------------------------------------------------------------------------------------------
def _round(options: argparse.Namespace) -> None:
    spec = _spec_of(options)
    if options.out:
        _check_suffix("--out", options.out, ".npy")
    array, from_file = _input(options)
    from jchop._round import round_to_format

    rounded = round_to_format(array, spec, _key(options, spec))
    print(f"to {spec}, carrier {array.dtype}")
    print(_summary(array, rounded, spec.format) if from_file else _comparison(array, rounded, spec.format))
    if options.out:
        write_atomically(options.out, lambda file: np.save(file, rounded, allow_pickle=False))
        print(f"wrote {options.out}")


def _spec_of(options: argparse.Namespace) -> Spec:
    """--to, with the fields that options of their own replace."""
    given = {name: getattr(options, name) for name in ("rounding", "overflow", "random_bits")}
    return dataclasses.replace(parse(options.to), **{name: value for name, value in given.items() if value is not None})


def _key(options: argparse.Namespace, spec: Spec) -> Any:
    if not spec.rounding.stochastic:
        return None
    if options.seed is None:
        raise ValueError(f"rounding {spec.rounding.value} needs --seed N; the same seed gives the same result")
    import jax

    return jax.random.key(options.seed)


def _input(options: argparse.Namespace) -> tuple[np.ndarray, bool]:
    """The numbers to round, and whether they come from a .npy file."""
    words = options.values
    if any(word.endswith(".npy") for word in words):
        if len(words) > 1:
            raise ValueError(f"a .npy file stands alone; got {len(words)} values")
        return _load(Path(words[0]), options.carrier), True
    if words in ([], ["-"]):
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("no values: give numbers or a .npy file, or pipe numbers in")
        words = sys.stdin.read().split()
    numbers = np.array([_number(word) for word in words], np.float64)
    with np.errstate(over="ignore"):
        return numbers.astype(CARRIERS[options.carrier or "float64"]), False


def _number(word: str) -> float:
    word = word.strip()
    try:
        return float.fromhex(word) if re.match(r"[+-]?0x", word, re.IGNORECASE) else float(word)
    except (ValueError, OverflowError):
        raise ValueError(
            f"bad number {word!r}: allowed are decimals, inf, nan, and hexadecimal such as 0x1.8p3"
        ) from None


def _load(path: Path, carrier: str | None) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no readable .npy file: {error}") from None
    if carrier is None:
        if array.dtype not in CARRIERS.values() and array.dtype.kind != "c":
            raise ValueError(f"{path} holds {array.dtype}; say --carrier float64 to convert it")
        return array
    if array.dtype.kind in "biuf":
        converted = array.astype(CARRIERS[carrier])
        if np.array_equal(converted.astype(array.dtype), array, equal_nan=array.dtype.kind == "f"):
            return converted
    raise ValueError(f"{path} holds {array.dtype} values that {carrier} cannot hold: they would be rounded twice")


def _errors(values: np.ndarray, rounded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Absolute and relative errors as float64; 0 where nothing moved, infinities and zeros included."""
    exact, result = values.astype(np.float64), rounded.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        absolute = np.where(exact == result, 0.0, np.abs(result - exact))
        return absolute, np.where(absolute == 0, 0.0, absolute / np.abs(exact))


def _comparison(values: np.ndarray, rounded: np.ndarray, fmt: ElementFormat) -> str:
    rows: list[tuple[str, ...]] = [("value", "rounded", "code", "binary", "abs. error", "rel. error")]
    for value, result, absolute, relative in zip(values, rounded, *_errors(values, rounded), strict=True):
        code = fmt.code_of(float(result))
        bits = ("-", "-") if code is None else (_hexadecimal(fmt, code), _binary(fmt, code))
        rows.append((_exact(value), _exact(result), *bits, _short(float(absolute)), _short(float(relative))))
    return _table(rows, "<<<<>>")


def _summary(values: np.ndarray, rounded: np.ndarray, fmt: ElementFormat) -> str:
    parts, results = _real_parts(values), _real_parts(rounded)
    exact, result = parts.astype(np.float64), results.astype(np.float64)
    finite = np.isfinite(exact)
    absolute, relative = (error[finite & np.isfinite(result)] for error in _errors(parts, results))
    lost = finite & ~np.isfinite(result)
    outside = finite & ((exact > _near(fmt.max)) | (exact < _near(fmt.min)))
    rows = [
        ("elements", f"{values.size}, shape {values.shape}"),
        ("changed", str(np.count_nonzero((exact != result) & ~np.isnan(exact)))),
        ("largest abs. error", _short(float(absolute.max(initial=0.0))) + _but(lost)),
        ("largest rel. error", _short(float(relative[np.isfinite(relative)].max(initial=0.0))) + _but(lost)),
        ("overflows", f"{np.count_nonzero(lost)} to inf or nan, {np.count_nonzero(outside & ~lost)} to a finite value"),
        ("underflows", f"{np.count_nonzero((exact != 0) & (result == 0))} to zero"),
        ("nan in the input", str(np.count_nonzero(np.isnan(exact)))),
    ]
    return _table([("  " + name, value) for name, value in rows], "<<", rule=False)


def _near(value: float | Fraction) -> float:
    """The float nearest a bound that binary64 may not hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _but(lost: np.ndarray) -> str:
    return " (overflows apart)" if lost.any() else ""


def _real_parts(array: np.ndarray) -> np.ndarray:
    flat = np.ravel(array)
    return np.concatenate([np.real(flat), np.imag(flat)]) if flat.dtype.kind == "c" else flat


def _check_suffix(option: str, path: Path, suffix: str) -> None:
    """Refuses, before any work, a file that could not be written or would not be what its name says."""
    if path.suffix.lower() != suffix:
        raise ValueError(f"{option} {path} must end in {suffix}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")


def _check_folder(option: str, path: Path) -> None:
    """Refuses, before any work, a folder that could not be made or written to."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ValueError(f"{option} {path}: {there} is no folder that can be written to")


# -- study ------------------------------------------------------------------------------------------------------------
def _study(options: argparse.Namespace) -> None:
    require_extra("jchop study", "study", ("flax", "optax", "sklearn", "matplotlib"))
    _check_folder("--out", options.out)
    from jchop import study
    from jchop.study._progress import ProgressBar

    result = study.run(
        options.dataset,
        formats=_items(options.formats),
        modes=_items(options.modes),
        seeds=options.seeds,
        epochs=options.epochs,
        activations=options.activations,
        seed=options.seed,
        progress=ProgressBar(sys.stderr),
    )
    paths = study.save(result, options.out)
    print(study.table(result))
    print(f"\nFiles: {', '.join(map(str, paths))} ({result.seconds:.0f} s)")


def _items(words: Sequence[str]) -> list[str]:
    """Texts between commas and spaces, except where those stand in parentheses or brackets."""
    items = re.split(r"[,\s]+(?![^()\[\]]*[)\]])", " ".join(words))
    return [item for item in items if item]


if __name__ == "__main__":
    sys.exit(main())
