"""What an operation must give: the exact result of rational arithmetic, rounded once by `oracle.round_exact`."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import oracle
from oracle import Carrier, FloatSet, Set, Special, Value

INFINITE = (Special.INF, Special.NEG_INF)


def is_negative(x: Value) -> bool:
    return x in (Special.NEG_ZERO, Special.NEG_INF) or (not isinstance(x, Special) and x < 0)


def is_zero(x: Value) -> bool:
    return x is Special.NEG_ZERO or x == 0


def number(x: Value) -> Fraction:
    """A finite value, its sign of zero dropped."""
    return Fraction(0) if x is Special.NEG_ZERO else x  # type: ignore[return-value]


def zero(negative: bool) -> Value:
    return Special.NEG_ZERO if negative else Fraction(0)


def infinity(negative: bool) -> Value:
    return Special.NEG_INF if negative else Special.INF


def multiply(x: Value, y: Value, down: bool = False) -> Value:
    if Special.NAN in (x, y):
        return Special.NAN
    negative = is_negative(x) != is_negative(y)
    if x in INFINITE or y in INFINITE:
        return Special.NAN if is_zero(x) or is_zero(y) else infinity(negative)
    return number(x) * number(y) or zero(negative)


def divide(x: Value, y: Value, down: bool = False) -> Value:
    if Special.NAN in (x, y) or (x in INFINITE and y in INFINITE) or (is_zero(x) and is_zero(y)):
        return Special.NAN
    negative = is_negative(x) != is_negative(y)
    if x in INFINITE or is_zero(y):
        return infinity(negative)
    return zero(negative) if y in INFINITE else number(x) / number(y) or zero(negative)


def add(x: Value, y: Value, down: bool = False) -> Value:
    """IEEE 754-2019, 6.3: a sum of zero of unlike signs is +0, when rounding down -0."""
    if Special.NAN in (x, y) or (x in INFINITE and y in INFINITE and x is not y):
        return Special.NAN
    if x in INFINITE or y in INFINITE:
        return x if x in INFINITE else y
    both_negative = is_negative(x) and is_negative(y)
    one_sign = is_negative(x) == is_negative(y)
    return number(x) + number(y) or zero(both_negative if one_sign else down)


def multiply_add(x: Value, y: Value, z: Value, down: bool = False) -> Value:
    return add(multiply(x, y), z, down)


OPERATIONS: dict[str, Callable[..., Value]] = {
    "multiply": multiply,
    "add": add,
    "divide": divide,
    "multiply_add": multiply_add,
}
OPERANDS = {"multiply": 2, "add": 2, "divide": 2, "multiply_add": 3}


def exact_results(operation: str, operands: list[np.ndarray], carrier: Carrier, down: bool) -> list[Value]:
    """The exact result for each row of operands, given as values of a carrier."""
    columns = [[oracle.from_bits(int(bits), carrier) for bits in column.view(carrier.words)] for column in operands]
    return [OPERATIONS[operation](*row, down=down) for row in zip(*columns, strict=True)]


# --- operands that are hard -------------------------------------------------------------------------------------------


def _scaled(significands: np.ndarray, exponents: np.ndarray, carrier: Carrier) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(significands, exponents).astype(carrier.name)


def interesting(fmt: Set, carrier: Carrier, n: int, rng: np.random.Generator) -> np.ndarray:
    """Numbers at and near the values of a format, the middles between them, its ends, and the carrier's ends."""
    m, least, top = (fmt.m, 1 - fmt.bias, fmt.bias) if isinstance(fmt, FloatSet) else (6, -8, 8)
    least, top = max(least, 1 - carrier.bias), min(top, carrier.bias)
    kind = rng.integers(0, 6, n)
    exponent = np.choose(
        kind,
        [
            rng.integers(-3, 4, n),
            rng.integers(least - m - 3, least + 2, n),
            rng.integers(top - 1, top + 2, n),
            rng.integers(least, top + 1, n),
            rng.integers(-carrier.bias - carrier.m, 3 - carrier.bias, n),
            rng.integers(carrier.bias - 2, carrier.bias + 1, n),
        ],
    )
    # A few leading bits of the format, a tie below them or not, and a unit or two at the end of the carrier or not.
    last = np.where(rng.random(n) < 0.5, m, m + 1)
    significand = 1 + np.floor(rng.random(n) * 2.0 ** rng.integers(0, m + 1, n)) * 2.0**-m
    significand = significand + np.where(rng.random(n) < 0.4, 2.0 ** -(last + 0.0), 0)
    significand = significand + rng.integers(-2, 3, n) * (rng.random(n) < 0.3) * 2.0**-carrier.m
    significand = np.where(rng.random(n) < 0.2, 1 + rng.random(n), significand)
    significand = np.where(rng.random(n) < 0.1, 2 - 2.0**-carrier.m, significand)
    return _scaled(significand * rng.choice([-1.0, 1.0], n), exponent, carrier)


def specials(operation: str, carrier: Carrier) -> list[np.ndarray]:
    """Combinations of zeros, infinities, NaN, one, and the carrier's smallest and largest values: 100 of them."""
    largest = np.array(carrier.infinity - 1, carrier.words).view(carrier.name)
    smallest = np.array(1, carrier.words).view(carrier.name)
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, smallest, -smallest, largest, -largest], carrier.name)
    x, y = (grid.ravel() for grid in np.meshgrid(values, values))
    return [x, y, np.roll(np.tile(values[:4], 25), 1)][: OPERANDS[operation]]


def pairs(operation: str, fmt: Set, carrier: Carrier, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Operands whose result is hard to round to `fmt`.

    Sums of a hard number and one 0 to 60 binades smaller, or that cancels it; products and quotients that come out near
    a hard number; products next to a power of two; and what just comes. The last operand of a fused operation hides,
    cancels or completes the product.
    """
    x, target = interesting(fmt, carrier, n, rng), interesting(fmt, carrier, n, rng)
    operands = [x, x]
    with np.errstate(all="ignore"):
        operands[1] = _partner("multiply" if operation == "multiply_add" else operation, x, target, carrier, rng)
        if operation == "multiply_add":
            operands.append(_partner("add", (x * operands[1]).astype(carrier.name), target, carrier, rng))
        for i in range(1, len(operands)):
            operands[i] = np.where(rng.random(n) < 0.25, interesting(fmt, carrier, n, rng), operands[i])
        if operation in ("multiply", "multiply_add"):
            rows = rng.random(n) < 0.2
            close = _near_powers(fmt, carrier, n, rng)
            operands = [np.where(rows, *both) for both in zip(close, operands, strict=False)]
    columns = [operand.astype(carrier.name) for operand in operands]
    return [np.concatenate(column) for column in zip(columns, specials(operation, carrier), strict=True)]


#: Factors a, b of M + 1 bits, 2^(2M) - 1 and 2^46 + 1 (1013 x 1657 x 5 and 277 x 30269).
_FACTORS = {"float32": ((2**23 + 1, 2**23 - 1), (8392705, 8384513)), "float64": ((2**52 + 1, 2**52 - 1),) * 2}


def _near_powers(fmt: Set, carrier: Carrier, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Factors of a product that misses a power of two by its very last bit; and an addend of which it is half a gap,
    or that it is far below.
    """
    m, tiny = (fmt.m, 1 - fmt.bias - fmt.m) if isinstance(fmt, FloatSet) else (6, -8)
    least = 1 - carrier.bias - carrier.m
    power = np.choose(
        rng.integers(0, 4, n),
        [
            rng.integers(-8, 8, n),
            rng.integers(tiny - 2, tiny + 2, n),
            rng.integers(least - 3, least + 2, n),
            rng.integers(least - 48, least, n),
        ],
    )
    one = power // 2 + rng.integers(-3, 4, n)
    kind = rng.integers(0, 2, n)
    factors = np.array(_FACTORS[carrier.name], float)[kind]
    sign = rng.choice([-1.0, 1.0], n)
    addend = (1 + np.floor(rng.random(n) * 2.0**m) * 2.0**-m) * rng.choice([-1.0, 1.0], n)
    return [
        _scaled(factors[:, 0] * sign, one - carrier.m, carrier),
        _scaled(factors[:, 1], power - one - carrier.m, carrier),
        _scaled(addend, power + np.where(rng.random(n) < 0.5, m + 1, rng.integers(20, 120, n)), carrier),
    ]


def _partner(
    operation: str, x: np.ndarray, target: np.ndarray, carrier: Carrier, rng: np.random.Generator
) -> np.ndarray:
    """A second operand for which the result is about `target`, or, of a sum, hard for another reason."""
    n, finite = len(x), np.where(np.isfinite(x), x, 1).astype(carrier.name)
    if operation != "add":
        return target / finite if operation == "multiply" else finite / target
    lower = np.where(rng.random(n) < 0.3, carrier.m + rng.integers(-1, 4, n), rng.integers(0, 61, n))
    exponent = np.frexp(finite)[1] - 1 - lower
    smaller = _scaled((1 + np.floor(rng.random(n) * 4) / 4) * rng.choice([-1.0, 1.0], n), exponent, carrier)
    near = np.nextafter(-finite, rng.choice([-1.0, 1.0], n).astype(carrier.name))
    cancels = np.where(rng.random(n) < 0.5, near, -finite)
    return np.choose(rng.integers(0, 4, n), [smaller, smaller, cancels, target - x])
