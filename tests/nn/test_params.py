"""Parameters of any pytree, the table of a model, and the memory that packing saves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from further import Further
from layer_references import checked, each

import jchop as jc

further = Further()

TREE = {
    "layers": [{"kernel": np.random.default_rng(0).normal(size=(8, 6)).astype("float32"), "bias": jnp.ones(6)}],
    "head": {"kernel": jnp.asarray(np.random.default_rng(1).normal(size=(6, 2)), "float32"), "step": jnp.array(3)},
}


@further.first
def leaves_are_packed_by_path() -> None:
    rules = [jc.Rule("head/kernel"), jc.Rule("kernel", weight="e4m3"), jc.Rule("bias", weight="int8(group=all)")]
    packed = jc.quantize(TREE, rules)
    assert isinstance(packed["layers"][0]["kernel"], jc.QArray) and packed["head"]["kernel"] is TREE["head"]["kernel"]
    assert packed["layers"][0]["kernel"].nbytes == 48 and packed["head"]["step"] is TREE["head"]["step"]
    back = jc.dequantize(packed)
    np.testing.assert_array_equal(back["layers"][0]["kernel"], jc.round_to_format(TREE["layers"][0]["kernel"], "e4m3"))
    np.testing.assert_array_equal(back["layers"][0]["bias"], np.ones(6))

    @jax.jit
    def run(params: Any, x: Any) -> Any:
        dense = jc.dequantize(params)
        return (x @ dense["layers"][0]["kernel"] + dense["layers"][0]["bias"]) @ dense["head"]["kernel"]

    assert run(packed, jnp.ones((3, 8))).shape == (3, 2)


def stochastic_leaves_draw_from_keys_of_their_own() -> None:
    tree = {"a": jnp.full((64,), 0.3), "b": jnp.full((64,), 0.3)}
    packed = jc.quantize(tree, jc.Rule(weight="e4m1:stochastic"), jax.random.key(0))
    a, b = (np.asarray(jc.dequantize(packed[name])) for name in "ab")
    assert (a != b).any() and set(a) == set(b) == {np.float32(0.25), np.float32(0.375)}


@each(
    ("rules", "error", "words"),
    [
        (jc.Rule("tail", weight="e4m3"), ValueError, "rules: 'tail' matches no array"),
        (jc.Rule("kernel", weight="e4m3", bias="e4m3"), ValueError, "bias has no effect"),
        (jc.Rule("step", weight="e4m3"), TypeError, "the leaf 'head/step'.*int32"),
        (jc.Rule("kernel", weight="e4m3:stochastic"), ValueError, "the leaf 'head/kernel'.*key=None"),
        (jc.Rule("bias", weight="int4(group=2,axis=1)"), ValueError, "the leaf 'layers/0/bias'"),
    ],
)
def test_what_cannot_be_packed_is_named(rules: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        jc.quantize(TREE, rules)


class Mixed(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(10, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(8))


@further
def the_report_is_what_quantize_does() -> None:
    plain = Mixed(rngs=nnx.Rngs(0))
    rules = [
        jc.Rule("norm"),
        jc.Rule("embed", weight="int8(group=all)"),
        jc.Rule("attention", weight="e4m3", activation="e5m2"),
    ]
    table = jc.nn.report(plain, rules)
    assert [(row.path, row.layer, row.specs) for row in table.rows] == [
        ("attention/key", "LinearGeneral", (("weight", "float8_e4m3"), ("activation", "float8_e5m2"))),
        ("attention/out", "LinearGeneral", (("weight", "float8_e4m3"), ("activation", "float8_e5m2"))),
        ("attention/query", "LinearGeneral", (("weight", "float8_e4m3"), ("activation", "float8_e5m2"))),
        ("attention/value", "LinearGeneral", (("weight", "float8_e4m3"), ("activation", "float8_e5m2"))),
        ("attention", "MultiHeadAttention", (("activation", "float8_e5m2"),)),
        ("embed", "Embed", (("weight", "int8(group=all)"),)),
        ("norm", "LayerNorm", ()),
        ("", "Mixed", ()),
    ]  # fmt: skip
    packed = jc.nn.quantize(plain, rules, mode="ptq")
    before, after = (sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(m))) for m in (plain, packed))
    assert (table.bytes_before, table.bytes_after) == (before, after)
    assert "(the model)" in str(table) and "nothing, and cannot be quantized" in str(table)
    shapes = nnx.eval_shape(lambda: Mixed(rngs=nnx.Rngs(0)))
    assert jc.nn.report(shapes, rules) == table
    assert jc.nn.report(plain).bytes_after == before


def packed_models_are_small() -> None:
    """int4 in blocks of 128 with 16-bit scales is 4.125 bits; biases and norms stay."""
    layers = [nnx.Linear(256, 256, rngs=nnx.Rngs(i)) for i in range(4)]
    plain = nnx.Sequential(*layers)
    packed = jc.nn.quantize(plain, jc.Rule(weight="int4(group=128,scale=bfloat16)"), mode="weight_only")
    before, after = (sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(m))) for m in (plain, packed))
    assert after < 0.14 * before


@pytest.mark.parametrize(
    "check",
    [stochastic_leaves_draw_from_keys_of_their_own, pytest.param(packed_models_are_small, marks=pytest.mark.slow)],
    ids=lambda check: check.__name__,
)
def test_leaves_and_models(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


test_further = further.test()
