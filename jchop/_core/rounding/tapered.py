"""The strings of posits and takums, and the codes of HiF8, on the bits of a carrier.

With e the exponent of a number, its string has a lead, whose length depends on e alone, then r exponent bits, then the
fraction. The exponent bits are the low r bits of e plus an offset, so the magnitude bits of a carrier, with that offset
in their exponent field, end in the string after its lead. A carry out of the exponent bits gives the next number, as in
the string. So the string is rounded by cutting low bits of these words, at a depth that depends on e.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop.formats import HiFloat8Format, PositFormat, StringFormat, TakumFormat

Array = jax.Array


@dataclass(frozen=True)
class TaperedWord:
    """Magnitudes laid out for a tapered format."""

    word: Array  # magnitude bits plus `offset`
    offset: Array | int
    depth: Array  # the number of low bits that are cut off
    last: Array  # 0 or 1: the last bit of the cut string
    lead: Array  # the bits of the string before the exponent bits, as an integer
    lead_bits: Array | int
    width: Array | int  # r


def tapered_word(magnitude: Array, fmt: StringFormat, carrier: Carrier) -> TaperedWord:
    """The strings of magnitude bits from the smallest to the largest value of `fmt`; others give words without use."""
    if isinstance(fmt, PositFormat):
        return _posit_word(magnitude, fmt, carrier)
    assert isinstance(fmt, TakumFormat)
    return _takum_word(magnitude, fmt, carrier)


def _posit_word(magnitude: Array, fmt: PositFormat, carrier: Carrier) -> TaperedWord:
    offset = -carrier.bias << carrier.fraction
    word = magnitude + offset
    regime = bit_ops.lax_clip(word >> (carrier.fraction + 2), 1 - fmt.bits, fmt.bits - 2)
    above = regime >= 0
    lead_bits = bit_ops.lax_where(above, regime + 2, 1 - regime)
    lead = bit_ops.lax_where(above, (jnp.ones_like(regime) << (jnp.maximum(regime, 0) + 2)) - 2, 1)
    tail_bits = fmt.bits - 1 - lead_bits
    depth = bit_ops.lax_clip(carrier.fraction + 2 - tail_bits, 0, carrier.fraction + 2)
    # If no exponent bit is left, the last bit is the last of the regime.
    last = bit_ops.lax_where(tail_bits > 0, word >> depth & 1, (~above).astype(word.dtype))
    return TaperedWord(word, offset, depth, last, lead, lead_bits, 2)


def _takum_word(magnitude: Array, fmt: TakumFormat, carrier: Carrier) -> TaperedWord:
    exponent = (magnitude >> carrier.fraction) - carrier.bias
    above = exponent >= 0
    size = bit_ops.lax_clip(bit_ops.lax_where(above, exponent + 1, -exponent), 1, 255)
    width = bit_ops.floor_log2_integers(size, carrier).astype(magnitude.dtype)
    offset = bit_ops.lax_where(above, (1 - carrier.bias) << carrier.fraction, (-1 - carrier.bias) << carrier.fraction)
    word = magnitude + offset.astype(magnitude.dtype)
    depth = jnp.maximum(carrier.fraction + width - (fmt.bits - 5), 0)
    lead = bit_ops.lax_where(above, 8 + width, 7 - width)
    return TaperedWord(word, offset.astype(magnitude.dtype), depth, word >> depth & 1, lead, 4, width)


def encode_tapered(sign: Array, magnitude: Array, fmt: StringFormat, carrier: Carrier) -> Array:
    """The codes of values of `fmt`, as integers of the carrier's work dtype."""
    layout = tapered_word(magnitude, fmt, carrier)
    tail_bits = fmt.bits - 1 - layout.lead_bits
    tail = (
        layout.word & bit_ops.low_mask(carrier.fraction + layout.width + jnp.zeros_like(layout.word))
    ) >> layout.depth
    spare = jnp.maximum(tail_bits - carrier.fraction - layout.width, 0)
    code = (layout.lead << jnp.maximum(tail_bits, 0)) | (tail << spare)
    code = bit_ops.lax_where(magnitude == 0, 0, jnp.minimum(code, fmt.max_code))
    code = bit_ops.lax_where(tail_bits < 0, bit_ops.lax_where(magnitude == 0, 0, fmt.max_code), code)
    code = bit_ops.lax_where(magnitude > carrier.inf, -fmt.max_code - 1, bit_ops.lax_where(sign != 0, -code, code))
    return code & bit_ops.low_mask(fmt.bits) if fmt.bits < carrier.work_width else code


def decode_tapered(codes: Array, fmt: StringFormat, carrier: Carrier) -> Array:
    """The values of codes in [0, 2^n), given in the work dtype of a carrier that holds every value."""
    spare = carrier.work_width - fmt.bits
    count = codes << spare >> spare  # two's complement
    string = jnp.abs(count) & fmt.max_code
    if isinstance(fmt, PositFormat):
        exponent, fraction_bits = _posit_exponent(string, fmt, carrier)
    else:
        exponent, fraction_bits = takum_exponent(string, fmt.bits)
    fraction = string & bit_ops.low_mask(fraction_bits)
    magnitude = ((exponent + carrier.bias) << carrier.fraction) + _shift_left_if_positive(
        fraction, carrier.fraction - fraction_bits
    )
    magnitude = bit_ops.lax_where(count == 0, 0, magnitude)
    is_nan = count == -fmt.max_code - 1
    magnitude = bit_ops.lax_where(is_nan, carrier.nan, magnitude)
    sign = bit_ops.lax_where((count < 0) & ~is_nan, jnp.full_like(magnitude, carrier.sign_bit), 0)
    return bit_ops.join_sign(sign, magnitude, carrier)


def _shift_left_if_positive(word: Array, count: Array) -> Array:
    """Words shifted left by `count`, which is not negative for values that the carrier holds."""
    return word << jnp.maximum(count, 0)


def _posit_exponent(string: Array, fmt: StringFormat, carrier: Carrier) -> tuple[Array, Array]:
    """Exponents, and the number of fraction bits, of positive strings of n - 1 bits."""
    size = fmt.bits - 1
    above = string >> (size - 1) != 0
    run_end = bit_ops.lax_where(above, string ^ bit_ops.low_mask(size), string)
    # The place of the first bit that differs from the run; -1 if the run is the whole string.
    place = bit_ops.lax_where(run_end == 0, -1, _floor_log2_by_halves(jnp.maximum(run_end, 1), carrier))
    run = size - 1 - place
    tail = jnp.maximum(place, 0)  # bits after the regime
    rest = string & bit_ops.low_mask(tail)
    fraction_bits = jnp.maximum(tail - 2, 0)
    low = bit_ops.lax_where(tail >= 2, rest >> fraction_bits, rest << (2 - jnp.minimum(tail, 2)))
    return 4 * bit_ops.lax_where(above, run - 1, -run) + low, fraction_bits


def _floor_log2_by_halves(count: Array, carrier: Carrier) -> Array:
    """floor(log2 count) of positive integers of up to 31 bits, by halves: `count` may not be exact as a float."""
    wide = carrier.fraction + 1
    if wide >= 31:
        return bit_ops.floor_log2_integers(count, carrier).astype(count.dtype)
    high = count >> 16
    place = bit_ops.floor_log2_integers(bit_ops.lax_where(high > 0, high, count & 0xFFFF), carrier).astype(count.dtype)
    return place + bit_ops.lax_where(high > 0, 16, 0)


def takum_exponent(string: Array, bits: int) -> tuple[Array, Array]:
    """Exponents, and the number of fraction bits, of positive strings of `bits` with the sign."""
    after = bits - 5
    above, field = string >> (bits - 2) != 0, string >> after & 7
    width = bit_ops.lax_where(above, field, 7 - field)
    rest = string & bit_ops.low_mask(after)
    fraction_bits = jnp.maximum(after - width, 0)
    count = rest >> fraction_bits << jnp.maximum(width - after, 0)
    one = jnp.ones_like(string)
    return bit_ops.lax_where(above, (one << width) - 1, 1 - (one << (width + 1))) + count, fraction_bits


# -- HiF8 --------------------------------------------------------------------------------------------------------------

#: The codes, without signs, from which on the exponent has one bit more, and the infinity.
_HIF8_WIDER_CODES, _HIF8_INFINITY_CODE = (16, 32, 64, 96), 0x6F


def encode_hif8(sign: Array, magnitude: Array, fmt: HiFloat8Format, carrier: Carrier) -> Array:
    """The codes of values of HiF8, as integers of the carrier's work dtype."""
    exponent = (magnitude >> carrier.fraction) - carrier.bias
    size = jnp.abs(exponent)
    fraction_bits = 3 - _count_limits(size, fmt.narrows)
    fraction = (magnitude & bit_ops.low_mask(carrier.fraction)) >> (carrier.fraction - fraction_bits)
    # The exponent's sign takes the place of its leading 1, of value `half`.
    width = _count_limits(size, (1, 2, 4, 8))
    half = jnp.ones_like(size) << width >> 1
    field = bit_ops.lax_where(exponent < 0, size, size - half)
    start = bit_ops.lax_where(width == 0, 8, bit_ops.lax_where(width == 4, 96, 8 << width))
    code = start + (field << fraction_bits) + fraction
    code = bit_ops.lax_where(exponent <= -fmt.narrows[-1], exponent + 23, code)
    code = bit_ops.lax_where(magnitude == 0, 0, bit_ops.lax_where(magnitude == carrier.inf, _HIF8_INFINITY_CODE, code))
    return bit_ops.lax_where(magnitude > carrier.inf, 0x80, bit_ops.lax_where(sign != 0, code | 0x80, code))


def decode_hif8(codes: Array, carrier: Carrier) -> Array:
    """The values of codes in [0, 256), given in the work dtype of a carrier that holds every value."""
    size = codes & 0x7F
    width = _count_limits(size, _HIF8_WIDER_CODES)
    fraction_bits = 3 - _count_limits(size, _HIF8_WIDER_CODES[2:])
    half = jnp.ones_like(size) << width >> 1
    field = size >> fraction_bits & bit_ops.low_mask(width)
    exponent = bit_ops.lax_where(field & half != 0, -field, field + half)
    fraction = _shift_left_if_positive(size & bit_ops.low_mask(fraction_bits), carrier.fraction - fraction_bits)
    exponent, fraction = bit_ops.lax_where(size < 8, size - 23, exponent), bit_ops.lax_where(size < 8, 0, fraction)
    magnitude = ((exponent + carrier.bias) << carrier.fraction) + fraction
    magnitude = bit_ops.lax_where(size == 0, bit_ops.lax_where(codes == 0, 0, carrier.nan), magnitude)
    magnitude = bit_ops.lax_where(size == _HIF8_INFINITY_CODE, carrier.inf, magnitude)
    sign = bit_ops.lax_where((codes > 0x7F) & (size != 0), jnp.full_like(magnitude, carrier.sign_bit), 0)
    return bit_ops.join_sign(sign, magnitude, carrier)


def _count_limits(x: Array, limits: tuple[int, ...]) -> Array:
    """How many of the bounds x has reached."""
    return jnp.asarray(sum((x >= limit).astype(x.dtype) for limit in limits))
