"""Constants of the formulas, computed with Python's integers when a function is first traced."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import factorial, isqrt

import numpy as np

from jchop._core.elementary.pairs import Pair, constant

#: Binary places of the constants.
PLACES = 400
_ONE = 1 << PLACES


def _arctangent(n: int) -> int:
    """2^PLACES arctan(1 / n), by Taylor's series."""
    total, power, k = 0, _ONE // n, 0
    while power:
        total += (-power if k & 1 else power) // (2 * k + 1)
        power, k = power // (n * n), k + 1
    return total


@lru_cache(maxsize=1)
def pi() -> Fraction:
    """π, by Machin's formula."""
    return Fraction(4 * (4 * _arctangent(5) - _arctangent(239)), _ONE)


def _hyperbolic_arctangent(n: int) -> Fraction:
    total, power, k = 0, _ONE // n, 0
    while power:
        total += power // (2 * k + 1)
        power, k = power // (n * n), k + 1
    return Fraction(total, _ONE)


@lru_cache(maxsize=16)
def log(n: int) -> Fraction:
    """The natural logarithm of a positive integer, by logarithms of n / (n - 1) = (1 + 1 / m) / (1 - 1 / m)."""
    if n == 1:
        return Fraction(0)
    return log(n - 1) + 2 * _hyperbolic_arctangent(2 * n - 1)


def arctangent_of(n: int) -> Fraction:
    """The arctangent of 1 / n."""
    return Fraction(_arctangent(n), _ONE)


def root(value: Fraction) -> Fraction:
    return Fraction(isqrt(int(value * _ONE * _ONE)), _ONE)


def _pairs(values: list[Fraction]) -> tuple[Pair, ...]:
    return tuple(constant(v) for v in values)


# -- series ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def exponential() -> tuple[Pair, ...]:
    """(e^x - 1) / x for |x| <= log(2) / 2."""
    return _pairs([Fraction(1, factorial(n + 1)) for n in range(12)])


@lru_cache(maxsize=1)
def hyperbolic_sine() -> tuple[Pair, ...]:
    """sinh(x) / x as a polynomial of x², for |x| <= log(2) / 2."""
    return _pairs([Fraction(1, factorial(2 * n + 1)) for n in range(6)])


@lru_cache(maxsize=1)
def hyperbolic_cosine() -> tuple[Pair, ...]:
    """(cosh(x) - 1) / x² as a polynomial of x², for |x| <= log(2) / 2."""
    return _pairs([Fraction(1, factorial(2 * n + 2)) for n in range(6)])


@lru_cache(maxsize=1)
def hyperbolic_tangent() -> tuple[Pair, ...]:
    """tanh(x) / x as a polynomial of x², for |x| <= 1/8: tanh' = 1 - tanh² gives the coefficients in order."""
    terms = [Fraction(1)]
    for n in range(1, 7):
        terms.append(-sum((a * b for a, b in zip(terms, reversed(terms), strict=True)), Fraction(0)) / (2 * n + 1))
    return _pairs(terms)


@lru_cache(maxsize=1)
def sine() -> tuple[Pair, ...]:
    """sin(x) / x as a polynomial of x², for |x| <= π / 4."""
    return _pairs([Fraction((-1) ** n, factorial(2 * n + 1)) for n in range(8)])


@lru_cache(maxsize=1)
def cosine() -> tuple[Pair, ...]:
    """cos(x) as a polynomial of x², for |x| <= π / 4."""
    return _pairs([Fraction((-1) ** n, factorial(2 * n)) for n in range(8)])


@lru_cache(maxsize=2)
def arctangent(sign: int) -> tuple[Pair, ...]:
    """arctan(x) / x for x² <= 1/16, or for sign 1 artanh(x) / x for x² <= 0.03, as a polynomial of x²."""
    return _pairs([Fraction(sign**n, 2 * n + 1) for n in range(9 if sign > 0 else 12)])


@lru_cache(maxsize=1)
def error() -> tuple[Pair, ...]:
    """erf(x) / x as a polynomial of x² <= 1: Kummer's series."""
    scale = 2 / root(pi())
    return _pairs([(-1) ** n * scale / (factorial(n) * (2 * n + 1)) for n in range(17)])


# -- tables ------------------------------------------------------------------------------------------------------------

#: For the scaled complementary error function: the parts of each binade from 1 on, all parts, and the terms of a
#: series.
ERROR_PARTS, ERROR_INTERVALS, ERROR_TERMS = 4, 14, 15


@lru_cache(maxsize=1)
def scaled_error() -> tuple[Pair, ...]:
    """Taylor's series of h(x) = exp(x²) erfc(x) at the middles of the parts: a table for each coefficient.

    h' = 2 x h - 2 / √π gives all coefficients from h.
    """
    columns = []
    for index in range(ERROR_INTERVALS):
        binade, part = divmod(index, ERROR_PARTS)
        columns.append(_pairs(_taylor((1 + Fraction(2 * part + 1, 2 * ERROR_PARTS)) * 2**binade)))
    return tuple(
        Pair(np.array([c.hi for c in terms]), np.array([c.lo for c in terms])) for terms in zip(*columns, strict=True)
    )


def _taylor(x: Fraction) -> list[Fraction]:
    slope = 2 / root(pi())
    terms = [_scaled_error_at(x)]
    terms.append(2 * x * terms[0] - slope)
    for n in range(1, ERROR_TERMS - 1):
        terms.append(Fraction(int((x * terms[n] + terms[n - 1]) * _ONE * 2 / (n + 1)), _ONE))
    return terms


def _scaled_error_at(x: Fraction) -> Fraction:
    """h(x) = exp(x²) - exp(x²) erf(x), by exp(x²) erf(x) = 2 / √π sum 2^n x^(2n + 1) / (2n + 1)!!."""
    power, total, n = _ONE, 0, 0
    while power:
        total, n = total + power, n + 1
        power = int(power * x * x / n)
    odd, error, n = int(_ONE * x), 0, 0
    while odd:
        error, n = error + odd, n + 1
        odd = int(2 * odd * x * x / (2 * n + 1))
    return Fraction(total, _ONE) - 2 / root(pi()) * Fraction(error, _ONE)


#: The parts of the interval from 1 to 2 for `logarithm_table`, and the first of those whose logarithms are taken of a
#: half.
LOG_PARTS, LOG_HALVED = 1024, 425


@lru_cache(maxsize=1)
def logarithms() -> tuple[np.ndarray, ...]:
    """log2(c), or log2(c / 2) from √2 on, for c = 1 + i / 1024: sums of four numbers, the first three of 12 bits."""
    unit, total, rows = log(2), Fraction(0), []
    for i in range(LOG_PARTS):
        value = total / unit - (i >= LOG_HALVED)
        row = []
        for _ in range(3):
            row.append(_leading(value))
            value -= Fraction(float(row[-1]))
        rows.append([*row, constant(value).hi])
        total += 2 * _hyperbolic_arctangent(2 * (LOG_PARTS + i) + 1)
    return tuple(np.array(rows, np.float32).T.copy())


def _leading(value: Fraction) -> np.float32:
    """A number to its first 12 bits, toward zero."""
    hi = constant(value).hi
    return (hi.view(np.int32) & np.int32(~0xFFF)).view(np.float32)


@lru_cache(maxsize=1)
def logarithm() -> tuple[Pair, ...]:
    """log2(1 + x) / x for |x| <= 2^-11."""
    return _pairs([(-1) ** n / ((n + 1) * log(2)) for n in range(4)])


#: For the reduction by π / 2: the exponents of the last places of float32 numbers from 1/2 on, and words of a fraction.
LEAST_PLACE, MOST_PLACE, TURN_WORDS = -24, 104, 3


@lru_cache(maxsize=1)
def turns() -> list[np.ndarray]:
    """For each place k, the fraction of 2^k / (2 π), in words of 32 bits."""
    bits = 32 * TURN_WORDS
    words = []
    for place in range(LEAST_PLACE, MOST_PLACE + 1):
        count = int(Fraction(2) ** (place + bits) / (2 * pi())) % (1 << bits)
        words.append([count >> 32 * (TURN_WORDS - 1 - i) & 0xFFFFFFFF for i in range(TURN_WORDS)])
    return list(np.array(words, np.uint32).T.copy())
