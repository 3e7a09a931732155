"""Scaled blocks against exact rationals, bit for bit: scales, elements, and the numbers that they stand for."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_scaled
import pytest
from cases_scaled import adversarial, blocks, integer_groups, moved, mx, nvfp4, value_of, values_of
from further import Further
from oracle import CARRIERS, Special
from oracle_scaled import Blocks

import jchop as jc
from jchop._common import bit_ops
from jchop._core.rounding.codes import unpack_codes
from jchop._core.rounding.random_bits import seed_words
from jchop._core.scaled import elements as chosen
from jchop._core.scaled.elements import (
    BlockScales,
    ScaledPlan,
    choose_scales,
    make_scaled_plan,
    multiply_by_power,
    multiply_by_scales,
    narrow_16_bit,
    round_block_quotients,
    scale_magnitude,
    store_scales,
    tensor_scale,
    widen_16_bit,
)
from jchop._core.scaled_bodies import dequantize_body, quantize_body, round_body
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat, ScaledFormat

further = Further()

DATA = pathlib.Path(__file__).parents[2] / "data"
KEY = 5
POWERS = ("floor", "ceil", "even", "rceil")


def format_of(spec: Spec) -> ScaledFormat:
    assert spec.scaled is not None
    return spec.scaled


def scale_of(spec: Spec) -> FloatFormat:
    return format_of(spec).scale_format


def size_of(spec: Spec) -> int:
    size = format_of(spec).group
    assert isinstance(size, int)
    return size


def changed(spec: Spec, **fields: Any) -> Spec:
    """Other blocks of the same elements."""
    return replace(spec, format=format_of(spec)(**fields))


def plan_of(spec: Spec, dtype: str) -> ScaledPlan:
    return make_scaled_plan(spec, bit_ops.CARRIERS[dtype])


def blocks_of(spec: Spec) -> Blocks:
    return Blocks(
        oracle.describe(spec.element),
        oracle.describe(scale_of(spec)),  # type: ignore[arg-type]
        format_of(spec).rule,
        spec.rounding.value,
        spec.overflow.value,
        format_of(spec).nan_block,
        spec.flush,
    )


def every_way(x: np.ndarray, *arrays: Any, spec: Spec) -> dict[str, np.ndarray]:
    """Rounded, quantized, and dequantized again, in one compiled function; 64-bit data stays so."""
    size, plan, stores = x.shape[-1], plan_of(spec, x.dtype.name), spec.element.bits <= 8

    @jax.jit
    def run(x: jax.Array, *arrays: jax.Array) -> dict[str, jax.Array]:
        result = {"rounded": round_body(x, *arrays, plan=plan)}
        if stores:
            codes, scales, *tensor = quantize_body(x, *arrays, plan=plan)
            back = dequantize_body(codes, scales, *tensor, plan=plan, shape=x.shape)
            unpacked = unpack_codes(codes, spec.element.bits, size)
            result |= {"codes": unpacked, "scales": scales, "dequantized": back}
        return result

    with jax.enable_x64(x.dtype.itemsize == 8):
        return {name: np.asarray(value) for name, value in run(x, *arrays).items()}


def drawn(spec: Spec, x: np.ndarray) -> tuple[list[jax.Array], int, np.ndarray]:
    """The seeds that a stochastic element takes, how many bits it draws, and the draws."""
    if not spec.rounding.stochastic:
        return [], 1, np.zeros(x.shape, object)
    width = 64 if x.dtype.itemsize == 8 else 32
    key = jax.random.key(KEY)
    with jax.enable_x64(True):
        words = np.asarray(jc.random_bits(key, x.shape, width=width))
    looks_further = spec.rounding.value in ("stochastic_b", "stochastic_c")
    bits = spec.random_bits or width - looks_further
    return list(seed_words(key)), bits, words.astype(object) >> width - bits


def check(spec: Spec, dtype: str, count: int) -> None:
    """Bodies against the oracle, on adversarial blocks along the last axis or the first of two."""
    carrier, rules, fmt = CARRIERS[dtype], blocks_of(spec), spec.element
    x = adversarial(fmt, size_of(spec), dtype, count, np.random.default_rng(count))
    x = x if format_of(spec).axis == -1 else np.ascontiguousarray(x.T)
    seeds, n, draws = drawn(spec, x)
    tensor = Fraction(1)
    if format_of(spec).scale_rule.tensor_scale:
        tensor = oracle_scaled.tensor_scale(values_of(x.ravel()), rules)
        with jax.enable_x64(x.dtype.itemsize == 8):
            plan = plan_of(spec, dtype)
            got = tensor_scale(widen_16_bit(jnp.asarray(x), plan.carrier), plan)
        assert Fraction(float(got)) == tensor
    results = every_way(x, *seeds, spec=spec)
    if format_of(spec).axis != -1:
        x, draws = x.T, draws.T
        results = {name: value.T for name, value in results.items()}
    for i in range(count):
        expected = oracle_scaled.quantize(values_of(x[i]), rules, carrier, tensor, n, draws[i].tolist())
        numbers = np.array([oracle.to_bits(value, carrier) for value in expected.numbers], carrier.words)
        what = f"{spec} in {dtype}, block {i}, {x[i]}"
        cases.assert_bits(np.ascontiguousarray(x[i]), np.ascontiguousarray(results["rounded"][i]), numbers, what)
        if "codes" in results:
            scale = results["scales"][i, 0]
            stored = scale_of(spec).decode(scale) if scale.dtype.kind == "u" else scale
            assert value_of(stored) == expected.scale, what
            if expected.elements:
                elements = fmt.decode(results["codes"][i])
                assert [value_of(e) for e in elements] == expected.elements, what
    if "codes" in results:
        np.testing.assert_array_equal(cases.bits(results["dequantized"]), cases.bits(results["rounded"]))


NF4 = f"codebook({','.join(map(repr, cases.CODEBOOKS['nf4']))})"
#: More levels than are all compared, unevenly spaced.
TABLE = f"codebook({','.join(repr(i * abs(i) / 1024) for i in range(-30, 33))})"

#: One of each kind of element, rule, scale format, carrier and axis; the slow test has them all.
SOME: list[tuple[Spec, str]] = [
    (mx("e4m3fn", block=8), "float32"),
    (mx("e2m1fn", rule="even", block=8, axis=-2), "bfloat16"),
    (mx("e3m2fn", rule="rceil", block=8), "float16"),
    (mx("e2m3fn", rule="ceil", block=8), "float64"),
    (mx("integer8", block=8), "float32"),
    (nvfp4(), "float32"),
    (nvfp4(axis=-2), "float64"),
    (changed(nvfp4(two_level=False), group=8), "bfloat16"),
    (integer_groups(4, 8), "float32"),
    (integer_groups(4, 8, scale="bfloat16", rule="half_range"), "bfloat16"),
    (integer_groups(8, 8, rule="no_clip", axis=-2), "float32"),
    (integer_groups(4, 8), "float64"),
    (blocks("e5m2", 8, scale="e8m0fnu", rule="absmax", nan_block=True), "float32"),
    (blocks("integer4:stochastic", 8, -2, scale="float32", rule="absmax"), "float32"),
    (blocks("e2m1fn:stochastic_c:random_bits=7", 8), "bfloat16"),
    (blocks(NF4, 8, scale="float32", rule="absmax"), "float32"),
    (blocks(f"{NF4}:odd", 8, scale="float32", rule="absmax"), "float32"),
]
POWER_ELEMENTS = ("e4m3fn", "e5m2", "e3m2fn", "e2m3fn", "e2m1fn", "integer8", "integer4", "binary8p3se")
SCALES = ("float32", "bfloat16", "float16", "e4m3fn")
MORE: list[Spec] = [
    # Two rules for each element, and so each rule for four of them.
    *(
        mx(element, rule=POWERS[(i + i // 4 + 2 * j) % 4], block=8)
        for i, element in enumerate(POWER_ELEMENTS)
        for j in range(2)
    ),
    # Every pair of a rule and a scale format, the lengths of integers in turn.
    *(
        integer_groups((2, 4, 8)[(i + j) % 3], 8, scale=scale, rule=rule)
        for i, scale in enumerate(SCALES)
        for j, rule in enumerate(("absmax", "half_range", "no_clip"))
    ),
    *(
        blocks(f"{element}:{mode}", 8, scale=scale, rule="absmax")
        for element, scale, modes in (
            ("e4m3fn", "float32", ("nearest_away", "nearest_zero", "up", "down", "toward_zero", "odd")),
            ("integer8", "e8m0fnu", ("nearest_zero", "up", "odd")),
            ("e3m2fn", "bfloat16", ("nearest_away", "down", "toward_zero")),
        )
        for mode in modes
    ),
    *(
        blocks(f"e4m3fn:{mode}", 8, scale=("float32", "e8m0fnu")[i % 2], rule=("absmax", "floor")[i % 2])
        for i, mode in enumerate(
            ("stochastic", "stochastic_b", "stochastic_c", "stochastic_equal", "stochastic_c:random_bits=5")
        )
    ),
    *(
        blocks(f"e5m2:{rule}", 8, scale="bfloat16", rule="absmax", nan_block=nan)
        for rule, nan in (("ieee", False), ("ieee", True), ("saturate", True), ("propagate", False))
    ),
    nvfp4(),
    nvfp4(two_level=False),
    blocks("e4m3fn:saturate", 8, scale="e2m3(subnormals=false)", rule="two_level"),
    blocks("integer4", 8, scale="e4m3fn", rule="two_level"),
    blocks("e5m2:flush:saturate", 8),
    blocks("float8_e4m3fnuz", 8),
    blocks("binary16:down", 8, scale="float32", rule="absmax"),
    blocks("codebook(-1,-0.5,0,0.25,1)", 8, scale="e8m0fnu", rule="absmax"),
    *(
        blocks(f"{NF4}:{mode}", 8, scale="float32", rule="absmax")
        for mode in ("nearest_even", "nearest_away", "up", "toward_zero", "odd")
    ),
    blocks(TABLE, 8, scale="bfloat16", rule="absmax"),
    blocks(f"{TABLE}:odd", 8, scale="bfloat16", rule="absmax"),
    blocks("codebook(-1,0,1,2):odd", 8, scale="float32", rule="absmax"),
    blocks("uinteger4", 8, scale="float32", rule="absmax"),
    blocks("e4m3fn:saturate", 8, scale="e4m3fn", rule="floor"),
    blocks("integer8(narrow=true)", 8, scale="float32", rule="floor"),
]


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("spec", "dtype"), SOME, ids=lambda value: str(value))
def against_exact_rationals(spec, dtype):
    check(spec, dtype, 30)


#: By default one, with few blocks; else two at a time.
ALL = [(1, 8), *(pytest.param(first, 80, marks=pytest.mark.slow) for first in range(0, len(MORE), 2))]


@pytest.mark.parametrize(("first", "count"), ALL)
def test_all_against_exact_rationals(first, count):
    """The carriers in turn, so that every kind, rule and mode meets all of them."""
    for number, spec in list(enumerate(MORE))[first : first + (2 if count > 8 else 1)]:
        check(spec, list(CARRIERS)[(number + number // 4) % 4], count)


# -- scales ------------------------------------------------------------------------------------------------------------

EXPONENTS = range(-149, 128)


@pytest.mark.in_turn(16)
@pytest.mark.parametrize(
    "spec",
    [
        *(mx(("e2m1fn", "int8")[i % 2], rule=rule, block=2) for i, rule in enumerate((*POWERS, "ceil"))),
        *(blocks("e4m3fn", 2, scale=scale, rule="absmax") for scale in ("e8m0fnu", "float32", "e4m3fn")),
    ],
    ids=str,
)
def test_scales_of_every_exponent(spec):
    """The largest magnitude 2^k and its neighbours, for every k of float32: the stored scale is the exact rule's."""
    powers = np.ldexp(np.float32(1), np.array(EXPONENTS)).astype(np.float32)
    largest = np.unique(np.concatenate([moved(powers, i) for i in (-1, 0, 1)]))
    plan, rules = plan_of(spec, "float32"), blocks_of(spec)
    blocks = np.stack([-largest, largest / 3], 1)
    stored = np.asarray(jax.jit(lambda x: store_scales(choose_scales(x, 1, plan), plan))(blocks))[:, 0]
    decoded = scale_of(spec).decode(stored) if stored.dtype.kind == "u" else stored
    for value, scale in zip(largest.astype(np.float64), decoded, strict=True):
        assert value_of(scale) == oracle_scaled.scale_of([-Fraction(value)], rules), value.hex()


@further
def scales_are_read_back():
    """Every code of an 8-bit scale format, NaN among them; and numbers that are stored as such."""
    for spec in (mx("e4m3fn"), blocks("e4m3fn", 4, scale="e4m3fn", rule="absmax")):
        plan = plan_of(spec, "float32")
        codes = np.arange(256 if not scale_of(spec).signed else 128, dtype=np.uint8)
        codes = codes[scale_of(spec).decode(codes) != 0]
        loaded = chosen.load_scales(jnp.asarray(codes), plan)
        np.testing.assert_array_equal(store_scales(loaded, plan), codes)
        expected, nan = scale_of(spec).decode(codes), np.asarray(loaded.nan)
        np.testing.assert_array_equal(nan, np.isnan(expected))
        bits = np.asarray(scale_magnitude(loaded, plan))
        np.testing.assert_array_equal(bits[~nan], cases.bits(expected[~nan].astype(np.float32)).astype(np.int32))


@further
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def elements_times_powers_of_two_below_the_normal_range(dtype):
    """The exact way: ties of every depth, either neighbour even."""
    carrier, plan = CARRIERS[dtype], plan_of(mx("e4m3fn"), dtype)
    elements = np.arange(1, 128, dtype=np.uint8)
    values = plan.element.format.decode(elements).astype(dtype)[:, None]
    values = np.concatenate([values[np.isfinite(values)], [0.0, -1.125, -np.inf, np.nan]]).reshape(-1, 1)
    powers = np.arange(-carrier.bias - carrier.m - 9, 8 - carrier.bias)
    with jax.enable_x64(True):
        exponents = jnp.asarray(powers, plan.compute.work)[None]
        x = jnp.broadcast_to(jnp.asarray(values, dtype), (len(values), len(powers)))
        got = np.asarray(jax.jit(lambda x, e: multiply_by_scales(x, BlockScales(e), plan))(x, exponents))
    wide = oracle.ieee(carrier.e, carrier.m)
    exact = [
        v if isinstance(v, Special) else v * oracle.pow2(int(k))
        for v in values_of(values.ravel().astype(dtype))
        for k in powers
    ]
    expected = [oracle.to_bits(oracle.round_exact(wide, v, "nearest_even"), carrier) for v in exact]
    cases.assert_bits(np.asarray(x).ravel(), got.ravel(), np.array(expected, carrier.words), dtype)


@functools.cache
def products(spec: Spec, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Every element code under every scale code of a block format."""
    bits = spec.element.bits
    codes = np.tile(np.arange(1 << bits, dtype=np.uint8), (256, 1))
    packed = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    scales = np.arange(256, dtype=np.uint8)[:, None]
    fun = functools.partial(dequantize_body, plan=plan_of(spec, dtype), shape=codes.shape)
    return codes, np.asarray(jax.jit(fun)(packed, scales))


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def every_code_under_every_scale(dtype):
    """mxfp4: each product rounded once, overflow and subnormal numbers included."""
    spec, carrier = mx("e2m1fn", block=16), CARRIERS[dtype]
    codes, numbers = products(spec, dtype)
    expected = np.empty(numbers.shape, carrier.words)
    for i, row in enumerate(codes):
        scale = value_of(scale_of(spec).decode(i))
        for j, code in enumerate(row):
            element = value_of(spec.element.decode(code))
            product = Special.NAN if isinstance(scale, Special) else oracle_scaled.back(element, scale, carrier)
            expected[i, j] = oracle.to_bits(product, carrier)
    cases.assert_bits(numbers.ravel(), numbers.ravel(), expected.ravel(), dtype)


# -- shapes ------------------------------------------------------------------------------------------------------------


def along_last(x: np.ndarray, spec: Spec) -> tuple[np.ndarray, ...]:
    """Rounded numbers, codes and scales by blocks along the last axis, those of each row filled up with zeros."""
    size, block = x.shape[-1], size_of(spec)
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % block)]).reshape(-1, block)
    whole = every_way(padded, spec=changed(spec, axis=-1))
    lead = x.shape[:-1]
    rounded, codes = (
        whole[name].reshape(*lead, padded.size // max(np.prod(lead, dtype=int), 1)) for name in ("rounded", "codes")
    )
    return rounded[..., :size], codes[..., :size], whole["scales"].reshape(*lead, -1)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((13,), (0,)),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (((2, 3, 1, 9), (1, 3)), ((3, 5, 19), (-2, 0)))),
    ],
)
def test_axes_and_ragged_tails(shape, axes, rng):
    """Any axis is the last one of the array with that axis moved there, and a tail is a smaller block."""
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)).astype(np.float32)
    for axis in axes:
        spec = mx("e2m1fn", block=4, axis=axis)
        got = every_way(x, spec=spec)
        moved_x = np.ascontiguousarray(np.moveaxis(x, axis, -1))
        for name, expected in zip(("rounded", "codes", "scales"), along_last(moved_x, spec), strict=True):
            np.testing.assert_array_equal(np.moveaxis(got[name], axis, -1), expected, f"{name} along {axis}")
        np.testing.assert_array_equal(cases.bits(got["dequantized"]), cases.bits(got["rounded"]))


@pytest.mark.parametrize("shape", [(0, 3), *(pytest.param(s, marks=pytest.mark.slow) for s in ((0,), (2, 0, 5)))])
def test_empty_arrays(shape):
    for axis in range(-len(shape), 0):
        got = every_way(np.zeros(shape, np.float32), spec=mx("e2m1fn", block=4, axis=axis))
        assert got["rounded"].shape == got["dequantized"].shape == shape
        scales = list(shape)
        scales[axis] = -(-shape[axis] // 4)
        assert got["scales"].shape == tuple(scales)


@further
def draws_depend_on_the_flat_index_alone(rng):
    """An element is rounded by the word of its place in the array, whatever the axis and length of the blocks."""
    x = (rng.integers(-7, 8, (6, 10)) + rng.random((6, 10))).astype(np.float32)
    x = np.clip(x, -7, 7)
    x[:, 0], x[0, :] = 7, 7  # all blocks have scale 1
    seeds = seed_words(jax.random.key(KEY))
    plain = np.asarray(jc.round_to_format(x, "integer4:stochastic", jax.random.key(KEY)))
    for axis, block in ((-1, 10), (-2, 6)):
        spec = blocks("integer4:stochastic", block, axis, "float32", "absmax")
        np.testing.assert_array_equal(every_way(x, *seeds, spec=spec)["rounded"], plain)


# -- what others have --------------------------------------------------------------------------------------------------

CONFORMANCE = [case for case in json.loads((DATA / "exact_cases.json").read_text()) if "mx" in case["spec"]]


@further.first
def the_conformance_file_is_covered():
    assert len(CONFORMANCE) == 75


@further
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def conformance(part):
    """The cases of scaled formats: microxcaling's vectors and the largest magnitudes just below powers of two.

    A five-bit scale stands for exponents -15 to 15, and a block that needs a larger one is NaN as a whole.
    """
    scales = {
        None: jc.formats.float8_e8m0fnu,
        5: jc.formats.FloatFormat(5, 0, infinities=False, nans="top", signed=False, zero=False),
    }
    for case in sorted(CONFORMANCE, key=lambda case: case["spec"]["mx"])[part::4]:
        given = case["spec"]
        assert set(given) <= {"mx", "block", "round", "scale_bits"}
        bits = given.get("scale_bits")
        spec = replace(mx(given["mx"], block=given["block"]), rounding=given["round"])
        spec = changed(spec, scale=scales[bits], nan_block=bits is not None)
        x, expected = (
            np.array([int(w, 16) for w in case[k]], np.uint32).view(np.float32) for k in ("input", "expected")
        )
        rounded = np.asarray(_round(x, spec))
        cases.assert_bits(x, rounded, cases.bits(expected), case["id"])


@functools.partial(jax.jit, static_argnums=1)
def _round(x: Any, spec: Spec) -> jax.Array:
    return round_body(x, plan=plan_of(spec, "float32"))


@functools.cache
def weights() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal((512, 1024)) * 0.02).astype(np.float32)


def digest(codes: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(codes).tobytes()).hexdigest()[:12]


def decibels(x: np.ndarray, rounded: np.ndarray) -> float:
    return 20 * float(np.log10(np.linalg.norm(x) / np.linalg.norm(x - rounded)))


#: Digests of torchao's codes of `weights()`, where it divides by powers of two or as a rounded quotient happens to
#: agree; and its signal-to-noise ratios.
TORCHAO: Sequence[tuple[Spec, str | None, float]] = (
    (mx("e4m3fn"), "b1df183e0d7e", 30.66),
    (mx("e2m1fn"), "60593f98e3d1", 18.86),
    (nvfp4(two_level=False), "2676e841d651", 17.71),
    (nvfp4(), None, 20.43),
    (integer_groups(4, 32, rule="no_clip"), None, 20.73),
    (integer_groups(8, 128, rule="half_range"), None, 43.69),
)


@pytest.mark.in_turn(32)
@pytest.mark.parametrize(("spec", "expected", "ratio"), TORCHAO, ids=str)
def test_codes_of_torchao(spec, expected, ratio):
    x = weights()
    plan = plan_of(spec, "float32")
    if expected is not None:
        codes, *_ = jax.jit(functools.partial(quantize_body, plan=plan))(x)
        assert digest(codes) == expected
    rounded = jax.jit(functools.partial(round_body, plan=plan))(x)
    assert decibels(x, np.asarray(rounded)) == pytest.approx(ratio, abs=0.005)


@pytest.mark.smoke
def test_where_torchao_differs():
    """int4 in groups of 32: torchao's float32 product x (1 / s) crosses ties that the exact quotient x / s is next to.

    Its codes are reproduced by its formula; ours are those of the exact quotient, and differ only within the product's
    error of half an integer. The scale is the largest magnitude over 7.5, so every group has such an element.
    """
    x = weights().reshape(-1, 32)
    scale = np.abs(x).max(1, keepdims=True) / np.float32(7.5)
    product = x * (np.float32(1) / scale)
    theirs = np.clip(np.rint(product), -8, 7).astype(np.int8)
    assert digest(theirs) == "90e523431c9c"
    spec = integer_groups(4, 32, rule="half_range")
    plan = plan_of(spec, "float32")

    @jax.jit
    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scales = choose_scales(x, 1, plan)
        return round_block_quotients(x, scales, plan, None), store_scales(scales, plan)

    ours, scales = run(x)
    np.testing.assert_array_equal(scales, scale)
    # Beside a tie such a quotient is off it by more than 2^-30, so float64's is rounded to the right integer.
    quotient = x.astype(np.float64) / scale.astype(np.float64)
    np.testing.assert_array_equal(ours, np.clip(np.rint(quotient), -8, 7))
    differs = theirs != np.asarray(ours)
    assert differs.sum() == 2496
    from_half = np.abs(quotient - np.floor(quotient) - 0.5)
    assert np.all(from_half[differs] <= 2.0**-23 * np.abs(quotient[differs]))


# -- what cannot be had ------------------------------------------------------------------------------------------------


def test_what_a_carrier_is_too_narrow_for():
    for spec, dtype, message in (
        (blocks("bfloat16", 8), "float32", "beyond 2^-95 ... 2^95"),
        (blocks("e5m20", 8, scale="float32", rule="absmax"), "float32", None),
        (blocks("e5m22", 8, scale="float32", rule="absmax"), "float32", "element='e5m22'"),
        (blocks("codebook(-1,1)", 8, scale="float32", rule="absmax"), "float32", None),
        (blocks(f"codebook({2.0**-60!r},1)", 8, scale="float32", rule="absmax"), "float32", "cannot tell quotients"),
        (blocks("e4m3fn", 8, scale="float64", rule="absmax"), "float32", "scale='binary64:saturate'"),
        (blocks("e4m3fn", 8, scale="float64", rule="absmax"), "float64", None),
        (blocks("integer8", 8, scale="e4m3fn", rule="two_level"), "float32", "has 7 significant bits, and float32"),
        (blocks("integer8", 8, scale="e4m3fn", rule="two_level"), "float64", None),
        (blocks("e2m1fn", 8, scale="bfloat16", rule="two_level"), "float32", "scale=bfloat16 has 8 significant"),
    ):
        if message is None:
            assert plan_of(spec, dtype).fmt == spec.scaled
            continue
        with pytest.raises(ValueError) as caught:
            plan_of(spec, dtype)
        assert message in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_numbers_are_widened_by_their_bits(dtype):
    """Every bit pattern comes back, subnormal ones too, and the value is the same."""
    x, carrier = cases.all_patterns(dtype), bit_ops.CARRIERS[dtype]
    wide, back = jax.jit(lambda x: (widen_16_bit(x, carrier), narrow_16_bit(widen_16_bit(x, carrier), carrier)))(x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.asarray(wide), x.astype(np.float32))
    cases.assert_bits(x, np.asarray(back), cases.bits(x), dtype)


@pytest.mark.parametrize(("power", "want"), [(1, [2.5, np.inf, -np.inf]), (2, [5.0, np.inf, -np.inf])])
def test_powers_beyond_the_largest_number_give_infinities(power: int, want: list[float]) -> None:
    x = np.array([1.25, 1.5 * 2.0**127, -1.75 * 2.0**127], np.float32)
    run = jax.jit(functools.partial(multiply_by_power, carrier=bit_ops.CARRIERS["float32"]))
    bits = run(x.view(np.int32), np.full(3, power, np.int32))
    np.testing.assert_array_equal(np.asarray(bits).view(np.float32), np.array(want, np.float32))


test_further = further.test()
