"""Groups of elements: views of an array in which some axes run through each group, and n of every m numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import CARRIERS, gather_cut_axes, lax_where, split_sign
from jchop._core.rounding.codes import join_groups, split_groups
from jchop.formats import ScaledFormat
from jchop.formats.scaled.scaled import sparse_length


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
        """Whether each axis is divided into several groups of more than one number."""
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
        for before, at in enumerate(self._within, 1):
            size = self.sizes[at - before]
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


# == n of every m numbers ==============================================================================================
# Groups are m consecutive numbers of an axis; the last one may be shorter. An array of the kept numbers has the
# numbers of each group in their order, so its axis has n numbers for each group.


def sparse_mask(x: Array, fmt: ScaledFormat) -> Array:
    """Which numbers of an array a format with `sparse` keeps: the numbers of largest magnitude.

    Magnitudes are compared as integers, so subnormal numbers count on every backend. All NaN are equal.
    """
    assert fmt.sparse is not None
    axis = fmt.axis_of_sparse % x.ndim
    magnitude = jnp.minimum(split_sign(x, carrier := CARRIERS[x.dtype.name])[1], carrier.inf + 1)
    return jnp.moveaxis(largest_mask((jnp.moveaxis(magnitude, axis, 0),), *fmt.sparse), 0, axis)


def drop_outside_mask(x: Array, mask: Array, fmt: ScaledFormat) -> Array:
    """An array whose dropped numbers do not count when scales are chosen.

    They become NaN, or 0 where the ends of a group decide, since a NaN could make its whole group NaN (`nan_block`).
    """
    return lax_where(mask, x, jnp.asarray(0 if fmt.scale_rule.by_ends else jnp.nan, x.dtype))


def largest_mask(keys: tuple[Array, ...], n: int, m: int) -> Array:
    """The n largest of every m numbers along the first axis; the last group may be shorter.

    Args:
        keys: the numbers, and others in the same shape that decide between equal ones; none is negative. Last decides
            the place.
        n: how many.
        m: of how many.
    """
    count = len(keys[0])
    groups = [split_groups(key, m, 0) for key in keys]
    place = np.arange(m).reshape(m, *(1,) * (keys[0].ndim - 1))
    before = jnp.asarray(place[None, None] < place[None, :, None])  # (1, own, other, ...)
    for key in reversed(groups):
        own, other = key[:, :, None], key[:, None]
        before = (other > own) | ((other == own) & before)
    return join_groups(before.sum(2) < n, 0, count)


def gather_sparse(entries: Array, mask: Array, sparse: tuple[int, int], axis: int) -> Array:
    """The kept ones of an array of integers.

    Args:
        entries: the array.
        mask: which are kept, n of every m.
        sparse: n and m.
        axis: of the groups, from 0.
    """
    (n, m), length = sparse, entries.shape[axis]
    which, own = split_groups(mask, m, axis), split_groups(entries, m, axis)
    rank = lax_where(which, _ranks_in_groups(which, axis + 1), n)
    number = np.arange(n).reshape(n, *(1,) * (entries.ndim - axis))
    match = jnp.expand_dims(rank, axis + 1) == number  # (..., groups, n, m, ...)
    result = lax_where(match, jnp.expand_dims(own, axis + 1), 0).sum(axis + 2, dtype=entries.dtype)
    return join_groups(result, axis, sparse_length(sparse, length))


def scatter_sparse(values: Array, mask: Array, sparse: tuple[int, int], axis: int) -> Array:
    """The inverse of `gather_sparse`, in the shape of `mask`: a dropped entry is one of the kept ones of its group.

    Differentiable in `values`.
    """
    (n, m), length = sparse, mask.shape[axis]
    which, own = split_groups(mask, m, axis), split_groups(values, n, axis)
    rank = _ranks_in_groups(which, axis + 1)
    each = [lax.slice_in_dim(own, i, i + 1, axis=axis + 1) for i in range(n)]
    result = reduce(lambda result, i: lax_where(rank >= i, each[i], result), range(1, n), each[0])
    return join_groups(jnp.broadcast_to(result, rank.shape), axis, length)


def _ranks_in_groups(which: Array, axis: int) -> Array:
    """How many before each one are set along an axis."""
    m = which.shape[axis]
    place = np.arange(m)
    before = (place[None] < place[:, None]).reshape(m, m, *(1,) * (which.ndim - axis - 1))
    return (jnp.expand_dims(which, axis) & before).sum(axis + 1, dtype=jnp.int32)
