"""How an array is laid out for a product, so that a scaled format has its groups along the sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jchop._common.bit_ops import reshape
from jchop._program.bind import straight_through
from jchop._quantized.products.rotation import Hadamard
from jchop._quantized.products.rule import Location
from jchop._round.arguments import run_numpy
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec
from jchop.formats import ScaledFormat
from jchop.storage._axis_groupings import OWN_SCALE, AxisGrouping, axis_groupings, with_groupings, with_sparse_axis

Array = jax.Array


@dataclass(frozen=True)
class OperandLayout:
    """The axes of an operand: the free ones, in order, then the contracting ones (summed over), as one.

    Args:
        free: axes that stay axes, and are axes of the result.
        contracting: axes that become the last one, in C order.
    """

    free: tuple[int, ...]
    contracting: tuple[int, ...]

    @staticmethod
    def of(free: Sequence[int], contracting: Sequence[int]) -> OperandLayout:
        """A layout of any sequences of axes."""
        return OperandLayout(tuple(free), tuple(contracting))

    @property
    def ndim(self) -> int:
        """How many axes an array has in this layout."""
        return len(self.free) + 1

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.free, *self.contracting)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that an array of `shape` has in this layout."""
        return (*(shape[axis] for axis in self.free), math.prod(shape[axis] for axis in self.contracting))

    def lay(self, x: Array, rotation: Hadamard | None = None) -> Array:
        """`x` in this layout, rotated along its last axis."""
        y = reshape(x.transpose(self._order), self.shape(x.shape))
        return y if rotation is None else rotation.rotate(y)

    def back(self, y: Any, shape: Sequence[int]) -> Any:
        """An array of `shape`, of JAX or NumPy, from its layout."""
        order = self._order
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return reshape(y, [shape[axis] for axis in order]).transpose(inverse)

    def entries(self, entries: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
        """The entries of a `PartitionSpec` for the layout of an array, with a stack in front, from those of its axes.

        Of the axes that become one, the first keeps its entry.
        """
        entries, stack = (*entries, *[None] * (len(shape) - len(entries))), len(shape) - len(self._order)
        first = next((axis for axis in self.contracting if shape[stack + axis] > 1), None)
        front = (*entries[:stack], *(entries[stack + axis] for axis in self.free))
        return (*front, None if first is None else entries[stack + first])

    def spec_in_place(self, spec: Spec, shape: Sequence[int]) -> Spec | None:
        """A spec that rounds an array of `shape` with its own axes as `spec` does in this layout, or None.

        It is `spec` itself if the layout is that of the array, or there are no groups. Groups along one axis need not
        be moved. But drawn bits depend on the layout, and so do sums over a group, where a rule takes some, and groups
        of scales.
        """
        fmt, backward, order = spec.format, spec.gradient.round, self._order
        if not isinstance(fmt, ScaledFormat) or (fmt.group is None and fmt.channel is None and fmt.sparse is None):
            return spec
        if order == tuple(range(len(order))) and len(self.contracting) == 1:
            return spec
        if not fmt.scale_rule.by_ends or isinstance(fmt.scale, ScaledFormat):
            return None
        fastest = next(reversed(self.contracting), None)
        if fmt.sparse is not None:
            several = len(self.contracting) > 1
            elsewhere = fmt.axis_of_sparse % self.ndim < self.ndim - 1
            if elsewhere or fastest is None or (several and shape[fastest] % fmt.sparse[1]):
                return None  # its groups are along another axis, or run over several
        gradient_depends = backward is not None and (backward.rounding.stochastic or backward.scaled is not None)
        if spec.rounding.stochastic or gradient_depends:
            return None
        *free_kinds, along = axis_groupings(fmt, self.ndim)
        kinds: list[AxisGrouping] = [OWN_SCALE] * len(shape)
        for axis, kind in zip(self.free, free_kinds, strict=True):
            kinds[axis] = kind
        for axis in self.contracting if isinstance(along, str) else self.contracting[-1:]:
            kinds[axis] = along
        if isinstance(along, int) and len(self.contracting) > 1 and shape[self.contracting[-1]] % along:
            return None  # a block over several axes
        in_place = with_groupings(fmt, kinds)
        if fmt.sparse is not None and fastest is not None:
            in_place = with_sparse_axis(in_place, fastest - len(shape))
        return replace(spec, format=in_place)


def round_in_layout(
    layout: OperandLayout | None,
    x: Array,
    spec: Spec | None,
    key: Array | None = None,
    gradient_key: Array | None = None,
    *,
    rotation: Hadamard | None = None,
) -> Array:
    """`x` rotated and rounded in a layout (None: with its own axes); its dtype, shape and order of axes come back."""
    if layout is not None and rotation is not None:
        x = rotate_along_sum(layout, x, rotation)
    if spec is None:
        return x
    if layout is None:
        y = round_to_format(x, spec, key, gradient_key=gradient_key)
    elif (same := layout.spec_in_place(spec, x.shape)) is not None:
        y = round_to_format(x if same is spec else jnp.asarray(x), same, key, gradient_key=gradient_key)
    else:
        y = layout.back(round_to_format(layout.lay(jnp.asarray(x)), spec, key, gradient_key=gradient_key), x.shape)
    return keep_nan(x, y, spec)


def rotate_along_sum(layout: OperandLayout, x: Array, rotation: Hadamard) -> Array:
    """`x` rotated along the axes that a product sums over."""
    return layout.back(layout.lay(jnp.asarray(x), rotation), x.shape)


def keep_nan(x: Array, y: Array, spec: Spec) -> Array:
    """`y`, which is `x` rounded, with the NaN of `x`.

    Elements without a code for NaN give their largest value for it, so a model would hide that it has diverged.
    """
    if spec.scaled is None or spec.element.has_nan:
        return y
    # Functions of jnp would be traced again in every call. The rounding has its own derivative, of NaN too.
    return straight_through(lambda values, x: lax.select(lax.ne(x, x), x, values[0]), lambda y: y, [y], x)


def rounds_transpose_alike(spec: Spec | None) -> bool:
    """Whether a matrix and its transpose are rounded to the same: no groups, one of the tensor, or square tiles."""
    fmt = None if spec is None else spec.scaled
    if fmt is not None and fmt.sparse is not None:
        return False
    if fmt is None or (fmt.group is None and fmt.channel is None):
        return True
    return isinstance(fmt.group, tuple) and len(set(fmt.group)) == 1 and fmt.axis == (-2, -1)


def norm_scale_spec(spec: Spec | None) -> Spec | None:
    """The rounding of a norm's scale under the spec of a weight: it is one row, in which tiles are blocks.

    Nothing sums over it, so it keeps all its numbers under a format with `sparse`.
    """
    fmt = None if spec is None else spec.scaled
    if spec is not None and fmt is not None and fmt.sparse is not None:
        fmt = fmt.dense
        spec = replace(spec, format=fmt)
    if spec is None or fmt is None or not isinstance(fmt.group, tuple) or fmt.axis != tuple(range(-len(fmt.group), 0)):
        return spec
    return replace(spec, format=fmt(group=fmt.group[-1]))


def check_layout_axes(field: str, spec: Spec | None, ndim: int, place: Location) -> None:
    """Refuse a scaled format that names an axis which its array, of `ndim` axes in its layout, has not.

    Raises:
        ValueError: that names the field of the rule, the layer and the axes that are allowed.
    """
    if spec is None or spec.scaled is None:
        return
    try:
        spec.scaled.group_shape((1,) * ndim)
    except ValueError as error:
        axes = f"axes from {-ndim} to {ndim - 1}" if ndim else "group='tensor' alone"
        raise ValueError(
            f"{field}={str(spec)!r} of the {place}: {error}. As it is laid out there, with what a product sums over "
            f"as its last axis, it may name {axes}"
        ) from None


def check_finite(value: Any, what: str) -> None:
    """Refuse to pack infinities and NaN, most of which codes have no place for; a tracer is let through.

    Raises:
        ValueError: that counts them; `what` says whose numbers they are.
    """
    if isinstance(value, jax.core.Tracer) or run_numpy(lambda: jnp.isfinite(value).all()):
        return
    nan, infinite = (int(run_numpy(lambda of=of: of(value).sum())) for of in (jnp.isnan, jnp.isinf))
    raise ValueError(
        f"{what} holds {nan} NaN and {infinite} infinities among its {value.size} numbers; what is packed must be "
        "finite"
    )
