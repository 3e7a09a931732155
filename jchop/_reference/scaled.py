"""Blocks of elements that share a scale: the arithmetic of one tile, and the bodies that every backend has.

The first half knows nothing of arrays: it takes a tile in which one axis runs through a block, divides by the scales,
rounds, and multiplies back or encodes, as a `Plan` says. Kernels run it on their own tiles. All of it is integer
arithmetic on bits, so neither subnormal numbers that a device reads as zero nor divisions that a compiler turns into
multiplications change a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax

from jchop import _bits
from jchop._bits import CARRIERS, Carrier
from jchop._reference.arithmetic import multiply, range_of
from jchop._reference.codes import decode_elements, encode_elements, extended, pack, unpack
from jchop._reference.elements import overflowed, round_elements
from jchop._reference.exact import overflowed_exact, round_exact
from jchop._reference.levels import round_to_levels
from jchop._reference.place import AT_START, Place, words_like
from jchop._reference.quotient import (
    Divisor,
    divisor_of,
    divisor_of_product,
    exact_quotient,
    odd_quotient,
    significand_of,
)
from jchop._reference.scales import (
    TENSOR_SCALE,
    Plan,
    Scales,
    choose_scales,
    load_scales,
    make_plan,
    positive,
    scale_magnitude,
    store_scales,
)
from jchop.formats import CodebookFormat, bfloat16, binary16
from jchop.scaling import BlockScaling
from jchop.spec import Spec

Array = jax.Array

#: The formats of the carriers that results are rounded to from a wider one.
_NARROW = {"float16": Spec(binary16), "bfloat16": Spec(bfloat16)}


# -- dtypes ------------------------------------------------------------------------------------------------------------


def widen(x: Array, carrier: Carrier) -> Array:
    """16-bit numbers in float32, by their bits; others as they are."""
    if carrier.width > 16:
        return x
    if carrier.name == "bfloat16":
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(bits, jnp.float32)
    return decode_elements(lax.bitcast_convert_type(x, jnp.uint16), binary16, CARRIERS["float32"])


def narrow(x: Array, carrier: Carrier) -> Array:
    """Numbers that `carrier` holds in its own dtype, the inverse of `widen`."""
    if carrier.width > 16:
        return x
    if carrier.name == "bfloat16":
        bits = lax.bitcast_convert_type(x, jnp.uint32) >> 16
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return lax.bitcast_convert_type(encode_elements(x, binary16, CARRIERS["float32"]), jnp.float16)


# -- division ----------------------------------------------------------------------------------------------------------


def round_quotients(x: Array, scales: Scales, plan: Plan, word: Array | None) -> Array:
    """The quotients x / s rounded once to the element format, as numbers of the carrier of the arithmetic."""
    compute, element = plan.compute, plan.scaling.element
    sign, magnitude = _bits.split(x, compute)
    plain = (magnitude != 0) & (magnitude < compute.inf)
    levels = isinstance(element.format, CodebookFormat)
    if not plan.scaling.is_power and levels != element.rounding.stochastic:
        exact = exact_quotient(sign, magnitude, plain, _divisor(scales, plan), compute)
        if isinstance(element.format, CodebookFormat):
            return _one_nan(round_to_levels(exact, element.format, element.rounding, compute), plan)
        return _one_nan(round_exact(exact, element, compute, word), plan)
    if plan.scaling.is_power:
        quotient = _over_power(magnitude, scales.value, compute)
    else:
        quotient = odd_quotient(magnitude, _divisor(scales, plan), compute)
    x = _bits.join(sign, jnp.where(plain, quotient, magnitude), compute)
    return _one_nan(round_elements(x, element, compute, word), plan)


def _one_nan(elements: Array, plan: Plan) -> Array:
    """NaN as the one that its code gives; where the element format has none its largest value."""
    compute, fmt = plan.compute, plan.scaling.element.format
    sign, magnitude = _bits.split(elements, compute)
    nan = magnitude > compute.inf
    instead = compute.nan if fmt.has_nan else compute.toward_zero(Fraction(fmt.max))[0]
    return _bits.join(jnp.where(nan, 0, sign), jnp.where(nan, instead, magnitude), compute)


def overflowed_quotients(x: Array, scales: Scales, plan: Plan, word: Array | None) -> Array:
    """Where the rounded quotients x / s lie beyond the ends of the element format; NaN counts as inside."""
    compute, element = plan.compute, plan.scaling.element
    sign, magnitude = _bits.split(x, compute)
    plain = (magnitude != 0) & (magnitude < compute.inf)
    if plan.scaling.is_power:
        quotient = jnp.where(plain, _over_power(magnitude, scales.value, compute), magnitude)
        return overflowed(_bits.join(sign, quotient, compute), element, compute, word)
    return overflowed_exact(
        exact_quotient(sign, magnitude, plain, _divisor(scales, plan), compute), element, compute, word
    )


def _over_power(magnitude: Array, exponent: Array, carrier: Carrier) -> Array:
    """Bits of magnitudes over 2^exponent. What falls below the normal range is its smallest value: as tiny."""
    moved = extended(magnitude, carrier) - (exponent << carrier.fraction)
    return jnp.maximum(moved, 1 << carrier.fraction)


def _divisor(scales: Scales, plan: Plan) -> Divisor:
    compute = plan.compute
    if scales.tensor is None:
        return divisor_of(scales.value, compute)
    bits, width = extended(scales.value, compute), plan.scaling.scale.sig_bits + 1
    count = significand_of(bits, compute) >> compute.fraction + 1 - width
    exponent = (bits >> compute.fraction) - compute.bias - (width - 1)
    return divisor_of_product(count, width, exponent, scales.tensor, TENSOR_SCALE.sig_bits, compute)


# -- multiplication ----------------------------------------------------------------------------------------------------


def multiply_back(elements: Array, scales: Scales, plan: Plan) -> Array:
    """The products s e rounded once to nearest, ties to even, as numbers of the plan's carrier."""
    compute = plan.compute
    spec = _NARROW.get(plan.carrier.name)
    if plan.scaling.is_power:
        result = _times_power(elements, scales.value, compute)
        result = result if spec is None else round_elements(result, spec, compute)
    else:
        result = _times(elements, scales, spec, plan)
    if scales.nan is not None:
        sign, magnitude = _bits.split(result, compute)
        result = _bits.join(jnp.where(scales.nan, 0, sign), jnp.where(scales.nan, compute.nan, magnitude), compute)
    return narrow(result, plan.carrier)


def _times(elements: Array, scales: Scales, spec: Spec | None, plan: Plan) -> Array:
    compute, element = plan.compute, range_of(plan.scaling.element, plan.compute)
    own = range_of(Spec(plan.scaling.scale), compute)
    scale = jnp.broadcast_to(positive(scale_magnitude(scales, plan), compute), elements.shape)
    if scales.tensor is None:
        return multiply(elements, scale, spec, compute, None, element, own)
    # Few bits times few bits are exact, and then one rounding is left.
    product = multiply(elements, scale, None, compute, None, element, own)
    tensor = jnp.broadcast_to(positive(scales.tensor, compute), elements.shape)
    whole = range_of(None, compute)
    return multiply(product, tensor, spec, compute, None, whole, whole)


def _times_power(x: Array, exponent: Array, carrier: Carrier) -> Array:
    """x 2^exponent, x being zero, normal, an infinity or NaN; to nearest even in the subnormal range."""  # noqa: D403
    fraction, top = carrier.fraction, 2 * carrier.bias + 1
    sign, magnitude = _bits.split(x, carrier)
    field = (magnitude >> fraction) + exponent
    right = jnp.clip(1 - field, 0, fraction + 2)
    significand = significand_of(magnitude, carrier)
    last = significand >> right & 1
    half = lax.shift_left(jnp.ones_like(right), right) >> 1
    small = significand + jnp.maximum(half - 1 + last, 0) >> right
    moved = jnp.where(field > 0, (jnp.minimum(field, top) << fraction) | magnitude & _bits.low_mask(fraction), small)
    moved = jnp.where(field >= top, carrier.inf, moved)
    return _bits.join(sign, jnp.where((magnitude == 0) | (magnitude >= carrier.inf), magnitude, moved), carrier)


# -- tiles -------------------------------------------------------------------------------------------------------------


def round_tile(x: Array, axis: int, plan: Plan, word: Array | None = None, tensor: Array | None = None) -> Array:
    """A tile, quantized and dequantized.

    Args:
        x: numbers that `widen` gave; zeros may fill up a block.
        axis: along which the blocks lie.
        plan: says how.
        word: for a stochastic element, a word for each number.
        tensor: for "two_level", the bits of the tensor's scale, int32.

    Returns:
        Numbers of the plan's carrier.
    """
    scales = choose_scales(x, axis, plan, tensor)
    return multiply_back(round_quotients(x, scales, plan, word), scales, plan)


def quantize_tile(
    x: Array, axis: int, plan: Plan, word: Array | None = None, tensor: Array | None = None
) -> tuple[Array, Array]:
    """The codes of a tile's elements, not yet packed, and its stored scales with length 1 along `axis`."""
    scales = choose_scales(x, axis, plan, tensor)
    elements = round_quotients(x, scales, plan, word)
    return encode_elements(elements, plan.scaling.element.format, plan.compute), store_scales(scales, plan)


# -- arrays ------------------------------------------------------------------------------------------------------------


def split_arrays(scaling: BlockScaling, arrays: Sequence[Array]) -> tuple[Array | None, tuple[Array, ...]]:
    """What follows the array among an operation's: the bits of the tensor's scale, if any, and what was drawn."""
    if scaling.rule == "two_level":
        return lax.bitcast_convert_type(arrays[0], jnp.int32), tuple(arrays[1:])
    return None, tuple(arrays)


def round_blocks_body(
    x: Array, *arrays: Array, scaling: BlockScaling, place: Place = AT_START, tiling: object = None
) -> Array:
    """`x` quantized and dequantized in blocks.

    Args:
        x: a carrier of at least one dimension.
        arrays: for "two_level" the tensor's scale, float32 (); for a stochastic element the words of `seed_words`, then
            the traced starts that `place` leaves open.
        scaling: blocks, their scales and elements.
        place: where `x` lies in the random stream.
        tiling: for the kernels alone.
    """
    del tiling
    plan, axis, word, tensor = _prepared(x, arrays, scaling, place)
    blocks = _in_blocks(widen(x, plan.carrier), axis, scaling.block)
    return _from_blocks(round_tile(blocks, axis + 1, plan, word, tensor), axis, x.shape[axis])


def quantize_blocks_body(
    x: Array, *arrays: Array, scaling: BlockScaling, place: Place = AT_START, tiling: object = None
) -> tuple[Array, Array]:
    """`x` as packed codes and scales; arguments as for `round_blocks_body`.

    Returns:
        uint8 codes of at most 8 bits, packed along the last axis, and the scales: the shape of `x` with one for each
        block along the axis, of `scale_dtype`.
    """
    del tiling
    plan, axis, word, tensor = _prepared(x, arrays, scaling, place)
    blocks = _in_blocks(widen(x, plan.carrier), axis, scaling.block)
    codes, scales = quantize_tile(blocks, axis + 1, plan, word, tensor)
    codes = _from_blocks(codes, axis, x.shape[axis])
    return pack(codes, scaling.element.format.bits), jnp.squeeze(scales, axis + 1)


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
    unpacked = unpack(codes, fmt.bits, size)
    blocks = decode_elements(_in_blocks(unpacked, axis, scaling.block), fmt, plan.compute)
    loaded = load_scales(jnp.expand_dims(scales, axis + 1), plan, split_arrays(scaling, arrays)[0])
    return _from_blocks(multiply_back(blocks, loaded, plan), axis, unpacked.shape[axis])


def _prepared(
    x: Array, arrays: Sequence[Array], scaling: BlockScaling, place: Place
) -> tuple[Plan, int, Array | None, Array | None]:
    """Plan, axis, random words in blocks, and the bits of the tensor's scale."""
    axis = block_axis(scaling, x.ndim)
    tensor, drawn = split_arrays(scaling, arrays)
    word = _in_blocks(words_like(x, drawn, place), axis, scaling.block) if drawn else None
    return make_plan(scaling, CARRIERS[x.dtype.name]), axis, word, tensor


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
