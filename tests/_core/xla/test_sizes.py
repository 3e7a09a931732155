"""Programs with symbolic shapes, which `jax.export` stores: the numbers of the same program with known shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import jchop as jc

W = jnp.asarray(np.random.default_rng(0).normal(size=(64, 16)), jnp.float32)
KERNEL = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 8, 4)), jnp.float32)
ROW = "int8(group=all)"
ROUNDED = ("int8", "mxfp8_e4m3", "nvfp4", "e4m3", "posit16")
STORED = ("uint8(group=all,zero_point=integer)", "nf4", "nvfp4")
RULES = {
    "one scale": jc.Rule(weight="int4(group=32)", activation="int8", product="codes"),
    "float": jc.Rule(weight=ROW, activation=ROW),
    "codes": jc.Rule(weight=ROW, activation=ROW, product="codes"),
    "blocks": jc.Rule(weight="int8(group=32)", activation="int8(group=32)", product="codes"),
    "float8": jc.Rule(weight="e4m3fn(group=all)", activation="e4m3fn(group=all)", product="codes"),
    "weights alone": jc.Rule(weight="int4(group=32)", product="codes"),
}
ACCUMULATED = jc.MatmulSpec(product="bfloat16", accumulate="bfloat16")


def served(rule: jc.Rule) -> Callable[[Any], Any]:
    low = jc.quantize_fn(lambda w, x: jnp.tanh(x @ w), rule)
    packed = low.pack(W, jnp.ones((4, 64)))
    return lambda x: low(packed, x)


def convolved(x: Any) -> Any:
    """The rows as images."""
    fun = jc.quantize_fn(
        lambda w, x: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        RULES["codes"],
    )
    return fun(KERNEL, x.reshape(-1, 2, 4, 8))


def layers(x: Any) -> Any:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), nnx.relu, nnx.LayerNorm(32, rngs=rngs))
    return jc.nn.quantize(model, [jc.Rule(weight=ROW, activation=ROW)], mode="ptq")(x)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    **{f"round to {spec}": lambda x, spec=spec: jc.round_to_format(x, spec) for spec in ROUNDED},
    **{f"store as {spec}": lambda x, spec=spec: jc.dequantize(jc.quantize(x, spec)) for spec in STORED},
    "convolution": convolved,
    "layers": layers,
    "emulated": jc.emulate(lambda x: jax.nn.softmax((x - x.mean(-1, keepdims=True)) @ W / 3), "e5m2"),
    "sums": lambda x: jc.math.matmul(x, W, ACCUMULATED),
}  # fmt: skip
LAYERS = {f"layer, {name}": rule for name, rule in RULES.items()}


def program(name: str) -> Callable[[Any], Any]:
    return served(LAYERS[name]) if name in LAYERS else PROGRAMS[name]


@pytest.mark.in_turn(64)
@pytest.mark.parametrize("name", (*PROGRAMS, *LAYERS))
def test_exported(name: str) -> None:
    shape = export.symbolic_shape("b, 64")
    run = jax.jit(program(name))
    exported = export.export(run)(jax.ShapeDtypeStruct(shape, jnp.float32))
    for rows in (3, 300):
        x = np.random.default_rng(rows).normal(size=(rows, 64)).astype(np.float32)
        known = run(x)
        if name in ("emulated", "layers", "layer, float"):  # XLA chooses the order of sums of floats by the shape
            np.testing.assert_allclose(exported.call(x), known, rtol=0.3 if name == "emulated" else 1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(exported.call(x), known)


@pytest.mark.in_turn(32)
@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("round to mxfp8_e4m3", "cuda"),
        ("sums", "tpu"),
        ("layer, weights alone", "cuda"),
        ("round to mxfp8_e4m3", "tpu"),
    ],
)
def test_kernels_are_left_out(name: str, platform: str) -> None:
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, 64"), jnp.float32)
    exported = export.export(jax.jit(program(name)), platforms=(platform,))(shape)
    assert (
        'custom_call_target = "tpu_custom_call' not in exported.mlir_module() and "triton" not in exported.mlir_module()
    )


def test_draws_need_known_lengths() -> None:
    def drawn(x: Any) -> Any:
        return jc.round_to_format(x, "bfloat16:stochastic", jax.random.key(0))

    with pytest.raises(NotImplementedError, match="a symbolic length cannot be drawn for"):
        export.export(jax.jit(drawn))(jax.ShapeDtypeStruct(export.symbolic_shape("b, 64"), jnp.float32))


def test_lengths_that_must_be_known() -> None:
    for function, said in (
        (lambda x: jc.math.sum(x, "bfloat16", axis=0), "none runs along a symbolic length"),
        (jc.emulate(lambda x: x.T @ x, "bfloat16", accumulate=ACCUMULATED), "none runs along a symbolic length"),
        (
            lambda x: jc.round_to_format(x, "int8(group=4,axis=0)"),
            "cuts an axis into groups, and its length must be known",
        ),
    ):
        with pytest.raises(NotImplementedError, match=said):
            export.export(jax.jit(function))(jax.ShapeDtypeStruct(export.symbolic_shape("b, 64"), jnp.float32))


def test_one_scale_along_a_symbolic_last_axis() -> None:
    run = jax.jit(lambda x: jc.round_to_format(x, "int8"))
    exported = export.export(run)(jax.ShapeDtypeStruct(export.symbolic_shape("4, b"), jnp.float32))
    x = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    np.testing.assert_array_equal(exported.call(x), run(x))
