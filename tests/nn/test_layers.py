"""Every layer computes what a reference computes that is written by hand from `round_to_format` and JAX.

One rule rounds everything that a layer has to other formats, plain ones and blocks, so that a rounding that is left
out, done twice or laid out wrongly shows; packed parameters give the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jchop as jc

WEIGHT, ACTIVATION, BIAS, OUTPUT = "mxfp8_e4m3(group=4)", "mxfp8_e5m2(group=4)", "e4m2", "e5m4"
RULE = jc.nn.Rule(weight=WEIGHT, activation=ACTIVATION, bias=BIAS, output=OUTPUT)
NO_BIAS = ("Embed", "RMSNorm", "LoRA")


def by_rows(w: Any, spec: str = WEIGHT) -> Any:
    """A kernel (summed, kept), rounded along the axis that is summed over."""
    return jc.round_to_format(w.T, spec).T


def act(x: Any) -> Any:
    return jc.round_to_format(x, ACTIVATION)


def end(y: Any) -> Any:
    return jc.round_to_format(y, OUTPUT)


def small(b: Any) -> Any:
    return jc.round_to_format(b, BIAS)


def linear(p: Any, x: Any) -> Any:
    return end(act(x) @ by_rows(p.kernel[...]) + small(p.bias[...]))


def linear_general(p: Any, x: Any) -> Any:
    w = p.kernel[...]  # (a, b, out): both summed over
    a, b, out = w.shape
    laid = act(x.reshape(-1, a * b))
    return end(laid @ by_rows(w.reshape(a * b, out)) + small(p.bias[...])).reshape(*x.shape[:-2], out)


def einsum(p: Any, x: Any) -> Any:
    w = jnp.swapaxes(jc.round_to_format(jnp.swapaxes(p.kernel[...], 1, 2), WEIGHT), 1, 2)  # (h, a, b): a summed over
    return end(jnp.einsum("nha,hab->nhb", act(x), w) + small(p.bias[...]))


def conv(p: Any, x: Any) -> Any:
    w = p.kernel[...]  # (kh, kw, cin, cout)
    rows = w.reshape(-1, w.shape[-1])
    image = act(x.reshape(x.shape[0], -1)).reshape(x.shape)
    y = lax.conv_general_dilated(
        image, by_rows(rows).reshape(w.shape), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return end(y + small(p.bias[...]))


def conv_transpose(p: Any, x: Any) -> Any:
    w = p.kernel[...]
    image = act(x.reshape(x.shape[0], -1)).reshape(x.shape)
    y = lax.conv_transpose(image, by_rows(w.reshape(-1, w.shape[-1])).reshape(w.shape), (2,), "SAME")
    return end(y + small(p.bias[...]))


def embed(p: Any, x: Any) -> Any:
    return end(jc.round_to_format(p.embedding[...], WEIGHT)[x])


def batch_norm(p: Any, x: Any) -> Any:
    x, scale, bias = act(x), jc.round_to_format(p.scale[...], WEIGHT), small(p.bias[...])
    mean = x.mean(0)
    return end((x - mean) * (lax.rsqrt(jnp.maximum(0.0, (x * x).mean(0) - mean * mean) + 1e-5) * scale) + bias)


def layer_norm(p: Any, x: Any) -> Any:
    x, scale, bias = act(x), jc.round_to_format(p.scale[...], WEIGHT), small(p.bias[...])
    mean = x.mean(-1, keepdims=True)
    var = jnp.maximum(0.0, (x * x).mean(-1, keepdims=True) - mean * mean)
    return end((x - mean) * (lax.rsqrt(var + 1e-6) * scale) + bias)


def rms_norm(p: Any, x: Any) -> Any:
    x, scale = act(x), jc.round_to_format(p.scale[...], WEIGHT)
    return end(x * (lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale))


def group_norm(p: Any, x: Any) -> Any:
    x, scale, bias = act(x), jc.round_to_format(p.scale[...], WEIGHT), small(p.bias[...])
    g = x.reshape(x.shape[0], -1, 2, x.shape[-1] // 2)
    mean = g.mean((1, 3))
    var = jnp.maximum(0.0, (g * g).mean((1, 3)) - mean * mean)
    mean, var = (jnp.repeat(v, x.shape[-1] // 2, axis=1)[:, None] for v in (mean, var))
    return end((x - mean) * (lax.rsqrt(var + 1e-6) * scale) + bias)


def lora(p: Any, x: Any) -> Any:
    return end(act(x) @ by_rows(p.lora_a[...]) @ by_rows(p.lora_b[...]))


def lora_linear(p: Any, x: Any) -> Any:
    y = act(x) @ by_rows(p.kernel[...]) + small(p.bias[...])
    return end(y + lora(p.lora, x))


def heads(p: Any, x: Any) -> Any:
    w = p.kernel[...]
    y = act(x) @ by_rows(w.reshape(w.shape[0], -1))
    return end(y.reshape(*x.shape[:-1], *w.shape[1:]) + small(p.bias[...]))


def attention(p: Any, x: Any) -> Any:
    q, k, v = (heads(part, x) for part in (p.query, p.key, p.value))
    q = q / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    weights = jax.nn.softmax(jnp.einsum("nqhd,nkhd->nhqk", act(q), act(k)))
    by_keys = jnp.moveaxis(act(jnp.moveaxis(v, 1, -1)), -1, 1)  # (n, k, h, d): k summed over
    y = jnp.einsum("nhqk,nkhd->nqhd", act(weights), by_keys)
    return linear_general(p.out, y)


def lstm(p: Any, carry: Any) -> Any:
    c, h, x = carry

    def gate(i: Any, r: Any) -> Any:
        return end(act(x) @ by_rows(i.kernel[...])) + linear(r, h)

    i, f, o = (nnx.sigmoid(gate(*pair)) for pair in ((p.ii, p.hi), (p.if_, p.hf), (p.io, p.ho)))
    c = f * c + i * jnp.tanh(gate(p.ig, p.hg))
    return o * jnp.tanh(c)


Case = tuple[Callable[[nnx.Rngs], Any], Callable[[Any, Any], Any], tuple[int, ...]]
LAYERS: dict[str, Case] = {
    "Linear": (lambda r: nnx.Linear(10, 6, rngs=r), linear, (5, 10)),
    "LinearGeneral": (lambda r: nnx.LinearGeneral((2, 5), 6, axis=(-2, -1), rngs=r), linear_general, (3, 2, 5)),
    "Einsum": (lambda r: nnx.Einsum("nha,hab->nhb", (2, 6, 5), (2, 5), rngs=r), einsum, (3, 2, 6)),
    "Conv": (lambda r: nnx.Conv(3, 4, (2, 3), rngs=r), conv, (2, 5, 4, 3)),
    "ConvTranspose": (lambda r: nnx.ConvTranspose(3, 4, (3,), (2,), rngs=r), conv_transpose, (2, 5, 3)),
    "Embed": (lambda r: nnx.Embed(7, 6, rngs=r), embed, (4,)),
    "BatchNorm": (lambda r: nnx.BatchNorm(6, rngs=r), batch_norm, (9, 6)),
    "LayerNorm": (lambda r: nnx.LayerNorm(6, rngs=r), layer_norm, (4, 6)),
    "RMSNorm": (lambda r: nnx.RMSNorm(6, rngs=r), rms_norm, (4, 6)),
    "GroupNorm": (lambda r: nnx.GroupNorm(6, num_groups=2, rngs=r), group_norm, (3, 5, 6)),
    "LoRA": (lambda r: nnx.LoRA(6, 3, 5, b_initializer=nnx.initializers.normal(), rngs=r), lora, (4, 6)),
    "LoRALinear": (
        lambda r: nnx.LoRALinear(6, 5, lora_rank=3, b_initializer=nnx.initializers.normal(), rngs=r),
        lora_linear,
        (4, 6),
    ),
    "MultiHeadAttention": (
        lambda r: nnx.MultiHeadAttention(2, 6, qkv_features=8, decode=False, rngs=r),
        attention,
        (2, 5, 6),
    ),
}


def data(name: str, shape: tuple[int, ...]) -> Any:
    draw = np.random.default_rng(len(name))
    return (
        jnp.asarray(draw.integers(0, 7, shape)) if name == "Embed" else jnp.asarray(draw.normal(size=shape), "float32")
    )


def moved(model: Any) -> Any:
    """A model none of whose biases and gains is at the zero or one that it starts from."""
    draw = np.random.default_rng(0)
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda v: v + jnp.asarray(draw.normal(size=v.shape) / 4, v.dtype), state))
    return model


SLOW = ("MultiHeadAttention", "ConvTranspose")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in LAYERS])
def test_layers_compute_the_reference(name: str) -> None:
    make, reference, shape = LAYERS[name]
    plain, x = moved(make(nnx.Rngs(0))), data(name, shape)
    rule = dataclasses.replace(RULE, bias=None) if name in NO_BIAS else RULE
    trained, packed = jc.nn.quantize(plain, rule), jc.nn.quantize(plain, rule, mode="ptq")

    @nnx.jit
    def run(plain: Any, trained: Any, packed: Any, x: Any) -> Any:
        return reference(plain, x), trained(x), packed(x)

    expected, of_trained, of_packed = run(plain, trained, packed, x)
    assert type(trained).__name__ == name and type(trained) is not type(plain)
    np.testing.assert_array_equal(of_trained, expected)
    np.testing.assert_array_equal(of_packed, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_reach_every_parameter(name: str) -> None:
    make, _, shape = LAYERS[name]
    layer = jc.nn.quantize(moved(make(nnx.Rngs(0))), jc.nn.Rule(weight="e4m3", output="bfloat16"))

    def loss(layer: Any, x: Any) -> Any:
        y = layer(x)
        return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

    @nnx.jit
    def gradient(layer: Any, x: Any) -> Any:
        return nnx.grad(loss)(layer, x)

    found = dict(nnx.to_flat_state(gradient(layer, data(name, shape))))
    assert found
    # A bias that is the same for every key moves all scores of a query alike, and softmax does not see it.
    still = {("key", "bias")} if name == "MultiHeadAttention" else set()
    assert {path for path, g in found.items() if not np.any(np.abs(g[...]) > 1e-5)} == still


@pytest.mark.slow
def test_cells_are_made_of_layers() -> None:
    cell = moved(nnx.LSTMCell(4, 4, rngs=nnx.Rngs(0)))
    rounded, packed = jc.nn.quantize(cell, RULE), jc.nn.quantize(cell, RULE, mode="ptq")
    c, h, x = (data(name, (3, 4)) for name in ["c", "hh", "xxx"])

    @nnx.jit
    def run(cell: Any, rounded: Any, packed: Any) -> Any:
        return lstm(cell, (c, h, x)), rounded((c, h), x)[1], packed((c, h), x)[1]

    expected, of_rounded, of_packed = run(cell, rounded, packed)
    np.testing.assert_array_equal(of_rounded, expected)
    np.testing.assert_array_equal(of_packed, expected)


@pytest.mark.parametrize(
    "cell", [nnx.GRUCell, *(pytest.param(c, marks=pytest.mark.slow) for c in (nnx.SimpleCell, nnx.OptimizedLSTMCell))]
)
def test_recurrent_networks_scan_quantized_cells(cell: Any) -> None:
    plain = cell(3, 4, rngs=nnx.Rngs(0))
    x = data("RNN", (2, 5, 3))
    rule = jc.nn.Rule(weight="e4m3", activation="e5m2")
    rounded, packed = (jc.nn.quantize(nnx.RNN(plain), rule, mode=mode) for mode in ("qat", "ptq"))

    @nnx.jit
    def run(one: Any, rounded: Any, packed: Any) -> Any:
        carry = one.initialize_carry((2, 3), nnx.Rngs(0))
        steps = []
        for t in range(5):
            carry, y = one(carry, x[:, t])
            steps.append(y)
        return jnp.stack(steps, 1), rounded(x, rngs=nnx.Rngs(0)), packed(x, rngs=nnx.Rngs(0))

    expected, of_rounded, of_packed = run(rounded.cell, rounded, packed)
    np.testing.assert_allclose(of_rounded, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(of_packed, of_rounded)
