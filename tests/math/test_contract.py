"""dot, conv and axpy: the shapes of NumPy and JAX, and the order of the sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_math
import pytest
from further import Further
from math_draws import rounded_operand
from oracle_matmul import Arithmetic, How, Sum
from refusals import assert_refused

import jchop as jc
from jchop import MatmulSpec

further = Further()

KEY = jax.random.key(3)
PLAIN = MatmulSpec()
F32 = oracle.CARRIERS["float32"]


def integers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def in_order(a: np.ndarray, b: np.ndarray, text: str = "e5m5") -> float:
    """The sum of products of rows that are rounded already, one after the other."""
    spec = How(oracle.describe(jc.formats.parse_format(text)))
    total = Sum(oracle_math.values(a), oracle_math.values(b), Arithmetic(spec, spec, F32), lambda which, step: 0)
    return float(oracle_math.array([total.result()])[0])


DOTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3,), (3,)), ((2, 3), (3,)), ((2, 3), (4, 3, 5)), ((3,), (3, 4)), ((), (2, 3)), ((2,), ()), ((), ())
]  # fmt: skip


@further
def dot_has_the_shapes_of_numpy() -> None:
    pairs = [(integers(*left), integers(*right, seed=1)) for left, right in DOTS]
    found = jax.jit(lambda pairs: [jc.math.dot(a, b, PLAIN) for a, b in pairs])(pairs)
    for got, (a, b) in zip(found, pairs, strict=True):
        np.testing.assert_array_equal(got, np.dot(a, b), err_msg=f"{a.shape} {b.shape}")
    own = jc.math.dot(*pairs[0], PLAIN)
    assert own == found[0] and not isinstance(own, jax.Array)


@further.first
def dot_rounds_every_operation() -> None:
    a, b = (np.asarray(jc.round_to_format(normal(40, seed=i), "e5m5")) for i in range(2))
    assert jc.math.dot(a, b, "e5m5") == in_order(a, b)
    assert jc.math.dot(a, b, "e5m5") != np.dot(a, b)


@further
def an_element_that_is_repeated_is_rounded_once() -> None:
    """Its random word is its own, not that of a copy."""
    spec = MatmulSpec("e4m2:stochastic")
    window = jc.math.conv(normal(1, 1, 9), np.ones((1, 1, 1), np.float32), spec, KEY)
    own = rounded_operand(normal(1, 1, 9), "e4m2:stochastic", KEY, 0)
    np.testing.assert_array_equal(window, own)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "stride": {"stride": 2, "padding": "SAME"},
    "plain": {},
    "same": {"padding": "SAME"},
    "dilated": {"dilation": (2, 1), "padding": ((1, 0), (2, 3))},
}


@pytest.mark.smoke
@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_those_of_lax(name: str) -> None:
    how = CONVOLUTIONS[name]
    x, w = integers(2, 3, 7, 6), integers(5, 3, 3, 2, seed=1)
    stride, dilation = ((v,) * 2 if isinstance(v, int) else v for v in (how.get("stride", 1), how.get("dilation", 1)))
    want = jax.lax.conv_general_dilated(
        jnp.asarray(x), jnp.asarray(w), stride, how.get("padding", "VALID"), rhs_dilation=dilation
    )
    np.testing.assert_array_equal(jc.math.conv(x, w, PLAIN, **how), want)


@further
def the_order_of_a_convolution_is_that_of_its_kernel() -> None:
    x, w = (np.asarray(jc.round_to_format(normal(*s), "e5m5")) for s in ((1, 3, 5, 5), (2, 3, 2, 2)))
    got = jc.math.conv(x, w, "e5m5")
    assert got[0, 1, 2, 3] == in_order(x[0, :, 2:4, 3:5].ravel(), w[1].ravel())


@further
def axpy_rounds_product_and_sum() -> None:
    a, x, y = (np.asarray(jc.round_to_format(normal(60, seed=i), "e5m5")) for i in range(3))
    product = jc.math.multiply(a, x, "e5m5")
    np.testing.assert_array_equal(jc.math.axpy(a, x, y, "e5m5"), jc.math.add(product, y, "e5m5"))
    fused = jc.math.axpy(a, x, y, "e5m5", fused=True)
    np.testing.assert_array_equal(fused, jc.math.fma(a, x, y, "e5m5"))
    assert np.any(fused != jc.math.axpy(a, x, y, "e5m5"))
    text = "e5m3:stochastic"
    a, x, y = (rounded_operand(v, text, KEY, i) for i, v in enumerate((a, x, y)))
    drawn = jc.math.axpy(a, x, y, text, KEY)
    assert np.mean(drawn != jc.math.axpy(a, x, y, "e5m3")) > 0.1


KERNEL = normal(2, 2, 3, seed=1)
#: Functions of an array of shape (1, 2, 4), and what they compute without rounding.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "axpy": (lambda x, *spec: jc.math.axpy(3.0, x[0, 0], x[0, 1], *spec), lambda x, k: 3 * x[0, 0] + x[0, 1]),
    "dot": (lambda x, *spec: jc.math.dot(x[0], x[0, 0], *spec), lambda x, k: x[0] @ x[0, 0]),
    "conv": (
        lambda x, *spec: jc.math.conv(x, KERNEL, *spec),
        lambda x, k: jax.lax.conv_general_dilated(x, k, (1,), "VALID"),
    ),
}


@further
@pytest.mark.parametrize("name", FUNCTIONS)
def transforms_and_derivatives(name: str) -> None:
    function, exact = FUNCTIONS[name]
    x, keys, text = jnp.asarray(normal(3, 1, 2, 4)), jax.random.split(KEY, 3), "e5m4:stochastic"
    each = jax.jit(jax.vmap(lambda x, key: function(x, text, key)))(x, keys)
    np.testing.assert_array_equal(each[1], function(x[1], text, keys[1]))
    r, k = jc.round_to_format(x[0], "e5m9"), jc.round_to_format(KERNEL, "e5m9")
    got = jax.grad(lambda x: function(x, "e5m9").sum())(x[0])
    np.testing.assert_allclose(got, jax.grad(lambda x: exact(x, k).sum())(r), rtol=1e-6, atol=1e-6)


untyped: Any = jc.math
A, X, W = np.ones((2, 3), np.float32), np.ones((1, 2, 5), np.float32), np.ones((4, 2, 3), np.float32)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "conv": (lambda: untyped.conv(A, A, "e5m2"), ValueError, r"x has shape \(2, 3\) and kernel has shape"),
    "channels": (lambda: untyped.conv(X, W[:, :1], "e5m2"), ValueError, "the same c"),
    "stride": (lambda: untyped.conv(X, W, "e5m2", stride=(1, 2)), ValueError, r"stride=\(1, 2\) must be"),
    "padding": (lambda: untyped.conv(X, W, "e5m2", padding="FULL"), ValueError, "padding='FULL' must be"),
    "small": (lambda: untyped.conv(X, W, "e5m2", dilation=3), ValueError, "too small for a kernel"),
    "dtypes": (lambda: untyped.dot(A, A.T.astype(complex), "e5m2"), TypeError, "b has dtype complex128"),
    "key": (lambda: untyped.axpy(1.0, A, A, "e5m2:stochastic"), ValueError, "key=None"),
}  # fmt: skip


def test_what_cannot_be_done_is_refused_with_a_reason() -> None:
    assert_refused(REFUSED)


test_further = further.test()
