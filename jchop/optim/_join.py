"""Leaves of one kind as one array of rows, in programs for one CPU: the program of a packed array is there once."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import nonempty_axis_env_DO_NOT_USE  # pyright: ignore[reportPrivateImportUsage]

from jchop._common.bit_ops import varying_axes
from jchop._kernels.primitive import one_device_at_hand
from jchop._round.arguments import has_tracer
from jchop._storage import QArray
from jchop.formats import ScaledFormat
from jchop.optim._leaves import is_float_leaf
from jchop.optim._pack import is_packed_leaf, leaf_codes

#: The elements of the fastest chunks; the fewest of an array that is cut; the limit of a joined array.
_FASTEST_CHUNK, _FEWEST_CUT, _MOST_JOINED = 1 << 18, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Joining:
    """Which leaves are joined, in the trees of the updates, the parameters and the state.

    Args:
        like: the structure of the updates.
        groups: indexes of the leaves of each joined array, in order.
        units: for each joined array the length of its rows; 0 for one leaf, which stays as it is.
        starts: for each leaf of the updates its first row in its joined array.
        count: of chunks of the joined arrays.
    """

    like: Any
    groups: tuple[tuple[int, ...], ...]
    units: tuple[int, ...]
    starts: tuple[int, ...]
    count: int

    def join(self, tree: Any) -> list[Any] | None:
        """The joined arrays of a tree like the updates."""
        if tree is None:
            return None
        leaves = self.like.flatten_up_to(tree)
        groups = zip(self.groups, self.units, strict=True)
        return [_join_rows([leaves[k] for k in group], unit, self.count) for group, unit in groups]

    def split(self, arrays: Sequence[Any], tree: Any, starts: Sequence[Any]) -> Any:
        """The tree whose joined arrays these are; `tree` has its shapes and types, `starts` is from `row_starts`."""
        olds, leaves = self.like.flatten_up_to(tree), [None] * len(starts)
        for array, group, unit in zip(arrays, self.groups, self.units, strict=True):
            for k in group:
                leaves[k] = _take_rows(array, olds[k], starts[k], unit) if unit else array
        return self.like.unflatten(leaves)

    def row_starts(self, known: Array) -> list[Array]:
        """`starts`, and zeros unless `known`: numbers of the run, so that copies of equal leaves are one function."""
        return lax.cond(known, lambda: list(map(jnp.int32, self.starts)), lambda: [jnp.int32(0)] * len(self.starts))

    def join_state(self, state: Any) -> Any:
        """A state whose trees like the updates are joined."""
        nodes, structure = _state_nodes(state, self.like)
        return structure.unflatten([self.join(node) if _is_like(node, self.like) else node for node in nodes])

    def split_state(self, joined: Any, state: Any, starts: Sequence[Any]) -> Any:
        """The inverse of `join_state`; `state` has the shapes and types."""
        nodes, structure = _state_nodes(state, self.like)
        pairs = zip(structure.flatten_up_to(joined), nodes, strict=True)
        return structure.unflatten(
            [self.split(new, old, starts) if _is_like(old, self.like) else new for new, old in pairs]
        )


def _is_like(node: Any, like: Any) -> bool:
    return jax.tree.structure(node, is_leaf=is_packed_leaf) == like


def _state_nodes(state: Any, like: Any) -> tuple[list[Any], Any]:
    """The trees like the updates, and the other leaves."""
    return jax.tree.flatten(state, is_leaf=lambda node: is_packed_leaf(node) or _is_like(node, like))


def _join_rows(leaves: list[Any], unit: int, count: int) -> Any:
    """One array with the rows of some leaves, and its first rows again up to a multiple of the chunks."""
    if not unit:
        return leaves[0]
    rows = [math.prod(leaf.shape) // unit for leaf in leaves]
    more = -sum(rows) % (count if unit > 1 else 1)

    def join(*parts: Array) -> Array:
        whole = jnp.concatenate([part.reshape(height, -1) for part, height in zip(parts, rows, strict=True)])
        return jnp.concatenate([whole, whole[:more]]) if more else whole

    codes = [leaf_codes(leaf) if is_packed_leaf(leaf) else leaf for leaf in leaves]
    joined = jax.tree.structure(codes[0]).unflatten(map(join, *map(jax.tree.leaves, codes)))
    return replace(joined, length=unit) if isinstance(joined, QArray) and joined.length is not None else joined


def _take_rows(array: Any, like: Any, start: Any, unit: int) -> Any:
    rows, parts = math.prod(like.shape) // unit, zip(jax.tree.leaves(array), jax.tree.leaves(like), strict=True)
    own = [lax.dynamic_slice_in_dim(part, start, rows).reshape(old.shape) for part, old in parts]
    return jax.tree.structure(like).unflatten(own)


def plan_joining(updates: Any, state: Any, params: Any) -> Joining | None:
    """The leaves that are joined; None if there are none, or if a program may be for more than one CPU.

    Leaves are joined if they, their parameters and their leaves of the state have the same dtypes and formats, and
    their rows are whole groups. Every packed array of the state must be in a tree like the updates.

    Args:
        updates: a pytree of arrays.
        state: of the wrapped transformation.
        params: a pytree like the updates, or None.
    """
    leaves, like = jax.tree.flatten(updates)
    if len(leaves) < 2 or not _is_for_one_cpu((updates, state, params)):
        return None
    nodes, _ = _state_nodes(state, like)
    if any(map(is_packed_leaf, nodes)):
        return None
    trees = [updates, *(node for node in nodes if _is_like(node, like))] + ([] if params is None else [params])
    found: dict[tuple[Any, ...], list[int]] = {}
    sizes = [math.prod(jnp.shape(leaf)) for leaf in leaves]
    for k, own in enumerate(zip(*map(like.flatten_up_to, trees), strict=True)):
        kinds = [kind for kind in map(_kind_of_rows, own) if kind is not None]
        unit = math.lcm(*(unit for unit, *_ in kinds))
        joins = sizes[k] > 0 and len(kinds) == len(own) and _has_rows(own, unit)
        place = sum(sizes[:k]) // _MOST_JOINED
        found.setdefault((unit, place, *kinds) if joins else (0, k), []).append(k)
    starts, units = [0] * len(leaves), []
    for (unit, *_), group in found.items():
        units.append(unit if len(group) > 1 else 0)
        for before, k in pairwise(group):
            starts[k] = starts[before] + sizes[before] // units[-1]
    if not any(units):
        return None
    size = max(sum(sizes[k] for k in group) for group, unit in zip(found.values(), units, strict=True) if unit)
    count = size // _FASTEST_CHUNK if size >= _FEWEST_CUT else 1
    return Joining(like, tuple(map(tuple, found.values())), tuple(units), tuple(starts), count)


def _kind_of_rows(leaf: Any) -> tuple[int, Hashable, Any] | None:
    """The length of the shortest row of whole groups and bytes, the format and the dtype; None for no such rows."""
    if not is_packed_leaf(leaf):
        return (1, None, leaf.dtype) if is_float_leaf(leaf) else None
    spec, fmt = leaf_codes(leaf).spec, leaf_codes(leaf).spec.scaled
    unit = 8
    if fmt is not None:
        if fmt.axis != -1 or not isinstance(fmt.group, int) or isinstance(fmt.scale, ScaledFormat):
            return None
        unit = math.lcm(fmt.group, 8)
    whole = spec.rounding.stochastic or (fmt is not None and fmt.scale_rule.tensor_scale)
    return None if whole else (unit, str(spec), leaf_codes(leaf).dtype)


def _has_rows(leaves: Sequence[Any], unit: int) -> bool:
    return all(leaf_codes(leaf).shape[-1] % unit == 0 for leaf in leaves if is_packed_leaf(leaf))


def _is_for_one_cpu(trees: Any) -> bool:
    arrays = jax.tree.leaves(trees)
    if not one_device_at_hand("cpu") or nonempty_axis_env_DO_NOT_USE() or not has_tracer(arrays):
        return False
    specs = [getattr(getattr(jax.typeof(x), "sharding", None), "spec", ()) for x in arrays]
    return not any(part is not None for spec in specs for part in spec) and not any(map(varying_axes, arrays))
