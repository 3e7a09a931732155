"""``jchop round``."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jchop._cli._text import binary, check_suffix, hexadecimal, short, shortest, table
from jchop._files import write_atomically
from jchop.formats import ElementFormat
from jchop.spec import Spec, parse

CARRIERS = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def run_round(options: argparse.Namespace) -> None:
    spec = _spec_of(options)
    if options.out:
        check_suffix("--out", options.out, ".npy")
    array, from_file = _input(options)
    from jchop._round import round_to_format

    rounded = round_to_format(array, spec, _key(options, spec))
    print(f"to {spec}, carrier {array.dtype}")
    fmt = spec.format if spec.scaled is None else None  # codes and ends belong to elements under their scales
    print(_summary(array, rounded, fmt) if from_file else _comparison(array, rounded, fmt))
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


def _comparison(values: np.ndarray, rounded: np.ndarray, fmt: ElementFormat | None) -> str:
    rows: list[tuple[str, ...]] = [("value", "rounded", "code", "binary", "abs. error", "rel. error")]
    for value, result, absolute, relative in zip(values, rounded, *_errors(values, rounded), strict=True):
        code = None if fmt is None else fmt.code_of(float(result))
        bits = ("-", "-") if fmt is None or code is None else (hexadecimal(fmt, code), binary(fmt, code))
        rows.append((shortest(value), shortest(result), *bits, short(float(absolute)), short(float(relative))))
    return table(rows, "<<<<>>")


def _summary(values: np.ndarray, rounded: np.ndarray, fmt: ElementFormat | None) -> str:
    parts, results = _real_parts(values), _real_parts(rounded)
    exact, result = parts.astype(np.float64), results.astype(np.float64)
    finite = np.isfinite(exact)
    absolute, relative = (error[finite & np.isfinite(result)] for error in _errors(parts, results))
    lost = finite & ~np.isfinite(result)
    outside = finite & ((exact > _near(fmt.max)) | (exact < _near(fmt.min))) if fmt else np.zeros_like(finite)
    rows = [
        ("elements", f"{values.size}, shape {values.shape}"),
        ("changed", str(np.count_nonzero((exact != result) & ~np.isnan(exact)))),
        ("largest abs. error", short(float(absolute.max(initial=0.0))) + _but(lost)),
        ("largest rel. error", short(float(relative[np.isfinite(relative)].max(initial=0.0))) + _but(lost)),
        ("overflows", f"{np.count_nonzero(lost)} to inf or nan, {np.count_nonzero(outside & ~lost)} to a finite value"),
        ("underflows", f"{np.count_nonzero((exact != 0) & (result == 0))} to zero"),
        ("nan in the input", str(np.count_nonzero(np.isnan(exact)))),
    ]
    return table([("  " + name, value) for name, value in rows], "<<", rule=False)


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
