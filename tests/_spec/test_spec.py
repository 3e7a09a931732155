"""Specifications: what is coerced, what is refused, and their text both ways."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import hypothesis.strategies as st
import pytest
from each_case import each
from formats.test_text import FORMATS
from hypothesis import given, settings

import jchop as jc
from jchop import Gradient, Overflow, Rounding, Spec


@st.composite
def plain(draw: st.DrawFn) -> Spec:
    """A spec with the default gradient."""
    fmt, mode = draw(FORMATS), draw(st.sampled_from(Rounding))
    wraps = isinstance(fmt, jc.formats.FixedFormat | jc.formats.IntegerFormat) and fmt.min != -fmt.max
    rule = draw(st.sampled_from([rule for rule in Overflow if wraps or rule is not Overflow.WRAP]))
    counted = mode.value in ("stochastic", "stochastic_b", "stochastic_c")
    random_bits = draw(st.none() | st.integers(1, 64)) if counted else None
    return Spec(
        fmt, mode, rule, random_bits, isinstance(fmt, jc.formats.FloatFormat) and fmt.zero and draw(st.booleans())
    )


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    gradient = Gradient(draw(st.booleans()), draw(st.none() | plain()))
    return dataclasses.replace(draw(plain()), gradient=gradient)


@pytest.mark.smoke
@settings(deadline=None)
@given(specs())
def test_what_is_printed_reads_back(spec: Spec):
    assert jc.Spec(str(spec)) == spec
    assert str(jc.Spec(str(spec))) == str(spec)
    assert hash(jc.Spec(str(spec))) == hash(spec)


def test_defaults():
    spec = Spec(jc.formats.float8_e5m2)
    assert spec == Spec("e5m2") == jc.Spec("e5m2") == jc.Spec("q52") == jc.Spec("float8_e5m2")
    assert (spec.format, spec.rounding, spec.overflow) == (jc.formats.float8_e5m2, Rounding.NEAREST_EVEN, Overflow.IEEE)
    assert (spec.random_bits, spec.flush, spec.gradient) == (None, False, Gradient())
    assert str(spec) == "float8_e5m2"
    assert spec == jc.Spec("e5m2:nearest_even:ieee:gradient=straight_through") == jc.Spec("e5m2:rne")


def test_text_is_coerced():
    spec = Spec("e4m3fn", "stochastic", "saturate", 8, False, "clipped")
    assert spec.format is jc.formats.float8_e4m3fn
    assert spec.rounding is Rounding.STOCHASTIC and spec.overflow is Overflow.SATURATE
    assert spec.gradient == Gradient(clipped=True)
    assert spec == Spec(
        jc.formats.float8_e4m3fn, rounding=Rounding.STOCHASTIC, overflow=Overflow.SATURATE, random_bits=8,
        gradient=Gradient(True),
    )  # fmt: skip


@each(
    ("text", "spec"),
    [
        ("e5m10:stochastic:saturate", Spec(jc.formats.binary16, "stochastic", "saturate")),
        ("e5m10:saturate:stochastic", Spec(jc.formats.binary16, "stochastic", "saturate")),
        (" E5M10 : Stochastic : random_bits=8 ", Spec(jc.formats.binary16, "stochastic", random_bits=8)),
        ("e5m2:sr:flush", Spec("e5m2", "stochastic", flush=True)),
        ("fixed8.4:wrap:rd", Spec(jc.formats.FixedFormat(8, 4), "down", "wrap")),
        ("uinteger4:wrap", Spec(jc.formats.IntegerFormat(4, signed=False), overflow="wrap")),
        ("e4m3(bias=11,subnormals=false):up", Spec(jc.formats.FloatFormat(4, 3, bias=11, subnormals=False), "up")),
        ("codebook(-1,0,1):odd", Spec(jc.formats.CodebookFormat((-1.0, 0.0, 1.0)), "odd")),
        ("e4m3:gradient=clipped", Spec("e4m3", gradient="clipped")),
        ("e4m3:gradient=[e5m2]", Spec("e4m3", gradient=jc.formats.float8_e5m2)),
        ("e4m3:gradient=e5m2", Spec("e4m3", gradient=Spec("e5m2"))),
        ("e4m3:gradient=[e5m2:sr:random_bits=4]:up", Spec("e4m3", "up", gradient=Spec("e5m2", "sr", random_bits=4))),
        ("e4m3:gradient=clipped+[e5m2:sr]", Spec("e4m3", gradient=Gradient(True, Spec("e5m2", "sr")))),
        ("e4m3:gradient=[e5m2(bias=3):sr]", Spec("e4m3", gradient=Spec(jc.formats.FloatFormat(5, 2, bias=3), "sr"))),
        ("e4m3:gradient=[codebook(-1,0,1)]", Spec("e4m3", gradient=jc.formats.CodebookFormat((-1.0, 0.0, 1.0)))),
    ],
)
def test_grammar(text, spec):
    assert jc.Spec(text) == spec and jc.Spec(str(spec)) == spec


@each(
    ("gradient", "expected"),
    [
        ("straight_through", Gradient()),
        ("clipped", Gradient(clipped=True)),
        ("e5m2", Gradient(round=Spec("e5m2"))),
        ("[e5m2:sr]", Gradient(round=Spec("e5m2", "stochastic"))),
        ("e5m2:sr", Gradient(round=Spec("e5m2", "stochastic"))),
        ("clipped+e5m2", Gradient(True, Spec("e5m2"))),
        (jc.formats.bfloat16, Gradient(round=Spec(jc.formats.bfloat16))),
        (jc.formats.FixedFormat(4, 4), Gradient(round=Spec(jc.formats.FixedFormat(4, 4)))),
        (Spec("bfloat16", "up"), Gradient(round=Spec("bfloat16", "up"))),
        (Gradient(True, "bfloat16"), Gradient(True, Spec("bfloat16"))),  # type: ignore[arg-type]
        (Gradient(round=jc.formats.bfloat16), Gradient(False, Spec("bfloat16"))),  # type: ignore[arg-type]
    ],
)
def test_gradient_forms(gradient, expected):
    spec = Spec("e4m3", gradient=gradient)
    assert spec.gradient == expected and jc.Spec(str(spec)) == spec


@each(
    ("fields", "words"),
    [
        ({"format": 5}, "format=5 must be a format, its text, or a dtype"),
        ({"format": None}, "format=None must be a format, its text, or a dtype"),
        ({"format": Spec("e5m2")}, "format=.* must be a format, its text, or a dtype"),
        ({"format": "bloat16"}, "'bloat16' is not known; did you mean bfloat16"),
        ({"flush": 1}, "flush=1 must be True or False"),
        ({"flush": "yes"}, "flush='yes' must be True or False"),
        ({"random_bits": 0, "rounding": "sr"}, "random_bits=0 must be an integer from 1 to 64"),
        ({"random_bits": 65, "rounding": "sr"}, "random_bits=65 must be an integer from 1 to 64"),
        ({"random_bits": 8.0, "rounding": "sr"}, "random_bits=8.0 must be an integer"),
        ({"random_bits": True, "rounding": "sr"}, "random_bits=True must be an integer"),
        ({"random_bits": 8}, "random_bits=8 has no effect under rounding='nearest_even'.*'stochastic'"),
        ({"random_bits": 8, "rounding": "stochastic_equal"}, "random_bits=8 has no effect.*'stochastic_equal'"),
        ({"overflow": "wrap"}, "overflow='wrap' is for fixed point and integers, not float8_e4m3"),
        ({"overflow": "wrap", "format": "codebook(0,1)"}, "overflow='wrap' is for fixed point and integers"),
        ({"overflow": "wrap", "format": "fixed4.4(symmetric=true)"}, "overflow='wrap' needs the whole .* range"),
        (
            {"overflow": "wrap", "format": "integer8(narrow=true)"},
            "overflow='wrap' needs the whole .* range, not integer8",
        ),
        ({"flush": True, "format": "integer8"}, "flush=True needs a floating-point format with a zero, not integer8"),
        ({"flush": True, "format": "e8m0fnu"}, "flush=True needs a floating-point format with a zero, not float8_e8m0"),
        ({"flush": True, "format": "codebook(0,1)"}, "flush=True needs a floating-point format"),
        ({"gradient": None}, "gradient=None must be 'straight_through', 'clipped', a Gradient, or a Spec"),
        ({"gradient": 0.5}, "gradient=0.5 must be 'straight_through', 'clipped'"),
        ({"gradient": "straight"}, "gradient='straight'.*'straight_through', 'clipped'"),
        ({"gradient": "clip"}, "gradient='clip'.*'straight_through', 'clipped'"),
        ({"gradient": "clippedd"}, "gradient='clippedd'.*'straight_through', 'clipped'"),
        ({"gradient": "clipped+"}, "gradient='clipped\\+'.*'straight_through', 'clipped'"),
        ({"gradient": ""}, "gradient=''.*'straight_through', 'clipped'"),
        ({"gradient": "[e5m2"}, r"gradient='\[e5m2'.*'straight_through', 'clipped'"),
        ({"gradient": Spec("e5m2", gradient="clipped")}, "round=.* the Spec of a cotangent has no gradient of its own"),
    ],
)
def test_bad_fields_are_refused(fields, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Spec(**({"format": "e4m3"} | fields))


@each(
    ("build", "words"),
    [
        (lambda: Gradient(clipped=1), "clipped=1 must be True or False"),  # type: ignore[arg-type]
        (lambda: Gradient(round=5), "round=5 must be a Spec, a format, a dtype, or text"),  # type: ignore[arg-type]
        (lambda: Gradient(round="bloat16"), "'bloat16' is not known"),  # type: ignore[arg-type]
    ],
)
def test_bad_gradients_are_refused(build, words):
    with pytest.raises((TypeError, ValueError), match=words):
        build()


@each(
    ("text", "words"),
    [
        ("e5m2:stochstic", "'e5m2:stochstic': part 'stochstic' is not known; did you mean stochastic"),
        ("e5m2:", "part '' is not known"),
        (":up", "'' is not known"),
        ("", "'' is not known"),
        ("e5m2:up:down", "'e5m2:up:down' gives rounding twice"),
        ("e5m2:ieee:saturate", "gives overflow twice"),
        ("e5m2:flush:flush", "gives flush twice"),
        ("e5m2:sr:random_bits=x", "'e5m2:sr:random_bits=x': random_bits='x' must be an integer from 1 to 64$"),
        ("e5m2:sr:random_bits=-1", "random_bits='-1' must be an integer from 1 to 64$"),
        ("e5m2:sr:random_bits=8.5", "random_bits='8.5' must be an integer from 1 to 64$"),
        ("e5m2:sr:random_bits", "random_bits='' must be an integer from 1 to 64$"),
        ("e5m2:sr:bits=3", "part 'bits=3' is not known"),
        ("e5m2:gradient=clip", "'clip'"),
        ("e5m2:gradient=", "gradient=''"),
        ("e5m2:gradient=[e5m2:gradient=clipped]", "the Spec of a cotangent has no gradient of its own"),
        ("bloat16:up", "'bloat16' is not known; did you mean bfloat16"),
        ("e5m2:random_bits=3", "random_bits=3 has no effect"),
    ],
)
def test_unknown_text(text, words):
    with pytest.raises(ValueError, match=words):
        jc.Spec(text)
    with pytest.raises(ValueError, match=words):
        jc.round_to_format(1.0, text)


@each("text", [None, 3, b"e5m2", Spec("e5m2")])
def test_what_is_no_text(text):
    with pytest.raises(TypeError, match=r"format=.* must be a format, its text, or a dtype"):
        jc.Spec(text)


@each("value", [None, 3, b"e5m2"])
def test_what_is_no_spec(value):
    with pytest.raises(TypeError, match=r"spec=.* must be a Spec, a format, a dtype, or text such as"):
        jc.round_to_format(1.0, value)


SPEC = Spec("e4m3", "stochastic", "saturate", 8, True, Gradient(True, Spec("bfloat16", "up")))


def test_specs_are_values():
    for other in (pickle.loads(pickle.dumps(SPEC)), copy.copy(SPEC), copy.deepcopy(SPEC), dataclasses.replace(SPEC)):
        assert other == SPEC and hash(other) == hash(SPEC) and str(other) == str(SPEC)
    assert eval(repr(SPEC), vars(jc) | vars(jc.formats)) == SPEC


def test_names_of_formats_are_no_part_of_a_spec():
    named = Spec(jc.formats.binary16, "up")
    unnamed = Spec(jc.formats.FloatFormat(5, 10), "up")
    assert named == unnamed and hash(named) == hash(unnamed) and {named: 1}[unnamed] == 1
    assert (str(named), str(unnamed)) == ("binary16:up", "e5m10:up")


def test_each_field_counts_in_equality():
    changes = ({"format": "e5m2"}, {"rounding": "stochastic_b"}, {"overflow": "ieee"}, {"random_bits": 7})
    changes += ({"flush": False}, {"gradient": "clipped"}, {"gradient": Gradient(False, Spec("bfloat16", "up"))})
    others = [dataclasses.replace(SPEC, **change) for change in changes]  # type: ignore[arg-type]
    assert len({SPEC, *others}) == len(others) + 1


@each("field", ["format", "rounding", "gradient", "brand_new"])
def test_specs_cannot_be_changed(field):
    with pytest.raises(AttributeError):
        setattr(SPEC, field, 3)
    with pytest.raises(AttributeError):
        setattr(SPEC.gradient, field, 3)
