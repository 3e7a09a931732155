"""Stored arrays on eight devices: the bits of the unsharded call, each leaf in shards, no needless communication."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc

further = Further()

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")

KEY = jax.random.key(3)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))


def numbers(shape: tuple[int, ...] = (16, 64)) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).standard_normal(shape), jnp.float32)


def same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def collectives(compiled: Any) -> set[str]:
    text = compiled.as_text()
    return {name for name in COLLECTIVES if f" {name}(" in text or f" {name}-start(" in text}


@further
@pytest.mark.parametrize(
    ("text", "where", "moves"),
    [
        ("int4(group=16,scale=bfloat16)", P("a", "b"), set()),
        ("mxfp4", P(("a", "b"), None), set()),
        ("int8(channel=0)", P(("a", "b"), None), set()),
        ("int4(group=16):stochastic", P("a", "b"), set()),
        ("int8(group=tensor)", P("a", "b"), {"all-reduce"}),
        ("nvfp4", P("a", None), {"all-reduce"}),
    ],
)
def sharded_is_unsharded(text: str, where: P, moves: set[str]) -> None:
    x, sharding = numbers(), NamedSharding(mesh(), where)

    def stored(x: jax.Array) -> Any:
        return jc.quantize(x, text, KEY)

    run = jax.jit(stored)
    wanted = run(x)
    compiled = jax.jit(stored, in_shardings=sharding).lower(x).compile()
    got = compiled(jax.device_put(x, sharding))
    same(got, wanted)
    assert collectives(compiled) <= moves
    assert got.qvalue.sharding.is_equivalent_to(sharding, 2)

    back = jax.jit(jc.dequantize).lower(got).compile()
    assert collectives(back) == set()
    values = back(got)
    same(values, jc.dequantize(wanted))
    assert values.sharding.is_equivalent_to(sharding, 2)


@further.first
def each_leaf_is_placed() -> None:
    q = jc.quantize(numbers(), "int4(group=16,scale=bfloat16)")
    placed = jax.device_put(q, NamedSharding(mesh(), P("a", "b")))
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    for kind in kinds:
        places = q.shardings(NamedSharding(mesh(), P("a", "b"), memory_kind=kind))
        assert {leaf.memory_kind for leaf in jax.tree.leaves(places)} == {kind}
    assert placed.qvalue.addressable_shards[0].data.shape == (4, 16)
    assert placed.scale.addressable_shards[0].data.shape == (4, 2)
    same(jax.jit(jc.dequantize)(placed), jc.dequantize(q))
    rows = jax.jit(lambda q: q[8:])(placed)
    same(jc.dequantize(rows), jc.dequantize(q)[8:])


@further
@pytest.mark.parametrize(
    ("text", "where", "scales"),
    [
        ("nvfp4", P("a", None), [P("a", None), P()]),
        ("int4(group=8,scale=int8(channel=0))", P(("a", "b")), [P(("a", "b"), None)] * 2),
    ],
)
def every_format_is_placed_in_one_call(text: str, where: P, scales: list[P]) -> None:
    q = jc.quantize(numbers(), text)
    places = q.shardings(NamedSharding(mesh(), where))
    placed = jax.device_put(q, places)
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(placed)[1:]] == scales
    assert placed.qvalue.sharding.is_equivalent_to(NamedSharding(mesh(), where), 2)
    same(jax.jit(jc.dequantize, in_shardings=(places,))(placed), jc.dequantize(q))


@further
def shardings_of_stacks_and_what_is_refused() -> None:
    stack = jax.vmap(lambda x: jc.quantize(x, "nvfp4"))(numbers((8, 4, 32)))
    places = stack.shardings(NamedSharding(mesh(), P("a")))
    assert tuple(places.scale[1].spec) == ("a",)
    same(jc.dequantize(jax.device_put(stack, places)), jc.dequantize(stack))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    assert set(jax.tree.leaves(stack.shardings(one))) == {one}
    q = jc.quantize(numbers((4, 4)), "int4(group=4)")
    for error, said, call in (
        (ValueError, "names 3 axes", lambda: q.shardings(NamedSharding(mesh(), P(None, None, "a")))),
        (ValueError, "codes of shape", lambda: q.shardings(NamedSharding(mesh(), P(None, "a")))),
        (TypeError, "sharding=3", lambda: q.shardings(3)),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=said):
            call()


@further
def explicit_meshes() -> None:
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(numbers(), P("a", None))
        q = jax.jit(lambda x: jc.quantize(x, "int4(group=16,scale=bfloat16)"))(x)
        values = jax.jit(jc.dequantize)(q)
    same(values, jc.round_to_format(numbers(), "int4(group=16,scale=bfloat16)"))


NESTED = "nf4(group=8,scale=uint8(group=256,zero_point=float))"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("e2m1", P(None, "a")),
        *(
            pytest.param(text, where, marks=pytest.mark.slow)
            for where in (P("a", "b"), P(None, ("a", "b")))
            for text in (
                NESTED, "hif4", "uint4(group=all,zero_point=float)", "int4(group=4,scale=int8(group=all))",
                "int4(group=16,rule=mse)", "int3(group=10)", "int4(group=8,sparse=2:4)",
            )
        ),
    ],
)  # fmt: skip
def test_explicit_shardings_may_cut_groups_and_words_of_codes(text: str, where: P) -> None:
    sharding, x = NamedSharding(mesh(AxisType.Explicit), where), numbers((4, 16) if text == "e2m1" else (8, 48))
    wanted, placed = jc.quantize(x, text), jax.device_put(x, sharding)
    try:
        stored = jax.device_put(wanted, wanted.shardings(sharding))
    except ValueError:  # codes that cannot be cut into equal parts
        stored = wanted
    values = jc.dequantize(stored)
    same(values, jc.dequantize(wanted))
    if stored is not wanted:
        assert jax.typeof(values).sharding.spec == jax.typeof(placed).sharding.spec
    if text != "e2m1":
        same(jc.quantize(placed, text), wanted)
        rounded = jc.round_to_format(placed, text)
        same(rounded, values)
        assert jax.typeof(rounded).sharding.spec == jax.typeof(placed).sharding.spec


@further
def shard_map_quantizes_its_own_part() -> None:
    x = numbers()

    def part(x: jax.Array) -> jax.Array:
        row = 4 * jax.lax.axis_index("a")
        return jc.quantize(x, "int4(group=16):stochastic", KEY, offset=((row, 0), (16, 64))).qvalue

    line = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    got = jax.jit(jax.shard_map(part, mesh=line, in_specs=P("a"), out_specs=P("a")))(x)
    same(got, jc.quantize(x, "int4(group=16):stochastic", KEY).qvalue)


test_further = further.test()
