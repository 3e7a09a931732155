"""The tiles of the kernels of scaled blocks, and the words that they get beside the array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from jchop._core.rounding.random_bits import SEEDS, StreamOffset, add_word_pairs, random_words_of_width, split_index
from jchop._core.scaled.elements import ScaledPlan, scale_dtype
from jchop._core.xla.backend import TILE
from jchop._kernels.tiles import LANES, WARP_LANES, WARPS, Tiling

# -- the problem of a kernel -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledBlocksProblem:
    """An array as (outer, size, inner), with its blocks along the middle; inner is 1 if that is the last axis.

    Args:
        plan: a plan of a format whose groups are blocks along one axis, or whole rows.
        shape: the shape of the array.
        axis: the axis along the blocks, not negative.
        block: the length of a block.
    """

    plan: ScaledPlan
    shape: tuple[int, ...]
    axis: int
    block: int

    @classmethod
    def of(cls, x: Any, plan: ScaledPlan) -> ScaledBlocksProblem:
        """The problem of an array, or of its shape and dtype."""
        shape, group, axis = tuple(x.shape), plan.fmt.group, plan.fmt.axis
        if isinstance(group, int) and isinstance(axis, int):
            axis, block = axis % len(shape), group
        else:
            axis, block = len(shape) - 1, shape[-1]
        return cls(replace(plan, backend=TILE), shape, axis, block)

    @property
    def last(self) -> bool:
        """Whether the blocks are along the last axis."""
        return self.axis == len(self.shape) - 1

    @property
    def outer(self) -> int:
        """The count of numbers before the axis of the blocks."""
        return math.prod(self.shape[: self.axis])

    @property
    def size(self) -> int:
        """The length of the axis of the blocks."""
        return self.shape[self.axis]

    @property
    def inner(self) -> int:
        """The count of numbers after the axis of the blocks, which lie side by side."""
        return math.prod(self.shape[self.axis + 1 :])

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
        if self.axis < len(self.shape) - 2 and self.shape[-1] * self.bits % 8:
            return (
                f"the last axis of length {self.shape[-1]} does not fill whole bytes with codes of {self.bits} bits, "
                "and the blocks do not lie along one of the last two axes"
            )
        return None


# -- tilings -----------------------------------------------------------------------------------------------------------

#: Rows of codes of 8 bits in a register of a TPU.
CODE_SUBLANES = 32


@dataclass(frozen=True)
class ScaledTpuTiling(Tiling):
    """Tiles of the TPU kernels.

    Args:
        blocks: blocks of a tile, along their axis: a multiple of `unit`.
        lanes: lanes of a tile, along the other axis: a multiple of 128, and of bytes of codes. If the blocks are along
            the last axis, lanes are rows of the array, which the kernel transposes.
    """

    blocks: int
    lanes: int

    MULTIPLES: ClassVar = {"blocks": 1, "lanes": LANES}
    #: Elements of one unrolled iteration of a tile's loop: 32 vector registers.
    _STEP = 1 << 15
    #: Bytes of a tile of the array; for this size the pipeline's costs are small.
    _TILE = 1 << 20
    #: Scales of longer blocks are stored in 32 bits: there are few, and they need a smaller part of a tile then.
    _LONG = 64

    @classmethod
    def for_shape(cls, problem: ScaledBlocksProblem) -> ScaledTpuTiling:
        """The heuristic: about a MiB of the array."""
        lanes = LANES if problem.last else LANES * problem.codes_of_whole_bytes
        unit = cls(1, lanes).unit(problem)
        return cls(unit * max(1, cls._TILE // (problem.block * lanes * 4 * unit)), lanes)

    def step(self, problem: ScaledBlocksProblem) -> int:
        """The number of blocks in one iteration of the tile's loop: whole tiles of codes, several if they are small."""
        whole = LANES * problem.codes_of_whole_bytes if problem.last else CODE_SUBLANES
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


@dataclass(frozen=True)
class ScaledGpuTiling(Tiling):
    """Tiles of the GPU kernels: rows of words of consecutive numbers, for one warpgroup of 128 threads.

    If the blocks are along the last axis, a row is a block, or a part of the one long block of a tile. Otherwise the
    rows are the rows of one block, and a word has numbers of neighbouring blocks.

    Args:
        rows: rows of a tile.
        words: its words in a row.
        numbers: numbers of a word, whose codes are stored together, 2, 4 or 8.
        lanes: the threads of a warp along the words, a power of two; the others, and the warps, are along the rows.
    """

    rows: int
    words: int
    numbers: int
    lanes: int

    MULTIPLES: ClassVar = {"rows": 1, "words": 1}
    POWERS: ClassVar = {"numbers": 2, "lanes": 1}
    #: The most numbers of a thread, which are in registers, and the number that gives enough loads.
    _MOST, _ENOUGH = 48, 16
    #: The most numbers of a word if a block is divided among warps, which exchange their maxima.
    _LONGEST_WORD_ACROSS = 4

    @classmethod
    def for_shape(cls, problem: ScaledBlocksProblem, quantizes: bool) -> ScaledGpuTiling | None:
        """The heuristic: words of at most 32 bits, as long as they can be; None if no tile fits."""
        bits = problem.bits if quantizes else 8
        if problem.size % problem.block or not problem.inner * problem.outer:
            return None
        whole = (numbers for numbers in (8, 4, 2) if numbers * bits % 8 == 0 and numbers * bits <= 32)
        return next(filter(None, (cls._of_words(problem, numbers) for numbers in whole)), None)

    @classmethod
    def _of_words(cls, problem: ScaledBlocksProblem, numbers: int) -> ScaledGpuTiling | None:
        """The tiling with words of `numbers` elements; None if they do not fit the blocks."""
        block, most = problem.block, cls._MOST >> problem.plan.element.rounding.stochastic
        if not problem.last:
            fits = numbers <= cls._LONGEST_WORD_ACROSS and block % WARPS == 0 and block // WARPS * numbers <= most
            wide = problem.inner % numbers == 0 and problem.inner // numbers >= WARP_LANES
            return cls(block, WARP_LANES, numbers, WARP_LANES) if fits and wide else None
        words, rest = divmod(block, numbers)
        if block > cls._ENOUGH * WARP_LANES:  # a tile has one block
            whole = block % (WARPS * WARP_LANES * numbers) == 0 and block // (WARPS * WARP_LANES) <= most
            return cls(words // WARP_LANES, WARP_LANES, numbers, WARP_LANES) if whole else None
        lanes = math.gcd(words, WARP_LANES)
        lanes = next((few for few in (4, 8, 16) if few <= lanes and block // few <= cls._ENOUGH), lanes)
        rows = WARPS * WARP_LANES // lanes
        fits = not rest and block // lanes <= most and problem.outer * problem.blocks >= rows
        return cls(rows, words, numbers, lanes) if fits else None

    def has_one_block(self, problem: ScaledBlocksProblem) -> bool:
        """Whether a tile has one block along the last axis, as several rows."""
        return problem.last and problem.block > self.words * self.numbers


# -- words beside the array --------------------------------------------------------------------------------------------

#: The places of the words that a kernel gets beside the array: the tensor's scale, six seeds, and the low and the high
#: word of the first element's index in the random stream.
_TENSOR_WORD, _SEED_WORD, _START_WORD = 0, 1, 1 + SEEDS


def kernel_words(tensor: Array | None, seeds_and_starts: Sequence[Array], place: StreamOffset) -> Array:
    """The tensor's scale, the seeds and the start of an array for kernels: a row of nine words, zero if unused."""
    scale = jnp.zeros(1, jnp.uint32) if tensor is None else lax.bitcast_convert_type(tensor, jnp.uint32)[None]
    if not seeds_and_starts:
        return jnp.pad(scale, (0, _START_WORD + 1))[None]
    return jnp.concatenate(
        [scale, jnp.stack(seeds_and_starts[:SEEDS]), _stream_start(seeds_and_starts[SEEDS:], place)]
    )[None]


def _stream_start(starts: Sequence[Array], place: StreamOffset) -> Array:
    """The index of an array's first element in the random stream, as low and high word."""
    start = split_index(starts[0] if starts else jnp.uint32(0))
    base = jnp.uint32(place.base & 0xFFFF_FFFF), jnp.uint32(place.base >> 32)
    return jnp.stack(add_word_pairs(start, base))


def draw_tile_words(words: Any, index: Array, plan: ScaledPlan) -> Array | None:
    """The random words, of 32 or 64 bits, of elements with these indexes (uint32) in the array; None if none draws."""
    if not plan.element.rounding.stochastic:
        return None
    seeds = [words[0, _SEED_WORD + i] for i in range(SEEDS)]
    low = words[0, _START_WORD] + index
    high = words[0, _START_WORD + 1] + (low < index).astype(jnp.uint32)
    return random_words_of_width(seeds, low, high, plan.compute.work_width)


def tensor_scale_of_words(words: Any, plan: ScaledPlan) -> Array | None:
    """The bits of the tensor's scale, if the rule has one."""
    return words[0, _TENSOR_WORD].astype(jnp.int32) if plan.rule.tensor_scale else None
