"""Recipes: what their products compute, by hand, and that a layer trains by one with the update that belongs to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

import jchop as jc
from jchop.nn._recipes import RECIPES

STEP = 2.0**-7  # of 8 bits
#: The recipes whose weights are the same numbers in the forward product and in that of the inputs' gradient.
ONE_WEIGHT = {"float8_tensorwise", "float8_delayed", "nvfp4", "deepseek_fp8", "ibm_fp8", "ibm_hybrid_fp8", "wage"}
#: Layers of shapes that 16 does not divide, without a bias, and the shape of their input.
LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "Linear": (lambda: nnx.Linear(37, 21, use_bias=False, rngs=nnx.Rngs(0)), (37,)),
    "LinearGeneral": (
        lambda: nnx.LinearGeneral((5, 7), (3, 18), axis=(-2, -1), use_bias=False, rngs=nnx.Rngs(0)),
        (5, 7),
    ),
    "Einsum": (lambda: nnx.Einsum("...ij,ikj->...ki", (3, 19, 17), rngs=nnx.Rngs(0)), (3, 17)),
    "Conv": (lambda: nnx.Conv(3, 18, (2, 2), padding="VALID", use_bias=False, rngs=nnx.Rngs(0)), (3, 3, 3)),
    "Dense": (lambda: linen.Dense(21, use_bias=False), (37,)),
    "DenseGeneral": (lambda: linen.DenseGeneral((3, 18), axis=(-2, -1), use_bias=False), (5, 7)),
    "linen.Conv": (lambda: linen.Conv(18, (2, 2), padding="VALID", use_bias=False), (3, 3, 3)),
}


def quantized(x: Any, step: float) -> Any:
    """Equation 6 of Wu et al.: multiples of a step short of -1 and 1."""
    return np.clip(step * np.round(x / step), -1 + step, 1 - step)


def products(name: str, x: Any, w: Any, gradients: Any) -> Any:
    """y, and for each gradient dx and dw, of a linear layer under a recipe."""
    layer = nnx.Linear(*w.shape, use_bias=False, rngs=nnx.Rngs(0))
    graph, params = nnx.split(jc.nn.quantize(layer, jc.nn.recipe(name)))

    @jax.jit
    def run(w: Any, x: Any, gradients: Any) -> Any:
        def call(w: Any, x: Any) -> Any:
            nnx.replace_by_pure_dict(params, {"kernel": w})
            return nnx.merge(graph, params)(x)

        y, pull = jax.vjp(call, w, x)
        return y, jax.vmap(pull)(gradients)

    return run(w, x, gradients)


def normal(*shape: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.slow
def test_wage_rounds_as_its_equations_say() -> None:
    x, w, g = normal(6, 10, seed=0), normal(10, 4, seed=1), normal(6, 4, seed=2)
    largest = np.array([1.2, 0.3 * 2.0**-9, 1.9, 1.45], np.float32)  # the last where the paper takes 2, and jchop 1
    gradients = g / np.abs(g).max() * largest[:, None, None]
    y, (dw, dx) = products("wage", x, w, gradients)
    x8, w2 = quantized(x, STEP), quantized(w, 0.5)
    np.testing.assert_array_equal(y, x8 @ w2)
    shifts = 2.0 ** np.round(np.log2(largest))
    shifts[3] = 1.0
    for i, shift in enumerate(shifts.astype(np.float32)):
        e = quantized(gradients[i] / shift, STEP) * shift
        np.testing.assert_array_equal(dx[i], (e @ w2.T) * (np.abs(x) <= 1 - STEP))
        np.testing.assert_array_equal(dw[i], x8.T @ e)


@pytest.mark.slow
def test_ibm_fp8_rounds_operands_and_sums() -> None:
    x, w = normal(3, 70, seed=0), normal(70, 4, seed=1)
    layer = nnx.Linear(70, 4, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    sums = jc.MatmulSpec(accumulate="e6m9", order="blocked(64)")
    expected = jc.math.matmul(jc.round_to_format(x, "e5m2"), jc.round_to_format(w, "e5m2"), sums)
    np.testing.assert_array_equal(jc.nn.quantize(layer, jc.nn.recipe("ibm_fp8"))(jnp.asarray(x)), expected)


def own_power(g: Any, _: Any) -> Any:
    """A gradient over the power of two nearest to its largest magnitude: equation 7 of Wu et al."""
    return jnp.ldexp(g, -jnp.round(jnp.log2(jnp.abs(g).max())).astype(int))


@pytest.mark.slow
def test_a_layer_trains_by_wage() -> None:
    layer = nnx.Linear(16, 4, use_bias=False, rngs=nnx.Rngs(0))
    graph, params = nnx.split(jc.nn.quantize(layer, jc.nn.recipe("wage")))
    params = jax.tree.map(lambda v: jc.round_to_format(v, "fixed1.7(symmetric=true)"), params)
    teacher = jnp.asarray(np.random.default_rng(3).integers(-1, 2, (16, 4)) / 2, "float32")
    tx = optax.chain(
        optax.stateless_with_tree_map(own_power),
        optax.sgd(4 * STEP),
        jc.optim.round_updates("fixed1.7:stochastic", jax.random.key(0)),
        jc.optim.round_params("fixed1.7(symmetric=true)"),
    )

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(
            (nnx.merge(graph, params)(x) - jc.round_to_format(x, "fixed1.7(symmetric=true)") @ teacher) ** 2
        )

    def step(carry: Any, x: Any) -> Any:
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, x)
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    xs = jnp.asarray(np.random.default_rng(4).uniform(-1, 1, (200, 32, 16)), "float32")
    (trained, _), losses = jax.jit(lambda carry: lax.scan(step, carry, xs))((params, tx.init(params)))
    assert losses[-20:].mean() < 0.05 * losses[:5].mean()
    kernel = np.asarray(nnx.to_pure_dict(trained)["kernel"])
    np.testing.assert_array_equal(kernel, quantized(kernel, STEP))


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_rule(name: str) -> None:
    rule = jc.nn.recipe(name, "blocks")
    assert rule.path == "blocks" and rule.weight is not None and rule.gradient is not None


@pytest.mark.slow
def test_int8_multiplies_codes() -> None:
    """The three products of int8 mixed precision, against its own operations in NumPy."""
    x, w, g = normal(3, 16, seed=0), normal(16, 4, seed=1), normal(3, 4, seed=2)
    y, (dw, dx) = products("int8", x, w, g[None])

    def product(a: Any, b: Any) -> Any:
        """Of rows a and rows b: absmax / 127 for each, int32 sums, one scale after the other."""
        scales = [np.abs(v).max(1) / np.float32(127) for v in (a, b)]
        codes = [np.rint(v / s[:, None]).astype(np.int64) for v, s in zip((a, b), scales, strict=True)]
        return (codes[0] @ codes[1].T).astype(np.float32) * scales[0][:, None] * scales[1]

    for got, want in ((y, product(x, w.T)), (dx[0], product(g, w)), (dw[0], product(g.T, x.T).T)):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_stochastic_int8_is_right_on_average() -> None:
    x, w, g = (jnp.asarray(normal(*shape, seed=i)) for i, shape in enumerate(((3, 16), (16, 4), (3, 4))))
    low = jc.quantize_fn(lambda w, x: x @ w, jc.nn.recipe("int8_stochastic"))

    def run(key: Any) -> Any:
        y, back = jax.vjp(lambda w, x: low(w, x, key=key), w, x)
        return y, *back(g)

    draws = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 400))
    for drawn, exact in zip(draws, (x @ w, x.T @ g, g @ w.T), strict=True):
        error = drawn.std(0) / 20  # of the mean of 400
        assert (error > 0).all() and (jnp.abs(drawn.mean(0) - exact) <= 5 * error).all()


def both_weights(name: str, layer: str) -> tuple[Any, Any]:
    """The matrices that a layer multiplies with, forward and for the gradient of its input, under a recipe."""
    make, shape = LAYERS[layer]
    # Unit vectors are what they are in these formats, so that each result is a rounded weight itself.
    rule = jc.nn.recipe(name, activation=None, gradient="binary32", rotation=None)
    plain, x = make(), jnp.eye(math.prod(shape)).reshape(-1, *shape)

    def spread(kernel: Any) -> Any:  # so wide that scales of other groups underflow at other places
        return kernel * 2.0 ** -(jnp.arange(kernel.size) % 29).reshape(kernel.shape)

    if isinstance(plain, nnx.Module):
        kernel: Any = plain.kernel  # type: ignore[attr-defined]
        kernel[...] = spread(kernel[...])
        graph, state = nnx.split(jc.nn.quantize(plain, rule))
        call: Any = lambda x: nnx.merge(graph, state, copy=True)(x)  # noqa: E731
    else:
        quantized = jc.nn.linen.quantize(plain, rule)
        variables = quantized.init(jax.random.key(0), x)
        variables = {**variables, "params": jax.tree.map(spread, variables["params"])}
        call = lambda x: quantized.apply(variables, x)  # noqa: E731

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(x: Any) -> Any:
        y = call(x)
        one = jnp.eye(y[0].size).reshape(-1, *y.shape[1:])
        _, pull = jax.vjp(call, jnp.zeros((len(one), *shape)))
        return y.reshape(len(x), -1), pull(one)[0].reshape(len(one), -1)

    return jax.tree.map(np.asarray, run(x))


@pytest.mark.in_turn(80)
@pytest.mark.parametrize(
    ("name", "layer"), [(name, layer) for name in RECIPES if name != "int8_stochastic" for layer in LAYERS]
)
def test_one_weight_forward_and_backward(name: str, layer: str) -> None:
    forward, backward = both_weights(name, layer)
    tiles_of_codes = name == "deepseek_fp8" and "General" in layer  # of other axes, joined, in dx
    assert np.array_equal(forward, backward.T) == (name in ONE_WEIGHT and not tiles_of_codes)


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("shape", [(37, 21), (1, 40)])
@pytest.mark.parametrize("text", ["nvfp4(group=(16,16))", "int4(group=(3,3))"])
def test_square_tiles_are_the_same_of_the_transpose(text: str, shape: tuple[int, ...]) -> None:
    w = normal(*shape, seed=5) * 0.02
    np.testing.assert_array_equal(jc.round_to_format(w.T, text), jc.round_to_format(w, text).T)


@pytest.mark.slow
def test_weights_of_nvfp4_are_tiles() -> None:
    w = normal(48, 37, seed=1)
    layer = nnx.Linear(48, 37, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    rule = jc.nn.recipe("nvfp4", activation=None)
    rounded = jc.nn.quantize(layer, rule, rngs=nnx.Rngs(rounding=0))(jnp.eye(48))
    np.testing.assert_array_equal(rounded, jc.round_to_format(w, "nvfp4(group=(16,16))"))
    # The gain of a norm is one row: of its tiles there is one row, too.
    norm = nnx.LayerNorm(37, rngs=nnx.Rngs(0))
    assert norm.scale is not None
    norm.scale[...] = w[0]
    by_tiles = jc.nn.quantize(norm, jc.nn.Rule(weight="nvfp4(group=(16,16))"))
    by_blocks = jc.nn.quantize(norm, jc.nn.Rule(weight="nvfp4"), mode="ptq")
    np.testing.assert_array_equal(by_tiles(w), by_blocks(w))


@pytest.mark.slow
def test_a_stochastic_weight_is_drawn_once() -> None:
    layer = nnx.Linear(37, 21, use_bias=False, rngs=nnx.Rngs(0))
    rule = jc.nn.Rule(weight="nvfp4(group=(16,16)):stochastic", gradient="binary32")
    graph, state = nnx.split(jc.nn.quantize(layer, rule, rngs=nnx.Rngs(rounding=0)))
    forward, pull = jax.vjp(lambda x: nnx.merge(graph, state, copy=True)(x), jnp.eye(37))
    backward = pull(jnp.eye(37, 21))[0][:21]
    np.testing.assert_array_equal(forward[:, :21], backward.T)
