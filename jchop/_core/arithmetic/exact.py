"""An exact result in a form that can be rounded once: its leading bits in the carrier, and the bits below them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import CARRIERS, Carrier, join_sign, lax_clip, lax_where, ordered_integers
from jchop._core.rounding import modes
from jchop._core.rounding.codebooks import pick_level
from jchop._core.rounding.codes import significand
from jchop._core.rounding.elements import overflow_mask, round_to_spec
from jchop._core.rounding.grid import Grid, carrier_holds, make_grid, tapered_word, x64_remedy
from jchop._core.rounding.modes import KnownFraction, RandomBits, rounding_thresholds, take_random_bits
from jchop._spec.spec import Spec
from jchop.formats import CodebookFormat, ElementFormat, FloatFormat, TaperedFormat, UniformFormat
from jchop.formats.rounding import Overflow, Rounding

# == ranges of operands ================================================================================================


#: The carriers of operations.
OPERATION_CARRIERS = ("float32", "float64")


@dataclass(frozen=True)
class ValueRange:
    """The range of an operand: every finite value v is a multiple of 2^quantum with |v| < 2^top.

    In addition, v has at most `precision` significant bits, from the first to the last bit that is set. Unless v is
    zero, |v| >= 2^least; None: 2^quantum.
    """

    quantum: int
    precision: int
    top: int
    least: int | None = None

    @property
    def bottom(self) -> int:
        """An exponent for which 2^bottom is at most every nonzero |v|."""
        return self.quantum if self.least is None else self.least

    def is_normal(self, carrier: Carrier) -> bool:
        """Whether no nonzero value is subnormal in the carrier."""
        return self.bottom >= 1 - carrier.bias

    @property
    def bits(self) -> int:
        """The largest number of significant bits of a value."""
        return min(self.precision, max(self.top - self.quantum, 0))


def carrier_range(carrier: Carrier) -> ValueRange:
    """The range of all values of `carrier`."""
    return ValueRange(carrier.tiny_exponent, carrier.fraction + 1, carrier.bias + 1)


@lru_cache(maxsize=1024)
def range_of(spec: Spec | None, carrier: Carrier) -> ValueRange:
    """The range of values of `carrier` rounded under `spec`; None: the range of all its values."""
    whole = carrier_range(carrier)
    if spec is None:
        return whole
    own = _range_of_format(spec.format)
    least = spec.format.emin if spec.flush and isinstance(spec.format, FloatFormat) else None
    return ValueRange(
        max(own.quantum, whole.quantum), min(own.precision, whole.precision), min(own.top, whole.top), least
    )


def holds_format(fmt: ElementFormat, carrier: Carrier) -> bool:
    """Whether every finite value of `fmt` is a value of `carrier`."""
    own, whole = _range_of_format(fmt), carrier_range(carrier)
    return own.precision <= whole.precision and own.quantum >= whole.quantum and own.top <= whole.top


def product_range(a: ValueRange, b: ValueRange) -> ValueRange:
    """The range of the exact products of values of two ranges."""
    least = None if a.least is None or b.least is None else a.least + b.least
    return ValueRange(a.quantum + b.quantum, a.bits + b.bits, a.top + b.top, least)


def sum_range(a: ValueRange, b: ValueRange) -> ValueRange:
    """The range of the exact sums of values of two ranges."""
    quantum, top = min(a.quantum, b.quantum), max(a.top, b.top) + 1
    return ValueRange(quantum, max(top - quantum, 1), top)


@lru_cache(maxsize=1024)
def _range_of_format(fmt: ElementFormat) -> ValueRange:
    """The quantum, the precision in bits, and the exponent above the largest value, of a format."""
    if isinstance(fmt, FloatFormat):
        return ValueRange(fmt.emin - fmt.frac_bits, fmt.precision, fmt.emax + 1)
    if isinstance(fmt, UniformFormat):
        largest = max(fmt.max_code, -fmt.min_code)
        # The minimum -2^k of two's complement has one significant bit.
        return ValueRange(-fmt.frac_bits, fmt.max_code.bit_length(), largest.bit_length() - fmt.frac_bits)
    if isinstance(fmt, TaperedFormat):
        return ValueRange(fmt.last_place, fmt.most_fraction_bits + 1, fmt.emax + 1)
    assert isinstance(fmt, CodebookFormat)
    ends = [_exponents_of_ends(Fraction(level)) for level in fmt.levels if level] or [(0, 1)]
    return ValueRange(min(low for low, _ in ends), max(high - low for low, high in ends), max(high for _, high in ends))


def _exponents_of_ends(value: Fraction) -> tuple[int, int]:
    """The exponent of the last significant bit of a dyadic number, and the exponent of the first bit plus 1."""
    count = abs(value.numerator)
    last_bit = (count & -count).bit_length() - 1
    shift = value.denominator.bit_length() - 1
    return last_bit - shift, count.bit_length() - shift


# -- which result formats an operation can have ------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def require_operation(spec: Spec | None, carrier: Carrier, argument: str) -> None:
    """Refuses a spec to which the exact result of an operation on `carrier` cannot always be rounded once.

    The exact result is first rounded to odd in the carrier's precision. If the carrier has two bits more than the
    format, the second rounding gives the rounded exact result (Boldo and Melquiond 2008). A format with the carrier's
    own grid is rounded to directly.

    Args:
        spec: the rounding of the result; None, the carrier's own format, always passes.
        carrier: the carrier of the operands.
        argument: the name of the argument with the spec, for the message.

    Raises:
        ValueError: if `carrier` is too narrow; the message names a dtype that works.
    """
    if spec is None or supports_operation(spec, carrier):
        return
    if isinstance(spec.format, CodebookFormat):
        raise ValueError(f"{argument}={str(spec)!r}: the result of an operation cannot be rounded to a codebook")
    able = [name for name in OPERATION_CARRIERS if supports_operation(spec, CARRIERS[name])]
    remedy = f"cast the operands to {able[0]}{x64_remedy(able)}" if able else "no carrier up to float64 can"
    if carrier.name not in OPERATION_CARRIERS:
        cause = f"operations must be {' or '.join(OPERATION_CARRIERS)} ones, not {carrier.name}"
    elif not carrier_holds(spec, carrier):
        cause = f"{carrier.name} cannot hold every result"
    else:
        cause = f"to round a result once, {carrier.name} must have two bits more than the format everywhere"
    raise ValueError(f"{argument}={str(spec)!r}: {cause}; {remedy}")


def supports_operation(spec: Spec, carrier: Carrier) -> bool:
    """Whether results of operations on `carrier` can be rounded under `spec`; see `require_operation`."""
    fmt = spec.format
    if carrier.name not in OPERATION_CARRIERS or isinstance(fmt, CodebookFormat) or not carrier_holds(spec, carrier):
        return False
    return has_spare_bits(fmt, carrier) or rounds_on_carrier_grid(spec, carrier)


def has_spare_bits(fmt: ElementFormat, carrier: Carrier) -> bool:
    """Whether the carrier has two bits more than `fmt` in the whole range of `fmt`."""
    if isinstance(fmt, FloatFormat):
        last_place = fmt.emin - fmt.frac_bits
        return fmt.frac_bits + 2 <= carrier.fraction and last_place >= carrier.tiny_exponent + 2
    if isinstance(fmt, TaperedFormat):
        return fmt.most_fraction_bits + 2 <= carrier.fraction and fmt.last_place >= carrier.tiny_exponent + 2
    assert isinstance(fmt, UniformFormat)
    return fmt.max_code.bit_length() + 1 <= carrier.fraction and -fmt.frac_bits >= carrier.tiny_exponent + 2


def rounds_on_carrier_grid(spec: Spec, carrier: Carrier) -> bool:
    """Whether `spec` rounds on the carrier's own grid: the same precision, and subnormals, if any."""
    fmt = spec.format
    if not isinstance(fmt, FloatFormat) or fmt.frac_bits != carrier.fraction:
        return False
    holds_largest = carrier.magnitude_bits(fmt.exact_max) is not None
    has_subnormals = fmt.subnormals and fmt.zero
    return holds_largest and (fmt.emin == 1 - carrier.bias if has_subnormals else fmt.emin >= 1 - carrier.bias)


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


def round_exact(v: ExactResult, spec: Spec | None, carrier: Carrier, word: Array | None) -> Array:
    """`v` rounded once under `spec`; None: to the carrier itself, to nearest even."""
    if spec is None:
        return join_sign(v.sign, v.magnitude + _increment(v, Rounding.NEAREST_EVEN), carrier)
    return round_to_spec(*_arguments_of_round_to_spec(v, spec, carrier, word))


def exact_overflow_mask(v: ExactResult, spec: Spec, carrier: Carrier, word: Array | None) -> Array:
    """Whether `v`, rounded under `spec`, is beyond the ends of its format; NaN counts as inside."""
    fmt = spec.format
    if isinstance(fmt, CodebookFormat):
        ordered_bits, is_inexact = ordered_integers(v.sign, v.magnitude), v.inexact.astype(carrier.work)
        floor, ceiling = (
            ordered_bits - lax_where(v.sign != 0, is_inexact, 0),
            ordered_bits + lax_where(v.sign != 0, 0, is_inexact),
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
        magnitude = _round_on_carrier_grid(v, magnitude, spec, carrier, word)
    elif spec.rounding.stochastic:
        # The draw is decided here, because v has more bits than the carrier.
        # Always inexact: `round_to_spec` treats values of the format.
        share = _share_of_exact(v, make_grid(spec.format, carrier))
        tail = KnownFraction(v.sign != 0, True, False, share, take_random_bits(word, spec, carrier))
        away = jnp.asarray(modes.AWAY_FROM_ZERO[spec.rounding](tail)) | v.beyond
        spec = replace(spec, rounding=Rounding.STOCHASTIC_EQUAL, random_bits=None)
        # Words whose top bit, the coin of that mode, is the decision.
        word = away.astype(jnp.dtype(f"uint{carrier.work_width}")) << (carrier.work_width - 1)
    return join_sign(v.sign, magnitude, carrier), spec, carrier, word


def below_last_place(v: ExactResult, draw: RandomBits | None = None) -> KnownFraction:
    """The bits below the last place of the carrier, as the discarded part."""
    return KnownFraction(v.sign != 0, v.inexact, (v.magnitude & 1) != 0, (v.rest, v.sticky), draw)


def _increment(v: ExactResult, mode: Rounding, draw: RandomBits | None = None) -> Array:
    """1 if v is rounded away from zero on the carrier's own grid, else 0."""
    away = jnp.asarray(modes.AWAY_FROM_ZERO[mode](below_last_place(v, draw)))
    return (away | v.beyond if mode.stochastic else away).astype(v.magnitude.dtype)


def _round_on_carrier_grid(v: ExactResult, odd_bits: Array, spec: Spec, carrier: Carrier, word: Array | None) -> Array:
    """Rounded magnitude bits, which `round_to_spec` changes only at the ends of the format."""
    assert isinstance(spec.format, FloatFormat)
    grid = make_grid(spec.format, carrier)
    rounded = v.magnitude + _increment(v, spec.rounding, take_random_bits(word, spec, carrier))
    if spec.overflow is not Overflow.IEEE:  # a finite value does not become infinity here
        rounded = lax_where(v.magnitude < carrier.inf, jnp.minimum(rounded, carrier.inf - 1), rounded)
    kept_below = max(grid.tiny_bits, grid.normal_bits if spec.flush else 0)
    return lax_where(v.magnitude < kept_below, odd_bits, rounded) if kept_below else rounded


# -- stochastic modes --------------------------------------------------------------------------------------------------


def _share_of_exact(v: ExactResult, grid: Grid) -> tuple[Array, Array]:
    """The share that a stochastic mode compares, from an exact number instead of a value of the carrier."""
    carrier, unsigned, width = grid.carrier, v.rest.dtype, grid.carrier.work_width
    if grid.taper is None:
        high, depth = significand(v.magnitude, carrier).astype(unsigned), _tail_depth(v, grid)
    else:
        layout = tapered_word(v.magnitude, grid.taper, carrier)
        high, depth = layout.word.astype(unsigned), layout.depth
    if isinstance(depth, int):
        return high << (width - depth) | v.rest >> depth, (v.rest << (width - depth) != 0) | v.sticky
    left_shift = lax_clip(width - depth, 0, width - 1).astype(unsigned)
    right_shift = lax_clip(depth - width, 0, width - 1).astype(unsigned)
    depth_in_word = lax_clip(depth, 0, width - 1).astype(unsigned)
    is_in_word = depth < width
    share = (high << left_shift >> right_shift) | lax_where(is_in_word, v.rest >> depth_in_word, 0)
    tail = lax_where(
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
    return lax_where(v.magnitude < grid.tiny_bits, depth_below, depth)


# == levels of a table =================================================================================================
# A number is F ulp + R 2^-W ulp, plus less than 2^-W ulp. F is an integer in the order of the carrier's values, R a
# word of W bits. A threshold, from which on the next level is taken, has the same form. A number has reached all
# thresholds of a smaller F. If a threshold has an equal F, R decides.


def round_to_levels(v: ExactResult, fmt: CodebookFormat, mode: Rounding, carrier: Carrier) -> Array:
    """`v` rounded under a deterministic mode; NaN stays NaN, numbers beyond the ends saturate."""
    table = require_levels(fmt, mode, carrier)
    floor, rest, sticky = _floor_and_rest(v)
    columns = (pick_level(floor, table.floors + 1, column) for column in table.columns)
    lower, upper, next_floor, next_rest, is_strict, *levels_beyond = columns
    next_rest = lax.bitcast_convert_type(next_rest, rest.dtype)
    exceeds = (rest > next_rest) | ((rest == next_rest) & sticky)
    reaches = (floor == next_floor) & (exceeds | ((rest == next_rest) & (is_strict == 0)))
    result = lax_where(reaches, upper, lower)
    if levels_beyond:
        result = lax_where((floor == next_floor) & exceeds, levels_beyond[0], result)
    is_nan = v.magnitude > carrier.inf
    sign = lax_where(result < 0, jnp.full_like(result, carrier.sign_bit), 0)
    return join_sign(lax_where(is_nan, v.sign, sign), lax_where(is_nan, v.magnitude, jnp.abs(result)), carrier)


def _floor_and_rest(v: ExactResult) -> tuple[Array, Array, Array]:
    """F, R, and whether further bits follow."""
    rounds_down = (v.sign != 0) & v.inexact
    floor = ordered_integers(v.sign, v.magnitude) - rounds_down.astype(v.magnitude.dtype)
    # 1 - rest, rounded down if further bits follow.
    complement = ~v.rest + (v.sticky ^ True).astype(v.rest.dtype)
    return floor, lax_where(rounds_down, complement, v.rest), v.sticky


@dataclass(frozen=True)
class _ThresholdColumns:
    """The F of the thresholds, increasing; and columns with an entry for each threshold and one more."""

    floors: np.ndarray
    #: The level below, the level above, F, R, and 1 if a number equal to the threshold has not reached it. Under
    #: `Rounding.ODD` also the level beyond: it differs from the level above if only numbers equal to the threshold take
    #: that level.
    columns: tuple[np.ndarray, ...]


@lru_cache(maxsize=64)
def require_levels(fmt: CodebookFormat, mode: Rounding, carrier: Carrier) -> _ThresholdColumns:
    """The table of thresholds and levels.

    Raises:
        ValueError: if a threshold has too many bits.
    """
    thresholds = rounding_thresholds(mode, fmt.levels)
    level_bits = carrier.ordered_bits(fmt.levels).tolist()
    if mode is Rounding.ODD:
        return _columns_of_odd_rounding(level_bits, thresholds, carrier)
    work, width = carrier.work, carrier.work_width
    wide = replace(carrier, fraction=carrier.fraction + width)  # its bits are the bits of F, and below them R
    parts = [(value < 0, *wide.toward_zero(value)) for value, _ in thresholds]
    if not all(exact for *_, exact in parts):
        raise ValueError(
            f"rounding={mode.value!r}: {carrier.name} cannot tell quotients between the levels of {fmt} apart"
        )
    both = [-bits if negative else bits for negative, bits, _ in parts]
    floors = [bits >> width for bits in both]  # all different: a level lies between two
    columns = (
        level_bits,
        [*level_bits[1:], level_bits[-1]],
        [*floors, np.iinfo(work).max],
        [*np.array([bits % (1 << width) for bits in both], f"uint{width}").view(work), 0],
        [*(int(strict) for _, strict in thresholds), 0],
    )
    return _ThresholdColumns(np.array(floors, work), tuple(np.array(column, work) for column in columns))


def _columns_of_odd_rounding(
    level_bits: list[int], thresholds: list[tuple[Fraction, bool]], carrier: Carrier
) -> _ThresholdColumns:
    """Only a number equal to a level of even index takes it: its two thresholds are one, and the next level follows.

    The thresholds are levels, so they are values of the carrier, and differ in F.
    """
    rows: list[tuple[int, ...]] = []
    for i, (value, strict) in enumerate(thresholds):
        floor = carrier.ceil_bits(value)
        if strict and rows and rows[-1][2] == floor:  # the previous threshold is the same level
            rows[-1] = (*rows[-1][:5], level_bits[i + 1])
        else:
            rows.append((level_bits[i], level_bits[i + 1], floor, 0, int(strict), level_bits[i + 1]))
    last = rows[-1][5] if rows else level_bits[0]
    rows.append((last, last, np.iinfo(carrier.work).max, 0, 0, last))
    columns = np.array(rows, carrier.work).T
    return _ThresholdColumns(columns[2][:-1], tuple(columns))
