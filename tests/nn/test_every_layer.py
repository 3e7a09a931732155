"""Every layer, NNX and Linen, with weights of every family, under the transformations of JAX.

What it computes is compared with a reference bit for bit, both under the same transformations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.traverse_util import flatten_dict
from further import Further
from jax import lax
from layer_references import LAYERS, Formats, Layer, checked

import jchop as jc

further = Further()

FAMILIES = {
    "float": Formats("e4m3", "e5m2", "e4m2", "e5m4"),
    "fixed": Formats("fixed2.4", "fixed3.3"),
    "int8": Formats("int8(group=all)", "int8(group=all)"),
    "mxfp8": Formats("mxfp8_e4m3(group=4)", "mxfp8_e5m2(group=4)", "e4m2", "e5m4"),
    "nf4": Formats("nf4(group=4)"),
}
RATE = 0.1  # of one step of gradient descent
Call = Callable[[Any, Any], Any]
quickly = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # most of the time is the compiler's


@dataclass(frozen=True)
class Model:
    """A layer of one interface: parameters, what it gives of them, what it gives packed, and what is expected."""

    params: Any
    call: Call
    call_packed: Call
    reference: Callable[[Formats, Any, Any], Any]


def inputs(name: str, layer: Layer) -> Any:
    """Two steps of two inputs."""
    draw = np.random.default_rng(len(name))
    shape = (2, 2, *layer.shape)
    words = name == "Embed"
    return jnp.asarray(
        draw.integers(0, 7, shape) if words else draw.normal(size=shape), "int32" if words else "float32"
    )


def drawn(shapes: Any) -> Any:
    """Parameters of these shapes, none of which is at the zero or one that layers start from."""
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda v: jnp.asarray(draw.normal(0.25, 0.5, v.shape), v.dtype), shapes)


def rule_for(layer: Layer, formats: Formats) -> jc.Rule:
    bias = formats.bias if layer.bias else None
    return jc.Rule(weight=formats.weight, activation=formats.activation, bias=bias, output=formats.output)


def of_nnx(layer: Layer, formats: Formats) -> Model:
    graph, state, rest = nnx.split(nnx.eval_shape(lambda: layer.make(nnx.Rngs(0))), nnx.Param, ...)
    rest = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), rest)

    def quantized(params: Any, mode: Any) -> Any:
        mine = jax.tree.map(lambda v: v, state)  # variables of this call alone
        nnx.replace_by_pure_dict(mine, params)
        return jc.nn.quantize(nnx.merge(graph, mine, rest, copy=True), rule_for(layer, formats), mode)

    def call(params: Any, x: Any) -> Any:
        return layer.run(quantized(params, "qat"), x)

    def call_packed(params: Any, x: Any) -> Any:
        return layer.run(quantized(params, "ptq"), x)

    return Model(nnx.to_pure_dict(drawn(state)), call, call_packed, layer.reference)


def of_linen(layer: Layer, formats: Formats, given: Any, x: Any) -> Model:
    """In Linen; with the parameters that are given, where its own have the same names."""
    module = jc.nn.quantize(layer.linen, rule_for(layer, formats))  # type: ignore[arg-type]
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *layer.arguments(x), **layer.more))
    rest = {name: drawn(tree) for name, tree in shapes.items() if name != "params"}
    own = drawn(shapes["params"])
    params = given if jax.tree.structure(own) == jax.tree.structure(given) else own

    def call(params: Any, x: Any) -> Any:
        variables = {**rest, "params": params}
        return layer.run(lambda *args, **more: module.apply(variables, *args, mutable=["batch_stats"], **more)[0], x)

    def call_packed(params: Any, x: Any) -> Any:
        variables, more = {**rest, "params": params}, {"mutable": ["batch_stats"], **layer.more}
        return call(module.pack(variables, *layer.arguments(x), **more)["params"], x)

    return Model(params, call, call_packed, layer.of_linen or layer.reference)


def models_of(layer: Layer, formats: Formats, x: Any) -> dict[str, Model]:
    found = {"NNX": of_nnx(layer, formats)}
    return found if layer.linen is None else {**found, "Linen": of_linen(layer, formats, found["NNX"].params, x)}


def learned(call: Call, params: Any, x: Any) -> Any:
    """What a layer gives, and the gradients of a loss of it."""

    def loss(params: Any) -> Any:
        y = call(params, x)
        return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

    (_, y), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return y, gradients


def check_training(layer: Layer, params: Any, gradients: Any) -> None:
    """Every parameter gets a gradient that is finite and not zero, and a step changes it."""
    mean = {path: np.asarray(g).mean((0, 1)) for path, g in flatten_dict(gradients).items()}
    before = flatten_dict(params)
    assert mean.keys() == before.keys() and all(np.isfinite(g).all() for g in mean.values())
    assert {path for path, g in mean.items() if not (np.abs(g) > 1e-5).any()} == set(layer.still)
    stays = {path for path, p in before.items() if (np.asarray(p - RATE * mean[path]) == p).all()}
    assert stays <= set(layer.still)


#: Those whose weights are laid out for a product, each in its own way, and one whose are not.
LAID_OUT = (
    "Linear",
    "LinearGeneral",
    "Einsum",
    "Conv2d",
    "ConvTranspose",
    "Embed",
    "BatchNorm",
    "LoRA",
    "MultiHeadAttention",
    "LSTMCell",
    "RNN",
)
#: Every layer with one family compiled and with another one eagerly; layouts meet the families of groups.
COMPILED = {
    **dict(zip((name for name in LAYERS if name not in LAID_OUT), itertools.cycle(("float", "mxfp8", "fixed", "nf4")))),
    **dict(zip(LAID_OUT, itertools.cycle(("int8", "mxfp8", "nf4")))),
}
EAGER = dict(zip(LAYERS, itertools.cycle(("float", "int8", "mxfp8", "nf4", "fixed"))))


@further.first
@pytest.mark.in_turn(30)
@pytest.mark.parametrize(("name", "family"), COMPILED.items())
def compiled_and_transformed(name: str, family: str) -> None:
    layer, formats = LAYERS[name], FAMILIES[family]
    xs = inputs(name, layer)
    models = models_of(layer, formats, xs[0, 0])

    def both(params: dict[str, Any], x: Any) -> Any:
        return {
            key: [learned(call, params[key], x) for call in (model.call, partial(model.reference, formats))]
            for key, model in models.items()
        }

    @quickly
    def run(params: Any, xs: Any) -> Any:  # what is the same in both interfaces is compiled once
        params = {key: params["NNX" if models[key].params is models["NNX"].params else key] for key in models}
        packed = {
            key: (model.call_packed(params[key], xs[0, 0]), model.reference(formats, params[key], xs[0, 0]))
            for key, model in models.items()
            if name in LAID_OUT
        }
        return lax.scan(lambda step, x: (step, jax.vmap(lambda x: both(params, x))(x)), 0, xs)[1], packed

    found, packed = run({key: model.params for key, model in models.items()}, xs)
    for key, ((y, gradients), (wanted, wanted_gradients)) in found.items():
        # The matrices of LoRA lie as rows in the reference, so their sums have another order. Results that are near 0
        # are sums of two products.
        close = {"LoRA": (2e-6, 0), "LoRALinear": (2e-6, 1e-6), "MultiHeadAttention": attention_bounds(key)}
        np.testing.assert_allclose(y, wanted, *close.get(name, (0, 0)), err_msg=key)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), gradients, wanted_gradients)
        check_training(layer, models[key].params, gradients)
    for key, (y, wanted) in packed.items():
        bounds = attention_bounds(key) if name == "MultiHeadAttention" else (0, 0)
        np.testing.assert_allclose(y, wanted, *bounds, err_msg=f"{key}, packed")


def attention_bounds(interface: str) -> tuple[float, float]:
    """The softmax of a program of Linen is compiled with its products, of which XLA contracts some with sums."""
    return 0, 1e-6 * (interface == "Linen")


@pytest.mark.in_turn(30)
@pytest.mark.parametrize(("name", "family"), EAGER.items())
def test_eager(name: str, family: str) -> None:
    layer, formats = LAYERS[name], FAMILIES[family]
    x = inputs(name, layer)[0, 0]
    for key, model in models_of(layer, formats, x).items():
        wanted = model.reference(formats, model.params, x)
        for call in (model.call, model.call_packed):
            np.testing.assert_array_equal(call(model.params, x), wanted, err_msg=f"{key}, {call.__name__}")


def test_both_matrices_of_an_adapter_are_rounded_along_what_they_sum_over() -> None:
    layer = nnx.LoRA(4, 2, 6, b_initializer=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), "float32")
    a, b = (jc.round_to_format(w[...].T, "int4(group=2)").T for w in (layer.lora_a, layer.lora_b))
    low = jc.nn.quantize(layer, jc.Rule(weight="int4(group=2)"))
    np.testing.assert_allclose(low(x), x @ a @ b, rtol=1e-6, atol=1e-7)


def test_a_packed_bias_of_several_axes_is_one_array() -> None:
    layer = nnx.LinearGeneral(2, (3, 4), bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    low = jc.nn.quantize(layer, jc.Rule(bias="int4(group=tensor)"), mode="ptq")
    assert layer.bias is not None
    wanted = jc.round_to_format(layer.bias[...], "int4(group=tensor)")
    np.testing.assert_array_equal(jc.dequantize(low.bias[...]), wanted)  # type: ignore[arg-type]


def test_attention_to_more_tokens_than_a_head_has_features_is_that_of_flax() -> None:
    """Under a format so wide that it changes nothing that matters; whether to decode is said in the call."""
    plain = nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0))
    x = 3 * jnp.asarray(np.random.default_rng(0).normal(size=(7, 4)), "float32")
    low = jc.nn.quantize(plain, jc.Rule(activation="e8m20"))
    np.testing.assert_allclose(low(x, decode=False), plain(x, decode=False), rtol=1e-3, atol=1e-4)


def einsum_packs_in_the_order_of_the_sum() -> None:
    layer = nnx.Einsum("nab,bac->nc", (3, 2, 4), rngs=nnx.Rngs(0))  # a before b, but b before a in the kernel
    rule = jc.Rule(weight="int8(group=4)")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 3)), "float32")
    rows = layer.kernel[...].transpose(2, 1, 0).reshape(4, 6)
    wanted = x.reshape(5, 6) @ jc.round_to_format(rows, "int8(group=4)").T
    for mode in ("qat", "ptq"):
        np.testing.assert_allclose(jc.nn.quantize(layer, rule, mode=mode)(x), wanted, rtol=1e-6, atol=1e-6)


def einsum_of_linen_may_get_its_subscripts_in_the_call() -> None:
    x, text = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), "float32"), "ab,bc->ac"
    rule = jc.Rule(weight="int8(group=4)", activation="int8(group=4)", gradient="e5m2")
    late, early = (jc.nn.quantize(layer, rule) for layer in (linen.Einsum((4, 2)), linen.Einsum((4, 2), text)))
    variables = early.init(jax.random.key(0), x)

    def of(module: Any, *said: Any) -> Any:
        return jax.value_and_grad(lambda v: jnp.sum(jnp.sin(module.apply(v, x, *said))))(variables)

    jax.tree.map(np.testing.assert_array_equal, of(late, text), of(early))


@pytest.mark.parametrize(
    "check",
    [
        einsum_of_linen_may_get_its_subscripts_in_the_call,
        pytest.param(einsum_packs_in_the_order_of_the_sum, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_einsum(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


test_further = further.test()
