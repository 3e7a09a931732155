"""Pytrees of arrays: checks of their leaves, and small leaves that are joined."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jchop._common.bit_ops import varying_axes
from jchop._common.checks import as_numpy
from jchop._round.arguments import carrier_of_dtype
from jchop.distributed._messages import fold_in_numbers

Array = jax.Array


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
