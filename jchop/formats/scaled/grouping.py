"""The groups and axes of a scaled format."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jchop._common.checks import check_int

#: A size, or "all" of an axis.
GroupSize = int | str


#: The largest m of n:m. Each number is compared with the others of its m.
_MAX_SPARSE_GROUP = 64


def as_sparse_pair(value: object) -> tuple[int, int] | None:
    """The n and m of n:m as they are stored, from a pair or its text."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", value) if isinstance(value, str) else None
    pair = value if match is None else tuple(map(int, match.groups()))
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"sparse={value!r} must be two integers n and m, or text such as '2:4'")
    m = check_int(f"sparse={value!r} keeps n of every m: m", pair[1], 2, _MAX_SPARSE_GROUP)
    return check_int(f"sparse={value!r} keeps n of every m: n", pair[0], 1, m - 1), m


def sparse_length(sparse: tuple[int, int], length: int) -> int:
    """How many numbers of an axis n:m keeps; the last group may be shorter."""
    whole, rest = divmod(length, sparse[1])
    return whole * sparse[0] + min(sparse[0], rest)


def check_zero_point(value: object) -> None:
    """Refuses an unknown kind of zero points."""
    if value is not None and (not isinstance(value, str) or value not in ("integer", "float")):
        raise ValueError(f"zero_point={value!r} must be None, 'integer' or 'float'")


def as_format_axes(name: str, value: object) -> int | tuple[int, ...]:
    """An axis, or several, as they are stored: a tuple of one axis becomes that axis."""
    if isinstance(value, tuple | list):
        if not value:
            raise ValueError(f"{name}={value!r} must name at least one axis")
        axes = tuple(check_int(name, axis, -(1 << 15), 1 << 15) for axis in value)
        return axes[0] if len(axes) == 1 else axes
    return check_int(name, value, -(1 << 15), 1 << 15)


def _as_group_size(value: object) -> GroupSize:
    if value == "all":
        return "all"
    return check_int("group", value, 1)


def as_group_and_axis(
    group: object, axis: object
) -> tuple[GroupSize | tuple[GroupSize, ...] | None, int | tuple[int, ...]]:
    """Group and axis as they are stored: a tuple of one group becomes that group, and "tensor" becomes None."""
    axes = as_format_axes("axis", axis)
    if group is None or group == "tensor":
        return None, axes
    groups: tuple[GroupSize, ...] = tuple(map(_as_group_size, group if isinstance(group, tuple | list) else (group,)))
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


def group_fits_axis(group: object, axis: object) -> bool:
    """Whether a group may keep an axis that another one had."""
    count = len(group) if isinstance(group, tuple | list) and len(group) > 1 else 1
    return group is not None and group != "tensor" and count == (len(axis) if isinstance(axis, tuple) else 1)


def axis_indexes(name: str, axes: int | tuple[int, ...] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Axes counted from the front, in an array that has each of them once."""
    axis_tuple = axes if isinstance(axes, tuple) else (axes,)
    for axis in axis_tuple:
        if axis is None or not -len(shape) <= axis < len(shape):
            raise ValueError(f"{name}={axes} is not an axis of an array of {len(shape)} dimensions")
    indexes = tuple(axis % len(shape) for axis in axis_tuple)  # type: ignore[operator]
    if len(set(indexes)) < len(indexes):
        raise ValueError(f"{name}={axes} names an axis twice in an array of {len(shape)} dimensions")
    return indexes
