"""Exact numbers that a carrier need not hold, rounded to a table of levels.

A number is F ulp + R 2^-W ulp, plus less than 2^-W ulp. F is an integer in the order of the carrier's values, R a word
of W bits. A threshold, from which on the next level is taken, has the same form. A number has reached all thresholds of
a smaller F. If a threshold has an equal F, R decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop._core.arithmetic.exact import ExactResult
from jchop._core.rounding.codebooks import pick_level
from jchop._core.rounding.modes import rounding_thresholds
from jchop.formats import CodebookFormat
from jchop.formats.rounding import Rounding

Array = jax.Array


def round_to_levels(v: ExactResult, fmt: CodebookFormat, mode: Rounding, carrier: Carrier) -> Array:
    """`v` rounded under a deterministic mode; NaN stays NaN, numbers beyond the ends saturate."""
    table = require_levels(fmt, mode, carrier)
    floor, rest, sticky = _floor_and_rest(v)
    columns = (pick_level(floor, table.floors + 1, column) for column in table.columns)
    lower, upper, next_floor, next_rest, is_strict, *levels_beyond = columns
    next_rest = lax.bitcast_convert_type(next_rest, rest.dtype)
    exceeds = (rest > next_rest) | ((rest == next_rest) & sticky)
    reaches = (floor == next_floor) & (exceeds | ((rest == next_rest) & (is_strict == 0)))
    result = bit_ops.lax_where(reaches, upper, lower)
    if levels_beyond:
        result = bit_ops.lax_where((floor == next_floor) & exceeds, levels_beyond[0], result)
    is_nan = v.magnitude > carrier.inf
    sign = bit_ops.lax_where(result < 0, jnp.full_like(result, carrier.sign_bit), 0)
    return bit_ops.join_sign(
        bit_ops.lax_where(is_nan, v.sign, sign), bit_ops.lax_where(is_nan, v.magnitude, jnp.abs(result)), carrier
    )


def _floor_and_rest(v: ExactResult) -> tuple[Array, Array, Array]:
    """F, R, and whether further bits follow."""
    rounds_down = (v.sign != 0) & v.inexact
    floor = bit_ops.ordered_integers(v.sign, v.magnitude) - rounds_down.astype(v.magnitude.dtype)
    # 1 - rest, rounded down if further bits follow.
    complement = ~v.rest + (~v.sticky).astype(v.rest.dtype)
    return floor, bit_ops.lax_where(rounds_down, complement, v.rest), v.sticky


@dataclass(frozen=True)
class _ThresholdColumns:
    """The F of the thresholds, increasing; and columns with an entry for each threshold and one more."""

    floors: np.ndarray
    #: The level below, the level above, F, R, and 1 if a number equal to the threshold has not reached it. Under
    #: `Rounding.ODD` also the level beyond: it differs from the level above if only numbers equal to the threshold take
    #: that level.
    columns: tuple[np.ndarray, ...]


@lru_cache(maxsize=64)
def require_levels(fmt: CodebookFormat, mode: Rounding, carrier: Carrier) -> _ThresholdColumns:
    """The table of thresholds and levels.

    Raises:
        ValueError: if a threshold has too many bits.
    """
    thresholds = rounding_thresholds(mode, fmt.levels)
    level_bits = carrier.ordered_bits(fmt.levels).tolist()
    if mode is Rounding.ODD:
        return _columns_of_odd_rounding(level_bits, thresholds, carrier)
    work, width = carrier.work, carrier.work_width
    wide = replace(carrier, fraction=carrier.fraction + width)  # its bits are those of F, and below them R
    parts = [(value < 0, *wide.toward_zero(value)) for value, _ in thresholds]
    if not all(exact for *_, exact in parts):
        raise ValueError(
            f"rounding={mode.value!r}: {carrier.name} cannot tell quotients between the levels of {fmt} apart"
        )
    both = [-bits if negative else bits for negative, bits, _ in parts]
    floors = [bits >> width for bits in both]  # all different: a level lies between two
    columns = (
        level_bits,
        [*level_bits[1:], level_bits[-1]],
        [*floors, np.iinfo(work).max],
        [*np.array([bits % (1 << width) for bits in both], f"uint{width}").view(work), 0],
        [*(int(strict) for _, strict in thresholds), 0],
    )
    return _ThresholdColumns(np.array(floors, work), tuple(np.array(column, work) for column in columns))


def _columns_of_odd_rounding(
    level_bits: list[int], thresholds: list[tuple[Fraction, bool]], carrier: Carrier
) -> _ThresholdColumns:
    """Only a number equal to a level of even index takes it: its two thresholds are one, and the next level follows.

    The thresholds are levels, so they are values of the carrier, and differ in F.
    """
    rows: list[tuple[int, ...]] = []
    for i, (value, strict) in enumerate(thresholds):
        floor = carrier.ceil_bits(value)
        if strict and rows and rows[-1][2] == floor:  # the previous threshold is the same level
            rows[-1] = (*rows[-1][:5], level_bits[i + 1])
        else:
            rows.append((level_bits[i], level_bits[i + 1], floor, 0, int(strict), level_bits[i + 1]))
    last = rows[-1][5] if rows else level_bits[0]
    rows.append((last, last, np.iinfo(carrier.work).max, 0, 0, last))
    columns = np.array(rows, carrier.work).T
    return _ThresholdColumns(columns[2][:-1], tuple(columns))
