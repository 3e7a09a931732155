"""Experts in tokamax's `ragged_dot`: the bits of the product of decoded arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jchop as jc

pytest.importorskip("tokamax")

pytestmark = pytest.mark.clients

SIZES = jnp.array([5, 0, 7])
SPECS = ["int8(channel=(0,2))", "int4(group=32,axis=1)", "mxfp4(axis=1)", "mxfp8_e4m3(axis=1)"]


@pytest.mark.parametrize("spec", SPECS)
def test_the_product_is_that_of_decoded_experts(spec: str) -> None:
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(12, 64), (3, 64, 16)]))
    experts = jc.quantize(w, spec)
    product = jax.jit(lambda x, experts: jc.ragged_dot(x, experts, SIZES, impl="tokamax"))(x, experts)
    np.testing.assert_array_equal(product, jax.lax.ragged_dot(x, jc.dequantize(experts), SIZES))
    assert jc.ragged_dot(x, experts, SIZES, impl="tokamax", dtype=jnp.bfloat16).dtype == jnp.bfloat16
