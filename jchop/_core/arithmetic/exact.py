"""An exact result in a form that can be rounded once: its leading bits in the carrier, and the bits below them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import jax
import jax.numpy as jnp

from jchop._common import bit_ops
from jchop._common.bit_ops import Carrier
from jchop._core.arithmetic.ranges import rounds_on_carrier_grid
from jchop._core.rounding import modes
from jchop._core.rounding.elements import overflow_mask, round_to_spec
from jchop._core.rounding.grid import Grid, make_grid
from jchop._core.rounding.modes import RandomBits, take_random_bits
from jchop._core.rounding.tapered import tapered_word
from jchop._spec.spec import Spec
from jchop.formats import CodebookFormat, FloatFormat
from jchop.formats.rounding import Overflow, Rounding

Array = jax.Array


@dataclass(frozen=True)
class ExactResult:
    """A number |v| = (t + (rest + epsilon) 2^-W) ulp(t), with W the width of a word and 0 <= epsilon < 1.

    t is |v| rounded toward zero in the carrier, whose words have W bits. Infinities and NaN have rest = epsilon = 0.
    """

    sign: Array  # the sign bit in place
    magnitude: Array  # the bits of t; of the largest finite value if `beyond`
    inexact: Array  # whether v is not t
    rest: Array  # unsigned
    sticky: Array  # whether epsilon > 0
    beyond: Array | bool = False  # whether |v| exceeds the carrier's largest finite value by an ulp of it or more
    quantum: int | None = None  # if known: every finite v is a multiple of 2^quantum


def significand(magnitude: Array, carrier: Carrier) -> Array:
    """The significand of magnitude bits as an integer, its leading bit included."""
    normal = (magnitude >> carrier.fraction > 0).astype(magnitude.dtype)
    return magnitude & bit_ops.low_mask(carrier.fraction) | normal << carrier.fraction


def round_exact(v: ExactResult, spec: Spec | None, carrier: Carrier, word: Array | None) -> Array:
    """`v` rounded once under `spec`; None: to the carrier itself, to nearest even."""
    if spec is None:
        return bit_ops.join_sign(v.sign, v.magnitude + _nearest_increment(v, Rounding.NEAREST_EVEN), carrier)
    return round_to_spec(*_arguments_of_round_to_spec(v, spec, carrier, word))


def exact_overflow_mask(v: ExactResult, spec: Spec, carrier: Carrier, word: Array | None) -> Array:
    """Whether `v`, rounded under `spec`, is beyond the ends of its format; NaN counts as inside."""
    fmt = spec.format
    if isinstance(fmt, CodebookFormat):
        ordered_bits, is_inexact = bit_ops.ordered_integers(v.sign, v.magnitude), v.inexact.astype(carrier.work)
        floor, ceiling = (
            ordered_bits - bit_ops.lax_where(v.sign != 0, is_inexact, 0),
            ordered_bits + bit_ops.lax_where(v.sign != 0, 0, is_inexact),
        )
        low, high = (carrier.ceil_bits(Fraction(end)) for end in (fmt.min, fmt.max))  # numbers of the carrier
        return ((floor < low) | (ceiling > high)) & (v.magnitude <= carrier.inf)
    return overflow_mask(*_arguments_of_round_to_spec(v, spec, carrier, word))


def _arguments_of_round_to_spec(
    v: ExactResult, spec: Spec, carrier: Carrier, word: Array | None
) -> tuple[Array, Spec, Carrier, Array | None]:
    """Numbers of the carrier, a spec and words with which `round_to_spec` gives the rounded `v`."""
    magnitude = v.magnitude | v.inexact.astype(carrier.work)  # rounded to odd
    if rounds_on_carrier_grid(spec, carrier):
        magnitude = _round_on_carrier_grid(v, magnitude, spec, carrier)
    elif spec.rounding.stochastic:
        # The draw is decided here, because v has more bits than the carrier.
        away = _draws_away(v, spec, carrier, word) | v.beyond
        spec = replace(spec, rounding=Rounding.STOCHASTIC_EQUAL, random_bits=None)
        word = _coin_words(away, carrier)
    return bit_ops.join_sign(v.sign, magnitude, carrier), spec, carrier, word


@dataclass(frozen=True)
class _BelowLastPlace(modes.DiscardedFraction):
    """The bits below the last place of the carrier, as the discarded part."""

    value: ExactResult

    @property
    def odd(self) -> Array:
        return (self.value.magnitude & 1) != 0

    def share(self) -> tuple[Array, Array]:
        return self.value.rest, self.value.sticky


def _nearest_increment(v: ExactResult, mode: Rounding) -> Array:
    """1 if v is rounded away from zero on the carrier's own grid, else 0."""
    return jnp.asarray(modes.AWAY_FROM_ZERO[mode](_BelowLastPlace(v))).astype(v.magnitude.dtype)


def _round_on_carrier_grid(v: ExactResult, odd_bits: Array, spec: Spec, carrier: Carrier) -> Array:
    """Rounded magnitude bits, which `round_to_spec` changes only at the ends of the format."""
    assert isinstance(spec.format, FloatFormat)
    grid = make_grid(spec.format, carrier)
    nearest = v.magnitude + _nearest_increment(v, spec.rounding)
    if spec.overflow is not Overflow.IEEE:  # a finite value does not become infinity here
        nearest = bit_ops.lax_where(v.magnitude < carrier.inf, jnp.minimum(nearest, carrier.inf - 1), nearest)
    kept_below = max(grid.tiny_bits, grid.normal_bits if spec.flush else 0)
    return bit_ops.lax_where(v.magnitude < kept_below, odd_bits, nearest) if kept_below else nearest


# -- stochastic modes --------------------------------------------------------------------------------------------------


def _coin_words(condition: Array, carrier: Carrier) -> Array:
    """Words whose top bit is the condition, the coin of `Rounding.STOCHASTIC_EQUAL`."""
    unsigned = jnp.dtype(f"uint{carrier.work_width}")
    return condition.astype(unsigned) << (carrier.work_width - 1)


def _draws_away(v: ExactResult, spec: Spec, carrier: Carrier, word: Array | None) -> Array:
    """The decision of a stochastic mode, from the exact discarded fraction."""
    tail = _StochasticTail(v, take_random_bits(word, spec, carrier), make_grid(spec.format, carrier))
    return jnp.asarray(modes.AWAY_FROM_ZERO[spec.rounding](tail))


@dataclass(frozen=True)
class _StochasticTail(modes.DiscardedFraction):
    """The discarded part for a stochastic mode, from an exact number instead of a value of the carrier."""

    value: ExactResult
    draw: RandomBits | None
    grid: Grid

    @property
    def inexact(self) -> bool:
        return True  # `round_to_spec` treats values of the format

    def share(self) -> tuple[Array, Array]:
        """floor(nu 2^W) for the discarded fraction nu, as an unsigned word of W bits; and whether bits were dropped."""
        v, carrier = self.value, self.grid.carrier
        unsigned, width = v.rest.dtype, carrier.work_width
        if self.grid.taper is None:
            high, depth = significand(v.magnitude, carrier).astype(unsigned), _tail_depth(v, self.grid)
        else:
            layout = tapered_word(v.magnitude, self.grid.taper, carrier)
            high, depth = layout.word.astype(unsigned), layout.depth
        if isinstance(depth, int):
            return high << (width - depth) | v.rest >> depth, (v.rest << (width - depth) != 0) | v.sticky
        left_shift = bit_ops.lax_clip(width - depth, 0, width - 1).astype(unsigned)
        right_shift = bit_ops.lax_clip(depth - width, 0, width - 1).astype(unsigned)
        depth_in_word = bit_ops.lax_clip(depth, 0, width - 1).astype(unsigned)
        is_in_word = depth < width
        share = (high << left_shift >> right_shift) | bit_ops.lax_where(is_in_word, v.rest >> depth_in_word, 0)
        tail = bit_ops.lax_where(
            is_in_word, v.rest & (jnp.ones_like(v.rest) << depth_in_word) - 1, v.rest | (high ^ share << right_shift)
        )
        return share, (tail != 0) | v.sticky


def _tail_depth(v: ExactResult, grid: Grid) -> Array | int:
    """The exponent d for which 2^d ulp(t) is the gap of the format around v; below T the gap from 0 to T.

    Multiples of T lie only in gaps of the format's full precision.
    """
    if v.quantum is not None and grid.drop and not grid.narrows and v.quantum >= grid.tiny_exponent:
        return grid.drop
    depth, _ = modes.drop_depth(v.magnitude, grid)
    if not grid.tiny_bits:
        return depth
    carrier = grid.carrier
    depth_below = grid.tiny_exponent + carrier.bias + carrier.fraction - jnp.maximum(v.magnitude >> carrier.fraction, 1)
    return bit_ops.lax_where(v.magnitude < grid.tiny_bits, depth_below, depth)
