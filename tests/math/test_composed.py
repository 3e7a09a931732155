"""where, cross, linspace and interp: every operation exact and rounded one by one, in the documented order."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_arithmetic as arithmetic
import oracle_math
import pytest
from further import Further
from math_draws import rounded_operand
from oracle import Value
from oracle_matmul import How, rounded
from refusals import assert_refused

import jchop as jc

further = Further()

KEY = jax.random.key(2)
untyped: Any = jc.math
F32 = oracle.CARRIERS["float32"]
HOWS: dict[str, How] = {
    "bfloat16": How(oracle.ieee(8, 7)),
    "e5m4:up": How(oracle.ieee(5, 4), "up"),
    "e5m7:down": How(oracle.ieee(5, 7), "down"),
    "e5m5:odd": How(oracle.ieee(5, 5), "odd"),
}


def same(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    cases.assert_bits(expected.ravel(), got.ravel(), cases.bits(expected.ravel()))


def f32(values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def some(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Machine:
    """Operations on flat arrays in one arithmetic, exact and then rounded."""

    def __init__(self, text: str) -> None:
        self.text, self.how = text, HOWS[text]

    def rounded(self, x: Any) -> np.ndarray:
        return np.asarray(jc.round_to_format(np.asarray(x, np.float32), self.text))

    def do(self, operation: Callable[..., Value], *operands: Any) -> np.ndarray:
        arrays = np.broadcast_arrays(*(np.asarray(x, np.float32) for x in operands))
        columns: Sequence[Any] = [oracle_math.values(x) for x in arrays]
        results = [rounded(operation(*row), self.how, F32, 0) for row in zip(*columns, strict=True)]
        return oracle_math.array(results).reshape(arrays[0].shape)

    def add(self, x: Any, y: Any) -> np.ndarray:
        return self.do(lambda a, b: arithmetic.add(a, b, self.how.mode == "down"), x, y)

    def sub(self, x: Any, y: Any) -> np.ndarray:
        return self.do(lambda a, b: oracle_math.subtract(a, b, self.how.mode == "down"), x, y)

    def mul(self, x: Any, y: Any) -> np.ndarray:
        return self.do(arithmetic.multiply, x, y)

    def div(self, x: Any, y: Any) -> np.ndarray:
        return self.do(arithmetic.divide, x, y)


@further
@pytest.mark.parametrize("text", HOWS)
def cross_products(text: str) -> None:
    m, a, b = Machine(text), some(4, 3), some(4, 3, seed=1)
    x, y = m.rounded(a), m.rounded(b)
    i, j = [1, 2, 0], [2, 0, 1]
    want = m.sub(m.mul(x[:, i], y[:, j]), m.mul(x[:, j], y[:, i]))
    same(jc.math.cross(a, b, text, KEY), want)


@further
def a_vector_of_two_elements_has_a_zero() -> None:
    """As in NumPy before 2.0; newer ones, and newer JAX, refuse it."""
    a, b = (np.random.default_rng(i).integers(-3, 4, (5, 3)).astype(np.float32) for i in range(2))
    flat = a * f32([1, 1, 0])
    np.testing.assert_array_equal(jc.math.cross(a[:, :2], b, "e8m15"), np.cross(flat, b))
    got = jc.math.cross(a[:, :2], b[:, :2], "e8m15")
    np.testing.assert_array_equal(got, a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0])


#: The axes, and the shapes of two arrays of vectors.
AXES: list[tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = [
    ({}, (5, 3), (4, 5, 3)),
    ({"axis": 0}, (3, 5), (3, 5)),
    ({"axisa": 0, "axisc": 1}, (3, 5, 2), (5, 2, 3)),
    ({"axisb": 0}, (3,), (3, 4)),
]


def test_the_product_of_two_vectors_of_two_elements_has_no_axis() -> None:
    a, b = f32([[1, 2], [3, 5]]), f32([[2, 1], [-1, 4]])
    np.testing.assert_array_equal(untyped.cross(a, b, "e8m15", axisc=5), [-3, 17])


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("axes", "left", "right"), AXES)
def test_cross_products_have_the_axes_of_numpy(axes: Any, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = (np.random.default_rng(i).integers(-3, 4, s).astype(np.float32) for i, s in enumerate((left, right)))
    np.testing.assert_array_equal(untyped.cross(a, b, "e8m15", **axes), jnp.cross(a, b, **axes))


@further
@pytest.mark.parametrize(("text", "endpoint"), list(zip(HOWS, [True, False] * 2, strict=True)))
def evenly_spaced_numbers(text: str, endpoint: bool) -> None:
    m, num = Machine(text), 7
    start, stop = m.rounded([0.3, -2]), m.rounded([1.7, 5])
    h = m.div(m.sub(stop, start), num - endpoint)
    i = np.arange(num, dtype=np.float32)[:, None]
    want = m.add(start, m.mul(i, h))
    if endpoint:
        want[-1] = stop
    same(jc.math.linspace(f32([0.3, -2]), f32([1.7, 5]), text, KEY, num=num, endpoint=endpoint), want)


@further
def spaces_have_the_shapes_of_numpy() -> None:
    many: list[dict[str, Any]] = [
        {"num": 0}, {"num": 1}, {"num": 1, "endpoint": False}, {"num": 2, "axis": -1},
        {"num": 5}, {"num": 5, "endpoint": False},
    ]  # fmt: skip
    a, b = np.arange(3, dtype=np.float32), np.float32(8)
    spaces = jax.jit(lambda a, b: [jc.math.linspace(a, b, "binary32", **more) for more in many])(a, b)
    for got, more in zip(spaces, many, strict=True):
        want = np.linspace(a, b, dtype=np.float32, **more)
        np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=str(more))
    assert jc.math.linspace(0, 1, "e5m2").shape == (50,)
    # 257 is no value of bfloat16, and yet the number of an element.
    assert jc.math.linspace(np.float32(0), 1024, "bfloat16", num=1025)[257] == 256
    assert jc.math.linspace(np.float32(0), 2048, "bfloat16", num=1025)[259] == 520


@further.first
@pytest.mark.parametrize("text", HOWS)
def interpolation(text: str) -> None:
    m = Machine(text)
    given = np.linspace(-3, 3, 23).astype(np.float32)
    x, xp, fp = m.rounded(given), m.rounded([-2, -0.7, 0.1, 1.9]), m.rounded([1, -3, 0.4, 2])
    left, right = m.rounded(7.3), m.rounded(-7.3)
    i = np.clip(np.searchsorted(xp, x, side="right") - 1, 0, 2)
    d, h, e = m.sub(x, xp[i]), m.sub(xp[i + 1], xp[i]), m.sub(fp[i + 1], fp[i])
    want = m.add(fp[i], m.mul(m.div(d, h), e))
    for node, value in zip(xp, fp, strict=True):
        want = np.where(x == node, value, want)
    want = np.where(x < xp[0], left, np.where(x > xp[-1], right, want)).astype(np.float32)
    nodes, values = f32([-2, -0.7, 0.1, 1.9]), f32([1, -3, 0.4, 2])
    same(jc.math.interp(given, nodes, values, text, KEY, left=7.3, right=-7.3), want)


def kept_apart(function: Callable[..., Any], *given: np.ndarray) -> list[str]:
    """The types of what is in memory before anything reads it: it is fused with nothing after it."""
    return re.findall(r":(\S+) = jchop_settled\[", str(jax.make_jaxpr(function)(*given)))


@pytest.mark.usefixtures("x64")
def test_the_search_of_an_interpolation_is_fused_with_nothing() -> None:
    """Fused with the search, the quotient of float64 takes XLA hours (`long_fusion_compiled_for_minutes`)."""
    text, nodes = "bfloat16:stochastic", np.arange(3.0)
    apart = kept_apart(lambda x, xp, fp: jc.math.interp(x, xp, fp, text, KEY), np.full((3, 32), 0.3), nodes, nodes)
    assert apart == ["i32[3,32]"]


def test_the_ends_and_the_step_of_evenly_spaced_rows_are_fused_with_nothing() -> None:
    """With its ends fused into all that reads them, XLA takes hours (`long_fusion_compiled_for_minutes`)."""
    apart = kept_apart(lambda x: jc.math.linspace(x, 1, "bfloat16:stochastic", KEY, num=3), np.ones(32, np.float32))
    assert apart == ["f32[32]", "f32[]", "f32[32]", "f32[32]"]  # start, stop, their difference, the step


@further
def interpolation_at_the_ends_and_between_equal_nodes() -> None:
    x = f32([-1, 0, 0.5, 1, 3, np.nan, np.inf])
    xp, fp = f32([0, 1, 1.01, 2]), f32([1, 2, 5, 3])
    got = jc.math.interp(x, xp, fp, "e5m4")  # 1.01 is rounded to 1
    np.testing.assert_array_equal(got, [1, 1, 1.5, 5, 3, np.nan, 3])
    np.testing.assert_array_equal(jc.math.interp(x, xp[:1], fp[:1], "e5m4", right=9)[:5], [1, 1, 9, 9, 9])
    tiny = np.float32(1e-45)
    np.testing.assert_array_equal(
        jc.math.interp(f32([0, tiny, 1]), f32([0, tiny, 1]), f32([1, 2, 3]), "binary32"), [1, 2, 3]
    )
    assert jc.math.interp(np.zeros((2, 0), np.float32), xp, fp, "e5m4").shape == (2, 0)


@pytest.mark.smoke
def test_where() -> None:
    x, y = some(3, 4), some(4, seed=1)
    condition = x > 0
    text = "e4m2:stochastic"
    own, other = rounded_operand(x, text, KEY, 0), rounded_operand(y, text, KEY, 1)
    same(jc.math.where(condition, x, y, text, KEY), np.where(condition, own, other))
    same(
        jc.math.where(condition.astype(int), x, 0.3, "e5m2"),
        np.where(condition, jc.round_to_format(x, "e5m2"), 0.3125).astype(np.float32),
    )
    assert isinstance(jc.math.where(jnp.asarray(condition), x, y, "e5m2"), jax.Array)
    grad = jax.grad(lambda x: jc.math.where(condition, x, 2.0, "e5m2").sum())(jnp.asarray(x))
    np.testing.assert_array_equal(grad, condition)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cross": (lambda x, *spec: jc.math.cross(x, x[::-1] + 1, *spec), lambda x: jnp.cross(x, x[::-1] + 1)),
    "linspace": (lambda x, *spec: jc.math.linspace(x, 3.0, *spec, num=4), lambda x: jnp.linspace(x, 3.0, 4)),
    "interp": (
        lambda x, *spec: jc.math.interp(x, jnp.arange(-2.0, 3.0), x[0] + jnp.arange(5.0) ** 2, *spec),
        lambda x: jnp.interp(x, jnp.arange(-2.0, 3.0), x[0] + jnp.arange(5.0) ** 2),
    ),
}


@further
@pytest.mark.parametrize("name", FUNCTIONS)
def transforms_and_derivatives(name: str) -> None:
    function, exact = FUNCTIONS[name]
    x, keys = jnp.asarray(some(3, 3)) * 0.6, jax.random.split(KEY, 3)
    text = "e5m4:stochastic"
    each = jax.jit(jax.vmap(lambda x, key: function(x, text, key)))(x, keys)
    same(each[1], function(x[1], text, keys[1]))
    weights = jnp.asarray(some(*exact(x[0]).shape, seed=5))
    got = jax.grad(lambda x: (function(x, "e6m13") * weights).sum())(x[0])
    np.testing.assert_allclose(got, jax.grad(lambda x: (exact(x) * weights).sum())(x[0]), rtol=2e-3, atol=2e-3)


X = np.ones((2, 3), np.float32)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "condition": (lambda: untyped.where(X, X, X, "e5m2"), TypeError, "condition has dtype float32; allowed: booleans"),
    "vectors": (lambda: untyped.cross(X.T[..., None], X, "e5m2"), ValueError, "must have 2 or 3 elements"),
    "shapes": (lambda: untyped.cross(X, np.ones((3, 3), np.float32), "e5m2"), ValueError, "they do not broadcast"),
    "axis": (lambda: untyped.cross(X, X, "e5m2", axisc=2), ValueError, "axisc=2 must be"),
    "num": (lambda: untyped.linspace(0, 1, "e5m2", num=-1), ValueError, "num=-1 must be"),
    "many": (lambda: untyped.linspace(X, 1, "e5m2", num=1 << 25), ValueError, "num=33554432 must be"),
    "endpoint": (lambda: untyped.linspace(0, 1, "e5m2", endpoint=2), TypeError, "endpoint=2 must be"),
    "nodes": (lambda: untyped.interp(X, X, X, "e5m2"), ValueError, r"xp has shape \(2, 3\) and fp has shape"),
    "no nodes": (lambda: untyped.interp(X, X[0, :0], X[0, :0], "e5m2"), ValueError, "n >= 1"),
    "left": (lambda: untyped.interp(X, X[0], X[0], "e5m2", left=X[0]), ValueError, r"left has shape \(3,\)"),
    "key": (lambda: untyped.linspace(0, 1, "e5m2:stochastic"), ValueError, "key=None"),
    "spec": (lambda: untyped.cross(X, X, jc.MatmulSpec()), TypeError, "must be a Spec"),
}  # fmt: skip


def test_what_cannot_be_done_is_refused_with_a_reason() -> None:
    assert_refused(REFUSED)


test_further = further.test()
