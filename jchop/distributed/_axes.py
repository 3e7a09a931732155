"""Mesh axes inside `jax.shard_map`: their sizes, this rank, and types that differ between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jchop._bits import varying

Array = jax.Array
#: The name of a mesh axis, or several names, of which the last varies fastest between ranks.
AxisName = Any


@dataclass(frozen=True)
class Axes:
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
        count = 1
        for size in self.sizes:
            count *= size
        return count

    @property
    def name(self) -> Any:
        """The argument of collectives of `jax.lax`."""
        return self.names[0] if len(self.names) == 1 else self.names

    @property
    def rank(self) -> Array:
        """The number of this rank."""
        return lax.axis_index(self.name)


def as_axes(axis_name: AxisName) -> Axes:
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
            here = tuple(map(str, jax.sharding.get_abstract_mesh().axis_names))
            known = ", ".join(map(repr, here)) if here else "none"
            raise ValueError(
                f"axis_name={axis_name!r}: {name!r} is not an axis here; axes of the mesh: {known}. Call it inside "
                "jax.shard_map over the axis, or use jchop.distributed.sharded_psum"
            ) from None
    return Axes(names, tuple(sizes))


def axes_are_tracked(axes: Axes) -> bool:
    """Whether types say along which axes a value differs: inside `jax.shard_map` unless ``check_vma=False``."""
    return set(axes.names) <= set(varying(axes.rank))


def vary(x: Array, axes: Axes) -> Array:
    """`x`, with a type that differs between the ranks of `axes`."""
    missing = tuple(name for name in axes.names if name not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing and axes_are_tracked(axes) else x
