"""Products of rows and the matrices of experts, of codes, against integers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jchop as jc

ROW = "int8(group=all)"
SIZES = jnp.array([2, 0, 3])  # and one row of no expert
X, W = (jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32) for shape in ((6, 16), (3, 16, 4)))


def of_rows(one: Any) -> jax.Array:
    """A product row by row, with the matrix of its expert; zeros for the last."""
    rows = [one(m, expert) for m, expert in enumerate((0, 0, 2, 2, 2))]
    return jnp.stack([*rows, jnp.zeros_like(rows[0])])


ZERO = "uint8(group=all,zero_point=integer)"


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (ROW, "int8(group=all,axis=1)"),
        (ZERO, "uint4(group=8,axis=1,zero_point=integer)"),
        (None, "int4(group=8,axis=1)"),
    ],
)
def test_each_row_has_the_matrix_of_its_expert(left: str | None, right: str) -> None:
    x, w = X if left is None else jc.quantize(X, left), jc.quantize(W, right)
    got = jax.jit(lambda x, w: jc.ragged_dot(x, w, SIZES))(x, w)
    want = of_rows(lambda m, e: jc.dot(x[m : m + 1], w[e])[0])
    if left is None:
        np.testing.assert_allclose(got, want, rtol=1e-5)
    else:
        np.testing.assert_array_equal(got, want)
    if left is None:
        dx = jax.grad(lambda x: jc.ragged_dot(x, w, SIZES).sum())(X)
        np.testing.assert_allclose(dx[:5], of_rows(lambda m, e: jc.dequantize(w)[e].sum(1))[:5], rtol=1e-5)


def test_training_and_packed_experts_are_equal() -> None:
    rule = jc.Rule(weight=ROW, activation=ZERO, gradient=ROW, product="codes")
    low = jc.quantize_fn(lambda w, x: lax.ragged_dot(x, w, SIZES), rule)

    @jax.jit
    def trained(w: Any, x: Any) -> Any:
        y, back = jax.vjp(low, w, x)
        return y, jnp.cos(y), *back(jnp.cos(y))

    y, g, dw, dx = trained(W, X)
    np.testing.assert_array_equal(jax.jit(low)(low.pack(W, X), X), y)

    @jax.jit
    def by_hand(g: Any) -> Any:
        low, weights = jc.quantize(g, ROW), jc.quantize(W, ROW)
        dx = of_rows(lambda m, e: jc.einsum("bn,kn->bk", low[m : m + 1], weights[e])[0])
        return dx, jc.dequantize(jc.quantize(g.T, ROW)), jc.dequantize(jc.quantize(X.T, ZERO))

    want, *operands = by_hand(g)
    np.testing.assert_array_equal(dx, want)
    for expert, rows in enumerate(([0, 1], [], [2, 3, 4])):
        gradient, data = (np.where(np.isin(np.arange(6), rows), v, 0) for v in operands)
        np.testing.assert_allclose(dw[expert], data @ gradient.T, rtol=1e-5, atol=1e-6)


def test_experts_refuse() -> None:
    w = jc.quantize(W, "int8(group=all,axis=1)")
    with pytest.raises(TypeError, match="one of them must be a QArray"):
        jc.ragged_dot(X, W, SIZES)
    with pytest.raises(ValueError, match=r"have shapes \(6, 16\), \(3, 16, 4\) and \(2,\)"):
        jc.ragged_dot(X, w, SIZES[:2])
    with pytest.raises(TypeError, match="group_sizes has dtype float32"):
        jc.ragged_dot(X, w, jnp.ones(3))
