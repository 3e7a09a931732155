"""Elements of groups as codes and as numbers, by the fastest way that gives them exactly; for XLA.

Where floating-point arithmetic is exact it takes the place of that on bits (`integers`, `floats`, `thresholds`); else
the bodies of tiles (`elements`) are run on arrays. Format and dtype decide, before any number is known; but a program
may branch on whether all scales are in a safe range, which takes fewer operations for each element.
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
from jchop._core.scaled.scales import LEAST_TO_BRANCH, Plan, Scales, all_in_safe_range
from jchop._core.scaled_float32 import codebooks, floats, integers, thresholds
from jchop._core.xla_cpu import branch, materialize_per_group

Array = jax.Array


def held(scales: Scales) -> Scales:
    """Scales that are worked out once for each group."""
    return Scales(*materialize_per_group((scales.value, scales.nan, scales.tensor)))


def branch_on_range(
    run: Callable[[Plan], Array], x: Array, scales: Scales, plan: Plan, branch_allowed: bool, zero: Array | None = None
) -> Array:
    """What `run` makes of `x` under a plan; where it may be asked, of one that knows whether scales are moderate.

    Args:
        run: takes a plan.
        x: numbers.
        scales: of their groups.
        plan: the plan, which knows nothing of the range.
        branch_allowed: whether it may be asked.
        zero: integer zero points, which have to lie within 2^10 of zero.
    """
    gains = integers.applies(plan) or floats.applies(plan)
    if not branch_allowed or not gains or scales.tensor is not None or x.size < LEAST_TO_BRANCH:
        return run(plan)
    in_safe_range = all_in_safe_range(scales, plan)
    if zero is not None and jnp.issubdtype(zero.dtype, jnp.integer):
        in_safe_range &= jnp.all((zero >= -integers.MOST_SHIFT) & (zero <= integers.MOST_SHIFT))
    return branch(in_safe_range, lambda: run(replace(plan, in_safe_range=True)), lambda: run(plan))


def codes_of(x: Array, scales: Scales, plan: Plan, word: Array | None) -> Array:
    """The codes of the quotients x / s rounded once to the element format."""
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
    """The numbers that those codes stand for."""
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


def numbers_of(codes: Array, scales: Scales, plan: Plan) -> Array:
    """The numbers that codes stand for."""
    if integers.multiplies(plan):
        counts, unused = integers.decode_whole(codes, plan)
        return times_whole(counts, scales, plan, unused)
    if floats.multiplies(plan):
        return _finished(floats.numbers_of(codes, scales, plan), scales, plan)
    fmt = plan.element.format
    if codebooks.multiplies(plan):
        return _finished(codebooks.numbers_of(codes, scales, plan), scales, plan)
    if thresholds.has_products(plan):
        products = elements.multiply_back(thresholds.each_level(fmt, scales.value), scales, plan)
        return thresholds.pick(codes, materialize_per_group(products))
    return elements.multiply_back(decode_elements(codes, fmt, plan.compute), scales, plan)


def times_whole(counts: Array, scales: Scales, plan: Plan, unused: Array | None = None) -> Array:
    """Quanta of the element format times scales, rounded once to the plan's carrier, where `integers.multiplies`."""
    return _finished(with_nan(integers.multiply_back(counts, scales, plan), unused, plan.compute), scales, plan)


def _finished(products: Array, scales: Scales, plan: Plan) -> Array:
    """Products that need not be rounded but to a narrower carrier."""
    if plan.carrier.name in elements.NARROW:
        products = round_elements(products, elements.NARROW[plan.carrier.name], plan.compute)
    return narrow(with_nan(products, scales.nan, plan.compute), plan.carrier)
