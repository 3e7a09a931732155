"""Mesh axes inside `jax.shard_map`: their sizes, this rank, and types that differ between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.bit_ops import varying_axes

Array = jax.Array
#: The name of a mesh axis, or several names, of which the last varies fastest between ranks.
AxisName = Any


@dataclass(frozen=True)
class RankAxes:
    """Mesh axes that a collective runs over.

    Args:
        names: their names, the slowest first.
        sizes: the number of ranks along each.
    """

    names: tuple[Any, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def name(self) -> Any:
        """The argument of collectives of `jax.lax`."""
        return self.names[0] if len(self.names) == 1 else self.names

    @property
    def rank(self) -> Array:
        """The number of this rank."""
        return lax.axis_index(self.name)


def as_rank_axes(axis_name: AxisName) -> RankAxes:
    """The axes of a name or of several names.

    Raises:
        ValueError: for a name that is not an axis here, one that is named twice, or no name.
    """
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"axis_name={axis_name!r} must be a mesh axis, or several different ones")
    sizes = []
    for name in names:
        try:
            sizes.append(int(lax.axis_size(name)))
        except (NameError, KeyError, TypeError, ValueError):
            mesh_axes = tuple(map(str, jax.sharding.get_abstract_mesh().axis_names))
            mesh_text = ", ".join(map(repr, mesh_axes)) if mesh_axes else "none"
            raise ValueError(
                f"axis_name={axis_name!r}: {name!r} is not an axis here; axes of the mesh: {mesh_text}. Call it inside "
                "jax.shard_map over the axis, or use jchop.distributed.sharded_psum"
            ) from None
    return RankAxes(names, tuple(sizes))


def _needs_single_axes(axes: RankAxes) -> bool:
    """Whether some of several axes are those of `jax.vmap`, whose collectives take one axis at a time."""
    return len(axes.names) > 1 and not set(axes.names) <= set(jax.sharding.get_abstract_mesh().axis_names)


def all_gather_over(x: Array, axes: RankAxes, axis: int = 0, *, tiled: bool = False, to: str = "varying") -> Array:
    """`jax.lax.all_gather` over all axes."""
    if not _needs_single_axes(axes):
        return lax.all_gather(x, axes.name, axis=axis, tiled=tiled, to=to)
    x = x if tiled else lax.expand_dims(x, [axis])
    for name in reversed(axes.names):
        x = lax.all_gather(x, name, axis=axis, tiled=True, to=to)
    return x


def psum_scatter_over(x: Array, axes: RankAxes, axis: int, tiled: bool) -> Array:
    """`jax.lax.psum_scatter` over all axes."""
    if not _needs_single_axes(axes):
        return lax.psum_scatter(x, axes.name, scatter_dimension=axis, tiled=tiled)
    for name in axes.names:
        x = lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
    return x if tiled else lax.squeeze(x, [axis])


def ppermute_over(x: Array, axes: RankAxes, perm: tuple[tuple[int, int], ...]) -> Array:
    """`jax.lax.ppermute` over all axes. In `jax.vmap` it takes one axis, and pairs with every rank."""
    in_vmap = not set(axes.names) <= set(jax.sharding.get_abstract_mesh().axis_names)
    if not in_vmap or (len(axes.names) == 1 and len(perm) == axes.size):
        return lax.ppermute(x, axes.name, perm)
    sources = {target: source for source, target in perm}
    source_rank = jnp.asarray([sources.get(rank, axes.size) for rank in range(axes.size)])[axes.rank]
    return all_gather_over(x, axes).at[source_rank].get(mode="fill", fill_value=0)


def types_track_axes(axes: RankAxes) -> bool:
    """Whether types say along which axes a value differs: inside `jax.shard_map` unless ``check_vma=False``."""
    return set(axes.names) <= set(varying_axes(axes.rank))


def vary_over(x: Array, axes: RankAxes) -> Array:
    """`x`, with a type that differs between the ranks of `axes`."""
    missing = tuple(name for name in axes.names if name not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing and types_track_axes(axes) else x
