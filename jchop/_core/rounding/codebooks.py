"""Rounding to a table of levels, by comparisons of ordered integers, or by bins.

Numbers are put into bins by their sign and the leading bits of their magnitude. Bins are so narrow that each has at
most one threshold. A table has the number of thresholds below each bin; the number is compared with the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop._core.rounding.modes import RandomBits, rounding_thresholds, take_random_bits
from jchop._spec.spec import Spec
from jchop.formats import CodebookFormat, ElementFormat
from jchop.formats.rounding import Rounding

Array = jax.Array


# == bins ==============================================================================================================


#: The most bins: as bytes, they fit into a quarter of a CPU's first cache.
_MOST_BINS = 8192


@dataclass(frozen=True, eq=False)
class Bins:
    """Bins of integers by sign and magnitude; each has at most one threshold in it or next to it.

    Args:
        shift: the number of low bits of a magnitude that are ignored.
        first: the leading bits of the largest magnitudes in the first bin, which also takes all smaller ones.
        last: the leading bits of the smallest magnitudes in the last bin, which also takes all larger ones.
        negative: whether numbers below zero have separate bins; else they are in the first bin.
        below: for each bin, the index of the threshold to compare with: earlier ones are reached, later ones are not.
    """

    shift: int
    first: int
    last: int
    negative: bool
    below: np.ndarray

    def place(self, below: Array, magnitude: Array) -> Array:
        """The bin of each number, int32.

        Args:
            below: whether each number is below zero.
            magnitude: integers.
        """
        within = bit_ops.lax_clip(magnitude, self.first << self.shift, self.last << self.shift) >> self.shift
        least, most = -self.first, self.last - self.first + 1
        if self.negative:
            return (within + bit_ops.lax_where(below, most + least, least)).astype(jnp.int32)
        return bit_ops.lax_where(below, 0, within + least).astype(jnp.int32)


def make_bins(thresholds: Sequence[int], margin: int = 0) -> Bins | None:
    """The fewest bins for thresholds; None if there are too many, or two thresholds are too close.

    Args:
        thresholds: increasing integers, in the order of the numbers; at least one.
        margin: the largest error of a binned number; bins count as larger by it.
    """
    width = max(map(abs, thresholds)).bit_length()
    candidates = (_bins_of_shift(np.array(thresholds, object), shift, margin) for shift in range(width, -1, -1))
    return next((bins for bins in candidates if bins is not None), None)


def _bins_of_shift(thresholds: np.ndarray, shift: int, margin: int) -> Bins | None:
    # Thresholds next to zero stay in the first bins, for every exponent.
    sizes = [abs(value) for value in thresholds if abs(value) > 1 + margin]
    if not sizes:
        return None
    first, last = max(((min(sizes) - margin) >> shift) - 1, 0), ((max(sizes) + margin) >> shift) + 1
    negative = bool(thresholds[0] < 0)
    count = last - first + 1
    if count << negative > _MOST_BINS:
        return None
    top = 1 << shift
    starts = np.array([0, *((first + i) * top for i in range(1, count))], object)
    ends = np.array([*((first + i + 1) * top - 1 for i in range(count - 1)), max(sizes) + 2 * top], object)
    low, high = starts - margin, ends + margin
    if negative:
        low, high = np.concatenate([low, -ends - margin]), np.concatenate([high, margin - starts])
    else:
        low[0] = min(low[0], thresholds[0] - 1)
    below = np.searchsorted(thresholds, low, side="left")
    if (np.searchsorted(thresholds, high, side="right") - below > 1).any():
        return None
    below = np.minimum(below, len(thresholds) - 1)
    return Bins(shift, first, last, negative, below.astype(np.uint8 if len(thresholds) <= 256 else np.uint16))


def take_in_bounds(table: Array, index: Array) -> Array:
    """``table[index]`` for valid indexes. Plain indexing does not support explicit sharding."""
    return table.at[index].get(
        out_sharding=jax.typeof(index).sharding, mode="promise_in_bounds", wrap_negative_indices=False
    )


# == levels ============================================================================================================


#: The most levels for which every threshold is compared, as kernels can; more levels use tables.
MOST_COMPARISONS = 32


def refuse_table(fmt: ElementFormat) -> str | None:
    """The reason why kernels do not take a format whose levels are gathered from a table; None for another."""
    if isinstance(fmt, CodebookFormat) and len(fmt.levels) > MOST_COMPARISONS:
        return f"{fmt} has more than {MOST_COMPARISONS} levels, which are gathered from a table"
    return None


def round_codebook(sign: Array, magnitude: Array, word: Array | None, spec: Spec, carrier: Carrier) -> Array:
    """Values rounded to the levels of `spec.format`; NaN stays NaN, numbers beyond the ends saturate."""
    table = _level_table(spec.format, carrier)  # type: ignore[arg-type]
    value = bit_ops.ordered_integers(sign, magnitude)
    if spec.rounding in table.thresholds:
        result = pick_level(value, table.thresholds[spec.rounding], table.levels)
    else:
        result = _draw_level(value, word, spec, table, carrier)
    is_nan = magnitude > carrier.inf
    sign = bit_ops.lax_where(is_nan, sign, bit_ops.lax_where(result < 0, carrier.sign_bit, 0).astype(sign.dtype))
    return bit_ops.join_sign(sign, bit_ops.lax_where(is_nan, magnitude, jnp.abs(result)), carrier)


@dataclass(frozen=True)
class _LevelTable:
    levels: np.ndarray  # as ordered integers of the carrier
    thresholds: dict[Rounding, np.ndarray]  # by mode: thresholds[i] is the first value of level i + 1


@lru_cache(maxsize=64)
def _level_table(fmt: CodebookFormat, carrier: Carrier) -> _LevelTable:
    def starts(mode: Rounding) -> np.ndarray:
        points = rounding_thresholds(mode, fmt.levels)
        # The first number above a point, or from it on.
        bits = [1 - carrier.ceil_bits(-point) if strict else carrier.ceil_bits(point) for point, strict in points]
        return np.array(bits, carrier.work)

    return _LevelTable(
        carrier.ordered_bits(fmt.levels), {mode: starts(mode) for mode in Rounding if not mode.stochastic}
    )


def pick_level(value: Array, thresholds: np.ndarray, choices: np.ndarray) -> Array:
    """``choices[k]`` for values that have reached k of the thresholds."""
    if len(choices) > MOST_COMPARISONS:
        return _search_level(value, thresholds, choices)
    result = jnp.full_like(value, int(choices[0]))
    for least, choice in zip(thresholds, choices[1:], strict=True):
        result = bit_ops.lax_where(value >= int(least), jnp.full_like(value, int(choice)), result)
    return result


def pick_code(codes: Array, table: Sequence[int], bits: int) -> Array:
    """``table[code]`` for codes of a few bits, by a selection for each pair; beyond the table its last number."""
    full = [*table, *[table[-1]] * (2**bits - len(table))][: 2**bits]

    def pick(part: list[int], bit: int) -> Array | int:
        if len(set(part)) == 1:
            return part[0]
        low, high = pick(part[: len(part) // 2], bit - 1), pick(part[len(part) // 2 :], bit - 1)
        return bit_ops.lax_where(
            is_set[bit], *(jnp.full_like(codes, v) if isinstance(v, int) else v for v in (high, low))
        )

    is_set = [(codes & (1 << bit)) != 0 for bit in range(bits)]
    choice = pick(full, bits - 1)
    return jnp.full_like(codes, choice) if isinstance(choice, int) else choice


def _search_level(value: Array, thresholds: np.ndarray, choices: np.ndarray) -> Array:
    """`pick_level` by bins, or by bisection if the thresholds cannot be binned."""
    bins = _bins_of_thresholds(tuple(thresholds.tolist()))
    if bins is None:
        return _bisect_level(value, thresholds, choices)
    index = take_in_bounds(jnp.asarray(bins.below), bins.place(value < 0, jnp.abs(value))).astype(jnp.int32)
    reaches = value >= take_in_bounds(jnp.asarray(thresholds), index)
    return take_in_bounds(jnp.asarray(choices), index + reaches)


@lru_cache(maxsize=256)
def _bins_of_thresholds(thresholds: tuple[int, ...]) -> Bins | None:
    return make_bins(thresholds)


def _bisect_level(value: Array, thresholds: np.ndarray, choices: np.ndarray) -> Array:
    """`pick_level` by bisection.

    XLA takes minutes to compile two consecutive searches that it fuses. The barrier prevents the fusion.
    """
    value = lax.optimization_barrier(value)
    steps = len(thresholds).bit_length()
    padding = np.full((1 << steps) - 1 - len(thresholds), np.iinfo(thresholds.dtype).max, thresholds.dtype)
    table = jnp.asarray(np.concatenate([thresholds, padding]))
    count = jnp.zeros_like(value)
    for step in reversed(range(steps)):
        reaches = value >= take_in_bounds(table, count + ((1 << step) - 1))
        count = bit_ops.lax_where(reaches, count + (1 << step), count)
    return take_in_bounds(jnp.asarray(choices), count)


def _draw_level(value: Array, word: Array | None, spec: Spec, table: _LevelTable, carrier: Carrier) -> Array:
    """The stochastic modes: the neighbour of larger magnitude if the draw selects it, else the other one."""
    starts = table.thresholds[Rounding.DOWN]
    below = pick_level(value, starts, table.levels)
    above = pick_level(value, starts, np.append(table.levels[1:], table.levels[-1]))
    inward = jnp.abs(below) < jnp.abs(above)
    near, far = bit_ops.lax_where(inward, below, above), bit_ops.lax_where(inward, above, below)
    random = take_random_bits(word, spec, carrier)
    assert random is not None
    if spec.rounding is Rounding.STOCHASTIC_EQUAL:
        away = bit_ops.top_bit(random.word)
    else:
        away = _draws_by_distance(value, near, far, random, spec.rounding, carrier)
    exact = (value == below) | (value < int(table.levels[0]))
    return bit_ops.lax_where(exact, below, bit_ops.lax_where(away, far, near))


def _draws_by_distance(
    value: Array, near: Array, far: Array, random: RandomBits, mode: Rounding, carrier: Carrier
) -> Array:
    """P3109's nu >= 1 - R 2^-N for nu = (x - near) / (far - near), in the carrier's arithmetic.

    The spacing of levels is arbitrary, so nu is not an integer number of random bits. The probability is right to
    within the carrier's own resolution, not exact as on a grid.
    """
    wide = "float64" if carrier.width == 64 else "float32"

    def number(ordered_bits: Array) -> Array:
        sign = bit_ops.lax_where(ordered_bits < 0, carrier.sign_bit, 0).astype(ordered_bits.dtype)
        return bit_ops.join_sign(sign, jnp.abs(ordered_bits), carrier).astype(wide)

    unit = 1 << (random.width - random.bits)
    to_nearest = mode is Rounding.STOCHASTIC_C  # rounds nu 2^N to the nearest integer first, so half a unit earlier
    word = random.word | random.word.dtype.type(unit >> 1) if to_nearest else random.word
    distance, share = jnp.abs(number(far) - number(value)), word.astype(wide) * 2.0**-random.width
    limit = jnp.abs(number(far) - number(near)) * share
    if not to_nearest:
        return distance <= limit
    even = random.word >> (random.width - random.bits) & 1 == 0  # decides a tie
    return (distance < limit) | ((distance == limit) & even)
