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
from jchop.nn import LoraRule, add_lora, load_lora, lora_mask, merge_lora, save_lora, split_lora

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


def unrounded(module: Any) -> Any:
    """A module that runs adapters and rounds nothing."""
    return jc.nn.quantize(module, Rule())


PLAIN = unrounded(Net())


@pytest.fixture(scope="module")
def plain() -> Any:
    return drawn(jax.eval_shape(Net().init, jax.random.key(0), X))


@pytest.fixture(scope="module")
def low() -> Any:
    return jc.nn.quantize(Net(), [Rule("norm"), Rule(weight=DOUBLE)])


@pytest.fixture(scope="module")
def packed(plain: Any, low: Any) -> Any:
    return jax.jit(low.pack)(plain, X)


def shapes_by_layer(lora: Any) -> Any:
    return {name: [own["kernel"].lora_a.shape, own["kernel"].lora_b.shape] for name, own in lora.items()}


def noised(variables: Any) -> Any:
    """Adapters of small random numbers."""
    keys = iter(jax.random.split(jax.random.key(2), 9))
    lora = jax.tree.map(lambda v: 0.1 * jax.random.normal(next(keys), v.shape), variables["lora"])
    return {**variables, "lora": lora}


def the_sum_is_that_of_the_definition(plain: Any) -> None:
    variables = add_lora(plain, LoraRule("{up,down}", rank=3, alpha=6), fun=PLAIN, inputs=(X,), key=KEY)
    up, down = (np.asarray(variables["lora"][name]["kernel"].lora_a) for name in ("up", "down"))
    assert up.shape == down.shape and (up != down).any()  # each layer has draws of its own
    variables = noised(variables)
    p, lora = (jax.tree.map(lambda v: np.asarray(v, np.float64), variables[name]) for name in ("params", "lora"))
    adapters = {name: lora[name]["kernel"] for name in ("up", "down")}
    weights = {name: p[name]["kernel"] + 2 * own.lora_a @ own.lora_b for name, own in adapters.items()}
    y = np.maximum(X @ weights["up"] + p["up"]["bias"], 0) @ weights["down"]
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
    wanted = y * p["norm"]["scale"] + p["norm"]["bias"]
    np.testing.assert_allclose(PLAIN.apply(variables, X), wanted, rtol=1e-3, atol=1e-4)
    merged = merge_lora(variables)
    assert "lora" not in merged
    for name, weight in weights.items():  # one rounding of a sum of float32 numbers
        np.testing.assert_allclose(merged["params"][name]["kernel"], weight, rtol=0, atol=2**-22 * abs(weight).max())


def dropout_in_expectation(plain: Any) -> None:
    variables = add_lora(plain, LoraRule("up", rank=4, dropout=0.5), fun=PLAIN, inputs=(X,), key=KEY)
    variables = noised(variables)
    up = lambda rngs: PLAIN.apply(variables, X, rngs=rngs, capture_intermediates=True)[1]  # noqa: E731
    of = lambda found: found["intermediates"]["up"]["__call__"][0]  # noqa: E731
    still = of(up(None))
    many = jax.jit(jax.vmap(lambda key: of(up({"dropout": key}))))(jax.random.split(KEY, 1000))
    spread = many.std(0) / np.sqrt(1000)
    assert bool((spread > 0).all()) and bool((abs(many.mean(0) - still) < 5 * spread).all())


def first_output_and_gradients(low: Any, packed: Any) -> None:
    rules = [LoraRule("up", rank=4, alpha=8), LoraRule("{up,down}", rank=2)]
    variables = add_lora(packed, rules, fun=low, inputs=(X,), key=KEY)
    np.testing.assert_array_equal(low.apply(variables, X), low.apply(packed, X))
    shapes = shapes_by_layer(variables["lora"])
    assert shapes == {"up": [(128, 4), (4, 128)], "down": [(128, 2), (2, 128)]}

    def loss(lora: Any) -> Any:
        return (low.apply({**packed, "lora": lora}, X) ** 2).mean()

    gradient = jax.jit(jax.grad(loss))(variables["lora"])
    assert shapes_by_layer(gradient) == shapes
    own = gradient["up"]["kernel"]
    assert bool(own.lora_b.any()) and not bool(own.lora_a.any())  # since B is zero
    masked = [
        leaf for leaf, owned in zip(*map(jax.tree.leaves, (variables, lora_mask(variables))), strict=True) if owned
    ]
    jax.tree.map(np.testing.assert_array_equal, masked, jax.tree.leaves(variables["lora"]))
    assert products_of_size(jax.make_jaxpr(jax.grad(loss))(variables["lora"]).jaxpr, SIZES) == 0
    whole = jax.grad(lambda kernel: ((X @ kernel) ** 2).mean())
    assert products_of_size(jax.make_jaxpr(whole)(jnp.ones((128, 128))).jaxpr, SIZES) == 1  # as it would be


def merge_split_and_files(low: Any, packed: Any, tmp_path: Path) -> None:
    variables = add_lora(packed, LoraRule("up", rank=3, alpha=6), fun=low, inputs=(X,), key=KEY)
    variables = noised(variables)
    y = low.apply(variables, X)
    merged = merge_lora(variables)
    assert isinstance(merged["params"]["down"]["kernel"], jc.QArray)
    assert isinstance(merged["params"]["up"]["kernel"], jax.Array)
    without = jc.nn.quantize(Net(), {"norm": None, "up": None, "*": DOUBLE})  # no rule rounds the sum
    np.testing.assert_allclose(without.apply(merged, X), y, rtol=1e-3, atol=1e-4)
    again = merge_lora(variables, requantize=True)
    kernel = again["params"]["up"]["kernel"]
    wanted = jc.quantize(merged["params"]["up"]["kernel"].T, DOUBLE)
    assert kernel.spec == packed["params"]["up"]["kernel"].spec
    np.testing.assert_array_equal(jc.dequantize(kernel), jc.dequantize(wanted).T)
    np.testing.assert_array_equal(low.apply(again, X), low.apply(merged, X))

    rest, adapters = split_lora(variables)
    jax.tree.map(np.testing.assert_array_equal, rest, packed)
    assert list(adapters) == ["up"] and adapters["up"]["rule"].rank == 3
    save_lora(tmp_path, variables)
    np.testing.assert_array_equal(low.apply(load_lora(tmp_path, packed, fun=low, inputs=(X,)), X), y)
    # A file of Linen is one of NNX, too: names are paths in both.
    twin = nnx.Dict(up=nnx.Linear(128, 128, rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(jc.nn.load_lora(tmp_path, twin)["up"].lora_a[...], adapters["up"]["lora_a"])


def all_merged_runs_in_the_module_itself(low: Any, plain: Any, packed: Any) -> None:
    variables = noised(add_lora(packed, LoraRule("{up,down}", rank=2), fun=low, inputs=(X,), key=KEY))
    np.testing.assert_allclose(Net().apply(merge_lora(variables), X), low.apply(variables, X), rtol=1e-3, atol=1e-4)


@each("init", ["loftq", "pissa"])
def best_approximations(low: Any, plain: Any, packed: Any, init: str) -> None:
    rule = LoraRule("up", rank=5, alpha=2.5, init=init)
    variables = add_lora(packed, rule, fun=low, inputs=(X,), key=KEY, original=plain)
    w = np.asarray(plain["params"]["up"]["kernel"], np.float64)
    a, b = (np.asarray(getattr(variables["lora"]["up"]["kernel"], name), np.float64) for name in ("lora_a", "lora_b"))
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
    low = jc.nn.quantize(net, Rule("{query,out}", weight=weight))
    base = plain if weight is None else low.pack(plain, x)
    variables = add_lora(base, LoraRule("{query,out}", rank=3, alpha=6), fun=low, inputs=(x,), key=KEY)
    np.testing.assert_array_equal(low.apply(variables, x), low.apply(base, x))
    variables = noised(variables)
    assert shapes_by_layer(variables["lora"]) == {"query": [(32, 3), (3, 64)], "out": [(64, 3), (3, 32)]}
    wanted = jax.tree.map(lambda v: v, plain)
    for path, adapter in variables["lora"].items():
        kernel = base["params"][path]["kernel"]
        held = kernel if weight is None else jc.dequantize(kernel)
        a, b = (np.asarray(v, np.float64) for v in (adapter["kernel"].lora_a, adapter["kernel"].lora_b))
        wanted["params"][path]["kernel"] = jnp.asarray(held + 2 * (a @ b).reshape(held.shape), jnp.float32)
    y = low.apply(variables, x)
    np.testing.assert_allclose(y, net.apply(wanted, x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(net.apply(merge_lora(variables), x), y, rtol=1e-4, atol=1e-5)
    again = merge_lora(variables, requantize=True)["params"]["out"]["kernel"]
    assert again.shape == (4, 16, 32)
    save_lora(tmp_path, variables)
    np.testing.assert_array_equal(low.apply(load_lora(tmp_path, base, fun=low, inputs=(x,)), x), y)
    whole = add_lora(base, LoraRule("out", rank=32, init="pissa"), fun=low, inputs=(x,), original=plain, key=KEY)
    assert whole["params"]["out"]["kernel"].shape == (4, 16, 32)


@pytest.mark.parametrize(
    "check",
    [
        the_sum_is_that_of_the_definition,
        pytest.param(the_projections_of_attention, marks=pytest.mark.slow),
        pytest.param(best_approximations, marks=pytest.mark.slow),
        pytest.param(all_merged_runs_in_the_module_itself, marks=pytest.mark.slow),
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
    low, x = unrounded(net), np.ones((1, 3), np.float32)
    plain = drawn(jax.eval_shape(net.init, KEY, x))
    variables = noised(add_lora(plain, LoraRule("layers_2", rank=2, alpha=6), fun=low, inputs=(x,), key=KEY))
    save_lora(tmp_path, variables)
    found = load_lora(tmp_path, plain, fun=low, inputs=(x,))
    jax.tree.map(np.testing.assert_array_equal, found, variables)
    assert found["lora"]["layers_2"]["kernel"].rule.factor == 3


def test_boxes_methods_and_roots(tmp_path: Path) -> None:
    """A boxed kernel stays in its box, another method is traced by its name, and the module may be the layer."""

    class Boxed(nn.Module):
        @nn.compact
        def other(self, x: Any) -> Any:
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
            return nn.Dense(4, kernel_init=init, use_bias=False)(x)

    low, x = unrounded(Boxed()), jnp.ones((2, 8))
    plain = Boxed().init(KEY, x, method="other")
    variables = noised(add_lora(plain, {"*": {"rank": 2}}, fun=low, inputs={"other": (x,)}, key=KEY))
    boxed, own = variables["params"]["Dense_0"]["kernel"], variables["lora"]["Dense_0"]["kernel"]
    assert boxed.names == ("in", "out")
    wanted = x @ (boxed.value + own.lora_a @ own.lora_b)
    np.testing.assert_allclose(low.apply(variables, x, method="other"), wanted, rtol=1e-5)
    merged = merge_lora(variables)
    np.testing.assert_allclose(Boxed().apply(merged, x, method="other"), wanted, rtol=1e-5)
    dense: Any = nn.Dense(4)
    root = add_lora(dense.init(KEY, x), LoraRule(rank=2), fun=unrounded(dense), inputs=(x,), key=KEY)
    assert [*split_lora(root)[1]] == [""]
    save_lora(tmp_path, root)
    assert "base_model.model..lora_A.weight" in jc.load(tmp_path / "adapter_model.safetensors")


class Step(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return x + nn.Dense(8, use_bias=False)(x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        scanned = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scanned()(x, None)[0]


def test_a_stack_is_calibrated_with_its_adapters(tmp_path: Path) -> None:
    """Each layer of a scan has its own adapter; calibration changes the scales alone."""
    rule = Rule(weight="int4(group=4)", activation="int8", scale_from=jc.MovingAverage())
    low, x = jc.nn.quantize(Stack(), rule), jnp.linspace(-1, 1, 16).reshape(2, 8)
    plain = low.init(KEY, x)
    variables = noised(add_lora(plain, {"*": {"rank": 2}}, fun=low, inputs=(x,), key=KEY))
    own = variables["lora"]["ScanStep_0"]["Dense_0"]["kernel"]
    assert (own.lora_a.shape, own.lora_b.shape) == ((3, 8, 2), (3, 2, 8))
    calibrated = low.calibrate(variables, [x])
    for name in ("params", "lora"):
        assert jax.tree.structure(calibrated[name]) == jax.tree.structure(variables[name])
    kernel = merge_lora(calibrated)["params"]["ScanStep_0"]["Dense_0"]["kernel"]
    wanted = plain["params"]["ScanStep_0"]["Dense_0"]["kernel"] + own.lora_a @ own.lora_b
    np.testing.assert_allclose(kernel, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="is one of a stack"):
        save_lora(tmp_path, calibrated)


def test_adapters_have_dropout_with_its_stream_alone() -> None:
    """A stochastic rule has a key in every call; without the stream of dropout adapters have none."""
    low, x = jc.nn.quantize(nn.Dense(4), Rule(weight="e4m3:stochastic")), jnp.ones((2, 8))
    plain = nn.Dense(4).init(KEY, x)
    variables = noised(add_lora(plain, LoraRule(rank=2, dropout=0.5), fun=low, inputs=(x,), key=KEY))
    without = noised(add_lora(plain, LoraRule(rank=2), fun=low, inputs=(x,), key=KEY))
    keys = {"rounding": KEY}
    np.testing.assert_array_equal(low.apply(variables, x, rngs=keys), low.apply(without, x, rngs=keys))
    dropped = low.apply(variables, x, rngs={**keys, "dropout": KEY})
    assert (dropped != low.apply(without, x, rngs=keys)).any()


@further.first
def axes_in_another_order_are_summed_as_flax_sums_them() -> None:
    net: Any = nn.DenseGeneral(8, axis=(2, 0))
    x = np.random.default_rng(1).standard_normal((3, 4, 3)).astype(np.float32)
    plain, low = drawn(jax.eval_shape(net.init, KEY, x)), unrounded(net)
    variables = noised(add_lora(plain, LoraRule("*", rank=2), fun=low, inputs=(x,), key=KEY))
    np.testing.assert_allclose(low.apply(variables, x), net.apply(merge_lora(variables), x), rtol=1e-4, atol=1e-5)


def test_errors(low: Any, plain: Any, packed: Any) -> None:
    add = lambda *rules, fun=low, variables=packed, **more: add_lora(  # noqa: E731
        variables, rules, **{"fun": fun, "inputs": (X,), "key": KEY, **more}
    )
    with pytest.raises(ValueError, match="matches no linear layer"):
        add(LoraRule("side", rank=2))
    with pytest.raises(ValueError, match="needs original="):
        add(LoraRule("up", rank=2, init="loftq"))
    with pytest.raises(ValueError, match="rank is above the sizes"):
        add(LoraRule("up", rank=129, init="loftq"), original=plain)
    with pytest.raises(TypeError, match="key=0 must be a typed key"):
        add(LoraRule("up", rank=2), key=0)
    with pytest.raises(TypeError, match=r"fun=Net.* must be .*quantize\(module, jchop.Rule\(\)\)"):
        add(LoraRule("up", rank=2), fun=Net())
    conv = nn.Conv(4, (2, 2))
    image = jnp.ones((1, 4, 4, 3))
    with pytest.raises(ValueError, match=r"'kernel'.*conv_general_dilated .* is no product of matrices"):
        variables = drawn(jax.eval_shape(conv.init, KEY, image))
        add(LoraRule("*", rank=2), fun=unrounded(conv), variables=variables, inputs=(image,))
    variables = add(LoraRule("up", rank=2))
    with pytest.raises(ValueError, match=r"'up/kernel' has an adapter; jchop\.nn\.split_lora or merge_lora"):
        add(LoraRule("up", rank=2), variables=variables)
    with pytest.raises(ValueError, match="'up/kernel' has an adapter, and no parameter"):
        low.apply({**variables, "params": {}}, X)


test_further = further.test()
