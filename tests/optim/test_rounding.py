"""Rounding in a chain: where parameters land, which keys are drawn from, and what Optax's wrappers make of it."""

# Optax types every state as a tree of arrays, which has no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false
from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import Further
from oracle import Special, ieee, round_exact

import jchop as jc
from jchop import optim

further = Further()

KEY = jax.random.key(7)
MODES = ("nearest_even", "nearest_away", "up", "down", "toward_zero", "odd")
#: (format, its exact values, the dtype of the parameters)
FORMATS = [
    ("bfloat16", ieee(8, 7), "bfloat16"),
    ("binary16", ieee(5, 10), "float16"),
    ("e5m10", ieee(5, 10), "float32"),
    ("float8_e5m2", ieee(5, 2), "float32"),
]


def numbers(fmt: str, dtype: str, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Parameters in a format, and updates of every relative size: far smaller, alike, opposite, and far larger."""
    spread = np.exp2(rng.uniform(-6, 6, 400)) * rng.choice([-1, 1], 400)
    p = jc.round_to_format(jnp.asarray(spread, jnp.float32), fmt).astype(dtype)
    sizes = np.exp2(rng.integers(-14, 8, 400)).astype(np.float32)
    u = np.asarray(p, np.float32) * sizes * rng.standard_normal(400).astype(np.float32)
    u[:40] = -np.asarray(p[:40], np.float32)
    u[40:80] = -np.asarray(p[40:80], np.float32) * np.float32(1 + 2**-9)
    return p, jnp.asarray(u)


@further
@pytest.mark.in_turn(5)
@pytest.mark.parametrize(("fmt", "exact", "dtype"), FORMATS)
def parameters_land_on_the_exact_sum_rounded_once(fmt: str, exact: Any, dtype: str, rng: Any) -> None:
    p, u = numbers(fmt, dtype, rng)

    @jax.jit
    def land(p: jax.Array, u: jax.Array) -> dict[str, jax.Array]:
        made = {}
        for mode in MODES:
            tx = optim.round_params(f"{fmt}:{mode}")
            made[mode] = optax.apply_updates(p, tx.update(u, tx.init(p), p)[0])
        return made

    for mode, landed in land(p, u).items():
        assert landed.dtype == p.dtype
        for a, b, c in zip(np.float64(p), np.float64(u), np.float64(landed), strict=True):
            wanted = round_exact(exact, Fraction(a) + Fraction(b), mode)
            assert (0 if wanted is Special.NEG_ZERO else wanted) == Fraction(c), (mode, a, b)


@pytest.mark.in_turn(5)
@pytest.mark.parametrize(("fmt", "exact", "dtype"), FORMATS[:3])
def test_stochastic_parameters_land_on_a_neighbour_and_are_unbiased(fmt: str, exact: Any, dtype: str, rng: Any) -> None:
    p, u = numbers(fmt, dtype, rng)
    tx = optim.round_params(f"{fmt}:stochastic", KEY)

    @jax.jit
    def land(state: Any) -> jax.Array:
        def step(state: Any, _: None) -> tuple[Any, jax.Array]:
            made, state = tx.update(u, state, p)
            return state, optax.apply_updates(p, made).astype(jnp.float32)

        return jax.lax.scan(step, state, None, length=200)[1]

    landed = np.float64(land(tx.init(p)))
    low, high = (np.zeros(400), np.zeros(400))
    for i, (a, b) in enumerate(zip(np.float64(p), np.float64(u), strict=True)):
        total = Fraction(a) + Fraction(b)
        ends = [round_exact(exact, total, mode) for mode in ("down", "up")]
        low[i], high[i] = [0.0 if end is Special.NEG_ZERO else float(end) for end in ends]  # type: ignore[arg-type]
    assert np.all((landed == low) | (landed == high))
    wide = high > low
    share = (landed == high)[:, wide].mean(0)
    wanted = ((np.float64(p) + np.float64(u) - low)[wide]) / (high - low)[wide]
    assert abs((share - wanted).mean()) < 5 * 0.5 / np.sqrt(200 * wide.sum())
    assert np.all(np.abs(share - wanted) < 6 * 0.5 / np.sqrt(200))


@further
def infinities_and_nan_land_too() -> None:
    p = jnp.array([1.0, jnp.inf, 1.0, 3e38, -jnp.inf])
    u = jnp.array([jnp.inf, 1.0, jnp.nan, 3e38, jnp.inf])
    tx = optim.round_params("bfloat16")
    landed = optax.apply_updates(p, tx.update(u, tx.init(p), p)[0])
    np.testing.assert_array_equal(landed, [jnp.inf, jnp.inf, jnp.nan, jnp.inf, jnp.nan])


@further
def scaled_parameters_land_on_their_grid() -> None:
    rng = np.random.default_rng(3)
    p = jnp.asarray(rng.standard_normal((8, 64)), jnp.float32)
    u = jnp.asarray(1e-2 * rng.standard_normal((8, 64)), jnp.float32)
    for spec in ("int8(channel=0)", "mxfp8_e4m3", "dynamic4(group=32)", "fixed4.6"):
        q = jc.round_to_format(p, spec)
        tx = optim.round_params(spec)
        landed = jax.jit(lambda q, tx=tx: optax.apply_updates(q, tx.update(u, tx.init(q), q)[0]))(q)
        wanted = np.asarray(jc.round_to_format(q + u, spec))
        off = np.abs(np.asarray(landed) - wanted)
        assert np.all(off <= np.spacing(np.abs(wanted))), spec
        assert (off == 0).mean() > 0.95, spec


def test_gradients_and_updates_are_rounded_leaf_by_leaf_with_keys_of_their_own() -> None:
    spec = "bfloat16:stochastic"
    g = {"a": jnp.full(1000, 1.001), "b": jnp.full(1000, 1.001)}
    for tx in (optim.round_updates(spec, KEY), optim.round_updates(spec, KEY, scale=jnp.float32(1))):
        first, state = tx.update(g, tx.init(g))
        second, _ = tx.update(g, state)
        drawn = [np.asarray(x) for made in (first, second) for x in (made["a"], made["b"])]
        assert all(set(np.unique(x)) <= {1.0, 1.0078125} for x in drawn)
        assert all((x != y).any() for i, x in enumerate(drawn) for y in drawn[:i])
        again, _ = tx.update(g, tx.init(g))
        np.testing.assert_array_equal(first["a"], again["a"])
        _, *keys = jax.random.split(KEY, 3)
        np.testing.assert_array_equal(first["b"], jc.round_to_format(g["b"], spec, keys[1]))


@pytest.mark.smoke
def test_gradients_are_scaled_before_they_are_rounded() -> None:
    tx = optim.round_updates("e5m2", scale=1 / 1024)
    made, _ = tx.update(jnp.array([1100.0, 3.0]), tx.init(jnp.zeros(2)))
    assert made.tolist() == [1.0, float(jc.round_to_format(3 / 1024, "e5m2"))]


def chain(spec: str = "bfloat16:stochastic", learning_rate: Any = 0.01) -> Any:
    return optax.chain(optim.round_updates(spec, KEY), optax.sgd(learning_rate, 0.9), optim.round_params(spec, KEY))


def on_grid(params: Any, fmt: str = "bfloat16") -> bool:
    return all(bool((jc.round_to_format(p, fmt) == p).all()) for p in jax.tree.leaves(params))


PARAMS = {"w": jnp.ones((4, 8)), "b": jnp.full(8, 0.5)}
GRADS = {"w": jnp.full((4, 8), 0.3), "b": jnp.full(8, -0.7)}
WRAPPED = {
    "masked": lambda: optax.masked(chain(), {"w": True, "b": False}),
    "partition": lambda: optax.partition({"low": chain(), "full": optax.sgd(0.01)}, {"w": "low", "b": "full"}),
    "multi_steps": lambda: optax.MultiSteps(chain(), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(chain(), 3),
    "schedule": lambda: chain(learning_rate=optax.linear_schedule(0.01, 0.0, 10)),
    "inject": lambda: optax.inject_hyperparams(lambda learning_rate: chain(learning_rate=learning_rate))(0.01),
}


@further.first
@pytest.mark.parametrize("name", WRAPPED)
def optax_wrappers_take_it(name: str) -> None:
    tx = WRAPPED[name]()

    @jax.jit
    def run(params: Any) -> tuple[Any, Any]:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            params, state = carry
            updates, state = tx.update(GRADS, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), None, length=4)[0]

    params, _ = run(PARAMS)
    assert on_grid(params["w"])
    assert bool((params["w"] < 1).all())
    assert bool((params["b"] > 0.5).all()) or name == "masked"


@further
def the_learning_rate_and_the_key_change_without_compiling_again() -> None:
    tx = WRAPPED["inject"]()
    step = jax.jit(lambda state, params: tx.update(GRADS, state, params))
    state = tx.init(PARAMS)
    first, _ = step(state, PARAMS)
    state.hyperparams["learning_rate"] = jnp.asarray(0.04, jnp.float32)
    second, _ = step(state, PARAMS)
    other = state.inner_state[-1]._replace(key=jax.random.key(99))
    third, _ = step(state._replace(inner_state=(*state.inner_state[:-1], other)), PARAMS)
    assert step._cache_size() == 1
    assert float(second["w"].mean()) < 2 * float(first["w"].mean())
    assert bool((third["w"] != second["w"]).any())


def test_what_is_refused() -> None:
    for name in ("round_updates", "round_params", "error_feedback", "compensate"):
        with pytest.raises(ValueError, match="key=None"):
            getattr(optim, name)("e5m2:stochastic")
    tx = optim.round_params("bfloat16")
    with pytest.raises(ValueError, match="params=None"):
        tx.update(PARAMS, tx.init(PARAMS))
    half = jnp.ones(3, "bfloat16")
    for spec in ("binary16", "binary32"):
        tx = optim.round_params(spec)
        with pytest.raises(ValueError, match="cannot hold"):
            tx.update(half, tx.init(half), half)
    whole = jnp.ones(3, jnp.int32)
    with pytest.raises(TypeError, match="int32"):
        optim.round_params("bfloat16").update(half, optim.round_params("bfloat16").init(half), whole)


test_further = further.test()
