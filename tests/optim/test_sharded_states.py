"""Packed states in parts on eight devices: the bits of one device, for every optimizer with a packed state."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from further import Further
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc

further = Further()

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")

#: With these rates and decays every product is exact, so that no compiler's contraction can change a bit.
RATE, DECAY = 2.0**-7, 2.0**-6
KEY = jax.random.key(4)
OPTIMIZERS = {
    "stochastic": jc.optim.quantize_state(optax.sgd(RATE, 0.5), "int4(group=64):stochastic", KEY, min_size=1024),
    "adamw8bit": jc.optim.adamw8bit(RATE, 0.5, 0.5, weight_decay=DECAY, min_size=1024),
    "adamw4bit": jc.optim.adamw4bit(RATE, 0.5, 0.5, weight_decay=DECAY, min_size=1024),
    "adamw_fp8": jc.optim.adamw_fp8(RATE, 0.5, 0.5, weight_decay=DECAY, min_size=1024),
    "adam8bit": jc.optim.adam8bit(RATE, 0.5, 0.5, min_size=1024),
    "lion8bit": jc.optim.lion8bit(RATE, 0.5, 0.5, weight_decay=DECAY, min_size=1024),
    "sgd8bit": jc.optim.sgd8bit(RATE, 0.5, min_size=1024),
}
#: Whole groups in every part; groups that are cut; axes that are joined; an array that stays unpacked.
SHAPES = {"whole": (16, 512), "cut": (8, 256), "joined": (8, 4, 64), "small": (64,)}
PLACES = {"whole": P("a", "b"), "cut": P(None, "b"), "joined": P("a"), "small": P("b")}


def steps(tx: Any, state: Any, grads: Any, params: Any) -> Any:
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state._replace(key=None)  # NumPy has no typed keys


@further
@pytest.mark.parametrize(
    ("name", "leaves"), [("stochastic", "whole small"), *((name, " ".join(SHAPES)) for name in OPTIMIZERS)]
)
def sharded_states_are_unsharded(name: str, leaves: str, rng: np.random.Generator) -> None:
    tx, shapes = OPTIMIZERS[name], {leaf: SHAPES[leaf] for leaf in leaves.split()}
    params = {leaf: rng.standard_normal(shape).astype(np.float32) for leaf, shape in shapes.items()}
    grads = {
        leaf: rng.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32) for leaf, shape in shapes.items()
    }
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    where = {leaf: NamedSharding(mesh, PLACES[leaf]) for leaf in shapes}
    wanted = jax.jit(lambda g, p: steps(tx, tx.init(p), g, p))(grads, params)

    placed, placed_grads = (jax.device_put(tree, where) for tree in (params, grads))
    of_state = jc.optim.state_shardings(tx, placed)
    state = jax.jit(tx.init, out_shardings=of_state)(placed)
    run = jax.jit(lambda s, g, p: steps(tx, s, g, p))
    got = run(state, placed_grads, placed)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    if name == "stochastic":
        for trace in (state.inner_state[0].trace, got[1].inner_state[0].trace):
            assert trace["whole"].qvalue.sharding.spec == trace["whole"].scale.sharding.spec == P("a", "b")
            assert trace["small"].sharding.is_equivalent_to(where["small"], 1)


@further
def rounded_parameters_of_a_sharded_state_are_unsharded(rng: np.random.Generator) -> None:
    """Their random bits are those of places in the whole array."""
    tx = jc.optim.round_params("bfloat16:stochastic", KEY)
    p, u = (rng.standard_normal(SHAPES["whole"]).astype(np.float32) for _ in range(2))
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    placed = jax.device_put((p, u), NamedSharding(mesh, PLACES["whole"]))
    landed = jax.jit(lambda p, u: optax.apply_updates(p, tx.update(u, tx.init(p), p)[0]))
    np.testing.assert_array_equal(landed(*placed), landed(p, u))


USUAL = {
    "sgd8bit": jc.optim.sgd8bit(1e-3, 0.9, min_size=1024),
    "adamw8bit": jc.optim.adamw8bit(1e-3, min_size=1024),
    "adamw4bit": jc.optim.adamw4bit(1e-3, min_size=1024),
    "adamw_fp8": jc.optim.adamw_fp8(1e-3, min_size=1024),
    "nesterov": jc.optim.adamw8bit(optax.cosine_decay_schedule(1e-3, 5), nesterov=True, min_size=1024),
    "lion8bit": jc.optim.lion8bit(1e-3, min_size=1024),
}
#: LLVM contracts `params - rate * (sign + decay * params)` by the shape of the loop: last bits of parameters differ.
TOLERANCES = {"lion8bit": (2.0**-22, 2.0**-32)}


@further.first
@pytest.mark.parametrize(("name", "places"), list(zip(USUAL, ["ZeRO", "rows"] * 3, strict=True)))
def usual_rates(name: str, places: str, rng: np.random.Generator) -> None:
    """A program of one step, with products that are not exact, too.

    With ZeRO parameters and gradients are on every device, states in parts; a step gathers the updates.
    """
    tx, shape = USUAL[name], SHAPES["whole"]
    mesh = jax.make_mesh((8,), ("a",))
    rows = NamedSharding(mesh, P("a"))
    place = rows if places == "rows" else NamedSharding(mesh, P())
    of_state = jc.optim.state_shardings(tx, jax.ShapeDtypeStruct(shape, np.float32, sharding=rows))

    def step(state: Any, grads: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    wanted = rng.standard_normal(shape).astype(np.float32)
    state, got = jax.jit(tx.init)(wanted), jax.device_put(wanted, place)
    parts = jax.jit(tx.init, out_shardings=of_state)(got)
    one, many = jax.jit(step), jax.jit(step, out_shardings=(place, of_state))
    for _ in range(3):
        grads = rng.standard_normal(shape).astype(np.float32)
        wanted, state = one(state, grads, wanted)
        got, parts = many(parts, jax.device_put(grads, place), got)
        np.testing.assert_allclose(got, wanted, *TOLERANCES.get(name, (0, 0)))
        jax.tree.map(np.testing.assert_array_equal, parts.arrays, state.arrays)
    codes = [leaf for leaf in jax.tree.leaves(parts.arrays) if leaf.dtype == np.uint8 and leaf.ndim == 2]
    assert codes and all(leaf.addressable_shards[0].data.size * 8 == leaf.size for leaf in codes)


@further
@pytest.mark.parametrize("name", USUAL)
def several_steps_in_one_program(name: str, rng: np.random.Generator) -> None:
    """The decays differ: see `quotient_by_one_number_is_product` in `_core/xla/cpu.py`."""
    tx, shape = USUAL[name], SHAPES["whole"]
    rows = NamedSharding(jax.make_mesh((8,), ("a",)), P("a"))
    params, *grads = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))

    def run(state: Any, grads: Any, params: Any) -> tuple[Any, Any]:
        for each in grads:
            updates, state = tx.update(each, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    placed = jax.device_put(params, rows)
    of_state = jc.optim.state_shardings(tx, placed)
    parts = jax.jit(tx.init, out_shardings=of_state)(placed)
    got, parts = jax.jit(run, out_shardings=(rows, of_state))(parts, jax.device_put(grads, rows), placed)
    wanted, state = jax.jit(run)(jax.jit(tx.init)(params), grads, params)
    np.testing.assert_allclose(got, wanted, *TOLERANCES.get(name, (0, 0)))
    jax.tree.map(np.testing.assert_array_equal, parts.arrays, state.arrays)


def of_kind(kind: AxisType) -> Any:
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind), devices=jax.devices()[:4])


JOINED = {
    "int8": jc.optim.quantize_state(optax.trace(0.5), "int8(group=16)", min_size=16),
    "int4": jc.optim.quantize_state(optax.trace(0.5), "int4(group=16)", min_size=16),
    "adamw8bit": jc.optim.adamw8bit(RATE, 0.5, 0.5, min_size=16),
    "adamw_fp8": jc.optim.adamw_fp8(RATE, 0.5, 0.5, min_size=16),
}


@pytest.mark.parametrize(
    ("name", "where", "kind", "steps_too"),
    [
        pytest.param("int8", P(None, "b"), AxisType.Auto, False, id="init"),
        *(
            pytest.param(name, where, kind, True, marks=pytest.mark.slow)
            for kind in (AxisType.Auto, AxisType.Explicit)
            for where in (P(None, "b"), P("a", "b"), P("a"))
            for name in JOINED
        ),
    ],
)
def test_codes_of_joined_axes_lie_as_their_array(name: str, where: P, kind: AxisType, steps_too: bool) -> None:
    """Codes have the shape of the parameter, so each device has those of its own part, in every step."""
    tx, w = JOINED[name], np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32)
    sharding = NamedSharding(of_kind(kind), where)
    params, plain = {"w": jax.device_put(w, sharding)}, {"w": w}

    def check(state: Any) -> None:
        found = [x for x in jax.tree.leaves(state.arrays) if x.ndim]
        assert found and all(x.sharding.is_equivalent_to(sharding, 2) for x in found)

    state, single = tx.init(params), tx.init(plain)
    check(state)
    if steps_too:
        step = jax.jit(lambda g, s, p: tx.update(g, s, p))
        for _ in range(2):
            updates, state = step(params, state, params)
            wanted, single = step(plain, single, plain)
            check(state)
        # XLA contracts the sums of Adam by the shape of the part, also those of optax.adam: the last bits may differ.
        np.testing.assert_array_max_ulp(updates["w"], wanted["w"], 2 if name.startswith("adamw") else 0)
    jax.tree.map(np.testing.assert_array_equal, state, single)
    places = jc.optim.state_shardings(tx, params)
    jax.tree.map(lambda x, place: place.shard_shape(x.shape), state, places)
    assert jax.tree.leaves(places.arrays)[-1].is_equivalent_to(sharding, 2)


@further
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["int8", "int4", "adamw8bit", "adamw_fp8"])
def optimizers_of_flax_take_annotated_kernels(kind: AxisType, name: str) -> None:
    nnx = pytest.importorskip("flax.nnx")

    def trained(annotation: Any, **more: Any) -> Any:
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0), kernel_metadata=annotation)
        optimizer = nnx.Optimizer(model, JOINED[name], wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any) -> None:
            loss = lambda model: (model(jax.numpy.ones((2, 16)), **more) ** 2).mean()  # noqa: E731
            optimizer.update(model, nnx.grad(loss)(model))

        step(model, optimizer)
        step(model, optimizer)
        return optimizer

    wanted = trained({})
    with jax.set_mesh(on := of_kind(kind)):
        explicit = {"out_sharding": P(None, None)} if kind == AxisType.Explicit else {}
        got = trained({"out_sharding": (None, "b")}, **explicit)
        codes = [x for x in jax.tree.leaves(nnx.state(got)) if x.ndim == 2 and x.dtype.itemsize == 1]
        assert codes and all(x.sharding.is_equivalent_to(NamedSharding(on, P(None, "b")), 2) for x in codes)
    for a, b in zip(jax.tree.leaves(nnx.state(got)), jax.tree.leaves(nnx.state(wanted)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype


test_further = further.test()
