"""quantize, dequantize, fit_scale: sizes that are what they say, the bits of round_to_format, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop import QArray

further = Further()

KEY = jax.random.key(7)

#: A format, a shape, and its stored bits an element.
SIZES = [
    ("int4(group=128,scale=bfloat16)", (4, 256), 4.125),
    ("mxfp4", (4, 256), 4.25),
    ("mxfp6_e3m2", (4, 256), 6.25),
    ("mxfp8_e5m2", (4, 256), 8.25),
    ("nvfp4", (64, 256), 4.5 + 32 / (64 * 256)),
    ("dynamic8", (4, 512), 8.125),
    ("nf4", (4, 256), 4.5),
    ("int8(channel=0)", (4, 256), 8 + 32 / 256),
    ("int8(group=tensor)", (4, 256), 8 + 32 / 1024),
    ("uint4(group=64,zero_point=integer)", (4, 256), 4 + 64 / 64),
    ("int4(group=64,zero_point=float,scale=bfloat16)", (4, 256), 4 + 32 / 64),
    ("int3(group=(2,16),scale=float16)", (4, 32), 3 + 16 / 32),
    ("e3m2fn", (4, 64), 6.0),
    ("bfloat16", (4, 64), 16.0),
    ("binary16p11se", (4, 64), 16.0),
]
#: Formats of all kinds of grouping, for arrays of 5 x 3 x 37 elements: ragged tails, and rows that fill no whole bytes.
TEXTS = [
    "int4(group=16,scale=bfloat16)",
    "int4(group=2,axis=0)",
    "int5(group=(2,16))",
    "int8(group=tensor)",
    "int8(channel=1,rule=half_range)",
    "uint3(channel=-1,zero_point=integer)",
    "int4(group=9,zero_point=float,scale=bfloat16)",
    "nf4(group=4,scale=uint8(group=3,zero_point=float))",
    "mxfp4(axis=1)",
    "mxfp8_e4m3(group=7)",
    "nvfp4",
    "nf4(group=all)",
    "float8_e5m2(channel=0)",
    "e3m2fn",
    "integer4:wrap",
    "fixed2.3",
    "codebook(-1,-0.25,0,0.5,1)",
    "float8_e4m3fn",
    "bfloat16",
    "e6m9",
]


def numbers(shape: tuple[int, ...] = (5, 3, 37), dtype: Any = np.float32) -> np.ndarray:
    """Normal numbers, zeros, a row of zeros, subnormal, large and infinite ones."""
    x = np.random.default_rng(3).standard_normal(shape)
    flat = x.reshape(-1)
    flat[::11] = 0
    flat[[5, flat.size // 3, -1]] = 1e-39, -np.inf, 6e4
    x[(0,) * (x.ndim - 1)] = 0
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def same(got: Any, wanted: Any) -> None:
    """Bit for bit, NaN apart."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    word = np.dtype(f"u{got.dtype.itemsize}")
    nan = np.isnan(got.astype(np.float64)) & np.isnan(wanted.astype(np.float64))
    np.testing.assert_array_equal(np.where(nan, 0, got.view(word)), np.where(nan, 0, wanted.view(word)))


def sized(q: Any, text: str, shape: tuple[int, ...], bits: float) -> None:
    assert (text, q.bits_per_element) == (text, bits)
    assert q.shape == shape and q.dtype == np.float32
    assert (text, q.nbytes) == (text, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(q)))
    if (fmt := jc.Spec(text).scaled) is not None:
        assert (text, fmt.bits_per_element(shape)) == (text, bits)


@further
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("part", [2, 0, 1, 3, 4])
def sizes_are_those_of_the_arrays(part: int) -> None:
    for text, shape, bits in SIZES[part::5]:
        q = jc.quantize(jnp.ones(shape), text)
        sized(q, text, shape, bits)
        assert 8 * q.nbytes == bits * np.prod(shape)


#: Double quantization, without and with zero points: 4.13 bits either way.
NF4 = [
    ("nf4(scale=int8(group=256))", (2, 64 * 256), 4 + 8 / 64 + 32 / (64 * 256)),
    ("nf4(scale=uint8(group=256,zero_point=float))", (2, 64 * 256), 4 + 8 / 64 + 64 / (64 * 256)),
]


@further
def the_size_of_scales_that_are_quantized_again() -> None:
    """And of all formats, as the traced program has them."""
    for text, shape, bits in (*SIZES, *NF4):
        q = jax.eval_shape(lambda x, text=text: jc.quantize(x, text), jax.ShapeDtypeStruct(shape, np.float32))
        sized(q, text, shape, bits)
        if "scale=int8" in text or "scale=uint8" in text:
            assert round(bits, 2) == 4.13
            assert [part.shape for part in q.scale] == [(2, 256), (2, 1), (2, 1)][: len(q.scale)]


def the_largest_scale_stays_finite() -> None:
    """255 steps from the smallest scale lie half a unit above the largest number, and would round to infinity."""
    top, other = np.finfo(np.float32).max, np.float32(float.fromhex("0x1.66f0dp+119"))
    x = np.repeat(np.array([[top, other]], np.float32), 8, axis=1)
    q = jc.quantize(x, "nf4(group=8,scale=uint8(group=2,zero_point=float))")
    same(jc.dequantize(q), x)


def codes_that_say_zero_are_the_smallest_scale() -> None:
    """No fit gives them, and within jit they cannot be refused."""
    tiny = np.float32(2.0**-149)
    x = np.array([[3.0, -5.0, 0.0, tiny] * 2], np.float32)
    text = "int4(group=8,scale=int8(channel=0))"
    (codes, outer), _ = jc.fit_scale(x, text)
    given = jax.jit(lambda x, codes: jc.dequantize(jc.quantize(x, text, scale=(codes, outer))))
    same(given(x, 0 * codes), np.array([[7 * tiny, -8 * tiny, 0.0, tiny] * 2], np.float32))


@further
@pytest.mark.parametrize("check", [codes_that_say_zero_are_the_smallest_scale, the_largest_scale_stays_finite])
def the_ends_of_scales_that_are_quantized_again(check: Any) -> None:
    check()


def test_odd_rows_waste_less_than_a_byte() -> None:
    for bits in (3, 4, 5, 8):
        q = jax.eval_shape(lambda x, bits=bits: jc.quantize(x, f"int{bits}(channel=0)"), jnp.ones((3, 37)))
        assert q.qvalue.shape == (3, -(-37 * bits // 8)) and q.qvalue.dtype.itemsize == 1


@further.first
@pytest.mark.parametrize("text", TEXTS)
def dequantized_is_rounded(text: str) -> None:
    x = numbers()
    q = jc.quantize(x, text)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(q))
    same(jc.dequantize(q), jc.round_to_format(x, text))
    compiled = jax.jit(lambda x: jc.quantize(x, text))(jnp.asarray(x))
    assert jax.tree.structure(compiled) == jax.tree.structure(q)
    jax.tree.map(same, compiled, q)


CARRIERS = [
    ("int8(channel=0)", ml_dtypes.bfloat16),
    ("mxfp4", ml_dtypes.bfloat16),
    ("int8(channel=0)", np.float16),
    ("e3m2fn", np.float16),
    ("mxfp4", np.float64),
    ("int8(channel=0)", np.float64),
]


@further
@pytest.mark.parametrize(("text", "dtype"), CARRIERS)
def every_carrier(text: str, dtype: Any) -> None:
    x = numbers((3, 37), dtype)
    q = jc.quantize(x, text)
    assert q.dtype == dtype
    same(jc.dequantize(q), jc.round_to_format(x, text))


@further
@pytest.mark.parametrize("text", ["e3m2fn:stochastic", "int4(group=16):stochastic"])
def stochastic_draws_are_those_of_rounding(text: str) -> None:
    x = numbers((4, 64))
    whole = jc.quantize(x, text, KEY)
    same(jc.dequantize(whole), jc.round_to_format(x, text, KEY))
    part = jc.quantize(x[2:], text, KEY, offset=((2, 0), (4, 64)))
    same(part.qvalue, whole[2:].qvalue)
    with pytest.raises(ValueError, match="key"):
        jc.quantize(x, "int4(group=16):stochastic")


@further
def codes_are_the_bits_of_native_dtypes() -> None:
    x = numbers((3, 8))
    x[1, 7] = 3.0
    kinds = {
        "int8(channel=0)": np.int8,
        "uint8(channel=0,zero_point=integer)": np.uint8,
        "mxint8": np.int8,
        "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
        "mxfp8_e5m2": ml_dtypes.float8_e5m2,
        "dynamic8": np.uint8,
        "mxfp4": np.uint8,
        "binary16": np.float16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "e6m9": np.uint16,
    }
    for text, dtype in kinds.items():
        assert jax.eval_shape(lambda x, text=text: jc.quantize(x, text), x).qvalue.dtype == dtype, text
    same(jc.quantize(x, "bfloat16").qvalue, x.astype(ml_dtypes.bfloat16))
    q = jc.quantize(x, "int8(channel=0)")
    same(q.qvalue * q.scale, jc.dequantize(q))


@further
def a_nan_that_cannot_be_said() -> None:
    x = np.array([[np.nan, 1.0, -2.0, np.inf]], np.float32)
    assert jc.dequantize(jc.quantize(x, "e2m1fn")).tolist() == [[6.0, 1.0, -2.0, 6.0]]
    assert np.isnan(jc.dequantize(jc.quantize(x, "e4m3"))[0, 0])
    assert jc.dequantize(jc.quantize(x, "int4(group=4)"))[0, 0] == 2.0


@further
@pytest.mark.parametrize("text", ["uint4(group=8,zero_point=integer)", "nvfp4"])
def given_scales_are_used_and_kept(text: str) -> None:
    x, other = numbers((4, 32)), 3 * numbers((4, 32))[::-1].copy()
    scale, zero_point = jc.fit_scale(x, text)
    q = jc.quantize(x, text, scale=scale, zero_point=zero_point)
    jax.tree.map(same, q, jc.quantize(x, text))
    static = jc.quantize(other, text, scale=scale, zero_point=zero_point)
    jax.tree.map(same, (static.scale, static.zero_point), (scale, zero_point))


@further
def quotients_beyond_all_numbers_of_the_carrier_saturate_like_others() -> None:
    huge = np.array([[3e38, -3e38, 1.0, 0.0]], np.float32)
    for text, tiny in (("int4(channel=0)", 1e-38), ("mxfp4(group=4)", 1)):
        like, _ = jc.fit_scale(huge, text)
        got = jc.dequantize(jc.quantize(huge, text, scale=np.full_like(like, tiny)))
        assert 0 < got[0, 0] < 1e-35 and -1e-35 < got[0, 1] < 0 and got[0, 3] == 0
    ones = np.ones((4, 1), np.float32)
    assert (np.abs(jc.quantize(np.full((4, 8), 2.4, np.float32), "int4(channel=0)", scale=ones).qvalue) == 0x22).all()


@pytest.mark.smoke
def test_refused() -> None:
    x = jnp.ones((4, 8))
    scale, _ = jc.fit_scale(x, "int8(channel=0)")
    for error, said, call in (
        (TypeError, "int32", lambda: jc.quantize(jnp.arange(3), "int4(group=2)")),
        (ValueError, "axis", lambda: jc.quantize(x, "int4(group=2,axis=2)")),
        (ValueError, "at most 8", lambda: jc.quantize(x, "int12(channel=0)")),
        (ValueError, "at most 16", lambda: jc.quantize(x, "tf32")),
        (ValueError, "binary64", lambda: jc.quantize(x, "binary64")),
        (ValueError, "no scale", lambda: jc.quantize(x, "e3m2fn", scale=scale)),
        (ValueError, "float32\\[4, 1\\]", lambda: jc.quantize(x, "int8(channel=0)", scale=scale[:2])),
        (ValueError, "float16", lambda: jc.quantize(x, "int8(channel=0)", scale=scale.astype("float16"))),
        (ValueError, "zero_point without scale", lambda: jc.quantize(x, "int8(channel=0)", zero_point=scale)),
        (ValueError, "zero_point", lambda: jc.quantize(x, "uint8(channel=0,zero_point=integer)", scale=scale)),
        (ValueError, "plain", lambda: jc.fit_scale(x, "integer8")),
        (TypeError, r"^q is \w+ float32\[4, 8\]; it must be a QArray.*$", lambda: jc.dequantize(x)),  # type: ignore[arg-type]
        (TypeError, "^q=None must be a QArray.*$", lambda: jc.dequantize(None)),
        (ValueError, "add_to belongs to one array", lambda: jc.dequantize([jc.quantize(x, "mxfp4")], add_to=x)),
        (TypeError, "not a carrier", lambda: jc.dequantize(jc.quantize(x, "int8(channel=0)"), "int32")),
        (ValueError, "add_to has shape", lambda: jc.dequantize(jc.quantize(x, "mxfp4"), add_to=x[:2])),
        (ValueError, "beside add_to", lambda: jc.dequantize(jc.quantize(x, "mxfp4"), "float16", add_to=x)),
        (ValueError, "impl", lambda: jc.quantize(x, "mxfp4", impl="fast")),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=said):
            call()


def test_scales_that_no_fit_gives_are_refused() -> None:
    x, text = numbers((2, 32)), "int4(group=8,scale=int8(channel=0))"
    (groups, _), _ = jc.fit_scale(x, "nvfp4")
    (codes, outer), _ = jc.fit_scale(x, text)
    for bad in (0.0, -1.0, np.nan, np.inf):
        scale = np.array([[1.0], [bad]], np.float32)
        with pytest.raises(ValueError, match=f"scale has {bad}; .*finite and above zero"):
            jc.quantize(x, "int8(channel=0)", scale=scale)
        with pytest.raises(ValueError, match=f"scale has {bad}"):
            jc.quantize(x, "nvfp4", scale=(groups, np.float32(bad)))
        with pytest.raises(ValueError, match="scale has"):
            jc.quantize(x, text, scale=(codes, np.full_like(outer, bad)))
    # Within jit the values are not known; shapes and dtypes are.
    given = jax.jit(lambda x, scale: jc.dequantize(jc.quantize(x, "int8(channel=0)", scale=scale)))
    assert given(x, scale).shape == x.shape
    with pytest.raises(ValueError, match=r"must be float32\[2, 1\]"):
        given(x, scale[:, 0])


@further
def codes_of_scales_and_zero_points_that_no_fit_gives_are_refused() -> None:
    x = numbers((2, 32))
    for text, code, value in (("mxfp4", 255, "nan"), ("int4(group=32,scale=e4m3fn)", 0x80, "0.0")):
        with pytest.raises(ValueError, match=f"scale has -?{value}"):
            jc.quantize(x, text, scale=np.array([[1], [code]], np.uint8))
    scale, zero = jc.fit_scale(x, "uint4(channel=0,zero_point=float)")
    with pytest.raises(ValueError, match="zero_point has nan"):
        jc.quantize(x, "uint4(channel=0,zero_point=float)", scale=scale, zero_point=np.full_like(zero, np.nan))
    texts = ("nvfp4", "mxfp4", "int4(group=8,scale=int8(channel=0))", "uint4(group=8,zero_point=float)")
    for text in (*texts, "nf4(group=8,scale=uint8(group=2,zero_point=float))", "int4(group=8,scale=float16)"):
        for y in (x, 0 * x, np.float32(1e-45) * x, np.float32(1e38) * np.sign(x)):
            scale, zero = jc.fit_scale(y, text)
            jax.tree.map(same, jc.quantize(y, text, scale=scale, zero_point=zero).scale, scale)


@further
@pytest.mark.parametrize("spec", ["dynamic8", "nf4(group=256)", "nf4(group=256,scale=bfloat16)"])
@pytest.mark.parametrize("rows", [4, 300])
def levels_under_scales_of_any_size_are_rounded_once(spec: str, rows: int) -> None:
    """Subnormal scales and products too. A program for one CPU computes few numbers in float64, and more in float32."""
    element: Any = jc.Spec(spec).scaled.element  # type: ignore[union-attr]
    levels = np.array(element.levels, np.float64)
    numbers = levels[np.arange(rows * 256).reshape(rows, 256) * 7 % len(levels)]
    sizes = np.array([1e-45, 3e-39, 1.3e-38, 7e-30, 0.3, 1.1, 3e30, 3.3e38])
    scale = sizes[np.arange(rows) % 8 if rows > 8 else [0, 1, 2, 6]][:, None]
    scale = scale.astype(ml_dtypes.bfloat16 if "bfloat16" in spec else np.float32)
    q = jc.quantize(numbers.astype(np.float32), spec, scale=np.full_like(scale, 1))
    wanted = (numbers * scale.astype(np.float64)).astype(np.float32)
    same(jax.jit(jc.dequantize)(dataclasses.replace(q, scale=scale)), wanted)


@further
def other_dtypes_are_rounded_once() -> None:
    x = numbers((3, 37))
    q = jc.quantize(x, "int8(channel=0)")
    exact = np.asarray(q.qvalue, np.float64) * np.asarray(q.scale, np.float64)
    same(jc.dequantize(q, "float64"), exact)
    same(jc.dequantize(q, jnp.bfloat16), jc.round_to_format(exact, "bfloat16").astype(ml_dtypes.bfloat16))
    plain = jc.quantize(x, "e6m9")
    same(jc.dequantize(plain, "float16"), jc.round_to_format(jc.dequantize(plain), "binary16").astype(np.float16))


def test_numbers_are_an_array_of_jax_unless_all_parts_are_of_numpy() -> None:
    q = jc.quantize(np.array([[1, -2], [3, 4]], np.float32), "int8(channel=0)")
    assert isinstance(jc.dequantize(q), np.ndarray)
    assert isinstance(jc.dequantize(q, add_to=jnp.ones((2, 2))), jax.Array)


@further
def adding() -> None:
    x = numbers((3, 40))
    q = jc.quantize(jnp.asarray(x), "mxfp4")
    total = jnp.full(x.shape, 0.5, jnp.bfloat16)
    got = jax.jit(lambda q, total: jc.dequantize(q, add_to=total))(q, total)
    same(got, total + jc.dequantize(q, "bfloat16"))
    assert isinstance(jc.dequantize(jc.quantize(x, "mxfp4"), add_to=np.ones_like(x)), np.ndarray)


@further
def arrays_without_axes_or_elements() -> None:
    for text in ("int4(group=tensor)", "e3m2fn", "bfloat16"):
        for x in (np.float32(1.25), np.zeros((0, 3), np.float32), np.zeros((3, 0), np.float32)):
            q = jc.quantize(x, text)
            assert q.shape == np.shape(x)
            same(jc.dequantize(q), jc.round_to_format(np.asarray(x), text))


@further
def the_spec_keeps_no_gradient_and_counts_axes_from_the_end() -> None:
    q = jc.quantize(jnp.ones((2, 3, 4)), "int4(group=2,axis=0):gradient=clipped")
    assert isinstance(q, QArray) and q.spec == jc.Spec("int4(group=2,axis=-3)")


test_further = further.test()
