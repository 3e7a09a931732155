"""Packed weights in parts on the devices: gathered as codes, the same bits as unsharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed.hlo import wire_bytes
from flax import nnx
from further import Further
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc

further = Further()

RANKS = 4
#: The format of a weight, and its axis that is cut.
WEIGHTS = {
    "int4": ("int4(group=16,scale=bfloat16)", 0),
    "tiles": ("e4m3fn(group=(4,16))", 0),
    "nvfp4": ("nvfp4", 1),
    "channels": ("int8(channel=0)", 0),
    "zero points": ("uint4(group=16,zero_point=integer)", 1),
    "twice": ("nf4(group=16,scale=uint8(group=2,zero_point=float))", 0),
    "plain": ("float8_e5m2", 0),
}


def mesh_of(kind: AxisType) -> Mesh:
    return Mesh(np.array(jax.devices()[:RANKS]), ("fsdp",), axis_types=(kind,))


def stored(rng: np.random.Generator) -> dict[str, Any]:
    return {
        name: jc.quantize(jnp.asarray(rng.standard_normal((32, 128)), jnp.float32), spec)
        for name, (spec, _) in WEIGHTS.items()
    }


def applied(weights: dict[str, Any], x: jax.Array) -> dict[str, Any]:
    return {name: (jc.dequantize(w), x @ jc.dequantize(w)) for name, w in weights.items()}


def rule_of(name: str) -> str:
    return f"/{name}/".replace(" ", "?")


RULES = {rule_of(name): P(*[None] * axis, "fsdp") for name, (_, axis) in WEIGHTS.items()}


@further
@pytest.mark.parametrize(
    "kind, names",
    [
        (AxisType.Explicit, ["int4", "channels"]),
        *(
            pytest.param(kind, list(WEIGHTS), marks=pytest.mark.slow)
            for kind in (AxisType.Auto, AxisType.Explicit, AxisType.Manual)
        ),
    ],
    ids=str,
)
def codes_are_gathered(kind: AxisType, names: list[str], rng: np.random.Generator) -> None:
    weights = {name: q for name, q in stored(rng).items() if name in names}
    x = jnp.asarray(rng.standard_normal((4, 32)), jnp.float32)
    mesh = mesh_of(AxisType.Auto if kind == AxisType.Manual else kind)
    placed = jc.nn.shard(weights, {rule: place for rule, place in RULES.items() if rule in map(rule_of, names)}, mesh)
    for name, q in placed.items():
        assert (
            q.qvalue.sharding.shard_shape(q.qvalue.shape)[WEIGHTS[name][1]] * RANKS == q.qvalue.shape[WEIGHTS[name][1]]
        )
    if kind == AxisType.Manual:

        def local(parts: dict[str, Any], x: jax.Array) -> Any:
            whole = {name: jc.distributed.unshard(q, "fsdp", axis=WEIGHTS[name][1]) for name, q in parts.items()}
            return jax.tree.map(lambda leaf: leaf[None], applied(whole, x))

        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, placed)
        program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs, P()), out_specs=P("fsdp")))
    else:
        program = jax.jit(lambda w, x: applied(jc.distributed.unshard(w), x))
    with jax.set_mesh(mesh):
        compiled = program.lower(placed, x).compile()
        found = jax.tree.map(np.asarray, compiled(placed, x))
    wanted = jax.tree.map(np.asarray, jax.jit(applied)(weights, x))
    if kind == AxisType.Manual:
        found = jax.tree.map(lambda leaf: leaf[-1], found)
    for name, (values, product) in wanted.items():
        np.testing.assert_array_equal(found[name][0].view(np.uint32), values.view(np.uint32), name)
        np.testing.assert_allclose(found[name][1], product, rtol=1e-5, atol=1e-4)
    moved = wire_bytes(compiled.as_text() or "", RANKS)
    stored_bytes = sum(q.nbytes for q in weights.values())
    assert moved.get("f32", 0) <= 32 * 128 / 16 * 4 * 2  # scales; a weight has 4096 numbers
    assert sum(moved.values()) <= stored_bytes * (RANKS - 1) / RANKS * 1.01


#: The format of a matrix, and whether its gathered codes count: codes of 8 bits and numbers together are 1.21.
PEAKS = [
    ("int4(group=128,scale=bfloat16)", False),
    ("int4(group=32,scale=bfloat16)", False),
    ("mxfp4", False),
    ("nvfp4", False),
    ("int8(channel=0)", True),
    ("float8_e4m3fn(channel=0)", True),
    ("float8_e5m2", True),
    ("mxfp8_e4m3", True),
]


@pytest.mark.parametrize(
    ("spec", "counts_codes"), [PEAKS[4], *(pytest.param(*PEAKS[at], marks=pytest.mark.slow) for at in (1, 3))]
)
def test_one_layer_is_whole_at_a_time(spec: str, counts_codes: bool) -> None:
    """100 million parameters on 8 devices: at most 1.2 times a part of all codes and one layer of numbers.

    With `counts_codes` a layer is its numbers and its gathered codes, which exist together before they are decoded.
    """

    def model(weights: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return jax.nn.relu(x @ jc.dequantize(jc.distributed.unshard(w))), None

        return jax.lax.scan(layer, x, weights)[0]

    check_peak(spec, model, in_layers(stack_of(spec)), counts_codes)


@pytest.mark.parametrize(
    ("spec", "counts_codes"), [PEAKS[6], *(pytest.param(*PEAKS[at], marks=pytest.mark.slow) for at in (0, 2, 5, 7))]
)
def test_one_layer_by_its_number_is_whole_at_a_time(spec: str, counts_codes: bool) -> None:
    """The same of a scan over numbers of layers: no stack of float8 is converted before it."""

    def model(weights: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return jax.nn.relu(x @ jc.dequantize(jc.distributed.unshard(weights, entry=i))), None

        return jax.lax.scan(layer, x, jnp.arange(LAYERS))[0]

    check_peak(spec, model, in_layers(stack_of(spec)), counts_codes)


@pytest.mark.parametrize(
    "spec", [PEAKS[4][0], *(pytest.param(PEAKS[at][0], marks=pytest.mark.slow) for at in (1, 3, 5, 7))]
)
def test_a_layer_of_two_matrices(spec: str) -> None:
    """The codes of one matrix are gone when those of the other come, so they need not count in any format."""

    def model(weights: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            up, down = (jc.distributed.unshard(w, entry=i) for w in weights)
            return x + jax.nn.relu(x @ jc.dequantize(up)) @ jc.dequantize(down), None

        return jax.lax.scan(layer, x, jnp.arange(LAYERS))[0]

    half = WIDTH // 2
    check_peak(spec, model, [in_layers(stack_of(spec, *shape)) for shape in ((WIDTH, half), (half, WIDTH))], False)


@pytest.mark.parametrize(
    ("spec", "counts_codes"), [PEAKS[5], *(pytest.param(*PEAKS[at], marks=pytest.mark.slow) for at in (1, 3))]
)
def test_one_layer_of_a_loop_is_whole_at_a_time(spec: str, counts_codes: bool) -> None:
    """The same of layers that are no stack: `after` orders them."""
    one = jax.tree.map(lambda leaf: placed_shape(leaf.shape, leaf, 0), stack_of(spec))

    def model(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ jc.dequantize(jc.distributed.unshard(w, after=x)))
        return x

    check_peak(spec, model, LAYERS * [one], counts_codes)


LAYERS, WIDTH, MANY = 6, 4096, 8


def stack_of(spec: str, rows: int = WIDTH, columns: int = WIDTH) -> Any:
    """The shapes of a packed weight, each leaf with its sharding: in parts along its first axis."""
    mesh = Mesh(np.array(jax.devices()[:MANY]), ("fsdp",), axis_types=(AxisType.Auto,))
    one = jax.eval_shape(lambda: jc.quantize(jnp.zeros((rows, columns)), spec))
    where = one.shardings(NamedSharding(mesh, P("fsdp")))
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), one, where)


def in_layers(one: Any) -> Any:
    """The shapes of stacks of all layers."""
    return jax.tree.map(lambda leaf: placed_shape((LAYERS, *leaf.shape), leaf, 1), one)


def placed_shape(shape: tuple[int, ...], one: Any, more: int) -> Any:
    sharding = NamedSharding(one.sharding.mesh, P(*[None] * more, *one.sharding.spec))
    return jax.ShapeDtypeStruct(shape, one.dtype, sharding=sharding)


def check_peak(spec: str, model: Any, weights: Any, counts_codes: bool) -> None:
    mesh = jax.tree.leaves(weights)[0].sharding.mesh
    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):
        memory = jax.jit(model).lower(weights, x).compile().memory_analysis()
    assert memory is not None
    codes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights)) / LAYERS
    allowed = LAYERS * codes / MANY + 4 * WIDTH**2 + counts_codes * codes
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    print(f"{spec}: {peak / 1e6:.1f} MB, {peak / allowed:.3f} of the parts and a layer")
    assert peak <= 1.2 * allowed


@further
@pytest.mark.parametrize("spec", ["e4m3fn(group=(4,16))", pytest.param("nvfp4", marks=pytest.mark.slow)])
def a_layer_by_its_number(spec: str, rng: np.random.Generator) -> None:
    """The bits of the layer, in an automatic mesh and in jax.shard_map."""
    numbers = jnp.asarray(rng.standard_normal((3, 32, 64)), jnp.float32)
    stacks = {"w": jax.vmap(lambda w: jc.quantize(w, spec))(numbers)}
    mesh = mesh_of(AxisType.Auto)
    placed = jc.nn.shard(stacks, {"*": P(None, "fsdp")}, mesh)

    def one(i: jax.Array) -> Any:
        return jax.tree.map(jc.dequantize, jc.distributed.unshard(placed, entry=i), is_leaf=is_stored)

    with jax.set_mesh(mesh):
        found = jax.jit(lambda: jax.lax.map(one, jnp.arange(3)))()
    wanted = jax.tree.map(jc.dequantize, stacks, is_leaf=is_stored)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)

    def local(parts: Any) -> Any:
        return jax.tree.map(jc.dequantize, jc.distributed.unshard(parts, "fsdp", entry=1), is_leaf=is_stored)

    if spec == "nvfp4":  # its scale of the tensor is in no part
        return
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(None, "fsdp"), out_specs=P(), check_vma=False)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(mapped)(placed), {"w": wanted["w"][1]})


@further.first
def an_entry_is_one_of_a_stack_of_layers() -> None:
    stacks = {"w": jax.eval_shape(lambda x: jax.vmap(lambda w: jc.quantize(w, "nvfp4"))(x), jnp.ones((3, 32, 64)))}
    stacks = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), stacks)
    whole = {"w": jc.quantize(jnp.ones((3, 32, 64)), "nvfp4"), "b": jnp.ones(4)}
    for tree, entry, error, text in [
        (whole, 1, ValueError, r"entry=1: every leaf must have a first axis of one length.*'b': \(4,\)"),
        (whole["w"], 1, ValueError, r"scale.1': \(\)"),
        (stacks, 3, ValueError, "entry=3 must be an integer from 0 to 2"),
        (stacks, 1.0, TypeError, "entry=1.0 must be an integer"),
        (stacks, jnp.ones(()), TypeError, "dtype float32; it must be one integer"),
        (stacks, jnp.zeros(2, int), TypeError, r"shape \(2,\)"),
    ]:
        with pytest.raises(error, match=text):
            jc.distributed.unshard(tree, entry=entry)  # type: ignore[arg-type]


def is_stored(leaf: Any) -> bool:
    return isinstance(leaf, jc.QArray)


def test_a_module_is_placed() -> None:
    model = jc.nn.quantize(nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jc.Rule(weight="int4(group=16)"), "ptq")
    placed = jc.nn.shard(model, {"kernel": P(None, "fsdp")}, mesh_of(AxisType.Auto))
    assert placed.kernel[...].qvalue.sharding.spec == P(None, "fsdp")
    assert placed.bias[...].sharding.spec == P()
    assert len(model.kernel[...].qvalue.devices()) == 1
    x = jnp.ones((2, 64))
    np.testing.assert_array_equal(jc.dequantize(placed.kernel[...]), jc.dequantize(model.kernel[...]))
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(placed, x), model(x), rtol=1e-5)


def test_what_is_refused(rng: np.random.Generator) -> None:
    mesh = mesh_of(AxisType.Auto)
    q = {"w": jc.quantize(rng.standard_normal((6, 96)).astype(np.float32), "int4(group=32)"), "b": jnp.zeros(6)}
    for rules, error, text in [
        ({"w": P(None, "fsdp")}, ValueError, "w: 'fsdp' cuts axis 1 of length 96 into 4 parts.*that fit: 1, 3"),
        ({"w": P("fsdp")}, ValueError, "w: 'fsdp' cuts axis 0 of length 6 into 4 parts.*that fit: 1, 2, 3, 6"),
        ({"w": P("rows")}, ValueError, "has no axis 'rows'"),
        ({"w": P(None, None, "fsdp")}, ValueError, "names 3 axes, and the array has 2"),
        ({"v": P("fsdp")}, ValueError, "'v' matches no array"),
        ({"b": P("fsdp")}, ValueError, "b: "),
        ({"w": "fsdp"}, TypeError, "must be a jax.sharding.PartitionSpec"),
        ({"w": P(None, None), "*": P(), "b": P()}, ValueError, "'b' matches no array, or only such as an earlier"),
        (3, TypeError, "rules=3 must map patterns"),
    ]:
        with pytest.raises(error, match=text):
            jc.nn.shard(q, rules, mesh)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no mesh"):
        jc.distributed.unshard(q)
    for wrong in (1.0, jnp.ones(2, bool), jnp.ones(2, complex)):
        with pytest.raises(TypeError, match="must be an array of real numbers"):
            jc.distributed.unshard(q, after=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cut groups of 32"):
        jax.vmap(lambda q: jc.distributed.unshard(q, "i", axis=1), axis_name="i")(
            jax.tree.map(lambda leaf: leaf[None], jc.quantize(jnp.ones((2, 40)), "int4(group=32)"))
        )


test_further = further.test()
