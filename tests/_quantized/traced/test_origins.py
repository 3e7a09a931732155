"""Origins: the axes of a parameter are followed through every way of moving numbers.

The test of an origin is the array itself. Each index of a parameter's axis is written into the parameter as a number; a
value has that axis where its numbers say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jchop._quantized.program.param_uses import ProvenancePlanner
from jchop._quantized.program.provenance import FROM_DATA, FROM_KEYS, ParamOrigin, Provenance, param_provenance

SHAPE = (4, 6, 10)
MESH = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])


def fact_of(function: Callable[..., Any], *data: Any, shape: tuple[int, ...] = SHAPE) -> Provenance:
    """What is known of what a function makes of a parameter, and of data or keys."""
    closed = jax.make_jaxpr(function)(jnp.zeros(shape), *data)
    facts = [FROM_KEYS if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else FROM_DATA for x in data]
    (fact,) = ProvenancePlanner().plan(closed, [param_provenance(0, shape), *facts]).out
    return fact


def origin_of(function: Callable[..., Any], *data: Any, shape: tuple[int, ...] = SHAPE) -> ParamOrigin | None:
    """The origin of what a function makes of a parameter, and of data."""
    fact = fact_of(function, *data, shape=shape)
    assert len(fact.origins) <= 1
    return fact.origins[0] if fact.origins else None


def in_parts(function: Callable[..., Any], *cut: str | None) -> Callable[..., Any]:
    """A function of the pieces of a parameter that two devices have, with the whole result on each."""
    return jax.shard_map(function, mesh=MESH, in_specs=P(*cut), out_specs=P(), check_vma=False)


def indexes_of(origin: ParamOrigin, shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[np.ndarray]:
    """By the origin: for each axis of the parameter the index at every place of a value of `shape`."""
    found = [np.zeros(shape, int) for _ in sizes]
    for position, parts in enumerate(origin.axes):
        number = np.arange(shape[position]).reshape([-1 if i == position else 1 for i in range(len(shape))])
        for part in reversed(parts):
            found[part.axis] = found[part.axis] + number % part.size * part.inner
            number = number // part.size
    return found


MOVES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda w: w,
    "transposed": lambda w: w.T,
    "axes moved": lambda w: jnp.moveaxis(w, 0, 1),
    "joined": lambda w: w.reshape(24, 10),
    "all joined": lambda w: w.reshape(-1),
    "split": lambda w: w.reshape(4, 6, 2, 5),
    "split and moved": lambda w: w.reshape(4, 2, 3, 10).transpose(2, 0, 1, 3),
    "joined, then split otherwise": lambda w: w.reshape(24, 10).reshape(8, 3, 10),
    "split, moved, joined": lambda w: w.reshape(4, 2, 3, 10).transpose(0, 2, 1, 3).reshape(4, 6, 10),
    "new axes": lambda w: w[:, None, :, None],
    "broadcast": lambda w: jnp.broadcast_to(w[None], (3, *SHAPE)),
    "squeezed": lambda w: w.reshape(4, 1, 60).squeeze(1),
    "cast": lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
    "jitted": jax.jit(lambda w: w.T.reshape(10, 24)),
    "checkpointed": jax.checkpoint(lambda w: w.T),
    "gathered": in_parts(lambda w: jax.lax.all_gather(w, "d", axis=1, tiled=True), None, "d"),
    "gathered as a stack": in_parts(lambda w: jax.lax.all_gather(w, "d", axis=2), None, "d"),
    "gathered rows of one": in_parts(lambda w: jax.lax.all_gather(w[0, :1], "d"), None, None, "d"),
    "gathered as a stack, joined": in_parts(lambda w: jax.lax.all_gather(w.reshape(2, 60), "d").reshape(4, 60), "d"),
    "gathered of all": in_parts(
        lambda w: jax.lax.all_gather(jax.lax.all_to_all(w, "d", 0, 2, tiled=True), "d", axis=0, tiled=True),
        None, None, "d",
    ),
    "added where others have zeros": in_parts(
        lambda w: jax.lax.psum(
            jax.lax.dynamic_update_slice(jnp.zeros(SHAPE), w, (2 * jax.lax.axis_index("d"), 0, 0)), "d"
        ),
        "d",
    ),
}  # fmt: skip


def test_the_axes_of_a_moved_parameter_are_those_that_its_numbers_say() -> None:
    for name, move in MOVES.items():
        origin = origin_of(move)
        assert origin is not None, name
        for axis, n in enumerate(SHAPE):
            index = np.arange(n).reshape([-1 if i == axis else 1 for i in range(len(SHAPE))])
            moved = np.asarray(move(jnp.broadcast_to(jnp.asarray(index, jnp.float32), SHAPE)))
            np.testing.assert_array_equal(indexes_of(origin, moved.shape, SHAPE)[axis], moved, name)


CHANGED: list[tuple[Callable[..., Any], list[int | None] | None]] = [
    (in_parts(lambda w: jax.lax.ppermute(w, "d", [(0, 1), (1, 0)]), "d"), [0, 1, 2]),
    (in_parts(lambda w: jax.lax.psum_scatter(w, "d", scatter_dimension=1, tiled=True)), [0, 1, 2]),
    (in_parts(lambda w: jax.lax.all_gather(w, "d")), [None, 0, 1, 2]),  # each device has the whole
    (in_parts(lambda w: jax.lax.all_to_all(w, "d", 0, 0), "d"), None),
    (lambda w: w[1], [1, 2]),
    (lambda w: w[:, 2], [0, 2]),
    (lambda w: jax.lax.dynamic_index_in_dim(w, jnp.int32(1), 1, keepdims=False), [0, 2]),
    (lambda w: w[jnp.array([0, 2, 1])], [None, 1, 2]),
    (lambda w: w[:2], [0, 1, 2]),
    (lambda w: jnp.concatenate([w, w], 1), [0, 1, 2]),
    (lambda w: jnp.pad(w, ((0, 1), (0, 0), (0, 0))), [0, 1, 2]),
    (lambda w: jnp.where(jnp.tri(6, 10, dtype=bool), w, 0.0), [0, 1, 2]),
    (lambda w: (w - w.mean((1, 2), keepdims=True)) / (1e-3 + w.std((1, 2), keepdims=True)), [0, 1, 2]),
    (lambda w: jax.lax.scan(lambda c, v: (c, v.T @ jnp.ones((6, 3))), 0, w)[1], None),
    (lambda w: jnp.broadcast_to(w[:, None], (4, 3, 6, 10)).reshape(12, 60), [0, 1]),
    (lambda w: jnp.sum(w), None),
]


def test_the_axes_of_a_piece_or_of_what_is_computed_from_parameters() -> None:
    for at, (change, axes) in enumerate(CHANGED):
        origin = origin_of(change)
        got = None if origin is None else [parts[0].axis if parts else None for parts in origin.axes]
        assert got == axes, at


def test_a_value_that_depends_on_data_has_no_origin() -> None:
    assert origin_of(lambda w, x: w * x, jnp.zeros(SHAPE)) is None
    assert origin_of(lambda w, x: jnp.where(x > 0, x, w), jnp.zeros(SHAPE)) is None
    assert origin_of(lambda w, x: jnp.where(x > 0, w, 0.0), jnp.zeros(SHAPE)) is not None  # data that only chooses
    assert origin_of(lambda w, i: w[i], jnp.int32(1)) is not None


def test_each_result_of_a_barrier_is_its_own_operand() -> None:
    barrier = lambda i: lambda w, x: jax.lax.optimization_barrier((x, w.T, w[0]))[i]  # noqa: E731
    w, row = (origin_of(lambda w, x, i=i: barrier(i)(w, x), jnp.zeros(3)) for i in (1, 2))
    assert fact_of(barrier(0), jnp.zeros(3)) == FROM_DATA
    assert w == origin_of(lambda w: w.T) and row == origin_of(lambda w: w[0])


MULTIPLIED: list[tuple[Callable[..., Any], bool]] = [
    (lambda w, x: x @ w, True),
    (lambda w, x: x @ jnp.roll(w, 2, 0), False),
    (lambda w, x: x @ jnp.roll(w, 2, 1), True),  # not along the sum
    (lambda w, x: x[:, :3] @ w.reshape(2, 3, 10)[1], True),  # a matrix of a stack within an axis
    (lambda w, x: jnp.einsum("bk,bkn->bn", x.T, jnp.roll(w, 1, 0)[:, None]), False),  # batched
    (lambda w, x: x @ w[::-1], False),
    (lambda w, x: x @ w[::-1][:, ::-1][::-1, ::-1], True),  # twice
    (lambda w, x: x @ in_parts(lambda w: jax.lax.all_gather(w, "d", tiled=True), "d")(w), False),
]


def test_a_product_knows_whether_it_takes_numbers_in_their_order() -> None:
    for at, (multiply, moved) in enumerate(MULTIPLIED):
        closed = jax.make_jaxpr(multiply)(jnp.zeros(TABLE), jnp.zeros((1, 6)))
        uses = [
            some
            for step in ProvenancePlanner().plan(closed, [param_provenance(0, TABLE), FROM_DATA]).walk()
            for some in step.uses
        ]
        assert [use.is_intact for some in uses for use in some] == [moved], at


TABLE = (6, 10)
TOKEN = jnp.int32(1)


LOOK_UPS: list[Callable[[Any, Any], Any]] = [
    lambda w, i: w[i],
    lambda w, i: w[i, 2:5],
    lambda w, i: w[:, i],
    lambda w, i: w[i, i],
    lambda w, i: w.at[i].get(),
    lambda w, i: w.at[i].get(mode="fill"),
    lambda w, i: jnp.take(w, i, axis=0),
    lambda w, i: jax.lax.dynamic_index_in_dim(w, i, keepdims=False),
    lambda w, i: jax.lax.dynamic_slice_in_dim(w, i, 1),
    lambda w, i: jax.jit(lambda w: w[i])(w),
    lambda w, i: jax.vmap(lambda i: w[i])(i[None]),
    lambda w, i: jax.lax.while_loop(lambda j: j > 9, lambda j: j - 1, i) + w[i],
    lambda w, i: w[jnp.where(i > 0, 3, 4)],  # data choose the index among constants
    lambda w, i: w[jnp.arange(6)[::-1][i]],
    lambda w, i: w[i[None]],
]


def test_a_row_that_data_choose_is_data() -> None:
    for at, look_up in enumerate(LOOK_UPS):
        drawn = lambda w, key, f=look_up: f(w, jax.random.randint(key, (), 0, 6))  # noqa: E731
        assert fact_of(look_up, TOKEN, shape=TABLE) == FROM_DATA, at
        assert fact_of(drawn, jax.random.key(0), shape=TABLE) == FROM_DATA, at


def test_what_a_loop_or_a_constant_chooses_is_a_layer() -> None:
    def total(take: Callable[[Any], Any], layers: Any) -> Any:
        return jax.lax.scan(lambda s, i: (s, take(i)), 0, layers)[1]

    closed = jax.make_jaxpr(lambda w: total(lambda i: w[i] + jnp.take(w, i, axis=0), jnp.arange(6)))(jnp.zeros(TABLE))
    plan = ProvenancePlanner().plan(closed, [param_provenance(0, TABLE)])
    assert not plan.out[0].data and not any(use for step in plan.walk() for some in step.uses for use in some)
    assert fact_of(lambda w: w[2], shape=TABLE).origins


def test_a_window_that_data_place_is_a_part_of_its_parameter() -> None:
    window = lambda w, i: jax.lax.dynamic_slice_in_dim(w, i, 3)  # noqa: E731
    one = origin_of(window, TOKEN, shape=TABLE)
    many = origin_of(lambda w, i: jax.vmap(lambda i: window(w, i))(i[None]), TOKEN, shape=TABLE)
    assert one is not None and many is not None and many.axes == ((), *one.axes)
    vector = origin_of(window, TOKEN, shape=(6,))
    assert vector is not None and [part.axis for part in vector.axes[0]] == [0]


def test_a_scan_takes_one_of_a_stack_and_a_loop_keeps_what_it_carries() -> None:
    shape = (3, 4, 5)
    closed = jax.make_jaxpr(lambda w, x: jax.lax.scan(lambda c, v: (jnp.tanh(c @ v @ v.T), None), x, w)[0])(
        jnp.zeros(shape), jnp.zeros((2, 4))
    )
    plan = ProvenancePlanner().plan(closed, [param_provenance(0, shape), FROM_DATA])
    laid = [use.view for step in plan.walk() for some in step.uses for use in some]
    assert [[part.axis for part in use.contracting] for use in laid if use] == [[1], [2]]
