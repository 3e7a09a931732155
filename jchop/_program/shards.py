"""The program inside `jax.shard_map`, run for all shards at once: every value has the axes of the mesh first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._program.bind import bind
from jchop._program.control import as_jax_value
from jchop._program.seeds import Seeds
from jchop._program.step import ProgramStep

Array = jax.Array
_Step = TypeVar("_Step", bound=ProgramStep)
#: The names and sizes of the mesh axes that values have first; empty outside of `jax.shard_map`.
ShardAxes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ShardMap:
    """A `shard_map` inside these axes of a mesh."""

    step: ProgramStep
    outer: ShardAxes

    @property
    def new(self) -> ShardAxes:
        """The axes over which it splits its operands, in the order of their names."""
        params = self.step.eqn.params
        names = sorted(params.get("newly_manual_axes", params.get("manual_axes")))
        return tuple((name, params["mesh"].shape[name]) for name in names)

    @property
    def axes(self) -> ShardAxes:
        """All axes of the values in it."""
        return (*self.outer, *self.new)

    def cuts(self) -> list[Callable[[Any], Any]]:
        """A function for each operand that cuts it."""
        return [
            partial(cut_to_shards, spec=spec, outer=len(self.outer), axes=self.new)
            for spec in self.step.eqn.params["in_specs"]
        ]

    def joins(self) -> list[Callable[[Any], Any]]:
        """A function for each result that joins its parts."""
        specs = self.step.eqn.params["out_specs"]
        return [partial(join_shards, spec=spec, outer=len(self.outer), axes=self.new) for spec in specs]

    def seeds(self, seeds: Seeds | None) -> Seeds | None:
        """The seeds of the program in it, given those outside."""
        inside = seeds_of_turn(self.outer, seeds, self.step.number)
        names, check_vma = tuple(name for name, _ in self.new), self.step.eqn.params["check_vma"]
        if inside is None or check_vma:
            return None if inside is None else inside.within(names, check_vma)
        return map_shards(self.axes, lambda seeds, _: _require_seeds(seeds).within(names, check_vma), inside, [])


def map_shards(
    axes: ShardAxes, run: Callable[[Seeds | None, list[Any]], Any], seeds: Seeds | None, args: list[Any]
) -> Any:
    """``run(seeds, args)`` for all shards: collectives within it see the named axes."""
    if not axes:
        return run(seeds, args)
    by_shard = 0 if seeds is not None and jnp.ndim(seeds.six[0]) else None
    for name, size in reversed(axes):
        run = jax.vmap(run, in_axes=(by_shard, 0), axis_name=name, axis_size=size)
    return run(seeds, args)


def seeds_of_turn(axes: ShardAxes, seeds: Seeds | None, number: int, turn: int = 0) -> Seeds | None:
    """The seeds of one turn of a program inside an equation."""
    if seeds is None:
        return None
    return map_shards(axes, lambda seeds, _: _require_seeds(seeds).turn(number, turn), seeds, [])


def _require_seeds(seeds: Seeds | None) -> Seeds:
    assert seeds is not None
    return seeds


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
    x = x[(slice(None),) * outer + tuple(slice(None) if name in used else 0 for name, _ in axes)]
    names = [name for name, _ in axes if name in used]
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
