"""The tiles of the kernels of the product with a matrix of codes and group scales."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jchop._kernels.tiles import LANES, SUBLANES, Tiling, next_multiple, next_power_of_two
from jchop.formats import CodebookFormat, ElementFormat

__all__ = ["DequantizeMatmulGpuTiling", "DequantizeMatmulProblem", "DequantizeMatmulTpuTiling"]


@dataclass(frozen=True)
class DequantizeMatmulProblem:
    """The sizes that decide the choice of tiles.

    Args:
        m: rows of x.
        k: columns of x, rows of W.
        width: bytes in a row of codes, the columns of one part of W.
        group: rows of W that share a scale, at most k.
        parts: codes in a byte.
        itemsize: bytes of an element of x.
        selects: whether codes are decoded by selections among levels, which fill registers.
    """

    m: int
    k: int
    width: int
    group: int
    parts: int
    itemsize: int
    selects: bool = False

    @classmethod
    def of(cls, x: Any, codes: Any, format: ElementFormat, group: int) -> DequantizeMatmulProblem:
        """The problem of arrays, or of their shapes and dtypes."""
        (m, k), width = x.shape, codes.shape[1]
        selects = isinstance(format, CodebookFormat)
        return cls(m, k, width, max(min(group, k), 1), 8 // format.bits, np.dtype(x.dtype).itemsize, selects)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return -(-self.k // self.group)


@dataclass(frozen=True)
class DequantizeMatmulTpuTiling(Tiling):
    """Tiles of the TPU kernel.

    Args:
        block_m: rows of a tile of the product: all, or a multiple of 8.
        block_n: bytes of codes across it, which is the number of columns of each part of W: all, or a multiple of 128.
        block_k: rows of W on chip at a time: all; or a multiple of 128 that holds a multiple of 8 whole groups, or
            that divides a group.
    """

    block_m: int
    block_n: int
    block_k: int

    #: The most groups of a tile; each has a separate product in the unrolled kernel.
    _MOST_GROUPS = 32
    #: The most bytes of a step's blocks and temporaries; the smallest chip has 16 MiB.
    _MEMORY = 10 << 20

    MULTIPLES: ClassVar = {"block_m": 1, "block_n": 1, "block_k": 1}

    @classmethod
    def for_shape(cls, problem: DequantizeMatmulProblem) -> DequantizeMatmulTpuTiling | None:
        """The heuristic; None if no tile fits.

        A step takes about 512 rows of W, so that its fixed cost does not matter. With few rows of x, reading codes
        takes most of the time, and a wide tile reads them in long pieces.
        """
        m, width = problem.m, problem.width
        rows = m if m <= 256 else next_multiple(-(-m // -(-m // 256)), SUBLANES)
        tilings = (
            cls(rows, min(block_n, width), block_k) for block_k in cls._depths(problem) for block_n in (512, 256, 128)
        )
        return next((tiling for tiling in tilings if tiling._bytes(problem) <= cls._MEMORY), None)

    @classmethod
    def _depths(cls, problem: DequantizeMatmulProblem) -> Iterator[int]:
        """Possible lengths of `block_k`, better ones first."""
        k, group = problem.k, problem.group
        if problem.groups <= cls._MOST_GROUPS and k <= 1024:
            yield k
        unit = math.lcm(group * SUBLANES, LANES)
        whole = [depth for depth in range(unit, cls._MOST_GROUPS * group + 1, unit) if depth < k]
        yield from sorted((depth for depth in whole if depth <= 2048), key=lambda depth: abs(depth - 512))
        if problem.groups == 1 and k > 512:
            yield 512
        yield from (depth for depth in range(512, 0, -LANES) if group % depth == 0 and depth < k)
        yield from whole
        if problem.groups <= cls._MOST_GROUPS:
            yield k

    def _bytes(self, problem: DequantizeMatmulProblem) -> int:
        """An upper estimate of the memory on chip: two of each block, since one is fetched while the other is used."""
        m, n, k, parts = self.block_m, self.block_n, self.block_k, problem.parts
        rows = min(problem.group, self.block_k)
        blocks = m * k * problem.itemsize + k * n + parts * n * (m * problem.itemsize + 4 * self._scale_rows(problem))
        return 2 * blocks + parts * n * (8 * m + 4 * rows) + rows * n * 8

    def _scale_rows(self, problem: DequantizeMatmulProblem) -> int:
        return problem.groups if self.divides(problem) else -(-self.block_k // problem.group)

    def divides(self, problem: DequantizeMatmulProblem) -> bool:
        """Whether a tile is a part of a group or one group, not several groups."""
        return self.block_k <= problem.group and self.block_k != problem.k


@dataclass(frozen=True)
class DequantizeMatmulGpuTiling(Tiling):
    """Tiles of the GPU kernel, one program each.

    Args:
        block_m: rows of a tile of the product: a power of two, at least 16; or 1, without the matrix units.
        block_n: bytes of codes across it, which is the number of columns of each part of W; a power of two, at least
            16.
        block_k: rows of W in a step; likewise. A step for one row of x takes several groups if it can.
        splits: number of stretches of k, whose sums are added afterwards: it gives more programs if a product has few
            tiles.
        num_warps: warps of 32 threads in a program, a power of two.
        num_stages: the number of steps whose loads may be in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    MULTIPLES: ClassVar = {"splits": 1, "num_stages": 1}
    POWERS: ClassVar = {"block_m": 1, "block_n": 16, "block_k": 16, "num_warps": 1}

    @classmethod
    def for_shape(cls, problem: DequantizeMatmulProblem) -> DequantizeMatmulGpuTiling:
        """The heuristic.

        With few rows, reading codes takes the time: a tile is wide enough for whole memory sectors, and k is split
        until the programs fill the chip. With many rows, a large tile decodes each code for more rows, and sums of
        stretches would cost more than idle multiprocessors.
        """
        if problem.m == 1:
            return cls._for_one_row(problem)
        tiles = _DEQUANTIZE_GPU_TILES["float32" if problem.itemsize == 4 else "bfloat16"]
        rows, columns, depth, warps = next((tile for tile in tiles if problem.m <= tile[0]), tiles[-1])
        depth = max(depth // 4, 16) if problem.selects else depth
        block_n = max(min(columns // problem.parts, 128, next_power_of_two(problem.width, 16)), 16)
        block_k = min(depth, next_power_of_two(problem.group, 16))
        if problem.m > rows:
            return cls(rows, block_n, block_k, 1, warps)
        splits = min(_DEQUANTIZE_PROGRAMS // -(-problem.width // block_n), problem.k // (_MIN_STEPS_OF_SPLIT * block_k))
        return cls(rows, block_n, block_k, max(splits, 1), warps)

    @classmethod
    def _for_one_row(cls, problem: DequantizeMatmulProblem) -> DequantizeMatmulGpuTiling:
        """A thread reads 16 bytes of each of 16 rows of W, and eight threads 128 bytes of a row."""
        block_n = min(128, next_power_of_two(problem.width, 16))
        # Selections fill registers.
        block_k, programs = (64, _DEQUANTIZE_PROGRAMS) if problem.selects else (512, _DEQUANTIZE_ROW_PROGRAMS)
        block_k = min(block_k, next_power_of_two(problem.k, 16))
        splits = min(max(programs // -(-problem.width // block_n), 1), -(-problem.k // block_k))
        return cls(1, block_n, block_k, splits, 8, 1)


#: Rows and columns of a tile of the product, rows of W in a step, and warps. float32 products run in the ordinary units
#: and keep their operands in registers, which just hold them.
_DEQUANTIZE_GPU_TILES = {
    "bfloat16": ((16, 256, 128, 8), (32, 128, 128, 4), (64, 128, 128, 4)),
    "float32": ((16, 64, 32, 4), (32, 64, 32, 4), (64, 64, 32, 8)),
}
#: Programs that fill a large GPU: about two for each multiprocessor.
_DEQUANTIZE_PROGRAMS = 256
#: The most programs for one row: more would be slowed down by the sum of their results.
_DEQUANTIZE_ROW_PROGRAMS = 1024
#: The fewest steps that hide the latency of the first loads.
_MIN_STEPS_OF_SPLIT = 4
