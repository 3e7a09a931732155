"""Kernels of one warpgroup thread by thread: which thread holds which numbers, and what `mma.m16n8k16` makes of them.

The tables are those of the PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jchop._kernels.warpgroups import LaidTile

_WARPS, _LANES = 4, 32
_GROUP, _IN_GROUP = np.divmod(np.arange(_LANES), 4)


def registers_of(tile: LaidTile, array: Any) -> np.ndarray:
    """The registers of each thread that a layout gives it, (warps, lanes, registers, numbers of a register)."""
    cut = np.asarray(array)
    for sizes in tile.tiles:  # the last axes become tiles of these sizes
        lead = cut.ndim - len(sizes)
        cut = cut.reshape(
            *cut.shape[:lead], *(v for d, t in zip(cut.shape[lead:], sizes, strict=True) for v in (d // t, t))
        )
        inner = range(lead, cut.ndim, 2)
        cut = cut.transpose(*range(lead), *inner, *(axis + 1 for axis in inner))
    warps = () if tile.warps is None else (tile.warps % cut.ndim,)
    lanes = tuple(axis % cut.ndim for axis in tile.lanes if axis < 0)
    rest = [axis for axis in range(cut.ndim) if axis not in (*warps, *lanes)]
    cut = cut.transpose(*warps, *lanes, *rest)
    if tile.warps is None:
        cut = np.broadcast_to(cut, (_WARPS, *cut.shape))
    sizes, place = [], 1
    for axis in tile.lanes:  # a positive number is one of equal threads
        if axis > 0:
            cut = np.repeat(np.expand_dims(cut, place), axis, place)
        sizes.append(cut.shape[place])
        place += 1
    assert cut.shape[0] == _WARPS and np.prod(sizes) == _LANES
    return cut.reshape(_WARPS, _LANES, -1, cut.shape[-1])


def array_of(tile: LaidTile, registers: np.ndarray) -> np.ndarray:
    """The array of the registers of all threads."""
    out = np.zeros(tile.shape, registers.dtype)
    out.flat[registers_of(tile, np.arange(out.size).reshape(tile.shape))] = registers
    return out


def mma(sums: Sequence[np.ndarray], left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a product of all warps: registers (warps, lanes, 2), two of sums, four of A and two of B."""
    warps = len(left[0])
    a, b, c = (np.zeros((warps, *shape)) for shape in ((16, 16), (16, 8), (16, 8)))
    for i in range(8):
        rows = _GROUP + (0 if i < 2 or 4 <= i < 6 else 8)
        a[:, rows, 2 * _IN_GROUP + (i & 1) + (0 if i < 4 else 8)] = left[i // 2][..., i & 1]
    for i in range(4):
        b[:, 2 * _IN_GROUP + (i & 1) + (0 if i < 2 else 8), _GROUP] = right[i // 2][..., i & 1]
        c[:, _GROUP + (0 if i < 2 else 8), 2 * _IN_GROUP + (i & 1)] = sums[i // 2][..., i & 1]
    with np.errstate(invalid="ignore"):
        d = (a @ b + c).astype(np.float32)
    return [
        np.stack([d[:, _GROUP + row, 2 * _IN_GROUP + e] for e in (0, 1)], -1)
        for row in (0, 8)
    ]  # fmt: skip


class _Reference:
    """An array that a kernel reads and writes, as a reference of Pallas."""

    def __init__(self, array: np.ndarray):
        self.array = array

    @property
    def at(self) -> Any:
        return _At(self.array)

    def __getitem__(self, index: Any) -> Any:
        return jax.numpy.asarray(self.array[index])

    def __setitem__(self, index: Any, values: Any) -> None:
        self.array[index] = values


class _At:
    def __init__(self, array: np.ndarray):
        self.array = array

    def __getitem__(self, index: Any) -> _Reference:
        index = index if isinstance(index, tuple) else (index,)
        assert len(index) <= self.array.ndim
        plain = tuple(
            slice(int(i.start), int(i.start) + i.size) if hasattr(i, "size") and hasattr(i, "start")
            else i if isinstance(i, slice) else int(i)
            for i in index
        )  # fmt: skip
        return _Reference(self.array[plain])


def call_in_turn(
    kernel: Callable[..., None], programs: int, arrays: Sequence[Any], outputs: Sequence[Any], **_: Any
) -> tuple[Any, ...]:
    """`call_on_warpgroups`, one program after the other, in NumPy."""
    given = [_Reference(np.asarray(array)) for array in arrays]
    made = [_Reference(np.zeros(shape, dtype)) for shape, dtype in outputs]
    with jax.disable_jit():
        for program in range(programs):
            kernel(np.int32(program), *given, *made)
    return tuple(jax.numpy.asarray(out.array) for out in made)
