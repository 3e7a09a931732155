"""Keys and values of attention kept packed, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jchop._spec.spec import Spec
from jchop._storage import QArray, dequantize, quantize


def empty_packed_cache(shape: Sequence[int], dtype: Any, spec: Spec) -> QArray:
    """A packed array of no tokens yet."""
    shapes = jax.eval_shape(lambda: quantize(jnp.zeros(shape, dtype), spec))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def attend_from_cache(
    layer: Any,
    spec: Spec,
    inputs: Array,
    *,
    mask: Array | None = None,
    deterministic: bool | None = None,
    is_causal: bool = False,
    rngs: Any = None,
    out_sharding: Any = None,
    qkv_sharding: Any = None,
) -> Array:
    """One token more: its key and value are packed into the cache, and it attends to all tokens there.

    Args:
        layer: a quantized attention layer with a cache.
        spec: the spec of keys and values.
        inputs: one token of each sequence, shape (..., 1, features).
        mask: the positions of the cache to which the token may attend.
        deterministic: as of the layer; there must be no dropout.
        is_causal: has no effect: the cache holds only earlier tokens.
        rngs: likewise, without a dropout.
        out_sharding: of the result.
        qkv_sharding: of query, key and value.
    """
    if layer.dropout_rate > 0 and not (layer.deterministic if deterministic is None else deterministic):
        raise ValueError(f"dropout_rate={layer.dropout_rate}: attention with a packed cache drops nothing; call eval()")
    if layer.cached_key is None or not isinstance(layer.cached_key.get_value(), QArray):
        raise ValueError("there is no packed cache yet: call init_cache of the quantized layer")
    query, key, value = (part(inputs, out_sharding=qkv_sharding) for part in (layer.query, layer.key, layer.value))
    if layer.normalize_qk:
        query, key = layer.query_ln(query), layer.key_ln(key)
    index = layer.cache_index[...]
    caches = [
        cache_with_token(cache, quantize(token.astype(cache.dtype), spec), index)
        for cache, token in ((layer.cached_key.get_value(), key), (layer.cached_value.get_value(), value))
    ]
    layer.cached_key.set_value(caches[0])
    layer.cached_value.set_value(caches[1])
    layer.cache_index[...] = index + 1
    length = caches[0].shape[-3]
    visible = jnp.broadcast_to(jnp.arange(length) <= index, (*key.shape[:-3], 1, 1, length))
    y = layer.attention_fn(
        query,
        *(dequantize(q, query.dtype) for q in caches),
        mask=nnx.combine_masks(mask, visible),
        deterministic=True,
        dtype=layer.dtype,
        precision=layer.precision,
    )
    return layer.out(y, out_sharding=out_sharding)


def cache_with_token(cache: QArray, token: QArray, index: Array) -> QArray:
    """A cache with one token of all heads put in its place."""
    if cache.spec != token.spec:
        raise ValueError(
            f"the cache is packed as {cache.spec}, and the rule of its layer has cache={token.spec}: it belongs to a "
            "model with another rule"
        )
    token_shape = (*cache.shape[:-3], 1, *cache.shape[-2:])
    if token.shape != token_shape:
        raise ValueError(f"inputs have keys of shape {token.shape}; with this cache they must have {token_shape}")

    def put(cache_array: Array, token_array: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(cache_array, token_array, index, cache_array.ndim - 3)

    return jax.tree.map(put, cache, token)
