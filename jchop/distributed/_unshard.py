"""`unshard`: packed arrays gathered as codes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jchop._common.checks import check_int
from jchop._core.rounding.codes import packed_size
from jchop._core.xla.cpu import compute_after, loop_entry
from jchop.distributed._axes import AxisName, RankAxes, all_gather_over, as_rank_axes
from jchop.distributed._messages import move_leaves
from jchop.formats import ScaledFormat
from jchop.storage import QArray
from jchop.storage._axis_groupings import WHOLE_AXIS, axis_groupings
from jchop.storage._codes import packs_codes
from jchop.storage._sharding import group_length

Array = jax.Array


def unshard(
    tree: Any,
    axis_name: AxisName | None = None,
    *,
    axis: int = 0,
    after: Array | None = None,
    entry: int | Array | None = None,
) -> Any:
    """Packed arrays on every device, gathered as codes and scales; `jchop.dequantize` of them then moves nothing.

    This is the gather of FSDP: weights lie in parts on the devices, and a layer gathers the codes of its own just
    before it is used. Without it XLA may gather dequantized numbers.

    Args:
        tree: a pytree with QArrays; other leaves are gathered as they are. Under `jax.jit` in an automatic or explicit
            mesh (`jax.set_mesh`), sharded in any way. In `jax.shard_map`, the parts of this rank.
        axis_name: the mesh axes to gather over, in `jax.shard_map`. Default None: not in `jax.shard_map`; all axes.
        axis: the array axis that was cut between ranks, in `jax.shard_map`. Default 0.
        after: an array of real numbers, such as the input of the layer, which is computed before anything is gathered.
            With it the layers of a loop in Python are whole one at a time, as those of a scan are; XLA may else gather
            and unpack all of them first. Outside of `jax.shard_map` this sends one number. Default None.
        entry: the number of a layer, if the arrays are stacks of layers along a first axis more: only the arrays of
            this layer are gathered, and `axis` counts their axes. For a `jax.lax.scan` over the numbers of layers,
            in which the stacks are constants: XLA's compiler for CPUs converts stacks of float8 that are scanned
            themselves, as a whole. A traced number out of range is clamped, as in JAX. Default None.

    Returns:
        The tree of whole arrays.

    Raises:
        TypeError: for an `after` that is no array of real numbers, or an `entry` that is no integer.
        ValueError: without a mesh; in `jax.shard_map`, for an axis that is not in the mesh or that an array lacks, and
            for parts that cut groups; for an `entry` out of range, or leaves that are no stacks of one length.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> w = jc.nn.shard({"w": jc.quantize(jnp.ones((8, 32)), "nvfp4")}, mesh, {"w": P("fsdp")})
        >>> with jax.set_mesh(mesh):
        ...     jax.jit(lambda w: jc.dequantize(jc.distributed.unshard(w)["w"]).sum())(w).item()
        256.0
    """
    if after is not None:
        if not isinstance(after, Array) or not jnp.isrealobj(after) or after.dtype == bool:
            raise TypeError(f"after={after!r} must be an array of real numbers")
        tree = compute_after(tree, after)
    if entry is not None:
        tree = _take_layer(tree, entry)
    if axis_name is not None:
        axes = as_rank_axes(axis_name)
        return jax.tree.map(lambda leaf: _gather_leaf(leaf, axes, axis), tree, is_leaf=_is_unshard_leaf)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError("axis_name=None, and there is no mesh: call it under jax.set_mesh(mesh)")
    if AxisType.Manual in mesh.axis_types:
        raise ValueError(f"axis_name=None inside jax.shard_map; pass one of {mesh.axis_names}")
    explicit = AxisType.Explicit in mesh.axis_types

    def replicate(leaf: Array) -> Array:
        leaf = lax.optimization_barrier(leaf)  # short floats are integers here, and have to be when they move
        return jax.reshard(leaf, P()) if explicit else lax.with_sharding_constraint(leaf, NamedSharding(mesh, P()))

    return jax.tree.map(lambda leaf: move_leaves(leaf, replicate), tree, is_leaf=_is_unshard_leaf)


def _take_layer(tree: Any, entry: Any) -> Any:
    leaves = jax.tree.leaves_with_path(tree)
    shapes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
    length, *other_lengths = {shape[:1] for shape in shapes.values()} or {(1,)}
    if other_lengths or not length:
        raise ValueError(f"entry={entry!r}: every leaf must have a first axis of one length, of layers; they have the "
                         f"shapes {shapes}")  # fmt: skip
    if isinstance(entry, Array):
        if entry.shape or not jnp.issubdtype(entry.dtype, jnp.integer):
            raise TypeError(f"entry has shape {entry.shape} and dtype {entry.dtype}; it must be one integer")
        index = entry
    else:
        index = jnp.int32(check_int("entry", entry, 0, length[0] - 1))
    return jax.tree.map(lambda leaf: loop_entry(leaf, index), tree)


def _is_unshard_leaf(leaf: Any) -> bool:
    return isinstance(leaf, QArray)


def _gather_leaf(leaf: Any, axes: RankAxes, axis: int) -> Any:
    dim = check_int("axis", axis, -len(leaf.shape), len(leaf.shape) - 1) % len(leaf.shape)
    if not isinstance(leaf, QArray):
        return all_gather_over(leaf, axes, dim, tiled=True)
    size, length, group_size, fmt = leaf.length, leaf.shape[dim], group_length(leaf, dim), leaf.spec.scaled
    if dim == leaf.ndim - 1:
        element, ranks = leaf.spec.element, axes.size
        stored, bits = (leaf.qvalue, element.bits) if leaf.places is None else (leaf.places, 1)
        whole_width = packed_size(length, bits) if packs_codes(element) or leaf.places is not None else length
        if (
            stored.shape[-1] != whole_width
        ):  # jax.shard_map cuts leaves, and a QArray keeps the length of its whole last axis
            length //= ranks
        element_count = length if fmt is None else fmt.kept_shape((*leaf.shape[:-1], length))[-1]
        if element_count * element.bits % 8 or (length * bits) % 8:
            raise ValueError(f"axis={axis}: parts of length {length} do not fill bytes of packed codes")
        size = length * ranks
    if length % group_size:
        raise ValueError(f"axis={axis}: parts of length {length} cut groups of {group_size} of {str(leaf.spec)!r}")

    def gather(part: Array) -> Array:
        return all_gather_over(part, axes, dim, tiled=True)

    scale, zero_point = leaf.scale, leaf.zero_point
    formats = [] if fmt is None else [fmt, fmt.scale]
    groupings = [axis_groupings(part, leaf.ndim)[dim] for part in formats if isinstance(part, ScaledFormat)]
    if WHOLE_AXIS in groupings[1:]:
        raise ValueError(f"axis={axis}: scales of {str(leaf.spec)!r} share a scale along it; gather another axis")
    if fmt is not None and groupings[0] != WHOLE_AXIS:  # a scale of the tensor is on every device
        scale = (move_leaves(scale[0], gather), scale[1]) if fmt.scale_rule.tensor_scale else move_leaves(scale, gather)
        zero_point = move_leaves(zero_point, gather)
    places = None if leaf.places is None else gather(leaf.places)
    return QArray(move_leaves(leaf.qvalue, gather), scale, zero_point, leaf.spec, size, leaf.dtype, places)
