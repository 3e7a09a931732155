"""The named formats: their facts, against the table of the numerics document and against ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from each_case import each

import jchop as jc
from jchop.formats import ALIASES, CATALOGUE, parse_format

#: e, m, bias, largest finite value, exponents of the smallest normal and the smallest subnormal value; inf, NaN, -0.
FACTS = {
    "binary64": (11, 52, 1023, 2.0**1023 * (2 - 2.0**-52), -1022, -1074, True, True, True),
    "binary32": (8, 23, 127, 2.0**127 * (2 - 2.0**-23), -126, -149, True, True, True),
    "binary16": (5, 10, 15, 65504.0, -14, -24, True, True, True),
    "bfloat16": (8, 7, 127, 2.0**127 * (2 - 2.0**-7), -126, -133, True, True, True),
    "tf32": (8, 10, 127, 2.0**127 * (2 - 2.0**-10), -126, -136, True, True, True),
    "float8_e5m2": (5, 2, 15, 57344.0, -14, -16, True, True, True),
    "float8_e4m3": (4, 3, 7, 240.0, -6, -9, True, True, True),
    "float8_e4m3fn": (4, 3, 7, 448.0, -6, -9, False, True, True),
    "float8_e5m2fnuz": (5, 2, 16, 57344.0, -15, -17, False, True, False),
    "float8_e4m3fnuz": (4, 3, 8, 240.0, -7, -10, False, True, False),
    "float8_e4m3b11fnuz": (4, 3, 11, 30.0, -10, -13, False, True, False),
    "float8_e3m4": (3, 4, 3, 15.5, -2, -6, True, True, True),
    "float8_e8m0fnu": (8, 0, 127, 2.0**127, -127, None, False, True, False),
    "float6_e3m2fn": (3, 2, 3, 28.0, -2, -4, False, False, True),
    "float6_e2m3fn": (2, 3, 1, 7.5, 0, -3, False, False, True),
    "float4_e2m1fn": (2, 1, 1, 6.0, 0, -1, False, False, True),
}

#: What ml_dtypes (or NumPy) calls them.
DTYPES = {name: getattr(ml_dtypes, name) for name in FACTS if name[:3] in ("flo", "bfl")} | {
    "binary64": np.float64,
    "binary32": np.float32,
    "binary16": np.float16,
}


def dtype_code(name: str, value: float) -> int:
    """The bit pattern that the dtype library gives a value; the bits above a narrow format's width are unused."""
    dtype = np.dtype(DTYPES[name])
    word = np.array(value).astype(dtype).view(f"uint{8 * dtype.itemsize}")
    return int(word) & ((1 << CATALOGUE[name].bits) - 1)


def test_every_named_format_is_here():
    assert set(CATALOGUE) == set(FACTS)


@each("name", FACTS)
def test_facts(name):
    exp_bits, frac_bits, bias, largest, normal, subnormal, inf, nan, negative_zero = FACTS[name]
    fmt, signed = CATALOGUE[name], name != "float8_e8m0fnu"
    assert (fmt.exp_bits, fmt.frac_bits, fmt.bias, fmt.signed) == (exp_bits, frac_bits, bias, signed)
    assert fmt.bits == signed + exp_bits + frac_bits
    assert fmt.precision == frac_bits + 1
    assert fmt.max == largest and isinstance(fmt.max, float)
    assert fmt.min == (-largest if signed else 2.0**-127)
    assert fmt.emax == math.frexp(largest)[1] - 1
    assert fmt.emin == normal and fmt.smallest_normal == 2.0**normal
    assert fmt.smallest_subnormal == (None if subnormal is None else 2.0**subnormal)
    assert fmt.smallest == (2.0**normal if subnormal is None else 2.0**subnormal)
    assert fmt.eps == 2.0**-frac_bits and fmt.unit_roundoff == 2.0**-frac_bits / 2
    assert (fmt.has_inf, fmt.has_nan, fmt.has_negative_zero) == (inf, nan, negative_zero)


@each("name", DTYPES)
def test_facts_agree_with_finfo(name):
    fmt, info = CATALOGUE[name], ml_dtypes.finfo(DTYPES[name])
    assert fmt.max == float(info.max) and fmt.eps == float(info.eps)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.bits == info.bits
    if fmt.smallest_subnormal is not None:
        assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    if name != "float8_e8m0fnu":
        assert fmt.min == float(info.min)


@each("name", [name for name in DTYPES if CATALOGUE[name].bits <= 16])
def test_codes_agree_with_the_dtype(name):
    """Every code decodes to what the dtype library reads in it, and encodes back to that library's code."""
    fmt, dtype = CATALOGUE[name], np.dtype(DTYPES[name])
    codes = np.arange(1 << fmt.bits, dtype=f"uint{8 * dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # signaling NaNs
        theirs = codes.view(dtype).astype(np.float64)
    ours = fmt.decode(codes)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours[~np.isnan(ours)]), np.signbit(theirs[~np.isnan(theirs)]))
    kept = codes[~np.isnan(ours)][:: max(1, len(codes) >> 10)]
    np.testing.assert_array_equal(fmt.encode(theirs[kept]), kept)
    if fmt.has_nan:
        assert int(fmt.encode(np.nan)) & ~fmt_sign(fmt) == dtype_code(name, np.nan) & ~fmt_sign(fmt)


def fmt_sign(fmt: jc.formats.FloatFormat) -> int:
    """The sign bit, which the NaN of an IEEE-like format may carry or not; no bit where -0 is the NaN."""
    return 1 << fmt.bits - 1 if fmt.has_negative_zero else 0


@each("name", CATALOGUE)
def test_names(name):
    fmt = CATALOGUE[name]
    assert str(fmt) == name and parse_format(name) is fmt
    assert getattr(jc.formats, name) is fmt
    assert parse_format(fmt.text) == fmt
    assert eval(repr(fmt), {"FloatFormat": jc.formats.FloatFormat}) == fmt


@each(
    ("alias", "name"),
    [
        *[(alias, "binary16") for alias in ("float16", "half", "fp16", "h", "e5m10")],
        *[(alias, "binary32") for alias in ("float32", "single", "fp32", "s", "e8m23")],
        *[(alias, "binary64") for alias in ("float64", "double", "fp64", "d", "e11m52")],
        *[(alias, "bfloat16") for alias in ("bf16", "b", "e8m7")],
        *[(alias, "tf32") for alias in ("t", "e8m10")],
        *[(alias, "float8_e5m2") for alias in ("q52", "e5m2")],
        *[(alias, "float8_e4m3") for alias in ("q43", "e4m3")],
        *[(name.split("_")[1], name) for name in FACTS if "_" in name],
    ],
)
def test_aliases(alias, name):
    assert parse_format(alias) == parse_format(alias.upper()) == parse_format(f" {alias} ") == CATALOGUE[name]


def test_the_tables_are_read_only_and_apart():
    for table in (CATALOGUE, ALIASES):
        with pytest.raises(TypeError):
            table["mine"] = jc.formats.binary16  # type: ignore[index]
    assert not set(ALIASES) & set(CATALOGUE)
    assert set(ALIASES.values()) <= set(CATALOGUE)


# --- IEEE P3109 ---------------------------------------------------------------------------------------------------

P3109 = [
    (bits, precision, signed, extended)
    for bits in range(3, 17)
    for signed in (True, False)
    for precision in range(1, bits + (not signed))
    for extended in (True, False)
]


@each(("bits", "precision", "signed", "extended"), P3109)
def test_p3109(bits, precision, signed, extended):
    fmt = jc.formats.p3109(bits, precision, signed, extended)
    name = f"binary{bits}p{precision}{'s' if signed else 'u'}{'e' if extended else 'f'}"
    assert str(fmt) == name and parse_format(name) == fmt == parse_format(fmt.text)
    assert (fmt.bits, fmt.precision, fmt.signed) == (bits, precision, signed)
    assert fmt.bias == 2 ** (bits - precision - 1 if signed else bits - precision)
    assert fmt.emin == 1 - fmt.bias
    assert fmt.has_nan and fmt.has_inf == extended and not fmt.has_negative_zero
    # The one NaN: the code of -0, or the last code of an unsigned format. Infinities just below it, or at both ends.
    nan = 1 << bits - 1 if signed else (1 << bits) - 1
    assert int(fmt.encode(np.nan)) == nan
    infinities = [nan - 1, (1 << bits) - 1] if signed else [nan - 1]
    if extended:
        assert [fmt.value_of(code) for code in infinities] == [np.inf, -np.inf][: len(infinities)]
    else:
        infinities = []
    # All other codes are finite values: zero, and from 1 on the positive ones in order.
    largest = nan - 1 - extended
    assert fmt.code_of(0.0) == 0 and fmt.code_of(fmt.smallest) == 1 and fmt.code_of(fmt.max) == largest
    assert fmt.code_of(-0.0) is None
    if signed:
        assert fmt.code_of(fmt.min) == nan + largest
    if bits <= 9:
        values = {fmt.value_of(code) for code in range(1 << bits) if code != nan and code not in infinities}
        assert len(values) == 2**bits - 1 - len(infinities)
        assert values == set(fmt.values().tolist())


@each(
    ("name", "largest", "smallest"),
    [
        ("binary8p1se", 2.0**62, 2.0**-63),
        ("binary8p3se", 49152.0, 2.0**-17),
        ("binary8p4sf", 240.0, 2.0**-10),
        ("binary8p4se", 224.0, 2.0**-10),
        ("binary8p7sf", 1.984375, 2.0**-6),
        ("binary4p2sf", 3.0, 0.25),
    ],
)
def test_p3109_ends(name, largest, smallest):
    fmt = jc.Spec(name).format
    assert (fmt.max, fmt.smallest) == (largest, smallest)


@each(
    ("arguments", "words"),
    [
        ((1, 1), "bits=1 must be an integer from 2 to 16"),
        ((17, 3), "bits=17 must be an integer from 2 to 16"),
        ((8, 8), "precision=8 must be an integer from 1 to 7"),
        ((8, 9, False), "precision=9 must be an integer from 1 to 8"),
        ((8, 0), "precision=0 must be an integer from 1 to 7"),
        ((8, 3.0), "precision=3.0 must be an integer"),
        ((8, 3, 1), "signed=1 must be True or False"),
        ((8, 3, True, None), "extended=None must be True or False"),
    ],
)
def test_p3109_refuses(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        jc.formats.p3109(*arguments)
