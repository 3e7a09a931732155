"""A model as a tree of arrays, and `shard` by patterns of paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jchop._common.checks import check
from jchop._common.paths import check_pattern_mapping, first_matches
from jchop._storage import QArray
from jchop._storage._array import check_group_sharding
from jchop.nn._trees.equinox_modules import is_equinox_module


def shard(model: Any, rules: Mapping[str, PartitionSpec], mesh: Mesh) -> Any:
    """Places a model, or any pytree, on the devices of a mesh: packed parameters too, cut between their groups.

    Args:
        model: a module of Flax NNX; or a pytree of arrays and QArrays: variables of Linen, parameters, or the state of
            an optimizer.
        rules: `jax.sharding.PartitionSpec` by patterns ([](patterns.md)) for paths as ``layers/0/kernel``. The first
            that matches counts. Its entries are for the axes of the array as it is stored. Arrays that no pattern
            matches are copied to every device.
        mesh: the mesh.

    Returns:
        A module or tree like `model`, of the same numbers.

    Raises:
        TypeError: for rules that are not PartitionSpecs by patterns.
        ValueError: for a pattern that matches no array, a mesh axis that does not exist, or an array without so many
            axes. For a rule that cuts an axis unevenly or cuts groups; the message says which sizes of the mesh axis
            fit.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> params = {"kernel": jc.quantize(jnp.ones((64, 32)), "int4(group=16)"), "bias": jnp.zeros(32)}
        >>> placed = jc.nn.shard(params, {"kernel": P("fsdp")}, mesh)
        >>> [tuple(part.sharding.spec) for part in (placed["kernel"].qvalue, placed["kernel"].scale)]
        [('fsdp', None), ('fsdp', None)]
    """
    _check_partition_rules(rules, mesh)
    arrays, rebuild = split_arrays(model)
    return rebuild(_shard_tree(arrays, rules, mesh))


def split_arrays(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The arrays of a model as a pytree, and a function that gives a model like it of other arrays."""
    if isinstance(model, nnx.Module):
        graph, state = nnx.split(nnx.merge(*nnx.split(model), copy=True))  # with variables of its own

        def rebuild_module(arrays: Any) -> Any:
            nnx.replace_by_pure_dict(state, arrays)
            return nnx.merge(graph, state)

        return nnx.to_pure_dict(state), rebuild_module
    if not is_equinox_module(model):
        return model, lambda arrays: arrays
    is_array = lambda leaf: isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)  # noqa: E731

    def rebuild_equinox_module(arrays: Any) -> Any:
        leaves = iter(jax.tree.leaves(arrays))
        return jax.tree.map(lambda leaf: next(leaves) if is_array(leaf) else leaf, model)

    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, model), rebuild_equinox_module


def _check_partition_rules(rules: Any, mesh: Any) -> None:
    for pattern, spec in check_pattern_mapping("rules", rules, "{'kernel': PartitionSpec('fsdp')}"):
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"rules[{pattern!r}]={spec!r} must be a jax.sharding.PartitionSpec")
        for entry in spec:
            for axis in entry if isinstance(entry, tuple) else (entry,):
                if axis is not None and axis not in mesh.axis_names:
                    raise ValueError(f"rules[{pattern!r}]={spec}: the mesh has no axis {axis!r}; its axes: "
                                     f"{mesh.axis_names}")  # fmt: skip


def _shard_tree(tree: Any, rules: Mapping[str, PartitionSpec], mesh: Mesh) -> Any:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, QArray))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    firsts, specs = first_matches("rules", rules, paths), list(rules.values())
    return structure.unflatten(
        [
            _shard_leaf(path, leaf, NamedSharding(mesh, PartitionSpec() if first is None else specs[first]))
            for path, (_, leaf), first in zip(paths, leaves, firsts, strict=True)
        ]
    )


def _shard_leaf(path: str, leaf: Any, sharding: NamedSharding) -> Any:
    ndim = len(getattr(leaf, "shape", ()))
    spec = sharding.spec
    check(len(spec) <= ndim, f"{path}: {spec} names {len(spec)} axes, and the array has {ndim}")
    if isinstance(leaf, QArray):
        check_group_sharding(leaf, sharding, path)
        return jax.device_put(leaf, leaf.shardings(sharding))
    try:
        return jax.device_put(leaf, sharding)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
