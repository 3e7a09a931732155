"""What the oracle gives for whole arrays: for the tests of functions that speak other programs' words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
from oracle import Fraction, Special, Value

_SPECIAL = {math.inf: Special.INF, -math.inf: Special.NEG_INF}
_FLOATS = {Special.NAN: math.nan, Special.INF: math.inf, Special.NEG_INF: -math.inf, Special.NEG_ZERO: -0.0}


def value(x: float) -> Value:
    """A float as the oracle says it."""
    if math.isnan(x):
        return Special.NAN
    if x == 0 and math.copysign(1, x) < 0:
        return Special.NEG_ZERO
    return _SPECIAL[x] if math.isinf(x) else Fraction(x)


def rounded(x: Any, fmt: oracle.Set, mode: str = "nearest_even", overflow: str = "ieee") -> np.ndarray:
    """Each number of `x` rounded, as float64."""
    array = np.asarray(x, np.float64)
    results = [oracle.round_exact(fmt, value(number), mode, overflow) for number in array.ravel().tolist()]
    return np.array([_FLOATS[r] if isinstance(r, Special) else float(r) for r in results]).reshape(array.shape)


def neighbours(x: Any, fmt: oracle.Set) -> tuple[np.ndarray, np.ndarray]:
    """The values next to each number of `x`, below and above; both are the number itself where it is a value."""
    return rounded(x, fmt, "down"), rounded(x, fmt, "up")


def numbers(size: int, low: int, high: int, seed: int = 0) -> np.ndarray:
    """Random numbers with exponents from `low` to `high`, as float64, some of them short; and zeros."""
    rng = np.random.default_rng(seed)
    significands = rng.uniform(1, 2, size)
    significands[::2] = np.round(significands[::2] * 32) / 32
    x = significands * rng.choice([-1.0, 1.0], size) * 2.0 ** rng.integers(low, high, size, endpoint=True)
    x[:2] = 0.0, -0.0
    return x


def assert_same(got: Any, wanted: np.ndarray) -> None:
    """Equal numbers, of equal sign where they are zero."""
    got = np.asarray(got, np.float64)
    np.testing.assert_array_equal(got, wanted)
    told = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(got)[told], np.signbit(wanted)[told])
