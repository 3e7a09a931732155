"""A state keeps its structure and dtypes from step to step, whatever the dtypes of parameters and gradients."""

# Optax types every state as a tree of arrays, which has no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import Further

import jchop as jc
from jchop import optim

further = Further()

KEY = jax.random.key(7)
#: Cheap to compile; the tests are about dtypes.
GROUPS = "mxfp8_e4m3"
#: Of parameters and gradients.
DTYPES = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")]


def packed(inner: Any = None, spec: Any = GROUPS, **options: Any) -> Any:
    """`w` is packed, `b` is not."""
    return optim.quantize_state(inner or optax.adam(1e-3), spec, KEY, min_size=100, **options)


def named(make: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: make(1e-3, min_size=100)


PACKED = {
    **{make.__name__: named(make) for make in (
        optim.adamw8bit, optim.adamw4bit, optim.adamw_fp8, optim.adam8bit, optim.lion8bit, optim.sgd8bit,
        optim.muon8bit)},
    "propagate": lambda: packed(nonfinite="propagate"),
    "chunks": lambda: packed(chunks=2),
    "propagate in chunks": lambda: packed(chunks=2, nonfinite="propagate"),
    "one moment": lambda: packed(spec={"0.mu": GROUPS, "0.nu": None}),
    "one moment in chunks": lambda: packed(spec={"0.mu": GROUPS, "0.nu": None}, chunks=2),
    "stochastic": lambda: packed(spec="e4m3:stochastic"),
    "joined axes": lambda: packed(spec="int8(group=256)"),
}  # fmt: skip

AROUND = {
    "skip_nonfinite": optim.skip_nonfinite,
    "dynamic_loss_scale": optim.dynamic_loss_scale,
    "dynamic_loss_scale of skip_nonfinite": lambda tx: optim.dynamic_loss_scale(optim.skip_nonfinite(tx)),
    "offload_state": lambda tx: optim.offload_state(tx, "device"),
    "low_precision": lambda tx: optim.low_precision(tx, weight="e4m3", accumulator="e5m9"),
    "a chain": lambda tx: optax.chain(optim.error_feedback("e4m3"), tx, optim.round_params("e4m3")),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "MultiSteps of dynamic_loss_scale": lambda tx: optax.MultiSteps(optim.dynamic_loss_scale(tx), 2),
    "dynamic_loss_scale of MultiSteps": lambda tx: optim.dynamic_loss_scale(optax.MultiSteps(tx, 2)),
}

INJECTED = {
    "packed": optim.adam8bit,
    "in a loss scale": lambda learning_rate: optim.dynamic_loss_scale(optim.adam8bit(learning_rate, min_size=100)),
}

SCALED = {
    "adam": lambda: optax.adam(1e-3),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(1e-3),
    "low_precision": lambda: optim.low_precision(optax.adam(1e-3), weight="e4m3", momentum="e5m9"),
    "compensate": lambda: optax.chain(optax.sgd(0.1, 0.9), optim.compensate("e4m3")),
    "others": lambda: optax.chain(
        optax.rmsprop(0.1), optim.sparse_params(2, 4, every=2), optim.average_params(spec="e4m3:stochastic", key=KEY)
    ),
}


def trees(of_params: str, of_gradients: str) -> tuple[Any, Any]:
    params = {"w": jnp.ones((4, 128), of_params), "b": jnp.ones(8, of_params)}
    return params, jax.tree.map(lambda p: jnp.full_like(p, 0.5, of_gradients), params)


def described(state: Any) -> Any:
    return jax.tree.structure(state), [(x.shape, x.dtype) for x in jax.tree.leaves(state)]


def assert_stays(tx: Any, dtypes: tuple[str, str], begin: Any = lambda params: params) -> None:
    """A step does not change the structure and dtypes of the state, and `lax.scan` takes it."""
    params, grads = trees(*dtypes)

    def run(params: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            params, state = carry
            updates, after = tx.update(grads, state, params)
            assert described(after) == described(state)
            return (optax.apply_updates(params, updates), after), None

        return jax.lax.scan(step, (params, tx.init(begin(params))), length=3)

    jax.eval_shape(run, params)


def some_of(table: Iterable[str], *whole: str) -> list[Any]:
    """Cases of a name and dtypes: those of `whole` with all dtypes, the others with one each, in turn."""
    return [
        pytest.param(name, dtypes, id=f"{name}-{'-'.join(dtypes)}")
        for place, name in enumerate(table)
        for number, dtypes in enumerate(DTYPES)
        if name in whole or number == place % len(DTYPES)
    ]


@pytest.mark.in_turn(16)
@pytest.mark.parametrize(("name", "dtypes"), some_of(PACKED, "adamw8bit", "one moment in chunks"))
def test_a_packed_state_stays(name: str, dtypes: tuple[str, str]) -> None:
    assert_stays(PACKED[name](), dtypes)


@pytest.mark.in_turn(16)
@pytest.mark.parametrize(("name", "dtypes"), some_of(AROUND, "dynamic_loss_scale", "low_precision"))
def test_a_packed_state_stays_in_other_transformations(name: str, dtypes: tuple[str, str]) -> None:
    assert_stays(AROUND[name](packed(nonfinite="propagate" if name.startswith("dynamic") else "skip")), dtypes)


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("name", "dtypes"), some_of(INJECTED, "packed"))
def test_a_packed_state_stays_under_hyperparameters_of_float32(name: str, dtypes: tuple[str, str]) -> None:
    assert_stays(optax.inject_hyperparams(INJECTED[name], hyperparam_dtype=jnp.float32)(1e-3), dtypes)


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("name", "dtypes"), some_of(SCALED, "low_precision"))
def test_any_state_stays_in_a_loss_scale(name: str, dtypes: tuple[str, str]) -> None:
    assert_stays(optim.dynamic_loss_scale(SCALED[name]()), dtypes)


CHAINED = {"alone": optax.identity(), "decayed": optax.add_decayed_weights(0.01)}


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("name", "dtypes"), some_of(CHAINED, "decayed"))
def test_moments_beside_an_accumulator_have_its_dtype(name: str, dtypes: tuple[str, str]) -> None:
    assert_stays(optim.low_precision(optax.chain(CHAINED[name], optax.sgd(0.1, 0.9)), accumulator="e5m9"), dtypes)


@pytest.mark.parametrize("wrap", [optim.skip_nonfinite, lambda tx: optim.low_precision(tx, weight="e4m3")])
def test_a_state_that_begins_from_float32_takes_gradients_of_float32(wrap: Any) -> None:
    """As the documentation advises for moments that are not packed."""
    tx = wrap(optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1, 0.9)))
    assert_stays(tx, ("bfloat16", "float32"), lambda params: jax.tree.map(lambda p: p.astype("float32"), params))


# -- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
def test_a_moment_of_float32_is_packed_as_it_is(nonfinite: str, rng: np.random.Generator) -> None:
    """The next step unpacks it in the dtype of the state. Numbers a little above a midpoint would be on it if they were
    rounded to bfloat16 first. A step in chunks does the same.
    """
    params, _ = trees("bfloat16", "float32")
    first, second = (np.float32(rng.standard_normal((4, 128)) + 3) for _ in range(2))
    first[:, ::32] = 7
    first[0, 1:8] = 4.25 + 2.0**-10  # between 4 and 4.5
    for count in (1, 2):
        tx = packed(optax.sgd(1.0, 0.5), nonfinite=nonfinite, chunks=count)
        state, trace = tx.init(params), np.zeros((4, 128), np.float32)
        small = np.zeros(8, np.float32)
        for g in (first, second):
            grads = {"w": jnp.asarray(g), "b": jnp.asarray(g[0, :8])}
            updates, state = jax.jit(tx.update)(grads, state, params)
            wanted = g + np.float32(jnp.bfloat16(0.5)) * trace
            np.testing.assert_allclose(updates["w"], -wanted, rtol=2**-7)
            kept = state.inner_state[0].trace
            assert kept["w"].dtype == kept["b"].dtype == jnp.bfloat16
            numbers = np.float32(jc.round_to_format(jnp.asarray(wanted), GROUPS))
            np.testing.assert_array_equal(jc.dequantize(kept["w"], "float32"), numbers)
            small = np.float32(jnp.asarray(g[0, :8] + np.float32(0.5) * small, "bfloat16"))
            np.testing.assert_array_equal(np.float32(kept["b"]), small)
            trace = np.float32(jnp.asarray(numbers, "bfloat16"))
            if g is first:
                assert (numbers[0, 1:8] == 4.5).all()


@further
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", ["w", "b"])
def a_moment_beyond_the_dtype_of_the_state_is_a_fault(name: str, chunks: int) -> None:
    params, grads = trees("float16", "float32")
    tx = packed(optax.sgd(2.0**-10, 0.5), chunks=chunks)
    grads[name] = grads[name].at[(1,) * grads[name].ndim].set(1e5)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert int(state.skipped) == 1 and all(not u.any() for u in jax.tree.leaves(updates))


@further.first
def moments_in_a_loss_scale_are_those_of_float32(rng: np.random.Generator) -> None:
    """Adam in binary64, of gradients whose squares float16 reads as zero."""
    params = jnp.ones(64, "float16")
    grads = jnp.asarray(rng.standard_normal((5, 64)), "float16")
    tx = optim.dynamic_loss_scale(optax.adam(1.0, 0.9, 0.99, 0.0), 2.0**15)

    def step(state: Any, g: Any) -> Any:
        updates, state = tx.update(g, state, params)
        return state, updates

    state, updates = jax.jit(lambda: jax.lax.scan(step, tx.init(params), grads))()
    m, v = np.zeros(64), np.zeros(64)
    for t, g in enumerate(np.float64(grads) / 2.0**15, 1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        np.testing.assert_allclose(updates[t - 1], -m / (1 - 0.9**t) / np.sqrt(v / (1 - 0.99**t)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.inner_state[0].nu, v, rtol=1e-5)
    assert int(state.skipped) == 0


test_further = further.test()
