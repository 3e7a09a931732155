"""Fixed scales of activations: the ranges that data have, and what is rounded under them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from further import Further
from layer_references import checked, each

import jchop as jc
from jchop._quantized.products.scales import (
    HISTOGRAM_BINS,
    MagnitudeHistogram,
    add_to_histogram,
    entropy_threshold,
    kl_divergence,
)

further = Further()

DRAW = np.random.default_rng(0)
BATCHES = [jnp.asarray(DRAW.normal(size=(5, 4)) * scale, "float32") for scale in (1.0, 3.0, 2.0)]
LOW = np.array([float(b.min()) for b in BATCHES])
HIGH = np.array([float(b.max()) for b in BATCHES])


def layer(activation: str = "int8(group=tensor)", **more: Any) -> Any:
    return jc.nn.Linear(4, 3, rule=jc.Rule(activation=activation, **more), rngs=nnx.Rngs(0))


def range_of(model: Any) -> np.ndarray:
    return np.asarray(model.dot_general.range[...])


def test_ranges_are_those_of_the_data() -> None:
    told: list[int] = []
    widest = jc.nn.calibrate(layer(), BATCHES, progress=told.append)
    np.testing.assert_allclose(range_of(widest), [LOW.min(), HIGH.max()], rtol=1e-6)
    np.testing.assert_allclose(range_of(jc.nn.calibrate(layer(), BATCHES, combine="mean")), [LOW.mean(), HIGH.mean()])
    assert told == [1, 2, 3]
    most = [float(np.percentile(np.abs(b), 80)) for b in BATCHES]
    ends = [max(-most[i], LOW[i]) for i in range(3)], [min(most[i], HIGH[i]) for i in range(3)]
    inside = jc.nn.calibrate(layer(), BATCHES, method="percentile(80)")
    np.testing.assert_allclose(range_of(inside), [min(ends[0]), max(ends[1])], rtol=1e-6)


@pytest.mark.smoke
def test_the_whole_is_a_percentile() -> None:
    batch = np.linspace(-9.5, 8.0, 4000, dtype=np.float32).reshape(1000, 4)
    model = jc.nn.calibrate(layer(), [batch], method="percentile(100)")
    np.testing.assert_array_equal(range_of(model), [-9.5, 8.0])


def test_the_least_square_error_is_found() -> None:
    x = np.concatenate([np.linspace(-1, 1, 511), [6.0]]).astype("float32").reshape(128, 4)
    errors = []
    for share in np.arange(1, 101) / 100:
        scale = np.float64(np.float32(share) * np.float32(6)) / 7  # of int4
        errors.append(np.sum((np.clip(np.rint(x / scale), -8, 7) * scale - x) ** 2))
    best = (1 + int(np.argmin(errors))) / 100
    assert 0.3 < best < 0.9
    found = jc.nn.calibrate(layer("int4(group=tensor)"), [jnp.asarray(x)], method="mse")
    np.testing.assert_allclose(range_of(found), [-best, 6 * best], rtol=1e-6)


@further.first
def a_histogram_counts_whatever_comes() -> None:
    values = [np.array([0.0, 0.0]), np.array([1.0, -0.5, np.nan]), np.array([3.5, -np.inf, 1e-3])]
    seen = MagnitudeHistogram()
    for x in values:
        seen = add_to_histogram(seen, x)
    every = np.abs(np.concatenate(values))
    every[every == 1] -= 1e-9  # the largest of the first array lies in the last bin
    every = every[np.isfinite(every)]
    assert seen.width == 4 / HISTOGRAM_BINS  # 1 / BINS, doubled twice
    np.testing.assert_array_equal(seen.counts, np.bincount((every / seen.width).astype(int), minlength=HISTOGRAM_BINS))


def test_the_divergence_is_that_of_the_definition() -> None:
    counts = np.array([4, 2, 0, 2, 1, 3, 2])
    # Four bins kept, five beyond them added to the last; two levels of two bins each.
    p, q = np.array([4, 2, 0, 2 + 6]) / 14, np.array([3, 3, 0, 2]) / 8
    expected = sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a)
    assert kl_divergence(counts, 4, 2) == pytest.approx(expected, rel=1e-12)
    assert kl_divergence(counts, 3, 2) == np.inf  # numbers beyond are put where none was
    evened = np.array([2, 2, 0, 2, 1, 3, 2])  # the first bin as the second
    losses = [kl_divergence(evened, kept, 2) for kept in range(2, 8)]
    assert entropy_threshold(counts, 2) == 2 + int(np.argmin(losses)) + 0.5
    assert entropy_threshold(np.array([5, 0, 1, 3]), 4) == 4.5  # nothing is lost with a level for each


def entropy_cuts_outliers_of_all_batches() -> None:
    draw = np.random.default_rng(1)
    batches = [jnp.asarray(draw.normal(size=(2000, 4)), "float32"), jnp.full((1, 4), 40.0)]
    model = layer()
    low, high = range_of(jc.nn.calibrate(model, batches, method="entropy"))
    assert -low == pytest.approx(-float(batches[0].min()), abs=1) and 2.5 < high < 20
    nothing = range_of(jc.nn.calibrate(model, [jnp.zeros((1, 4))], method="entropy"))
    np.testing.assert_array_equal(nothing, [0, 0])
    one_sign = jc.nn.calibrate(layer("uint4(group=tensor,zero_point=integer)"), [jnp.abs(batches[0])], method="entropy")
    assert range_of(one_sign)[0] == 0 < range_of(one_sign)[1] <= float(jnp.abs(batches[0]).max())


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("method", ["minmax", "mse", "percentile(100)", "entropy"])
def test_what_is_not_finite_does_not_count(method: str) -> None:
    x = np.random.default_rng(4).normal(size=(4096, 4)).astype(np.float32)
    faulty = np.where(np.arange(x.size).reshape(x.shape) % 4001 == 7, np.nan, x)
    faulty[1000, 2] = np.inf
    with pytest.warns(RuntimeWarning, match="batches give the .* 6 NaN or infinities among 16384 numbers"):
        found = range_of(jc.nn.calibrate(layer(), [jnp.asarray(faulty)], method=method))
    wanted = range_of(jc.nn.calibrate(layer(), [jnp.nan_to_num(faulty, nan=0, posinf=0)], method=method))
    np.testing.assert_array_equal(found, wanted)
    assert found[0] < -2.5 and found[1] > 2.5


def test_a_program_warns_of_what_is_not_finite() -> None:
    """By the name of the product, and refuses inputs without a finite number."""
    low = jc.quantize_fn(lambda p, x: x @ p["w"], jc.Rule(activation="int8"))
    params, x = {"w": jnp.ones((2, 2))}, np.array([[1.0, np.inf]], np.float32)
    with pytest.warns(RuntimeWarning, match="product of 'w_activation_range'.* 1 NaN or infinities among 2 numbers"):
        fixed = low.calibrate(params, [x])
    assert fixed.stats["w_activation_range"].tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"product of 'w_activation_range'.* shape \(1, 2\) without a finite number"):
        low.calibrate(params, [x * np.inf])


def test_zeros_do_not_shorten_the_range_of_least_entropy() -> None:
    """Behind a ReLU half of the numbers are zeros, which every range rounds to themselves."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(20_000, 4)), "float32")
    ends = [range_of(jc.nn.calibrate(layer(), [part], method="entropy"))[1] for part in (jax.nn.relu(x), jnp.abs(x))]
    assert min(ends) > 3.3  # of a largest number above 4; with the zeros counted 2.0
    for end, part in zip(ends, (jax.nn.relu(x), jnp.abs(x)), strict=True):
        cut = jnp.clip(part, 0, end)
        assert float(jnp.mean((part - cut) ** 2)) < 1e-4


@further
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("activation", ["int8(group=tensor)", "uint8(group=tensor,zero_point=integer)"])
def inputs_are_rounded_under_the_fixed_scale(activation: str) -> None:
    static = jc.nn.calibrate(layer(activation), BATCHES)
    low, high = (float(v) for v in range_of(static))
    if "zero_point" in activation:
        scale = np.float32((high - low) / 255)
        zero = np.clip(np.rint(-low / scale), 0, 255)
        top, bottom = 255, 0
    else:
        scale, zero, top, bottom = np.float32(max(-low, high) / 127), 0, 127, -128
    x = 1.5 * BATCHES[1]  # beyond the range, too
    codes = np.clip(np.rint(np.asarray(x, "float64") / scale) + zero, bottom, top)
    assert ((codes == top) | (codes == bottom)).any()
    rounded = jnp.asarray((codes - zero) * np.float64(scale), "float32")
    plain = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(static, x), plain(rounded), rtol=1e-5, atol=1e-5)


def gradients_pass_and_the_range_is_state() -> None:
    static = jc.nn.calibrate(layer(weight="e4m3"), BATCHES)

    @nnx.jit
    def gradients(static: Any, x: Any) -> Any:
        graph, params, rest = nnx.split(static, nnx.Param, ...)
        return jax.grad(lambda p, x: nnx.merge(graph, p, rest)(x).sum(), (0, 1))(params, x)

    of_params, dx = gradients(static, BATCHES[0])
    kernel = jc.round_to_format(static.kernel[...], "e4m3")
    np.testing.assert_allclose(dx, np.broadcast_to(kernel.sum(1), dx.shape), rtol=1e-6)
    assert (of_params["kernel"][...] != 0).any() and list(of_params) == ["bias", "kernel"]
    state = nnx.state(static, jc.nn.ActivationRange)
    assert list(nnx.to_flat_state(state)) == [(("dot_general", "range"), state["dot_general"]["range"])]
    packed = jc.nn.quantize(static, jc.Rule(weight="e4m3", activation="int8(group=tensor)"), mode="ptq")
    np.testing.assert_array_equal(range_of(packed), range_of(static))  # it goes on
    for fields in (
        {"activation": "int4(group=tensor)"},
        {"activation": "int8(group=tensor)", "gradient": "e5m2"},
        {"activation": "int8(group=tensor)", "scale_from": jc.MovingAverage()},
    ):
        assert jc.nn.quantize(static, jc.Rule(**fields)).dot_general.range is None  # type: ignore[arg-type]
    again = jc.nn.calibrate(static, [10 * BATCHES[0]])
    np.testing.assert_allclose(range_of(again), [10 * LOW[0], 10 * HIGH[0]], rtol=1e-6)
    untouched = jc.nn.quantize(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), jc.Rule(activation="int8(group=tensor)"))
    before, graph = untouched(BATCHES[0]), nnx.graphdef(untouched)
    assert range_of(jc.nn.calibrate(untouched, [10 * BATCHES[0]])).max() > 0
    assert untouched.dot_general.range is None and nnx.graphdef(untouched) == graph
    np.testing.assert_array_equal(untouched(BATCHES[0]), before)


@pytest.mark.parametrize(
    "check",
    [entropy_cuts_outliers_of_all_batches, pytest.param(gradients_pass_and_the_range_is_state, marks=pytest.mark.slow)],
    ids=lambda check: check.__name__,
)
def test_ranges_in_use(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@pytest.mark.parametrize("outside", [True, False])
def test_a_calibrated_model_is_loaded_into_its_shapes(outside: bool, tmp_path: Path) -> None:
    x = BATCHES[0]

    def shapes(method: str) -> Any:
        return nnx.eval_shape(lambda: jc.nn.calibrate(layer(), [x if outside else jnp.zeros_like(x)], method=method))

    static = jc.nn.calibrate(layer(), [x], method="entropy")
    jc.save(tmp_path / "static.safetensors", static)
    for method in ("minmax", "mse"):
        loaded = jc.load(tmp_path / "static.safetensors", shapes(method))
        np.testing.assert_array_equal(range_of(loaded), range_of(static))
    with pytest.raises(ValueError, match=r"method='percentile\(99\)' needs numbers.*method='minmax'"):
        shapes("percentile(99)")
    if not outside:
        with pytest.raises(ValueError, match="method='entropy' needs numbers"):
            shapes("entropy")


@each(
    ("model", "batches", "more", "words"),
    [
        (lambda: layer("int8(group=all)"), BATCHES, {}, "one scale for the whole array"),
        (lambda: layer(gradient="e5m2"), BATCHES, {}, "backward roundings"),
        (lambda: layer(), [], {}, "no batch"),
        (lambda: layer(), BATCHES, {"method": "percentile(0)"}, "method='percentile"),
        (lambda: layer(), BATCHES, {"combine": "median"}, "combine='median'"),
        (lambda: layer(), BATCHES, {"method": "entropy", "combine": "mean"}, "combine='mean'"),
        (lambda: layer("e4m3(group=tensor)"), BATCHES, {"method": "entropy"}, "even levels"),
        (lambda: layer(scale_from=jc.DelayedScaling(2)), BATCHES, {}, "a history"),
    ],
)
def test_what_cannot_be_calibrated_is_said(model: Callable[[], Any], batches: Any, more: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        jc.nn.calibrate(model(), batches, **more)


test_further = further.test()
