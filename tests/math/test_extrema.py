"""max, min and their places: those of NumPy, of the rounded elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from math_draws import rounded_operand
from refusals import assert_refused

import jchop as jc

further = Further()

KEY = jax.random.key(4)
TINY = np.float32(1e-45)


def same(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    cases.assert_bits(expected.ravel(), got.ravel(), cases.bits(expected.ravel()))


def some(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=shape).astype(np.float32)


@pytest.mark.smoke
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", ["max", "min"])
def test_the_element_is_that_of_the_rounded_array(name: str) -> None:
    x = some(3, 4, 5)
    own = np.asarray(jc.round_to_format(x, "e5m2"))
    for axis in (None, 1, (0, -1)):
        same(getattr(jc.math, name)(x, "e5m2", axis=axis), getattr(np, name)(own, axis=axis))
    same(getattr(jc.math, name)(x, "e5m2", axis=1, keepdims=True), getattr(np, name)(own, axis=1, keepdims=True))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.in_turn(3)
def test_subnormal_numbers_zeros_infinities_and_nan(dtype: Any) -> None:
    least = np.finfo(dtype).smallest_subnormal
    x = np.array([[least, 0, -0.0], [-least, -0.0, -0.0], [-np.inf, 2, np.nan], [-np.inf, -1, np.inf]], dtype)
    spec = {2: "binary16", 4: "binary32", 8: "binary64"}[x.itemsize]
    same(jc.math.max(x, spec, axis=1), np.array([least, -0.0, np.nan, np.inf], dtype))
    same(jc.math.min(x, spec, axis=1), np.array([-0.0, -least, np.nan, -np.inf], dtype))
    np.testing.assert_array_equal(jc.math.argmax(x, spec, axis=1), [0, 1, 2, 2])
    np.testing.assert_array_equal(jc.math.argmin(x, spec, axis=1), [1, 0, 2, 0])


def test_where_and_initial() -> None:
    x, mask = some(3, 6), np.array([[True, False, True], [False] * 3, [True] * 3]).repeat(2, 1)
    own = np.asarray(jc.round_to_format(x, "e5m2"))
    for name in ("max", "min"):
        for start in (-9.0, 0.3, 9.0):
            first = np.float32(jc.round_to_format(np.float32(start), "e5m2"))
            want = getattr(np, name)(own, axis=1, where=mask, initial=first)
            same(getattr(jc.math, name)(x, "e5m2", axis=1, where=mask, initial=start), want)
        same(getattr(jc.math, name)(x[:, :0], "e5m2", axis=1, initial=0.3), np.full(3, 0.3125, np.float32))


def test_the_place_is_the_first_of_equal_elements() -> None:
    x = np.array([[2.9, 3.0, 3.1, 1.0], [-0.0, 0.0, 0.0, -0.0]], np.float32)
    for name in ("argmax", "argmin"):
        own = np.asarray(jc.round_to_format(x, "e5m2"))
        got = getattr(jc.math, name)(x, "e5m2", axis=1)
        assert got.dtype == np.int32 and isinstance(got, np.ndarray)
        np.testing.assert_array_equal(got, getattr(np, name)(own, axis=1))
        np.testing.assert_array_equal(getattr(jc.math, name)(x, "e5m2"), getattr(np, name)(own))
        assert getattr(jc.math, name)(x, "e5m2", axis=0, keepdims=True).shape == (1, 4)


@further
def draws_and_transforms() -> None:
    x, text = jnp.asarray(some(4, 5)), "e4m2:stochastic"
    own, first = rounded_operand(x, text, KEY, 0), rounded_operand(jnp.float32(0.3), text, KEY, 1)
    same(jc.math.max(x, text, KEY, axis=1, initial=0.3), jnp.maximum(own.max(1), first))
    np.testing.assert_array_equal(jc.math.argmin(x, text, KEY, axis=1), own.argmin(1))
    each = jax.jit(jax.vmap(lambda x, key: jc.math.min(x, text, key)))(x, jax.random.split(KEY, 4))
    same(each[2], jc.math.min(x[2], text, jax.random.split(KEY, 4)[2]))


def test_the_derivative_is_shared_by_equal_elements() -> None:
    x = jnp.array([2.9, 3.1, 1.0, 3.0])
    np.testing.assert_allclose(jax.grad(lambda x: jc.math.max(x, "e5m2"))(x), [1 / 3, 1 / 3, 0, 1 / 3])
    masked = jax.grad(lambda x: jc.math.max(x, "e5m2", where=jnp.array([True, False, True, False]), initial=-1.0))
    np.testing.assert_allclose(masked(x), [1, 0, 0, 0])


untyped: Any = jc.math
X = np.ones((2, 3), np.float32)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: untyped.max(X[:0], "e5m2"), r"x has shape \(0, 3\), so there are no elements"),
    "no place": (lambda: untyped.argmin(X[:, :0], "e5m2", axis=1), r"x has shape \(2, 0\), so there are no elements"),
    "where": (lambda: untyped.min(X, "e5m2", where=X > 0), "where without initial"),
    "axis": (lambda: untyped.argmax(X, "e5m2", axis=2), "axis=2 must be"),
    "axes": (lambda: untyped.argmax(X, "e5m2", axis=(0, 1)), r"axis=\(0, 1\) must be an integer"),
    "key": (lambda: untyped.max(X, "e5m2:stochastic"), "key=None"),
    "carrier": (lambda: untyped.max(X.astype(np.float16), "bfloat16"), "float16"),
}


@further.first
def what_cannot_be_done_is_refused_with_a_reason() -> None:
    assert_refused({name: (make, (TypeError, ValueError), message) for name, (make, message) in REFUSED.items()})


test_further = further.test()
