"""The position of an array in the random stream, and the words of its elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jchop._core.rounding.random_bits import SEEDS, stream_words

Array = jax.Array


@dataclass(frozen=True)
class StreamOffset:
    """The static part of an offset, with None for each traced start."""

    static_starts: tuple[int | None, ...] = (0,)
    whole: tuple[int, ...] | None = None  # the shape of the whole array; None for a contiguous chunk
    base: int = 0  # a known index added to all
    shape: tuple[int, ...] | None = None  # the shape in which the words are drawn; None for the array's shape

    def offset(self, starts: Sequence[Array]) -> Any:
        """The argument `offset` of `stream_words`, with the traced starts filled in."""
        rest = iter(starts)
        each = tuple(next(rest) if start is None else start for start in self.static_starts)
        return each[0] if self.whole is None else (each, self.whole)


STREAM_START = StreamOffset()


def draw_words(
    seeds: Sequence[Array], shape: tuple[int, ...], place: StreamOffset, starts: Sequence[Array], width: int
) -> Array:
    """A word of `width` bits, 32 or 64, for each element of an array of `shape`."""
    words = stream_words(seeds, place.shape or shape, place.offset(starts), width, place.base)
    if width == 32:
        return words.reshape(shape)
    high, low = (half.astype(jnp.uint64) for half in words)
    return ((high << 32) | low).reshape(shape)


def words_like(x: Array, seeds_and_starts: Sequence[Array], place: StreamOffset) -> Array:
    """A word for each element of `x`, of 64 bits for float64.

    Args:
        x: the array to round.
        seeds_and_starts: the words of `seed_words`, then the traced starts of `place`.
        place: the position of `x` in the random stream.
    """
    word = draw_words(
        seeds_and_starts[:SEEDS], x.shape, place, seeds_and_starts[SEEDS:], 64 if x.dtype.itemsize == 8 else 32
    )
    # ORed with zeros like x, the words have the sharding of x in their type, which explicit meshes need.
    return word | jnp.zeros_like(x, word.dtype)
