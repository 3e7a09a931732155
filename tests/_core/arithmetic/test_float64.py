"""Quotients and roots in float64 against the integer arithmetic of `operations.round_operation`, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from math import isqrt

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from further import Further

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic import float64
from jchop._core.arithmetic.exact import ValueRange, range_of
from jchop._core.matmul.operations import OPERAND_COUNTS, round_operation
from jchop._kernels.operation import operation_on_device
from jchop.formats import FloatFormat

further = Further()

CARRIER = CARRIERS["float32"]
COUNT = 1 << 12
SPECIAL = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan], np.float32)
SPECS = [
    "bfloat16",
    "bfloat16:saturate",
    "binary16",
    "e4m3",
    "float8_e4m3fn",
    "e5m2:saturate",
    "bfloat16:stochastic",
    "bfloat16:stochastic:random_bits=5",
    "float8_e4m3fn:stochastic",
    "e4m3:stochastic_b",
]


def operands(spec: jc.Spec, rng: np.random.Generator) -> list[np.ndarray]:
    """Pairs of numbers of the format: of all exponents, near 1, squares, and special ones."""
    plain = replace(spec, rounding=jc.Rounding.TOWARD_ZERO, random_bits=None)
    sides = []
    for _ in range(2):
        wide = np.ldexp(rng.uniform(-2, 2, COUNT), rng.integers(-150, 128, COUNT))
        near = rng.integers(-300, 300, COUNT) * np.exp2(rng.integers(-3, 3, COUNT))
        sides.append(np.where(rng.random(COUNT) < 0.5, wide, near).astype(np.float32))
    sides[0][: COUNT // 4] = np.square(sides[0][: COUNT // 4] % 16)
    for side, special in zip(sides, (np.repeat(SPECIAL, 7), np.tile(SPECIAL, 7)), strict=True):
        side[:49] = special
    return [np.array(jc.round_to_format(side, plain)) for side in sides]


def words(name: str, spec: jc.Spec, args: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Random words; for half of the elements the least word that rounds away from zero, or one beside it."""
    fmt = spec.format
    assert isinstance(fmt, FloatFormat)
    drawn = rng.integers(0, 1 << 32, COUNT, dtype=np.uint32)
    with np.errstate(all="ignore"):
        x, y = (np.abs(arg.astype(np.float64)) for arg in args)
        exact = np.nan_to_num(x / y if name == "div" else np.sqrt(x), posinf=1.0)
    _, exponent = np.frexp(exact)
    place = np.exp2(np.maximum(exponent - 1, fmt.emin) - fmt.frac_bits, dtype=np.float64)
    share = exact / place % 1
    least = np.ceil((1 - share) * 2.0**32).astype(np.int64) + rng.integers(-1, 2, COUNT)
    return np.where(np.arange(COUNT) % 2, drawn, np.clip(least, 0, (1 << 32) - 1).astype(np.uint32))


@further
@pytest.mark.in_turn(5)
@pytest.mark.parametrize(
    ("text", "name"),
    [*zip(SPECS, itertools.cycle(["div", "sqrt"])), ("bfloat16", "sqrt"), ("bfloat16:stochastic", "sqrt"),
     ("bfloat16:stochastic:random_bits=5", "div"), ("e4m3:stochastic_b", "div"), ("binary16", "sqrt")],
)  # fmt: skip
def the_bits_are_those_of_integers(text: str, name: str, rng: np.random.Generator) -> None:
    spec = jc.Spec(text)
    known = (range_of(spec, CARRIER),) * OPERAND_COUNTS[name]
    assert float64.supports_float64_operation(name, spec, known)
    both = operands(spec, rng)
    word = [words(name, spec, both, rng)] if spec.rounding.stochastic else []
    args = [*map(jnp.asarray, both[: OPERAND_COUNTS[name]]), *map(jnp.asarray, word)]
    want = np.array(jax.jit(lambda *a: round_operation(name, a[: len(known)], spec, *a[len(known) :]))(*args))
    on_device = jax.jit(lambda *a: operation_on_device(name, a[: len(known)], spec, *a[len(known) :]))
    got = np.array(on_device(*args))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got.view(np.int32)[~np.isnan(want)], want.view(np.int32)[~np.isnan(want)])
    assert len(np.unique(want)) > 100 or spec.format.bits <= 8
    assert "f64" in on_device.lower(*args).as_text() or jax.default_backend() != "cpu"


#: The most fraction bits that each operation takes, to nearest and stochastically.
WIDEST = {("div", ""): 20, ("sqrt", ""): 19, ("div", ":stochastic"): 9, ("sqrt", ":stochastic"): 17}


def hard_operands(name: str, bits: int, drawn: bool, rng: np.random.Generator) -> list[list[int]]:
    """Integers of so many bits, times a power of two, whose quotient or root lies next to a middle of two numbers.

    For a stochastic rounding it is the word that makes quotients hard; roots are just above and just below a point that
    a word stands for, in turn.
    """
    whole = rng.integers(1 << bits - 1, 1 << bits, (200, 2)) | 1
    if name == "sqrt" and drawn:
        squares = [x << bits for x in range((1 << bits) - 4000, 1 << bits)]
        squares.sort(key=lambda x: isqrt(x << 2 * (32 + 8)) & 255)
        return [[x for pair in zip(squares[:60], reversed(squares), strict=False) for x in pair]]
    if name == "sqrt":
        return [cases.near_middles_of_roots(bits)]
    x, y = whole.T.tolist()
    if not drawn:  # x = (y g -+ 1) / 2^(bits + 1), for an odd g of one bit more
        half = 1 << bits
        odd = [g if g > half else 2 * half - g for g in (pow(v, -1, 2 * half) for v in y)]
        x = [(v * g + 1) // (2 * half) for v, g in zip(y, odd, strict=True)]
    return [x, y]


@pytest.mark.parametrize(("name", "mode"), WIDEST)
def test_the_widest_formats_at_their_hardest_numbers(name: str, mode: str, rng: np.random.Generator) -> None:
    """Beside middles of two numbers; and under the least random word that rounds up, or the one before."""
    frac = WIDEST[name, mode]
    spec, wider = (jc.Spec(f"e8m{bits}{mode}") for bits in (frac, frac + 1))
    known = [(range_of(each, CARRIER),) * OPERAND_COUNTS[name] for each in (spec, wider)]
    assert float64.supports_float64_operation(name, spec, known[0]) and not float64.supports_float64_operation(
        name, wider, known[1]
    )
    args = hard_operands(name, frac + 1, bool(mode), rng)
    word, want = [], []
    for x, *others in zip(*args, strict=True):
        # 2^32 units in the last place of the result are cut to an integer; a random word is added to its lower half.
        if others:
            lag = 32 + frac + (x < others[0])
            count = (x << lag) // others[0]
        else:
            lag = 33 + frac - (x.bit_length() + 1) // 2
            count = isqrt(x << 2 * lag)
        low, share = divmod(count, 1 << 32)
        least = min((1 << 32) - share, (1 << 32) - 1)  # that rounds up, or the one before
        word.append(least - len(word) % 2 if mode else 1 << 31)
        want.append(np.ldexp(low + (share + word[-1] >= 1 << 32), 32 - lag))
    sides = [np.array(side, np.float32) for side in args]
    if name == "div":
        signs = [rng.choice(np.array([-1, 1], np.float32), len(want)) for _ in sides]
        sides, want = [x * sign for x, sign in zip(sides, signs, strict=True)], want * signs[0] * signs[1]
    # Zeros, infinities and NaN, and numbers with an exact result, have that of IEEE 754.
    special = [np.repeat(SPECIAL, 7), np.tile(SPECIAL, 7)][: len(sides)]
    with np.errstate(all="ignore"):
        exact = np.divide(*special) if name == "div" else np.sqrt(*special)
    sides = [np.concatenate(pair) for pair in zip(sides, special, strict=True)]
    drawn = [np.concatenate([np.array(word, np.uint32), np.full(49, 1 << 30, np.uint32)])] * bool(mode)
    run = jax.jit(lambda *a: operation_on_device(name, a[: len(args)], spec, *a[len(args) :]))
    want = np.concatenate([np.array(want, np.float32), exact])
    assert not len(cases.differences(np.asarray(run(*sides, *drawn)), cases.bits(want), oracle.CARRIERS["float32"]))


@pytest.mark.parametrize(
    ("name", "text"), [("div", "bfloat16"), ("div", "e5m7:saturate"), ("div", "e4m3fn"), ("sqrt", "e8m17")]
)
def test_results_of_every_magnitude(name: str, text: str, rng: np.random.Generator) -> None:
    """Subnormal ones and those that overflow among them, of operands that may be subnormal."""
    spec, low = jc.Spec(text), jc.Spec(f"{text}:toward_zero")
    fmt = spec.format
    assert isinstance(fmt, FloatFormat)
    exponents = rng.integers(fmt.emin - fmt.frac_bits - 1, fmt.emax + 1, (2, 300))
    both = np.ldexp(rng.uniform(-2, 2, (2, 300)), exponents).astype(np.float32)
    args = [np.array(jc.round_to_format(x if name == "div" else abs(x), low)) for x in both[: OPERAND_COUNTS[name]]]
    kept = np.all([np.isfinite(x) & (x != 0) for x in args], 0)
    args = [np.append(x[kept], np.float32(end)) for x, end in zip(args, (fmt.max, 1), strict=False)]
    got = jax.jit(lambda *a: operation_on_device(name, a, spec))(*args)
    exact = [Fraction(float(x)) for x in args[0]]
    if name == "div":
        exact = [x / Fraction(float(y)) for x, y in zip(exact, args[1], strict=True)]
    else:  # 2^200 times as large, cut; and a half if that is not all
        counts = [int(x * 4**200) for x in exact]
        exact = [Fraction(2 * isqrt(n) + (isqrt(n) ** 2 != n), 2**201) for n in counts]
    carrier = oracle.CARRIERS["float32"]
    how = oracle.describe(fmt), "nearest_even", spec.overflow.value
    want = [oracle.to_bits(oracle.round_exact(how[0], v, *how[1:]), carrier) for v in exact]
    assert not len(cases.differences(np.asarray(got), np.array(want, np.uint32), carrier))
    assert len(exact) > 100


def test_others_are_refused() -> None:
    for name, text in (
        ("add", "bfloat16"),
        ("div", "bfloat16:up"),
        ("div", "bfloat16:flush"),
        ("div", "bfloat16:stochastic_c"),
        ("div", "binary16:stochastic"),
        ("div", "tf32:stochastic"),
        ("sqrt", "e8m18:stochastic"),
        ("sqrt", "binary32"),
        ("div", "posit8"),
    ):
        spec = jc.Spec(text)
        assert not float64.supports_float64_operation(name, spec, (range_of(spec, CARRIER),) * OPERAND_COUNTS[name]), (
            name,
            text,
        )


@further.first
def operands_may_have_more_bits_than_the_format() -> None:
    spec, whole = jc.Spec("e4m3"), ValueRange(-149, 24, 128)
    assert float64.supports_float64_operation("div", spec, (ValueRange(-20, 19, 20), ValueRange(-20, 19, 20)))
    assert not float64.supports_float64_operation("div", spec, (whole, whole))
    narrow = range_of(spec, CARRIER)
    assert not float64.supports_float64_operation(
        "div", spec, (narrow, whole)
    ) and not float64.supports_float64_operation("div", spec, (whole, narrow))
    assert float64.supports_float64_operation("sqrt", spec, (whole,))


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("divisor", "text"),
    [*zip(["127", "123", "255/2", "6", "448", "3/4"], itertools.cycle(["binary32", "bfloat16", "e4m3"])),
     ("255/2", "binary32"), ("6", "e4m3")],
)  # fmt: skip
def test_quotients_by_a_constant_are_rounded_once(divisor: str, text: str, rng: np.random.Generator) -> None:
    """At products of the divisor and the middles of numbers of the format, beside them, and for small numbers."""
    over, fmt = Fraction(divisor), jc.Spec(text).format
    assert isinstance(fmt, FloatFormat) and float64.can_divide_in_float64(over.numerator.bit_length(), fmt)
    odd = 2 * rng.integers(0, 1 << fmt.frac_bits, 200) + 1
    units = np.concatenate([np.full(50, fmt.emin - fmt.frac_bits), rng.integers(fmt.emin, fmt.emax - 1, 150)]) - 1
    with np.errstate(over="ignore"):
        middles = (odd * float(over) * np.exp2(units - fmt.frac_bits * (np.arange(200) > 49))).astype(np.float32)
    near = middles[middles < np.inf].view(np.int32)[:, None] + np.arange(-1, 2)
    magnitudes = np.concatenate([np.maximum(near, 0).ravel(), np.arange(500), rng.integers(0, 255 << 23, 100)])
    known, x = oracle.describe(fmt), magnitudes.astype(np.int32)
    exact = [Fraction(float(v)) / over for v in x.view(np.float32)]
    inside = np.array([v <= oracle.largest(known) for v in exact])
    want = [float(oracle.round_exact(known, v, "nearest_even")) for v in np.array(exact)[inside]]  # type: ignore[arg-type]
    assert inside.sum() > 500
    for found in (float64.quotient_bits, float64.quotient_in_float64):
        got = np.asarray(jax.jit(lambda x, found=found: found(x, over, fmt))(x))
        got = (got.view(np.float32) if got.dtype == np.int32 else got)[inside]
        np.testing.assert_array_equal(got.astype(np.float64), want)


test_further = further.test()
