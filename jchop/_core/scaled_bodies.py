"""Scaled formats of any grouping: rounding, quantization, dequantization and fits, elementwise with broadcast scales.

The arithmetic is the arithmetic of tiles (`elements`), along all axes of a group. The format's rule chooses a
scale. If the format quantizes scales again, the stored scale is used.

Elements are found by the fastest exact way. If floating-point arithmetic is exact, it replaces arithmetic on bits
(`grid_elements`, `codebook_elements`). Otherwise the bodies of tiles (`elements`) run on arrays. Format and dtype
decide, before any number is known. But a program may branch on whether all scales are in a safe range; that way has
fewer operations for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, enable_x64, lax

from jchop._common.bit_ops import FLOAT32, join_sign, lax_clip, reshard_like, split_sign
from jchop._core.rounding.codes import (
    bits_to_float,
    decode_elements,
    encode_elements,
    float_to_bits,
    pack_codes,
    unpack_codes,
)
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.random_bits import STREAM_START, StreamOffset, words_like
from jchop._core.scaled import codebook_elements, elements, fitting, grid_elements, zero_points
from jchop._core.scaled.elements import (
    MOST_WITHOUT_BRANCH,
    SAFE_EXPONENT,
    BlockScales,
    Decoding,
    Encoding,
    ScaledPlan,
    are_in_safe_range,
    choose_scales,
    largest_finite_magnitude,
    load_scales,
    narrow_16_bit,
    put_nan,
    scale_magnitude,
    store_scales,
    tensor_scale,
)
from jchop._core.scaled.fitting import fit_levels
from jchop._core.scaled.groups import Groups
from jchop._core.xla.backend import PORTABLE, Backend
from jchop._core.xla.sizes import if_static
from jchop._spec.spec import Spec
from jchop.formats import CodebookFormat, IntegerFormat, ScaledFormat

# == which way =========================================================================================================


#: Arrays of at most as many numbers are rounded in float64 if the program may: a third of the operations to compile,
#: each of them at half the speed. Under scales that are powers of two (True) float32 needs few operations, too.
MOST_IN_FLOAT64 = {False: 1 << 19, True: 1 << 16}

#: The least numbers of a branch in float64.
LEAST_BRANCH_IN_FLOAT64 = 1 << 14


def plan_to_encode(x: Array, plan: ScaledPlan, backend: Backend) -> ScaledPlan:
    """The plan of a program that finds the elements of `x`, with every choice between the exact ways."""
    plan = plan_to_decode(plan, backend)
    encoding = next((way for way, supports in _ENCODINGS.items() if supports(plan)), "exact")
    few = if_static(lambda: x.size <= MOST_IN_FLOAT64[plan.is_power])
    float64 = backend.float64 and (few or encoding == "exact") and plan.second is None
    of_elements = float64 and grid_elements.supports_float64_encode(plan)
    # Float32 products may be rounded once more, to the plan's carrier, if they are exact.
    of_numbers = of_elements and (plan.carrier is plan.compute or plan.decoding in ("integers", "floats"))
    return replace(plan, encoding=encoding, float64=float64, float64_elements=of_elements, float64_numbers=of_numbers)


def plan_to_decode(plan: ScaledPlan, backend: Backend) -> ScaledPlan:
    """The plan of a program that finds the numbers of codes."""
    decoding = next((way for way, supports in _DECODINGS.items() if supports(plan)), "exact")
    return replace(plan, backend=backend, decoding=decoding, float64=backend.float64 and decoding == "codebooks")


#: Whether a way gives the results of the exact way, the fastest first.
_ENCODINGS: dict[Encoding, Callable[[ScaledPlan], bool]] = {
    "integers": grid_elements.supports_integer_encode,
    "floats": grid_elements.supports_float_encode,
    "thresholds": codebook_elements.supports_threshold_encode,
    "codebooks": codebook_elements.supports_codebook_encode,
}
_DECODINGS: dict[Decoding, Callable[[ScaledPlan], bool]] = {
    "integers": grid_elements.supports_integer_decode,
    "floats": grid_elements.supports_float_decode,
    "codebooks": codebook_elements.supports_codebook_decode,
    "level_products": codebook_elements.has_level_products,
}


def materialize_scales(scales: BlockScales, plan: ScaledPlan, decodes: bool = False) -> BlockScales:
    """Scales, computed once for each group. If `decodes`, the program only decodes, by the quanta of most formats."""
    if plan.float64_numbers:
        return grid_elements.materialize_scale_pairs(scales, plan)
    if decodes and plan.decoding in ("integers", "floats") and scales.tensor is None and scales.second is None:
        quanta, nan = plan.backend.per_group((grid_elements.product_quanta(scales, plan), scales.nan))
        return replace(scales, nan=nan, quanta=quanta)
    parts = plan.backend.per_group((scales.value, scales.nan, scales.tensor, scales.second))
    return BlockScales(*parts[:3], second=parts[3])


def _by_levels(run: Callable[[BlockScales, ScaledPlan], Array], scales: BlockScales, plan: ScaledPlan) -> Array:
    """The results of a function of scales and plan; each group has one of its two levels, if the rule has two."""
    if scales.second is None or plan.second is None:
        return run(scales, plan)
    alone = replace(scales, second=None)
    return jnp.where(scales.second, run(alone, plan.second), run(alone, plan))


def branch_on_range(
    run: Callable[[ScaledPlan], Array],
    x: Array,
    scales: BlockScales,
    plan: ScaledPlan,
    zero: Array | None = None,
    rounds: bool = False,
) -> Array:
    """The result of `run` under a plan. If the program may branch, moderate scales use a plan with `in_safe_range`.

    Args:
        run: a function of a plan.
        x: numbers.
        scales: the scales of their groups.
        plan: the plan without `in_safe_range`.
        zero: integer zero points, which must be within 2^10 of zero for the branch.
        rounds: whether the result is numbers. In float64 only these gain: half the time, without subnormal numbers.
    """
    branch, gains = plan.backend.branch, plan.encoding in ("integers", "floats") and not plan.float64_elements
    if branch is not None and rounds and scales.pair is not None and grid_elements.rounds_to_nearest(plan):
        if if_static(lambda: x.size < LEAST_BRANCH_IN_FLOAT64):
            return run(plan)
        with enable_x64(True):
            moderate = jnp.min(scales.pair[0]) >= 2.0**-SAFE_EXPONENT
        return branch(moderate, lambda: run(replace(plan, in_safe_range=True)), lambda: run(plan))
    small = if_static(lambda: x.size <= MOST_WITHOUT_BRANCH)
    if branch is None or not gains or scales.tensor is not None or small:
        return run(plan)
    in_safe_range = jnp.all(are_in_safe_range(scales, plan))
    if zero is not None and jnp.issubdtype(zero.dtype, jnp.integer):
        in_safe_range &= jnp.all((zero >= -grid_elements.MOST_ZERO_POINT) & (zero <= grid_elements.MOST_ZERO_POINT))
    return branch(in_safe_range, lambda: run(replace(plan, in_safe_range=True)), lambda: run(plan))


def encode_groups(
    x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None, zero: Array | None = None
) -> Array:
    """The codes of the quotients x / s, with zero points if there are any, rounded once to the element format."""
    if scales.second is not None:
        return _by_levels(lambda scales, plan: _to_codes(encode_groups(x, scales, plan, word), plan), scales, plan)
    if plan.float64_elements and not _is_number(zero):
        return grid_elements.encode_in_float64(x, scales, plan, word, zero)
    if zero is not None:
        return grid_elements.encode_integers(_round_with_zero_points(x, scales, zero, plan, word), plan)
    match plan.encoding:
        case "integers":
            return grid_elements.encode_integers(grid_elements.round_to_integers(x, scales, None, plan, word), plan)
        case "floats":
            return grid_elements.encode_floats(x, scales, plan)
        case "thresholds":
            return codebook_elements.encode_by_thresholds(x, scales, plan)
        case "codebooks":
            return codebook_elements.encode_codebook(x, scales, plan)
    return encode_elements(elements.round_block_quotients(x, scales, plan, word), plan.element.format, plan.compute)


def round_groups(
    x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None, zero: Array | None = None
) -> Array:
    """The numbers of the codes of `encode_groups`."""
    if scales.second is not None:
        return _by_levels(lambda scales, plan: round_groups(x, scales, plan, word), scales, plan)
    if plan.float64_numbers and not _is_number(zero):
        return _narrow_products(grid_elements.round_in_float64(x, scales, plan, word, zero), scales, plan)
    if zero is not None:
        return _subtract_zero_points(_round_with_zero_points(x, scales, zero, plan, word), scales, zero, plan)
    match plan.encoding, plan.decoding:
        case "integers", "integers":
            counts = grid_elements.round_to_integers(x, scales, None, plan, word)
            return multiply_integers_of_groups(counts, scales, plan)
        case "floats", "floats":
            values = grid_elements.round_float_quotients(x, scales, plan)
            return _narrow_products(grid_elements.multiply_floats_by_scales(values, scales, plan), scales, plan)
        case "thresholds" | "codebooks", _:
            return decode_groups(encode_groups(x, scales, plan, word), scales, plan)
    return elements.multiply_by_scales(elements.round_block_quotients(x, scales, plan, word), scales, plan)


def decode_groups(codes: Array, scales: BlockScales, plan: ScaledPlan, zero: Array | None = None) -> Array:
    """The numbers of codes."""
    if scales.second is not None:
        return _by_levels(lambda scales, plan: decode_groups(_from_codes(codes, plan), scales, plan), scales, plan)
    if zero is not None:
        counts, _ = grid_elements.decode_integers(codes, plan)
        return _subtract_zero_points(counts.astype(plan.compute.work), scales, zero, plan)
    match plan.decoding:
        case "integers":
            counts, unused_codes = grid_elements.decode_integers(codes, plan)
            return multiply_integers_of_groups(counts, scales, plan, unused_codes)
        case "floats":
            values = decode_elements(codes, plan.element.format, FLOAT32, short=True)
            return _narrow_products(grid_elements.multiply_floats_by_scales(values, scales, plan), scales, plan)
        case "codebooks":
            return _narrow_products(codebook_elements.decode_codebook(codes, scales, plan), scales, plan)
        case "level_products":
            levels = codebook_elements.level_of_each_code(plan.element.format, scales.value)
            products = elements.multiply_by_scales(levels, scales, plan)
            return codebook_elements.pick_product(codes, plan.backend.per_group(products))
    return elements.multiply_by_scales(decode_elements(codes, plan.element.format, plan.compute), scales, plan)


def _to_codes(indexes: Array, plan: ScaledPlan) -> Array:
    """Codes of levels; the other levels of a rule are integers in two's complement."""
    fmt = plan.element.format
    return indexes if not isinstance(fmt, CodebookFormat) else (indexes - len(fmt.levels) // 2) & ((1 << fmt.bits) - 1)


def _from_codes(codes: Array, plan: ScaledPlan) -> Array:
    """The inverse of `_to_codes`."""
    fmt = plan.element.format
    return codes if not isinstance(fmt, CodebookFormat) else (codes + len(fmt.levels) // 2) & ((1 << fmt.bits) - 1)


def _is_number(zero: Array | None) -> bool:
    """Whether zero points are numbers to add, and not integers."""
    return zero is not None and jnp.issubdtype(zero.dtype, jnp.floating)


def _round_with_zero_points(x: Array, scales: BlockScales, zero: Array, plan: ScaledPlan, word: Array | None) -> Array:
    """The elements as whole numbers of the work dtype."""
    if plan.encoding == "integers" and not _is_number(zero):
        return grid_elements.round_to_integers(x, scales, zero, plan, word)
    return zero_points.clamp_to_ends(zero_points.round_with_zero_points(x, scales, zero, plan, word), plan)


def _subtract_zero_points(values: Array, scales: BlockScales, zero: Array, plan: ScaledPlan) -> Array:
    """The numbers of elements with zero points."""
    if _is_number(zero):
        return zero_points.add_zero_points(values, scales, zero, plan)
    values = values - zero.astype(values.dtype)
    if plan.decoding == "integers":
        return multiply_integers_of_groups(values, scales, plan)
    wider = Spec(IntegerFormat(plan.element.format.bits + 1))
    return elements.multiply_by_scales(values.astype(plan.compute.name), scales, replace(plan, element=wider))


def multiply_integers_of_groups(
    counts: Array, scales: BlockScales, plan: ScaledPlan, unused_codes: Array | None = None
) -> Array:
    """Quanta times scales, rounded once to the plan's carrier, if its `decoding` is "integers"."""
    return _narrow_products(
        put_nan(grid_elements.multiply_integers_by_scales(counts, scales, plan), unused_codes, plan.compute),
        scales,
        plan,
    )


def _narrow_products(products: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """Products, rounded to a narrower carrier if the plan has one."""
    if plan.narrow_spec is not None:
        products = round_to_spec(products, plan.narrow_spec, plan.compute)
    return narrow_16_bit(put_nan(products, scales.nan, plan.compute), plan.carrier)


# == bodies ============================================================================================================


#: A stored scale: an array, or a tuple if a format has several parts (`ScaledFormat.scale_parts`).
ScaleArrays = Any


#: Makes the random words of a view; None: nothing draws.
_Words = Callable[[], Array | None]


@dataclass(frozen=True)
class _GroupScales:
    """The scales of groups and their zero points, on a view.

    Args:
        scales: the scales of the groups.
        zero: their zero points, if the format has any.
        store: returns both in their stored form; a program that only rounds does not call it.
        codes: the elements, if they were found under other scales than the ones that multiply them.
    """

    scales: BlockScales
    zero: Array | None
    store: Callable[[], tuple[ScaleArrays, Array | None]]
    codes: Array | None = None


# -- bodies ------------------------------------------------------------------------------------------------------------


def round_body(
    x: Array,
    *seeds_and_starts: Array,
    plan: ScaledPlan,
    place: StreamOffset = STREAM_START,
    keep_nan: bool = False,
    backend: Backend = PORTABLE,
) -> Array:
    """`x` after quantization and dequantization.

    Args:
        x: a carrier, not empty.
        seeds_and_starts: for a stochastic element, the words of `seed_words`, then the traced starts of `place`.
        plan: the plan of the scaled format in arrays like `x`.
        place: the position of `x` in the random stream.
        keep_nan: whether NaN stays NaN, whatever the codes of the elements.
        backend: of the program; it may branch on the scales' sizes, and compute in float64.
    """
    plan = plan_to_encode(x, plan, backend)
    groups = _groups_of_plan(x.shape, plan)
    words = partial(_words_of_groups, x, seeds_and_starts, groups, place)
    group_scales = _fit_groups(x, _view_of_groups(x, groups, plan), groups, plan, words)

    def run(plan: ScaledPlan) -> Array:
        if group_scales.codes is not None:
            numbers = decode_groups(group_scales.codes, group_scales.scales, plan_to_decode(plan, backend))
        else:
            view, word = _view_of_groups(x, groups, plan), words()
            numbers = round_groups(view, group_scales.scales, plan, word, group_scales.zero)
        return nan_of(x, groups.back(numbers)) if keep_nan else groups.back(numbers)

    return branch_on_range(run, x, group_scales.scales, plan, group_scales.zero, rounds=True)


def nan_of(x: Array, numbers: Array) -> Array:
    """Numbers, with NaN where `x` is NaN."""
    return lax.select(lax.ne(x, x), x, reshard_like(numbers, x))


def quantize_body(
    x: Array,
    *arrays: Array,
    plan: ScaledPlan,
    given: int = 0,
    place: StreamOffset = STREAM_START,
    as_dtype: Any = "uint8",
    backend: Backend = PORTABLE,
) -> tuple[Array, ...]:
    """`x` as packed codes, then the stored scales and zero points.

    Args:
        x: a carrier, not empty.
        arrays: `given` arrays, the stored scales and zero points; then `seeds_and_starts` as for `round_body`.
        plan: as for `round_body`.
        given: the number of arrays of scales and zero points; 0 if they are fitted.
        place: as for `round_body`.
        as_dtype: dtype of the codes, of 8 bits. None: only scales and zero points, no codes.
        backend: as for `round_body`.
    """
    plan = plan_to_encode(x, plan, backend)
    groups = _groups_of_plan(x.shape, plan)
    words = partial(_words_of_groups, x, arrays[given:], groups, place)
    if given:
        group_scales = _load_groups(arrays[:given], groups, plan)
    else:
        group_scales = _fit_groups(x, _view_of_groups(x, groups, plan), groups, plan, words, stores=True)
    scale_arrays = flatten_scales(*group_scales.store())
    if as_dtype is None:
        return scale_arrays

    def run(plan: ScaledPlan) -> Array:
        codes = group_scales.codes
        if codes is None:
            codes = encode_groups(
                _view_of_groups(x, groups, plan), group_scales.scales, plan, words(), group_scales.zero
            )
        return lax.bitcast_convert_type(_pack_view(codes, groups, plan.fmt.bits), as_dtype)

    return branch_on_range(run, x, group_scales.scales, plan, group_scales.zero), *scale_arrays


def dequantize_body(
    codes: Array, *scale_arrays: Array, plan: ScaledPlan, shape: tuple[int, ...], backend: Backend = PORTABLE
) -> Array:
    """The numbers of the results of `quantize_body`: equal to `round_body`, bit for bit; `backend` as there."""
    plan = plan_to_decode(plan, backend)
    groups = _groups_of_plan(shape, plan)
    group_scales = _load_groups(scale_arrays, groups, plan, decodes=plan.fmt.zero_point != "float")
    view = _unpack_view(codes, groups, plan.fmt.bits, backend.gathers)
    return groups.back(decode_groups(view, group_scales.scales, plan, group_scales.zero))


def overflow_body(x: Array, *seeds_and_starts: Array, plan: ScaledPlan, place: StreamOffset = STREAM_START) -> Array:
    """Whether the rounded x / s + z is beyond the ends of the element format; NaN counts as inside."""
    groups = _groups_of_plan(x.shape, plan)
    view, word = _view_of_groups(x, groups, plan), _words_of_groups(x, seeds_and_starts, groups, place)
    group_scales = _fit_groups(x, view, groups, replace(plan, corrected=None))
    if group_scales.zero is not None:
        return groups.back(
            zero_points.is_beyond_ends(
                view, zero_points.round_with_zero_points(view, group_scales.scales, group_scales.zero, plan, word), plan
            )
        )
    overflows = partial(elements.quotient_overflow_mask, view, word=word)
    return groups.back(_by_levels(overflows, group_scales.scales, plan))


def flatten_scales(scale: ScaleArrays, zero: Array | None) -> tuple[Array, ...]:
    """Scales and zero points as a tuple of arrays."""
    return (*(scale if isinstance(scale, tuple) else (scale,)), *(() if zero is None else (zero,)))


def unflatten_scales(arrays: Sequence[Array], fmt: ScaledFormat) -> tuple[ScaleArrays, Array | None]:
    """The inverse of `flatten_scales`."""
    count = len(fmt.scale_parts)
    return tuple(arrays[:count]) if count > 1 else arrays[0], arrays[-1] if fmt.zero_point else None


def _groups_of_plan(shape: tuple[int, ...], plan: ScaledPlan) -> Groups:
    return Groups(shape, plan.fmt.group_shape(shape))


def _view_of_groups(x: Array, groups: Groups, plan: ScaledPlan) -> Array:
    """The view of the numbers; 16-bit numbers are in float32."""
    # With zero points that are numbers, padding with zeros would change the range of a group.
    fill = float("nan") if plan.fmt.zero_point == "float" else plan.rule.fill
    return groups.view(elements.widen_16_bit(x, plan.carrier), fill)


def _words_of_groups(x: Array, seeds_and_starts: Sequence[Array], groups: Groups, place: StreamOffset) -> Array | None:
    """The random words of the numbers. Each branch draws them itself; operands of a branch are written to memory."""
    return groups.view(words_like(x, seeds_and_starts, place)) if seeds_and_starts else None


def _pack_view(codes: Array, groups: Groups, bits: int) -> Array:
    """Codes of a view, packed along the last axis of the array."""
    byte_groups = groups.byte_groups(bits)
    if byte_groups is not None:
        return byte_groups.back(pack_codes(codes, bits))
    codes = groups.back(codes)
    return pack_codes(codes if codes.ndim else codes[None], bits)


def _unpack_view(code_bytes: Array, groups: Groups, bits: int, gathers: bool = False) -> Array:
    """The inverse of `_pack_view`."""
    byte_groups = groups.byte_groups(bits)
    if byte_groups is not None:
        return unpack_codes(byte_groups.view(code_bytes), bits, groups.sizes[-1], gathers)
    return groups.view(unpack_codes(code_bytes, bits, groups.shape[-1] if groups.shape else 1).reshape(groups.shape))


# -- scales ------------------------------------------------------------------------------------------------------------


def _fit_groups(
    x: Array, view: Array, groups: Groups, plan: ScaledPlan, words: _Words = lambda: None, stores: bool = False
) -> _GroupScales:
    """Scales and zero points of the groups of `x`, computed once for each group.

    Otherwise a compiler may compute them again for every element, or take minutes to compile the fused program. They
    are also materialized before they are stored, so that both uses share one computation. `words` gives the random
    words of the view. `stores` as in `choose_scales`.
    """
    fmt, zero = plan.fmt, None
    whole = tensor_scale(elements.widen_16_bit(x, plan.carrier), plan) if plan.rule.tensor_scale else None
    tensor = None if whole is None else float_to_bits(whole)
    if fmt.zero_point:
        fit = zero_points.fit_offset if fmt.zero_point == "float" else zero_points.fit_range
        scales, zero = fit(view, groups.axes, plan)
    elif plan.rule.fit in fitting.SCALE_FITS:
        scales = fitting.SCALE_FITS[plan.rule.fit](view, groups.axes, plan, tensor)
    elif plan.rule.fit == "levels":
        largest = largest_finite_magnitude(split_sign(view, plan.compute)[1], groups.axes, plan)
        scales = BlockScales(groups.expand(fit_levels(groups.squeeze(largest), plan)))
    else:
        scales = choose_scales(view, groups.axes, plan, tensor, stores)
    scales, zero, codes = materialize_scales(scales, plan), plan.backend.per_group(zero), None
    if plan.corrected is not None:
        codes = encode_groups(view, scales, plan, None)
        plan = plan_to_decode(plan, plan.backend)
        scales = BlockScales(scale_magnitude(scales, plan), None, scales.tensor)
        rounded = decode_groups(codes, scales, replace(plan, carrier=plan.compute))
        scales = fitting.correct_scales(view, rounded, groups.axes, scales, plan, words())
        scales = materialize_scales(scales, plan)

    def scale_arrays() -> ScaleArrays:
        own = groups.squeeze(store_scales(scales, plan))
        return own if whole is None else (own, whole)

    def zero_array() -> Array | None:
        if zero is None:
            return None
        zeros = groups.squeeze(zero)
        return zero_points.store_zero_points(zeros, plan) if fmt.zero_point == "float" else zeros

    if plan.of_scales is None:
        return _GroupScales(scales, zero, lambda: plan.backend.per_group((scale_arrays(), zero_array())), codes)
    parts = lax.optimization_barrier(_quantize_scales(lax.optimization_barrier(scale_arrays()), plan.of_scales))
    return _GroupScales(
        materialize_scales(_load_block_scales(parts, groups, plan), plan),
        zero,
        lambda: plan.backend.per_group((parts, zero_array())),
    )


def _load_groups(arrays: Sequence[Array], groups: Groups, plan: ScaledPlan, decodes: bool = False) -> _GroupScales:
    """Scales and zero points from their stored form; `decodes` as of `materialize_scales`."""
    scale_arrays, zeros = unflatten_scales(arrays, plan.fmt)
    zero = None if zeros is None else groups.expand(zeros)
    if zero is not None and plan.fmt.zero_point == "float":
        zero = zero_points.load_zero_points(zero, plan)
    scales = materialize_scales(_load_block_scales(scale_arrays, groups, plan), plan, decodes)
    return _GroupScales(scales, zero, lambda: (scale_arrays, zeros))


def _load_block_scales(parts: ScaleArrays, groups: Groups, plan: ScaledPlan) -> BlockScales:
    if plan.of_scales is not None:
        scales = dequantize_body(*parts, plan=plan.of_scales, shape=groups.counts)
        bits = float_to_bits(scales)
        finite = lax_clip(bits, 1, FLOAT32.inf - 1)  # the largest may round up beyond the ends
        parts = bits_to_float(finite)
    if plan.rule.tensor_scale:
        parts, whole = parts
        return load_scales(groups.expand(parts), plan, float_to_bits(whole))
    return load_scales(groups.expand(parts), plan)


def _quantize_scales(scales: Array, plan: ScaledPlan) -> tuple[Array, ...]:
    """binary32 scales in their own scaled format, never zero: codes, scales, and zero points if any."""
    plan = plan_to_encode(scales, plan, PORTABLE)
    groups = _groups_of_plan(scales.shape, plan)
    view = _view_of_groups(scales, groups, plan)
    group_scales = _fit_groups(scales, view, groups, plan)
    if group_scales.zero is None:
        values = elements.round_block_quotients(view, group_scales.scales, plan, None)
        sign, magnitude = split_sign(values, plan.compute)
        smallest = plan.compute.toward_zero(Fraction(plan.element.format.smallest or 0))[0]
        values = join_sign(sign, jnp.maximum(magnitude, smallest), plan.compute)
        codes = encode_elements(values, plan.element.format, plan.compute)
    else:
        codes = grid_elements.encode_integers(
            _round_with_zero_points(view, group_scales.scales, group_scales.zero, plan, None), plan
        )
    return _pack_view(codes, groups, plan.fmt.bits), *flatten_scales(*group_scales.store())
