"""Trees of arrays of which small ones are joined; arrays cut into one piece for each rank, and joined again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jchop._common.bit_ops import varying_axes
from jchop._common.checks import as_numpy
from jchop._round.arguments import carrier_of_dtype
from jchop._spec.spec import Spec
from jchop.distributed._messages import fold_in_numbers
from jchop.formats import ScaledFormat
from jchop.storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, AxisGrouping, axis_groupings

Array = jax.Array


def quantizes_vectors(spec: Spec) -> bool:
    """Whether a spec quantizes vectors: each number by itself, in blocks of the last axis, or all under one scale."""
    fmt = spec.scaled
    if fmt is None:
        return True
    formats = [fmt]
    while isinstance(formats[-1].scale, ScaledFormat):
        formats.append(formats[-1].scale)
    return all(fmt_part.channel is None and (fmt_part.group is None or fmt_part.axis == -1) for fmt_part in formats)


def split_axis(x: Array, axis: int, count: int) -> Array:
    """(count, ...): the equal parts of an axis."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :]), axis, 0)


def join_axis(pieces: Array, axis: int) -> Array:
    """The inverse of `split_axis`."""
    split = jnp.moveaxis(pieces, 0, axis)
    return split.reshape(*split.shape[:axis], -1, *split.shape[axis + 2 :])


@dataclass(frozen=True)
class PieceCut:
    """The cut of arrays into one piece for each rank.

    Args:
        count: the number of ranks.
        shape: of the array, or of the vector of several joined arrays.
        axis: the axis of the cut.
        length: of a piece along it.
    """

    count: int
    shape: tuple[int, ...]
    axis: int
    length: int

    def pieces(self, x: Array) -> Array:
        """(count, ...): the pieces; the last number is repeated up to the length of the last pieces."""
        missing = self.count * self.length - self.shape[self.axis]
        if missing:
            x = jnp.pad(x, [(0, missing if axis == self.axis else 0) for axis in range(x.ndim)], mode="edge")
        return split_axis(x, self.axis, self.count)

    def join(self, pieces: Array) -> Array:
        """The array of pieces."""
        return jax.lax.slice_in_dim(join_axis(pieces, self.axis), 0, self.shape[self.axis], axis=self.axis)


def plan_piece_cut(shape: Sequence[int], spec: Spec, count: int) -> PieceCut:
    """The cut of an array between groups.

    A piece of a vector holds whole groups, if it holds more than one. Another array is cut between groups, along the
    axis that is not under one scale and leaves the fewest numbers to be added.

    Raises:
        ValueError: for a format that has an axis that the array lacks, or groups that span every axis.
    """
    shape = tuple(shape)
    groups = (OWN_SCALE,) * len(shape) if spec.scaled is None else axis_groupings(spec.scaled, len(shape))
    if quantizes_vectors(spec):
        axis = len(shape) - 1
        return PieceCut(count, shape, axis, _piece_length(shape[axis], groups[axis], count))
    lengths = {
        axis: _piece_length(n, groups[axis], count, 0) for axis, n in enumerate(shape) if groups[axis] != WHOLE_AXIS
    }
    if not lengths:
        raise ValueError(f"spec={str(spec)!r} has groups that span every axis of x, of shape {shape}, so it cannot be "
                         "cut into pieces; use a format whose groups are blocks or all numbers")  # fmt: skip
    axis = min(lengths, key=lambda axis: lengths[axis] * count / max(shape[axis], 1))
    return PieceCut(count, shape, axis, lengths[axis])


def _piece_length(n: int, grouping: AxisGrouping, count: int, most_cut: int = 1) -> int:
    """The least length of `count` equal pieces of an axis of length n, of whole groups if of more than `most_cut`."""
    length = -(-n // count)
    return -(-length // grouping) * grouping if isinstance(grouping, int) and length > grouping * most_cut else length


def check_whole_groups(spec: Spec, shape: Sequence[int], axis: int, count: int, name: str) -> None:
    """Refuses parts along an axis that cut blocks of it.

    Args:
        spec: of the codes.
        shape: of a part.
        axis: of the cut.
        count: the number of parts.
        name: the argument whose parts they are, with its axis.
    """
    if spec.scaled is None or not shape:
        return
    formats: list[Any] = [spec.scaled]
    block = 1
    while formats:
        fmt = formats.pop()
        grouping = axis_groupings(fmt, len(shape))[axis]
        block *= grouping if isinstance(grouping, int) else 1
        formats += [fmt.scale] if isinstance(fmt.scale, ScaledFormat) else []
    if shape[axis] % block:
        total = shape[axis] * count
        part_counts = [n for n in range(1, math.isqrt(total) * 8 + 2) if total % (n * block) == 0]
        counts_text = ", ".join(map(str, part_counts[:12])) or "none"
        raise ValueError(
            f"{name}: {count} parts of length {shape[axis]} cut groups of {block} of spec={str(spec)!r}; numbers of "
            f"parts that fit a length of {total}: {counts_text}"
        )


# -- trees -------------------------------------------------------------------------------------------------------------


def carrier_leaves(x: Any) -> tuple[list[Array], Any]:
    """The leaves of a tree as JAX arrays, and its structure.

    Raises:
        TypeError: for a leaf of a dtype that is no carrier; the error has its path.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(x)
    leaves = []
    for path, leaf in paths:
        name = f"x{jax.tree_util.keystr(path)}"
        array = leaf if isinstance(leaf, Array) else as_numpy(name, leaf)
        carrier_of_dtype(array.dtype, name, complex_too=False)
        leaves.append(jnp.asarray(array))
    return leaves, structure


def map_leaves(x: Any, key: Array | None, function: Callable[[Array, Array | None], Array]) -> Any:
    """`function` of every leaf of a tree, with the key and the number of the leaf folded in; empty leaves unchanged."""
    leaves, structure = carrier_leaves(x)
    return structure.unflatten([function(leaf, fold_in_numbers(key, index)) for index, leaf in enumerate(leaves)])


def map_buckets(x: Any, key: Array | None, function: Callable[[Array, Array | None], Array], bucket: int | None) -> Any:
    """`function` of every leaf of a tree as a vector; small ones of one dtype are one vector.

    Args:
        x: the tree.
        key: the key; the number of the vector is folded in.
        function: has a vector and gives one of the same length.
        bucket: leaves of fewer elements are joined. None: leaves keep their shapes; those without elements stay.
    """
    if bucket is None:
        return map_leaves(x, key, lambda leaf, k: function(leaf, k) if leaf.size else leaf)
    leaves, structure = carrier_leaves(x)
    results: list[Array] = list(leaves)
    for bucket_index, members in enumerate(_bucket_members(leaves, bucket)):
        vector = jnp.concatenate([leaves[at].reshape(-1) for at in members])
        result = function(vector, fold_in_numbers(key, bucket_index))
        ends = list(itertools.accumulate(leaves[at].size for at in members))
        for leaf_index, end in zip(members, ends, strict=True):
            results[leaf_index] = result[end - leaves[leaf_index].size : end].reshape(leaves[leaf_index].shape)
    return structure.unflatten(results)


def _bucket_members(leaves: list[Array], bucket: int) -> list[list[int]]:
    """The numbers of the leaves of each vector, in the order of their first leaves; leaves without numbers have none.

    A bucket is closed when it has `bucket` elements.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[Any, Any], list[int]] = {}
    for leaf_index, leaf in enumerate(leaves):
        if not leaf.size:
            continue
        dtype_and_axes = (leaf.dtype, varying_axes(leaf))
        if leaf.size >= bucket:
            buckets.append([leaf_index])
            continue
        members = open_buckets.get(dtype_and_axes)
        if members is None:
            members = open_buckets[dtype_and_axes] = []
            buckets.append(members)
        members.append(leaf_index)
        if math.fsum(leaves[i].size for i in members) >= bucket:
            del open_buckets[dtype_and_axes]
    return buckets
