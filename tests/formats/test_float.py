"""Floating-point formats of any size: their facts, values and codes, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from fractions import Fraction

import numpy as np
import oracle
import pytest
from each_case import each

import jchop as jc
from jchop.formats import CATALOGUE, FloatFormat, parse_format

#: One format for each way to use the codes, and sizes that binary64 does not hold.
SHAPES = {
    "smallest": FloatFormat(1, 0, infinities=False, nans="none"),
    "only subnormals": FloatFormat(1, 3),
    "no fraction": FloatFormat(4, 0),
    "no fraction, no nan": FloatFormat(4, 0, infinities=False, nans="none"),
    "no subnormals": FloatFormat(4, 3, subnormals=False),
    "fn without subnormals": FloatFormat(4, 3, subnormals=False, infinities=False, nans="top"),
    "extended": FloatFormat(4, 3, nans="none"),
    "extended, top nan": FloatFormat(4, 3, nans="top"),
    "unsigned": FloatFormat(3, 2, signed=False),
    "no zero": FloatFormat(3, 2, zero=False),
    "biased up": FloatFormat(5, 2, bias=200),
    "biased down": FloatFormat(5, 2, bias=-90),
    "finer than binary64": FloatFormat(8, 3, bias=1300),
    "wider than binary64": FloatFormat(11, 1, nans="none", infinities=False),
    "lower largest exponent": FloatFormat(5, 2, max_exponent=9),
    "of a single exponent": FloatFormat(5, 2, bias=3, max_exponent=-2),
    "lower, no zero": FloatFormat(3, 2, zero=False, max_exponent=1),
    "p3109 powers": jc.formats.p3109(12, 1, False),
    "p3109 wide": jc.formats.p3109(13, 2, False),
    "p3109 narrow": jc.formats.p3109(10, 10, False),
}

#: The formats whose every code is met by default, and those of more codes than 4,096.
FEW = [fmt for fmt in SHAPES.values() if fmt.bits <= 8]
BY_SIZE = pytest.mark.parametrize(
    "formats",
    [FEW, pytest.param([fmt for fmt in SHAPES.values() if fmt.bits > 8], marks=pytest.mark.slow)],
    ids=["to 8 bits", "wider"],
)
NAMED_BY_SIZE = pytest.mark.parametrize(
    "formats",
    [
        [fmt for fmt in CATALOGUE.values() if fmt.bits <= 8],
        pytest.param([fmt for fmt in CATALOGUE.values() if 8 < fmt.bits <= 16], marks=pytest.mark.slow),
    ],
    ids=["to 8 bits", "wider"],
)


def codes_of(fmt: jc.formats.ElementFormat) -> np.ndarray:
    """Every code that the format uses, NaN left out."""
    values = [fmt.value_of(code) for code in range(1 << fmt.bits)]
    return np.array([code for code, value in enumerate(values) if value is not None and value == value])


@BY_SIZE
def test_values_and_codes(formats):
    """Sorted, unique, the set that the definition gives; closed under encode and decode over every code."""
    for fmt in formats:
        values = fmt.values()
        exact = [Fraction(value) for value in values]
        assert exact == oracle.values(oracle.describe(fmt)), fmt
        assert values.dtype == (np.float64 if all(isinstance(v, float) for v in values.tolist()) else object), fmt
        assert all(low < high for low, high in itertools.pairwise(exact)), fmt
        assert exact[-1] == Fraction(fmt.max) and exact[0] == Fraction(fmt.min), fmt
        assert next(value for value in exact if value > 0) == Fraction(fmt.smallest), fmt
        codes = codes_of(fmt)
        np.testing.assert_array_equal(fmt.encode(fmt.decode(codes)), codes, str(fmt))
        np.testing.assert_array_equal(fmt.decode(fmt.encode(values)), values, str(fmt))
        assert fmt.encode(values).dtype == (np.uint8 if fmt.bits <= 8 else np.uint16), fmt


@NAMED_BY_SIZE
def test_named_formats_are_closed(formats):
    for fmt in formats:
        codes = codes_of(fmt)
        np.testing.assert_array_equal(fmt.encode(fmt.decode(codes)), codes, str(fmt))
        values = fmt.values()
        assert values.dtype == np.float64 and (np.diff(values) > 0).all(), fmt
        assert not np.signbit(values[values == 0]).any(), fmt
        np.testing.assert_array_equal(fmt.decode(fmt.encode(values)), values, str(fmt))


@each("fmt", [fmt for fmt in SHAPES.values() if fmt.bits <= 12])
def test_facts_are_those_of_the_values(fmt):
    positive = [Fraction(value) for value in fmt.values() if value > 0]
    one = Fraction(2) ** fmt.emax
    assert one <= positive[-1] < 2 * one
    assert fmt.has_negative_zero == (fmt.signed and fmt.zero and fmt.nans != "negative_zero")
    subnormal = [value for value in positive if fmt.zero and value < Fraction(fmt.smallest_normal)]
    if subnormal and fmt.frac_bits:
        assert Fraction(fmt.smallest_subnormal) == subnormal[0]
    assert Fraction(fmt.smallest_normal) == Fraction(2) ** fmt.emin
    assert fmt.bits == fmt.signed + fmt.exp_bits + fmt.frac_bits


@each(
    ("fmt", "value"),
    [
        (jc.formats.float8_e4m3fn, 449.0),
        (jc.formats.float8_e4m3fn, 480.0),
        (jc.formats.float8_e4m3fn, np.inf),
        (jc.formats.float8_e4m3fn, 2.0**-10),
        (jc.formats.float8_e4m3fn, 1.0625),
        (jc.formats.float8_e4m3fnuz, -0.0),
        (jc.formats.float4_e2m1fn, np.nan),
        (jc.formats.float8_e8m0fnu, 0.0),
        (jc.formats.float8_e8m0fnu, -1.0),
        (jc.formats.float8_e8m0fnu, 3.0),
        (FloatFormat(4, 3, subnormals=False), 2.0**-9),
        (FloatFormat(3, 2, signed=False), -1.0),
        (FloatFormat(3, 2, signed=False), -0.0),
        (jc.formats.p3109(8, 3, extended=False), -np.inf),
        (jc.formats.binary32, 0.1),
    ],
)
def test_encode_refuses_other_values(fmt, value):
    with pytest.raises(ValueError, match=r"values\[1\]=.* is not a value of .*round_to_format") as error:
        fmt.encode([fmt.max, value])
    assert str(float(value)) in str(error.value) and str(fmt) in str(error.value)


@each("fmt", [jc.formats.tf32, jc.formats.binary32, jc.formats.binary64, FloatFormat(8, 10), FloatFormat(9, 11)])
def test_wide_formats_have_codes(fmt, rng):
    codes = rng.integers(0, 1 << fmt.bits, 300, dtype=np.uint64)
    codes = codes[~np.isnan(fmt.decode(codes))]
    np.testing.assert_array_equal(fmt.encode(fmt.decode(codes)), codes)
    assert fmt.encode(fmt.decode(codes)).dtype == fmt.code_dtype == (np.uint64 if fmt.bits > 32 else np.uint32)


@each("dtype", [np.float16, np.float32, np.float64])
def test_codes_are_the_patterns_of_ieee_dtypes(dtype, rng):
    x = rng.standard_normal(200).astype(dtype)
    fmt = jc.Spec(np.dtype(dtype).name).format
    np.testing.assert_array_equal(fmt.encode(x), x.view(f"uint{x.itemsize * 8}"))


@each("fmt", [FloatFormat(16, 10), FloatFormat(12, 20, bias=1), FloatFormat(8, 20, bias=3000)])
def test_wide_formats_that_binary64_does_not_hold(fmt):
    """Exact fractions, as for the narrow ones: nothing is rounded on the way."""
    codes = [0, 1, 5, fmt.max_code - 1, fmt.max_code]
    values = fmt.decode(codes)
    assert [Fraction(value) for value in values] == [Fraction(fmt.value_of(code)) for code in codes]
    np.testing.assert_array_equal(fmt.encode(values), codes)


def test_shapes_of_codes():
    fmt = jc.formats.float8_e4m3fn
    grid = fmt.values()[:24].reshape(2, 3, 4)
    assert fmt.encode(grid).shape == (2, 3, 4) == fmt.decode(fmt.encode(grid)).shape
    assert fmt.encode([]).shape == (0,) == fmt.decode([]).shape
    assert fmt.encode([]).dtype == np.uint8 and fmt.decode([]).dtype == np.float64
    assert fmt.encode(1.0).shape == () == np.shape(fmt.decode(56))
    assert fmt.encode(grid.T).tolist() == fmt.encode(grid).T.tolist()
    assert fmt.decode(56) == 1.0


def test_decoded_values_are_the_callers_own():
    first = jc.formats.float8_e4m3fn.decode([56, 57])
    first[:] = -1
    values = jc.formats.float8_e4m3fn.values()
    values[:] = -1
    assert jc.formats.float8_e4m3fn.decode([56]).tolist() == [1.0] and jc.formats.float8_e4m3fn.values()[-1] == 448


@each(
    ("codes", "words"),
    [
        ([256], r"codes must lie in \[0, 2\^8\).*256"),
        ([-1], r"codes must lie in \[0, 2\^8\).*-1"),
        ([1.0], r"codes=\[1.0\] must be integers"),
        ([True], "must be integers"),
        (["a"], "must be integers"),
    ],
)
def test_decode_refuses(codes, words):
    with pytest.raises((TypeError, ValueError), match=words):
        jc.formats.float8_e4m3fn.decode(codes)


def test_values_of_wide_formats_are_refused():
    with pytest.raises(ValueError, match=r"binary32 has 32 bits.*at most 16"):
        jc.formats.binary32.values()


@each(
    ("fields", "words"),
    [
        ({"exp_bits": 0}, "exp_bits=0 must be an integer from 1 to 16"),
        ({"exp_bits": 17}, "exp_bits=17 must be an integer from 1 to 16"),
        ({"exp_bits": 5.0}, "exp_bits=5.0 must be an integer"),
        ({"exp_bits": True}, "exp_bits=True must be an integer"),
        ({"exp_bits": "5"}, "exp_bits='5' must be an integer"),
        ({"frac_bits": -1}, "frac_bits=-1 must be an integer from 0 to 52"),
        ({"frac_bits": 53}, "frac_bits=53 must be an integer from 0 to 52"),
        ({"frac_bits": None}, "frac_bits=None must be an integer"),
        ({"bias": 1.5}, "bias=1.5 must be an integer"),
        ({"bias": 10**6}, "bias=1000000 must be an integer from"),
        ({"subnormals": 1}, "subnormals=1 must be True or False"),
        ({"infinities": "no"}, "infinities='no' must be True or False"),
        ({"signed": None}, "signed=None must be True or False"),
        ({"zero": 0}, "zero=0 must be True or False"),
        ({"nans": "fn"}, "nans='fn' must be one of 'ieee', 'top', 'negative_zero', 'none'"),
        ({"nans": None}, "nans=None must be one of 'ieee'"),
        ({"infinities": False}, "infinities=False contradicts nans='ieee'.*use nans="),
        ({"nans": "negative_zero", "signed": False}, "nans='negative_zero' needs signed=True"),
        ({"nans": "negative_zero", "zero": False}, "nans='negative_zero' needs zero=True"),
        ({"zero": False, "subnormals": False}, "subnormals=False has no effect with zero=False"),
        ({"max_exponent": 8}, "max_exponent=8 must be an integer from -6 to 7"),
        ({"max_exponent": -7}, "max_exponent=-7 must be an integer from -6 to 7"),
        ({"max_exponent": 7.0}, "max_exponent=7.0 must be an integer"),
        ({"max_exponent": 3, "infinities": False, "nans": "top"}, "max_exponent=3 needs nans='ieee'"),
        ({"exp_bits": 1, "frac_bits": 0}, "exp_bits=1, frac_bits=0, nans='ieee' leave no positive finite value"),
        ({"exp_bits": 1, "frac_bits": 2, "subnormals": False}, "exp_bits=1, frac_bits=2.*no positive finite value"),
    ],
)
def test_bad_fields_are_refused(fields, words):
    with pytest.raises((TypeError, ValueError), match=words):
        FloatFormat(**({"exp_bits": 4, "frac_bits": 3} | fields))


def test_options_are_keywords():
    with pytest.raises(TypeError):
        FloatFormat(4, 3, 7)  # type: ignore[misc]


def test_numpy_integers_are_integers():
    fmt = FloatFormat(np.int64(11), np.uint8(52), bias=np.int16(1023))  # type: ignore[arg-type]
    assert fmt == jc.formats.binary64 and fmt.max == jc.formats.binary64.max and fmt.text == "e11m52"
    assert repr(fmt) == repr(FloatFormat(11, 52))
    assert all(type(field) is int for field in (fmt.exp_bits, fmt.frac_bits, fmt.bias))


def test_the_default_bias_is_an_integer():
    assert [FloatFormat(e, 3).bias for e in (2, 5, 8)] == [1, 15, 127]
    assert FloatFormat(5, 2, bias=None) == FloatFormat(5, 2, bias=15)  # type: ignore[arg-type]


@each("fmt", [*SHAPES.values(), *CATALOGUE.values()])
def test_formats_are_values(fmt):
    """Hashable, picklable, copyable; equal where the fields are, whatever the name."""
    fmt.values() if fmt.bits <= 8 else fmt.max  # cached facts are no part of it
    for other in (pickle.loads(pickle.dumps(fmt)), copy.copy(fmt), copy.deepcopy(fmt)):
        assert other == fmt and hash(other) == hash(fmt) and str(other) == str(fmt) and repr(other) == repr(fmt)
    same = dataclasses.replace(fmt)
    assert same == fmt and same.name is None and parse_format(str(same)) == fmt
    named = fmt.named("mine")
    assert named == fmt and hash(named) == hash(fmt) and str(named) == "mine"
    assert {fmt: 1}[named] == 1
    assert parse_format(fmt.text) == fmt
    assert eval(repr(fmt), {"FloatFormat": FloatFormat}) == fmt


def test_each_field_counts_in_equality():
    fmt = FloatFormat(4, 3, nans="top")
    changes = ({"exp_bits": 5}, {"frac_bits": 2}, {"bias": 8}, {"subnormals": False}, {"infinities": False})
    changes += ({"nans": "none"}, {"signed": False}, {"zero": False})
    others = [dataclasses.replace(fmt, **({"bias": 7} | change)) for change in changes]
    assert len({fmt, *others}) == len(others) + 1
    assert fmt != "e4m3" and fmt != jc.formats.IntegerFormat(8)


@each("field", ["exp_bits", "bias", "name", "max", "brand_new"])
def test_formats_cannot_be_changed(field):
    with pytest.raises(AttributeError):
        setattr(jc.formats.binary16, field, 3)
    with pytest.raises(AttributeError):
        delattr(jc.formats.binary16, field)


def test_a_changed_copy_does_not_keep_the_name():
    """What `str` prints reads back as the same format."""
    fmt = dataclasses.replace(jc.formats.binary16, subnormals=False)
    assert parse_format(str(fmt)) == fmt
