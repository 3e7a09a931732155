"""Which scale: blocks of elements that share one, the format of the scales and the rule that chooses them.

Throughout, a is the largest finite magnitude of a block, M the largest value of the element format, s the scale. The
block's elements are x = s e with e in the element format; s is always positive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING

from jchop._checks import check_bool, check_choice, check_int
from jchop.formats import (
    SCALE_RULES,
    CodebookFormat,
    ElementFormat,
    FixedFormat,
    FloatFormat,
    IntegerFormat,
    float4_e2m1fn,
    float8_e4m3fn,
    float8_e8m0fnu,
    parse_format,
)
from jchop.rounding import Overflow
from jchop.spec import Gradient, Spec, as_spec

__all__ = ["RULES", "BlockScaling", "integer_groups", "mx", "nvfp4"]

#: The rules that look at the ends of one block alone, by the scale that they ask for.
RULES = MappingProxyType(
    {
        name: SCALE_RULES[name]
        for name in ("floor", "ceil", "even", "rceil", "absmax", "half_range", "no_clip", "two_level")
    }
)
#: The rules whose scales are powers of two.
POWERS = ("floor", "ceil", "even", "rceil")


@dataclass(frozen=True)
class BlockScaling:
    """An element format, and how blocks of consecutive elements along one axis share a scale.

    Infinities and NaN do not count when a scale is chosen; then they obey the element's overflow rule. A NaN in an
    element format without one becomes its largest value, as in NVIDIA's conversions. A block without a finite value
    other than zero has scale 1.

    Args:
        element: what x / s is rounded to, once, from the exact quotient: a Spec, a format, or text.
        block: how many consecutive elements share a scale, at least 1. The last block of a row may be smaller.
        axis: the axis along which they lie. Default -1.
        scale: the format of the scales, of which the positive numbers are used. Default e8m0. A quotient is rounded to
            it to nearest, ties to even, and clamped to its smallest and largest positive number; a power of two that a
            rule asks for is clamped to its smallest and largest power of two.
        rule: one of `RULES`. Default "floor", that of the OCP Microscaling Formats (MX) specification 1.0.
        nan_block: a block that holds an infinity or NaN, or asks for a larger scale than there is, becomes NaN as a
            whole, by a scale that is NaN (OCP MX 1.0, 5.3). Default False.

    Raises:
        TypeError, ValueError: for a field out of range, or a combination that says nothing.

    Example:
        >>> from jchop.scaling import BlockScaling
        >>> scaling = BlockScaling("e2m1fn:saturate", 32)
        >>> str(scaling), scaling.bits_per_element
        ('float4_e2m1fn:saturate(block=32,axis=-1,scale=float8_e8m0fnu,rule=floor)', 4.25)
    """

    element: Spec
    block: int
    axis: int = -1
    scale: FloatFormat = float8_e8m0fnu
    rule: str = "floor"
    nan_block: bool = False

    if TYPE_CHECKING:  # what may be given is more than what is stored

        def __init__(
            self,
            element: Spec | ElementFormat | str,
            block: int,
            axis: int = ...,
            scale: FloatFormat | str = ...,
            rule: str = ...,
            nan_block: bool = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "element", as_spec(self.element, "element"))
        object.__setattr__(self, "block", check_int("block", self.block, 1))
        object.__setattr__(self, "axis", check_int("axis", self.axis, -(1 << 15), 1 << 15))
        object.__setattr__(self, "scale", _as_scale(self.scale))
        check_choice("rule", self.rule, tuple(RULES))
        check_bool("nan_block", self.nan_block)
        self._check_element()
        if self.nan_block and not self.scale.has_nan:
            raise ValueError(f"nan_block=True needs a scale format with a NaN, not scale={self.scale}")

    def _check_element(self) -> None:
        fmt, rule = self.element.format, f"rule={self.rule!r}"
        if self.element.gradient != Gradient():
            raise ValueError(f"element={self.element} has a gradient, which is not one of the elements")
        if self.element.overflow is Overflow.WRAP:
            raise ValueError(f"element={self.element}: scaled elements cannot wrap; use overflow='saturate'")
        if fmt.max <= 0:
            raise ValueError(f"element={self.element} has no positive value to scale to")
        if self.rule in ("half_range", "no_clip") and not fmt.min < 0:
            raise ValueError(f"{rule} needs an element format with negative values, not element={self.element}")
        if self.rule == "even" and self.element_fraction is None:
            raise ValueError(f"{rule} needs an element format with fraction bits, not element={self.element}")

    # -- facts of the element format -----------------------------------------------------------------------------------
    @property
    def element_emax(self) -> int:
        """floor(log2 M)."""
        largest = Fraction(self.element.format.max)
        guess = largest.numerator.bit_length() - largest.denominator.bit_length()
        return guess if Fraction(2) ** guess <= largest else guess - 1

    @property
    def element_fraction(self) -> int | None:
        """Bits that follow the leading one in M's binade; None for a codebook."""
        fmt = self.element.format
        if isinstance(fmt, CodebookFormat):
            return None
        return fmt.frac_bits if isinstance(fmt, FloatFormat) else fmt.bits - 1 - fmt.signed

    @property
    def divisors(self) -> tuple[Fraction, ...]:
        """What a is divided by; under "no_clip" the largest and the least value, each by its own end."""
        top, bottom = Fraction(self.element.format.max), Fraction(self.element.format.min)
        other: dict[str, Callable[[], tuple[Fraction, ...]]] = {
            "half_range": lambda: ((top - bottom) / 2,),
            "no_clip": lambda: (top, -bottom),
        }
        return other[self.rule]() if self.rule in other else (top,)

    @property
    def tensor_divisor(self) -> Fraction:
        """What the largest magnitude of a tensor is divided by to give the t of "two_level"."""
        return Fraction(self.scale.max) * Fraction(self.element.format.max)

    @property
    def is_power(self) -> bool:
        """Whether every scale is a power of two."""
        return self.rule in POWERS or (self.scale.frac_bits == 0 and self.rule != "two_level")

    @property
    def bits_per_element(self) -> float:
        """Stored bits of an element in a whole block, with its share of the scale."""
        return self.element.format.bits + self.scale.bits / self.block

    def __str__(self) -> str:
        options = f"block={self.block},axis={self.axis},scale={self.scale},rule={self.rule}"
        return f"{self.element}({options}{',nan_block=true' if self.nan_block else ''})"


def _as_scale(value: object) -> FloatFormat:
    fmt = parse_format(value) if isinstance(value, str) else value
    if not isinstance(fmt, FloatFormat):
        raise TypeError(f"scale={value!r} must be a FloatFormat or its text, as 'e8m0fnu' or 'bfloat16'")
    return fmt


# -- block formats in use ----------------------------------------------------------------------------------------------


def mx(element: ElementFormat | str, *, rule: str = "floor", block: int = 32, axis: int = -1) -> BlockScaling:
    """A format of the OCP Microscaling Formats (MX) specification 1.0: e8m0 scales, elements that saturate.

    Args:
        element: ``"e4m3fn"``, ``"e5m2"``, ``"e3m2fn"``, ``"e2m3fn"``, ``"e2m1fn"`` or ``"integer8"`` (MXINT8: a sign,
            an integer bit and six fraction bits, without -2; likewise other widths), or any other format.
        rule: "floor" as specified (default), or another of `RULES`.
        block: default 32, as specified.
        axis: default -1.

    Example:
        >>> from jchop.scaling import mx
        >>> str(mx("integer8").element)
        'fixed2.6(symmetric=true):saturate'
    """
    fmt = parse_format(element) if isinstance(element, str) else element
    if isinstance(fmt, IntegerFormat) and fmt.signed:
        fmt = FixedFormat(2, fmt.bits - 2, symmetric=True)
    return BlockScaling(Spec(fmt, overflow="saturate"), block, axis, float8_e8m0fnu, rule)


def nvfp4(*, two_level: bool = True, axis: int = -1) -> BlockScaling:
    """NVFP4: e2m1 elements in blocks of 16, e4m3 scales from 2^-6 to 448, by default under a scale of the tensor.

    The range is that of e4m3 without subnormal numbers.

    Args:
        two_level: with a float32 scale of the whole tensor. Default True.
        axis: default -1.

    Example:
        >>> from jchop.scaling import nvfp4
        >>> scaling = nvfp4()
        >>> scaling.scale.smallest, scaling.scale.max, scaling.bits_per_element
        (0.015625, 448.0, 4.5)
    """
    scale = replace(float8_e4m3fn, subnormals=False)
    rule = "two_level" if two_level else "absmax"
    return BlockScaling(Spec(float4_e2m1fn, overflow="saturate"), 16, axis, scale, rule)


def integer_groups(
    bits: int, block: int, *, scale: FloatFormat | str = "float32", rule: str = "absmax", axis: int = -1
) -> BlockScaling:
    """Symmetric integers in groups: ``integer_groups(4, 128, scale="bfloat16")`` is int4 with 4.125 bits an element.

    Args:
        bits: width of an integer.
        block: how many share a scale.
        scale: format of the scales. Default float32.
        rule: "absmax" (default), "half_range" (torchao's symmetric mapping, which clips the largest element) or
            "no_clip".
        axis: default -1.

    Example:
        >>> from jchop.scaling import integer_groups
        >>> integer_groups(4, 128, scale="bfloat16").bits_per_element
        4.125
    """
    return BlockScaling(Spec(IntegerFormat(bits)), block, axis, _as_scale(scale), rule)


def divisor_parts(divisor: Fraction) -> tuple[int, int]:
    """A dyadic number as an odd integer times a power of two: (integer, exponent).

    Raises:
        ValueError: for a number that is not dyadic, which no binary format has.
    """
    shift = divisor.denominator.bit_length() - 1
    if divisor.denominator != 1 << shift:
        raise ValueError(f"{divisor} is no integer times a power of two")
    low = (divisor.numerator & -divisor.numerator).bit_length() - 1
    return divisor.numerator >> low, low - shift
