"""Biases that take the mean errors of products: wherever a program adds them, and why one does not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import lax

import jchop as jc
from tests.ptq.tables import case, some_of

further = Further()

RULE = jc.Rule(weight="int2(group=4)")
STEPS = [jc.ptq.correct_biases()]


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def conv(p: Any, x: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x.reshape(5, 3, 4, 2), p["w"], (1, 1), "SAME", dimension_numbers=numbers) + p["b"]


#: A function, the shapes of its weight and bias, and the axes of its result over which the mean error vanishes.
PLACES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "row": (lambda p, x: x @ p["w"] + p["b"], (24, 3), (3,), (0,)),
    "subtracted": (lambda p, x: x @ p["w"] - p["b"], (24, 3), (3,), (0,)),
    "from": (lambda p, x: p["b"] - x @ p["w"], (24, 3), (3,), (0,)),
    "left operand": (lambda p, x: (p["w"] @ x.T).T + p["b"], (3, 24), (3,), (0,)),
    "heads": (lambda p, x: jnp.einsum("td,dhk->hkt", x, p["w"]) + p["b"][..., None], (24, 2, 3), (2, 3), (2,)),
    "one for all heads": (lambda p, x: jnp.einsum("td,dhk->thk", x, p["w"]) + p["b"], (24, 2, 3), (3,), (0, 1)),
    "joined heads": (lambda p, x: jnp.einsum("td,dhk->thk", x, p["w"]).reshape(-1, 6) + p["b"], (24, 2, 3), (6,), (0,)),
    "split columns": (lambda p, x: (x @ p["w"]).reshape(-1, 2, 3) + p["b"].T, (24, 6), (3, 2), (0,)),
    "experts": (
        lambda p, x: jnp.einsum("etk,ekn->etn", x.reshape(2, -1, 24), p["w"]) + p["b"], (2, 24, 3), (2, 1, 3), (1,)
    ),
    "one number": (lambda p, x: x @ p["w"] + p["b"], (24, 3), (), (0, 1)),
    "after a residual": (lambda p, x: x[:, :3] + x @ p["w"] + p["b"], (24, 3), (3,), (0,)),
    "taken off a residual": (
        lambda p, x: jax.jit(lambda x, w: x[:, :3] - (x @ w) + 1)(x, p["w"]) - p["b"], (24, 3), (3,), (0,)
    ),
    "calls": (
        lambda p, x: jax.jit(lambda x, w: x @ w)(x, p["w"]) + jax.jit(lambda b: b[None])(p["b"]), (24, 3), (3,), (0,)
    ),
    "patches": (conv, (2, 2, 2, 3), (3,), (0, 1, 2)),
}  # fmt: skip


def check_the_mean_error_vanishes(name: str) -> None:
    fun, shape, bias, axes = PLACES[name]
    params, x = (
        {"w": normal(*shape), "b": normal(*bias, seed=1)},
        normal(10, 24) if name == "experts" else normal(5, 24),
    )
    x = x + jnp.linspace(-1, 2, 24)
    packed, report = jc.quantize_fn(fun, RULE).pack(params, batches=[x], steps=STEPS, return_report=True)
    low = jc.quantize_fn(fun, RULE)
    plain, error = (np.asarray(fun(params, x) - low(p, x), np.float64) for p in (params, packed))
    assert np.abs(plain.mean(axes)).max() > 0.05 and np.abs(error.mean(axes)).max() < 1e-5
    (row,) = report.weights
    assert row.bias == "b" and packed["b"].shape == bias
    np.testing.assert_allclose(row.after - row.before, 10 * np.log10((plain**2).sum() / (error**2).sum()), atol=1e-3)


@further
@some_of(PLACES, 4)
def the_mean_error_vanishes(names: list[str]) -> None:
    for name in names:
        with case(name):
            check_the_mean_error_vanishes(name)


def test_layer_after_layer_all_means_are_those_of_full_precision() -> None:
    def network(p: Any, x: Any) -> Any:
        seen = []
        for layer in p:
            seen.append(x @ layer["w"] + layer["b"])
            x = jax.nn.relu(seen[-1])
        return jnp.stack(seen)

    params = [{"w": normal(8, 8, seed=i), "b": normal(8, seed=9)} for i in range(3)]
    x, rules = normal(50, 8) + 1, [jc.Rule(weight="int3(group=4)", activation="int8(group=all)")]
    packed, report = jc.quantize_fn(network, rules).pack(
        params, batches=[x[:20], x[20:]], steps=[jc.ptq.sequential(), *STEPS], return_report=True
    )
    y, low = network(params, x), jc.quantize_fn(network, rules)(packed, x)
    np.testing.assert_allclose(low.mean(1), y.mean(1), atol=2e-5)
    assert report.passes == 3 and [row.bias for row in report.weights] == ["0/b", "1/b", "2/b"]


@pytest.mark.parametrize("bias, bound", [("bfloat16", 0.02), pytest.param(None, 2e-5, marks=pytest.mark.slow)])
def test_turns_of_a_loop_and_rounded_biases(bias: str | None, bound: float) -> None:
    def layers(p: Any, x: Any) -> Any:
        def turn(h: Any, own: Any) -> tuple[Any, Any]:
            y = h @ own["w"] + own["b"]
            return jnp.tanh(y), y

        return lax.scan(turn, x, p)[1]

    params, x = {"w": normal(3, 8, 8), "b": normal(3, 8, seed=1)}, normal(50, 8) + 1
    rule = jc.Rule(weight="int3(group=4)", bias=bias)
    packed = jc.quantize_fn(layers, rule).pack(params, batches=[x], steps=[jc.ptq.sequential(), jc.ptq.gptq(), *STEPS])
    y, low = layers(params, x), jc.quantize_fn(layers, rule)(packed, x)
    assert np.abs(low.mean(1) - y.mean(1)).max() < bound
    assert bias is None or str(packed["b"].spec) == bias


@further.first
def a_bias_takes_the_mean_errors_of_all_products_of_its_sum() -> None:
    def cell(p: Any, x: Any) -> Any:
        return x - x[:, :4] @ p["u"] + x @ p["w"] - p["b"]

    params, x = {"w": normal(8, 8), "u": normal(4, 8, seed=1), "b": normal(8, seed=2)}, normal(50, 8, seed=3) + 1
    packed, report = jc.quantize_fn(cell, RULE).pack(params, batches=[x], steps=STEPS, return_report=True)
    low = jc.quantize_fn(cell, RULE)
    plain, error = (np.asarray(cell(params, x) - low(p, x), np.float64) for p in ({**packed, "b": params["b"]}, packed))
    assert np.abs(plain.mean(0)).max() > 0.05 and np.abs(error.mean(0)).max() < 1e-5
    assert [row.bias for row in report.weights] == ["b", "b"]


WITHOUT: dict[str, tuple[Any, str]] = {
    "none": (lambda p, x: x @ p["w"], "no bias is added to its product"),
    "scaled before": (lambda p, x: 2 * (x @ p["w"]) + p["b"], "no bias is added to its product"),
    "two": (lambda p, x: (x @ p["w"] + p["b"], x @ p["w"] + p["b"]), "several products take the weight"),
    "shared": (lambda p, x: (x @ p["w"] + p["b"]) * p["b"], "its bias 'b' is used elsewhere, too"),
    "computed": (lambda p, x: x @ p["w"] + jnp.exp(p["b"]), "its bias 'b' is computed with before it is added"),
    "rows": (lambda p, x: x @ p["w"] + p["b"][:, None], "its bias 'b' has an axis that the weight has not"),
    "loop": (
        lambda p, x: lax.fori_loop(0, 2, lambda i, h: h @ p["w"] + p["b"], x),
        "",  # a weight and a bias that all turns share
    ),
    "residual used": (lambda p, x: (lambda h: (h + p["b"]) * h)(x + x @ p["w"]), "no bias is added to its product"),
    "residual returned": (lambda p, x: (lambda h: (h + p["b"], h))(x + x @ p["w"]), "no bias is added to its product"),
    "twice in a sum": (lambda p, x: (lambda y: y + y + p["b"])(x @ p["w"]), "no bias is added to its product"),
    "stacked": (
        lambda p, x: lax.scan(lambda h, b: (h @ p["w"] + b, None), x, jnp.stack([p["b"]] * 2))[0],
        "its bias 'b' is not that of each layer of the stack alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "names", [["shared"], pytest.param([name for name in WITHOUT if name != "shared"], marks=pytest.mark.slow)], ids=len
)
def test_the_report_says_why_there_is_no_bias(names: list[str]) -> None:
    params, x = {"w": normal(8, 8), "b": normal(8, seed=1)}, normal(8, 8)
    for name in names:
        fun, reason = WITHOUT[name]
        packed, report = jc.quantize_fn(fun, RULE).pack(params, batches=[x], steps=STEPS, return_report=True)
        row = report.weights[0]
        assert row.note == (reason and f"correct_biases: {reason}") and (row.bias == "") == bool(reason), name
        assert bool((packed["b"] == params["b"]).all()) == bool(reason), name
        assert row.note in str(report), name


test_further = further.test()
