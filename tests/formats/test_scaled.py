"""Scaled formats as values: groups, shapes of scales, stored bits, calls, and the text grammar."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from each_case import each
from hypothesis import assume, given, settings

import jchop as jc
from jchop.formats import SCALE_RULES, SCALED_CATALOGUE, IntegerFormat, ScaledFormat, parse_format
from jchop.formats._base import format_facts

ELEMENTS = st.sampled_from(["integer4", "uinteger8", "integer8(narrow=true)", "e4m3fn", "e4m3(bias=11)", "e2m1fn",
                            "fixed2.6", "codebook(-1,0,1)", "binary8p3se"])  # fmt: skip
SIZES = st.integers(1, 1 << 20) | st.just("all")
RULES = st.sampled_from([*list(SCALE_RULES)[:-1], "percentile(99.9)", "percentile(100)", "percentile(0.01)"])


@st.composite
def groupings(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["tensor", "channel", "group", "tiles"]))
    axes = st.lists(st.integers(-4, 4), min_size=2, max_size=3, unique=True).map(tuple)
    if kind == "tensor":
        return {}
    if kind == "channel":
        return {"channel": draw(st.integers(-4, 4) | axes)}
    if kind == "group":
        return {"group": draw(SIZES), "axis": draw(st.integers(-4, 4))}
    names = draw(axes)
    return {"group": tuple(draw(SIZES) for _ in names), "axis": names}


@st.composite
def formats(draw: st.DrawFn) -> ScaledFormat:
    own = st.sampled_from(["binary32", "bfloat16", "e8m0fnu", "e4m3(subnormals=false)", "int8(group=256)",
                           "dynamic8(group=(2,32))", "uint4(channel=0,rule=percentile(50))"])  # fmt: skip
    flags = {"zero_point": draw(st.sampled_from([None, "integer", "float"])), "nan_block": draw(st.booleans())}
    try:
        base = draw(st.sampled_from([*SCALED_CATALOGUE.values(), jc.formats.bfp(6), None]))
        if base is not None:
            changed: dict[str, Any] = {"rule": draw(RULES)} if draw(st.booleans()) else {}
            changed |= {"element": draw(ELEMENTS)} if draw(st.booleans()) else {}
            return base(**draw(groupings()) | changed)
        rule = draw(RULES | st.none())
        return ScaledFormat(draw(ELEMENTS), scale=draw(own), rule=rule, **draw(groupings()), **flags)
    except ValueError:
        assume(False)
        raise


@pytest.mark.smoke
@settings(deadline=None, max_examples=100)
@given(formats())
def test_what_is_printed_reads_back(fmt: ScaledFormat):
    assert parse_format(str(fmt)) == fmt
    assert parse_format(str(fmt).upper()) == fmt
    assert str(parse_format(str(fmt))) == str(fmt)
    assert eval(repr(fmt), vars(jc) | vars(jc.formats)) == fmt
    assert jc.Spec(f"{fmt}:stochastic").scaled == fmt
    assert jc.Spec(str(jc.Spec(fmt, overflow="ieee"))).overflow is jc.Overflow.IEEE


@each(
    ("text", "fmt"),
    [
        ("int8(channel=0,rule=half_range)", ScaledFormat("integer8", channel=0, rule="half_range")),
        ("int4(group=(4,8),axis=(0,-1),scale=bfloat16)", jc.formats.int4(group=(4, 8), axis=(0, -1), scale="bfloat16")),
        (
            "int4(group=8,scale=int8(channel=0),rule=no_clip)",
            ScaledFormat("integer4", 8, scale="int8(channel=0)", rule="no_clip"),
        ),
        ("int4(group=128,axis=0,scale=bfloat16)", jc.formats.int4(group=128, axis=0, scale="bfloat16")),
        ("int8(group=tensor)", jc.formats.int8),
        ("mxfp8_e4m3(rule=rceil)", jc.formats.mxfp8_e4m3(rule="rceil")),
        ("mxfp4(axis=0)", jc.formats.mxfp4(axis=0)),
        ("mxint8", ScaledFormat("fixed2.6(symmetric=true)", 32, scale="e8m0fnu", rule="floor")),
        ("bfp8(group=16)", ScaledFormat("integer8(narrow=true)", 16, scale="e8m0fnu", rule="floor")),
        ("bfp8", jc.formats.bfp(8)),
        ("nf4( scale = uint8( group = 256 ) )", jc.formats.nf4(scale=jc.formats.uint8(group=256))),
        ("nf4(channel=0)", jc.formats.nf4(channel=0)),
        ("dynamic8(group=tensor)", jc.formats.dynamic8(group="tensor")),
        ("float8_e4m3fn(channel=-1)", ScaledFormat("e4m3fn", channel=-1)),
        ("e3m2fn(channel=0)", ScaledFormat("e3m2fn", channel=0)),
        ("e2m1fn(group=(2,16))", ScaledFormat("e2m1fn", (2, 16), (-2, -1))),
        ("e4m3(bias=11,group=all)", ScaledFormat("e4m3(bias=11)", "all")),
        ("codebook(-1,0,1,group=4)", ScaledFormat("codebook(-1,0,1)", 4)),
        ("uint4(group=32,zero_point=integer)", ScaledFormat("uinteger4", 32, zero_point="integer")),
        ("int4(group=32,zero_point=float)", ScaledFormat("integer4", 32, zero_point="float")),
        ("nf4(scale=uint8(group=256,zero_point=float))", jc.formats.nf4(scale="uint8(group=256,zero_point=float)")),
        ("udynamic8", jc.formats.udynamic8),
        ("udynamic8nz", jc.formats.udynamic8nz),
        ("softsign8(scale=bfloat16)", jc.formats.softsign8(scale="bfloat16")),
        ("int8(group=32,rule=percentile(99.9))", ScaledFormat("integer8", 32, rule="percentile(99.9)")),
    ],
)  # fmt: skip
def test_texts(text, fmt):
    assert parse_format(text) == fmt


def test_a_notebook_shows_the_ends_of_elements_in_at_most_six_digits():
    for text, ends in (("mxfp4", "-6 to 6"), ("mxfp8_e4m3", "-448 to 448"), ("mxint8", "-1.98438 to 1.98438")):
        assert f"from {ends}<" in parse_format(text)._repr_html_()


@each("bits", [2, 3, 4, 5, 8, 16])
@each("signed", [True, False])
def test_integers_under_a_scale_and_without(bits, signed):
    kind, plain = "int" if signed else "uint", IntegerFormat(bits, signed=signed)
    scaled = ScaledFormat(plain)
    assert (str(plain), str(scaled)) == (f"{kind}eger{bits}", f"{kind}{bits}")
    assert parse_format(f"{kind}eger{bits}") == plain
    for text in (f"{kind}{bits}", f"{kind}{bits}(group=tensor)", f"{kind}eger{bits}(group=tensor)"):
        assert parse_format(text) == scaled
    assert str(ScaledFormat(IntegerFormat(bits, narrow=True))) == f"int{bits}(narrow=true)"
    assert parse_format(f"int{bits}(narrow=true)") == ScaledFormat(IntegerFormat(bits, narrow=True))


def test_an_element_format_is_plain():
    with pytest.raises(TypeError, match="element='int8' must be an element format such as 'integer8'"):
        ScaledFormat("int8", group=4)
    with pytest.raises(ValueError, match=r"spec='int8' is a scaled format.*'integer8'"):
        jc.math.add(1.0, 2.0, "int8")


@each(
    ("text", "message"),
    [
        ("mxfp5", "did you mean mxfp4"),
        ("mxfp4(foo=1)", "unknown option 'foo'; allowed: group, axis"),
        ("int8(grup=3)", "unknown option 'grup'"),
        ("int8(group=x)", "group='x' must be integers"),
        ("int8(group=(84)", "group='(84' must be integers"),
        ("int8(group=0)", "group=0 must be an integer >= 1"),
        ("int8(group=4,channel=0)", "exclude each other"),
        ("int8(group=tensor,axis=1)", "without group= it has no effect"),
        ("int8(group=(2,2),axis=0)", "must name as many axes"),
        ("int8(group=2,axis=(0,1))", "names 2 axes"),
        ("int8(group=4,rule=best)", "rule='best' must be one of"),
        ("int8(group=4,rule=percentile(101))", "must be one of"),
        ("int8(group=4,rule=percentile(99.999))", "at most two decimals"),
        ("int8(group=4,rule=minmax)", "zero points go with rule='minmax'"),
        ("int8(group=4,zero_point=integer,rule=absmax)", "zero points go with rule='minmax'"),
        ("e4m3(group=4,zero_point=integer)", "needs an integer element"),
        ("int32(group=4,zero_point=integer)", "of at most 16 bits"),
        ("uint4(group=4,rule=half_range)", "with negative values"),
        ("nf4(rule=even)", "with fraction bits"),
        ("codebook(-1,0,group=4)", "no positive value"),
        ("int8(group=4,scale=integer8)", "must be a FloatFormat or ScaledFormat"),
        ("int8(group=4,scale=e2m1(bias=9))", "no number from 1 on"),
        ("int8(group=4,nan_block=true,scale=e2m1fn)", "with a NaN"),
        ("int8(group=4,nan_block=true,rule=mse)", "does not go with"),
        ("nf4(group=64,rule=floor,scale=int8(group=2))", "does not keep the powers of two"),
        ("nf4(scale=int8(group=4,zero_point=integer))", "without zero_point"),
        ("nf4(scale=int8(group=4,zero_point=float))", "an unsigned element"),
        ("int4(group=4,zero_point=maybe)", "zero_point='maybe' must be"),
        ("int4(group=4,zero_point=float,scale=e8m0fnu)", "in the format of the scales"),
        ("int4(group=4,zero_point=float,scale=integer8)", "must be a FloatFormat or ScaledFormat"),
        ("int4(group=4,zero_point=float,scale=nf4)", "in the format of the scales"),
        ("e4m3(group=4,zero_point=float)", "needs an integer element"),
        ("int4(group=4,zero_point=float,rule=absmax)", "zero points go with rule='minmax'"),
        ("nf4(scale=nf4(group=4,scale=nf4))", "of its own that are numbers"),
        ("nf4(scale=binary16(group=4))", "at most 8 are stored"),
        ("nvfp4(scale=nf4)", "do not go with that"),
    ],
)
def test_texts_that_name_no_format(text, message):
    with pytest.raises(ValueError) as caught:
        parse_format(text)
    assert message in str(caught.value)


def test_one_axis_is_itself_however_it_is_given():
    assert jc.formats.int8(channel=(1,)) == jc.formats.int8(channel=1) and jc.formats.int8(channel=(1,)).channel == 1
    assert jc.formats.int4(group=(8,), axis=(0,)) == jc.formats.int4(group=8, axis=0)


def test_zero_points_as_numbers_need_a_scale_format_that_holds_them():
    for scale in ("e5m0", "e8m0fnu", "e4m3(signed=false)", "e4m3(zero=false)"):
        with pytest.raises(ValueError, match="with a sign, a zero and fraction bits"):
            jc.formats.uint4(group=8, zero_point="float", scale=scale)
    assert jc.formats.uint4(group=8, zero_point="float", scale="e5m1").scale == jc.formats.FloatFormat(5, 1)


def test_other_refusals():
    with pytest.raises(TypeError, match="is no field of a scaled format"):
        jc.formats.mxfp4(size=3)
    with pytest.raises(TypeError, match="element=3 must be an element format"):
        ScaledFormat(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be an element format"):
        ScaledFormat("mxfp4", axis=0)
    with pytest.raises(ValueError, match="overflow='wrap'"):
        jc.Spec("int8(channel=0)", overflow="wrap")
    with pytest.raises(ValueError, match="flush=True needs a floating-point format"):
        jc.Spec("int8(channel=0)", flush=True)
    with pytest.raises(ValueError, match="is a scaled format"):
        jc.MatmulSpec(operands="mxfp4")


# -- calls -------------------------------------------------------------------------------------------------------------


@each(
    ("fmt", "expected"),
    [
        (jc.formats.mxfp4(channel=0), (None, -1, 0)),
        (jc.formats.int8(channel=0)(group=4), (4, -1, None)),
        (jc.formats.mxfp4(axis=0)(group=16), (16, 0, None)),
        (jc.formats.mxfp4(axis=0)(group=(2, 2)), ((2, 2), (-2, -1), None)),
        (jc.formats.int4(group=(2, 2), axis=(0, 1))(group=8), (8, -1, None)),
        (jc.formats.mxfp4(axis=0)(group=None), (None, -1, None)),
        (jc.formats.int8(group=["all", 2]), (("all", 2), (-2, -1), None)),
        (jc.formats.int8(group=[3]), (3, -1, None)),
    ],
)
def test_a_call_changes_what_it_names_and_keeps_the_grouping_whole(fmt, expected):
    assert (fmt.group, fmt.axis, fmt.channel) == expected


def test_rules_follow_zero_points():
    assert jc.formats.uint8(zero_point="integer").rule == "minmax"
    assert jc.formats.uint8(zero_point="integer")(zero_point=None).rule == "absmax"
    assert jc.formats.mxfp4(zero_point=None) == jc.formats.mxfp4
    assert (
        jc.formats.uint8(zero_point="float").rule
        == jc.formats.uint8(zero_point="integer")(zero_point="float").rule
        == "minmax"
    )
    with pytest.raises(ValueError, match="zero_point=1 must be None, 'integer' or 'float'"):
        jc.formats.uint8(zero_point=1)


def test_named_formats_are_those_of_their_sources():
    """OCP MX 1.0; NVIDIA's NVFP4; NormalFloat4 (arXiv 2305.14314); the maps of 8-bit optimizers (arXiv 2110.02861)."""
    mx = {"group": 32, "axis": -1, "scale": jc.formats.float8_e8m0fnu, "rule": "floor"}
    for fmt, element in (
        (jc.formats.mxfp8_e4m3, jc.formats.float8_e4m3fn),
        (jc.formats.mxfp8_e5m2, jc.formats.float8_e5m2),
        (jc.formats.mxfp6_e3m2, jc.formats.float6_e3m2fn),
        (jc.formats.mxfp6_e2m3, jc.formats.float6_e2m3fn),
        (jc.formats.mxfp4, jc.formats.float4_e2m1fn),
        (jc.formats.mxint8, jc.formats.FixedFormat(2, 6, symmetric=True)),
    ):
        assert fmt == ScaledFormat(element, **mx)
    e4m3 = jc.formats.FloatFormat(4, 3, infinities=False, nans="top", subnormals=False)
    assert jc.formats.nvfp4 == ScaledFormat(jc.formats.float4_e2m1fn, group=16, scale=e4m3, rule="two_level")
    for name, group, levels in (
        ("nf4", 64, 16),
        ("dynamic8", 256, 256),
        ("dynamic4", 256, 16),
        ("udynamic8", 256, 256),
        ("udynamic8nz", 256, 256),
        ("softsign8", 32, 255),
        ("usquare8nz", 32, 256),
    ):
        fmt = parse_format(name)
        assert isinstance(fmt, ScaledFormat) and isinstance(fmt.element, jc.formats.CodebookFormat)
        assert (fmt.group, fmt.axis, fmt.scale, fmt.rule) == (group, -1, jc.formats.binary32, "absmax")
        assert (len(fmt.element.levels), fmt.element.max) == (levels, 1)
        assert (fmt.element.min < 0) == (not name.startswith("u"))
        assert (0 in fmt.element.levels) == (not name.endswith("nz"))
    z = np.arange(-127, 128) / 127  # equal steps of 2 x / (1 + |x|)
    softsign, square = jc.formats.softsign8.element, jc.formats.usquare8nz.element
    assert isinstance(softsign, jc.formats.CodebookFormat) and isinstance(square, jc.formats.CodebookFormat)
    x = np.array(softsign.levels)
    np.testing.assert_allclose(2 * x / (1 + np.abs(x)), z, rtol=1e-7)
    np.testing.assert_array_equal(np.sqrt(square.levels) * 256, np.arange(1, 257))


def test_another_element_is_not_the_named_format():
    fmt = jc.formats.mxint8(element="integer4", group=8)
    assert str(fmt) == "int4(group=8,scale=float8_e8m0fnu,rule=floor)"
    assert parse_format(str(fmt)) == fmt


# -- groups, and what they take ----------------------------------------------------------------------------------------


@each(
    ("fmt", "shape", "sizes", "scales"),
    [
        (jc.formats.int8, (4, 6), (4, 6), (1, 1)),
        (jc.formats.int8, (), (), ()),
        (jc.formats.int8(channel=0), (4, 6, 5), (1, 6, 5), (4, 1, 1)),
        (jc.formats.int8(channel=(0, -1)), (4, 6, 5), (1, 6, 1), (4, 1, 5)),
        (jc.formats.mxfp4, (4, 100), (1, 32), (4, 4)),
        (jc.formats.mxfp4, (4, 20), (1, 20), (4, 1)),
        (jc.formats.mxfp4(axis=0), (100, 4), (32, 1), (4, 4)),
        (jc.formats.int4(group="all"), (3, 7), (1, 7), (3, 1)),
        (jc.formats.int4(group=(128, 128)), (2, 300, 256), (1, 128, 128), (2, 3, 2)),
        (jc.formats.int4(group=("all", 4), axis=(2, 0)), (9, 2, 5), (4, 1, 5), (3, 2, 1)),
        (jc.formats.mxfp4, (3, 0), (1, 1), (3, 0)),
        (jc.formats.int8(channel=0), (3, 0), (1, 1), (3, 0)),
    ],
)
def test_shapes(fmt, shape, sizes, scales):
    assert fmt.group_shape(shape) == sizes
    assert fmt.scale_shape(shape) == scales


@each(
    ("fmt", "shape", "expected"),
    [
        (jc.formats.int4(group=128, scale="bfloat16"), None, 4.125),
        (jc.formats.mxfp4, None, 4.25),
        (jc.formats.nvfp4, None, 4.5),
        (jc.formats.dynamic8, None, 8.125),
        (jc.formats.nf4, None, 4.5),
        (jc.formats.nf4(scale=jc.formats.int8(group=256)), None, 4 + (8 + 32 / 256) / 64),
        (jc.formats.int8(channel=0), None, 8.0),
        (jc.formats.int8(channel=0), (4, 100), 8.32),
        (jc.formats.int4(group=(4, 8)), None, 5.0),
        (jc.formats.uint4(group=32, zero_point="integer"), None, 6.0),
        (jc.formats.int4(group=32, zero_point="float", scale="bfloat16"), None, 5.0),
        (jc.formats.nf4(scale="uint8(group=256,zero_point=float)"), None, 4 + (8 + 64 / 256) / 64),
        (jc.formats.nvfp4, (2, 16), 5.5),
        (jc.formats.nf4(scale=jc.formats.int8(group=256)), (2, 128), 4 + (4 * 8 + 2 * 32) / 256),
        (jc.formats.mxfp4, (0, 3), 4.0),
    ],
)
def test_bits_per_element(fmt, shape, expected):
    assert fmt.bits_per_element(shape) == expected


def test_axes_that_are_not_there():
    for fmt, shape in ((jc.formats.mxfp4, ()), (jc.formats.mxfp4(axis=2), (3, 3)), (jc.formats.int8(channel=1), (3,))):
        with pytest.raises(ValueError, match="not an axis of an array of"):
            fmt.scale_shape(shape)
    with pytest.raises(ValueError, match="names an axis twice"):
        jc.formats.int8(channel=(0, -2)).group_shape((3, 3))


def test_block_floating_point_is_as_it_is_defined():
    """Quantum 2^(E + 2 - k), clipped to 2^E (2 - 2^-(k - 2)), for E = floor(log2 a)."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 16)) * 2.0 ** rng.integers(-9, 9, (6, 1))
    for bits in (2, 4, 8):
        exponent = np.floor(np.log2(np.abs(x).max(1, keepdims=True)))
        quantum, limit = 2.0 ** (exponent + 2 - bits), 2.0**exponent * (2 - 2.0 ** -(bits - 2))
        expected = np.clip(np.rint(x / quantum) * quantum, -limit, limit)
        np.testing.assert_array_equal(jc.round_to_format(x, jc.formats.bfp(bits, 16)), expected)


@each(
    ("text", "parts"),
    [
        ("int8", ("scale",)),
        ("nvfp4", ("scale", "tensor_scale")),
        ("nvfp4_e5m3", ("scale",)),
        ("hif4", ("scale", "scale_scale", "scale_scale_scale")),
        ("nf4(group=8,scale=int8(group=2))", ("scale", "scale_scale")),
        ("nf4(group=8,scale=uint8(group=2,zero_point=float))", ("scale", "scale_scale", "scale_zero_point")),
    ],
)
def test_parts_of_a_stored_scale(text: str, parts: tuple[str, ...]) -> None:
    fmt = jc.Spec(text).scaled
    assert fmt is not None
    assert fmt.scale_parts == parts


def test_formats_that_keep_n_of_every_m() -> None:
    fmt = jc.formats.int4(group=32, sparse="2:4")
    assert fmt.sparse == (2, 4) and fmt == jc.formats.int4(group=32)(sparse=[2, 4])
    assert jc.Spec("int4( group=32, sparse=2:4 ):stochastic").format == fmt
    assert hash(fmt) == hash(jc.formats.int4(group=32, sparse=(2, 4))) and fmt != fmt.dense == jc.formats.int4(group=32)
    assert [str(v) for v in (fmt, jc.formats.nf4(sparse="1:2"), jc.formats.mxfp4(axis=0, sparse=(4, 8)))] == [
        "int4(group=32,sparse=2:4)", "nf4(sparse=1:2)", "mxfp4(axis=0,sparse=4:8)"
    ]  # fmt: skip
    for text in ("int8(channel=0,sparse=2:4,sparse_axis=-2)", "e4m3fn(sparse=3:7)", "int4(group=(8,all),sparse=2:4)"):
        assert jc.Spec(str(jc.Spec(text))) == jc.Spec(text)
    tiles = jc.formats.int8(group=(8, 8), axis=(1, 0), sparse="2:4")
    assert [v.axis_of_sparse for v in (fmt, fmt(axis=0), fmt(axis=0, sparse_axis=1), tiles)] == [-1, 0, 1, 0]
    assert fmt(sparse_axis=0)(sparse=None) == jc.formats.int4(group=32)
    assert fmt.bits_per_element() == 1 + 4 / 2 + 32 / 32 and fmt.bits_per_element((2, 6)) == 1 + 4 * 4 / 6 + 32 / 6
    assert fmt.kept_shape((3, 7)) == (3, 4) and fmt.scale_shape((3, 33)) == (3, 2)
    assert ("sparse", "2 of every 4 numbers along axis -1") in format_facts(fmt)
    for text, why in {
        "int4(sparse=4:4)": "sparse='4:4' keeps n of every m: n=4 must be an integer from 1 to 3",
        "int4(sparse=1:65)": "sparse='1:65' keeps n of every m: m=65",
        "int4(sparse=2)": "sparse='2' must be two integers n and m, or text such as '2:4'",
        "int4(sparse_axis=0)": "sparse_axis=0 is the axis of sparse=; without it it has no effect",
        "nf4(scale=uint8(group=8,sparse=2:4))": "would drop scales, which every group needs",
    }.items():
        with pytest.raises(ValueError, match=why):
            jc.Spec(text)
    with pytest.raises(ValueError, match="not an axis of an array of 1"):
        fmt(sparse_axis=-2).group_shape((8,))
