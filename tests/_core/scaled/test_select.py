"""Scaled elements in floating-point arithmetic beside the same in integers, bit for bit, under scales of any size."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from further import Further
from jax import lax

import jchop as jc
from jchop._common import bit_ops
from jchop._common.bit_ops import CARRIERS
from jchop._core import scaled_bodies
from jchop._core.rounding.codes import decode_elements, encode_elements, extend_exponent
from jchop._core.scaled import codebook_elements, elements, grid_elements, groups, zero_points
from jchop._core.scaled.elements import SAFE_EXPONENT, BlockScales, ScaledPlan, are_in_safe_range, make_scaled_plan
from jchop._core.xla.backend import PORTABLE
from jchop._spec.spec import Spec
from jchop.formats import ElementFormat, ScaledFormat

further = Further()

ROWS, ROW = 300, 64
SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38], np.float32)


def scales_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Positive float32 numbers, half of them near 1, the others of the whole range, subnormal ones included."""
    exponents = np.where(np.arange(rows) % 2, rng.integers(-149, 128, rows), rng.integers(-12, 12, rows))
    significands = np.where(rng.random(rows) < 0.2, rng.choice([1, 1.5, 2 - 2.0**-23], rows), 1 + rng.random(rows))
    numbers = np.minimum(np.ldexp(significands, exponents), np.finfo(np.float32).max)
    return np.maximum(numbers.astype(np.float32), np.float32(1e-45))


def near(points: np.ndarray, scales: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rows of points times scales, moved by up to two units in the last place; and what is no such number."""
    with np.errstate(all="ignore"):
        exact = points * scales[:, None].astype(np.float64)
        x = exact.astype(np.float32)
        others = (rng.normal(size=x.shape) * exact * rng.choice([1e-3, 1, 100], x.shape)).astype(np.float32)
    x = (
        (x.view(np.int32) + rng.integers(-2, 3, x.shape) * (rng.random(x.shape) < 0.7))
        .astype(np.int32)
        .view(np.float32)
    )
    which = rng.random(x.shape)
    x = np.where(which < 0.1, others, x)
    x = np.where(which > 0.97, rng.integers(0, 1 << 32, x.shape, np.uint32).view(np.float32), x)
    return np.where(np.abs(which - 0.5) < 0.02, rng.choice(SPECIAL, x.shape), x)


def words_of(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random words, some of them next to the ends, and to a half, where what is drawn decides about ties."""
    words = rng.integers(0, 1 << 32, shape, np.uint32)
    ends = np.array([0, 1, 2, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 1], np.uint32)
    return np.where(rng.random(shape) < 0.5, rng.choice(ends, shape), words)


def plan_of(element: ElementFormat, mode: str, scale: Any = "binary32", carrier: str = "float32") -> ScaledPlan:
    return plan_of_spec(Spec(ScaledFormat(element, ROW, scale=scale), rounding=mode), carrier)


def plan_of_spec(spec: Spec, carrier: str = "float32") -> ScaledPlan:
    return scaled_bodies.plan_to_encode(jnp.zeros(1), make_scaled_plan(spec, CARRIERS[carrier]), PORTABLE)


def fast_codes(x: jax.Array, scales: BlockScales, plan: ScaledPlan, words: jax.Array) -> jax.Array:
    return scaled_bodies.encode_groups(x, scales, plan, words)


def exact_codes(x: jax.Array, scales: BlockScales, plan: ScaledPlan, words: jax.Array) -> jax.Array:
    values = elements.round_block_quotients(x, scales, plan, words)
    return encode_elements(values, plan.element.format, plan.compute)


def exact_rounded(x: jax.Array, scales: BlockScales, plan: ScaledPlan, words: jax.Array) -> jax.Array:
    return elements.multiply_by_scales(elements.round_block_quotients(x, scales, plan, words), scales, plan)


def exact_numbers(codes: jax.Array, scales: BlockScales, plan: ScaledPlan) -> jax.Array:
    return elements.multiply_by_scales(decode_elements(codes, plan.element.format, plan.compute), scales, plan)


def assert_same(got: Any, expected: Any, x: np.ndarray, s: np.ndarray, what: str) -> None:
    got, expected = (np.asarray(value) for value in (got, expected))
    words = {2: np.uint16, 4: np.uint32}.get(got.dtype.itemsize, got.dtype)
    wrong = np.argwhere(got.view(words) != expected.view(words))
    where = tuple(wrong[0]) if len(wrong) else ()
    shown = [] if not where else [float(x[where]).hex(), float(s[where[0]]).hex(), got[where], expected[where]]
    assert not len(wrong), f"{what}: {len(wrong)} of {got.size} differ, as {shown}"


# -- integers ----------------------------------------------------------------------------------------------------------


def check_zero_points(bits: int, modes: tuple[str, ...], rows: int, seed: int) -> None:
    element, rng = jc.formats.IntegerFormat(bits, signed=False), np.random.default_rng(seed)
    plans = [plan_of(element, mode) for mode in modes]
    assert all(grid_elements.supports_integer_encode(plan) for plan in plans)
    far = rng.integers(-grid_elements.MOST_ZERO_POINT, grid_elements.MOST_ZERO_POINT + 1, rows)
    zero = np.where(rng.random(rows) < 0.2, far, rng.integers(0, 1 << bits, rows)).astype(np.int32)
    words = words_of(rng, (rows, ROW))

    @partial(jax.jit, static_argnames="moderate")
    def run(x: jax.Array, s: jax.Array, zero: jax.Array, words: jax.Array, moderate: bool) -> list[tuple[Any, Any]]:
        scales = BlockScales(lax.bitcast_convert_type(s, jnp.int32))
        known = [replace(plan, in_safe_range=moderate) for plan in plans]
        fast = [grid_elements.round_to_integers(x, scales, zero, plan, words).astype(jnp.int32) for plan in known]
        exact = [
            zero_points.clamp_to_ends(zero_points.round_with_zero_points(x, scales, zero, plan, words), plan)
            for plan in plans
        ]
        return list(zip(fast, exact, strict=True))

    for moderate in (False, True):
        s = scales_of(rng, rows)
        s = moderately(s) if moderate else s
        x = near(rng.integers(-4, 2 * (4 << bits), (rows, ROW)) / 4 - zero[:, None], s, rng)
        for mode, (fast, exact) in zip(modes, run(x, s[:, None], zero[:, None], words, moderate), strict=True):
            assert_same(fast, exact, x, s, f"{element} {mode} {moderate=}")


ALL_MODES = ("nearest_even", "nearest_away", "nearest_zero", "up", "down", "toward_zero", "odd")
ALL_MODES += ("stochastic", "stochastic_b", "stochastic_equal")


@pytest.mark.parametrize(
    ("bits", "modes", "rows"),
    [(8, ("odd",), ROWS), *(pytest.param(n, ALL_MODES, 20_000, marks=pytest.mark.slow) for n in (1, 4, 8))],
    ids=lambda value: str(len(value)) if isinstance(value, tuple) else str(value),
)
def test_zero_points(bits: int, modes: tuple[str, ...], rows: int) -> None:
    check_zero_points(bits, modes, rows, bits)


def check(plan: ScaledPlan, points: np.ndarray, rows: int, seed: int, tensor: float | None = None) -> None:
    """Codes of numbers near `points` under random scales, and numbers of every code, both ways in one function."""
    check_scales(plan, points, rows, np.random.default_rng(seed), tensor, False)
    if tensor is None and (grid_elements.supports_integer_encode(plan) or grid_elements.supports_float_encode(plan)):
        check_scales(plan, points, rows, np.random.default_rng(seed + 1), tensor, True)


def check_scales(
    plan: ScaledPlan, points: np.ndarray, rows: int, rng: np.random.Generator, tensor: float | None, moderate: bool
) -> None:
    fmt = plan.element.format
    s = scales_of(rng, rows)
    s = moderately(s) if moderate else s
    if plan.is_power:
        s = np.ldexp(1.0, np.frexp(np.maximum(s, np.float32(2.0**-127)))[1] - 1)
    elif plan.scale is not jc.formats.binary32:
        values = plan.scale.values()
        values = values[np.isfinite(values) & (values > 0)]
        s = rng.choice(moderately(values) if moderate else values, rows)
    whole = s.astype(np.float64) * (1 if tensor is None else np.float32(tensor))
    x = near(rng.choice(points, (rows, ROW)), whole, rng)
    codes = rng.integers(0, 1 << fmt.bits, x.shape).astype(fmt.code_dtype)

    @jax.jit
    def run(x: jax.Array, words: jax.Array, codes: jax.Array, s: jax.Array, tensor: jax.Array | None) -> Any:
        bits = lax.bitcast_convert_type(s, jnp.int32)
        value = (extend_exponent(bits, plan.compute) >> plan.compute.fraction) - plan.compute.bias
        scales = BlockScales(value if plan.is_power else bits, None, tensor)
        known = replace(plan, in_safe_range=moderate)
        coded = fast_codes(x, scales, known, words), exact_codes(x, scales, plan, words)
        rounded = scaled_bodies.round_groups(x, scales, known, words), exact_rounded(x, scales, plan, words)
        numbers = scaled_bodies.decode_groups(codes, scales, known), exact_numbers(codes, scales, plan)
        return jnp.all(are_in_safe_range(scales, plan)), (coded, rounded, numbers)

    word = None if tensor is None else np.full((rows, 1), np.float32(tensor).view(np.int32))
    inside, found = run(x, words_of(rng, x.shape), codes, s.astype(np.float32)[:, None], word)
    assert bool(inside) or not moderate
    for (fast, exact), data in zip(found, (x, x, codes), strict=True):
        assert_same(fast, exact, data, whole, f"{plan.fmt} in {plan.carrier.name} {moderate=}")


def moderately(scales: np.ndarray) -> np.ndarray:
    return np.clip(scales, 2.0**-SAFE_EXPONENT, 2.0**SAFE_EXPONENT).astype(scales.dtype)


def halves(fmt: ElementFormat) -> np.ndarray:
    """The values of a format, what lies halfway between them, and some beyond its ends."""
    values = np.unique(fmt.values()[np.isfinite(fmt.values())])
    return np.concatenate([values, (values[1:] + values[:-1]) / 2, values[[0, -1]] * 1.1, values[[0, -1]] * 2])


POWER = jc.formats.float8_e8m0fnu
#: Elements, modes, scale formats and carriers.
UNIFORM = [
    (jc.formats.IntegerFormat(8), "nearest_even", jc.formats.binary32, "float32"),
    (jc.formats.IntegerFormat(4, narrow=True), "toward_zero", jc.formats.bfloat16, "bfloat16"),
    (jc.formats.IntegerFormat(10, signed=False), "nearest_away", jc.formats.binary32, "float32"),
    (jc.formats.FixedFormat(2, 6, symmetric=True), "nearest_even", POWER, "float16"),
    (jc.formats.IntegerFormat(8), "down", POWER, "float32"),
    (jc.formats.IntegerFormat(8), "stochastic", jc.formats.binary32, "float32"),
    (jc.formats.IntegerFormat(4), "stochastic_equal", jc.formats.bfloat16, "float32"),
    (jc.formats.FixedFormat(2, 6, symmetric=True), "stochastic", POWER, "float32"),
]


@pytest.mark.parametrize("case", [UNIFORM[0], pytest.param(UNIFORM[1:], marks=pytest.mark.slow)], ids=["some", "all"])
def test_uniform(case: Any) -> None:
    for i, (element, mode, scale, carrier) in enumerate([case] if isinstance(case, tuple) else case):
        plan = plan_of(element, mode, scale, carrier)
        assert grid_elements.supports_integer_encode(plan) and grid_elements.supports_integer_decode(plan)
        check(plan, halves(element), ROWS if isinstance(case, tuple) else 20_000, i)


@pytest.mark.smoke
def test_integers_that_take_the_exact_way(rng: np.random.Generator) -> None:
    """A mode that first rounds to the random bits, of which there are few, to nearest."""
    spec = Spec(ScaledFormat(jc.formats.IntegerFormat(4), ROW), rounding="stochastic_c", random_bits=2)
    plan = plan_of_spec(spec)
    assert not grid_elements.supports_integer_encode(plan) and grid_elements.supports_integer_decode(plan)
    s, words = np.array([[1.0], [3.0]], np.float32), words_of(rng, (2, 64))
    x = (rng.integers(-64, 64, (2, 64)) / 8 * s).astype(np.float32)

    @jax.jit
    def run(x: jax.Array, words: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        scales = BlockScales(lax.bitcast_convert_type(s, jnp.int32))
        return scaled_bodies.round_groups(x, scales, plan, words), exact_rounded(x, scales, plan, words)

    got, expected = run(x, words, s)
    assert_same(got, expected, x, s[:, 0], "stochastic_c")


@pytest.mark.smoke
def test_products_are_rounded_once_to_a_narrow_carrier() -> None:
    """Products of 31 bits next to the middle of two numbers of binary16; binary32 would round them to the middle."""
    plan = plan_of(jc.formats.IntegerFormat(8), "nearest_even", carrier="float16")
    assert grid_elements.supports_integer_encode(plan) and not grid_elements.supports_integer_decode(plan)
    middle, counts = 64 + Fraction(1, 1 << 5), np.array([3, 7, 11, 13, 19])
    scales = np.nextafter((float(middle) / counts).astype(np.float32), np.float32(100))[:, None]
    products = [Fraction(float(s)) * int(count) - middle for s, count in zip(scales.ravel(), counts, strict=True)]
    assert any(0 < above < Fraction(1, 1 << 18) for above in products)
    expected = [64.0625 if above > 0 else 64.0 for above in products]
    x = np.full((len(counts), 1), 64, np.float32)

    @jax.jit
    def run(x: jax.Array, s: jax.Array) -> jax.Array:
        return scaled_bodies.round_groups(x, BlockScales(lax.bitcast_convert_type(s, jnp.int32)), plan, None)

    got = np.asarray(run(x, scales)).astype(np.float16)
    assert got.ravel().tolist() == expected


# -- floating-point elements -------------------------------------------------------------------------------------------


MINIFLOATS: list[tuple[ScaledFormat, str, float | None]] = [
    (jc.formats.mxfp8_e4m3, "float32", None),
    (jc.formats.nvfp4, "float32", 1.37e-5),
    (jc.formats.mxfp8_e5m2, "bfloat16", None),
    (jc.formats.mxfp6_e3m2, "float16", None),
    (jc.formats.mxfp4, "float32", None),
    (jc.formats.nvfp4, "float32", 1e-42),
    (jc.formats.nvfp4, "bfloat16", 3e37),
    (jc.formats.nvfp4(element="e5m2"), "float32", 1e-42),
    (jc.formats.mxfp8_e4m3(scale=jc.formats.binary32, rule="absmax"), "float32", None),
    (jc.formats.mxfp8_e5m2(scale=jc.formats.bfloat16, rule="absmax"), "float32", None),
]


@pytest.mark.parametrize(
    "cases", [MINIFLOATS[:1], pytest.param(MINIFLOATS[1:], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_minifloats(cases: list[tuple[ScaledFormat, str, float | None]]) -> None:
    for i, (fmt, carrier, tensor) in enumerate(cases):
        plan = plan_of_spec(Spec(fmt), carrier)
        assert grid_elements.supports_float_encode(plan)
        assert grid_elements.supports_float_decode(plan) or carrier != "float32"
        check(plan, halves(fmt.element), ROWS if len(cases) == 1 else 10_000, i, tensor)


def test_products_of_as_many_bits_as_the_carrier_has() -> None:
    """What float32 holds exactly is rounded once, to 16 bits; products with a bit more would be rounded twice."""
    for bits, exact in ((15, True), (16, False)):
        fmt = ScaledFormat("e4m7", ROW, scale=f"e5m{bits}")
        assert grid_elements.supports_float_decode(make_scaled_plan(Spec(fmt), CARRIERS["bfloat16"])) is exact


# -- codebooks ---------------------------------------------------------------------------------------------------------


def check_levels(fmt: jc.formats.CodebookFormat, mode: str, rows: int, carrier: str = "float32") -> None:
    plan = plan_of(fmt, mode, carrier=carrier)
    assert codebook_elements.supports_threshold_encode(plan) and codebook_elements.has_level_products(plan)
    check(plan, halves(fmt), rows, rows)


LEVEL_MODES = ("nearest_even", "nearest_away", "nearest_zero", "up", "down", "toward_zero", "odd")


@pytest.mark.parametrize(
    ("mode", "rows"),
    [("nearest_even", ROWS), *(pytest.param(mode, 10_000, marks=pytest.mark.slow) for mode in LEVEL_MODES)],
)
def test_levels(mode: str, rows: int) -> None:
    nf4 = jc.formats.nf4.element
    assert isinstance(nf4, jc.formats.CodebookFormat)
    check_levels(nf4, mode, rows)
    if rows > ROWS:
        check_levels(jc.formats.CodebookFormat((-1, -0.5, 0, 0.25, 0.75)), mode, 2_000, "bfloat16")


@further
def the_largest_number_reaches_thresholds_beyond_it() -> None:
    """The largest scale times a threshold below -1 overflows: the largest negative number is above it, -inf below."""
    fmt, most = jc.formats.CodebookFormat((-8, -6, -3, 0, 1)), np.finfo(np.float32).max
    plan = plan_of(fmt, "nearest_even")
    assert codebook_elements.supports_threshold_encode(plan)
    s = BlockScales(lax.bitcast_convert_type(jnp.full((1, 1), most), jnp.int32))
    codes = codebook_elements.encode_by_thresholds(jnp.asarray([[-most, most, -np.inf, np.inf]], jnp.float32), s, plan)
    assert [fmt.levels[code] for code in np.asarray(codes)[0]] == [0, 1, -8, 1]


def test_levels_with_too_many_bits_take_the_exact_way() -> None:
    close = jc.formats.CodebookFormat((0, 1, float(1 + Fraction(1, 1 << 23)), 1000.0))
    assert codebook_elements.supports_threshold_encode(plan_of(close, "up"))
    assert not codebook_elements.supports_threshold_encode(plan_of(close, "nearest_even"))


# -- codebooks of many levels ------------------------------------------------------------------------------------------


def element_of(fmt: jc.formats.ScaledFormat) -> jc.formats.CodebookFormat:
    assert isinstance(fmt.element, jc.formats.CodebookFormat)
    return fmt.element


#: Some levels that are numbers of few bits, so that numbers lie on the middles between them; the last has no zero.
EVEN = jc.formats.CodebookFormat(tuple(i / 32 for i in range(-40, 30)))
POSITIVE = jc.formats.CodebookFormat(tuple(i / 64 for i in range(1, 65)))


def check_many_levels(fmt: jc.formats.CodebookFormat, mode: str, rows: int, scale: Any = jc.formats.binary32) -> None:
    plan = plan_of(fmt, mode, scale)
    assert codebook_elements.supports_codebook_encode(plan) and codebook_elements.supports_codebook_decode(plan)
    check(plan, halves(fmt), rows, rows)


@pytest.mark.parametrize(
    ("mode", "rows"),
    [("nearest_even", 300), *(pytest.param(mode, 3_000, marks=pytest.mark.slow) for mode in LEVEL_MODES[1:-1])],
)
def test_many_levels(mode: str, rows: int) -> None:
    for fmt in (element_of(jc.formats.dynamic8), EVEN)[: 1 if rows == 300 else 2]:
        check_many_levels(fmt, mode, rows)


@pytest.mark.in_turn(64)
@pytest.mark.parametrize("name", ["dynamic8", "udynamic8", "udynamic8nz"])
def test_many_levels_beside_rationals(name: str) -> None:
    """Not beside the exact way of this package but beside an oracle that knows nothing of it."""
    fmt, rng = element_of(getattr(jc.formats, name)), np.random.default_rng(9)
    plan, blocks = plan_of(fmt, "nearest_even"), oracle.codebook(fmt.levels)
    s = scales_of(rng, 12)
    x = near(rng.choice(halves(fmt), (12, ROW)), s.astype(np.float64), rng)

    @jax.jit
    def run(x: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        scales = BlockScales(lax.bitcast_convert_type(s, jnp.int32))
        codes = codebook_elements.encode_codebook(x, scales, plan)
        return codes, codebook_elements.decode_codebook(codes, scales, plan)

    expected, carrier = [], oracle.CARRIERS["float32"]
    for value, scale in zip(x.ravel().tolist(), np.repeat(s, ROW).tolist(), strict=True):
        if np.isnan(value):
            expected.append(Fraction(fmt.levels[-1]))
            continue
        quotient = Fraction(value) / Fraction(scale) if np.isfinite(value) else Fraction(np.sign(value)) * 2**200
        expected.append(oracle.round_exact(blocks, quotient, "nearest_even", "saturate"))
    products = [v * Fraction(c) for v, c in zip(expected, np.repeat(s, ROW).tolist(), strict=True)]
    rounded = [oracle.round_exact(oracle.ieee(8, 23), v, "nearest_even", "ieee") for v in products]
    codes, numbers = (np.asarray(part) for part in run(x, s[:, None]))
    assert [fmt.levels[code] for code in codes.ravel()] == expected
    assert cases.bits(numbers).ravel().tolist() == [oracle.to_bits(v, carrier) for v in rounded]


@pytest.mark.parametrize(
    ("fmt", "scale", "rows"),
    [
        (POSITIVE, jc.formats.binary32, 300),
        *(
            pytest.param(fmt, scale, rows, marks=pytest.mark.slow)
            for fmt, scale, rows in (
                (element_of(jc.formats.dynamic8), jc.formats.binary32, 30_000),
                (element_of(jc.formats.udynamic8), jc.formats.binary32, 30_000),
                (EVEN, POWER, 3_000),
                (EVEN, jc.formats.bfloat16, 3_000),
                (POSITIVE, jc.formats.binary32, 3_000),
            )
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_many_levels_and_many_numbers(fmt: jc.formats.CodebookFormat, scale: Any, rows: int) -> None:
    check_many_levels(fmt, "nearest_even", rows, scale)


def test_ties_of_many_levels() -> None:
    """Numbers on the middles of levels and next to them, on both sides of zero, where a mode decides by the sign."""
    for mode in ("nearest_away", "nearest_zero", "toward_zero"):
        check_ties(mode)


def check_ties(mode: str) -> None:
    levels, scale = oracle.codebook(EVEN.levels), np.array([[1.0], [3.0]], np.float32)
    points = np.unique(np.concatenate([np.arange(-82, 62) / 64, np.nextafter(np.float32(5 / 64), [0, 1])]))
    x = (points * scale).astype(np.float32)
    plan = plan_of(EVEN, mode)
    assert codebook_elements.supports_codebook_encode(plan)
    codes = jax.jit(
        lambda x, s: codebook_elements.encode_codebook(x, BlockScales(lax.bitcast_convert_type(s, jnp.int32)), plan)
    )(x, scale)
    expected = [
        [oracle.round_exact(levels, Fraction(v) / int(s), mode, "saturate") for v in row.tolist()]
        for row, (s,) in zip(x, scale, strict=True)
    ]
    assert [[EVEN.levels[code] for code in row] for row in np.asarray(codes)] == expected, mode


def test_many_levels_that_take_the_exact_way() -> None:
    fmt = element_of(jc.formats.dynamic8)
    close = jc.formats.CodebookFormat((*(i / 64 for i in range(60)), 1 + 2.0**-20, 1 + 2.0**-19, 2.0))
    wide = jc.formats.CodebookFormat((*(i / 64 for i in range(60)), 1 - 2.0**-24, 7.0))  # a middle of 27 bits
    for plan in (plan_of(fmt, "odd"), plan_of(fmt, "stochastic"), plan_of(close, "up"), plan_of(wide, "nearest_even")):
        assert not codebook_elements.supports_codebook_encode(plan)
    assert not codebook_elements.supports_codebook_decode(plan_of(fmt, "nearest_even", carrier="bfloat16"))


# -- groups ------------------------------------------------------------------------------------------------------------


@further.first
def codes_are_packed_beside_their_groups() -> None:
    assert groups.Groups((2, 256), (1, 64)).byte_groups(4) == groups.Groups((2, 128), (1, 32))
    assert groups.Groups((2, 256), (1, 2)).byte_groups(4) is None  # a byte for each group
    assert groups.Groups((2, 250), (1, 64)).byte_groups(4) is None
    assert groups.Groups((2, 256), (2, 1)).byte_groups(4) is None


def test_bits_of_a_number_below_the_normal_range() -> None:
    """What moves tiny scales keeps subnormal numbers, which arithmetic may read as zeros."""
    tiny = np.array([1e-45, -3e-42, 1.1e-38, 0.0], np.float32)
    move = jax.jit(
        lambda x, s: grid_elements.move_with_quanta(
            x, grid_elements.quanta_of_bits(extend_exponent(s, CARRIERS["float32"]))
        )
    )
    moved = move(tiny, np.array([1], np.int32))
    expected = [float(v) * 2.0**100 for v in tiny]
    assert np.asarray(moved).tolist() == expected
    assert bit_ops.CARRIERS["float32"].tiny_exponent == -149


test_further = further.test()
