"""Rounding to a table of levels, by comparisons of ordered integers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop import _bits
from jchop._bits import Carrier
from jchop._core.rounding.bins import Bins, make_bins, take
from jchop._core.rounding.modes import Draw, draw, threshold
from jchop.formats import CodebookFormat, ElementFormat
from jchop.rounding import Rounding
from jchop.spec import Spec

Array = jax.Array

#: The most levels for which every threshold is compared, as kernels can; more levels use tables.
COMPARE_ALL = 32


def refuse_table(fmt: ElementFormat) -> str | None:
    """The reason why kernels do not take a format whose levels are gathered from a table; None for another."""
    if isinstance(fmt, CodebookFormat) and len(fmt.levels) > COMPARE_ALL:
        return f"{fmt} has more than {COMPARE_ALL} levels, which are gathered from a table"
    return None


def round_codebook(sign: Array, magnitude: Array, word: Array | None, spec: Spec, carrier: Carrier) -> Array:
    """Values rounded to the levels of `spec.format`; NaN stays NaN, numbers beyond the ends saturate."""
    table = _table(spec.format, carrier)  # type: ignore[arg-type]
    value = _bits.ordered(sign, magnitude)
    if spec.rounding in table.thresholds:
        result = pick_level(value, table.thresholds[spec.rounding], table.levels)
    else:
        result = _draw_between(value, word, spec, table, carrier)
    is_nan = magnitude > carrier.inf
    sign = _bits.where(is_nan, sign, _bits.where(result < 0, carrier.sign_bit, 0).astype(sign.dtype))
    return _bits.join(sign, _bits.where(is_nan, magnitude, jnp.abs(result)), carrier)


@dataclass(frozen=True)
class _Table:
    levels: np.ndarray  # as ordered integers of the carrier
    thresholds: dict[Rounding, np.ndarray]  # by mode: thresholds[i] is the first value of level i + 1


@lru_cache(maxsize=64)
def _table(fmt: CodebookFormat, carrier: Carrier) -> _Table:
    levels = [Fraction(level) for level in fmt.levels]
    pairs = list(itertools.pairwise(levels))

    def to_array(values: list[int]) -> np.ndarray:
        return np.array(values, carrier.work)

    def at_least(value: Fraction) -> int:  # first ordered integer whose value is >= value
        return carrier.ceil_bits(value)

    def above(value: Fraction) -> int:  # first ordered integer whose value is > value
        return -carrier.ceil_bits(-value) + 1

    def first(mode: Rounding) -> np.ndarray:
        points = (threshold(mode, index, *pair) for index, pair in enumerate(pairs))
        return to_array([above(point) if strict else at_least(point) for point, strict in points])

    return _Table(
        levels=to_array([at_least(level) for level in levels]),
        thresholds={mode: first(mode) for mode in Rounding if not mode.stochastic},
    )


def pick_level(value: Array, thresholds: np.ndarray, choices: np.ndarray) -> Array:
    """``choices[k]`` for values that have reached k of the thresholds."""
    if len(choices) > COMPARE_ALL:
        return _search(value, thresholds, choices)
    result = jnp.full_like(value, int(choices[0]))
    for least, choice in zip(thresholds, choices[1:], strict=True):
        result = _bits.where(value >= int(least), jnp.full_like(value, int(choice)), result)
    return result


def pick_code(codes: Array, table: Sequence[int], bits: int) -> Array:
    """``table[code]`` for codes of a few bits, by a selection for each pair; beyond the table its last number."""
    full = [*table, *[table[-1]] * (2**bits - len(table))][: 2**bits]

    def pick(part: list[int], bit: int) -> Array | int:
        if len(set(part)) == 1:
            return part[0]
        low, high = pick(part[: len(part) // 2], bit - 1), pick(part[len(part) // 2 :], bit - 1)
        return _bits.where(is_set[bit], *(jnp.full_like(codes, v) if isinstance(v, int) else v for v in (high, low)))

    is_set = [(codes & (1 << bit)) != 0 for bit in range(bits)]
    choice = pick(full, bits - 1)
    return jnp.full_like(codes, choice) if isinstance(choice, int) else choice


def _search(value: Array, thresholds: np.ndarray, choices: np.ndarray) -> Array:
    """`pick_level` by bins, or by bisection if the thresholds cannot be binned."""
    bins = _bins_of(tuple(thresholds.tolist()))
    if bins is None:
        return _bisect(value, thresholds, choices)
    index = take(jnp.asarray(bins.below), bins.place(value < 0, jnp.abs(value))).astype(jnp.int32)
    reaches = value >= take(jnp.asarray(thresholds), index)
    return take(jnp.asarray(choices), index + reaches)


@lru_cache(maxsize=256)
def _bins_of(thresholds: tuple[int, ...]) -> Bins | None:
    return make_bins(thresholds)


def _bisect(value: Array, thresholds: np.ndarray, choices: np.ndarray) -> Array:
    """`pick_level` by bisection.

    XLA takes minutes to compile two consecutive searches that it fuses. The barrier prevents the fusion.
    """
    value = lax.optimization_barrier(value)
    steps = len(thresholds).bit_length()
    padding = np.full((1 << steps) - 1 - len(thresholds), np.iinfo(thresholds.dtype).max, thresholds.dtype)
    table = jnp.asarray(np.concatenate([thresholds, padding]))
    count = jnp.zeros_like(value)
    for step in reversed(range(steps)):
        reaches = value >= take(table, count + ((1 << step) - 1))
        count = _bits.where(reaches, count + (1 << step), count)
    return take(jnp.asarray(choices), count)


def _draw_between(value: Array, word: Array | None, spec: Spec, table: _Table, carrier: Carrier) -> Array:
    """The stochastic modes: the neighbour of larger magnitude if the draw selects it, else the other one."""
    starts = table.thresholds[Rounding.DOWN]
    below = pick_level(value, starts, table.levels)
    above = pick_level(value, starts, np.append(table.levels[1:], table.levels[-1]))
    inward = jnp.abs(below) < jnp.abs(above)
    near, far = _bits.where(inward, below, above), _bits.where(inward, above, below)
    random = draw(word, spec, carrier)
    assert random is not None
    if spec.rounding is Rounding.STOCHASTIC_EQUAL:
        away = _bits.top_bit(random.word)
    else:
        away = _proportional(value, near, far, random, spec.rounding, carrier)
    exact = (value == below) | (value < int(table.levels[0]))
    return _bits.where(exact, below, _bits.where(away, far, near))


def _proportional(value: Array, near: Array, far: Array, random: Draw, mode: Rounding, carrier: Carrier) -> Array:
    """P3109's nu >= 1 - R 2^-N for nu = (x - near) / (far - near), in the carrier's arithmetic.

    The spacing of levels is arbitrary, so nu is not an integer number of random bits. The probability is right to
    within the carrier's own resolution, not exact as on a grid.
    """
    wide = "float64" if carrier.width == 64 else "float32"

    def number(ordered_bits: Array) -> Array:
        sign = _bits.where(ordered_bits < 0, carrier.sign_bit, 0).astype(ordered_bits.dtype)
        return _bits.join(sign, jnp.abs(ordered_bits), carrier).astype(wide)

    unit = 1 << (random.width - random.bits)
    to_nearest = mode is Rounding.STOCHASTIC_C  # rounds nu 2^N to the nearest integer first, so half a unit earlier
    word = random.word | random.word.dtype.type(unit >> 1) if to_nearest else random.word
    distance, share = jnp.abs(number(far) - number(value)), word.astype(wide) * 2.0**-random.width
    limit = jnp.abs(number(far) - number(near)) * share
    if not to_nearest:
        return distance <= limit
    even = random.word >> (random.width - random.bits) & 1 == 0  # decides a tie
    return (distance < limit) | ((distance == limit) & even)
