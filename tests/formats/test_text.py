"""The text grammar of formats, both ways."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from each_case import each
from hypothesis import assume, given, settings

import jchop as jc
from jchop.formats import (
    ALIASES,
    CATALOGUE,
    CodebookFormat,
    ElementFormat,
    FixedFormat,
    FloatFormat,
    HiFloat8Format,
    IntegerFormat,
    LogTakumFormat,
    PositFormat,
    TakumFormat,
    parse_format,
)


@st.composite
def floats(draw: st.DrawFn) -> FloatFormat:
    exp_bits, frac_bits = draw(st.integers(1, 16)), draw(st.integers(0, 52))
    zero = draw(st.booleans())
    signed, subnormals = draw(st.booleans()), not zero or draw(st.booleans())
    nans = draw(st.sampled_from(["ieee", "top", "none"] + ["negative_zero"] * (signed and zero)))
    flags = {
        "zero": zero,
        "signed": signed,
        "subnormals": subnormals,
        "infinities": nans == "ieee" or draw(st.booleans()),
    }
    bias = draw(st.none() | st.integers(-(1 << 16), 1 << 16))
    try:
        fmt = FloatFormat(exp_bits, frac_bits, bias=bias, nans=nans, **flags)  # type: ignore[arg-type]
        # One whose codes are all of subnormals has no exponent to choose.
        if nans != "ieee" or fmt.emax < fmt.emin or draw(st.booleans()):
            return fmt
        largest = draw(st.integers(fmt.emin, fmt.emax))
        return FloatFormat(exp_bits, frac_bits, bias=bias, nans=nans, max_exponent=largest, **flags)  # type: ignore[arg-type]
    except ValueError:  # too few bits for one value
        assume(False)
        raise


@st.composite
def fixed(draw: st.DrawFn) -> FixedFormat:
    signed = draw(st.booleans())
    bits, frac_bits = draw(st.integers(1 + signed, 64)), draw(st.integers(-900, 900))
    return FixedFormat(bits - frac_bits, frac_bits, signed, signed and draw(st.booleans()))


@st.composite
def integers(draw: st.DrawFn) -> IntegerFormat:
    signed = draw(st.booleans())
    return IntegerFormat(draw(st.integers(1 + signed, 64)), signed, signed and draw(st.booleans()))


LEVELS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8, unique=True)
CODEBOOKS = LEVELS.map(lambda levels: CodebookFormat(tuple(sorted({level + 0.0 for level in levels}))))
NAMED = st.sampled_from(
    [*CATALOGUE.values(), *(jc.formats.p3109(*args) for args in ((8, 3), (16, 16, False, False), (3, 1)))]  # type: ignore[arg-type]
)
TAPERED = (
    st.integers(2, 32).map(PositFormat)
    | st.integers(6, 32).map(TakumFormat)
    | st.just(HiFloat8Format())
    | st.integers(6, 32).map(LogTakumFormat)
)
FORMATS = st.one_of(floats(), fixed(), integers(), CODEBOOKS, NAMED, TAPERED)


@pytest.mark.smoke
@settings(deadline=None)
@given(FORMATS)
def test_what_is_printed_reads_back(fmt: ElementFormat):
    assert parse_format(str(fmt)) == fmt
    assert parse_format(str(fmt).upper()) == fmt
    assert str(parse_format(str(fmt))) == str(fmt)
    assert eval(repr(fmt), vars(jc) | vars(jc.formats)) == fmt


@each(
    ("text", "fmt"),
    [
        ("e5m3fn", FloatFormat(5, 3, infinities=False, nans="top")),
        ("e5m3fnuz", FloatFormat(5, 3, bias=16, infinities=False, nans="negative_zero")),
        ("e4m3(bias=11)", FloatFormat(4, 3, bias=11)),
        ("e4m3(subnormals=false)", FloatFormat(4, 3, subnormals=False)),
        ("e4m3(bias=11,subnormals=false,nans=none,infinities=false)",
         FloatFormat(4, 3, bias=11, subnormals=False, nans="none", infinities=False)),
        ("e4m3fn(bias=-3)", FloatFormat(4, 3, bias=-3, infinities=False, nans="top")),
        ("e5m2fnuz(bias=15)", FloatFormat(5, 2, bias=15, infinities=False, nans="negative_zero")),
        ("e5m3fnuz(bias=12)", FloatFormat(5, 3, bias=12, infinities=False, nans="negative_zero")),
        ("binary16(subnormals=false)", FloatFormat(5, 10, subnormals=False)),
        ("bfloat16( subnormals = false )", FloatFormat(8, 7, subnormals=False)),
        ("e5m10(nans=none,infinities=false)", FloatFormat(5, 10, nans="none", infinities=False)),
        ("E5M10", jc.formats.binary16),
        (" e5m10\n", jc.formats.binary16),
        ("fixed8.4", FixedFormat(8, 4)),
        ("fixed8.-4", FixedFormat(8, -4)),
        ("ufixed8.4", FixedFormat(8, 4, signed=False)),
        ("fixed8.4(symmetric=true)", FixedFormat(8, 4, symmetric=True)),
        ("integer8", IntegerFormat(8)),
        ("uinteger4", IntegerFormat(4, signed=False)),
        ("integer8(narrow=true)", IntegerFormat(8, narrow=True)),
        ("binary8p3se", jc.formats.p3109(8, 3)),
        ("ue5m3", FloatFormat(5, 3, infinities=False, nans="top", signed=False)),
        ("ue4m3(bias=9)", FloatFormat(4, 3, bias=9, infinities=False, nans="top", signed=False)),
        ("posit16", PositFormat(16)),
        ("takum_linear16", TakumFormat(16)),
        ("hif8", HiFloat8Format()),
        ("takum16", LogTakumFormat(16)),
        ("Binary8p3uf", jc.formats.p3109(8, 3, signed=False, extended=False)),
        ("codebook(-1,0,0.5)", CodebookFormat((-1.0, 0.0, 0.5))),
        ("codebook( -1e-3, 2.5e+10 )", CodebookFormat((-1e-3, 2.5e10))),
    ],
)  # fmt: skip
def test_grammar(text, fmt):
    assert parse_format(text) == fmt
    assert jc.Spec(text) == jc.Spec(fmt)


@each(
    ("text", "words"),
    [
        ("bloat16", "'bloat16' is not known; did you mean bfloat16"),
        ("e4m3fm", "'e4m3fm' is not known; did you mean .*e4m3fn"),
        ("flaot8_e5m2", "'flaot8_e5m2' is not known; did you mean .*float8_e5m2"),
        ("tf33", "'tf33' is not known; did you mean .*tf32"),
        ("bflaot16", "did you mean bfloat16"),
        ("possit16", "'possit16' is not known; did you mean posit16"),
        ("takumlinear20", "did you mean takum_linear20"),
        ("takum_log12", "did you mean takum12"),
        ("hif9", "did you mean hif8"),
        ("ue8m0", "did you mean e8m0"),  # no width of the pattern ue5m3
        ("binary8p4s", "did you mean binary8p4se"),
        ("fp8", "did you mean float8_e4m3fn .*float8_e5m2"),
        ("e5m", "'e5m' is not known"),
        ("", "'' is not known; it is a name such as .*e5m10"),
        ("fixed4", "'fixed4' is not known; .*fixed4.4"),
        ("int", "'int' is not known; .*int8"),
        ("e5m10)", r"'e5m10\)' is not known"),
        ("e5m10(", r"'e5m10\(' is not known"),
        ("e5m-1", "'e5m-1' is not known"),
        ("é5m2", "'é5m2' is not known"),
        ("e4m3(foo=1)", r"'e4m3\(foo=1\)'.*'foo'; allowed: bias, subnormals"),
        ("e5m7(foo=1)", r"'e5m7\(foo=1\)'.*'foo'.*allowed.*bias, subnormals"),
        ("int8(bias=3)", r"'int8\(bias=3\)'.*'bias'.*allowed.*narrow"),
        ("fixed4.4(narrow=true)", r"'fixed4.4\(narrow=true\)'.*'narrow'.*allowed: symmetric, group, axis"),
        ("int4(gruop=3)", "unknown option 'gruop'; did you mean group[?]$"),
        ("e4m3fn(gruop=3)", "'gruop'; did you mean group"),
        ("fixed4.4(symetric=true,group=2)", "'symetric'; did you mean symmetric"),
        ("int4(zero_points=integer)", "'zero_points'; did you mean zero_point"),
        ("binary8p3se(bias=3)", r"'binary8p3se\(bias=3\)'.*'bias'"),
        ("e4m3(bias)", r"'e4m3\(bias\)': option 'bias' must be name=value"),
        ("e4m3(bias=3,bias=4)", "option 'bias=4' must be name=value, each name once"),
        ("e4m3(bias=x)", "bias='x' must be an integer"),
        ("e4m3(subnormals=maybe)", "subnormals='maybe' must be true or false"),
        ("e4m3(nans=most)", r"format text 'e4m3\(nans=most\)': nans='most' must be one of 'ieee'"),
        ("e17m3", "format text 'e17m3': exp_bits=17 must be an integer from 1 to 16"),
        ("e5m60", "frac_bits=60 must be an integer from 0 to 52"),
        ("e15m112", "format text 'e15m112': frac_bits=112 must be an integer from 0 to 52"),
        ("e100m3", "exp_bits=100 must be an integer from 1 to 16"),
        ("ue5m112", "frac_bits=112 must be an integer from 0 to 52"),
        ("binary128p3se", "bits=128 must be an integer from 2 to 16"),
        ("int128", "bits=128 must be an integer from 2 to 64"),
        ("posit128", "bits=128 must be an integer from 2 to 32"),
        ("bfp128", "bits=128 must be an integer from 2 to 64"),
        ("mxfp4_e2m1", "'mxfp4_e2m1' is not known; did you mean mxfp4"),
        ("bpf8", "did you mean bfp8"),
        ("ue8m0", "'ue8m0' is not known"),
        ("posit33", "format text 'posit33': bits=33 must be an integer from 2 to 32"),
        ("takum_linear5", "bits=5 must be an integer from 6 to 32"),
        ("posit16(es=1)", r"'posit16\(es=1\)': unknown option 'es'; there are none for it"),
        ("integer99", "format text 'integer99': bits=99 must be an integer from 2 to 64"),
        ("fixed60.60", r"int_bits \+ frac_bits=120 must be an integer from 2 to 64"),
        ("binary8p9se", "precision=9 must be an integer from 1 to 7"),
        ("binary99p3se", "bits=99 must be an integer from 2 to 16"),
        ("codebook", "levels must be numbers, as in codebook"),
        ("codebook()", "levels must be numbers, as in codebook"),
        ("codebook(a,b)", "levels must be numbers, as in codebook"),
        ("codebook(1,0)", r"levels=\(1.0, 0.0\) must be strictly increasing"),
        ("codebook(0,inf)", r"format text 'codebook\(0,inf\)': .* must be finite"),
        ("bfp99", "format text 'bfp99': bits=99"),
        ("codebook(-1,0,1)(group=2)", r"one pair of parentheses, as in 'codebook\(-1,0,1,group=2\)'"),
        ("int4(group=2)(axis=0)", r"one pair of parentheses, as in 'int4\(group=2,axis=0\)'"),
    ],
)
def test_unknown_text(text, words):
    with pytest.raises(ValueError, match=words):
        parse_format(text)
    with pytest.raises(ValueError, match=words):
        jc.round_to_format(1.0, text)


@each("text", ["e12345m112", "fixd15.112", "posit_128", "e15.112", "mxfp4_e2m1"])
def test_close_texts_are_formats(text):
    with pytest.raises(ValueError) as caught:
        parse_format(text)
    near = str(caught.value).partition("; close: ")[2].partition(";")[0]
    for name in filter(None, near.split(", ")):
        assert parse_format(name)


def test_the_text_of_a_spec_is_no_format():
    with pytest.raises(ValueError, match="':saturate:up' belongs to a spec; pass the format alone, 'e4m3fn'"):
        parse_format("e4m3fn:saturate:up")


@each("text", [None, 5, b"e5m10", jc.formats.binary16])
def test_what_is_no_text(text):
    with pytest.raises(TypeError, match=r"text=.* must be a format's text such as 'e5m10'"):
        parse_format(text)


@each("text", ["e5m10 ", "half", "e5m10(bias=3)", "fixed4.4"])
def test_reading_twice_gives_the_same(text):
    assert parse_format(text) is parse_format(text)


def test_every_alias_reads():
    for alias, name in ALIASES.items():
        assert parse_format(alias) is CATALOGUE[name]


# -- texts from elsewhere ----------------------------------------------------------------------------------------------

LONG = 10**6
#: Texts of a million characters, each long in another part of the grammar.
TOO_LONG = {
    "parts": "e5m2:" * (LONG // 5),
    "options": "e5m2(" + "bias=1," * (LONG // 7) + "bias=1)",
    "name": "x" * LONG,
    "open": "(" * LONG,
    "gradients": "e5m2:gradient=" * (LONG // 14),
    "digits": "e5m2:random_bits=" + "9" * LONG,
    "sizes": f"int8(group=({'1,' * (LONG // 2)}))",
    "spaces": "e5m2" + " " * LONG + ":up",
}
DOORS: dict[str, Callable[[str], object]] = {
    "parse": jc.Spec,
    "parse_format": parse_format,
    "format": jc.Spec,
    "rounding": lambda text: jc.Spec("e5m2", rounding=text),
    "overflow": lambda text: jc.Spec("e5m2", overflow=text),
    "gradient": lambda text: jc.Spec("e5m2", gradient=text),
    "scale": lambda text: jc.formats.int8(scale=text),
    "rule": lambda text: jc.formats.int8(rule=text),
    "element": jc.formats.ScaledFormat,
    "order": jc.Order.parse,
}


@pytest.mark.parametrize("door", DOORS)
def test_long_texts_are_refused_at_once(door):
    """By their length, before anything looks at their parts; and the error shows their beginning alone."""
    for what, text in TOO_LONG.items():
        with pytest.raises(ValueError) as caught:
            DOORS[door](text)
        assert len(str(caught.value)) < 3000, what
        if door in ("parse", "parse_format", "order"):
            assert "is too long: at most 4096 characters" in str(caught.value), what


class Counted(str):
    """A text that counts how many of its characters are looked at, one by one."""

    looked = 0

    def __iter__(self):
        for char in str.__iter__(self):
            Counted.looked += 1
            yield char


def test_parts_are_split_in_one_pass():
    from jchop._common.checks import split_outside_brackets

    for count in (10, 1000):
        Counted.looked = 0
        assert len(split_outside_brackets(Counted("e5m2:" * count), ":")) == count + 1
        assert Counted.looked == 5 * count


def test_brackets_within_brackets_are_limited():
    deep = "nf4(scale=" * 300 + "nf4" + ")" * 300
    for door in ("parse", "parse_format", "scale", "element"):
        with pytest.raises(ValueError, match="more than 8 brackets within each other"):
            DOORS[door](deep)


@pytest.mark.parametrize("levels", [1 << 9, pytest.param(1 << 16, marks=pytest.mark.slow)])
def test_tables_of_levels_may_be_long(levels):
    """Whatever is printed reads back: a codebook has up to 2^16 levels."""
    fmt = CodebookFormat(tuple(1.1 * level for level in range(-(levels // 2), levels // 2)))
    assert len(str(fmt)) > max(4096, 8 * levels)
    assert jc.Spec(f"{fmt}:up") == jc.Spec(fmt, rounding="up")
    for text in (f"codebook({'axis=1,' * 50_000}{'0,' * 50_000}scale=e4m3)", f"codebook({'1' * LONG}x)"):
        with pytest.raises(ValueError):
            parse_format(text)
    with pytest.raises(ValueError, match="is too long"):
        parse_format("codebook(" + "0," * (1 << 21) + "1)")


@each("digits", ["٣", "３", "²", "1_0", "३"])
def test_digits_are_ascii(digits):
    for text in (
        f"e{digits}m2", f"fixed{digits}.1", f"int{digits}", f"int8(group={digits})", f"e5m2(bias={digits})",
        f"codebook(-{digits},100)", f"int8(group=4,rule=percentile({digits}))", f"bfp{digits}",
        f"binary{digits}p1se", f"e5m2:sr:random_bits={digits}",
    ):  # fmt: skip
        with pytest.raises(ValueError):
            jc.Spec(text)
    with pytest.raises(ValueError):
        jc.Order.parse(f"blocked({digits})")
    with pytest.raises(ValueError):
        jc.formats.int8(rule=f"percentile({digits})")


def test_letters_are_ascii():
    for text in ("bloc\u212aed(8)", "e5m2:nearest_\u017fero", "bfloat16\u00a0"):
        for door in ("parse", "parse_format", "order"):
            with pytest.raises(ValueError, match="only ASCII characters"):
                DOORS[door](text)


PIECES = [
    "e5m2", "integer8", "nf4", "mxfp4", "codebook", "fixed4.4", "binary8p3se", "bfp8", "blocked", ":", ",", "(", ")",
    "[", "]", "=", "-", "+", ".", "1", "32", "1e999", "nan", "gradient", "clipped", "up", "sr", "random_bits", "flush",
    "group", "channel", "axis", "scale", "rule", "percentile", "bias", "narrow", "true", "tensor", "all", " ", "\n",
    "é",
]  # fmt: skip


#: Not `st.text()`, whose table of all characters takes seconds in a fresh clone.
CHARACTERS = st.lists(st.integers(0, 0x10FFFF).map(chr), max_size=20)


@settings(deadline=None, max_examples=100)
@given((st.lists(st.sampled_from(PIECES), max_size=14) | CHARACTERS).map("".join))
def test_any_text_is_read_or_is_a_value_error(text):
    for read in (jc.Spec, parse_format, jc.Order.parse):
        with contextlib.suppress(ValueError):
            read(text)
