"""`shard`: a model placed on a mesh by rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jchop._common.paths import check_path_pattern, matches_path, nearest_paths_hint
from jchop.storage import QArray, shardings
from jchop.storage._array import check_group_sharding


def shard(model: Any, mesh: Mesh, rules: Mapping[str, PartitionSpec]) -> Any:
    """A model, or any pytree, placed on the devices of a mesh: packed parameters too, between their groups.

    Args:
        model: a module of Flax NNX; or a pytree of arrays and QArrays, such as variables of Linen, parameters, or the
            state of an optimizer.
        mesh: the mesh.
        rules: `jax.sharding.PartitionSpec` by patterns ([](patterns.md)) for paths such as ``layers/0/kernel``; the
            first that matches counts. Its entries are for the axes of the array as it is stored. Arrays that no pattern
            matches are copied to every device.

    Returns:
        A module or tree like `model`, of the same numbers.

    Raises:
        TypeError: for rules that are not PartitionSpecs by patterns.
        ValueError: for a pattern that matches no array, a mesh axis that does not exist, an array without so many axes,
            or a rule that cuts an axis unevenly or cuts groups; the message says which sizes of the mesh axis fit.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> params = {"kernel": jc.quantize(jnp.ones((64, 32)), "int4(group=16)"), "bias": jnp.zeros(32)}
        >>> placed = jc.nn.shard(params, mesh, {"kernel": P("fsdp")})
        >>> [tuple(part.sharding.spec) for part in (placed["kernel"].qvalue, placed["kernel"].scale)]
        [('fsdp', None), ('fsdp', None)]
    """
    _check_partition_rules(mesh, rules)
    if isinstance(model, nnx.Module):
        graph, state = nnx.split(model)
        arrays = _shard_tree(nnx.to_pure_dict(state), mesh, rules)
        _, new_state = nnx.split(nnx.merge(graph, state, copy=True))
        nnx.replace_by_pure_dict(new_state, arrays)
        return nnx.merge(graph, new_state)
    return _shard_tree(model, mesh, rules)


def _check_partition_rules(mesh: Any, rules: Any) -> None:
    if not isinstance(rules, Mapping) or not all(isinstance(spec, PartitionSpec) for spec in rules.values()):
        raise TypeError(f"rules={rules!r} must map patterns to jax.sharding.PartitionSpec")
    for pattern, spec in rules.items():
        check_path_pattern("rules", pattern)
        for entry in spec:
            for axis in entry if isinstance(entry, tuple) else (entry,):
                if axis is not None and axis not in mesh.axis_names:
                    raise ValueError(f"rules[{pattern!r}]={spec}: the mesh has no axis {axis!r}; its axes: "
                                     f"{mesh.axis_names}")  # fmt: skip


def _shard_tree(tree: Any, mesh: Mesh, rules: Mapping[str, PartitionSpec]) -> Any:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, QArray))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    patterns = [next((pattern for pattern in rules if matches_path(pattern, path)), None) for path in paths]
    if idle := [pattern for pattern in rules if pattern not in patterns]:
        raise ValueError(f"rules: {', '.join(map(repr, idle))} matches no array, or only such as an earlier pattern "
                         f"matches{nearest_paths_hint(idle, paths)}")  # fmt: skip
    specs = [PartitionSpec() if pattern is None else rules[pattern] for pattern in patterns]
    return structure.unflatten(
        [
            _shard_leaf(path, leaf, NamedSharding(mesh, spec))
            for path, (_, leaf), spec in zip(paths, leaves, specs, strict=True)
        ]
    )


def _shard_leaf(path: str, leaf: Any, sharding: NamedSharding) -> Any:
    ndim = len(getattr(leaf, "shape", ()))
    if len(sharding.spec) > ndim:
        raise ValueError(f"{path}: {sharding.spec} names {len(sharding.spec)} axes, and the array has {ndim}")
    if isinstance(leaf, QArray):
        check_group_sharding(leaf, sharding, path)
        return jax.device_put(leaf, shardings(leaf, sharding))
    try:
        return jax.device_put(leaf, sharding)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
