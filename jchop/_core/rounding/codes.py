"""Bit patterns of values, and patterns of fewer than eight bits packed into bytes: integer operations on tiles.

A code is the result of `ElementFormat.encode`. Codes are packed along the last axis. The k-bit code i of a row takes
the bits [k i, k i + k) of the row's little-endian bit stream. For 4 bits the low nibble is first. Every row is padded
with zeros to whole bytes.
"""

from __future__ import annotations

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop import formats
from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop._core.rounding import codebooks
from jchop._core.rounding.codebooks import decode_log_takum, encode_log_takum, take_in_bounds
from jchop._core.rounding.grid import decode_hif8, decode_tapered, encode_hif8, encode_tapered
from jchop._core.xla.sizes import are_static


def float_to_bits(x: Array) -> Array:
    """The bits of float32 numbers."""
    return lax.bitcast_convert_type(x, jnp.int32)


def bits_to_float(bits: Array) -> Array:
    """The inverse of `float_to_bits`."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def encode_elements(values: Array, fmt: formats.ElementFormat, carrier: Carrier) -> Array:
    """The codes of values of `fmt`, as integers of its ``code_dtype``.

    Args:
        values: values of `fmt` in `carrier`, which holds them all. A NaN gets the positive quiet NaN code, or an
            unspecified code if `fmt` has none.
        fmt: a float or tapered format of any width, or another of at most 16 bits.
        carrier: the carrier of `values`.
    """
    sign, magnitude = bit_ops.split_sign(values, carrier)
    if isinstance(fmt, formats.FloatFormat):
        codes = _encode_float_format(sign, magnitude, fmt, carrier)
    elif isinstance(fmt, formats.UniformFormat):
        codes = _encode_uniform_format(sign, magnitude, fmt, carrier)
    elif isinstance(fmt, formats.LogTakumFormat):
        codes = encode_log_takum(sign, magnitude, fmt, carrier)
    elif isinstance(fmt, formats.StringFormat):
        codes = encode_tapered(sign, magnitude, fmt, carrier)
    elif isinstance(fmt, formats.HiFloat8Format):
        codes = encode_hif8(sign, magnitude, fmt, carrier)
    else:
        assert isinstance(fmt, formats.CodebookFormat)
        levels = carrier.ordered_bits(fmt.levels)
        indexes = np.arange(len(levels), dtype=carrier.work)
        codes = codebooks.pick_level(bit_ops.ordered_integers(sign, magnitude), levels[1:], indexes)
    return codes.astype(fmt.code_dtype)


def decode_elements(codes: Array, fmt: formats.ElementFormat, carrier: Carrier, *, short: bool = False) -> Array:
    """The values of codes, in `carrier`; a code that `fmt` does not use gives NaN.

    Args:
        codes: integers in [0, 2^bits), any dtype.
        fmt: as for `encode_elements`.
        carrier: a carrier that holds every value of `fmt`.
        short: whether to take fewer operations, for codes that lie in registers. Default False.
    """
    codes = codes.astype(carrier.work)
    if isinstance(fmt, formats.FloatFormat):
        return (_decode_short_float if short and _has_short_decode(fmt, carrier) else _decode_float_format)(
            codes, fmt, carrier
        )
    if isinstance(fmt, formats.UniformFormat):
        return (_decode_short_uniform if short and _has_short_decode(fmt, carrier) else _decode_uniform_format)(
            codes, fmt, carrier
        )
    if isinstance(fmt, formats.LogTakumFormat):
        return decode_log_takum(codes, fmt, carrier)
    if isinstance(fmt, formats.StringFormat):
        return decode_tapered(codes, fmt, carrier)
    if isinstance(fmt, formats.HiFloat8Format):
        return decode_hif8(codes, carrier)
    assert isinstance(fmt, formats.CodebookFormat)
    levels = carrier.ordered_bits(fmt.levels)
    table = np.append(np.where(levels < 0, -levels | carrier.sign_bit, levels), carrier.nan).astype(carrier.work)
    if len(table) > codebooks.MOST_COMPARISONS:
        bits = take_in_bounds(jnp.asarray(table), jnp.minimum(codes, len(table) - 1))
    elif short:
        bits = codebooks.pick_code(codes, [int(pattern) for pattern in table], fmt.bits)
    else:
        bits = codebooks.pick_level(codes, np.arange(1, len(table), dtype=carrier.work), table)
    return bit_ops.join_sign(jnp.zeros_like(bits), bits, carrier)


def decode_magnitude(codes: Array, fmt: formats.FloatFormat, carrier: Carrier) -> Array:
    """The magnitude bits of the values of codes; NaN has bits above infinity. Arguments as for `decode_elements`.

    In few operations where the bits of a code are the first bits of its value, as for bfloat16 in float32.
    """
    if not _is_prefix_of_carrier(fmt, carrier):
        return bit_ops.split_sign(decode_elements(codes, fmt, carrier), carrier)[1]
    return (codes.astype(carrier.work) & bit_ops.low_mask(fmt.bits - fmt.signed)) << (carrier.fraction - fmt.frac_bits)


def extend_exponent(magnitude: Array, carrier: Carrier) -> Array:
    """Magnitude bits with an exponent field that continues below 1, so that every value but 0 has a leading bit.

    A subnormal value is its bits, read as an integer, times the smallest value of the carrier.
    """
    wide = bit_ops.CARRIERS["float64" if carrier.width == 64 else "float32"]
    lead = lax.bitcast_convert_type(magnitude.astype(wide.name), wide.work) >> (wide.fraction - carrier.fraction)
    subnormal_bits = lead + ((carrier.tiny_exponent + carrier.bias - wide.bias) << carrier.fraction)
    return bit_ops.lax_where(magnitude < 1 << carrier.fraction, subnormal_bits, magnitude)


def significand(magnitude: Array, carrier: Carrier) -> Array:
    """The significand of magnitude bits as an integer, its leading bit included."""
    normal = (magnitude >> carrier.fraction > 0).astype(magnitude.dtype)
    return magnitude & bit_ops.low_mask(carrier.fraction) | normal << carrier.fraction


def exponent_and_significand(magnitude: Array, carrier: Carrier) -> tuple[Array, Array]:
    """Exponent, at least the exponent of the smallest normal value, and significand with its leading bit."""
    return jnp.maximum(magnitude >> carrier.fraction, 1) - carrier.bias, significand(magnitude, carrier)


# -- floating-point formats --------------------------------------------------------------------------------------------


def _encode_float_format(sign: Array, magnitude: Array, fmt: formats.FloatFormat, carrier: Carrier) -> Array:
    """The codes, in the carrier's integers, of values that the format has, from sign and magnitude bits."""
    drop, bias_gap = carrier.fraction - fmt.frac_bits, carrier.bias - fmt.bias
    is_prefix = _is_prefix_of_carrier(fmt, carrier)
    bits = magnitude if is_prefix or _is_normal_in_carrier(fmt, carrier) else extend_exponent(magnitude, carrier)
    codes = _shift_right_or_left(bits - (bias_gap << carrier.fraction), drop)
    if fmt.zero and not is_prefix:
        field = (bits >> carrier.fraction) - bias_gap
        significand = bits & bit_ops.low_mask(carrier.fraction) | 1 << carrier.fraction
        small = significand >> bit_ops.lax_clip(drop + 1 - field, 0, carrier.work_width - 1)
        codes = bit_ops.lax_where(field > 0, codes, small if fmt.subnormals else 0)
    if fmt.inf_code is not None and not is_prefix:
        codes = bit_ops.lax_where(magnitude == carrier.inf, fmt.inf_code, codes)
    if fmt.signed:
        top = 1 << (fmt.bits - 1) if fmt.bits < carrier.work_width else carrier.sign_bit
        codes = bit_ops.lax_where(sign != 0, codes | top, codes)
    nan = fmt.code_of(math.nan)
    return codes if nan is None else bit_ops.lax_where(magnitude > carrier.inf, nan, codes)


def _decode_float_format(codes: Array, fmt: formats.FloatFormat, carrier: Carrier) -> Array:
    """The carrier values of codes in the carrier's integers; codes that the format does not use give NaN."""
    width = fmt.bits - fmt.signed
    code = codes & bit_ops.low_mask(width)
    drop, bias_gap = carrier.fraction - fmt.frac_bits, carrier.bias - fmt.bias
    if is_prefix := _is_prefix_of_carrier(fmt, carrier):
        magnitude = small = _shift_right_or_left(code, -drop)
    elif _is_normal_in_carrier(fmt, carrier):
        magnitude = _shift_right_or_left(code, -drop) + (bias_gap << carrier.fraction)
        small = _bits_of_multiple(code, fmt.emin - fmt.frac_bits, carrier)
    else:
        field = code >> fmt.frac_bits
        significand = code & bit_ops.low_mask(fmt.frac_bits) | 1 << fmt.frac_bits
        magnitude = bit_ops.compose_magnitude(significand, field - fmt.bias - fmt.frac_bits, carrier)
        small = bit_ops.compose_magnitude(code, jnp.full_like(code, fmt.emin - fmt.frac_bits), carrier)
    if fmt.zero and not is_prefix:
        if not fmt.subnormals:
            small = bit_ops.lax_where(code == 0, 0, carrier.nan)
        magnitude = bit_ops.lax_where(code < 1 << fmt.frac_bits, small, magnitude)
    if fmt.max_code != bit_ops.low_mask(width):
        magnitude = bit_ops.lax_where(code > fmt.max_code, carrier.nan, magnitude)
    if fmt.has_inf:
        magnitude = bit_ops.lax_where(code == fmt.inf_code, carrier.inf, magnitude)
    sign = jnp.zeros_like(code)
    if fmt.signed:
        negative = (codes >> width) & 1 != 0
        sign = bit_ops.lax_where(negative & (magnitude <= carrier.inf), jnp.full_like(code, carrier.sign_bit), sign)
        if fmt.nans == "negative_zero":
            magnitude = bit_ops.lax_where(negative & (code == 0), carrier.nan, magnitude)
            sign = bit_ops.lax_where(code == 0, 0, sign)
    return bit_ops.join_sign(sign.astype(carrier.work), magnitude.astype(carrier.work), carrier)


def _is_prefix_of_carrier(fmt: formats.FloatFormat, carrier: Carrier) -> bool:
    """Whether the codes of numbers are the leading bits of their patterns in the carrier, as bfloat16 in float32."""
    infinity = carrier.inf >> max(carrier.fraction - fmt.frac_bits, 0)
    return fmt.zero and fmt.subnormals and fmt.bias == carrier.bias and fmt.inf_code == infinity


def _has_short_decode(fmt: formats.FloatFormat | formats.UniformFormat, carrier: Carrier) -> bool:
    """Whether float32 or float64 has all values as normal numbers, and adds the ends of the format exactly."""
    if isinstance(fmt, formats.FloatFormat) and not (fmt.zero and fmt.subnormals and fmt.nans != "negative_zero"):
        return False
    if (
        isinstance(fmt, formats.UniformFormat) and fmt.signed and fmt.min_code > -(1 << (fmt.bits - 1))
    ):  # an unused code
        return False
    return carrier.width >= 32 and fmt.bits < carrier.fraction and _is_normal_in_carrier(fmt, carrier)


def _decode_short_float(codes: Array, fmt: formats.FloatFormat, carrier: Carrier) -> Array:
    """`_decode_float_format` in few operations: a subnormal number is 1.f times the least normal one, minus that."""
    code = codes & bit_ops.low_mask(fmt.bits - fmt.signed)
    drop, bias_gap = carrier.fraction - fmt.frac_bits, carrier.bias - fmt.bias
    bits = (code << drop) + (bias_gap << carrier.fraction)
    above = lax.bitcast_convert_type(bits + (1 << carrier.fraction), jnp.dtype(carrier.name))
    small = lax.bitcast_convert_type(above - jnp.asarray(2.0**fmt.emin, above.dtype), carrier.work)
    bits = bit_ops.lax_where(code < 1 << fmt.frac_bits, small, bits)
    if fmt.has_inf:
        bits = bit_ops.lax_where(code == fmt.inf_code, carrier.inf, bits)
    if fmt.signed:
        bits = bits | ((codes << (carrier.work_width - fmt.bits)) & carrier.sign_bit)
    if fmt.max_code != bit_ops.low_mask(fmt.bits - fmt.signed):
        beyond = code > fmt.max_code
        bits = bit_ops.lax_where(beyond & (code != fmt.inf_code) if fmt.has_inf else beyond, carrier.nan, bits)
    return lax.bitcast_convert_type(bits, jnp.dtype(carrier.name))


def _is_normal_in_carrier(fmt: formats.FloatFormat | formats.UniformFormat, carrier: Carrier) -> bool:
    """Whether every value of `fmt` but 0 is a normal number of `carrier`."""
    return Fraction(fmt.smallest) >= Fraction(2) ** (1 - carrier.bias)  # type: ignore[arg-type]


def _bits_of_multiple(count: Array, exponent: int, carrier: Carrier) -> Array:
    """Magnitude bits of count * 2^exponent, 0 or normal, for counts that a significand of the carrier holds."""
    wide = bit_ops.CARRIERS["float64" if carrier.width == 64 else "float32"]
    bits = lax.bitcast_convert_type(count.astype(wide.name), wide.work) >> (wide.fraction - carrier.fraction)
    return bit_ops.lax_where(count == 0, 0, bits + ((exponent + carrier.bias - wide.bias) << carrier.fraction))


def _shift_right_or_left(word: Array, right: int) -> Array:
    return word >> right if right >= 0 else word << -right


# -- fixed point and integers ------------------------------------------------------------------------------------------


def _encode_uniform_format(sign: Array, magnitude: Array, fmt: formats.UniformFormat, carrier: Carrier) -> Array:
    bits = magnitude if _is_normal_in_carrier(fmt, carrier) else extend_exponent(magnitude, carrier)
    significand = bits & bit_ops.low_mask(carrier.fraction) | 1 << carrier.fraction
    right = carrier.fraction + carrier.bias - fmt.frac_bits - (bits >> carrier.fraction)
    count = significand >> bit_ops.lax_clip(right, 0, carrier.work_width - 1)
    count = bit_ops.lax_where(magnitude == 0, 0, count)
    return bit_ops.lax_where(sign != 0, -count, count) & bit_ops.low_mask(fmt.bits)


def _decode_short_uniform(codes: Array, fmt: formats.UniformFormat, carrier: Carrier) -> Array:
    """`_decode_uniform_format` without a conversion: 2^fraction + code, minus that power of two."""
    lead, sign = 1 << carrier.fraction, (1 << (fmt.bits - 1)) if fmt.signed else 0
    number_bits = codes ^ sign | ((carrier.bias + carrier.fraction) << carrier.fraction)
    number = lax.bitcast_convert_type(number_bits, jnp.dtype(carrier.name))
    number = number - jnp.asarray(float(lead + sign), number.dtype)
    return number * jnp.asarray(2.0**-fmt.frac_bits, number.dtype) if fmt.frac_bits else number


def _decode_uniform_format(codes: Array, fmt: formats.UniformFormat, carrier: Carrier) -> Array:
    """The carrier values of codes in the carrier's integers; the lowest code of a symmetric format gives NaN."""
    spare = carrier.work_width - fmt.bits
    count = (codes << spare) >> spare if fmt.signed else codes
    size = jnp.abs(count)
    if _is_normal_in_carrier(fmt, carrier):
        magnitude = _bits_of_multiple(size, -fmt.frac_bits, carrier)
    else:
        magnitude = bit_ops.compose_magnitude(size, jnp.full_like(size, -fmt.frac_bits), carrier)
    has_spare_code = fmt.signed and fmt.min_code > -(1 << (fmt.bits - 1))
    sign = bit_ops.lax_where(count < 0, jnp.full_like(count, carrier.sign_bit), 0)
    if has_spare_code:
        magnitude = bit_ops.lax_where(count < fmt.min_code, carrier.nan, magnitude)
        sign = bit_ops.lax_where(count < fmt.min_code, 0, sign)
    return bit_ops.join_sign(sign, magnitude.astype(carrier.work), carrier)


# -- packing -----------------------------------------------------------------------------------------------------------


def packed_size(count: int, bits: int) -> int:
    """Bytes of a row of `count` packed codes."""
    return -(-count * bits // 8)


def pack_codes(codes: Array, bits: int) -> Array:
    """Codes packed along the last axis.

    Args:
        codes: (..., n) integers in [0, 2^bits).
        bits: width of a code, 1 to 8.

    Returns:
        (..., ceil(n * bits / 8)) uint8.

    Example:
        >>> pack_codes(jnp.array([1, 2, 15]), 4).tolist()
        [33, 15]
    """
    if bits == 8:
        return codes.astype(jnp.uint8)
    unit, unit_bytes = _packing_unit(bits)
    last = codes.ndim - 1
    starts = bits * np.arange(unit) - 8 * np.arange(unit_bytes)[:, None]
    code_bytes = _shift_and_combine(split_groups(codes.astype(jnp.uint8), unit, last), starts)
    return join_groups(code_bytes, last, packed_size(codes.shape[-1], bits))


def unpack_codes(code_bytes: Array, bits: int, count: int, gathers: bool = False) -> Array:
    """The codes that `pack_codes` packed.

    Args:
        code_bytes: (..., ceil(count * bits / 8)) uint8.
        bits: width of a code, 1 to 8.
        count: codes in a row.
        gathers: as in `Backend`. Default False.

    Returns:
        (..., count) uint8.

    Example:
        >>> unpack_codes(jnp.array([33, 15], jnp.uint8), 4, 3).tolist()
        [1, 2, 15]
    """
    if bits == 8:
        return code_bytes
    last = code_bytes.ndim - 1
    if gathers and 8 % bits == 0:
        places = lax.iota(jnp.int32, count).reshape(*[1] * last, count)
        own = jnp.take_along_axis(code_bytes, places // (8 // bits), -1, mode="promise_in_bounds").astype(jnp.int32)
        places = lax.broadcasted_iota(jnp.int32, own.shape, last)
        shifted = lax.shift_right_logical(own, places % (8 // bits) * bits)
        return (shifted & bit_ops.low_mask(bits)).astype(jnp.uint8)
    whole = 8 % bits == 0 and code_bytes.shape[-1] % 4 == 0 and code_bytes.shape[-1] * 8 == count * bits
    whole = whole and not bit_ops.axes_cut_by_sharding(code_bytes, [*[1] * (code_bytes.ndim - 1), 4])
    if whole and are_static(code_bytes.shape):  # XLA has no shape for words of symbolic ones
        # The codes of a 32-bit word fill a vector, which is faster than the codes of a byte.
        words = lax.bitcast_convert_type(
            code_bytes.reshape(*code_bytes.shape[:-1], code_bytes.shape[-1] // 4, 4), jnp.int32
        )
        shifts = np.arange(0, 32, bits, dtype=np.int32)
        return join_groups(words[..., None] >> shifts & bit_ops.low_mask(bits), last, count).astype(jnp.uint8)
    unit, unit_bytes = _packing_unit(bits)
    starts = 8 * np.arange(unit_bytes) - bits * np.arange(unit)[:, None]
    codes = _shift_and_combine(split_groups(code_bytes, unit_bytes, last), starts)
    return join_groups(codes & np.uint8(bit_ops.low_mask(bits)), last, count)


def _packing_unit(bits: int) -> tuple[int, int]:
    """The least number of codes that fill whole bytes, and the number of these bytes."""
    return 8 // math.gcd(8, bits), bits // math.gcd(8, bits)


def split_groups(x: Array, size: int, axis: int) -> Array:
    """An array with an axis, from 0, split into groups, the last of which is filled up with zeros."""
    x = bit_ops.gather_cut_axes(x, [size if i == axis else 1 for i in range(x.ndim)])
    missing = -x.shape[axis] % size
    if missing:
        x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])


def join_groups(groups: Array, axis: int, length: int) -> Array:
    """The inverse of `split_groups`, for an axis of a length."""
    shape = groups.shape
    joined = groups.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    return joined if joined.shape[axis] == length else lax.slice_in_dim(joined, 0, length, axis=axis)


def _shift_and_combine(groups: Array, starts: np.ndarray) -> Array:
    """For each row of `starts`, the bytes of a group, shifted left by so many bits each and combined.

    XLA's CPU backend vectorizes shifts of a broadcast axis and a sum over it. It would fuse stacked slices with the
    computation of the codes, element by element.
    """
    up, down = (np.clip(shift, 0, 7).astype(np.uint8) for shift in (starts, -starts))
    parts = groups[..., None, :] << up >> down
    return bit_ops.lax_where(np.abs(starts) < 8, parts, np.uint8(0)).sum(-1, dtype=jnp.uint8)
