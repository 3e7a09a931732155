"""Kept scales of models whose programs are quantized: variables of NNX, collections of Linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from layer_references import checked, drawn

import jchop as jc

TENSOR = "int8(group=tensor)"
X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), jnp.float32)


class Heads(nnx.Module):
    def __init__(self) -> None:
        self.query = nnx.Param(jax.random.normal(jax.random.key(0), (8, 2, 4)))
        self.out = nnx.Linear(8, 3, rngs=nnx.Rngs(0))

    def heads(self, x: Any) -> Any:
        return jnp.einsum("bd,dhk->bhk", x, self.query[...]).reshape(-1, 8)

    def __call__(self, x: Any) -> Any:
        return self.out(jnp.tanh(self.heads(x)))


INPUTS = {"__call__": (X,), "heads": (X,)}


def rule(source: Any) -> Any:
    return jc.Rule(weight=TENSOR, activation=TENSOR, scale_from=source)


@nnx.jit
def step(model: Any, x: Any) -> Any:
    def loss(model: Any) -> Any:
        y = model(x)
        return jnp.sum(y**2), y

    gradient, y = nnx.grad(loss, has_aux=True)(model)
    return y, gradient


def state_follows_in_training_and_stays_in_evaluation() -> None:
    model = jc.nn.quantize(Heads(), rule(jc.MovingAverage(0.5)), inputs=INPUTS)
    held = model.quantization_scales
    for x in (X, 3 * X):
        step(model, x)
    expected = 2 * np.array([X.min(), X.max()])
    np.testing.assert_allclose(held.stats["query_activation_range"][...], expected, rtol=1e-6)
    assert isinstance(held.stats["out/kernel_activation_range"], jc.nn.ActivationRange)
    model.heads(X)  # another method, the same product
    np.testing.assert_allclose(held.stats["query_activation_range"][...], 0.75 * expected, rtol=1e-6)
    model.eval()
    before = jax.tree.map(np.asarray, held.scales)
    y, _ = step(model, X)
    jax.tree.map(np.testing.assert_array_equal, held.scales, before)
    packed = jc.nn.quantize(model, rule(jc.MovingAverage(0.5)), mode="ptq", inputs=INPUTS)
    packed.eval()
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(packed, X), y)


def histories_are_no_parameters() -> None:
    model = jc.nn.quantize(Heads(), jc.nn.recipe("float8_delayed", scale_from=jc.DelayedScaling(2)), inputs=(X,))
    _, gradient = step(model, X)
    assert sorted(gradient) == ["out", "query"]
    found = {name: (type(v), v.shape) for name, v in model.quantization_scales.stats.items()}
    places = [f"{path}_{field}_history" for path in ("out/kernel", "query") for field in ("activation", "weight")]
    assert found == dict.fromkeys(places, (jc.nn.AmaxHistory, (2,)))
    with pytest.raises(ValueError, match="a history of scales is for training"):
        jc.nn.quantize(model, jc.nn.recipe("float8_delayed"), mode="ptq", inputs=(X,))


def learned_scales_are_calibrated_trained_and_packed() -> None:
    learned = jc.nn.quantize(Heads(), rule(jc.LSQ()), inputs=INPUTS)
    with pytest.raises(ValueError, match="scales has no 'query_activation_scale'"):
        learned(X)
    learned = jc.nn.calibrate(learned, [X, 2 * X])
    scale = learned.quantization_scales.learned["query_activation_scale"]
    assert isinstance(scale, jc.nn.LearnedScale)
    np.testing.assert_allclose(scale[...], 2 * jnp.abs(X).max() / 127, rtol=1e-6)
    y, gradient = step(learned, X)
    assert all((v[...] != 0).any() for v in jax.tree.leaves(gradient, is_leaf=lambda v: isinstance(v, nnx.Variable)))
    packed = jc.nn.quantize(learned, rule(jc.LSQ()), mode="ptq", inputs=INPUTS)
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(packed, X), y)
    assert sorted(packed.quantization_scales.learned) == ["out/kernel_activation_scale", "query_activation_scale"]


class Tower(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        init = linen.with_partitioning(linen.initializers.normal(1.0), ("a", "b"))
        x = x @ self.param("w", init, (8, 8))

        class Block(linen.Module):
            @linen.compact
            def __call__(self, x: Any, _: Any) -> Any:
                return linen.tanh(linen.Dense(8)(x)), None

        x, _ = linen.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)
        return linen.Dense(2)(x)


def variables_of_linen() -> None:
    tower = jc.nn.quantize(Tower(), rule(jc.MovingAverage(0.5)))
    variables = jax.jit(tower.init)(jax.random.key(0), X)
    block = variables["scale_stats"]["ScanBlock_0"]["Dense_0"]
    assert {name: v.shape for name, v in block.items()} == {"kernel_activation_range": (3, 2)}

    @jax.jit
    def run(variables: Any, x: Any) -> Any:
        y, moved = tower.apply(variables, x, mutable=["scale_stats"])
        return y, moved, tower.apply({**variables, **moved}, x)

    y, moved, again = run(variables, X)
    np.testing.assert_array_equal(moved["scale_stats"]["w_activation_range"], [X.min(), X.max()])
    np.testing.assert_allclose(again, y, rtol=1e-5, atol=1e-6)
    learned = jc.nn.quantize(Tower(), rule(jc.LSQ()))
    variables = jax.jit(learned.init)(jax.random.key(0), X)
    names = ["bias", "kernel", "kernel_activation_scale", "kernel_weight_scale"]
    assert sorted(variables["params"]["Dense_0"]) == names
    gradient = jax.eval_shape(jax.grad(lambda p: jnp.sum(learned.apply({"params": p}, X) ** 2)), variables["params"])
    assert gradient["ScanBlock_0"]["Dense_0"]["kernel_weight_scale"].shape == (3, 1, 1)
    packed = jax.jit(learned.pack)(variables, X)
    np.testing.assert_array_equal(jax.jit(learned.apply)(packed, X), jax.jit(learned.apply)(variables, X))
    assert sorted(packed["params"]["Dense_0"]) == names[:3]
    plain = jc.nn.quantize(Tower(), jc.Rule(activation=TENSOR))
    fixed = plain.calibrate(drawn(jax.eval_shape(Tower().init, jax.random.key(0), X)), [X, 2 * X])
    np.testing.assert_array_equal(fixed["scale_stats"]["w_activation_range"], [2 * X.min(), 2 * X.max()])
    with pytest.raises(ValueError, match="batches has no batch"):
        plain.calibrate(variables, [])


def a_program_is_calibrated() -> None:
    dynamic = jc.nn.quantize(Heads(), jc.Rule(weight=TENSOR, activation=TENSOR), inputs=(X,))
    static = jc.nn.calibrate(dynamic, [X, 2 * X], method="percentile(90)")
    most = np.percentile(np.abs(2 * np.asarray(X, np.float64)), 90)
    found = static.quantization_scales.stats["query_activation_range"][...]
    np.testing.assert_allclose(found, [-most, most], rtol=1e-6)
    np.testing.assert_array_equal(static(100 * jnp.sign(X)), static(200 * jnp.sign(X)))
    with pytest.raises(ValueError, match=r"inputs=None: pass inputs=.* keeps scales"):
        jc.nn.quantize(Heads(), rule(jc.LSQ()))


@pytest.mark.parametrize(
    "check",
    [
        a_program_is_calibrated,
        pytest.param(histories_are_no_parameters, marks=pytest.mark.slow),
        pytest.param(state_follows_in_training_and_stays_in_evaluation, marks=pytest.mark.slow),
        pytest.param(learned_scales_are_calibrated_trained_and_packed, marks=pytest.mark.slow),
        pytest.param(variables_of_linen, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_kept_scales(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)
