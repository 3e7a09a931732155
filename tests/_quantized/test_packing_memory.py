"""The bytes on the devices while parameters are packed: of wide arrays, codes and scales, every shard counted."""

import gc
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jchop as jc

WIDTH, LAYERS, SPEC = 64, 16, "int4(group=32)"
WIDE = 4 * WIDTH * WIDTH * LAYERS
X = jnp.ones((4, WIDTH))


def mesh_sharding(parts: int) -> Any:
    mesh = jax.make_mesh((parts,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:parts])
    return jax.NamedSharding(mesh, jax.P(None, "d"))


def weights(sharding: Any = None) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {f"w{i:02d}": jax.device_put(jax.random.normal(key, (WIDTH, WIDTH)), sharding) for i, key in enumerate(keys)}


def network(params: Any, x: Any) -> Any:
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return x


class Network(nnx.Module):
    def __init__(self, params: Any) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0)) for _ in params])
        for layer, value in zip(self.layers, params.values(), strict=True):
            layer.kernel.set_value(value)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def live_bytes() -> int:
    arrays = ((v, v.sharding) for v in jax.live_arrays())
    sizes = ((math.prod(s.shard_shape(v.shape)) * v.dtype.itemsize, len(s.addressable_devices)) for v, s in arrays)
    return sum(size * devices for size, devices in sizes)


@contextmanager
def watched() -> Iterator[list[float]]:
    """The bytes that live whenever `jc.quantize` returns, as a share of the wide arrays."""
    gc.collect()
    before, found = live_bytes(), [0.0]

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is jc.quantize.__code__:
            found.append((live_bytes() - before) / WIDE)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("parts", [1, 2])
def test_donated_parameters_are_deleted_as_soon_as_their_codes_exist(parts: int) -> None:
    low, sharding = jc.quantize_fn(network, SPEC), mesh_sharding(parts)
    with watched() as peak:
        params = weights(sharding)
        packed = low.pack(params, X, donate=True)
        assert len(peak) == LAYERS + 1 and 1 <= max(peak) < 1.1
    assert all(v.is_deleted() for v in params.values())
    assert all(len(v.sharding.device_set) == parts for v in jax.tree.leaves(packed))
    kept = low.pack(weights(sharding), X)
    assert all(np.array_equal(*map(jc.dequantize, pair)) for pair in zip(packed.values(), kept.values(), strict=True))


def test_donated_parameters_that_have_other_uses_stay() -> None:
    first, *others = weights().values()
    params = {"a": first, "b": first, "table": others[0], "other": others[0], "gain": others[1][0]}
    low = jc.quantize_fn(
        lambda p, x: ((x @ p["a"]) * p["gain"]) @ p["b"] + (x @ p["table"] + x @ p["other"]), {"a b table": SPEC}
    )
    packed = low.pack(params, X, donate=True)
    assert first.is_deleted() and not others[0].is_deleted() and packed["gain"] is params["gain"]
    with pytest.raises(ValueError, match="'b' holds 0 NaN and 1 infinities"):
        bad = {"a": others[2], "b": others[3].at[0, 0].set(jnp.inf)}
        jc.quantize_fn(lambda p, x: (x @ p["a"]) @ p["b"], SPEC).pack(bad, X, donate=True)
    assert not others[2].is_deleted()
    with pytest.raises(ValueError, match="donate=True"):
        jc.quantize_fn(network, SPEC).pack(params, batches=[X], donate=True)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("inputs", [None, (X,)], ids=["layers", "program"])
def test_packing_a_model_holds_no_more_than_it_and_its_codes(inputs: Any, donate: bool, parts: int) -> None:
    with watched() as peak:
        model = nnx.clone(Network(weights(mesh_sharding(parts))))
        given = jax.tree.leaves(nnx.state(model))
        packed = jc.nn.quantize(model, SPEC, mode="ptq", inputs=inputs, donate=donate)
    codes = jax.tree.leaves(nnx.state(packed))
    assert all(len(v.sharding.device_set) == parts for v in codes)
    assert all(v.is_deleted() == donate for v in given)
    kept = 0 if donate else sum(v.nbytes for v in codes) / WIDE
    assert len(peak) > LAYERS and 1 <= max(peak) - kept < 1.1
    same = jc.nn.quantize(Network(weights(mesh_sharding(parts))), SPEC, mode="ptq", inputs=inputs)
    assert all(map(np.array_equal, codes, jax.tree.leaves(nnx.state(same))))


class Tied(nnx.Module):
    """Two layers with one array, and two with one variable."""

    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(i)) for i in range(4)])
        self.layers[1].kernel.set_value(self.layers[0].kernel.get_value())
        self.layers[3].kernel = self.layers[2].kernel
        self.norm = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.mark.parametrize("inputs", [None, (X,)], ids=["layers", "program"])
def test_a_donated_model_keeps_what_is_not_packed(inputs: Any) -> None:
    model, rules = Tied(), {"layers/*": SPEC}
    kernels = [layer.kernel.get_value() for layer in model.layers]
    hand, packed = (jc.nn.quantize(one, rules, "ptq", inputs=inputs, donate=one is model) for one in (Tied(), model))
    assert [v.is_deleted() for v in kernels] == [True] * 4 and not jax.tree.leaves(nnx.state(model.norm))[
        0
    ].is_deleted()
    np.testing.assert_array_equal(packed(X), hand(X))
    with pytest.raises(RuntimeError, match="deleted"):
        model(X)
    first, last = Tied(), Tied()
    last.layers[2].kernel[0, 0] = jnp.inf
    for each, options, error in (
        (last, {"mode": "ptq"}, "kernel of the .*'layers/2'"),
        (first, {}, "donate=True: mode='qat' packs nothing"),
        (first, {"mode": "ptq", "batches": [X]}, "donate=True: batches run the model"),
    ):
        with pytest.raises(ValueError, match=error if inputs is None or each is first else "infinities"):
            jc.nn.quantize(each, rules, **options, inputs=inputs, donate=True)
        assert not any(v.is_deleted() for v in jax.tree.leaves(nnx.state(each, nnx.Param)))


class Own(nnx.Module):
    """A layer of Flax beside a parameter that the model itself multiplies."""

    def __init__(self) -> None:
        self.linear, self.own = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones((WIDTH, WIDTH)))

    def __call__(self, x: Any) -> Any:
        return self.linear(x) @ self.own[...]


@pytest.mark.filterwarnings("ignore:.*are not packed")
def test_of_plain_layers_the_packed_arrays_are_deleted() -> None:
    model = Own()
    jc.nn.quantize(model, SPEC, "ptq", donate=True)
    assert model.linear.kernel.get_value().is_deleted() and not model.own.get_value().is_deleted()


def test_a_donated_module_of_equinox_is_deleted() -> None:
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(WIDTH, WIDTH, WIDTH, 1, use_bias=False, key=jax.random.key(0))
    hand = jc.nn.quantize(model, SPEC, "ptq", inputs=(X[0],))
    packed = jc.nn.quantize(model, SPEC, "ptq", inputs=(X[0],), donate=True)
    assert all(layer.weight.is_deleted() for layer in model.layers)
    np.testing.assert_array_equal(packed(X[0]), hand(X[0]))
