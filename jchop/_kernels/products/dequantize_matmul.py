"""The product with a matrix of codes and group scales as an operation."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jchop._common.checks import check_int
from jchop._core.matmul.dequantize_matmul import dequantize_matmul_body, is_exact_in
from jchop._core.rounding.codebooks import refuse_table
from jchop._kernels.primitive import Kernel, make_op
from jchop._kernels.products.dequantize_matmul_tile import DequantizeMatmulProblem, DequantizeMatmulTpuTiling
from jchop._kernels.tiles import kernel_function, refuse_large
from jchop.formats import CodebookFormat, ElementFormat, FloatFormat, UniformFormat

__all__ = ["dequantize_matmul", "dequantize_matmul_op"]

Array = jax.Array


def _refuse_tpu_dequantize_matmul(x: Any, codes: Any, scales: Any, *, format: ElementFormat, group: int) -> str | None:
    problem = DequantizeMatmulProblem.of(x, codes, format, group)
    if DequantizeMatmulTpuTiling.for_shape(problem) is None:
        return f"no tile of whole groups of {group} rows fits on chip (k={problem.k})"
    return refuse_table(format)


def _refuse_gpu_dequantize_matmul(x: Any, codes: Any, scales: Any, *, format: ElementFormat, **_: Any) -> str | None:
    return refuse_table(format) or refuse_large(x=x.size, codes=codes.size, y=x.shape[0] * scales.shape[1])


dequantize_matmul_op = make_op(
    "jchop_dequantize_matmul",
    dequantize_matmul_body,
    # On chip, codes are in tiles of 32 rows: groups of other lengths would have to be moved.
    tpu=Kernel(
        kernel_function("products.dequantize_matmul_tpu", "tpu_dequantize_matmul"),
        _refuse_tpu_dequantize_matmul,
        lambda x, codes, scales, *, group, **_: group % 32 == 0 or group >= x.shape[1],
    ),
    # A step takes at least 16 rows of W; for many rows of float32 a tuned library is faster.
    gpu=Kernel(
        kernel_function("products.dequantize_matmul_gpu", "gpu_dequantize_matmul"),
        _refuse_gpu_dequantize_matmul,
        lambda x, codes, scales, *, group, **_: group >= 16 and (x.dtype == jnp.bfloat16 or x.shape[0] <= 64),
    ),
)


def dequantize_matmul(
    x: Array,
    codes: Array,
    scales: Array,
    *,
    format: ElementFormat,
    group: int,
    impl: str = "auto",
) -> Array:
    """The product of `x` with a matrix of codes and group scales, W[k, n] = s[k // group, n] * value(codes[k, n]).

    W is decoded a few groups at a time, never as a whole. Products of `x` with the values of the codes are summed in
    float32, and scaled group by group. The order of the sums is not defined. So implementations agree up to the
    rounding of float32 sums, and exactly if these sums are exact.

    Args:
        x: (..., k), float32 or bfloat16.
        codes: (k, ceil(n * bits / 8)) uint8. Code j of a row occupies the bits [bits * j, bits * (j + 1)) of the row
            read as a little-endian number: low nibble first for 4 bits.
        scales: (ceil(k / group), n), float32 or bfloat16.
        format: the format of the codes: floating-point, fixed-point, integer or a codebook, of 2, 4 or 8 bits.
        group: the number of consecutive rows of W that share a scale; the last group may be smaller.
        impl: "auto", "xla" or "pallas"; only "auto" may fall back.

    Returns:
        (..., n), in the dtype of `x`.

    Raises:
        TypeError: for another dtype or format.
        ValueError: for shapes that do not fit together, or a bad `group` or `impl`.
        NotImplementedError: while it is lowered, if ``impl="pallas"`` and the kernel cannot run.

    Example:
        >>> import jax.numpy as jnp
        >>> from jchop.formats import IntegerFormat
        >>> codes = jnp.array([[0x21], [0xF3]], jnp.uint8)  # [[1, 2], [3, -1]]
        >>> dequantize_matmul(jnp.ones((1, 2)), codes, jnp.full((1, 2), 0.5), format=IntegerFormat(4), group=2).tolist()
        [[2.0, 0.5]]
    """
    group = check_int("group", group, 1)
    _check_code_format(format)
    for name, array, dtypes in (
        ("x", x, _DEQUANTIZE_MATMUL_FLOATS),
        ("codes", codes, ("uint8",)),
        ("scales", scales, _DEQUANTIZE_MATMUL_FLOATS),
    ):
        if array.dtype.name not in dtypes:
            raise TypeError(f"{name} has dtype {array.dtype.name}; it must be {' or '.join(dtypes)}")
    _check_dequantize_matmul_shapes(x.shape, codes.shape, scales.shape, format, group)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = dequantize_matmul_op(flat, codes, scales, format=format, group=group, impl=impl)
    return y.reshape(*x.shape[:-1], scales.shape[1])


_DEQUANTIZE_MATMUL_FLOATS = ("float32", "bfloat16")


def _check_code_format(format: ElementFormat) -> None:
    if not isinstance(format, FloatFormat | UniformFormat | CodebookFormat) or format.bits not in (2, 4, 8):
        raise TypeError(
            f"format={format} must be a floating-point, fixed-point or integer format, or a codebook, of 2, 4 or 8 bits"
        )
    if not is_exact_in(format, "float32"):
        raise TypeError(f"format={format} must have only values that are normal numbers of float32")


def _check_dequantize_matmul_shapes(x: tuple, codes: tuple, scales: tuple, format: ElementFormat, group: int) -> None:
    if not x or len(codes) != 2 or len(scales) != 2:
        raise ValueError(
            f"x, codes and scales have shapes {x}, {codes} and {scales}; x must be (..., k), codes and scales matrices"
        )
    k, n = x[-1], scales[1]
    conditions = f"with k={k}, n={n}, group={group}, format={format}"
    checks = ("codes", codes, (k, -(-n * format.bits // 8))), ("scales", scales, (-(-k // group), n))
    for name, shape, expected_shape in checks:
        if shape != expected_shape:
            raise ValueError(f"{name} has shape {shape}; {conditions} it must be {expected_shape}")
