"""Arrays cut into one piece for each rank, and joined again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jchop._spec.spec import Spec
from jchop.formats import ScaledFormat
from jchop.storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, AxisGrouping, axis_groupings

Array = jax.Array


def quantizes_vectors(spec: Spec) -> bool:
    """Whether a spec quantizes vectors: each number by itself, in blocks of the last axis, or all under one scale."""
    fmt = spec.scaled
    if fmt is None:
        return True
    formats = [fmt]
    while isinstance(formats[-1].scale, ScaledFormat):
        formats.append(formats[-1].scale)
    return all(fmt_part.channel is None and (fmt_part.group is None or fmt_part.axis == -1) for fmt_part in formats)


@dataclass(frozen=True)
class PieceCut:
    """The cut of arrays into one piece for each rank.

    Args:
        count: the number of ranks.
        shape: of the array, or of the vector of several joined arrays.
        axis: the axis of the cut.
        length: of a piece along it.
    """

    count: int
    shape: tuple[int, ...]
    axis: int
    length: int

    def pieces(self, x: Array) -> Array:
        """(count, ...): the pieces; the last number is repeated up to the length of the last pieces."""
        missing = self.count * self.length - self.shape[self.axis]
        if missing:
            x = jnp.pad(x, [(0, missing if axis == self.axis else 0) for axis in range(x.ndim)], mode="edge")
        split = x.reshape(*x.shape[: self.axis], self.count, self.length, *x.shape[self.axis + 1 :])
        return jnp.moveaxis(split, self.axis, 0)

    def join(self, pieces: Array) -> Array:
        """The array of pieces."""
        split = jnp.moveaxis(pieces, 0, self.axis)
        padded = split.reshape(*split.shape[: self.axis], -1, *split.shape[self.axis + 2 :])
        return jax.lax.slice_in_dim(padded, 0, self.shape[self.axis], axis=self.axis)


def plan_piece_cut(shape: Sequence[int], spec: Spec, count: int) -> PieceCut:
    """The cut of an array between groups.

    A piece of a vector holds whole groups, if it holds more than one. Another array is cut between groups, along the
    axis that is not under one scale and leaves the fewest numbers to be added.

    Raises:
        ValueError: for a format that has an axis that the array lacks, or groups that span every axis.
    """
    shape = tuple(shape)
    groups = (OWN_SCALE,) * len(shape) if spec.scaled is None else axis_groupings(spec.scaled, len(shape))
    if quantizes_vectors(spec):
        axis = len(shape) - 1
        return PieceCut(count, shape, axis, _piece_length(shape[axis], groups[axis], count))
    lengths = {
        axis: _piece_length(n, groups[axis], count, 0) for axis, n in enumerate(shape) if groups[axis] != WHOLE_AXIS
    }
    if not lengths:
        raise ValueError(f"spec={str(spec)!r} has groups that span every axis of x, of shape {shape}, so it cannot be "
                         "cut into pieces; use a format whose groups are blocks or all numbers")  # fmt: skip
    axis = min(lengths, key=lambda axis: lengths[axis] * count / max(shape[axis], 1))
    return PieceCut(count, shape, axis, lengths[axis])


def _piece_length(n: int, grouping: AxisGrouping, count: int, most_cut: int = 1) -> int:
    """The least length of `count` equal pieces of an axis of length n, of whole groups if of more than `most_cut`."""
    length = -(-n // count)
    return -(-length // grouping) * grouping if isinstance(grouping, int) and length > grouping * most_cut else length


def check_whole_groups(spec: Spec, shape: Sequence[int], axis: int, count: int, name: str) -> None:
    """Refuses parts along an axis that cut blocks of it.

    Args:
        spec: of the codes.
        shape: of a part.
        axis: of the cut.
        count: the number of parts.
        name: the argument whose parts they are, with its axis.
    """
    if spec.scaled is None or not shape:
        return
    formats: list[Any] = [spec.scaled]
    block = 1
    while formats:
        fmt = formats.pop()
        grouping = axis_groupings(fmt, len(shape))[axis]
        block *= grouping if isinstance(grouping, int) else 1
        formats += [fmt.scale] if isinstance(fmt.scale, ScaledFormat) else []
    if shape[axis] % block:
        total = shape[axis] * count
        part_counts = [n for n in range(1, math.isqrt(total) * 8 + 2) if total % (n * block) == 0]
        counts_text = ", ".join(map(str, part_counts[:12])) or "none"
        raise ValueError(
            f"{name}: {count} parts of length {shape[axis]} cut groups of {block} of spec={str(spec)!r}; numbers of "
            f"parts that fit a length of {total}: {counts_text}"
        )
