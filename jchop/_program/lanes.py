"""Programs on concrete values in several lanes, such as samples or shards: loops run turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._program.bind import bind
from jchop._program.control import (
    Interpret,
    ScanOrder,
    ScanTurn,
    WhileParts,
    as_jax_value,
    deciding_places,
    manual_axes,
)
from jchop._program.run import Runner
from jchop._program.seeds import Seeds
from jchop._program.step import ProgramStep
from jchop._program.stopped_loops import STUCK, text_of_stop

# -- shards ------------------------------------------------------------------------------------------------------------


_Step = TypeVar("_Step", bound=ProgramStep)
#: The names and sizes of the mesh axes that values have first; empty outside of `jax.shard_map`.
ShardAxes = tuple[tuple[str, int], ...]


def map_shards(axes: ShardAxes, run: Callable[[Any, list[Any]], Any], seeds: Seeds | None, args: list[Any]) -> Any:
    """``run(seeds, args)`` for all shards: collectives within it see the named axes."""
    if not axes:
        return run(seeds, args)
    by_shard = 0 if seeds is not None and jnp.ndim(seeds.six[0]) else None
    for name, size in reversed(axes):
        run = jax.vmap(run, in_axes=(by_shard, 0), axis_name=name, axis_size=size)
    return run(seeds, args)


def bind_shards(axes: ShardAxes, primitive: Any, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """The results of a primitive for all shards."""
    return map_shards(axes, lambda _, args: bind(primitive, params, *args), None, list(args))


def with_vmap_collective(step: _Step, axes: ShardAxes) -> _Step:
    """The step with a collective that `jax.vmap` takes and that has a derivative, where its own lacks one."""
    if not axes or step.name not in _VMAP_COLLECTIVES:
        return step
    aval = step.eqn.invars[0].aval
    collective = partial(_VMAP_COLLECTIVES[step.name], **step.eqn.params)
    like = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    (eqn,) = jax.make_jaxpr(lambda x: collective(x), axis_env=list(axes))(like).eqns
    return replace(step, eqn=step.eqn.replace(primitive=eqn.primitive, params=eqn.params))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _gather_extreme(x: Array, axes: tuple[str, ...], groups: Any, find: Callable[..., Array]) -> Array:
    """The maximum or minimum over axes; `pmax` and `pmin` have no derivative."""
    for name in axes:
        x = find(lax.all_gather(x, name, axis_index_groups=groups), axis=0)
    return x


_VMAP_COLLECTIVES: dict[str, Callable[..., Any]] = {
    "pvary": lambda x, axes: jnp.copy(x),
    "psum_invariant": lambda x, axes: lax.psum(x, axes),
    "all_gather_invariant": lambda x, all_gather_dimension, axis_name, axis_size, tiled: lax.all_gather(
        x, axis_name, axis=all_gather_dimension, tiled=tiled
    ),
    "pmax": lambda x, axes, axis_index_groups: _gather_extreme(x, axes, axis_index_groups, jnp.max),
    "pmin": lambda x, axes, axis_index_groups: _gather_extreme(x, axes, axis_index_groups, jnp.min),
}


# -- values ------------------------------------------------------------------------------------------------------------


def broadcast_to_shards(x: Any, axes: ShardAxes) -> Any:
    """A value that is the same on all shards."""
    return _broadcast_mesh_axes(x if isinstance(x, np.ndarray) else as_jax_value(x), axes, 0) if axes else x


def align_shard_axes(x: Any, ndim: int) -> np.ndarray:
    """A number of every shard with as many axes as an array of every shard has."""
    x = np.asarray(x)
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def cut_to_shards(x: Any, spec: Any, outer: int, axes: ShardAxes) -> Any:
    """The parts of an array, by the axes of a mesh.

    Args:
        x: the array.
        spec: for each axis of the array the name of a mesh axis, a tuple of names, or None.
        outer: the number of mesh axes that the array has first already.
        axes: the mesh axes that come after these.
    """
    x, sizes, lead = _on_one_device(x), dict(axes), x.shape[:outer]
    shape, where = list(lead), dict[str, int]()
    for i, n in enumerate(x.shape[outer:]):
        for name in _mesh_names(spec, i):
            where[name] = len(shape)
            shape.append(sizes[name])
            n //= sizes[name]
        shape.append(n)
    first = [*range(outer), *(where[name] for name, _ in axes if name in where)]
    x = x.reshape(shape).transpose(*first, *(i for i in range(len(shape)) if i not in first))
    for i, axis in enumerate(axes):
        if axis[0] not in where:
            x = _broadcast_mesh_axes(x, (axis,), outer + i)
    return x


def join_shards(x: Any, spec: Any, outer: int, axes: ShardAxes) -> Any:
    """The array of these parts; of parts that are the same over an axis of the mesh, the first."""
    count = len(x.shape) - outer - len(axes)
    used = [name for i in range(count) for name in _mesh_names(spec, i)]
    names = [name for name, _ in axes if name in used]
    x = x[(slice(None),) * outer + tuple(slice(None) if name in used else 0 for name, _ in axes)]
    order, shape = list(range(outer)), list(x.shape[:outer])
    for i in range(count):
        whole = outer + len(names) + i
        parts = [outer + names.index(name) for name in _mesh_names(spec, i)]
        order += [*parts, whole]
        shape.append(int(np.prod([x.shape[k] for k in (*parts, whole)])))
    return x.transpose(*order).reshape(shape)


def _mesh_names(spec: Any, i: int) -> tuple[str, ...]:
    entry = spec[i] if i < len(spec) else None
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _broadcast_mesh_axes(x: Any, axes: ShardAxes, place: int) -> Any:
    """The array with more axes at a place, along which it is the same."""
    module: Any = np if isinstance(x, np.ndarray) else jnp
    shape = (*x.shape[:place], *(n for _, n in axes), *x.shape[place:])
    return module.broadcast_to(x.reshape(*x.shape[:place], *(1 for _ in axes), *x.shape[place:]), shape)


def _on_one_device(x: Any) -> Any:
    """The array, away from the devices of a mesh, so that operations on it need no partitions."""
    if not isinstance(x, Array) or isinstance(x, jax.core.Tracer) or x.sharding.num_devices == 1:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(x))), impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


def shard_row(x: Any, k: int, axes: ShardAxes) -> Any:
    """Row k of an array of every shard."""
    return x[(slice(None),) * len(axes) + (k,)]


def stack_turns(rows: Sequence[Any], aval: Any, axes: ShardAxes) -> Any:
    """The results of the turns of a scan along the first axis of every shard."""
    if not rows:
        return jnp.zeros((*(n for _, n in axes), *aval.shape), aval.dtype)
    return (np if isinstance(rows[0], np.ndarray) else jnp).stack(rows, len(axes))


#: A value: a sequence with an entry for each lane.
LaneValue = Any
#: The number of turns from which a `while` loop is long.
_LONG_LOOP = 64


class LaneRunner(Runner):
    """Runs a plan on values of several lanes, of which some choose paths. A use of it is a subclass.

    Seeds are a sequence, too. All shards of a `shard_map` run at once.
    """

    #: Runs the steps of one lane.
    runner: Runner
    #: Sentences about loops that were stopped.
    notes: list[str]
    max_turns: int
    differentiates = False
    #: The lanes that run now, and choose their paths.
    lanes: Sequence[int] = (0,)
    #: The turns of the loops around, and how many of these are `while` loops.
    turn: tuple[int, ...] = ()
    while_depth = 0
    #: The axes of the mesh, which values have first.
    axes: ShardAxes = ()

    # -- the part of a use ---------------------------------------------------------------------------------------------

    def map_lanes(self, move: Callable[[Any], Any], value: LaneValue) -> LaneValue:
        """The value with its numbers in another place."""
        raise NotImplementedError

    def row(self, value: LaneValue, k: int) -> LaneValue:
        """Row k of arrays."""
        return self.map_lanes(lambda x: shard_row(x, k, self.axes), value)

    def stack(self, rows: list[LaneValue], aval: Any) -> LaneValue:
        """The results of the turns of a scan along a first axis."""
        raise NotImplementedError

    def choose(self, active: Mapping[int, Any], new: LaneValue, old: LaneValue) -> LaneValue:
        """The new values in active lanes, else the old ones; `active` has bools by lane, or arrays of bools."""
        raise NotImplementedError

    def path_value(self, value: LaneValue, lane: int) -> Any:
        """The value that chooses the path of a lane: an index of branches, a condition."""
        return value[lane]

    def rounded_operands(self, step: Any, seeds: Any, args: list[LaneValue]) -> list[LaneValue]:
        """The operands of an equation that holds programs, in the form that it takes."""
        return args

    def check_long(self) -> None:
        """Called when a `while` loop has made many turns."""

    # -- equations that hold programs ----------------------------------------------------------------------------------

    def context(self, part: Any) -> AbstractContextManager[Any]:
        """The settings of JAX for a part; a mesh is none of them here."""
        return nullcontext() if self.axes else super().context(part)

    def control(self, step: Any, seeds: Any, args: list[LaneValue]) -> list[LaneValue]:
        """The results of an equation that holds programs."""
        return super().control(step, seeds, self.rounded_operands(step, seeds, args))

    def inside(self, seeds: Sequence[Seeds | None], number: int, turn: Any = 0) -> list[Seeds | None]:
        """The seeds of one turn of a program within an equation."""

        def of_turn(seeds: Seeds, _: list[Any]) -> Seeds:
            return seeds.turn(number, turn)

        return [None if one is None else map_shards(self.axes, of_turn, one, []) for one in seeds]

    def switch(self, index: Any, branches: Sequence[Callable[[Any], Any]], operands: Any) -> Any:
        """The results of the branches that lanes, or shards of a lane, take."""
        lanes, out = self.lanes, None
        chosen = {i: np.clip(np.asarray(self.path_value(index, i)), 0, len(branches) - 1) for i in lanes}
        for k in map(int, np.unique(np.stack(list(chosen.values())))):
            self.lanes = [i for i in lanes if np.any(chosen[i] == k)]
            new = branches[k](operands)
            active = {i: jnp.asarray(chosen[i] == k) for i in self.lanes}
            out = new if out is None else [self.choose(active, *pair) for pair in zip(new, out, strict=True)]
        self.lanes = lanes
        return out

    def scan(self, step: Any, turn: ScanTurn, start: Any, xs: Any, order: ScanOrder) -> tuple[Any, Any]:
        """The last carried values and the stacked results, turn by turn."""
        places, outer, carry = range(order.length), self.turn, start
        each: list[list[LaneValue]] = []
        for count, k in enumerate(reversed(places) if order.reverse else places):
            self.turn = (*outer, count)
            carry, ys = turn(carry, [self.row(x, k) for x in xs], count)
            each.append(ys)
        self.turn = outer
        if order.reverse:
            each.reverse()
        avals = [v.aval for v in step.eqn.outvars[len(start) :]]
        return carry, [self.stack([ys[i] for ys in each], aval) for i, aval in enumerate(avals)]

    def while_loop(self, step: Any, loop: WhileParts, start: Any) -> Any:
        """The values with which each lane ends; a loop whose values no longer change is stopped."""
        lanes, outer, carry, turn = self.lanes, self.turn, start, 0
        active = {i: jnp.asarray(True) for i in lanes}
        draws = any(seeds is not None for seeds in loop.condition(start, 0)[0])
        places = () if draws else deciding_places(step)
        self.while_depth += 1
        while True:
            self.turn = (*outer, turn)
            holds = loop.goes_on(carry, turn)
            active = {i: active[i] & self.path_value(holds, i) for i in self.lanes}
            self.lanes = [i for i in self.lanes if bool(jnp.any(active[i]))]
            if not self.lanes:
                break
            if turn >= self.max_turns:
                self._note_stop(step, f"after max_turns={turn} turns", *loop.condition(carry, turn))
                break
            if turn == _LONG_LOOP:
                self.check_long()
            active = {i: active[i] for i in self.lanes}
            new = [self.choose(active, *pair) for pair in zip(loop.next_of(carry, turn), carry, strict=True)]
            turn += 1
            if places and all(same_bits(new[place][i], carry[place][i]) for place in places for i in self.lanes):
                self._note_stop(step, STUCK.format(turns=turn), *loop.condition(carry, turn))
                break
            carry = new
        self.lanes, self.turn, self.while_depth = lanes, outer, self.while_depth - 1
        return carry

    def _note_stop(self, step: ProgramStep, why: str, seeds: Sequence[Seeds | None], args: Sequence[LaneValue]) -> None:
        """Adds a sentence about a `while` loop that is stopped, with its line and the numbers compared."""
        lane, steps = self.lanes[0], list[ProgramStep]()

        def look(seeds: Seeds | None, args: list[Any]) -> tuple[Any, list[list[Any]]]:
            comparisons, holds = self.runner.watch(step.inner[0], seeds, args)
            steps[:] = [one for one, _ in comparisons]
            return holds, [values for _, values in comparisons]

        values = map_shards(self.axes, look, seeds[lane], [x[lane] for x in args])
        self.notes.append(text_of_stop(step, steps, why, *values))

    def shard_map(self, step: Any, seeds: Sequence[Any], args: list[LaneValue], interpret: Interpret) -> list[Any]:
        """All shards at once."""
        params, outer = step.eqn.params, self.axes
        names = manual_axes(params)
        new = tuple((name, params["mesh"].shape[name]) for name in names)
        cut, join = (partial(move, outer=len(outer), axes=new) for move in (cut_to_shards, join_shards))
        parts = [self.map_lanes(partial(cut, spec=own), x) for own, x in zip(params["in_specs"], args, strict=True)]
        inside = self.inside(seeds, step.number)
        self.axes = (*outer, *new)
        # Types that do not show variation need the index of a shard, which only a run of all shards knows.
        axes = () if params["check_vma"] else self.axes

        def within(seeds: Seeds | None) -> Seeds | None:
            return seeds and map_shards(axes, lambda seeds, _: seeds.within(names, params["check_vma"]), seeds, [])

        out = interpret(step.inner[0], list(map(within, inside)), parts)
        self.axes = outer
        return [self.map_lanes(partial(join, spec=own), x) for own, x in zip(params["out_specs"], out, strict=True)]


def same_bits(one: Any, two: Any) -> bool:
    """Whether two values have the same bits."""
    one, two = as_jax_value(one), as_jax_value(two)
    if jnp.issubdtype(one.dtype, jax.dtypes.extended):
        one, two = jax.random.key_data(one), jax.random.key_data(two)
    return np.asarray(one).tobytes() == np.asarray(two).tobytes()
