"""The choice between two neighbours: every rounding mode, in three forms. All other code uses these tables.

* `ROUNDING_ADDENDS`: at or above the format's smallest positive value T a mode is one addend: |x| plus the addend, its
  low d bits then cleared. A carry into the exponent is right, because a carrier's bits have the order of its values.
* `AWAY_FROM_ZERO`: one comparison of the discarded part, if it is not the low bits of a magnitude. Below T the
  neighbours are 0 and T.
* `rounding_thresholds`: the points between levels above which the upper one is taken.

The facts of modes at the end are for overflow and for short cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from jchop._common.bit_ops import Carrier, floor_log2_integers, lax_clip, lax_where, low_mask, shift_right, top_bit
from jchop._core.rounding.grid import Grid, most_random_bits, tapered_word
from jchop._spec.spec import Spec
from jchop.formats.rounding import Rounding


@dataclass(frozen=True)
class RandomBits:
    """N random bits for each element, in the top bits of a word; the other bits are zero."""

    word: Array
    bits: int

    @property
    def width(self) -> int:
        return self.word.dtype.itemsize * 8

    def keep(self, word: Array) -> Array:
        """The top N bits of `word`; the other bits are zero."""
        return _top_bits(word, self.bits)


def take_random_bits(word: Array | None, spec: Spec, carrier: Carrier) -> RandomBits | None:
    """The random bits for `spec`, taken from whole random words.

    P3109's variant B with N bits R is variant A with the N + 1 bits 2R + 1. Variants B and C need one bit more than N,
    so N is at most one less than the width of a word.
    """
    if word is None or not spec.rounding.stochastic:
        return None
    width = word.dtype.itemsize * 8
    bits = spec.random_bits or most_random_bits(spec, carrier)
    top_bits = _top_bits(word, bits)
    if spec.rounding is Rounding.STOCHASTIC_B:
        return RandomBits(top_bits | word.dtype.type(1 << (width - bits - 1)), bits + 1)
    return RandomBits(top_bits, bits)


def _top_bits(word: Array, bits: int) -> Array:
    """The top `bits` bits of a word, the others zero; by shifts, because GPU kernels take no constant from 2^63 on."""
    low = word.dtype.itemsize * 8 - bits
    return word >> low << low if low else word


def _coin_of_word(bits: RandomBits | None) -> Array:
    assert bits is not None
    return top_bit(bits.word)


# -- at or above the smallest value ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridCut:
    """The input of a mode: |x|, the depth d of the cut, the bit above it, the sign, the random bits."""

    magnitude: Array
    depth: Array | int
    least: int  # a lower bound of d
    mask: Array | int  # 2^d - 1
    last: Array  # 0 or 1: the last bit of the lower neighbour's significand
    negative: Array
    draw: RandomBits | None

    @property
    def coarse(self) -> Array | int:
        """Mask of the discarded bits below the reach of N random bits: 2^(d-N) - 1, or 0."""
        assert self.draw is not None
        if isinstance(self.depth, int):
            return low_mask(max(self.depth - self.draw.bits, 0))
        return low_mask(jnp.maximum(self.depth - self.draw.bits, 0))

    def random(self) -> Array:
        """R 2^(d-N): the random bits on the scale of the discarded bits, without fractions."""
        assert self.draw is not None
        word, width = self.draw.word, self.draw.width
        if not self.least:  # d = 0 would shift by the whole width: shift twice
            word, width = shift_right(word, 1), width - 1
        return shift_right(word, width - self.depth).astype(self.magnitude.dtype)

    def random_to_nearest(self) -> Array:
        """`random`, plus the addend that first rounds the discarded bits to N bits, ties to even."""
        last = ((self.magnitude & self.mask & (self.coarse + 1)) != 0).astype(self.magnitude.dtype)
        return self.random() + (self.coarse >> 1) + (last & self.coarse)


ROUNDING_ADDENDS: dict[Rounding, Callable[[GridCut], Array | int]] = {
    Rounding.NEAREST_EVEN: lambda cut: (cut.mask >> 1) + (cut.last & cut.mask),
    Rounding.NEAREST_AWAY: lambda cut: cut.mask - (cut.mask >> 1),
    Rounding.NEAREST_ZERO: lambda cut: cut.mask >> 1,
    Rounding.UP: lambda cut: lax_where(cut.negative, 0, cut.mask),
    Rounding.DOWN: lambda cut: lax_where(cut.negative, cut.mask, 0),
    Rounding.TOWARD_ZERO: lambda cut: 0,
    Rounding.ODD: lambda cut: cut.mask & (cut.last - 1),
    Rounding.STOCHASTIC: GridCut.random,
    Rounding.STOCHASTIC_B: GridCut.random,
    Rounding.STOCHASTIC_C: GridCut.random_to_nearest,
    Rounding.STOCHASTIC_EQUAL: lambda cut: lax_where(_coin_of_word(cut.draw), cut.mask, 0),
}


def round_magnitude(magnitude: Array, negative: Array, word: Array | None, spec: Spec, grid: Grid) -> Array:
    """|x| rounded under `spec` on the grid without an upper end, as magnitude bits."""
    if grid.taper is not None:
        return _round_tapered_word(magnitude, negative, word, spec, grid)
    depth, last = drop_depth(magnitude, grid)
    mask = low_mask(depth)
    bits = take_random_bits(word, spec, grid.carrier)
    cut = GridCut(magnitude, depth, 0 if grid.deep else grid.drop, mask, last, negative, bits)
    rounded_bits = (magnitude + ROUNDING_ADDENDS[spec.rounding](cut)) & ~mask
    if grid.tiny_bits:
        away = AWAY_FROM_ZERO[spec.rounding](BelowSmallest(magnitude, negative, bits, grid)) if grid.zero else True
        tiny = grid.tiny_bits
        below = tiny * away if isinstance(away, bool) else lax_where(away, jnp.full_like(magnitude, tiny), 0)
        rounded_bits = lax_where(magnitude < grid.tiny_bits, below, rounded_bits)
    if spec.flush:
        rounded_bits = lax_where(magnitude < grid.normal_bits, 0, rounded_bits)
    return rounded_bits


def _round_tapered_word(magnitude: Array, negative: Array, word: Array | None, spec: Spec, grid: Grid) -> Array:
    """`round_magnitude` for a tapered format, whose strings are cut; no number but 0 becomes 0."""
    assert grid.taper is not None
    layout = tapered_word(magnitude, grid.taper, grid.carrier)
    mask = low_mask(layout.depth)
    bits = take_random_bits(word, spec, grid.carrier)
    cut = GridCut(layout.word, layout.depth, 0, mask, layout.last, negative, bits)
    rounded_bits = ((layout.word + ROUNDING_ADDENDS[spec.rounding](cut)) & ~mask) - layout.offset
    smallest = lax_where(magnitude == 0, 0, jnp.full_like(magnitude, grid.tiny_bits))
    return lax_where(magnitude <= grid.tiny_bits, smallest, rounded_bits)


def drop_depth(magnitude: Array, grid: Grid) -> tuple[Array | int, Array]:
    """The number d of low bits to drop, and the last bit of the lower neighbour."""
    fraction = grid.carrier.fraction
    exponent = magnitude >> fraction
    if grid.narrows:
        size = jnp.abs(exponent - grid.carrier.bias)
        narrower = sum((size >= k).astype(magnitude.dtype) for k in grid.narrows)
        depth = grid.drop + jnp.asarray(narrower)
        return depth, magnitude >> depth & 1  # biases are odd: so is the last bit of the exponent of an odd code
    if grid.deep:
        return _subnormal_drop_depth(magnitude, exponent, grid)
    depth: Array | int = grid.drop
    if grid.spacing is not None:
        if grid.spacing <= fraction:  # else d is M for every subnormal of the carrier
            exponent = jnp.maximum(exponent, 1)
        depth = lax_clip(grid.spacing - exponent, grid.drop, fraction)
    return depth, ((magnitude + grid.parity) >> depth) & 1


def _subnormal_drop_depth(magnitude: Array, exponent: Array, grid: Grid) -> tuple[Array, Array]:
    """`drop_depth` for formats that have subnormals of the carrier as normal values.

    A subnormal with leading bit b has the spacing of a normal value M - b binades lower, so d is smaller by M - b.
    """
    carrier, subnormal = grid.carrier, exponent == 0
    lead = floor_log2_integers(lax_where(subnormal, jnp.maximum(magnitude, 1), 1), carrier).astype(magnitude.dtype)
    depth = lax_where(subnormal, jnp.maximum(grid.drop - carrier.fraction + lead, grid.deep_least), grid.drop)
    last = (magnitude + grid.parity) >> depth
    if grid.drop == carrier.fraction:  # one bit of precision: the parity of the exponent
        last = lax_where(subnormal, lead + grid.deep_parity, last)
    return depth, last & 1


# -- by the discarded part ---------------------------------------------------------------------------------------------


class BetweenNeighbours:
    """A number between two neighbours, with the properties that directed modes compare."""

    draw: RandomBits | None
    negative: Array
    #: Whether the last bit of the neighbour nearer to zero is 1.
    odd: Array | bool
    inexact: Array | bool

    @property
    def above(self) -> Array:
        """Whether it is inexact and positive."""
        return self.inexact & (self.negative ^ True)

    @property
    def below(self) -> Array:
        """Whether it is inexact and negative."""
        return self.inexact & self.negative


class DiscardedFraction(BetweenNeighbours):
    """The discarded part of a number between two neighbours, which all modes compare."""

    #: floor(nu 2^W) for the discarded fraction nu, as an unsigned word of W bits; and whether bits were dropped.
    share: tuple[Array, Array | bool]

    def nearest(self, tie: Array | bool) -> Array:
        """Whether the nearer neighbour is the one away from zero; a tie goes to it if `tie`."""
        share, has_more = self.share
        return top_bit(share) & ((share << 1 != 0) | has_more | tie)

    def stochastic(self) -> Array:
        """P3109 StochasticA: floor(nu 2^N) + R >= 2^N, both sides scaled to words."""
        assert self.draw is not None
        share, _ = self.share
        return self.draw.keep(share) + self.draw.word < self.draw.word  # the sum of words has a carry

    def stochastic_to_nearest(self) -> Array:
        """P3109 StochasticC: rne(nu 2^N) + R >= 2^N."""
        assert self.draw is not None
        share, has_more = self.share
        word, low, bits = self.draw.word.dtype.type, self.draw.width - self.draw.bits, self.draw.bits
        rest, half = share & word((1 << low) - 1), word(1 << low >> 1)
        up = (rest > half) | ((rest == half) & (has_more | (share >> low & 1 != 0)))
        total = self.draw.keep(share) + self.draw.word  # carries, or carries with one unit more
        return (total < self.draw.word) | (up & (total >> low == word((1 << bits) - 1)))


@dataclass(frozen=True)
class KnownFraction(DiscardedFraction):
    """A discarded part by its facts."""

    negative: Array
    inexact: Array | bool
    odd: Array | bool
    share: tuple[Array, Array | bool]
    draw: RandomBits | None = None


@dataclass(frozen=True)
class BelowSmallest(DiscardedFraction):
    """A magnitude below T, whose neighbours are 0 and T."""

    magnitude: Array
    negative: Array
    draw: RandomBits | None
    grid: Grid
    odd: ClassVar[bool] = False

    @property
    def inexact(self) -> Array:
        return self.magnitude != 0

    @property
    def above(self) -> Array:
        return lax_where(self.negative, 0, self.magnitude) != 0

    @property
    def below(self) -> Array:
        return lax_where(self.negative, self.magnitude, 0) != 0

    def nearest(self, tie: Array | bool) -> Array:
        half = self.grid.carrier.magnitude_bits(Fraction(2) ** (self.grid.tiny_exponent - 1))
        assert half is not None  # a carrier with values below T holds T / 2
        if isinstance(tie, bool):
            return self.magnitude >= half if tie else self.magnitude > half
        return (self.magnitude > half) | (tie & (self.magnitude == half))

    @property
    def share(self) -> tuple[Array, Array | bool]:
        """The magnitude over T as a fraction in units of a random word's, and whether bits are cut from it."""
        assert self.draw is not None
        carrier, exponent, width = self.grid.carrier, self.grid.tiny_exponent, self.draw.width
        unsigned = self.draw.word.dtype
        if exponent + carrier.bias <= 1:  # T is a subnormal of the carrier or its smallest normal value
            return self.magnitude.astype(unsigned) << (width - (exponent - carrier.tiny_exponent)), False
        field = self.magnitude >> carrier.fraction
        # Moves the significand to the top of a word; the bits above it are shifted out, except the leading bit's place.
        significand = (self.magnitude | 1 << carrier.fraction).astype(unsigned) << (width - 1 - carrier.fraction)
        if exponent + carrier.bias - 2 < width:  # else subnormals of the carrier leave no bit
            significand = lax_where(field > 0, significand, significand << 1 >> 1)
            field = jnp.maximum(field, 1)
        # Not negative below T; above T the result is not used.
        shift = jnp.maximum(exponent + carrier.bias - 1 - field, 0)
        within = jnp.minimum(shift, width - 1).astype(unsigned)
        share = lax_where(shift < width, significand >> within, 0)
        return share, (share << within != significand) & (self.magnitude != 0)


#: Of a `DiscardedFraction`; for modes other than nearest ones and StochasticC a `BetweenNeighbours` is enough, with its
#: own `stochastic`.
AWAY_FROM_ZERO: dict[Rounding, Callable[[Any], Array | bool]] = {
    Rounding.NEAREST_EVEN: lambda rest: rest.nearest(rest.odd),
    Rounding.NEAREST_AWAY: lambda rest: rest.nearest(True),
    Rounding.NEAREST_ZERO: lambda rest: rest.nearest(False),
    Rounding.UP: lambda rest: rest.above,
    Rounding.DOWN: lambda rest: rest.below,
    Rounding.TOWARD_ZERO: lambda rest: False,
    Rounding.ODD: lambda rest: rest.inexact if rest.odd is False else rest.inexact & (rest.odd ^ True),
    Rounding.STOCHASTIC: lambda rest: rest.stochastic(),
    Rounding.STOCHASTIC_B: lambda rest: rest.stochastic(),
    Rounding.STOCHASTIC_C: DiscardedFraction.stochastic_to_nearest,
    Rounding.STOCHASTIC_EQUAL: lambda rest: rest.inexact & _coin_of_word(rest.draw),
}


# -- between levels ----------------------------------------------------------------------------------------------------


def rounding_thresholds(mode: Rounding, levels: Sequence[float], first: int = 0) -> list[tuple[Fraction, bool]]:
    """For each pair of neighbouring levels, the point from which on the upper one is taken, and whether it is excluded.

    Stochastic modes have no thresholds.

    Args:
        mode: a deterministic mode.
        levels: increasing numbers.
        first: the index of the first level.
    """
    points = []
    for index, (low, high) in enumerate(itertools.pairwise(map(Fraction, levels)), first):
        middle = (low + high) / 2
        at_low, at_high = (low, True), (high, False)
        point_of_mode = {
            Rounding.NEAREST_EVEN: (middle, False),
            Rounding.NEAREST_AWAY: (middle, middle <= 0),
            Rounding.NEAREST_ZERO: (middle, middle > 0),
            Rounding.UP: at_low,
            Rounding.DOWN: at_high,
            Rounding.TOWARD_ZERO: at_high if middle > 0 else at_low,
            Rounding.ODD: at_low if index % 2 == 0 else at_high,
        }
        points.append(point_of_mode[mode])
    return points


# -- facts of modes ----------------------------------------------------------------------------------------------------

#: Modes that take the nearer neighbour.
NEAREST_MODES = frozenset({Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY, Rounding.NEAREST_ZERO})
#: Modes for which the smallest distance from a value of the format changes the result, so that no product may vanish.
TINY_SENSITIVE_MODES = frozenset({Rounding.UP, Rounding.DOWN, Rounding.ODD, Rounding.STOCHASTIC_EQUAL})
#: Modes that round a positive or a negative overflow inward, to the largest finite value.
INWARD_OVERFLOW = {
    Rounding.TOWARD_ZERO: (True, True),
    Rounding.ODD: (True, True),
    Rounding.UP: (False, True),
    Rounding.DOWN: (True, False),
}
#: Modes that take a negative number to the smallest value of an unsigned format.
NEGATIVE_TO_SMALLEST = frozenset({Rounding.UP, Rounding.TOWARD_ZERO, Rounding.ODD})
