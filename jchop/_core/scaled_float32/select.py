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
from jchop._core.rounding.elements import round_elements
from jchop._core.scaled import elements
from jchop._core.scaled.elements import narrow, with_nan
from jchop._core.scaled.scales import MOST_UNBRANCHED, Plan, Scales, all_in_safe_range
from jchop._core.scaled_float32 import codebooks, floats, in_float64, integers, thresholds
from jchop._core.sizes import if_known
from jchop._core.xla_cpu import branch, materialize_per_group

Array = jax.Array

#: Arrays of at most as many numbers are rounded in float64 if the program may: a third of the operations to compile,
#: each of them at half the speed. Under scales that are powers of two (True) float32 needs few operations, too.
MOST_IN_FLOAT64 = {False: 1 << 19, True: 1 << 16}


def prefers_float64(x: Array, plan: Plan) -> bool:
    """Whether a program of one CPU rounds in float64: few numbers, or no exact float32 arithmetic for them."""
    few = if_known(lambda: x.size <= MOST_IN_FLOAT64[plan.is_power])
    return few or not any(
        applies(plan) for applies in (integers.applies, floats.applies, thresholds.applies, codebooks.applies)
    )


def held(scales: Scales, plan: Plan) -> Scales:
    """Scales, computed once for each group."""
    if rounds_in_float64(plan):
        return in_float64.held(scales, plan)
    return Scales(*materialize_per_group((scales.value, scales.nan, scales.tensor)))


def branch_on_range(
    run: Callable[[Plan], Array], x: Array, scales: Scales, plan: Plan, may_branch: bool, zero: Array | None = None
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
    gains = (integers.applies(plan) or floats.applies(plan)) and not in_float64.applies(plan)
    if not may_branch or not gains or scales.tensor is not None or if_known(lambda: x.size <= MOST_UNBRANCHED):
        return run(plan)
    in_safe_range = all_in_safe_range(scales, plan)
    if zero is not None and jnp.issubdtype(zero.dtype, jnp.integer):
        in_safe_range &= jnp.all((zero >= -integers.MOST_SHIFT) & (zero <= integers.MOST_SHIFT))
    return branch(in_safe_range, lambda: run(replace(plan, in_safe_range=True)), lambda: run(plan))


def codes_of(x: Array, scales: Scales, plan: Plan, word: Array | None) -> Array:
    """The codes of the quotients x / s rounded once to the element format."""
    if in_float64.applies(plan):
        return in_float64.codes_of(x, scales, plan, word)
    if integers.applies(plan):
        return integers.encode_whole(integers.round_whole(x, scales, None, plan, word), plan)
    if floats.applies(plan):
        return floats.encode(x, scales, plan)
    if thresholds.applies(plan):
        return thresholds.encode(x, scales, plan)
    if codebooks.applies(plan):
        return codebooks.encode(x, scales, plan)
    return encode_elements(elements.round_quotients(x, scales, plan, word), plan.element.format, plan.compute)


def rounded(x: Array, scales: Scales, plan: Plan, word: Array | None) -> Array:
    """The numbers of the codes of `encode_groups`."""
    if rounds_in_float64(plan):
        return rounded_in_float64(x, scales, None, plan, word)
    if integers.applies(plan) and integers.multiplies(plan):
        return times_whole(integers.round_whole(x, scales, None, plan, word), scales, plan)
    if floats.applies(plan) and floats.multiplies(plan):
        values = floats.round_quotients(x, scales, plan)
        return _finished(floats.multiply_back(values, scales, plan), scales, plan)
    if thresholds.applies(plan):
        return numbers_of(thresholds.encode(x, scales, plan), scales, plan)
    if codebooks.applies(plan):
        return numbers_of(codebooks.encode(x, scales, plan), scales, plan)
    return elements.multiply_back(elements.round_quotients(x, scales, plan, word), scales, plan)


def rounds_in_float64(plan: Plan) -> bool:
    """Whether `round_groups_in_float64` applies: float32 products may be rounded once more, to the plan's carrier."""
    exact = plan.carrier is plan.compute or integers.multiplies(plan) or floats.multiplies(plan)
    return exact and in_float64.applies(plan)


def rounded_in_float64(x: Array, scales: Scales, zero: Array | None, plan: Plan, word: Array | None) -> Array:
    """`round_groups`, also with integer zero points."""
    return _finished(in_float64.rounded(x, scales, plan, word, zero), scales, plan)


def numbers_of(codes: Array, scales: Scales, plan: Plan) -> Array:
    """The numbers of codes."""
    if integers.multiplies(plan):
        counts, unused_codes = integers.decode_whole(codes, plan)
        return times_whole(counts, scales, plan, unused_codes)
    if floats.multiplies(plan):
        return _finished(floats.numbers_of(codes, scales, plan), scales, plan)
    fmt = plan.element.format
    if codebooks.multiplies(plan):
        return _finished(codebooks.numbers_of(codes, scales, plan), scales, plan)
    if thresholds.has_products(plan):
        products = elements.multiply_back(thresholds.each_level(fmt, scales.value), scales, plan)
        return thresholds.pick(codes, materialize_per_group(products))
    return elements.multiply_back(decode_elements(codes, fmt, plan.compute), scales, plan)


def times_whole(counts: Array, scales: Scales, plan: Plan, unused_codes: Array | None = None) -> Array:
    """Quanta times scales, rounded once to the plan's carrier, if `integers.supports_integer_decode`."""
    return _finished(with_nan(integers.multiply_back(counts, scales, plan), unused_codes, plan.compute), scales, plan)


def _finished(products: Array, scales: Scales, plan: Plan) -> Array:
    """Products, rounded to a narrower carrier if the plan has one."""
    if plan.carrier.name in elements.NARROW:
        products = round_elements(products, elements.NARROW[plan.carrier.name], plan.compute)
    return narrow(with_nan(products, scales.nan, plan.compute), plan.carrier)
