"""Floats times packed weights: every layout of the codes, panels that do not divide the sum, and no copy as floats."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jchop as jc
from jchop._products.codes import parts_of
from jchop._products.sums.weights_alone import _by_kernel, _fits

#: With a bit of every kind of element: bytes, several in a byte, several bytes for some, zero points, two scales.
FORMATS = [
    "int8(group=all", "int4(group=16", "uint8(group=all,zero_point=integer", "uint2(group=16,zero_point=integer",
    "nvfp4(", "e4m3fn(group=all", "int6(group=8",
]  # fmt: skip


@pytest.mark.in_turn(27)
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_panels(axis: int, text: str) -> None:
    """Small integers as floats, whose sums are exact before the scales: 272 numbers, two panels and a rest."""
    shape = (272, 12) if axis == 0 else (12, 272)
    stored = jc.quantize(jax.random.normal(jax.random.key(0), shape), f"{text},axis={axis})".replace("(,", "("))
    x = jax.random.randint(jax.random.key(1), (3, 272), -4, 5).astype(jnp.float32)
    letters = "bk,kn->bn" if axis == 0 else "bk,nk->bn"
    got = jax.jit(lambda x, w: jc.einsum(letters, x, w))(x, stored)
    want = np.einsum(letters, np.asarray(x, np.float64), np.asarray(jc.dequantize(stored), np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-4)


@pytest.mark.slow
def test_the_kernel_takes_stored_codes() -> None:
    """As other devices multiply them, from the same bytes."""
    x = jax.random.normal(jax.random.key(1), (3, 64))
    for text in ("int4(group=16,axis=0)", "int8(group=all,axis=0)", "mxfp8_e4m3(axis=0)", "nvfp4(axis=0)"):
        stored = jc.quantize(jax.random.normal(jax.random.key(0), (64, 12)), text)
        block = None if "all" in text else 32 if "mx" in text else 16
        w = parts_of(stored)
        laid = replace(w.moved(jnp.transpose), block=block, stored=stored, shift=w.shift)
        assert _fits(x, laid, jnp.float32)
        np.testing.assert_allclose(_by_kernel(x, laid, jnp.float32), x @ jc.dequantize(stored), rtol=1e-5, atol=1e-5)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("text", ["int8(group=all,axis=0)", "int4(group=128,axis=0)"])
def test_weights_are_never_written_as_floats(text: str) -> None:
    w = jax.eval_shape(lambda v: jc.quantize(v, text), jax.ShapeDtypeStruct((4096, 1024), jnp.float32))
    x = jax.ShapeDtypeStruct((1, 4096), jnp.float32)
    compiled = jax.jit(jc.dot).lower(x, w).compile()
    sizes = compiled.memory_analysis()
    assert sizes is not None and sizes.temp_size_in_bytes <= 0.05 * 4096 * 1024 * 4


@pytest.mark.slow
def test_training_and_packed_weights_alone_are_equal() -> None:
    """In both layouts, and with two axes that are kept."""
    x = jax.random.normal(jax.random.key(1), (3, 160))
    cases = [(lambda w, x: x @ w, (160, 6)), (lambda w, x: x @ w.T, (6, 160))]
    cases += [(lambda w, x: jnp.einsum("bk,khd->bhd", x, w), (160, 3, 2))]
    for fun, shape in cases:
        w = jax.random.normal(jax.random.key(0), shape)
        low = jc.quantize_fn(fun, jc.Rule(weight="int4(group=32)", product="codes"))
        packed = low.pack(w, x)
        np.testing.assert_array_equal(jax.jit(low)(packed, x), jax.jit(low)(w, x))
