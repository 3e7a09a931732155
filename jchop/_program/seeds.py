"""Where the roundings of a program draw: seeds of the whole, of each turn of a loop, and of each shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._core.arithmetic.operations import fold_seeds, words

Array = jax.Array

__all__ = ["Seeds", "varying"]

#: The numbers from here on belong to shards, those below to the equations of a program.
_SHARDS = 1 << 31


@partial(jax.tree_util.register_dataclass, data_fields=["six"], meta_fields=["axes"])
@dataclass(frozen=True)
class Seeds:
    """The six words of `seed_words`, and the axes of a mesh over which a value that varies draws otherwise.

    A value that is the same on every shard must stay so when it is rounded; one that varies has words of its own.
    """

    six: tuple[Array, ...]
    axes: tuple[str, ...] = ()

    def turn(self, number: int, step: Array | int = 0) -> Seeds:
        """Those of turn `step` of the program that has the number."""
        return Seeds(fold_seeds(self.six, number, step), self.axes)

    def within(self, axes: tuple[str, ...], typed: bool) -> Seeds:
        """Those of a shard; if nothing says what varies over the axes (`typed`), everything draws otherwise."""
        if typed:
            return Seeds(self.six, (*self.axes, *axes))
        return self.turn(0, lax.axis_index(axes))

    def of(self, *like: Any) -> tuple[Array, ...]:
        """The six words for what varies as these arrays do."""
        found = {axis for x in like for axis in varying(x)}
        axes = tuple(axis for axis in self.axes if axis in found)
        return fold_seeds(self.six, _SHARDS, lax.axis_index(axes)) if axes else self.six

    def words(self, like: Any, number: int) -> Array:
        """A word for each element of an array, or of what has its shape and type."""
        array = like if isinstance(like, Array) else jnp.zeros(like.shape, like.dtype)
        return words(self.of(like), array, number)


def varying(x: Any) -> Sequence[str]:
    """The axes of a mesh over which a value is known to vary; JAX has moved where it says so."""
    kind = jax.typeof(x) if isinstance(x, Array) else x
    return tuple(getattr(getattr(kind, "mat", kind), "varying", None) or getattr(kind, "vma", ()))
