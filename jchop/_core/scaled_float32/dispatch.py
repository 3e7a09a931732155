"""Elements of groups as codes and as numbers, by the fastest exact way; for XLA.

If floating-point arithmetic is exact, it replaces arithmetic on bits (`integers`, `floats`, `thresholds`, `codebooks`).
Otherwise the bodies of tiles (`elements`) run on arrays. Format and dtype decide, before any number is known. But a
program may branch on whether all scales are in a safe range; that way has fewer operations for each element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jchop._core.rounding.codes import decode_elements, encode_elements
from jchop._core.rounding.elements import round_to_spec
from jchop._core.scaled import elements
from jchop._core.scaled.elements import narrow_16_bit, put_nan
from jchop._core.scaled.scales import MOST_WITHOUT_BRANCH, BlockScales, ScaledPlan, all_in_safe_range
from jchop._core.scaled_float32 import codebooks, floats, in_float64, integers, thresholds
from jchop._core.xla.cpu import branch_in_functions, materialize_per_group
from jchop._core.xla.sizes import if_static

Array = jax.Array

#: Arrays of at most as many numbers are rounded in float64 if the program may: a third of the operations to compile,
#: each of them at half the speed. Under scales that are powers of two (True) float32 needs few operations, too.
MOST_IN_FLOAT64 = {False: 1 << 19, True: 1 << 16}


def prefers_float64(x: Array, plan: ScaledPlan) -> bool:
    """Whether a program of one CPU rounds in float64: few numbers, or no exact float32 arithmetic for them."""
    few = if_static(lambda: x.size <= MOST_IN_FLOAT64[plan.is_power])
    return few or not any(
        applies(plan)
        for applies in (
            integers.supports_integer_encode,
            floats.supports_float_encode,
            thresholds.supports_threshold_encode,
            codebooks.supports_codebook_encode,
        )
    )


def materialize_scales(scales: BlockScales, plan: ScaledPlan) -> BlockScales:
    """Scales, computed once for each group."""
    if rounds_in_float64(plan):
        return in_float64.materialize_scale_pairs(scales, plan)
    return BlockScales(*materialize_per_group((scales.value, scales.nan, scales.tensor)))


def branch_on_range(
    run: Callable[[ScaledPlan], Array],
    x: Array,
    scales: BlockScales,
    plan: ScaledPlan,
    may_branch: bool,
    zero: Array | None = None,
) -> Array:
    """The result of `run` under a plan. If a branch is allowed, moderate scales use a plan with `in_safe_range`.

    Args:
        run: a function of a plan.
        x: numbers.
        scales: the scales of their groups.
        plan: the plan without `in_safe_range`.
        may_branch: whether the program may branch.
        zero: integer zero points, which must be within 2^10 of zero for the branch.
    """
    gains = (
        integers.supports_integer_encode(plan) or floats.supports_float_encode(plan)
    ) and not in_float64.supports_float64_encode(plan)
    if not may_branch or not gains or scales.tensor is not None or if_static(lambda: x.size <= MOST_WITHOUT_BRANCH):
        return run(plan)
    in_safe_range = all_in_safe_range(scales, plan)
    if zero is not None and jnp.issubdtype(zero.dtype, jnp.integer):
        in_safe_range &= jnp.all((zero >= -integers.MOST_ZERO_POINT) & (zero <= integers.MOST_ZERO_POINT))
    return branch_in_functions(in_safe_range, lambda: run(replace(plan, in_safe_range=True)), lambda: run(plan))


def encode_groups(x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None) -> Array:
    """The codes of the quotients x / s rounded once to the element format."""
    if in_float64.supports_float64_encode(plan):
        return in_float64.encode_in_float64(x, scales, plan, word)
    if integers.supports_integer_encode(plan):
        return integers.encode_integers(integers.round_to_integers(x, scales, None, plan, word), plan)
    if floats.supports_float_encode(plan):
        return floats.encode_floats(x, scales, plan)
    if thresholds.supports_threshold_encode(plan):
        return thresholds.encode_by_thresholds(x, scales, plan)
    if codebooks.supports_codebook_encode(plan):
        return codebooks.encode_codebook(x, scales, plan)
    return encode_elements(elements.round_block_quotients(x, scales, plan, word), plan.element.format, plan.compute)


def round_groups(x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None) -> Array:
    """The numbers of the codes of `encode_groups`."""
    if rounds_in_float64(plan):
        return round_groups_in_float64(x, scales, None, plan, word)
    if integers.supports_integer_encode(plan) and integers.supports_integer_decode(plan):
        return multiply_integers_of_groups(integers.round_to_integers(x, scales, None, plan, word), scales, plan)
    if floats.supports_float_encode(plan) and floats.supports_float_decode(plan):
        values = floats.round_float_quotients(x, scales, plan)
        return _narrow_products(floats.multiply_floats_by_scales(values, scales, plan), scales, plan)
    if thresholds.supports_threshold_encode(plan):
        return decode_groups(thresholds.encode_by_thresholds(x, scales, plan), scales, plan)
    if codebooks.supports_codebook_encode(plan):
        return decode_groups(codebooks.encode_codebook(x, scales, plan), scales, plan)
    return elements.multiply_by_scales(elements.round_block_quotients(x, scales, plan, word), scales, plan)


def rounds_in_float64(plan: ScaledPlan) -> bool:
    """Whether `round_groups_in_float64` applies: float32 products may be rounded once more, to the plan's carrier."""
    exact = plan.carrier is plan.compute or integers.supports_integer_decode(plan) or floats.supports_float_decode(plan)
    return exact and in_float64.supports_float64_encode(plan)


def round_groups_in_float64(
    x: Array, scales: BlockScales, zero: Array | None, plan: ScaledPlan, word: Array | None
) -> Array:
    """`round_groups`, also with integer zero points."""
    return _narrow_products(in_float64.round_in_float64(x, scales, plan, word, zero), scales, plan)


def decode_groups(codes: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The numbers of codes."""
    if integers.supports_integer_decode(plan):
        counts, unused_codes = integers.decode_integers(codes, plan)
        return multiply_integers_of_groups(counts, scales, plan, unused_codes)
    if floats.supports_float_decode(plan):
        return _narrow_products(floats.decode_floats(codes, scales, plan), scales, plan)
    fmt = plan.element.format
    if codebooks.supports_codebook_decode(plan):
        return _narrow_products(codebooks.decode_codebook(codes, scales, plan), scales, plan)
    if thresholds.has_level_products(plan):
        products = elements.multiply_by_scales(thresholds.level_of_each_code(fmt, scales.value), scales, plan)
        return thresholds.pick_product(codes, materialize_per_group(products))
    return elements.multiply_by_scales(decode_elements(codes, fmt, plan.compute), scales, plan)


def multiply_integers_of_groups(
    counts: Array, scales: BlockScales, plan: ScaledPlan, unused_codes: Array | None = None
) -> Array:
    """Quanta times scales, rounded once to the plan's carrier, if `integers.supports_integer_decode`."""
    return _narrow_products(
        put_nan(integers.multiply_integers_by_scales(counts, scales, plan), unused_codes, plan.compute), scales, plan
    )


def _narrow_products(products: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """Products, rounded to a narrower carrier if the plan has one."""
    if plan.carrier.name in elements.NARROW_SPECS:
        products = round_to_spec(products, elements.NARROW_SPECS[plan.carrier.name], plan.compute)
    return narrow_16_bit(put_nan(products, scales.nan, plan.compute), plan.carrier)
