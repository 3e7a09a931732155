"""Models as programs: parts that are called by themselves, modules that other code has changed, arguments by name."""

from __future__ import annotations

import pickle
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from each_case import each
from flax import linen, nnx

import jchop as jc
from jchop import Rule

INT4, INT8 = "int4(group=4)", "int8(group=all)"
RULE = Rule(weight=INT4, activation=INT8)
X = jax.random.normal(jax.random.key(0), (3, 8))


def product(x: Any, w: Any) -> Any:
    """The product of the rule, by hand."""
    w = jnp.moveaxis(jc.round_to_format(jnp.moveaxis(w, 0, -1), INT4), -1, 0)
    return jc.round_to_format(x, INT8) @ w


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.lin = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.own = nnx.Param(nnx.initializers.normal()(rngs.params(), (8, 8)))
        self.turns = 1

    def __call__(self, x: Any) -> Any:
        return self.lin(x) @ self.own[...]

    def half(self, x: Any) -> Any:
        return self.lin(x)

    def _inner(self, x: Any) -> Any:
        return x @ self.own[...]

    def turn(self) -> str:
        self.turns += 1
        self.seen = nnx.Cache(jnp.zeros(2))
        return "turned"


class Head(nnx.Module):
    def __init__(self, table: nnx.Embed) -> None:
        self.table = table

    def __call__(self, x: Any) -> Any:
        return x @ self.table.embedding[...].T


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(4, 8, rngs=rngs)
        self.head = Head(self.table)
        self.blocks = nnx.List([Encoder(rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x: Any, *, gain: Any = 1.0) -> Any:
        for block in self.blocks:
            x = block(x * gain)
        return self.head(x)

    def encode(self, x: Any) -> Any:
        return self.blocks[0](x)


def quantized(rule: Any = RULE, mode: Any = "qat", **more: Any) -> Any:
    return jc.nn.quantize(Model(nnx.Rngs(0)), rule, mode, inputs=(X,), **more)


PARTS = {
    "block": (lambda m: m.blocks[1](X), lambda m: product(product(X, m.lin.kernel[...]), m.own[...])),
    "method": (lambda m: m.blocks[1].half(X), lambda m: product(X, m.lin.kernel[...])),
    "layer": (lambda m: m.blocks[1].lin(X), lambda m: product(X, m.lin.kernel[...])),
    "private": (lambda m: m.blocks[1]._inner(X), lambda m: product(X, m.own[...])),
}


@pytest.mark.parametrize("mode", ["qat", pytest.param("ptq", marks=pytest.mark.slow)])
def test_parts_that_are_called_by_themselves_are_under_the_rules_of_the_model(mode: Any) -> None:
    plain, low = Model(nnx.Rngs(0)), quantized(mode=mode)
    for name, (call, by_hand) in PARTS.items():
        np.testing.assert_allclose(call(low), by_hand(plain.blocks[1]), rtol=1e-5, atol=1e-6, err_msg=name)
        assert (call(low) != call(plain)).any(), name


def test_a_part_has_the_rule_of_a_parameter_that_another_module_holds_first() -> None:
    plain = Model(nnx.Rngs(0))
    setattr(plain, "first", plain.head)  # noqa: B010 # so that the table has the path first/table in the model
    low = jc.nn.quantize(plain, [Rule("first", weight=INT8), Rule("blocks")], inputs=(X,))
    table = jc.round_to_format(plain.table.embedding[...], INT8)
    np.testing.assert_allclose(low.head(X), X @ table.T, rtol=1e-5)
    np.testing.assert_allclose(low.table.attend(X), X @ table.T, rtol=1e-5)


def test_parts_change_their_state_and_give_what_is_no_array() -> None:
    plain, low = Model(nnx.Rngs(0)), quantized()
    for model in (plain, low):
        model.norm(X)
        assert model.blocks[0].turn() == "turned"
    np.testing.assert_array_equal(low.norm.mean[...], plain.norm.mean[...])
    np.testing.assert_array_equal(low.dropout(X), plain.dropout(X))
    assert low.blocks[0].turns == plain.blocks[0].turns == 2
    assert low.blocks[0].seen.shape == (2,)


def test_gradients_of_a_part_are_those_of_the_rules() -> None:
    rule = Rule(weight=INT4, gradient="int2(group=all)")
    low = quantized(rule)
    layer = jc.nn.quantize(low.blocks[0].lin, rule)
    grads = nnx.grad(lambda m: jnp.sum(m.blocks[0].half(X) ** 2))(low)
    alone = nnx.grad(lambda m: jnp.sum(m(X) ** 2))(layer)
    np.testing.assert_array_equal(grads.blocks[0].lin.kernel[...], alone.kernel[...])
    assert not grads.blocks[1].lin.kernel[...].any()


def test_parts_without_the_state_of_the_model_are_refused() -> None:
    drawn = quantized(Rule("blocks", weight=f"{INT4}:stochastic"), rngs=nnx.Rngs(0))
    ranged = jc.nn.calibrate(quantized(Rule("blocks", activation="int8")), [X])
    for low, needs in ((drawn, "a stream of keys"), (ranged, "kept scales")):
        assert low(X).shape == (3, 4)
        with pytest.raises(ValueError, match=f"the part 'blocks/0' .* need {needs}.*a method of the model"):
            low.blocks[0](X)
        assert low.dropout(X).shape == X.shape


def test_methods_of_the_plain_class_are_refused_for_a_quantized_module() -> None:
    low, module = quantized(), jc.nn.quantize(Tree(), RULE)
    for call in (
        lambda: Encoder.__call__(low.blocks[0], X),
        lambda: nnx.jit(Encoder.half)(low.blocks[0], X),
        lambda: Tree.__call__(module, X[0]),
        lambda: jax.vmap(Tree.inside, in_axes=(None, 0))(module, X),
    ):
        with pytest.raises(TypeError, match="of the plain class, whose products are not rounded"):
            call()


def test_programs_and_their_parts_can_be_pickled() -> None:
    for low in (quantized(), quantized(mode="ptq"), jc.nn.quantize(Tree(), RULE)):
        copy = pickle.loads(pickle.dumps(low))
        assert type(copy) is type(low)
        x = X if isinstance(low, nnx.Module) else X[0]
        np.testing.assert_array_equal(copy(x), low(x))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(quantized().blocks[0]))(X), quantized().blocks[0](X))


class Leaf(eqx.Module):
    w: jax.Array

    def __call__(self, x: Any) -> Any:
        return x @ self.w


class Tree(eqx.Module):
    leaves: list[Leaf]
    w: jax.Array

    def __init__(self) -> None:
        self.leaves = [Leaf(jax.random.normal(jax.random.key(i), (8, 8))) for i in (1, 2)]
        self.w = jax.random.normal(jax.random.key(3), (8, 8))

    def __call__(self, x: Any) -> Any:
        return self.leaves[0](x) @ self.w

    def inside(self, x: Any) -> Any:
        return jax.lax.cond(x[0] > 0, lambda: x @ self.w, lambda: x)


@pytest.mark.parametrize("mode", ["qat", "ptq"])
def test_parts_of_equinox_are_under_the_rules_of_the_module(mode: Any) -> None:
    plain = Tree()
    low = jc.nn.quantize(plain, [Rule("leaves/1"), RULE], mode, inputs={"__call__": (X[0],)})
    np.testing.assert_allclose(low.leaves[0](X[0]), product(X[0], plain.leaves[0].w), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(low.leaves[1](X[0]), plain.leaves[1](X[0]))
    np.testing.assert_allclose(jax.vmap(low.leaves[0])(X)[0], low.leaves[0](X[0]), rtol=1e-5)


def test_a_part_of_equinox_without_kept_scales_or_a_key_is_refused() -> None:
    plain = Tree()
    ranged = jc.nn.calibrate(jc.nn.quantize(plain, Rule(activation="int8")), [X[0]])
    with pytest.raises(ValueError, match=r"the part 'leaves/0' .* need kept scales"):
        ranged.leaves[0](X[0])
    drawn = jc.nn.quantize(plain, Rule(weight=f"{INT4}:stochastic"))
    with pytest.raises(ValueError, match="rounding_key=None"):
        drawn.leaves[0](X[0])
    assert drawn.leaves[0](X[0], rounding_key=jax.random.key(0)).shape == (8,)


# -- modules that other code has changed -------------------------------------------------------------------------------


class Adapted(nnx.Linear):
    """Adds adapters to the parameters that it finds, by their class, as libraries that intercept products do."""

    def __call__(self, x: Any) -> Any:
        y = super().__call__(x)
        for name, value in vars(self).items():
            if isinstance(value, nnx.Param) and name + "_a" in vars(self):
                y += x @ getattr(self, name + "_a")[...] @ getattr(self, name + "_b")[...]
        return y


def adapted(layer: Any) -> Any:
    layer.kernel_a, layer.kernel_b = nnx.LoRAParam(jnp.ones((8, 2))), nnx.LoRAParam(jnp.ones((2, 8)))
    return layer


class Kernel(nnx.Param):
    """A class of parameters of another library."""


class Filtered(nnx.Module):
    """A module that takes its parameters by a filter."""

    def __init__(self) -> None:
        self.w = Kernel(jax.random.normal(jax.random.key(1), (8, 8)))

    def __call__(self, x: Any) -> Any:
        return sum(x @ w for w in jax.tree.leaves(nnx.state(self, Kernel)))


@pytest.mark.parametrize(
    "make", [lambda: adapted(Adapted(8, 8, rngs=nnx.Rngs(0))), Filtered], ids=["adapted", "filtered"]
)
def test_packed_programs_see_parameters_of_the_classes_that_they_had(make: Any) -> None:
    rules = [Rule("{*_a,*_b}"), Rule(weight=INT4)] if make is not Filtered else Rule(weight=INT4)
    trained, packed = (jc.nn.quantize(make(), rules, mode, inputs=(X,)) for mode in ("qat", "ptq"))  # type: ignore[arg-type]
    np.testing.assert_array_equal(packed(X), trained(X))
    assert (trained(X) != make()(X)).any()
    grad = nnx.grad(lambda m: jnp.sum(m(X) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))
    for one, other in zip(*(jax.tree.leaves(grad(m)) for m in (packed, trained)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.any()


@each(
    "change",
    [
        adapted,
        lambda layer: setattr(layer, "__class__", Adapted) or layer,
        lambda layer: setattr(layer, "extra", nnx.Param(jnp.ones(8))) or layer,
    ],
)
def test_a_layer_that_holds_more_than_its_class_says_is_a_program(change: Any) -> None:
    model = nnx.Sequential(change(nnx.Linear(8, 8, rngs=nnx.Rngs(0))))
    with pytest.raises(ValueError, match=r"^inputs=None: pass inputs=\(x,\), .*no plain layer of Flax holds"):
        jc.nn.quantize(model, Rule(weight=INT4), "ptq")
    low = jc.nn.quantize(model, Rule(weight=INT4))
    assert isinstance(model.layers[0], nnx.Linear)
    np.testing.assert_array_equal(low(X), jc.nn.quantize(model, Rule(weight=INT4), "ptq", inputs=(X,))(X))


def test_a_layer_whose_methods_were_replaced_is_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    model, embed = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), nnx.Embed(4, 8, rngs=nnx.Rngs(0))
    dense, variables = linen.Dense(8), {"params": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}}
    setattr(embed, "attend", lambda q: q @ embed.embedding[...].T)  # noqa: B010
    monkeypatch.setattr(nnx.Linear, "__call__", lambda self, x: x @ self.kernel[...])
    monkeypatch.setattr(linen.Dense, "__call__", lambda self, x: x @ jnp.ones((8, 8)))
    for one in (model, nnx.Sequential(embed)):
        with pytest.raises(ValueError, match="no plain layer of Flax holds"):
            jc.nn.quantize(one, Rule(weight=INT4), "ptq")
    own = jc.nn.quantize(dense, Rule(weight=INT4)).apply(variables, X)
    np.testing.assert_array_equal(own, X @ jnp.ones((8, 8)))
    low = jc.nn.quantize(model, Rule(weight=INT4))
    np.testing.assert_allclose(low(X), X @ jc.round_to_format(model.layers[0].kernel[...].T, INT4).T, rtol=1e-5)


def test_a_method_of_one_object_is_refused() -> None:
    for change in (
        lambda m: setattr(m, "encode", lambda x: x),
        lambda m: setattr(m, "fun", m.encode),
        lambda m: setattr(m.blocks[0], "half", types.MethodType(lambda self, x: x, m.blocks[0])),
    ):
        model = Model(nnx.Rngs(0))
        change(model)
        with pytest.raises(ValueError, match="is a function of one object"):
            jc.nn.quantize(model, RULE, inputs=(X,))


def test_linen_wrapped_as_nnx_is_a_program() -> None:
    wrapped: Any = nnx.bridge.lazy_init(nnx.bridge.ToNNX(linen.Dense(4), rngs=nnx.Rngs(0)), X)
    for low in (
        jc.nn.quantize(wrapped, RULE),
        jc.nn.quantize(wrapped, RULE, inputs=(X,)),
        jc.nn.quantize(wrapped, RULE, "ptq", inputs={"inputs": X}),
        jc.nn.quantize(nnx.Sequential(wrapped), RULE, inputs=(X,)).layers[0],
    ):
        np.testing.assert_allclose(low(X), product(X, wrapped.kernel[...]), rtol=1e-5, atol=1e-6)


# -- arguments by name -------------------------------------------------------------------------------------------------


def test_example_arguments_have_names() -> None:
    given = {"x": X, "gain": jax.ShapeDtypeStruct((), jnp.float32)}
    for inputs in (given, {"__call__": given, "encode": {"x": X}}):
        low = jc.nn.quantize(Model(nnx.Rngs(0)), RULE, "ptq", inputs=inputs)
        np.testing.assert_array_equal(low(X, gain=0.5), quantized()(X, gain=0.5))
    assert [*jc.nn.report(Model(nnx.Rngs(0)), RULE, inputs=given)] == ["__call__"]
    tree = jc.nn.quantize(Tree(), RULE, "ptq", inputs={"x": X[0]})
    np.testing.assert_array_equal(tree(X[0]), jc.nn.quantize(Tree(), RULE)(X[0]))
    adapters = jc.nn.add_lora(tree, jc.nn.LoraRule("w", rank=1), inputs={"x": X[0]}, key=jax.random.key(0))
    np.testing.assert_array_equal(adapters(X[0]), tree(X[0]))


@each(
    ("inputs", "error", "text"),
    [
        ({"x": X, "grain": 1.0}, ValueError, "Model has no method 'x', and .*argument 'grain'"),
        ({"encode": {"y": X}}, ValueError, r"Model.encode takes other arguments: missing a required argument: 'x'"),
        ({"encode": X}, TypeError, r"a tuple of arguments of 'encode', such as \(x,\), or a dict by name"),
        ({"decode": (X,)}, ValueError, "Model has no method 'decode'"),
        ({"encode": (X,), "x": X}, ValueError, "Model has no method 'x'"),
    ],
)
def test_wrong_example_arguments_are_named(inputs: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        jc.nn.quantize(Model(nnx.Rngs(0)), RULE, inputs=inputs)
