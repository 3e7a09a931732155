"""What a scaled format is given beside its element: groups, axes, and the rule of its scales."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from types import MappingProxyType

from jchop._checks import check_int, quoted

#: A size, or "all" of an axis.
Group = int | str

#: Each rule by the scale that it asks for, which is then rounded to the scale format and clamped to its positive range;
#: a: largest finite magnitude of a group, M and m: largest and least value of the element format.
SCALE_RULES = MappingProxyType(
    {
        "floor": "2^(floor(log2 a) - floor(log2 M))",
        "ceil": "2^(ceil(log2 a) - floor(log2 M))",
        "even": "as floor, after a was rounded to the element's fraction bits, halves up",
        "rceil": "2^ceil(log2(a / M))",
        "absmax": "a / M",
        "half_range": "a / ((M - m) / 2)",
        "no_clip": "the larger of (largest x) / M and (least x) / m",
        "two_level": "a / (M t), and the product of that and t is the scale, t being a binary32 scale of the tensor",
        "minmax": "(largest x - least x) / (M - m), of the range that all x, and 0 but under 'float', span; for zero "
        "points",
        "mse": "of absmax times 1, 63/64 ... 32/64 the first with the least sum of squared errors, summed in binary32",
        "percentile(q)": "as absmax, after a became the smallest magnitude that q % of the finite x do not exceed",
    }
)
PERCENTILE = re.compile(r"percentile\(([0-9]{1,3}(?:\.[0-9]{1,2})?)\)")


def check_zero_point(value: object) -> None:
    """Refuse a kind of zero points that there is not."""
    if value is not None and (not isinstance(value, str) or value not in ("integer", "float")):
        raise ValueError(f"zero_point={value!r} must be None, 'integer' or 'float'")


def as_rule(rule: object, zero_point: str | None) -> str:
    """A rule as it is stored; None is the usual one."""
    if rule is None:
        return "minmax" if zero_point else "absmax"
    found = PERCENTILE.fullmatch(rule) if isinstance(rule, str) else None
    if found and 0 < Fraction(found[1]) <= 100:
        return rule  # type: ignore[return-value]
    if found or rule == "percentile(q)" or rule not in SCALE_RULES:
        raise ValueError(
            f"rule={quoted(rule)} must be one of {', '.join(map(repr, SCALE_RULES))}, with 0 < q <= 100 of at most two "
            "decimals"
        )
    return rule  # type: ignore[return-value]


def as_axes(name: str, value: object) -> int | tuple[int, ...]:
    """An axis, or several, as they are stored: a tuple of one as what it holds."""
    if isinstance(value, tuple | list):
        if not value:
            raise ValueError(f"{name}={value!r} must name at least one axis")
        axes = tuple(check_int(name, axis, -(1 << 15), 1 << 15) for axis in value)
        return axes[0] if len(axes) == 1 else axes
    return check_int(name, value, -(1 << 15), 1 << 15)


def _as_group(value: object) -> Group:
    if value == "all":
        return "all"
    return check_int("group", value, 1)


def as_groups(group: object, axis: object) -> tuple[Group | tuple[Group, ...] | None, int | tuple[int, ...]]:
    """Group and axis as they are stored: a tuple of one as what it holds, "tensor" as None."""
    axes = as_axes("axis", axis)
    if group is None or group == "tensor":
        return None, axes
    groups: tuple[Group, ...] = tuple(map(_as_group, group if isinstance(group, tuple | list) else (group,)))
    if not groups:
        raise ValueError("group=() must have a size for each of its axes")
    if len(groups) == 1:
        if isinstance(axes, tuple):
            raise ValueError(f"group={group!r} is one size, and axis={axis!r} names {len(axes)} axes")
        return groups[0], axes
    if axes == -1:
        axes = tuple(range(-len(groups), 0))
    if not isinstance(axes, tuple) or len(axes) != len(groups):
        raise ValueError(f"group={group!r} has {len(groups)} sizes; axis={axis!r} must name as many axes")
    return groups, axes


def same_count(group: object, axis: object) -> bool:
    """Whether a group may keep an axis that another one had."""
    count = len(group) if isinstance(group, tuple | list) and len(group) > 1 else 1
    return group is not None and group != "tensor" and count == (len(axis) if isinstance(axis, tuple) else 1)


def axis_indexes(name: str, axes: int | tuple[int, ...] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Axes counted from the front, in an array that has each of them once."""
    given = axes if isinstance(axes, tuple) else (axes,)
    for axis in given:
        if axis is None or not -len(shape) <= axis < len(shape):
            raise ValueError(f"{name}={axes} is none of an array of {len(shape)} dimensions")
    indexes = tuple(axis % len(shape) for axis in given)  # type: ignore[operator]
    if len(set(indexes)) < len(indexes):
        raise ValueError(f"{name}={axes} names an axis twice in an array of {len(shape)} dimensions")
    return indexes
