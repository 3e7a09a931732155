"""Codebooks of few levels under scales: every group has its own thresholds, and numbers are compared with them.

x / s reaches a threshold t if x reaches t s. So the smallest number of the carrier that reaches it is computed for each
group and threshold, exactly, in integers that have the order of the numbers. The product of level and scale is computed
for each group and level. Elements then need only comparisons and selections. This is for XLA, not for kernels, whose
tiles have too many groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32
from jchop._core.arithmetic.quotient import significand_of_extended
from jchop._core.rounding.codes import extend_exponent
from jchop._core.rounding.modes import rounding_thresholds
from jchop._core.scaled.scales import BlockScales, ScaledPlan, scale_magnitude
from jchop._core.scaled_float32.integers import bits_to_float
from jchop.formats import CodebookFormat, ElementFormat
from jchop.formats.rounding import Rounding

Array = jax.Array

#: The most bits of codes.
_MOST_THRESHOLD_CODE_BITS = 4
#: Thresholds are integers of 28 bits, four digits, times a power of two; nonzero ones are from 2^-_REACH to 2^_REACH.
_DIGIT_BITS, _DIGIT_COUNT, _LEVEL_REACH = 7, 4, 40


def supports_threshold_encode(plan: ScaledPlan) -> bool:
    """Whether `encode_by_thresholds` gives the codes of the exact way."""
    element, fmt = plan.element, plan.element.format
    if plan.compute is not FLOAT32 or not isinstance(fmt, CodebookFormat) or fmt.bits > _MOST_THRESHOLD_CODE_BITS:
        return False
    return not plan.rule.tensor_scale and _threshold_table(fmt, element.rounding) is not None


def has_level_products(plan: ScaledPlan) -> bool:
    """Whether the numbers of a group are selected from its products."""
    fmt = plan.element.format
    return plan.compute is FLOAT32 and isinstance(fmt, CodebookFormat) and fmt.bits <= _MOST_THRESHOLD_CODE_BITS


@lru_cache(maxsize=64)
def _threshold_table(fmt: CodebookFormat, mode: Rounding) -> tuple[tuple[Fraction, bool], ...] | None:
    """The thresholds, and whether only numbers beyond each one reach it; None if they have too many bits."""
    if mode.stochastic:
        return None
    table = tuple(rounding_thresholds(mode, fmt.levels))
    least, most = Fraction(1, 1 << _LEVEL_REACH), Fraction(1 << _LEVEL_REACH)
    for value, _ in table:
        if value and not (least <= abs(value) <= most and _normalize_threshold(value)[0].denominator == 1):
            return None
    return table


def _normalize_threshold(value: Fraction) -> tuple[Fraction, int]:
    """|value| as N 2^e with 2^27 <= N < 2^28."""
    width, exponent = _DIGIT_BITS * _DIGIT_COUNT, 0
    count = abs(value)
    while count >= 1 << width:
        count, exponent = count / 2, exponent + 1
    while count < 1 << (width - 1):
        count, exponent = count * 2, exponent - 1
    return count, exponent


# -- codes -------------------------------------------------------------------------------------------------------------


def encode_by_thresholds(x: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The codes of the quotients x / s rounded once to a level."""
    fmt = cast(CodebookFormat, plan.element.format)
    table = _threshold_table(fmt, plan.element.rounding)
    assert table is not None
    starts = plan.backend.per_group(_starts_of_levels(extend_exponent(scale_magnitude(scales, plan), FLOAT32), table))
    sign, magnitude = bit_ops.split_sign(x, FLOAT32)
    value = bit_ops.lax_where(magnitude > FLOAT32.inf, FLOAT32.inf, bit_ops.ordered_integers(sign, magnitude))
    no_start = jnp.full_like(starts[0], np.iinfo(np.int32).max)
    candidates = [starts[i] if i < len(table) else no_start for i in range((1 << fmt.bits) - 1)]
    code = jnp.zeros_like(value)
    while candidates:
        middle = len(candidates) // 2
        reaches = value >= candidates[middle]
        code = 2 * code + reaches
        candidates = [
            bit_ops.lax_where(reaches, *pair)
            for pair in zip(candidates[middle + 1 :], candidates[:middle], strict=True)
        ]
    return code.astype(fmt.code_dtype)


def _starts_of_levels(scale: Array, table: Sequence[tuple[Fraction, bool]]) -> Array:
    """Ordered integers of the smallest numbers that reach thresholds times scales.

    Args:
        scale: extended magnitude bits.
        table: thresholds, and whether only numbers beyond each one reach it; they become a first axis of the result.
    """

    def column(values: Iterable[int]) -> np.ndarray:
        return np.array(list(values), np.int32).reshape(-1, *[1] * scale.ndim)

    parts = [
        _normalize_threshold(value) if value else (Fraction(1 << (_DIGIT_BITS * _DIGIT_COUNT - 1)), 0)
        for value, _ in table
    ]
    floor, inexact = _truncate_threshold_product(
        scale[None], column(int(count) for count, _ in parts), column(e for _, e in parts)
    )
    strict, sign = column(beyond for _, beyond in table), column((v > 0) - (v < 0) for v, _ in table)
    # Positive infinity reaches all thresholds; negative infinity reaches none.
    up = jnp.minimum(floor + bit_ops.lax_where(strict != 0, 1, inexact), FLOAT32.inf)
    down = jnp.maximum(bit_ops.lax_where(strict != 0, 1 - (floor + inexact), -floor), 1 - FLOAT32.inf)
    return bit_ops.lax_where(sign > 0, up, bit_ops.lax_where(sign < 0, down, jnp.zeros_like(up) + strict))


def _truncate_threshold_product(scale: Array, count: np.ndarray, exponent: np.ndarray) -> tuple[Array, Array]:
    """Magnitude bits of scale times count 2^exponent toward zero (`FLOAT32.inf` or more if too large); 1 if inexact."""
    significand, mask = significand_of_extended(scale, FLOAT32), bit_ops.low_mask(_DIGIT_BITS)
    top, tail = jnp.zeros_like(scale), jnp.zeros_like(scale)
    for i in range(_DIGIT_COUNT):
        tail = tail | top & mask
        top = significand * (count >> i * _DIGIT_BITS & mask) + (top >> _DIGIT_BITS)
    # `top` is the part of the product above the three lower digits: 30 or 31 bits.
    drop = 6 + (top >> 30)
    field = jnp.minimum(
        (scale >> FLOAT32.fraction) + drop + ((_DIGIT_COUNT - 1) * _DIGIT_BITS + exponent), 2 * FLOAT32.bias + 1
    )
    drop = drop + bit_ops.lax_clip(1 - field, 0, FLOAT32.fraction + 1)
    tail = tail | top & bit_ops.low_mask(drop)
    floor = (jnp.maximum(field - 1, 0) << FLOAT32.fraction) + (top >> drop)
    return floor, (tail != 0).astype(floor.dtype)


# -- numbers -----------------------------------------------------------------------------------------------------------


def level_of_each_code(fmt: ElementFormat, like: Array) -> Array:
    """The value of each code, NaN if it is unused, along a first axis, broadcast to the shape of `like`."""
    values = (fmt.value_of(code) for code in range(1 << fmt.bits))
    bits = np.array([float("nan") if v is None else float(v) for v in values], np.float32).view(np.int32)
    return bits_to_float(jnp.zeros_like(like, jnp.int32)[None] | bits.reshape(-1, *[1] * like.ndim))


def pick_product(codes: Array, products: Array) -> Array:
    """``products[code]``, selected by the bits of the codes; each group has a product for each code."""
    choices, bit = [products[i] for i in range(products.shape[0])], 0
    while len(choices) > 1:
        odd = codes >> bit & 1 != 0
        choices, bit = (
            [bit_ops.lax_where(odd, *pair) for pair in zip(choices[1::2], choices[::2], strict=True)],
            bit + 1,
        )
    return choices[0]
