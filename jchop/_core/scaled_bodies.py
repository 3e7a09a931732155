"""Scaled formats of any grouping: rounding, quantization, dequantization and fits, elementwise with broadcast scales.

The arithmetic is the arithmetic of tiles (`elements`, `scales`), along all axes of a group. The format's rule chooses a
scale. If the format quantizes scales again, the stored scale is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop import _bits
from jchop._bits import CARRIERS
from jchop._core.rounding.codes import encode_elements, pack, unpack
from jchop._core.rounding.stream_offset import AT_START, StreamOffset, words_like
from jchop._core.scaled import elements, fitting, float_zero_points, zero_points
from jchop._core.scaled.groups import Groups
from jchop._core.scaled.levels import fit_levels
from jchop._core.scaled.scales import Plan, Scales, choose_scales, largest_of, load_scales, store_scales, tensor_scale
from jchop._core.scaled_float32 import codebooks, in_float64, integers, select
from jchop._core.xla_cpu import materialize_per_group, maximum
from jchop.formats import IntegerFormat, ScaledFormat
from jchop.spec import Spec

Array = jax.Array
#: A stored scale: an array, or a tuple if a format has several parts (`ScaledFormat.scale_parts`).
Stored = Any


@dataclass(frozen=True)
class _Fitted:
    """The scales of groups and their zero points, on a view.

    Args:
        scales: the scales of the groups.
        zero: their zero points, if the format has any.
        store: returns both in their stored form; a program that only rounds does not call it.
    """

    scales: Scales
    zero: Array | None
    store: Callable[[], tuple[Stored, Array | None]]

    @property
    def zero_is_number(self) -> bool:
        """Whether zero points are numbers to add, and not integers."""
        return self.zero is not None and jnp.issubdtype(self.zero.dtype, jnp.floating)


# -- bodies ------------------------------------------------------------------------------------------------------------


def round_body(
    x: Array, *seeds_and_starts: Array, plan: Plan, place: StreamOffset = AT_START, may_branch: bool = False
) -> Array:
    """`x` after quantization and dequantization.

    Args:
        x: a carrier, not empty.
        seeds_and_starts: for a stochastic element, the words of `seed_words`, then the traced starts of `place`.
        plan: the plan of the scaled format in arrays like `x`.
        place: the position of `x` in the random stream.
        may_branch: whether the program is for one CPU: it may branch on the scales' sizes, and has fast float64.
    """
    plan = replace(plan, float64=may_branch and select.prefers_float64(x, plan))
    groups = _groups(x.shape, plan)
    group_scales = _fit(x, _view(x, groups, plan), groups, plan)

    def run(plan: Plan) -> Array:
        view, word = _view(x, groups, plan), _words(x, seeds_and_starts, groups, place)
        if group_scales.zero is None:
            return groups.back(select.rounded(view, group_scales.scales, plan, word))
        if not group_scales.zero_is_number and select.rounds_in_float64(plan):
            return groups.back(select.rounded_in_float64(view, group_scales.scales, group_scales.zero, plan, word))
        return groups.back(_multiply_back(_elements(view, group_scales, plan, word), group_scales, plan))

    return select.branch_on_range(run, x, group_scales.scales, plan, may_branch, group_scales.zero)


def quantize_body(
    x: Array,
    *arrays: Array,
    plan: Plan,
    given: int = 0,
    place: StreamOffset = AT_START,
    as_dtype: Any = "uint8",
    may_branch: bool = False,
) -> tuple[Array, ...]:
    """`x` as packed codes, then the stored scales and zero points.

    Args:
        x: a carrier, not empty.
        arrays: `given` arrays, the stored scales and zero points; then `seeds_and_starts` as for `round_body`.
        plan: as for `round_body`.
        given: the number of arrays of scales and zero points; 0 if they are fitted.
        place: as for `round_body`.
        as_dtype: dtype of the codes, of 8 bits. None: only scales and zero points, no codes.
        may_branch: as for `round_body`.
    """
    plan = replace(plan, float64=may_branch and select.prefers_float64(x, plan))
    groups = _groups(x.shape, plan)
    if given:
        group_scales = _loaded(arrays[:given], groups, plan)
    else:
        group_scales = _fit(x, _view(x, groups, plan), groups, plan, may_branch)
    scale_arrays = flat(*group_scales.store())
    if as_dtype is None:
        return scale_arrays

    def run(plan: Plan) -> Array:
        view, word = _view(x, groups, plan), _words(x, arrays[given:], groups, place)
        if group_scales.zero is None:
            codes = select.codes_of(view, group_scales.scales, plan, word)
        elif not group_scales.zero_is_number and in_float64.applies(plan):
            codes = in_float64.codes_of(view, group_scales.scales, plan, word, group_scales.zero)
        else:
            codes = integers.encode_whole(_elements(view, group_scales, plan, word), plan)
        return lax.bitcast_convert_type(_pack(codes, groups, plan.fmt.bits), as_dtype)

    return select.branch_on_range(run, x, group_scales.scales, plan, may_branch, group_scales.zero), *scale_arrays


def dequantize_body(
    codes: Array, *scale_arrays: Array, plan: Plan, shape: tuple[int, ...], may_branch: bool = False
) -> Array:
    """The numbers of the results of `quantize_body`: equal to `round_body`, bit for bit.

    `may_branch` says, as there, whether the program is for one CPU, which has fast float64.
    """
    plan = replace(plan, float64=may_branch and codebooks.multiplies(plan))
    groups = _groups(shape, plan)
    group_scales = _loaded(scale_arrays, groups, plan)
    view = _unpack(codes, groups, plan.fmt.bits)
    if group_scales.zero is None:
        return groups.back(select.numbers_of(view, group_scales.scales, plan))
    return groups.back(
        _multiply_back(integers.decode_whole(view, plan)[0].astype(plan.compute.work), group_scales, plan)
    )


def overflowed_body(x: Array, *seeds_and_starts: Array, plan: Plan, place: StreamOffset = AT_START) -> Array:
    """Whether the rounded x / s + z is beyond the ends of the element format; NaN counts as inside."""
    groups = _groups(x.shape, plan)
    view, word = _view(x, groups, plan), _words(x, seeds_and_starts, groups, place)
    group_scales = _fit(x, view, groups, plan)
    if group_scales.zero is not None:
        return groups.back(zero_points.beyond_ends(view, _shifted(view, group_scales, plan, word), plan))
    return groups.back(elements.overflowed_quotients(view, group_scales.scales, plan, word))


def flat(scale: Stored, zero: Array | None) -> tuple[Array, ...]:
    """Scales and zero points as a tuple of arrays."""
    return (*(scale if isinstance(scale, tuple) else (scale,)), *(() if zero is None else (zero,)))


def unflat(arrays: Sequence[Array], fmt: ScaledFormat) -> tuple[Stored, Array | None]:
    """The inverse of `flatten_scales`."""
    count = len(fmt.scale_parts)
    return tuple(arrays[:count]) if count > 1 else arrays[0], arrays[-1] if fmt.zero_point else None


def _groups(shape: tuple[int, ...], plan: Plan) -> Groups:
    return Groups(shape, plan.fmt.group_shape(shape))


def _view(x: Array, groups: Groups, plan: Plan) -> Array:
    """The view of the numbers; 16-bit numbers are in float32."""
    # With zero points that are numbers, padding with zeros would change the range of a group.
    fill = float("nan") if plan.fmt.zero_point == "float" else plan.rule.fill
    return groups.view(elements.widen(x, plan.carrier), fill)


def _words(x: Array, seeds_and_starts: Sequence[Array], groups: Groups, place: StreamOffset) -> Array | None:
    """The random words of the numbers. Each branch draws them itself; operands of a branch are written to memory."""
    return groups.view(words_like(x, seeds_and_starts, place)) if seeds_and_starts else None


# -- elements ----------------------------------------------------------------------------------------------------------


def _elements(view: Array, group_scales: _Fitted, plan: Plan, word: Array | None) -> Array:
    """The elements as numbers, or as whole numbers of the work dtype if there are zero points."""
    if group_scales.zero is None:
        return elements.round_quotients(view, group_scales.scales, plan, word)
    if integers.applies(plan) and not group_scales.zero_is_number:
        return integers.round_whole(view, group_scales.scales, group_scales.zero, plan, word)
    return zero_points.clamp(_shifted(view, group_scales, plan, word), plan)


def _pack(codes: Array, groups: Groups, bits: int) -> Array:
    """Codes of a view, packed along the last axis of the array."""
    byte_groups = groups.byte_groups(bits)
    if byte_groups is not None:
        return byte_groups.back(pack(codes, bits))
    codes = groups.back(codes)
    return pack(codes if codes.ndim else codes[None], bits)


def _unpack(code_bytes: Array, groups: Groups, bits: int) -> Array:
    """The inverse of `_pack_view`."""
    byte_groups = groups.byte_groups(bits)
    if byte_groups is not None:
        return unpack(byte_groups.view(code_bytes), bits, groups.sizes[-1])
    return groups.view(unpack(code_bytes, bits, groups.shape[-1] if groups.shape else 1).reshape(groups.shape))


def _shifted(view: Array, group_scales: _Fitted, plan: Plan, word: Array | None) -> Array:
    assert group_scales.zero is not None
    rounds = float_zero_points.round_offset if group_scales.zero_is_number else zero_points.round_shifted
    return rounds(view, group_scales.scales, group_scales.zero, plan, word)


def _codes(values: Array, group_scales: _Fitted, plan: Plan) -> Array:
    """The codes of the results of `_round_to_elements`."""
    if group_scales.zero is None:
        return encode_elements(values, plan.element.format, plan.compute)
    return integers.encode_whole(values, plan)


def _multiply_back(values: Array, group_scales: _Fitted, plan: Plan) -> Array:
    assert group_scales.zero is not None
    if group_scales.zero_is_number:
        return float_zero_points.add_back(values, group_scales.scales, group_scales.zero, plan)
    values = values - group_scales.zero.astype(values.dtype)
    if integers.multiplies(plan):
        return select.times_whole(values, group_scales.scales, plan)
    difference = values.astype(plan.compute.name)
    wider = Spec(IntegerFormat(plan.element.format.bits + 1))
    return elements.multiply_back(difference, group_scales.scales, replace(plan, element=wider))


# -- scales ------------------------------------------------------------------------------------------------------------


def _fit(x: Array, view: Array, groups: Groups, plan: Plan, may_branch: bool = False) -> _Fitted:
    """Scales and zero points of the groups of `x`, computed once for each group.

    Otherwise a compiler may compute them again for every element, or take minutes to compile the fused program. They
    are also materialized before they are stored, so that both uses share one computation.
    """
    fmt, zero = plan.fmt, None
    whole = tensor_scale(elements.widen(x, plan.carrier), plan) if plan.rule.tensor_scale else None
    tensor = None if whole is None else lax.bitcast_convert_type(whole, jnp.int32)
    if fmt.zero_point:
        fit = float_zero_points.fit_offset if fmt.zero_point == "float" else zero_points.fit_range
        scales, zero = fit(view, groups.axes, plan)
    elif plan.rule.fit in fitting.FITTED:
        scales = fitting.FITTED[plan.rule.fit](view, groups.axes, plan, tensor)
    elif plan.rule.fit == "levels":
        largest = largest_of(_bits.split(view, plan.compute)[1], groups.axes, plan.compute, maximum)
        scales = Scales(groups.expand(fit_levels(groups.squeeze(largest), plan)))
    else:
        scales = choose_scales(view, groups.axes, plan, tensor, maximum, may_branch, select.rounds_in_float64(plan))
    scales, zero = select.held(scales, plan), materialize_per_group(zero)

    def scale_arrays() -> Stored:
        own = groups.squeeze(store_scales(scales, plan))
        return own if whole is None else (own, whole)

    def zero_array() -> Array | None:
        if zero is None:
            return None
        zeros = groups.squeeze(zero)
        return float_zero_points.store_zero(zeros, plan) if fmt.zero_point == "float" else zeros

    if plan.of_scales is None:
        return _Fitted(scales, zero, lambda: _held(scale_arrays(), zero_array()))
    parts = lax.optimization_barrier(_quantize_scales(lax.optimization_barrier(scale_arrays()), plan.of_scales))
    return _Fitted(select.held(_load(parts, groups, plan), plan), zero, lambda: _held(parts, zero_array()))


def _held(scale_arrays: Stored, zero: Array | None) -> tuple[Stored, Array | None]:
    return materialize_per_group((scale_arrays, zero))


def _loaded(arrays: Sequence[Array], groups: Groups, plan: Plan) -> _Fitted:
    """Scales and zero points from their stored form."""
    scale_arrays, zeros = unflat(arrays, plan.fmt)
    zero = None if zeros is None else groups.expand(zeros)
    if zero is not None and plan.fmt.zero_point == "float":
        zero = float_zero_points.load_zero(zero, plan)
    return _Fitted(select.held(_load(scale_arrays, groups, plan), plan), zero, lambda: (scale_arrays, zeros))


def _load(parts: Stored, groups: Groups, plan: Plan) -> Scales:
    if plan.of_scales is not None:
        parts = _dequantize_scales(parts, plan.of_scales, groups.counts)
    if plan.rule.tensor_scale:
        parts, whole = parts
        return load_scales(groups.expand(parts), plan, lax.bitcast_convert_type(whole, jnp.int32))
    return load_scales(groups.expand(parts), plan)


def _quantize_scales(scales: Array, plan: Plan) -> tuple[Array, ...]:
    """binary32 scales in their own scaled format, never zero: codes, scales, and zero points if any."""
    groups = _groups(scales.shape, plan)
    view = _view(scales, groups, plan)
    group_scales = _fit(scales, view, groups, plan)
    values = _elements(view, group_scales, plan, None)
    if group_scales.zero is None:
        sign, magnitude = _bits.split(values, plan.compute)
        smallest = plan.compute.toward_zero(fitting.smallest_of(plan.element.format))[0]
        values = _bits.join(sign, jnp.maximum(magnitude, smallest), plan.compute)
    return _pack(_codes(values, group_scales, plan), groups, plan.fmt.bits), *flat(*group_scales.store())


def _dequantize_scales(scale_arrays: tuple[Array, ...], plan: Plan, shape: tuple[int, ...]) -> Array:
    scales = dequantize_body(*scale_arrays, plan=plan, shape=shape)
    bits = lax.bitcast_convert_type(scales, jnp.int32)
    finite = _bits.clip(bits, 1, CARRIERS["float32"].inf - 1)  # the largest may round up beyond the ends
    return lax.bitcast_convert_type(finite, jnp.float32)
