"""A packed parameter with a scale for each element.

The scales of groups are chosen before any element is rounded, by the rule of the format. Then every element can be
rounded by itself, in any order, whatever the shape of a group is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._core.scaled_bodies import unflatten_scales
from jchop._quantized.program.weight_layout import StoredAs
from jchop._spec.spec import Spec
from jchop.formats import ScaledFormat, binary32
from jchop.storage import QArray, dequantize, quantize
from jchop.storage._axis_groupings import OWN_SCALE, axis_groupings, with_groupings
from jchop.storage._codes import pack_entries, unpack_entries
from jchop.storage._decode import repeat_over_groups

Array = jax.Array

__all__ = ["ElementScales", "element_scales", "elementwise_spec", "qarray_of", "round_column", "with_entries"]


@dataclass(frozen=True)
class ElementScales:
    """Scales and zero points as they are stored, one for each element.

    Args:
        scale: none for a plain format; the second of two is the scale of the tensor, and has no axis.
        zero: None for a format without zero points.
    """

    scale: tuple[Array, ...]
    zero: Array | None

    @property
    def by_element(self) -> tuple[Array, ...]:
        """The arrays that have a number for each element."""
        return (*self.scale[:1], *(() if self.zero is None else (self.zero,)))

    def quantize_args(self, by_element: Sequence[Array]) -> tuple[Any, Any]:
        """The arguments scale and zero_point of `quantize`, from a part of the arrays `by_element`."""
        if not self.scale:
            return None, None
        first, *zero = by_element
        scale = first if len(self.scale) == 1 else (first, *self.scale[1:])
        return scale, zero[0] if zero else None


def qarray_of(packed_weight: QArray | StoredAs) -> QArray:
    """The array that holds the codes of a packed parameter."""
    return packed_weight.stored if isinstance(packed_weight, StoredAs) else packed_weight


def element_scales(q: QArray) -> ElementScales:
    """The scales of each element of an array that has no axes of a stack."""
    fmt = q.spec.scaled
    if fmt is None:
        return ElementScales((), None)
    groupings = axis_groupings(fmt, q.ndim)

    def repeat_to_elements(values: Array) -> Array:
        return jnp.broadcast_to(repeat_over_groups(values, groupings, q.shape), q.shape)

    if isinstance(fmt.scale, ScaledFormat):
        scale_shape = fmt.scale_shape(q.shape)
        codes, *inner_arrays = q.scale
        inner_scale, zero = unflatten_scales(inner_arrays, fmt.scale)
        length = scale_shape[-1] if scale_shape else None
        scale_qarray = QArray(codes, inner_scale, zero, Spec(fmt.scale), length, np.dtype(np.float32))
        scales = jnp.clip(dequantize(scale_qarray), np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max)
        scale: tuple[Array, ...] = (repeat_to_elements(scales),)
    elif isinstance(q.scale, tuple):
        scale = (repeat_to_elements(q.scale[0]), q.scale[1])
    else:
        scale = (repeat_to_elements(q.scale),)
    return ElementScales(scale, None if q.zero_point is None else repeat_to_elements(q.zero_point))


def elementwise_spec(spec: Spec) -> Spec:
    """A spec under which each element of a vector has a scale of its own."""
    fmt = spec.scaled
    if fmt is None:
        return spec
    elementwise_format = with_groupings(fmt, (OWN_SCALE,))
    if isinstance(fmt.scale, ScaledFormat):
        elementwise_format = replace(elementwise_format, scale=binary32, rule=None)  # the caller passes scales
    return replace(spec, format=elementwise_format)


def round_column(
    column: Array, scale: Any, zero: Any, spec: Spec, dtype: Any, key: Array | None = None
) -> tuple[Array, Array]:
    """The codes of a vector, one entry for each element, and their numbers in `dtype`.

    `spec` is one of `elementwise_spec`.
    """
    scale_args = {} if scale is None else {"scale": scale, "zero_point": zero}
    q = quantize(column, spec, key, impl="xla", **scale_args)
    entries = unpack_entries(q.qvalue, spec.element, column.shape[0])
    return entries, dequantize(q, dtype)


def with_entries(packed_weight: QArray | StoredAs, entries: Array) -> QArray | StoredAs:
    """A packed parameter with other codes, one entry for each element, in the order of its numbers."""
    if isinstance(packed_weight, StoredAs):
        q = with_entries(packed_weight.stored, entries)
        assert isinstance(q, QArray)
        return replace(packed_weight, stored=q)
    codes = pack_entries(entries.reshape(packed_weight.shape or (1,)), packed_weight.spec.element)
    return replace(packed_weight, qvalue=codes)
