"""Modules of Linen compute what those of NNX with the same parameters compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from further import Further
from jax import export
from layer_references import checked

import jchop as jc

further = Further()

WEIGHT = "mxfp8_e4m3(group=4)"


class Tower(linen.Module):
    """What every kind of layer computes is in test_every_layer.py."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(5, name="head")(linen.Conv(8, (3,), name="conv")(x))


class Twin(nnx.Module):
    """The same in NNX."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(6, 8, (3,), rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.conv(x))


X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 6)), "float32")


def start() -> tuple[Any, Any]:
    """Variables whose biases are not zero, and the twin that has them."""
    draw = np.random.default_rng(1)
    shapes = jax.eval_shape(Tower().init, jax.random.key(0), X)
    variables = jax.tree.map(lambda v: jnp.asarray(draw.normal(0.1, 0.4, v.shape), v.dtype), shapes)
    twin = nnx.eval_shape(lambda: Twin(rngs=nnx.Rngs(0)))
    nnx.update(twin, variables["params"])
    return variables, twin


@further
def gradients_and_packed_parameters_are_those_of_the_twin() -> None:
    variables, twin = start()
    rules = [jc.Rule("head", weight=WEIGHT, activation="e4m3", gradient="e5m2"), jc.Rule("conv", weight="e4m3")]
    tower, rounded = jc.nn.quantize(Tower(), rules), jc.nn.quantize(twin, rules)

    @nnx.jit
    def run(variables: Any, rounded: Any) -> Any:
        ours = jax.grad(lambda v: jnp.sin(tower.apply(v, X)).sum())(variables)
        theirs = nnx.grad(lambda model: jnp.sin(model(X)).sum())(rounded)
        return ours["params"], theirs, tower.pack(variables, X)

    ours, theirs, packed = run(variables, rounded)
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(ours["head"][name], theirs["head"][name][...], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(ours["conv"][name], theirs["conv"][name][...], rtol=1e-4, atol=1e-5)
    kernel = packed["params"]["head"]["kernel"]
    assert isinstance(kernel, jc.QArray) and kernel.shape == (8, 5)
    expected = jc.round_to_format(variables["params"]["head"]["kernel"].T, WEIGHT).T
    np.testing.assert_array_equal(jc.dequantize(kernel), expected)


def cells_are_made_of_dense_layers_and_state_goes_through() -> None:
    cell = jc.nn.quantize(linen.GRUCell(4), jc.Rule(weight="fixed2.2"))
    x, h = jnp.ones((2, 4)), jnp.full((2, 4), 0.5)
    variables = cell.init(jax.random.key(0), h, x)
    rounded = jax.tree_util.tree_map_with_path(
        lambda path, v: jc.round_to_format(v, "fixed2.2") if path[-1].key == "kernel" else v, variables
    )
    np.testing.assert_array_equal(cell.apply(variables, h, x)[1], linen.GRUCell(4).apply(rounded, h, x)[1])
    norm = jc.nn.quantize(linen.BatchNorm(use_running_average=False), jc.Rule(activation="e4m3"))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), "float32")
    variables = norm.init(jax.random.key(0), x)
    y, after = norm.apply(variables, x, mutable=["batch_stats"])
    plain = linen.BatchNorm(use_running_average=False)
    expected, state = plain.apply(variables, jc.round_to_format(x, "e4m3"), mutable=["batch_stats"])
    np.testing.assert_array_equal(y, expected)
    jax.tree.map(np.testing.assert_array_equal, after, state)


class Bare(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(2)(x @ self.param("w", linen.initializers.normal(), (4, 4)))


def test_what_cannot_be_quantized_is_named() -> None:
    x = jnp.ones((1, 4))

    def run(module: Any, rules: Any) -> Any:
        wrapped = jc.nn.quantize(module, rules)
        return wrapped.apply(wrapped.init(jax.random.key(0), x), x)

    assert run(Bare(), jc.Rule(weight="e4m3", output="e4m3")).shape == (1, 2)
    assert run(Bare(), jc.Rule("Dense_0", weight="e4m3")).shape == (1, 2)
    with pytest.raises(ValueError, match=r"Rule\('Dense_1', .*nearest paths are 'Dense_0"):
        run(Bare(), jc.Rule("Dense_1", weight="e4m3"))
    assert run(linen.ConvTranspose(2, (3,)), jc.Rule(gradient="e5m2")).shape == (1, 2)
    own = linen.Dense(2, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k))
    assert run(own, jc.Rule(weight="e4m3")).shape == (1, 2)
    with pytest.raises(ValueError, match=r"Rule\('Dense_0', .*\): cache has no effect .*of attention"):
        run(Bare(), [jc.Rule("Dense_0", bias="e4m3", gradient="e5m2", cache="int8(group=all)"), jc.Rule("*")])
    for more in ({"mode": "ptq"}, {"batches": [x]}, {"inputs": (x,)}):
        with pytest.raises(ValueError, match=rf"^{next(iter(more))}: .* write .*pack\(variables, \*args\)"):
            jc.nn.quantize(Bare(), "int8", **more)  # type: ignore[arg-type]


class Told(linen.Module):
    @linen.compact
    def __call__(self, x: Any, how: str, double: bool, pair: Any) -> Any:
        y = {"sin": jnp.sin, "cos": jnp.cos}[how](linen.Dense(2)(x) + pair[0])
        return 2 * y if double else y


@further.first
def arguments_that_are_no_arrays_go_through() -> None:
    """By position as by name, also within others and beside arrays."""
    x, pair = np.ones((1, 4), np.float32), (jnp.ones(2), "beside")
    told = jc.nn.quantize(Told(), jc.Rule(weight="e4m3"))
    variables = told.init(jax.random.key(0), x, "sin", True, pair)
    y = told.apply(variables, x, "cos", False, pair)
    np.testing.assert_array_equal(y, told.apply(variables, x=x, how="cos", double=False, pair=pair))
    np.testing.assert_array_equal(told.apply(told.pack(variables, x, "cos", False, pair), x, "cos", True, pair), 2 * y)


def packed_parameters_are_numbers_for_functions_of_trees() -> None:
    """A convolution whose groups run over its window, and a stack of layers, each with its own scales."""

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            layer = linen.vmap(linen.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=2)
            return layer(8, name="heads")(linen.Conv(8, (3, 3), name="conv")(x))

    x = jnp.ones((2, 4, 4, 3))
    low = jc.nn.quantize(Net(), jc.Rule(weight="int4(group=8)"))
    variables = low.init(jax.random.key(0), x)
    packed = low.pack(variables, x)
    numbers = jc.storage.dequantize_params(packed)
    kernels = numbers["params"]["conv"]["kernel"], numbers["params"]["heads"]["kernel"]
    assert [kernel.shape for kernel in kernels] == [(3, 3, 3, 8), (2, 8, 8)]
    np.testing.assert_array_equal(low.apply(numbers, x), low.apply(packed, x))
    moved = jc.optim.apply_updates(packed, jax.tree.map(jnp.ones_like, numbers))
    assert jax.tree.structure(moved) == jax.tree.structure(packed)
    again = low.pack(jax.tree.map(jnp.add, numbers, jax.tree.map(jnp.ones_like, numbers)), x)
    jax.tree.map(np.testing.assert_array_equal, moved, again)


def stochastic_rules_draw_from_their_stream() -> None:
    rule = jc.Rule(weight="e4m1:stochastic", bias="e4m1:stochastic", activation="e4m1:stochastic")
    dense = jc.nn.quantize(linen.Dense(8), rule)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), "float32")
    variables = dense.init(jax.random.key(0), x)
    first, again, other = (dense.apply(variables, x, rngs={"rounding": jax.random.key(k)}) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    with pytest.raises(ValueError, match=r"rngs=\{'rounding': a key\}"):
        dense.apply(variables, x)


@pytest.mark.parametrize(
    "check",
    [
        stochastic_rules_draw_from_their_stream,
        pytest.param(cells_are_made_of_dense_layers_and_state_goes_through, marks=pytest.mark.slow),
        pytest.param(packed_parameters_are_numbers_for_functions_of_trees, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_state_and_trees(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


class Apart(linen.Module):
    """Three results that are the bias of a layer each."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        start = {"kernel_init": linen.initializers.zeros, "bias_init": linen.initializers.constant(0.5)}
        return [linen.Dense(32, name=name, **start)(x) for name in ("one", "two", "out")]


def test_parameters_results_and_their_cotangents_draw_each_for_itself() -> None:
    half = "fixed8.0:stochastic:gradient=[fixed8.0:stochastic]"
    rules = [jc.Rule("{one,two}", bias=half), jc.Rule("out", output=half)]
    low, x = jc.nn.quantize(Apart(), rules), jnp.zeros((1, 2))
    variables = Apart().init(jax.random.key(0), x)
    results, pull = jax.vjp(lambda v: low.apply(v, x, rngs={"rounding": jax.random.key(1)}), variables)
    (slopes,) = pull([jnp.full((1, 32), 0.5)] * 3)
    drawn = [*map(np.ravel, results), *(slopes["params"][name]["bias"] for name in ("one", "two", "out"))]
    assert all(set(v.tolist()) == {0, 1} for v in drawn)
    assert len({np.asarray(v).tobytes() for v in drawn}) == 6


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.RMSNorm(name="norm")(linen.Dense(8, name="up")(x))
        return linen.Dense(8, name="down")(x)


def test_norms_are_rounded_by_rules_of_their_own_alone() -> None:
    """As in a program, and as in NNX (tests/nn/test_surgery.py)."""
    x = jax.random.normal(jax.random.key(3), (5, 8))
    variables = Normed().init(jax.random.key(0), x)
    variables["params"]["norm"]["scale"] = jnp.linspace(0.3, 1.7, 8)
    rule = jc.Rule(weight="int4(group=4)", activation="e2m1")
    wide = jc.nn.quantize(Normed(), rule)
    packed = wide.pack(variables, x)
    np.testing.assert_array_equal(wide.apply(packed, x), wide.apply(variables, x))
    assert isinstance(packed["params"]["norm"]["scale"], jax.Array)
    assert {row.path: row.spec for row in wide.report(variables, x).parameters}["norm/scale"] == ""

    own = jc.nn.quantize(Normed(), [jc.Rule(layer="RMSNorm", weight="e2m1", activation="e4m3"), rule])
    stored = own.pack(variables, x)
    assert isinstance(stored["params"]["norm"]["scale"], jc.QArray)
    assert {row.path: row.spec for row in own.report(variables, x).parameters}["norm/scale"] == "e2m1"
    np.testing.assert_array_equal(own.apply(stored, x), own.apply(variables, x))
    assert (own.apply(variables, x) != wide.apply(variables, x)).any()

    scale = {"params": {"scale": jnp.linspace(0.3, 1.7, 8)}}
    norm = jc.nn.quantize(linen.RMSNorm(), jc.Rule(activation="e4m3"))
    by_hand = linen.RMSNorm().apply(scale, jc.round_to_format(x, "e4m3"))
    np.testing.assert_array_equal(norm.apply(scale, x), by_hand)


class Attended(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.MultiHeadDotProductAttention(2, name="attend")(x)
        return linen.LayerNorm(use_scale=False, use_bias=False)(x)


def test_rules_for_classes_reach_modules_without_parameters() -> None:
    rules = [jc.Rule(layer="MultiHead*", activation="e4m3"), jc.Rule(layer="LayerNorm", activation="e5m2")]
    x = X[..., :4]
    variables = Attended().init(jax.random.key(0), x)
    low, attention = (jc.nn.quantize(Attended(), some) for some in (rules, rules[:1]))
    rounded = [row.parameters for row in low.report(variables, x).products if row.roundings]
    assert rounded == [(), ()]  # both products of attention, and no other
    _, seen = attention.apply(variables, x, capture_intermediates=True)
    (y,) = seen["intermediates"]["attend"]["__call__"]
    by_hand = linen.LayerNorm(use_scale=False, use_bias=False).apply({}, jc.round_to_format(y, "e5m2"))
    np.testing.assert_array_equal(low.apply(variables, x), by_hand)
    with pytest.raises(ValueError, match=r"GroupNorm.* matches no parameter and no product"):
        jc.nn.quantize(Attended(), jc.Rule(layer="GroupNorm", activation="e5m2")).apply(variables, x)


def test_interceptors_of_the_caller_are_called_in_each_call() -> None:
    low, x = jc.nn.quantize(linen.Dense(2), jc.Rule(weight="e4m3")), jnp.ones((1, 4))
    variables = low.init(jax.random.key(0), x)
    y, seen = low.apply(variables, x), []

    def double(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.append(context.method_name)
        return 2 * call(*args, **kwargs)

    for count in (1, 2):
        with linen.intercept_methods(double):
            np.testing.assert_array_equal(low.apply(variables, x), 2 * y)
        assert seen == ["__call__"] * count
        np.testing.assert_array_equal(low.apply(variables, x), y)


@further
def packed_variables_are_arguments_of_exported_programs() -> None:
    dense, x = jc.nn.quantize(linen.Dense(2), jc.Rule(weight="int4(group=4)")), X[0]
    variables = dense.pack(dense.init(jax.random.key(0), x), x)
    run = jax.jit(dense.apply)
    stored = export.export(run)(variables, x).serialize()
    np.testing.assert_array_equal(export.deserialize(stored).call(variables, x), run(variables, x))


test_further = further.test()
