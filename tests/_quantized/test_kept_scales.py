"""Kept scales of programs: state in, state out; the same numbers as the layers of Flax, and as loops unrolled."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from zoo import CASES

import jchop as jc

further = Further()

#: Models with products in a custom derivative, a shard_map, or a while loop.
CLOSED = {"dict_custom_vjp", "dict_shard_map", "odd_power_iteration"}
TENSOR = "int8(group=tensor)"
BOTH: Any = {"weight": TENSOR, "activation": TENSOR}
SOURCES: Any = [jc.MovingAverage(0.5), jc.DelayedScaling(2), jc.LSQ()]


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = [normal(4, 8, seed=i) * s for i, s in enumerate((1.0, 2.0, 0.5))]
PARAMS = {"up": normal(8, 6), "down": normal(6, 3, seed=1)}


def mlp(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["up"]) @ p["down"]


def int8(x: Any, most: Any) -> Any:
    """Rounded to int8 under one float32 scale, in float64."""
    scale = np.float32(most) / np.float32(127)
    return np.clip(np.rint(np.asarray(x, np.float64) / np.float64(scale)), -128, 127) * np.float64(scale)


def test_a_range_follows_in_updates_and_stays_in_calls() -> None:
    low = jc.quantize_fn(mlp, jc.Rule("up", activation=TENSOR, scale_from=jc.MovingAverage(0.75)))
    scales, span = low.start(PARAMS, jax.ShapeDtypeStruct((4, 8), jnp.float32)), None
    assert {name: np.isnan(v).all() for name, v in scales.stats.items()} == {"up_activation_range": True}
    update = jax.jit(low.update)
    for x in X:
        found = np.array([x.min(), x.max()], np.float64)
        span = found if span is None else 0.75 * span + 0.25 * found
        y, scales = update(PARAMS, x, scales=scales)
        np.testing.assert_allclose(scales.stats["up_activation_range"], span, rtol=1e-6)
        hidden = int8(x, np.abs(scales.stats["up_activation_range"]).max()) @ np.asarray(PARAMS["up"], np.float64)
        np.testing.assert_allclose(y, np.tanh(hidden) @ PARAMS["down"], rtol=1e-4, atol=1e-5)
    hidden = int8(X[0], np.abs(scales.stats["up_activation_range"]).max()) @ np.asarray(PARAMS["up"], np.float64)
    expected = np.tanh(hidden) @ PARAMS["down"]
    np.testing.assert_allclose(low(PARAMS, X[0], scales=scales), expected, rtol=1e-4, atol=1e-5)


#: State that calls follow, and parameters; the first is the default case.
ONE_OF_BOTH = [SOURCES[0], *(pytest.param(source, marks=pytest.mark.slow) for source in SOURCES[1:])]


@pytest.mark.parametrize("source", ONE_OF_BOTH, ids=lambda s: type(s).__name__)
def test_layers_keep_the_same_scales(source: Any) -> None:
    """A Linear of `jchop.nn` and its program: results, gradients and state of two steps."""
    nnx = pytest.importorskip("flax.nnx")
    rule = jc.Rule(**BOTH, scale_from=source)
    layer = jc.nn.Linear(8, 6, use_bias=False, rule=rule, rngs=nnx.Rngs(0))
    w = layer.kernel[...]
    low = jc.quantize_fn(lambda p, x: x @ p["w"], rule)
    scales = low.start({"w": w}, X[0])
    if isinstance(source, jc.LSQ):
        layer = jc.nn.calibrate(layer, [X[0]])

    def loss(w: Any, learned: Any, scales: Any, x: Any) -> Any:
        y, after = low.update({"w": w}, x, scales=scales._replace(learned=learned))
        return jnp.sum(y**2), (y, after)

    def of_layer(layer: Any, x: Any) -> Any:
        y = layer(x)
        return jnp.sum(y**2), y

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    theirs = nnx.jit(nnx.grad(of_layer, has_aux=True))
    for x in X[:2]:
        (dw, dl), (y, scales) = step(w, scales.learned, scales, x)
        gradient, expected = theirs(layer, x)
        chex.assert_trees_all_close((y, dw), (expected, gradient["kernel"][...]), rtol=1e-6, atol=1e-5)
        site = layer.dot_general
        if isinstance(source, jc.MovingAverage):
            np.testing.assert_array_equal(scales.stats["w_activation_range"], site.left.range[...])
        elif isinstance(source, jc.DelayedScaling):
            np.testing.assert_array_equal(scales.stats["w_activation_history"], site.left.history[...])
            np.testing.assert_array_equal(scales.stats["w_weight_history"], site.right.history[...])
        else:
            state = gradient["dot_general"]
            np.testing.assert_allclose(
                dl["w_weight_scale"].ravel(), state["right"]["scale"][...].ravel(), rtol=1e-5, atol=1e-6
            )
            np.testing.assert_allclose(dl["w_activation_scale"], state["left"]["scale"][...], rtol=1e-5, atol=1e-6)


@further
def a_recipe_with_a_history() -> None:
    rule = jc.Rule(
        weight="float8_e4m3fn(group=tensor)", activation="float8_e4m3fn(group=tensor)",
        gradient="float8_e5m2(group=tensor)", scale_from=jc.DelayedScaling(2),
    )  # fmt: skip
    low = jc.quantize_fn(mlp, rule)
    scales = low.start(PARAMS, X[0])
    y, scales = jax.jit(low.update)(PARAMS, X[0], scales=scales)
    plain = jc.quantize_fn(mlp, jc.Rule(weight=rule.weight, activation=rule.activation, gradient=rule.gradient))
    np.testing.assert_allclose(y, jax.jit(plain)(PARAMS, X[0]), rtol=1e-6)  # no history yet: of the arrays themselves
    again, after = jax.jit(low.update)(PARAMS, X[1], scales=scales)
    clipped = low(PARAMS, jnp.clip(X[1], -jnp.abs(X[0]).max(), jnp.abs(X[0]).max()), scales=scales)
    np.testing.assert_allclose(again, clipped, rtol=1e-6)  # beyond the history numbers saturate
    assert after.stats["up_activation_history"].tolist() == [jnp.abs(X[1]).max(), jnp.abs(X[0]).max()]


@further.first
def the_largest_or_the_last_of_a_history_counts() -> None:
    """The last one is the smallest, under which numbers of the largest saturate."""
    sizes = [float(jnp.abs(x).max()) for x in X[1:]]
    assert sizes[1] < sizes[0] / 2
    for take, most in (("max", sizes[0]), ("last", sizes[1])):
        low = jc.quantize_fn(mlp, jc.Rule("up", activation=TENSOR, scale_from=jc.DelayedScaling(2, take)))  # type: ignore[arg-type]
        kept = jc.Scales({}, {"up_activation_history": jnp.asarray(sizes[::-1])})
        wanted = np.tanh(int8(X[1], most) @ np.asarray(PARAMS["up"], np.float64)) @ PARAMS["down"]
        np.testing.assert_allclose(low(PARAMS, X[1], scales=kept), wanted, rtol=1e-4, atol=1e-5, err_msg=take)


@further
@pytest.mark.parametrize("source", ONE_OF_BOTH, ids=lambda s: type(s).__name__)
def layers_of_a_scan_keep_scales_of_their_own(source: Any) -> None:
    w = normal(3, 8, 8)

    def scanned(p: Any, x: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, p["w"])[0]

    def unrolled(p: Any, x: Any) -> Any:
        for i in range(3):
            x = jnp.tanh(x @ p[str(i)])
        return x

    rule = jc.Rule(**BOTH, scale_from=source)
    one, many = jc.quantize_fn(scanned, rule), jc.quantize_fn(unrolled, rule)
    apart = {str(i): w[i] for i in range(3)}
    mine, theirs = one.start({"w": w}, X[0]), many.start(apart, X[0])

    def step(low: Any, params: Any, scales: Any, x: Any) -> Any:
        def loss(params: Any, learned: Any) -> Any:
            y, after = low.update(params, x, scales=scales._replace(learned=learned))
            return jnp.sum(y**2), (y, after)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, scales.learned)

    for x in X[:2]:
        (dw, dl), (y, mine) = step(one, {"w": w}, mine, x)
        (each, el), (expected, theirs) = step(many, apart, theirs, x)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dw["w"], jnp.stack([each[str(i)] for i in range(3)]), rtol=1e-4, atol=1e-4)
        for ours, others in ((mine.stats, theirs.stats), (mine.learned, theirs.learned), (dl, el)):
            for name, value in ours.items():
                stacked = jnp.stack([others[name.replace("w_", f"{i}_", 1)] for i in range(3)])
                np.testing.assert_allclose(value, stacked, rtol=1e-4, atol=1e-4)


def test_a_product_in_every_turn_of_a_loop_keeps_one_range() -> None:
    w, xs = normal(8, 8) / 3, jnp.stack(X)

    def cell(p: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda h, x: (jnp.tanh(x @ p["w"]), None), xs[0], xs)[0]

    def turns(p: Any, xs: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(xs[c[1]] @ p["w"]), c[1] + 1), (xs[0], 0))[0]

    span: Any = None
    for x in X:
        found = np.array([x.min(), x.max()])
        span = found if span is None else 0.5 * span + 0.5 * found
    for fun in (cell, turns):
        low = jc.quantize_fn(fun, jc.Rule(activation=TENSOR, scale_from=jc.MovingAverage(0.5)))
        _, scales = low.update({"w": w}, xs, scales=low.start({"w": w}, xs))
        np.testing.assert_allclose(scales.stats["w_activation_range"], span, rtol=1e-6)
    static = jc.quantize_fn(cell, jc.Rule(activation=TENSOR)).calibrate({"w": w}, [xs])
    np.testing.assert_array_equal(static.stats["w_activation_range"], [xs.min(), xs.max()])


def test_a_branch_that_is_not_taken_keeps_its_range() -> None:
    def either(p: Any, x: Any) -> Any:
        return jax.lax.cond(x.sum() > 0, lambda x: x @ p["a"], lambda x: x @ p["b"], x)

    params, x = {"a": normal(8, 2), "b": normal(8, 2)}, jnp.abs(X[0])
    low = jc.quantize_fn(either, jc.Rule(activation=TENSOR, scale_from=jc.MovingAverage(0.5)))
    _, scales = jax.jit(low.update)(params, x, scales=low.start(params, x))
    np.testing.assert_array_equal(scales.stats["a_activation_range"], [x.min(), x.max()])
    assert np.isnan(scales.stats["b_activation_range"]).all()
    found = jc.quantize_fn(either, jc.Rule(activation=TENSOR)).calibrate(params, [x])
    assert list(found.stats) == ["a_activation_range"]


@pytest.mark.parametrize(
    "name", ["dict_mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "dict_mlp")]
)
def test_models_keep_scales(name: str) -> None:
    """State comes out as it went in, or the error names the rule to put before.

    Of each model the scales that are parameters, and one of the two kinds of state in turn.
    """
    case = CASES[name]
    params, args = case.params()
    for source in (SOURCES[2], SOURCES[sorted(CASES).index(name) % 2]):
        low = jc.quantize_fn(case.apply, jc.Rule(**BOTH, scale_from=source))

        def step(params: Any, low: Any = low) -> Any:
            scales = low.start(params, *args)
            grad = jax.grad(
                lambda learned: case.loss(low.update(params, *args, scales=scales._replace(learned=learned))[0])
            )
            return scales, low.update(params, *args, scales=scales)[1], grad(scales.learned)

        if name in CLOSED and (name != "odd_power_iteration" or isinstance(source, jc.LSQ)):
            closed = r"out of which its data cannot come\. Put Rule\('\w+', \.\.\.\)"
            with pytest.raises(NotImplementedError, match=closed):
                jax.eval_shape(step, params)
            continue
        scales, after, gradient = jax.eval_shape(step, params)
        assert scales.learned or scales.stats, source
        chex.assert_trees_all_equal_shapes_and_dtypes(scales, after)
        chex.assert_trees_all_equal_shapes_and_dtypes(scales.learned, gradient)


@further
def packed_parameters_have_learned_scales() -> None:
    low = jc.quantize_fn(mlp, jc.Rule(weight="int4(group=2)", activation=TENSOR, scale_from=jc.LSQ()))
    scales = low.start(PARAMS, X[0])
    assert scales.learned["up_weight_scale"].shape == (4, 6) and scales.learned["up_activation_scale"].shape == ()
    moved = scales._replace(learned={k: 0.7 * v for k, v in scales.learned.items()})
    packed = low.pack(PARAMS, X[0], scales=moved)
    np.testing.assert_array_equal(packed["up"].scale, moved.learned["up_weight_scale"])
    np.testing.assert_array_equal(low(packed, X[0], scales=moved), low(PARAMS, X[0], scales=moved))
    assert (low(packed, X[0], scales=moved) != low(PARAMS, X[0], scales=scales)).any()


def test_a_fixed_range() -> None:
    low = jc.quantize_fn(mlp, [jc.Rule("down"), jc.Rule(activation="int8", weight="int4(group=2)")])
    fixed = low.calibrate(PARAMS, [X[0], (X[1],)], method="minmax")
    widest = [float(min(x.min() for x in X[:2])), float(max(x.max() for x in X[:2]))]
    assert fixed.learned == {} and {k: v.tolist() for k, v in fixed.stats.items()} == {"up_activation_range": widest}
    packed = low.pack(PARAMS, X[0])
    np.testing.assert_array_equal(low(packed, 9 * X[0], scales=fixed), low(PARAMS, 9 * X[0], scales=fixed))
    assert (low(PARAMS, 9 * X[0], scales=fixed) != low(PARAMS, 9 * X[0])).any()
    _, tangent = jax.jvp(lambda x: low(PARAMS, x, scales=fixed), (X[0],), (X[1],))
    _, back = jax.vjp(lambda x: low(PARAMS, x, scales=fixed), X[0])
    np.testing.assert_allclose(tangent.sum(), jnp.vdot(back(jnp.ones_like(tangent))[0], X[1]), rtol=1e-5)
    emulated = jc.emulate(lambda x: low(PARAMS, x, scales=fixed), "bfloat16")
    assert "jchop" in [row.primitive for row in emulated.report(X[0]).rows]  # it finds a rule for all


def test_a_rule_with_a_rounded_gradient_keeps_its_ranges() -> None:
    low = jc.quantize_fn(mlp, jc.Rule("up", activation=TENSOR, gradient="e5m2", scale_from=jc.MovingAverage(0.5)))
    assert list(low.start(PARAMS, X[0]).stats) == ["up_activation_range"]


def test_fixed_ranges_are_those_of_the_function_and_its_rules() -> None:
    rule = jc.Rule(activation="int8", weight="int4(group=2)")
    low = jc.quantize_fn(mlp, rule)
    fixed = low.calibrate(PARAMS, [X[0]])
    some = {name: span for name, span in fixed.stats.items() if name.startswith("up")}
    other = jc.quantize_fn(lambda p, x: mlp({**p, "up": p["in"]}, x), rule)
    renamed = {"in": PARAMS["up"], "down": PARAMS["down"]}
    without = jc.quantize_fn(mlp, [jc.Rule("up"), rule])
    moving = jc.quantize_fn(mlp, jc.Rule(activation="int8", scale_from=jc.MovingAverage()))
    for function, params, scales, words in (
        (low, PARAMS, some, "scales has no 'down_activation_range': pass"),
        (low, PARAMS, {**fixed.stats, "no": jnp.ones(2)}, "scales has 'no', which has no use here: pass"),
        (other, renamed, fixed.stats, "has no 'in_activation_range', has 'up_activation_range', which has no use here"),
        (without, PARAMS, fixed.stats, "has 'up_activation_range', which has no use here"),
        (moving, PARAMS, {**moving.start(PARAMS, X[0]).stats, "up_activation_history": jnp.ones(2)}, "up_activation_h"),
    ):
        with pytest.raises(ValueError, match=words):
            function(params, X[0], scales=jc.Scales({}, scales))
    with pytest.raises(ValueError, match="has no 'down_activation_range'"):
        low.update(PARAMS, X[0], scales=jc.Scales({}, some))
    np.testing.assert_array_equal(low(PARAMS, X[0], scales=low.start(PARAMS, X[0])), low(PARAMS, X[0]))


@further
def fixed_ranges_of_all_shapes_and_of_the_branches_that_were_taken() -> None:
    def steps(w: Any, xs: Any) -> Any:
        h = jnp.zeros(8)
        for x in xs:
            h = jnp.tanh(jax.lax.cond(x[0] > 9, lambda h: h @ w["never"], lambda h: h, h) @ w["w"] + x)
        return h

    low = jc.quantize_fn(steps, jc.Rule(activation="int8"))
    params = {"w": normal(8, 8), "never": normal(8, 8, seed=1)}
    fixed = low.calibrate(params, [X[0][:2]])
    assert sorted(fixed.stats) == ["w_activation_range", "w_activation_range_1"]
    for count in (1, 2):
        low(params, X[0][:count], scales=fixed)
    with pytest.raises(ValueError, match=r"has no 'w_activation_range_2'.*arguments of these shapes"):
        low(params, X[0][:3], scales=fixed)


def test_what_is_missing_is_said() -> None:
    moving = jc.Rule(**BOTH, scale_from=jc.MovingAverage())
    low, history = jc.quantize_fn(mlp, moving), jc.quantize_fn(mlp, jc.Rule(**BOTH, scale_from=jc.DelayedScaling(2)))
    with pytest.raises(ValueError, match=r"scales=None, but Rule.*pass scales=low.start"):
        low(PARAMS, X[0])
    with pytest.raises(ValueError, match=r"scales has no 'up_activation_range' of the dot_general"):
        low(PARAMS, X[0], scales=jc.Scales())
    with pytest.raises(ValueError, match=r"'up_activation_range'.*has shape \(3,\).*needs \(2,\)"):
        low(PARAMS, X[0], scales=jc.Scales({}, {"up_activation_range": jnp.zeros(3)}))
    with pytest.raises(TypeError, match="scales=3 must be"):
        low(PARAMS, X[0], scales=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a history of scales is for training"):
        history.pack(PARAMS, X[0], scales=history.start(PARAMS, X[0]))
    with pytest.raises(ValueError, match="no product of the program has an activation with one scale"):
        jc.quantize_fn(mlp, jc.Rule(weight=TENSOR)).calibrate(PARAMS, [X[0]])
    learned = jc.quantize_fn(mlp, jc.Rule(**BOTH, scale_from=jc.LSQ()))
    with pytest.raises(ValueError, match="pass arrays, not shapes"):
        learned.start(PARAMS, jax.ShapeDtypeStruct((4, 8), jnp.float32))

    @jax.custom_vjp
    def own(w: Any, x: Any) -> Any:
        return x @ w

    own.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))
    within = jc.quantize_fn(own, moving)
    with pytest.raises(NotImplementedError, match="within a function with a derivative of its own"):
        within(PARAMS["up"], X[0], scales=jc.Scales())
    with pytest.raises(ValueError, match="scale_from has no effect"):
        jc.quantize_fn(lambda p, x: p["up"][x], moving)(PARAMS, jnp.arange(3))


@further
def parameters_of_one_path_have_scales_of_their_own() -> None:
    params = {"a": {"b": normal(8, 6)}, "a/b": normal(6, 3, seed=1)}
    low = jc.quantize_fn(
        lambda p, x: x @ p["a"]["b"] @ p["a/b"], jc.Rule(weight="int4(group=all)", scale_from=jc.LSQ())
    )
    scales = low.start(params, X[0])
    shapes = {name: scale.shape for name, scale in scales.learned.items()}
    assert shapes == {"a/b_weight_scale": (1, 6), "a/b_weight_scale_1": (1, 3)}
    assert low(params, X[0], scales=scales).shape == (4, 3)


test_further = further.test()
