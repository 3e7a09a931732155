"""The rules that choose the scales of groups, each a value with its divisor and its fit.

Throughout, x are the finite numbers of a group, and a is their largest magnitude. M and m are the largest and the
least value of the element format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import numpy as np

from jchop._common.checks import quote
from jchop.formats._base import ElementFormat, exact_number, floor_log2
from jchop.formats._binary import FloatFormat, UniformFormat
from jchop.formats._codebook import CodebookFormat


def _next_power_ratio(element: ElementFormat) -> float:
    """2^(floor(log2 M) + 1) / M, from 1 to 2, rounded up to binary32."""
    most = Fraction(element.max)
    return math.ceil(Fraction(2) ** (floor_log2(most) + 24) / most) / 2**23


def _half_ulp_carry(element: ElementFormat, fraction: int, _: int) -> int:
    """Half a unit in the last place of the element format, which rounds the fraction of a to its bits."""
    assert isinstance(element, FloatFormat | UniformFormat)
    bits = element.frac_bits if isinstance(element, FloatFormat) else element.bits - 1 - element.signed
    return 1 << (fraction - bits - 1) if bits < fraction else 0


def _integers_up_to_max(element: ElementFormat) -> CodebookFormat:
    """The integers of as many bits, but for the least one, times M over the largest of them, in binary32."""
    most = (1 << (element.bits - 1)) - 1
    return CodebookFormat(tuple(float(np.float32(i * element.max / most)) for i in range(-most, most + 1)))


def _is_e2m1(element: ElementFormat) -> bool:
    return isinstance(element, FloatFormat) and (element.max, element.smallest, element.frac_bits) == (6, 0.5, 1)


@dataclass(frozen=True)
class ScaleRule:
    """How the scale of a group is chosen.

    Args:
        name: in text.
        formula: the scale that the rule asks for. It is then rounded to the scale format, to nearest, ties to even, and
            clamped to the positive range of that format.
        divisors: of an element format, the number that a is divided by. Or two numbers, for the largest x and for minus
            the least x: the larger quotient is the scale. Or two numbers that are tried one after the other (`fit`).
        carry: for a rule whose scales are 2^(E - floor(log2 M)), with E the exponent of a. This number is added to the
            bits of a first. So E increases by one for the fractions that ask for it. It is a function of the element
            format, the fraction bits of a, and the fraction of M in as many bits. None: another rule.
        tensor_scale: whether the scale is a product with a binary32 scale of the whole tensor.
        constant: of an element format, the scale of every tensor; None if it follows from the tensor.
        top: of a scale format, the scale of the group with the largest number if the tensor has a scale too.
        second: of an element format, the other levels that a group may have. The sign of its stored scale says which.
        fit: which numbers of a group count. With "ends" its ends alone, with "range" the range of all x for a zero
            point, with "percentile" a percentile. The others use all numbers: least "squares" of many scales or of
            "either" divisor's scales, or of either levels, their "power" (the mean of their squares), or its "root".
            With "eden" the scale of the ends is corrected by all numbers. With "levels" the ends of groups within
            groups count, one for each time that the scales are quantized again.
        percentile: the q of "percentile".
        fill: the number that fills up the last block of an axis: 0, or NaN for a rule that counts numbers.
        takes: whether an element format may have this rule.
        needs: the element formats that may, in words.
    """

    name: str
    formula: str
    divisors: Callable[[ElementFormat], tuple[Fraction, ...]] = lambda element: (Fraction(element.max),)
    carry: Callable[[ElementFormat, int, int], int] | None = None
    tensor_scale: bool = False
    constant: Callable[[ElementFormat], float] | None = None
    top: Callable[[FloatFormat], Fraction] = lambda scale: Fraction(scale.max)
    second: Callable[[ElementFormat], CodebookFormat] | None = None
    fit: Literal["ends", "range", "percentile", "squares", "either", "power", "root", "eden", "levels"] = "ends"
    percentile: Fraction | None = None
    fill: float = 0.0
    takes: Callable[[ElementFormat], bool] = lambda element: True
    needs: str = ""

    @property
    def gives_powers(self) -> bool:
        """Whether the scales of groups are powers of two in every scale format."""
        return self.carry is not None or self.fit == "power"

    @property
    def by_ends(self) -> bool:
        """Whether the ends of a group decide, so that neither order nor sums matter."""
        return self.fit == "ends"

    @property
    def by_extremes(self) -> bool:
        """Whether the least and the largest number of a group decide, so that a group may be read in chunks."""
        return self.fit in ("ends", "range")


_PERCENTILE_TEXT = re.compile(r"percentile\(([0-9]{1,3}(?:\.[0-9]{1,2})?)\)")
#: The rules by name.
SCALE_RULES: Mapping[str, ScaleRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            ScaleRule("floor", "2^(floor(log2 a) - floor(log2 M))", carry=lambda element, fraction, of_most: 0),
            ScaleRule(
                "ceil", "2^(ceil(log2 a) - floor(log2 M))", carry=lambda element, fraction, of_most: (1 << fraction) - 1
            ),
            ScaleRule(
                "even",
                "as floor, after a was rounded to the element's fraction bits, halves up",
                carry=_half_ulp_carry,
                takes=lambda element: not isinstance(element, CodebookFormat),
                needs="fraction bits",
            ),
            ScaleRule(
                "rceil", "2^ceil(log2(a / M))", carry=lambda element, fraction, of_most: (1 << fraction) - 1 - of_most
            ),
            ScaleRule(
                "floor_unclipped",
                "as floor, and the product of that and t is the scale, t being 2^(floor(log2 M) + 1) / M in binary32, "
                "rounded up: the scale of every tensor, under which no x is beyond M",
                carry=lambda element, fraction, of_most: 0,
                tensor_scale=True,
                constant=_next_power_ratio,
            ),
            ScaleRule("absmax", "a / M"),
            ScaleRule("max_abs", "a", lambda element: (Fraction(1),)),
            ScaleRule(
                "half_range",
                "a / ((M - m) / 2)",
                lambda element: ((Fraction(element.max) - Fraction(element.min)) / 2,),
                takes=lambda element: element.min < 0,
                needs="negative values",
            ),
            ScaleRule(
                "no_clip",
                "the larger of (largest x) / M and (least x) / m",
                lambda element: (Fraction(element.max), -Fraction(element.min)),
                takes=lambda element: element.min < 0,
                needs="negative values",
            ),
            ScaleRule(
                "two_level",
                "a / (M t), and the product of that and t is the scale, t being a binary32 scale of the tensor",
                tensor_scale=True,
            ),
            ScaleRule(
                "four_over_six",
                "as two_level, or 3/2 of that before it is rounded, if the sum of squared errors is smaller, summed in "
                "binary32; the largest scale is a power of two, to leave room",
                lambda element: (Fraction(element.max), Fraction(element.max) * 2 / 3),
                tensor_scale=True,
                top=lambda scale: Fraction(2) ** scale.emax,
                fit="either",
                takes=lambda element: element.code_of(exact_number(Fraction(element.max) * 2 / 3)) is not None,
                needs="two thirds of its largest value",
            ),
            ScaleRule(
                "int_or_float",
                "as two_level; each group has the levels of the element format, or integers i with -k <= i <= k times "
                "M / k, with 2 k + 1 of them in the bits of a code, if the sum of squared errors is smaller, summed in "
                "binary32; then its stored scale has a minus sign",
                tensor_scale=True,
                second=_integers_up_to_max,
                fit="either",
                takes=lambda element: isinstance(element, FloatFormat) and element.signed and element.bits <= 8,
                needs="a sign and at most 8 bits, a float",
            ),
            ScaleRule(
                "eden",
                "as two_level for the elements, which are rounded to nearest; they are multiplied by that times c, c "
                "being sum(x^2) / sum(x y) with y the elements times that, summed in binary32; the spec's rounding is "
                "of this product; the largest scale of elements is a power of two, to leave room",
                tensor_scale=True,
                top=lambda scale: Fraction(2) ** scale.emax,
                fit="eden",
            ),
            ScaleRule(
                "levels",
                "c, or 2 c if the group's largest number is at least 2^k c, with c the scale of the group around it "
                "and k the number of levels from this one on; the outermost scale is a / (2^n M) for n levels",
                fit="levels",
            ),
            ScaleRule(
                "minmax",
                "(largest x - least x) / (M - m), of the range that all x, and 0 but under 'float', span; for zero "
                "points",
                fit="range",
            ),
            ScaleRule(
                "mse",
                "of absmax times 1, 63/64 ... 32/64 the first with the least sum of squared errors, summed in binary32",
                fit="squares",
            ),
            ScaleRule(
                "quest",
                "2^floor(log2(r 2.92247856 / 6)), r being the root of the mean of the squares, summed in binary32: the "
                "normal numbers of this r lose least if they are clipped at 2.92247856 r",
                fit="power",
                fill=math.nan,
                takes=_is_e2m1,
                needs="the values of e2m1",
            ),
            ScaleRule(
                "rms",
                "the root of the mean of the squares, summed in binary32; the least scale for a group of zeros",
                lambda element: (Fraction(1),),
                fit="root",
                fill=math.nan,
                takes=lambda element: element.min < 0,
                needs="negative values",
            ),
            ScaleRule(
                "percentile(q)",
                "as absmax, after a became the smallest magnitude that q % of the finite x do not exceed",
                fit="percentile",
                fill=math.nan,
            ),
        )
    }
)


@lru_cache(maxsize=256)
def scale_rule_of(text: str) -> ScaleRule:
    """The rule that a text names.

    Raises:
        ValueError: for a text that names none.
    """
    match = _PERCENTILE_TEXT.fullmatch(text)
    if match and 0 < Fraction(match[1]) <= 100:
        return replace(SCALE_RULES["percentile(q)"], name=text, percentile=Fraction(match[1]))
    if match or text == "percentile(q)" or text not in SCALE_RULES:
        raise _unknown_scale_rule(text)
    return SCALE_RULES[text]


def as_scale_rule_name(rule: object, zero_point: str | None) -> str:
    """The stored name of a rule; None gives the default."""
    if rule is None:
        return "minmax" if zero_point else "absmax"
    if not isinstance(rule, str):
        raise _unknown_scale_rule(rule)
    return scale_rule_of(rule).name


def _unknown_scale_rule(rule: object) -> ValueError:
    return ValueError(
        f"rule={quote(rule)} must be one of {', '.join(map(repr, SCALE_RULES))}, with 0 < q <= 100 of at most two "
        "decimals"
    )
