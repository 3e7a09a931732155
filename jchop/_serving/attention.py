"""`dot_product_attention`: attention to the tokens of a cache, of which a block at a time is unpacked."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jchop._common.bit_ops import enable_x64_for, varying_like
from jchop._common.checks import check, check_bool, check_int
from jchop._common.settings import always_jit
from jchop._round.arguments import JCHOP_SCOPE, carrier_of_dtype, mark_results
from jchop._serving.kv_cache import KVCache, KVRows, attention_mask, masked_numbers

#: Slots of a block, unless the caller says otherwise.
_ATTENTION_BLOCK_SIZE = 128


def dot_product_attention(
    query: Any,
    cache: KVCache,
    *,
    positions: Any = None,
    scale: float | None = None,
    is_causal: bool = True,
    window: int | None = None,
    block_size: int = _ATTENTION_BLOCK_SIZE,
    precision: Any = None,
) -> Array:
    """Attention of queries to the tokens of a cache, as `jax.nn.dot_product_attention` has it to arrays.

    The cache is read in blocks of slots. Only one block of keys and values is unpacked at a time, and blocks that no
    query attends to are not read. The softmax is the online one of Milakov and Gimelshein (2018), as in
    FlashAttention. Blocks come in the order of slots, and the recent tokens of the cache are the last block. With m =
    -inf, l = 0 and a = 0 at first, and s the scores:

        s = (q · k) scale;  n = max(m, max s);  p = exp(s - n);  c = exp(m - n)
        l = l c + sum p;  a = a c + p · v;  m = n;  at last a / l

    in float32 (float64 if an operand is float64). The two products and the sums within a block are in the order of the
    backend. A cache that is not packed and has the same numbers gives the same results. Forward mode derivatives work,
    reverse mode does not, because the number of blocks depends on the lengths.

    Args:
        query: queries, shape (batch, tokens, heads, head_dim). Heads are a multiple of the cache's heads. A key and
            value head serves as many query heads in a row (grouped-query attention).
        cache: a `KVCache`, in which the queries' own tokens are already.
        positions: of the queries in their sequences, shape (tokens,) or (batch, tokens); -1 for padding, whose result
            is 0. Default: the last tokens, which `KVCache.update` without positions has added.
        scale: factor of the scores. Default 1 / sqrt(head_dim).
        is_causal: whether a query attends to its own token and earlier ones alone. Default True.
        window: number of tokens that a query attends to, itself included, if `is_causal`. Default: the cache's window.
        block_size: number of slots in a block; of a paged cache whole pages, at least one. Default 128.
        precision: as in `jax.lax.dot_general`.

    Returns:
        Shape and dtype of `query`. NaN for a sequence that overflowed, and for a query whose window a rolling cache no
        longer holds. 0 for a query that attends to nothing.

    Raises:
        TypeError: for a cache of another class, or a dtype that is no carrier.
        ValueError: for other shapes, or a window that is longer than the window of a rolling cache. For more queries
            than a rolling cache has slots.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> k, v, q = (jax.random.normal(jax.random.key(i), (1, 5, 2, 16)) for i in range(3))
        >>> cache = jc.KVCache.full((1, 8, 2, 16), keys="int8(group=all)", values="int8(group=all)").update(k, v)
        >>> y = jc.dot_product_attention(q, cache)
        >>> bool(jnp.allclose(y, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=0.02))
        True
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a jchop.KVCache")
    query = jnp.asarray(query)
    carrier_of_dtype(query.dtype, "query", complex_too=False)
    batch, slots, kv_heads, size = cache.shape
    if query.ndim != 4 or (query.shape[0], query.shape[3]) != (batch, size) or query.shape[2] % kv_heads:
        raise ValueError(
            f"query has the shape {query.shape}; it must be ({batch}, tokens, heads, {size}) with heads a multiple of "
            f"{kv_heads}"
        )
    tokens = query.shape[1]
    check_bool("is_causal", is_causal)
    if window is not None and check_int("window", window, 1, (1 << 31) - 1) and not is_causal:
        raise ValueError(f"window={window} needs is_causal=True")
    if cache.window is not None:
        if not is_causal or (window or 1) > cache.window:
            raise ValueError(
                f"is_causal={is_causal} and window={window}: the cache is rolling and holds {cache.window} tokens"
            )
        check(
            tokens <= slots, f"query has {tokens} tokens, and the rolling cache {slots} slots: attend in smaller chunks"
        )
        window = cache.window if window is None else window
    page_size = cache.slot_positions.shape[1]
    if cache.table is None:
        page_size = math.lcm(cache.key_slots.group, cache.value_slots.group)
    block = min(max(check_int("block_size", block_size, 1) // page_size, 1) * page_size, slots)
    scale = size**-0.5 if scale is None else scale
    query_positions = cache.query_positions(positions, tokens)
    options = {"is_causal": is_causal, "window": window, "block": block, "precision": precision}
    with enable_x64_for(query.dtype), jax.named_scope(JCHOP_SCOPE), jax.named_scope("dot_product_attention"):
        return mark_results(_attend_in_blocks(query, cache, query_positions, scale, **options))


@partial(always_jit, static_argnames=("is_causal", "window", "block", "precision"), inline=True)
def _attend_in_blocks(
    query: Array,
    cache: KVCache,
    query_positions: Array,
    scale: Any,
    *,
    is_causal: bool,
    window: int | None,
    block: int,
    precision: Any,
) -> Array:
    batch, slots, kv_heads, head_dim = cache.shape
    tokens, heads = query.shape[1:3]
    dtype = jnp.promote_types(jnp.float32, jnp.promote_types(query.dtype, cache.dtype))
    wide = query.astype(dtype) if cache.rotation is None else cache.rotation.rotate(query.astype(dtype))
    q = jnp.moveaxis(wide.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim), 1, 3)
    multiply = partial(jnp.einsum, precision=precision, preferred_element_type=dtype)

    def block_start(i: Array) -> Array:
        return jnp.minimum(i * block, slots - block)  # the last block ends with the cache

    def load_block(i: Array) -> tuple[KVRows, KVRows, Array]:
        keys, values, positions = cache.part(block_start(i), block)
        # Heads are moved before numbers are unpacked: fewer bytes, and unpacking is not fused with the move.
        return keys.heads_first(), values.heads_first(), positions

    def step(i: Array, state: Any) -> Any:
        # The next block is loaded here and unpacked in its iteration: `slice_fused_into_loop` in `_core/xla/cpu.py`.
        (keys, values, positions), sums = state
        # The last block may begin with slots of the block before.
        positions = jnp.where(block_start(i) + jnp.arange(block) < i * block, -1, positions)
        if cache.recent is not None:
            positions = jnp.where(cache.is_recent(positions), -1, positions)
        return load_block(i + 1), add_tokens(keys, values, positions, sums)

    def add_tokens(keys: KVRows, values: KVRows, positions: Array, sums: Any) -> Any:
        running_max, running_sum, weighted_sum = sums
        mask = attention_mask(query_positions, positions, is_causal, window)[:, None, None]
        k, v = (masked_numbers(rows, positions[:, None], 2).astype(dtype) for rows in (keys, values))
        scores = multiply("bngth,bnsh->bngts", q, k) * jnp.asarray(scale, dtype)
        scores = jnp.where(mask, scores, -jnp.inf)
        new_max = jnp.maximum(running_max, jnp.max(scores, axis=-1, keepdims=True))
        shift = jnp.where(new_max == -jnp.inf, 0, new_max)  # nothing seen yet
        weights, correction = jnp.exp(scores - shift), jnp.exp(running_max - shift)
        running_sum = running_sum * correction + jnp.sum(weights, axis=-1, keepdims=True)
        weighted_sum = weighted_sum * correction + multiply("bngts,bnsh->bngth", weights, v)
        return new_max, running_sum, weighted_sum

    shape = (batch, kv_heads, heads // kv_heads, tokens)
    init = (jnp.full((*shape, 1), -jnp.inf, dtype), jnp.zeros((*shape, 1), dtype), jnp.zeros((*shape, head_dim), dtype))
    init = tuple(varying_like(v, *jax.tree.leaves((q, cache, query_positions))) for v in init)
    first, end = _attention_block_range(cache, query_positions, is_causal, window, block)
    start = load_block(first), init
    _, sums = lax.fori_loop(first, end, step, start)
    if cache.recent is not None:
        keys, values, positions = cache.recent.part(0, cache.recent.shape[1])
        sums = add_tokens(keys.heads_first(), values.heads_first(), positions, sums)
    _, total, weighted_sum = sums
    y = jnp.where(total == 0, 0, weighted_sum / jnp.where(total == 0, 1, total))
    y = cache.rotate_back(jnp.moveaxis(y, 3, 1).reshape(query.shape))
    return jnp.where(cache.incomplete(query_positions, window)[:, :, None, None], jnp.nan, y).astype(query.dtype)


def _attention_block_range(
    cache: KVCache, query_positions: Array, is_causal: bool, window: int | None, block: int
) -> tuple[Array, Array]:
    """The first block that a query attends to, and the one after the last."""
    slots = cache.shape[1]
    longest = jnp.max(cache.lengths)
    if cache.window is not None:
        return jnp.int32(0), -(-jnp.minimum(longest, slots) // block)
    end = jnp.minimum(longest, jnp.max(query_positions) + 1) if is_causal else longest
    end = jnp.clip(end, 0, slots)
    if window is None:
        return jnp.int32(0), -(-end // block)
    oldest = jnp.min(jnp.where(query_positions >= 0, query_positions, slots))
    return jnp.maximum(oldest - window + 1, 0) // block, -(-end // block)
