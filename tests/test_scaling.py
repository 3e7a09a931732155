"""Blocks and their scales as values: what they accept, refuse, say of themselves; no JAX."""

from __future__ import annotations

import copy
import subprocess
import sys
from fractions import Fraction

import pytest

import jchop as jc
from jchop.scaling import RULES, BlockScaling, divisor_parts, integer_groups, mx, nvfp4

WHOLE = [mx(element) for element in ("e4m3fn", "e5m2", "e3m2fn", "e2m3fn", "e2m1fn", "integer8")] + [
    nvfp4(),
    nvfp4(two_level=False),
    integer_groups(4, 32, rule="half_range"),
    integer_groups(4, 128, scale="bfloat16"),
    integer_groups(8, 32, rule="no_clip", axis=0),
    BlockScaling("integer6(narrow=true):stochastic", 16, -2, "e8m0fnu", "floor"),
    BlockScaling("codebook(-1,0,1)", 64, scale="float32", rule="absmax"),
    BlockScaling("e4m3fn", 8, nan_block=True),
]


@pytest.mark.parametrize("scaling", WHOLE, ids=str)
def test_is_a_frozen_hashable_value(scaling):
    same = copy.deepcopy(scaling)
    assert same == scaling and hash(same) == hash(scaling) and len({same, scaling}) == 1
    with pytest.raises(AttributeError):
        scaling.block = 3


def test_texts_are_coerced():
    scaling = BlockScaling("float8_e4m3fn:saturate", 32, scale="e8m0fnu")
    assert scaling == BlockScaling(jc.Spec(jc.float8_e4m3fn, overflow="saturate"), 32, scale=jc.float8_e8m0fnu)
    assert scaling == mx("e4m3fn") == mx(jc.float8_e4m3fn)
    assert str(scaling) == "float8_e4m3fn:saturate(block=32,axis=-1,scale=float8_e8m0fnu,rule=floor)"
    assert str(BlockScaling("e5m2", 4, nan_block=True)).endswith(",nan_block=true)")


def test_formats_in_use():
    """Elements, blocks, scales and stored bits of the formats that documents define."""
    assert [mx(e).bits_per_element for e in ("e4m3fn", "e3m2fn", "e2m1fn", "integer8")] == [8.25, 6.25, 4.25, 8.25]
    mxint8 = mx("integer8").element.format
    assert (mxint8.max, mxint8.min, mxint8.smallest) == (1.984375, -1.984375, 0.015625)
    assert (nvfp4().block, nvfp4().scale.smallest, nvfp4().scale.max) == (16, 2.0**-6, 448.0)
    assert nvfp4().tensor_divisor == 2688
    assert integer_groups(4, 128, scale="bfloat16").bits_per_element == 4.125
    assert integer_groups(4, 32).scale == jc.binary32


@pytest.mark.parametrize(
    ("scaling", "emax", "fraction", "divisors"),
    [
        (mx("e4m3fn"), 8, 3, (448,)),
        (mx("e2m3fn"), 2, 3, (Fraction(15, 2),)),
        (mx("integer8"), 0, 6, (Fraction(127, 64),)),
        (integer_groups(4, 32, rule="half_range"), 2, 2, (Fraction(15, 2),)),
        (integer_groups(4, 32, rule="no_clip"), 2, 2, (7, 8)),
        (BlockScaling("uinteger4", 32), 3, 3, (15,)),
        (BlockScaling("codebook(-1,0,0.75)", 32), -1, None, (Fraction(3, 4),)),
    ],
    ids=str,
)
def test_facts_of_the_element(scaling, emax, fraction, divisors):
    assert (scaling.element_emax, scaling.element_fraction, scaling.divisors) == (emax, fraction, divisors)


def test_powers():
    assert mx("e4m3fn").is_power
    assert BlockScaling("integer4", 32, scale="bfloat16", rule="floor").is_power
    assert BlockScaling("integer4", 32, scale="e8m0fnu", rule="absmax").is_power
    assert not integer_groups(4, 32).is_power
    assert not BlockScaling("e2m1fn", 16, scale="e8m0fnu", rule="two_level").is_power


def test_parts_of_a_divisor():
    assert divisor_parts(Fraction(448)) == (7, 6)
    assert divisor_parts(Fraction(15, 2)) == (15, -1)
    assert divisor_parts(Fraction(3, 64)) == (3, -6)
    with pytest.raises(ValueError, match="1/3 is no integer times a power of two"):
        divisor_parts(Fraction(1, 3))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"element": 8}, TypeError, "element=8 must be"),
        ({"element": "e9"}, ValueError, "'e9' is not known"),
        ({"block": 0}, ValueError, "block=0 must be an integer >= 1"),
        ({"block": 2.0}, TypeError, "block=2.0 must be"),
        ({"axis": None}, TypeError, "axis=None must be"),
        ({"scale": "int8"}, TypeError, "scale='int8' must be a FloatFormat"),
        ({"rule": "max"}, ValueError, "rule='max' must be one of 'floor', 'ceil'"),
        ({"nan_block": 1}, TypeError, "nan_block=1 must be True or False"),
        ({"element": "integer8:wrap"}, ValueError, "scaled elements cannot wrap"),
        ({"element": "e4m3:gradient=clipped"}, ValueError, "has a gradient"),
        ({"element": "codebook(-1,0)"}, ValueError, "no positive value"),
        ({"element": "uinteger4", "rule": "half_range"}, ValueError, "needs an element format with negative values"),
        ({"element": "uinteger4", "rule": "no_clip"}, ValueError, "needs an element format with negative values"),
        ({"element": "codebook(-1,1)", "rule": "even"}, ValueError, "needs an element format with fraction bits"),
        ({"scale": "float6_e3m2fn", "nan_block": True}, ValueError, "needs a scale format with a NaN"),
    ],
    ids=str,
)
def test_refusals_name_the_field(fields, error, message):
    with pytest.raises(error) as caught:
        BlockScaling(**({"element": "e4m3fn", "block": 32} | fields))
    assert message in str(caught.value)


def test_every_rule_is_described():
    assert set(RULES) == {"floor", "ceil", "even", "rceil", "absmax", "half_range", "no_clip", "two_level"}


@pytest.mark.smoke
def test_needs_no_jax():
    # The package's face imports JAX; a bare package in its place does not.
    code = f"""
import sys, types
sys.modules["jax"] = None
sys.modules["jchop"] = package = types.ModuleType("jchop")
package.__path__ = {list(jc.__path__)!r}
import jchop.scaling
jchop.scaling.mx("e4m3fn")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
