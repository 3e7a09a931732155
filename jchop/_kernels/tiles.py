"""Sizes of tiles, and reasons against a kernel: kernels share them before Pallas is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

import jax

from jchop._common.checks import check_int
from jchop._common.on_demand import load_name

#: Numbers in a row of a TPU's vector register, and rows of 32-bit numbers.
LANES, SUBLANES = 128, 8
#: Threads of a warp of a GPU, and warps of a warpgroup.
WARP_LANES, WARPS = 32, 4
#: Dtypes that the TPU's vector unit does not have.
_DTYPES_NOT_ON_TPU = {"float16", "float64"}
#: From here on int32 does not number the elements of an array.
_MAX_ELEMENTS = 1 << 31


class Tiling:
    """Sizes of the tiles of a kernel: the base of frozen dataclasses of integers.

    Attributes:
        MULTIPLES: of sizes, the number that each is a multiple of, or the name of another size.
        POWERS: of sizes that are powers of two, the least value of each.
    """

    MULTIPLES: ClassVar[Mapping[str, int | str]] = {}
    POWERS: ClassVar[Mapping[str, int]] = {}

    def __post_init__(self) -> None:
        for name, unit in self.MULTIPLES.items():
            unit = getattr(self, unit) if isinstance(unit, str) else unit
            if check_int(name, getattr(self, name), 1) % unit:
                raise ValueError(f"{name}={getattr(self, name)} must be a multiple of {unit}")
        for name, least in self.POWERS.items():
            value = check_int(name, getattr(self, name), least)
            if value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")


def next_multiple(value: int, unit: int) -> int:
    """The least multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def next_power_of_two(value: int, least: int = 1) -> int:
    """The least power of two that is at least `value` and `least`."""
    return max(1 << max(value - 1, 0).bit_length(), least)


def kernel_function(module: str, name: str) -> Callable[..., Any]:
    """A function of a file of `_kernels/`, which is imported, and Pallas with it, when the function is first called."""
    return lambda *args, **static: load_name(f"jchop._kernels.{module}", name)(*args, **static)


def mosaic_gpu_capability(*_: Any, **__: Any) -> float:
    """The least compute capability of kernels of Mosaic GPU. Before JAX 0.12, it ends the process on Ampere GPUs."""
    return 8.0 if jax.__version_info__ >= (0, 12) else 9.0


def refuse_mosaic_gpu(**dtypes: Any) -> str | None:
    """The reason why Mosaic GPU has no kernel for arrays of these dtypes, by name, or None."""
    for name, dtype in dtypes.items():
        if dtype.itemsize == 8:
            return f"{name} has dtype {dtype.name}, and kernels of GPUs take at most 32 bits"
    return None if find_spec("absl") else "JAX's Mosaic GPU needs absl: pip install absl-py"


def refuse_tpu_dtype(name: str, dtype: Any) -> str | None:
    """The reason why a TPU's kernels have no numbers of a dtype, or None."""
    return f"{name} has dtype {dtype.name}, which TPU kernels do not take" if dtype.name in _DTYPES_NOT_ON_TPU else None


def refuse_large(**sizes: int) -> str | None:
    """The reason why the indexes of a kernel do not reach all elements of arrays, by name, or None."""
    for name, size in sizes.items():
        if size >= _MAX_ELEMENTS:
            return f"{name} has {size} elements, and a kernel takes fewer than 2^31"
    return None
