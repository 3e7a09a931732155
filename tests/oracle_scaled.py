"""What scaled blocks must give, from the written rules alone: Python integers and fractions, nothing of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import oracle
from oracle import ZERO, Carrier, FixedSet, FloatSet, Levels, Set, Special, Value, pow2


@dataclass(frozen=True)
class Blocks:
    """An element format with its rounding, the scales it is under, and how they are chosen."""

    element: Set
    scale: FloatSet
    rule: str
    mode: str = "nearest_even"
    overflow: str = "saturate"
    nan_block: bool = False
    flush: bool = False

    @property
    def most(self) -> Fraction:
        return max(oracle.values(self.element)) if isinstance(self.element, Levels) else oracle.largest(self.element)

    @property
    def least(self) -> Fraction:
        if isinstance(self.element, Levels):
            return min(self.element.levels)
        return -oracle.largest(self.element, negative=True)

    @property
    def fraction_bits(self) -> int:
        """Bits after the leading one in the binade of the largest value."""
        if isinstance(self.element, FloatSet):
            return self.element.m
        assert isinstance(self.element, FixedSet)
        return self.element.bits - 1 - self.element.signed

    @property
    def scale_range(self) -> tuple[Fraction, Fraction]:
        positive = self.scale.value(1 if self.scale.value(0) == 0 else 0)
        return positive, oracle.largest(self.scale)


def floor_log2(x: Fraction) -> int:
    k = x.numerator.bit_length() - x.denominator.bit_length()
    return k if pow2(k) <= x else k - 1


def ceil_log2(x: Fraction) -> int:
    k = floor_log2(x)
    return k if pow2(k) == x else k + 1


def _half_up(x: Fraction, bits: int) -> Fraction:
    """x > 0 rounded to `bits` bits after its leading one, halves up."""
    unit = pow2(floor_log2(x) - bits)
    return (x / unit + Fraction(1, 2)) // 1 * unit


def finite(values: Sequence[Value]) -> list[Fraction]:
    return [ZERO if v is Special.NEG_ZERO else v for v in values if isinstance(v, Fraction) or v is Special.NEG_ZERO]


#: The scale that a rule asks for, from the block's finite numbers, not all zero, and the tensor's scale.
ASKED: dict[str, Callable[[Blocks, list[Fraction], Fraction], Fraction]] = {
    "floor": lambda b, x, t: pow2(floor_log2(_amax(x)) - floor_log2(b.most)),
    "ceil": lambda b, x, t: pow2(ceil_log2(_amax(x)) - floor_log2(b.most)),
    "even": lambda b, x, t: pow2(floor_log2(_half_up(_amax(x), b.fraction_bits)) - floor_log2(b.most)),
    "rceil": lambda b, x, t: pow2(ceil_log2(_amax(x) / b.most)),
    "absmax": lambda b, x, t: _amax(x) / b.most,
    "max_abs": lambda b, x, t: _amax(x),
    "half_range": lambda b, x, t: _amax(x) / ((b.most - b.least) / 2),
    "no_clip": lambda b, x, t: max(min(*x, ZERO) / b.least, max(*x, ZERO) / b.most),
    "two_level": lambda b, x, t: _amax(x) / b.most / t,
    "four_over_six": lambda b, x, t: _amax(x) / b.most / t,
    "int_or_float": lambda b, x, t: _amax(x) / b.most / t,
    "eden": lambda b, x, t: _amax(x) / b.most / t,  # before it is corrected
    "floor_unclipped": lambda b, x, t: pow2(floor_log2(_amax(x)) - floor_log2(b.most)),
    # The root of c^2 times the mean square: half its exponent, rounded down.
    "quest": lambda b, x, t: pow2(floor_log2(Fraction("2.92247856") ** 2 / 36 * sum(v * v for v in x) / len(x)) // 2),
}
#: The rules with a scale of the tensor.
OF_TENSORS = ("two_level", "four_over_six", "int_or_float", "eden", "floor_unclipped")


#: The rules that ask for powers of two, which are clamped to those of the scale format.
POWERS = ("floor", "ceil", "even", "rceil", "floor_unclipped", "quest")


def _amax(x: list[Fraction]) -> Fraction:
    return max(map(abs, x))


def tensor_scale(values: Sequence[Value], blocks: Blocks) -> Fraction:
    """The float32 scale of a whole tensor, largest magnitude over (largest scale times largest element).

    For "four_over_six" and "eden" the scale is the largest power of two instead. For "floor_unclipped" it is the least
    binary32 number by which the largest element reaches the power of two above it.
    """
    if blocks.rule == "floor_unclipped":
        t = oracle.round_exact(oracle.ieee(8, 23), pow2(floor_log2(blocks.most) + 1) / blocks.most, "up", "saturate")
        assert isinstance(t, Fraction)
        return t
    amax = max(map(abs, finite(values)), default=ZERO)
    if amax == 0:
        return Fraction(1)
    top = oracle.largest(blocks.scale)
    top = pow2(floor_log2(top)) if blocks.rule in ("four_over_six", "eden") else top
    t = oracle.round_exact(oracle.ieee(8, 23), amax / (top * blocks.most), "nearest_even", "saturate")
    assert isinstance(t, Fraction)
    return max(t, pow2(-149))


def scale_of(values: Sequence[Value], blocks: Blocks, tensor: Fraction = Fraction(1)) -> Value:
    """The scale of a block, in the scale format; NaN where the block becomes NaN as a whole."""
    smallest, largest = blocks.scale_range
    numbers = finite(values)
    if blocks.nan_block and len(numbers) < len(values):
        return Special.NAN
    if not any(numbers):
        return min(max(Fraction(1), smallest), largest)
    asked = ASKED[blocks.rule](blocks, numbers, tensor)
    if blocks.rule == "four_over_six":
        six, four = (_rounded_scale(blocks, asked * factor) for factor in (1, Fraction(3, 2)))
        return four if squares(numbers, four * tensor, blocks) < squares(numbers, six * tensor, blocks) else six
    if blocks.rule in POWERS:
        highest = pow2(floor_log2(largest))
        return Special.NAN if blocks.nan_block and asked > highest else min(max(asked, smallest), highest)
    if blocks.nan_block:
        rounded = oracle.round_exact(blocks.scale, asked, "nearest_even", "ieee")
        if not isinstance(rounded, Fraction):
            return Special.NAN
    return _rounded_scale(blocks, asked)


def _rounded_scale(blocks: Blocks, asked: Fraction) -> Fraction:
    """A scale in the scale format, never zero."""
    rounded = oracle.round_exact(blocks.scale, asked, "nearest_even", "saturate")
    return max(ZERO if isinstance(rounded, Special) else rounded, blocks.scale_range[0])


def squares(numbers: list[Fraction], scale: Fraction, blocks: Blocks) -> Fraction:
    """The sum of squared errors of a block under a scale, of numbers to nearest, ties to even, in binary32."""
    nearest = replace(blocks, mode="nearest_even")
    results = [back(element_of(x, scale, nearest), scale, oracle.CARRIERS["float32"]) for x in numbers]
    errors = [_plain(result) - x for x, result in zip(numbers, results, strict=True)]  # also of -0
    return sum((error * error for error in errors), ZERO)


def element_of(x: Value, scale: Fraction, blocks: Blocks, n: int = 1, r: int = 0) -> Value:
    """The element that x becomes under the whole scale; stochastic modes are given the n-bit integer r."""
    if x is Special.NAN:
        has_nan = isinstance(blocks.element, FloatSet) and blocks.element.has_nan
        return x if has_nan else blocks.most
    quotient = x / scale if isinstance(x, Fraction) else x
    return oracle.round_exact(blocks.element, quotient, blocks.mode, blocks.overflow, flush=blocks.flush, n=n, r=r)


def back(element: Value, scale: Fraction, carrier: Carrier) -> Value:
    """Scale times element, rounded once to the carrier."""
    if isinstance(element, Special):
        return element
    return oracle.round_exact(oracle.ieee(carrier.e, carrier.m), element * scale, "nearest_even", "ieee")


@dataclass(frozen=True)
class Quantized:
    """One block: its scale in the scale format, its elements, and the numbers that they stand for."""

    scale: Value
    elements: list[Value]
    numbers: list[Value]


def quantize(
    values: Sequence[Value],
    blocks: Blocks,
    carrier: Carrier,
    tensor: Fraction = Fraction(1),
    n: int = 1,
    draws: Sequence[int] | None = None,
) -> Quantized:
    scale = scale_of(values, blocks, tensor)
    if not isinstance(scale, Fraction):
        return Quantized(scale, [], [Special.NAN] * len(values))
    whole = scale * tensor
    elements = [element_of(x, whole, blocks, n, r) for x, r in zip(values, draws or [0] * len(values), strict=True)]
    return Quantized(scale, elements, [back(e, whole, carrier) for e in elements])


# --- scaled formats of any grouping -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """Blocks, and which elements share a scale; with zero points the rule is "minmax", and "float" ones are added."""

    blocks: Blocks
    group: Any = None
    axis: Any = -1
    channel: Any = None
    zero_point: str | None = None
    percentile: Fraction | None = None
    again: Scheme | None = None  # how the scales, binary32 numbers, are quantized

    def members(self, shape: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
        """The flat indexes of the elements of each group, by the group's place among the scales."""
        result: dict[tuple[int, ...], list[int]] = {}
        for flat, index in enumerate(np.ndindex(*shape)):
            result.setdefault(self._group_of(index), []).append(flat)
        return result

    def _group_of(self, index: tuple[int, ...]) -> tuple[int, ...]:
        n = len(index)
        if self.group is None:
            channels = self.channel if isinstance(self.channel, tuple) else (self.channel,)
            kept = {axis % n for axis in channels if axis is not None}
            return tuple(i if axis in kept else 0 for axis, i in enumerate(index))
        groups = self.group if isinstance(self.group, tuple) else (self.group,)
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        sizes = {axis % n: size for axis, size in zip(axes, groups, strict=True)}
        return tuple(0 if sizes.get(k) == "all" else i // sizes.get(k, 1) for k, i in enumerate(index))


@dataclass(frozen=True)
class Result:
    """What an array becomes: scales by group, their own elements and scales, zero points; elements, numbers."""

    scales: dict[tuple[int, ...], Value]
    again: Result | None
    zeros: dict[tuple[int, ...], Fraction]
    elements: list[Value]
    numbers: list[Value]


def quantize_array(
    values: Sequence[Value], shape: tuple[int, ...], scheme: Scheme, carrier: Carrier, n: int, draws: Sequence[int]
) -> Result:
    """A whole array, `values` and `draws` in C order."""
    blocks, groups = scheme.blocks, scheme.members(shape)
    tensor = tensor_scale(values, blocks) if blocks.rule in OF_TENSORS else Fraction(1)
    scales: dict[tuple[int, ...], Value] = {}
    again = None
    for place, members in groups.items():
        numbers = [values[i] for i in members]
        scales[place] = _scale(numbers, scheme, tensor)
    if scheme.again is not None:
        scales, again = _quantize_scales(scales, scheme.again)
    zeros: dict[tuple[int, ...], Fraction] = {}
    elements: list[Value] = [ZERO] * len(values)
    results: list[Value] = [Special.NAN] * len(values)
    for place, members in groups.items():
        scale = scales[place]
        if not isinstance(scale, Fraction):
            continue
        if scheme.zero_point == "float":
            zeros[place] = _added([values[i] for i in members], scale, blocks)
            for i in members:
                elements[i], results[i] = _offset(values[i], scale, zeros[place], blocks, carrier, n, draws[i])
            continue
        if scheme.zero_point:
            low = min(*finite([values[i] for i in members]), ZERO, ZERO)
            zeros[place] = min(max(blocks.least - oracle.rne(low / scale), blocks.least), blocks.most)
        for i in members:
            shift = zeros.get(place, ZERO)
            element = _shifted(values[i], scale * tensor, shift, blocks, n, draws[i])
            elements[i] = element
            number = element - shift if isinstance(element, Fraction) else element
            results[i] = back(number, scale * tensor, carrier)
    return Result(scales, again, zeros, elements, results)


def _scale(numbers: list[Value], scheme: Scheme, tensor: Fraction) -> Value:
    blocks = scheme.blocks
    if scheme.percentile is not None:
        sizes = sorted(map(abs, finite(numbers)))
        rank = -(-scheme.percentile * len(sizes) // 100)
        chosen = sizes[int(rank) - 1] if sizes else ZERO
        return scale_of([chosen or max(sizes, default=ZERO)], blocks)
    if not scheme.zero_point:
        return scale_of(numbers, blocks, tensor)
    ends = [*finite(numbers), *([] if scheme.zero_point == "float" and finite(numbers) else [ZERO])]
    # As an absmax whose largest element is the whole range.
    return scale_of(
        [(max(ends) - min(ends)) * blocks.most / (blocks.most - blocks.least)], replace(blocks, rule="absmax")
    )


def _added(numbers: list[Value], scale: Fraction, blocks: Blocks) -> Fraction:
    """A zero point that is a number of the scale format: the least number less the least element times the scale."""
    known = finite(numbers) or [ZERO]
    exact = min(known) - (blocks.least * scale if min(known) < max(known) else ZERO)
    rounded = oracle.round_exact(blocks.scale, exact, "nearest_even", "saturate")
    return rounded if isinstance(rounded, Fraction) else ZERO


def _offset(
    x: Value, scale: Fraction, zero: Fraction, blocks: Blocks, carrier: Carrier, n: int, r: int
) -> tuple[Value, Value]:
    """Element and number of x = s e + z."""
    difference = x if isinstance(x, Special) and x is not Special.NEG_ZERO else _plain(x) - zero
    element = _plain(element_of(difference, scale, blocks, n, r))
    number = element * scale + zero
    return element, oracle.round_exact(oracle.ieee(carrier.e, carrier.m), number, "nearest_even", "ieee")


def _plain(x: Value) -> Fraction:
    return x if isinstance(x, Fraction) else ZERO


def _shifted(x: Value, scale: Fraction, shift: Fraction, blocks: Blocks, n: int, r: int) -> Value:
    if isinstance(x, Special) and x is not Special.NEG_ZERO:
        return element_of(x, scale, blocks, n, r)
    if shift == 0:
        return element_of(x, scale, blocks, n, r)
    quotient = (ZERO if isinstance(x, Special) else x) / scale + shift
    return oracle.round_exact(blocks.element, quotient, blocks.mode, blocks.overflow, n=n, r=r)


def _quantize_scales(
    scales: dict[tuple[int, ...], Value], scheme: Scheme
) -> tuple[dict[tuple[int, ...], Value], Result]:
    places = sorted(scales)
    shape = tuple(max(place[k] for place in places) + 1 for k in range(len(places[0])))
    values = [scales[place] for place in places]
    own = quantize_array(values, shape, scheme, oracle.CARRIERS["float32"], 1, [0] * len(values))
    smallest = min(v for v in oracle.values(scheme.blocks.element) if v > 0)
    least = ZERO if scheme.zero_point else smallest
    elements = [max(e, least) for e in own.elements if isinstance(e, Fraction)]
    numbers: list[Value] = []
    for place, members in scheme.members(shape).items():
        scale = own.scales[place]
        assert isinstance(scale, Fraction)
        for i in members:
            if scheme.zero_point == "float":
                numbers.append(own.numbers[i])
                continue
            number = back(elements[i] if i < len(elements) else ZERO, scale, oracle.CARRIERS["float32"])
            numbers.append(number)
    order = [i for members in scheme.members(shape).values() for i in members]
    largest = oracle.largest(oracle.ieee(8, 23))
    by_index = {i: v if isinstance(v, Fraction) else largest for i, v in zip(order, numbers, strict=True)}
    final = {place: max(by_index[i], pow2(-149)) for i, place in enumerate(places)}
    return final, replace(own, elements=list(elements))  # type: ignore[return-value]
