"""Codes on tiles of every carrier: those of the formats themselves, and packing by a bit stream written out."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.rounding.codes import decode_elements, encode_elements, extend_exponent, pack_codes, unpack_codes
from jchop._core.rounding.grid import carrier_holds

further = Further()

#: Formats of at most 16 bits, of every kind, subnormal in the carrier or not.
TEXTS = [
    *cases.NAMED, *cases.CUSTOM, *cases.P3109, *cases.FIXED,
    "e5m2(subnormals=false)", "e4m3fn(subnormals=false)", "fixed1.7(symmetric=true)", "fixed-120.128", "integer16",
    "uinteger16", "integer3", "integer5", "uinteger7", "codebook(-3,-1,0,0.5,8)", "codebook(0.5)",
    f"codebook({','.join(map(str, range(-20, 20)))})",
]  # fmt: skip
FORMATS = {text: jc.Spec(text).format for text in TEXTS}


def of_carrier(name: str) -> dict[str, jc.formats.ElementFormat]:
    """The formats that a carrier holds."""
    return {t: f for t, f in FORMATS.items() if carrier_holds(jc.Spec(f, overflow="saturate"), CARRIERS[name])}


@further
@pytest.mark.parametrize(
    "name", ["bfloat16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float16", "float32", "float64"))]
)
def codes_are_those_of_the_formats(name):
    """Every code decodes, unused ones to NaN, and every value, NaN included, encodes; one compiled function for all."""
    carrier, formats = CARRIERS[name], of_carrier(name)
    assert len(formats) > 40

    @jax.jit
    def both(codes: dict) -> dict:
        values = {text: decode_elements(code, formats[text], carrier) for text, code in codes.items()}
        return {text: (value, encode_elements(value, formats[text], carrier)) for text, value in values.items()}

    with jax.enable_x64(True):
        codes = {text: jnp.arange(1 << fmt.bits, dtype=fmt.code_dtype) for text, fmt in formats.items()}
        results = jax.device_get(both(codes))
    for text, (values, encoded) in results.items():
        fmt = formats[text]
        expected = fmt.decode(codes[text]).astype(np.float64)
        with np.errstate(over="ignore"):
            cases.assert_bits(values, values, cases.bits(expected.astype(values.dtype)), f"{text} in {name}")
        used = ~np.isnan(expected)
        np.testing.assert_array_equal(encoded[used], np.asarray(codes[text])[used], f"{text} in {name}")
        assert encoded.dtype == fmt.code_dtype
        if fmt.has_nan:
            assert set(encoded[~used].tolist()) == set(fmt.encode([np.nan]).tolist()), f"{text} in {name}"


@further
def wide_formats():
    """A float32 number is its own code; narrower scales of float64 arithmetic have float32's."""
    x = np.array([0.0, -0.0, 1.0, -2.5, 3e38, 1e-45, 1e-38, np.inf, -np.inf], np.float32)
    codes = encode_elements(jnp.asarray(x), jc.formats.binary32, CARRIERS["float32"])
    np.testing.assert_array_equal(codes, x.view(np.uint32))
    with jax.enable_x64(True):
        wide = jnp.asarray(x.astype(np.float64))
        np.testing.assert_array_equal(
            encode_elements(wide, jc.formats.binary32, CARRIERS["float64"]), x.view(np.uint32)
        )
        back = decode_elements(jnp.asarray(x.view(np.uint32)), jc.formats.binary32, CARRIERS["float64"])
        np.testing.assert_array_equal(cases.bits(np.asarray(back)), cases.bits(x.astype(np.float64)))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", CARRIERS)
def test_extended_bits_have_a_leading_bit(name):
    """m 2^k for all powers of two: the exponent field goes on below the carrier's, the fraction stays."""
    carrier = CARRIERS[name]
    exponents = range(carrier.tiny_exponent + 2, carrier.bias + 1)
    values = np.ldexp([[1.0, 1.25, 1.75]], np.array(exponents)[:, None]).astype(cases.DTYPES[name])
    with jax.enable_x64(True):
        magnitudes = jnp.asarray(cases.bits(values)).astype(carrier.work)
        bits = np.asarray(extend_exponent(magnitudes, carrier))
    expected = (np.array(exponents) + carrier.bias)[:, None] * (1 << carrier.fraction) + np.array(
        [[0, 1 << carrier.fraction - 2, 3 << carrier.fraction - 2]]
    )
    np.testing.assert_array_equal(bits, expected)


@further.first
def packing_is_a_little_endian_bit_stream(rng):
    sizes = [*((bits, 31) for bits in range(1, 9)), (3, 0), (5, 1), (2, 3), (7, 8), (6, 64)]
    given = [rng.integers(0, 1 << bits, (2, 3, count)).astype(np.uint8) for bits, count in sizes]

    @jax.jit
    def both(given):
        packed = [pack_codes(codes, bits) for codes, (bits, _) in zip(given, sizes, strict=True)]
        return packed, [unpack_codes(codes, *size) for codes, size in zip(packed, sizes, strict=True)]

    for codes, (bits, count), packed, back in zip(given, sizes, *jax.device_get(both(given)), strict=True):
        assert packed.shape == (2, 3, -(-count * bits // 8)) and packed.dtype == np.uint8
        for row, stored in zip(codes.reshape(6, count), packed.reshape(6, -1), strict=True):
            stream = sum(int(code) << bits * i for i, code in enumerate(row))
            assert stored.tobytes() == stream.to_bytes(len(stored), "little"), (bits, count)
        np.testing.assert_array_equal(back, codes, f"{bits} bits, {count} codes")


@pytest.mark.parametrize("name", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_code_below_a_symmetric_range_is_nan(name):
    """And has no sign; neighbours in two's complement are the ends of the range."""
    codes = jnp.array([128, 129, 127], jnp.uint8)
    values = decode_elements(codes, FORMATS["fixed1.7(symmetric=true)"], CARRIERS[name])
    np.testing.assert_array_equal(np.asarray(values, np.float32), [np.nan, -127 / 128, 127 / 128])
    assert not np.signbit(values[0])


@pytest.mark.in_turn(64)
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_fewer_operations_give_the_same_values(name):
    carrier, formats = CARRIERS[name], {text: fmt for text, fmt in of_carrier(name).items() if fmt.bits <= 8}
    assert len(formats) > 20

    @jax.jit
    def both(codes: dict) -> list:
        return [
            {text: decode_elements(code, formats[text], carrier, short=short) for text, code in codes.items()}
            for short in (True, False)
        ]

    with jax.enable_x64(True):
        codes = {text: jnp.arange(1 << fmt.bits, dtype=fmt.code_dtype) for text, fmt in formats.items()}
        short, long = jax.device_get(both(codes))
    for text, values in short.items():
        cases.assert_bits(values, values, cases.bits(long[text]), f"{text} in {name}")


test_further = further.test()
