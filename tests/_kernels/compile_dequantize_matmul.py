"""The cases of the product with a matrix of codes and group scales: few rows and many, ragged sizes, every format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from _kernels.compiling import Case, checks_of, is_tpu

from jchop.formats import ElementFormat, IntegerFormat
from jchop.formats._catalogue import float4_e2m1fn, float8_e4m3fn, float8_e5m2

FORMATS: dict[str, ElementFormat] = {
    "int4": IntegerFormat(4),
    "int8": IntegerFormat(8),
    "float8_e4m3fn": float8_e4m3fn,
    "float8_e5m2": float8_e5m2,
}
#: m, k, n, group: one row, few, many; groups of all kinds; sizes that nothing divides.
SHAPES = (
    (1, 4096, 4096, 128),
    (16, 1024, 512, 32),
    (512, 2048, 1024, 2048),
    (19, 1000, 515, 32),
    (300, 1100, 37, 100),
    (7, 2500, 130, 1024),
    (5, 70, 9, 16),
)


def kernel_of(target: str) -> Callable[..., Any]:
    if is_tpu(target):
        from jchop._kernels.products import dequantize_matmul_tpu

        return dequantize_matmul_tpu.tpu_dequantize_matmul
    from jchop._kernels.products import dequantize_matmul_gpu

    return dequantize_matmul_gpu.gpu_dequantize_matmul


def arguments(
    shape: tuple[int, int, int, int], format: ElementFormat, dtype: str, scale_dtype: str
) -> tuple[jax.ShapeDtypeStruct, ...]:
    m, k, n, group = shape
    return (
        jax.ShapeDtypeStruct((m, k), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((k, -(-n * format.bits // 8)), jnp.uint8),
        jax.ShapeDtypeStruct((-(-k // group), n), jnp.dtype(scale_dtype)),
    )


def cases(target: str) -> Iterator[Case]:
    run = kernel_of(target)
    wanted = [
        (shape, name, dtype, scale_dtype, i % 2 == 1)
        for i, shape in enumerate(SHAPES)
        for name, dtype, scale_dtype in (("int4", "bfloat16", "bfloat16"), ("int8", "float32", "float32"))
    ]
    wanted += [
        (shape, name, dtype, "float32", dtype == "bfloat16")
        for shape in (SHAPES[1], SHAPES[3])
        for name in FORMATS
        for dtype in ("bfloat16", "float32")
    ]
    for shape, name, dtype, scale_dtype, x64 in wanted:
        fun = partial(run, format=FORMATS[name], group=shape[3])
        text = f"dequantize_matmul {name} {shape} {dtype}, scales {scale_dtype}{', x64' if x64 else ''}"
        checks = without_masks(checks_of(target, shape[1] % 16 == shape[2] % 16 == 0), shape)
        yield Case(text, fun, arguments(shape, FORMATS[name], dtype, scale_dtype), x64, checks)
    if not is_tpu(target):
        yield from one_row(target)
    for name, format in (("int2", IntegerFormat(2)), ("float4_e2m1fn", float4_e2m1fn)):
        fun = partial(run, format=format, group=32)
        avals = arguments((16, 1000, 515, 32), format, "bfloat16", "float32")
        yield Case(f"dequantize_matmul {name}, x64", fun, avals, True, checks_of(target, False))


def without_masks(checks: tuple[str, ...], shape: tuple[int, int, int, int]) -> tuple[str, ...]:
    """The checks of a shape: one row has no masks if whole tiles fill the arrays."""
    return tuple(check for check in checks if check != "masked" or shape[:3] != (1, 4096, 4096))


def one_row(target: str) -> Iterator[Case]:
    """Without the matrix units: spans longer than a step and shorter, ragged ones."""
    from jchop._kernels.products.dequantize_matmul import DequantizeMatmulGpuTiling

    for name, (k, n, group), tiling in (
        ("int4", (4096, 4096, 128), DequantizeMatmulGpuTiling(1, 128, 16, 16)),
        ("int8", (1000, 515, 100), DequantizeMatmulGpuTiling(1, 64, 32, 3)),
        ("float8_e4m3fn", (1000, 512, 128), DequantizeMatmulGpuTiling(1, 64, 512, 2)),
    ):
        fun = partial(kernel_of(target), format=FORMATS[name], group=group, tiling=tiling)
        avals = arguments((1, k, n, group), FORMATS[name], "bfloat16", "float32")
        yield Case(
            f"dequantize_matmul {name} (1, {k}, {n}, {group}), {tiling}",
            fun,
            avals,
            False,
            without_masks(checks_of(target, n % 16 == 0), (1, k, n, group)),
        )
