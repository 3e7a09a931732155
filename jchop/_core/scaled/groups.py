"""Groups of elements that share a scale: views of an array in which some axes run through each group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.bit_ops import gather_cut_axes

Array = jax.Array


@dataclass(frozen=True)
class Groups:
    """The groups of an array, by their size along each axis: 1, a block's size, or the whole length.

    An axis of blocks is split in two: blocks, and their elements. No other axis changes, so an array that is sharded
    between groups is not moved.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property
    def _split(self) -> tuple[bool, ...]:
        return tuple(size not in (1, length) for length, size in zip(self.shape, self.sizes, strict=True))

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes of a view that run through a group."""
        axes, at = [], 0
        for length, size, split in zip(self.shape, self.sizes, self._split, strict=True):
            at += split
            if split or (size == length and size not in (0, 1)):
                axes.append(at)
            at += 1
        return tuple(axes)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of groups along each axis, which is the shape of the scales."""
        return tuple(-(-length // size) for length, size in zip(self.shape, self.sizes, strict=True))

    @cached_property
    def _within(self) -> tuple[int, ...]:
        """The axes of a view that run through the blocks of an axis that was split."""
        before = 0
        within = []
        for axis, split in enumerate(self._split):
            before += split
            if split:
                within.append(axis + before)
        return tuple(within)

    def view(self, x: Array, fill: float = 0) -> Array:
        """An array with its axes of blocks split; the last block of each is padded."""
        x = gather_cut_axes(x, [size if split else 1 for size, split in zip(self.sizes, self._split, strict=True)])
        missing = [
            -length % size if split else 0
            for length, size, split in zip(self.shape, self.sizes, self._split, strict=True)
        ]
        if any(missing):
            x = jnp.pad(x, [(0, more) for more in missing], constant_values=fill)
        # One axis at a time: explicit shardings support such reshapes.
        for at in self._within:
            size = self.sizes[self._axis_of(at)]
            x = x.reshape(*x.shape[: at - 1], x.shape[at - 1] // size, size, *x.shape[at:])
        return x

    def back(self, x: Array) -> Array:
        """The inverse of `view`."""
        for at in reversed(self._within):
            x = x.reshape(*x.shape[: at - 1], x.shape[at - 1] * x.shape[at], *x.shape[at + 1 :])
        return x if x.shape == self.shape else lax.slice(x, (0,) * x.ndim, self.shape)

    def byte_groups(self, bits: int) -> Groups | None:
        """The groups of the bytes of packed codes of `bits` bits; None if bytes cross groups.

        If they are packed and unpacked on a view, codes stay beside the numbers of their group.
        """
        if not self.shape or not self._split[-1]:
            return None
        size, length = self.sizes[-1] * bits, self.shape[-1] * bits
        whole = size % 8 == 0 and size > 8 and self.shape[-1] % self.sizes[-1] == 0
        return Groups((*self.shape[:-1], length // 8), (*self.sizes[:-1], size // 8)) if whole else None

    def squeeze(self, x: Array) -> Array:
        """One number for each group in the stored shape, from a view with length 1 along the axes of a group."""
        return lax.squeeze(x, self._within)

    def expand(self, x: Array) -> Array:
        """The inverse of `squeeze`."""
        return lax.expand_dims(x, self._within)

    def _axis_of(self, at: int) -> int:
        """The axis of the array that was split into this axis of the view."""
        return at - 1 - self._within.index(at)
