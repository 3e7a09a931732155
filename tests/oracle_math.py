"""What a function must give: the real function of rational numbers, rounded once by `oracle`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import oracle
import oracle_arithmetic as arithmetic
from oracle import Carrier, Special, Value
from oracle_matmul import How, rounded

F32 = oracle.CARRIERS["float32"]
ONE = Fraction(1)


def values(x: np.ndarray) -> list[Value]:
    """The exact values of a float32 or float64 array, in C order."""
    carrier = oracle.CARRIERS[x.dtype.name]
    return [oracle.from_bits(int(bits), carrier) for bits in np.ascontiguousarray(x).ravel().view(carrier.words)]


def array(results: Sequence[Value], carrier: Carrier = F32) -> np.ndarray:
    """The inverse of `values`."""
    return np.array([oracle.to_bits(v, carrier) for v in results], carrier.words).view(carrier.name)


def sqrt(x: Value, down: bool = False) -> Value:
    """To 300 bits and a half of the last one where it is not exact: on the right side of every middle."""
    if x is Special.NAN or x is Special.INF or arithmetic.is_zero(x):
        return x
    if arithmetic.is_negative(x):
        return Special.NAN
    number = arithmetic.number(x)
    scaled = number * oracle.pow2(600)
    root = math.isqrt(int(scaled))
    return (root + Fraction(root * root != scaled, 2)) * oracle.pow2(-300)


def negative(x: Value) -> Value:
    swap = {Special.INF: Special.NEG_INF, Special.NEG_INF: Special.INF, Special.NEG_ZERO: Fraction(0)}
    if isinstance(x, Special):
        return swap.get(x, x)
    return -x if x else Special.NEG_ZERO


def floor_divide(x: Value, y: Value, down: bool = False) -> Value:
    """As NumPy's: NaN for infinite x unless y is zero, and -1 for numbers of other signs of which y is infinite."""
    if x in arithmetic.INFINITE and not arithmetic.is_zero(y):
        return Special.NAN
    quotient = arithmetic.divide(x, y)
    if y in arithmetic.INFINITE and x is not Special.NAN and not arithmetic.is_zero(x):
        return Fraction(-1) if arithmetic.is_negative(x) != arithmetic.is_negative(y) else quotient
    if isinstance(quotient, Special):
        return quotient
    return Fraction(math.floor(quotient)) if quotient else quotient


def mod(x: Value, y: Value, down: bool = False) -> Value:
    """Of the sign of y, as Python's."""
    if Special.NAN in (x, y) or x in arithmetic.INFINITE or arithmetic.is_zero(y):
        return Special.NAN
    opposed = arithmetic.is_negative(x) != arithmetic.is_negative(y)
    if y in arithmetic.INFINITE:
        return arithmetic.zero(arithmetic.is_negative(y)) if arithmetic.is_zero(x) else y if opposed else x
    rest = arithmetic.number(x) - math.floor(arithmetic.number(x) / arithmetic.number(y)) * arithmetic.number(y)
    return rest or arithmetic.zero(arithmetic.is_negative(y))


def subtract(x: Value, y: Value, down: bool = False) -> Value:
    return arithmetic.add(x, negative(y), down)


def square(x: Value, down: bool = False) -> Value:
    return arithmetic.multiply(x, x)


def reciprocal(x: Value, down: bool = False) -> Value:
    return arithmetic.divide(ONE, x)


#: By the name in `jchop.math`: the exact function of values.
EXACT: dict[str, Callable[..., Value]] = {
    "add": arithmetic.add,
    "subtract": subtract,
    "multiply": arithmetic.multiply,
    "divide": arithmetic.divide,
    "fma": arithmetic.multiply_add,
    "sqrt": sqrt,
    "square": square,
    "reciprocal": reciprocal,
    "mod": mod,
    "floor_divide": floor_divide,
}


def applied(name: str, operands: Sequence[np.ndarray], how: How, words: np.ndarray) -> np.ndarray:
    """The function of operands that are rounded already, float32, element by element."""
    columns = [values(x) for x in operands]
    down = how.mode == "down"
    return array(
        [
            rounded(EXACT[name](*row, down=down), how, F32, int(word))
            for *row, word in zip(*columns, words.ravel(), strict=True)
        ]
    )
