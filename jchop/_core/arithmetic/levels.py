"""Exact numbers that a carrier need not hold, rounded to a table of levels.

A number is F ulp + R 2^-W ulp and less than 2^-W ulp more: F an integer that orders as the carrier's values do, R a
word of W bits. So is each threshold, from which on the next level is taken. All thresholds of a smaller F are reached;
the one of an equal F, if there is one, is told by R.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop import _bits
from jchop._bits import Carrier
from jchop._core.arithmetic.exact import Exact
from jchop._core.rounding.codebooks import pick_level
from jchop._core.rounding.modes import threshold
from jchop.formats import CodebookFormat
from jchop.rounding import Rounding

Array = jax.Array


def round_to_levels(v: Exact, fmt: CodebookFormat, mode: Rounding, carrier: Carrier) -> Array:
    """`v` rounded under a deterministic mode; NaN stays, whatever lies beyond the ends saturates."""
    table = require_levels(fmt, mode, carrier)
    floor, rest, sticky = _floor(v)
    columns = (pick_level(floor, table.floors + 1, column) for column in table.columns)
    lower, upper, next_floor, next_rest, strict, *beyond = columns
    next_rest = lax.bitcast_convert_type(next_rest, rest.dtype)
    more = (rest > next_rest) | ((rest == next_rest) & sticky)
    reached = (floor == next_floor) & (more | ((rest == next_rest) & (strict == 0)))
    result = jnp.where(reached, upper, lower)
    if beyond:
        result = jnp.where((floor == next_floor) & more, beyond[0], result)
    is_nan = v.magnitude > carrier.inf
    sign = jnp.where(result < 0, jnp.full_like(result, carrier.sign_bit), 0)
    return _bits.join(jnp.where(is_nan, v.sign, sign), jnp.where(is_nan, v.magnitude, jnp.abs(result)), carrier)


def _floor(v: Exact) -> tuple[Array, Array, Array]:
    """F, R, and whether anything follows."""
    down = (v.sign != 0) & v.inexact
    floor = _bits.ordered(v.sign, v.magnitude) - down.astype(v.magnitude.dtype)
    # 1 - rest; where anything follows it, what follows that.
    complement = ~v.rest + (~v.sticky).astype(v.rest.dtype)
    return floor, jnp.where(down, complement, v.rest), v.sticky


@dataclass(frozen=True)
class _Levels:
    """The thresholds' F, increasing; and what stands beside each, in columns of one entry more."""

    floors: np.ndarray
    #: The level below, the level above, F, R, and 1 where equality is not enough; under `Rounding.ODD` the level
    #: beyond, which differs from that above where the threshold is a level that is taken by equality alone.
    columns: tuple[np.ndarray, ...]


@lru_cache(maxsize=64)
def require_levels(fmt: CodebookFormat, mode: Rounding, carrier: Carrier) -> _Levels:
    """The table, if its thresholds can be told apart.

    Raises:
        ValueError: if a middle of two levels has too many bits.
    """
    levels = [Fraction(level) for level in fmt.levels]
    thresholds = [threshold(mode, index, *pair) for index, pair in enumerate(itertools.pairwise(levels))]
    if mode is Rounding.ODD:
        return _odd_levels(levels, thresholds, carrier)
    parts = [_parts(value, carrier) for value, _ in thresholds]
    floors = [floor for floor, _ in parts]  # no two alike: between two thresholds lies a level, a value of the carrier
    if any(rest.denominator != 1 for _, rest in parts):
        raise ValueError(
            f"rounding={mode.value!r}: {carrier.name} cannot tell quotients between the levels of {fmt} apart"
        )
    work, width = carrier.work, carrier.work_width
    rests = [int(rest) - (1 << width if rest >= 1 << width - 1 else 0) for _, rest in parts]
    ordered = [carrier.ceil_bits(level) for level in levels]
    columns = (
        ordered,
        [*ordered[1:], ordered[-1]],
        [*floors, np.iinfo(work).max],
        [*rests, 0],
        [*(int(strict) for _, strict in thresholds), 0],
    )
    return _Levels(np.array(floors, work), tuple(np.array(column, work) for column in columns))


def _odd_levels(levels: list[Fraction], thresholds: list[tuple[Fraction, bool]], carrier: Carrier) -> _Levels:
    """A level of even index is taken by equality alone: its two thresholds are one, and beyond it lies the next level.

    Levels are values of the carrier, so thresholds can always be told apart.
    """
    ordered = [carrier.ceil_bits(level) for level in levels]
    rows: list[tuple[int, ...]] = []
    for i, (value, strict) in enumerate(thresholds):
        floor = carrier.ceil_bits(value)
        if strict and rows and rows[-1][2] == floor:  # the level that the threshold before this one is
            rows[-1] = (*rows[-1][:5], ordered[i + 1])
        else:
            rows.append((ordered[i], ordered[i + 1], floor, 0, int(strict), ordered[i + 1]))
    last = rows[-1][5] if rows else ordered[0]
    rows.append((last, last, np.iinfo(carrier.work).max, 0, 0, last))
    columns = np.array(rows, carrier.work).T
    return _Levels(columns[2][:-1], tuple(columns))


def _parts(value: Fraction, carrier: Carrier) -> tuple[int, Fraction]:
    """F and R of an exact number, R a fraction where W bits are not enough."""
    bits, exact = carrier.toward_zero(value)
    field, fraction = bits >> carrier.fraction, bits & (1 << carrier.fraction) - 1
    ulp = Fraction(2) ** (max(field, 1) - carrier.bias - carrier.fraction)
    rest = abs(value) / ulp - (fraction + (1 << carrier.fraction if field else 0))
    if value < 0 and not exact:
        bits, rest = bits + 1, 1 - rest
    return -bits if value < 0 else bits, rest * (1 << carrier.work_width)
