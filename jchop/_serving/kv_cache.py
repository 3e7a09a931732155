"""`KVCache`: the keys and values of attention, kept packed from token to token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check, check_int, place_in_errors
from jchop._quantized.products.operand_layout import Hadamard
from jchop._quantized.products.rule import check_cache_spec
from jchop._round.arguments import has_tracer
from jchop._spec.spec import Spec, SpecLike, as_spec
from jchop._storage import QArray, dequantize, quantize
from jchop._storage._array import register_export
from jchop._storage._axis_groupings import axes_from_end

_KVSpec = SpecLike | None

#: The entry of a table for a page that a sequence has not.
NO_PAGE = -1
#: Rows of slots, slots, heads, head_dim.
KV_NDIM = 4
#: The axis of slots.
TOKEN_AXIS = -3
#: The position of a slot without a token.
NO_TOKEN = -1


@partial(jax.tree_util.register_dataclass, data_fields=("words",), meta_fields=("spec", "size", "dtype"))
@dataclass(frozen=True, eq=False)
class KVRows:
    """Keys or values in rows of slots: each slot holds one token.

    Args:
        words: the leaves of a QArray, or the numbers, each in the shape (rows, slots, heads, ...). With scales for
            groups of tokens, (rows, groups, heads, head_dim, ...): packed along tokens. Floats of fewer than 32 bits
            are stored as integers of the same bits. XLA's CPU backend would convert all of them in every write
            (`short_floats_converted_whole`).
        spec: the spec of the QArray; None for numbers.
        size: head_dim.
        dtype: of the numbers.
    """

    words: tuple[Array, ...]
    spec: Spec | None
    size: int
    dtype: np.dtype

    @staticmethod
    def empty(shape: Sequence[int], spec: Spec | None, dtype: Any) -> KVRows:
        """Zeros: no tokens yet."""
        leaves = jax.tree.leaves(_abstract_kv_rows(shape, spec, dtype))
        words = tuple(jnp.zeros(leaf.shape, _kv_word_dtype(leaf.dtype)) for leaf in leaves)
        return KVRows(words, spec, shape[-1], np.dtype(dtype))

    @property
    def group(self) -> int:
        """Number of tokens that share the scale of a channel; 1 if each token has its own."""
        return _tokens_of_group(self.spec)

    def part(self, take: Callable[[Array], Array]) -> KVRows:
        """Some of the slots; `take` gives them of any leaf."""
        return replace(self, words=tuple(map(take, self.words)))

    def heads_first(self) -> KVRows:
        """The tokens with the axis of heads before the axis of slots."""
        return self.part(lambda word: jnp.swapaxes(word, 1, 2))

    def write(self, new: Array, row: Array, slot: Array) -> KVRows:
        """The tokens with new ones, or groups of them, at a row and a slot; a row that does not exist is dropped."""
        leaves = jax.tree.leaves(_quantize_kv_rows(new.astype(self.dtype), self.spec))
        words = (
            old.at[row, slot].set(lax.bitcast_convert_type(leaf, old.dtype), mode="drop")
            for old, leaf in zip(self.words, leaves, strict=True)
        )
        return replace(self, words=tuple(words))

    def numbers(self, slot_axis: int = 1) -> Array:
        """The tokens as numbers; `slot_axis` is 2 after `heads_first`."""
        tree, dtypes = _kv_rows_structure(self.spec, self.size, self.dtype)
        leaves = (lax.bitcast_convert_type(word, dtype) for word, dtype in zip(self.words, dtypes, strict=True))
        tokens = jax.tree.unflatten(tree, leaves)
        numbers = dequantize(tokens) if isinstance(tokens, QArray) else tokens
        if self.group == 1:
            return numbers
        numbers = jnp.moveaxis(numbers, -1, slot_axis + 1)
        return lax.collapse(numbers, slot_axis, slot_axis + 2)


def masked_numbers(rows: KVRows, positions: Array, slot_axis: int = 1) -> Array:
    """Keys or values as numbers, 0 in slots without a token: another sequence's NaN times a weight of 0 is NaN.

    Args:
        rows: the keys or values.
        positions: the positions of their tokens, in the shape of `rows` without head_dim; the axis of heads may have
            length 1.
        slot_axis: as in `KVRows.numbers`.
    """
    return jnp.where((positions != NO_TOKEN)[..., None], rows.numbers(slot_axis), jnp.zeros((), rows.dtype))


def kv_rows_spec(name: str, spec: Any) -> Spec | None:
    """The spec of keys or values, with axes counted from the end; None stores the numbers as they are.

    Raises:
        TypeError, ValueError: for a spec that rounds tokens or heads together, or draws random bits.
    """
    if spec is None:
        return None
    spec = as_spec(spec, name, scaled=True)
    if spec.scaled is not None:
        with place_in_errors(f"{name}={str(spec)!r}"):
            spec = replace(spec, format=axes_from_end(spec.scaled, KV_NDIM))
    check_cache_spec(name, spec if _tokens_of_group(spec) == 1 else _along_last_axis(spec))
    return spec


def _tokens_of_group(spec: Spec | None) -> int:
    fmt = None if spec is None else spec.scaled
    return fmt.group if fmt is not None and fmt.axis == TOKEN_AXIS and isinstance(fmt.group, int) else 1


def _along_last_axis(spec: Spec) -> Spec:
    """The spec of groups of tokens after their axis was moved to the end."""
    assert spec.scaled is not None
    return replace(spec, format=spec.scaled(axis=-1))


def _quantize_kv_rows(x: Array, spec: Spec | None) -> QArray | Array:
    if spec is None:
        return x
    group = _tokens_of_group(spec)
    if group == 1:
        return quantize(x, spec)
    groups = x.reshape(x.shape[0], -1, group, *x.shape[2:])
    return quantize(jnp.moveaxis(groups, 2, -1), _along_last_axis(spec))


def _abstract_kv_rows(shape: Sequence[int], spec: Spec | None, dtype: Any) -> Any:
    """The shapes and dtypes of stored tokens."""
    return jax.eval_shape(partial(_quantize_kv_rows, spec=spec), jax.ShapeDtypeStruct(tuple(shape), dtype))


@lru_cache(maxsize=64)
def _kv_rows_structure(spec: Spec | None, size: int, dtype: np.dtype) -> tuple[Any, tuple[np.dtype, ...]]:
    """The structure of stored tokens, and the dtypes of its leaves."""
    leaves, tree = jax.tree.flatten(_abstract_kv_rows((1, _tokens_of_group(spec), 1, size), spec, dtype))
    return tree, tuple(leaf.dtype for leaf in leaves)


def _kv_word_dtype(dtype: Any) -> np.dtype:
    short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(f"u{dtype.itemsize}") if short else np.dtype(dtype)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("key_slots", "value_slots", "slot_positions", "lengths", "overflowed", "table", "recent"),
    meta_fields=("window", "rotation"),
)
@dataclass(frozen=True, eq=False, repr=False)
class KVCache:
    """Keys and values of the tokens of several sequences, packed one token at a time: a pytree of plain arrays.

    `KVCache.full` has a slot for each token, and `KVCache.rolling` for the last ones alone. `KVCache.paged` has pages
    of slots that sequences draw from a common store as they grow. `update` returns a cache with more tokens, and rounds
    these alone. `jchop.dot_product_attention` attends to the packed tokens. Attention of your own reads `keys`,
    `values` and `mask` as arrays. Caches pass through jit, scan, vmap, donation and sharding. A stack of them for the
    layers of a model is a cache whose leaves have one axis more.

    A token has a position in its sequence, 0 for the first. Each slot records the position of its token, so a slot that
    was never written, or was written for another sequence, is never read. A token finds no slot if its position is
    beyond the length of the cache or no page is free. This is an error if shapes and known values show it. Within a
    compiled program it is not stored, and the sequence is marked in `overflowed`. Its `values` and its attention are
    NaN from then on, until `release`. `truncate` drops the last tokens of sequences, and `take` chooses sequences.

    Args:
        key_slots: stored keys, in rows of slots; a row is a sequence, or a page.
        value_slots: stored values, in the same rows.
        slot_positions: int32, the position of the token in each slot, shape (rows, slots); -1 without a token. In a
            rolling cache -2 - p, if the token at p was written over by one that `truncate` dropped.
        lengths: int32, one more than the largest position of each sequence so far, shape (batch,).
        overflowed: bool, whether a token of a sequence was not stored, shape (batch,).
        table: int32, the pages of each sequence in order, shape (batch, pages of a sequence); -1 for none. None without
            pages.
        window: number of tokens that a query attends to, itself included; None for all.
        recent: a rolling cache of the last tokens, not packed, which are read there; None without it.
        rotation: of the stored keys and values along head_dim; None for none.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> cache = jc.KVCache.full((2, 8, 4, 16), keys="int8(group=all)", values="int8(group=all)")
        >>> cache = cache.update(jnp.ones((2, 3, 4, 16)), jnp.ones((2, 3, 4, 16)))
        >>> cache.keys.shape, cache.lengths.tolist(), cache.positions[0].tolist()
        ((2, 8, 4, 16), [3, 3], [0, 1, 2, -1, -1, -1, -1, -1])
        >>> jc.dot_product_attention(jnp.ones((2, 1, 8, 16)), cache).shape
        (2, 1, 8, 16)
    """

    key_slots: KVRows
    value_slots: KVRows
    slot_positions: Array
    lengths: Array
    overflowed: Array
    table: Array | None = None
    window: int | None = None
    recent: KVCache | None = None
    rotation: Hadamard | None = None

    # -- making one ----------------------------------------------------------------------------------------------------
    @staticmethod
    def full(
        shape: Sequence[int], *, keys: _KVSpec = None, values: _KVSpec = None, dtype: Any = jnp.float32,
        rotation: Hadamard | None = None, recent: int = 0,
    ) -> KVCache:  # fmt: skip
        """An empty cache with a slot for every token.

        Args:
            shape: (batch, length, kv_heads, head_dim); `length` is the number of tokens of a sequence at most.
            keys: the spec of keys: a plain format, or one with groups along head_dim. Examples are
                ``"int8(group=all)"``, with one scale for each token and head, and ``"int4(group=32)"``. In
                ``"uint2(group=32,axis=1,zero_point=integer)"`` each channel has a scale for 32 tokens, as the keys of
                KIVI (arXiv 2402.02750); it needs `recent`. Default None: not rounded.
            values: likewise, of values.
            dtype: of the numbers: float32 (default), bfloat16, float16 or float64.
            rotation: a `jchop.Hadamard`, such as ``Hadamard("all")``. It rotates keys and values along head_dim before
                they are rounded, which spreads outliers, as in TurboQuant (arXiv 2504.19874). Attention rotates
                queries, and its result back. Default None.
            recent: the number of last tokens of a sequence that are read as they came, from slots of their own in
                `dtype`. Groups of tokens need at least a group. Default 0.

        Raises:
            TypeError, ValueError: for another shape or dtype, a spec that rounds tokens or heads together, or a
                rotation whose size does not divide head_dim.
        """
        batch, length, *rest = _check_cache_shape(shape)
        return _empty_cache(batch, (batch, length, *rest), keys, values, dtype, rotation, recent)

    @staticmethod
    def rolling(
        shape: Sequence[int], *, chunk: int = 1, keys: _KVSpec = None, values: _KVSpec = None, dtype: Any = jnp.float32,
        rotation: Hadamard | None = None, recent: int = 0,
    ) -> KVCache:  # fmt: skip
        """An empty cache of the last tokens, for attention with a sliding window: sequences have any length.

        Args:
            shape: (batch, window, kv_heads, head_dim). A query attends to itself and the ``window - 1`` tokens before.
            chunk: the most tokens for one `update`, so that each of them still finds its whole window. The cache has
                ``window + chunk - 1`` slots for a sequence. Default 1: decoding token by token.
            keys: as in `full`; also the arguments that follow.
            values: see `keys`.
            dtype: see `keys`.
            rotation: see `keys`.
            recent: see `keys`.

        Raises:
            TypeError, ValueError: as in `full`.
        """
        batch, window, *rest = _check_cache_shape(shape)
        slots = window + check_int("chunk", chunk, 1) - 1
        return _empty_cache(batch, (batch, slots, *rest), keys, values, dtype, rotation, recent, window=window)

    @staticmethod
    def paged(
        shape: Sequence[int], *, pages: int, page_size: int, keys: _KVSpec = None, values: _KVSpec = None,
        dtype: Any = jnp.float32, rotation: Hadamard | None = None, recent: int = 0,
    ) -> KVCache:  # fmt: skip
        """An empty cache whose sequences share pages of slots, so that short ones need little memory.

        `update` gives a sequence the free page of the lowest number if a token needs one; `release` returns pages.

        Args:
            shape: (batch, length, kv_heads, head_dim), as in `full`; it needs no memory.
            pages: number of pages, for all sequences together.
            page_size: number of tokens on a page.
            keys: as in `full`; also the arguments that follow.
            values: see `keys`.
            dtype: see `keys`.
            rotation: see `keys`.
            recent: see `keys`.

        Raises:
            TypeError, ValueError: as in `full`.
        """
        batch, length, *rest = _check_cache_shape(shape)
        pages, page_size = check_int("pages", pages, 1), check_int("page_size", page_size, 1)
        cache = _empty_cache(batch, (pages, page_size, *rest), keys, values, dtype, rotation, recent)
        return replace(cache, table=jnp.full((batch, -(-length // page_size)), NO_PAGE, jnp.int32))

    # -- reading -------------------------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of `keys` and `values`: (batch, slots of a sequence, kv_heads, head_dim)."""
        rows, slots = self.slot_positions.shape
        heads = self.key_slots.words[0].shape[2]
        batch, columns = (rows, 1) if self.table is None else self.table.shape
        return batch, columns * slots, heads, self.key_slots.size

    @property
    def dtype(self) -> np.dtype:
        """The dtype of keys and values as numbers."""
        return self.key_slots.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def positions(self) -> Array:
        """The position of the token in each slot of `keys`, shape (batch, slots); -1 without a token."""
        return self.part(0, self.shape[1])[2]

    @property
    def keys(self) -> Array:
        """The stored keys as numbers, in `shape`; 0 without a token."""
        keys, _, positions = self.part(0, self.shape[1])
        return self._numbers(keys, "key_slots", positions)

    @property
    def values(self) -> Array:
        """The stored values as numbers, in `shape`; 0 without a token, NaN in sequences that overflowed."""
        _, values, positions = self.part(0, self.shape[1])
        numbers = self._numbers(values, "value_slots", positions)
        return jnp.where(self.overflowed[:, None, None, None], jnp.nan, numbers)

    def _numbers(self, rows: KVRows, name: str, positions: Array) -> Array:
        """Keys or values in all slots, with the recent tokens as they came, and rotated back."""
        numbers = masked_numbers(rows, positions[:, :, None])
        return self.rotate_back(numbers if self.recent is None else self._with_recent(numbers, name, positions))

    def _with_recent(self, numbers: Array, name: str, positions: Array) -> Array:
        """The numbers of tokens at these positions, of which the recent ones are as they came."""
        assert self.recent is not None
        slots = (positions % self.recent.slot_positions.shape[1])[:, :, None, None]
        own = jnp.take_along_axis(getattr(self.recent, name).numbers(), slots, axis=1)
        return jnp.where(self.is_recent(positions)[:, :, None, None], own, numbers)

    def is_recent(self, positions: Array) -> Array:
        """Which tokens of each sequence are read from `recent`, in the shape of `positions`, (batch, slots)."""
        assert self.recent is not None
        stored = self.recent.slot_positions
        return (positions >= 0) & (jnp.take_along_axis(stored, positions % stored.shape[1], axis=1) == positions)

    def rotate_back(self, x: Array) -> Array:
        """Keys, values or results of attention without the rotation of head_dim."""
        if self.rotation is None:
            return x
        wide = jnp.promote_types(x.dtype, jnp.float32)
        matrix = jnp.asarray(self.rotation.matrix, wide)
        blocks = x.astype(wide).reshape(*x.shape[:-1], -1, len(matrix))
        return jnp.matmul(blocks, matrix, precision=lax.Precision.HIGHEST).reshape(x.shape).astype(x.dtype)

    def mask(
        self, positions: Any = None, *, tokens: int = 1, is_causal: bool = True, window: int | None = None
    ) -> Array:
        """Which slots queries attend to, as the mask of `jax.nn.dot_product_attention`.

        Args:
            positions: of the queries, shape (tokens,) or (batch, tokens); -1 for padding. Default: the last `tokens`.
            tokens: number of queries, if `positions` is not given. Default 1.
            is_causal: whether a query attends to its own token and earlier ones alone. Default True.
            window: number of tokens that a query attends to, itself included. Default: the cache's window.

        Returns:
            bool, shape (batch, 1, tokens, slots).
        """
        query = self.query_positions(positions, check_int("tokens", tokens, 1) if positions is None else None)
        window = self.window if window is None else check_int("window", window, 1, self.window or (1 << 31) - 1)
        return attention_mask(query, self.positions, is_causal, window)[:, None]

    # -- writing -------------------------------------------------------------------------------------------------------
    def update(self, k: Any, v: Any, positions: Any = None) -> KVCache:
        """A cache with more tokens, of which alone the keys and values are rounded.

        Args:
            k: keys of new tokens, shape (batch, tokens, kv_heads, head_dim).
            v: values, in the same shape.
            positions: of the tokens, integers, shape (tokens,) or (batch, tokens), each once in a sequence. A token at
                -1 is padding and not stored, so prompts of several lengths can be padded to one. A position that is in
                the cache already is written anew. Default: the positions after `lengths`.

        Returns:
            The cache. A rolling one keeps the tokens of the largest positions.

        Raises:
            ValueError: for another shape; for more tokens than there are slots; for known positions below -1 or beyond
                the slots, unless the cache is rolling.
            TypeError: for positions that are no integers.
        """
        batch, capacity, heads, head_dim = self.shape
        k, v = jnp.asarray(k), jnp.asarray(v)
        for name, x in (("k", k), ("v", v)):
            if x.ndim != KV_NDIM or x.shape[0] != batch or x.shape[2:] != (heads, head_dim):
                raise ValueError(f"{name} has the shape {x.shape}; it must be ({batch}, tokens, {heads}, {head_dim})")
        check(k.shape == v.shape, f"k has the shape {k.shape}, and v {v.shape}; they must be the same")
        count = k.shape[1]
        if self.window is None and count > capacity:
            raise ValueError(f"k has {count} tokens, and the cache {capacity} slots for a sequence")
        if positions is None:
            positions = self.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)
        self._check_positions(positions)
        if self.rotation is not None:
            k, v = self.rotation.rotate(k), self.rotation.rotate(v)
        return self._write_tokens(k, v, self._as_positions(positions, count))

    def _write_tokens(self, k: Array, v: Array, position: Array) -> KVCache:
        batch, capacity, _, _ = self.shape
        rows, slots = self.slot_positions.shape
        is_token, in_groups = position >= 0, max(self.key_slots.group, self.value_slots.group) > 1
        lengths = jnp.maximum(self.lengths, jnp.max(position, axis=1, initial=NO_TOKEN) + 1)
        row, slot, table = jnp.broadcast_to(jnp.arange(batch)[:, None], position.shape), position, self.table
        if self.window is not None:
            slot, fits, overflow = position % slots, is_token & (position >= lengths[:, None] - slots), None
        else:
            fits = is_token & (position < capacity)
            if in_groups:
                first = jnp.min(position, axis=1, keepdims=True, where=is_token, initial=capacity)
                fits &= position < first + position.shape[1]
            if table is not None:
                page = position // slots
                table = _assign_pages(table, rows, page, fits, min(table.size, position.size))
                row = jnp.take_along_axis(table, jnp.where(fits, page, 0), axis=1)
                slot, fits = position % slots, fits & (row != NO_PAGE)
            overflow = is_token & ~fits
        row = jnp.where(fits, row, rows)  # a row that does not exist: nothing is written
        write = partial(self._write_rows, row=row, slot=slot, position=jnp.where(fits, position, -1), table=table)
        return replace(
            self,
            key_slots=write("key_slots", k),
            value_slots=write("value_slots", v),
            slot_positions=self.slot_positions.at[row, slot].set(position, mode="drop"),
            lengths=lengths,
            overflowed=self.overflowed if overflow is None else self.overflowed | overflow.any(axis=1),
            table=table,
            recent=None if self.recent is None else self.recent._write_tokens(k, v, position),
        )

    def _write_rows(self, name: str, new: Array, *, row: Array, slot: Array, position: Array, table: Any) -> KVRows:
        """Keys or values with new tokens; groups that have one are rounded from their tokens in `recent`."""
        stored: KVRows = getattr(self, name)
        group, slots = stored.group, self.slot_positions.shape[1]
        if group == 1:
            return stored.write(new, row, slot)
        assert self.recent is not None
        batch, capacity, _, _ = self.shape
        sequence, is_token = jnp.arange(batch)[:, None], position >= 0
        count = min((new.shape[1] + group - 2) // group + 1, capacity // group)
        first = jnp.min(position, axis=1, keepdims=True, where=is_token, initial=capacity) // group
        first = jnp.minimum(first, capacity // group - count)
        index = first + jnp.arange(count)
        row, slot = jnp.broadcast_to(sequence, index.shape), index % (slots // group)
        if table is not None:
            row = table[sequence, index // (slots // group)]
        # The tokens of these groups: new, recent, or stored.
        place = sequence, jnp.where(is_token, position - first * group, count * group)
        has_new = jnp.zeros((batch, count * group), bool).at[place].set(True, mode="drop")
        positions = first * group + jnp.arange(count * group)
        slot_positions = self.slot_positions.reshape(-1, slots // group, group)[row, slot].reshape(positions.shape)
        is_stored = (slot_positions == positions) & jnp.repeat(row != NO_PAGE, group, axis=1)
        old = masked_numbers(
            stored.part(lambda word: word[row, slot]), jnp.where(is_stored, positions, NO_TOKEN)[:, :, None]
        )
        old = self._with_recent(old, name, positions)
        has_new = has_new.reshape(batch, count, group).any(axis=2)
        row = jnp.where(has_new & (row != NO_PAGE), row, self.slot_positions.shape[0])
        return stored.write(old.at[place].set(new.astype(self.dtype), mode="drop"), row, slot)

    def release(self, ended: Any) -> KVCache:
        """A cache in which some sequences have no tokens, so that others can begin there; their pages are free.

        Args:
            ended: the sequences, bool, shape (batch,).

        Raises:
            ValueError, TypeError: for another shape or dtype.
        """
        ended = jnp.asarray(ended)
        if ended.dtype != bool or ended.shape != self.lengths.shape:
            raise ValueError(f"ended is {ended.dtype}{list(ended.shape)}; it must be bool{list(self.lengths.shape)}")
        return replace(self.truncate(jnp.where(ended, 0, self.lengths)), overflowed=self.overflowed & ~ended)

    def truncate(self, lengths: Any) -> KVCache:
        """A cache without the last tokens of sequences, for example the rejected tokens of speculative decoding.

        Tokens at positions from `lengths` on are dropped, and no query sees them. The next token of a sequence comes
        after the tokens that are left. Pages without these tokens are free. A sequence that overflowed stays so.

        A rolling cache has written each token over the one that is as many positions earlier as there are slots. That
        one does not come back: a query whose window it is in gets NaN. After ``n <= chunk`` tokens are dropped, the
        windows of all later tokens are whole.

        Args:
            lengths: the number of tokens to keep, integers, shape () or (batch,). A sequence that is not longer stays
                as it is. Within a compiled program, numbers below 0 count as 0.

        Raises:
            ValueError: for another shape, or for known numbers below 0.
            TypeError: for numbers that are no integers.

        Example:
            >>> import jax.numpy as jnp, jchop as jc
            >>> cache = jc.KVCache.full((2, 8, 4, 16)).update(jnp.ones((2, 6, 4, 16)), jnp.ones((2, 6, 4, 16)))
            >>> cache = cache.truncate([4, 6])
            >>> cache.lengths.tolist(), cache.positions[0].tolist()
            ([4, 6], [0, 1, 2, 3, -1, -1, -1, -1])
        """
        limit = _as_integers("lengths", lengths)
        if limit.shape not in ((), self.lengths.shape):
            raise ValueError(f"lengths have the shape {limit.shape}; it must be () or {self.lengths.shape}")
        if not has_tracer(limit) and (np.asarray(limit) < 0).any():
            raise ValueError(f"lengths hold {np.asarray(limit).min()}; they must be 0 or more")
        limit = jnp.clip(limit, 0, self.lengths).astype(jnp.int32)
        rows, slots = self.slot_positions.shape
        positions, table, end = self.slot_positions, self.table, limit[:, None]
        if table is not None:
            page_rows = jnp.where(table == NO_PAGE, rows, table)
            end = jnp.zeros(rows, jnp.int32).at[page_rows].set(end, mode="drop")[:, None]
            table = jnp.where(jnp.arange(table.shape[1]) * slots < limit[:, None], table, NO_PAGE)
        drops, mark = jnp.maximum(positions, _eviction_mark(positions)) >= end, NO_TOKEN
        if self.window is not None:
            mark = jnp.minimum(_eviction_mark(end - 1 - (end - 1 - jnp.arange(slots)) % slots), NO_TOKEN)
        recent = None if self.recent is None else self.recent.truncate(limit)
        positions = jnp.where(drops, mark, positions)
        return replace(self, slot_positions=positions, lengths=limit, table=table, recent=recent)

    def take(self, sequences: Any) -> KVCache:
        """A cache of some of the sequences, each as often as it is named: the survivors of a beam search.

        No number is rounded again. A paged cache frees the pages of sequences that are not named. The first copy of a
        sequence keeps its pages, and each further one gets pages of its own. A copy that finds no free page is marked
        in `overflowed`.

        Args:
            sequences: the sequence that each new one continues, integers, shape (sequences,). Within a compiled
                program, numbers that name no sequence count as the nearest one.

        Raises:
            ValueError: for another shape, or for known numbers that name no sequence.
            TypeError: for numbers that are no integers.

        Example:
            >>> import jax.numpy as jnp, jchop as jc
            >>> cache = jc.KVCache.full((3, 8, 4, 16)).update(jnp.ones((3, 2, 4, 16)), jnp.ones((3, 2, 4, 16)))
            >>> cache.truncate([0, 1, 2]).take([2, 2, 1]).lengths.tolist()
            [2, 2, 1]
        """
        index = _as_integers("sequences", sequences)
        check(index.ndim == 1, f"sequences have the shape {index.shape}; it must be (sequences,)")
        last_sequence = self.lengths.shape[0] - 1
        if not has_tracer(index) and (wrong := [n for n in np.asarray(index).tolist() if not 0 <= n <= last_sequence]):
            raise ValueError(f"sequences hold {wrong[0]}; the cache has sequences 0 to {last_sequence}")
        index = jnp.clip(index, 0, last_sequence)
        if self.table is None:
            return jax.tree.map(lambda leaf: leaf[index], self)
        rows, source_pages = self.slot_positions.shape[0], self.table[index]
        is_first_copy = jnp.argmax(index[:, None] == index, axis=1) == jnp.arange(index.size)
        table, has_page = jnp.where(is_first_copy[:, None], source_pages, NO_PAGE), source_pages != NO_PAGE
        page = jnp.broadcast_to(jnp.arange(table.shape[1]), table.shape)
        table = _assign_pages(table, rows, page, has_page, table.size)
        page_rows = jnp.where(table == NO_PAGE, rows, table)
        source_page = jnp.full(rows, NO_PAGE).at[page_rows].set(source_pages, mode="drop")
        take_rows = partial(jnp.take, indices=jnp.maximum(source_page, 0), axis=0)
        return replace(
            self,
            key_slots=self.key_slots.part(take_rows),
            value_slots=self.value_slots.part(take_rows),
            slot_positions=jnp.where((source_page == NO_PAGE)[:, None], NO_TOKEN, take_rows(self.slot_positions)),
            lengths=self.lengths[index],
            overflowed=self.overflowed[index] | (has_page & (table == NO_PAGE)).any(axis=1),
            table=table,
            recent=None if self.recent is None else self.recent.take(index),
        )

    # -- parts, for attention ------------------------------------------------------------------------------------------
    def part(self, start: Any, count: int) -> tuple[KVRows, KVRows, Array]:
        """Keys, values and positions of `count` slots of each sequence from `start` on, which are on whole pages."""
        if self.table is None:

            def take(leaf: Array) -> Array:
                group = self.slot_positions.shape[1] // leaf.shape[1]
                at = start if group == 1 else start // group
                return lax.dynamic_slice_in_dim(leaf, at, count // group, axis=1)

            positions = jnp.maximum(take(self.slot_positions), NO_TOKEN)
        else:
            page_size = self.slot_positions.shape[1]
            table = lax.dynamic_slice_in_dim(self.table, start // page_size, count // page_size, axis=1)
            take = partial(_gather_pages, table=table)
            positions = jnp.where(jnp.repeat(table == NO_PAGE, page_size, axis=1), NO_TOKEN, take(self.slot_positions))
        return self.key_slots.part(take), self.value_slots.part(take), positions

    def query_positions(self, positions: Any, tokens: int | None) -> Array:
        """The positions of queries, shape (batch, tokens): the given ones, or the last ones."""
        if positions is not None:
            return self._as_positions(positions, tokens)
        assert tokens is not None
        return self.lengths[:, None] - tokens + jnp.arange(tokens, dtype=jnp.int32)

    def incomplete(self, query: Array, window: int | None) -> Array:
        """Whether a query would attend to tokens that are not stored, in the shape of `query`."""
        lacks_tokens = jnp.broadcast_to(self.overflowed[:, None], query.shape)
        if self.window is None or window is None:
            return lacks_tokens
        oldest = jnp.maximum(self.lengths[:, None] - self.slot_positions.shape[1], 0)
        lacks_tokens |= (query >= 0) & (jnp.maximum(query - window + 1, 0) < oldest)
        return lacks_tokens | attention_mask(query, _eviction_mark(self.slot_positions), True, window).any(axis=2)

    def _as_positions(self, positions: Any, tokens: int | None) -> Array:
        array = _as_integers("positions", positions)
        batch = self.lengths.shape[0]
        count = array.shape[-1] if tokens is None and array.ndim else tokens
        if array.shape not in ((count,), (batch, count)):
            raise ValueError(f"positions have the shape {array.shape}; it must be ({count},) or ({batch}, {count})")
        return jnp.broadcast_to(array.astype(jnp.int32), (batch, count))

    def _check_positions(self, positions: Any) -> None:
        """Refuse positions that have no slot, if their values are known."""
        if has_tracer(positions):
            return
        values = np.asarray(positions)
        capacity = self.shape[1]
        wrong = values[(values < NO_TOKEN) | ((values >= capacity) & (self.window is None))]
        if max(self.key_slots.group, self.value_slots.group) > 1 and values.size:
            lows = np.min(values, axis=-1, where=values >= 0, initial=capacity)
            span = int(np.max(np.max(values, axis=-1) - lows)) + 1
            check(
                span <= values.shape[-1],
                f"positions span {span} tokens; with groups of tokens they must be within {values.shape[-1]}",
            )
        if wrong.size:
            raise ValueError(
                f"positions hold {wrong.flat[0]}; the cache has slots for 0 to {capacity - 1}, and -1 is padding"
            )

    def __repr__(self) -> str:
        layout = "paged" if self.table is not None else "full" if self.window is None else "rolling"
        options = {"window": self.window, "rotation": self.rotation, "recent": self.recent and self.recent.window}
        facts = [f"keys={str(self.key_slots.spec)!r}", f"values={str(self.value_slots.spec)!r}"]
        facts += [f"{name}={value}" for name, value in options.items() if value is not None]
        shape = getattr(self.slot_positions, "shape", None)  # none, if something else stands for the leaves
        return f"KVCache({layout}, slots={shape}, {', '.join(facts)}, dtype={self.dtype.name})"


def _as_integers(name: str, values: Any) -> Array:
    array = values if isinstance(values, Array) else jnp.asarray(np.asarray(values))
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} have the dtype {array.dtype}; they must be integers")
    return array


def attention_mask(query: Array, slots: Array, is_causal: bool, window: int | None) -> Array:
    """Whether queries at some positions attend to slots with some positions, shape (batch, queries, slots)."""
    query, slots = query[:, :, None], slots[:, None, :]
    mask = (query >= 0) & (slots >= 0)
    if is_causal:
        mask &= slots <= query
    return mask if window is None else mask & (slots > query - window)


def _eviction_mark(positions: Array) -> Array:
    """The positions that stand for lost tokens in a rolling cache, and the other way round: -2 is the token at 0."""
    return NO_TOKEN - 1 - positions


def _gather_pages(leaf: Array, table: Array) -> Array:
    """The slots on some pages of each sequence, in order; of pages that a sequence has not, another's."""
    slots = leaf[jnp.maximum(table, 0)]
    return slots.reshape(table.shape[0], -1, *leaf.shape[2:])


def _check_cache_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if len(tuple(shape)) != KV_NDIM:
        raise ValueError(f"shape={tuple(shape)} must be (batch, length, kv_heads, head_dim)")
    return tuple(check_int("shape", n, 1) for n in shape)


def _empty_cache(
    batch: int, shape: tuple[int, ...], keys: Any, values: Any, dtype: Any, rotation: Hadamard | None = None,
    recent: int = 0, window: int | None = None,
) -> KVCache:  # fmt: skip
    dtype, size = jnp.dtype(dtype), shape[-1]
    keys, values = kv_rows_spec("keys", keys), kv_rows_spec("values", values)
    if rotation is not None:
        if not isinstance(rotation, Hadamard):
            raise TypeError(f"rotation={rotation!r} must be a jchop.Hadamard, such as Hadamard('all')")
        rotation = Hadamard(size if rotation.size == "all" else rotation.size, rotation.signs)
        check(size % len(rotation.matrix) == 0, f"rotation={rotation} must have a size that divides head_dim={size}")
    recent = check_int("recent", recent, 0)
    if dtype.name not in CARRIERS:
        raise TypeError(f"dtype={dtype.name} must be one of {', '.join(CARRIERS)}")
    for name, group in (("keys", _tokens_of_group(keys)), ("values", _tokens_of_group(values))):
        if group > 1:
            hint = f"groups of {group} tokens in {name} need"
            check(window is None, f"{hint} KVCache.full or KVCache.paged, not a rolling cache")
            check(recent >= group, f"{hint} recent={group} or more, for tokens of the last group; it is {recent}")
            check(shape[1] % group == 0, f"{hint} a length, or page_size, that is a multiple; it is {shape[1]}")
    return KVCache(
        KVRows.empty(shape, keys, dtype),
        KVRows.empty(shape, values, dtype),
        jnp.full(shape[:2], NO_TOKEN, jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
        window=window,
        recent=_empty_cache(batch, (batch, recent, *shape[2:]), None, None, dtype, window=recent) if recent else None,
        rotation=rotation,
    )


# -- pages -------------------------------------------------------------------------------------------------------------


def _assign_pages(table: Array, pages: int, page: Array, is_token: Array, max_new_pages: int) -> Array:
    """A table in which tokens have their pages, taken from the free ones in the order of sequences.

    Args:
        table: the pages of each sequence in the order of its tokens, shape (batch, pages of a sequence).
        pages: number of pages in all.
        page: which page of its sequence each token is on, shape (batch, tokens).
        is_token: the tokens that are stored; in shape of `page`.
        max_new_pages: number of pages that are new at most, for static shapes.

    Returns:
        The table; an entry stays `NO_PAGE` if no page is free.
    """
    batch, columns = table.shape
    sequence = jnp.arange(batch)[:, None]
    needs_page = jnp.zeros(table.shape, bool).at[sequence, jnp.where(is_token, page, columns)].set(True, mode="drop")
    missing = needs_page & (table == NO_PAGE)
    used = jnp.zeros(pages, bool).at[jnp.where(table == NO_PAGE, pages, table)].set(True, mode="drop")
    (free,) = jnp.nonzero(~used, size=min(max_new_pages, pages), fill_value=NO_PAGE)
    free_index = jnp.cumsum(missing.ravel()).reshape(missing.shape) - 1
    new_pages = free.astype(table.dtype).at[free_index].get(mode="fill", fill_value=NO_PAGE)
    return jnp.where(missing, new_pages, table)


def _cache_auxdata(window: int | None, rotation: Sequence[Any] | None) -> tuple[int | None, Hadamard | None]:
    return window, None if rotation is None else Hadamard(*rotation)


# -- jax.export --------------------------------------------------------------------------------------------------------


register_export(KVRows, "jchop.KVCache.Rows")
export.register_pytree_node_serialization(
    KVCache,
    serialized_name="jchop.KVCache",
    serialize_auxdata=lambda static: json.dumps(
        static, default=lambda rotation: [rotation.size, rotation.signs]
    ).encode(),
    deserialize_auxdata=lambda data: _cache_auxdata(*json.loads(data)),
)
