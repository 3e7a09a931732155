"""Programs that people have: Flax models, an Optax step and a solver pass through `jc.emulate` as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from further import Further
from jax.scipy.sparse.linalg import cg

import jchop as jc

further = Further()

KEY = jax.random.key(0)
SUM = jc.MatmulSpec(accumulate="e6m12")


class Cnn(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 3, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
        self.out = nnx.Linear(12, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), strides=(2, 2))
        return self.out(x.reshape(x.shape[0], -1))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


def assert_low(got: Any, want: Any, atol: float) -> None:
    """Near the carrier's result, not it, and in the format."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_array_equal(one, jc.round_to_format(one, "e5m10"))
            np.testing.assert_allclose(one, other, atol=atol)
            assert not np.array_equal(one, other)


def a_cnn(spec: str) -> None:
    graph, state = nnx.split(Cnn(nnx.Rngs(0)))
    run = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    x = jax.random.normal(KEY, (2, 4, 4, 1))
    got = jax.jit(jc.emulate(run, spec, accumulate=SUM))(state, x, key=KEY)
    assert_low(got, run(state, x), 0.01)


def a_transformer_block(spec: str) -> None:
    graph, state = nnx.split(Block(nnx.Rngs(0)))
    run = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    x = jax.random.normal(KEY, (1, 3, 8))
    got = jax.jit(jc.emulate(run, spec))(state, x, key=KEY)
    assert_low(got, run(state, x), 0.02)


def the_derivative_of_a_block(spec: str) -> None:
    """Straight-through it is near the carrier's; as a module that is called, too."""
    block = Block(nnx.Rngs(0))
    x = jax.random.normal(KEY, (1, 3, 8))
    got = jax.jit(jax.grad(lambda x: (jc.emulate(block, spec)(x) ** 2).sum()))(x)
    want = jax.grad(lambda x: (block(x) ** 2).sum())(x)
    np.testing.assert_allclose(got, want, atol=0.05)
    assert not np.array_equal(got, want)


def an_adam_step(spec: str) -> None:
    optimizer = optax.adam(0.25)
    params = {"w": jc.round_to_format(jax.random.normal(KEY, (4,)), "e5m10")}
    loss = lambda p: jnp.sum(p["w"] ** 2)  # noqa: E731

    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    (new, moments), (want, _) = jax.jit(jc.emulate(step, spec))(params, state, key=KEY), step(params, state)
    assert_low(new, want, 0.01)
    assert int(moments[0].count) == 1
    if spec == "e5m10":  # the first moment by hand
        rounded = lambda v: jc.round_to_format(v, spec)  # noqa: E731
        by_hand = rounded(rounded(np.float32(1) - rounded(np.float32(0.9))) * (2 * params["w"]))
        np.testing.assert_allclose(moments[0].mu["w"], by_hand, rtol=2e-3)


def conjugate_gradients(spec: str) -> None:
    a = jnp.diag(jnp.arange(1.0, 5.0)) + 0.1
    b = jnp.ones(4)
    solve = lambda a, b: cg(lambda v: a @ v, b, maxiter=8)[0]  # noqa: E731
    low = jc.emulate(solve, spec, accumulate=jc.MatmulSpec(accumulate=spec), key=KEY)
    assert_low(jax.jit(low)(a, b), jnp.linalg.solve(a, b), 0.02)
    if spec == "e5m10":  # the derivative is that of the linear system
        slope = jax.grad(lambda b: low(a, b).sum())(b)
        np.testing.assert_allclose(slope, jnp.linalg.solve(a, jnp.ones(4)), atol=1e-3)


def conjugate_gradients_by_hand(spec: str) -> None:
    """Two turns of the method, every operation rounded where `jax.scipy` does it."""
    how = jc.MatmulSpec(accumulate=spec)
    r = lambda v: jc.round_to_format(v, spec)  # noqa: E731
    dot = lambda x, y: r(jc.math.matmul(x, y, how))  # noqa: E731
    a, b = r(jnp.diag(jnp.arange(1.0, 5.0)) + 0.1), jnp.ones(4)
    x, residual = jnp.zeros(4), b
    p, gamma = residual, dot(residual, residual)
    for _ in range(2):
        ap = dot(a, p)
        alpha = r(gamma / dot(p, ap))
        x, residual = r(x + r(alpha * p)), r(residual - r(alpha * ap))
        gamma, before = dot(residual, residual), gamma
        p = r(residual + r(r(gamma / before) * p))
    got = jc.emulate(lambda a, b: cg(lambda v: a @ v, b, maxiter=2)[0], spec, accumulate=how)(a, b)
    np.testing.assert_array_equal(got, x)


@further.first
@pytest.mark.parametrize(
    ("check", "spec"),
    [
        (an_adam_step, "e5m10"),
        *(
            pytest.param(check, spec, marks=pytest.mark.slow)
            for check, spec in (
                (an_adam_step, "e5m10:stochastic"),
                (a_cnn, "e5m10:stochastic"),
                (a_transformer_block, "e5m10"),
                (the_derivative_of_a_block, "e6m12"),
                (conjugate_gradients, "e5m10"),
                (conjugate_gradients, "e5m10:stochastic"),
                (conjugate_gradients_by_hand, "e5m10"),
            )
        ),
    ],
)
def programs_that_people_have(check: Callable[[str], None], spec: str) -> None:
    check(spec)


test_further = further.test()
