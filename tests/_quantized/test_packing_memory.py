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
from jchop.ptq._data.passes import BatchData
from jchop.ptq._quantize import _CalibrationJob

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
def watched(*functions: Any) -> Iterator[list[float]]:
    """The bytes that live whenever a function, by default `jc.quantize`, returns, as a share of the wide arrays."""
    gc.collect()
    codes = {function.__code__ for function in functions or (jc.quantize,)}
    before, found = live_bytes(), [0.0]

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "return" and frame.f_code in codes:
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


DEPTH = 3
DATA = [jax.random.normal(jax.random.key(i), (96, WIDTH)) for i in range(2)]
SEQUENTIAL = [jc.ptq.sequential(), jc.ptq.gptq()]


@pytest.mark.parametrize(
    ("steps", "parts"),
    [
        (jc.ptq.gptq(), 1),
        pytest.param(SEQUENTIAL, 2, marks=pytest.mark.slow),
        pytest.param(SEQUENTIAL, 1, marks=pytest.mark.slow),
        pytest.param(jc.ptq.gptq(), 2, marks=pytest.mark.slow),
        pytest.param([jc.ptq.awq(), jc.ptq.gptq()], 1, marks=pytest.mark.slow),
        pytest.param([jc.ptq.sequential(), jc.ptq.gptq(), jc.ptq.correct_biases()], 1, marks=pytest.mark.slow),
    ],
)
def test_with_data_memory_holds_the_weights_and_the_sums_of_one_pass(steps: Any, parts: int) -> None:
    low, bound = jc.quantize_fn(network, SPEC), 8 * (2 * WIDTH**2 + 5 * WIDTH + 2)
    options = {"batches": DATA, "steps": steps, "memory": None if isinstance(steps, list) else bound}

    def params() -> dict[str, Any]:
        return dict(list(weights(mesh_sharding(parts)).items())[:DEPTH])

    with watched(_CalibrationJob._round_layer, BatchData.sums, BatchData._count_batch) as peak:
        given = params()
        packed = low.pack(given, **options, donate=True)
    assert all(v.is_deleted() for v in given.values())
    assert all(map(np.array_equal, *map(jax.tree.leaves, (packed, low.pack(params(), **options)))))
    if steps in (SEQUENTIAL, jc.ptq.gptq()):
        share = DEPTH / LAYERS
        assert share < max(peak) < share + parts * bound / WIDE + 0.01


@pytest.mark.parametrize("axis", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_each_device_has_a_part_of_the_statistics(axis: int) -> None:
    """All devices together hold two float32 matrices of (inputs, inputs), of one weight."""
    sharding = jax.NamedSharding(mesh_sharding(4).mesh, jax.P(*[None, "d"][:: 1 - 2 * axis]))
    low, memory = jc.quantize_fn(network, SPEC), 8 * (2 * WIDTH**2 + 5 * WIDTH + 2)

    def params() -> dict[str, Any]:
        return dict(list(weights(sharding).items())[:DEPTH])

    with watched(_CalibrationJob._round_layer, BatchData.sums, BatchData._count_batch) as peak:
        packed = low.pack(params(), batches=DATA, memory=memory, donate=True)
    assert DEPTH / LAYERS < max(peak) < (DEPTH + 2.3) / LAYERS
    assert all(map(np.array_equal, *map(jax.tree.leaves, (packed, low.pack(params(), batches=DATA)))))


def test_donated_weights_stay_as_long_as_the_data_are_run_by_them() -> None:
    tied, head = (jax.random.normal(key, (WIDTH, WIDTH)) for key in jax.random.split(jax.random.key(0)))
    low = jc.quantize_fn(lambda p, x: (jnp.tanh(p["tied"][:8] * (x @ p["head"])[:8]) @ p["tied"].T) @ p["twin"], SPEC)

    def params() -> dict[str, Any]:
        return {"tied": jnp.array(tied), "head": jnp.array(head), "twin": head + 1}

    given = params()
    packed, report = low.pack(given, batches=DATA, memory="80KiB", donate=True, return_report=True)
    kept = low.pack(params(), batches=DATA, memory="80KiB")
    assert all(map(np.array_equal, *map(jax.tree.leaves, (packed, kept))))
    assert all(v.is_deleted() for v in given.values()) and report.passes > 2
    given = params()
    with pytest.raises(ValueError, match=r"'head' .*one whose square overflows"):  # the weight of the last pass
        low.pack(given, batches=[1e30 * DATA[0]], memory="80KiB", donate=True)
    assert not any(v.is_deleted() for v in given.values())


def test_a_model_is_donated_with_data() -> None:
    given, other = (Network(dict(list(weights().items())[:2])) for _ in range(2))
    packed = jc.nn.quantize(given, SPEC, "ptq", batches=DATA, steps=SEQUENTIAL, donate=True)
    assert all(v.is_deleted() for v in jax.tree.leaves(nnx.state(given)))
    kept = jc.nn.quantize(other, SPEC, "ptq", batches=DATA, steps=SEQUENTIAL)
    assert all(map(np.array_equal, *(jax.tree.leaves(nnx.state(v)) for v in (packed, kept))))


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
        (first, {"mode": "ptq", "batches": [X * jnp.nan]}, "an input with NaN"),
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
