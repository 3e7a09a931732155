"""The tiles of the kernels of scaled blocks, and the words that they get beside the array."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jchop._common.checks import check_int
from jchop._core.rounding.random_bits import SEEDS
from jchop._core.scaled.elements import ScaledPlan, scale_dtype
from jchop._core.xla.backend import TILE
from jchop._kernels.round_tile import KernelStream

__all__ = [
    "CODE_SUBLANES",
    "KERNEL_WORD_COUNT",
    "TENSOR_WORD",
    "ScaledBlocksProblem",
    "ScaledGpuTiling",
    "ScaledTpuTiling",
    "kernel_stream",
]

# -- the problem of a kernel -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledBlocksProblem:
    """An array as (outer, size, inner), with its blocks along the middle; inner is 1 if that is the last axis.

    Args:
        plan: a plan of a format whose groups are blocks along one axis, or whole rows.
        shape: the shape of the array.
    """

    plan: ScaledPlan
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Any, plan: ScaledPlan) -> ScaledBlocksProblem:
        """The problem of an array, or of its shape and dtype."""
        return cls(replace(plan, backend=TILE), tuple(x.shape))

    @property
    def axis(self) -> int:
        axis = self.plan.fmt.axis if self._has_blocks else -1
        assert isinstance(axis, int)
        return axis % len(self.shape)

    @property
    def _has_blocks(self) -> bool:
        """Whether the format has blocks of a given length; else a group is a row."""
        return isinstance(self.plan.fmt.group, int) and isinstance(self.plan.fmt.axis, int)

    @property
    def last(self) -> bool:
        """Whether the blocks are along the last axis."""
        return self.axis == len(self.shape) - 1

    @property
    def outer(self) -> int:
        return math.prod(self.shape[: self.axis])

    @property
    def size(self) -> int:
        return self.shape[self.axis]

    @property
    def inner(self) -> int:
        return math.prod(self.shape[self.axis + 1 :])

    @property
    def block(self) -> int:
        block = self.plan.fmt.group if self._has_blocks else self.shape[-1]
        assert isinstance(block, int)
        return block

    @property
    def blocks(self) -> int:
        """Blocks along the axis."""
        return -(-self.size // self.block)

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.plan.element.format.bits

    @property
    def codes_of_whole_bytes(self) -> int:
        """The least number of codes that fill whole bytes."""
        return 8 // math.gcd(8, self.bits)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape of the packed codes."""
        return (*self.shape[:-1], -(-self.shape[-1] * self.bits // 8))

    @property
    def scales_shape(self) -> tuple[int, ...]:
        return self.plan.fmt.scale_shape(self.shape)

    @property
    def scale_dtype(self) -> jnp.dtype:
        return scale_dtype(self.plan.scale)

    def packs_in_view(self) -> str | None:
        """The reason why packed rows of the array differ from packed rows of the view, or None."""
        rows_merge = self.axis < len(self.shape) - 2 and self.shape[-1] * self.bits % 8
        if rows_merge:
            return (
                f"the last axis of length {self.shape[-1]} does not fill whole bytes with codes of {self.bits} bits, "
                "and the blocks do not lie along one of the last two axes"
            )
        return None


# -- tilings -----------------------------------------------------------------------------------------------------------

_SCALED_LANES, CODE_SUBLANES = 128, 32


@dataclass(frozen=True)
class ScaledTpuTiling:
    """Tiles of the TPU kernels.

    Args:
        blocks: blocks of a tile, along their axis: a multiple of `unit`.
        lanes: lanes of a tile, along the other axis: a multiple of 128. If the blocks are along the last axis, lanes
            are rows of the array, which the kernel transposes.
    """

    blocks: int
    lanes: int

    #: Elements of one unrolled iteration of a tile's loop: 32 vector registers.
    _STEP = 1 << 15
    #: Bytes of a tile of the array; for this size the pipeline's costs are small.
    _TILE = 1 << 20
    #: Scales of longer blocks are stored in 32 bits: there are few, and they need a smaller part of a tile then.
    _LONG = 64

    def __post_init__(self) -> None:
        check_int("blocks", self.blocks, 1)
        check_int("lanes", self.lanes, 1)
        if self.lanes % _SCALED_LANES:
            raise ValueError(f"lanes={self.lanes} must be a multiple of {_SCALED_LANES}")

    @classmethod
    def for_shape(cls, problem: ScaledBlocksProblem) -> ScaledTpuTiling:
        """The heuristic: about a MiB of the array."""
        lanes = _SCALED_LANES if problem.last else _SCALED_LANES * problem.codes_of_whole_bytes
        unit = cls(1, lanes).unit(problem)
        return cls(unit * max(1, cls._TILE // (problem.block * lanes * 4 * unit)), lanes)

    def step(self, problem: ScaledBlocksProblem) -> int:
        """The number of blocks in one iteration of the tile's loop: whole tiles of codes, several if they are small."""
        whole = _SCALED_LANES * problem.codes_of_whole_bytes if problem.last else CODE_SUBLANES
        count = math.lcm(problem.block, whole) // problem.block
        while 2 * count * problem.block * self.lanes <= self._STEP:
            count *= 2
        return count

    def scale_dtype(self, problem: ScaledBlocksProblem) -> jnp.dtype:
        """The dtype in which the kernel stores scales."""
        return problem.scale_dtype if problem.block <= self._LONG else jnp.dtype(jnp.int32)

    def unit(self, problem: ScaledBlocksProblem) -> int:
        """The unit of `blocks`: a multiple of an iteration, and of a tile of the scales."""
        return math.lcm(self.step(problem), CODE_SUBLANES // self.scale_dtype(problem).itemsize)

    def misfit(self, problem: ScaledBlocksProblem) -> str | None:
        """Why the tiles do not fit a problem, or None."""
        lanes, unit = (
            _SCALED_LANES if problem.last else _SCALED_LANES * problem.codes_of_whole_bytes,
            self.unit(problem),
        )
        if self.lanes % lanes:
            return f"lanes={self.lanes} is no multiple of {lanes}"
        return f"blocks={self.blocks} is no multiple of {unit}" if self.blocks % unit else None


@dataclass(frozen=True)
class ScaledGpuTiling:
    """Tiles of the GPU kernels, one program each.

    Args:
        blocks: blocks of a tile, a power of two; 1 if they are not along the last axis.
        lanes: columns of a tile, a power of two; 1 if the blocks are along the last axis.
        num_warps: warps of a program, a power of two.
    """

    blocks: int
    lanes: int
    num_warps: int

    def __post_init__(self) -> None:
        for name in ("blocks", "lanes", "num_warps"):
            value = check_int(name, getattr(self, name), 1)
            if value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")

    @classmethod
    def for_shape(cls, problem: ScaledBlocksProblem) -> ScaledGpuTiling:
        """The heuristic.

        Along rows, a tile has 2048 elements, 16 for each thread, so that one or a few threads reduce a block. Down
        columns, 128 columns make a warp of threads with four neighbours each, which reduce their part of a block in
        registers. For 64-bit numbers, for rows of codes of which eight are stored together, and for columns under
        stochastic rounding, a tile has half as many elements, because of the registers. Longer rows have more warps.
        """
        padded_block, half = cls.padded_length(problem), problem.plan.compute.width // 64
        if problem.last:
            blocks = max((2048 >> (half + (problem.codes_of_whole_bytes == 8))) // padded_block, 1)
            return cls(blocks, 1, max(padded_block // 1024, 4))
        columns, is_stochastic = max(_power_of_two_length(problem.inner), 16), problem.plan.element.rounding.stochastic
        return cls(1, max(min((4096 >> (half + is_stochastic)) // padded_block, 128, columns), 16), 4)

    @staticmethod
    def padded_length(problem: ScaledBlocksProblem) -> int:
        """A block's length in a tile, a power of two."""
        return _power_of_two_length(min(problem.block, problem.size))

    def misfit(self, problem: ScaledBlocksProblem) -> str | None:
        """Why the tiles do not fit a problem, or None."""
        name, value = ("lanes", self.lanes) if problem.last else ("blocks", self.blocks)
        if value != 1:
            return f"{name}={value} must be 1 for blocks along axis {problem.plan.fmt.axis}"
        if not problem.last and self.lanes % problem.codes_of_whole_bytes:
            return f"lanes={self.lanes} is no multiple of {problem.codes_of_whole_bytes}"
        return None


def _power_of_two_length(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


# -- words beside the array --------------------------------------------------------------------------------------------

#: The places of the words that a kernel gets beside the array: the tensor's scale, six seeds, and the low and the high
#: word of the first element's index in the random stream.
TENSOR_WORD, _SEED_WORD, _START_WORD = 0, 1, 1 + SEEDS
KERNEL_WORD_COUNT = _START_WORD + 2


def kernel_stream(words: Any) -> KernelStream:
    """The random stream of the words of a kernel."""
    return KernelStream(
        [words[0, _SEED_WORD + i] for i in range(SEEDS)], (words[0, _START_WORD], words[0, _START_WORD + 1])
    )
