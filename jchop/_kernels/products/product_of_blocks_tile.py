"""The tiles of the kernels of a product of blocks, and their common function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.checks import check_int

__all__ = [
    "LONGEST_PRODUCT_STEP",
    "PRODUCT_LANES",
    "ProductOfBlocksGpuTiling",
    "ProductOfBlocksHopperTiling",
    "ProductOfBlocksTpuTiling",
    "sums_of_blocks",
]

Array = jax.Array


def sums_of_blocks(x: Array, w: Array, parts: Mapping[str, Array], block: int) -> dict[str, Array]:
    """The sums of elements that zero points of the other operand are multiplied by, for each block, int32.

    The sum of (a - z_a)(b - z_b) is that of a b, minus z_b times the sum of a, minus z_a times the sum of b - z_b.
    """

    def of(v: Array) -> Array:
        v = jnp.pad(v, ((0, 0), (0, 0), (0, -v.shape[2] % block)))
        return jnp.sum(v.reshape(*v.shape[:2], -1, block), -1, jnp.int32)

    sums = {}
    if "w_zero" in parts:
        sums["x_sum"] = of(x)
    if "x_zero" in parts:
        sums["w_sum"] = of(w)
        if "w_zero" in parts:
            size = w.shape[2]
            lengths = np.minimum(block, size - np.arange(0, size, block)).astype(np.int32)
            sums["w_sum"] -= lengths * parts["w_zero"]
    return sums


@dataclass(frozen=True)
class ProductOfBlocksGpuTiling:
    """Tiles of the GPU kernel, one program each. All sizes are powers of two.

    Args:
        block_m: rows of a tile of the product, at least 16. The units of Hopper take 64.
        block_n: its columns, at least 16.
        block_k: numbers of the sum in a step, at least 32, as many as the units take. A step that ends beyond a block
            is filled up with zeros.
        num_warps: warps of 32 threads in a program.
        num_stages: the number of steps whose loads may be in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name, least in (("block_m", 16), ("block_n", 16), ("block_k", 32), ("num_warps", 1)):
            value = check_int(name, getattr(self, name), least)
            if value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")
        check_int("num_stages", self.num_stages, 1)

    @classmethod
    def for_shape(cls, m: int, n: int, block: int, *, extra_registers: bool = False) -> ProductOfBlocksGpuTiling:
        """The heuristic.

        Few rows get many narrow tiles, which share the work of reading. Of many rows a tile is as large as its
        registers allow, which hold the sum of a block and the sum of all blocks.

        Args:
            m: rows of the product.
            n: its columns.
            block: the length of a block.
            extra_registers: whether a step needs other registers, too: for zero points, or for the sum of a step of
                float8.
        """
        rows, columns, warps = next((tile for tile in _PRODUCT_GPU_TILES if m <= tile[0]), _PRODUCT_GPU_TILES[-1])
        columns = columns // 2 if extra_registers else columns
        deep = min(max(_ceil_power_of_two(block), _SHORTEST_PRODUCT_STEP), LONGEST_PRODUCT_STEP)
        return cls(rows, min(columns, max(_ceil_power_of_two(n), 16)), deep, warps, _PRODUCT_STAGES)


#: Rows and columns of a tile of the product, and warps.
_PRODUCT_GPU_TILES = ((16, 32, 4), (32, 64, 4), (64, 64, 4), (128, 128, 8))
#: Of a step, in numbers of the sum.
_SHORTEST_PRODUCT_STEP, LONGEST_PRODUCT_STEP = 32, 128
_PRODUCT_STAGES = 4


def _ceil_power_of_two(value: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class ProductOfBlocksHopperTiling:
    """Tiles of the Hopper kernel.

    Args:
        rows: rows of the part of a tile that one of two warpgroups computes, a multiple of 64.
        columns: its columns, a multiple of 128.
        depth: numbers of the sum in a step, a multiple of 128.
        stages: the number of steps whose copies may be in flight.
    """

    rows: int
    columns: int
    depth: int
    stages: int

    def __post_init__(self) -> None:
        for name, unit in (("rows", 64), ("columns", 128), ("depth", 128), ("stages", 1)):
            value = check_int(name, getattr(self, name), 1)
            if value % unit:
                raise ValueError(f"{name}={value} must be a multiple of {unit}")

    @classmethod
    def for_shape(cls, shape: Sequence[int], n: int, block: int, *, is_integer: bool) -> ProductOfBlocksHopperTiling:
        """The heuristic: tiles as large as registers and shared memory allow.

        Registers hold the sum of a tile, and unless one unit sums all, that of a step.

        Args:
            shape: (batch, rows, numbers of the sum) of the left operand.
            n: columns of the product.
            block: the length of a block.
            is_integer: whether the elements are integers, which the unit sums exactly.
        """
        _, m, k = shape
        if block < k:
            return cls(64, 128, 128, 5)
        if not is_integer:
            return cls(64, 128, 256, 3)
        return cls(128, 128, 128, 4) if m * n >= _LARGE_HOPPER_PRODUCT else cls(64, 128, 128, 6)


#: Elements of a product with a tile of 256 × 128 for each multiprocessor.
_LARGE_HOPPER_PRODUCT = 132 * 256 * 128

#: Numbers in a row of a register of a TPU.
PRODUCT_LANES, _PRODUCT_SUBLANES = 128, 32


@dataclass(frozen=True)
class ProductOfBlocksTpuTiling:
    """Tiles of the TPU kernel.

    Args:
        block_m: rows of a tile of the product: all, or a multiple of 32.
        block_n: its columns: all, or a multiple of 128.
        block_k: numbers of the sum on chip at a time, a multiple of 128 that holds whole blocks.
    """

    block_m: int
    block_n: int
    block_k: int

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            check_int(name, getattr(self, name), 1)

    @classmethod
    def for_shape(cls, m: int, n: int, k: int, block: int) -> ProductOfBlocksTpuTiling:
        """The heuristic: a step of a few blocks, whose sums stay on chip."""
        whole = max(block, PRODUCT_LANES)
        depth = next((deep for deep in (512, 256) if deep % whole == 0 and k % deep == 0), whole)
        return cls(min(m, 256), min(n, 512), depth)

    def misfit(self, m: int, n: int, block: int) -> str | None:
        """The reason why the tiles do not fit a problem, or None."""
        for name, size, unit in (("block_m", m, _PRODUCT_SUBLANES), ("block_n", n, PRODUCT_LANES)):
            value = getattr(self, name)
            if value != size and value % unit:
                return f"{name}={value} is neither {size}, the whole, nor a multiple of {unit}"
        if self.block_k % PRODUCT_LANES or self.block_k % block:
            return f"block_k={self.block_k} is no multiple of {PRODUCT_LANES} that holds whole blocks of {block}"
        return None
