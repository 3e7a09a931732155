"""Cuts a large array into chunks that are quantized separately, with the same result as for the whole array.

A chunk has one index of each axis before the cut axis, a range of the cut axis, and all of the axes after it. So its
elements are contiguous in C order, and so are its codes and scales. Axes in blocks are cut between blocks. If a scale
is shared along the cut axis, the extremes of its group are prepended to each chunk, so that the rule includes them; all
rules but "mse" and "percentile" depend only on the extremes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from jchop.formats import ScaledFormat
from jchop.storage._array import QArray
from jchop.storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, AxisGrouping, axis_groupings

#: This number of codes of any width fills whole bytes.
_CODES_IN_WHOLE_BYTES = 8


@dataclass(frozen=True)
class ChunkCut:
    """The cut of an array.

    Args:
        axis: axis of the cut; None for an array without axes, which is one chunk.
        step: length of a chunk along it.
        kinds: grouping of each axis.
        needs_extremes: whether chunks share a scale.
    """

    axis: int | None
    step: int
    kinds: tuple[AxisGrouping, ...]
    needs_extremes: bool


@dataclass(frozen=True)
class Chunk:
    """A chunk of an array: its first index (by axis, and flat), and its shape."""

    starts: tuple[int, ...]
    start: int
    shape: tuple[int, ...]
    is_first_of_groups: bool


def plan_chunk_cut(shape: Sequence[int], itemsize: int, fmt: ScaledFormat | None, chunk_bytes: int) -> ChunkCut:
    """The cut of an array into chunks of about `chunk_bytes` bytes at most, if its groups allow it.

    Args:
        shape: shape of the array.
        itemsize: bytes of an element.
        fmt: the scaled format, with axes counted from the end; None for a plain one.
        chunk_bytes: bytes.
    """
    if not shape:
        return ChunkCut(None, 1, (), False)
    kinds = axis_groupings(fmt, len(shape)) if fmt is not None else (OWN_SCALE,) * len(shape)
    units, indivisible = _cut_units(kinds, fmt, len(shape))
    if fmt is not None and fmt.sparse is not None and math.prod(shape) and _may_share_scales(kinds, fmt):
        return ChunkCut(0, shape[0], kinds, False)  # the ends of a chunk are not those of its kept numbers
    for axis, size in enumerate(shape):
        inner = math.prod(shape[axis + 1 :]) * itemsize
        unit = units[axis]
        if size > 1 and indivisible[axis]:
            step = size
        elif unit * inner <= chunk_bytes or axis == len(shape) - 1 or unit > 1:
            step = max(1, chunk_bytes // max(unit * inner, 1)) * unit
        else:
            continue
        break
    else:
        raise AssertionError("the last axis ends the search")
    parts = [*(n > 1 for n in shape[:axis]), step < shape[axis]]
    share_scale = any(several and kinds[i] == WHOLE_AXIS for i, several in enumerate(parts))
    of_tensor = fmt is not None and fmt.scale_rule.tensor_scale
    return ChunkCut(axis, min(step, max(shape[axis], 1)), kinds, share_scale or (of_tensor and any(parts)))


def _may_share_scales(kinds: Sequence[AxisGrouping], fmt: ScaledFormat) -> bool:
    """Whether chunks may share a scale."""
    return WHOLE_AXIS in kinds or fmt.scale_rule.tensor_scale


def _cut_units(kinds: Sequence[AxisGrouping], fmt: ScaledFormat | None, ndim: int) -> tuple[list[int], list[bool]]:
    """For each axis the unit of its cuts, and whether it cannot be cut."""
    units = [kind if isinstance(kind, int) else 1 for kind in kinds]
    if fmt is not None and fmt.sparse is not None:
        units[fmt.axis_of_sparse] = math.lcm(units[fmt.axis_of_sparse], fmt.sparse[1])
    indivisible = [False] * ndim
    if fmt is not None and isinstance(fmt.scale, ScaledFormat):
        indivisible, scale = [kind == WHOLE_AXIS for kind in kinds], fmt.scale
        while isinstance(scale, ScaledFormat):
            inner = axis_groupings(scale, ndim)
            units = [unit * (kind if isinstance(kind, int) else 1) for unit, kind in zip(units, inner, strict=True)]
            indivisible = [whole or kind == WHOLE_AXIS for whole, kind in zip(indivisible, inner, strict=True)]
            scale = scale.scale
    elif fmt is not None and (fmt.scale_rule.tensor_scale or not fmt.scale_rule.by_extremes):
        indivisible = [kind == WHOLE_AXIS for kind in kinds]
    units[-1] *= _CODES_IN_WHOLE_BYTES
    return units, indivisible


def chunks(shape: Sequence[int], cut: ChunkCut) -> Iterator[Chunk]:
    """The chunks of an array in C order."""
    if cut.axis is None:
        yield Chunk((), 0, (), True)
        return
    axis, rest = cut.axis, tuple(shape[cut.axis + 1 :])
    inner, start = math.prod(rest), 0
    if math.prod(shape) == 0:
        yield Chunk((0,) * len(shape), 0, tuple(shape), True)
        return
    for outer in itertools.product(*map(range, shape[:axis])):
        for first in range(0, shape[axis], cut.step):
            length = min(cut.step, shape[axis] - first)
            begins = (*outer, first)
            leads = all(at == 0 for at, kind in zip(begins, cut.kinds, strict=False) if kind == WHOLE_AXIS)
            yield Chunk((*begins, *(0 for _ in rest)), start, ((1,) * axis) + (length, *rest), leads)
            start += length * inner


@dataclass(frozen=True)
class GroupExtremes:
    """The least and the largest finite element of each group of an array that is read in chunks."""

    axis: int  # along which they are prepended to a chunk
    count: int  # number of prepended entries
    shares_axis: tuple[bool, ...]  # for each axis, whether scales are shared along it
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, shape: Sequence[int], cut: ChunkCut, fmt: ScaledFormat) -> Self:
        """The state before the first piece."""
        assert cut.axis is not None
        everywhere = fmt.scale_rule.tensor_scale
        shares_axis = tuple(everywhere or kind == WHOLE_AXIS for kind in cut.kinds)
        axis = cut.axis if everywhere else cut.kinds.index(WHOLE_AXIS)
        kind = cut.kinds[axis]
        bounds = tuple(1 if all_of else n for all_of, n in zip(shares_axis, shape, strict=True))
        unit = kind if isinstance(kind, int) else 1
        return cls(axis, unit * _CODES_IN_WHOLE_BYTES, shares_axis, np.full(bounds, np.inf), np.full(bounds, -np.inf))

    def _place(self, chunk: Chunk) -> tuple[slice, ...]:
        spans = zip(self.shares_axis, chunk.starts, chunk.shape, strict=True)
        return tuple(slice(None) if shares else slice(at, at + n) for shares, at, n in spans)

    def see(self, x: np.ndarray, chunk: Chunk) -> None:
        """Updates the extremes with a chunk."""
        axes = tuple(axis for axis, shares in enumerate(self.shares_axis) if shares)
        place, finite = self._place(chunk), np.isfinite(x)
        wide = x.astype(np.float64)
        low = np.min(wide, axis=axes, keepdims=True, initial=np.inf, where=finite)
        high = np.max(wide, axis=axes, keepdims=True, initial=-np.inf, where=finite)
        self.low[place] = np.minimum(self.low[place], low)
        self.high[place] = np.maximum(self.high[place], high)

    def add(self, x: np.ndarray, chunk: Chunk) -> np.ndarray:
        """A chunk with the extremes prepended."""
        place = self._place(chunk)
        shape = (*x.shape[: self.axis], 1, *x.shape[self.axis + 1 :])
        ends = [np.where(np.isfinite(end[place]), end[place], 0).astype(x.dtype) for end in (self.low, self.high)]
        front = [np.broadcast_to(ends[i % 2], shape) for i in range(self.count)]
        return np.concatenate([*front, x], axis=self.axis)

    def drop(self, q: QArray) -> QArray:
        """The quantized chunk without the extremes."""
        return q[(*(slice(None),) * self.axis, slice(self.count, None))]
