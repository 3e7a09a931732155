"""softmax and logsumexp: every operation exact or a function of the table, rounded one by one."""

from __future__ import annotations

from collections.abc import Callable
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
from oracle import Fraction, Value
from oracle_matmul import Arithmetic, How, Sum, rounded

import jchop as jc
from jchop import MatmulSpec

further = Further()

KEY = jax.random.key(8)
F32 = oracle.CARRIERS["float32"]


def same(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    cases.assert_bits(expected.ravel(), got.ravel(), cases.bits(expected.ravel()))


def some(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32) * 2


E5M7 = How(oracle.ieee(5, 7))
#: The spec, and its operands, sums, order and block for the oracle.
SPECS: dict[str, tuple[MatmulSpec, How, How, str, int]] = {
    "sequential": (MatmulSpec("e5m7", accumulate="e5m7"), E5M7, E5M7, "sequential", 0),
    "pairwise": (
        MatmulSpec("e5m4:down", accumulate="e6m9:up", order="pairwise"),
        How(oracle.ieee(5, 4), "down"),
        How(oracle.ieee(6, 9), "up"),
        "pairwise",
        0,
    ),
    "blocked": (
        MatmulSpec("bfloat16", accumulate="e5m10:odd", order="blocked(2)"),
        How(oracle.ieee(8, 7)),
        How(oracle.ieee(5, 10), "odd"),
        "blocked",
        2,
    ),
}


class Row:
    """The definition, on one row of rounded numbers; `exp` and `log` are those of the table."""

    def __init__(self, name: str, x: np.ndarray, mask: np.ndarray) -> None:
        self.spec, self.operands, self.accumulate, order, block = SPECS[name]
        assert self.spec.operands is not None and self.spec.accumulate is not None
        self.largest = Fraction(float(x[mask].max()))
        down = self.operands.mode == "down"
        d = [rounded(oracle_math.subtract(v, self.largest, down), self.operands, F32, 0) for v in oracle_math.values(x)]
        e = np.where(mask, np.asarray(jc.math.exp(oracle_math.array(d), self.spec.operands)), np.float32(0))
        self.e = oracle_math.values(e)
        how = Arithmetic(None, self.accumulate, F32, order, block)
        self.total = Sum(self.e, [Fraction(1)] * len(x), how, lambda which, step: 0).result()

    def softmax(self) -> list[Value]:
        return [rounded(arithmetic.divide(v, self.total), self.accumulate, F32, 0) for v in self.e]

    def logsumexp(self) -> list[Value]:
        assert self.spec.accumulate is not None
        log = jc.math.log(oracle_math.array([self.total]), self.spec.accumulate)
        total = arithmetic.add(oracle_math.values(np.asarray(log))[0], self.largest, self.accumulate.mode == "down")
        return [rounded(total, self.accumulate, F32, 0)]


@pytest.mark.in_turn(22)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_operations_are_rounded_one_by_one(name: str, masked: bool) -> None:
    spec = SPECS[name][0]
    x = np.asarray(jc.round_to_format(some(3, 5), spec.operands or "binary32"))
    mask = np.random.default_rng(2).random(x.shape) < 0.6 if masked else np.ones(x.shape, bool)
    mask[:, 0] = True
    rows = [Row(name, *pair) for pair in zip(x, mask, strict=True)]
    where = mask if masked else None
    same(jc.math.softmax(x, spec, where=where), np.array([oracle_math.array(row.softmax()) for row in rows]))
    want = np.concatenate([oracle_math.array(row.logsumexp()) for row in rows])
    same(jc.math.logsumexp(x, spec, axis=1, where=where), want)


@further
def in_the_carrier_they_are_those_of_jax() -> None:
    x, axes = some(2, 3, 4), (-1, 0, (0, 2), None)

    @jax.jit
    def all_of(x: jax.Array) -> Any:
        ours = [(jc.math.softmax(x, MatmulSpec(), axis=axis),
                 jc.math.logsumexp(x, MatmulSpec(), axis=axis, keepdims=True)) for axis in axes]  # fmt: skip
        theirs = [(jax.nn.softmax(x, axis=axis), jax.nn.logsumexp(x, axis=axis, keepdims=True)) for axis in axes]
        return ours, theirs

    for axis, got, want in zip(axes, *all_of(x), strict=True):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6, err_msg=str(axis))
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6, err_msg=str(axis))


@further.first
def infinities_nan_and_nothing() -> None:
    x = np.array([[np.inf, 1, 2], [-np.inf, 1, 1], [-np.inf] * 3, [np.nan, 1, 2]], np.float32)
    want = jax.nn.softmax(x, axis=-1)
    np.testing.assert_array_equal(jc.math.softmax(x, "binary16"), np.where(np.isnan(want), want, [0, 0.5, 0.5]))
    got = jc.math.logsumexp(x, "binary16", axis=-1)
    np.testing.assert_allclose(got, [np.inf, 1 + np.log(2), -np.inf, np.nan], rtol=1e-3)


@further
def sums_of_nothing_and_what_is_refused() -> None:
    x = np.ones((4, 3), np.float32)
    assert jc.math.logsumexp(x[:, :0], "binary16", axis=1).tolist() == [-np.inf] * 4
    assert jc.math.softmax(x[:, :0], "binary16").shape == (4, 0)
    assert np.isnan(jc.math.softmax(x[1], "binary16", where=np.zeros(3, bool))).all()
    with pytest.raises(ValueError, match="axis=-1, but x is a scalar"):
        jc.math.softmax(1.0, "binary16")
    with pytest.raises(ValueError, match="a sum has no products"):
        jc.math.softmax(x, MatmulSpec(product="e5m2"))


@further
def draws_are_those_of_emulate() -> None:
    x, text = some(2, 4), "e5m4:stochastic"
    low = jc.emulate(jax.nn.softmax, text, accumulate=MatmulSpec(accumulate=text))
    same(jc.math.softmax(x, MatmulSpec(text, accumulate=text), KEY), low(jnp.asarray(x), key=KEY))


@further
@pytest.mark.parametrize("name", ["logsumexp", "softmax"])
def jit_vmap_and_derivatives(name: str) -> None:
    function: Callable[..., Any] = getattr(jc.math, name)
    x, keys = jnp.asarray(some(3, 4)), jax.random.split(KEY, 3)
    each = jax.jit(jax.vmap(lambda x, key: function(x, "e5m5:stochastic", key)))(x, keys)
    same(each[1], function(x[1], "e5m5:stochastic", keys[1]))
    weights, mask = jnp.arange(1.0, 5.0), jnp.array([True, False, True, True])
    got, masked = jax.jit(
        lambda x: (
            jax.grad(lambda x: (function(x, "e6m13") * weights).sum())(x),
            jax.grad(lambda x: function(x, "e6m13", where=mask).sum())(x),
        )
    )(x[0])
    want = jax.grad(lambda x: (getattr(jax.nn, name)(x) * weights).sum())(x[0])
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)
    assert masked[1] == 0


test_further = further.test()
