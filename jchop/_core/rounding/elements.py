"""Rounding of elements: the one body behind every implementation.

`round_to_spec` works on the bits of one array and a word of random bits for each element. It does not depend on
shapes, keys or devices, so XLA fuses it and a kernel runs it on a tile.
"""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
from jax import Array

from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop._core.rounding.codebooks import round_codebook, round_log_takum
from jchop._core.rounding.codes import exponent_and_significand
from jchop._core.rounding.grid import Grid, make_grid
from jchop._core.rounding.modes import INWARD_OVERFLOW, NEGATIVE_TO_SMALLEST, round_magnitude
from jchop._spec.spec import Spec
from jchop.formats import CodebookFormat, LogTakumFormat, UniformFormat
from jchop.formats.rounding import Overflow, Rounding


def round_to_spec(x: Array, spec: Spec, carrier: Carrier, word: Array | None = None) -> Array:
    """`x` rounded under `spec`, exact in its own dtype.

    Args:
        x: values of `carrier`, any shape.
        spec: a plain (not scaled) specification that `carrier` holds.
        carrier: the carrier of `x`.
        word: for the stochastic modes, a random unsigned integer for each element: uint32, or uint64 for float64.
    """
    sign, magnitude = bit_ops.split_sign(x, carrier)
    fmt = spec.format
    if isinstance(fmt, CodebookFormat):
        return round_codebook(sign, magnitude, word, spec, carrier)
    grid = make_grid(fmt, carrier)
    negative = sign != 0
    result = _round_without_end(magnitude, negative, word, spec, grid)
    if spec.overflow is Overflow.WRAP:
        assert isinstance(fmt, UniformFormat)
        sign, result = _wrap_to_range(sign, result, fmt, carrier)
        result = bit_ops.lax_where(magnitude == carrier.inf, _end_of_range(negative, grid), result)
        sign = bit_ops.lax_where(negative & (magnitude == carrier.inf), carrier.sign_bit, sign)
    else:
        result = apply_overflow(magnitude, result, negative, spec, grid)
    if not grid.fmt.signed:
        sign = jnp.zeros_like(sign)
    elif not grid.fmt.has_negative_zero:
        sign = bit_ops.lax_where(result == 0, 0, sign)
    is_nan = magnitude > carrier.inf
    return bit_ops.join_sign(sign, bit_ops.lax_where(is_nan, magnitude, result), carrier)


def _round_without_end(magnitude: Array, negative: Array, word: Array | None, spec: Spec, grid: Grid) -> Array:
    """|x| rounded without an upper end, as magnitude bits."""
    if isinstance(grid.taper, LogTakumFormat):
        return round_log_takum(magnitude, negative, spec.rounding, grid.taper)
    return round_magnitude(magnitude, negative, word, spec, grid)


def overflow_mask(x: Array, spec: Spec, carrier: Carrier, word: Array | None = None) -> Array:
    """Whether the rounded value is beyond the ends of the format, with the arguments of `round_to_spec`.

    NaN counts as inside. Infinities, and negative rounded values in an unsigned format, count as outside.
    """
    sign, magnitude = bit_ops.split_sign(x, carrier)
    fmt = spec.format
    if isinstance(fmt, CodebookFormat):
        value = bit_ops.ordered_integers(sign, magnitude)
        low, high = (carrier.ceil_bits(Fraction(end)) for end in (fmt.min, fmt.max))
        beyond = (value < low) | (value > high)
    else:
        grid = make_grid(fmt, carrier)
        rounded_bits, negative = _round_without_end(magnitude, sign != 0, word, spec, grid), sign != 0
        beyond = rounded_bits > (_end_of_range(negative, grid) if grid.fmt.signed else grid.top_bits)
        if not grid.fmt.signed:
            beyond = beyond | _stays_negative(magnitude, rounded_bits, negative, grid)
    return beyond & (magnitude <= carrier.inf)


def _end_of_range(negative: Array, grid: Grid) -> Array | int:
    """Magnitude bits of the end of the range on x's side of zero."""
    if grid.top_bits == grid.bottom_bits:
        return grid.top_bits
    kind = grid.carrier.work.type  # Python ints would make 64-bit words in 64-bit mode
    return bit_ops.lax_where(negative, kind(grid.bottom_bits), kind(grid.top_bits))


def apply_overflow(magnitude: Array, rounded_bits: Array, negative: Array, spec: Spec, grid: Grid) -> Array:
    """`rounded_bits` with the overflow rule applied; `magnitude` separates infinities from finite values."""
    carrier = grid.carrier
    limit = _end_of_range(negative, grid) if grid.fmt.signed else grid.top_bits
    beyond = limit if grid.fmt.saturates else carrier.inf if grid.fmt.has_inf else carrier.nan
    infinity = limit if spec.overflow is Overflow.SATURATE else beyond
    finite = limit
    if spec.overflow is Overflow.IEEE and grid.taper is None:
        to_odd = getattr(grid.fmt, "p3109", False) and spec.rounding is Rounding.ODD
        inward = (False, False) if to_odd else INWARD_OVERFLOW.get(spec.rounding, (False, False))
        finite = limit if all(inward) else beyond
        if inward[0] != inward[1]:
            kind = carrier.work.type
            finite = bit_ops.lax_where(
                negative == inward[1],
                kind(limit) if isinstance(limit, int) else limit,
                kind(beyond) if isinstance(beyond, int) else beyond,
            )
    result = bit_ops.lax_where(rounded_bits > limit, finite, rounded_bits)
    if infinity is not finite:
        result = bit_ops.lax_where(magnitude == carrier.inf, infinity, result)
    if grid.fmt.signed:
        return result
    # An unsigned format has no values below zero; modes that round up, or to zero, give its smallest value.
    smallest = 0 if grid.zero else grid.tiny_bits
    finds_none = spec.overflow is Overflow.IEEE and spec.rounding not in NEGATIVE_TO_SMALLEST
    below = carrier.nan if grid.fmt.has_nan and finds_none else smallest
    return bit_ops.lax_where(_stays_negative(magnitude, rounded_bits, negative, grid), below, result)


def _stays_negative(magnitude: Array, rounded_bits: Array, negative: Array, grid: Grid) -> Array:
    """Whether a value stays negative in an unsigned format; without a zero, no negative value rounds to zero."""
    return negative & ((rounded_bits if grid.zero else magnitude) != 0)


def _wrap_to_range(sign: Array, rounded_bits: Array, fmt: UniformFormat, carrier: Carrier) -> tuple[Array, Array]:
    """Sign and magnitude of the rounded value wrapped into the format's two's complement range.

    The value is c 2^s quanta, with an integer c of the carrier's precision. So only the low (bits - s) bits of c
    matter.
    """
    width, fraction = carrier.work_width, carrier.fraction
    exponent, count = exponent_and_significand(rounded_bits, carrier)
    exponent = exponent - fraction
    # If the last place of c is below one quantum, its low bits are zero, because the value is a whole number of quanta.
    spare = bit_ops.lax_clip(-fmt.frac_bits - exponent, 0, fraction + 1)
    count, exponent = count >> spare, exponent + spare
    keep = bit_ops.lax_clip(fmt.bits - (exponent + fmt.frac_bits), 0, fraction + 3)
    count = bit_ops.lax_where(sign != 0, -count, count)
    shift = width - jnp.maximum(keep, 1)
    residue = (count << shift) >> shift if fmt.signed else count & bit_ops.low_mask(jnp.minimum(keep, width - 1))
    residue = bit_ops.lax_where(keep == 0, 0, residue)
    magnitude = bit_ops.compose_magnitude(jnp.abs(residue), exponent, carrier)
    return bit_ops.lax_where(residue < 0, carrier.sign_bit, 0).astype(sign.dtype), magnitude
