"""The names of rounding modes and overflow rules."""

from __future__ import annotations

import copy
import pickle

import pytest
from each_case import each

import jchop as jc
from jchop import Overflow, Rounding
from jchop.formats.rounding import ROUNDING_ALIASES, as_overflow, as_rounding

DETERMINISTIC = ["nearest_even", "nearest_away", "nearest_zero", "up", "down", "toward_zero", "odd"]
STOCHASTIC = ["stochastic", "stochastic_b", "stochastic_c", "stochastic_equal"]


def test_the_members():
    assert [mode.value for mode in Rounding] == DETERMINISTIC + STOCHASTIC
    assert [rule.value for rule in Overflow] == ["ieee", "saturate", "propagate", "wrap"]
    for member in [*Rounding, *Overflow]:
        assert member.value == member.name.lower()


def test_which_modes_draw():
    assert [mode.value for mode in Rounding if mode.stochastic] == STOCHASTIC


@each(
    ("alias", "mode"),
    [
        ("nearest", Rounding.NEAREST_EVEN),
        ("rne", Rounding.NEAREST_EVEN),
        ("rna", Rounding.NEAREST_AWAY),
        ("rnz", Rounding.NEAREST_ZERO),
        ("ru", Rounding.UP),
        ("rd", Rounding.DOWN),
        ("rz", Rounding.TOWARD_ZERO),
        ("ro", Rounding.ODD),
        ("sr", Rounding.STOCHASTIC),
    ],
)
def test_short_names(alias, mode):
    assert as_rounding(alias) is mode
    assert jc.Spec("e5m2", alias).rounding is mode
    assert jc.Spec(f"e5m2:{alias}").rounding is mode


@each("mode", Rounding)
def test_rounding_by_member_and_text(mode):
    assert as_rounding(mode) is as_rounding(mode.value) is mode
    assert jc.Spec("e5m2", mode) == jc.Spec("e5m2", rounding=mode.value) == jc.Spec(f"e5m2:{mode.value}")
    assert pickle.loads(pickle.dumps(mode)) is copy.deepcopy(mode) is mode


@each("rule", Overflow)
def test_overflow_by_member_and_text(rule):
    assert as_overflow(rule) is as_overflow(rule.value) is rule
    assert (
        jc.Spec("integer8", overflow=rule)
        == jc.Spec("integer8", overflow=rule.value)
        == jc.Spec(f"integer8:{rule.value}")
    )


def test_no_name_means_two_things():
    names = {mode.value for mode in Rounding} | set(ROUNDING_ALIASES)
    assert not names & {rule.value for rule in Overflow}
    assert not set(ROUNDING_ALIASES) & {mode.value for mode in Rounding}


@each("value", ["nearest-even", "rn", "", None, 3, Overflow.IEEE, ["up"]])
def test_unknown_rounding(value):
    with pytest.raises(
        ValueError, match=r"rounding=.* is not known; (allowed: nearest_even, .*stochastic_equal.*rne|did you mean )"
    ) as e:
        jc.Spec("e5m2", rounding=value)
    assert repr(value) in str(e.value)


@each("value", ["clip", "", 0, True, Rounding.UP])
def test_unknown_overflow(value):
    with pytest.raises(ValueError, match=r"overflow=.* is not known; allowed: ieee, saturate, propagate, wrap") as e:
        jc.Spec("e5m2", overflow=value)
    assert repr(value) in str(e.value)


@each(("fmt", "expected"), [("e5m2", Overflow.IEEE), ("integer8", Overflow.IEEE), ("mxfp4", Overflow.SATURATE)])
def test_the_default_overflow_is_that_of_the_format(fmt, expected):
    assert jc.Spec(fmt).overflow is jc.Spec(fmt, overflow=None).overflow is expected
