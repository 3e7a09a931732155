"""The kernels of a product of codes and scales. The body is in `_quantized/products/codes.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from jchop._core.xla.backend import TILE
from jchop._kernels.primitive import Kernel
from jchop._kernels.tiles import LANES, Tiling, kernel_function, next_power_of_two, refuse_large, refuse_mosaic_gpu

#: A zero point, and the sums of elements of the other operand that it is multiplied by.
_ZERO_POINTS = (("w_zero", "x_sum"), ("x_zero", "w_sum"))


def named_parts(x: Array, w: Array, names: Sequence[str], parts: Sequence[Array], block: int) -> dict[str, Array]:
    """The parts by name, with the sums of elements that zero points of the other operand are multiplied by, int32.

    The sum of (a - z_a)(b - z_b) is the sum of a b, minus z_b times the sum of a, minus z_a times the sum of b - z_b.
    """

    def block_sums(v: Array) -> Array:
        v = jnp.pad(v, ((0, 0), (0, 0), (0, -v.shape[2] % block)))
        return jnp.sum(v.reshape(*v.shape[:2], -1, block), -1, jnp.int32)

    by_name = dict(zip(names, parts, strict=True))
    if "w_zero" in names:
        by_name["x_sum"] = block_sums(x)
    if "x_zero" in names:
        by_name["w_sum"] = block_sums(w)
        if "w_zero" in names:
            size = w.shape[2]
            lengths = np.minimum(block, size - np.arange(0, size, block)).astype(np.int32)
            by_name["w_sum"] -= lengths * by_name["w_zero"]
    return by_name


def subtract_zero_points(term: Array, parts: Mapping[str, Any]) -> Array:
    """The sum of the products of numbers of a block, float32, from the sum of the products of their elements."""
    for zero, sums in _ZERO_POINTS:
        if zero in parts:
            term = term - parts[zero] * parts[sums]
    return term.astype(jnp.float32)


def multiply_scales(numbers: Array, parts: Mapping[str, Any], names: Iterable[str], interpret: bool) -> Array:
    """Numbers times the scales among `names`, one after the other. A chip rounds each product before it is added."""
    for name in names:
        if name.endswith("scale"):
            numbers = numbers * parts[name]
            if interpret:
                numbers = TILE.prevent_fma(numbers, jnp.broadcast_to(parts[name], numbers.shape))
    return numbers


@dataclass(frozen=True)
class ProductOfBlocksGpuTiling(Tiling):
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

    MULTIPLES: ClassVar = {"num_stages": 1}
    POWERS: ClassVar = {"block_m": 16, "block_n": 16, "block_k": 32, "num_warps": 1}

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
        deep = min(next_power_of_two(block, _SHORTEST_PRODUCT_STEP), LONGEST_PRODUCT_STEP)
        return cls(rows, min(columns, next_power_of_two(n, 16)), deep, warps, _PRODUCT_STAGES)


#: Rows and columns of a tile of the product, and warps.
_PRODUCT_GPU_TILES = ((16, 32, 4), (32, 64, 4), (64, 64, 4), (128, 128, 8))
#: Of a step, in numbers of the sum.
_SHORTEST_PRODUCT_STEP, LONGEST_PRODUCT_STEP = 32, 128
_PRODUCT_STAGES = 4


@dataclass(frozen=True)
class ProductOfBlocksHopperTiling(Tiling):
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

    MULTIPLES: ClassVar = {"rows": 64, "columns": 128, "depth": 128, "stages": 1}

    @classmethod
    def for_shape(cls, shape: Sequence[int], n: int, block: int, *, is_integer: bool) -> ProductOfBlocksHopperTiling:
        """The heuristic: tiles as large as registers and shared memory allow.

        Registers hold the sum of a tile. Unless one unit sums all, they hold the sum of a step, too.

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


@dataclass(frozen=True)
class ProductOfBlocksTpuTiling(Tiling):
    """Tiles of the TPU kernel.

    Args:
        block_m: rows of a tile of the product: all, or a multiple of 32.
        block_n: its columns: all, or a multiple of 128.
        block_k: numbers of the sum on chip at a time, a multiple of 128 that holds whole blocks.
    """

    block_m: int
    block_n: int
    block_k: int

    MULTIPLES: ClassVar = {"block_m": 1, "block_n": 1, "block_k": LANES}

    @classmethod
    def for_shape(cls, m: int, n: int, k: int, block: int) -> ProductOfBlocksTpuTiling:
        """The heuristic: a step of a few blocks, whose sums stay on chip."""
        whole = max(block, LANES)
        depth = next((deep for deep in (512, 256) if deep % whole == 0 and k % deep == 0), whole)
        return cls(min(m, 256), min(n, 512), depth)


# -- the operation ---------------------------------------------------------------------------------------------------

_INT8_DTYPES, _FLOAT8_DTYPES = {"int8"}, {"float8_e4m3fn", "float8_e5m2"}
#: The longest block whose sum of products of two int8 is surely in int32.
_LONGEST_INT8_BLOCK = (2**31 - 1) // 2**14
#: Blocks that a step of a TPU holds whole.
_MIN_TPU_PRODUCT_BLOCK, _MAX_TPU_PRODUCT_BLOCK = 8, 512
#: Hopper and Ada have units for float8; the compiler knows no e4m3 for older GPUs.
_INT8_CAPABILITY, _FLOAT8_CAPABILITY = 8.0, 8.9
#: The capabilities of Hopper and Blackwell, and sizes that Hopper's kernel copies: rows of each operand, and numbers.
_HOPPER_CAPABILITY, _BLACKWELL_CAPABILITY = 9.0, 10.0
_HOPPER_UNITS = {"m": 8, "n": 64, "k": 128}
#: Fewer rows leave most of a tile empty.
_MIN_HOPPER_ROWS = 128


def _refuse_product_of_blocks(x: Any, w: Any, *scales: Any, block: int, dtype: str, **_: Any) -> str | None:
    kinds = {x.dtype.name, w.dtype.name}
    if not (kinds <= _INT8_DTYPES or kinds <= _FLOAT8_DTYPES):
        return f"the operands have elements of {' and '.join(sorted(kinds))}, not both of int8 or both of float8"
    if np.dtype(dtype).itemsize == 8:
        return f"the result has dtype {dtype}"
    if kinds <= _INT8_DTYPES and block > _LONGEST_INT8_BLOCK:
        return f"the sum of a block of {block} numbers may leave int32"
    return None


def _refuse_gpu_product_of_blocks(x: Any, w: Any, *scales: Any, **static: Any) -> str | None:
    large = refuse_large(x=x.size, w=w.size, y=x.shape[0] * x.shape[1] * w.shape[1])
    return large or _refuse_product_of_blocks(x, w, *scales, **static)


def _refuse_hopper_product_of_blocks(
    x: Any, w: Any, *scales: Any, names: tuple[str, ...], block: int, **static: Any
) -> str | None:
    sizes = {"m": x.shape[1], "n": w.shape[1], "k": x.shape[2]}
    for name, unit in _HOPPER_UNITS.items():
        if sizes[name] % unit:
            return f"{name}={sizes[name]} is no multiple of {unit}"
    if x.dtype != w.dtype:
        return f"the operands have elements of {x.dtype.name} and {w.dtype.name}"
    if any(name.endswith("zero") for name in names):
        return "there are zero points"
    if block not in (_HOPPER_UNITS["k"], sizes["k"]):
        return f"the blocks of {block} are neither of {_HOPPER_UNITS['k']} nor one of {sizes['k']}"
    if reason := refuse_mosaic_gpu():
        return reason
    return _refuse_gpu_product_of_blocks(x, w, *scales, block=block, **static)


def _refuse_tpu_product_of_blocks(x: Any, w: Any, *scales: Any, block: int, **static: Any) -> str | None:
    if block & (block - 1) or not _MIN_TPU_PRODUCT_BLOCK <= block <= _MAX_TPU_PRODUCT_BLOCK:
        return f"the blocks of {block} are no power of two from {_MIN_TPU_PRODUCT_BLOCK} to {_MAX_TPU_PRODUCT_BLOCK}"
    return _refuse_product_of_blocks(x, w, *scales, block=block, **static)


TPU_KERNEL = Kernel(
    kernel_function("products.product_of_blocks_tpu", "tpu_product_of_blocks"), _refuse_tpu_product_of_blocks
)
HOPPER_KERNEL = Kernel(
    kernel_function("products.product_of_blocks_hopper", "hopper_product_of_blocks"),
    _refuse_hopper_product_of_blocks,
    profitable=lambda x, *_, **__: x.shape[1] >= _MIN_HOPPER_ROWS,
    capability=lambda *_, **__: _HOPPER_CAPABILITY,
    below=_BLACKWELL_CAPABILITY,
)
#: XLA's product is faster than the kernel of all GPUs if no scale changes along the sum.
GPU_KERNEL = Kernel(
    kernel_function("products.product_of_blocks_gpu", "gpu_product_of_blocks"),
    _refuse_gpu_product_of_blocks,
    profitable=lambda x, *_, block, **__: block < x.shape[2],
    capability=lambda x, *_, **__: _FLOAT8_CAPABILITY if x.dtype.name in _FLOAT8_DTYPES else _INT8_CAPABILITY,
)
