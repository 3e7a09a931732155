"""Fixed point and integers: their facts, values and codes, and what is refused."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction

import numpy as np
import oracle
import pytest
from each_case import each

from jchop.formats import FixedFormat, IntegerFormat, parse_format

#: By text: the format, its width, smallest and largest value, quantum.
FACTS = {
    "fixed4.4": (FixedFormat(4, 4), 8, -8.0, 7.9375, 2.0**-4),
    "fixed4.4(symmetric=true)": (FixedFormat(4, 4, symmetric=True), 8, -7.9375, 7.9375, 2.0**-4),
    "ufixed4.4": (FixedFormat(4, 4, signed=False), 8, 0.0, 15.9375, 2.0**-4),
    "fixed1.7": (FixedFormat(1, 7), 8, -1.0, 1 - 2.0**-7, 2.0**-7),
    "fixed8.0": (FixedFormat(8, 0), 8, -128.0, 127.0, 1.0),
    "fixed-2.8": (FixedFormat(-2, 8), 6, -(2.0**-3), 2.0**-3 - 2.0**-8, 2.0**-8),
    "fixed10.-4": (FixedFormat(10, -4), 6, -512.0, 496.0, 16.0),
    "ufixed0.8": (FixedFormat(0, 8, False), 8, 0.0, 255 / 256, 2.0**-8),
    "fixed3.7": (FixedFormat(3, 7), 10, -4.0, 4 - 2.0**-7, 2.0**-7),
    "ufixed1.0": (FixedFormat(1, 0, False), 1, 0.0, 1.0, 1.0),
    "integer8": (IntegerFormat(8), 8, -128.0, 127.0, 1.0),
    "integer8(narrow=true)": (IntegerFormat(8, narrow=True), 8, -127.0, 127.0, 1.0),
    "uinteger8": (IntegerFormat(8, signed=False), 8, 0.0, 255.0, 1.0),
    "integer2": (IntegerFormat(2), 2, -2.0, 1.0, 1.0),
    "integer4(narrow=true)": (IntegerFormat(4, True, True), 4, -7.0, 7.0, 1.0),
    "uinteger1": (IntegerFormat(1, signed=False), 1, 0.0, 1.0, 1.0),
    "integer11": (IntegerFormat(11), 11, -1024.0, 1023.0, 1.0),
    "fixed-984.992": (FixedFormat(-984, 992), 8, -(2.0**-985), 2.0**-985 - 2.0**-992, 2.0**-992),
}
FORMATS = [row[0] for row in FACTS.values()]


@each("text", FACTS)
def test_facts(text):
    fmt, bits, low, high, quantum = FACTS[text]
    assert (fmt.bits, fmt.min, fmt.max, fmt.smallest) == (bits, low, high, quantum)
    assert Fraction(fmt.quantum) == Fraction(quantum)
    assert fmt.precision is fmt.emin is fmt.emax is fmt.eps is fmt.unit_roundoff is None
    assert fmt.smallest_normal is fmt.smallest_subnormal is None
    assert not (fmt.has_inf or fmt.has_nan or fmt.has_negative_zero)
    assert str(fmt) == fmt.text == text and parse_format(text) == fmt


@each("fmt", FORMATS)
def test_values_and_codes(fmt):
    values = fmt.values()
    assert [Fraction(value) for value in values] == oracle.values(oracle.describe(fmt))
    assert values.dtype == np.float64 and (np.diff(values) > 0).all()
    codes = fmt.encode(values)
    np.testing.assert_array_equal(fmt.decode(codes), values)
    # Two's complement: the codes, read as integers of that width, count the quanta.
    counts = np.round(values / float(fmt.quantum)).astype(np.int64)
    np.testing.assert_array_equal(codes, counts % (1 << fmt.bits))
    unused = np.setdiff1d(np.arange(1 << fmt.bits), codes)
    assert np.isnan(fmt.decode(unused)).all() and len(unused) == (fmt.min == -fmt.max)


@each(
    ("fmt", "value"),
    [
        (FixedFormat(4, 4), 8.0),
        (FixedFormat(4, 4), 0.03125),
        (FixedFormat(4, 4, symmetric=True), -8.0),
        (FixedFormat(4, 4, signed=False), -0.0625),
        (IntegerFormat(8), 128.0),
        (IntegerFormat(8), 0.5),
        (IntegerFormat(8, narrow=True), -128.0),
        (IntegerFormat(8), np.nan),
        (IntegerFormat(8), -np.inf),
    ],
)
def test_encode_refuses_other_values(fmt, value):
    with pytest.raises(ValueError, match=r"values\[1\]=.* is not a value of") as error:
        fmt.encode([0.0, value])
    assert str(value) in str(error.value) and str(fmt) in str(error.value)


@each("fmt", [FixedFormat(16, 16), IntegerFormat(32), FixedFormat(1, 31), IntegerFormat(48)])
def test_wide_formats_have_codes(fmt, rng):
    codes = rng.integers(0, 1 << fmt.bits, 300, dtype=np.uint64)
    np.testing.assert_array_equal(fmt.encode(fmt.decode(codes)), codes)


@each("fmt", [FixedFormat(32, 32), IntegerFormat(64), FixedFormat(1, 63, False)])
def test_wide_formats_that_binary64_does_not_hold(fmt):
    """Exact fractions where binary64 is too narrow: nothing is rounded on the way."""
    codes = np.array([0, 1, 2**53 + 1, 2**63 - 1, 2**63 + 1, 2**64 - 1], np.uint64)
    values = fmt.decode(codes)
    assert [Fraction(value) for value in values] == [Fraction(fmt.value_of(int(code))) for code in codes]
    np.testing.assert_array_equal(fmt.encode(values), codes)


def test_exact_integers_can_be_encoded():
    codes = IntegerFormat(64).encode([Fraction(2**63 - 1), Fraction(-(2**63)), Fraction(2**53 + 1)])
    assert codes.tolist() == [2**63 - 1, 2**63, 2**53 + 1]
    assert IntegerFormat(64).encode(np.array([2**53 + 1, -1])).tolist() == [2**53 + 1, 2**64 - 1]


@each(
    ("build", "words"),
    [
        (lambda: FixedFormat(1001, 4), "int_bits=1001 must be an integer from -1000 to 1000"),
        (lambda: FixedFormat(4, 1001), "frac_bits=1001 must be an integer from -1000 to 1000"),
        (lambda: FixedFormat(4.0, 4), "int_bits=4.0 must be an integer"),  # type: ignore[arg-type]
        (lambda: FixedFormat(4, "4"), "frac_bits='4' must be an integer"),  # type: ignore[arg-type]
        (lambda: FixedFormat(40, 25), r"int_bits \+ frac_bits=65 must be an integer from 2 to 64"),
        (lambda: FixedFormat(1, 0), r"int_bits \+ frac_bits=1 must be an integer from 2 to 64"),
        (lambda: FixedFormat(4, -4, False), r"int_bits \+ frac_bits=0 must be an integer from 1 to 64"),
        (lambda: FixedFormat(4, 4, 1), "signed=1 must be True or False"),  # type: ignore[arg-type]
        (lambda: FixedFormat(4, 4, True, None), "symmetric=None must be True or False"),  # type: ignore[arg-type]
        (lambda: FixedFormat(4, 4, False, True), "symmetric=True needs signed=True"),
        (lambda: IntegerFormat(1), "bits=1 must be an integer from 2 to 64"),
        (lambda: IntegerFormat(0, False), "bits=0 must be an integer from 1 to 64"),
        (lambda: IntegerFormat(65), "bits=65 must be an integer from 2 to 64"),
        (lambda: IntegerFormat(8.0), "bits=8.0 must be an integer"),  # type: ignore[arg-type]
        (lambda: IntegerFormat(8, "yes"), "signed='yes' must be True or False"),  # type: ignore[arg-type]
        (lambda: IntegerFormat(8, True, 1), "narrow=1 must be True or False"),  # type: ignore[arg-type]
        (lambda: IntegerFormat(8, False, True), "narrow=True needs signed=True"),
    ],
)
def test_bad_fields_are_refused(build, words):
    with pytest.raises((TypeError, ValueError), match=words):
        build()


def test_numpy_integers_are_integers():
    assert IntegerFormat(np.int64(64)).max == IntegerFormat(64).max  # type: ignore[arg-type]
    fmt = FixedFormat(np.uint8(4), np.int64(60))  # type: ignore[arg-type]
    assert fmt == FixedFormat(4, 60) and repr(fmt) == repr(FixedFormat(4, 60)) and fmt.max == FixedFormat(4, 60).max


@each("fmt", FORMATS)
def test_formats_are_values(fmt):
    for other in (pickle.loads(pickle.dumps(fmt)), copy.copy(fmt), copy.deepcopy(fmt)):
        assert other == fmt and hash(other) == hash(fmt) and str(other) == str(fmt)
    named = fmt.named("mine")
    assert named == fmt and hash(named) == hash(fmt) and str(named) == "mine"
    assert eval(repr(fmt), {"FixedFormat": FixedFormat, "IntegerFormat": IntegerFormat}) == fmt


def test_each_field_counts_in_equality():
    fixed = [FixedFormat(4, 4), FixedFormat(5, 4), FixedFormat(4, 5), FixedFormat(4, 4, False)]
    integers = [IntegerFormat(8), IntegerFormat(9), IntegerFormat(8, False), IntegerFormat(8, narrow=True)]
    everything = [*fixed, FixedFormat(4, 4, symmetric=True), *integers, FixedFormat(8, 0)]
    assert len(set(everything)) == len(everything)


@each("fmt", [FixedFormat(4, 4), IntegerFormat(8)])
@each("field", ["bits", "signed", "name", "frac_bits", "brand_new"])
def test_formats_cannot_be_changed(fmt, field):
    with pytest.raises(AttributeError):
        setattr(fmt, field, 3)


def test_nothing_lies_beyond_the_largest_value() -> None:
    for fmt in (FixedFormat(4, 4), IntegerFormat(8)):
        assert fmt.saturates and not fmt.has_inf and not fmt.has_nan
