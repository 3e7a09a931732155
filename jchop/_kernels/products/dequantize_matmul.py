"""The product with a matrix of codes and group scales as an operation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jax import Array

from jchop._core.matmul.dequantize_matmul import dequantize_matmul_body, is_exact_in
from jchop._core.rounding.codebooks import refuse_table
from jchop._kernels.primitive import Kernel, make_op
from jchop._kernels.tiles import (
    LANES,
    SUBLANES,
    Tiling,
    kernel_function,
    mosaic_gpu_capability,
    next_multiple,
    refuse_large,
    refuse_mosaic_gpu,
)
from jchop.formats import ElementFormat


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
        terms: numbers of bfloat16 whose sum is the number of a code.
    """

    m: int
    k: int
    width: int
    group: int
    parts: int
    itemsize: int
    terms: int = 1

    @classmethod
    def of(cls, x: Any, codes: Any, format: ElementFormat, group: int) -> DequantizeMatmulProblem:
        """The problem of arrays, or of their shapes and dtypes."""
        (m, k), width = x.shape, codes.shape[1]
        terms = 1 if is_exact_in(format, "bfloat16") else 3
        return cls(m, k, width, max(min(group, k), 1), 8 // format.bits, np.dtype(x.dtype).itemsize, terms)

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
        block_k: rows of W on chip at a time. All, or a multiple of 128 that holds a multiple of 8 whole groups, or
            one that divides a group.
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
        scale_rows = problem.groups if self.divides(problem) else -(-self.block_k // problem.group)
        blocks = m * k * problem.itemsize + k * n + parts * n * (m * problem.itemsize + 4 * scale_rows)
        return 2 * blocks + parts * n * (8 * m + 4 * rows) + rows * n * 8

    def divides(self, problem: DequantizeMatmulProblem) -> bool:
        """Whether a tile is a part of a group or one group, not several groups."""
        return self.block_k <= problem.group and self.block_k != problem.k


@dataclass(frozen=True)
class DequantizeMatmulGpuTiling(Tiling):
    """Tiles of the GPU kernel, for one warpgroup of 128 threads.

    Args:
        depth: rows of W whose sums are scaled together: a group, or a part of one.
        loads: how many of these a step loads before it decodes them.
        splits: number of stretches of k, whose sums are added afterwards. It gives more programs if a product has few
            tiles.
    """

    depth: int
    loads: int = 1
    splits: int = 1

    MULTIPLES: ClassVar = {"depth": 16, "loads": 1, "splits": 1}

    @classmethod
    def for_shape(cls, problem: DequantizeMatmulProblem) -> DequantizeMatmulGpuTiling | None:
        """The heuristic; None if no tile fits.

        Reading codes takes the time, so a step loads many rows of W, and k is split until the programs fill the chip.
        """
        most = _DEQUANTIZE_DEPTH if problem.terms == 1 else _DEQUANTIZE_DEPTH // 2  # so that registers hold all terms
        depth, whole = math.gcd(problem.group, most), problem.k % problem.group == 0
        if depth % 16 or not whole or problem.width % 4 or problem.width < DEQUANTIZE_BYTES:
            return None
        spans = problem.k // depth
        loads = math.gcd(spans, _DEQUANTIZE_DEPTH // depth)
        tiles = -(-problem.width // DEQUANTIZE_BYTES) * -(-problem.m // MOST_DEQUANTIZE_ROWS)
        return cls(depth, loads, min(max(_DEQUANTIZE_PROGRAMS // tiles, 1), spans // loads))


#: Bytes of a tile in a row of W, and rows of x in a tile at most.
DEQUANTIZE_BYTES, MOST_DEQUANTIZE_ROWS = 128, 16
#: Rows of W that a step loads, and programs that fill a large GPU. More would be slowed down by the sum of their
#: results.
_DEQUANTIZE_DEPTH, _DEQUANTIZE_PROGRAMS = 128, 528
#: The most rows for which decoding each number anew takes less time than reading the matrix unpacked.
_MOST_ROWS_OF_X = 16


# -- the operation ---------------------------------------------------------------------------------------------------


def _refuse_tpu_dequantize_matmul(x: Any, codes: Any, scales: Any, *, format: ElementFormat, group: int) -> str | None:
    problem = DequantizeMatmulProblem.of(x, codes, format, group)
    if DequantizeMatmulTpuTiling.for_shape(problem) is None:
        return f"no tile of whole groups of {group} rows fits on chip (k={problem.k})"
    return refuse_table(format)


def _refuse_gpu_dequantize_matmul(x: Any, codes: Any, scales: Any, *, format: ElementFormat, group: int) -> str | None:
    problem = DequantizeMatmulProblem.of(x, codes, format, group)
    if problem.width * problem.parts != scales.shape[1] or DequantizeMatmulGpuTiling.for_shape(problem) is None:
        return f"no tile of whole words and groups of {group} rows fits (k={problem.k}, n={scales.shape[1]})"
    large = refuse_large(x=x.size, codes=codes.size, y=x.shape[0] * scales.shape[1])
    return refuse_mosaic_gpu(x=x.dtype) or refuse_table(format) or large


GPU_KERNEL = Kernel(
    kernel_function("products.dequantize_matmul_gpu", "gpu_dequantize_matmul"),
    _refuse_gpu_dequantize_matmul,
    lambda x, *_, **__: x.shape[0] <= _MOST_ROWS_OF_X,
    capability=mosaic_gpu_capability,
)
dequantize_matmul_op = make_op(
    "jchop_dequantize_matmul",
    dequantize_matmul_body,
    # On chip, codes are in tiles of 32 rows: groups of other lengths would have to be moved.
    tpu=Kernel(
        kernel_function("products.dequantize_matmul_tpu", "tpu_dequantize_matmul"),
        _refuse_tpu_dequantize_matmul,
        lambda x, codes, scales, *, group, **_: group % 32 == 0 or group >= x.shape[1],
    ),
    gpu=GPU_KERNEL,
)


def dequantize_matmul(
    x: Array, codes: Array, scales: Array, *, format: ElementFormat, group: int, impl: str = "auto"
) -> Array:
    """The product of `x` with a matrix of codes and group scales, W[k, n] = s[k // group, n] * value(codes[k, n]).

    W is decoded a few groups at a time, never as a whole. Products of `x` with the values of the codes are summed in
    float32, and scaled group by group. The order of the sums is not defined. So implementations agree up to the
    rounding of float32 sums, and exactly if these sums are exact.

    Args:
        x: (..., k), float32 or bfloat16.
        codes: (k, ceil(n * bits / 8)) uint8. Code j of a row occupies the bits [bits * j, bits * (j + 1)) of the row
            read as a little-endian number. For 4 bits the low nibble is first.
        scales: (ceil(k / group), n), float32 or bfloat16.
        format: the format of the codes: floating-point, fixed-point, integer or a codebook, of 2, 4 or 8 bits.
        group: the number of consecutive rows of W that share a scale; the last group may be smaller.
        impl: "auto", "xla" or "pallas"; only "auto" may fall back.

    Returns:
        (..., n), in the dtype of `x`.

    Raises:
        ValueError: for a bad `impl`.
        NotImplementedError: while it is lowered, if ``impl="pallas"`` and the kernel cannot run.

    Example:
        >>> import jax.numpy as jnp
        >>> from jchop.formats import IntegerFormat
        >>> codes = jnp.array([[0x21], [0xF3]], jnp.uint8)  # [[1, 2], [3, -1]]
        >>> dequantize_matmul(jnp.ones((1, 2)), codes, jnp.full((1, 2), 0.5), format=IntegerFormat(4), group=2).tolist()
        [[2.0, 0.5]]
    """
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = dequantize_matmul_op(flat, codes, scales, format=format, group=group, impl=impl)
    return y.reshape(*x.shape[:-1], scales.shape[1])
