"""What scaled blocks must give, from the written rules alone: Python integers and fractions, nothing of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import oracle
from oracle import ZERO, Carrier, FloatSet, Levels, Set, Special, Value, pow2


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
        assert not isinstance(self.element, Levels)
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
    "half_range": lambda b, x, t: _amax(x) / ((b.most - b.least) / 2),
    "no_clip": lambda b, x, t: max(min(*x, ZERO) / b.least, max(*x, ZERO) / b.most),
    "two_level": lambda b, x, t: _amax(x) / b.most / t,
}


#: The rules that ask for powers of two, which are clamped to those of the scale format.
POWERS = ("floor", "ceil", "even", "rceil")


def _amax(x: list[Fraction]) -> Fraction:
    return max(map(abs, x))


def tensor_scale(values: Sequence[Value], blocks: Blocks) -> Fraction:
    """The float32 scale of a whole tensor, largest magnitude over (largest scale times largest element)."""
    amax = max(map(abs, finite(values)), default=ZERO)
    if amax == 0:
        return Fraction(1)
    t = oracle.round_exact(
        oracle.ieee(8, 23), amax / (oracle.largest(blocks.scale) * blocks.most), "nearest_even", "saturate"
    )
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
    if blocks.rule in POWERS:
        highest = pow2(floor_log2(largest))
        return Special.NAN if blocks.nan_block and asked > highest else min(max(asked, smallest), highest)
    if blocks.nan_block:
        rounded = oracle.round_exact(blocks.scale, asked, "nearest_even", "ieee")
        if not isinstance(rounded, Fraction):
            return Special.NAN
    rounded = oracle.round_exact(blocks.scale, asked, "nearest_even", "saturate")
    return max(ZERO if isinstance(rounded, Special) else rounded, smallest)


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
