"""Training with few exchanges equals a replay in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from distributed import replay
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jchop as jc

RANKS, EVERY, STEPS, SHAPE = 4, 3, 7, (5, 11)
#: Powers of two, so that products are exact and no compiler's contraction changes a bit.
INNER, OUTER, MOMENTUM = 0.5, 0.25, 0.5


def replayed(gradients: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The parameters of each rank and the anchor. `gradients` is (steps, ranks, ...)."""
    own = [start] * RANKS
    anchor, trace = start, np.zeros_like(start)
    for step, gradient in enumerate(gradients, 1):
        before, own = own, [p - np.float32(INNER) * g for p, g in zip(own, gradient, strict=True)]
        if step % EVERY == 0:
            mean = replay.psum([anchor - p for p in own]) / np.float32(RANKS)
            trace = mean + np.float32(MOMENTUM) * trace
            anchor = anchor - np.float32(OUTER) * (mean + np.float32(MOMENTUM) * trace)
            own = [p + (anchor - p) for p in before]
    return np.stack(own), anchor


def test_exchanges_equal_a_replay(rng: np.random.Generator) -> None:
    gradients = rng.standard_normal((STEPS, RANKS, *SHAPE)).astype(np.float32)
    start = rng.standard_normal(SHAPE).astype(np.float32)
    summed = optax.stateless(lambda u, _: jc.distributed.psum(u, "d", replay.NEAREST))
    outer = optax.chain(summed, optax.scale(1 / RANKS), optax.sgd(OUTER, MOMENTUM, nesterov=True))
    tx = jc.distributed.diloco(optax.sgd(INNER), outer, EVERY)

    def local(gradients: jax.Array, params: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(carry: Any, gradient: jax.Array) -> Any:
            params, state = carry
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        own = jax.lax.pcast(params, "d", to="varying")
        (own, state), _ = jax.lax.scan(step, (own, tx.init(params)), gradients[:, 0])
        return own[None], state.anchor  # a type that is equal on all ranks

    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("d",), axis_types=(AxisType.Auto,))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(None, "d"), P()), out_specs=(P("d"), P())))
    own, anchor = replayed(gradients, start)
    for found, wanted in zip(run(gradients, start), (own, anchor), strict=True):
        np.testing.assert_array_equal(np.asarray(found).view(np.uint32), wanted.view(np.uint32))


def test_what_is_refused() -> None:
    tx = optax.sgd(0.1)
    for error, said, call in (
        (ValueError, "every=0", lambda: jc.distributed.diloco(tx, tx, 0)),
        (TypeError, "outer=3 must be", lambda: jc.distributed.diloco(tx, 3, 2)),
        (ValueError, "params=None", lambda: jc.distributed.diloco(tx, tx, 2).update(
            jnp.ones(2), jc.distributed.diloco(tx, tx, 2).init(jnp.ones(2)))),
    ):  # fmt: skip
        with pytest.raises(error, match=said):
            call()
