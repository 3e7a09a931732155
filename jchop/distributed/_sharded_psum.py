"""`sharded_psum`: the quantized sum over ranks outside of `jax.shard_map`."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jchop._round.arguments import has_tracer
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop.distributed._algorithms import TWO_SHOT, Algorithm
from jchop.distributed._axes import AxisName
from jchop.distributed._buckets import carrier_leaves
from jchop.distributed._collectives import BUCKET, psum
from jchop.formats import ElementFormat, ScaledFormat

Array = jax.Array


def sharded_psum(
    x: Any,
    axis_name: AxisName,
    spec: Spec | ElementFormat | ScaledFormat | str,
    key: Array | None = None,
    *,
    mesh: Any = None,
    algorithm: Algorithm = TWO_SHOT,
    accumulate: MatmulSpec | Spec | ElementFormat | str | None = None,
    bucket: int = BUCKET,
) -> Any:
    """The sum over the first axis of arrays that have one entry for each rank: `psum` outside of `jax.shard_map`.

    Works eagerly and under jit, on arrays that are sharded along the first axis, and on others, which are cut first.

    Args:
        x: an array of shape (n, ...), or a pytree of such arrays, with n ranks.
        axis_name: as in `psum`.
        spec: as in `psum`.
        key: as in `psum`.
        mesh: the mesh. Default None: the one of `jax.set_mesh`, else of the first array with a `NamedSharding`.
        algorithm: as in `psum`.
        accumulate: as in `psum`.
        bucket: as in `psum`.

    Returns:
        Arrays of shape (...), the same on all devices.

    Raises:
        TypeError, ValueError: as `psum`; and for an axis that is not in the mesh, or arrays whose first axis has not
            the length n.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> jc.distributed.sharded_psum(jnp.array([[1.0, 2.0, 127.0]]), "data", "int8(group=4)", mesh=mesh).tolist()
        [1.0, 2.0, 127.0]
    """
    leaves, structure = carrier_leaves(x)
    mesh = _mesh_of_call(mesh, leaves)
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if missing := [name for name in names if name not in mesh.axis_names]:
        raise ValueError(f"axis_name={axis_name!r}: the mesh has no axis {missing[0]!r}; its axes: {mesh.axis_names}")
    count = 1
    for name in names:
        count *= mesh.shape[name]
    for path, leaf in jax.tree_util.tree_flatten_with_path(x)[0]:
        if leaf.ndim == 0 or leaf.shape[0] != count:
            raise ValueError(f"x{jax.tree_util.keystr(path)} has shape {tuple(leaf.shape)}; its first axis must have "
                             f"an entry for each of the {count} ranks along {axis_name!r}")  # fmt: skip

    def sum_on_rank(x: Any, key: Array | None) -> Any:
        rank_x = jax.tree.map(lambda leaf: leaf[0], x)
        return psum(rank_x, axis_name, spec, key, algorithm=algorithm, accumulate=accumulate, bucket=bucket)

    arrays = structure.unflatten(leaves)
    shards = jax.tree.map(lambda leaf: _put_on_ranks(leaf, NamedSharding(mesh, P(names))), arrays)
    run = jax.shard_map(sum_on_rank, mesh=mesh, in_specs=(P(names), P()), out_specs=P())
    return run(shards, key)


def _put_on_ranks(leaf: Array, sharding: NamedSharding) -> Array:
    """A leaf that is cut along its first axis."""
    if has_tracer(leaf) and not isinstance(sharding.mesh, Mesh):
        return jax.reshard(leaf, sharding.spec)
    return jax.device_put(leaf, sharding)


def _mesh_of_call(mesh: Any, leaves: list[Array]) -> Any:
    """The mesh that is given, set, or of an array."""
    if mesh is not None:
        return mesh
    current = jax.sharding.get_abstract_mesh()
    if not current.empty:
        return current
    for leaf in leaves:
        sharding = None if has_tracer(leaf) else leaf.sharding
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    raise ValueError("mesh=None, and neither jax.set_mesh nor an array of x has a mesh; pass mesh=")
