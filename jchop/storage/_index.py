"""Indexing of arrays in groups: the entries along an axis, and the entries of the scales."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jchop._common.checks import as_numpy
from jchop.storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, AxisGrouping

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
    if isinstance(entry, slice):
        start, stop, step = entry.indices(n)
        return slice(None) if (start, stop, step) == (0, n, 1) else slice(start, None if stop < 0 else stop, step)
    if isinstance(entry, jax.Array | np.ndarray | list):
        entry = entry if isinstance(entry, jax.Array) else jnp.asarray(as_numpy("index", entry))
        if jnp.issubdtype(entry.dtype, jnp.integer):
            _require_index_in_range(axis, entry, n)
            return entry
    elif not isinstance(entry, bool) and hasattr(entry, "__index__"):
        number = operator.index(entry)
        if not -n <= number < n:
            raise IndexError(f"index {number} is outside axis {axis} of length {n}")
        return number % n
    raise TypeError(f"index {entry!r} of a QArray must be an integer, a slice, or an array of integers")


def _require_index_in_range(axis: int, entry: jax.Array, n: int) -> None:
    """Refuse known indexes out of range, which JAX would clamp."""
    if isinstance(entry, jax.core.Tracer):
        return
    values = np.asarray(entry)
    outside = values[(values < -n) | (values >= n)]
    if outside.size:
        raise IndexError(f"index {outside.flat[0]} is outside axis {axis} of length {n}")


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
        f"index {entry!r} along axis {axis} cuts groups of {group}; take the whole axis, a slice of whole groups, or "
        "dequantize first"
    )
