"""Adapters of low rank on Linen: first output, gradients, initial values, merging, files."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from further import Further
from layer_references import checked, drawn, each, products_of_size

import jchop as jc
from jchop import Rule
from jchop.nn import LoraRule
from jchop.nn.linen import add_lora, load_lora, merge_lora, save_lora, split_lora

further = Further()

DOUBLE = "nf4(scale=uint8(group=256,zero_point=float))"
X = np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32)
KEY = jax.random.key(1)
SIZES = {128 * 128}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(128, name="up")(x))
        return nn.LayerNorm(name="norm")(nn.Dense(128, use_bias=False, name="down")(x))


@pytest.fixture(scope="module")
def plain() -> Any:
    return drawn(jax.eval_shape(Net().init, jax.random.key(0), X))


@pytest.fixture(scope="module")
def low() -> Any:
    return jc.nn.quantize(Net(), [Rule("norm"), Rule(weight=DOUBLE)])


@pytest.fixture(scope="module")
def packed(plain: Any, low: Any) -> Any:
    return jax.jit(low.pack)(plain, X)


def noised(variables: Any) -> Any:
    """Adapters of small random numbers."""
    keys = iter(jax.random.split(jax.random.key(2), 9))
    lora = jax.tree.map(lambda v: 0.1 * jax.random.normal(next(keys), v.shape), variables["lora"])
    return {**variables, "lora": lora}


def the_sum_is_that_of_the_definition(plain: Any) -> None:
    adapted, variables = add_lora(Net(), plain, LoraRule("{up,down}", rank=3, alpha=6), X, key=KEY)
    up, down = (np.asarray(variables["lora"][name]["lora_a"]) for name in ("up", "down"))
    assert up.shape == down.shape and (up != down).any()  # each layer has draws of its own
    variables = noised(variables)
    p, lora = (jax.tree.map(lambda v: np.asarray(v, np.float64), variables[name]) for name in ("params", "lora"))
    weights = {name: p[name]["kernel"] + 2 * lora[name]["lora_a"] @ lora[name]["lora_b"] for name in ("up", "down")}
    y = np.maximum(X @ weights["up"] + p["up"]["bias"], 0) @ weights["down"]
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
    wanted = y * p["norm"]["scale"] + p["norm"]["bias"]
    np.testing.assert_allclose(adapted.apply(variables, X), wanted, rtol=1e-3, atol=1e-4)
    module, merged = merge_lora(adapted, variables, X)
    assert module is adapted.module and "lora" not in merged
    for name, weight in weights.items():  # one rounding of a sum of float32 numbers
        np.testing.assert_allclose(merged["params"][name]["kernel"], weight, rtol=0, atol=2**-22 * abs(weight).max())


def test_merged_layers_leave_no_rule_for_the_norms_alone(plain: Any) -> None:
    """The rule was for all layers, and left the norm; when its other layers are merged, it still does."""
    low = jc.nn.quantize(Net(), Rule(weight="int4(group=32)", activation="e4m3", output="e4m3"))
    adapted, variables = add_lora(low, low.pack(plain, X), LoraRule("{up,down}", rank=2), X, key=KEY)
    module, _ = merge_lora(adapted, variables, X)
    assert type(module) is type(low)
    assert [str(rule) for rule in module.rules][1:] == ["Rule('*', output=float8_e4m3)"]


def dropout_in_expectation(plain: Any) -> None:
    adapted, variables = add_lora(Net(), plain, LoraRule("up", rank=4, dropout=0.5), X, key=KEY)
    variables = noised(variables)
    up = lambda rngs: adapted.apply(variables, X, rngs=rngs, capture_intermediates=True)[1]  # noqa: E731
    of = lambda found: found["intermediates"]["up"]["__call__"][0]  # noqa: E731
    still = of(up(None))
    many = jax.jit(jax.vmap(lambda key: of(up({"dropout": key}))))(jax.random.split(KEY, 1000))
    spread = many.std(0) / np.sqrt(1000)
    assert bool((spread > 0).all()) and bool((abs(many.mean(0) - still) < 5 * spread).all())


def first_output_and_gradients(low: Any, packed: Any) -> None:
    rules = [LoraRule("up", rank=4, alpha=8), LoraRule("{up,down}", rank=2)]
    adapted, variables = add_lora(low, packed, rules, X, key=KEY)
    np.testing.assert_array_equal(adapted.apply(variables, X), low.apply(packed, X))
    shapes = jax.tree.map(jnp.shape, variables["lora"])
    assert shapes == {
        "up": {"lora_a": (128, 4), "lora_b": (4, 128)}, "down": {"lora_a": (128, 2), "lora_b": (2, 128)}
    }  # fmt: skip

    def loss(lora: Any) -> Any:
        return (adapted.apply({**packed, "lora": lora}, X) ** 2).mean()

    gradient = jax.jit(jax.grad(loss))(variables["lora"])
    assert jax.tree.map(jnp.shape, gradient) == shapes
    assert bool(gradient["up"]["lora_b"].any()) and not bool(gradient["up"]["lora_a"].any())  # since B is zero
    assert products_of_size(jax.make_jaxpr(jax.grad(loss))(variables["lora"]).jaxpr, SIZES) == 0
    whole = jax.grad(lambda kernel: ((X @ kernel) ** 2).mean())
    assert products_of_size(jax.make_jaxpr(whole)(jnp.ones((128, 128))).jaxpr, SIZES) == 1  # as it would be


def merge_split_and_files(low: Any, packed: Any, tmp_path: Path) -> None:
    adapted, variables = add_lora(low, packed, LoraRule("up", rank=3, alpha=6), X, key=KEY)
    variables = noised(variables)
    y = adapted.apply(variables, X)
    module, merged = merge_lora(adapted, variables, X)
    assert isinstance(merged["params"]["down"]["kernel"], jc.QArray)
    assert isinstance(merged["params"]["up"]["kernel"], jax.Array)
    np.testing.assert_allclose(module.apply(merged, X), y, rtol=1e-3, atol=1e-4)  # no rule rounds the sum
    again, repacked = merge_lora(adapted, variables, X, requantize=True)
    kernel = repacked["params"]["up"]["kernel"]
    wanted = jc.quantize(merged["params"]["up"]["kernel"].T, DOUBLE)
    assert again is low and kernel.spec == packed["params"]["up"]["kernel"].spec
    np.testing.assert_array_equal(jc.dequantize(kernel), jc.dequantize(wanted).T)

    base, rest, adapters = split_lora(adapted, variables)
    np.testing.assert_array_equal(base.apply(rest, X), low.apply(packed, X))
    assert list(adapters) == ["up"] and adapters["up"]["rule"].rank == 3
    save_lora(tmp_path, adapted, variables)
    loaded, found = load_lora(tmp_path, low, packed)
    np.testing.assert_array_equal(loaded.apply(found, X), y)
    # A file of Linen is one of NNX, too: names are paths in both.
    twin = nnx.Dict(up=nnx.Linear(128, 128, rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(jc.nn.load_lora(tmp_path, twin)["up"].lora_a[...], adapters["up"]["lora_a"])


def all_merged_is_a_plain_module(low: Any, plain: Any, packed: Any) -> None:
    adapted, variables = add_lora(low, plain, LoraRule("up", rank=2), X, key=KEY)
    assert merge_lora(adapted, variables, X)[0] is low  # a weight that is not packed is still rounded in each call
    adapted, variables = add_lora(low, packed, LoraRule("{up,down}", rank=2), X, key=KEY)
    module, merged = merge_lora(adapted, variables, X)
    assert type(module) is Net
    np.testing.assert_allclose(module.apply(merged, X), low.apply(packed, X), rtol=1e-4, atol=1e-5)


@each("init", ["loftq", "pissa"])
def best_approximations(low: Any, plain: Any, packed: Any, init: str) -> None:
    rule = LoraRule("up", rank=5, alpha=2.5, init=init)
    _, variables = add_lora(low, packed, rule, X, key=KEY, original=plain)
    w = np.asarray(plain["params"]["up"]["kernel"], np.float64)
    a, b = (np.asarray(variables["lora"]["up"][name], np.float64) for name in ("lora_a", "lora_b"))
    kernel = variables["params"]["up"]["kernel"]
    held = np.asarray(jc.dequantize(kernel), np.float64)
    error = w - held if init == "loftq" else w
    tail = np.linalg.svd(error, compute_uv=False)[5:]
    assert np.linalg.norm(error - 0.5 * a @ b) == pytest.approx(np.linalg.norm(tail), rel=1e-5)
    rest = jnp.asarray(w - 0.5 * a @ b, jnp.float32) if init == "pissa" else plain["params"]["up"]["kernel"]
    np.testing.assert_array_equal(held, jc.dequantize(jc.quantize(rest.T, DOUBLE)).T)


@each("weight", ["nf4", None])
def the_projections_of_attention(weight: str | None, tmp_path: Path) -> None:
    net: Any = nn.MultiHeadDotProductAttention(4, qkv_features=64)
    x = np.random.default_rng(1).standard_normal((2, 5, 32)).astype(np.float32)
    plain: Any = drawn(jax.eval_shape(net.init, KEY, x))
    low = net if weight is None else jc.nn.quantize(net, Rule("{query,out}", weight=weight))
    base = plain if weight is None else low.pack(plain, x)
    adapted, variables = add_lora(low, base, LoraRule("{query,out}", rank=3, alpha=6), x, key=KEY)
    np.testing.assert_array_equal(adapted.apply(variables, x), low.apply(base, x))
    variables = noised(variables)
    shapes = jax.tree.map(jnp.shape, variables["lora"])
    assert shapes == {
        "query": {"lora_a": (32, 3), "lora_b": (3, 64)}, "out": {"lora_a": (64, 3), "lora_b": (3, 32)}
    }  # fmt: skip
    wanted = jax.tree.map(lambda v: v, plain)
    for path, adapter in variables["lora"].items():
        kernel = base["params"][path]["kernel"]
        held = kernel if weight is None else jc.dequantize(kernel)
        a, b = (np.asarray(adapter[name], np.float64) for name in ("lora_a", "lora_b"))
        wanted["params"][path]["kernel"] = jnp.asarray(held + 2 * (a @ b).reshape(held.shape), jnp.float32)
    y = adapted.apply(variables, x)
    np.testing.assert_allclose(y, net.apply(wanted, x), rtol=1e-4, atol=1e-5)
    module, merged = merge_lora(adapted, variables, x)
    np.testing.assert_allclose(module.apply(merged, x), y, rtol=1e-4, atol=1e-5)
    again = merge_lora(adapted, variables, x, requantize=True)[1]["params"]["out"]["kernel"]
    assert again.shape == (4, 16, 32)
    save_lora(tmp_path, adapted, variables)
    loaded, found = load_lora(tmp_path, low, base)
    np.testing.assert_array_equal(loaded.apply(found, x), y)
    _, whole = add_lora(low, base, LoraRule("out", rank=32, init="pissa"), x, key=KEY, original=plain)
    assert whole["params"]["out"]["kernel"].shape == (4, 16, 32)


@pytest.mark.parametrize(
    "check",
    [
        the_sum_is_that_of_the_definition,
        pytest.param(the_projections_of_attention, marks=pytest.mark.slow),
        pytest.param(best_approximations, marks=pytest.mark.slow),
        pytest.param(all_merged_is_a_plain_module, marks=pytest.mark.slow),
        pytest.param(merge_split_and_files, marks=pytest.mark.slow),
        pytest.param(first_output_and_gradients, marks=pytest.mark.slow),
        pytest.param(dropout_in_expectation, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_numbers(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


def test_adapters_of_a_file_are_those_of_their_layer(tmp_path: Path) -> None:
    net: Any = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
    x = np.ones((1, 3), np.float32)
    plain = drawn(jax.eval_shape(net.init, KEY, x))
    adapted, variables = add_lora(net, plain, LoraRule("layers_2", rank=2, alpha=6), x, key=KEY)
    variables = noised(variables)
    save_lora(tmp_path, adapted, variables)
    loaded, found = load_lora(tmp_path, net, plain)
    assert loaded.rules == adapted.rules
    jax.tree.map(np.testing.assert_array_equal, found, variables)


@further.first
def axes_in_another_order_are_summed_as_flax_sums_them() -> None:
    net: Any = nn.DenseGeneral(8, axis=(2, 0))
    x = np.random.default_rng(1).standard_normal((3, 4, 3)).astype(np.float32)
    adapted, variables = add_lora(net, drawn(jax.eval_shape(net.init, KEY, x)), LoraRule("*", rank=2), x, key=KEY)
    variables = noised(variables)
    module, merged = merge_lora(adapted, variables, x)
    np.testing.assert_allclose(adapted.apply(variables, x), module.apply(merged, x), rtol=1e-4, atol=1e-5)


@further
def rules_that_say_nothing_of_merged_layers_are_dropped() -> None:
    """The rule matches the attention itself, too, which has no weight of its own."""
    net: Any = nn.MultiHeadDotProductAttention(4)
    x = np.random.default_rng(1).standard_normal((2, 5, 16)).astype(np.float32)
    low = jc.nn.quantize(net, Rule(weight="int8(channel=-1)"))
    packed = jax.jit(low.pack)(drawn(jax.eval_shape(net.init, KEY, x)), x)
    adapted, variables = add_lora(low, packed, LoraRule("*", rank=2), x, key=KEY)
    variables = noised(variables)
    module, merged = merge_lora(adapted, variables, x)
    np.testing.assert_allclose(module.apply(merged, x), adapted.apply(variables, x), rtol=1e-4, atol=1e-5)


def test_errors(low: Any, plain: Any, packed: Any) -> None:
    add = lambda *rules, **more: add_lora(low, packed, rules, X, **{"key": KEY, **more})  # noqa: E731
    with pytest.raises(ValueError, match="matches no linear layer"):
        add(LoraRule("side", rank=2))
    with pytest.raises(ValueError, match="needs original="):
        add(LoraRule("up", rank=2, init="loftq"))
    with pytest.raises(ValueError, match="rank is above the sizes"):
        add(LoraRule("up", rank=129, init="loftq"), original=plain)
    with pytest.raises(TypeError, match="key=0 must be a typed key"):
        add(LoraRule("up", rank=2), key=0)
    with pytest.raises(TypeError, match="module=3 must be a module of Flax Linen"):
        add_lora(3, packed, LoraRule("up", rank=2), X, key=KEY)  # type: ignore[arg-type]
    conv = nn.Conv(4, (2, 2))
    image = jnp.ones((1, 4, 4, 3))
    with pytest.raises(ValueError, match=r"'kernel'.*conv_general_dilated .* is no product of matrices"):
        add_lora(conv, drawn(jax.eval_shape(conv.init, KEY, image)), LoraRule("*", rank=2), image, key=KEY)
    adapted, variables = add(LoraRule("up", rank=2))
    with pytest.raises(ValueError, match="variables have adapters already"):
        add_lora(low, variables, LoraRule("up", rank=2), X, key=KEY)
    with pytest.raises(ValueError, match=r"differ in 'up/lora_a'"):
        adapted.apply(packed, X)


test_further = further.test()
