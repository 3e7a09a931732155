"""Rounding to posits, takums and HiF8: on the string, in every mode, in every carrier, and after exact operations."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import oracle_arithmetic
import pytest
from further import Further

import jchop as jc
from jchop._common.bit_ops import CARRIERS, enable_x64_for
from jchop._core.rounding.codes import decode_elements, encode_elements
from jchop._core.rounding.elements import round_to_spec
from jchop.formats import StringFormat, parse_format

further = Further()

#: Formats, each with a carrier that holds its values.
PAIRS = [("posit8", "float32"), ("posit16", "float64"), ("takum_linear8", "float64"), ("takum_linear16", "float64")]


def tapered(text: str) -> StringFormat:
    fmt = parse_format(text)
    assert isinstance(fmt, StringFormat)
    return fmt


def numbers(fmt: StringFormat, dtype: Any, count: int, rng: np.random.Generator) -> np.ndarray:
    """Numbers of all sizes, codes' values, the points between neighbours, the ends, and specials."""
    info = ml_dtypes.finfo(dtype)
    wide = jc.formats.TakumFormat if isinstance(fmt, jc.formats.TakumFormat) else jc.formats.PositFormat
    codes = rng.integers(1, fmt.max_code, count // 4)
    ties = [float(wide(fmt.bits + 1).magnitude_of(2 * int(code) + 1)) for code in codes]
    sizes = rng.uniform(float(info.minexp), float(info.maxexp - 1), count // 2)
    low, high = float(fmt.smallest), float(fmt.max)
    ends = [low, low / 3, low * 1.5, high, high * 0.6, np.nextafter(high, np.inf), 0.0, np.inf, np.nan, info.tiny / 4]
    values = np.concatenate([2.0**sizes, ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf), ends])
    with np.errstate(over="ignore", under="ignore"):
        values = values.astype(dtype)
    return np.concatenate([values, -values])


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("text", "carrier"), [("posit5", "float16"), *PAIRS, ("posit16", "float32")])
def every_deterministic_mode(text: str, carrier: str) -> None:
    fmt, c = tapered(text), oracle.CARRIERS[carrier]
    strings = oracle.describe(fmt)
    x = numbers(fmt, np.dtype(carrier), 120, np.random.default_rng(1))
    exact = [oracle.from_bits(word, c) for word in x.view(c.words)]
    modes = [(mode, "ieee") for mode in oracle.DETERMINISTIC] + [("nearest_even", "saturate"), ("up", "propagate")]

    with enable_x64_for(x.dtype):
        specs = [jc.Spec(fmt, *mode) for mode in modes]
        results = jax.jit(lambda x: [round_to_spec(x, spec, CARRIERS[carrier]) for spec in specs])(x)
    for mode, result in zip(modes, results, strict=True):
        wanted = np.array([oracle.to_bits(oracle.round_exact(strings, v, *mode), c) for v in exact], c.words)
        got = np.asarray(result)
        wanted = wanted.view(got.dtype)
        np.testing.assert_array_equal(got, wanted, str(mode))
        np.testing.assert_array_equal(np.signbit(got[got == 0]), False)


@pytest.mark.parametrize("text", ["posit8", "posit16", "takum_linear8", "takum_linear16"])
@pytest.mark.in_turn(4)
def test_every_point_between_neighbours(text: str) -> None:
    """The point is the string of one bit more: it goes to the even code, and the numbers beside it to their side."""
    fmt = tapered(text)
    wide = type(fmt)(fmt.bits + 1)  # type: ignore[call-arg]
    ties = wide.decode(np.arange(3, 2 * fmt.max_code, 2)) if wide.bits <= 16 else _sampled(wide, fmt)
    codes = (np.asarray([wide.code_of(tie) for tie in ties]) - 1) // 2 if wide.bits > 16 else np.arange(1, fmt.max_code)
    values = fmt.decode(np.arange(fmt.max_code + 1))
    x = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf)])
    wanted = values[np.concatenate([codes + codes % 2, codes, codes + 1])]
    np.testing.assert_array_equal(jc.round_to_format(x, fmt), wanted)
    np.testing.assert_array_equal(jc.round_to_format(-x, fmt), -wanted)


def _sampled(wide: StringFormat, fmt: StringFormat) -> np.ndarray:
    codes = np.random.default_rng(2).integers(1, fmt.max_code, 3000)
    return np.array([float(wide.magnitude_of(2 * int(code) + 1)) for code in codes])


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize("text", ["posit15", "posit16", "takum_linear16", "takum_linear13"])
def all_codes_are_fixed_and_order_is_kept(text: str) -> None:
    fmt = tapered(text)
    values = fmt.values()
    np.testing.assert_array_equal(jc.round_to_format(values, fmt), values)
    x = np.sort(numbers(fmt, np.float64, 20_000, np.random.default_rng(3)))
    for mode in oracle.DETERMINISTIC:
        rounded = jc.round_to_format(x[np.isfinite(x)], f"{text}:{mode}")
        assert (np.diff(rounded) >= 0).all() and np.isin(rounded, values).all()


@further
@pytest.mark.parametrize("mode", oracle.STOCHASTIC)
@pytest.mark.in_turn(5)
def a_draw_compares_the_bits_that_are_cut(mode: str) -> None:
    """Each element with its own word: in the fraction, in the exponent, in the regime and at the ends."""
    for text, carrier in PAIRS[:3]:
        fmt, c = tapered(text), oracle.CARRIERS[carrier]
        x = numbers(fmt, np.dtype(carrier), 60, np.random.default_rng(4))
        n = 7 if mode != "stochastic_equal" else None
        word_type = np.uint64 if carrier == "float64" else np.uint32
        width = 8 * np.dtype(word_type).itemsize
        words = np.random.default_rng(5).integers(0, 1 << width, len(x), word_type, endpoint=False)
        spec = jc.Spec(fmt, mode, random_bits=n)
        with enable_x64_for(x.dtype):
            got = np.asarray(jax.jit(partial(round_to_spec, spec=spec, carrier=CARRIERS[carrier]))(x, word=words))
        n = n or 1
        for value, word, result in zip(x, words, got, strict=True):
            exact = oracle.from_bits(value.view(c.words), c)
            wanted = oracle.round_exact(oracle.describe(fmt), exact, mode, n=n, r=int(word) >> width - n)
            assert wanted == oracle.from_bits(result.view(c.words), c), (text, value)


@partial(jax.jit, static_argnums=(1, 2))
def _both_ways(codes: Any, fmt: StringFormat, carrier: str) -> tuple[jax.Array, jax.Array]:
    values = decode_elements(jnp.asarray(codes), fmt, CARRIERS[carrier])
    return values, encode_elements(values, fmt, CARRIERS[carrier])


@pytest.mark.parametrize("text", ["posit5", "posit2", "posit16", "takum_linear6", "takum_linear16"])
@pytest.mark.in_turn(12)
def test_codes_of_arrays(text: str) -> None:
    fmt = tapered(text)
    codes = np.arange(1 << fmt.bits)
    for carrier in ["float32"] * text.startswith("posit") + ["float64"]:
        with enable_x64_for(carrier):
            values, back = _both_ways(codes, fmt, carrier)
            np.testing.assert_array_equal(np.asarray(values), fmt.decode(codes).astype(carrier))
            np.testing.assert_array_equal(np.asarray(back), codes)


def test_codes_of_32_bits() -> None:
    for text in ("posit32", "takum_linear32", "posit27", "takum_linear23"):
        fmt = tapered(text)
        edges = [0, 1, 2, 3, fmt.max_code - 1, fmt.max_code, fmt.max_code + 1, fmt.max_code + 2, 2 * fmt.max_code + 1]
        codes = np.array([*edges, *np.random.default_rng(6).integers(0, 1 << fmt.bits, 300)])
        with enable_x64_for("float64"):
            values, back = _both_ways(codes, fmt, "float64")
            np.testing.assert_array_equal(np.asarray(values), fmt.decode(codes).astype(float))
            np.testing.assert_array_equal(np.asarray(back), codes)
            np.testing.assert_array_equal(jc.round_to_format(np.asarray(values), fmt), np.asarray(values))


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize("mode", ["nearest_even", "toward_zero", "up", "odd"])
def operations_are_rounded_once(mode: str) -> None:
    """Sums, products and quotients of values that are far apart, cancel, and leave the range on both sides."""
    rng, c = np.random.default_rng(7), oracle.CARRIERS["float32"]
    fmt = jc.formats.PositFormat(16)
    strings = oracle.describe(fmt)
    values = fmt.values().astype(np.float32)
    places = rng.integers(0, len(values), 200)
    x, y = values[places], rng.choice(values, 200)
    y[:40] = -values[np.clip(places[:40] + rng.integers(-3, 4, 40), 0, len(values) - 1)]
    y[40:50], x[50:55], y[50:52] = 0, values[-1], values[-1]
    spec = f"posit16:{mode}"

    def operations(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        return [jc.math.add(x, y, spec), jc.math.multiply(x, y, spec), jc.math.divide(x, y, spec)]

    results = jax.jit(operations)(x, y)
    for name, result in zip(("add", "multiply", "divide"), results, strict=True):
        for a, b, got in zip(x, y, np.asarray(result), strict=True):
            exact = [oracle.from_bits(v.view(np.uint32), c) for v in (a, b)]
            wanted = oracle.round_exact(strings, getattr(oracle_arithmetic, name)(*exact), mode)
            assert wanted == oracle.from_bits(got.view(np.uint32), c), (name, a, b)


@pytest.mark.in_turn(64)
@pytest.mark.parametrize("mode", ["stochastic", "stochastic_c"])
def test_stochastic_operations_average_to_their_share(mode: str) -> None:
    """Of 2^14 sums that lie between two posits, the share that goes up is the share of the string that is cut."""
    x, y = np.full(1 << 14, 3.0e9, np.float32), np.full(1 << 14, 3.3e5, np.float32)
    total = jc.math.add(jnp.asarray(x), jnp.asarray(y), f"posit8:{mode}", jax.random.key(3))
    strings = oracle.Strings("posit", 8)
    place = strings.place(Fraction(3.0e9) + Fraction(float(np.float32(3.3e5))))
    strings_top = strings.top(False)
    assert place > strings_top  # beyond the largest posit8: every draw saturates
    assert (np.asarray(total) == 2.0**24).all()
    x, y = np.full(1 << 14, 70000.0, np.float32), np.full(1 << 14, 2.0**-9, np.float32)
    total = np.asarray(jc.math.add(jnp.asarray(x), jnp.asarray(y), f"posit8:{mode}", jax.random.key(4)))
    place = strings.place(Fraction(70000) + Fraction(2) ** -9)
    low = int(place)
    assert set(total.tolist()) == {float(strings.value(low)), float(strings.value(low + 1))}
    share, wanted = (total == float(strings.value(low + 1))).mean(), float(place - low)
    assert abs(share - wanted) < 4 * (wanted * (1 - wanted) / (1 << 14)) ** 0.5


@further
def emulated_functions() -> None:
    """One function of a program: elementary ones are rounded once, an overflow saturates, and 1/0 is NaR."""

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.exp(x), jnp.exp(100 * x), jnp.exp(-100 * x), 1 / (x - x), jnp.log(x)

    results = jc.emulate(f, "posit16")(jnp.float32(1.5))
    fmt = jc.formats.PositFormat(16)
    assert float(results[0]) == float(jc.round_to_format(np.exp(1.5), fmt))
    assert (float(results[1]), float(results[2])) == (fmt.max, fmt.smallest)
    assert np.isnan(results[3]) and float(results[4]) == float(jc.round_to_format(np.log(1.5), fmt))
    with pytest.raises(
        ValueError, match=r"'posit32' has values that float32 cannot hold; cast the operands to float64"
    ):
        jc.emulate(f, "posit32")(jnp.float32(1.5))


def test_arrays_are_stored_and_bits_flip() -> None:
    x = np.random.default_rng(8).standard_normal((3, 20)) * 1e3
    for text, size in (("posit6", 45), ("posit16", 120), ("takum_linear12", 120)):
        q = jc.quantize(x, text)
        assert q.qvalue.nbytes == size
        np.testing.assert_array_equal(jc.dequantize(q), jc.round_to_format(x, text))
        np.testing.assert_array_equal(jc.dequantize(q, "float32"), jc.round_to_format(x, text).astype(np.float32))
    flipped = jc.flip_bits(x, "posit8", 1.0, jax.random.key(0), where="code")
    before, after = (
        jc.formats.PositFormat(8).encode(v).astype(int) for v in (jc.round_to_format(x, "posit8"), flipped)
    )
    assert all(int(one ^ other).bit_count() == 1 for one, other in zip(before.ravel(), after.ravel(), strict=True))


def test_derivatives_pass_through() -> None:
    grad = jax.grad(lambda x: jc.round_to_format(x, "posit8").sum())(jnp.array([0.3, 1e30]))
    clipped = jax.grad(lambda x: jc.round_to_format(x, "posit8:gradient=clipped").sum())(jnp.array([0.3, 1e30]))
    assert (grad.tolist(), clipped.tolist()) == ([1.0, 1.0], [1.0, 0.0])


# -- HiF8 --------------------------------------------------------------------------------------------------------------


def hif8_numbers(dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """All values, the middles between them and their neighbours, numbers of all sizes, the ends, and specials."""
    values = jc.formats.HiFloat8Format().values()[126:]
    middles = (values[1:] + values[:-1]) / 2
    ends = [2.0**-24, 40960.0, 36864.0, 1e30, 0.0, np.inf, np.nan, ml_dtypes.finfo(dtype).tiny / 4]
    beside = [np.nextafter(middles.astype(dtype), dtype.type(end)).astype(np.float64) for end in (0, 1e30)]
    x = np.concatenate([values, middles, *beside, ends, 2.0 ** rng.uniform(-26, 18, 40)]).astype(dtype)
    return x * rng.choice([-1, 1], len(x)).astype(dtype)


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize("carrier", ["bfloat16", "float32", "float64"])
def every_mode_of_hif8(carrier: str) -> None:
    fmt, c = jc.formats.HiFloat8Format(), oracle.CARRIERS[carrier]
    x = hif8_numbers(np.dtype(carrier), np.random.default_rng(1))
    exact = [oracle.from_bits(word, c) for word in x.view(c.words)]
    modes = [(mode, "ieee") for mode in oracle.DETERMINISTIC]
    modes += [("nearest_away", "saturate"), ("up", "propagate")]
    with enable_x64_for(x.dtype):
        specs = [jc.Spec(fmt, *mode) for mode in modes]
        results = jax.jit(lambda x: [round_to_spec(x, spec, CARRIERS[carrier]) for spec in specs])(x)
    for mode, result in zip(modes, results, strict=True):
        wanted = np.array([oracle.to_bits(oracle.round_exact(oracle.HiFloat8Set(), v, *mode), c) for v in exact])
        got = np.asarray(result)
        wanted = wanted.astype(c.words).view(got.dtype).astype(np.float64)
        np.testing.assert_array_equal(got.astype(np.float64), wanted, str(mode))
        np.testing.assert_array_equal(np.signbit(got[got == 0]), False)


@further.first
def a_draw_of_hif8_compares_the_bits_that_are_cut() -> None:
    c = oracle.CARRIERS["float32"]
    x = hif8_numbers(np.dtype("float32"), np.random.default_rng(2))
    words = np.random.default_rng(5).integers(0, 1 << 32, len(x), np.uint32, endpoint=False)
    modes = [(mode, 7) for mode in oracle.PROPORTIONAL] + [("stochastic_equal", None)]
    specs = [jc.Spec("hif8", mode, random_bits=n) for mode, n in modes]
    results = jax.jit(lambda x, word: [round_to_spec(x, spec, CARRIERS["float32"], word) for spec in specs])(x, words)
    for (mode, n), result in zip(modes, results, strict=True):
        for value, word, got in zip(x, words, np.asarray(result), strict=True):
            exact, n = oracle.from_bits(value.view(c.words), c), n or 1
            wanted = oracle.round_exact(oracle.HiFloat8Set(), exact, mode, n=n, r=int(word) >> 32 - n)
            assert wanted == oracle.from_bits(got.view(c.words), c), (mode, value)


def test_arrays_of_hif8_are_stored_and_sums_are_rounded_once() -> None:
    fmt, rng = jc.formats.HiFloat8Format(), np.random.default_rng(3)
    codes = np.arange(256)
    for carrier in ("float32", "float64"):
        with enable_x64_for(carrier):
            values, back = _both_ways(codes, fmt, carrier)  # type: ignore[arg-type]
            np.testing.assert_array_equal(np.asarray(values), fmt.decode(codes).astype(carrier))
            np.testing.assert_array_equal(np.asarray(back), codes)
    x = (rng.standard_normal((3, 20)) * 2.0 ** rng.uniform(-24, 17, (3, 20))).astype(np.float32)
    q = jc.quantize(x, "hif8:nearest_away")
    assert (q.qvalue.nbytes, q.qvalue.dtype) == (60, np.uint8)
    np.testing.assert_array_equal(jc.dequantize(q), jc.round_to_format(x, "hif8:nearest_away"))
    a, b = (rng.choice(fmt.values(), 200).astype(np.float32) for _ in range(2))
    sums = jax.jit(lambda a, b: [jc.math.add(a, b, "hif8"), jc.math.multiply(a, b, "hif8:nearest_away")])(a, b)
    for mode, name, result in zip(("nearest_even", "nearest_away"), ("add", "multiply"), sums, strict=True):
        for one, other, got in zip(a, b, np.asarray(result), strict=True):
            exact = getattr(oracle_arithmetic, name)(Fraction(float(one)), Fraction(float(other)))
            wanted = oracle.round_exact(oracle.HiFloat8Set(), exact, mode)
            assert wanted == oracle.from_bits(got.view(np.uint32), oracle.CARRIERS["float32"]), (name, one, other)


test_further = further.test()
