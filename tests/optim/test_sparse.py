"""Parameters held sparse in training, against NumPy step by step."""

# Optax types every state as a tree of arrays, which has no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportCallIssue=false
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jchop as jc
from jchop import optim


def largest(w: np.ndarray, n: int = 2, m: int = 4) -> np.ndarray:
    """Which numbers are among the n largest of their group along the first axis."""
    groups = np.abs(w).reshape(-1, m, w.shape[1])
    return (np.argsort(np.argsort(-groups, axis=1, kind="stable"), axis=1) < n).reshape(w.shape)


def steps_of(tx: Any, params: Any, grads: Any) -> tuple[list[Any], Any]:
    """The parameters after each step, and the last state."""
    step, state, each = jax.jit(tx.update), tx.init(params), []
    for g in grads:
        updates, state = step(g, state, params)
        params = optax.apply_updates(params, updates)
        each.append(params)
    assert step._cache_size() == 1
    return each, state


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.in_turn(4)
def test_masks_that_are_chosen_once(start: int, dtype: str, rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(12, 5)), dtype), "b": jnp.ones(5), "n": jnp.ones((4, 4), "int32")}
    grads = [
        {"w": jnp.asarray(rng.normal(size=(12, 5)), dtype), "b": jnp.ones(5), "n": jnp.zeros((4, 4), "int32")}
        for _ in range(4)
    ]
    plain, _ = steps_of(optax.sgd(0.25), params, grads)
    each, state = steps_of(optax.chain(optax.sgd(0.25), optim.sparse_params(2, 4, start=start)), params, grads)
    mask = largest(np.asarray(plain[start]["w"], np.float64))
    for number, (dense, sparse) in enumerate(zip(plain, each, strict=True)):
        assert sparse["w"].dtype == dtype
        wanted = dense["w"] if number < start else jnp.where(mask, dense["w"], 0)
        np.testing.assert_array_equal(sparse["w"], wanted)
        np.testing.assert_array_equal(sparse["b"], dense["b"])
    np.testing.assert_array_equal(state[1].masks["w"], mask)
    assert state[1].dense is None and int(state[1].steps) == 4


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_masks_that_are_chosen_again(decay: float, rng: np.random.Generator) -> None:
    """SR-STE in NumPy: the dense parameters take the gradient at the masked ones, and those masked out decay."""
    w, grads = rng.normal(size=(16, 6)), rng.normal(size=(7, 16, 6))
    tx = optax.chain(optax.sgd(0.5), optim.sparse_params(2, 4, start=1, every=3, decay=decay))
    each, state = steps_of(tx, jnp.asarray(w, jnp.float32), jnp.asarray(grads, jnp.float32))
    dense, mask, masks = w.copy(), np.ones(w.shape, bool), []
    for number, (g, found) in enumerate(zip(grads, each, strict=True)):
        dense = dense * np.where(mask, 1, 1 - decay) - 0.5 * g
        if number >= 1 and (number - 1) % 3 == 0:
            mask = largest(dense)
            masks.append(mask)
        np.testing.assert_allclose(found, dense * mask, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(found)[~mask], 0)
    assert len(masks) == 2 and (masks[0] != masks[1]).any()  # numbers have come back
    np.testing.assert_allclose(state[1].dense, dense, rtol=1e-5, atol=1e-6)


def test_tiles_are_sparse_both_ways(rng: np.random.Generator) -> None:
    params = jnp.asarray(rng.normal(size=(3, 8, 12)), "bfloat16")
    tx = optim.sparse_params(2, 4, axis=(-2, -1), every=1)
    (after,), state = steps_of(tx, params, [jnp.zeros_like(params)])
    tiles = np.asarray(after != 0).reshape(3, 2, 4, 3, 4)
    assert (tiles.sum(2) == 2).all() and (tiles.sum(4) == 2).all()
    np.testing.assert_array_equal(after, jnp.where(state.masks, params, 0))
    np.testing.assert_array_equal(state.masks, jc.sparsity.mask(params, 2, 4, axis=(1, 2)))
    assert state.dense.dtype == jnp.float32


def test_training_recovers_from_pruning(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(256, 16)) @ rng.normal(size=(16, 16)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    y = x @ w

    def loss(p: jax.Array) -> jax.Array:
        return jnp.mean((x @ p - y) ** 2)

    def trained(**options: Any) -> float:
        tx = optax.chain(optax.adam(0.02), optim.sparse_params(2, 4, **options))

        def step(carry: Any, _: Any) -> Any:
            p, state = carry
            updates, state = tx.update(jax.grad(loss)(p), state, p)
            return (optax.apply_updates(p, updates), state), None

        (p, _), _ = jax.jit(lambda w: jax.lax.scan(step, (w, tx.init(w)), None, length=300))(w)
        assert int((p.reshape(4, 4, 8) != 0).sum(1).max()) == 2
        return float(loss(p))

    once = float(loss(jnp.where(jc.sparsity.mask(w, 2, 4, axis=0), w, 0)))
    fixed, again = trained(), trained(every=10)
    assert again < 0.9 * fixed < 0.6 * once
    assert trained(every=10, decay=0.0) > once  # masks that never settle


def test_parts_of_a_tree() -> None:
    params = {"a": jnp.ones((4, 2)), "b": jnp.ones((4, 2))}
    tx = optax.masked(optim.sparse_params(1, 2, every=2), {"a": True, "b": False})
    (after,), _ = steps_of(tx, params, [jax.tree.map(jnp.zeros_like, params)])
    assert after["a"].tolist() == [[1, 1], [0, 0]] * 2 and after["b"].tolist() == params["b"].tolist()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="n=4 must be an integer from 1 to 3"):
        optim.sparse_params(4, 4)
    with pytest.raises(ValueError, match=r"m \(the side of a tile\)=8 must be"):
        optim.sparse_params(2, 8, axis=(0, 1))
    with pytest.raises(ValueError, match="every=0 must be an integer from 1 to 2147483647"):
        optim.sparse_params(2, 4, every=0)
    with pytest.raises(ValueError, match="start=-1 must be an integer from 0 to 2147483647"):
        optim.sparse_params(2, 4, start=-1)
    with pytest.raises(ValueError, match="decay=1 must be a finite number >= 0 and < 1"):
        optim.sparse_params(2, 4, every=1, decay=1)
    with pytest.raises(ValueError, match=r"decay=0\.5 is that of dense parameters, which are kept with every="):
        optim.sparse_params(2, 4, decay=0.5)
    with pytest.raises(ValueError, match="axis=-3 is not an axis of an array of 2 dim"):
        optim.sparse_params(2, 4, axis=-3).init(jnp.ones((4, 4)))
    tx, p = optim.sparse_params(2, 4), jnp.ones((4, 4))
    with pytest.raises(ValueError, match="params=None"):
        tx.update(p, tx.init(p))
    with pytest.raises(ValueError, match=r"params: the array has shape \(8, 4\), and the masks \(4, 4\)"):
        tx.update(jnp.ones((8, 4)), tx.init(p), jnp.ones((8, 4)))
