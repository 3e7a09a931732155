"""Fixed scales of activations: the ranges that data have, and what is rounded under them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jchop as jc

DRAW = np.random.default_rng(0)
BATCHES = [jnp.asarray(DRAW.normal(size=(5, 4)) * scale, "float32") for scale in (1.0, 3.0, 2.0)]
LOW = np.array([float(b.min()) for b in BATCHES])
HIGH = np.array([float(b.max()) for b in BATCHES])


def layer(activation: str = "int8(group=tensor)", **more: Any) -> Any:
    return jc.nn.Linear(4, 3, rule=jc.nn.Rule(activation=activation, **more), rngs=nnx.Rngs(0))


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


@pytest.mark.parametrize("activation", ["int8(group=tensor)", "uint8(group=tensor,zero_point=true)"])
def test_inputs_are_rounded_under_the_fixed_scale(activation: str) -> None:
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


def test_gradients_pass_and_the_range_is_state() -> None:
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
    again = jc.nn.calibrate(static, [10 * BATCHES[0]])
    np.testing.assert_allclose(range_of(again), [10 * LOW[0], 10 * HIGH[0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "batches", "more", "words"),
    [
        (layer("int8(group=all)"), BATCHES, {}, "one scale for the whole array"),
        (layer(gradient="e5m2"), BATCHES, {}, "backward roundings"),
        (layer(), [], {}, "no batch"),
        (layer(), BATCHES, {"method": "percentile(0)"}, "method='percentile"),
        (layer(), BATCHES, {"combine": "median"}, "combine='median'"),
    ],
)
def test_what_cannot_be_calibrated_is_said(model: Any, batches: Any, more: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        jc.nn.calibrate(model, batches, **more)
