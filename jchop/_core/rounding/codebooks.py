"""Rounding to a table of levels, by comparisons of ordered integers, or by bins; and to logarithmic takums.

Numbers are put into bins by their sign and the leading bits of their magnitude. Bins are so narrow that each has at
most one threshold. A table has the number of thresholds below each bin; the number is compared with the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT64, Carrier, join_sign, lax_clip, lax_where, low_mask, ordered_integers, top_bit
from jchop._core.rounding.grid import encode_tapered, takum_exponent
from jchop._core.rounding.modes import RandomBits, rounding_thresholds, take_random_bits
from jchop._spec.spec import Spec
from jchop.formats import CodebookFormat, ElementFormat, LogTakumFormat, TakumFormat, _tapered
from jchop.formats.rounding import Rounding

# == bins ==============================================================================================================


#: The most bins: as bytes, they fit into a quarter of a CPU's first cache.
_MOST_BINS = 8192


@dataclass(frozen=True, eq=False)
class Bins:
    """Bins of integers by sign and magnitude; each has at most one threshold in it or next to it.

    Args:
        shift: the number of low bits of a magnitude that are ignored.
        first: the leading bits of the largest magnitudes in the first bin, which also takes all smaller ones.
        last: the leading bits of the smallest magnitudes in the last bin, which also takes all larger ones.
        negative: whether numbers below zero have separate bins; else they are in the first bin.
        below: for each bin, the index of the threshold to compare with: earlier ones are reached, later ones are not.
    """

    shift: int
    first: int
    last: int
    negative: bool
    below: np.ndarray

    def place(self, below: Array, magnitude: Array) -> Array:
        """The bin of each number, int32.

        Args:
            below: whether each number is below zero.
            magnitude: integers.
        """
        within = lax_clip(magnitude, self.first << self.shift, self.last << self.shift) >> self.shift
        least, most = -self.first, self.last - self.first + 1
        if self.negative:
            return (within + lax_where(below, most + least, least)).astype(jnp.int32)
        return lax_where(below, 0, within + least).astype(jnp.int32)


@lru_cache(maxsize=256)
def make_bins(thresholds: tuple[int, ...], margin: int = 0) -> Bins | None:
    """The fewest bins for thresholds; None if there are too many, or two thresholds are too close.

    Args:
        thresholds: increasing integers, in the order of the numbers; at least one.
        margin: the largest error of a binned number; bins count as larger by it.
    """
    width = max(map(abs, thresholds)).bit_length()
    candidates = (_bins_of_shift(np.array(thresholds, object), shift, margin) for shift in range(width, -1, -1))
    return next((bins for bins in candidates if bins is not None), None)


def _bins_of_shift(thresholds: np.ndarray, shift: int, margin: int) -> Bins | None:
    """The bins of 2^shift magnitudes each; None if there are too many, or one has two thresholds."""
    # Thresholds next to zero stay in the first bins, for every exponent.
    sizes = [abs(value) for value in thresholds if abs(value) > 1 + margin]
    if not sizes:
        return None
    first, last = max(((min(sizes) - margin) >> shift) - 1, 0), ((max(sizes) + margin) >> shift) + 1
    negative = bool(thresholds[0] < 0)
    count = last - first + 1
    if count << negative > _MOST_BINS:
        return None
    top = 1 << shift
    starts = np.array([0, *((first + i) * top for i in range(1, count))], object)
    ends = np.array([*((first + i + 1) * top - 1 for i in range(count - 1)), max(sizes) + 2 * top], object)
    low, high = starts - margin, ends + margin
    if negative:
        low, high = np.concatenate([low, -ends - margin]), np.concatenate([high, margin - starts])
    else:
        low[0] = min(low[0], thresholds[0] - 1)
    below = np.searchsorted(thresholds, low, side="left")
    if (np.searchsorted(thresholds, high, side="right") - below > 1).any():
        return None
    below = np.minimum(below, len(thresholds) - 1)
    return Bins(shift, first, last, negative, below.astype(np.uint8 if len(thresholds) <= 256 else np.uint16))


def take_in_bounds(table: Array, index: Array) -> Array:
    """``table[index]`` for valid indexes. Plain indexing does not support explicit sharding."""
    return table.at[index].get(
        out_sharding=jax.typeof(index).sharding, mode="promise_in_bounds", wrap_negative_indices=False
    )


# == levels ============================================================================================================


#: The most levels for which every threshold is compared, as kernels can; more levels use tables.
MOST_COMPARISONS = 32


def refuse_table(fmt: ElementFormat) -> str | None:
    """The reason why kernels do not take a format whose levels are gathered from a table; None for another."""
    if isinstance(fmt, CodebookFormat) and len(fmt.levels) > MOST_COMPARISONS:
        return f"{fmt} has more than {MOST_COMPARISONS} levels, which are gathered from a table"
    return None


def round_codebook(sign: Array, magnitude: Array, word: Array | None, spec: Spec, carrier: Carrier) -> Array:
    """Values rounded to the levels of `spec.format`; NaN stays NaN, numbers beyond the ends saturate."""
    table = _level_table(spec.format, carrier)  # type: ignore[arg-type]
    value = ordered_integers(sign, magnitude)
    if spec.rounding in table.thresholds:
        result = pick_level(value, table.thresholds[spec.rounding], table.levels)
    else:
        result = _draw_level(value, word, spec, table, carrier)
    is_nan = magnitude > carrier.inf
    sign = lax_where(is_nan, sign, lax_where(result < 0, carrier.sign_bit, 0).astype(sign.dtype))
    return join_sign(sign, lax_where(is_nan, magnitude, jnp.abs(result)), carrier)


@dataclass(frozen=True)
class _LevelTable:
    levels: np.ndarray  # as ordered integers of the carrier
    thresholds: dict[Rounding, np.ndarray]  # by mode: thresholds[i] is the first value of level i + 1


@lru_cache(maxsize=64)
def _level_table(fmt: CodebookFormat, carrier: Carrier) -> _LevelTable:
    """The carrier bits of a format's levels, and of the first number that each mode rounds up to each of them."""

    def starts(mode: Rounding) -> np.ndarray:
        points = rounding_thresholds(mode, fmt.levels)
        # The first number above a point, or from it on.
        bits = [1 - carrier.ceil_bits(-point) if strict else carrier.ceil_bits(point) for point, strict in points]
        return np.array(bits, carrier.work)

    return _LevelTable(
        carrier.ordered_bits(fmt.levels), {mode: starts(mode) for mode in Rounding if not mode.stochastic}
    )


def pick_level(value: Array, thresholds: np.ndarray, choices: np.ndarray) -> Array:
    """``choices[k]`` for values that have reached k of the thresholds."""
    if len(choices) > MOST_COMPARISONS:
        # `pick_level` by bins, or by bisection if the thresholds cannot be binned.
        bins = make_bins(tuple(thresholds.tolist()))
        if bins is None:
            return _bisect_level(value, thresholds, choices)
        index = take_in_bounds(jnp.asarray(bins.below), bins.place(value < 0, jnp.abs(value))).astype(jnp.int32)
        reaches = value >= take_in_bounds(jnp.asarray(thresholds), index)
        return take_in_bounds(jnp.asarray(choices), index + reaches)
    result = jnp.full_like(value, int(choices[0]))
    for least, choice in zip(thresholds, choices[1:], strict=True):
        result = lax_where(value >= int(least), jnp.full_like(value, int(choice)), result)
    return result


def pick_code(codes: Array, table: Sequence[int], bits: int) -> Array:
    """``table[code]`` for codes of a few bits, by a selection for each pair; beyond the table its last number."""
    full = [*table, *[table[-1]] * (2**bits - len(table))][: 2**bits]

    def pick(part: list[int], bit: int) -> Array | int:
        if len(set(part)) == 1:
            return part[0]
        low, high = pick(part[: len(part) // 2], bit - 1), pick(part[len(part) // 2 :], bit - 1)
        return lax_where(is_set[bit], *(jnp.full_like(codes, v) if isinstance(v, int) else v for v in (high, low)))

    is_set = [(codes & (1 << bit)) != 0 for bit in range(bits)]
    choice = pick(full, bits - 1)
    return jnp.full_like(codes, choice) if isinstance(choice, int) else choice


def _bisect_level(value: Array, thresholds: np.ndarray, choices: np.ndarray) -> Array:
    """The level that `pick_level` gives, by bisection.

    XLA takes minutes to compile two consecutive searches that it fuses. The barrier prevents the fusion.
    """
    value = lax.optimization_barrier(value)
    steps = len(thresholds).bit_length()
    padding = np.full((1 << steps) - 1 - len(thresholds), np.iinfo(thresholds.dtype).max, thresholds.dtype)
    table = jnp.asarray(np.concatenate([thresholds, padding]))
    count = jnp.zeros_like(value)
    for step in reversed(range(steps)):
        reaches = value >= take_in_bounds(table, count + ((1 << step) - 1))
        count = lax_where(reaches, count + (1 << step), count)
    return take_in_bounds(jnp.asarray(choices), count)


def _draw_level(value: Array, word: Array | None, spec: Spec, table: _LevelTable, carrier: Carrier) -> Array:
    """The stochastic modes: the neighbour of larger magnitude if the draw selects it, else the other one."""
    starts = table.thresholds[Rounding.DOWN]
    below = pick_level(value, starts, table.levels)
    above = pick_level(value, starts, np.append(table.levels[1:], table.levels[-1]))
    inward = jnp.abs(below) < jnp.abs(above)
    near, far = lax_where(inward, below, above), lax_where(inward, above, below)
    random = take_random_bits(word, spec, carrier)
    assert random is not None
    if spec.rounding is Rounding.STOCHASTIC_EQUAL:
        away = top_bit(random.word)
    else:
        away = _draws_by_distance(value, near, far, random, spec.rounding, carrier)
    exact = (value == below) | (value < int(table.levels[0]))
    return lax_where(exact, below, lax_where(away, far, near))


def _draws_by_distance(
    value: Array, near: Array, far: Array, random: RandomBits, mode: Rounding, carrier: Carrier
) -> Array:
    """P3109's nu >= 1 - R 2^-N for nu = (x - near) / (far - near), in the carrier's arithmetic.

    The spacing of levels is arbitrary, so nu is not an integer number of random bits. The probability is right to
    within the carrier's own resolution, not exact as on a grid.
    """
    wide = "float64" if carrier.width == 64 else "float32"

    def number(ordered_bits: Array) -> Array:
        sign = lax_where(ordered_bits < 0, carrier.sign_bit, 0).astype(ordered_bits.dtype)
        return join_sign(sign, jnp.abs(ordered_bits), carrier).astype(wide)

    unit = 1 << (random.width - random.bits)
    to_nearest = mode is Rounding.STOCHASTIC_C  # rounds nu 2^N to the nearest integer first, so half a unit earlier
    word = random.word | random.word.dtype.type(unit >> 1) if to_nearest else random.word
    distance, share = jnp.abs(number(far) - number(value)), word.astype(wide) * 2.0**-random.width
    limit = jnp.abs(number(far) - number(near)) * share
    if not to_nearest:
        return distance <= limit
    even = random.word >> (random.width - random.bits) & 1 == 0  # decides a tie
    return (distance < limit) | ((distance == limit) & even)


# == logarithmic takums, by tables of magnitudes in binary64, or by powers =============================================
# Of wide ones the logarithm of a number gives a code that may be one too large or too small. The number is then
# compared with the power next to it, which is computed exactly.


# -- powers ------------------------------------------------------------------------------------------------------------
# e^(l/2) for the l of takum strings of up to 33 bits, rounded once to binary64, by integer arithmetic. The power is
# the product of four numbers from tables, of the exponent of l and of three parts of its fraction. Each is known to
# 128 bits after the point, and so is the product, but for its last few bits. Of 2^32 powers none is expected within
# 2^-120 of a binary64 number or of a point between two, where those bits would matter.


#: Limbs of 32 bits: one before the point, four after it.
_TAKUM_LIMBS, _TAKUM_LIMB_BITS = 5, 32
_TAKUM_LIMB_MASK = np.uint64((1 << _TAKUM_LIMB_BITS) - 1)
#: The least exponent of l, and the bits of its fraction in three parts, the last of which is a string's 28th.
_LEAST_TAKUM_EXPONENT, _FRACTION_PARTS = -255, (10, 9, 9)


def takum_power(string: Array, bits: int, *, above: bool = False) -> Array:
    """Magnitude bits of the binary64 number nearest to the power of a positive string, or of the next one above it.

    Args:
        string: integers of int64, 1 to 2^(bits - 1) - 1.
        bits: of the whole string, with its sign; at most 33.
        above: whether the number is the smallest one above the power.
    """
    string = lax.optimization_barrier(string)  # XLA would compute it, and every limb, again for each use
    exponent, fraction_bits = takum_exponent(string, bits)
    fraction = (string & (jnp.ones_like(string) << fraction_bits) - 1) << (sum(_FRACTION_PARTS) - fraction_bits)
    wholes, shifts, *parts = _takum_power_tables()
    limbs = _limbs_from_table(wholes, exponent - _LEAST_TAKUM_EXPONENT)
    place = sum(_FRACTION_PARTS)
    for table, size in zip(parts, _FRACTION_PARTS, strict=True):
        place -= size
        limbs = lax.optimization_barrier(
            _multiply_takum_limbs(limbs, _limbs_from_table(table, fraction >> place & (1 << size) - 1))
        )
    lead = (limbs[0] >> 1).astype(jnp.int64)  # the power is 1 to 4 times 2^shift
    # 53 bits and one more. No power is a binary64 number or lies between two, so that bit decides.
    head = limbs[0] << 53 | limbs[1] << 21 | limbs[2] >> 11
    head = (head >> lead.astype(jnp.uint64)).astype(jnp.int64)
    significand = (head >> 1) + 1 if above else (head + 1) >> 1
    bias = FLOAT64.bias - 1  # the leading bit of the significand counts one, too
    magnitude = (
        (take_in_bounds(jnp.asarray(shifts), exponent - _LEAST_TAKUM_EXPONENT) + lead + bias) << FLOAT64.fraction
    ) + significand
    one = jnp.full_like(magnitude, FLOAT64.bias << FLOAT64.fraction)  # the one power that is a number
    return lax.optimization_barrier(lax_where((exponent == 0) & (fraction == 0), one + above, magnitude))


def _limbs_from_table(table: np.ndarray, index: Array) -> list[Array]:
    return [take_in_bounds(jnp.asarray(column), index) for column in table]


def _multiply_takum_limbs(a: list[Array], b: list[Array]) -> list[Array]:
    """The product of two numbers, cut after its last limb; the columns after that but one are left out."""
    low = [jnp.zeros_like(a[0]) for _ in range(_TAKUM_LIMBS + 2)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            if i + j <= _TAKUM_LIMBS:
                term = x * y
                low[i + j] += term & _TAKUM_LIMB_MASK
                if i + j:
                    low[i + j - 1] += term >> _TAKUM_LIMB_BITS
    carry = low[_TAKUM_LIMBS] >> _TAKUM_LIMB_BITS
    out: list[Array] = []
    for column in reversed(low[:_TAKUM_LIMBS]):
        total = column + carry
        out.append(total & _TAKUM_LIMB_MASK)
        carry = total >> _TAKUM_LIMB_BITS
    return out[::-1]


@lru_cache(maxsize=1)
def _takum_power_tables() -> tuple[np.ndarray, ...]:
    """The limbs of e^(c/2) over a power of two, the exponents of those, and the limbs of e^(f/2) of each part f."""
    places = _TAKUM_LIMB_BITS * (_TAKUM_LIMBS - 1)
    wholes = _successive_powers(Fraction(_LEAST_TAKUM_EXPONENT), Fraction(1), -2 * _LEAST_TAKUM_EXPONENT)
    shifts = [whole.bit_length() - 1 - _tapered.POWER_BITS for whole in wholes]
    scaled_wholes = [
        whole >> (_tapered.POWER_BITS + shift - places) for whole, shift in zip(wholes, shifts, strict=True)
    ]
    parts, place = [], 1
    for size in _FRACTION_PARTS:
        place <<= size
        steps = _successive_powers(Fraction(0), Fraction(1, place), 1 << size)
        parts.append(_columns_of_limbs([step >> (_tapered.POWER_BITS - places) for step in steps]))
    return _columns_of_limbs(scaled_wholes), np.array(shifts, np.int64), *parts


def _successive_powers(start: Fraction, step: Fraction, count: int) -> list[int]:
    """e^(l/2) 2^UNIT for l = start, start + step ..., to 300 bits and more."""
    powers, factor = [_tapered.sqrt_e_power(start)], _tapered.sqrt_e_power(step)
    for _ in range(count - 1):
        powers.append(powers[-1] * factor >> _tapered.POWER_BITS)
    return powers


def _columns_of_limbs(values: list[int]) -> np.ndarray:
    """Numbers as columns of limbs, the highest first."""
    limbs = [
        [value >> _TAKUM_LIMB_BITS * i & int(_TAKUM_LIMB_MASK) for value in values]
        for i in reversed(range(_TAKUM_LIMBS))
    ]
    return np.array(limbs, np.uint64)


# -- codes -------------------------------------------------------------------------------------------------------------


def round_log_takum(magnitude: Array, negative: Array, mode: Rounding, fmt: LogTakumFormat) -> Array:
    """|x| rounded by a deterministic mode, as magnitude bits of float64; no number but 0 becomes 0."""
    if fmt.bits > _tapered.LOG_TAKUM_TABLE_BITS:
        code = _wide_log_takum_code(magnitude, negative, mode, fmt)
        return lax_where(magnitude == 0, 0, takum_power(code, fmt.bits))
    levels = _log_takum_magnitudes(fmt.bits)
    above, below = (_log_takum_thresholds(fmt.bits, mode, side) for side in (False, True))
    rounded_bits = pick_level(magnitude, above, levels)
    if (above != below).any():
        rounded_bits = lax_where(negative, pick_level(magnitude, below, levels), rounded_bits)
    return lax_where(magnitude == 0, 0, rounded_bits)


def encode_log_takum(sign: Array, magnitude: Array, fmt: LogTakumFormat, carrier: Carrier) -> Array:
    """The codes of values of `fmt`, as integers of the carrier's work dtype."""
    if fmt.bits > _tapered.LOG_TAKUM_TABLE_BITS:
        code = _wide_log_takum_code(magnitude, sign != 0, Rounding.NEAREST_EVEN, fmt)
    else:
        levels = _log_takum_magnitudes(fmt.bits)
        code = pick_level(magnitude, levels[1:], np.arange(1, fmt.max_code + 1, dtype=levels.dtype))
    code = lax_where(magnitude == 0, 0, lax_where(magnitude > carrier.inf, -fmt.max_code - 1, code))
    return lax_where((sign != 0) & (magnitude <= carrier.inf), -code, code) & low_mask(fmt.bits)


def decode_log_takum(codes: Array, fmt: LogTakumFormat, carrier: Carrier) -> Array:
    """The values of codes in [0, 2^n), given in the work dtype of float64."""
    spare = carrier.work_width - fmt.bits
    count = codes << spare >> spare  # two's complement
    string = jnp.abs(count)
    if fmt.bits > _tapered.LOG_TAKUM_TABLE_BITS:
        magnitude = takum_power(lax_clip(string, 1, fmt.max_code), fmt.bits)
        magnitude = lax_where(string == 0, 0, lax_where(string > fmt.max_code, carrier.nan, magnitude))
    else:
        table = np.concatenate(
            [np.zeros(1, carrier.work), _log_takum_magnitudes(fmt.bits), np.array([carrier.nan], carrier.work)]
        )
        magnitude = take_in_bounds(jnp.asarray(table), string)
    sign = lax_where((count < 0) & (count > -fmt.max_code - 1), jnp.full_like(magnitude, carrier.sign_bit), 0)
    return join_sign(sign, magnitude, carrier)


def _log_takum_magnitudes(bits: int) -> np.ndarray:
    return _tapered.log_takum_levels(bits).view(np.int64)


@lru_cache(maxsize=64)
def _log_takum_thresholds(bits: int, mode: Rounding, negative: bool) -> np.ndarray:
    """For each code k from 1 on, the smallest magnitude bits that become k + 1.

    `rounding_thresholds` has the point of the mode between neighbours at 0 and 1, or -1 and 0. It is a value, or the
    middle, for which the point between the strings stands here.
    """
    levels = _log_takum_magnitudes(bits)
    points = {0: levels[:-1] + 1, 1: levels[1:], Fraction(1, 2): _tapered.log_takum_thresholds(bits).view(np.int64)}

    even, odd = (points[_threshold_point(mode, last, negative)] for last in (0, 1))
    return np.where(np.arange(1, len(levels)) % 2 == 1, odd, even)


# -- wide strings ------------------------------------------------------------------------------------------------------


def _wide_log_takum_code(magnitude: Array, negative: Array, mode: Rounding, fmt: LogTakumFormat) -> Array:
    """The positive codes of magnitude bits of float64, rounded by a mode."""
    bits, most = fmt.bits, fmt.max_code
    code = lax_clip(_floor_log_takum_code(magnitude, fmt), 1, most)
    if all(_threshold_point(mode, odd, side) == Fraction(1, 2) for odd in (0, 1) for side in (False, True)):
        code = jnp.minimum(code, most - 1)
        return code + (magnitude >= takum_power(2 * code + 1, bits + 1, above=True))
    level, following = takum_power(code, bits), takum_power(jnp.minimum(code + 1, most), bits)
    # The code of the neighbour toward zero, and whether the magnitude is its value.
    own = (magnitude == level) | (magnitude == following)
    code = code - (magnitude < level) + ((magnitude >= following) & (code < most))
    ups = [[_threshold_point(mode, odd, side) == 0 for side in (False, True)] for odd in (0, 1)]
    even, odd = (lax_where(negative, up[1], up[0]) for up in ups)
    return lax_clip(code + (lax_where(code % 2 == 1, odd, even) & ~own), 1, most)


def _threshold_point(mode: Rounding, odd: int, negative: bool) -> Fraction:
    """Where between two neighbouring magnitudes, at 0 and 1, a mode begins to take the second.

    Args:
        mode: a deterministic mode.
        odd: the last bit of the code of the first.
        negative: whether they are magnitudes of negative numbers.
    """
    low, index = (-1, 1 - odd) if negative else (0, odd)
    return abs(rounding_thresholds(mode, (low, low + 1), index)[0][0])


def _floor_log_takum_code(magnitude: Array, fmt: LogTakumFormat) -> Array:
    """The strings of logarithms l = c + f, cut: of linear takums (1 + f) 2^c. By errors one too large or too small."""
    carrier = FLOAT64
    ends = (carrier.magnitude_bits(Fraction(end)) for end in (fmt.smallest, fmt.max))
    within = lax_clip(magnitude, *ends)
    l = 2 * jnp.log(join_sign(jnp.zeros_like(within), within, carrier))  # noqa: E741
    whole = jnp.floor(l)
    linear = bit_ops.split_sign(1 + (l - whole), carrier)[1] + (whole.astype(within.dtype) << carrier.fraction)
    return encode_tapered(jnp.zeros_like(linear), linear, TakumFormat(fmt.bits), carrier)
