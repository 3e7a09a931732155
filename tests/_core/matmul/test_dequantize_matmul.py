"""The product with a matrix of codes and group scales, against exact arithmetic."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from programs.program import equations

from jchop._core.matmul.dequantize_matmul import dequantize_matmul_body, join_columns, part_columns
from jchop.formats import ElementFormat, FixedFormat, IntegerFormat
from jchop.formats._catalogue import float4_e2m1fn, float8_e4m3fn, float8_e5m2

FORMATS: dict[str, ElementFormat] = {
    "int2": IntegerFormat(2),
    "int4": IntegerFormat(4),
    "uint4": IntegerFormat(4, signed=False),
    "int8": IntegerFormat(8),
    "uint8": IntegerFormat(8, signed=False),
    "fixed2.2": FixedFormat(2, 2),
    "float4_e2m1fn": float4_e2m1fn,
    "float8_e4m3fn": float8_e4m3fn,
    "float8_e5m2": float8_e5m2,
}
FOUR = ["int4", "int8", "float8_e4m3fn", "float8_e5m2"]
DTYPES = ["float32", "bfloat16"]

#: What the codes mean, by libraries and arithmetic that know nothing of jchop.
VALUES = {
    **{f"int{b}": (np.arange(1 << b) + (1 << b - 1)) % (1 << b) - 2.0 ** (b - 1) for b in (2, 4, 8)},
    **{f"uint{b}": np.arange(1.0 * (1 << b)) for b in (4, 8)},
    "fixed2.2": ((np.arange(16) + 8) % 16 - 8) / 4,
    "float4_e2m1fn": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
    "float8_e4m3fn": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    "float8_e5m2": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64),
}
#: (m, k, n, group): nothing divides anything, groups of one row, one group, groups of more than one step.
SHAPES = [
    (1, 1, 1, 1),
    (3, 100, 7, 32),
    (4, 96, 8, 32),
    (2, 40, 6, 1),
    (5, 70, 9, 100),
    (2, 1100, 3, 1030),
    (2, 1300, 5, 600),
    (1, 1500, 5, 48),
]


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes packed along the last axis by definition: code j of a row is its bits [bits j, bits (j + 1))."""
    size = -(-codes.shape[1] * bits // 8)
    rows = [sum(int(code) << bits * j for j, code in enumerate(row)).to_bytes(size, "little") for row in codes]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(codes.shape[0], size)


def exact_data(
    rng: np.random.Generator, name: str, shape: tuple[int, int, int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x, packed codes, scales (float32), and their product (float64), every partial sum of which float32 holds."""
    m, k, n, group = shape
    values = VALUES[name]
    usable = np.flatnonzero(np.isin(values, np.arange(-4096, 4097) / 32))
    codes = rng.choice(usable, (k, n))
    x = rng.integers(-3, 4, (m, k)).astype(np.float32)
    scales = 2.0 ** rng.integers(-1, 2, (-(-k // group), n))
    w = values[codes] * np.repeat(scales, group, 0)[:k]
    # In quanta of 2^-6 nothing exceeds 2^24.
    assert (np.abs(x) @ np.abs(w)).max() * 64 < 1 << 24
    return x, pack_rows(codes, FORMATS[name].bits), scales.astype(np.float32), x.astype(np.float64) @ w


def rounded(y: np.ndarray, dtype: str) -> np.ndarray:
    return y.astype(np.float32).astype(np.dtype(dtype))


def error_bound(x: np.ndarray, w: np.ndarray, terms: int, y: np.ndarray, dtype: str) -> np.ndarray:
    """What |computed - y| cannot exceed, w of exact products and y = x w both of fractions.

    A product reaches the result through at most `terms` roundings of float32 in whatever order the sums are taken
    (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1), and the result is rounded once more.
    """
    unit = Fraction(1, 1 << 24)
    gamma = terms * unit / (1 - terms * unit)
    sums = gamma * (np.abs(x) @ np.abs(w))
    last = Fraction(1, 1 << 8) if dtype == "bfloat16" else Fraction(0)
    return sums + last * (np.abs(y) + sums)


def random_data(
    rng: np.random.Generator, name: str, shape: tuple[int, int, int, int], dtype: str
) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """x, packed codes and scales of all magnitudes; the exact product, and how far a result may be from it."""
    m, k, n, group = shape
    values = VALUES[name]
    codes = rng.choice(np.flatnonzero(np.isfinite(values)), (k, n))
    x = rng.standard_normal((m, k)).astype(np.dtype(dtype))
    scales = np.exp(rng.standard_normal((-(-k // group), n))).astype(np.dtype(dtype))
    fractions = np.vectorize(Fraction, otypes=[object])
    w = fractions(values[codes]) * np.repeat(fractions(scales.astype(np.float64)), group, 0)[:k]
    exact = fractions(x.astype(np.float64)) @ w
    bound = error_bound(fractions(x.astype(np.float64)), w, k + len(scales) + 2, exact, dtype)
    return (x, pack_rows(codes, FORMATS[name].bits), scales), exact, bound


def within(y: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> bool:
    computed = np.vectorize(Fraction, otypes=[object])(np.asarray(y).astype(np.float64))
    return bool((np.abs(computed - exact) <= bound).all())


def run(name: str, group: int, *arrays: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(partial(dequantize_matmul_body, format=FORMATS[name], group=group))(*arrays))


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("name", "dtype"), list(zip(FORMATS, itertools.cycle(DTYPES), strict=False)))
def test_every_code_has_its_value(name, dtype):
    values = VALUES[name]
    codes = pack_rows(np.arange(len(values))[None, :], FORMATS[name].bits)
    ones = np.ones((1, 1), np.dtype(dtype)), np.ones((1, len(values)), np.float32)
    np.testing.assert_array_equal(run(name, 1, ones[0], codes, ones[1])[0].astype(np.float64), values)


@pytest.mark.in_turn(16)
@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [("int4", "bfloat16", shape) for shape in SHAPES]
    + [("int8", "float32", SHAPES[4]), ("float8_e4m3fn", "float32", SHAPES[6])]
    + [("float8_e5m2", "bfloat16", SHAPES[1])],
    ids=str,
)
def test_sums_that_float32_holds_are_exact(name, dtype, shape, rng):
    x, codes, scales, exact = exact_data(rng, name, shape)
    y = run(name, shape[3], x.astype(np.dtype(dtype)), codes, scales)
    assert y.dtype.name == dtype
    np.testing.assert_array_equal(y, rounded(exact, dtype))


@pytest.mark.in_turn(16)
@pytest.mark.parametrize(("name", "dtype"), list(zip(FOUR, itertools.cycle(DTYPES), strict=False)))
def test_random_data_within_the_bound(name, dtype, rng):
    shape = (3, 70, 5, 32)
    arrays, exact, bound = random_data(rng, name, shape, dtype)
    y = run(name, shape[3], *arrays)
    assert within(y, exact, bound)
    # The bound is no empty promise: it tells the result from one that used another group's scales.
    assert not within(run(name, shape[3], *arrays[:2], np.roll(arrays[2], 1, 0)), exact, bound)


@pytest.mark.smoke
def test_a_row_that_two_steps_reach_counts_once():
    """The last step of a group of 600 rows begins 88 rows before the end of the first: also for codes of inf."""
    k = 600
    codes = np.zeros((k, 1), np.uint8)
    codes[500] = 0x7C
    x, scales = np.zeros((2, k), np.float32), np.ones((1, 1), np.float32)
    x[0, 500], x[1, 5] = 1, 1
    assert run("float8_e5m2", k, x, codes, scales)[0, 0] == np.inf
    assert np.isnan(run("float8_e5m2", k, x, codes, scales)[1, 0])


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 0, 4, 4), (2, 8, 0, 4)])
def test_empty(shape):
    m, k, n, group = shape
    y = run(
        "int4", group, np.ones((m, k), np.float32), np.zeros((k, -(-n // 2)), np.uint8), np.ones((-(-k // group), n))
    )
    np.testing.assert_array_equal(y, np.zeros((m, n), np.float32), strict=True)


def test_parts_of_columns():
    matrix = jnp.arange(15.0).reshape(3, 5)
    parts = part_columns(matrix, 2)
    np.testing.assert_array_equal(parts[:, 0], [[0, 2, 4], [1, 3, 0]])
    np.testing.assert_array_equal(join_columns(parts, 5), matrix)


def sizes(jaxpr: Any) -> list[int]:
    """Sizes of all floating-point intermediates, those of inner programs included."""
    results = (v.aval for equation in equations(jaxpr) for v in equation.outvars)
    return [aval.size for aval in results if jnp.issubdtype(aval.dtype, jnp.floating)]


@pytest.mark.parametrize("group", [32, 4096])
def test_the_weights_are_never_decoded_whole(group):
    k, n = 4096, 64
    arrays = (
        jax.ShapeDtypeStruct((2, k), jnp.bfloat16),
        jax.ShapeDtypeStruct((k, n // 2), jnp.uint8),
        jax.ShapeDtypeStruct((k // group, n), jnp.float32),
    )
    found = sizes(jax.make_jaxpr(partial(dequantize_matmul_body, format=FORMATS["int4"], group=group))(*arrays).jaxpr)
    assert 512 * n // 2 in found
    assert max(found) <= k * n // 8
