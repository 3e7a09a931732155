"""Sums whose errors are kept, also inside of Optax chains, and with errors kept by `optim.error_feedback`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import Further

import jchop as jc

further = Further()

GROUP = 16
INT4 = f"int4(group={GROUP})"
#: One bit: plus or minus the median magnitude of a group.
SIGNS = jc.formats.ScaledFormat(
    jc.formats.CodebookFormat((-1.0, 1.0)), group=GROUP, scale="binary32", rule="percentile(50)"
)


def check_sums(spec: str, rng: np.random.Generator) -> None:
    """The sum of what all ranks got differs from the true sum by the errors that are kept, and by no more."""
    ranks, size, steps = 8, 256, 100
    x = rng.standard_normal((steps, ranks, size)).astype(np.float32)
    tx = jc.distributed.psum_with_feedback("d", spec, jax.random.key(3))

    def run(x: jax.Array) -> Any:
        def step(state: Any, x: jax.Array) -> Any:
            y, state = tx.update(x, state)
            return state, y

        return jax.lax.scan(step, tx.init(x[0]), x)

    state, sent = jax.jit(jax.vmap(run, in_axes=1, axis_name="d"))(x)
    sent = np.asarray(sent, np.float64)
    assert (sent == sent[:1]).all()
    missing = x.astype(np.float64).sum((0, 1)) - sent[0].sum(0)
    kept = np.asarray(state.sent[0], np.float64).sum(0).reshape(-1) + np.asarray(state.total[0], np.float64).reshape(-1)
    np.testing.assert_allclose(missing, kept, atol=2e-3)
    own = np.asarray(state.sent[0], np.float64)  # of each rank: within one step of its own scale
    wanted = np.abs(x).max() * 2 / 7 * (2 if "stochastic" in spec else 1)
    assert np.abs(own).max() <= wanted
    largest = np.abs(sent).max() / 7 * 1.5
    assert np.abs(missing).max() <= ranks * wanted + largest


@further.first
def optims_error_feedback_before_a_sum(rng: np.random.Generator) -> None:
    """Updates that `optim.error_feedback` rounded travel without another error: the sum is that of the rounded ones."""
    x = rng.standard_normal((4, 2, 2 * GROUP)).astype(np.float32)
    spec = f"int4(group={GROUP},scale=e8m0fnu,rule=ceil)"  # steps that are powers of two: sums of 4 fit 16 bits
    chain = optax.chain(
        jc.optim.error_feedback(spec), optax.stateless(lambda u, _: jc.distributed.psum(u, "d", spec, accumulate=None))
    )
    local = jc.optim.error_feedback(spec)

    def run(x: jax.Array) -> Any:
        both, own = chain.init(x[0]), local.init(x[0])
        found = []
        for step in range(2):
            y, both = chain.update(x[step], both)
            q, own = local.update(x[step], own)
            found.append((y, q))
        return found

    for y, q in jax.jit(jax.vmap(run, axis_name="d"))(x):
        pieces = np.asarray(q).sum(0).reshape(4, -1)
        wanted = np.stack([np.asarray(jc.round_to_format(piece, spec)) for piece in pieces]).reshape(-1)
        np.testing.assert_array_equal(np.asarray(y)[0], wanted)


INT8 = "int8(group=4,scale=bfloat16)"
#: Ranks whose third has an infinity, a NaN, and numbers that are finite while their sum is not.
FAULTS = {"inf": (2, np.inf), "nan": (2, np.nan), "overflow": (slice(None), 3e38)}


def updates_of(tx: Any, gradients: Any) -> np.ndarray:
    """The updates of every rank and step. Gradients are (ranks, steps, ...)."""

    def rank(gradients: jax.Array) -> jax.Array:
        def step(state: Any, g: jax.Array) -> Any:
            y, state = tx.update(g, state, g)
            return state, y

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

    return np.asarray(jax.jit(jax.vmap(rank, axis_name="d"))(gradients))


def spoiled(at: Any, number: float) -> np.ndarray:
    """Gradients of four steps, with faulty numbers in the second."""
    gradients = np.ones((4, 4, 8), np.float32)
    gradients[:, 2:, 0] = -1
    gradients[at, 1, 0] = number
    return gradients


@pytest.mark.parametrize(
    ("fault", "spec"),
    [
        ("inf", "fixed4.0"),
        *(
            pytest.param(fault, spec, marks=pytest.mark.slow)
            for fault in FAULTS
            for spec in (INT8, "e4m3fn", "bfloat16", f"{INT8[:-1]},nan_block=true)")
        ),
    ],
)
def test_a_fault_on_one_rank_is_seen_by_all_and_not_kept(fault: str, spec: str) -> None:
    """The sum is NaN on all ranks in that step, whose errors are left out; later sums do not know of it."""
    tx = jc.distributed.psum_with_feedback("d", spec)
    found = updates_of(tx, spoiled(*FAULTS[fault]))
    steps = spoiled(0, 1.0)[:, [0, 2, 3]]  # the same without the faulty step
    assert np.isnan(found[:, 1]).all()
    np.testing.assert_array_equal(found[:, [0, 2, 3]], updates_of(tx, steps))


def _trained(reduce: Any, steps: int = 400) -> float:
    """The loss of a small transformer block after data-parallel training on 4 ranks: it learns to repeat a token.

    Of the targets 30 % are drawn, so that the least loss is 1.4.
    """
    ranks, batch, length, vocabulary, width = 4, 8, 8, 16, 32
    keys = jax.random.split(jax.random.key(0), 6)
    params = {
        "embed": jax.random.normal(keys[0], (vocabulary, width)) * 0.5,
        "place": jax.random.normal(keys[1], (length, width)) * 0.5,
        "qkv": jax.random.normal(keys[2], (width, 3 * width)) * width**-0.5,
        "up": jax.random.normal(keys[3], (width, 4 * width)) * width**-0.5,
        "down": jax.random.normal(keys[4], (4 * width, width)) * (4 * width) ** -0.5,
    }

    def loss(params: Any, key: jax.Array) -> jax.Array:
        tokens, other = jax.random.randint(key, (2, batch, length), 0, vocabulary)
        drawn = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.3, tokens.shape)
        x = params["embed"][tokens] + params["place"]
        q, k, v = jnp.split(x @ params["qkv"], 3, -1)
        scores = q @ k.swapaxes(-1, -2) * width**-0.5 + jnp.where(jnp.tri(length), 0, -1e9)
        x = x + jax.nn.softmax(scores) @ v
        x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        target = jnp.where(drawn, other, jnp.roll(tokens, 1, -1))[:, 1:, None]
        return -jnp.take_along_axis(logits[:, 1:], target, -1).mean()

    tx = optax.chain(reduce, optax.scale(1 / ranks), optax.adam(3e-3))

    def run(rank: jax.Array) -> jax.Array:
        def step(carry: Any, at: jax.Array) -> Any:
            params, state = carry
            key = jax.random.fold_in(jax.random.fold_in(keys[5], at), rank)
            value, gradient = jax.value_and_grad(loss)(params, key)
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), jax.lax.pmean(value, "d")

        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))[1][-50:].mean()

    return float(jax.jit(jax.vmap(run, axis_name="d"))(jnp.arange(ranks))[0])


def check_training(spec: Any, rng: np.random.Generator) -> None:
    exact = _trained(optax.stateless(lambda u, _: jax.lax.psum(u, "d")))
    signs = _trained(jc.distributed.psum_with_feedback("d", spec))
    print(f"losses: floats {exact:.4f}, one bit {signs:.4f}")
    assert abs(signs - exact) <= 0.02 * exact


@pytest.mark.parametrize(
    ("check", "spec"),
    [
        (check_sums, INT4),
        pytest.param(check_sums, INT4 + ":stochastic", marks=pytest.mark.slow),
        pytest.param(check_training, SIGNS, marks=pytest.mark.slow),
    ],
    ids=["sums", "stochastic sums", "one bit trains like floats"],
)
def test_errors_are_kept_for_later_sums(check: Any, spec: Any, rng: np.random.Generator) -> None:
    check(spec, rng)


test_further = further.test()
