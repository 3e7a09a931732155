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
from jchop._core.scaled.scales import (
    MOST_WITHOUT_BRANCH,
    BlockScales,
    Decoding,
    Encoding,
    ScaledPlan,
    all_in_safe_range,
)
from jchop._core.scaled_float32 import codebooks, floats, in_float64, integers, thresholds
from jchop._core.xla.backend import Backend
from jchop._core.xla.sizes import if_static

Array = jax.Array

#: Arrays of at most as many numbers are rounded in float64 if the program may: a third of the operations to compile,
#: each of them at half the speed. Under scales that are powers of two (True) float32 needs few operations, too.
MOST_IN_FLOAT64 = {False: 1 << 19, True: 1 << 16}


def plan_to_encode(x: Array, plan: ScaledPlan, backend: Backend) -> ScaledPlan:
    """The plan of a program that finds the elements of `x`, with every choice between the exact ways."""
    plan = plan_to_decode(plan, backend)
    encoding = next((way for way, supports in _ENCODINGS.items() if supports(plan)), "exact")
    few = if_static(lambda: x.size <= MOST_IN_FLOAT64[plan.is_power])
    float64 = backend.float64 and (few or encoding == "exact")
    of_elements = float64 and in_float64.supports_float64_encode(plan)
    # Float32 products may be rounded once more, to the plan's carrier, if they are exact.
    of_numbers = of_elements and (plan.carrier is plan.compute or plan.decoding in ("integers", "floats"))
    return replace(plan, encoding=encoding, float64=float64, float64_elements=of_elements, float64_numbers=of_numbers)


def plan_to_decode(plan: ScaledPlan, backend: Backend) -> ScaledPlan:
    """The plan of a program that finds the numbers of codes."""
    decoding = next((way for way, supports in _DECODINGS.items() if supports(plan)), "exact")
    return replace(plan, backend=backend, decoding=decoding, float64=backend.float64 and decoding == "codebooks")


#: Whether a way gives the results of the exact way, the fastest first.
_ENCODINGS: dict[Encoding, Callable[[ScaledPlan], bool]] = {
    "integers": integers.supports_integer_encode,
    "floats": floats.supports_float_encode,
    "thresholds": thresholds.supports_threshold_encode,
    "codebooks": codebooks.supports_codebook_encode,
}
_DECODINGS: dict[Decoding, Callable[[ScaledPlan], bool]] = {
    "integers": integers.supports_integer_decode,
    "floats": floats.supports_float_decode,
    "codebooks": codebooks.supports_codebook_decode,
    "level_products": thresholds.has_level_products,
}


def materialize_scales(scales: BlockScales, plan: ScaledPlan) -> BlockScales:
    """Scales, computed once for each group."""
    if plan.float64_numbers:
        return in_float64.materialize_scale_pairs(scales, plan)
    return BlockScales(*plan.backend.per_group((scales.value, scales.nan, scales.tensor)))


def branch_on_range(
    run: Callable[[ScaledPlan], Array], x: Array, scales: BlockScales, plan: ScaledPlan, zero: Array | None = None
) -> Array:
    """The result of `run` under a plan. If the program may branch, moderate scales use a plan with `in_safe_range`.

    Args:
        run: a function of a plan.
        x: numbers.
        scales: the scales of their groups.
        plan: the plan without `in_safe_range`.
        zero: integer zero points, which must be within 2^10 of zero for the branch.
    """
    branch, gains = plan.backend.branch, plan.encoding in ("integers", "floats") and not plan.float64_elements
    small = if_static(lambda: x.size <= MOST_WITHOUT_BRANCH)
    if branch is None or not gains or scales.tensor is not None or small:
        return run(plan)
    in_safe_range = all_in_safe_range(scales, plan)
    if zero is not None and jnp.issubdtype(zero.dtype, jnp.integer):
        in_safe_range &= jnp.all((zero >= -integers.MOST_ZERO_POINT) & (zero <= integers.MOST_ZERO_POINT))
    return branch(in_safe_range, lambda: run(replace(plan, in_safe_range=True)), lambda: run(plan))


def encode_groups(x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None) -> Array:
    """The codes of the quotients x / s rounded once to the element format."""
    if plan.float64_elements:
        return in_float64.encode_in_float64(x, scales, plan, word)
    match plan.encoding:
        case "integers":
            return integers.encode_integers(integers.round_to_integers(x, scales, None, plan, word), plan)
        case "floats":
            return floats.encode_floats(x, scales, plan)
        case "thresholds":
            return thresholds.encode_by_thresholds(x, scales, plan)
        case "codebooks":
            return codebooks.encode_codebook(x, scales, plan)
    return encode_elements(elements.round_block_quotients(x, scales, plan, word), plan.element.format, plan.compute)


def round_groups(x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None) -> Array:
    """The numbers of the codes of `encode_groups`."""
    if plan.float64_numbers:
        return round_groups_in_float64(x, scales, None, plan, word)
    match plan.encoding, plan.decoding:
        case "integers", "integers":
            return multiply_integers_of_groups(integers.round_to_integers(x, scales, None, plan, word), scales, plan)
        case "floats", "floats":
            values = floats.round_float_quotients(x, scales, plan)
            return _narrow_products(floats.multiply_floats_by_scales(values, scales, plan), scales, plan)
        case "thresholds", _:
            return decode_groups(thresholds.encode_by_thresholds(x, scales, plan), scales, plan)
        case "codebooks", _:
            return decode_groups(codebooks.encode_codebook(x, scales, plan), scales, plan)
    return elements.multiply_by_scales(elements.round_block_quotients(x, scales, plan, word), scales, plan)


def round_groups_in_float64(
    x: Array, scales: BlockScales, zero: Array | None, plan: ScaledPlan, word: Array | None
) -> Array:
    """`round_groups` of a plan with `float64_numbers`, also with integer zero points."""
    return _narrow_products(in_float64.round_in_float64(x, scales, plan, word, zero), scales, plan)


def decode_groups(codes: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The numbers of codes."""
    match plan.decoding:
        case "integers":
            counts, unused_codes = integers.decode_integers(codes, plan)
            return multiply_integers_of_groups(counts, scales, plan, unused_codes)
        case "floats":
            return _narrow_products(floats.decode_floats(codes, scales, plan), scales, plan)
        case "codebooks":
            return _narrow_products(codebooks.decode_codebook(codes, scales, plan), scales, plan)
        case "level_products":
            levels = thresholds.level_of_each_code(plan.element.format, scales.value)
            products = elements.multiply_by_scales(levels, scales, plan)
            return thresholds.pick_product(codes, plan.backend.per_group(products))
    return elements.multiply_by_scales(decode_elements(codes, plan.element.format, plan.compute), scales, plan)


def multiply_integers_of_groups(
    counts: Array, scales: BlockScales, plan: ScaledPlan, unused_codes: Array | None = None
) -> Array:
    """Quanta times scales, rounded once to the plan's carrier, if its `decoding` is "integers"."""
    return _narrow_products(
        put_nan(integers.multiply_integers_by_scales(counts, scales, plan), unused_codes, plan.compute), scales, plan
    )


def _narrow_products(products: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """Products, rounded to a narrower carrier if the plan has one."""
    if plan.carrier.name in elements.NARROW_SPECS:
        products = round_to_spec(products, elements.NARROW_SPECS[plan.carrier.name], plan.compute)
    return narrow_16_bit(put_nan(products, scales.nan, plan.compute), plan.carrier)
