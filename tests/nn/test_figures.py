"""Errors of quantized networks beside those that other libraries have on the same data."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jchop as jc

#: Relative output error of qwix 0.1.8, weights alone, mean of three seeds, for each format: per output channel, or
#: in blocks along the sum.
YARDSTICK = {
    "int8(group=all)": (0.0088 + 0.0090 + 0.0092) / 3,
    "int4(group=all,rule=half_range)": (0.1483 + 0.1502 + 0.1563) / 3,
    "int4(group=32)": (0.1453 + 0.1471 + 0.1474) / 3,
    "nf4(group=all)": (0.1605 + 0.1624 + 0.1659) / 3,
    "float8_e4m3fn(group=all)": (0.0451 + 0.0456 + 0.0467) / 3,
    "float8_e5m2(group=all)": (0.0893 + 0.0913 + 0.0935) / 3,
    "mxfp4(rule=rceil)": (0.1793 + 0.1826 + 0.1862) / 3,
    "nvfp4": (0.1686 + 0.1740 + 0.1776) / 3,
    "mxfp8_e4m3(rule=rceil)": (0.0462 + 0.0463 + 0.0471) / 3,
}
SLACK = 1.02


class Network(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        sizes = (512, 1024, 1024, 512)
        self.layers = nnx.List([nnx.Linear(*pair, rngs=rngs) for pair in itertools.pairwise(sizes)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


@nnx.jit
def run(network: Any, x: Any) -> Any:
    return network(x)


def error_of(spec: str, seed: int) -> float:
    network, x = Network(rngs=nnx.Rngs(seed)), jax.random.normal(jax.random.key(100 + seed), (256, 512))
    exact, rounded = run(network, x), run(jc.nn.quantize(network, jc.nn.Rule(weight=spec)), x)
    return float(jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact))


@pytest.mark.slow
@pytest.mark.parametrize("spec", YARDSTICK)
def test_errors_are_within_two_percent_of_qwix(spec: str) -> None:
    assert np.mean([error_of(spec, seed) for seed in range(3)]) <= SLACK * YARDSTICK[spec]


# -- torchao 0.18, in decibels -----------------------------------------------------------------------------------------


def decibels(exact: Any, rounded: Any) -> float:
    return float(20 * jnp.log10(jnp.linalg.norm(exact) / jnp.linalg.norm(exact - rounded)))


def matrices() -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    w = (draw.standard_normal((512, 1024)) * 0.02).astype("float32")
    x, g = (draw.standard_normal(shape).astype("float32") for shape in ((64, 1024), (64, 512)))
    return jnp.asarray(x), jnp.asarray(w.T), jnp.asarray(g)


def products(rule: jc.nn.Rule) -> tuple[float, float, float]:
    x, w, g = matrices()
    plain = nnx.Linear(1024, 512, use_bias=False, rngs=nnx.Rngs(0))
    plain.kernel[...] = w

    def run(layer: Any, x: Any) -> Any:
        graph, params = nnx.split(layer)
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        of_params, dx = pull(g)
        return y, dx, of_params["kernel"][...]

    pairs = zip(nnx.jit(run)(plain, x), nnx.jit(run)(jc.nn.quantize(plain, rule), x), strict=True)
    y, dx, dw = (decibels(*pair) for pair in pairs)
    return y, dx, dw


_TORCHAO_INT8, _TORCHAO_INT4 = "int8(group=all,rule=half_range)", "int4(group=32,rule=half_range)"
_FLOAT8 = "float8_e4m3fn(group=all)"
#: Weight, activation, decibels of y.
FORWARD = {
    "dynamic int8": (_TORCHAO_INT8, _TORCHAO_INT8, 39.10),
    "8da4w": (_TORCHAO_INT4, "int8(group=all,zero_point=true)", 20.38),
    "dynamic float8": (_FLOAT8, _FLOAT8, 28.51),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORWARD)
def test_forward_products_are_as_exact_as_those_of_torchao(name: str) -> None:
    weight, activation, figure = FORWARD[name]
    assert products(jc.nn.Rule(weight=weight, activation=activation))[0] == pytest.approx(figure, abs=0.06)


#: Decibels of y, dx and dw.
TRAINING = {
    "float8_tensorwise": (28.5, 24.6, 24.6),
    "float8_rowwise": (28.5, 28.5, 28.5),
    "float8_rowwise_with_gw_hp": (28.5, 28.5, np.inf),
}
#: What torchao asks of its own tests.
LEAST = {"mxfp8": (27, 25, 24)}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_training_products_are_as_exact_as_those_of_torchao(name: str) -> None:
    for got, figure in zip(products(jc.nn.recipe(name)), TRAINING[name], strict=True):
        assert got > 100 if figure == np.inf else got == pytest.approx(figure, abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAST)
def test_training_products_are_exact_enough(name: str) -> None:
    assert all(got >= least for got, least in zip(products(jc.nn.recipe(name)), LEAST[name], strict=True))
