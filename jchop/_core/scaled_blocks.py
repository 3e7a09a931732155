"""Blocks along one axis of arrays, quantized and back: the bodies of the operations that have kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._bits import CARRIERS
from jchop._core.rounding.codes import pack, unpack
from jchop._core.rounding.stream_offset import AT_START, StreamOffset, words_like
from jchop._core.scaled.elements import widen
from jchop._core.scaled.scales import Plan, Scales, choose_scales, load_scales, make_plan, store_scales
from jchop._core.scaled_float32 import select
from jchop._core.xla_cpu import maximum
from jchop.scaling import BlockScaling

Array = jax.Array


def split_arrays(scaling: BlockScaling, arrays: Sequence[Array]) -> tuple[Array | None, tuple[Array, ...]]:
    """What follows the array among an operation's: the bits of the tensor's scale, if any, and what was drawn."""
    if scaling.rule == "two_level":
        return lax.bitcast_convert_type(arrays[0], jnp.int32), tuple(arrays[1:])
    return None, tuple(arrays)


def round_blocks_body(
    x: Array,
    *arrays: Array,
    scaling: BlockScaling,
    place: StreamOffset = AT_START,
    tiling: object = None,
    branch_allowed: bool = False,
) -> Array:
    """`x` quantized and dequantized in blocks.

    Args:
        x: a carrier of at least one dimension.
        arrays: for "two_level" the tensor's scale, float32 (); for a stochastic element the words of `seed_words`, then
            the traced starts that `place` leaves open.
        scaling: blocks, their scales and elements.
        place: where `x` lies in the random stream.
        tiling: for the kernels alone.
        branch_allowed: whether the program may branch on the scales' sizes.
    """
    del tiling
    plan, axis, scales = _chosen(x, arrays, scaling)

    def run(plan: Plan) -> Array:
        blocks, word = _numbers(x, axis, plan), _words(x, arrays, axis, scaling, place)
        return _from_blocks(select.rounded(blocks, scales, plan, word), axis, x.shape[axis])

    return select.branch_on_range(run, x, scales, plan, branch_allowed)


def quantize_blocks_body(
    x: Array,
    *arrays: Array,
    scaling: BlockScaling,
    place: StreamOffset = AT_START,
    tiling: object = None,
    as_dtype: Any = "uint8",
    branch_allowed: bool = False,
) -> tuple[Array, Array]:
    """`x` as packed codes and scales; arguments as for `round_blocks_body`, and `as_dtype`, 8 bits, of the codes.

    Returns:
        Codes of at most 8 bits, packed along the last axis, and the scales: the shape of `x` with one for each block
        along the axis, of `scale_dtype`.
    """
    del tiling
    plan, axis, scales = _chosen(x, arrays, scaling, branch_allowed)
    bits = scaling.element.format.bits

    def run(plan: Plan) -> Array:
        blocks, word = _numbers(x, axis, plan), _words(x, arrays, axis, scaling, place)
        codes = select.codes_of(blocks, scales, plan, word)
        if _packs_blocks(scaling, axis, x.shape):
            packed = _from_blocks(pack(codes, bits), axis, x.shape[axis] * bits // 8)
        else:
            packed = pack(_from_blocks(codes, axis, x.shape[axis]), bits)
        return lax.bitcast_convert_type(packed, as_dtype)

    return select.branch_on_range(run, x, scales, plan, branch_allowed), jnp.squeeze(
        store_scales(scales, plan), axis + 1
    )


def dequantize_blocks_body(
    codes: Array, scales: Array, *arrays: Array, scaling: BlockScaling, size: int, dtype: str
) -> Array:
    """The numbers that `quantize_blocks_body` stored; what `round_blocks_body` gives, bit for bit.

    Args:
        codes: uint8, packed along the last axis.
        scales: as stored.
        arrays: for "two_level" the tensor's scale.
        scaling: as it was.
        size: length of the last axis of the result.
        dtype: of the result, a carrier.
    """
    plan, axis = make_plan(scaling, CARRIERS[dtype]), block_axis(scaling, codes.ndim)
    fmt = scaling.element.format
    shape = (*codes.shape[:-1], size)
    if _packs_blocks(scaling, axis, shape):
        blocks = unpack(_in_blocks(codes, axis, scaling.block * fmt.bits // 8), fmt.bits, scaling.block)
    else:
        blocks = _in_blocks(unpack(codes, fmt.bits, size), axis, scaling.block)
    loaded = load_scales(jnp.expand_dims(scales, axis + 1), plan, split_arrays(scaling, arrays)[0])
    return _from_blocks(select.numbers_of(blocks, select.held(loaded), plan), axis, shape[axis])


def _chosen(
    x: Array, arrays: Sequence[Array], scaling: BlockScaling, branch_allowed: bool = False
) -> tuple[Plan, int, Scales]:
    """Plan, axis, and the scales of the blocks."""
    plan, axis = make_plan(scaling, CARRIERS[x.dtype.name]), block_axis(scaling, x.ndim)
    tensor = split_arrays(scaling, arrays)[0]
    return (
        plan,
        axis,
        select.held(choose_scales(_numbers(x, axis, plan), axis + 1, plan, tensor, maximum, branch_allowed)),
    )


def _numbers(x: Array, axis: int, plan: Plan) -> Array:
    """The numbers in blocks, those of 16 bits in float32."""
    return _in_blocks(widen(x, plan.carrier), axis, plan.scaling.block)


def _words(x: Array, arrays: Sequence[Array], axis: int, scaling: BlockScaling, place: StreamOffset) -> Array | None:
    """The random words in blocks. A branch draws its own: else they would all be written to memory for it."""
    drawn = split_arrays(scaling, arrays)[1]
    return _in_blocks(words_like(x, drawn, place), axis, scaling.block) if drawn else None


def block_axis(scaling: BlockScaling, ndim: int) -> int:
    """The axis of the blocks, counted from the front.

    Raises:
        ValueError: where an array of `ndim` dimensions has no such axis.
    """
    if not -ndim <= scaling.axis < ndim:
        raise ValueError(f"axis={scaling.axis} is none of an array of {ndim} dimensions")
    return scaling.axis % ndim


def scales_shape(scaling: BlockScaling, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of an array of `shape`."""
    axis = block_axis(scaling, len(shape))
    return (*shape[:axis], -(-shape[axis] // scaling.block), *shape[axis + 1 :])


def _packs_blocks(scaling: BlockScaling, axis: int, shape: Sequence[int]) -> bool:
    """Whether no byte of packed codes crosses blocks: packed in blocks, codes stay beside the numbers of theirs."""
    last = axis == len(shape) - 1 and shape[-1] % scaling.block == 0
    return last and scaling.block * scaling.element.format.bits % 8 == 0


def _in_blocks(x: Array, axis: int, block: int) -> Array:
    """An axis as two, blocks and their elements; zeros fill up the last block."""
    missing = -x.shape[axis] % block
    if missing:
        x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])


def _from_blocks(x: Array, axis: int, size: int) -> Array:
    """The inverse of `_in_blocks`."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return x if x.shape[axis] == size else lax.slice_in_dim(x, 0, size, axis=axis)
