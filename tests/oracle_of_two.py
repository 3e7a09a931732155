"""Functions of two dyadic numbers, as `oracle_elementary` has those of one: float64's value, or integers.

`values` gives float64 numbers that round as the true values do. Nothing here comes from jchop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from oracle_elementary import FAR, ONE, PLACES, arctan, circle, exp, fixed, log, log1p

#: Float64's functions, and the share of the larger operand by which they may be off, beside 2^-44 of the result.
NEAR: dict[str, tuple[Callable[..., np.ndarray], float]] = {
    "hypot": (np.hypot, 0.0),
    "atan2": (np.arctan2, 0.0),
    "logaddexp": (np.logaddexp, 2.0**-48),
    "pow": (np.power, 0.0),
}


def odd_ratio(count: int, places: int, exact: bool = False) -> float:
    """count 2^-places rounded to odd in float64; the digits beyond are not zero unless the number is exact."""
    size = abs(count)
    drop = max(size.bit_length() - 53, 0)
    lost = not exact or size & ((1 << drop) - 1) != 0
    return math.copysign(math.ldexp(size >> drop | int(lost), drop - places), 1 if count > 0 else -1)


def square_root(x: Fraction) -> Fraction | None:
    """The root of a positive number if it is rational."""
    found = Fraction(math.isqrt(x.numerator), math.isqrt(x.denominator))
    return found if found * found == x else None


def hypot(x: Fraction, y: Fraction) -> float:
    total = x * x + y * y
    found = square_root(total)
    if found is not None:
        places = found.denominator.bit_length() - 1
        return odd_ratio(found.numerator, places, exact=True)
    return odd_ratio(math.isqrt(int(total * ONE * ONE)), PLACES)


def atan2(y: Fraction, x: Fraction) -> float:
    size = arctan(fixed(abs(y / x)))
    size = circle() - size if x < 0 else size
    return odd_ratio(size if y > 0 else -size, PLACES)


def logaddexp(x: Fraction, y: Fraction) -> float:
    return odd_ratio(fixed(max(x, y)) + log1p(exp(-fixed(min(abs(x - y), Fraction(FAR))))), PLACES)


def power(x: Fraction, y: Fraction) -> float:
    sign = -1 if x < 0 and y.denominator == 1 and y.numerator % 2 else 1
    known = exact_power(abs(x), y)
    if known is not None:
        return sign * odd_ratio(known.numerator, known.denominator.bit_length() - 1, exact=True)
    shift = max(abs(x).denominator.bit_length(), 1)
    size = log(fixed(abs(x) * 2**shift)) - shift * log(2 * ONE) if abs(x) < Fraction(1, 4) else log(fixed(abs(x)))
    exponent = max(min(Fraction(size, ONE) * y, Fraction(FAR)), Fraction(-FAR))
    return sign * odd_ratio(exp(fixed(exponent)), PLACES)


def exact_power(x: Fraction, y: Fraction) -> Fraction | None:
    """x^y if it is a number of no more than 60 bits."""
    root: Fraction | None = x
    for _ in range(y.denominator.bit_length() - 1):
        root = square_root(root) if root is not None and root.numerator and root != 1 else root
        if root is None:
            return None
    assert root is not None
    if root == 1:
        return root
    if root.numerator & (root.numerator - 1) == 0 and root.denominator & (root.denominator - 1) == 0:
        return root**y.numerator if abs(y.numerator) < 1000 else None
    return root**y.numerator if 0 < y.numerator <= 40 else None


EXACT = {"hypot": hypot, "atan2": atan2, "logaddexp": logaddexp, "pow": power}


def values(name: str, x: np.ndarray, y: np.ndarray, rounded: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Float64 numbers that round as the function's values do; `rounded` gives rows of all roundings."""
    function, share = NEAR[name]
    inside = np.isfinite(x) & np.isfinite(y) & (x != 0) & (y != 0)
    with np.errstate(all="ignore"):
        v = np.asarray(function(x, y))
        if name == "logaddexp":  # NumPy's is -0 for -0 and -infinity
            v = np.where(v == 0, 0.0, v)
        inside |= (name == "logaddexp") & np.isfinite(x) & np.isfinite(y)
        pad = np.abs(v) * 2.0**-44 + np.where(inside, share * np.maximum(np.abs(x), np.abs(y)), 0)
        same = np.all(rounded(v - pad) == rounded(v + pad), axis=0)
        if name == "pow":  # far from all formats, and close to 1
            way = np.where(inside, y * np.log2(np.abs(np.where(inside, x, 1))), 0)
            far, tiny = np.abs(way) > FAR, (np.abs(way) < 2.0**-56) & (way != 0)
            beside = np.where(way > 0, 1 + 2.0**-52, 1 - 2.0**-53)
            v = np.where(far & ~np.isnan(v), np.copysign(np.where(way > 0, 2.0**FAR, 2.0**-FAR), v), v)
            v = np.where(tiny & ~np.isnan(v), np.copysign(beside, v), v)
            same |= far | tiny
    for i in np.flatnonzero(inside & ~np.isnan(v) & ~same):
        v[i] = EXACT[name](Fraction(float(x[i])), Fraction(float(y[i])))
    return v
