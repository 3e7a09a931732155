"""The seeds of the roundings of a program: for the program, for each turn of a loop, and for each shard."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from jchop._common.bit_ops import varying_axes
from jchop._common.settings import always_jit
from jchop._core.matmul.operations import fold_seeds
from jchop._core.rounding.random_bits import flat_index, random_words
from jchop._core.xla.cpu import compute_once, hide_constant

#: The first number for shards; smaller numbers belong to the equations of a program.
_FIRST_SHARD_NUMBER = 1 << 31


@partial(jax.tree_util.register_dataclass, data_fields=["six", "shift"], meta_fields=["axes"])
@dataclass(frozen=True)
class Seeds:
    """The six words of `seed_words`, and axes of a mesh. Values that vary over these axes draw different words.

    A value that is the same on every shard must have the same rounded value there. A value that varies draws different
    words on each shard. If `shift` is not None, the numbers of all draws are larger by it, modulo 2^32. So a loop over
    equal steps has the steps of one turn.
    """

    six: tuple[Array, ...]
    axes: tuple[str, ...] = ()
    shift: Array | None = None

    def _at(self, number: Array | int) -> Any:
        """The number of a draw."""
        return _as_uint32_word(number) if self.shift is None else _as_uint32_word(number) + self.shift

    def turn(self, number: Array | int, step: Array | int = 0) -> Seeds:
        """The seeds of turn `step` of the program with the number."""
        return Seeds(_fold_seed_words(self.six, self._at(number), _as_uint32_word(step)), self.axes)

    def within(self, axes: tuple[str, ...], check_vma: bool) -> Seeds:
        """The seeds of a shard. If types do not show variation (`check_vma` is False), all values draw by shard."""
        if check_vma:
            return replace(self, axes=(*self.axes, *axes))
        return self.turn(0, lax.axis_index(axes))

    def of(self, *like: Any) -> tuple[Array, ...]:
        """The six words for a value that varies over the same axes as these arrays."""
        value_axes = {axis for x in like for axis in varying_axes(x)}
        axes = tuple(axis for axis in self.axes if axis in value_axes)
        return _fold_seed_words(self.six, np.uint32(_FIRST_SHARD_NUMBER), lax.axis_index(axes)) if axes else self.six

    def like(self, *avals: Any) -> Seeds:
        """The seeds for values of these types; they draw by shard wherever the types say so."""
        return Seeds(self.of(*avals), shift=self.shift) if self.axes else self

    def draw(self, aval: Any, number: int) -> SeedDraw:
        """The draw of a word for each element of an array of this type."""
        place = hide_constant(number) if isinstance(self.six[0], Tracer) else _as_uint32_word(number)
        return SeedDraw(self.of(aval), place, self.shift, aval.shape, aval.dtype)

    def words(self, like: Any, number: int) -> Array:
        """A word for each element of an array, or of an array with the shape and type of `like`."""
        value = like if isinstance(like, Array) else None
        return _draw_words(self.of(like), self._at(number), value, like.shape, like.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["six", "number", "shift"], meta_fields=["shape", "dtype"])
@dataclass(frozen=True)
class SeedDraw:
    """The seeds and the number of a draw: its words are made where they are used, and need not be in memory."""

    six: tuple[Array, ...]
    number: Any
    shift: Array | None
    shape: tuple[int, ...]
    dtype: Any

    def later(self, count: int) -> SeedDraw:
        """The draw whose number is larger by `count`."""
        return replace(self, number=self.number + np.uint32(count))

    def words(self) -> Array:
        """A word for each element."""
        number = self.number if self.shift is None else self.number + self.shift
        return _draw_words(self.six, number, None, self.shape, self.dtype)


def _as_uint32_word(number: Any) -> Any:
    return number if isinstance(number, Array) else np.uint32(number)


#: The number is an operand, so that calls with other numbers share a function of a program, or a compiled program.
@always_jit
def _fold_seed_words(six: tuple[Array, ...], number: Any, step: Any) -> tuple[Array, ...]:
    """The words of `fold_seeds`."""
    return compute_once(fold_seeds(six, number, step))


@partial(always_jit, static_argnums=(3, 4))
def _draw_words(six: tuple[Array, ...], number: Array, like: Array | None, shape: tuple[int, ...], dtype: Any) -> Array:
    """The words of `operations.operation_words`, for an array or for its shape and dtype."""
    low, high = flat_index(shape)
    lanes = range(2 if dtype.itemsize == 8 else 1)
    first, *second = (random_words(six, low, number + jnp.uint32(high), lane) for lane in lanes)
    word = (first.astype(jnp.uint64) << 32) | second[0].astype(jnp.uint64) if second else first
    return word if like is None else word | jnp.zeros_like(like, word.dtype)
