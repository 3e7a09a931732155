"""The tiles of the rounding kernels, and the rounding of a tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check_int
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.random_bits import SEEDS, random_words
from jchop._spec.spec import Spec

__all__ = [
    "ROUND_LANES",
    "KernelStream",
    "RoundGpuTiling",
    "RoundTpuTiling",
    "elementwise_under_vmap",
    "register_rows",
    "result_like",
    "round_array_tile",
]

Array = jax.Array

# -- tilings -----------------------------------------------------------------------------------------------------------

ROUND_LANES = 128  # of a TPU's vector register; it has 8 rows of them, 16 of 16-bit numbers


def register_rows(itemsize: int) -> int:
    """Rows of a TPU register of numbers of `itemsize` bytes."""
    return 32 // itemsize


@dataclass(frozen=True)
class RoundTpuTiling:
    """Blocks of an array of (slabs, rows, columns), from `round_tpu.as_slabs`.

    Args:
        slabs: slabs of a block.
        rows: its rows, a multiple of `chunk`.
        columns: its columns, a multiple of 128; 128 for an array of one axis, which is read as rows of 128.
        chunk: rows in registers at a time, a multiple of 8 (16 for bfloat16).
    """

    slabs: int
    rows: int
    columns: int
    chunk: int

    def __post_init__(self) -> None:
        for name, unit in (("slabs", 1), ("chunk", 8), ("rows", self.chunk), ("columns", ROUND_LANES)):
            value = check_int(name, getattr(self, name), 1)
            if value % unit:
                raise ValueError(f"{name}={value} must be a multiple of {unit}")

    @classmethod
    def for_shape(cls, shape: tuple[int, ...], itemsize: int) -> RoundTpuTiling:
        """The heuristic for an array of shape (slabs, rows, columns).

        A block of 1 MiB amortises the cost of a grid step. Two input blocks and two output blocks take 4 of 16 MiB. A
        smaller array has 8 blocks, so that copies and arithmetic overlap. A chunk of 8 registers gives the vector units
        independent work, and leaves room for intermediate results.
        """
        least = register_rows(itemsize)
        slabs, rows, columns = shape
        area = min(max(math.prod(shape) // 8, _CHUNK_ELEMENTS), _BLOCK_BYTES // itemsize)
        wide = min(_next_round_multiple(columns, ROUND_LANES), _CHUNK_ELEMENTS // least)
        chunk = min(_CHUNK_ELEMENTS // wide // least * least, _next_round_multiple(rows, least))
        tall = min(_next_round_multiple(rows, chunk), area // wide // chunk * chunk)
        return cls(min(slabs, area // (tall * wide)), tall, wide, chunk)


_CHUNK_ELEMENTS = 8 * 8 * ROUND_LANES  # elements
_BLOCK_BYTES = 1 << 20  # bytes


@dataclass(frozen=True)
class RoundGpuTiling:
    """Programs of a GPU kernel.

    Args:
        block: elements of a program, a power of two of at least 128.
        num_warps: its warps of 32 threads, a power of two.
    """

    block: int
    num_warps: int = 4

    def __post_init__(self) -> None:
        for name, least in (("block", 128), ("num_warps", 1)):
            value = check_int(name, getattr(self, name), least)
            if value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")

    @classmethod
    def for_size(cls, size: int, itemsize: int) -> RoundGpuTiling:
        """The heuristic.

        With 8 KiB for each program, a thread has four vectors of 16 bytes in flight. A smaller array is spread over the
        multiprocessors, with at least one vector for each thread.
        """
        block = 1 << max(size // _ROUND_PROGRAMS, 1).bit_length()
        return cls(min(max(block, 2048 // itemsize), 8192 // itemsize))


_ROUND_PROGRAMS = 256  # about two for each multiprocessor of a large GPU


def _next_round_multiple(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def result_like(x: Array, words: Sequence[Array]) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `x`, and the mesh axes along which `x` or the drawn words vary."""
    like = jax.eval_shape(lambda x, *rest: x + sum(jnp.sum(part).astype(x.dtype) for part in rest), x, *words)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=like.manual_axis_type)


def elementwise_under_vmap(fun: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """An elementwise function of one array; under vmap it gets the whole array."""
    call = jax.custom_batching.custom_vmap(fun)
    call.def_vmap(lambda size, batch_flags, x: (call(x), True))
    return call


# -- a tile ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelStream:
    """The random stream, as scalars in a kernel.

    Args:
        seeds: the six words of `seed_words`.
        start: low and high word of the index of the array's first element; None for 0.
    """

    seeds: Sequence[Array]
    start: tuple[Array, Array] | None = None

    @classmethod
    def read(cls, refs: Sequence[Any]) -> KernelStream | None:
        """The stream from references of the seeds, or of the seeds and the start; None without references."""
        if not refs:
            return None
        seeds, *start = refs
        return cls([seeds[i] for i in range(SEEDS)], (start[0][0], start[0][1]) if start else None)

    def words(self, first: Array, local: Array, width: int) -> Array:
        """The words, of 32 or 64 bits, of the array's elements `first + local`; both uint32."""
        low, high = self._index(first, local)
        word = random_words(self.seeds, low, high)
        if width == 32:
            return word
        return (word.astype(jnp.uint64) << 32) | random_words(self.seeds, low, high, lane=1).astype(jnp.uint64)

    def _index(self, first: Array, local: Array) -> tuple[Array, Any]:
        if self.start is None:
            return first + local, 0
        base, high = self.start[0] + first, self.start[1]
        high = high + (base < first).astype(jnp.uint32)
        low = base + local
        return low, high + (low < base).astype(jnp.uint32)


def round_array_tile(x: Array, spec: Spec, stream: KernelStream | None, first: Array, local: Array) -> Array:
    """A tile, rounded; `first + local` are the C-order indexes of its elements in the array."""
    carrier = CARRIERS[x.dtype.name]
    return round_to_spec(x, spec, carrier, stream and stream.words(first, local, carrier.work_width))
