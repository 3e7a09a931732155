"""Attention with rounded operands in both of its products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes

from jchop._quantized.products.contraction import ProductRoundings, rounded_einsum

Array = jax.Array

__all__ = ["rounded_attention"]


def rounded_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    how: ProductRoundings,
    keys: tuple[Array | None, Array | None],
) -> tuple[Array, Array]:
    """`flax.nnx.dot_product_attention`, with its arguments, and the attention weights before a dropout.

    Args:
        query: shape (..., queries, heads, depth).
        key: shape (..., keys, heads or a divisor of them, depth).
        value: as `key`.
        bias: added to the scores.
        mask: the positions to which a query may attend.
        broadcast_dropout: one dropout for all heads and sequences.
        dropout_rng: its key.
        dropout_rate: of the attention weights.
        deterministic: no dropout.
        dtype: of the computation.
        precision: of the products.
        promote_dtype: function that casts arrays to one dtype.
        is_causal: no query attends to later keys.
        how: the roundings of both products.
        keys: a key for each product, if it is stochastic.
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    groups = query.shape[-2] // key.shape[-2]  # of queries that share a key and a value
    key, value = (jnp.repeat(v, groups, axis=-2) if groups > 1 else v for v in (key, value))
    query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    scores = rounded_einsum("...qhd,...khd->...hqk", query, key, precision=precision, how=how, key=keys[0])
    scores = scores if bias is None else scores + bias
    weights = dropout_weights = jax.nn.softmax(_mask_scores(scores, mask, is_causal)).astype(query.dtype)
    if not deterministic and dropout_rate > 0.0:
        shape = (1,) * (weights.ndim - 2) + weights.shape[-2:] if broadcast_dropout else weights.shape
        keep = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, shape)  # type: ignore[arg-type]
        dropout_weights = weights * (keep.astype(weights.dtype) / (1.0 - dropout_rate))
    return rounded_einsum(
        "...hqk,...khd->...qhd", dropout_weights, value, precision=precision, how=how, key=keys[1]
    ), weights


def _mask_scores(scores: Array, mask: Array | None, is_causal: bool) -> Array:
    masks = [] if mask is None else [mask.astype(bool)]
    if is_causal:
        masks.append(jnp.tril(jnp.ones(scores.shape[-2:], bool)))
    return jnp.where(math.prod(masks), scores, jnp.finfo(scores.dtype).min) if masks else scores
