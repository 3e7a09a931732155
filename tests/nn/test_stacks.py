"""Stacks of layers are packed layer by layer: each slice of a packed stack is that layer, packed alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from further import Further

import jchop as jc

further = Further()

LAYERS = 3
ROWS = "int8(group=all)"
#: Layers whose weight is summed over more than one of its axes, and the shape of their input.
KINDS: dict[str, tuple[Callable[[nnx.Rngs], Any], tuple[int, ...]]] = {
    "LinearGeneral": (lambda rngs: nnx.LinearGeneral((4, 8), 6, axis=(-2, -1), rngs=rngs), (2, 4, 8)),
    "Einsum": (lambda rngs: nnx.Einsum("bthk,hkd->btd", (4, 8, 6), (6,), rngs=rngs), (2, 3, 4, 8)),
    "Conv": (lambda rngs: nnx.Conv(8, 6, (3,), rngs=rngs), (2, 5, 8)),
    "MultiHeadAttention": (lambda rngs: nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs), (2, 3, 32)),
}


def same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def numbers(shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(5).standard_normal(shape), jnp.float32)


@nnx.jit
def each(stack: Any, x: jax.Array) -> jax.Array:
    """The result of each layer."""
    return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack, x)


def layers_in_a_scan(text: str) -> None:
    make, _ = KINDS["MultiHeadAttention"]
    stack = nnx.vmap(lambda key: make(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), LAYERS))
    x, rule = numbers((2, 3, 32)), jc.Rule(weight=text)
    run = nnx.jit(nnx.scan(lambda x, layer: x + layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry))
    same(run(x, jc.nn.quantize(stack, rule, "ptq")), run(x, jc.nn.quantize(stack, rule)))


class _Block(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + linen.MultiHeadDotProductAttention(4)(x), None


class _Blocks(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return linen.scan(_Block, **axes, length=LAYERS)()(x, None)[0]


def a_scan_of_linen(text: str, tmp_path: Path) -> None:
    x, model = numbers((2, 3, 32)), _Blocks()
    variables = model.init(jax.random.key(0), x)
    low = jc.nn.quantize(model, jc.Rule(weight=text))
    packed, run = low.pack(variables, x), jax.jit(low.apply)
    wanted = run(variables, x)
    same(run(packed, x), wanted)
    jc.nn.save(tmp_path / "x.safetensors", packed)
    same(run(jc.nn.load(tmp_path / "x.safetensors", packed), x), wanted)


@further.first
@pytest.mark.in_turn(12)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("LinearGeneral", ROWS),
        ("Einsum", "int4(group=8)"),
        ("Conv", "uint4(group=all,zero_point=integer)"),
        ("MultiHeadAttention", "int8"),
        ("LinearGeneral", "e4m3"),
        ("in a scan", "int4(group=8)"),
        ("in a scan of Linen", ROWS),
    ],
)
def a_packed_stack_serves_the_numbers_of_training(kind: str, text: str, tmp_path: Path) -> None:
    if kind not in KINDS:
        return layers_in_a_scan(text) if kind == "in a scan" else a_scan_of_linen(text, tmp_path)
    make, shape = KINDS[kind]
    stack = nnx.vmap(lambda key: make(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), LAYERS))
    x, rule = numbers(shape), jc.Rule(weight=text)
    packed = jc.nn.quantize(stack, rule, "ptq")
    wanted = each(jc.nn.quantize(stack, rule), x)
    same(each(packed, x), wanted)
    graph, state = nnx.split(stack)
    for i in range(LAYERS):
        alone = jc.nn.quantize(nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state)), rule, "ptq")
        same(jax.tree.map(lambda leaf, i=i: leaf[i], nnx.state(packed)), nnx.state(alone))
    jc.nn.save(tmp_path / "x.safetensors", packed)
    loaded = jc.nn.load(tmp_path / "x.safetensors", jc.nn.quantize(stack, rule, "ptq"))
    same(each(loaded, x), wanted)


test_further = further.test()
