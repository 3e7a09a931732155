"""Batch norms that become part of a layer, and biases that lose the mean error of rounding."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_references import checked, each

import jchop as jc


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([nnx.Conv(2, 4, (3,), use_bias=False, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)])
        self.up = nnx.ConvTranspose(4, 6, (2,), transpose_kernel=True, rngs=rngs)
        self.norm = nnx.BatchNorm(6, use_bias=False, use_scale=False, epsilon=0.1, rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)
        self.last = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.blocks[1](self.blocks[0](x)))
        return self.last(self.head(nnx.relu(self.norm(self.up(x)))))


@nnx.jit
def run(model: Any, x: Any) -> Any:
    return model(x)


PAIRS = {"blocks/0": "blocks/1", "up": "norm", "head": "last"}


def trained() -> Any:
    """A model in evaluation whose statistics, gains and offsets are none that it starts from."""
    model, draw = Model(rngs=nnx.Rngs(0)), np.random.default_rng(9)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            for variable in (module.mean, module.var, module.scale, module.bias):
                if variable is not None:
                    variable[...] = jnp.asarray(draw.uniform(0.3, 2, variable.shape), "float32")
    model.eval()
    return model


def folded_norms_are_the_formula() -> None:
    model, x = trained(), jnp.asarray(np.random.default_rng(1).normal(size=(5, 7, 2)), "float32")
    before = np.array(model.head.kernel[...])
    folded = jc.nn.fold_batch_norms(model, PAIRS)
    norm, head = model.last, folded.head
    a = np.asarray(norm.scale[...], np.float64) / np.sqrt(np.asarray(norm.var[...], np.float64) + 1e-5)
    np.testing.assert_allclose(head.kernel[...], np.asarray(before, np.float64) * a, rtol=1e-6)
    b = (np.asarray(model.head.bias[...], np.float64) - np.asarray(norm.mean[...])) * a + np.asarray(norm.bias[...])
    np.testing.assert_allclose(head.bias[...], b, rtol=1e-5)
    expected, y = nnx.jit(lambda model, folded, x: (model(x), folded(x)))(model, folded, x)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    assert all(isinstance(layer, jc.nn.Folded) for layer in (folded.blocks[1], folded.norm, folded.last))
    assert (model.head.kernel[...] == before).all() and isinstance(model.last, nnx.BatchNorm)
    assert folded.blocks[0].bias is not None and model.blocks[0].bias is None
    rounded = jc.nn.quantize(folded, jc.Rule("head", weight="int8(group=all)"))
    assert np.abs(np.asarray(rounded(x) - y)).max() < 0.1


@each(
    ("pairs", "error", "words"),
    [
        ({"tail": "last"}, ValueError, "no module there"),
        ({"head": "last", "up": "last"}, ValueError, "'last' 2 times"),
        ({"head": "norm"}, ValueError, "num_features=6"),
        ({"head": "up"}, NotImplementedError, "must be a BatchNorm"),
        ({"last": "norm"}, NotImplementedError, "can be a Linear, Conv, ConvTranspose"),
    ],
)
def test_what_cannot_be_folded_is_said(pairs: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        jc.nn.fold_batch_norms(Model(rngs=nnx.Rngs(0)), pairs)


RULE = jc.Rule(weight="int2(group=all,rule=half_range)", output="bfloat16")


def means_are_those_of_the_exact_model() -> None:
    model = jc.nn.fold_batch_norms(trained(), PAIRS)
    batches = list(jnp.asarray(np.random.default_rng(2).uniform(size=(3, 8, 7, 2)), "float32"))
    rounded, told = jc.nn.quantize(model, RULE), []
    corrected = jc.nn.correct_biases(model, rounded, batches, progress=told.append)
    assert told == [1, 2, 3]

    def mean(model: Any) -> np.ndarray:
        return np.mean([np.asarray(run(model, x), np.float64) for x in batches], axis=(0, 1, 2))

    exact = mean(model)
    assert np.abs(mean(rounded) - exact).max() > 0.05
    np.testing.assert_allclose(mean(corrected), exact, atol=0.01)  # what bfloat16 leaves
    assert nnx.graphdef(corrected) == nnx.graphdef(rounded)
    packed = jc.nn.correct_biases(model, jc.nn.quantize(model, RULE, mode="ptq"), batches)
    np.testing.assert_array_equal(packed.head.bias[...], corrected.head.bias[...])
    # By hand, of the layer that is called first.
    first = [
        np.mean([np.asarray(m.blocks[0](x), np.float64) for x in batches], axis=(0, 1, 2)) for m in (rounded, model)
    ]
    bias = np.asarray(model.blocks[0].bias[...]) - (first[0] - first[1])
    np.testing.assert_allclose(corrected.blocks[0].bias[...], bias, atol=1e-6)


@pytest.mark.parametrize(
    "check",
    [folded_norms_are_the_formula, pytest.param(means_are_those_of_the_exact_model, marks=pytest.mark.slow)],
    ids=lambda check: check.__name__,
)
def test_folding_and_correcting(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


def test_a_bias_takes_up_the_mean_error_of_all_rows() -> None:
    exact, draw = nnx.Linear(8, 3, rngs=nnx.Rngs(0)), np.random.default_rng(3)
    exact.bias = nnx.Param(jnp.asarray([0.5, -1.0, 2.0]))
    batches = [jnp.asarray(draw.uniform(size=(count, 8)), "float32") for count in (2, 5)]
    low = jc.nn.quantize(exact, jc.Rule(weight="int2(group=all)"))
    lost = np.concatenate([np.asarray(exact(x) - low(x), np.float64) for x in batches]).mean(0)
    assert np.abs(lost).min() > 1e-3
    corrected = jc.nn.correct_biases(exact, low, batches)
    np.testing.assert_allclose(corrected.bias[...], np.asarray(exact.bias[...]) + lost, rtol=1e-5)


def test_what_cannot_be_corrected_is_said() -> None:
    model, x = Model(rngs=nnx.Rngs(0)), [jnp.ones((1, 4, 2))]
    rounded = jc.nn.quantize(model, RULE)
    for arguments, more, words in (
        ((model, rounded, []), {}, "no batch"),
        ((model, model, x), {}, "must be the same"),
        (
            (model, rounded, x),
            {"run": lambda model, batch: model.head(jnp.ones((1, 6)))},
            "reach no layer at 'blocks/0'",
        ),
        ((model, rounded, x), {"run": nnx.jit(lambda model, batch: model(batch))}, r"within jax\.jit"),
    ):
        with pytest.raises(ValueError, match=words):
            jc.nn.correct_biases(*arguments, **more)
    packed = jc.nn.quantize(model, jc.Rule("head", weight="e4m3", bias="e4m3"), mode="ptq")
    with pytest.raises(NotImplementedError, match="'head' has a packed bias"):
        jc.nn.correct_biases(model, packed, x)
