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
    assert {type(layer).__name__ for layer in (folded.blocks[1], folded.norm, folded.last)} == {"Folded"}
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


RULE = jc.Rule(weight="int2(group=all,rule=half_range)", activation="int8(group=all)")
CORRECTED = [jc.ptq.sequential(), jc.ptq.correct_biases()]


def means_are_those_of_the_exact_model() -> None:
    model = jc.nn.fold_batch_norms(trained(), PAIRS)
    batches = list(jnp.asarray(np.random.default_rng(2).uniform(size=(3, 8, 7, 2)), "float32"))
    rounded = jc.nn.quantize(model, RULE, "ptq", inputs=(batches[0],))
    corrected, report = jc.nn.quantize(
        model, RULE, "ptq", batches=batches, steps=CORRECTED, call=lambda m, x: run(m, x), return_report=True
    )
    assert [row.bias for row in report.weights] == ["blocks/0/bias", "up/bias", "head/bias"]

    def mean(model: Any) -> np.ndarray:
        return np.mean([np.asarray(run(model, x), np.float64) for x in batches], axis=(0, 1, 2))

    exact = mean(model)
    assert np.abs(mean(rounded) - exact).max() > 0.05
    np.testing.assert_allclose(mean(corrected), exact, atol=1e-5)


@pytest.mark.parametrize(
    "check",
    [folded_norms_are_the_formula, pytest.param(means_are_those_of_the_exact_model, marks=pytest.mark.slow)],
    ids=lambda check: check.__name__,
)
def test_folding_and_correcting(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@pytest.mark.parametrize("biased", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_bias_takes_up_the_mean_error_of_all_rows(biased: bool) -> None:
    exact, draw = nnx.Linear(8, 3, use_bias=biased, rngs=nnx.Rngs(0)), np.random.default_rng(3)
    if biased:
        exact.bias = nnx.Param(jnp.asarray([0.5, -1.0, 2.0]))
    batches = [jnp.asarray(draw.uniform(size=(count, 8)), "float32") for count in (2, 5)]
    rule = jc.Rule(weight="int2(group=all)")
    low = jc.nn.quantize(exact, rule)
    lost = np.concatenate([np.asarray(exact(x) - low(x), np.float64) for x in batches]).mean(0)
    assert np.abs(lost).min() > 1e-3
    corrected = jc.nn.quantize(exact, rule, "ptq", batches=batches, steps=jc.ptq.correct_biases())
    assert corrected.bias is not None
    before = 0.0 if exact.bias is None else np.asarray(exact.bias[...])
    np.testing.assert_allclose(corrected.bias[...], before + lost, rtol=1e-5)
    assert (exact.bias is not None) == biased
