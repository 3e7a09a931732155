"""The number of thresholds that a number has reached, by its leading bits and one comparison.

Numbers are put into bins by their sign and the leading bits of their magnitude. Bins are so narrow that each has at
most one threshold. A table has the number of thresholds below each bin; the number is compared with the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common import bit_ops

Array = jax.Array

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
