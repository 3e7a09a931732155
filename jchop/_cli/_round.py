"""``jchop round``."""

from __future__ import annotations

import argparse
import math
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from decimal import Context
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jchop._cli import _command as cli
from jchop._common.checks import check, clip_text, first_names
from jchop._common.files import write_atomically
from jchop._spec.spec import Spec, parse
from jchop.formats import ElementFormat
from jchop.formats.rounding import Overflow, Rounding, as_overflow, as_rounding

CARRIER_NUMPY_DTYPES = {name: np.dtype(name) for name in ("float64", "float32", "float16", "bfloat16")}

#: Bytes of a file that are rounded at once.
_CHUNK_BYTES = 1 << 22
#: The most characters of a typed number, and its largest exponent of ten or two: these keep exact arithmetic fast.
_MAX_LENGTH, _MAX_EXPONENT = 1000, 20_000
#: Formats of at most so many bits have two bits less than float64, at least, wherever they have numbers.
_NARROW_BITS = 32


def _run_round(options: argparse.Namespace) -> None:
    spec = _spec_of_options(options)
    key = cli.key_of_seed_option(options.seed, [spec])
    if options.out:
        cli.check_suffix("--out", options.out, ".npy")
        cli.check_new_file("--out", options.out, options.force)
    if any(text.lower().endswith(".npy") for text in options.values):
        _round_npy_file(options, spec, key)
    else:
        _round_numbers(options, spec, key)
    if options.out and not options.json:
        cli.print_written(options.out)


def _spec_of_options(options: argparse.Namespace) -> Spec:
    """The spec of --to, with the fields of further options."""
    parts = [options.to]
    parts += [] if options.rounding is None else [as_rounding(options.rounding).value]
    parts += [] if options.overflow is None else [as_overflow(options.overflow).value]
    parts += [] if options.random_bits is None else [f"random_bits={options.random_bits}"]
    try:
        return parse(":".join(parts))
    except ValueError as error:
        parse(options.to)  # an error in it is reported first
        raise ValueError(f"--to {options.to!r} together with the other options: {error}") from None


def _format_with_codes(spec: Spec) -> ElementFormat | None:
    """The format whose codes and extremes are shown; None for a scaled one, which has them only under a scale."""
    return spec.format if spec.scaled is None else None


# -- numbers -----------------------------------------------------------------------------------------------------------


class _TypedNumber(NamedTuple):
    """The text of a number, and its value: a float if it is not finite."""

    word: str
    exact: Fraction | float


def _round_numbers(options: argparse.Namespace, spec: Spec, key: Any) -> None:
    from jchop._round.round_to_format import round_to_format

    texts = options.values
    if texts in ([], ["-"]):
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("no values: pass numbers or a .npy file, or pipe numbers in")
        texts = sys.stdin.read().split()
        check(texts, "no values: standard input is empty")
    typed = [_parse_number(text.strip()) for text in texts]
    element = _format_with_codes(spec)
    is_narrow = options.carrier is None and element is not None and element.bits <= _NARROW_BITS
    values = _round_to_carrier([number.exact for number in typed], options.carrier or "float64", is_narrow)
    results = round_to_format(values, spec, key)
    if options.out:
        write_atomically(options.out, lambda file: np.save(file, results, allow_pickle=False))
    pairs = zip(typed, values, results, strict=True)
    rows = [_number_cells(*pair, element, options.json) for pair in pairs]
    if options.json:
        numbers = [dict(zip(_ROUND_HEAD, row, strict=True)) for row in rows]
        cli.print_json({"to": str(spec), "carrier": str(values.dtype), "numbers": numbers})
        return
    print(f"to {spec}, carrier {values.dtype}")
    print(cli.text_table([_ROUND_HEAD, *rows], "<<<<>>"))


def _parse_number(text: str) -> _TypedNumber:
    """The exact value of a decimal or hexadecimal number."""
    decimal = re.fullmatch(r"[+-]?(?=\.?[0-9])([0-9]*)\.?([0-9]*)(?:e([+-]?[0-9]+))?", text, re.IGNORECASE)
    hexa = re.fullmatch(r"([+-]?)0x(?=\.?[0-9a-f])([0-9a-f]*)\.?([0-9a-f]*)(?:p([+-]?[0-9]+))?", text, re.IGNORECASE)
    if re.fullmatch(r"[+-]?(inf|infinity|nan)", text, re.IGNORECASE):
        return _TypedNumber(text, float(text))
    if not (decimal or hexa):
        raise _bad_number_error(text)
    exponent = (decimal[3] if decimal else hexa[4] if hexa else None) or "0"
    short = len(text) <= _MAX_LENGTH and len(exponent.lstrip("+-0")) <= len(str(_MAX_EXPONENT))
    most = f"{_MAX_LENGTH} characters, an exponent to {_MAX_EXPONENT} at most"
    check(short and abs(int(exponent)) <= _MAX_EXPONENT, f"number {clip_text(text)!r} is too long: {most}")
    if hexa:
        scale = Fraction(2) ** (int(exponent) - 4 * len(hexa[3]))
        value = int(hexa[2] + hexa[3], 16) * scale * (-1 if hexa[1] == "-" else 1)
    else:
        value = Fraction(text)
    return _TypedNumber(text, -0.0 if value == 0 and text.startswith("-") else value)


def _bad_number_error(text: str) -> ValueError:
    """The error for a word that is not a number: perhaps a file of another kind."""
    path = Path(text)
    try:
        if path.is_dir():
            return ValueError(f"{text!r} is a folder; allowed are numbers, or one .npy file")
        if path.suffix.lower() == ".npz" and path.is_file():
            return ValueError(
                f"{text!r} holds {_arrays_in_npz(path)}; allowed are numbers, or one .npy file of numpy.save"
            )
        if path.is_file():
            return ValueError(f"{text!r} is not a .npy file; numbers in a text file are read from standard input")
    except (OSError, ValueError):
        pass  # not the name of a file
    return ValueError(
        f"bad number {clip_text(text)!r}: allowed are decimals, inf, nan, and hexadecimal such as 0x1.8p3"
    )


def _arrays_in_npz(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as file:
            names = [name.removesuffix(".npy") for name in file.namelist()]
    except (zipfile.BadZipFile, NotImplementedError):
        return "no arrays that numpy.load can read"
    return f"{'the array' if len(names) == 1 else 'the arrays'} {first_names(names)}"


def _round_to_carrier(exact: list[Fraction | float], carrier: str, for_narrow_format: bool) -> np.ndarray:
    """Numbers rounded once to the carrier, to nearest with ties to even.

    With `for_narrow_format`, which float64 alone may have, they are for a narrow format, whose rounding then is the
    only one.
    """
    from jchop._round.round_to_format import round_to_format

    rounds_again = carrier != "float64"
    values = np.array([_nearest_float(value, odd=rounds_again or for_narrow_format) for value in exact], np.float64)
    return round_to_format(values, carrier).astype(CARRIER_NUMPY_DTYPES[carrier]) if rounds_again else values


def _nearest_float(value: Fraction | float, *, odd: bool) -> float:
    """The float nearest a number; with `odd` the neighbour whose last bit is 1, so that it may be rounded again."""
    if isinstance(value, float):
        return value
    try:
        nearest = float(value)
    except OverflowError:
        limit = sys.float_info.max if odd else math.inf
        return limit if value > 0 else -limit
    if odd and Fraction(nearest) != value and not int(np.float64(nearest).view(np.uint64)) & 1:
        return math.nextafter(nearest, math.inf if value > nearest else -math.inf)
    return nearest


_ROUND_HEAD = ("value", "rounded", "code", "binary", "abs. error", "rel. error")


def _number_cells(
    number: _TypedNumber, value: Any, result: Any, fmt: ElementFormat | None, as_json: bool
) -> tuple[Any, ...]:
    """The cells of a number under `_ROUND_HEAD`, as texts or for JSON."""
    code = None if fmt is None else fmt.code_of(float(result))
    codes = (None, None) if fmt is None or code is None else cli.code_texts(fmt, code)
    text = cli.shortest_decimal(value)
    if isinstance(number.exact, Fraction) and not (np.isfinite(value) and Fraction(text) == number.exact):
        text = number.word  # the carrier's number is another
    errors = _exact_errors(number.exact, float(result))
    if as_json:
        numbers = _json_number(number.exact, text), cli.json_value(float(result))
        return *numbers, *codes, *(_error_cell(error, 17, cli.json_value) for error in errors)
    error_texts = (_error_cell(error, 4, cli.short_decimal) for error in errors)
    return clip_text(text), cli.shortest_decimal(result), *(part or "-" for part in codes), *error_texts


def _json_number(exact: Fraction | float, text: str) -> Any:
    """A typed number in JSON: a float64, or an integer of at most 64 bits; else its text."""
    if isinstance(exact, float):
        return cli.json_value(exact)
    nearest, digits = _nearest_float(exact, odd=False), cli.integer_digits(exact)
    return nearest if nearest == exact else int(digits) if digits else text


def _exact_errors(exact: Fraction | float, result: float) -> tuple[Fraction | float, Fraction | float]:
    """Absolute and relative error; 0 if the number did not change, including infinities and zeros."""
    if exact == result:
        return 0.0, 0.0
    if isinstance(exact, float) and not math.isfinite(exact):
        return abs(result - exact), math.nan
    if not math.isfinite(result):
        return abs(result), abs(result)
    absolute = abs(Fraction(result) - Fraction(exact))
    return absolute, absolute / abs(Fraction(exact)) if exact else math.inf


def _error_cell(value: Fraction | float, digits: int, write: Callable[[float], Any]) -> Any:
    """The nearest float64 as `write` gives it; a text of some digits, if it lies outside of the normal numbers."""
    nearest = _nearest_float(value, odd=False)
    if isinstance(value, float) or sys.float_info.min <= nearest < math.inf:
        return write(nearest)
    exact = Context(prec=30, Emin=-(10**6), Emax=10**6)
    quotient = exact.divide(exact.create_decimal(value.numerator), exact.create_decimal(value.denominator))
    return f"{quotient.normalize(Context(prec=digits, Emin=-(10**6), Emax=10**6)):g}"


# -- files -------------------------------------------------------------------------------------------------------------


def _round_npy_file(options: argparse.Namespace, spec: Spec, key: Any) -> None:
    check(len(options.values) <= 1, f"a .npy file must be the only value; got {len(options.values)} values")
    from jchop._storage._chunks import RoundedChunks
    from jchop._storage._files.npy import NpyFile

    path = Path(options.values[0])
    with NpyFile(path, str(path), CARRIER_NUMPY_DTYPES.get(options.carrier)) as file:
        if file.dtype not in CARRIER_NUMPY_DTYPES.values() and file.dtype.kind != "c":
            raise ValueError(f"{path} holds {file.dtype}; pass --carrier float64 to convert it")
        summary = _RoundingSummary(_format_with_codes(spec))
        bar = cli.PercentProgress("round") if file.size * file.dtype.itemsize > _CHUNK_BYTES else lambda *_: None
        chunks = RoundedChunks(file, spec, key, _CHUNK_BYTES, lambda count, total: bar(path.name, count, total))
        if options.out:
            write_atomically(options.out, lambda out: chunks.write(out, summary.add_chunk))
        else:
            for pair in chunks:
                summary.add_chunk(*pair)
        if options.json:
            facts = {"to": str(spec), "carrier": str(file.dtype), "shape": list(file.shape)}
            cli.print_json(facts | summary.as_dict())
            return
        print(f"to {spec}, carrier {file.dtype}")
        print(summary.text(file.shape))


class _RoundingSummary:
    """Statistics of an array that is rounded chunk by chunk; a complex number counts once, by either of its parts.

    Args:
        fmt: the format whose range tells which results saturate; None for a scaled one.
    """

    def __init__(self, fmt: ElementFormat | None) -> None:
        self._fmt = fmt
        self._counts: Counter[str] = Counter()
        self._errors = {"largest absolute error": 0.0, "largest relative error": 0.0}
        self.add_chunk(np.zeros(0), np.zeros(0))  # all counts are 0

    def add_chunk(self, values: np.ndarray, results: np.ndarray) -> None:
        """Adds a chunk."""
        parts = (np.real, np.imag) if values.dtype.kind == "c" else (np.real,)
        exact, result = (np.stack([part(x.ravel()) for part in parts]).astype(np.float64) for x in (values, results))
        finite, infinite, nan = np.isfinite(exact), np.isinf(exact), np.isnan(exact)
        is_finite_result, overflows = np.isfinite(result), finite & ~np.isfinite(result)
        least, most = (-math.inf, math.inf) if self._fmt is None else (self._fmt.min, self._fmt.max)
        outside = (exact > _nearest_float(most, odd=False)) | (exact < _nearest_float(least, odd=False))
        masks = {
            "changed": (exact != result) & ~(nan & np.isnan(result)),
            "overflows": overflows,
            "saturated": finite & outside & ~overflows,
            "underflows": finite & (exact != 0) & (result == 0),
            "infinities": infinite,
            "infinities to nan": infinite & np.isnan(result),
            "infinities to finite": infinite & is_finite_result,
            "nans": nan,
            "nans to finite": nan & is_finite_result,
        }
        self._counts.update({name: int(np.count_nonzero(mask.any(axis=0))) for name, mask in masks.items()})
        exact, result = exact[finite & ~overflows], result[finite & ~overflows]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            absolute = np.abs(result - exact)
            relative = absolute / np.abs(exact)
        for name, errors in zip(self._errors, (absolute, relative[np.isfinite(relative)]), strict=True):
            self._errors[name] = max(self._errors[name], float(errors.max(initial=0.0)))

    def as_dict(self) -> dict[str, Any]:
        """The statistics. Finite numbers beyond the range are counted by their result: not finite, or finite."""
        return {"changed": self._counts["changed"]} | self._errors | self._counts

    def text(self, shape: tuple[int, ...]) -> str:
        """The table of the statistics."""
        counts, note = self._counts, " (overflows apart)" if self._counts["overflows"] else ""
        absolute, relative = (cli.short_decimal(error) + note for error in self._errors.values())
        infinities, to_nan = counts["infinities"], counts["infinities to nan"]
        facts = {
            "elements": f"{math.prod(shape)}, shape {shape}",
            "changed": counts["changed"],
            "largest abs. error": absolute,
            "largest rel. error": relative,
            "finite overflows": f"{counts['overflows']} to inf or nan, {counts['saturated']} to a finite value",
            "underflows": f"{counts['underflows']} to zero",
            "inf in the input": f"{infinities}, {to_nan} to nan, {counts['infinities to finite']} to a finite value",
            "nan in the input": f"{counts['nans']}, {counts['nans to finite']} to a finite value",
        }
        return cli.facts_table({name: str(fact) for name, fact in facts.items()})


ROUND = cli.Command(
    "round",
    _run_round,
    "round numbers, or a .npy array, to a format",
    (
        cli.argument("values", "X", "numbers, or one .npy file; - or nothing: standard input", nargs="*"),
        cli.argument("--to", "SPEC", "format, or a whole spec such as e5m2:up:saturate", required=True),
        cli.argument("--rounding", "MODE", ", ".join(mode.value for mode in Rounding)),
        cli.argument("--overflow", "RULE", ", ".join(rule.value for rule in Overflow)),
        cli.argument("--random-bits", "N", "random bits for each stochastic rounding", type=int),
        cli.argument("--seed"),
        cli.argument("--carrier", choices=CARRIER_NUMPY_DTYPES, help="type of the numbers before and after; default "
                 "float64, and for a .npy file its own type"),
        cli.argument("--out", "FILE.npy", "write the rounded array there", type=Path),
        cli.argument("--force", help="replace FILE.npy if it exists"),
        cli.argument("--json"),
    ),
    "Rounds numbers to a format and shows value, code and error.",
    "examples:\n"
    "  jchop round 0.1 1e9 --to e5m2 --rounding up\n"
    "  seq 1 20 | jchop round --to e2m1fn:saturate\n"
    "  jchop round weights.npy --to e4m3fn --rounding stochastic --seed 0 --out rounded.npy",
)  # fmt: skip
