"""Facts under the names of NumPy's `finfo`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from each_case import each

import jchop as jc
from jchop.formats import ALIASES, CATALOGUE

NAMES = ("bits", "eps", "epsneg", "machep", "negep", "max", "min", "tiny", "smallest_normal", "smallest_subnormal",
         "maxexp", "minexp", "nmant", "nexp")  # fmt: skip
DTYPES = {name: getattr(ml_dtypes, name) for name in CATALOGUE if hasattr(ml_dtypes, name)}
DTYPES |= {"binary16": np.float16, "binary32": np.float32, "binary64": np.float64}


@each("name", DTYPES)
def test_facts_are_those_of_the_dtype(name: str) -> None:
    theirs, ours = jnp.finfo(DTYPES[name]), jc.finfo(name)
    for fact in NAMES:
        if (name, fact) == ("float8_e8m0fnu", "smallest_subnormal"):  # it has none, and ml_dtypes gives the normal one
            continue
        assert getattr(ours, fact) == np.float64(getattr(theirs, fact)), fact


def test_a_format_a_spec_and_texts_mean_the_same() -> None:
    wanted = jc.finfo(jc.formats.float8_e5m2)
    alias = next(other for other, name in ALIASES.items() if name == "float8_e5m2")
    for given in ("float8_e5m2", alias, "e5m2:stochastic", jc.Spec("e5m2"), jc.formats.mxfp8_e5m2, "e5m2(channel=0)"):
        assert jc.finfo(given) == wanted
    assert hash(jc.finfo("e5m2")) == hash(wanted)


def test_the_facts_are_shown() -> None:
    facts = "max=448.0, min=-448.0, eps=0.125, smallest_normal=0.015625, smallest_subnormal=0.001953125"
    assert repr(jc.finfo("e4m3fn")) == str(jc.finfo("e4m3fn")) == f"finfo(float8_e4m3fn, bits=8, {facts})"
    assert repr(jc.finfo("fixed4.4")) == "finfo(fixed4.4, bits=8, max=7.9375, min=-8.0)"
    assert "max=1.875 · 2^8191" in repr(jc.finfo(jc.formats.FloatFormat(14, 3)))


def test_values_that_no_float_holds_are_fractions() -> None:
    info = jc.finfo(jc.formats.FloatFormat(14, 3))
    assert info.max == Fraction(15, 8) * Fraction(2) ** 8191 and info.smallest_normal == Fraction(1, 2**8190)


@each("text", ["fixed4.4", "integer8", "int8", "nf4", "codebook(-1,0,1)"])
def test_formats_without_an_exponent_have_no_such_facts(text: str) -> None:
    info, element = jc.finfo(text), jc.Spec(text).element
    assert (info.bits, info.max, info.min) == (element.bits, element.max, element.min)
    for fact in set(NAMES) - {"bits", "max", "min"}:
        with pytest.raises(AttributeError, match=r" has no \w+; it has bits, max and min"):
            getattr(info, fact)


def test_a_format_without_subnormal_numbers() -> None:
    info = jc.finfo("e4m3(subnormals=false)")
    assert info.smallest_normal == 2.0**-6
    with pytest.raises(AttributeError, match="has no smallest_subnormal; it has all others"):
        _ = info.smallest_subnormal


def test_no_format() -> None:
    with pytest.raises(TypeError, match="format=8 must be a Spec, a format, a dtype, or text"):
        jc.finfo(8)  # type: ignore[arg-type]


def test_wide_facts_print_shortly() -> None:
    """Fractions of thousands of digits: exact, equal to plain ones, and texts of a few characters."""
    wide, small = jc.finfo("e15m3"), jc.finfo(jc.formats.FloatFormat(16, 3)).smallest_subnormal
    assert (str(wide.max), str(wide.min), f"{small}") == ("15 * 2^16380", "-15 * 2^16380", "2^-32769")
    for value, exact in (
        (wide.max, Fraction(15 * 2**16380)),
        (wide.min, -Fraction(15 * 2**16380)),
        (small, Fraction(1, 2**32769)),
        (jc.formats.IntegerFormat(64).max, Fraction(2**63 - 1)),
    ):
        assert value == exact and hash(value) == hash(exact) and eval(repr(value)) == exact
        assert pickle.loads(pickle.dumps(value)) == exact and type(value * 2) is Fraction
    assert repr(wide.max) == "Fraction(15) * 2**16380" and repr(small) == "Fraction(1) / 2**32769"


@each("make", [jc.finfo, jc.Spec, lambda dtype: jc.Rule(weight=dtype).weight])
def test_a_dtype_stands_for_its_format(make: Callable[[Any], Any]) -> None:
    for name, dtypes in {
        "binary16": (np.float16, np.dtype("float16"), jnp.float16),
        "bfloat16": (jnp.bfloat16, ml_dtypes.bfloat16, jnp.zeros(1, "bfloat16").dtype),
        "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, jnp.float8_e4m3fn),
        "int8": (np.int8, jnp.int8),
        "int4": (jnp.int4,),
    }.items():
        for dtype in dtypes:
            assert make(dtype) == make(name)
    for other in (float, bool, list, None, 8):
        if (make is jc.finfo or make is jc.Spec) or other is not None:
            with pytest.raises(TypeError, match="must be a"):
                make(other)
    with pytest.raises(ValueError, match="'complex64' is not known"):
        make(jnp.complex64)
