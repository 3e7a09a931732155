"""Elements of groups as codes and as numbers, by the fastest way that gives them exactly; for XLA.

Where floating-point arithmetic is exact it takes the place of that on bits (`quanta`, `minifloats`, `thresholds`); else
the bodies of tiles (`scaled`) are run on arrays. Format and dtype decide, before any number is known; but a program may
ask whether all scales are moderate, which takes fewer operations for each element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jchop._reference import lookups, minifloats, quanta, scaled, thresholds
from jchop._reference.codes import decode_elements, encode_elements
from jchop._reference.elements import round_elements
from jchop._reference.groups import once
from jchop._reference.scaled import narrow, with_nan
from jchop._reference.scales import LEAST_ASKED, Plan, Scales, all_moderate

Array = jax.Array


def held(scales: Scales) -> Scales:
    """Scales that are worked out once for each group."""
    return Scales(*once((scales.value, scales.nan, scales.tensor)))


def asked(
    run: Callable[[Plan], Array], x: Array, scales: Scales, plan: Plan, ask: bool, zero: Array | None = None
) -> Array:
    """What `run` makes of `x` under a plan; where it may be asked, of one that knows whether scales are moderate.

    Args:
        run: takes a plan.
        x: numbers.
        scales: of their groups.
        plan: that says nothing.
        ask: whether it may be asked.
        zero: integer zero points, which have to lie within 2^10 of zero.
    """
    gains = quanta.applies(plan) or minifloats.applies(plan)
    if not ask or not gains or scales.tensor is not None or x.size < LEAST_ASKED:
        return run(plan)
    moderate = all_moderate(scales, plan)
    if zero is not None and jnp.issubdtype(zero.dtype, jnp.integer):
        moderate &= jnp.all((zero >= -quanta.MOST_SHIFT) & (zero <= quanta.MOST_SHIFT))
    return lax.cond(moderate, lambda: run(replace(plan, moderate=True)), lambda: run(plan))


def codes_of(x: Array, scales: Scales, plan: Plan, word: Array | None) -> Array:
    """The codes of the quotients x / s rounded once to the element format."""
    if quanta.applies(plan):
        return quanta.encode_whole(quanta.round_whole(x, scales, None, plan, word), plan)
    if minifloats.applies(plan):
        return minifloats.encode(x, scales, plan)
    if thresholds.applies(plan):
        return thresholds.encode(x, scales, plan)
    if lookups.applies(plan):
        return lookups.encode(x, scales, plan)
    return encode_elements(scaled.round_quotients(x, scales, plan, word), plan.scaling.element.format, plan.compute)


def rounded(x: Array, scales: Scales, plan: Plan, word: Array | None) -> Array:
    """The numbers that those codes stand for."""
    if quanta.applies(plan) and quanta.multiplies(plan):
        return times_whole(quanta.round_whole(x, scales, None, plan, word), scales, plan)
    if minifloats.applies(plan) and minifloats.multiplies(plan):
        values = minifloats.round_quotients(x, scales, plan)
        return _finished(minifloats.multiply_back(values, scales, plan), scales, plan)
    if thresholds.applies(plan):
        return numbers_of(thresholds.encode(x, scales, plan), scales, plan)
    if lookups.applies(plan):
        return numbers_of(lookups.encode(x, scales, plan), scales, plan)
    return scaled.multiply_back(scaled.round_quotients(x, scales, plan, word), scales, plan)


def numbers_of(codes: Array, scales: Scales, plan: Plan) -> Array:
    """The numbers that codes stand for."""
    if quanta.multiplies(plan):
        counts, unused = quanta.decode_whole(codes, plan)
        return times_whole(counts, scales, plan, unused)
    if minifloats.multiplies(plan):
        return _finished(minifloats.numbers_of(codes, scales, plan), scales, plan)
    fmt = plan.scaling.element.format
    if lookups.multiplies(plan):
        return _finished(lookups.numbers_of(codes, scales, plan), scales, plan)
    if thresholds.has_products(plan):
        products = scaled.multiply_back(thresholds.each_level(fmt, scales.value), scales, plan)
        return thresholds.pick(codes, once(products))
    return scaled.multiply_back(decode_elements(codes, fmt, plan.compute), scales, plan)


def times_whole(counts: Array, scales: Scales, plan: Plan, unused: Array | None = None) -> Array:
    """Quanta of the element format times scales, rounded once to the plan's carrier, where `quanta.multiplies`."""
    return _finished(with_nan(quanta.multiply_back(counts, scales, plan), unused, plan.compute), scales, plan)


def _finished(products: Array, scales: Scales, plan: Plan) -> Array:
    """Products that need not be rounded but to a narrower carrier."""
    if plan.carrier.name in scaled._NARROW:
        products = round_elements(products, scaled._NARROW[plan.carrier.name], plan.compute)
    return narrow(with_nan(products, scales.nan, plan.compute), plan.carrier)
