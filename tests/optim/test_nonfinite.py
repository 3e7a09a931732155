"""Faulty gradients: parameters and state stay as they were, and no packed block is poisoned in silence."""

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
from further import Further

import jchop as jc
from jchop import optim
from jchop.optim._chain import LossScaleState, all_hold, finite_leaves

further = Further()

GROUPS = "mxfp8_e4m3"
PARAMS = {"w": jnp.ones((2, 64)), "b": jnp.ones(3)}
SOUND = {"w": jnp.full((2, 64), 0.5), "b": jnp.ones(3)}
#: A NaN, an infinity, and a gradient whose square overflows.
FAULTS = {"nan": jnp.nan, "inf": -jnp.inf, "overflow": 1e30}

WRAPPERS = {
    "skip_nonfinite": optim.skip_nonfinite(optax.adam(0.1)),
    "quantize_state": optim.quantize_state(optax.adam(0.1), GROUPS, min_size=8),
    "dynamic_loss_scale": optim.dynamic_loss_scale(optim.quantize_state(optax.adam(0.1), GROUPS, min_size=8), 4.0),
}


def spoiled(number: float) -> dict[str, jax.Array]:
    return SOUND | {"w": SOUND["w"].at[1, 40].set(number)}


LARGE = jnp.asarray(np.random.default_rng(3).standard_normal((128, 256)), "float32")


@further
@pytest.mark.parametrize("chunks", [1, 2])
def one_nan_among_many_numbers_leaves_a_step_out(chunks: int) -> None:
    """XLA's CPU backend may lose a NaN on the way to the largest number of a large array."""
    tx = optim.adamw8bit(0.1, chunks=chunks)
    state, step = jax.jit(tx.init)(LARGE), jax.jit(tx.update)
    for at in ((0, 3), (63, 200), (127, 255)):
        updates, after = step(LARGE.at[at].set(jnp.nan), state, LARGE)
        assert (at, float(jnp.abs(updates).sum()), int(after.skipped)) == (at, 0, 1)
        jax.tree.map(np.testing.assert_array_equal, unkeyed(after), unkeyed(state))


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("dtype", "stored"), [("float16", False), ("bfloat16", True), ("float32", True)])
def test_all_finite_of_many_numbers(dtype: str, stored: bool) -> None:
    sound = jax.jit(lambda x: all_hold(finite_leaves({"x": x, "count": jnp.asarray(3)}, stored)))
    largest = jnp.full((64, 256), jnp.finfo(dtype).max, dtype)  # their sum is infinite
    assert bool(sound(largest)) and bool(sound(-largest)) and bool(sound(LARGE.astype(dtype)))
    for number in (jnp.nan, jnp.inf, -jnp.inf):
        for place in (0, 5_000, largest.size - 1):
            assert not bool(sound(largest.ravel().at[place].set(number).reshape(largest.shape))), (number, place)


def unkeyed(state: Any) -> Any:
    return [x for x in jax.tree.leaves(state) if x.ndim > 0]


def left_out(state: Any) -> int:
    """Steps left out, by a wrapper or by one within it."""
    own = int(state.skipped)
    return own + (left_out(state.inner_state) if isinstance(state, LossScaleState) else 0)


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_step_that_is_not_finite_is_left_out(name: str) -> None:
    tx = WRAPPERS[name]
    step = jax.jit(tx.update)
    _, state = step(SOUND, jax.jit(tx.init)(PARAMS), PARAMS)
    for i, number in enumerate(FAULTS.values()):
        updates, after = step(spoiled(number), state, PARAMS)
        jax.tree.map(np.testing.assert_array_equal, optax.apply_updates(PARAMS, updates), PARAMS)
        jax.tree.map(np.testing.assert_array_equal, unkeyed(after), unkeyed(state))
        assert left_out(after) == i + 1
        state = after
    updates, _ = step(SOUND, state, PARAMS)
    assert float(updates["w"].max()) < 0


#: Links that exchange numbers between ranks; a sum in integers says nothing of an infinity.
SUMS = {
    "fixed": optax.stateless(lambda u, _: jc.distributed.psum(u, "d", "fixed4.2")),
    "int8": optax.stateless(lambda u, _: jc.distributed.psum(u, "d", "int8(group=4)")),
    "ring": optax.stateless(lambda u, _: jc.distributed.psum(u, "d", "int8(group=4)", algorithm="ring")),
    "feedback": jc.distributed.psum_with_feedback("d", "int8(group=4)"),
    "floats": optax.stateless(lambda u, _: jax.tree.map(lambda x: jax.lax.pmean(jnp.nan_to_num(x), "d"), u)),
}
DECIDING = {
    "skip_nonfinite": lambda tx: optim.skip_nonfinite(optax.chain(tx, optax.sgd(0.1, 0.9))),
    "dynamic_loss_scale": lambda tx: optim.dynamic_loss_scale(optax.chain(tx, optax.sgd(0.1, 0.9)), 2.0),
    "quantize_state": lambda tx: optim.quantize_state(
        optax.chain(tx, optax.sgd(0.1, 0.9)), {"1.0.trace": "bfloat16"}, min_size=1
    ),
    "chunks": lambda tx: optim.quantize_state(
        optax.chain(tx, optax.sgd(0.1, 0.9)), {"1.0.trace": "bfloat16"}, min_size=1, chunks=2
    ),
}


@pytest.mark.parametrize(
    ("wrapper", "link"),
    [
        ("skip_nonfinite", "fixed"),
        *(
            pytest.param(wrapper, link, marks=pytest.mark.slow)
            for wrapper in DECIDING
            for link in SUMS
            if (wrapper, link) != ("skip_nonfinite", "fixed") and (wrapper, link) != ("chunks", "feedback")
        ),
    ],
)
def test_ranks_decide_together(wrapper: str, link: str) -> None:
    """A step that one rank has to skip is skipped by all that exchange numbers with it, and the states agree."""
    tx = DECIDING[wrapper](SUMS[link])

    def rank(gradient: jax.Array) -> Any:
        state = tx.init(jnp.ones((2, 4)))
        updates, state = tx.update(gradient, state, jnp.ones((2, 4)))
        return updates, state.skipped

    gradients = jnp.ones((3, 2, 4)).at[2, 0, 1].set(jnp.inf)
    updates, skipped = jax.jit(jax.vmap(rank, axis_name="d"))(gradients)
    assert not updates.any() and skipped.tolist() == [1, 1, 1]


def test_ranks_that_exchange_nothing_decide_alone() -> None:
    tx = optim.skip_nonfinite(optax.sgd(1.0))
    gradients = jnp.ones((3, 2)).at[2, 0].set(jnp.nan)
    updates = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="d"))(gradients)
    assert updates.tolist() == [[-1, -1], [-1, -1], [0, 0]]


@further
@pytest.mark.parametrize("name", WRAPPERS)
def gradients_that_differ_by_type_between_ranks(name: str) -> None:
    """Packed states step inside of `jax.shard_map`, whose types tell what differs."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = WRAPPERS[name]

    def step(params: Any, gradients: Any) -> Any:
        return jax.tree.map(lambda u: u[None], tx.update(gradients, tx.init(params), params)[0])

    spec = jax.sharding.PartitionSpec
    by_rank = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec(), spec()), out_specs=spec("d")))
    varied = jax.jit(jax.shard_map(
        lambda p, g: step(p, jax.lax.pcast(g, "d", to="varying")), mesh=mesh, in_specs=spec(), out_specs=spec("d")
    ))  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, by_rank(PARAMS, SOUND), varied(PARAMS, SOUND))


@further.first
def a_state_that_holds_an_infinity_by_right_is_no_fault() -> None:
    plateau = optax.contrib.reduce_on_plateau()
    assert bool(jnp.isinf(plateau.init(PARAMS).best_value))
    for wrap in (optim.skip_nonfinite, lambda tx: optim.quantize_state(tx, "bfloat16", min_size=8)):
        tx = wrap(optax.chain(optax.sgd(0.1, 0.9), plateau))
        state = tx.init(PARAMS)
        updates, state = tx.update(SOUND, state, PARAMS, value=jnp.float32(1.0))
        assert int(state.skipped) == 0 and float(updates["w"].max()) < 0


def test_a_packed_state_may_hold_infinities_too() -> None:
    def update(updates: Any, least: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return updates, jax.tree.map(lambda s, g: jnp.where(g > 0, jnp.minimum(s, g), s / (1 + g)), least, updates)

    plain = optax.GradientTransformation(lambda p: jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), p), update)
    tx = optim.quantize_state(plain, "bfloat16", min_size=1)
    step, state = jax.jit(tx.update), tx.init(jnp.ones(3))
    _, state = step(jnp.asarray([1.0, 0.0, 3.0]), state, None)
    assert int(state.skipped) == 0 and jc.dequantize(state.inner_state).tolist() == [1.0, np.inf, 3.0]
    _, after = step(jnp.asarray([2.0, 4.0, -1.0]), state, None)  # 3 / 0 is new
    assert int(after.skipped) == 1 and jc.dequantize(after.inner_state).tolist() == [1.0, np.inf, 3.0]


def test_packed_numbers_that_are_never_nan_are_unpacked_once() -> None:
    """A branch that asks which old numbers were finite unpacks them again; formats without NaN do not need it."""
    for spec, branches in (("int8(group=8)", 1), ("bfloat16", 2)):
        tx = optim.quantize_state(optax.sgd(0.1, 0.9), spec, min_size=8)
        program = jax.make_jaxpr(tx.update)(PARAMS["w"], jax.eval_shape(tx.init, PARAMS["w"]), PARAMS["w"])
        assert (spec, str(program).count("cond[")) == (spec, branches)


def test_a_fault_that_is_let_through_shows() -> None:
    tx = optim.quantize_state(optax.sgd(0.1, 0.9), GROUPS, min_size=8, nonfinite="propagate")
    _, state = jax.jit(tx.update)(spoiled(jnp.nan), jax.jit(tx.init)(PARAMS), PARAMS)
    kept = np.asarray(jc.dequantize(state.inner_state[0].trace["w"]))
    assert np.isnan(kept[1, 32:]).all() and not np.isnan(kept[0]).any() and not np.isnan(kept[1, :32]).any()
    for spec in ("integer8", "nf4(scale=int8(group=256))"):
        with pytest.raises(ValueError, match="nonfinite='propagate'"):
            optim.quantize_state(optax.sgd(0.1, 0.9), jc.Spec(spec), nonfinite="propagate")


@pytest.mark.smoke
def test_the_loss_scale_shrinks_on_overflow_and_grows_with_time() -> None:
    tx = optim.dynamic_loss_scale(optax.sgd(1.0), 8.0, growth_interval=3, largest=16.0, smallest=4.0)
    step = jax.jit(tx.update)
    state, params, scales = tx.init(jnp.ones(1)), jnp.ones(1), []
    for g in (1, 1, jnp.inf, 1, 1, 1, 1, 1, 1, 1, 1, 1, jnp.nan, jnp.nan, jnp.nan, jnp.nan):
        updates, state = step(jnp.array([1.0 * g]), state, params)
        assert float(updates[0]) == (-1 / (scales[-1] if scales else 8.0) if np.isfinite(g) else 0)
        scales.append(float(optim.loss_scale(state)))
    assert scales == [8, 8, 4, 4, 4, 8, 8, 8, 16, 16, 16, 16, 8, 4, 4, 4]
    assert int(state.skipped) == 5


def test_gradients_of_16_bits_are_unscaled_in_32() -> None:
    tx = optim.dynamic_loss_scale(optax.sgd(1.0), 2.0**15)
    params = jnp.ones(1, "float16")
    updates, _ = tx.update(jnp.array([2.0**-12], "float16"), tx.init(params), params)
    assert updates.dtype == jnp.float32 and float(updates[0]) == -(2.0**-27)


def test_gradients_are_scaled_by_numbers_and_schedules() -> None:
    """By Optax, as the page on optimizers says, in the dtype of gradients."""
    made, _ = optax.scale(1 / 1024).update(jnp.array([512.0], "bfloat16"), optax.EmptyState())
    assert made.tolist() == [0.5] and made.dtype == jnp.bfloat16
    tx = optax.scale_by_schedule(lambda count: 0.5**count)
    state, seen = tx.init(jnp.ones(1)), []
    for _ in range(3):
        updates, state = tx.update(jnp.array([8.0], "bfloat16"), state)
        seen.append(float(updates[0]))
    assert seen == [8, 4, 2] and updates.dtype == jnp.bfloat16


def test_what_is_refused() -> None:
    for wrong in ({"initial": 0.5}, {"factor": 1.0}, {"growth_interval": 0}, {"smallest": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            optim.dynamic_loss_scale(optax.sgd(1.0), **wrong)
    with pytest.raises(ValueError, match="0 states"):
        optim.loss_scale(optax.adam(1.0).init(jnp.ones(1)))


test_further = further.test()
