"""Checks of the combination of fields of a scaled format."""

from __future__ import annotations

from typing import Any

from jchop.formats._codebook import CodebookFormat
from jchop.formats._fixed import IntegerFormat
from jchop.formats._float import FloatFormat
from jchop.formats._tapered import TaperedFormat

#: The most bits of integers with zero points.
MAX_ZERO_POINT_BITS = 16


def check_scaled_format(fmt: Any) -> None:
    """Refuse a scaled format with fields that are allowed separately, but not together.

    Args:
        fmt: a ScaledFormat, or an object with the same fields.

    Raises:
        ValueError: the message names the fields.
    """
    for check in (
        _check_scaled_element,
        _check_grouping,
        _check_zero_point_fields,
        _check_scale_rule,
        _check_scale_format,
        _check_sparse_fields,
    ):
        check(fmt)


def _check_scaled_element(fmt: Any) -> None:
    if isinstance(fmt.element, TaperedFormat):
        raise ValueError(
            f"element={fmt.element} has its most bits next to 1, and scales would move numbers to its largest value, "
            "which has few or none; round to it without a scale, or multiply by a power of two first"
        )


def _check_grouping(fmt: Any) -> None:
    if fmt.channel is not None and fmt.group is not None:
        raise ValueError(f"channel={fmt.channel} and group={fmt.group} exclude each other")
    if fmt.group is None and fmt.axis != -1:
        raise ValueError(f"axis={fmt.axis} is the axis of a group; without group= it has no effect")


def _check_sparse_fields(fmt: Any) -> None:
    if fmt.sparse is None and fmt.sparse_axis is not None:
        raise ValueError(f"sparse_axis={fmt.sparse_axis} is the axis of sparse=; without it it has no effect")
    if getattr(fmt.scale, "sparse", None) is not None:
        raise ValueError(f"scale={fmt.scale} would drop scales, which every group needs; leave sparse out of it")


def _check_zero_point_fields(fmt: Any) -> None:
    field = f"zero_point={fmt.zero_point}"
    if bool(fmt.zero_point) != (fmt.scale_rule.fit == "range"):
        more = "write rule=minmax, or " if fmt.zero_point else "add zero_point=integer, or "
        more *= isinstance(fmt.element, IntegerFormat)
        raise ValueError(f"{field} with rule={fmt.rule!r}: zero points go with rule='minmax'; {more}leave rule out")
    if not fmt.zero_point:
        return
    if not isinstance(fmt.element, IntegerFormat) or fmt.element.bits > MAX_ZERO_POINT_BITS:
        raise ValueError(
            f"{field} needs an integer element of at most {MAX_ZERO_POINT_BITS} bits, not element={fmt.element}"
        )
    scale = fmt.scale
    if fmt.zero_point == "float" and not (
        isinstance(scale, FloatFormat) and scale.signed and scale.zero and scale.frac_bits
    ):
        raise ValueError(f"{field} is kept in the format of the scales: with a sign, a zero and fraction bits, not "
                         f"scale={scale}")  # fmt: skip


def _check_scale_rule(fmt: Any) -> None:
    element = fmt.element
    if element.max <= 0:
        raise ValueError(f"element={element} has no positive value to scale to")
    rule = fmt.scale_rule
    if not rule.takes(element):
        raise ValueError(f"rule={fmt.rule!r} needs an element format with {rule.needs}, not element={element}")


def _check_level_scales(scale: Any) -> None:
    """Refuse other scales than levels 1 and 2, once or twice, over a format of codes."""
    level = scale
    while hasattr(level, "element") and level.element == CodebookFormat((1.0, 2.0)) and level.rule == "absmax":
        level = level.scale
    if level is scale or hasattr(level, "element") or level.bits > 8:
        raise ValueError(
            "rule='levels' needs scales that are quantized again to codebook(1,2), once or twice, under scales of at "
            f"most 8 bits, not scale={scale}"
        )


def _check_scale_format(fmt: Any) -> None:
    scale = fmt.scale
    if isinstance(scale, FloatFormat):
        if scale.max < 1:
            raise ValueError(f"scale={scale} has no number from 1 on, and scales need one")
        if fmt.nan_block and not scale.has_nan:
            raise ValueError(f"nan_block=True needs a scale format with a NaN, not scale={scale}")
        if fmt.nan_block and not fmt.scale_rule.by_ends:
            raise ValueError(f"nan_block=True does not go with rule={fmt.rule!r}")
        if fmt.scale_rule.fit == "levels":
            _check_level_scales(scale)
        return
    has_levels = fmt.scale_rule.fit == "levels"
    if (
        not (isinstance(scale.scale, FloatFormat) or (has_levels and not scale.zero_point))
        or scale.zero_point == "integer"
        or scale.nan_block
        or scale.scale_rule.tensor_scale
    ):
        raise ValueError(f"scale={scale} must have scales of its own that are numbers, without zero_point=integer, "
                         "nan_block or a scale of the tensor")  # fmt: skip
    if scale.zero_point and scale.element.signed:
        raise ValueError(f"scale={scale}: scales are positive; with a zero point an unsigned element is for them")
    if scale.element.bits > 8:
        raise ValueError(f"scale={scale} has codes of {scale.element.bits} bits; at most 8 are stored")
    if has_levels:
        _check_level_scales(scale)
    if fmt.nan_block or fmt.scale_rule.tensor_scale:
        raise ValueError(f"scale={scale} is quantized again: nan_block and rule={fmt.rule!r} do not go with that")
    if fmt.scale_rule.gives_powers:
        raise ValueError(
            f"scale={scale} does not keep the powers of two that rule={fmt.rule!r} gives; use rule='absmax', or a "
            "floating-point format for the scales"
        )
