"""Scales that depend on all numbers of a group: percentiles, least squares, power, and groups within groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType

import jax.numpy as jnp
from jax import Array, lax

from jchop._common.bit_ops import join_sign, lax_clip, lax_where, split_sign
from jchop._core.arithmetic.basic import multiply_and_round
from jchop._core.arithmetic.exact import range_of
from jchop._core.rounding.elements import round_to_spec
from jchop._core.scaled import elements
from jchop._core.scaled.elements import (
    BlockScales,
    ScaledPlan,
    largest_finite_magnitude,
    number_of_magnitude,
    round_scales,
    scale_magnitude,
    tensor_scale_bits,
)
from jchop._core.scaled.groups import Groups
from jchop.formats.rounding import Rounding

#: N: the rule "mse" tries the scale of "absmax" times 1, 1 - 1/N ... 1/2.
SQUARES_STEPS = 64
#: The scale of normal numbers with variance 1 under which e2m1 loses least, before it becomes a power of two (Panferov
#: et al., "QuEST", arXiv 2502.05003; the number is from Castro et al., "Quartet", arXiv 2505.14669).
QUEST_SCALE = 2.92247856 / 6


# -- percentiles -------------------------------------------------------------------------------------------------------


def fit_percentile(x: Array, axes: tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None) -> BlockScales:
    """The "absmax" scale for the rule's percentile of a group's finite magnitudes instead of the largest one.

    The percentile is the smallest magnitude that this share of the numbers does not exceed. If it is zero, the largest
    magnitude is used. It is found bit by bit, by counting, so the result is exact and does not depend on the order, and
    no element is moved.

    Args:
        x: numbers of the arithmetic's carrier; a group may be padded with NaN.
        axes: the axes of a group.
        plan: the plan.
        tensor: None; the rule has no scale of the tensor.
    """
    compute = plan.compute
    magnitude = split_sign(x, compute)[1]
    largest = largest_finite_magnitude(magnitude, axes, plan)
    finite = magnitude < compute.inf

    def count(within: Array) -> Array:
        return jnp.sum(within, axis=axes, keepdims=True, dtype=jnp.int32)

    assert plan.rule.percentile is not None
    share = plan.rule.percentile / 100
    number = count(finite)
    whole, rest = number // share.denominator, number % share.denominator
    rank = whole * share.numerator - (-rest * share.numerator) // share.denominator  # without a product that overflows

    def step(i: Array, least: Array) -> Array:
        bit = lax.shift_left(jnp.ones_like(least), jnp.full_like(least, compute.work_width - 2) - i.astype(least.dtype))
        short = count(finite & (magnitude <= (least | bit - 1))) < rank
        return lax_where(short, least | bit, least)

    least = lax.fori_loop(0, compute.work_width - 1, step, jnp.zeros_like(largest))
    return BlockScales(round_scales((lax_where(least == 0, largest, least),), None, plan)[0])


# -- least squares -----------------------------------------------------------------------------------------------------


def fit_squares(x: Array, axes: tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None) -> BlockScales:
    """The first of the scales of `SQUARES_STEPS` with the least sum of squared errors.

    Args:
        x: numbers of the arithmetic's carrier; a group may be padded with zeros.
        axes: the axes of a group.
        plan: the plan.
        tensor: None; the rule has no scale of the tensor.
    """
    compute = plan.compute
    largest = largest_finite_magnitude(split_sign(x, compute)[1], axes, plan)
    error_of = _make_squared_error(x, axes, largest, plan)
    whole = range_of(None, compute)

    def attempt(i: Array) -> tuple[Array, Array]:
        factor = jnp.broadcast_to((SQUARES_STEPS - i).astype(compute.name) / SQUARES_STEPS, largest.shape)
        end = multiply_and_round(number_of_magnitude(largest, compute), factor, None, compute, None, whole, whole)
        value = round_scales((split_sign(end, compute)[1],), None, plan)[0]
        return error_of(BlockScales(value)), value

    def step(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        error, value = attempt(i)
        return lax_where(error < best[0], error, best[0]), lax_where(error < best[0], value, best[1])

    first = attempt(jnp.zeros((), jnp.int32))
    return BlockScales(lax.fori_loop(1, SQUARES_STEPS // 2 + 1, step, first)[1])


def fit_either(x: Array, axes: tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None) -> BlockScales:
    """The scale of the rule's first divisor, or of its second one, or levels, if the sum of squared errors is smaller.

    Args:
        x: as for `fit_squares`.
        axes: as for `fit_squares`.
        plan: the plan.
        tensor: for a rule with a scale of the tensor, its bits, int32.
    """
    compute = plan.compute
    largest = largest_finite_magnitude(split_sign(x, compute)[1], axes, plan)
    whole = None if tensor is None else tensor_scale_bits(tensor, largest.shape, plan)
    candidates = [
        BlockScales(round_scales((largest,), whole, plan, (divisor,))[0], None, whole) for divisor in plan.divisors
    ]
    error_of = _make_squared_error(x, axes, largest, plan)
    if plan.second is not None:
        error_of_second = _make_squared_error(x, axes, largest, plan.second)
        return replace(candidates[0], second=error_of_second(candidates[0]) < error_of(candidates[0]))
    first, second = map(error_of, candidates)
    return replace(candidates[0], value=lax_where(second < first, candidates[1].value, candidates[0].value))


def fit_power(x: Array, axes: tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None) -> BlockScales:
    """2^floor(log2(r / L)), r the root of the mean square of a group's finite numbers, 1 / L as in `QUEST_SCALE`.

    Args:
        x: as for `fit_root`.
        axes: as for `fit_root`.
        plan: the plan.
        tensor: None; the rule has no scale of the tensor.
    """
    compute = plan.compute
    share, largest, lag = _mean_square(x, axes, plan, QUEST_SCALE**2)
    # floor(log2 of the root) is half the exponent, rounded down.
    half = ((split_sign(share, compute)[1] >> compute.fraction) - compute.bias) >> 1
    low, zero, high = plan.exponents
    exponent = lax_where(largest == 0, zero, lax_clip(half - lag, low, high))
    return BlockScales(exponent.astype(largest.dtype))


def fit_root(x: Array, axes: tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None) -> BlockScales:
    """The root of the mean square of a group's finite numbers.

    Args:
        x: numbers of the arithmetic's carrier; a group may be padded with NaN.
        axes: the axes of a group.
        plan: the plan.
        tensor: None; the rule has no scale of the tensor.
    """
    share, largest, lag = _mean_square(x, axes, plan)
    root = elements.multiply_by_power(jnp.sqrt(share), -lag, plan.compute)
    # Zeros get the least scale and not 1, because the levels of normal numbers have no zero.
    end = lax_where(largest == 0, 1, jnp.maximum(split_sign(root, plan.compute)[1], 1))
    return BlockScales(round_scales((end,), None, plan)[0])


def _mean_square(x: Array, axes: tuple[int, ...], plan: ScaledPlan, factor: float = 1.0) -> tuple[Array, Array, Array]:
    """The mean of the squares of 2^lag x times a factor, the largest magnitude of x, and lag.

    2^lag brings the largest magnitude next to 1. The squares are summed in the arithmetic's carrier.
    """
    compute = plan.compute
    magnitude = split_sign(x, compute)[1]
    largest = largest_finite_magnitude(magnitude, axes, plan)
    lag = compute.bias - (largest >> compute.fraction)
    finite = magnitude < compute.inf
    near_one = elements.multiply_by_power(_zero_subnormals(x, plan), jnp.broadcast_to(lag, x.shape), compute)
    total = jnp.sum(lax_where(finite, near_one * near_one, 0), axis=axes, keepdims=True)
    share = total * factor / jnp.maximum(jnp.sum(finite, axis=axes, keepdims=True), 1).astype(compute.name)
    return share, largest, lag


def _make_squared_error(x: Array, axes: tuple[int, ...], largest: Array, plan: ScaledPlan) -> Callable[..., Array]:
    """The function that gives the sums of squared errors of a group under its scale.

    The errors are scaled by the largest magnitude's power of two, and summed in the arithmetic's carrier, so that they
    neither overflow nor vanish. Elements are rounded to nearest, ties to even.
    """
    compute = plan.compute
    element = replace(plan.element, rounding=Rounding.NEAREST_EVEN, random_bits=None)
    plan = replace(plan, element=element)
    wide = replace(plan, carrier=compute)
    lag = compute.bias - (largest >> compute.fraction)
    plain = split_sign(x, compute)[1] < compute.inf

    def near_one(values: Array) -> Array:
        return elements.multiply_by_power(values, jnp.broadcast_to(lag, values.shape), compute)

    target = near_one(_zero_subnormals(x, plan))

    def error_of(scales: BlockScales) -> Array:
        values = elements.multiply_by_scales(elements.round_block_quotients(x, scales, plan, None), scales, wide)
        error = lax_where(plain, near_one(_zero_subnormals(values, plan)) - target, 0)
        return jnp.sum(error * error, axis=axes, keepdims=True)

    return error_of


def correct_scales(
    x: Array, rounded: Array, axes: tuple[int, ...], scales: BlockScales, plan: ScaledPlan, word: Array | None
) -> BlockScales:
    """Scales times c = (sum of x^2) / (sum of x y), y the rounded numbers; rounded as the plan's `corrected` says.

    Then the sum of x y is the sum of x^2, on average over the draws (Panferov et al., arXiv 2601.22813). The sums, c
    and its product with a scale are in the arithmetic's carrier.

    Args:
        x: as for `fit_squares`.
        rounded: the elements times the scales and the tensor's scale, in the same carrier.
        axes: as for `fit_squares`.
        scales: the magnitude bits of the scales.
        plan: the plan.
        word: random words like `x`; a group uses its first one. None, as for a fit: stochastic scales are to nearest.
    """
    compute, spec = plan.compute, plan.corrected
    assert spec is not None
    if word is None and spec.rounding.stochastic:
        spec = replace(spec, rounding=Rounding.NEAREST_EVEN, random_bits=None)
    magnitude = split_sign(x, compute)[1]
    largest = largest_finite_magnitude(magnitude, axes, plan)
    lag = jnp.broadcast_to(compute.bias - (largest >> compute.fraction), x.shape)
    near, y = (elements.multiply_by_power(_zero_subnormals(v, plan), lag, compute) for v in (x, rounded))
    products = (lax_where(magnitude < compute.inf, near * v, 0) for v in (near, y))
    whole, shared = (jnp.sum(v, axis=axes, keepdims=True) for v in products)
    factor = lax_where(shared > 0, whole / shared, 1)
    first = word if word is None else word[tuple(slice(0, 1) if i in axes else slice(None) for i in range(x.ndim))]
    product = number_of_magnitude(scales.value, compute) * factor
    bits = split_sign(round_to_spec(product, spec, compute, first), compute)[1]
    return replace(scales, value=elements.clamp_scale(bits, largest == 0, plan)[0])


def _zero_subnormals(x: Array, plan: ScaledPlan) -> Array:
    """Numbers, with zeros in place of subnormal numbers."""
    sign, magnitude = split_sign(x, plan.compute)
    return join_sign(sign, lax_where(magnitude >> plan.compute.fraction == 0, 0, magnitude), plan.compute)


#: The functions that fit scales to all numbers of a group, by `ScaleRule.fit`.
SCALE_FITS: Mapping[str, Callable[[Array, tuple[int, ...], ScaledPlan, Array | None], BlockScales]] = MappingProxyType(
    {"percentile": fit_percentile, "squares": fit_squares, "either": fit_either, "power": fit_power, "root": fit_root}
)


# == levels ============================================================================================================
# Scales that double at the levels of groups within groups, as in HiF4. A scale s of the largest groups is
# stored in its own format. Each group within doubles its scale, if its largest number asks for it, and so does each
# group within that. The doublings are scales that are quantized again to the levels 1 and 2, so that their codes have
# one bit, and the storage is the same as for any such format.


def fit_levels(largest: Array, plan: ScaledPlan) -> Array:
    """Magnitude bits of the scales of the smallest groups.

    Let a be the largest magnitude of a largest group, M the largest element and n the number of levels. Then s is
    a / (2^n M) in the format of the scales. From the outermost level inward, a scale c becomes 2 c if its group's
    largest number is at least 2^k c. From this level on there are k levels, so 2^k c is beyond all numbers under c.

    Args:
        largest: magnitude bits of the largest numbers of the smallest groups, in the shape of the stored scales.
        plan: a plan whose scales are quantized again, once for each level.
    """
    compute, levels, within = plan.compute, [], plan
    while within.of_scales is not None:
        within = within.of_scales
        groups = Groups(largest.shape, within.fmt.group_shape(largest.shape))
        levels.append((largest, groups))
        view = groups.view(largest)
        largest = groups.squeeze(jnp.max(view, axis=groups.axes, keepdims=True))
    divisor = Fraction(plan.element.format.max) * (1 << len(levels))
    base = replace(within, carrier=compute)
    scale = scale_magnitude(BlockScales(round_scales((largest,), None, base, (divisor,))[0]), base)
    for remaining, (inner, groups) in reversed(list(enumerate(levels, 1))):
        view = groups.view(inner)
        outer = jnp.broadcast_to(groups.expand(scale), view.shape)
        doubles = view >= outer + (remaining << compute.fraction)
        scale = groups.back(outer + (doubles.astype(outer.dtype) << compute.fraction))
    return scale
