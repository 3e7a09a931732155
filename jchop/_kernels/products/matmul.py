"""The matrix product with an emulated accumulator as an operation, with the body for XLA and the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import CARRIERS, lax_where
from jchop._core.arithmetic.basic import ValueRange, add_and_round, carrier_range, sum_range
from jchop._core.matmul import aligned
from jchop._core.matmul.aligned import TensorCoreUnit
from jchop._core.matmul.matmul import MatmulPlan, WordSource, accumulate_product, combine_sums, matmul_body
from jchop._kernels.primitive import Kernel, make_op
from jchop._kernels.products.product_of_blocks import (
    BLACKWELL_CAPABILITY,
    HOPPER_CAPABILITY,
    HOPPER_ROW_BYTES,
    HopperTiling,
)
from jchop._kernels.tiles import (
    LANES,
    SUBLANES,
    Tiling,
    kernel_function,
    mosaic_gpu_capability,
    next_multiple,
    next_power_of_two,
    refuse_large,
    refuse_mosaic_gpu,
)
from jchop._spec.accumulation import MatmulSpec

# -- tilings -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatmulTpuTiling(Tiling):
    """Tiles of the TPU kernel.

    Args:
        block_m: rows of an output tile, a multiple of `rows`.
        block_n: its columns, a multiple of 128.
        block_k: length of the part of the inner dimension on chip at a time, a multiple of 128.
        rows: rows of the chunk of a tile that stays in registers through these steps, a multiple of 8.
    """

    block_m: int
    block_n: int
    block_k: int
    rows: int

    MULTIPLES: ClassVar = {"rows": SUBLANES, "block_m": "rows", "block_n": LANES, "block_k": LANES}
    #: Elements of a chunk: four registers, to keep the vector units busy and leave room for temporaries.
    _CHUNK = 4 * SUBLANES * LANES
    #: The most bytes of the partial sums of pairwise order; a chip has 16 MiB.
    _STACK = 4 << 20

    @classmethod
    def for_shape(cls, m: int, n: int, k: int, spec: MatmulSpec) -> MatmulTpuTiling:
        """The tiling for a product of (m, k) and (k, n), by a heuristic.

        A step of an elementwise order takes tens to hundreds of vector operations for each element, so arithmetic
        limits it for every tile. A wide chunk shares the broadcast of its column of `a`. For a matrix unit, nearly
        square tiles are best.
        """
        units = spec.order.kind == "matrix_unit"
        aligned = spec.order.aligned
        block_n = min(256 if units else LANES if aligned else 512, next_multiple(n, LANES))
        chunk = SUBLANES * LANES if aligned else cls._CHUNK  # many terms of an element are alive together
        rows = min(chunk // block_n // SUBLANES * SUBLANES, next_multiple(m, SUBLANES))
        tall = 256
        if spec.order.kind == "pairwise":
            tall = min(tall, cls._STACK // (4 * block_n * max(pair_levels(k), 1)))
        block_m = max(min(tall, next_multiple(m, rows)) // rows, 1) * rows
        block_k = LANES
        if units:  # a block consists of whole parts, or lies in one part if possible
            block_k = min(max((spec.order.block or 1) // LANES, 1) * LANES, 512, next_multiple(k, LANES))
        if aligned:
            block_k = math.lcm(LANES, aligned_unit(spec, k).length)
        return cls(block_m, block_n, block_k, rows)


#: Rows of a tile of the GPU kernel.
MATMUL_GPU_ROWS = 64


@dataclass(frozen=True)
class MatmulGpuTiling(Tiling):
    """Tiles of the GPU kernel, of 64 rows.

    Args:
        block_n: columns of a tile, a multiple of 8.
        block_k: the number of products that a step loads together, even.
    """

    block_n: int
    block_k: int

    MULTIPLES: ClassVar = {"block_n": 8, "block_k": 2}

    @classmethod
    def for_order(cls, order: Any) -> MatmulGpuTiling:
        """The heuristic: a thread has 8 sums, or 4 if it also keeps the sums of each level, or all terms of a block."""
        return cls(8, 4) if order.kind == "pairwise" or order.aligned else cls(16, 4)


def hopper_dot_tiling(plan: MatmulPlan) -> HopperTiling | None:
    """Tiles of the kernel of ``matrix_unit``: a step is a block, filled up to a step of the units; None if none fits.

    The accumulator and the temporaries of a step must stay in registers, also if sums may need integers.
    """
    if (dtype := HOPPER_OPERANDS.get(dot_operand(plan))) is None:
        return None
    itemsize, block = jnp.dtype(dtype).itemsize, min(plan.spec.order.block or 1, plan.k)
    size = next_power_of_two(block * itemsize, _MIN_HOPPER_STEP)
    size = size if size <= HOPPER_ROW_BYTES else next_multiple(block * itemsize, HOPPER_ROW_BYTES)
    total, bias = sum_range(plan.accumulator, plan.dot), plan.carrier.bias
    columns = _DOT_COLUMNS if total.quantum > -bias and total.top <= bias else _DOT_COLUMNS // 2
    stages = min(_HOPPER_MEMORY // (size * (2 * MATMUL_GPU_ROWS + columns)), _MOST_HOPPER_STAGES)
    return HopperTiling(MATMUL_GPU_ROWS, columns, size // itemsize, stages) if stages > 1 else None


#: Bytes of a row of the shortest step, and of all steps in flight, whose number has a limit.
_MIN_HOPPER_STEP, _HOPPER_MEMORY, _MOST_HOPPER_STAGES = 32, 200 << 10, 6
_DOT_COLUMNS = 64


# -- common functions of the kernels -----------------------------------------------------------------------------------

#: Types of operands whose products are exact in float32, the cheapest first, with the range of each.
_NARROW_OPERANDS = {
    "bfloat16": ValueRange(-133, 8, 128),
    "float16": ValueRange(-24, 11, 16),
    "tf32": ValueRange(-136, 11, 128),
}
#: The dtype of these operands on the matrix units of Hopper, which take float32 as tf32.
HOPPER_OPERANDS = {"bfloat16": "bfloat16", "float16": "float16", "tf32": "float32"}


def dot_operand(plan: MatmulPlan, types: tuple[str, ...] = tuple(_NARROW_OPERANDS)) -> str:
    """The narrowest type of operand (a dtype, or ``"tf32"``) that holds every operand, else the carrier's name.

    Products of these operands are exact in float32, and a matrix unit sums them in float32. That is the carrier's dot,
    much faster than with operands of 24 bits.
    """
    if plan.carrier.name == "float32":
        for name in types:
            limits, operand = _NARROW_OPERANDS[name], plan.operand
            if operand.quantum >= limits.quantum and operand.bits <= limits.precision and operand.top <= limits.top:
                return name
    return plan.carrier.name


def int32_loop(begin: Array | int, end: Array | int, body: Callable[[Array, Any], Any], init: Any) -> Any:
    """`lax.fori_loop` with an int32 index, also if both ends are known and 64-bit types are on."""

    def step(state: tuple) -> tuple:
        i, end, carry = state
        return i + 1, end, body(i, carry)

    return lax.while_loop(lambda state: state[0] < state[1], step, (jnp.int32(begin), jnp.int32(end), init))[2]


def aligned_unit(spec: MatmulSpec, k: int) -> TensorCoreUnit:
    """The tensor core of an aligned order, for sums of k products."""
    return TensorCoreUnit(spec, min(spec.order.block or k, k))


def aligned_factors(x: Array, axis: int, unit: TensorCoreUnit) -> list[Array]:
    """Significands and exponents of operands; zeros fill the last block, which change no sum."""
    rest = -x.shape[axis] % unit.length
    with jax.enable_x64(False):  # otherwise some Python numbers would become 64-bit numbers
        parts = aligned.limb_factors(jnp.pad(x, [(0, rest * (i == axis)) for i in range(x.ndim)]), unit)
        return [parts.significand, parts.exponent]


def add_aligned_block(
    sums: tuple[Array, ...],
    lhs: Sequence[list[Array]],
    rhs: Sequence[list[Array]],
    plan: MatmulPlan,
    draw: WordSource | None,
    block: Array,
) -> tuple[Array, ...]:
    """The sums after block number `block`: c alone, or c and the float32 total to which it is promoted.

    Args:
        sums: c, and the total if the order promotes.
        lhs: significand and exponent of the left factor of each product.
        rhs: likewise, of the right factor.
        plan: the arithmetic.
        draw: the random words of the tile, if it draws.
        block: int32 scalar.
    """
    unit, every = aligned_unit(plan.spec, plan.k), plan.spec.order.promote_every
    word = draw("accumulate", block) if draw is not None else None
    x, y = ([aligned.LimbFactors(*parts) for parts in side] for side in (lhs, rhs))
    c = aligned.fused_add_limbs(sums[0], x, y, unit, word)
    if every is None:
        return (c,)
    full_range = carrier_range(plan.carrier)
    following = block + 1
    ends = (lax.rem(following, np.int32(every // unit.length)) == 0) | (following == -(-plan.k // unit.length))
    promoted = add_and_round(sums[1], c, None, plan.carrier, None, full_range, full_range)
    return lax_where(ends, jnp.zeros_like(c), c), lax_where(ends, promoted, sums[1])


def pair_levels(k: int) -> int:
    """The number of partial sums in pairwise order: level l holds a sum of 2^(l+1) products."""
    return (k // 2).bit_length()


def merge_pairs(
    pair: Array, sum_: Array, partial_sum: Callable[[Array], Array], plan: MatmulPlan, draw: WordSource | None
) -> tuple[Array, Array]:
    """Adds every partial sum that the pair of products number `pair` completes to the sum of this pair.

    This is binary counting: the partial sums on the left belong to the bits set in `pair`, and the lowest bits carry.

    Args:
        pair: int32 scalar.
        sum_: A(p + q) of the pair.
        partial_sum: a function from a level (an int32 scalar) to its partial sum.
        plan: the arithmetic.
        draw: the random words of the tile, if it draws.

    Returns:
        The level of the sum, and the sum.
    """

    def carries(state: tuple[Array, Array]) -> Array:
        return (pair >> state[0]) & 1 == 1

    def merge(state: tuple[Array, Array]) -> tuple[Array, Array]:
        level, total = state
        begin = 2 * (pair + 1) - lax.shift_left(np.int32(2), level)  # of the right part
        return level + 1, combine_sums(partial_sum(level), total, plan, draw, begin)

    return lax.while_loop(carries, merge, (jnp.int32(0), sum_))


def finish_pairs(
    last: Array | None, partial_sum: Callable[[Array], Array], plan: MatmulPlan, draw: WordSource | None
) -> Array:
    """The pairwise sum after every pair is merged: the last single product, then the partial sums from the right.

    Args:
        last: the last product if their number is odd and above one.
        partial_sum: as in `merge_pairs`.
        plan: likewise.
        draw: likewise.
    """
    pairs = plan.k // 2
    lowest = (pairs & -pairs).bit_length() - 1
    total = partial_sum(jnp.int32(lowest))
    if last is not None:
        total = accumulate_product(total, last, plan, draw, plan.k - 1)

    def add(level: Array, total: Array) -> Array:
        begin = lax.shift_left(lax.shift_right_logical(jnp.int32(pairs), level), level) * 2
        total_with = combine_sums(partial_sum(level), total, plan, draw, begin)
        return lax_where((pairs >> level) & 1 == 1, total_with, total)

    return int32_loop(lowest + 1, pairs.bit_length(), add, total)


# -- the operation ---------------------------------------------------------------------------------------------------


#: The limit of the inner dimension: steps are counted in int32, blocks after products.
_LONGEST_INNER_DIMENSION = 1 << 30
#: The orders that the kernels know.
_KERNEL_ORDERS = ("sequential", "blocked", "pairwise", "matrix_unit", "aligned", "aligned_apart", "aligned_halves")
#: The longest part of the inner dimension on a TPU that consists of whole blocks.
_LONGEST_TPU_PART = 1024


def _refuse_matmul(a: jax.ShapeDtypeStruct, *_: Any, spec: MatmulSpec) -> str | None:
    if spec.order.kind not in _KERNEL_ORDERS:
        return (
            f"order={str(spec.order)!r} has no kernel: XLA fuses its steps as a kernel would. Kernels: {_KERNEL_ORDERS}"
        )
    if spec.order.aligned and (reason := _refuse_aligned_matmul(a, spec)):
        return reason
    if a.shape[2] >= _LONGEST_INNER_DIMENSION:
        return f"the inner dimension is {a.shape[2]}, and a kernel takes less than 2^30"
    return None


def _refuse_aligned_matmul(a: jax.ShapeDtypeStruct, spec: MatmulSpec) -> str | None:
    if a.dtype != jnp.float32:
        return f"the operands have dtype {a.dtype.name}, and kernels of order={str(spec.order)!r} take float32"
    if spec.group:
        return f"operands={str(spec.operands)!r} have scales, and kernels of order={str(spec.order)!r} have none"
    if not aligned_unit(spec, a.shape[2]).exact_floats:
        return f"operands={str(spec.operands)!r} have products of more than 24 bits, which kernels do not align"
    return None


def _refuse_tpu_matmul(a: jax.ShapeDtypeStruct, *_: Any, spec: MatmulSpec) -> str | None:
    if a.dtype != jnp.float32:
        return f"the operands have dtype {a.dtype.name}, and the TPU kernel takes float32"
    block = aligned_unit(spec, max(a.shape[2], 1)).length if spec.order.aligned else 1
    if math.lcm(block, LANES) > _LONGEST_TPU_PART:
        return f"order={str(spec.order)!r}: blocks of {block} products do not fill parts of up to {_LONGEST_TPU_PART}"
    return _refuse_matmul(a, spec=spec)


def _refuse_gpu_matmul(a: jax.ShapeDtypeStruct, b: Any, *_: Any, spec: MatmulSpec) -> str | None:
    if spec.order.kind == "matrix_unit":
        return f"order={str(spec.order)!r} has a kernel of its own"
    return refuse_mosaic_gpu(a=a.dtype) or refuse_large(a=a.size, b=b.size) or _refuse_matmul(a, spec=spec)


def refuse_dots(a: jax.ShapeDtypeStruct, b: Any, *_: Any, spec: MatmulSpec) -> str | None:
    """The reason against the kernel of ``matrix_unit`` for operands, or None."""
    if spec.order.kind != "matrix_unit":
        return f"order={str(spec.order)!r} is not summed by matrix units"
    if reason := refuse_mosaic_gpu(a=a.dtype) or refuse_large(a=a.size, b=b.size) or _refuse_matmul(a, spec=spec):
        return reason
    plan = MatmulPlan(spec, CARRIERS[a.dtype.name], max(a.shape[2], 1))
    if hopper_dot_tiling(plan) is None:
        operands = "operands=None" if spec.operands is None else f"operands={str(spec.operands)!r}"
        return (
            f"{operands}, order={str(spec.order)!r}: kernels take bfloat16, float16 or tf32, and two blocks at a time"
        )
    return None


matmul_op = make_op(
    "jchop_matmul",
    matmul_body,
    tpu=Kernel(kernel_function("products.matmul_tpu", "tpu_matmul"), _refuse_tpu_matmul),
    gpu=(
        Kernel(
            kernel_function("products.matmul_hopper", "hopper_matmul_of_dots"),
            refuse_dots,
            capability=lambda *_, **__: HOPPER_CAPABILITY,
            below=BLACKWELL_CAPABILITY,
        ),
        Kernel(
            kernel_function("products.matmul_gpu", "gpu_matmul"), _refuse_gpu_matmul, capability=mosaic_gpu_capability
        ),
    ),
    by_backend=True,
)
