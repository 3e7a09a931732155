"""Constants of the formulas, computed with Python's integers when a function is first traced."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import factorial, isqrt

import numpy as np

from jchop._core.elementary.pairs import FloatPair, pair_of_constant

#: Binary places of the constants.
PLACES = 400
_FIXED_POINT_ONE = 1 << PLACES


def arctangent_of_inverse(n: int, sign: int = -1) -> Fraction:
    """arctan(1 / n), or artanh(1 / n) if `sign` is 1, by Taylor's series, whose signs are powers of `sign`."""
    total, power, k = 0, _FIXED_POINT_ONE // n, 0
    while power:
        total += sign**k * power // (2 * k + 1)
        power, k = power // (n * n), k + 1
    return Fraction(total, _FIXED_POINT_ONE)


@lru_cache(maxsize=1)
def pi() -> Fraction:
    """π, by Machin's formula."""
    return 4 * (4 * arctangent_of_inverse(5) - arctangent_of_inverse(239))


@lru_cache(maxsize=16)
def log_of_integer(n: int) -> Fraction:
    """The natural logarithm of a positive integer, by logarithms of n / (n - 1) = (1 + 1 / m) / (1 - 1 / m)."""
    if n == 1:
        return Fraction(0)
    return log_of_integer(n - 1) + 2 * arctangent_of_inverse(2 * n - 1, 1)


def root_of_fraction(value: Fraction) -> Fraction:
    return Fraction(isqrt(int(value * _FIXED_POINT_ONE * _FIXED_POINT_ONE)), _FIXED_POINT_ONE)


# -- series ------------------------------------------------------------------------------------------------------------


def _hyperbolic_tangent_terms() -> list[Fraction]:
    """Tanh' = 1 - tanh² gives the coefficients in order."""
    terms = [Fraction(1)]
    for n in range(1, 7):
        terms.append(-sum((a * b for a, b in zip(terms, reversed(terms), strict=True)), Fraction(0)) / (2 * n + 1))
    return terms


_SERIES: dict[str, Callable[[], list[Fraction]]] = {
    # (e^x - 1) / x for |x| <= log(2) / 2
    "expm1": lambda: [Fraction(1, factorial(n + 1)) for n in range(12)],
    # sinh(x) / x and (cosh(x) - 1) / x² as polynomials of x², for |x| <= log(2) / 2
    "sinh": lambda: [Fraction(1, factorial(2 * n + 1)) for n in range(6)],
    "coshm1": lambda: [Fraction(1, factorial(2 * n + 2)) for n in range(6)],
    # tanh(x) / x as a polynomial of x², for |x| <= 1/8
    "tanh": _hyperbolic_tangent_terms,
    # sin(x) / x and cos(x) as polynomials of x², for |x| <= π / 4
    "sin": lambda: [Fraction((-1) ** n, factorial(2 * n + 1)) for n in range(8)],
    "cos": lambda: [Fraction((-1) ** n, factorial(2 * n)) for n in range(8)],
    # arctan(x) / x for x² <= 1/16, and artanh(x) / x for x² <= 0.03, as polynomials of x²
    "arctan": lambda: [Fraction((-1) ** n, 2 * n + 1) for n in range(12)],
    "artanh": lambda: [Fraction(1, 2 * n + 1) for n in range(9)],
    # erf(x) / x as a polynomial of x² <= 1: Kummer's series
    "erf": lambda: [(-1) ** n * 2 / (root_of_fraction(pi()) * factorial(n) * (2 * n + 1)) for n in range(17)],
    # log2(1 + x) / x for |x| <= 2^-11
    "log2": lambda: [(-1) ** n / ((n + 1) * log_of_integer(2)) for n in range(4)],
}


@lru_cache(maxsize=len(_SERIES))
def series(name: str) -> tuple[FloatPair, ...]:
    """The coefficients of a series, the constant term first."""
    return tuple(map(pair_of_constant, _SERIES[name]()))


# -- tables ------------------------------------------------------------------------------------------------------------

#: For the scaled complementary error function: the parts of each binade from 1 on, all parts, and the terms of a
#: series.
ERROR_PARTS, ERROR_INTERVALS, ERROR_TERMS = 4, 14, 15


@lru_cache(maxsize=1)
def scaled_erfc_series() -> tuple[FloatPair, ...]:
    """Taylor's series of h(x) = exp(x²) erfc(x) at the middles of the parts: a table for each coefficient.

    h' = 2 x h - 2 / √π gives all coefficients from h.
    """
    columns = []
    for index in range(ERROR_INTERVALS):
        binade, part = divmod(index, ERROR_PARTS)
        middle = (1 + Fraction(2 * part + 1, 2 * ERROR_PARTS)) * 2**binade
        columns.append(map(pair_of_constant, _scaled_erfc_taylor(middle)))
    return tuple(
        FloatPair(np.array([c.hi for c in terms]), np.array([c.lo for c in terms]))
        for terms in zip(*columns, strict=True)
    )


def _scaled_erfc_taylor(x: Fraction) -> list[Fraction]:
    slope = 2 / root_of_fraction(pi())
    terms = [_scaled_erfc_at(x)]
    terms.append(2 * x * terms[0] - slope)
    for n in range(1, ERROR_TERMS - 1):
        terms.append(Fraction(int((x * terms[n] + terms[n - 1]) * _FIXED_POINT_ONE * 2 / (n + 1)), _FIXED_POINT_ONE))
    return terms


def _scaled_erfc_at(x: Fraction) -> Fraction:
    """h(x) = exp(x²) - exp(x²) erf(x), by exp(x²) erf(x) = 2 / √π sum 2^n x^(2n + 1) / (2n + 1)!!."""
    exp_term, exp_sum, n = _FIXED_POINT_ONE, 0, 0
    while exp_term:
        exp_sum, n = exp_sum + exp_term, n + 1
        exp_term = int(exp_term * x * x / n)
    erf_term, erf_sum, n = int(_FIXED_POINT_ONE * x), 0, 0
    while erf_term:
        erf_sum, n = erf_sum + erf_term, n + 1
        erf_term = int(2 * erf_term * x * x / (2 * n + 1))
    return Fraction(exp_sum, _FIXED_POINT_ONE) - 2 / root_of_fraction(pi()) * Fraction(erf_sum, _FIXED_POINT_ONE)


#: The parts of the interval from 1 to 2 for `logarithm_table`, and the first of those whose logarithms are taken of a
#: half.
LOG_PARTS, FIRST_LOG_OF_HALF = 1024, 425


@lru_cache(maxsize=1)
def logarithm_table() -> tuple[np.ndarray, ...]:
    """log2(c), or log2(c / 2) from √2 on, for c = 1 + i / 1024: sums of four numbers, the first three of 12 bits."""
    unit, total, rows = log_of_integer(2), Fraction(0), []
    for i in range(LOG_PARTS):
        value = total / unit - (i >= FIRST_LOG_OF_HALF)
        row = []
        for _ in range(3):
            nearest = pair_of_constant(value).hi
            row.append((nearest.view(np.int32) & np.int32(~0xFFF)).view(np.float32))  # its first 12 bits
            value -= Fraction(float(row[-1]))
        rows.append([*row, pair_of_constant(value).hi])
        total += 2 * arctangent_of_inverse(2 * (LOG_PARTS + i) + 1, 1)
    return tuple(np.array(rows, np.float32).T.copy())


#: For the reduction by π / 2: the exponents of the last places of float32 numbers from 1/2 on, and words of a fraction.
LEAST_PLACE, MOST_PLACE, TWO_PI_WORDS = -24, 104, 3


@lru_cache(maxsize=1)
def inverse_of_two_pi() -> list[np.ndarray]:
    """For each place k, the fraction of 2^k / (2 π), in words of 32 bits."""
    bits = 32 * TWO_PI_WORDS
    words = []
    for exponent in range(LEAST_PLACE, MOST_PLACE + 1):
        fraction_bits = int(Fraction(2) ** (exponent + bits) / (2 * pi())) % (1 << bits)
        words.append([fraction_bits >> 32 * (TWO_PI_WORDS - 1 - i) & 0xFFFFFFFF for i in range(TWO_PI_WORDS)])
    return list(np.array(words, np.uint32).T.copy())
