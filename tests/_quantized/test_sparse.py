"""Weights of which formats keep n of every m inputs: in programs and in layers, in training and packed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from further import Further
from jax import lax

import jchop as jc

further = Further()


def kept(low: Any, m: int) -> int:
    """The most numbers that are not zero of every m along the first axis."""
    groups = np.pad(np.asarray(low), [(0, -len(low) % m), (0, 0)])
    return int((groups.reshape(-1, m, groups.shape[1]) != 0).sum(1).max())


@further
@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("int4(group=16,sparse=2:4)", "int4(group=16,axis=-2,sparse=2:4)"),
        ("int8(channel=0,sparse=2:4)", "int8(channel=-1,sparse=2:4,sparse_axis=-2)"),
        ("int8(sparse=1:4)", "int8(sparse=1:4,sparse_axis=-2)"),
        ("nvfp4(sparse=2:4)", "nvfp4(axis=-2,sparse=2:4)"),
    ],
)
def a_product_of_matrices(text: str, stored: str) -> None:
    w, x = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(32, 12), (5, 32)]))
    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=text))
    packed = low.pack(w, x)
    assert str(packed.spec) == stored
    wanted = jc.round_to_format(w.T, text).T  # groups along the inputs
    np.testing.assert_array_equal(jc.dequantize(packed), wanted)
    assert kept(wanted, 4) == (1 if "1:4" in text else 2)
    np.testing.assert_allclose(low(w, x), x @ wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(low(packed, x), low(w, x))
    gradient = jax.grad(lambda w: low(w, x).sum())(w)
    np.testing.assert_allclose(gradient, jnp.broadcast_to(x.sum(0)[:, None], w.shape), rtol=1e-5, atol=1e-5)


@further
@pytest.mark.parametrize(
    ("channels", "text"),
    [
        (3, "int8(channel=0,sparse=2:4)"),
        pytest.param(8, "int4(group=36,sparse=2:4)", marks=pytest.mark.slow),
        pytest.param(3, "int4(group=36,sparse=2:4)", marks=pytest.mark.slow),
    ],
)
def a_convolution(channels: int, text: str) -> None:
    """Consecutive inputs are channels; with three of them, groups of four run over the window, too."""
    kernel = jax.random.normal(jax.random.key(0), (3, 3, channels, 5))  # HWIO
    image = jax.random.normal(jax.random.key(1), (2, 7, 7, channels))

    def conv(p: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x, p, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    low = jc.quantize_fn(conv, jc.Rule(weight=text))
    packed = low.pack(kernel, image)
    rows = kernel.reshape(-1, 5).T
    wanted = jc.round_to_format(rows, text).T.reshape(kernel.shape)
    numbers = packed.dequantize() if hasattr(packed, "dequantize") else jc.dequantize(packed)
    np.testing.assert_array_equal(numbers, wanted)
    np.testing.assert_allclose(low(kernel, image), conv(wanted, image), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(low(packed, image), low(kernel, image))


@further
def experts_stacks_and_inputs() -> None:
    text = "int4(group=8,sparse=2:4)"
    w, x = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(3, 16, 16), (5, 16)]))
    low = jc.quantize_fn(lambda w, x: lax.scan(lambda h, one: (jnp.tanh(h @ one), None), x, w)[0], jc.Rule(weight=text))
    packed = low.pack(w, x)
    assert packed.shape == w.shape and packed.nbytes == w.size * 3 // 8 + w.size // 8 * 4
    np.testing.assert_allclose(low(packed, x), low(w, x), rtol=1e-5, atol=1e-6)
    both = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(activation=text, weight="int8"))
    rounded = jc.round_to_format(x, text) @ jc.round_to_format(w[0], "int8")
    np.testing.assert_allclose(both(w[0], x), rounded, rtol=1e-5, atol=1e-5)
    turned = jc.quantize_fn(lambda w, x: jnp.einsum("ik,ij->jk", x, w), jc.Rule(activation="int8(sparse=2:4)"))
    rounded = jc.round_to_format(x, "int8(sparse=2:4)") @ w[0]
    np.testing.assert_allclose(turned(w[0], x.T), rounded.T, rtol=1e-5, atol=1e-5)


def test_layers_of_flax() -> None:
    rule = jc.Rule(weight="int4(group=16,scale=bfloat16,sparse=2:4)")
    x = jax.random.normal(jax.random.key(2), (4, 32))
    model = nnx.Sequential(nnx.Linear(32, 16, rngs=nnx.Rngs(0)), nnx.LayerNorm(16, rngs=nnx.Rngs(1)))
    rules = [jc.Rule(layer="LayerNorm", weight=rule.weight), rule]
    low, packed = jc.nn.quantize(model, rules), jc.nn.quantize(model, rules, "ptq")
    kernel = model.layers[0].kernel[...]
    wanted = jc.round_to_format(kernel.T, rule.weight).T  # type: ignore[arg-type]
    stored = packed.layers[0].kernel.get_value()
    np.testing.assert_array_equal(jc.dequantize(stored), wanted)
    assert stored.nbytes == kernel.size // 2 and str(stored.spec) == "int4(group=16,axis=-2,scale=bfloat16,sparse=2:4)"
    np.testing.assert_array_equal(low(x), packed(x))
    assert str(packed.layers[1].scale.get_value().spec) == "int4(group=16,scale=bfloat16)"  # no number is dropped


@further.first
def what_is_refused() -> None:
    text, x = "int4(group=16,sparse=2:4)", jnp.ones((2, 32))
    with pytest.raises(ValueError, match="it stores no codes of the numbers that sparse drops"):
        rule = jc.Rule(weight=text, activation="int8", product="codes")
        jc.quantize_fn(lambda w, x: x @ w, rule)(jnp.ones((32, 4)), x)
    pairs = jc.quantize_fn(lambda w, x: jnp.einsum("bij,jki->bk", x, w), jc.Rule(weight="int4(group=9,sparse=2:4)"))
    with pytest.raises(ValueError, match="lie in several axes of the parameter, of which the fastest has 3"):
        pairs(jnp.ones((3, 5, 6)), jnp.ones((2, 6, 3)))


test_further = further.test()
