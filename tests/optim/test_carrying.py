"""What is carried from step to step: errors of rounding, compensation, averages."""

# Optax types every state as a tree of arrays, which has no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportCallIssue=false
from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import Further
from oracle import ieee, round_exact

import jchop as jc
from jchop import optim
from jchop.optim._chain import join_master

further = Further()

KEY = jax.random.key(5)


def scan(tx: Any, grads: jax.Array, params: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    """(parameters after each step, updates of each step, last state)."""

    def run(params: jax.Array) -> Any:
        def step(carry: Any, g: jax.Array) -> Any:
            params, state = carry
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (params, updates)

        (_, state), (each, updates) = jax.lax.scan(step, (params, tx.init(params)), grads)
        return each, updates, state

    return jax.jit(run)(params)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("spec", ["fixed2.3", "e5m2", "codebook(-1.0,1.0)", "e5m2:stochastic"])
def test_what_error_feedback_sends_sums_to_what_came(spec: str, rng: np.random.Generator) -> None:
    grads = jc.round_to_format(jnp.asarray(rng.standard_normal((50, 16)) / 4, jnp.float32), "fixed4.10")
    _, sent, state = scan(optim.error_feedback(spec, KEY), grads, jnp.zeros(16))
    np.testing.assert_array_equal(sent, jc.round_to_format(sent, spec.split(":")[0]))
    np.testing.assert_allclose(np.float64(sent).sum(0) + state.error, np.float64(grads).sum(0), atol=1e-6)
    assert float(jnp.abs(state.error).max()) < 4


def test_a_byte_beside_bfloat16_makes_a_master_of_24_bits(rng: np.random.Generator) -> None:
    """Beside float64, which holds each sum: rounded once to 16 digits, and from there to 8, ties away from zero."""

    def rounded(x: np.ndarray, digits: int, up: Any = np.rint) -> np.ndarray:
        last_place = 2.0 ** (np.floor(np.log2(np.abs(x))) - digits + 1)
        return np.copysign(up(np.abs(x) / last_place) * last_place, x)

    start = rng.standard_normal(2000) * np.exp(4 * rng.standard_normal(2000))
    params, tx = jnp.asarray(start, jnp.bfloat16), optim.compensate("bfloat16", bits=8)
    state, master, step = tx.init(params), np.asarray(params, np.float64), jax.jit(tx.update)
    assert state.lost.dtype == jnp.int8
    for size in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1e-4, 1e-5, 1e-3):
        change = np.float32(size * master * rng.standard_normal(2000))
        updates, state = step(jnp.asarray(change), state, params)
        params = optax.apply_updates(params, updates)
        master = rounded(master + change, 16)
        expected = rounded(master, 8, lambda n: np.floor(n + 0.5))
        np.testing.assert_array_equal(np.asarray(params, np.float64), expected)
        place = 2.0 ** (np.floor(np.log2(np.abs(expected))) - 15)
        difference = (np.abs(master) - np.abs(expected)) / place
        # Below a power of two, the places of the master are half as large as those of the parameter.
        np.testing.assert_array_equal(difference, np.where(difference < 0, difference, state.lost))
        assert np.abs(state.lost).max() <= 128


def test_masters_of_24_bits_at_the_ends_of_the_range() -> None:
    """The largest numbers stay finite while the master does; another dtype has no byte; infinities come and stay."""
    tx, most = optim.compensate("bfloat16", bits=8), float(jnp.finfo("bfloat16").max)
    params = {"p": jnp.array([most, -most, 0.0, jnp.inf, 1.0], "bfloat16"), "wide": jnp.ones(2)}
    change = {"p": jnp.array([most / 600, -most, -(2.0**-20), 1.0, jnp.nan]), "wide": jnp.full(2, 2.0**-20)}
    updates, state = tx.update(change, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params["p"].astype(jnp.float32), [most, -np.inf, -(2.0**-20), np.inf, np.nan])
    assert state.lost["p"].tolist()[0] in range(90, 128) and state.lost["p"].tolist()[1:] == [0] * 4
    assert params["wide"].tolist() == [1 + 2.0**-20] * 2 and state.lost["wide"].shape == ()


def test_adamw_split_steps_like_adamw_in_float32(rng: np.random.Generator) -> None:
    """With weight decay from the master; the moments differ by their levels alone."""
    params = jnp.asarray(rng.standard_normal((64, 128)), jnp.bfloat16)
    grads = jnp.asarray(rng.standard_normal((64, 128)), jnp.bfloat16)
    wide, packed = optax.adamw(1e-4, weight_decay=0.1), optim.adamw_split(1e-4, weight_decay=0.1)
    expected, p = params.astype(jnp.float32), params
    wide_state, state, step = wide.init(expected), packed.init(params), jax.jit(packed.update)
    for _ in range(20):
        updates, wide_state = wide.update(grads.astype(jnp.float32), wide_state, expected)
        expected = optax.apply_updates(expected, updates)
        updates, state = step(grads, state, p)
        p = optax.apply_updates(p, updates)
    moved = np.abs(np.asarray(expected - params.astype(jnp.float32))).mean()
    master = np.asarray(join_master(p, state[1].lost))
    assert np.abs(master - np.asarray(expected)).mean() < 0.05 * moved
    assert (p == master.astype(jnp.bfloat16)).mean() > 0.99


def test_muon8bit_steps_as_its_definition_in_numpy(rng: np.random.Generator) -> None:
    """Momentum in blocks of 256 under the nearest levels; five Newton-Schulz iterations of Nesterov's momentum."""
    levels = np.array([float(v) for v in jc.formats.dynamic8.element.levels])
    tx, beta = optim.muon8bit(0.02, beta=0.9), 0.9
    params = jnp.asarray(rng.standard_normal((64, 128)), jnp.float32)
    state, step = tx.init({"w": params}), jax.jit(tx.update)
    expected, m = np.asarray(params, np.float64), np.zeros((64, 128))
    for count in range(1, 4):
        g = rng.standard_normal((64, 128)).astype(np.float32)
        updates, state = step({"w": jnp.asarray(g)}, state, {"w": params})
        params = optax.apply_updates(params, updates["w"])
        m = beta * m + (1 - beta) * g
        x = beta * m / (1 - beta ** (count + 1)) + (1 - beta) * g / (1 - beta**count)
        x = x / np.linalg.norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        expected = expected - 0.02 * np.sqrt(128 / 64) * x
        blocks = m.reshape(-1, 256)
        scale = np.abs(blocks).max(1, keepdims=True) / levels.max()
        m = (levels[np.abs(blocks[..., None] / scale[..., None] - levels).argmin(-1)] * scale).reshape(64, 128)
        assert np.abs(params - expected).mean() < 2e-6  # a tie of rounding errors may take the other level


def test_what_is_lost_draws_apart_from_the_parameter() -> None:
    """Of 1/3 and of 16/3 the fractions are 1/3 both, so the same bits would round both down or both up."""
    tx = optim.compensate("fixed8.0:stochastic", KEY, compensation="fixed8.4:stochastic")
    params = jnp.zeros(64)
    updates, state = jax.jit(tx.update)(jnp.full(64, 1 / 3), tx.init(params), params)
    lost = np.asarray(state.lost)  # type: ignore[union-attr]
    assert set(lost[updates == 0].tolist()) == {5 / 16, 6 / 16}
    assert set(lost[updates == 1].tolist()) == {-10 / 16, -11 / 16}


@pytest.mark.parametrize(
    ("make", "spec"),
    [
        (optim.error_feedback, "fixed2.3"),
        *(
            pytest.param(make, spec, marks=pytest.mark.slow)
            for make, specs in (
                (optim.error_feedback, ("e4m3fn", "int8(group=4)")),
                (optim.compensate, ("fixed2.3", "e4m3:saturate", "int8(group=4)")),
            )
            for spec in specs
        ),
    ],
)
def test_numbers_that_are_not_finite_leave_no_error(make: Any, spec: str) -> None:
    """The error of a number stays what it was in a step that gives no finite one; others are as ever."""
    grads = jnp.asarray([[0.2, 0.2, 0.2, 0.3], [jnp.inf, -jnp.inf, jnp.nan, 0.1]])
    (before, *_), (after, *_) = (scan(make(spec), grads[:steps], jnp.zeros(4))[2] for steps in (1, 2))
    assert before[:3].all() and (after[:3] == before[:3]).all() and jnp.isfinite(after[3]), (before, after)


def test_compensation_follows_kahan_exactly(rng: np.random.Generator) -> None:
    """Against exact arithmetic: y = u + c, t = round(p + y), c = y - (t - p), with c rounded to bfloat16."""
    grads = np.float32(rng.integers(-8, 40, (60, 4)) / 2.0**14)
    start = jnp.asarray([1.0, -2.0, 0.5, 96.0], "bfloat16")
    each, _, state = scan(optim.compensate("bfloat16"), jnp.asarray(grads), start)
    exact = ieee(8, 7)
    for column in range(4):
        p, c = Fraction(float(start[column])), Fraction(0)
        for step in range(60):
            y = Fraction(float(grads[step, column])) + c
            t = round_exact(exact, p + y, "nearest_even")
            assert isinstance(t, Fraction)
            lost = round_exact(exact, y - (t - p), "nearest_even")
            p, c = t, lost if isinstance(lost, Fraction) else Fraction(0)
            assert Fraction(float(each[step, column])) == p, (column, step)
        assert Fraction(float(state.lost[column])) == c


@further.first
def compensation_in_a_format_of_its_own() -> None:
    tx = optim.compensate("fixed4.2:stochastic", KEY, compensation="fixed1.7:stochastic")
    each, _, state = scan(tx, jnp.full((40, 8), 1 / 64), jnp.zeros(8))
    np.testing.assert_array_equal(each[-1] + state.lost, jnp.full(8, 40 / 64))
    np.testing.assert_array_equal(each, jc.round_to_format(each, "fixed4.2"))


def test_the_average_is_that_of_the_parameters_taken(rng: np.random.Generator) -> None:
    grads = jnp.asarray(rng.standard_normal((20, 8)), jnp.float32)
    tx = optax.chain(optax.sgd(0.1), optim.round_params("e5m2:stochastic", KEY), optim.average_params(4, 3))
    each, _, state = scan(tx, grads, jnp.ones(8))
    wanted = np.float64(each)[4::3].mean(0)
    assert int(state[-1].taken) == len(each[4::3])
    np.testing.assert_allclose(optim.averaged_params(state, each[-1]), wanted, rtol=1e-5)
    tx = optim.average_params(spec="fixed4.3")
    _, _, state = scan(tx, -grads / 8, jnp.ones(8))
    average = optim.averaged_params(state, jnp.ones(8))
    np.testing.assert_array_equal(average, jc.round_to_format(average, "fixed4.3"))
    np.testing.assert_array_equal(optim.averaged_params(tx.init(jnp.ones(8)), jnp.full(8, 3.0)), jnp.full(8, 3.0))


@pytest.mark.smoke
def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="start=-1"):
        optim.average_params(-1)
    with pytest.raises(ValueError, match="key=None"):
        optim.average_params(spec="e5m2:stochastic")
    with pytest.raises(ValueError, match="key=None"):
        optim.compensate("e5m2", compensation="e5m2:stochastic")
    for tx in (optim.average_params(), optim.compensate("e5m2"), optim.low_precision(optax.sgd(1.0), weight="e5m2")):
        with pytest.raises(ValueError, match="params=None"):
            tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


# -- parameters that are packed ----------------------------------------------------------------------------------------


@further
def packed_parameters_move_by_less_than_a_quantum_on_average() -> None:
    spec = "int8(channel=0):stochastic"
    w = jnp.ones((4, 4096)).at[:, 0].set(127.0)  # a quantum of 1, and steps of a sixteenth
    params = {"w": jc.quantize(w, spec, KEY), "b": jnp.zeros(3)}
    updates = {"w": jnp.full((4, 4096), 1 / 16).at[:, 0].set(0), "b": jnp.ones(3)}

    @jax.jit
    def run(params: Any) -> Any:
        return jax.lax.scan(
            lambda p, key: (optim.apply_updates(p, updates, key), None), params, jax.random.split(KEY, 16)
        )[0]

    after = run(params)
    assert isinstance(after["w"], jc.QArray) and after["b"].tolist() == [16, 16, 16]
    moved = np.asarray(jc.dequantize(after)["w"])[:, 1:]
    assert abs(moved.mean() - 2) < 5 * np.sqrt(16 * 15 / 256 / moved.size)
    assert (moved[0] != moved[1]).any()
    with pytest.raises(ValueError, match="key=None"):
        optim.apply_updates(params, updates)


def test_a_parameter_that_is_stored_in_another_shape_is_packed_again() -> None:
    def convolved(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    w = jax.random.normal(KEY, (3, 3, 3, 8))
    packed = jc.quantize_fn(convolved, jc.Rule(weight="int4(group=8)")).pack(w, jnp.ones((1, 4, 4, 3)))
    after = optim.apply_updates({"w": packed}, {"w": w})["w"]
    assert jax.tree.structure(after) == jax.tree.structure(packed) and packed.stored.shape == (27, 8)
    moved = (jc.dequantize(packed) + w).reshape(27, 8)
    np.testing.assert_array_equal(jc.dequantize(after), jc.round_to_format(moved, packed.spec).reshape(w.shape))
    with pytest.raises(ValueError, match=r"updates: w has shape \(27, 8\), and params \(3, 3, 3, 8\)"):
        optim.apply_updates({"w": packed}, {"w": jnp.zeros((27, 8))})


@further
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("spec", ["nvfp4", "int8(channel=1):stochastic"])
def layers_of_a_stack_keep_their_own_scales(spec: str) -> None:
    """Two layers are equal, and scales of all layers together would lose the third."""
    w = jax.random.normal(KEY, (8, 16)) * jnp.array([1.0, 1.0, 2.0**-18])[:, None, None]
    packed = jax.vmap(lambda w, key: jc.quantize(w, spec, key))(w, jax.random.split(KEY, 3))
    after = jax.jit(optim.apply_updates)({"w": packed}, {"w": w}, KEY)["w"]
    assert jax.tree.structure(after) == jax.tree.structure(packed)
    assert jax.tree.map(jnp.shape, jax.tree.leaves(after)) == jax.tree.map(jnp.shape, jax.tree.leaves(packed))
    moved, numbers = np.asarray(jc.dequantize(packed) + w), np.asarray(jc.dequantize(after))
    assert (np.abs(numbers - moved).max((1, 2)) < 0.3 * np.abs(w).max((1, 2))).all()
    if packed.spec.rounding.stochastic:
        assert (numbers[0] != numbers[1]).any()
    else:
        np.testing.assert_array_equal(numbers[2], jc.round_to_format(moved[2], spec))


test_further = further.test()
