"""Codebooks of many levels under scales, exactly; for XLA, which takes numbers from small tables in few operations.

A product with 1 / s guesses the quotient x / s to far less than the width of a bin (`bins`), which leaves one threshold
t; and whether x / s reaches it is the sign of x - t s. With t in two parts of at most 16 bits and s in three of 8 the
products are exact. Where the sign is in doubt x is near the first of them, so that the differences are exact too, from
the largest product to the smallest; else they are off by too little to change it. So neither how a division is carried
out nor whether a product and a sum are contracted changes a bit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop import _bits
from jchop._bits import CARRIERS
from jchop._reference import products, quanta
from jchop._reference.bins import Bins, make_bins, take
from jchop._reference.codes import extended
from jchop._reference.groups import once
from jchop._reference.levels import _threshold
from jchop._reference.quanta import number_of, word_of
from jchop._reference.scales import Plan, Scales, scale_magnitude
from jchop.formats import CodebookFormat
from jchop.rounding import Rounding

Array = jax.Array

_CARRIER = CARRIERS["float32"]
_FRACTION, _BIAS, _INF = _CARRIER.fraction, _CARRIER.bias, _CARRIER.inf
#: Thresholds are integers of 28 bits, or of fewer, times a power of two; the upper part of one has 16 bits, and all but
#: zero lie within 2^-_REACH and 2^_TOP.
_WIDTH, _UPPER, _REACH, _TOP = 28, 16, 40, 20
#: Bits of an index of a threshold, which go where the upper part of one has none.
_INDEX = _FRACTION + 1 - _UPPER
#: How many units in its last place a guess may be off, a few more than it is.
_MARGIN = 16
#: Scales below 2^-_LEAST are moved: a unit in the last place of one times one of a threshold is then a normal number.
_LEAST = 32
#: Bits of the parts of scales, from the top.
_PARTS = (8, 8)


@dataclass(frozen=True, eq=False)
class _Table:
    """Bins, and thresholds in two parts.

    Args:
        bins: of the bits of guesses.
        upper: for each bin the bits of the upper part of its threshold, and in its last eight the index of that.
        lower: for each threshold the other part; None where all are zero.
        has_zero: whether zero is a threshold.
        strict: whether thresholds above zero, and the others, are reached beyond them alone.
    """

    bins: Bins
    upper: np.ndarray
    lower: np.ndarray | None
    has_zero: bool
    strict: tuple[bool, bool]


@lru_cache(maxsize=64)
def _table(fmt: CodebookFormat, mode: Rounding) -> _Table | None:
    """The table; None where thresholds are too close, too many, too far from 1, or have too many bits."""
    if mode.stochastic or fmt.bits > _INDEX:
        return None
    pairs = itertools.pairwise([Fraction(level) for level in fmt.levels])
    thresholds = [_threshold(mode, index, *pair) for index, pair in enumerate(pairs)]
    values = [value for value, _ in thresholds]
    strict = tuple({beyond for value, beyond in thresholds if (value > 0) is above} for above in (True, False))
    if max(map(len, strict)) > 1 or not all(map(_fits, values)):
        return None
    bins = make_bins([_CARRIER.ceil_bits(value) for value in values], _MARGIN)
    if bins is None:
        return None
    upper = [_upper_part(value) for value in values]
    bits = np.array([float(part) for part in upper], np.float32).view(np.int32)
    lower = np.array([float(value - part) for value, part in zip(values, upper, strict=True)], np.float32)
    return _Table(
        bins,
        bits[bins.below] | bins.below,
        lower if lower.any() else None,
        0 in values,
        (True in strict[0], True in strict[1]),
    )


def _fits(value: Fraction) -> bool:
    if not value:
        return True
    odd = abs(value.numerator) // (value.numerator & -value.numerator)
    power = value.denominator & value.denominator - 1 == 0
    return power and odd.bit_length() <= _WIDTH and Fraction(1, 1 << _REACH) <= abs(value) <= 1 << _TOP


def _upper_part(value: Fraction) -> Fraction:
    """The leading bits of a threshold."""
    if not value:
        return value
    unit = Fraction(2) ** (_exponent(abs(value)) - _UPPER + 1)
    return int(value / unit) * unit


def _exponent(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent - (value < Fraction(2) ** exponent)


def applies(plan: Plan) -> bool:
    """Whether `encode` gives the codes that the exact way gives."""
    element, fmt = plan.scaling.element, plan.scaling.element.format
    if plan.compute is not _CARRIER or not isinstance(fmt, CodebookFormat) or plan.scaling.rule == "two_level":
        return False
    return _table(fmt, element.rounding) is not None


def encode(x: Array, scales: Scales, plan: Plan) -> Array:
    """The codes of the quotients x / s rounded once to a level."""
    fmt = plan.scaling.element.format
    assert isinstance(fmt, CodebookFormat)
    table = _table(fmt, plan.scaling.element.rounding)
    assert table is not None
    divisor = quanta.move_bits(extended(scale_magnitude(scales, plan), _CARRIER), least=_LEAST)
    factor, inverse, *parts = once(_prepared(divisor))
    sign, magnitude = _bits.split(x, _CARRIER)
    moved = _move(x, sign, magnitude, *factor)
    guess = word_of(moved * inverse) & _bits.low_mask(_CARRIER.width - 1)
    entry = take(jnp.asarray(table.upper), table.bins.place(sign != 0, guess))
    index = entry & _bits.low_mask(_INDEX)
    reached = _reaches(x, moved, number_of(entry ^ index), index, parts, table)
    nan = magnitude > _INF
    return jnp.where(nan, len(fmt.levels) - 1, index + reached).astype(fmt.code_dtype)


def _prepared(divisor: quanta.Quanta) -> tuple[Any, ...]:
    """What numbers are multiplied by to be moved, and those below the normal range; 1 / s; and s in parts."""
    assert divisor.tiny is not None and divisor.factor is not None
    factor = jnp.where(divisor.tiny, jnp.float32(2.0**quanta._TINY), divisor.factor)
    # Beside any other scale such numbers are as good as zero.
    small = jnp.where(divisor.tiny, jnp.float32(2.0 ** (_CARRIER.tiny_exponent + quanta._TINY)), 0)
    return (factor, small), 1 / divisor.value, *_parts(divisor.value)


def _move(x: Array, sign: Array, magnitude: Array, factor: Array, small: Array) -> Array:
    """Numbers moved as scales were."""
    count = jnp.where(sign != 0, -magnitude, magnitude).astype(jnp.float32)
    return jnp.where(magnitude < 1 << _FRACTION, count * small, x * factor)


def _parts(scale: Array) -> tuple[Array, ...]:
    """Numbers as sums of three of 8 bits each."""
    parts: list[Array] = []
    for bits in _PARTS:
        part = number_of(word_of(scale) & ~_bits.low_mask(_FRACTION + 1 - bits))
        parts.append(part)
        scale = scale - part
    return (*parts, scale)


def _reaches(x: Array, moved: Array, upper: Array, index: Array, parts: list[Array], table: _Table) -> Array:
    """Whether x / s reaches the threshold of its bin."""
    lower = None if table.lower is None else take(jnp.asarray(table.lower), index)
    first, second, third = parts
    rest = (moved - upper * first) - upper * second
    if lower is not None:
        rest = rest - lower * first
    rest = rest - upper * third
    if lower is not None:
        rest = (rest - lower * second) - lower * third
    # Zero, or a multiple of a normal number.
    above, others = (_compare(rest, beyond) for beyond in table.strict)
    if table.has_zero:
        side = _bits.ordered(*_bits.split(x, _CARRIER))
        others = jnp.where(upper == 0, _compare(side, table.strict[1]), others)
    elif table.strict[0] == table.strict[1]:
        return above
    return jnp.where(upper > 0, above, others)


def _compare(side: Array, beyond: bool) -> Array:
    return side > 0 if beyond else side >= 0


# -- numbers -----------------------------------------------------------------------------------------------------------


def multiplies(plan: Plan) -> bool:
    """Whether `numbers_of` gives the numbers that the exact way gives."""
    fmt = plan.scaling.element.format
    if plan.carrier is not _CARRIER or not isinstance(fmt, CodebookFormat) or plan.scaling.rule == "two_level":
        return False
    sizes = [abs(Fraction(level)) for level in fmt.levels if level]
    within = (Fraction(1, 1 << products.LEAST) <= size <= 1 << products.MOST for size in sizes)
    return all(within) and all(_CARRIER.magnitude_bits(size) is not None for size in sizes)


def numbers_of(codes: Array, scales: Scales, plan: Plan) -> Array:
    """Codes times scales, rounded once to nearest even; float32, NaN for a code that is not used."""
    fmt = plan.scaling.element.format
    assert isinstance(fmt, CodebookFormat)
    values = [fmt.value_of(code) for code in range(1 << fmt.bits)]
    table = np.array([np.nan if value is None else float(value) for value in values], np.float32)
    level = take(jnp.asarray(table), codes.astype(jnp.int32))
    return products.times(level, extended(scale_magnitude(scales, plan), _CARRIER))
