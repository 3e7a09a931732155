"""Scales that are kept: moving averages, histories, and scales that are learned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx
from layer_references import checked, each

import jchop as jc

X = list(jnp.asarray(np.random.default_rng(4).normal(size=(3, 6, 8)) * [[[1.0]], [[2.0]], [[0.5]]], "float32"))
TENSOR = "int8(group=tensor)"


def layer(rngs: Any = None, **rule: Any) -> Any:
    return jc.nn.Linear(8, 3, rule=jc.Rule(**rule), rngs=rngs or nnx.Rngs(0))


def under(x: Any, most: Any, levels: int = 127) -> Any:
    """Rounded to the integers of one scale."""
    scale = np.float32(most) / np.float32(levels)
    return jnp.asarray(np.clip(np.rint(np.asarray(x, "float64") / scale), -levels - 1, levels) * np.float64(scale))


@nnx.jit
def run(model: Any, x: Any) -> Any:
    return model(x)


@pytest.mark.parametrize("source", [jc.DelayedScaling(2), jc.MovingAverage()], ids=["delayed", "average"])
@pytest.mark.parametrize("face", ["nnx", "linen"])
def test_both_operands_under_kept_scales_draw_each_for_itself(face: str, source: Any) -> None:
    """Halves under a scale of 1, which the first number of each operand asks for, and their outer product."""
    halves = jnp.full(32, 0.5).at[0].set(7.0)
    text = "int4(group=tensor):stochastic"
    given = {"activation": text, "weight": text} if isinstance(source, jc.DelayedScaling) else {"activation": text}
    rule = jc.Rule(**given, scale_from=source)  # type: ignore[arg-type]
    if face == "nnx":
        model = jc.nn.Linear(1, 32, use_bias=False, rule=rule, rngs=nnx.Rngs(0, rounding=1))
        model.kernel[...] = halves[None]
        y, again = (model(halves[:, None]) for _ in range(2))
    else:
        low = jc.nn.quantize(linen.Dense(32, use_bias=False), rule)
        variables = low.init({"params": jax.random.key(0), "rounding": jax.random.key(1)}, halves[:, None])
        variables["params"]["kernel"] = halves[None]
        y, again = (low.apply(variables, halves[:, None], rngs={"rounding": jax.random.key(k)}) for k in range(2))
    left, right = (np.rint(side / 7).tolist() for side in (y[:, 0], y[0]))
    assert set(left) == {0, 1, 7} and bool((y != again).any())
    if "weight" in given:
        assert set(right) == {0, 1, 7} and left != right


def a_moving_average_follows_and_stays() -> None:
    model = layer(activation=TENSOR, scale_from=jc.MovingAverage(0.75))
    span, spans = None, []
    for x in X:
        found = np.array([x.min(), x.max()], np.float64)
        span = found if span is None else 0.75 * span + 0.25 * found
        y = run(model, x)
        spans.append(np.asarray(model.dot_general.left.range[...]))
        np.testing.assert_allclose(spans[-1], span, rtol=1e-6)
        expected = under(x, np.abs(spans[-1]).max()) @ model.kernel[...] + model.bias[...]
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    model.eval()
    y = run(model, X[1])
    np.testing.assert_array_equal(model.dot_general.left.range[...], spans[-1])
    np.testing.assert_allclose(y, under(X[1], np.abs(spans[-1]).max()) @ model.kernel[...], rtol=1e-5, atol=1e-5)
    packed = jc.nn.quantize(model, jc.Rule(activation=TENSOR, scale_from=jc.MovingAverage(0.75)), mode="ptq")
    np.testing.assert_array_equal(run(packed, X[1]), y)  # the range goes on
    view = nnx.view(model, use_running_average=False)
    run(view, X[1])
    assert (np.asarray(view.dot_general.left.range[...]) != spans[-1]).all()
    started = jc.nn.calibrate(layer(activation=TENSOR, scale_from=jc.MovingAverage()), X[:1])
    np.testing.assert_array_equal(started.dot_general.left.range[...], [X[0].min(), X[0].max()])


def in_e4m3(x: Any, most: Any) -> np.ndarray:
    """Rounded to float8_e4m3fn under one scale."""
    scale = np.float32(most) / np.float32(448)
    numbers = np.clip(np.asarray(x, np.float64) / np.float64(scale), -448, 448).astype(np.float32)
    return numbers.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def a_history_is_of_earlier_steps() -> None:
    model = jc.nn.Linear(8, 3, rule=jc.nn.recipe("float8_delayed", scale_from=jc.DelayedScaling(2)), rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])
    weight = in_e4m3(kernel, np.abs(kernel).max())

    @nnx.jit
    def step(model: Any, x: Any) -> Any:
        def loss(model: Any, x: Any) -> Any:
            y = model(x)
            return y.sum(), y

        (_, y), gradient = nnx.value_and_grad(loss, has_aux=True)(model, x)
        return y, gradient

    past: list[float] = []
    for x in (*map(np.asarray, X), np.full((6, 8), np.inf, np.float32)):
        y, gradient = step(model, x)
        now = np.max(np.abs(x[np.isfinite(x)]), initial=0)
        rounded = in_e4m3(x, max(past[:2]) if past else now)
        np.testing.assert_allclose(y, rounded @ weight + model.bias[...], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gradient["kernel"][...], rounded.T @ np.ones((6, 3)), rtol=1e-4, atol=1e-4)
        assert sorted(gradient) == ["bias", "kernel"]  # no history
        past.insert(0, now)
        np.testing.assert_array_equal(model.dot_general.left.history[...], [*past, 0.0][:2])
    np.testing.assert_array_equal(model.dot_general.right.history[...], [np.abs(kernel).max()] * 2)
    model.eval()
    step(model, X[0])
    np.testing.assert_array_equal(model.dot_general.left.history[...], past[:2])


def by_step(v: Any, s: Any) -> np.ndarray:
    """Numbers rounded to int4 under float32 scales: the exact quotient to nearest, and one rounded product."""
    ratio = np.asarray(v, np.float64) / np.asarray(s, np.float64)
    return np.clip(np.rint(ratio), -8, 7).astype(np.float32) * np.asarray(s)


def lsq(v: np.ndarray, s: np.ndarray, g: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Equations 2 and 3 of the paper (and the straight-through 5), for numbers (rows, n) and scales (rows, 1)."""
    ratio = v / s
    slope = np.where(ratio <= low, low, np.where(ratio >= high, high, np.rint(ratio) - ratio))
    return np.where((ratio > low) & (ratio < high), g, 0), np.sum(g * slope, axis=1, keepdims=True)


def learned_scales_have_the_gradient_of_the_paper(rng: np.random.Generator) -> None:
    rule = {"weight": "int4(group=4)", "activation": "int4(group=tensor)", "scale_from": jc.LSQ()}
    model = jc.nn.calibrate(layer(**rule), X[:1], method="percentile(90)")
    kernel, step = model.dot_general.right.scale, model.dot_general.left.scale
    assert isinstance(kernel, jc.nn.LearnedScale) and isinstance(step, nnx.Param)
    kernel[...] = kernel[...] * jnp.asarray(rng.uniform(0.5, 1.1, (3, 2)), "float32")

    plain = nnx.clone(model)
    for source in (plain.dot_general.left, plain.dot_general.right):
        source.how = jc.LSQ(factor=False)

    def back(model: Any, x: Any, g: Any) -> Any:
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params, rest)(x), params, x)
        return y, *pull(g)

    g = jnp.asarray(rng.normal(size=(6, 3)), "float32")
    both = nnx.jit(lambda model, plain, x, g: (*back(model, x, g), back(plain, x, g)[1]))
    y, gradient, dx, without = both(model, plain, X[0], g)
    # Forward: bit for bit the numbers of int4 under the same scales.
    w, x = by_step(model.kernel[...].T.reshape(3, 2, 4), kernel[...][..., None]), by_step(X[0], step[...])
    w = w.reshape(3, 8).T
    site = model.dot_general
    np.testing.assert_array_equal(site.right(model.kernel[...], site.how.right, None), w)
    np.testing.assert_array_equal(site.left(X[0], site.how.left, None), x)
    np.testing.assert_allclose(y, x @ w + model.bias[...], rtol=1e-5, atol=1e-5)
    # Backward: the formulas, in float64.
    wide = [np.asarray(v, np.float64) for v in (model.kernel[...], kernel[...], w, X[0], step[...], x, g)]
    v, s, w64, u, t, x64, g64 = wide
    assert (np.abs(v.T.reshape(3, 2, 4) / s[..., None]) > 7).any() and (np.abs(u / t) > 7).any()
    of_v, of_s = lsq(v.T.reshape(6, 4), s.reshape(6, 1), (x64.T @ g64).T.reshape(6, 4), -8, 7)
    of_u, of_t = lsq(u.reshape(1, -1), t.reshape(1, 1), (g64 @ w64.T).reshape(1, -1), -8, 7)

    def close(found: Any, expected: Any) -> None:
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)

    close(gradient["kernel"][...], of_v.reshape(3, 8).T)
    close(dx, of_u.reshape(6, 8))
    for found, by in ((gradient, (1 / np.sqrt(4 * 7), 1 / np.sqrt(8 * 7))), (without, (1, 1))):
        close(found["dot_general"]["right"]["scale"][...], of_s.reshape(3, 2) * by[0])
        close(found["dot_general"]["left"]["scale"][...], of_t[0, 0] * by[1])
    packed = jc.nn.quantize(model, jc.Rule(**rule), mode="ptq")
    np.testing.assert_array_equal(run(packed, X[1]), run(model, X[1]))
    np.testing.assert_array_equal(packed.kernel[...].scale.T, kernel[...])


def learned_scales_train(rng: np.random.Generator) -> None:
    """A scale ten times too large is brought back by its gradient alone, in a convolution."""
    rule = jc.Rule(weight="int4(group=all)", scale_from=jc.LSQ())
    model = jc.nn.Conv(2, 3, (2,), rule=rule, rngs=nnx.Rngs(0))
    scale = model.conv_general_dilated.right.scale
    assert scale[...].shape == (3, 1)
    right = np.asarray(scale[...])
    scale[...] = 10 * scale[...]
    x = jnp.asarray(rng.normal(size=(40, 5, 2)), "float32")
    target = nnx.Conv(2, 3, (2,), rngs=nnx.Rngs(0))(x)

    @nnx.jit
    def step(model: Any) -> Any:
        wrt = nnx.DiffState(0, jc.nn.LearnedScale)
        loss, gradient = nnx.value_and_grad(lambda model: jnp.mean((model(x) - target) ** 2), argnums=wrt)(model)
        scales = nnx.state(model, jc.nn.LearnedScale)
        nnx.update(model, jax.tree.map(lambda s, g: s - 0.5 * g, scales, gradient))
        return loss

    losses = [float(step(model)) for _ in range(200)]
    assert losses[-1] < 0.1 * losses[0] and (np.asarray(scale[...]) < 3 * right).all()


def stacks_have_scales_of_their_own() -> None:
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs: nnx.Rngs) -> Any:
        return nnx.Linear(8, 8, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def through(layer: Any, x: Any) -> Any:
        return layer(x)

    rule = jc.Rule(weight="int4(group=all)", scale_from=jc.LSQ())
    learned = jc.nn.quantize(stack(nnx.Rngs(0)), rule)
    assert learned.dot_general.right.scale[...].shape == (3, 8, 1)
    packed = jc.nn.quantize(learned, rule, mode="ptq")
    np.testing.assert_array_equal(through(packed, X[0]), through(learned, X[0]))
    moving = jc.Rule(activation=TENSOR, scale_from=jc.MovingAverage())
    followed = jc.nn.quantize(stack(nnx.Rngs(0)), moving)
    through(followed, X[0])
    ranges = np.asarray(followed.dot_general.left.range[...])
    assert ranges.shape == (3, 2) and len(np.unique(ranges)) == 6


def the_most_recent_magnitude_may_count_alone() -> None:
    """The magnitudes fall before they rise, so that the last one is not the largest of the history."""
    model, past = layer(activation="float8_e4m3fn(group=tensor)", scale_from=jc.DelayedScaling(2, "last")), []
    for x in (X[1], X[2], X[0]):
        now = np.abs(x).max()
        expected = in_e4m3(x, past[-1] if past else now)
        np.testing.assert_allclose(run(model, x), expected @ model.kernel[...], rtol=1e-4, atol=1e-4)
        past.append(now)
    by_the_largest = in_e4m3(X[0], max(past[:2])) @ model.kernel[...]
    assert past[1] < past[0] and np.abs(by_the_largest - expected @ model.kernel[...]).max() > 0.01


def test_a_moving_average_moves() -> None:
    model = layer(activation=TENSOR, scale_from=jc.MovingAverage(0.75))
    for x in X[:2]:
        run(model, x)
    first, second = (np.array([x.min(), x.max()], np.float64) for x in X[:2])
    np.testing.assert_allclose(model.dot_general.left.range[...], 0.75 * first + 0.25 * second, rtol=1e-6)


@pytest.mark.parametrize(
    "check",
    [
        the_most_recent_magnitude_may_count_alone,
        pytest.param(a_history_is_of_earlier_steps, marks=pytest.mark.slow),
        pytest.param(stacks_have_scales_of_their_own, marks=pytest.mark.slow),
        pytest.param(a_moving_average_follows_and_stays, marks=pytest.mark.slow),
        pytest.param(learned_scales_have_the_gradient_of_the_paper, marks=pytest.mark.slow),
        pytest.param(learned_scales_train, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_sources_by_their_definition(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


MOVING, HISTORY, LEARNED = jc.MovingAverage(), jc.DelayedScaling(), jc.LSQ()


@each(
    ("fields", "error", "words"),
    [
        ({"activation": TENSOR, "scale_from": "ema"}, TypeError, "scale_from='ema' must be"),
        ({"weight": TENSOR, "scale_from": MOVING}, ValueError, "has no effect without activation"),
        ({"activation": "int8(group=all)", "scale_from": MOVING}, ValueError, "one scale for the whole array"),
        (
            {"activation": TENSOR, "weight": "e4m3", "scale_from": HISTORY},
            ValueError,
            "weight='float8_e4m3'.*whole array",
        ),
        ({"weight": "mxfp4", "scale_from": LEARNED}, ValueError, "kept in 16 bits or more"),
        ({"weight": "uint4(group=4,zero_point=integer)", "scale_from": LEARNED}, ValueError, "no zero point"),
        ({"activation": "uint8(group=tensor,zero_point=integer)", "scale_from": HISTORY}, ValueError, "no zero point"),
        ({"weight": TENSOR + ":gradient=clipped", "scale_from": LEARNED}, ValueError, "straight through"),
        ({"weight": TENSOR, "weight_gradient": "e5m2", "scale_from": LEARNED}, ValueError, "all three products"),
        ({"weight": TENSOR, "input_gradient": "e5m2", "scale_from": LEARNED}, ValueError, "input_gradient=.*all three"),
    ],
)
def test_what_cannot_be_kept_is_said(fields: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        jc.Rule(**fields)


def test_what_says_nothing_is_said() -> None:
    for make, argument in ((jc.MovingAverage, 1.0), (jc.DelayedScaling, 0), (jc.LSQ, 1)):
        with pytest.raises((TypeError, ValueError), match="must be"):
            make(argument)  # type: ignore[arg-type]
    rule = jc.nn.recipe("float8_delayed")
    assert str(rule).endswith("scale_from=DelayedScaling(length=1024, take='max'))")
    with pytest.raises(ValueError, match=r"for training, mode='qat'"):
        jc.nn.quantize(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), rule, mode="ptq")
    with pytest.raises(ValueError, match="scale_from has no effect on any of its layers: Embed"):
        jc.nn.quantize(nnx.Embed(2, 2, rngs=nnx.Rngs(0)), jc.Rule(weight=TENSOR, scale_from=jc.LSQ()))
    with pytest.raises(ValueError, match=r"run jchop\.nn\.calibrate"):
        layer(activation=TENSOR, scale_from=jc.LSQ())(X[0])
