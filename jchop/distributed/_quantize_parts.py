"""Parts of arrays as codes, under scales of the whole arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import CARRIERS, Carrier
from jchop._common.checks import check_int
from jchop._common.settings import jax_default_settings
from jchop._core.matmul.operations import spec_draws
from jchop._spec.spec import Spec
from jchop.distributed._algorithms import TWO_SHOT
from jchop.distributed._axes import AxisName, RankAxes, vary_over
from jchop.distributed._buckets import map_leaves
from jchop.distributed._collectives import check_collective
from jchop.distributed._pieces import check_whole_groups
from jchop.formats import ElementFormat, ScaledFormat
from jchop.storage import fit_scale, quantize
from jchop.storage._axis_groupings import WHOLE_AXIS, axes_from_end, axis_groupings
from jchop.storage._codes import packs_codes

Array = jax.Array


def quantize_parts(
    x: Any,
    axis_name: AxisName,
    spec: Spec | ElementFormat | ScaledFormat | str,
    key: Array | None = None,
    *,
    axis: int = 0,
) -> Any:
    """The parts of this rank as codes under the scales of the whole arrays: one all-reduce of maxima for a whole tree.

    If scales are shared along the cut axis (a scale of the tensor, of columns), the ranks exchange the least and the
    largest number of each group, of all arrays together, as integers in the order of the numbers. Otherwise nothing
    moves. `unshard` of the result gathers the codes. So weights that lie in parts as floats are gathered in the bytes
    of the format.

    Args:
        x: the parts of this rank: as in `psum`.
        axis_name: as in `psum`: the mesh axes over which the arrays are cut.
        spec: as in `psum`; groups must not be cut.
        key: as in `psum`. Leaf number i of the tree draws from ``fold_in(key, i)``.
        axis: the axis along which all arrays are cut. Default 0.

    Returns:
        QArrays of the parts. Joined along the axis, they are bit for bit `jchop.quantize` of the whole array.

    Raises:
        TypeError, ValueError: as `psum`; and for parts that cut groups or bytes of codes, for scales of scales that are
            shared along the axis, and for rules that read all numbers of a group, if it is cut.

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
    wire, key = check_collective(axis_name, spec, key, TWO_SHOT, None, x)
    spec, axes = wire.spec, wire.axes
    parts: list[_ArrayPart] = []

    def prepare(v: Array, k: Array | None) -> Array:
        if not v.ndim:
            raise ValueError("x has an array without axes, of which no axis can be cut")
        cut_axis = check_int("axis", axis, -v.ndim, v.ndim - 1) % v.ndim
        parts.append(_array_part(vary_over(v, axes), k, spec, axes, cut_axis))
        return v

    with jax_default_settings():
        map_leaves(x, key, prepare)
        ends = _max_over_ranks([part.ends() for part in parts if part.shares_scales], axes)
        qarrays = [part.to_qarray(axes, ends.pop(0) if part.shares_scales else None) for part in parts]
    return jax.tree.structure(x).unflatten(qarrays)


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
    check_whole_groups(spec, x.shape, axis, axes.size, f"axis={axis}")
    if axis == x.ndim - 1 and packs_codes(spec.element) and x.shape[axis] * spec.element.bits % 8:
        raise ValueError(f"axis={axis}: parts of length {x.shape[axis]} do not fill bytes of codes of {str(spec)!r}")
    if spec.scaled is None:
        return _ArrayPart(x, key, spec, axis, ())
    fmt = axes_from_end(spec.scaled, x.ndim)
    spec = replace(spec, format=fmt)
    groupings = axis_groupings(fmt, x.ndim)
    if isinstance(fmt.scale, ScaledFormat) and WHOLE_AXIS in (groupings[axis], axis_groupings(fmt.scale, x.ndim)[axis]):
        raise ValueError(f"axis={axis}: scales of {str(spec)!r} share a scale along it; cut another axis")
    if fmt.scale_rule.tensor_scale:
        return _ArrayPart(x, key, spec, axis, tuple(range(x.ndim)))
    if groupings[axis] != WHOLE_AXIS:
        return _ArrayPart(x, key, spec, axis, ())
    if not fmt.scale_rule.by_extremes:
        raise ValueError(f"axis={axis} cuts groups of {str(spec)!r}, whose rule reads all numbers of a group; cut "
                         "another axis, or use a rule of the largest magnitude")  # fmt: skip
    return _ArrayPart(x, key, spec, axis, tuple(i for i, grouping in enumerate(groupings) if grouping == WHOLE_AXIS))


def _max_over_ranks(ends: list[Array], axes: RankAxes) -> list[Array]:
    """The maxima over all ranks, in one all-reduce for each width of numbers."""
    maxima: list[Array] = list(ends)
    for dtype in dict.fromkeys(end.dtype for end in ends):
        members = [at for at, end in enumerate(ends) if end.dtype == dtype]
        vector = lax.pmax(jnp.concatenate([ends[at].reshape(-1) for at in members]), axes.name)
        for index in members:
            maxima[index], vector = vector[: ends[index].size].reshape(ends[index].shape), vector[ends[index].size :]
    return maxima
