"""Attention in Linen: what it is given besides queries and keys, and a packed cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from layer_references import checked

import jchop as jc

HEADS, DEPTH, LENGTH = 2, 16, 8
CACHE = jc.Rule(cache="int8(group=all)")
X = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5, 12)), "float32")


def attention(**more: Any) -> Any:
    return linen.MultiHeadDotProductAttention(HEADS, qkv_features=HEADS * DEPTH, **more)


PLAIN = attention(decode=True)
LAYER = jc.nn.quantize(PLAIN, CACHE)


@cache
def begun() -> Any:
    """The variables of the quantized module, and of the plain one."""
    whole = jnp.ones((2, LENGTH, 12))
    return jax.jit(lambda key: (LAYER.init(key, whole), PLAIN.init(key, whole)))(jax.random.key(0))


def a_packed_cache_is_that_of_the_twin() -> None:
    variables, usual = begun()
    params, kept = variables["params"], variables["cache"]
    jax.tree.map(np.testing.assert_array_equal, params, usual["params"])
    twin = jc.nn.quantize(nnx.MultiHeadAttention(HEADS, 12, HEADS * DEPTH, decode=True, rngs=nnx.Rngs(0)), CACHE)
    nnx.update(twin, params)
    twin.init_cache((2, LENGTH, 12))
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(v["cache"])) - 4 for v in (variables, usual)]
    assert sizes == [2 * 2 * LENGTH * HEADS * (DEPTH + 4), 2 * 2 * LENGTH * HEADS * 4 * DEPTH]

    @jax.jit
    def step(cache: Any, x: Any) -> Any:
        y, after = LAYER.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return after["cache"], y

    of_twin = nnx.jit(lambda twin, x: twin(x))
    for t in range(X.shape[1]):
        kept, y = step(kept, X[:, t : t + 1])
        np.testing.assert_allclose(y, of_twin(twin, X[:, t : t + 1]), rtol=1e-4, atol=1e-6)  # the sums are Linen's
    assert int(kept["cache_index"]) == X.shape[1]
    for name in ("cached_key", "cached_value"):
        assert isinstance(kept[name], jc.QArray)
        jax.tree.map(np.testing.assert_array_equal, kept[name], getattr(twin, name).get_value())


def a_cache_is_begun_and_checked() -> None:
    variables, usual = begun()
    params = {"params": usual["params"]}
    _, after = jax.jit(lambda params: LAYER.apply(params, X, mutable=["cache"]))(params)
    keys = after["cache"]["cached_key"]
    assert keys.shape == (2, 5, HEADS, DEPTH) and not np.asarray(jc.dequantize(keys)).any()
    by_start = jax.eval_shape(lambda params: LAYER.start(params, X), params)
    assert jax.tree.flatten(jax.eval_shape(lambda: {**after, **params})) == jax.tree.flatten(by_start)
    assert LAYER.start(variables, X[:, :1])["cache"] is variables["cache"]
    with pytest.raises(ValueError, match="cache of MultiHeadDotProductAttention at '' is not packed"):
        LAYER.apply(usual, X[:, :1], mutable=["cache"])


def masks_and_dropouts_go_through() -> None:
    """Where nothing is rounded, a rounded attention is Linen's own with all that this is given."""
    mask = linen.make_causal_mask(jnp.ones(X.shape[:2]))
    plain = attention(dropout_rate=0.5, broadcast_dropout=False)
    exact = jc.nn.quantize(plain, jc.Rule(activation="binary32"))

    @jax.jit
    def run(key: Any) -> Any:
        variables = plain.init(key, X, deterministic=True)
        arguments = {"mask": mask, "deterministic": False, "sow_weights": True}
        return [
            module.apply(variables, X, **arguments, rngs={"dropout": key}, mutable=["intermediates"])
            for module in (plain, exact)
        ]

    (y, sown), (of_exact, sown_exact) = run(jax.random.key(0))
    np.testing.assert_allclose(of_exact, y, rtol=1e-6, atol=1e-6)
    (weights,), (of_ours,) = (i["intermediates"]["attention_weights"] for i in (sown, sown_exact))
    np.testing.assert_allclose(of_ours, weights, rtol=1e-6, atol=1e-6)
    assert not np.triu(of_ours, 1).any()


@pytest.mark.parametrize(
    "check",
    [
        a_packed_cache_is_that_of_the_twin,
        pytest.param(a_cache_is_begun_and_checked, marks=pytest.mark.slow),
        pytest.param(masks_and_dropouts_go_through, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_attention(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@pytest.mark.smoke
def test_attention_with_functions_of_its_own_is_a_program_too() -> None:
    own = {"qk_attn_weights_einsum_cls": lambda: jnp.einsum, "attn_weights_value_einsum_cls": lambda: jnp.einsum}
    for more in ({"force_fp32_for_softmax": True}, own):
        module = attention(**more)
        variables = jax.eval_shape(lambda module=module: module.init(jax.random.key(0), X))
        layer = jc.nn.quantize(module, jc.Rule(activation="e4m3"))
        products = layer.report(variables, X).products
        assert len(products) == 6 and all(row.roundings["activation"] == "float8_e4m3" for row in products)
        assert jax.eval_shape(lambda v, layer=layer: layer.apply(v, X), variables).shape == X.shape
