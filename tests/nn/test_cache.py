"""Keys and values that attention keeps for decoding, packed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_references import checked, each

import jchop as jc

HEADS, DEPTH, LENGTH = 4, 16, 8
X = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5, 24)), "float32")


def attention(**more: Any) -> Any:
    more = {"num_kv_heads": 2, "normalize_qk": True, "decode": True, **more}
    return nnx.MultiHeadAttention(HEADS, 24, qkv_features=HEADS * DEPTH, rngs=nnx.Rngs(0), **more)


@nnx.jit
def step(layer: Any, x: Any) -> Any:
    return layer(x, is_causal=True)


def without_decoding_nothing_changes() -> None:
    plain = attention()
    layer = jc.nn.quantize(plain, jc.Rule(cache="int8(group=all)"))
    run = nnx.jit(lambda layer, x: layer(x, decode=False))
    np.testing.assert_array_equal(run(layer, X), run(plain, X))
    usual = jc.nn.quantize(plain, jc.Rule(activation="e4m3"))
    usual.init_cache((2, LENGTH, 24))
    assert usual.cached_key[...].shape == (2, LENGTH, 2, DEPTH)
    row = jc.nn.report(plain, jc.Rule(cache="int8(group=all)")).rows
    assert [r.specs for r in row if r.layer == "MultiHeadAttention"] == [(("cache", "int8(group=all)"),)]


def what_cannot_be_decoded_is_said() -> None:
    rule = jc.Rule(cache="int8(group=all)")
    layer = jc.nn.quantize(attention(), rule)
    with pytest.raises(ValueError, match="call init_cache"):
        layer(X[:, :1])
    layer.init_cache((2, LENGTH, 24))
    for arguments, more, words in (
        ((X,), {}, r"keys of shape \(2, 5, 2, 16\)"),
        ((X[:, :1], X[:, :1]), {}, "inputs_k and inputs_v"),
    ):
        with pytest.raises(ValueError, match=words):
            layer(*arguments, **more)
    drops = jc.nn.quantize(attention(dropout_rate=0.5, deterministic=False), rule)
    drops.init_cache((2, LENGTH, 24))
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5"):
        drops(X[:, :1])
    for spec in (
        "int8(group=tensor)",
        "int8(group=all,axis=-2)",
        "int8(group=8,axis=0)",
        "int8(group=(8,8),axis=(-2,-1))",
        "nvfp4",
        "int8(channel=0)",
        "e4m3:stochastic",
        "int8(group=8):stochastic",
    ):
        with pytest.raises(ValueError, match="each token and head by itself"):
            jc.Rule(cache=spec)
    with pytest.raises(ValueError, match=r"cache has no effect .* Linear"):
        jc.nn.quantize(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), rule)


@each(
    ("spec", "per_number"), [("int8(group=all)", (DEPTH + 4) / DEPTH), ("int4(group=8)", (DEPTH / 2 + 2 * 4) / DEPTH)]
)
def a_packed_cache_is_one_rounded_by_hand(spec: str, per_number: float) -> None:
    plain = attention()
    layer = jc.nn.quantize(plain, jc.Rule(cache=spec))
    layer.init_cache((2, LENGTH, 24))
    plain.init_cache((2, LENGTH, 24))
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(m, nnx.Cache))) - 4 for m in (layer, plain)]
    assert sizes[0] == per_number * 2 * 2 * LENGTH * 2 * DEPTH and sizes[1] == 4 * 2 * 2 * LENGTH * 2 * DEPTH

    @nnx.jit
    def by_hand(plain: Any, x: Any, t: Any) -> Any:
        query, keys = plain.query_ln(plain.query(x)), plain.key_ln(plain.key(x))
        keys, values = (jc.round_to_format(v, spec) for v in (keys, plain.value(x)))
        fill = [(0, 0), (0, LENGTH - x.shape[1]), (0, 0), (0, 0)]
        seen = (jnp.arange(LENGTH) <= t)[None, None, None]
        query = jax.lax.dynamic_slice_in_dim(query, t, 1, 1)
        y = nnx.dot_product_attention(query, jnp.pad(keys, fill), jnp.pad(values, fill), mask=seen)
        return plain.out(y)

    for t in range(X.shape[1]):
        got, expected = step(layer, X[:, t : t + 1]), by_hand(plain, X, t)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert int(layer.cache_index[...]) == X.shape[1] and isinstance(layer.cached_key[...], jc.QArray)
    keys = jc.dequantize(layer.cached_key.get_value())[:, : X.shape[1]]
    expected = jc.round_to_format(plain.key_ln(plain.key(X)), spec)
    np.testing.assert_allclose(keys, expected, rtol=1e-5, atol=1e-6)


def test_a_token_follows_the_one_before() -> None:
    spec = "int8(group=all)"
    layer = jc.nn.quantize(attention(normalize_qk=False), jc.Rule(cache=spec))
    layer.init_cache((2, LENGTH, 24))
    for t in range(2):
        step(layer, X[:, t : t + 1])
    keys = jc.dequantize(layer.cached_key.get_value())
    np.testing.assert_allclose(keys[:, :2], jc.round_to_format(layer.key(X[:, :2]), spec), rtol=1e-5, atol=1e-6)
    assert not keys[:, 2:].any()


@pytest.mark.parametrize(
    "check",
    [
        what_cannot_be_decoded_is_said,
        pytest.param(a_packed_cache_is_one_rounded_by_hand, marks=pytest.mark.slow),
        pytest.param(without_decoding_nothing_changes, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_what_a_cache_is_not(check: Any, request: Any) -> None:
    """Errors, and layers that do not decode; the first of these checks runs by default."""
    checked(check, request)
