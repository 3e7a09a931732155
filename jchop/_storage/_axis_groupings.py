"""The grouping of elements under scales, axis by axis, and its change by indexing, permuting and reshaping.

Along an axis each index has its own scales (OWN), all indexes share scales (WHOLE), or blocks of a length share them
(that length). A format counts axes from the front or the end. Stored arrays count them from the end. So leading
axes can be added (vmap, scan) or removed (vmap, scan, indexing) without a change of the format. A stored format may so
name channels along axes in front of all axes that its array has now; they say nothing about the array.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jchop._common.checks import as_numpy, short_repr
from jchop._common.settings import split_prng_key
from jchop.formats import ScaledFormat
from jchop.formats.scaled.scaled import axis_indexes

OWN_SCALE: Final = "own"
WHOLE_AXIS: Final = "whole"
AxisGrouping = str | int


def axis_groupings(fmt: ScaledFormat, ndim: int, batch: int = 0) -> tuple[AxisGrouping, ...]:
    """The grouping of each of `ndim` axes, of which the leading `batch` were added after quantization.

    Raises:
        ValueError: for an axis of the format that the array does not have; `format_of_part` takes removed ones away.
    """
    core = ndim - batch
    _check_format_axes(fmt, core)
    kinds: list[AxisGrouping] = [OWN_SCALE if fmt.group is not None else WHOLE_AXIS] * core
    for axis, kind in _format_axes(fmt):
        kinds[axis] = kind
    return (OWN_SCALE,) * batch + tuple(kinds)


def unit_lengths(fmt: ScaledFormat | None, ndim: int) -> list[int]:
    """The length along each axis that parts must be multiples of: of groups, of groups of scales, of `sparse`."""
    lengths, level = [1] * ndim, fmt
    while isinstance(level, ScaledFormat):
        kinds = axis_groupings(level, ndim)
        lengths = [n * (kind if isinstance(kind, int) else 1) for n, kind in zip(lengths, kinds, strict=True)]
        level = level.scale
    if fmt is not None and fmt.sparse is not None:
        lengths[fmt.axis_of_sparse] = math.lcm(lengths[fmt.axis_of_sparse], fmt.sparse[1])
    return lengths


def format_of_part(fmt: ScaledFormat, ndim: int) -> ScaledFormat:
    """A stored format without the channels along axes that vmap or scan removed from in front of the `ndim` left.

    Each index of a removed axis had its own scales, so the scales that are left are the scales of this part alone.
    """
    if isinstance(fmt.scale, ScaledFormat) and (inner := format_of_part(fmt.scale, ndim)) != fmt.scale:
        fmt = fmt(scale=inner)
    if fmt.channel is None:
        return fmt
    axes = _as_tuple(fmt.channel)
    remaining = tuple(axis for axis in axes if axis >= -ndim)
    return fmt if remaining == axes else fmt(channel=remaining or None)


def axes_from_end(fmt: ScaledFormat, ndim: int) -> ScaledFormat:
    """`fmt` with its axes counted from the end.

    Raises:
        ValueError: for an axis of the format that an array of `ndim` axes does not have.
    """
    _check_format_axes(fmt, ndim)
    sparse = axis_indexes("sparse_axis", fmt.axis_of_sparse, (1,) * ndim)[0] - ndim if fmt.sparse else None
    if isinstance(fmt.scale, ScaledFormat):
        inner = axes_from_end(fmt.scale, ndim)
        fmt = fmt if inner == fmt.scale else fmt(scale=inner)
    axes = tuple(axis for axis, _ in _format_axes(fmt))
    if not all(axis < 0 for axis in axes):
        negative = tuple(axis % ndim - ndim for axis in axes)
        fmt = fmt(channel=negative) if fmt.channel is not None else fmt(axis=negative)
    return fmt if sparse is None else with_sparse_axis(fmt, sparse)


def with_sparse_axis(fmt: ScaledFormat, axis: int) -> ScaledFormat:
    """`fmt`, with `sparse` counted along this axis, which has no name where the groups say it."""
    default = fmt if fmt.sparse_axis is None else fmt(sparse_axis=None)
    return default if default.axis_of_sparse == axis else fmt(sparse_axis=axis)


def grouping_fields(kinds: Sequence[AxisGrouping], has_groups: bool = False) -> dict[str, Any]:
    """The fields `group`, `axis` and `channel` of a scaled format with a grouping for each axis.

    Args:
        kinds: the groupings.
        has_groups: whether one axis under one scale is said by its group, and not by the other axes. Default False.
    """
    axes = dict(zip(range(-len(kinds), 0), kinds, strict=True))
    sizes = {axis: "all" if kind == WHOLE_AXIS else kind for axis, kind in axes.items() if kind != OWN_SCALE}
    if any(isinstance(kind, int) for kind in kinds) or (has_groups and len(sizes) == 1):
        return {"group": tuple(sizes.values()), "axis": tuple(sizes)}
    return {"group": None, "axis": -1, "channel": tuple(axis for axis in axes if axis not in sizes) or None}


def with_groupings(fmt: ScaledFormat, kinds: Sequence[AxisGrouping]) -> ScaledFormat:
    """`fmt` with the grouping `kinds`, its axes counted from the end."""
    ndim = len(kinds)
    if all(-ndim <= axis < 0 for axis, _ in _format_axes(fmt)) and axis_groupings(fmt, ndim) == tuple(kinds):
        return fmt
    return fmt(**grouping_fields(kinds, fmt.group is not None))


def scale_shape_of(kinds: Sequence[AxisGrouping], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales: one for each group."""
    return tuple(
        n if kind == OWN_SCALE else int(n != 0) if kind == WHOLE_AXIS else -(-n // int(kind))
        for kind, n in zip(kinds, shape, strict=True)
    )


def over_elements(values: np.ndarray, kinds: Sequence[AxisGrouping], shape: Sequence[int]) -> np.ndarray:
    """One value for each group, repeated for its elements; axes of length 1 are left to broadcasting."""
    for axis, (kind, n) in enumerate(zip(kinds, shape, strict=True)):
        if kind not in (OWN_SCALE, WHOLE_AXIS):
            values = np.repeat(values, int(kind), axis).take(range(n), axis)
    return values


def reshape_groupings(
    kinds: Sequence[AxisGrouping], old: Sequence[int], new: Sequence[int]
) -> tuple[AxisGrouping, ...] | None:
    """The grouping of an array after a reshape from `old` to `new`; None if that splits groups.

    Runs of axes of one kind are reshaped separately. An axis in blocks may be split between blocks: (..., n) becomes
    (..., n / m, m) with whole blocks in m. Axes before it may be joined to it if it holds whole blocks: (m, n) becomes
    (m n,). A run whose numbers are one group is a block.
    """
    if tuple(old) == tuple(new):
        return tuple(kinds)
    if math.prod(old) == 0:
        return None
    result: list[AxisGrouping] = []
    rest = list(new)
    runs = _grouping_runs(kinds, old)
    while runs:
        kind, size = runs.pop(0)
        part = _take_axes(rest, size)
        if part is None and kind == OWN_SCALE and runs:
            kind, n = runs.pop(0)
            kind = n if kind == WHOLE_AXIS else min(int(kind), n)
            part = _take_axes(rest, size * n) if n % kind == 0 else None
        if part is None:
            return None
        if isinstance(kind, int):
            inner = [i for i, n in enumerate(part) if n != 1]
            if len(inner) > 1 and part[inner[-1]] % kind:
                return None
            result += [kind if i == inner[-1] else OWN_SCALE for i in range(len(part))]
        else:
            result += [kind] * len(part)
    return (*result, *([result[-1] if result and result[-1] == WHOLE_AXIS else OWN_SCALE] * len(rest)))


def _grouping_runs(kinds: Sequence[AxisGrouping], shape: Sequence[int]) -> list[tuple[AxisGrouping, int]]:
    """(kind, elements) of the longest runs of axes of one kind; an axis in blocks is a separate run."""
    runs: list[tuple[AxisGrouping, int]] = []
    for kind, n in zip(kinds, shape, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][0] == kind and not isinstance(kind, int):
            runs[-1] = (kind, runs[-1][1] * n)
        else:
            runs.append((kind, n))
    return runs


def _take_axes(rest: list[int], size: int) -> list[int] | None:
    """Removes from the front of `rest` axes with `size` elements in all; None if no number of axes has that many."""
    count = 0
    while math.prod(rest[:count]) < size and count < len(rest):
        count += 1
    if math.prod(rest[:count]) != size:
        return None
    part, rest[:count] = rest[:count], []
    return part


def _format_axes(fmt: ScaledFormat) -> list[tuple[int, AxisGrouping]]:
    """(axis, kind) of the axes named by a format."""
    if fmt.group is None:
        return [] if fmt.channel is None else [(axis, OWN_SCALE) for axis in _as_tuple(fmt.channel)]
    sizes = _as_tuple(fmt.group)
    return [
        (axis, WHOLE_AXIS if size == "all" else size) for axis, size in zip(_as_tuple(fmt.axis), sizes, strict=True)
    ]


def _check_format_axes(fmt: ScaledFormat, ndim: int) -> None:
    wrong = next((axis for axis, _ in _format_axes(fmt) if not -ndim <= axis < ndim), None)
    if wrong is not None:  # the text of a format takes time, and every product asks
        raise ValueError(f"{fmt} names axis {wrong}, which an array of {ndim} axes does not have")


def _as_tuple(item: Any) -> tuple[Any, ...]:
    return item if isinstance(item, tuple) else (item,)


def map_over_stack(stack: int, function: Callable[..., Any], value: Any, *keys: jax.Array | None) -> Any:
    """A function of each layer of a stack, of so many axes in front, with keys of its own."""
    if not stack:
        return function(value, *keys)
    size = jax.tree.leaves(value)[0].shape[0]
    many = [None if key is None else split_prng_key(key, size) for key in keys]
    return jax.vmap(lambda value, *keys: map_over_stack(stack - 1, function, value, *keys))(value, *many)


# -- indexing: the entries along an axis, and the entries of the scales ------------------------------------------------


#: An integer or scalar array, a slice, or an array of integers.
Index = Any


def normalize_index(index: Any, shape: Sequence[int]) -> list[Index]:
    """One entry for each axis: slices of a whole axis become ``slice(None)``, and static integers nonnegative.

    Raises:
        IndexError: for too many entries, or a known integer out of range.
        TypeError: for an entry of another kind.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, entry in enumerate(items) if entry is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can hold one ellipsis")
    missing = len(shape) - len(items) + len(dots)
    if missing < 0:
        raise IndexError(f"{len(items) - len(dots)} indexes for an array of {len(shape)} axes")
    at = dots[0] if dots else len(items)
    items[at : at + len(dots)] = [slice(None)] * missing
    entries = [_index_entry(axis, entry, n) for axis, (entry, n) in enumerate(zip(items, shape, strict=True))]
    arrays = [entry for entry in entries if not isinstance(entry, slice) and np.ndim(entry)]
    if arrays and sum(not isinstance(entry, slice) for entry in entries) > 1:
        raise TypeError("an index of a QArray can hold one array with axes, and beside it slices only")
    return entries


def _index_entry(axis: int, entry: Any, n: int) -> Index:
    """An entry of an index along an axis of length `n`, checked: a slice, an integer or an array of integers."""
    if isinstance(entry, slice):
        start, stop, step = entry.indices(n)
        return slice(None) if (start, stop, step) == (0, n, 1) else slice(start, None if stop < 0 else stop, step)
    if isinstance(entry, jax.Array | np.ndarray | list):
        entry = entry if isinstance(entry, jax.Array) else jnp.asarray(as_numpy("index", entry))
        is_integer = jnp.issubdtype(entry.dtype, jnp.integer)
    else:
        is_integer = not isinstance(entry, bool) and hasattr(entry, "__index__")
    if not is_integer:
        raise TypeError(f"index {short_repr(entry)} of a QArray must be an integer, a slice, or an array of integers")
    if not isinstance(entry, Tracer):  # JAX would clamp an index out of range
        values = np.asarray(entry if isinstance(entry, jax.Array) else operator.index(entry))
        outside = values[(values < -n) | (values >= n)]
        if outside.size:
            raise IndexError(f"index {outside.flat[0]} is outside axis {axis} of length {n}")
    return entry if isinstance(entry, jax.Array) else operator.index(entry) % n


def scale_entry(axis: int, entry: Index, kind: AxisGrouping, n: int) -> Index:
    """The index of the scales for `entry` along an axis of length `n`.

    Raises:
        ValueError: if `entry` cuts a group.
    """
    whole = isinstance(entry, slice) and entry == slice(None)
    if kind == OWN_SCALE or whole:
        return entry
    if kind == WHOLE_AXIS:
        if isinstance(entry, slice):
            return slice(None) if len(range(*entry.indices(n))) else slice(0, 0)
        ndim = np.ndim(entry)  # 1: quantized scales keep their own groups whole
        return np.zeros((1,) * ndim, np.int32) if ndim > 1 else slice(None) if ndim else 0
    group = int(kind)
    if isinstance(entry, slice):
        start, stop, step = entry.indices(n)
        if step == 1 and start % group == 0 and (stop % group == 0 or stop == n):
            return slice(start // group, -(-stop // group))
    raise ValueError(
        f"index {short_repr(entry)} along axis {axis} cuts groups of {group}; take the whole axis, a slice of whole "
        "groups, or dequantize first"
    )
