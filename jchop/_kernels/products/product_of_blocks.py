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
from jchop._kernels.tiles import LANES, Tiling, kernel_function, refuse_large, refuse_mosaic_gpu

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


#: Bytes of a row of the parts in which tiles lie in shared memory.
HOPPER_ROW_BYTES = 128


@dataclass(frozen=True)
class HopperTiling(Tiling):
    """Tiles of the kernels for the matrix units of Hopper.

    Args:
        rows: rows of the part of a tile that one of two warpgroups computes, a multiple of 64.
        columns: its columns, a multiple of 32.
        depth: numbers of the sum in a step, of 32 or 64 bytes or a multiple of 128.
        stages: the number of steps whose copies may be in flight.
    """

    rows: int
    columns: int
    depth: int
    stages: int

    MULTIPLES: ClassVar = {"rows": 64, "columns": 32, "depth": 8, "stages": 1}

    @classmethod
    def for_shape(cls, shape: Sequence[int], n: int, block: int, *, is_integer: bool) -> HopperTiling:
        """The heuristic for 8-bit numbers: tiles as large as registers and shared memory allow.

        Registers hold the sum of a tile. Unless one unit sums all, they hold the sum of a step, too.

        Args:
            shape: (batch, rows, numbers of the sum) of the left operand.
            n: columns of the product.
            block: the length of a block.
            is_integer: whether the elements are integers, which the unit sums exactly.
        """
        _, m, k = shape
        if block < k:
            return cls(64, 128, block, 5 if block <= HOPPER_ROW_BYTES else 2)
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
#: The capabilities of Hopper and Blackwell, and sizes that Hopper's kernel copies: rows of each operand, and numbers.
HOPPER_CAPABILITY, BLACKWELL_CAPABILITY = 9.0, 10.0
_HOPPER_UNITS = {"m": 8, "n": 64, "k": 128}
#: Lengths of its blocks, which are the steps of the sum.
_HOPPER_BLOCKS = (32, 64, 128, 256)
#: Fewer rows leave most of a tile empty.
_MIN_HOPPER_ROWS = 128
#: Bytes that the body writes and reads for each block of an element of the product.
_BODY_BYTES = 8


def _refuse_product_of_blocks(x: Any, w: Any, *scales: Any, block: int, dtype: str, **_: Any) -> str | None:
    kinds = {x.dtype.name, w.dtype.name}
    if not (kinds <= _INT8_DTYPES or kinds <= _FLOAT8_DTYPES):
        return f"the operands have elements of {' and '.join(sorted(kinds))}, not both of int8 or both of float8"
    if np.dtype(dtype).itemsize == 8:
        return f"the result has dtype {dtype}"
    if kinds <= _INT8_DTYPES and block > _LONGEST_INT8_BLOCK:
        return f"the sum of a block of {block} numbers may leave int32"
    return None


def _refuse_hopper_product_of_blocks(x: Any, w: Any, *scales: Any, block: int, **static: Any) -> str | None:
    sizes = {"m": x.shape[1], "n": w.shape[1], "k": x.shape[2]}
    for name, unit in _HOPPER_UNITS.items():
        if sizes[name] % unit and (name != "k" or block >= sizes["k"]):
            return f"{name}={sizes[name]} is no multiple of {unit}"
    if x.dtype != w.dtype:
        return f"the operands have elements of {x.dtype.name} and {w.dtype.name}"
    if block < sizes["k"] and (block not in _HOPPER_BLOCKS or sizes["k"] % block):
        return f"k={sizes['k']} is not divided into blocks of {block}; a kernel takes {_HOPPER_BLOCKS}"
    large = refuse_large(x=x.size, w=w.size, y=x.shape[0] * sizes["m"] * sizes["n"])
    return refuse_mosaic_gpu() or large or _refuse_product_of_blocks(x, w, *scales, block=block, **static)


def _refuse_tpu_product_of_blocks(x: Any, w: Any, *scales: Any, block: int, **static: Any) -> str | None:
    if block & (block - 1) or not _MIN_TPU_PRODUCT_BLOCK <= block <= _MAX_TPU_PRODUCT_BLOCK:
        return f"the blocks of {block} are no power of two from {_MIN_TPU_PRODUCT_BLOCK} to {_MAX_TPU_PRODUCT_BLOCK}"
    return _refuse_product_of_blocks(x, w, *scales, block=block, **static)


TPU_KERNEL = Kernel(
    kernel_function("products.product_of_blocks_tpu", "tpu_product_of_blocks"), _refuse_tpu_product_of_blocks
)
#: The body writes the sums after each block, so the kernel pays if these have more bytes than the right operand.
HOPPER_KERNEL = Kernel(
    kernel_function("products.product_of_blocks_hopper", "hopper_product_of_blocks"),
    _refuse_hopper_product_of_blocks,
    profitable=lambda x, *_, block, **__: (
        x.shape[1] >= (_MIN_HOPPER_ROWS if block >= x.shape[2] else -(-block // _BODY_BYTES))
    ),
    capability=lambda *_, **__: HOPPER_CAPABILITY,
    below=BLACKWELL_CAPABILITY,
)
