"""Elementary functions of dyadic numbers: float64's value, and where that cannot decide, integers of a thousand bits.

`values` gives float64 numbers that round to any format of up to 24 bits as the true values do: those of NumPy or SciPy
where everything within 2^-44 of them rounds alike, else the true value rounded to odd in float64. Nothing here comes
from jchop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import scipy.special

#: Binary places of the exact values, and of the intermediate ones.
PLACES = 900
ONE = 1 << PLACES
#: Beyond this |x| e^x is beyond all formats.
FAR = 400


def fixed(x: Fraction) -> int:
    return x.numerator * ONE // x.denominator


def times(a: int, b: int) -> int:
    return a * b >> PLACES


def over(a: int, b: int) -> int:
    return (a << PLACES) // b


def root(a: int) -> int:
    return math.isqrt(a << PLACES)


def series(x: int, term: Callable[[int], tuple[int, int]], square: int, start: int = 0) -> int:
    """x (c(0) + c(1) square + ...), where c(n + 1) / c(n) is a quotient of integers; until nothing is left."""
    total, part, n = 0, x, start
    while part not in (0, -1):
        total += part
        above, below = term(n)
        part = times(part, square) * above // below
        n += 1
    return total


@lru_cache(maxsize=1)
def pi() -> int:
    """To PLACES + 200 places, so that the largest float32 numbers can be reduced."""
    unit = ONE << 200

    def arctangent(n: int) -> int:
        total, power, k = 0, unit // n, 0
        while power:
            total += (-1) ** k * (power // (2 * k + 1))
            power, k = power // (n * n), k + 1
        return total

    return 4 * (12 * arctangent(18) + 8 * arctangent(57) - 5 * arctangent(239))  # Gauss


def circle() -> int:
    return pi() >> 200


@lru_cache(maxsize=1)
def log_of_2() -> int:
    return 2 * artanh_series(ONE // 3)


def artanh_series(s: int) -> int:
    square, total, power, k = times(s, s), 0, s, 0
    while power not in (0, -1):
        total += power // (2 * k + 1)
        power, k = times(power, square), k + 1
    return total


def exp(x: int) -> int:
    """For |x| <= FAR."""
    n = x // log_of_2()
    r = x - n * log_of_2()
    part = series(ONE, lambda k: (1, k + 1), r)
    return part << n if n >= 0 else part >> -n


def expm1(x: int) -> int:
    return series(x, lambda k: (1, k + 2), x) if abs(x) < ONE else exp(x) - ONE


def log(x: int) -> int:
    n = x.bit_length() - PLACES
    m = x >> n if n >= 0 else x << -n  # in [1/2, 1)
    if 3 * m < 2 * ONE:
        m, n = 2 * m, n - 1
    return n * log_of_2() + 2 * artanh_series(over(m - ONE, m + ONE))


def log1p(x: int) -> int:
    return 2 * artanh_series(over(x, 2 * ONE + x)) if abs(x) < ONE // 2 else log(ONE + x)


def sinh(x: int) -> int:
    return series(x, lambda k: (1, (2 * k + 2) * (2 * k + 3)), times(x, x)) if abs(x) < ONE else (exp(x) - exp(-x)) // 2


def cosh(x: int) -> int:
    return (
        series(ONE, lambda k: (1, (2 * k + 1) * (2 * k + 2)), times(x, x)) if abs(x) < ONE else (exp(x) + exp(-x)) // 2
    )


def arctan(x: int) -> int:
    if x > ONE:
        return circle() // 2 - arctan(over(ONE, x))
    if x > ONE // 8:
        return 2 * arctan(over(x, ONE + root(ONE + times(x, x))))
    square, total, power, k = times(x, x), 0, x, 0
    while power not in (0, -1):
        total += (-1) ** k * (power // (2 * k + 1))
        power, k = times(power, square), k + 1
    return total


def turned(x: Fraction) -> tuple[int, int]:
    """x less the nearest multiple of π / 2, and which."""
    long = x.numerator * (ONE << 200) // x.denominator
    q = (2 * long + pi() // 2) // pi()
    return (long - q * pi() // 2) >> 200, q % 4


def sin_of(r: int) -> int:
    return series(r, lambda k: (-1, (2 * k + 2) * (2 * k + 3)), times(r, r))


def cos_of(r: int) -> int:
    return series(ONE, lambda k: (-1, (2 * k + 1) * (2 * k + 2)), times(r, r))


def sin(x: Fraction, shift: int = 0) -> int:
    r, q = turned(x)
    q = (q + shift) % 4
    return (-1) ** (q // 2) * (cos_of(r) if q % 2 else sin_of(r))


def erf(x: int) -> int:
    """2 / √π exp(-x²) sum 2^n x^(2n + 1) / (2n + 1)!!."""
    total = series(x, lambda k: (2, 2 * k + 3), times(x, x))
    return over(2 * times(total, exp(-times(x, x))), root(circle()))


def cbrt(x: int) -> int:
    """floor of the cube root."""
    number = x << 2 * PLACES
    guess = 1 << (number.bit_length() + 2) // 3
    while (better := (2 * guess + number // (guess * guess)) // 3) < guess:
        guess = better
    return guess


def plain(function: Callable[[int], int]) -> Callable[[Fraction], int]:
    return lambda x: function(fixed(x))


def even(function: Callable[[Fraction], int]) -> Callable[[Fraction], int]:
    return lambda x: function(abs(x))


def odd(function: Callable[[Fraction], int]) -> Callable[[Fraction], int]:
    return lambda x: function(x) if x > 0 else -function(-x)


def arccos(x: Fraction) -> int:
    a = fixed(abs(x))
    beside = root(ONE - times(a, a))
    angle = arctan(over(beside, a)) if a > ONE // 4 else circle() // 2 - arctan(over(a, beside))
    return angle if x > 0 else circle() - angle


def arcsin(x: int) -> int:
    return circle() // 2 if x == ONE else arctan(over(x, root(ONE - times(x, x))))


def exp2(x: Fraction) -> int:
    n = math.floor(x)
    part = exp(times(fixed(x - n), log_of_2()))
    return part << n if n >= 0 else part >> -n


def erfc(x: Fraction) -> int:
    return ONE - erf(fixed(x))


#: Of numbers other than 0 in the domain, to some 20 places less than PLACES.
EXACT: dict[str, Callable[[Fraction], int]] = {
    "exp": plain(exp),
    "exp2": exp2,
    "expm1": plain(expm1),
    "logistic": lambda x: over(ONE, ONE + exp(-fixed(x))),
    "sinh": odd(plain(sinh)),
    "cosh": even(plain(cosh)),
    "tanh": odd(plain(lambda x: over(sinh(x), cosh(x)))),
    "log": plain(log),
    "log2": plain(lambda x: over(log(x), log_of_2())),
    "log10": plain(lambda x: over(log(x), log(10 * ONE))),
    "log1p": plain(log1p),
    "arcsinh": odd(
        plain(
            lambda x: (
                artanh_series(over(x, root(ONE + times(x, x)))) if x < ONE // 2 else log(x + root(ONE + times(x, x)))
            )
        )
    ),
    "arccosh": plain(lambda x: log(x + root(times(x, x) - ONE))),
    "arctanh": odd(plain(lambda x: artanh_series(x) if x < ONE // 2 else log(over(ONE + x, ONE - x)) // 2)),
    "sin": odd(sin),
    "cos": even(lambda x: sin(x, 1)),
    "tan": odd(lambda x: over(sin(x), sin(x, 1))),
    "arcsin": odd(plain(arcsin)),
    "arccos": arccos,
    "arctan": odd(plain(arctan)),
    "erf": odd(plain(erf)),
    "erfc": erfc,
    "cbrt": odd(plain(cbrt)),
    "rsqrt": plain(lambda x: root(over(ONE, x))),
    "degrees": odd(lambda x: over(fixed(x * 180), circle())),
    "radians": odd(lambda x: times(fixed(x / 180), circle())),
}

#: Of float64 numbers, those of which NumPy has none.
_NEAR: dict[str, Callable[[Any], Any]] = {
    "logistic": scipy.special.expit,
    "erf": scipy.special.erf,
    "erfc": scipy.special.erfc,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


def near(name: str) -> Callable[[Any], Any]:
    """The function of float64 numbers."""
    return _NEAR[name] if name in _NEAR else getattr(np, name)


def power_of(x: Fraction, base: int) -> Fraction | None:
    """n if x = base^n."""
    n = 0
    while x > 1:
        x, n = x / base, n + 1
    while x < 1:
        x, n = x * base, n - 1
    return Fraction(n) if x == 1 else None


def cube_root(x: Fraction) -> Fraction | None:
    roots = [round(abs(part) ** (1 / 3)) for part in (x.numerator, x.denominator)]
    found = Fraction(*roots) * (1 if x > 0 else -1)
    return found if found**3 == x else None


def inverse_root(x: Fraction) -> Fraction | None:
    found = Fraction(math.isqrt(x.denominator), math.isqrt(x.numerator))
    return found if found**2 * x == 1 and found.denominator & (found.denominator - 1) == 0 else None


#: Where a result can be a dyadic number, beside zeros and infinities: that number, or None.
DYADIC: dict[str, Callable[[Fraction], Fraction | None]] = {
    "exp2": lambda x: Fraction(2) ** int(x) if x.denominator == 1 and abs(x) < FAR else None,
    "log2": lambda x: power_of(x, 2),
    "log10": lambda x: power_of(x, 10) if x >= 1 else None,
    "cbrt": cube_root,
    "rsqrt": inverse_root,
}
#: Of the number 1.
AT_ONE = {"log": 0, "arccosh": 0, "arccos": 0}
#: Beyond this |x| functions are held to what they are there: far beyond all formats, or an end of them.
HELD = dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh", "logistic", "tanh"), FAR) | {"erf": 20, "erfc": 20}


def odd_float(name: str, x: Fraction) -> float:
    """The value at x rounded to odd in float64, of values within its range."""
    known = DYADIC.get(name, lambda _: None)(x)
    if x == 1 and name in AT_ONE:
        known = Fraction(AT_ONE[name])
    if known is not None:
        return float(known)
    limit = HELD.get(name)
    if limit is not None and abs(x) > limit:
        x = Fraction(limit if x > 0 else -limit)
    return _odd_float(name, x)


@lru_cache(maxsize=1 << 16)
def _odd_float(name: str, x: Fraction) -> float:
    count = EXACT[name](x)
    size = abs(count)
    assert size.bit_length() > 120, (name, x)  # so that errors in the last places do not count
    drop = size.bit_length() - 53
    return math.copysign(math.ldexp(size >> drop | 1, drop - PLACES), 1 if count > 0 else -1)


def values(name: str, x: np.ndarray, rounded: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Float64 numbers that round as the function's values at `x` do; NaN outside the domain, infinities at poles.

    Args:
        name: of a function of `EXACT`.
        x: float64.
        rounded: float64 numbers to rows of results, for every rounding that there will be.
    """
    with np.errstate(all="ignore"):
        y = np.asarray(near(name)(x))
    inside = np.isfinite(x) & (x != 0) & ~np.isnan(y)
    poles = (np.abs(x) == 1) & np.isinf(y)
    size = np.abs(y)
    ends = [np.copysign(np.maximum(size * (1 + s * 2.0**-44), 0), y) for s in (-1, 1)]
    same = np.all(rounded(ends[0]) == rounded(ends[1]), axis=0) & np.isfinite(y) & (size > 2.0**-1000)
    out = y.copy()
    for i in np.flatnonzero(inside & ~poles & ~same):
        out[i] = odd_float(name, Fraction(float(x[i])))
    return out


# -- roundings ---------------------------------------------------------------------------------------------------------


def round_array(y: np.ndarray, exponent_bits: int, fraction_bits: int, mode: str, word: np.ndarray) -> np.ndarray:
    """Float64 numbers rounded to an IEEE-like format: the neighbours' multiples of the last place, and the mode's rule.

    `word` are random words of 32 bits for the stochastic modes.
    """
    bias = 2 ** (exponent_bits - 1) - 1
    largest = (2 - 2.0**-fraction_bits) * 2.0**bias
    finite = np.isfinite(y)
    size = np.where(finite, np.abs(y), 1.0)
    _, exponent = np.frexp(size)
    place = np.maximum(exponent - 1, 1 - bias) - fraction_bits
    count = np.ldexp(size, -place)
    low = np.floor(count)
    rest = count - low
    share = np.floor(rest * 2.0**32)
    positive = ~np.signbit(y)
    up = {
        "nearest_even": (rest > 0.5) | ((rest == 0.5) & (low % 2 == 1)),
        "nearest_away": rest >= 0.5,
        "nearest_zero": rest > 0.5,
        "up": (rest > 0) & positive,
        "down": (rest > 0) & ~positive,
        "toward_zero": np.zeros(y.shape, bool),
        "odd": (rest > 0) & (low % 2 == 0),
        "stochastic": share + word >= 2.0**32,
        "stochastic_equal": (rest > 0) & (word >= 2**31),
    }[mode]
    result = np.ldexp(low + up, place)
    inward = {"toward_zero": True, "odd": True, "up": ~positive, "down": positive}.get(mode, False)
    result = np.where(result > largest, np.where(inward, largest, np.inf), result)
    return np.copysign(np.where(finite, result, np.abs(y)), y)


MODES = (
    "nearest_even",
    "nearest_away",
    "nearest_zero",
    "up",
    "down",
    "toward_zero",
    "odd",
    "stochastic",
    "stochastic_equal",
)
