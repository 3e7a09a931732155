"""The cases of the product with a matrix of codes and group scales: few rows and many, ragged sizes, every format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from _kernels.compiling import Case, checks_of, is_tpu

from jchop._kernels.products.dequantize_matmul import GPU_KERNEL, dequantize_matmul_op
from jchop._spec.spec import as_spec
from jchop.formats import ElementFormat, IntegerFormat
from jchop.formats._catalogue import float4_e2m1fn, float8_e4m3fn, float8_e5m2

FORMATS: dict[str, ElementFormat] = {
    "int4": IntegerFormat(4),
    "int8": IntegerFormat(8),
    "float8_e4m3fn": float8_e4m3fn,
    "float8_e5m2": float8_e5m2,
}
NF4: Any = as_spec("nf4(group=32)", "", scaled=True)
OTHERS: dict[str, ElementFormat] = {"int2": IntegerFormat(2), "float4_e2m1fn": float4_e2m1fn, "nf4": NF4.element}
_AMPERE_CAPABILITY = 8.0
#: m, k, n, group: one row, few, many; groups of all kinds; sizes that nothing divides, which TPUs take.
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
        if (name, dtype) != ("int8", "float32")
    ]
    for shape, name, dtype, scale_dtype, x64 in wanted:
        yield from case(target, run, shape, name, FORMATS[name], dtype, scale_dtype, x64)
    if not is_tpu(target):
        yield from few_rows(target)
    for name, format in OTHERS.items():
        shape = (16, 1000, 515, 32) if is_tpu(target) else (16, 1024, 528, 32)
        yield from case(target, run, shape, name, format, "bfloat16", "float32", True)


def case(
    target: str,
    run: Callable[..., Any],
    shape: tuple[int, int, int, int],
    name: str,
    format: ElementFormat,
    dtype: str,
    scale_dtype: str,
    x64: bool = False,
) -> Iterator[Case]:
    """The case of a shape, unless kernels of GPUs do not take it; of the body, if the chip is too old."""
    avals = arguments(shape, format, dtype, scale_dtype)
    text = f"dequantize_matmul {name} {shape} {dtype}, scales {scale_dtype}{', x64' if x64 else ''}"
    if not is_tpu(target):
        if GPU_KERNEL.refuse(*avals, format=format, group=shape[3]):
            return
        if target == "a100" and GPU_KERNEL.capability(*avals, format=format) > _AMPERE_CAPABILITY:
            op = partial(dequantize_matmul_op, format=format, group=shape[3])
            yield Case(text, op, avals, x64, ("body",))
            return
    yield Case(text, partial(run, format=format, group=shape[3]), avals, x64, checks_of(target))


def few_rows(target: str, of_table: bool = False) -> Iterator[Case]:
    """Of large matrices, as a step of decoding has them; or those of the table of machine code."""
    wanted = [
        ("int4", 8, 128), ("int4", 16, 128), ("int8", 2, 4096), ("float8_e4m3fn", 1, 128),
        ("float8_e4m3fn", 8, 128), ("float8_e5m2", 4, 4096),
    ]  # fmt: skip
    if of_table:
        wanted = [(name, rows, 128) for name in ("int4", "int8", "float8_e4m3fn") for rows in (1, 8, 16)]
        wanted += [("float4_e2m1fn", rows, group) for rows in (1, 16) for group in (16, 32)]
        wanted += [("nf4", rows, 64) for rows in (1, 16)]
    for name, rows, group in wanted:
        format = (FORMATS | OTHERS)[name]
        yield from case(target, kernel_of(target), (rows, 4096, 4096, group), name, format, "bfloat16", "bfloat16")
