"""Recipes: what their products compute, by hand, and that a layer trains by one with the update that belongs to it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from further import Further
from jax import lax
from layer_references import checked

import jchop as jc
from jchop.nn._recipes import RECIPES

further = Further()

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


def wage_rounds_as_its_equations_say() -> None:
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


def ibm_fp8_rounds_operands_and_sums() -> None:
    x, w = normal(3, 70, seed=0), normal(70, 4, seed=1)
    layer = nnx.Linear(70, 4, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    sums = jc.MatmulSpec(accumulate="e6m9", order="blocked(64)")
    expected = jc.math.matmul(jc.round_to_format(x, "e5m2"), jc.round_to_format(w, "e5m2"), sums)
    np.testing.assert_array_equal(jc.nn.quantize(layer, jc.nn.recipe("ibm_fp8"))(jnp.asarray(x)), expected)


def own_power(g: Any, _: Any) -> Any:
    """A gradient over the power of two nearest to its largest magnitude: equation 7 of Wu et al."""
    return jnp.ldexp(g, -jnp.round(jnp.log2(jnp.abs(g).max())).astype(int))


def a_layer_trains_by_wage() -> None:
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


@further.first
def every_recipe_is_a_rule() -> None:
    for name in RECIPES:
        rule = jc.nn.recipe(name, "blocks")
        assert rule.path == "blocks" and rule.weight is not None and rule.gradient is not None, name


def int8_multiplies_codes() -> None:
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


@pytest.mark.parametrize(
    "check",
    [
        wage_rounds_as_its_equations_say,
        pytest.param(ibm_fp8_rounds_operands_and_sums, marks=pytest.mark.slow),
        pytest.param(a_layer_trains_by_wage, marks=pytest.mark.slow),
        pytest.param(int8_multiplies_codes, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_products_by_hand(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


def both_weights(name: str, layer: str) -> tuple[Any, Any]:
    """The matrices that a layer multiplies with, forward and for the gradient of its input, under a recipe."""
    make, shape = LAYERS[layer]
    # Unit vectors are what they are in these formats, so that each result is a rounded weight itself.
    plainly: Any = {"gradient": "binary32", "input_gradient": None, "weight_gradient": None, "rotation": None}
    rule = jc.nn.recipe(name, activation=None, **plainly)
    plain, x = make(), jnp.eye(math.prod(shape)).reshape(-1, *shape)

    def spread(kernel: Any) -> Any:  # so wide that scales of other groups underflow at other places
        return kernel * 2.0 ** -(jnp.arange(kernel.size) % 29).reshape(kernel.shape)

    if isinstance(plain, nnx.Module):
        kernel: Any = plain.kernel  # type: ignore[attr-defined]
        kernel[...] = spread(kernel[...])
        graph, state = nnx.split(jc.nn.quantize(plain, rule))
        call: Any = lambda x: nnx.merge(graph, state, copy=True)(x)  # noqa: E731
    else:
        # Blocks of codes have to fit the axes of a program's product; the weights are the same without them.
        quantized = jc.nn.quantize(plain, dataclasses.replace(rule, product=None))
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


#: In layers of other layouts: tiles, blocks along one axis, and one scale for the whole array.
SOME = ("nvfp4", "deepseek_fp8", "float8_rowwise", "float8_tensorwise")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        pytest.param("Linear", ("float8_rowwise", "nvfp4"), id="Linear"),
        pytest.param("Linear", [name for name in RECIPES if name != "int8_stochastic"], marks=slow, id="all of them"),
        *(pytest.param(layer, SOME, marks=slow, id=layer) for layer in LAYERS if layer != "Linear"),
    ],
)
def test_one_weight_forward_and_backward(layer: str, names: Sequence[str]) -> None:
    for name in names:
        forward, backward = both_weights(name, layer)
        tiles_of_codes = name == "deepseek_fp8" and layer == "LinearGeneral"  # of other axes, joined, in dx
        assert np.array_equal(forward, backward.T) == (name in ONE_WEIGHT and not tiles_of_codes), name


def test_blocks_that_stay_as_they_are() -> None:
    class Tower(nnx.Module):
        def __init__(self) -> None:
            self.blocks = nnx.List([nnx.Linear(32, 32, rngs=nnx.Rngs(i)) for i in range(12)])
            self.head = nnx.Linear(32, 32, rngs=nnx.Rngs(12))

    rules = [*jc.nn.keep_wide("blocks", 12, first=1, last=2, others="head"), jc.Rule(weight="mxfp4")]
    layers = jc.nn.quantize(Tower(), rules)
    wide = [type(layer) is nnx.Linear for layer in (*layers.blocks, layers.head)]
    assert [i for i, kept in enumerate(wide) if kept] == [0, 10, 11, 12]
    assert [rule.path for rule in jc.nn.keep_wide("blocks", 12, first=0, last=0)] == ["{embed,head}"]
    assert [rule.path for rule in jc.nn.keep_wide("net/blocks", 10, others="")] == ["net/blocks/{0,1,2,3,4,5,6,7,8,9}"]
    for arguments, message in (((0,), "count=0"), ((12, 13), "first=13"), ((12, 5, 8), "last=8 must be .* 0 to 7")):
        with pytest.raises(ValueError, match=message):
            jc.nn.keep_wide("blocks", **dict(zip(("count", "first", "last"), arguments, strict=False)))


# -- MXFP4, against the algorithms of the papers in NumPy --------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def turned(x: np.ndarray, rotation: jc.Hadamard) -> np.ndarray:
    """The last axis times the matrix, by blocks."""
    return (x.reshape(*x.shape[:-1], -1, len(rotation.matrix)) @ rotation.matrix.T).reshape(x.shape)


def blockwise(x: np.ndarray, scale: Callable[[Any], Any]) -> tuple[np.ndarray, np.ndarray]:
    """The last axis in blocks of 32, each to the nearest e2m1 (no ties here) under a scale; and what stays within 6."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    s = scale(blocks)[..., None]
    size = np.abs(blocks / s)
    nearest = E2M1[np.argmin(np.abs(size[..., None] - E2M1), -1)]
    return (np.sign(blocks) * nearest * s).reshape(x.shape), (size < 7).reshape(x.shape)


def quest(blocks: Any) -> Any:
    """Panferov et al., arXiv 2502.05003: the root of the mean square times the best clip of normal numbers."""
    return 2.0 ** np.floor(np.log2(np.sqrt((blocks**2).mean(-1)) * 2.92247856 / 6))


def rounded_up(blocks: Any) -> Any:
    return 2.0 ** np.ceil(np.log2(np.abs(blocks).max(-1) / 6))


@pytest.mark.parametrize(("name", "scale"), [("mxfp4", rounded_up), pytest.param("mxfp4_quartet", quest, marks=slow)])
def test_mxfp4_forward(name: str, scale: Any) -> None:
    """y, and the derivative of the rounded operands: that of the clipped ones of Quartet is 0."""
    x, w, g = normal(5, 64, seed=0), normal(64, 3, seed=1), normal(5, 3, seed=2)
    rule = jc.nn.recipe(name, gradient=None, input_gradient="binary32", weight_gradient="binary32")
    low = jc.quantize_fn(lambda w, x: x @ w, rule)
    y, pull = jax.vjp(lambda w, x: low(w, x), w, x)
    dw, dx = pull(g)
    rotation = jc.Hadamard(32)
    forward: Any = (lambda a: turned(a, rotation)) if name == "mxfp4_quartet" else (lambda a: a)
    back: Any = (lambda a: a.reshape(*a.shape[:-1], 2, 32) @ rotation.matrix) if name == "mxfp4_quartet" else None
    (xq, x_kept), (wq, w_kept) = (blockwise(forward(a), scale) for a in (x, w.T))
    np.testing.assert_allclose(y, xq @ wq.T, rtol=0, atol=2e-5)
    if name == "mxfp4_quartet":
        assert 0.005 < 1 - x_kept.mean() < 0.5 and not w_kept.all()
        inner = g @ forward(w.T)  # the backward products are of full precision here
        np.testing.assert_allclose(dx, back(inner * x_kept).reshape(x.shape), rtol=0, atol=1e-4)
        inner = g.T @ forward(x)
        np.testing.assert_allclose(dw.T, back(inner * w_kept).reshape(w.T.shape), rtol=0, atol=1e-4)
    else:
        assert x_kept.all() and w_kept.all()
        np.testing.assert_allclose(dx, g @ w.T, rtol=0, atol=1e-4)
        np.testing.assert_allclose(dw, x.T @ g, rtol=0, atol=1e-4)


def off_by(rule: jc.Rule, shapes: Any, count: int) -> Any:
    """Of y, dw and dx, the distance of the mean of so many draws from the product, in units of its standard error."""
    x, w, g = (jnp.asarray(normal(*shape, seed=i)) for i, shape in enumerate(shapes))
    low = jc.quantize_fn(lambda w, x: x @ w, rule)

    def draw(key: Any) -> Any:
        y, back = jax.vjp(lambda w, x: low(w, x, key=key), w, x)
        return y, *back(g)

    draws = [np.asarray(v, np.float64) for v in jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), count))]
    wide = [np.asarray(v, np.float64) for v in (x, w, g)]
    exact = wide[0] @ wide[1], wide[0].T @ wide[2], wide[2] @ wide[1].T
    return [(v.mean(0) - e) / (v.std(0) / count**0.5) for v, e in zip(draws, exact, strict=True) if (v != v[0]).any()]


#: Operands that are clipped forward would have no gradient; without the factor of 3/4, OCP's scales clip backward.
WIDE: dict[str, Any] = {"weight": None, "activation": "binary32"}
CLIPS: dict[str, Any] = {"weight": None, "activation": None} | dict.fromkeys(
    ("input_gradient", "weight_gradient"), "mxfp4:stochastic"
)
#: Scales corrected under signs that are always the same are wrong on average.
FIXED: dict[str, Any] = WIDE | {"rotation": jc.Hadamard(128, products="both")}


@further
@pytest.mark.parametrize(
    ("name", "more", "shapes", "count"),
    [
        ("mxfp4", WIDE, ((32, 2), (2, 32), (32, 32)), 1 << 9),
        *(
            pytest.param(name, more, shapes, 1 << 12, marks=slow)
            for name, more, shapes in (
                ("mxfp4", WIDE, ((64, 4), (4, 64), (64, 64))),
                ("mxfp4_quartet", WIDE, ((64, 4), (4, 64), (64, 64))),
                ("mxfp4", CLIPS, ((64, 4), (4, 64), (64, 64))),
                ("int8_stochastic", {}, ((3, 16), (16, 4), (3, 4))),
                ("nvfp4_quartet2", WIDE, ((128, 2), (2, 128), (128, 128))),
                ("nvfp4_quartet2", FIXED, ((128, 2), (2, 128), (128, 128))),
            )
        ),
    ],
)
def what_is_drawn_is_right_on_average(name: str, more: Any, shapes: Any, count: int) -> None:
    """The products that are drawn: with WIDE operands both backward ones, of int8 all three. Not if CLIPS or FIXED."""
    found = off_by(jc.nn.recipe(name, **more), shapes, count)
    assert len(found) == (2 if more else 3)
    for off in found:
        if more in (CLIPS, FIXED):
            assert np.sqrt((off**2).mean()) > 3
        else:
            assert np.abs(off).max() < 4.8 and np.sqrt((off**2).mean()) < 1 + 2.4 / off.size**0.5


@pytest.mark.parametrize(
    ("text", "shape"), [("int4(group=(3,3))", (1, 40)), pytest.param("nvfp4(group=(16,16))", (37, 21), marks=slow)]
)
def test_square_tiles_are_the_same_of_the_transpose(text: str, shape: tuple[int, ...]) -> None:
    w = normal(*shape, seed=5) * 0.02
    np.testing.assert_array_equal(jc.round_to_format(w.T, text), jc.round_to_format(w, text).T)


def weights_of_nvfp4_are_tiles() -> None:
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
    by_tiles = jc.nn.quantize(norm, jc.Rule(weight="nvfp4(group=(16,16))"))
    by_blocks = jc.nn.quantize(norm, jc.Rule(weight="nvfp4"), mode="ptq")
    np.testing.assert_array_equal(by_tiles(w), by_blocks(w))


def a_stochastic_weight_is_drawn_once() -> None:
    layer = nnx.Linear(37, 21, use_bias=False, rngs=nnx.Rngs(0))
    rule = jc.Rule(weight="nvfp4(group=(16,16)):stochastic", gradient="binary32")
    graph, state = nnx.split(jc.nn.quantize(layer, rule, rngs=nnx.Rngs(rounding=0)))
    forward, pull = jax.vjp(lambda x: nnx.merge(graph, state, copy=True)(x), jnp.eye(37))
    backward = pull(jnp.eye(37, 21))[0][:21]
    np.testing.assert_array_equal(forward[:, :21], backward.T)


@pytest.mark.parametrize(
    "check",
    [a_stochastic_weight_is_drawn_once, pytest.param(weights_of_nvfp4_are_tiles, marks=pytest.mark.slow)],
    ids=lambda check: check.__name__,
)
def test_weights_of_nvfp4(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


test_further = further.test()
