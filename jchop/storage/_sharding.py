"""Shardings of the leaves of a QArray."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jchop._common.bit_ops import fit_sharding, parts_of_axes
from jchop._common.checks import check, check_instance
from jchop.formats import ScaledFormat
from jchop.storage._array import QArray, check_qarray
from jchop.storage._axis_groupings import axis_groupings
from jchop.storage._decode import spec_of_part


def shardings(q: QArray, sharding: Sharding) -> QArray:
    """The sharding of each leaf of a QArray, derived from the sharding of its array.

    Codes are sharded like the array, and so are scales and zero points, except along axes that are too short; those are
    replicated. So ``jax.device_put(q, shardings(q, sharding))`` works for every format, and the result is valid for
    `in_shardings` and `out_shardings` of `jax.jit`.

    Args:
        q: a QArray, of arrays or of `jax.ShapeDtypeStruct`.
        sharding: the sharding of an array of the shape of `q`. A `jax.sharding.NamedSharding` is adapted to each leaf;
            any other is used for all leaves.

    Returns:
        A QArray with shardings as leaves.

    Raises:
        TypeError: if `q` is not a QArray, or `sharding` not a sharding.
        ValueError: if `sharding` has more axes than `q`, or cuts bytes of packed codes.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> q = jc.quantize(jnp.ones((4, 32)), "nvfp4")
        >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None))
        >>> where = jc.storage.shardings(q, rows)
        >>> tuple(where.scale[0].spec), tuple(where.scale[1].spec)
        (('data', None), ())
        >>> jax.device_put(q, where).shape
        (4, 32)
    """
    check_qarray("q", q)
    check_instance("sharding", sharding, Sharding, "a sharding of JAX")
    if not isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda _: sharding, q)
    check(len(sharding.spec) <= q.ndim, f"sharding={sharding} names {len(sharding.spec)} axes, and q has {q.ndim}")
    names = (*sharding.spec, *[None] * (q.ndim - len(sharding.spec)))
    whole = sharding.update(spec=PartitionSpec(*names))
    # A tensor scale has only axes that vmap added.
    result = jax.tree.map(lambda leaf: fit_sharding(whole, leaf.shape), q)
    if tuple(result.qvalue.spec) != names[: len(q.qvalue.shape)]:
        raise ValueError(f"sharding={sharding} does not cut codes of shape {list(q.qvalue.shape)} into equal parts")
    return result


def named_sharding_of(like: Any) -> NamedSharding | None:
    """The sharding of an array, or of its shape and dtype; one of an abstract mesh is that of the current mesh.

    Raises:
        ValueError: for an abstract mesh that is not the current one.
    """
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    if isinstance(sharding.mesh, Mesh):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.shape != sharding.mesh.shape:
        raise ValueError(
            f"like has the sharding {sharding.spec} on an abstract mesh of {dict(sharding.mesh.shape)}, whose devices "
            "are not known; call it under jax.set_mesh(mesh)"
        )
    return NamedSharding(mesh, sharding.spec)


def check_group_sharding(q: QArray, sharding: NamedSharding, name: str) -> None:
    """Refuses a sharding that cuts a block of a format between devices.

    Scales that a whole axis shares are on every device, so an axis under one scale may be cut.

    Args:
        q: a QArray, of arrays or of `jax.ShapeDtypeStruct`.
        sharding: of the array.
        name: of the array, for the error.

    Raises:
        ValueError: names the axis, and the numbers of parts that fit.
    """
    for axis, (entry, count) in enumerate(zip(sharding.spec, parts_of_axes(sharding), strict=True)):
        unit, length = group_length(q, axis), q.shape[axis]
        if length % (count * unit):
            fits = [n for n in range(1, length // unit + 1) if length % (n * unit) == 0]
            raise ValueError(
                f"{name}: {entry!r} cuts axis {axis} of length {length} into {count} parts, which do not hold whole "
                f"groups of {unit} of {str(q.spec)!r}; sizes of the mesh axis that fit: {', '.join(map(str, fits))}"
            )


def group_length(q: QArray, axis: int) -> int:
    """The length along an axis that parts of a QArray must be multiples of: of its groups, and of groups of scales."""
    length, fmt = 1, spec_of_part(q.spec, q.ndim).format
    if isinstance(fmt, ScaledFormat) and fmt.sparse is not None and fmt.axis_of_sparse % q.ndim == axis:
        return math.lcm(fmt.sparse[1], group_length(replace(q, spec=replace(q.spec, format=fmt.dense)), axis))
    while isinstance(fmt, ScaledFormat):
        kind = axis_groupings(fmt, q.ndim)[axis]
        length *= kind if isinstance(kind, int) else 1
        fmt = fmt.scale
    return length
