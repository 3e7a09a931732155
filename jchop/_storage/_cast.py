"""Casts of stored arrays to other scaled formats that keep every number, or fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.checks import check
from jchop._round.arguments import has_tracer
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import as_spec
from jchop._storage import _axis_groupings as groupings
from jchop._storage._array import QArray
from jchop._storage._codes import CARRIER_FORMATS, batch_axes, spec_of_part
from jchop._storage._quantize import dequantize, quantize
from jchop.formats import ElementFormat, ScaledFormat


def cast_qarray(q: QArray, to: Any) -> QArray:
    """A QArray with the same numbers under another spec.

    The scale of a group is the largest that its numbers had before. Or it is that times a power of two, so that the
    largest number is near the largest element. For elements of up to 4 bits it may be the largest number over one of
    them. Numbers of short formats are exact in binary64, in which both are compared.

    Raises:
        TypeError: for traced arrays.
        ValueError: for a number that the spec does not hold, or a spec without its own scale for each group.
    """
    spec = as_spec(to, scaled=True)
    if has_tracer(q):
        raise TypeError("astype with a spec compares numbers, which jax.jit does not know: call it outside")
    fmt = spec.scaled
    simple = fmt is not None and isinstance(fmt.scale, ElementFormat) and not fmt.sparse and fmt.zero_point != "float"
    check(simple, f"dtype={str(spec)!r} must be a carrier, or a scaled format without quantized scales, float zero "
                  "points and sparsity")  # fmt: skip
    assert fmt is not None and isinstance(fmt.scale, ElementFormat)
    host = jax.tree.map(np.asarray, q)
    x = dequantize(host, "float64")
    kinds = groupings.axis_groupings(groupings.axes_from_end(fmt, x.ndim), x.ndim)
    numbers = np.where(np.isfinite(x), x, 0)
    scale = _most_in_groups(np.where(numbers == 0, 0, _scales_of_elements(host)), kinds)
    scale, most = np.where(scale == 0, 1, scale), _most_in_groups(np.abs(numbers), kinds)
    fraction, power = np.frexp(most / (scale * float(fmt.element.max)))
    smaller = np.ldexp(scale, np.where(most == 0, 0, power - (fraction == 0.5)))

    def zeros(scale: np.ndarray) -> np.ndarray:
        middle = 0 if getattr(fmt.element, "signed", True) else 1 << (fmt.element.bits - 1)
        low = _most_in_groups(-numbers, kinds) / scale
        return np.round(np.where(low <= middle, middle, np.minimum(low, 2 * middle - 1))) if fmt.zero_point else low * 0

    levels = fmt.element.decode(range(1 << fmt.element.bits)) if fmt.element.bits <= 4 else np.zeros(0)
    first, lost = scale, np.ones(scale.shape, bool)
    for other in (scale, smaller, *(most / level for level in levels[levels > 0].tolist())):
        scale = np.where(lost & (other > 0), other, scale)
        scales, points = (groupings.over_elements(part, kinds, x.shape) for part in (scale, zeros(scale)))
        elements = numbers / scales + points
        lost = _most_in_groups(np.asarray(round_to_format(elements, fmt.element)) != elements, kinds)
        if not lost.any():
            break
    scale = np.where(lost, first, scale)
    factor = None
    if fmt.scale_rule.tensor_scale:
        fraction, power = np.frexp(scale.max(initial=0) / float(fmt.scale.max))
        factor = np.ldexp(np.float32(1), power - (fraction == 0.5))
        scale = scale / factor
    stored, zero = _stored_scales(scale, fmt.scale), zeros(scale * (1 if factor is None else factor)).astype(np.int32)
    result = quantize(
        x, spec, scale=stored if factor is None else (stored, factor), zero_point=zero if fmt.zero_point else None
    )
    found = dequantize(result)
    wrong = np.argwhere((found != x) & ~(np.isnan(found) & np.isnan(x)))
    if wrong.size:
        place = tuple(map(int, wrong[0]))
        raise ValueError(
            f"the number {x[place]} at {list(place)} would change under {spec}; jc.quantize(jc.dequantize(q), "
            f"{str(spec)!r}) rounds"
        )
    result = replace(result, dtype=q.dtype)
    return jax.tree.map(jnp.asarray, result) if any(isinstance(x, jax.Array) for x in jax.tree.leaves(q)) else result


def _scales_of_elements(q: QArray) -> np.ndarray:
    """The scale of each number in binary64; 1 for a plain format."""
    fmt: Any = spec_of_part(q.spec, q.ndim).scaled
    if fmt is None or isinstance(fmt.scale, ScaledFormat):
        return np.ones(q.shape)
    first, *rest = q.scale if isinstance(q.scale, tuple) else (q.scale,)
    scale = first.astype(np.float64) if fmt.scale in CARRIER_FORMATS.values() else fmt.scale.decode(first)
    batch = batch_axes(q.spec, q.shape, q.scale)
    for factor in rest:
        scale = scale * factor.astype(np.float64).reshape(*factor.shape, *(1,) * (q.ndim - factor.ndim))
    return groupings.over_elements(scale, groupings.axis_groupings(fmt, q.ndim, batch), q.shape)


def _stored_scales(scale: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    """Scales as a QArray has them. One that the format lacks becomes 1, so its numbers change."""
    distinct, places = np.unique(scale, return_inverse=True)
    dtype = next((name for name, own in CARRIER_FORMATS.items() if own == fmt), None)
    if dtype is None:
        codes = [fmt.code_of(1.0) if (code := fmt.code_of(number)) is None else code for number in distinct.tolist()]
        stored = np.array(codes, fmt.code_dtype)
    else:
        with np.errstate(over="ignore"):
            stored = distinct.astype(jnp.dtype(dtype))
        stored = np.where(np.isfinite(stored) & (stored > 0), stored, 1).astype(stored.dtype)
    return stored[places].reshape(scale.shape)


def _most_in_groups(values: np.ndarray, kinds: tuple[groupings.AxisGrouping, ...]) -> np.ndarray:
    for axis, (kind, n) in enumerate(zip(kinds, values.shape, strict=True)):
        if kind != groupings.OWN_SCALE and n:
            values = np.maximum.reduceat(values, range(0, n, n if kind == groupings.WHOLE_AXIS else int(kind)), axis)
    return values
