"""How a large array is cut into pieces that are quantized one by one and give what the whole would.

A piece takes one index of each axis before that of the cut, a range along that, and all of the axes behind: its
elements lie together in C order, and so do its codes and scales. Axes in blocks are cut between blocks. Where a scale
is shared along an axis that is cut, the extremes of what it is shared by are put in front of each piece, so that the
rule sees them; all rules but "mse" and "percentile" look at nothing else.
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
from jchop.storage._layout import OWN, WHOLE, Kind, kinds_of

#: Codes of any width fill whole bytes if there are as many.
_BYTES = 8


@dataclass(frozen=True)
class Cut:
    """Where an array is cut.

    Args:
        axis: None for an array that is one piece without axes.
        step: length of a piece along it.
        kinds: how each axis is grouped.
        needs_extremes: whether a scale is shared between pieces.
    """

    axis: int | None
    step: int
    kinds: tuple[Kind, ...]
    needs_extremes: bool


@dataclass(frozen=True)
class Piece:
    """A piece of an array: where it begins (by axis, and counted in elements), and its shape."""

    starts: tuple[int, ...]
    start: int
    shape: tuple[int, ...]
    is_first_of_groups: bool


def plan_cut(shape: Sequence[int], itemsize: int, fmt: ScaledFormat | None, chunk: int) -> Cut:
    """Where to cut an array so that a piece has no more than about `chunk` bytes, if its groups allow.

    Args:
        shape: of the array.
        itemsize: bytes of an element.
        fmt: the scaled format it is quantized to, axes counted from the end; None for a plain one.
        chunk: bytes.
    """
    if not shape:
        return Cut(None, 1, (), False)
    kinds = kinds_of(fmt, len(shape)) if fmt is not None else (OWN,) * len(shape)
    units, torn = _units(kinds, fmt, len(shape))
    for axis, size in enumerate(shape):
        inner = math.prod(shape[axis + 1 :]) * itemsize
        unit = units[axis]
        if size > 1 and torn[axis]:
            step = size
        elif unit * inner <= chunk or axis == len(shape) - 1 or unit > 1:
            step = max(1, chunk // max(unit * inner, 1)) * unit
        else:
            continue
        break
    else:
        raise AssertionError("the last axis ends the search")
    parts = [*(n > 1 for n in shape[:axis]), step < shape[axis]]
    shared = any(several and kinds[i] == WHOLE for i, several in enumerate(parts))
    of_tensor = fmt is not None and fmt.scale_rule.tensor_scale
    return Cut(axis, min(step, max(shape[axis], 1)), kinds, shared or (of_tensor and any(parts)))


def _units(kinds: Sequence[Kind], fmt: ScaledFormat | None, ndim: int) -> tuple[list[int], list[bool]]:
    """Of each axis the length that is cut in multiples only, and whether it cannot be cut at all."""
    units = [kind if isinstance(kind, int) else 1 for kind in kinds]
    torn = [False] * ndim
    if fmt is not None and isinstance(fmt.scale, ScaledFormat):
        inner = kinds_of(fmt.scale, ndim)
        units = [unit * (kind if isinstance(kind, int) else 1) for unit, kind in zip(units, inner, strict=True)]
        torn = [WHOLE in pair for pair in zip(kinds, inner, strict=True)]
    elif fmt is not None and (fmt.scale_rule.tensor_scale or not fmt.scale_rule.by_extremes):
        torn = [kind == WHOLE for kind in kinds]
    units[-1] *= _BYTES
    return units, torn


def pieces(shape: Sequence[int], cut: Cut) -> Iterator[Piece]:
    """The pieces of an array in C order."""
    if cut.axis is None:
        yield Piece((), 0, (), True)
        return
    axis, rest = cut.axis, tuple(shape[cut.axis + 1 :])
    inner, start = math.prod(rest), 0
    if math.prod(shape) == 0:
        yield Piece((0,) * len(shape), 0, tuple(shape), True)
        return
    for outer in itertools.product(*map(range, shape[:axis])):
        for first in range(0, shape[axis], cut.step):
            length = min(cut.step, shape[axis] - first)
            begins = (*outer, first)
            leads = all(at == 0 for at, kind in zip(begins, cut.kinds, strict=False) if kind == WHOLE)
            yield Piece((*begins, *(0 for _ in rest)), start, ((1,) * axis) + (length, *rest), leads)
            start += length * inner


@dataclass(frozen=True)
class Extremes:
    """The least and the largest finite elements that share scales, of an array that is read in pieces."""

    axis: int  # along which they are put in front of a piece
    count: int  # as how many entries
    shared: tuple[bool, ...]  # of each axis, whether scales are shared along it
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, shape: Sequence[int], cut: Cut, fmt: ScaledFormat) -> Self:
        """None seen yet."""
        assert cut.axis is not None
        everywhere = fmt.scale_rule.tensor_scale
        shared = tuple(everywhere or kind == WHOLE for kind in cut.kinds)
        axis = cut.axis if everywhere else cut.kinds.index(WHOLE)
        kind = cut.kinds[axis]
        bounds = tuple(1 if all_of else n for all_of, n in zip(shared, shape, strict=True))
        unit = kind if isinstance(kind, int) else 1
        return cls(axis, unit * _BYTES, shared, np.full(bounds, np.inf), np.full(bounds, -np.inf))

    def _place(self, piece: Piece) -> tuple[slice, ...]:
        spans = zip(self.shared, piece.starts, piece.shape, strict=True)
        return tuple(slice(None) if shared else slice(at, at + n) for shared, at, n in spans)

    def see(self, x: np.ndarray, piece: Piece) -> None:
        """Takes in a piece."""
        axes = tuple(axis for axis, shared in enumerate(self.shared) if shared)
        place, finite = self._place(piece), np.isfinite(x)
        wide = x.astype(np.float64)
        low = np.min(wide, axis=axes, keepdims=True, initial=np.inf, where=finite)
        high = np.max(wide, axis=axes, keepdims=True, initial=-np.inf, where=finite)
        self.low[place] = np.minimum(self.low[place], low)
        self.high[place] = np.maximum(self.high[place], high)

    def add(self, x: np.ndarray, piece: Piece) -> np.ndarray:
        """A piece, with the extremes in front."""
        place = self._place(piece)
        shape = (*x.shape[: self.axis], 1, *x.shape[self.axis + 1 :])
        ends = [np.where(np.isfinite(end[place]), end[place], 0).astype(x.dtype) for end in (self.low, self.high)]
        front = [np.broadcast_to(ends[i % 2], shape) for i in range(self.count)]
        return np.concatenate([*front, x], axis=self.axis)

    def drop(self, q: QArray) -> QArray:
        """The piece, without them."""
        return q[(*(slice(None),) * self.axis, slice(self.count, None))]
