"""Scaled formats of any grouping: rounded, quantized, dequantized and fitted, elementwise under broadcast scales.

The arithmetic is that of tiles (`elements`, `scales`), over as many axes as a group extends. A scale is chosen by the
format's rule, and where the format quantizes scales again it is what was stored that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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
from jchop._core.scaled.scales import Plan, Scales, choose_scales, load_scales, make_plan, store_scales, tensor_scale
from jchop._core.scaled_float32 import integers, select
from jchop._core.xla_cpu import materialize_per_group, maximum
from jchop.formats import IntegerFormat, ScaledFormat, binary32
from jchop.scaling import RULES, BlockScaling
from jchop.spec import Gradient, Spec

Array = jax.Array
#: A scale as it is stored: an array, or a tuple where a format has several parts (`ScaledFormat.scale_parts`).
Stored = Any


@lru_cache(maxsize=1024)
def scaling_of(spec: Spec) -> BlockScaling:
    """Elements, scales and rule of a scaled format as tiles have them; block and axis say nothing."""
    fmt = _format(spec)
    element = replace(spec, format=fmt.element, gradient=Gradient())
    scale = binary32 if isinstance(fmt.scale, ScaledFormat) else fmt.scale
    return BlockScaling(element, 1, 0, scale, fmt.rule if fmt.rule in RULES else "absmax", fmt.nan_block)


def plan_of(spec: Spec, dtype: str) -> Plan:
    """The Plan of a scaled format in arrays of a carrier's dtype.

    Raises:
        ValueError: where the carrier of the arithmetic is too narrow for elements or scales.
    """
    return make_plan(scaling_of(spec), CARRIERS[dtype])


def _format(spec: Spec) -> ScaledFormat:
    assert spec.scaled is not None
    return spec.scaled


@dataclass(frozen=True)
class _Fitted:
    """The scales of groups and their zero points, on a view; and both as they are stored."""

    scales: Scales
    zero: Array | None
    stored: tuple[Stored, Array | None]

    @property
    def zero_is_number(self) -> bool:
        """Whether zero points are numbers that are added, and not integers."""
        return self.zero is not None and jnp.issubdtype(self.zero.dtype, jnp.floating)


# -- bodies ------------------------------------------------------------------------------------------------------------


def round_body(
    x: Array, *drawn: Array, spec: Spec, place: StreamOffset = AT_START, branch_allowed: bool = False
) -> Array:
    """`x` quantized and dequantized.

    Args:
        x: a carrier, not empty.
        drawn: for a stochastic spec the words of `seed_words`, then the traced starts that `place` leaves open.
        spec: of a scaled format.
        place: where `x` lies in the random stream.
        branch_allowed: whether the program may branch on the scales' sizes.
    """
    plan, groups = _planned(x, spec)
    fitted = _fit(x, _view(x, groups, plan, spec), groups, plan, spec)

    def run(plan: Plan) -> Array:
        view, word = _view(x, groups, plan, spec), _words(x, drawn, groups, place)
        if fitted.zero is None:
            return groups.back(select.rounded(view, fitted.scales, plan, word))
        return groups.back(_multiply_back(_elements(view, fitted, plan, word), fitted, plan))

    return select.branch_on_range(run, x, fitted.scales, plan, branch_allowed, fitted.zero)


def quantize_body(
    x: Array,
    *arrays: Array,
    spec: Spec,
    given: int = 0,
    place: StreamOffset = AT_START,
    as_dtype: Any = "uint8",
    branch_allowed: bool = False,
) -> tuple[Array, ...]:
    """`x` as packed codes, and scales and zero points as they are stored, one after the other.

    Args:
        x: a carrier, not empty.
        arrays: `given` arrays, scales and zero points as they are stored; then what was drawn, as for `round_body`.
        spec: of a scaled format.
        given: how many arrays of scales and zero points there are; 0 where they are to be fitted.
        place: as for `round_body`.
        as_dtype: of the codes, 8 bits.
        branch_allowed: as for `round_body`.
    """
    plan, groups = _planned(x, spec)
    if given:
        fitted = _loaded(arrays[:given], groups, plan, spec)
    else:
        fitted = _fit(x, _view(x, groups, plan, spec), groups, plan, spec, branch_allowed)

    def run(plan: Plan) -> Array:
        view, word = _view(x, groups, plan, spec), _words(x, arrays[given:], groups, place)
        if fitted.zero is None:
            codes = select.codes_of(view, fitted.scales, plan, word)
        else:
            codes = integers.encode_whole(_elements(view, fitted, plan, word), plan)
        return lax.bitcast_convert_type(_pack(codes, groups, _format(spec).bits), as_dtype)

    return select.branch_on_range(run, x, fitted.scales, plan, branch_allowed, fitted.zero), *flat(*fitted.stored)


def dequantize_body(codes: Array, *stored: Array, spec: Spec, shape: tuple[int, ...], dtype: str) -> Array:
    """The numbers that `quantize_body` stored: what `round_body` gives, bit for bit."""
    plan = plan_of(spec, dtype)
    groups = Groups(shape, _format(spec).group_shape(shape))
    fitted = _loaded(stored, groups, plan, spec)
    view = _unpack(codes, groups, _format(spec).bits)
    if fitted.zero is None:
        return groups.back(select.numbers_of(view, fitted.scales, plan))
    return groups.back(_multiply_back(integers.decode_whole(view, plan)[0].astype(plan.compute.work), fitted, plan))


def fit_body(x: Array, *, spec: Spec, branch_allowed: bool = False) -> tuple[Array, ...]:
    """The scales and zero points of `x` as they are stored, one after the other; arguments as for `round_body`."""
    plan, groups = _planned(x, spec)
    return flat(*_fit(x, _view(x, groups, plan, spec), groups, plan, spec, branch_allowed).stored)


def overflowed_body(x: Array, *drawn: Array, spec: Spec, place: StreamOffset = AT_START) -> Array:
    """Where the rounded x / s + z lies beyond the ends of the element format; NaN counts as inside."""
    plan, groups = _planned(x, spec)
    view, word = _view(x, groups, plan, spec), _words(x, drawn, groups, place)
    fitted = _fit(x, view, groups, plan, spec)
    if fitted.zero is not None:
        return groups.back(zero_points.beyond_ends(view, _shifted(view, fitted, plan, word), plan))
    return groups.back(elements.overflowed_quotients(view, fitted.scales, plan, word))


def flat(scale: Stored, zero: Array | None) -> tuple[Array, ...]:
    """Scales and zero points as a tuple of arrays."""
    return (*(scale if isinstance(scale, tuple) else (scale,)), *(() if zero is None else (zero,)))


def unflat(arrays: Sequence[Array], fmt: ScaledFormat) -> tuple[Stored, Array | None]:
    """The inverse of `flat`."""
    count = len(fmt.scale_parts)
    return tuple(arrays[:count]) if count > 1 else arrays[0], arrays[-1] if fmt.zero_point else None


def _planned(x: Array, spec: Spec) -> tuple[Plan, Groups]:
    return plan_of(spec, x.dtype.name), Groups(x.shape, _format(spec).group_shape(x.shape))


def _view(x: Array, groups: Groups, plan: Plan, spec: Spec) -> Array:
    """The numbers, those of 16 bits in float32."""
    # What fills up a group is none of its numbers: to rules that look at more than the largest magnitude it shows.
    no_number = _format(spec).percentile is not None or _format(spec).zero_point == "float"
    return groups.view(elements.widen(x, plan.carrier), float("nan") if no_number else 0)


def _words(x: Array, drawn: Sequence[Array], groups: Groups, place: StreamOffset) -> Array | None:
    """The random words of the numbers. A branch draws its own: else they would all be written to memory for it."""
    return groups.view(words_like(x, drawn, place)) if drawn else None


# -- elements ----------------------------------------------------------------------------------------------------------


def _elements(view: Array, fitted: _Fitted, plan: Plan, word: Array | None) -> Array:
    """The elements as numbers; whole numbers of the work dtype where there are zero points."""
    if fitted.zero is None:
        return elements.round_quotients(view, fitted.scales, plan, word)
    if integers.applies(plan) and not fitted.zero_is_number:
        return integers.round_whole(view, fitted.scales, fitted.zero, plan, word)
    return zero_points.clamp(_shifted(view, fitted, plan, word), plan)


def _pack(codes: Array, groups: Groups, bits: int) -> Array:
    """Codes of a view, packed along the last axis of the array."""
    packed = groups.packed(bits)
    if packed is not None:
        return packed.back(pack(codes, bits))
    codes = groups.back(codes)
    return pack(codes if codes.ndim else codes[None], bits)


def _unpack(packed: Array, groups: Groups, bits: int) -> Array:
    """The inverse of `_pack`."""
    bytes_of = groups.packed(bits)
    if bytes_of is not None:
        return unpack(bytes_of.view(packed), bits, groups.sizes[-1])
    return groups.view(unpack(packed, bits, groups.shape[-1] if groups.shape else 1).reshape(groups.shape))


def _shifted(view: Array, fitted: _Fitted, plan: Plan, word: Array | None) -> Array:
    assert fitted.zero is not None
    rounds = float_zero_points.round_offset if fitted.zero_is_number else zero_points.round_shifted
    return rounds(view, fitted.scales, fitted.zero, plan, word)


def _codes(values: Array, fitted: _Fitted, plan: Plan) -> Array:
    """The codes of what `_elements` gave."""
    if fitted.zero is None:
        return encode_elements(values, plan.scaling.element.format, plan.compute)
    return integers.encode_whole(values, plan)


def _multiply_back(values: Array, fitted: _Fitted, plan: Plan) -> Array:
    assert fitted.zero is not None
    if fitted.zero_is_number:
        return float_zero_points.add_back(values, fitted.scales, fitted.zero, plan)
    values = values - fitted.zero.astype(values.dtype)
    if integers.multiplies(plan):
        return select.times_whole(values, fitted.scales, plan)
    difference = values.astype(plan.compute.name)
    wider = Spec(IntegerFormat(plan.scaling.element.format.bits + 1))
    plan = replace(plan, scaling=replace(plan.scaling, element=wider))
    return elements.multiply_back(difference, fitted.scales, plan)


# -- scales ------------------------------------------------------------------------------------------------------------


def _fit(x: Array, view: Array, groups: Groups, plan: Plan, spec: Spec, branch_allowed: bool = False) -> _Fitted:
    """Scales and zero points of the groups of `x`, worked out once for each group.

    Else a compiler may work them out anew for every element, or take minutes over the fused program.
    """
    found = _fit_groups(x, view, groups, plan, spec, branch_allowed)
    scales = found.scales
    values, zero, stored = materialize_per_group(((scales.value, scales.nan, scales.tensor), found.zero, found.stored))
    return _Fitted(Scales(*values), zero, stored)


def _fit_groups(x: Array, view: Array, groups: Groups, plan: Plan, spec: Spec, branch_allowed: bool) -> _Fitted:
    fmt, zero = _format(spec), None
    if fmt.rule == "two_level":
        whole = tensor_scale(elements.widen(x, plan.carrier), plan)
        scales = choose_scales(view, groups.axes, plan, lax.bitcast_convert_type(whole, jnp.int32), maximum)
        return _Fitted(scales, None, ((groups.squeeze(store_scales(scales, plan)), whole), None))
    if fmt.zero_point:
        fit = float_zero_points.fit_offset if fmt.zero_point == "float" else zero_points.fit_range
        scales, zero = fit(view, groups.axes, plan)
    elif fmt.percentile is not None:
        scales = fitting.fit_percentile(view, groups.axes, plan, fmt.percentile)
    elif fmt.rule == "mse":
        scales = fitting.fit_squares(view, groups.axes, plan)
    else:
        scales = choose_scales(view, groups.axes, plan, maximum=maximum, branch_allowed=branch_allowed)
    stored = groups.squeeze(store_scales(scales, plan))
    zeros = None if zero is None else groups.squeeze(zero)
    if zeros is not None and fmt.zero_point == "float":
        zeros = float_zero_points.store_zero(zeros, plan)
    if not isinstance(fmt.scale, ScaledFormat):
        return _Fitted(scales, zero, (stored, zeros))
    parts = lax.optimization_barrier(_quantize_scales(lax.optimization_barrier(stored), fmt.scale))
    return _Fitted(_load(parts, groups, plan, fmt), zero, (parts, zeros))


def _loaded(arrays: Sequence[Array], groups: Groups, plan: Plan, spec: Spec) -> _Fitted:
    """Scales and zero points that were stored."""
    stored, zeros = unflat(arrays, _format(spec))
    zero = None if zeros is None else groups.expand(zeros)
    if zero is not None and _format(spec).zero_point == "float":
        zero = float_zero_points.load_zero(zero, plan)
    return _Fitted(select.held(_load(stored, groups, plan, _format(spec))), zero, (stored, zeros))


def _load(stored: Stored, groups: Groups, plan: Plan, fmt: ScaledFormat) -> Scales:
    if isinstance(fmt.scale, ScaledFormat):
        stored = _dequantize_scales(stored, fmt.scale, groups.counts)
    if fmt.rule == "two_level":
        stored, whole = stored
        return load_scales(groups.expand(stored), plan, lax.bitcast_convert_type(whole, jnp.int32))
    return load_scales(groups.expand(stored), plan)


def _quantize_scales(scales: Array, fmt: ScaledFormat) -> tuple[Array, ...]:
    """binary32 scales under a format of their own, none of them zero: codes, scales, and zero points if any."""
    spec = Spec(fmt)
    plan, groups = _planned(scales, spec)
    view = _view(scales, groups, plan, spec)
    fitted = _fit(scales, view, groups, plan, spec)
    values = _elements(view, fitted, plan, None)
    if fitted.zero is None:
        sign, magnitude = _bits.split(values, plan.compute)
        smallest = plan.compute.toward_zero(fitting.smallest_of(fmt.element))[0]
        values = _bits.join(sign, jnp.maximum(magnitude, smallest), plan.compute)
    return _pack(_codes(values, fitted, plan), groups, fmt.element.bits), *flat(*fitted.stored)


def _dequantize_scales(stored: tuple[Array, ...], fmt: ScaledFormat, shape: tuple[int, ...]) -> Array:
    scales = dequantize_body(*stored, spec=Spec(fmt), shape=shape, dtype="float32")
    bits = lax.bitcast_convert_type(scales, jnp.int32)
    finite = jnp.clip(bits, 1, CARRIERS["float32"].inf - 1)  # the largest may round up beyond the ends
    return lax.bitcast_convert_type(finite, jnp.float32)
