"""The tiles of the kernels of the matrix product, and the kernels' common functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common.checks import check_int
from jchop._core.arithmetic.basic import add_and_round
from jchop._core.arithmetic.ranges import ValueRange, carrier_range, sum_range
from jchop._core.matmul import aligned
from jchop._core.matmul.aligned import TensorCoreUnit
from jchop._core.matmul.matmul import MatmulPlan, WordSource, accumulate_product, combine_sums
from jchop._spec.accumulation import MatmulSpec

__all__ = [
    "MIN_DOT_SIDE",
    "MatmulGpuTiling",
    "MatmulTpuTiling",
    "add_aligned_block",
    "aligned_factors",
    "aligned_unit",
    "dot_length",
    "dot_operand",
    "finish_pairs",
    "int32_loop",
    "matmul_result_type",
    "merge_pairs",
    "pair_levels",
]

Array = jax.Array

# -- tilings -----------------------------------------------------------------------------------------------------------

_MATMUL_LANES, _MATMUL_SUBLANES = 128, 8


@dataclass(frozen=True)
class MatmulTpuTiling:
    """Tiles of the TPU kernel.

    Args:
        block_m: rows of an output tile, a multiple of `rows`.
        block_n: its columns, a multiple of 128.
        block_k: length of the part of the inner dimension on chip at a time, a multiple of 128.
        rows: rows of the chunk of a tile that stays in registers through those steps, a multiple of 8.
    """

    block_m: int
    block_n: int
    block_k: int
    rows: int

    #: Elements of a chunk: four registers, to keep the vector units busy and leave room for temporaries.
    _CHUNK = 4 * _MATMUL_SUBLANES * _MATMUL_LANES
    #: The most bytes of the partial sums of pairwise order; a chip has 16 MiB.
    _STACK = 4 << 20

    def __post_init__(self) -> None:
        check_int("rows", self.rows, 1)
        for name, unit in (
            ("rows", _MATMUL_SUBLANES),
            ("block_m", self.rows),
            ("block_n", _MATMUL_LANES),
            ("block_k", _MATMUL_LANES),
        ):
            if check_int(name, getattr(self, name), 1) % unit:
                raise ValueError(f"{name}={getattr(self, name)} must be a multiple of {unit}")

    @classmethod
    def for_shape(cls, m: int, n: int, k: int, spec: MatmulSpec) -> MatmulTpuTiling:
        """The heuristic.

        A step of an elementwise order takes tens to hundreds of vector operations for each element, so arithmetic
        limits it for every tile; a wide chunk shares the broadcast of its column of `a`. For a matrix unit, nearly
        square tiles are best.
        """
        units = spec.order.kind == "matrix_unit"
        block_n = min(
            256 if units else _MATMUL_LANES if spec.order.aligned else 512, _next_matmul_multiple(n, _MATMUL_LANES)
        )
        chunk = (
            _MATMUL_SUBLANES * _MATMUL_LANES if spec.order.aligned else cls._CHUNK
        )  # many terms of an element are alive together
        rows = min(chunk // block_n // _MATMUL_SUBLANES * _MATMUL_SUBLANES, _next_matmul_multiple(m, _MATMUL_SUBLANES))
        tall = 256
        if spec.order.kind == "pairwise":
            tall = min(tall, cls._STACK // (4 * block_n * max(pair_levels(k), 1)))
        block_m = max(min(tall, _next_matmul_multiple(m, rows)) // rows, 1) * rows
        # A unit's block consists of whole parts, or lies in one part if possible.
        block_k = (
            min(
                max((spec.order.block or 1) // _MATMUL_LANES, 1) * _MATMUL_LANES,
                512,
                _next_matmul_multiple(k, _MATMUL_LANES),
            )
            if units
            else _MATMUL_LANES
        )
        if spec.order.aligned:
            block_k = math.lcm(_MATMUL_LANES, aligned_unit(spec, k).length)
        return cls(block_m, block_n, block_k, rows)


@dataclass(frozen=True)
class MatmulGpuTiling:
    """Tiles of the GPU kernel, one program each.

    Args:
        block_m: rows of an output tile, a power of two (at least 16 for ``matrix_unit``).
        block_n: its columns, likewise.
        block_k: longest part of a block that one tile product of ``matrix_unit`` takes, likewise; in the other orders,
            the number of products that a step loads together.
        num_warps: warps of 32 threads in a program, a power of two.
        num_stages: the number of loads of a ``matrix_unit`` block that may be in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value = check_int(name, getattr(self, name), 1)
            if value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")
        check_int("num_stages", self.num_stages, 1)

    @classmethod
    def for_shape(cls, batch: int, m: int, n: int, plan: MatmulPlan) -> MatmulGpuTiling:
        """The heuristic: the largest tile of a list that gives work to every multiprocessor.

        The accumulator and the temporaries of a step must stay in registers. That allows 8 elements for each thread (4
        for float64, and in pairwise order, which also keeps a partial sum of every level); for ``matrix_unit`` 32, or
        16 if its sums may need integer arithmetic.
        """
        tiles = _matmul_gpu_tiles(plan)
        for tile in tiles:
            if batch * _parts_of_length(m, tile.block_m) * _parts_of_length(n, tile.block_n) >= _MATMUL_PROGRAMS:
                return tile
        return tiles[-1]


#: Programs that fill a large GPU: about two for each multiprocessor.
_MATMUL_PROGRAMS = 256
_STEP_GPU_TILES = (
    MatmulGpuTiling(32, 64, 8, num_warps=8),
    MatmulGpuTiling(32, 32, 8, num_warps=4),
    MatmulGpuTiling(16, 32, 8, num_warps=4),
)
#: All terms of a block are alive together, so a thread has 2 elements.
_ALIGNED_GPU_TILES = (MatmulGpuTiling(16, 32, 1, num_warps=8), MatmulGpuTiling(16, 16, 1, num_warps=4))
_DOT_GPU_TILES = (
    MatmulGpuTiling(64, 128, 64, num_warps=8, num_stages=3),
    MatmulGpuTiling(64, 64, 64, num_warps=8, num_stages=3),
    MatmulGpuTiling(32, 32, 64, num_warps=4, num_stages=3),
)
#: Tile products without tensor cores, or with operands of 32 bits, have less room.
_WIDE_DOT_GPU_TILES = {
    "tf32": (MatmulGpuTiling(64, 64, 32, num_warps=8), MatmulGpuTiling(32, 32, 32)),
    "float32": (MatmulGpuTiling(64, 64, 32, num_warps=8), MatmulGpuTiling(32, 32, 32)),
    "float64": (MatmulGpuTiling(32, 32, 16),),
}


def _matmul_gpu_tiles(plan: MatmulPlan) -> tuple[MatmulGpuTiling, ...]:
    if plan.spec.order.kind == "matrix_unit":
        total, bias = sum_range(plan.accumulator, plan.dot), plan.carrier.bias
        light = total.quantum > -bias and total.top <= bias
        return _WIDE_DOT_GPU_TILES.get(dot_operand(plan)) or (_DOT_GPU_TILES if light else _DOT_GPU_TILES[1:])
    if plan.spec.order.aligned:
        return _ALIGNED_GPU_TILES
    narrow = plan.spec.order.kind == "pairwise" or plan.carrier.width == 64
    return tuple(replace(tile, block_m=tile.block_m // 2) for tile in _STEP_GPU_TILES) if narrow else _STEP_GPU_TILES


def _parts_of_length(length: int, part: int) -> int:
    return -(-length // part)


def _next_matmul_multiple(length: int, unit: int) -> int:
    return _parts_of_length(length, unit) * unit


# -- common functions of the kernels -----------------------------------------------------------------------------------

#: The shortest side of a tile product on a GPU.
MIN_DOT_SIDE = 16
#: Types of operands whose products are exact in float32, the cheapest first, with the range of each.
_NARROW_OPERANDS = {
    "bfloat16": ValueRange(-133, 8, 128),
    "float16": ValueRange(-24, 11, 16),
    "tf32": ValueRange(-136, 11, 128),
}


def dot_operand(plan: MatmulPlan, types: tuple[str, ...] = tuple(_NARROW_OPERANDS)) -> str:
    """The narrowest type of operand (a dtype, or ``"tf32"``) that holds every operand, else the carrier's name.

    Products of such operands are exact in float32, and a matrix unit sums them in float32. That is the carrier's dot,
    much faster than with operands of 24 bits.
    """
    if plan.carrier.name == "float32":
        for name in types:
            limits, operand = _NARROW_OPERANDS[name], plan.operand
            if operand.quantum >= limits.quantum and operand.bits <= limits.precision and operand.top <= limits.top:
                return name
    return plan.carrier.name


def matmul_result_type(a: Array, b: Array, seeds: Array | None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the product, and the mesh axes along which any argument varies."""

    def like(a: Array, b: Array, *seeds: Array) -> Array:
        return jnp.matmul(a, b) + sum(jnp.sum(seed).astype(a.dtype) for seed in seeds)

    struct = jax.eval_shape(like, a, b, *([] if seeds is None else [seeds]))
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, manual_axis_type=struct.manual_axis_type)


def int32_loop(begin: Array | int, end: Array | int, body: Callable[[Array, Any], Any], init: Any) -> Any:
    """`lax.fori_loop` with an int32 index, also if both ends are known and 64-bit types are on."""

    def step(state: tuple) -> tuple:
        i, end, carry = state
        return i + 1, end, body(i, carry)

    return lax.while_loop(lambda state: state[0] < state[1], step, (jnp.int32(begin), jnp.int32(end), init))[2]


def dot_length(block: int) -> int:
    """The least length to which a short block is padded for a tile product on a GPU."""
    return max(1 << (block - 1).bit_length(), MIN_DOT_SIDE)


def aligned_unit(spec: MatmulSpec, k: int) -> TensorCoreUnit:
    """The tensor core of an aligned order, for sums of k products."""
    return TensorCoreUnit(spec, min(spec.order.block or k, k))


def aligned_factors(x: Array, axis: int, unit: TensorCoreUnit) -> list[Array]:
    """Significands and exponents of operands; zeros fill the last block, which change no sum."""
    rest = -x.shape[axis] % unit.length
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
        rhs: those of the right factors.
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
    return jnp.where(ends, 0, c), jnp.where(
        ends, add_and_round(sums[1], c, None, plan.carrier, None, full_range, full_range), sums[1]
    )


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
        return jnp.where((pairs >> level) & 1 == 1, combine_sums(partial_sum(level), total, plan, draw, begin), total)

    return int32_loop(lowest + 1, pairs.bit_length(), add, total)
