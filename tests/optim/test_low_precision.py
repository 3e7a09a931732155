"""`low_precision` against scalar arithmetic in exact fractions, each rounding written out; and every row of a table."""

# Optax types every state as a tree of arrays, which has no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false
from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import Further
from oracle import ieee, pow2, round_exact

import jchop as jc
from jchop import optim

further = Further()

KEY = jax.random.key(3)
F32 = ieee(8, 23)
SETS = {"e5m10": ieee(5, 10), "bfloat16": ieee(8, 7)}
MODES = ("nearest_even", "toward_zero", "up")
LR = 3 * 2.0**-5
GRADIENTS = [[1.375, -0.3, 2e-3, 70.0], [0.11, 0.7, -5e-3, -3.25], [-2.5, 0.01, 3e-3, 1e-2], [0.6, -0.9, 1e-4, 5.5]]


def rounded(fmt: Any, x: Fraction, mode: str = "nearest_even") -> Fraction:
    made = round_exact(fmt, x, mode)
    return made if isinstance(made, Fraction) else Fraction(0)


def single(x: Fraction) -> Fraction:
    """An operation of binary32, which Optax computes in."""
    return rounded(F32, x)


def root(x: Fraction) -> Fraction:
    """The square root, rounded to binary32: the integer root of x 2^2k says which neighbour, and whether it is one."""
    if x == 0:
        return x
    k = 60 - (x.numerator.bit_length() - x.denominator.bit_length()) // 2
    scaled = x * pow2(2 * k)
    whole = math.isqrt(math.floor(scaled))
    sticky = Fraction(whole * whole != scaled, 2)
    return single((whole + sticky) * pow2(-k))


def sgd(p: Fraction, gradients: list[Fraction], q: Any) -> list[Fraction]:
    """SGD with momentum 7/8; `q` rounds to the format. Products with 7/8 are exact in binary32."""
    m, passed = Fraction(0), []
    for given in gradients:
        g = q(given)
        m = single(g + Fraction(7, 8) * m)
        p = q(p + single(-Fraction(LR) * m))
        m = q(m)
        passed.append(p)
    return passed


def adam(p: Fraction, gradients: list[Fraction], q: Any) -> list[Fraction]:
    """Adam with decays 1/2 and 3/4, whose products are exact in binary32."""
    m, v, passed = Fraction(0), Fraction(0), []
    for t, given in enumerate(gradients, 1):
        g = q(given)
        m = single(g / 2 + m / 2)
        v = single(single(g * g) / 4 + v * Fraction(3, 4))
        first = single(m / (1 - Fraction(1, 2) ** t))
        second = single(v / (1 - Fraction(3, 4) ** t))
        u = single(first / single(root(second) + single(Fraction(1e-8))))
        p = q(p + single(-Fraction(LR) * u))
        m, v = q(m), q(v)
        passed.append(p)
    return passed


CASES = {"sgd": (sgd, optax.sgd(LR, 0.875)), "adam": (adam, optax.adam(LR, 0.5, 0.75, 1e-8))}


@further
@pytest.mark.parametrize("fmt", SETS)
@pytest.mark.parametrize("name", CASES)
def steps_are_those_of_exact_arithmetic(name: str, fmt: str) -> None:
    """Scalars, and operation by operation, so that no compiler joins two of Optax's operations into one."""
    exact, plain = CASES[name]
    starts = [1.0, -0.5, 2.0**-7, 96.0]
    grads = np.float32(GRADIENTS)
    for mode in MODES:
        spec = f"{fmt}:{mode}"
        tx = optim.low_precision(plain, weight=spec, gradient=spec, momentum=spec)
        params = {str(i): jnp.float32(p) for i, p in enumerate(starts)}
        state, passed = tx.init(params), []
        for row in grads:
            given = {str(i): jnp.float32(g) for i, g in enumerate(row)}
            updates, state = tx.update(given, state, params)
            params = optax.apply_updates(params, updates)
            passed.append([Fraction(float(params[str(i)])) for i in range(4)])
        for i, start in enumerate(starts):
            to_format = partial(rounded, SETS[fmt], mode=mode)
            wanted = exact(Fraction(start), [Fraction(float(g)) for g in grads[:, i]], to_format)
            assert [row[i] for row in passed] == wanted, (mode, i)


TABLE = {
    "sgd": optax.sgd(0.05, 0.9),
    "adam": optax.adam(0.05),
    "adamw": optax.adamw(0.05),
    "rmsprop": optax.rmsprop(0.05),
    "adagrad": optax.adagrad(0.05),
    "adadelta": optax.adadelta(0.5),
}


@further
@pytest.mark.parametrize("name", TABLE)
def gradients_state_and_weights_are_rounded_in_every_optimizer(name: str, rng: np.random.Generator) -> None:
    tx = optim.low_precision(
        TABLE[name],
        weight="bfloat16:stochastic",
        gradient="e5m2",
        momentum="e8m3",
        accumulator="e8m10:stochastic",
        gradient_scale=0.25,
        key=KEY,
    )
    params = {"w": jnp.asarray(rng.standard_normal((4, 8)), jnp.float32), "b": jnp.zeros(8)}
    target = jax.tree.map(jnp.ones_like, params)

    def loss(p: Any) -> jax.Array:
        return sum(((a - b) ** 2).sum() for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(target), strict=True))

    @jax.jit
    def run(params: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, tx.init(params)), None, length=30)

    (params, state), losses = run(params)
    assert float(losses[-1]) < float(losses[0])
    moments = [x for x in jax.tree.leaves(state.inner_state) if x.ndim > 0]
    assert moments
    for leaves, fmt in ((params, "bfloat16"), (moments, "e8m3"), (state.accumulator, "e8m10")):
        for leaf in jax.tree.leaves(leaves):
            np.testing.assert_array_equal(leaf, jc.round_to_format(leaf, fmt))
    np.testing.assert_allclose(params["w"], state.accumulator["w"], rtol=2**-7)


def test_the_accumulator_moves_where_the_weight_cannot() -> None:
    plain = optax.sgd(2.0**-8)
    params, ones = jnp.ones(4), jnp.ones(4)
    for accumulator, wanted in ((None, 1.0), ("e8m10", 0.875)):
        tx = optim.low_precision(plain, weight="e5m2", accumulator=accumulator)
        p, state, step = params, tx.init(params), jax.jit(tx.update)
        for _ in range(32):
            updates, state = step(ones, state, p)
            p = optax.apply_updates(p, updates)
        assert p.tolist() == [wanted] * 4


@further.first
def each_rounding_draws_bits_of_its_own() -> None:
    """Each result lies halfway between its neighbours, whatever the roundings before it have drawn."""
    count, spec = 1 << 14, "fixed6.{}:stochastic"
    tx = optim.low_precision(
        optax.sgd(-1.0, 0.0),
        gradient=spec.format(3),
        momentum=spec.format(2),
        accumulator=spec.format(2),
        weight=spec.format(1),
        key=KEY,
    )
    params, state = jnp.ones(count), jax.jit(tx.init)(jnp.ones(count))
    updates, state = jax.jit(tx.update)(jnp.full(count, 1 / 16), state, params)
    weight, held, moment = (np.asarray(x) for x in (params + updates, state.accumulator, state.inner_state[0].trace))
    assert [set(x.tolist()) for x in (weight, held, moment)] == [{1.0, 1.5}, {1.0, 1.25}, {0.0, 0.25}]
    up, moved, kept = weight == 1.5, held == 1.25, moment == 0.25
    for found, wanted in (
        (moved, 1 / 4),  # the gradient, which is 0 or 1/8, and then the accumulator
        (kept, 1 / 4),
        (moved & kept, 1 / 8),
        (moved & up, 1 / 8),
        (moved & up & kept, 1 / 16),
    ):
        assert abs(found.mean() - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / count), wanted
    assert not np.any(up & ~moved)


@further
def what_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum='float8_e5m2' rounds arrays, and inner packs its state"):
        optim.low_precision(optax.chain(optim.adamw8bit(0.1)), momentum="e5m2").init(jnp.ones((64, 64)))
    with pytest.raises(ValueError, match="key=None"):
        optim.low_precision(optax.sgd(0.1), weight="e5m2", momentum="e5m2:stochastic")
    with pytest.raises(TypeError, match="gradient=3"):
        optim.low_precision(optax.sgd(0.1), gradient=3)  # type: ignore[arg-type]


test_further = further.test()
