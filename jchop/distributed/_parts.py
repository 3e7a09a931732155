"""Parts of arrays on ranks: as codes under scales of the whole arrays, and gathered as codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jchop._common import bit_ops
from jchop._common.bit_ops import CARRIERS, Carrier
from jchop._common.checks import check, check_int
from jchop._common.settings import jax_default_settings
from jchop._core.matmul.operations import spec_draws
from jchop._core.rounding.codes import packed_size
from jchop._core.xla.cpu import compute_after, loop_entry
from jchop._spec.spec import Spec, SpecLike
from jchop._storage import QArray, fit_scale, quantize
from jchop._storage._array import group_length
from jchop._storage._axis_groupings import WHOLE_AXIS, axes_from_end, axis_groupings
from jchop._storage._codes import packs_codes
from jchop.distributed import _messages as messages
from jchop.distributed._collectives import check_collective, collective_axis
from jchop.distributed._messages import AxisName, RankAxes
from jchop.formats import ScaledFormat


def quantize_parts(x: Any, axis_name: AxisName, spec: SpecLike, key: Array | None = None, *, axis: int = 0) -> Any:
    """Quantizes the parts of this rank under the scales of the whole arrays: one all-reduce of maxima for a whole tree.

    Scales may be shared along the cut axis (a scale of the tensor, of columns). The ranks then exchange the least and
    the largest number of each group, of all arrays together, as integers in the order of the numbers. Otherwise nothing
    moves. `unshard` of the result gathers the codes. So weights that are cut between devices as floats are gathered in
    the bytes of the format.

    Args:
        x: the parts of this rank, as in `psum`.
        axis_name: the mesh axes over which the arrays are cut, as in `psum`.
        spec: as in `psum`; groups must not be cut.
        key: as in `psum`. Leaf number i of the tree draws from ``fold_in(key, i)``.
        axis: the axis along which all arrays are cut. Default 0.

    Returns:
        QArrays of the parts. Joined along the axis, they are bit for bit `jchop.quantize` of the whole array.

    Raises:
        TypeError, ValueError: as `psum`. For parts that cut groups or bytes of codes, and for scales of scales that are
            shared along the axis. For rules that read all numbers of a group, if it is cut.

    References:
        The gather of float8 weights in torchao's ``precompute_float8_dynamic_scale_for_fsdp``.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> x = jnp.array([[[1.0, 2.0]], [[4.0, 448.0]]])
        >>> def whole(x):
        ...     return jc.distributed.unshard(jc.distributed.quantize_parts(x, "i", "e4m3fn(group=tensor)"), "i")
        >>> jc.dequantize(jax.vmap(whole, axis_name="i")(x))[0].tolist()
        [[1.0, 2.0], [4.0, 448.0]]
    """
    wire, key = check_collective(axis_name, spec, key, x)
    spec, axes = wire.spec, wire.axes
    with jax_default_settings():
        leaves, structure = messages.carrier_leaves(x)
        keys = [messages.fold_in_numbers(key, index) for index in range(len(leaves))]
        parts = [_array_part(leaf, k, spec, axes, axis) for leaf, k in zip(leaves, keys, strict=True)]
        # XLA joins the maxima of all arrays to one all-reduce.
        ends = lax.pmax([part.ends() for part in parts if part.shares_scales], axes.name)
        qarrays = [part.to_qarray(axes, ends.pop(0) if part.shares_scales else None) for part in parts]
    return structure.unflatten(qarrays)


@dataclass(frozen=True)
class _ArrayPart:
    """A part of an array.

    Args:
        x: its numbers.
        key: for its codes.
        spec: of the codes, with axes counted from the end.
        axis: of the cut.
        shared_axes: the axes along which scales are shared, also between ranks; none if ranks share no scale.
    """

    x: Array
    key: Array | None
    spec: Spec
    axis: int
    shared_axes: tuple[int, ...]

    @property
    def shares_scales(self) -> bool:
        return bool(self.shared_axes) and self.x.size > 0

    @property
    def carrier(self) -> Carrier:
        return CARRIERS[self.x.dtype.name]

    def ends(self) -> Array:
        """(2, ...): the largest number and minus the least one of each group, as ordered integers.

        Numbers that are not finite do not count, except if they make their group NaN.
        """
        sign, magnitude = bit_ops.split_sign(self.x, self.carrier)
        fmt = self.spec.scaled
        none = jnp.iinfo(self.carrier.work).min + 1
        is_counted = magnitude < self.carrier.inf
        if fmt is not None and fmt.nan_block:
            magnitude, is_counted = jnp.minimum(magnitude, self.carrier.inf), jnp.ones_like(is_counted)
        ordered = bit_ops.ordered_integers(sign, magnitude)
        ends = (jnp.where(is_counted, end, none) for end in (ordered, -ordered))
        return jnp.stack([jnp.max(end, axis=self.shared_axes, keepdims=True) for end in ends])

    def to_qarray(self, axes: RankAxes, ends: Array | None) -> Any:
        """The codes of the part; `ends` of the whole array if ranks share scales."""
        scales = {} if ends is None else self._scales(ends)
        if not spec_draws(self.spec):
            return quantize(self.x, self.spec, **scales)
        shape = list(self.x.shape)
        starts: list[Any] = [0] * len(shape)
        starts[self.axis] = axes.rank * shape[self.axis]
        shape[self.axis] *= axes.size
        return quantize(self.x, self.spec, self.key, offset=(tuple(starts), tuple(shape)), **scales)

    def _scales(self, ends: Array) -> dict[str, Any]:
        """The scales and zero points of the part, fitted to an array with the ends in it.

        With a scale of the tensor, its own numbers are in that array, too, for the scales of blocks.
        """
        fmt = self.spec.scaled
        assert fmt is not None
        none = jnp.iinfo(ends.dtype).min + 1
        ends = jnp.where(ends == none, 0, ends)  # no finite number
        signed = jnp.stack([ends[0], -ends[1]])
        sign = jnp.where(signed < 0, self.carrier.sign_bit, 0).astype(signed.dtype)
        end_values = bit_ops.join_sign(sign, jnp.abs(signed), self.carrier)
        if not fmt.scale_rule.tensor_scale:
            samples = jnp.concatenate([end_values[0], end_values[1]], axis=self.axis)
            scale, zero_point = fit_scale(samples, self.spec)
            return {"scale": scale, "zero_point": zero_point}
        grouping = axis_groupings(fmt, self.x.ndim)[self.axis]
        length = grouping if isinstance(grouping, int) else 1
        shape = (*self.x.shape[: self.axis], length, *self.x.shape[self.axis + 1 :])
        end_blocks = [jnp.broadcast_to(end, shape) for end in end_values]
        (scale, tensor), zero_point = fit_scale(jnp.concatenate([*end_blocks, self.x], axis=self.axis), self.spec)
        block_scales = lax.slice_in_dim(scale, 2, None, axis=self.axis)
        return {"scale": (block_scales, tensor), "zero_point": zero_point}


def _array_part(x: Array, key: Array | None, spec: Spec, axes: RankAxes, axis: int) -> _ArrayPart:
    """A device's part of an array, with the axes along which groups share a scale with other devices."""
    x, axis = messages.vary_over(x, axes), collective_axis("axis", axis, x.ndim)
    messages.check_whole_groups(spec, x.shape, axis, axes.size, f"axis={axis}")
    if axis == x.ndim - 1 and packs_codes(spec.element) and x.shape[axis] * spec.element.bits % 8:
        raise ValueError(f"axis={axis}: parts of length {x.shape[axis]} do not fill bytes of codes of {str(spec)!r}")
    if spec.scaled is None:
        return _ArrayPart(x, key, spec, axis, ())
    fmt = axes_from_end(spec.scaled, x.ndim)
    spec, groupings, shared_axes = replace(spec, format=fmt), axis_groupings(fmt, x.ndim), ()
    if isinstance(fmt.scale, ScaledFormat) and WHOLE_AXIS in (groupings[axis], axis_groupings(fmt.scale, x.ndim)[axis]):
        raise ValueError(f"axis={axis}: scales of {str(spec)!r} share a scale along it; cut another axis")
    if fmt.scale_rule.tensor_scale:
        shared_axes = tuple(range(x.ndim))
    elif groupings[axis] == WHOLE_AXIS:
        if not fmt.scale_rule.by_extremes:
            raise ValueError(f"axis={axis} cuts groups of {str(spec)!r}, whose rule reads all numbers of a group; cut "
                             "another axis, or use a rule of the largest magnitude")  # fmt: skip
        shared_axes = tuple(i for i, grouping in enumerate(groupings) if grouping == WHOLE_AXIS)
    return _ArrayPart(x, key, spec, axis, shared_axes)


# -- whole arrays ------------------------------------------------------------------------------------------------------


def unshard(
    tree: Any,
    axis_name: AxisName | None = None,
    *,
    axis: int = 0,
    after: Array | None = None,
    entry: int | Array | None = None,
) -> Any:
    """Gathers packed arrays on every device as codes and scales; `jchop.dequantize` of them then moves nothing.

    This is the gather of FSDP: the devices store parts of the weights, and a layer gathers its own codes just before it
    is used. Without it XLA may gather dequantized numbers.

    Args:
        tree: a pytree with QArrays; other leaves are gathered as they are. Under `jax.jit` in an automatic or explicit
            mesh (`jax.set_mesh`) it is sharded in any way. In `jax.shard_map` it has the parts of this rank.
        axis_name: the mesh axes to gather over, in `jax.shard_map`. Default None, outside of `jax.shard_map`: all axes.
        axis: the array axis that was cut between ranks, in `jax.shard_map`. Default 0.
        after: an array of real numbers, for example the input of the layer, which is computed before anything is
            gathered. With it the layers of a loop in Python are whole one at a time, as in a scan. Without it XLA may
            gather and unpack all of them first. Outside of `jax.shard_map` it sends one number. Default None.
        entry: the index of a layer, if the arrays are stacks of layers along one more first axis. Only the arrays of
            this layer are gathered, and `axis` counts their axes. Use it in a `jax.lax.scan` over the indexes of
            layers, in which the stacks are constants. XLA's compiler for CPUs would convert stacks of float8 that are
            scanned themselves as a whole. A traced index out of range is clamped, as in JAX. Default None.

    Returns:
        The tree of whole arrays.

    Raises:
        TypeError: for an `after` that is no array of real numbers, or an `entry` that is no integer.
        ValueError: without a mesh. In `jax.shard_map`, for an axis that is not in the mesh or that an array lacks, and
            for parts that cut groups. For an `entry` out of range, or leaves that are no stacks of one length.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> w = jc.nn.shard({"w": jc.quantize(jnp.ones((8, 32)), "nvfp4")}, {"w": P("fsdp")}, mesh)
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
    map_arrays = partial(jax.tree.map, is_leaf=lambda leaf: isinstance(leaf, QArray))
    if axis_name is not None:
        axes = messages.as_rank_axes(axis_name)
        return map_arrays(lambda leaf: _gather_leaf(leaf, axes, axis), tree)
    mesh = jax.sharding.get_abstract_mesh()
    check(not mesh.empty, "axis_name=None, and there is no mesh: call it under jax.set_mesh(mesh)")
    check(AxisType.Manual not in mesh.axis_types, f"axis_name=None inside jax.shard_map; pass one of {mesh.axis_names}")
    explicit = AxisType.Explicit in mesh.axis_types

    def replicate(leaf: Array) -> Array:
        leaf = lax.optimization_barrier(leaf)  # short floats are integers here, and have to be when they move
        return jax.reshard(leaf, P()) if explicit else lax.with_sharding_constraint(leaf, NamedSharding(mesh, P()))

    return map_arrays(lambda leaf: messages.move_leaves(leaf, replicate), tree)


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


def _gather_leaf(leaf: Any, axes: RankAxes, axis: int) -> Any:
    """A leaf gathered along an axis from its parts on all devices; of a packed one codes and scales."""
    dim = collective_axis("axis", axis, len(leaf.shape))
    if not isinstance(leaf, QArray):
        return messages.all_gather_over(leaf, axes, dim, tiled=True)
    size, length, group_size, fmt = leaf.length, leaf.shape[dim], group_length(leaf, dim), leaf.spec.scaled
    if dim == leaf.ndim - 1:
        element, ranks = leaf.spec.element, axes.size
        stored, bits = (leaf.qvalue, element.bits) if leaf.places is None else (leaf.places, 1)
        whole_width = packed_size(length, bits) if packs_codes(element) or leaf.places is not None else length
        # jax.shard_map cuts leaves, and a QArray keeps the length of its whole last axis.
        length //= ranks if stored.shape[-1] != whole_width else 1
        element_count = length if fmt is None else fmt.kept_shape((*leaf.shape[:-1], length))[-1]
        if element_count * element.bits % 8 or (length * bits) % 8:
            raise ValueError(f"axis={axis}: parts of length {length} do not fill bytes of packed codes")
        size = length * ranks
    if length % group_size:
        raise ValueError(f"axis={axis}: parts of length {length} cut groups of {group_size} of {str(leaf.spec)!r}")

    def gather(part: Any) -> Any:
        return messages.move_leaves(part, lambda x: messages.all_gather_over(x, axes, dim, tiled=True))

    scale, zero_point = leaf.scale, leaf.zero_point
    formats = [] if fmt is None else [fmt, fmt.scale]
    groupings = [axis_groupings(part, leaf.ndim)[dim] for part in formats if isinstance(part, ScaledFormat)]
    if WHOLE_AXIS in groupings[1:]:
        raise ValueError(f"axis={axis}: scales of {str(leaf.spec)!r} share a scale along it; gather another axis")
    if fmt is not None and groupings[0] != WHOLE_AXIS:  # a scale of the tensor is on every device
        scale = (gather(scale[0]), scale[1]) if fmt.scale_rule.tensor_scale else gather(scale)
        zero_point = gather(zero_point)
    return QArray(gather(leaf.qvalue), scale, zero_point, leaf.spec, size, leaf.dtype, gather(leaf.places))
