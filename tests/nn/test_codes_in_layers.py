"""Layers of Flax under product="codes": the same numbers in training, packed, and as a program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from further import Further
from layer_references import checked, each

import jchop as jc

further = Further()

ROW = "int8(group=all)"
X = jnp.asarray(np.random.default_rng(3).normal(size=(2, 6, 8)), jnp.float32)


def layers(name: str) -> Any:
    rngs = nnx.Rngs(0)
    return {
        "Linear": lambda: nnx.Linear(8, 4, rngs=rngs),
        "LinearGeneral": lambda: nnx.LinearGeneral(8, (2, 3), rngs=rngs),
        "Einsum": lambda: nnx.Einsum("btd,dhk->bthk", (8, 2, 4), (2, 4), rngs=rngs),
        "Conv": lambda: nnx.Conv(8, 4, (3,), strides=2, feature_group_count=2, rngs=rngs),
        "MultiHeadAttention": lambda: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
    }[name]()


RULES: dict[str, dict[str, Any]] = {
    "int8": {"weight": ROW, "activation": ROW},
    "asymmetric": {"weight": "int4(group=4)", "activation": "uint8(group=all,zero_point=integer)"},
    "weights alone": {"weight": "int4(group=8)"},
}


@further
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("weight", ["int8(group=4)", "int4(group=all)"])
def a_square_layer_trains_and_serves_the_same_numbers(weight: str) -> None:
    """Its matrix and the transpose have one shape."""
    layer, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X[..., :8]
    rule = jc.Rule(weight=weight, activation=ROW, product="codes")
    trained, packed = (jc.nn.quantize(layer, rule, mode=mode)(x) for mode in ("qat", "ptq"))  # type: ignore[arg-type]
    np.testing.assert_array_equal(trained, packed)
    np.testing.assert_allclose(trained, jc.nn.quantize(layer, replace(rule, product="float"))(x), rtol=1e-4, atol=1e-5)


def test_the_product_of_a_layer_is_of_integers() -> None:
    """No sum of floats has the operands: the jaxpr of another device has the product of int8."""
    layer = jc.nn.quantize(layers("Linear"), jc.Rule(weight=ROW, activation=ROW, product="codes"), mode="ptq")
    text = str(jax.make_jaxpr(lambda x: layer(x))(X))
    assert "preferred_element_type=int32" in text


def gradients_of_layers_are_of_codes() -> None:
    layer = jc.nn.quantize(layers("Linear"), jc.Rule(weight=ROW, activation=ROW, gradient=ROW, product="codes"))
    x, g = X[0], jax.random.normal(jax.random.key(1), (6, 4))
    w = layer.kernel[...]
    _, back = jax.vjp(lambda x: layer(x), x)
    of = lambda v: jc.quantize(v, ROW)  # noqa: E731
    np.testing.assert_array_equal(back(g)[0], jc.einsum("bo,io->bi", of(g), of(w)))


def calibrated_layers() -> None:
    """Under a range that was found, a code is that of the rounded number."""
    rule: dict[str, Any] = {"weight": ROW, "activation": "uint8(zero_point=integer)"}
    low, floats = (
        jc.nn.calibrate(jc.nn.quantize(layers("Linear"), jc.Rule(**rule, product=p)), [X]) for p in ("codes", "float")
    )
    assert low.dot_general.range is not None
    np.testing.assert_allclose(low(2 * X), floats(2 * X), rtol=1e-4, atol=1e-5)


def modules_of_linen() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.Conv(8, (3,))(x)
            return linen.DenseGeneral((2, 3))(linen.MultiHeadDotProductAttention(2)(x, x))

    low = jc.nn.quantize(Net(), jc.Rule(weight="int4(group=4)", activation=ROW, product="codes"))
    floats = jc.nn.quantize(Net(), jc.Rule(weight="int4(group=4)", activation=ROW))
    variables = low.init(jax.random.key(0), X)
    y = jax.jit(low.apply)(variables, X)
    np.testing.assert_array_equal(jax.jit(low.apply)(low.pack(variables, X), X), y)
    np.testing.assert_allclose(y, jax.jit(floats.apply)(variables, X), rtol=2e-3, atol=2e-4)


def the_operands_of_a_program() -> None:
    def attend(p: Any, x: jax.Array, image: jax.Array) -> Any:
        q, k = x @ p["q"], x @ p["k"]
        return q @ k.T, jax.lax.conv(image, p["c"], (1, 1), "SAME"), x @ p["wide"]

    p = {"q": jnp.ones((8, 8)), "k": jnp.ones((8, 8), jnp.bfloat16), "c": jnp.ones((4, 4, 3, 3)), "wide": jnp.ones(8)}
    rules = [jc.Rule("wide"), jc.Rule("q", weight=ROW), jc.Rule(weight="e4m3fn", activation="e5m2", product="codes")]
    low = jc.quantize_fn(attend, rules)
    args = p, jnp.ones((3, 8)), jnp.ones((1, 4, 8, 8))

    def told(platform: str) -> list[str]:
        return [row.operands for row in low.report(*args, platform=platform).products]

    eight = "float8 x float8 -> float32"
    assert told("h200") == ["float32 x float32", eight, eight, eight, "float32 x float32"]
    assert told("cpu") == ["float32 x float32"] * 5
    assert [row.operands for row in low.report(*args).products] == [""] * 5


@each(
    ("name", "rule"),
    [("Linear", "int8"), ("Conv", "asymmetric"), ("Einsum", "weights alone"), ("MultiHeadAttention", "asymmetric")],
)
def layers_train_and_serve_the_same_numbers(name: str, rule: str) -> None:
    model, given = layers(name), jc.Rule(**RULES[rule], product="codes")
    trained, packed = (jc.nn.quantize(model, given, mode=mode) for mode in ("qat", "ptq"))  # type: ignore[arg-type]
    run = nnx.jit(lambda model, x: model(x))
    y = run(trained, X)
    np.testing.assert_array_equal(run(packed, X), y)
    floats = run(jc.nn.quantize(model, jc.Rule(**RULES[rule])), X)
    np.testing.assert_allclose(y, floats, rtol=2e-4, atol=2e-5)
    if rule == "weights alone":
        np.testing.assert_array_equal(run(jc.nn.quantize(model, given, mode="weight_only"), X), y)
    if name != "MultiHeadAttention":
        served = jc.nn.quantize(model, given, mode="ptq", inputs=(X,))
        np.testing.assert_array_equal(run(served, X), y)


@further.first
@pytest.mark.parametrize("name", ["Linear", "LinearGeneral", "Einsum", "Conv", "MultiHeadAttention"])
def weights_alone_are_multiplied_as_they_are_stored(name: str) -> None:
    """By layers and as a program, where a product of matrices can; else as floats; an explicit product decides."""
    model, run = layers(name), nnx.jit(lambda model, x: model(x))
    for weight in ("int8(group=all)", "int4(group=8)", "uint8(group=8,zero_point=float)"):
        rule = jc.Rule(weight=weight)
        floats, told = run(jc.nn.quantize(model, rule, "ptq"), X), replace(rule, product="float")
        np.testing.assert_array_equal(run(jc.nn.quantize(model, told, "weight_only"), X), floats)
        takes = name not in ("Conv", "MultiHeadAttention") and "float" not in weight
        want = run(jc.nn.quantize(model, replace(rule, product="codes"), "ptq"), X) if takes else floats
        low = run(jc.nn.quantize(model, rule, "weight_only"), X)
        np.testing.assert_allclose(low, floats, rtol=1e-5, atol=1e-5)
        if name != "MultiHeadAttention":  # whose own layers are multiplied by codes
            np.testing.assert_array_equal(low, want)
            np.testing.assert_array_equal(run(jc.nn.quantize(model, rule, "weight_only", inputs=(X,)), X), low)
            np.testing.assert_array_equal(run(jc.nn.quantize(model, replace(rule, product="auto")), X), low)


def weights_alone_in_programs_of_any_form() -> None:
    """Where a weight has no codes, or no blocks along the sum, its product is of floats, and nothing is refused."""
    w, x = jax.random.normal(jax.random.key(0), (32, 32)), jax.random.normal(jax.random.key(1), (4, 32))
    for fun in (lambda w, x: x @ (w * 2), lambda w, x: (x @ w) @ w.T, lambda w, x: w @ x.T):
        low, floats = (jc.quantize_fn(fun, jc.Rule(weight="int4(group=16)", product=p)) for p in ("auto", "float"))
        packed = low.pack(w, x)
        y = jax.jit(low)(packed, x)
        np.testing.assert_array_equal(y, jax.jit(low)(w, x))
        np.testing.assert_allclose(y, jax.jit(floats)(packed, x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "check",
    [
        the_operands_of_a_program,
        pytest.param(layers_train_and_serve_the_same_numbers, marks=pytest.mark.slow),
        pytest.param(gradients_of_layers_are_of_codes, marks=pytest.mark.slow),
        pytest.param(calibrated_layers, marks=pytest.mark.slow),
        pytest.param(modules_of_linen, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_other_products(check: Any, request: Any) -> None:
    """Gradients, fixed scales, Linen; the first of these checks runs by default."""
    checked(check, request)


def test_the_report_says_which_operands_reach_the_units() -> None:
    model = nnx.Sequential(layers("Linear"), layers("Conv"))

    def told(platform: str, **fields: Any) -> list[str]:
        report = jc.nn.report(model, jc.Rule(**{"product": "codes", **fields}), platform=platform)
        assert all(f"multiplies: {row.path}: {row.operands}" in str(report) for row in report.rows)
        return [row.operands for row in report.rows]

    assert told("h200", weight="int4(group=8)", activation=ROW) == ["int8 x int8 -> int32"] * 2
    assert told("cpu", weight=ROW, activation=ROW) == ["int8 x int8 -> int32", "float32 x float32, exact"]
    assert told("h200", weight="nvfp4", activation="mxfp8_e4m3") == ["float8 x float8 -> float32"] * 2
    assert all("no units for float8" in text for text in told("a100", weight="e5m2", activation="e4m3fn"))
    assert told("v6e", weight="int4(group=8)") == ["codes, decoded in a kernel", "float32 x float32"]
    assert told("v6e", weight=ROW, activation="e4m3fn") == ["bfloat16 x bfloat16 -> float32"] * 2
    assert told("v6e", weight=ROW, activation=ROW, product="float") == ["float32 x float32"] * 2
    with pytest.raises(ValueError, match="platform='h100' must be one of 'cpu'"):
        told("h100", weight=ROW)


def test_reports_of_linen_and_of_programs_say_it_too() -> None:
    rule = jc.Rule(weight=ROW, activation=ROW, product="codes")
    low = jc.nn.quantize(linen.Dense(4), rule)
    x = jnp.ones((2, 8))
    variables = jax.eval_shape(low.init, jax.random.key(0), x)
    assert [row.operands for row in low.report(variables, x, platform="h200").products] == ["int8 x int8 -> int32"]
    assert [row.operands for row in low.report(variables, x).products] == [""]
    model = layers("Linear")
    program = jc.nn.report(model, rule, inputs=(x,), platform="v6e")
    assert [row.operands for row in program.products] == ["int8 x int8 -> int32"]
    assert "multiplies" in str(program) and "int8 x int8 -> int32" in str(program)
    for report in (low.report, jc.quantize_fn(low.module.apply, rule).report):
        with pytest.raises(ValueError, match="platform='h100' must be one of 'cpu'"):
            report(variables, x, platform="h100")


@further.first
def layers_without_a_product_refuse() -> None:
    rule = jc.Rule(weight=ROW, activation=ROW, product="codes")
    with pytest.raises(NotImplementedError, match=r"ConvTranspose at .*Flax gives no access to its product"):
        jc.nn.quantize(nnx.ConvTranspose(8, 4, (3,), rngs=nnx.Rngs(0)), rule)
    with pytest.raises(NotImplementedError, match="none from scale_from"):
        jc.nn.quantize(layers("Linear"), jc.Rule(weight=ROW, scale_from=jc.LSQ(), product="codes"))
    module = linen.Einsum((8, 4), "btd,dk->btk")
    low = jc.nn.quantize(module, rule)  # a program has its product
    assert low.report(module.init(jax.random.key(0), X), X).products[0].roundings["product"] == "codes"


test_further = further.test()
