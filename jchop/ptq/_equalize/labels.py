"""Factors of the channels of a value: which factor each of its numbers has.

The channels of a mapping are numbered from 0. A value whose numbers have factors has, on each axis, runs (size, stride)
of indexes, the last one moving fastest: the channel of a number is the sum of index times stride over all runs. A
stride of 0 is a run of indexes with one factor. So axes that are split, merged and moved are followed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np

__all__ = [
    "ChannelRun",
    "Channels",
    "FactorLabel",
    "FoldError",
    "RunAxis",
    "axis_lengths",
    "has_one_factor",
    "merge_runs",
    "reshape_runs",
]

#: The size of a run of indexes, and the distance of the channels of two neighbours.
ChannelRun = tuple[int, int]
RunAxis = tuple[ChannelRun, ...]


class FoldError(Exception):
    """Factors cannot be folded; the text says why."""


@dataclass(frozen=True)
class FactorLabel:
    """The factors of a value.

    Args:
        power: of the factors of its channels.
        axes: the runs of each axis: first of the loops around it, then its own.
    """

    power: Fraction
    axes: tuple[RunAxis, ...]

    def to(self, axes: Iterable[RunAxis]) -> FactorLabel:
        """The same power on other axes."""
        return replace(self, axes=tuple(axes))

    def to_power(self, exponent: Fraction | int) -> FactorLabel:
        """The factors to a power."""
        return replace(self, power=self.power * exponent)

    def indexes(self) -> np.ndarray:
        """The channel of each number; axes of one factor have length 1."""
        channels = np.zeros((1,) * len(self.axes), np.int64)
        for i, axis in enumerate(self.axes):
            axis_channels = np.zeros(1, np.int64)
            for size, stride in axis if not has_one_factor(axis) else ():
                axis_channels = (axis_channels[:, None] + stride * np.arange(size)).reshape(-1)
            channels = channels + axis_channels.reshape([-1 if j == i else 1 for j in range(len(self.axes))])
        return channels


def has_one_factor(axis: RunAxis) -> bool:
    """Whether all numbers along an axis have one factor."""
    return all(stride == 0 for _, stride in axis)


def merge_runs(runs: Iterable[ChannelRun]) -> RunAxis:
    """Runs with those put together that are one."""
    result: list[ChannelRun] = []
    for size, stride in runs:
        if size == 1:
            continue
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return tuple(result)


def reshape_runs(axes: Sequence[RunAxis], shape: Sequence[int]) -> tuple[RunAxis, ...]:
    """The runs of axes that are taken apart and put together.

    Raises:
        FoldError: if a run would be cut at a place that is no multiple.
    """
    runs = list(merge_runs(run for axis in axes for run in axis))
    result: list[RunAxis] = []
    for remaining in reversed(shape):
        axis_runs: list[ChannelRun] = []
        while remaining > 1:
            size, stride = runs.pop()
            if size > remaining:
                if size % remaining:
                    raise FoldError("a reshape cuts its channels into unequal parts")
                runs.append((size // remaining, stride * remaining))
                size = remaining
            elif remaining % size:
                raise FoldError("a reshape cuts its channels into unequal parts")
            axis_runs.insert(0, (size, stride))
            remaining //= size
        result.insert(0, merge_runs(axis_runs))
    return tuple(result)


@dataclass(frozen=True)
class Channels:
    """The channels of a mapping.

    Args:
        count: how many there are.
        tied: runs of channels that must have one factor.
    """

    count: int
    tied: frozenset[ChannelRun] = frozenset()

    def tie(self, runs: Iterable[ChannelRun]) -> Channels:
        """With more runs tied.

        Raises:
            FoldError: if no channel would have a factor of its own.
        """
        tied_channels = Channels(self.count, self.tied | {run for run in runs if run[1]})
        if has_one_factor(tied_channels.axis(self.count, 1)):
            raise FoldError("all channels would be tied")
        return tied_channels

    def axis(self, size: int, stride: int) -> RunAxis:
        """The runs of an axis over channels that lie `stride` apart."""
        cuts = {stride, stride * size}
        for tied_size, tied_stride in self.tied:
            cuts |= {bound for bound in (tied_stride, tied_stride * tied_size) if stride < bound < stride * size}
        bounds = sorted(cuts)
        if any(b % a for a, b in pairwise(bounds)):
            raise FoldError("its channels would be tied in parts that overlap")
        runs = [(b // a, 0 if self._is_tied(a) else a) for a, b in pairwise(bounds)]
        return merge_runs(reversed(runs))

    @property
    def free(self) -> int:
        """How many channels there are in the runs that are not tied."""
        return math.prod(size for size, stride in self.axis(self.count, 1) if stride)

    def _is_tied(self, stride: int) -> bool:
        return any(tied_stride <= stride < tied_stride * size for size, tied_stride in self.tied)


def axis_lengths(axes: Sequence[RunAxis]) -> tuple[int, ...]:
    """The lengths of axes."""
    return tuple(math.prod(size for size, _ in axis) for axis in axes)
