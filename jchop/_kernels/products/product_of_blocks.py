"""The kernels of a product of codes and scales. The body is in `_quantized/products/codes.py`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from jchop._kernels.primitive import Kernel
from jchop._kernels.tiles import kernel_function, refuse_large

__all__ = ["GPU_KERNEL", "HOPPER_KERNEL", "TPU_KERNEL"]

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
    if find_spec("absl") is None:
        return "JAX's Mosaic GPU needs absl: pip install absl-py"
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
