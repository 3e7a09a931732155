"""A step in chunks, each a part of every large array, so that intermediate results fit in a cache.

Arrays are cut along their first axis, so that cutting and joining move no data. The results of a transformation that
treats each number by itself stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._kernels.scaled import code_and_scale_shapes
from jchop.optim._leaves import is_float_leaf, owner_index
from jchop.optim._pack import is_packed_leaf, leaf_codes
from jchop.storage import QArray

Array = jax.Array

#: The limit of elements of an array that is cut: its place in the stream of random words has 32 bits.
_MOST_CHUNK_ELEMENTS = 1 << 32


@dataclass(frozen=True)
class Chunks:
    """The leaves that are cut, and the number of chunks.

    Args:
        count: of chunks.
        update_is_cut: for each leaf of the updates, whether it is cut.
        owners: for each leaf of the state (a packed array is one leaf), the index of its leaf of the updates; None if
            it has none.
    """

    count: int
    update_is_cut: tuple[bool, ...]
    owners: tuple[int | None, ...]

    @property
    def state_is_cut(self) -> tuple[bool, ...]:
        """For each leaf of the state, whether it is cut."""
        return tuple(owner is not None and self.update_is_cut[owner] for owner in self.owners)

    def rest(self, updates: Any, state: Any, params: Any) -> tuple[Any, Any, Any]:
        """Updates, state and parameters, with empty arrays for the leaves that are cut."""
        return self._each(updates, state, params, lambda leaf, cut: _empty_like_leaf(leaf) if cut else leaf)

    def chunk(self, updates: Any, state: Any, params: Any, i: Array) -> tuple[Any, Any, Any]:
        """Chunk i of the leaves that are cut, and empty arrays for others. State without a leaf of updates stays."""
        return self._each(
            updates, state, params, lambda leaf, cut: self._part(leaf, i) if cut else _empty_like_leaf(leaf)
        )

    def _each(self, updates: Any, state: Any, params: Any, change: Callable[[Any, bool], Any]) -> tuple[Any, Any, Any]:
        leaves, structure = jax.tree.flatten(state, is_leaf=is_packed_leaf)
        leaves_and_owners = zip(leaves, self.owners, self.state_is_cut, strict=True)
        state = structure.unflatten(
            [leaf if owner is None else change(leaf, cut) for leaf, owner, cut in leaves_and_owners]
        )
        updates, params = (self._map(change, tree) for tree in (updates, params))
        return updates, state, params

    def _map(self, change: Callable[[Any, bool], Any], tree: Any) -> Any:
        if tree is None:
            return None
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten([change(leaf, cut) for leaf, cut in zip(leaves, self.update_is_cut, strict=True)])

    def _part(self, leaf: Any, i: Array) -> Any:
        if isinstance(leaf, QArray):
            return replace(jax.tree.map(lambda x: self._part(x, i), leaf), length=_chunk_length(leaf, self.count))
        chunks = _short_floats_as_words(leaf).reshape(self.count, leaf.shape[0] // self.count, *leaf.shape[1:])
        return _words_as_floats(lax.dynamic_index_in_dim(chunks, i, 0, keepdims=False), leaf.dtype)

    def start(self, leaf: Any, i: Array) -> Array:
        """The index of the first element of chunk i in a leaf of the state."""
        return i.astype(jnp.uint32) * jnp.uint32(math.prod(leaf.shape) // self.count)


def plan_chunks(updates: Any, state: Any, count: int) -> Chunks | None:
    """The leaves that can be cut into `count` chunks; None if there are none.

    The leaves of the state that belong to a leaf of the updates have its shape, and a path that ends with its path. The
    leaf is cut if the first axes of all their stored arrays, and its own, are multiples of `count`, and at least one of
    them is packed.

    Args:
        updates: a pytree of arrays.
        state: the state of the wrapped transformation, with packed leaves.
        count: number of chunks, 2 or more.
    """
    update_leaves = jax.tree_util.tree_leaves_with_path(updates)
    state_leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_packed_leaf)
    owners = [owner_index(path, leaf, update_leaves) for path, leaf in state_leaves]
    cut = []
    for place, (_, update) in enumerate(update_leaves):
        own = [leaf for owner, (_, leaf) in zip(owners, state_leaves, strict=True) if owner == place]
        is_divisible = is_float_leaf(update) and all(_is_divisible(leaf, count) for leaf in (update, *own))
        cut.append(is_divisible and any(map(is_packed_leaf, own)))
    return Chunks(count, tuple(cut), tuple(owners)) if any(cut) else None


def _is_divisible(leaf: Any, count: int) -> bool:
    shape = tuple(leaf.shape)
    if not shape or not shape[0] or shape[0] % count or math.prod(shape) >= _MOST_CHUNK_ELEMENTS:
        return False
    if not is_packed_leaf(leaf):
        return True
    if not isinstance(leaf, QArray):
        return False
    if leaf.spec.scaled is None:
        return len(shape) > 1
    chunk_parts = jax.tree.leaves(code_and_scale_shapes(leaf.spec, (shape[0] // count, *shape[1:]))[1:])
    parts = jax.tree.leaves((leaf.scale, leaf.zero_point))
    return leaf.qvalue.shape[0] % count == 0 and [part.shape for part in chunk_parts] == [
        (part.shape[0] // count, *part.shape[1:]) if part.shape and part.shape[0] % count == 0 else None
        for part in parts
    ]


def _chunk_length(leaf: QArray, count: int) -> int | None:
    """The length of the last axis of a chunk."""
    return leaf.length // count if leaf.ndim == 1 and leaf.length is not None else leaf.length


def _empty_like_leaf(leaf: Any) -> Any:
    """An empty array with the axes of a leaf, and one axis at least."""
    return jnp.zeros((0, *tuple(leaf.shape)[1:]), (leaf_codes(leaf) if is_packed_leaf(leaf) else leaf).dtype)


def _short_floats_as_words(x: Array) -> Array:
    """The bits of short floats, because of the quirk `short_floats_converted_whole` (`_core/xla/cpu.py`)."""
    short = is_float_leaf(x) and x.dtype.itemsize < 4
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")) if short else x


def _words_as_floats(x: Array, dtype: Any) -> Array:
    """The inverse of `_short_floats_as_words`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


# -- the loop ----------------------------------------------------------------------------------------------------------


def loop_over_chunks(step_of_chunk: Callable[[Array], tuple[Any, Any, Array]], count: int) -> tuple[Any, Any, Array]:
    """The results of `step_of_chunk` for each chunk, joined along the first axis; and whether all chunks are sound.

    Args:
        step_of_chunk: maps the index of a chunk, an int32 scalar, to two pytrees of arrays and a bool scalar. The
            arrays of the second pytree take long to compute, and are stored one iteration later, because of the quirk
            `write_into_part_has_one_thread` (`_core/xla/cpu.py`).
        count: of chunks.
    """
    first = jax.eval_shape(step_of_chunk, jax.ShapeDtypeStruct((), jnp.int32))
    words = jax.eval_shape(lambda parts: jax.tree.map(_short_floats_as_words, parts), first[:2])
    early, late = (jax.tree.map(lambda x: _zero_rows(count * x.shape[0], x), part) for part in words)
    pending = jax.tree.map(lambda x: _zero_rows(x.shape[0], x), words[1])

    def body(i: Array, carry: Any) -> Any:
        early, late, pending, sound = carry
        late = _write_chunk(late, pending, jnp.maximum(i - 1, 0))
        now, pending, is_sound = step_of_chunk(i)
        now, pending = jax.tree.map(_short_floats_as_words, (now, pending))
        return _write_chunk(early, now, i), late, pending, sound & is_sound

    early, late, pending, sound = lax.fori_loop(0, count, body, (early, late, pending, jnp.asarray(True)))
    late = _write_chunk(late, pending, jnp.asarray(count - 1))
    return *jax.tree.map(lambda x, like: _words_as_floats(x, like.dtype), (early, late), first[:2]), sound


def _zero_rows(rows: int, like: Any) -> Array:
    return jnp.zeros((rows, *like.shape[1:]), like.dtype)


def _write_chunk(whole: Any, parts: Any, i: Array) -> Any:
    return jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, i * part.shape[0], 0), whole, parts)


def merge_leaves(whole: list[Any], cut: list[Any], is_cut: tuple[bool, ...]) -> list[Any]:
    """Leaves in order: the next leaf of `cut` if `is_cut`, else the leaf of `whole`."""
    rest = iter(cut)
    return [next(rest) if chunk else leaf for leaf, chunk in zip(whole, is_cut, strict=True)]
