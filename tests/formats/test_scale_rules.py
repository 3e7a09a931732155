"""The rules of scales as values: their divisors, which give powers of two, and what they refuse."""

from __future__ import annotations

from fractions import Fraction

import pytest
from each_case import each

import jchop as jc
from jchop.formats import SCALE_RULES, ScaledFormat, parse_format
from jchop.formats.scaled.scale_rules import scale_rule_of


@each(
    ("element", "rule", "divisors"),
    [
        ("e4m3fn", "floor", (448,)),
        ("e2m3fn", "absmax", (Fraction(15, 2),)),
        ("fixed2.6(symmetric=true)", "mse", (Fraction(127, 64),)),
        ("e2m1fn", "four_over_six", (6, 4)),
        ("binary8p3se", "max_abs", (1,)),
        ("integer4", "half_range", (Fraction(15, 2),)),
        ("integer4", "no_clip", (7, 8)),
        ("uinteger4", "minmax", (15,)),
        ("codebook(-1,0,0.75)", "percentile(99)", (Fraction(3, 4),)),
    ],
)
def test_divisors(element, rule, divisors):
    fmt = parse_format(element)
    assert isinstance(fmt, jc.formats.ElementFormat) and scale_rule_of(rule).divisors(fmt) == divisors


def test_rules_that_give_powers_of_two():
    """The exponent of a goes up by one if a's fraction and what is added reach 1; fractions of 6 bits, M = 1.75 2^8."""
    element, of_most = jc.formats.float8_e4m3fn, 48
    first = {"floor": None, "ceil": 1, "even": 60, "rceil": 49, "floor_unclipped": None}
    assert {name for name, rule in SCALE_RULES.items() if rule.carry is not None} == set(first)
    for name, least in first.items():
        carry = scale_rule_of(name).carry
        assert carry is not None
        up = [fraction for fraction in range(64) if fraction + carry(element, 6, of_most) >= 64]
        assert up == ([] if least is None else list(range(least, 64))), name


def test_what_is_fitted_and_how():
    assert [name for name, rule in SCALE_RULES.items() if not rule.by_ends] == [
        "four_over_six", "int_or_float", "eden", "levels", "minmax", "mse", "quest", "rms", "percentile(q)",
    ]  # fmt: skip
    of_tensors = {name: rule for name, rule in SCALE_RULES.items() if rule.tensor_scale}
    tops = {name: rule.top(jc.formats.float8_e4m3fn) for name, rule in of_tensors.items() if rule.constant is None}
    assert tops == {"two_level": 448, "four_over_six": 256, "int_or_float": 448, "eden": 256}
    constant = of_tensors["floor_unclipped"].constant
    assert constant is not None
    for fmt in (jc.formats.float8_e4m3fn, jc.formats.float4_e2m1fn):  # the least number of binary32 that clips nothing
        t, most = Fraction(constant(fmt)), Fraction(fmt.max)
        assert most * (t - Fraction(1, 1 << 23)) < (8 if most == 6 else 512) <= most * t
    assert scale_rule_of("percentile(99.9)").percentile == Fraction(999, 10)
    name = "percentile(99.9)"
    assert scale_rule_of(name).name == name == ScaledFormat("integer8", rule=name).rule


@each("rule", ["best", "percentile(q)", "percentile(0)", "percentile(100.01)", "percentile(1.234)"])
def test_texts_that_name_no_rule(rule):
    with pytest.raises(ValueError, match="must be one of 'floor', 'ceil'"):
        scale_rule_of(rule)


def test_a_rule_that_is_no_text():
    with pytest.raises(ValueError, match=r"rule=\['floor'\] must be one of"):
        ScaledFormat("integer8", rule=["floor"])  # type: ignore[arg-type]
