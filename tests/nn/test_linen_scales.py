"""Scales that layers of Linen keep: those of the twin in NNX, step by step."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from layer_references import checked

import jchop as jc

X = jnp.asarray(
    np.random.default_rng(4).normal(size=(4, 3, 4, 6)) * np.array([1, 2, 0.5, 1])[:, None, None, None], "f4"
)
TENSOR = "int8(group=tensor)"
LEARNED = {"weight": "int4(group=all)", "activation": "int8(group=tensor)", "scale_from": jc.LSQ()}


class Net(linen.Module):
    """Every kind of layer that keeps scales."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(8, (3,), name="conv")(x)
        x = linen.DenseGeneral((2, 3), name="general")(x)
        return linen.Dense(5, name="head")(x)


class Twin(nnx.Module):
    """The same in NNX."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(6, 8, (3,), rngs=rngs)
        self.general = nnx.LinearGeneral(8, (2, 3), rngs=rngs)
        self.head = nnx.Linear(3, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.general(self.conv(x)))


SITES = {"conv": "conv_general_dilated", "general": "dot_general", "head": "dot_general"}


def start(rules: Any) -> tuple[Any, Any, Any]:
    """The module, its variables, and the twin that has them."""
    net = jc.nn.quantize(Net(), rules)
    variables = jax.jit(net.init)(jax.random.key(0), X[0])
    twin = nnx.eval_shape(lambda: Twin(rngs=nnx.Rngs(0)))
    nnx.update(twin, {path: without_scales(layer) for path, layer in variables["params"].items()})
    return net, variables, jc.nn.quantize(twin, rules)


def without_scales(params: Any) -> Any:
    return {name: value for name, value in params.items() if not name.endswith("_scale")}


def loss(y: Any) -> Any:
    return jnp.sum(jnp.sin(y))


@partial(jax.jit, static_argnums=0)
def train(net: Any, variables: Any) -> tuple[Any, ...]:
    """Steps of a TrainState with statistics, in one scan, and two calls more, without and with what they move.

    Returns:
        The parameters, the statistics, and what each call gave.
    """
    state = TrainState.create(apply_fn=net.apply, params=variables["params"], tx=optax.sgd(0.01))

    def step(carry: Any, x: Any) -> Any:
        state, stats = carry

        def of(params: Any) -> Any:
            y, after = state.apply_fn({"params": params, **stats}, x, mutable=["scale_stats"])
            return loss(y), after

        (value, stats), gradient = jax.value_and_grad(of, has_aux=True)(state.params)
        return (state.apply_gradients(grads=gradient), stats), value

    stats = {name: value for name, value in variables.items() if name != "params"}
    (state, stats), losses = jax.lax.scan(step, (state, stats), X)
    variables = {"params": state.params, **stats}
    frozen, (y, after) = net.apply(variables, X[1]), net.apply(variables, X[1], mutable=["scale_stats"])
    return state.params, after, (losses, frozen, y)


@nnx.jit
def train_twin(twin: Any) -> Any:
    optimizer = nnx.Optimizer(twin, optax.sgd(0.01), wrt=nnx.Param)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def step(carry: Any, x: Any) -> Any:
        twin, optimizer = carry
        value, gradient = nnx.value_and_grad(lambda twin: loss(twin(x)))(twin)
        optimizer.update(twin, gradient)
        return (twin, optimizer), value

    losses = step((twin, optimizer), X)[1]
    twin.eval()
    frozen = twin(X[1])
    twin.train()
    return losses, frozen, twin(X[1])


def same_as_twin(params: Any, stats: Any, twin: Any, rtol: float = 0) -> None:
    same = partial(np.testing.assert_allclose, rtol=rtol, atol=rtol / 10)
    for path, site in SITES.items():
        layer = getattr(twin, path)
        same(params[path]["kernel"], layer.kernel[...])
        for side, role in (("left", "activation"), ("right", "weight")):
            source = getattr(getattr(layer, site), side)
            for name in ("range", "history"):
                if hasattr(source, name):
                    same(stats["scale_stats"][path][f"kernel_{role}_{name}"], getattr(source, name)[...])
            if hasattr(source, "scale"):  # those of a kernel lie as it does
                own = params[path][f"kernel_{role}_scale"]
                same(own.ravel(), source.scale[...].ravel())


MOVING = {"activation": TENSOR, "scale_from": jc.MovingAverage(0.75)}
HISTORY = jc.nn.recipe("float8_delayed", scale_from=jc.DelayedScaling(2))


def check(rules: Any, calibrated: bool) -> Any:
    """Train a module and its twin; the statistics of the module."""
    net, variables, twin = start(rules)
    twin = jc.nn.calibrate(twin, X[:1]) if calibrated else twin
    same_as_twin(variables["params"], variables, twin)
    params, stats, results = train(net, variables)
    learns = any(isinstance(rule.scale_from, jc.LSQ) for rule in (rules if isinstance(rules, list) else [rules]))
    # Kernels of a program lie as they are, so that the sums in the gradients of learned scales have another order.
    rtol = 2e-5 if learns else 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), results, train_twin(twin))
    same_as_twin(params, stats, twin, rtol)
    assert all((params[path]["kernel"] != variables["params"][path]["kernel"]).any() for path in SITES)
    for path, before in variables.get("scale_stats", {}).items():
        assert all((stats["scale_stats"][path][name] != value).any() for name, value in before.items())
    return stats


def each_its_own() -> Any:
    """Another source for each layer."""
    learned = jc.Rule("head", weight="int4(group=all)", scale_from=jc.LSQ())
    return [jc.Rule("conv", **MOVING), dataclasses.replace(HISTORY, path="general"), learned]


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(jc.Rule(**LEARNED), marks=pytest.mark.slow, id="LSQ"),
        pytest.param(each_its_own(), marks=pytest.mark.slow, id="each its own"),
        pytest.param(jc.Rule(**MOVING), id="MovingAverage"),
    ],
)
def test_every_layer_trains_as_its_twin(rules: Any) -> None:
    several = isinstance(rules, list)
    stats = check(rules, not several and isinstance(rules.scale_from, jc.LSQ))
    if several:
        assert {path: sorted(names) for path, names in stats["scale_stats"].items()} == {
            "conv": ["kernel_activation_range"],
            "general": ["kernel_activation_history", "kernel_weight_history"],
        }


def start_keeps_what_is_there_and_begins_the_rest() -> None:
    x = jnp.asarray([[1.0, -4.0, 0.5, 2.0]])
    dense = linen.Dense(3)
    plain = dense.init(jax.random.key(0), x)
    rule = jc.Rule(weight="int4(group=2)", activation=TENSOR, scale_from=jc.LSQ())
    net = jc.nn.quantize(dense, rule)
    with pytest.raises(ValueError, match=r"scales has no 'kernel_weight_scale': pass .*start"):
        net.apply(plain, x)
    variables = net.init(jax.random.key(0), x)
    first = variables["params"]
    jax.tree.map(np.testing.assert_array_equal, plain["params"], without_scales(first))
    jax.tree.map(np.testing.assert_array_equal, net.start(plain, x), variables)
    np.testing.assert_array_equal(first["kernel_activation_scale"], np.float32(4) / np.float32(127))
    by_rule = jc.fit_scale(first["kernel"].T, "int4(group=2)")[0].T
    np.testing.assert_array_equal(first["kernel_weight_scale"], by_rule)
    first["kernel_weight_scale"] = 2 * first["kernel_weight_scale"]
    again = net.start(variables, 8 * x)
    jax.tree.map(np.testing.assert_array_equal, again, variables)
    moving = jc.nn.quantize(dense, jc.Rule(**MOVING))
    with pytest.raises(ValueError, match="no 'kernel_activation_range'"):
        moving.apply(plain, x)
    known = {**plain, "scale_stats": {"kernel_activation_range": jnp.asarray([-1.0, 3.0])}}
    jax.tree.map(np.testing.assert_array_equal, moving.start(known, x), known)
    # Where it is stored packed, the scale that was learned is the packed array's.
    packed = net.pack(variables, x)
    assert sorted(packed["params"]) == ["bias", "kernel", "kernel_activation_scale"]
    np.testing.assert_array_equal(packed["params"]["kernel"].scale, first["kernel_weight_scale"])
    np.testing.assert_array_equal(net.apply(packed, x), net.apply(variables, x))
    with pytest.raises(ValueError, match="'kernel' is packed already"):
        net.pack(packed, x)
    with pytest.raises(ValueError, match="history of scales is for training"):
        jc.nn.quantize(dense, HISTORY).pack(plain, x)


class Stack(linen.Module):
    """Three layers, one after the other, in one scan."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        scan = linen.scan(
            lambda layer, x, _: (jnp.sin(layer(x)), None),
            variable_axes={"params": 0, "scale_stats": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scan(linen.Dense(6, name="layers"), x, None)[0]


def stacks_have_scales_of_their_own() -> None:
    rule = jc.Rule(weight="int4(group=all)", activation=TENSOR, bias="fixed2.2(group=tensor)", scale_from=jc.LSQ())
    net, one = jc.nn.quantize(Stack(), rule), jc.nn.quantize(linen.Dense(6), rule)
    x = X[0, 0]
    variables = jax.jit(net.init)(jax.random.key(0), x)
    layers = variables["params"]["layers"]
    layers["bias"] = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6)) * [[1], [4], [9]], "f4")
    assert layers["kernel_weight_scale"].shape == (3, 1, 6) and layers["kernel_activation_scale"].shape == (3,)

    @jax.jit
    def run(variables: Any, packed: Any) -> Any:
        layers = variables["params"]["layers"]
        y, _ = jax.lax.scan(lambda y, params: (jnp.sin(one.apply({"params": params}, y)), None), x, layers)
        return net.apply(variables, x), net.apply(packed, x), y

    packed = jax.jit(net.pack)(variables, x)
    assert packed["params"]["layers"]["kernel"].shape == (3, 6, 6)
    of_net, of_packed, by_layer = run(variables, packed)
    np.testing.assert_array_equal(of_net, by_layer)
    np.testing.assert_array_equal(of_packed, by_layer)
    moving = jc.nn.quantize(Stack(), jc.Rule(**MOVING))
    plain = {"params": {"layers": without_scales(layers)}}
    after = jax.jit(lambda v: moving.apply(moving.start(v, x), x, mutable=["scale_stats"])[1])(plain)
    ranges = after["scale_stats"]["layers"]["kernel_activation_range"]
    assert ranges.shape == (3, 2) and len(np.unique(ranges)) == 6
    np.testing.assert_array_equal(ranges[0], [x.min(), x.max()])


def a_range_goes_through_the_steps_of_a_recurrent_network() -> None:
    network = linen.RNN(linen.SimpleCell(5), variable_carry="scale_stats")
    net, x = jc.nn.quantize(network, jc.Rule(**MOVING)), X[0]
    variables = jax.jit(net.init)(jax.random.key(0), x)
    after = jax.jit(lambda v: net.apply(v, x, mutable=["scale_stats"])[1])(variables)
    span = np.array([x[:, 0].min(), x[:, 0].max()])
    for t in range(1, x.shape[1]):
        span = 0.75 * span + 0.25 * np.array([x[:, t].min(), x[:, t].max()])
    np.testing.assert_allclose(after["scale_stats"]["cell"]["i"]["kernel_activation_range"], span, rtol=1e-6)


@pytest.mark.parametrize(
    "check",
    [
        start_keeps_what_is_there_and_begins_the_rest,
        pytest.param(stacks_have_scales_of_their_own, marks=pytest.mark.slow),
        pytest.param(a_range_goes_through_the_steps_of_a_recurrent_network, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_where_scales_are_kept(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@pytest.mark.smoke
def test_what_cannot_be_kept_is_named() -> None:
    x = jnp.ones((2, 4))
    learned = jc.Rule(weight="int8(group=all)", scale_from=jc.LSQ())
    einsum = linen.Einsum((4, 3), "ij,jk->ik")
    for module, rule, error, words in (
        (linen.Dense(3), jc.Rule(cache="int8(group=all)"), ValueError, "cache has no effect"),
        (linen.Dense(3), jc.Rule(weight="int8", product="codes", scale_from=jc.LSQ()), NotImplementedError, "codes"),
    ):
        with pytest.raises(error, match=words):
            low = jc.nn.quantize(module, rule)
            low.apply(low.init(jax.random.key(0), x), x)
    names = sorted(jc.nn.quantize(einsum, learned).init(jax.random.key(0), x)["params"])
    assert names == ["bias", "kernel", "kernel_weight_scale"]
