"""Rounding of elements: the one body behind every implementation.

`round_to_spec` works on the bits of one array and a word of random bits for each element. It does not depend on
shapes, keys or devices, so XLA fuses it and a kernel runs it on a tile.
"""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp

from jchop import _bits
from jchop._bits import Carrier
from jchop._core.rounding.codebooks import round_codebook
from jchop._core.rounding.grid import Grid, make_grid
from jchop._core.rounding.log_takum import round_log
from jchop._core.rounding.modes import INWARD, TO_SMALLEST, round_magnitude
from jchop.formats import CodebookFormat, LogTakumFormat, UniformFormat
from jchop.rounding import Overflow, Rounding
from jchop.spec import Spec

Array = jax.Array


def round_elements(x: Array, spec: Spec, carrier: Carrier, word: Array | None = None) -> Array:
    """`x` rounded under `spec`, exact in its own dtype.

    Args:
        x: values of `carrier`, any shape.
        spec: a plain (not scaled) specification that `carrier` holds.
        carrier: the carrier of `x`.
        word: for the stochastic modes, a random unsigned integer for each element: uint32, or uint64 for float64.
    """
    sign, magnitude = _bits.split(x, carrier)
    fmt = spec.format
    if isinstance(fmt, CodebookFormat):
        return round_codebook(sign, magnitude, word, spec, carrier)
    grid = make_grid(fmt, carrier)
    negative = sign != 0
    result = _rounded(magnitude, negative, word, spec, grid)
    if spec.overflow is Overflow.WRAP:
        assert isinstance(fmt, UniformFormat)
        sign, result = _wrap(sign, result, fmt, carrier)
        result = _bits.where(magnitude == carrier.inf, _limit(negative, grid), result)
        sign = _bits.where(negative & (magnitude == carrier.inf), carrier.sign_bit, sign)
    else:
        result = at_ends(magnitude, result, negative, spec, grid)
    if not grid.signed:
        sign = jnp.zeros_like(sign)
    elif not grid.negative_zero:
        sign = _bits.where(result == 0, 0, sign)
    is_nan = magnitude > carrier.inf
    return _bits.join(sign, _bits.where(is_nan, magnitude, result), carrier)


def _rounded(magnitude: Array, negative: Array, word: Array | None, spec: Spec, grid: Grid) -> Array:
    """|x| rounded without an upper end, as magnitude bits."""
    if isinstance(grid.taper, LogTakumFormat):
        return round_log(magnitude, negative, spec.rounding, grid.taper)
    return round_magnitude(magnitude, negative, word, spec, grid)


def overflowed(x: Array, spec: Spec, carrier: Carrier, word: Array | None = None) -> Array:
    """Whether the rounded value is beyond the ends of the format, with the arguments of `round_to_spec`.

    NaN counts as inside. Infinities, and negative rounded values in an unsigned format, count as outside.
    """
    sign, magnitude = _bits.split(x, carrier)
    fmt = spec.format
    if isinstance(fmt, CodebookFormat):
        value = _bits.ordered(sign, magnitude)
        low, high = (carrier.ceil_bits(Fraction(end)) for end in (fmt.min, fmt.max))
        beyond = (value < low) | (value > high)
    else:
        grid = make_grid(fmt, carrier)
        rounded_bits, negative = _rounded(magnitude, sign != 0, word, spec, grid), sign != 0
        beyond = rounded_bits > (_limit(negative, grid) if grid.signed else grid.top_bits)
        if not grid.signed:
            beyond = beyond | _below(magnitude, rounded_bits, negative, grid)
    return beyond & (magnitude <= carrier.inf)


def _limit(negative: Array, grid: Grid) -> Array | int:
    """Magnitude bits of the end of the range on x's side of zero."""
    if grid.top_bits == grid.bottom_bits:
        return grid.top_bits
    kind = grid.carrier.work.type  # Python ints would make 64-bit words in 64-bit mode
    return _bits.where(negative, kind(grid.bottom_bits), kind(grid.top_bits))


def at_ends(magnitude: Array, rounded_bits: Array, negative: Array, spec: Spec, grid: Grid) -> Array:
    """`rounded_bits` with the overflow rule applied; `magnitude` separates infinities from finite values."""
    carrier = grid.carrier
    limit = _limit(negative, grid) if grid.signed else grid.top_bits
    beyond = limit if grid.saturates else carrier.inf if grid.has_inf else carrier.nan
    infinity = limit if spec.overflow is Overflow.SATURATE else beyond
    finite = limit
    if spec.overflow is Overflow.IEEE and grid.taper is None:
        to_odd = grid.p3109 and spec.rounding is Rounding.ODD
        inward = (False, False) if to_odd else INWARD.get(spec.rounding, (False, False))
        finite = limit if all(inward) else beyond
        if inward[0] != inward[1]:
            kind = carrier.work.type
            finite = _bits.where(
                negative == inward[1],
                kind(limit) if isinstance(limit, int) else limit,
                kind(beyond) if isinstance(beyond, int) else beyond,
            )
    result = _bits.where(rounded_bits > limit, finite, rounded_bits)
    if infinity is not finite:
        result = _bits.where(magnitude == carrier.inf, infinity, result)
    if grid.signed:
        return result
    # An unsigned format has no values below zero; modes that round up, or to zero, give its smallest value.
    smallest = 0 if grid.zero else grid.tiny_bits
    finds_none = spec.overflow is Overflow.IEEE and spec.rounding not in TO_SMALLEST
    below = carrier.nan if grid.has_nan and finds_none else smallest
    return _bits.where(_below(magnitude, rounded_bits, negative, grid), below, result)


def _below(magnitude: Array, rounded_bits: Array, negative: Array, grid: Grid) -> Array:
    """Whether a value stays negative in an unsigned format; without a zero, no negative value rounds to zero."""
    return negative & ((rounded_bits if grid.zero else magnitude) != 0)


def _wrap(sign: Array, rounded_bits: Array, fmt: UniformFormat, carrier: Carrier) -> tuple[Array, Array]:
    """Sign and magnitude of the rounded value wrapped into the format's two's complement range.

    The value is c 2^s quanta, with an integer c of the carrier's precision. So only the low (bits - s) bits of c
    matter.
    """
    width, fraction = carrier.work_width, carrier.fraction
    field = rounded_bits >> fraction
    count = rounded_bits & _bits.low_mask(fraction) | _bits.where(field > 0, 1 << fraction, 0)
    exponent = jnp.maximum(field, 1) - carrier.bias - fraction
    # If the last place of c is below one quantum, its low bits are zero, because the value is a whole number of quanta.
    spare = _bits.clip(-fmt.frac_bits - exponent, 0, fraction + 1)
    count, exponent = count >> spare, exponent + spare
    keep = _bits.clip(fmt.bits - (exponent + fmt.frac_bits), 0, fraction + 3)
    count = _bits.where(sign != 0, -count, count)
    shift = width - jnp.maximum(keep, 1)
    residue = (count << shift) >> shift if fmt.signed else count & _bits.low_mask(jnp.minimum(keep, width - 1))
    residue = _bits.where(keep == 0, 0, residue)
    magnitude = _bits.compose(jnp.abs(residue), exponent, carrier)
    return _bits.where(residue < 0, carrier.sign_bit, 0).astype(sign.dtype), magnitude
