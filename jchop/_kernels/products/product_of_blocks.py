"""The kernels of a product of codes and scales. The body is in `_quantized/products/codes.py`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from jchop._kernels.primitive import Kernel
from jchop._kernels.products.product_of_blocks_tile import (
    ProductOfBlocksGpuTiling,
    ProductOfBlocksHopperTiling,
    ProductOfBlocksTpuTiling,
)

__all__ = ["GPU_KERNEL", "HOPPER_KERNEL", "TPU_KERNEL"]

Array = jax.Array

_INT8_DTYPES, _FLOAT8_DTYPES = {"int8"}, {"float8_e4m3fn", "float8_e5m2"}
#: The longest block whose sum of products of two int8 is surely in int32.
_LONGEST_INT8_BLOCK = (2**31 - 1) // 2**14
#: Blocks that a step of a TPU holds whole.
_MIN_TPU_PRODUCT_BLOCK, _MAX_TPU_PRODUCT_BLOCK = 8, 512
#: Hopper and Ada have units for float8; the compiler knows no e4m3 for older GPUs.
_INT8_CAPABILITY, _FLOAT8_CAPABILITY = 8.0, 8.9
#: Those of Hopper, and the sizes that its kernel copies: rows of each operand, and numbers of the sum.
_HOPPER_CAPABILITY, _BLACKWELL_CAPABILITY = 9.0, 10.0
_HOPPER_UNITS = {"m": 8, "n": 64, "k": 128}
#: Fewer rows leave most of a tile empty.
_MIN_HOPPER_ROWS = 128


def _run_tpu_product_of_blocks(*args: Array, **static: Any) -> Array:
    from jchop._kernels.products import product_of_blocks_tpu

    return product_of_blocks_tpu.tpu_product_of_blocks(*args, **static)


def _run_gpu_product_of_blocks(*args: Array, **static: Any) -> Array:
    from jchop._kernels.products import product_of_blocks_gpu

    return product_of_blocks_gpu.gpu_product_of_blocks(*args, **static)


def _run_hopper_product_of_blocks(*args: Array, **static: Any) -> Array:
    from jchop._kernels.products import product_of_blocks_hopper

    return product_of_blocks_hopper.hopper_product_of_blocks(*args, **static)


def _refuse_product_of_blocks(x: Any, w: Any, *scales: Any, block: int, dtype: str, **_: Any) -> str | None:
    kinds = {x.dtype.name, w.dtype.name}
    if not (kinds <= _INT8_DTYPES or kinds <= _FLOAT8_DTYPES):
        return f"the operands have elements of {' and '.join(sorted(kinds))}, not both of int8 or both of float8"
    if np.dtype(dtype).itemsize == 8:
        return f"the result has dtype {dtype}"
    if kinds <= _INT8_DTYPES and block > _LONGEST_INT8_BLOCK:
        return f"the sum of a block of {block} numbers may leave int32"
    return None


def _refuse_gpu_product_of_blocks(x: Any, w: Any, *scales: Any, tiling: Any = None, **static: Any) -> str | None:
    if tiling is not None and not isinstance(tiling, ProductOfBlocksGpuTiling):
        return f"tiling={tiling!r} is not a ProductOfBlocksGpuTiling"
    return _refuse_large_arrays(x, w) or _refuse_product_of_blocks(x, w, *scales, **static)


def _refuse_large_arrays(x: Any, w: Any) -> str | None:
    """The reason why the indices of a GPU do not reach all elements, or None."""
    for name, size in (("x", x.size), ("w", w.size), ("y", x.shape[0] * x.shape[1] * w.shape[1])):
        if size >= 1 << 31:
            return f"{name} has {size} elements, and a kernel takes fewer than 2^31"
    return None


def _refuse_hopper_product_of_blocks(
    x: Any, w: Any, *scales: Any, names: tuple[str, ...], block: int, tiling: Any = None, **static: Any
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
    if tiling is not None and not isinstance(tiling, ProductOfBlocksHopperTiling):
        return f"tiling={tiling!r} is not a ProductOfBlocksHopperTiling"
    if find_spec("absl") is None:
        return "JAX's Mosaic GPU needs absl: pip install absl-py"
    return _refuse_large_arrays(x, w) or _refuse_product_of_blocks(x, w, *scales, block=block, **static)


def _pays_on_hopper(x: Any, *_: Any, **__: Any) -> bool:
    return x.shape[1] >= _MIN_HOPPER_ROWS


def _has_several_blocks(x: Any, *_: Any, block: int, **__: Any) -> bool:
    """XLA's product is faster than the kernel of all GPUs if no scale changes along the sum."""
    return block < x.shape[2]


def _refuse_tpu_product_of_blocks(
    x: Any, w: Any, *scales: Any, block: int, tiling: Any = None, **static: Any
) -> str | None:
    if block & (block - 1) or not _MIN_TPU_PRODUCT_BLOCK <= block <= _MAX_TPU_PRODUCT_BLOCK:
        return f"the blocks of {block} are no power of two from {_MIN_TPU_PRODUCT_BLOCK} to {_MAX_TPU_PRODUCT_BLOCK}"
    if tiling is not None and not isinstance(tiling, ProductOfBlocksTpuTiling):
        return f"tiling={tiling!r} is not a ProductOfBlocksTpuTiling"
    misfit = None if tiling is None else tiling.misfit(x.shape[1], w.shape[1], block)
    return misfit or _refuse_product_of_blocks(x, w, *scales, block=block, **static)


def _capability_of_dtype(x: Any, *_: Any, **__: Any) -> float:
    return _FLOAT8_CAPABILITY if x.dtype.name in _FLOAT8_DTYPES else _INT8_CAPABILITY


TPU_KERNEL = Kernel(_run_tpu_product_of_blocks, _refuse_tpu_product_of_blocks)
HOPPER_KERNEL = Kernel(
    _run_hopper_product_of_blocks,
    _refuse_hopper_product_of_blocks,
    _pays_on_hopper,
    lambda *_, **__: _HOPPER_CAPABILITY,
    _BLACKWELL_CAPABILITY,
)
GPU_KERNEL = Kernel(
    _run_gpu_product_of_blocks, _refuse_gpu_product_of_blocks, _has_several_blocks, _capability_of_dtype
)
