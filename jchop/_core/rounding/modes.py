"""Which neighbour: every rounding mode on the bits of a magnitude.

At or above the format's smallest positive value T a mode is one addend: |x| plus the addend, its low d bits then
cleared. The carry runs into the exponent as it should, because a carrier's bits order as its values do. Below T the
neighbours are 0 and T, and a mode is one comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import jax
import jax.numpy as jnp

from jchop import _bits
from jchop._bits import Carrier
from jchop._core.rounding.grid import Grid, most_random_bits
from jchop.rounding import Rounding
from jchop.spec import Spec

Array = jax.Array


@dataclass(frozen=True)
class Draw:
    """N random bits for each element, in the top bits of a word, the rest of it zero."""

    word: Array
    bits: int

    @property
    def width(self) -> int:
        return self.word.dtype.itemsize * 8

    def keep(self, word: Array) -> Array:
        """The top N bits of `word`, the rest of it zero."""
        return _top(word, self.bits)


def draw(word: Array | None, spec: Spec, carrier: Carrier) -> Draw | None:
    """The random bits that `spec` asks for out of whole random words.

    P3109's variant B with N bits R is variant A with the N + 1 bits 2R + 1. Variants B and C look one bit further
    than N, so the most they can have is one less than the width of a word.
    """
    if word is None or not spec.rounding.stochastic:
        return None
    width = word.dtype.itemsize * 8
    bits = spec.random_bits or most_random_bits(spec, carrier)
    kept = _top(word, bits)
    if spec.rounding is Rounding.STOCHASTIC_B:
        return Draw(kept | word.dtype.type(1 << width - bits - 1), bits + 1)
    return Draw(kept, bits)


def _top(word: Array, bits: int) -> Array:
    """The top `bits` bits of a word, the rest of it zero; by shifts: GPU kernels take no constant from 2^63 on."""
    low = word.dtype.itemsize * 8 - bits
    return word >> low << low if low else word


def _coin(bits: Draw | None) -> Array:
    assert bits is not None
    return _bits.top_bit(bits.word)


# -- at or above the smallest value ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DroppedBits:
    """What a mode may look at: |x|, the depth d of the cut, the bit above it, the sign, the random bits."""

    magnitude: Array
    depth: Array | int
    least: int  # no d is smaller
    mask: Array | int  # 2^d - 1
    last: Array  # 0 or 1: the last bit of the lower neighbour's significand
    negative: Array
    draw: Draw | None

    @property
    def coarse(self) -> Array | int:
        """Mask of the discarded bits below the reach of N random bits: 2^(d-N) - 1, or 0."""
        assert self.draw is not None
        if isinstance(self.depth, int):
            return _bits.low_mask(max(self.depth - self.draw.bits, 0))
        return _bits.low_mask(jnp.maximum(self.depth - self.draw.bits, 0))

    def random(self) -> Array:
        """R 2^(d-N): the random bits on the scale of the discarded ones, fractions dropped."""
        assert self.draw is not None
        word, width = self.draw.word, self.draw.width
        if not self.least:  # d = 0 would shift by the whole width: shift twice
            word, width = _bits.shift_right(word, 1), width - 1
        return _bits.shift_right(word, width - self.depth).astype(self.magnitude.dtype)

    def random_to_nearest(self) -> Array:
        """The same, plus what rounds the discarded bits to N bits, half to even, first."""
        last = ((self.magnitude & self.mask & (self.coarse + 1)) != 0).astype(self.magnitude.dtype)
        return self.random() + (self.coarse >> 1) + (last & self.coarse)


AWAY: dict[Rounding, Callable[[DroppedBits], Array | int]] = {
    Rounding.NEAREST_EVEN: lambda cut: (cut.mask >> 1) + (cut.last & cut.mask),
    Rounding.NEAREST_AWAY: lambda cut: cut.mask - (cut.mask >> 1),
    Rounding.NEAREST_ZERO: lambda cut: cut.mask >> 1,
    Rounding.UP: lambda cut: jnp.where(cut.negative, 0, cut.mask),
    Rounding.DOWN: lambda cut: jnp.where(cut.negative, cut.mask, 0),
    Rounding.TOWARD_ZERO: lambda cut: 0,
    Rounding.ODD: lambda cut: cut.mask & (cut.last - 1),
    Rounding.STOCHASTIC: DroppedBits.random,
    Rounding.STOCHASTIC_B: DroppedBits.random,
    Rounding.STOCHASTIC_C: DroppedBits.random_to_nearest,
    Rounding.STOCHASTIC_EQUAL: lambda cut: jnp.where(_coin(cut.draw), cut.mask, 0),
}


def round_magnitude(magnitude: Array, negative: Array, word: Array | None, spec: Spec, grid: Grid) -> Array:
    """|x| rounded under `spec` on the grid extended upward without end, as magnitude bits."""
    depth, last = dropped_bits(magnitude, grid)
    mask = _bits.low_mask(depth)
    bits = draw(word, spec, grid.carrier)
    cut = DroppedBits(magnitude, depth, 0 if grid.deep else grid.drop, mask, last, negative, bits)
    rounded = (magnitude + AWAY[spec.rounding](cut)) & ~mask
    if grid.tiny_bits:
        away = AWAY_FROM_ZERO[spec.rounding](BelowSmallest(magnitude, negative, bits, grid)) if grid.zero else True
        tiny = grid.tiny_bits
        below = tiny * away if isinstance(away, bool) else jnp.where(away, jnp.full_like(magnitude, tiny), 0)
        rounded = jnp.where(magnitude < grid.tiny_bits, below, rounded)
    if spec.flush:
        rounded = jnp.where(magnitude < grid.normal_bits, 0, rounded)
    return rounded


def dropped_bits(magnitude: Array, grid: Grid) -> tuple[Array | int, Array]:
    """The number d of low bits to drop, and the last bit of the lower neighbour."""
    fraction = grid.carrier.fraction
    exponent = magnitude >> fraction
    if grid.deep:
        return _deep_depth(magnitude, exponent, grid)
    depth: Array | int = grid.drop
    if grid.spacing is not None:
        if grid.spacing <= fraction:  # else d is M for every subnormal of the carrier, whatever their exponent
            exponent = jnp.maximum(exponent, 1)
        depth = jnp.clip(grid.spacing - exponent, grid.drop, fraction)
    return depth, (magnitude + grid.parity >> depth) & 1


def _deep_depth(magnitude: Array, exponent: Array, grid: Grid) -> tuple[Array, Array]:
    """As `dropped_bits`, where subnormals of the carrier are normal values of the format.

    One with leading bit b has the spacing of a normal value M - b binades further down, so d is that much less.
    """
    carrier, subnormal = grid.carrier, exponent == 0
    lead = _bits.floor_log2(jnp.where(subnormal, jnp.maximum(magnitude, 1), 1), carrier).astype(magnitude.dtype)
    depth = jnp.where(subnormal, jnp.maximum(grid.drop - carrier.fraction + lead, grid.deep_least), grid.drop)
    last = (magnitude + grid.parity) >> depth
    if grid.drop == carrier.fraction:  # one bit of precision: parity is that of the exponent
        last = jnp.where(subnormal, lead + grid.deep_parity, last)
    return depth, last & 1


# -- below the smallest value ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BelowSmallest:
    """A magnitude below T, whose neighbours are 0 and T."""

    magnitude: Array
    negative: Array
    draw: Draw | None
    grid: Grid

    @property
    def half(self) -> int:
        """Magnitude bits of T / 2; a carrier with values below T holds it."""
        bits = self.grid.carrier.magnitude_bits(Fraction(2) ** (self.grid.tiny_exponent - 1))
        assert bits is not None
        return bits

    @property
    def inexact(self) -> Array:
        return self.magnitude != 0

    def share(self) -> tuple[Array, Array | bool]:
        """floor(nu 2^W) for nu = |x| / T, as an unsigned word of W bits; and whether bits were dropped."""
        assert self.draw is not None
        carrier, exponent, width = self.grid.carrier, self.grid.tiny_exponent, self.draw.width
        unsigned = self.draw.word.dtype
        if exponent + carrier.bias <= 1:  # T is a subnormal of the carrier or its smallest normal value
            return self.magnitude.astype(unsigned) << width - (exponent - carrier.tiny_exponent), False
        biased = self.magnitude >> carrier.fraction
        # The significand to the top of a word; what stood above it falls out, but for the place of the leading bit.
        significand = (self.magnitude | 1 << carrier.fraction).astype(unsigned) << width - 1 - carrier.fraction
        if exponent + carrier.bias - 2 < width:  # else subnormals of the carrier leave no bit
            significand = jnp.where(biased > 0, significand, significand << 1 >> 1)
            biased = jnp.maximum(biased, 1)
        # Not negative below T; elsewhere the result is not used.
        shift = jnp.maximum(exponent + carrier.bias - 1 - biased, 0)
        within = jnp.minimum(shift, width - 1).astype(unsigned)
        share = jnp.where(shift < width, significand >> within, 0)
        return share, (share << within != significand) & (self.magnitude != 0)

    def stochastic(self) -> Array:
        """P3109 StochasticA: floor(nu 2^N) + R >= 2^N, both sides scaled to words."""
        assert self.draw is not None
        share, _ = self.share()
        return self.draw.keep(share) + self.draw.word < self.draw.word  # the sum of words has a carry

    def stochastic_to_nearest(self) -> Array:
        """P3109 StochasticC: rne(nu 2^N) + R >= 2^N."""
        assert self.draw is not None
        share, dropped = self.share()
        word, low, bits = self.draw.word.dtype.type, self.draw.width - self.draw.bits, self.draw.bits
        rest, half = share & word((1 << low) - 1), word(1 << low >> 1)
        up = (rest > half) | ((rest == half) & (dropped | (share >> low & 1 != 0)))
        total = self.draw.keep(share) + self.draw.word  # carries as it is, or with one unit more
        return (total < self.draw.word) | (up & (total >> low == word((1 << bits) - 1)))


AWAY_FROM_ZERO: dict[Rounding, Callable[[BelowSmallest], Array | bool]] = {
    Rounding.NEAREST_EVEN: lambda tiny: tiny.magnitude > tiny.half,
    Rounding.NEAREST_AWAY: lambda tiny: tiny.magnitude >= tiny.half,
    Rounding.NEAREST_ZERO: lambda tiny: tiny.magnitude > tiny.half,
    Rounding.UP: lambda tiny: jnp.where(tiny.negative, 0, tiny.magnitude) != 0,
    Rounding.DOWN: lambda tiny: jnp.where(tiny.negative, tiny.magnitude, 0) != 0,
    Rounding.TOWARD_ZERO: lambda tiny: False,
    Rounding.ODD: lambda tiny: tiny.inexact,
    Rounding.STOCHASTIC: BelowSmallest.stochastic,
    Rounding.STOCHASTIC_B: BelowSmallest.stochastic,
    Rounding.STOCHASTIC_C: BelowSmallest.stochastic_to_nearest,
    Rounding.STOCHASTIC_EQUAL: lambda tiny: tiny.inexact & _coin(tiny.draw),
}
