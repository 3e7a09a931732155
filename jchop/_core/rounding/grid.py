"""A format's values as bit patterns of a carrier: the static data of even grids, and the words of tapered formats.

Within a binade of the carrier the values of a floating-point or fixed-point format are evenly spaced. So rounding
drops the low d bits of the magnitude. With E the carrier's biased exponent,

    d = max(D, K - E),

where D = M - m belongs to the format's full precision and K to its smallest spacing (subnormals, or the quantum of
fixed point). Below the smallest positive value T the neighbours are 0 and T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array

from jchop import formats
from jchop._common.bit_ops import CARRIERS, Carrier, floor_log2_integers, join_sign, lax_clip, lax_where, low_mask
from jchop._spec.spec import Spec
from jchop.formats._tapered import HIF8_INFINITY, HIF8_STARTS
from jchop.formats.rounding import Overflow, Rounding

#: The rounding to each carrier, to nearest even.
CARRIER_SPECS = {name: Spec(name) for name in CARRIERS}


@dataclass(frozen=True)
class Grid:
    """The static numbers of one format on one carrier; all `*_bits` are magnitude bits."""

    fmt: formats.ElementFormat
    carrier: Carrier
    drop: int  # D: bits dropped at full precision
    tiny_exponent: int  # T = 2^tiny_exponent
    tiny_bits: int  # T; 0 if no value of the carrier lies between 0 and T
    top_bits: int  # the largest value
    bottom_bits: int  # the smallest (most negative) value
    spacing: int | None = None  # K; None if d = D everywhere above T
    deep: bool = False  # whether the carrier's subnormals are normal values of the format; then d is smaller
    deep_least: int = 0  # the least d there, from the format's own subnormals
    parity: int = 0  # added to the magnitude before its bit d is read as the last bit of the format's significand
    deep_parity: int = 0  # the same for a precision of one bit in the carrier's subnormals: there the exponent is read
    normal_bits: int = 0  # the smallest normal value; 0 if there is none
    taper: formats.StringFormat | None = None  # a format whose numbers are cut as strings, not on an even grid
    narrows: tuple[int, ...] = ()  # exponents k: from k and -k on, one bit more is dropped
    zero: bool = True  # whether the format has a zero


@lru_cache(maxsize=1024)
def make_grid(fmt: formats.ElementFormat, carrier: Carrier) -> Grid:
    """The Grid of `fmt`, not a codebook, on `carrier`, which must hold its results (see `require_carrier`)."""
    if isinstance(fmt, formats.TaperedFormat):
        return _tapered_grid(fmt, carrier)
    assert isinstance(fmt, formats.FloatFormat | formats.UniformFormat)
    tiny = _tiny_exponent(fmt)
    spacing = tiny + carrier.bias + carrier.fraction
    if isinstance(fmt, formats.FloatFormat):
        drop = max(carrier.fraction - fmt.frac_bits, 0)
        has_subnormals = fmt.subnormals and fmt.zero and fmt.frac_bits > 0
        deep = drop > 0 and fmt.emin < 1 - carrier.bias
        normal = _bits_or_end(Fraction(2) ** fmt.emin, carrier)
        # With one bit of precision a code's last bit is the last bit of its exponent.
        lag = None if fmt.frac_bits else fmt.bias - carrier.bias
    else:
        drop, has_subnormals, deep, normal, lag = 0, True, False, 0, None
    odd = (tiny + carrier.bias + 1 if lag is None else lag) % 2
    return Grid(
        fmt=fmt,
        carrier=carrier,
        drop=drop,
        spacing=spacing if has_subnormals and spacing - 1 > drop else None,
        deep=deep,
        deep_least=max(tiny - carrier.tiny_exponent, 0) if has_subnormals else 0,
        tiny_exponent=tiny,
        tiny_bits=_bits_or_end(Fraction(2) ** tiny, carrier)
        if tiny > carrier.tiny_exponent or not _format_has_zero(fmt)
        else 0,
        parity=odd << carrier.fraction,
        deep_parity=(lag or 0) + 1 - carrier.fraction,
        normal_bits=normal,
        top_bits=_bits_or_end(Fraction(fmt.max), carrier),
        bottom_bits=_bits_or_end(Fraction(fmt.min), carrier) if fmt.signed else 0,
        zero=_format_has_zero(fmt),
    )


def _tapered_grid(fmt: formats.TaperedFormat, carrier: Carrier) -> Grid:
    """The ends of a tapered format; the fields of an even grid are for the most fraction bits, or for strings."""
    of_strings = isinstance(fmt, formats.StringFormat)
    top = _bits_or_end(Fraction(fmt.max), carrier)
    return Grid(
        fmt=fmt,
        carrier=carrier,
        drop=0 if of_strings else carrier.fraction - fmt.most_fraction_bits,
        tiny_exponent=fmt.last_place,
        tiny_bits=_bits_or_end(Fraction(fmt.smallest or 0), carrier),
        top_bits=top,
        bottom_bits=top,
        taper=fmt if of_strings else None,
        narrows=fmt.narrows if isinstance(fmt, formats.HiFloat8Format) else (),
    )


def _format_has_zero(fmt: formats.ElementFormat) -> bool:
    return not isinstance(fmt, formats.FloatFormat) or fmt.zero


def _tiny_exponent(fmt: formats.FloatFormat | formats.UniformFormat) -> int:
    if isinstance(fmt, formats.UniformFormat):
        return -fmt.frac_bits
    return fmt.emin - (fmt.frac_bits if fmt.subnormals and fmt.zero else 0)


def _bits_or_end(value: Fraction, carrier: Carrier) -> int:
    """Magnitude bits; for numbers beyond the carrier's range, its end, which no input exceeds.

    Only wrapping allows an end that the carrier does not hold; then only infinities become this end, rounded toward
    zero.
    """
    return min(carrier.toward_zero(value)[0], carrier.inf - 1)


def most_random_bits(spec: Spec, carrier: Carrier) -> int:
    """The largest `random_bits` of a stochastic mode: a word, minus one bit for variants B and C."""
    return carrier.work_width - (spec.rounding in (Rounding.STOCHASTIC_B, Rounding.STOCHASTIC_C))


def carrier_holds(spec: Spec, carrier: Carrier) -> bool:
    """Whether every result of rounding values of `carrier` under `spec` is a value of `carrier`."""
    fmt = spec.format
    if isinstance(fmt, formats.CodebookFormat):
        return carrier.holds_all(fmt.levels)
    if isinstance(fmt, formats.TaperedFormat):
        ends = (Fraction(fmt.smallest or 0), Fraction(fmt.max))
        return ends[0] >= Fraction(2) ** (1 - carrier.bias) and ends[1] <= carrier.max
    tiny = _tiny_exponent(fmt)  # type: ignore[arg-type]
    if Fraction(2) ** tiny > carrier.max or (not _format_has_zero(fmt) and tiny < carrier.tiny_exponent):
        return False
    if spec.overflow is Overflow.WRAP and fmt.signed:
        return True  # wrapped values have no more bits than the values before
    ends = [Fraction(end) for end in (fmt.max, fmt.min)]
    if all(carrier.magnitude_bits(end) is not None for end in ends):
        return True
    # A format that is finer and wider than the carrier changes no finite value. Infinities must not saturate.
    finer = isinstance(fmt, formats.FloatFormat) and fmt.frac_bits >= carrier.fraction and fmt.max > carrier.max
    return finer and spec.overflow is not Overflow.SATURATE and not fmt.saturates


def x64_remedy(able: Sequence[str]) -> str:
    """The end of an error that advises a cast to these carriers: float64 is off, if it is the first one."""
    missing = able[0] == "float64" and not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    return "; JAX arrays are float64 only with jax_enable_x64, which is off" * missing


@lru_cache(maxsize=1024)
def require_carrier(spec: Spec, carrier: Carrier) -> None:
    """Refuses a carrier that cannot hold the results of `spec`; the error names one that can."""
    if spec.random_bits is not None and spec.random_bits > (most := most_random_bits(spec, carrier)):
        raise ValueError(
            f"random_bits={spec.random_bits} of spec={str(spec)!r} is more than the {most} that there are for "
            f"an element of x, of dtype {carrier.name}"
        )
    if isinstance(spec.format, formats.LogTakumFormat) and spec.rounding.stochastic:
        raise ValueError(
            f"rounding={spec.rounding.value!r} compares the bits that are cut off, and those of {spec.format} are the "
            "bits of a logarithm, which are not computed; a deterministic mode is needed"
        )
    if carrier_holds(spec, carrier):
        return
    able = [
        name for name, other in CARRIERS.items() if other.width > carrier.width and carrier_holds(spec, other)
    ]  # exact casts
    remedy = f"cast x to {' or '.join(able)} first{x64_remedy(able)}" if able else "no carrier up to float64 can"
    raise ValueError(f"x has dtype {carrier.name}, which cannot hold every result of spec={str(spec)!r}; {remedy}")


# == tapered formats ===================================================================================================
# With e the exponent of a number, its string has a lead, whose length depends on e alone, then r exponent bits, then
# the fraction. The exponent bits are the low r bits of e plus an offset, so the magnitude bits of a carrier, with
# that offset in their exponent field, end in the string after its lead. A carry out of the exponent bits gives the
# next number, as in the string. So the string is rounded by cutting low bits of these words, at a depth that depends
# on e.


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


def tapered_word(magnitude: Array, fmt: formats.StringFormat, carrier: Carrier) -> TaperedWord:
    """The strings of magnitude bits from the smallest to the largest value of `fmt`; others give words without use."""
    if isinstance(fmt, formats.PositFormat):
        return _posit_word(magnitude, fmt, carrier)
    assert isinstance(fmt, formats.TakumFormat)
    return _takum_word(magnitude, fmt, carrier)


def _posit_word(magnitude: Array, fmt: formats.PositFormat, carrier: Carrier) -> TaperedWord:
    """The words of posits with two exponent bits: regime, exponent and fraction are one integer."""
    offset = -carrier.bias << carrier.fraction
    word = magnitude + offset
    regime = lax_clip(word >> (carrier.fraction + 2), 1 - fmt.bits, fmt.bits - 2)
    above = regime >= 0
    lead_bits = lax_where(above, regime + 2, 1 - regime)
    lead = lax_where(above, (jnp.ones_like(regime) << (jnp.maximum(regime, 0) + 2)) - 2, 1)
    tail_bits = fmt.bits - 1 - lead_bits
    depth = lax_clip(carrier.fraction + 2 - tail_bits, 0, carrier.fraction + 2)
    # If no exponent bit is left, the last bit is the last of the regime.
    last = lax_where(tail_bits > 0, word >> depth & 1, (regime < 0).astype(word.dtype))
    return TaperedWord(word, offset, depth, last, lead, lead_bits, 2)


def _takum_word(magnitude: Array, fmt: formats.TakumFormat, carrier: Carrier) -> TaperedWord:
    """The words of takums: direction and regime before `width` bits of the characteristic, then the fraction."""
    exponent = (magnitude >> carrier.fraction) - carrier.bias
    above = exponent >= 0
    size = lax_clip(lax_where(above, exponent + 1, -exponent), 1, 255)
    width = floor_log2_integers(size, carrier).astype(magnitude.dtype)
    offset = lax_where(above, (1 - carrier.bias) << carrier.fraction, (-1 - carrier.bias) << carrier.fraction)
    word = magnitude + offset.astype(magnitude.dtype)
    depth = jnp.maximum(carrier.fraction + width - (fmt.bits - 5), 0)
    lead = lax_where(above, 8 + width, 7 - width)
    return TaperedWord(word, offset.astype(magnitude.dtype), depth, word >> depth & 1, lead, 4, width)


def encode_tapered(sign: Array, magnitude: Array, fmt: formats.StringFormat, carrier: Carrier) -> Array:
    """The codes of values of `fmt`, as integers of the carrier's work dtype."""
    layout = tapered_word(magnitude, fmt, carrier)
    tail_bits = fmt.bits - 1 - layout.lead_bits
    tail = (layout.word & low_mask(carrier.fraction + layout.width + jnp.zeros_like(layout.word))) >> layout.depth
    spare = jnp.maximum(tail_bits - carrier.fraction - layout.width, 0)
    code = (layout.lead << jnp.maximum(tail_bits, 0)) | (tail << spare)
    code = lax_where(magnitude == 0, 0, jnp.minimum(code, fmt.max_code))
    code = lax_where(tail_bits < 0, lax_where(magnitude == 0, 0, fmt.max_code), code)
    code = lax_where(magnitude > carrier.inf, -fmt.max_code - 1, lax_where(sign != 0, -code, code))
    return code & low_mask(fmt.bits) if fmt.bits < carrier.work_width else code


def decode_tapered(codes: Array, fmt: formats.StringFormat, carrier: Carrier) -> Array:
    """The values of codes in [0, 2^n), given in the work dtype of a carrier that holds every value."""
    spare = carrier.work_width - fmt.bits
    count = codes << spare >> spare  # two's complement
    string = jnp.abs(count) & fmt.max_code
    if isinstance(fmt, formats.PositFormat):
        exponent, fraction_bits = _posit_exponent(string, fmt, carrier)
    else:
        exponent, fraction_bits = takum_exponent(string, fmt.bits)
    fraction = string & low_mask(fraction_bits)
    magnitude = ((exponent + carrier.bias) << carrier.fraction) + _shift_left_if_positive(
        fraction, carrier.fraction - fraction_bits
    )
    magnitude = lax_where(count == 0, 0, magnitude)
    is_nan = count == -fmt.max_code - 1
    magnitude = lax_where(is_nan, carrier.nan, magnitude)
    sign = lax_where((count < 0) & (count > -fmt.max_code - 1), jnp.full_like(magnitude, carrier.sign_bit), 0)
    return join_sign(sign, magnitude, carrier)


def _shift_left_if_positive(word: Array, count: Array) -> Array:
    """Words shifted left by `count`, which is not negative for values that the carrier holds."""
    return word << jnp.maximum(count, 0)


def _posit_exponent(string: Array, fmt: formats.StringFormat, carrier: Carrier) -> tuple[Array, Array]:
    """Exponents, and the number of fraction bits, of positive strings of n - 1 bits."""
    size = fmt.bits - 1
    above = string >> (size - 1) != 0
    run_end = lax_where(above, string ^ low_mask(size), string)
    # The place of the first bit that differs from the run; -1 if the run is the whole string.
    place = lax_where(run_end == 0, -1, _floor_log2_by_halves(jnp.maximum(run_end, 1), carrier))
    run = size - 1 - place
    tail = jnp.maximum(place, 0)  # bits after the regime
    rest = string & low_mask(tail)
    fraction_bits = jnp.maximum(tail - 2, 0)
    low = lax_where(tail >= 2, rest >> fraction_bits, rest << (2 - jnp.minimum(tail, 2)))
    return 4 * lax_where(above, run - 1, -run) + low, fraction_bits


def _floor_log2_by_halves(count: Array, carrier: Carrier) -> Array:
    """floor(log2 count) of positive integers of up to 31 bits, by halves: `count` may not be exact as a float."""
    wide = carrier.fraction + 1
    if wide >= 31:
        return floor_log2_integers(count, carrier).astype(count.dtype)
    high = count >> 16
    place = floor_log2_integers(lax_where(high > 0, high, count & 0xFFFF), carrier).astype(count.dtype)
    return place + lax_where(high > 0, 16, 0)


def takum_exponent(string: Array, bits: int) -> tuple[Array, Array]:
    """Exponents, and the number of fraction bits, of positive strings of `bits` with the sign."""
    after = bits - 5
    above, field = string >> (bits - 2) != 0, string >> after & 7
    width = lax_where(above, field, 7 - field)
    rest = string & low_mask(after)
    fraction_bits = jnp.maximum(after - width, 0)
    count = rest >> fraction_bits << jnp.maximum(width - after, 0)
    one = jnp.ones_like(string)
    return lax_where(above, (one << width) - 1, 1 - (one << (width + 1))) + count, fraction_bits


# -- HiF8 --------------------------------------------------------------------------------------------------------------


def encode_hif8(sign: Array, magnitude: Array, fmt: formats.HiFloat8Format, carrier: Carrier) -> Array:
    """The codes of values of HiF8, as integers of the carrier's work dtype."""
    exponent = (magnitude >> carrier.fraction) - carrier.bias
    size = jnp.abs(exponent)
    fraction_bits = 3 - _count_limits(size, fmt.narrows)
    fraction = (magnitude & low_mask(carrier.fraction)) >> (carrier.fraction - fraction_bits)
    # The exponent's sign takes the place of its leading 1, of value `half`.
    width = _count_limits(size, (1, 2, 4, 8))
    half = jnp.ones_like(size) << width >> 1
    field = lax_where(exponent < 0, size, size - half)
    start = lax_where(width == 0, 8, lax_where(width == 4, 96, 8 << width))
    code = start + (field << fraction_bits) + fraction
    code = lax_where(exponent <= -fmt.narrows[-1], exponent + 23, code)
    code = lax_where(magnitude == 0, 0, lax_where(magnitude == carrier.inf, HIF8_INFINITY, code))
    return lax_where(magnitude > carrier.inf, 0x80, lax_where(sign != 0, code | 0x80, code))


def decode_hif8(codes: Array, carrier: Carrier) -> Array:
    """The values of codes in [0, 256), given in the work dtype of a carrier that holds every value."""
    size = codes & 0x7F
    width = _count_limits(size, HIF8_STARTS)
    fraction_bits = 3 - _count_limits(size, HIF8_STARTS[2:])
    half = jnp.ones_like(size) << width >> 1
    field = size >> fraction_bits & low_mask(width)
    exponent = lax_where(field & half != 0, -field, field + half)
    fraction = _shift_left_if_positive(size & low_mask(fraction_bits), carrier.fraction - fraction_bits)
    exponent, fraction = lax_where(size < 8, size - 23, exponent), lax_where(size < 8, 0, fraction)
    magnitude = ((exponent + carrier.bias) << carrier.fraction) + fraction
    magnitude = lax_where(size == 0, lax_where(codes == 0, 0, carrier.nan), magnitude)
    magnitude = lax_where(size == HIF8_INFINITY, carrier.inf, magnitude)
    sign = lax_where((codes > 0x7F) & (size != 0), jnp.full_like(magnitude, carrier.sign_bit), 0)
    return join_sign(sign, magnitude, carrier)


def _count_limits(x: Array, limits: tuple[int, ...]) -> Array:
    """How many of the bounds x has reached."""
    return jnp.asarray(sum((x >= limit).astype(x.dtype) for limit in limits))
