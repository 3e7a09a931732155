"""Logarithmic takums: values, points between them, modes and codes against powers of e in integers of 900 bits."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import jax
import numpy as np
import oracle
import oracle_elementary
import pytest

import jchop as jc
from jchop._common.bit_ops import CARRIERS, enable_x64_for
from jchop._core.rounding.codebooks import takum_power
from jchop._core.rounding.codes import decode_elements, encode_elements
from jchop._core.rounding.elements import round_to_spec
from jchop.formats import _tapered
from jchop.formats._tapered import log_takum_levels, log_takum_thresholds


def power(n: int, code: int) -> Fraction:
    """e^(l/2) for the l of a positive code (arXiv 2404.18603, definition 2), to 900 binary places."""
    string = f"{code:0{n}b}"
    above, field = string[1] == "1", int(string[2:5], 2)
    r = field if above else 7 - field
    rest = string[5:] + "0" * 40
    c = int("0" + rest[:r], 2) + (2**r - 1 if above else 1 - 2 ** (r + 1))
    l = c + Fraction(int(rest[r:], 2), 2 ** len(rest[r:]))  # noqa: E741
    return Fraction(oracle_elementary.exp(oracle_elementary.fixed(l / 2)), oracle_elementary.ONE)


def above(value: Fraction) -> float:
    """The smallest binary64 number above a number that is none."""
    nearest = float(value)
    return nearest if nearest > value else math.nextafter(nearest, math.inf)


NEAREST = ("nearest_even", "nearest_away", "nearest_zero")


def check_codes(n: int, codes: list[int], modes: tuple[str, ...] = NEAREST) -> None:
    fmt = jc.formats.LogTakumFormat(n)
    powers = [power(n, code) for code in codes]
    assert fmt.decode(codes).tolist() == [float(value) for value in powers]
    assert fmt.decode([(1 << n) - code for code in codes]).tolist() == [-float(value) for value in powers]
    points = [power(n + 1, 2 * code + 1) for code in codes if code < fmt.max_code]
    ends = np.array([above(point) for point in points])
    lower = np.array([code for code in codes if code < fmt.max_code])
    x = np.concatenate([np.nextafter(ends, 0), ends])
    wanted = fmt.decode(np.concatenate([lower, lower + 1]))
    for mode in modes:
        np.testing.assert_array_equal(jc.round_to_format(x, f"takum{n}:{mode}"), wanted)
    np.testing.assert_array_equal(jc.round_to_format(-x, fmt), -wanted)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("n", [6, 8])
def test_every_value_and_every_point_between(n: int) -> None:
    check_codes(n, list(range(1, 1 << n - 1)))


@pytest.mark.parametrize("n", [32, *(pytest.param(n, marks=pytest.mark.slow) for n in (17, 25))])
def test_wide_strings(n: int) -> None:
    edges = [1, 2, 3, (1 << n - 2) - 1, 1 << n - 2, (1 << n - 2) + 1, (1 << n - 1) - 2, (1 << n - 1) - 1]
    check_codes(n, [*edges, *np.random.default_rng(n).integers(4, (1 << n - 1) - 4, 30).tolist()], NEAREST[:1])


def test_computed_powers_are_those_of_the_tables() -> None:
    with enable_x64_for("float64"):
        codes = np.arange(1, 1 << 11)
        levels = jax.jit(lambda c: takum_power(c, 12))(codes)
        firsts = jax.jit(lambda c: takum_power(2 * c + 1, 13, above=True))(codes[:-1])
    np.testing.assert_array_equal(np.asarray(levels).view(np.float64), log_takum_levels(12))
    np.testing.assert_array_equal(np.asarray(firsts).view(np.float64), log_takum_thresholds(12))


@pytest.mark.parametrize("n", [11, pytest.param(16, marks=pytest.mark.slow)])
def test_values_of_longer_strings(n: int) -> None:
    edges = [1, 2, 3, (1 << n - 2) - 1, 1 << n - 2, (1 << n - 2) + 1, (1 << n - 1) - 2, (1 << n - 1) - 1]
    check_codes(n, [*edges, *np.random.default_rng(0).integers(4, (1 << n - 1) - 4, 300).tolist()])
    fmt = jc.formats.LogTakumFormat(n)
    decoded = fmt.decode(range(1 << n))
    ordered = [*decoded[(1 << n - 1) + 1 :], *decoded[: 1 << n - 1]]
    assert all(low < high for low, high in itertools.pairwise(ordered))
    assert fmt.encode(decoded).tolist() == list(range(1 << n))


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_mode_and_every_code(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tables, and as strings of more than 16 bits are rounded."""
    if wide:
        monkeypatch.setattr(_tapered, "LOG_TAKUM_TABLE_BITS", 0)
    fmt, carrier = jc.formats.LogTakumFormat(8), CARRIERS["float64"]
    levels = [float(power(8, code)) for code in range(1, 128)]
    points = [power(9, 2 * code + 1) for code in range(1, 127)]
    rng = np.random.default_rng(1)
    between = [low + (high - low) * rng.random() for low, high in itertools.pairwise(levels)]
    x = np.array([*levels, *np.nextafter(levels, 0), *np.nextafter(levels, np.inf), *between, 1e-300, 1e300])
    x = np.concatenate([x, -x, [0.0, -0.0, np.inf, -np.inf, np.nan]])

    def wanted(value: float, mode: str) -> float:
        if not math.isfinite(value):
            return math.nan
        if value == 0:
            return 0.0
        size = abs(value)
        k = sum(level <= size for level in levels)  # the code of the neighbour toward zero
        if k in (0, 127) or levels[k - 1] == size:
            return math.copysign(levels[max(k, 1) - 1], value)
        away = {
            "up": value > 0, "down": value < 0, "toward_zero": False, "odd": k % 2 == 0,
        }.get(mode, Fraction(size) > points[k - 1])  # fmt: skip
        return math.copysign(levels[k - 1 + away], value)

    with enable_x64_for("float64"):
        modes = ("nearest_even", "up", "odd") if wide else oracle.DETERMINISTIC
        specs = [jc.Spec(fmt, mode) for mode in modes] + [jc.Spec(fmt, overflow="saturate")]
        codes = np.arange(256)

        @jax.jit
        def run(x: jax.Array, codes: jax.Array) -> tuple[list[jax.Array], jax.Array, jax.Array]:
            results = [round_to_spec(x, spec, carrier) for spec in specs]
            return results, decode_elements(codes, fmt, carrier), encode_elements(results[0], fmt, carrier)

        results, decoded, encoded = run(x, codes)
    for mode, result in zip(modes, results[:-1], strict=True):
        np.testing.assert_array_equal(result, [wanted(float(value), mode) for value in x], mode)
    np.testing.assert_array_equal(np.asarray(results[-1])[-3:], [levels[-1], -levels[-1], np.nan])
    np.testing.assert_array_equal(decoded, fmt.decode(codes))
    assert np.asarray(encoded).tolist() == fmt.encode(np.asarray(results[0])).tolist()


def test_published_numbers() -> None:
    """The README of Takums.jl prints takum8(4.0) as 3.955 and the takum of its root as 2.117."""
    x = float(jc.round_to_format(4.0, "takum8"))
    assert (round(x, 3), round(float(jc.round_to_format(math.sqrt(x), "takum8")), 3)) == (3.955, 2.117)


def test_facts_and_what_is_refused() -> None:
    fmt = jc.formats.LogTakumFormat(12)
    assert jc.Spec(str(fmt)).format == fmt and str(fmt) == "takum12"
    assert (fmt.bits, fmt.precision, fmt.has_nan, fmt.has_inf, fmt.max_code) == (12, None, True, False, 2047)
    x = np.random.default_rng(2).standard_normal((3, 20))
    q = jc.quantize(x, fmt)
    assert q.qvalue.nbytes == 120
    np.testing.assert_array_equal(jc.dequantize(q), jc.round_to_format(x, fmt))
    for run, message in (
        (lambda: jc.quantize(x, "takum8:stochastic", jax.random.key(0)), "a deterministic mode is needed"),
        (lambda: jc.formats.LogTakumFormat(33), "bits=33 must be an integer from 6 to 32"),
        (lambda: jc.quantize(x, "takum17"), "at most 16 are stored"),
        (lambda: jc.round_to_format(x, "takum8:stochastic", jax.random.key(0)), "are the bits of a logarithm"),
        (lambda: jc.round_to_format(np.float32(1), "takum8"), "cast x to float64 first"),
        (lambda: jc.math.add(1.0, 2.0, "takum8"), "to round a result once"),
        (lambda: jc.formats.ScaledFormat("takum8", group=16), "has its most bits next to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            run()
