"""round_to_format on eight devices: the bits of the unsharded call, and no communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _round.test_round_transforms import KEY, OTHER, numbers, rounded, same
from further import Further
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

further = Further()

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")

TEXTS = {
    "deterministic": "e4m3fn:up",
    "stochastic": "e5m2:stochastic",
    "wrapping": "integer4:wrap",
    "codebook": "codebook(-1,-0.25,0,0.5,1):stochastic_equal",
}
CLIPPED = "e5m2:stochastic:gradient=clipped+[e4m3:stochastic]"
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


def line(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((8,), ("a",), axis_types=(kind,))


def square(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))


def chunk(text: str) -> Any:
    """The part of one device on a line: rows, contiguous in C order."""

    def part(x: jax.Array) -> jax.Array:
        return rounded(x, text, offset=lax.axis_index("a") * x.size)

    return part


def tile(text: str) -> Any:
    """The part of one device on a 4 x 2 mesh, by (starts, shape)."""

    def part(x: jax.Array) -> jax.Array:
        rows, columns = x.shape
        starts = (lax.axis_index("a") * rows, lax.axis_index("b") * columns)
        return rounded(x, text, offset=(starts, (4 * rows, 2 * columns)))

    return part


@further.first
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", TEXTS)
def shard_map_on_a_line(name):
    x = jnp.asarray(numbers(np.float32, (8 * 5, 3)))
    run = jax.shard_map(chunk(TEXTS[name]), mesh=line(), in_specs=P("a"), out_specs=P("a"))
    same(jax.jit(run)(x), rounded(x, TEXTS[name]))


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", TEXTS)
def test_shard_map_on_a_square(name):
    x = jnp.asarray(numbers(np.float32, (4 * 3, 2 * 7)))
    run = jax.shard_map(tile(TEXTS[name]), mesh=square(), in_specs=P("a", "b"), out_specs=P("a", "b"))
    same(jax.jit(run)(x), rounded(x, TEXTS[name]))


def shard_map_of_deterministic_modes_needs_no_offset():
    x = jnp.asarray(numbers(np.float32, (8, 7)))
    run = jax.shard_map(lambda x: rounded(x, "e4m3:odd"), mesh=line(), in_specs=P("a"), out_specs=P("a"))
    same(run(x), rounded(x, "e4m3:odd"))


def without_an_offset_every_device_draws_the_same():
    """What the offset is for: each device counts its elements from 0."""
    x = jnp.full((8 * 64,), 1.1)
    run = jax.shard_map(lambda x: rounded(x, "e4m3:stochastic"), mesh=line(), in_specs=P("a"), out_specs=P("a"))
    rows = np.asarray(run(x)).reshape(8, 64)
    assert (rows == rows[0]).all()
    assert len({row.tobytes() for row in np.asarray(rounded(x, "e4m3:stochastic")).reshape(8, 64)}) == 8


def keys_folded_by_device():
    x = jnp.full((8 * 64,), 1.1)

    def part(x: jax.Array) -> jax.Array:
        return rounded(x, "e4m3:stochastic", jax.random.fold_in(KEY, lax.axis_index("a")))

    run = jax.jit(jax.shard_map(part, mesh=line(), in_specs=P("a"), out_specs=P("a")))
    rows = [rounded(x[:64], "e4m3:stochastic", jax.random.fold_in(KEY, k)) for k in range(8)]
    same(run(x), jnp.concatenate(rows))


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("inside", [False, True], ids=["vjp of shard_map", "vjp in shard_map"])
def test_derivatives_through_shard_map(inside):
    """Clipping and the stochastic rounding of the cotangent too are those of the unsharded call."""
    x, cotangent = (jnp.asarray(numbers(np.float32, (4 * 3, 2 * 7), seed) * 1e3) for seed in (0, 1))
    specs: Any = {"mesh": square(), "in_specs": P("a", "b"), "out_specs": P("a", "b")}

    @jax.jit
    def sharded(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        if not inside:
            return jax.vjp(jax.shard_map(tile(CLIPPED), **specs), x)[1](cotangent)[0]
        pull = jax.shard_map(
            lambda x, c: jax.vjp(tile(CLIPPED), x)[1](c)[0], **specs | {"in_specs": (P("a", "b"), P("a", "b"))}
        )
        return pull(x, cotangent)

    whole = jax.jit(lambda x, c: jax.vjp(lambda x: rounded(x, CLIPPED), x)[1](c)[0])
    same(sharded(x, cotangent), whole(x, cotangent))
    assert (np.asarray(whole(x, cotangent)) == 0).any()


# --- automatic partitioning ---------------------------------------------------------------------------------------


@pytest.mark.in_turn(16)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("layout", ["rows", "columns", "tiles"])
def test_automatic_partitioning_communicates_nothing(layout, name):
    mesh, spec = {"rows": (line(), P("a")), "columns": (line(), P(None, "a")), "tiles": (square(), P("a", "b"))}[layout]
    x = jnp.asarray(numbers(np.float32, (16, 24)))
    placed = jax.device_put(x, NamedSharding(mesh, spec))
    compiled = jax.jit(lambda x: rounded(x, TEXTS[name])).lower(placed).compile()
    assert not [word for word in COLLECTIVES if word in str(compiled.as_text())]
    out = compiled(placed)
    assert out.sharding.is_equivalent_to(placed.sharding, 2)
    same(out, rounded(x, TEXTS[name]))


def automatic_partitioning_of_derivatives():
    x, cotangent = (jnp.asarray(numbers(np.float32, (16, 24), seed) * 1e3) for seed in (0, 1))
    where = NamedSharding(square(), P("b", "a"))
    pull = jax.jit(lambda x, c: jax.vjp(lambda x: rounded(x, CLIPPED), x)[1](c)[0])
    compiled = pull.lower(jax.device_put(x, where), jax.device_put(cotangent, where)).compile()
    assert not [word for word in COLLECTIVES if word in str(compiled.as_text())]
    same(compiled(jax.device_put(x, where), jax.device_put(cotangent, where)), pull(x, cotangent))


def eager_calls_keep_the_sharding():
    x = jnp.asarray(numbers(np.float32, (16, 24)))
    placed = jax.device_put(x, NamedSharding(square(), P("a", "b")))
    out = rounded(placed, "e5m2:stochastic")
    assert out.sharding.is_equivalent_to(placed.sharding, 2)
    same(out, rounded(x, "e5m2:stochastic"))


# --- explicit sharding --------------------------------------------------------------------------------------------

EXPLICIT = TEXTS | {"long codebook": f"codebook({','.join(map(str, range(-20, 21)))})"}


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", EXPLICIT)
@pytest.mark.parametrize("current", [True, False], ids=["mesh set", "mesh of the array"])
def test_explicit_sharding(current, name):
    x, mesh = jnp.asarray(numbers(np.float32, (16, 24))), square(AxisType.Explicit)
    expected = rounded(x, EXPLICIT[name])
    placed = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
    if current:
        with jax.set_mesh(mesh):
            out = jax.jit(lambda x: rounded(x, EXPLICIT[name]))(placed)
    else:
        out = rounded(placed, EXPLICIT[name])
    assert out.sharding.spec == P("a", "b")  # type: ignore[attr-defined]
    same(out, expected)


def derivatives_under_explicit_sharding():
    x, cotangent = (jnp.asarray(numbers(np.float32, (16, 24), seed) * 1e3) for seed in (0, 1))
    mesh = square(AxisType.Explicit)
    where = NamedSharding(mesh, P("a", "b"))

    def pull(x: jax.Array, c: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: rounded(x, CLIPPED), x)[1](c)[0]

    with jax.set_mesh(mesh):
        out = jax.jit(pull)(jax.device_put(x, where), jax.device_put(cotangent, where))
    assert out.sharding.spec == P("a", "b")
    same(out, jax.jit(pull)(x, cotangent))


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    "check",
    [automatic_partitioning_of_derivatives, derivatives_under_explicit_sharding],
    ids=lambda check: check.__name__,
)
def test_derivatives_of_sharded_arrays(check: Callable[[], None]) -> None:
    check()


def vmap_over_a_sharded_axis_with_split_keys():
    x, keys = jnp.asarray(numbers(np.float32, (8, 33))), jax.random.split(OTHER, 8)
    placed = jax.device_put(x, NamedSharding(line(), P("a")))
    call = jax.jit(jax.vmap(lambda x, key: rounded(x, "e4m3:stochastic", key)))
    same(
        call(placed, keys), jnp.stack([rounded(row, "e4m3:stochastic", key) for row, key in zip(x, keys, strict=True)])
    )


@pytest.mark.in_turn(1000)
@pytest.mark.smoke
@pytest.mark.parametrize(
    "check",
    [
        keys_folded_by_device,
        without_an_offset_every_device_draws_the_same,
        shard_map_of_deterministic_modes_needs_no_offset,
        eager_calls_keep_the_sharding,
        vmap_over_a_sharded_axis_with_split_keys,
    ],
    ids=lambda check: check.__name__,
)
def test_draws_of_devices(check: Callable[[], None]) -> None:
    check()


test_further = further.test()
