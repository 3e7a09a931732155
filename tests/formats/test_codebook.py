"""Codebooks: levels, their codes, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle

import cases
import numpy as np
import pytest
from each_case import each

import jchop as jc
from jchop.formats import CodebookFormat, parse_format


@each("name", cases.CODEBOOKS)
def test_facts_values_and_codes(name):
    levels = cases.CODEBOOKS[name]
    fmt = CodebookFormat(levels)
    assert fmt.levels == levels and (fmt.min, fmt.max) == (levels[0], levels[-1])
    assert fmt.bits == max(1, math.ceil(math.log2(len(levels))))
    assert fmt.signed == (levels[0] < 0)
    assert fmt.smallest == min(level for level in levels if level > 0)
    assert not (fmt.has_inf or fmt.has_nan or fmt.has_negative_zero)
    assert fmt.precision is fmt.emin is fmt.emax is fmt.eps is fmt.unit_roundoff is None
    np.testing.assert_array_equal(fmt.values(), levels)
    codes = np.arange(len(levels))
    np.testing.assert_array_equal(fmt.decode(codes), levels)
    np.testing.assert_array_equal(fmt.encode(levels), codes)
    assert np.isnan(fmt.decode(np.arange(len(levels), 1 << fmt.bits))).all()
    assert parse_format(str(fmt)) == fmt == CodebookFormat(list(levels)) == CodebookFormat(np.array(levels))  # type: ignore[arg-type]


@each("count", [1, 2, 3, 255, 256, 257, 1 << 16])
def test_widths(count):
    fmt = CodebookFormat(tuple(np.arange(count) / 4.0))
    assert fmt.bits == max(1, (count - 1).bit_length())
    assert fmt.encode([fmt.max]).tolist() == [count - 1]
    assert fmt.encode([fmt.max]).dtype == (np.uint8 if fmt.bits <= 8 else np.uint16)


def test_no_positive_level():
    assert CodebookFormat((-2.0, -1.0)).smallest is None
    assert CodebookFormat((-2.0, -0.0)).smallest is None


def test_negative_zero_is_zero():
    fmt = CodebookFormat((-1.0, -0.0, 1.0))
    assert fmt == CodebookFormat((-1.0, 0.0, 1.0)) and not np.signbit(fmt.values()[1])
    assert fmt.encode([-0.0]).tolist() == [1]


@each("value", [0.5, 2.0, -2.0, math.inf, math.nan])
def test_encode_refuses_other_values(value):
    with pytest.raises(ValueError, match=r"values\[1\]=.* is not a value of codebook") as error:
        CodebookFormat((-1.0, 0.0, 1.0)).encode([1.0, value])
    assert str(value) in str(error.value)


@each(
    ("levels", "words"),
    [
        ((), "levels has 0 entries; allowed: 1 to 65536"),
        (tuple(range(65537)), "levels has 65537 entries; allowed: 1 to 65536"),
        ((0.0, math.nan), r"levels=.*nan.* must be finite"),
        ((0.0, math.inf), r"levels=.*inf.* must be finite"),
        ((1.0, 0.0), r"levels=\(1.0, 0.0\) must be strictly increasing"),
        ((0.0, 0.0), r"levels=\(0.0, 0.0\) must be strictly increasing"),
        ((-0.0, 0.0), r"levels=\(0.0, 0.0\) must be strictly increasing"),
        (("a", "b"), "levels=.* must be a sequence of numbers"),
        ((1.0, None), "levels=.* must be a sequence of numbers"),
        (1.0, "levels=1.0 must be a sequence of numbers"),
        ((1.0, 1j), "levels=.* must be a sequence of numbers"),
        ((0, 10**400), "levels=.* must be finite"),
    ],
)
def test_bad_levels_are_refused(levels, words):
    with pytest.raises((TypeError, ValueError), match=words):
        CodebookFormat(levels)


def test_formats_are_values():
    fmt = CodebookFormat((-1.0, 0.0, 1e-300, 1e16))
    for other in (pickle.loads(pickle.dumps(fmt)), copy.copy(fmt), copy.deepcopy(fmt)):
        assert other == fmt and hash(other) == hash(fmt) and str(other) == str(fmt)
    named = fmt.named("mine")
    assert named == fmt and hash(named) == hash(fmt) and str(named) == "mine" and named.text == fmt.text
    assert fmt != CodebookFormat((-1.0, 0.0, 1e16))
    assert eval(repr(fmt), {"CodebookFormat": CodebookFormat}) == fmt


@each("field", ["levels", "name", "bits", "brand_new"])
def test_formats_cannot_be_changed(field):
    with pytest.raises(AttributeError):
        setattr(jc.formats.CodebookFormat((0.0, 1.0)), field, 3)
