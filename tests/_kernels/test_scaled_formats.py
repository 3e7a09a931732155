"""Scaled formats of every grouping against exact rationals, bit for bit: scales, zero points, elements, numbers."""

from __future__ import annotations

import functools
import itertools
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
from cases_scaled import adversarial, extreme, ranges, value_of, values_of
from further import Further
from oracle import CARRIERS
from oracle_scaled import Blocks, Scheme

import jchop as jc
from jchop._common import bit_ops
from jchop._core import scaled_bodies
from jchop._core.rounding.codes import unpack_codes
from jchop._core.rounding.random_bits import seed_words
from jchop._core.scaled.elements import ScaledPlan, make_scaled_plan
from jchop._core.scaled_bodies import quantize_body, round_body
from jchop._kernels.scaled import (
    code_and_scale_shapes,
    dequantize_scaled,
    fit_scaled,
    quantize_scaled,
    require_scaled_plan,
    round_scaled,
)
from jchop._spec.spec import Spec
from jchop.formats import ScaledFormat

further = Further()

KEY = 7


def plan_of(spec: Spec, dtype: str) -> ScaledPlan:
    return make_scaled_plan(spec, bit_ops.CARRIERS[dtype])


def scheme_of(spec: Spec) -> Scheme:
    fmt = spec.scaled
    assert fmt is not None
    again = scheme_of(Spec(fmt.scale)) if isinstance(fmt.scale, ScaledFormat) else None
    scale = oracle.ieee(8, 23) if again else oracle.describe(fmt.scale)
    assert isinstance(scale, oracle.FloatSet)
    element = oracle.describe(fmt.element)
    rule = fmt.rule if fmt.rule in oracle_scaled.ASKED else "absmax"
    blocks = Blocks(element, scale, rule, spec.rounding.value, spec.overflow.value, fmt.nan_block, spec.flush)
    return Scheme(blocks, fmt.group, fmt.axis, fmt.channel, fmt.zero_point, fmt.percentile, again)


@functools.lru_cache(maxsize=1)
def compiled(spec: Spec) -> Any:
    """Rounded, quantized and dequantized, in one compiled function."""

    @jax.jit
    def run(x: jax.Array, *drawn: jax.Array) -> dict[str, Any]:
        result: dict[str, Any] = {"rounded": round_scaled(x, *drawn, spec=spec)}
        if spec.element.bits > 8:
            return result
        codes, scale, zero = quantize_scaled(x, *drawn, spec=spec)
        back = dequantize_scaled(codes, scale, zero, spec=spec, shape=x.shape, dtype=x.dtype.name)
        unpacked = unpack_codes(codes, spec.element.bits, x.shape[-1] if x.ndim else 1).reshape(x.shape)
        return result | {"codes": unpacked, "stored": (codes, scale, zero), "dequantized": back}

    return run


def every_way(x: np.ndarray, spec: Spec, drawn: tuple = ()) -> dict[str, Any]:
    with jax.enable_x64(x.dtype.itemsize == 8):
        return jax.tree.map(np.asarray, compiled(spec)(x, *drawn))


def fill(shape: tuple[int, ...], spec: Spec, dtype: str, seed: int) -> np.ndarray:
    """An array whose groups are hard to scale."""
    rng = np.random.default_rng(seed)
    fmt = spec.scaled
    assert fmt is not None
    groups = list(scheme_of(spec).members(shape).values())
    size = max(max(map(len, groups)), 2)
    if fmt.zero_point:
        blocks = ranges(1 << fmt.bits, size, dtype, max(len(groups), 1), rng)
    else:
        blocks = adversarial(fmt.element, size, dtype, max(len(groups), 1), rng)
    x = np.zeros(shape, cases.DTYPES[dtype])
    for members, block in zip(groups, blocks[rng.permutation(len(blocks))], strict=True):
        x.reshape(-1)[members] = block[: len(members)]
    return x


def drawn(spec: Spec, x: np.ndarray) -> tuple[tuple, int, list[int]]:
    """Seeds, how many bits an element draws, and the draws."""
    if not spec.rounding.stochastic:
        return (), 1, [0] * x.size
    width = 64 if x.dtype.itemsize == 8 else 32
    key = jax.random.key(KEY)
    with jax.enable_x64(True):
        words = np.asarray(jc.random_bits(key, x.shape, width=width))
    bits = spec.random_bits or width - (spec.rounding.value in ("stochastic_b", "stochastic_c"))
    return tuple(seed_words(key)), bits, (words.astype(object) >> width - bits).ravel().tolist()


def check(text: str, shape: tuple[int, ...], dtype: str, seed: int = 0) -> None:
    spec = jc.Spec(text)
    check_array(spec, fill(shape, spec, dtype, seed))


def check_array(spec: Spec, x: np.ndarray) -> None:
    fmt, shape, dtype = spec.scaled, x.shape, x.dtype.name
    carrier = CARRIERS[dtype]
    assert fmt is not None
    seeds, n, draws = drawn(spec, x)
    expected = oracle_scaled.quantize_array(values_of(x.ravel()), shape, scheme_of(spec), carrier, n, draws)
    got = every_way(x, spec, seeds)
    numbers = np.array([oracle.to_bits(value, carrier) for value in expected.numbers], carrier.words)
    cases.assert_bits(x.ravel(), got["rounded"].ravel(), numbers, f"{spec} of {dtype}{shape}")
    if "stored" not in got:
        return
    np.testing.assert_array_equal(cases.bits(got["dequantized"]), cases.bits(got["rounded"]))
    wanted = code_and_scale_shapes(spec, shape)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), wanted) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), got["stored"]
    )
    check_scales(expected, fmt, got["stored"][1:], shape)
    elements = fmt.element.decode(got["codes"]).ravel()
    nan = [isinstance(v, oracle.Special) and v is oracle.Special.NAN for v in expected.numbers]
    for i in np.flatnonzero(~np.array(nan)):
        assert value_of(elements[i]) == expected.elements[i]


def check_scales(expected: oracle_scaled.Result, fmt: ScaledFormat, stored: tuple, shape: tuple[int, ...]) -> None:
    scale, zero = stored
    counts = fmt.scale_shape(shape)
    for place, wanted in expected.zeros.items():
        value = fmt.scale.decode(zero[place]) if zero.dtype.kind == "u" else zero[place]  # type: ignore[union-attr]
        assert Fraction(float(value)) == wanted
    if isinstance(fmt.scale, ScaledFormat):
        codes, own, *zeros = scale
        assert expected.again is not None
        unpacked = np.asarray(unpack_codes(jnp.asarray(codes), fmt.scale.bits, counts[-1] if counts else 1)).ravel()
        assert [Fraction(v) for v in fmt.scale.element.decode(unpacked).tolist()] == expected.again.elements
        if zeros:
            check_scales(expected.again, fmt.scale, (own, *zeros), counts)
        scale, expected, fmt = own, expected.again, fmt.scale
    scale = scale[0] if isinstance(scale, tuple) else scale
    assert not isinstance(fmt.scale, ScaledFormat)
    for place, wanted in expected.scales.items():
        value = fmt.scale.decode(scale[place]) if scale.dtype.kind == "u" else scale[place]
        assert value_of(value) == wanted, place


#: Every grouping, rule, kind of element and scale, and carrier, each at least once; 1-D to 4-D, ragged tails.
SOME = [
    ("int8(channel=0,rule=half_range)", (24, 5), "float32"),
    ("int4(channel=(0,2))", (3, 4, 5), "bfloat16"),
    ("float8_e4m3fn(channel=-1)", (3, 17), "float32"),
    ("int8(group=tensor)", (7,), "float16"),
    ("int8(group=tensor)", (), "float32"),
    ("mxfp4(group=all,axis=1)", (4, 5, 4), "float32"),
    ("e3m2fn(group=(2,3))", (7, 8), "float32"),
    ("int4(group=(2,all),axis=(0,3),scale=e4m3fn)", (3, 2, 2, 3), "float32"),
    ("mxfp8_e4m3(group=(4,2),axis=(-1,0))", (5, 9), "float64"),
    ("bfp8(group=4,axis=0)", (9, 4), "float32"),
    ("nvfp4(channel=0)", (12, 6), "float32"),
    ("nvfp4(group=4)", (6, 10), "bfloat16"),
    ("nvfp4(group=8,rule=four_over_six)", (6, 20), "float32"),
    ("mxfp4(group=8,rule=floor_unclipped)", (20, 20), "float32"),
    ("mxfp8_e4m3(group=8,rule=floor_unclipped):stochastic", (6, 20), "float32"),
    ("mxfp4(group=8,rule=quest)", (20, 21), "float32"),
    ("binary8p3se(group=4,scale=binary8p1uf,rule=max_abs)", (24, 10), "float32"),
    ("uint4(group=6,zero_point=integer)", (20, 13), "float32"),
    ("int8(channel=1,zero_point=integer)", (9, 12), "float16"),
    ("uint8(group=4,axis=0,zero_point=integer,scale=bfloat16)", (8, 9), "bfloat16"),
    ("int3(group=tensor,zero_point=integer,scale=e8m0fnu)", (4, 4), "float32"),
    ("int4(group=5,zero_point=integer)", (30, 5), "float64"),
    ("uint4(group=6,zero_point=integer):stochastic", (20, 12), "float32"),
    ("uint4(group=6,zero_point=float)", (30, 13), "float32"),
    ("int4(channel=1,zero_point=float,scale=bfloat16)", (9, 12), "bfloat16"),
    ("int8(group=4,axis=0,zero_point=float,scale=float16)", (8, 9), "float16"),
    ("uint8(group=(2,3),zero_point=float)", (7, 3, 4), "float64"),
    ("int2(group=6,zero_point=float,scale=e4m3fn):stochastic", (20, 12), "float32"),
    ("nf4(group=4,scale=uint8(group=3,zero_point=float))", (5, 22), "float32"),
    (
        "float4_e2m1fn(group=4,scale=float8_e4m3fn(group=all))",
        (6, 20),
        "float32",
    ),  # scales of blocks under one of a row
    ("int8(group=all,scale=float8_e4m3fn(group=tensor))", (9, 12), "float32"),  # by row and tensor
    ("nf4(group=8)", (6, 20), "float32"),
    ("nf4(group=4,scale=int8(group=3))", (5, 22), "float32"),
    ("dynamic4(channel=0,scale=dynamic8(group=4,axis=0))", (10, 4), "bfloat16"),
    ("int8(group=8,rule=percentile(80))", (6, 21), "float32"),
    ("int8(channel=1,rule=percentile(99.9),scale=bfloat16)", (13, 6), "float64"),
    ("e5m2(channel=0):stochastic", (8, 9), "float32"),
    ("e5m2(channel=0,nan_block=true,scale=bfloat16):ieee", (16, 4), "float32"),
    ("binary16(channel=0)", (8, 4), "float32"),
]


#: Two at a time.
IN_TWOS = [SOME[i : i + 2] for i in range(0, len(SOME), 2)]


def check_some(rows):
    for row in rows:
        check(*row)


GROUPINGS = {
    "group=tensor": (11,),
    "channel=0": (5, 7),
    "channel=(0,-1)": (3, 4, 3),
    "group=all": (4, 6),
    "group=3,axis=0": (7, 4),
    "group=(2,3)": (3, 5, 4),
    "group=(3,all),axis=(3,1)": (2, 3, 2, 4),
    "group=4": (3, 2, 2, 9),
}
RULES = ("floor", "ceil", "even", "rceil", "absmax", "half_range", "no_clip", "two_level", "percentile(70.5)",
         "max_abs")  # fmt: skip
MODES = (
    "nearest_even", "nearest_away", "nearest_zero", "up", "down", "toward_zero", "odd",
    "stochastic", "stochastic_b", "stochastic_c", "stochastic_equal", "stochastic:random_bits=3",
)  # fmt: skip


def in_turn(first: Sequence[str], second: Sequence[str], one_of: int) -> list[tuple[str, str, str]]:
    """One of so many of the pairs, so that each meets others, with the carriers in turn."""
    carriers = list(CARRIERS)
    pairs = [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if (i + j) % one_of == 0]
    return [(*pair, carriers[turn % len(carriers)]) for turn, pair in enumerate(pairs)]


def check_rules(rule):
    for of_rule, grouping, dtype in in_turn(RULES, list(GROUPINGS), 4):
        if of_rule == rule:
            check_rule(rule, grouping, dtype)


def check_rule(rule, grouping, dtype):
    scale = "e4m3fn" if rule == "two_level" else "float32" if rule in RULES[4:] else "e8m0fnu"
    check(f"int4({grouping},rule={rule},scale={scale})", GROUPINGS[grouping], dtype)


#: Scale formats as wide as there are, few and many bits, with and without subnormals and zero.
SCALES = (
    "e8m0fnu", "e8m2", "e8m3", "e4m3fn", "e5m2", "e4m3fn(subnormals=false)", "binary16", "bfloat16", "binary32",
)  # fmt: skip
EXTREME_GROUPS = ("group=4", "channel=0", "group=(1,4)")
EXTREME_ELEMENTS = ("e2m1fn", "integer4", "nf4", "e4m3fn", "integer8")
EXTREME_MODES = ("nearest_even", "stochastic", "up", "odd")


def extremes() -> list[Any]:
    """Every scale format with the rule of two levels, and with one or two of the others."""
    pairs = itertools.product(enumerate(RULES), enumerate(SCALES))
    return [
        (rule, scale, i * len(SCALES) + j) for (i, rule), (j, scale) in pairs if rule == "two_level" or (i + j) % 6 == 0
    ]


def check_extremes(rule, scale, turn):
    """Neither a product of two scales nor that of a scale and an element need be a number of the carrier."""
    rest = list(itertools.product(EXTREME_GROUPS, EXTREME_ELEMENTS, EXTREME_MODES, CARRIERS))
    for at in range(turn, turn + len(rest)):  # the first ones that go with rule and scale
        grouping, element, mode, dtype = rest[7 * at % len(rest)]
        try:
            spec = jc.Spec(f"{element}({grouping},rule={rule},scale={scale}):{mode}")
            require_scaled_plan(spec, (10, 4), dtype)
        except ValueError:
            continue
        break
    for x in extreme(dtype):
        check_array(spec, x)


#: Every named format and kind of element; the rules, modes, groupings and carriers come to each in turn.
ELEMENTS = (
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "bfp8", "nf4", "dynamic8",
    "dynamic4", "udynamic8", "uinteger8", "e4m3(bias=11)", "binary8p3se",
)  # fmt: skip


def check_element(name):
    at = 2 * ELEMENTS.index(name) + ELEMENTS.index(name) // 2 % 2
    grouping, shape = list(GROUPINGS.items())[(3 * at) % len(GROUPINGS)]
    mode, dtype = MODES[(5 * at) % len(MODES)], list(CARRIERS)[at % len(CARRIERS)]
    head = f"{name[:-1]}," if name.endswith(")") else f"{name}("
    for rule in RULES[at % len(RULES) :] + RULES:  # the first one that goes with the element
        own = "float32" if rule in RULES[4:] else "e8m0fnu"
        scale = "e4m3fn" if rule == "two_level" else own
        try:
            spec = jc.Spec(f"{head}{grouping},rule={rule},scale={scale}):{mode}")
            require_scaled_plan(spec, shape, dtype)
        except ValueError:
            continue
        break
    check(str(spec), shape, dtype, at)


ZERO_POINTS = {"integer": ["uint8(", "int8(", "int2(", "uint2(", "int8(narrow=true,"], "float": ["uint8(", "int12("]}
#: Two at a time.
OF_MODES = [
    (kind, [(elements[i % len(elements)], MODES[i], list(CARRIERS)[(i + i // 4) % 4]) for i in (at, at + 1)])
    for kind, elements in ZERO_POINTS.items()
    for at in range(0, len(MODES), 2)
]


def check_zero_points(kind, rows):
    for element, mode, dtype in rows:
        check(f"{element}group=6,zero_point={kind}):{mode}", (40, 17), dtype)


#: What is compared, and its arguments; by default a small array.
ALL = [(check, ("int4(group=4,zero_point=integer)", (2, 6), "float32"))]
ALL += [(check_some, (rows,)) for rows in IN_TWOS]
ALL += [(check_rules, (rule,)) for rule in RULES]
ALL += [(check_extremes, row) for row in extremes()]
ALL += [(check_element, (name,)) for name in ELEMENTS]
ALL += [(check_zero_points, row) for row in OF_MODES]


def text_of(value: Any) -> str:
    if callable(value):
        return value.__name__.removeprefix("check_")
    return "-".join(map(text_of, value)) if isinstance(value, tuple | list) else str(value)


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("run", "row"), ALL, ids=text_of)
def against_exact_rationals(run, row):
    run(*row)


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(
    "text", ["nvfp4(group=4)", "uint4(channel=0,zero_point=integer)", "nf4(group=4,scale=int8(group=2))"]
)
def test_fitted_scales_give_what_quantize_chooses(text):
    spec = jc.Spec(text)
    x = fill((6, 10), spec, "float32", 1)

    @jax.jit
    def run(x: jax.Array) -> tuple[Any, Any, Any]:
        scale, zero_point = fit_scaled(x, spec=spec)
        again = quantize_scaled(x, spec=spec, scale=scale, zero_point=zero_point)
        return quantize_scaled(x, spec=spec), again, (again[0], scale, zero_point)

    stored, again, fitted = run(x)
    jax.tree.map(np.testing.assert_array_equal, again, stored)
    jax.tree.map(np.testing.assert_array_equal, fitted, stored)


# -- least squares -----------------------------------------------------------------------------------------------------


@further
def least_squares_is_the_least_of_its_candidates(rng):
    """Against every candidate, tried as a given scale, with errors summed in float64."""
    spec = jc.Spec("int4(channel=0,rule=mse)")
    x = (rng.standard_normal((5, 40)) ** 3).astype(np.float32)
    best = np.asarray(fit_scaled(x, spec=spec)[0]).ravel()
    errors, scales = [], []
    for i in range(33):
        largest = np.abs(x).max(1, keepdims=True)
        scale = (largest * np.float32((64 - i) / 64) / np.float32(7)).astype(np.float32)
        stored = quantize_scaled(jnp.asarray(x), spec=spec, scale=jnp.asarray(scale))
        back = dequantize_scaled(*stored, spec=spec, shape=x.shape, dtype="float32")
        errors.append(((np.asarray(back, np.float64) - x) ** 2).sum(1))
        scales.append(scale.ravel())
    at = np.argmin(np.array(errors), 0)
    assert len(set(at)) > 1
    np.testing.assert_allclose(best, np.array(scales)[at, np.arange(5)], rtol=1e-6)


def test_least_squares_do_not_depend_on_the_size_of_the_numbers(rng):
    spec = jc.Spec("e2m1fn(group=16,rule=mse)")
    x = rng.standard_normal((4, 16)).astype(np.float32)
    plain = np.asarray(fit_scaled(jnp.asarray(x), spec=spec)[0])
    for power in (-120, 110):
        moved = np.asarray(fit_scaled(jnp.asarray(np.ldexp(x, power)), spec=spec)[0])
        np.testing.assert_array_equal(moved, np.ldexp(plain, power), str(power))


def test_four_over_six_takes_the_smaller_exact_error():
    """A row of an array whose SQNR is published: its blocks, scales and numbers as exact sums of squares choose."""
    x = (np.random.default_rng(0).standard_normal((512, 1024)) * 0.02).astype(np.float32)
    spec = jc.Spec("nvfp4(rule=four_over_six)")
    codes, (scales, tensor) = jax.tree.map(np.asarray, quantize_scaled(jnp.asarray(x), spec=spec)[:2])
    blocks = scheme_of(spec).blocks
    whole = oracle_scaled.tensor_scale([Fraction(float(np.abs(x).max()))], blocks)
    assert whole == Fraction(float(tensor))
    rows = x[0].reshape(-1, 16)
    expected = [oracle_scaled.quantize(values_of(row), blocks, CARRIERS["float32"], whole) for row in rows]
    stored = spec.scaled.scale.decode(scales)  # type: ignore[union-attr]
    assert [value_of(v) for v in stored[0]] == [block.scale for block in expected]
    elements = jc.formats.float4_e2m1fn.decode(np.asarray(unpack_codes(jnp.asarray(codes[:1]), 4, 1024)))[0]
    assert [value_of(v) for v in elements] == [e for block in expected for e in block.elements]
    fours = np.abs(elements.reshape(-1, 16)).max(1) < 6
    assert 10 < fours.sum() < 54
    back = np.asarray(dequantize_scaled(codes, (scales, tensor), None, spec=spec, shape=x.shape, dtype="float32"))
    error = (back.astype(np.float64) - x) ** 2
    assert abs(10 * np.log10((x.astype(np.float64) ** 2).sum() / error.sum()) - 21.221) < 0.001


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("nvfp4(rule=int_or_float)", "float32"),
        pytest.param("nvfp4(axis=0,rule=int_or_float):stochastic", "bfloat16", marks=pytest.mark.slow),
        pytest.param(
            "float6_e3m2fn(group=16,scale=float8_e4m3fn,rule=int_or_float)", "float64", marks=pytest.mark.slow
        ),
    ],
)
def test_each_group_has_the_levels_with_the_smaller_exact_error(text: str, dtype: str) -> None:
    """IF4 (arXiv 2603.28765): scales with their signs, codes and numbers, as exact sums of squares choose."""
    spec, rng = jc.Spec(text), np.random.default_rng(5)
    rows = rng.standard_normal((24, 16)) * rng.uniform(0.01, 1, (24, 1)) ** 2
    rows[::3] = rng.uniform(-1, 1, (8, 16))
    rows[1], rows[2, :3] = 0, (np.inf, np.nan, -0.0)
    x = rows.astype(cases.DTYPES[dtype])
    x = x.T if "axis=0" in text else x
    fmt, blocks = spec.scaled, scheme_of(spec).blocks
    assert fmt is not None and isinstance(fmt.scale, jc.formats.FloatFormat)
    seeds, n, draws = drawn(spec, x)
    got = every_way(x, spec, seeds)
    codes, numbers = (v.T if "axis=0" in text else v for v in (got["codes"], got["rounded"]))
    stored, tensor = got["stored"][1]
    scales = fmt.scale.decode(stored).ravel()
    order = np.array(draws, object).reshape(x.shape)
    order = order.T if "axis=0" in text else order
    most = (1 << (fmt.bits - 1)) - 1
    levels = [np.float32(i * fmt.element.max / most) for i in range(-most, most + 1)]
    others = replace(blocks, element=oracle.codebook([float(v) for v in levels]))
    whole = oracle_scaled.tensor_scale(values_of(x.ravel()), blocks)
    assert whole == Fraction(float(tensor))
    seen = set()
    for row, values in enumerate(map(values_of, x.T if "axis=0" in text else x)):
        scale = oracle_scaled.scale_of(values, blocks, whole)
        assert isinstance(scale, Fraction) and abs(scales[row]) == scale
        errors = [oracle_scaled.squares(oracle_scaled.finite(values), scale * whole, each) for each in (blocks, others)]
        second = errors[1] < errors[0]
        assert np.signbit(scales[row]) == second, (row, list(map(float, errors)))
        seen.add(second)
        for i, v in enumerate(values):
            e = oracle_scaled.element_of(v, scale * whole, others if second else blocks, n, order[row, i])
            want = oracle.to_bits(oracle_scaled.back(e, scale * whole, CARRIERS[dtype]), CARRIERS[dtype])
            assert cases.bits(numbers[row : row + 1, i])[0] == want, (row, i)
            code = codes[row, i]
            if second:
                signed = int(code) - (1 << fmt.bits) * (code > most)
                assert Fraction(float(levels[signed + most])) == e, (row, i)
            else:
                assert value_of(fmt.element.decode(codes[row : row + 1, i])[0]) == e
    assert seen == {False, True}
    np.testing.assert_array_equal(cases.bits(got["dequantized"]), cases.bits(got["rounded"]))
    assert fmt.bits_per_element() == fmt.bits + 0.5
    with pytest.raises(ValueError, match="levels of two formats"):
        jc.encode_checkpoint(
            {"w.weight": jc.quantize(jnp.ones((16, 16)), "nvfp4(rule=int_or_float)")}, "compressed-tensors"
        )


def eden(row: np.ndarray, whole: Fraction, blocks: Blocks) -> tuple[list[list[Fraction]], list[Fraction]]:
    """The elements of blocks of 16, and the scales that multiply them, not rounded yet (arXiv 2601.22813)."""
    elements, scales = [], []
    for values in map(values_of, row.reshape(-1, 16)):
        scale = oracle_scaled.scale_of(values, blocks, whole)
        assert isinstance(scale, Fraction)
        e: Any = [oracle_scaled.element_of(v, scale * whole, blocks) for v in values]
        pairs = list(zip(oracle_scaled.finite(values), oracle_scaled.finite(e), strict=True))
        elements.append(e)
        shared = sum(x * y * scale * whole for x, y in pairs)
        scales.append(scale * sum(x * x for x, _ in pairs) / shared if shared else scale)
    return elements, scales


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_eden_moves_the_draws_from_elements_to_scales(dtype: str) -> None:
    """Elements to nearest, scales to a neighbour of the exact corrected one, right on average; half the error."""
    x = jnp.asarray(np.random.default_rng(3).standard_normal((256, 128)), dtype)
    x = x.at[0, :16].set(0).at[0, 16].set(7e-4 if dtype == "float32" else 0)
    near, spec = jc.Spec("nvfp4(rule=eden)"), jc.Spec("nvfp4(rule=eden):stochastic")
    blocks = scheme_of(near).blocks
    assert spec.scaled is not None and isinstance(spec.scaled.scale, jc.formats.FloatFormat)
    largest = Fraction(float(jnp.abs(x).max()))
    whole = oracle_scaled.tensor_scale([largest], blocks)
    elements, asked = eden(np.asarray(x[0]), whole, blocks)

    def drawn(key: Any) -> Any:
        codes, (scales, tensor), _ = quantize_scaled(x, *seed_words(key), spec=spec)
        return unpack_codes(codes[0], 4, 128), scales[0], tensor

    codes, scales, tensor = jax.tree.map(np.asarray, jax.jit(jax.vmap(drawn))(jax.random.split(jax.random.key(0), 256)))
    assert {Fraction(float(t)) for t in tensor} == {whole}
    assert [value_of(v) for v in jc.formats.float4_e2m1fn.decode(codes[0])] == [e for block in elements for e in block]
    assert (codes == codes[0]).all()
    nearest = spec.scaled.scale.decode(np.asarray(quantize_scaled(x, spec=near)[1][0])[0])
    drawn_scales = spec.scaled.scale.decode(scales)
    for i, want in enumerate(map(float, asked)):
        step = 2.0 ** (np.floor(np.log2(want)) - 3)
        low = np.floor(want / step) * step
        assert set(drawn_scales[:, i]) <= ({low, low + step} if want != low else {want}), i
        assert abs(drawn_scales[:, i].mean() - want) < 4.5 * step / 32, i  # 256 draws of half a step at most
        assert abs(nearest[i] - want) <= step / 2 * (1 + 1e-5), i
    key = jax.random.key(1)

    def error(text: str) -> float:
        wide = np.asarray(x, np.float64)
        return float(((np.asarray(jc.round_to_format(x, text, key), np.float64) - wide) ** 2).mean())

    assert error("nvfp4(rule=eden):stochastic") < 0.5 * error("nvfp4:stochastic")
    np.testing.assert_array_equal(jc.fit_scale(x, spec)[0][0], jc.fit_scale(x, near)[0][0])
    q = jc.quantize(x, spec, key)
    np.testing.assert_array_equal(np.asarray(jc.dequantize(q)), np.asarray(jc.round_to_format(x, spec, key)))


# -- shapes, and what is refused ---------------------------------------------------------------------------------------


@pytest.mark.in_turn(8)
@pytest.mark.parametrize(
    ("shape", "text"),
    [((3, 0), "mxfp4"), ((0, 3), "nvfp4"), ((0,), "int8(group=tensor)"), ((2, 0, 5), "nf4(scale=int8(group=4))"),
     ((0, 3), "uint4(group=all,axis=0,zero_point=integer)"), ((3, 0), "uint4(group=all,axis=0,zero_point=integer)"),
     ((0,), "nf4(scale=int8(group=4))"), ((2, 0, 5), "nvfp4")],
)  # fmt: skip
def test_empty_arrays(shape, text):
    spec = jc.Spec(text)
    x = jnp.zeros(shape, jnp.bfloat16)
    stored = quantize_scaled(x, spec=spec)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), stored) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), code_and_scale_shapes(spec, shape)
    )
    assert jax.tree.leaves(fit_scaled(x, spec=spec))[0].shape == jax.tree.leaves(stored[1])[0].shape
    back = dequantize_scaled(*stored, spec=spec, shape=shape, dtype="bfloat16")
    assert back.shape == round_scaled(x, spec=spec).shape == shape
    assert back.dtype == jnp.bfloat16


# -- programs that ask for the sizes of scales -------------------------------------------------------------------------

#: What a row of numbers is multiplied by.
SIZES = {"plain": 1.0, "tiny": 2.0**-90, "huge": 2.0**90, "zeros": 0.0}
ASKING = [
    "int8(channel=0)", "mxfp8_e4m3", "int4(group=32)", "e4m3fn(channel=0):saturate",
    "uint8(channel=0,zero_point=integer)", "int8(channel=0):stochastic",
]  # fmt: skip


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("text", "dtype"), list(zip(ASKING, itertools.cycle(["float32", "bfloat16"]), strict=False)))
def asking_changes_no_bit(text, dtype, rng):
    """Through the operations, which ask in the program of one CPU, and the bodies that do not."""
    spec = jc.Spec(text)
    drawn = seed_words(jax.random.key(KEY)) if spec.rounding.stochastic else ()
    shape, plan = (64, scaled_bodies.MOST_WITHOUT_BRANCH // 32), plan_of(spec, dtype)

    @jax.jit
    def both(x):
        asked = round_scaled(x, *drawn, spec=spec), quantize_scaled(x, *drawn, spec=spec)
        return asked, (round_body(x, *drawn, plan=plan), quantize_body(x, *drawn, plan=plan))

    assert "conditional(" in str(both.lower(jnp.zeros(shape, dtype)).compile().as_text())
    for name, factor in SIZES.items():
        x = rng.standard_normal(shape).astype(np.float32)
        x[3] *= factor
        x[5, :7] = [np.nan, np.inf, -np.inf, -0.0, 1e-42, -3e-39, 0.0]
        (rounded, stored), (expected, parts) = both(jnp.asarray(x, dtype))
        np.testing.assert_array_equal(cases.bits(np.asarray(rounded)), cases.bits(np.asarray(expected)), name)
        for one, other in zip(jax.tree.leaves(stored), parts, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), name)


@further
def zero_points_far_outside_are_not_called_moderate(rng):
    """They are no zero points that are fitted; with all scales moderate the program has to take the other branch."""
    spec = jc.Spec("uint8(channel=0,zero_point=integer)")
    shape = (64, scaled_bodies.MOST_WITHOUT_BRANCH // 32)
    x = jnp.asarray(rng.standard_normal(shape).astype(np.float32))
    scale, zero = jnp.full((64, 1), 0.01, jnp.float32), jnp.full((64, 1), 128, jnp.int32)
    for far in (-(2**31), -70_000, -1025, 1025, 70_000, 2**31 - 1):
        given = (scale, zero.at[7].set(far))
        found = quantize_scaled(x, spec=spec, scale=given[0], zero_point=given[1])
        expected = jax.jit(functools.partial(quantize_body, plan=plan_of(spec, "float32"), given=2))(x, *given)
        np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(expected[0]), str(far))


#: A column of numbers for each, within plain ones.
COLUMNS = {
    "plain": lambda x: x,
    "zeros": lambda x: 0 * x,
    "subnormal": lambda x: x * 1e-41,
    "next to normal": lambda x: np.where(np.arange(x.size) == 9, 2.0**-126, np.clip(x, -1, 1) * 2.0**-127),
    "huge": lambda x: np.where(np.arange(x.size) == 9, -np.finfo(np.float32).max, x),
    "NaN": lambda x: np.where(np.arange(x.size) % 3 == 0, np.nan, x),
    "all NaN": lambda x: x * np.nan,
    "infinity": lambda x: np.where(np.arange(x.size) == 9, -np.inf, x),
}


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(
    ("text", "dtype"),
    [("int8(channel=1)", "float32"), ("int8(channel=1)", "bfloat16"), ("int4(group=64,axis=0)", "float32"),
     ("float8_e4m3fn(channel=1,scale=e8m0fnu)", "bfloat16")],
)  # fmt: skip
def test_the_largest_number_of_a_column(text, dtype, rng):
    """A program of one CPU looks for it among numbers first; the body that may not branch, among integers."""
    spec, shape = jc.Spec(text), (scaled_bodies.MOST_WITHOUT_BRANCH // 64, 65)
    plan = plan_of(spec, dtype)

    @jax.jit
    def both(x):
        return fit_scaled(x, spec=spec), quantize_body(x, plan=plan, as_dtype=None)

    assert "conditional(" in str(both.lower(jnp.zeros(shape, dtype)).compile().as_text())
    for name, change in COLUMNS.items():
        x = rng.standard_normal(shape).astype(np.float32)
        x[:, 3] = change(x[:, 3])
        found, expected = both(jnp.asarray(x, dtype))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(cases.bits(np.asarray(one)), cases.bits(np.asarray(other)), name)


# -- what stands around an operation -----------------------------------------------------------------------------------

#: With few scales, which a compiler takes out of its loops.
INEXACT = [
    "int8(group=all)", "nf4(group=all)", "int8(group=tensor)", "int8(channel=0)", "e4m3fn(group=all)",
    "uint8(group=tensor,zero_point=integer)", "nvfp4", "int4(group=32,scale=bfloat16)",
    "int4(group=all,zero_point=float)",
]  # fmt: skip


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("text", "devices"), [*((text, 1) for text in INEXACT), ("nvfp4", 8)])
def test_products_are_rounded_before_they_are_summed(text, devices, rng):
    """XLA's CPU backend contracts a product with a sum that follows it, unless it cannot see the product."""
    if devices > jax.device_count():
        pytest.skip("needs eight (forced host) devices")
    spec, shape = jc.Spec(text), (8, 128)
    mesh = jax.make_mesh((devices,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("rows",), ()))
    x, y = (jax.device_put(rng.standard_normal(shape).astype(np.float32), split) for _ in range(2))
    stored = jax.device_put(quantize_scaled(jnp.asarray(np.asarray(x)), spec=spec), whole)

    def back(stored):
        return dequantize_scaled(*stored, spec=spec, shape=shape, dtype="float32")

    def sums(number, y):
        return number + y, 1.0 - number

    def fused(x, y, stored):
        again = quantize_scaled(x, spec=spec)
        return [sums(number, y) for number in (round_scaled(x, spec=spec), back(stored), back(again))]

    expected = [np.asarray(v) for v in sums(np.asarray(back(stored)), np.asarray(y))]
    for found in jax.jit(fused)(x, y, stored):
        jax.tree.map(np.testing.assert_array_equal, list(found), expected)


@further.first
def scales_that_do_not_fit():
    ones, zeros = np.ones((3, 1), np.float32), np.zeros((3, 1), np.int32)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"zero_point": zeros}, "zero_point without scale"),
        ({"scale": ones}, "zero_point is None"),
        ({"scale": ones.T, "zero_point": zeros}, "scale is float32"),
        ({"scale": ones.astype(np.float16), "zero_point": zeros}, "float16"),
    ]
    for given, message in refused:
        with pytest.raises(ValueError, match=message):
            quantize_scaled(jnp.ones((3, 4)), spec=jc.Spec("uint4(channel=0,zero_point=integer)"), **given)


@pytest.mark.smoke
def test_other_refusals():
    x = jnp.ones((3, 4))
    with pytest.raises(ValueError, match="at most 8 are stored"):
        quantize_scaled(x, spec=jc.Spec("binary16(channel=0)"))
    with pytest.raises(ValueError, match="is not scaled"):
        fit_scaled(x, spec=jc.Spec("integer8"))
    with pytest.raises(ValueError, match="qvalue is uint8"):
        stored = quantize_scaled(x, spec=Spec(jc.formats.mxfp4))
        dequantize_scaled(*stored, spec=Spec(jc.formats.mxfp4), shape=(3, 9), dtype="float32")
    with pytest.raises(ValueError, match="not an axis of an array of 1 dimensions"):
        require_scaled_plan(jc.Spec("int8(channel=1)"), (3,), "float32")
    with pytest.raises(ValueError, match="element=binary32"):
        require_scaled_plan(jc.Spec("binary32(channel=0)"), (3,), "float32")


test_further = further.test()
