"""Which of many thresholds a number has reached: by its leading bits, and a comparison with one of them.

Numbers are put into bins by their sign and the leading bits of their magnitude, so narrow that a bin has at most one
threshold. A table says how many thresholds lie below each bin; of those the next one is left to be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

#: The most bins: of bytes, they fit into a quarter of a CPU's nearest cache.
_MOST = 8192


@dataclass(frozen=True, eq=False)
class Bins:
    """Bins of integers by sign and magnitude, each with at most one threshold in it or next to it.

    Args:
        shift: bits of a magnitude that do not count.
        first: what is left of the largest magnitudes in the first bin, which takes all that are smaller, too.
        last: the same of the last bin, which takes all that are larger.
        negative: whether numbers below zero have bins of their own; else they are in the first one.
        below: for each bin the index of the threshold to compare with: all before that are reached, none behind it.
    """

    shift: int
    first: int
    last: int
    negative: bool
    below: np.ndarray

    def place(self, below: Array, magnitude: Array) -> Array:
        """The bin of each number, int32.

        Args:
            below: where numbers are below zero.
            magnitude: integers.
        """
        within = jnp.clip(magnitude, self.first << self.shift, self.last << self.shift) >> self.shift
        least, most = -self.first, self.last - self.first + 1
        if self.negative:
            return (within + jnp.where(below, most + least, least)).astype(jnp.int32)
        return jnp.where(below, 0, within + least).astype(jnp.int32)


def make_bins(thresholds: Sequence[int], margin: int = 0) -> Bins | None:
    """The fewest bins for thresholds; None where that takes too many, or two thresholds are too close.

    Args:
        thresholds: increasing integers, which order as numbers do; at least one.
        margin: how far a number may lie from the one that it stands for; bins count as so much larger.
    """
    width = max(map(abs, thresholds)).bit_length()
    found = (_bins(np.array(thresholds, object), shift, margin) for shift in range(width, -1, -1))
    return next((bins for bins in found if bins is not None), None)


def _bins(thresholds: np.ndarray, shift: int, margin: int) -> Bins | None:
    # What lies next to zero stays in the first bins, whatever its exponent.
    sizes = [abs(value) for value in thresholds if abs(value) > 1 + margin]
    if not sizes:
        return None
    first, last = max((min(sizes) - margin >> shift) - 1, 0), (max(sizes) + margin >> shift) + 1
    negative = bool(thresholds[0] < 0)
    count = last - first + 1
    if count << negative > _MOST:
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


def take(table: Array, index: Array) -> Array:
    """``table[index]`` for indexes within it. Plain indexing knows nothing of explicit sharding."""
    return table.at[index].get(out_sharding=jax.typeof(index).sharding, mode="promise_in_bounds")
