"""Functions of two arguments rounded once, in every mode, against integer arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
import oracle_elementary as exact
import oracle_of_two
import pytest
from elementary_table import FORMATS, arguments, bits, words
from further import Further

import jchop as jc
from jchop._core.elementary.functions import BINARY_FUNCTIONS, elementary_function

further = Further()


def wrong(name: str, text: str, x: np.ndarray, y: np.ndarray, modes: Sequence[str] = exact.MODES) -> dict[str, int]:
    """How many results differ from the true ones, by mode."""
    word = words(len(x))
    rows = [partial(exact.round_array, exponent_bits=FORMATS[text][0], fraction_bits=FORMATS[text][1], mode=mode,
                    word=word) for mode in modes]  # fmt: skip
    v = oracle_of_two.values(name, x.astype(float), y.astype(float), lambda v: np.stack([row(v) for row in rows]))

    @jax.jit
    def every_mode(x: jax.Array, y: jax.Array, word: jax.Array) -> list[jax.Array]:
        specs = [jc.Spec(f"{text}:{mode}") for mode in modes]
        return [elementary_function(x, y, *([word] if s.rounding.stochastic else []), name=name, spec=s) for s in specs]

    counts = {}
    for mode, row, got in zip(modes, rows, every_mode(x, y, word), strict=True):
        bad = bits(np.asarray(got)) != bits(row(v).astype(np.float32))
        counts[mode] = int(bad.sum())
        if bad.any():
            print(name, text, mode, x[bad][:3], y[bad][:3], np.asarray(got)[bad][:3], v[bad][:3])
    return counts


def pairs_of(text: str, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of every size, numbers near 1 and of similar sizes, and small squares."""
    rng = np.random.default_rng(seed)
    every, n = arguments(text), count // 4
    some = np.asarray(jc.round_to_format(rng.normal(size=4 * n).astype(np.float32) * 3, text)).reshape(4, n)
    squares = rng.integers(1, 16, n).astype(np.float32) ** rng.choice([1, 2, 4], n)
    halves = rng.integers(-12, 24, n).astype(np.float32) / 4
    x = np.concatenate([rng.choice(every, n), np.abs(some[0]), -some[1], squares])
    y = np.concatenate([rng.choice(every, n), some[2], some[1] * np.exp2(np.round(some[3])), halves])
    return x.astype(np.float32), np.asarray(jc.round_to_format(y.astype(np.float32), text))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *((name, 9) for name in BINARY_FUNCTIONS),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in BINARY_FUNCTIONS),
    ],
)
def test_pairs_of_an_8_bit_format(name: str, step: int) -> None:
    text = "float8_e5m2"
    x, y = (v.ravel() for v in np.meshgrid(arguments(text)[::step], arguments(text)[::step]))
    assert not any(wrong(name, text, x, y, exact.MODES if step == 3 else exact.MODES[:1]).values())


MANY = [("pow", "binary16", 1000)]
MANY += [
    pytest.param(name, text, 100_000, marks=pytest.mark.slow)
    for name, text in itertools.product(BINARY_FUNCTIONS, ["bfloat16", "binary16"])
]


@further
@pytest.mark.parametrize(("name", "text", "count"), MANY)
def many_pairs_of_16_bit_formats(name: str, text: str, count: int) -> None:
    modes = exact.MODES if count > 1000 else exact.MODES[-2:]
    assert not any(wrong(name, text, *pairs_of(text, count, 1), modes).values())


@pytest.mark.in_turn(64)
@pytest.mark.parametrize("name", BINARY_FUNCTIONS)
def test_special_values(name: str) -> None:
    """Those of C, which NumPy has too, except that log(e^-0 + e^-inf) is +0."""
    ends = np.array([0, -0.0, 1, -1, 2, -2, 3, 0.5, -0.5, np.inf, -np.inf, np.nan], np.float32)
    x, y = (v.ravel() for v in np.meshgrid(ends, ends))
    with np.errstate(all="ignore"):
        want = oracle_of_two.NEAR[name][0](x.astype(float), y.astype(float))
    want = np.asarray(jc.round_to_format(want, "bfloat16")).astype(np.float32)
    if name == "logaddexp":
        want = np.where(want == 0, np.float32(0), want)
    got = np.asarray(jax.jit(partial(elementary_function, name=name, spec=jc.Spec("bfloat16")))(x, y))
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.in_turn(64)
@pytest.mark.parametrize("mode", ["up", "down", "odd"])
def test_exact_powers_and_roots_are_exact_in_every_mode(mode: str) -> None:
    x, y = np.array([625, -3, 2.0**-14], np.float32), np.array([0.25, 5, 1.5], np.float32)
    assert jc.math.power(x, y, f"binary16:{mode}").tolist() == [5.0, -243.0, 2.0**-21]
    assert jc.math.hypot(np.float32(3), np.float32(-4), f"binary16:{mode}") == 5.0


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("mode", "want"), [("nearest_away", 362.0), ("nearest_even", 360.0), ("nearest_zero", 360.0)])
def test_exact_powers_may_be_ties(mode: str, want: float) -> None:
    assert jc.math.power(np.float32(19), np.float32(2), f"bfloat16:{mode}") == want


@further
def ends_of_the_range() -> None:
    """Products and squares that float32 does not hold."""
    big, small = np.float32(2.0**127), np.float32(2.0**-133)
    assert jc.math.hypot(3 * small, 4 * small, "bfloat16") == 5 * small
    assert jc.math.hypot(big, 2.0**-30 * big, "bfloat16:up") == big * np.float32(1 + 2.0**-7)
    assert jc.math.arctan2(small, np.float32(1), "bfloat16:down") == 0
    assert jc.math.power(np.float32(2), np.float32(-133), "bfloat16") == small
    assert jc.math.logaddexp(np.float32(0), np.float32(-88), "bfloat16:down") > 0


@further.first
@pytest.mark.parametrize("name", ["arctan2", pytest.param("power", marks=pytest.mark.slow)])
def emulate_float64_and_the_functions_agree(name: str) -> None:
    x, y = (np.abs(v[:60]) for v in pairs_of("bfloat16", 240, 5))
    want = getattr(jc.math, name)(x, y, "bfloat16:up")
    got = jc.emulate({"power": jax.lax.pow, "arctan2": jax.lax.atan2}[name], "bfloat16:up")(x, y)
    np.testing.assert_array_equal(bits(np.asarray(got)), bits(want))
    wide = getattr(jc.math, name)(x.astype(float), y.astype(float), "bfloat16:up")
    np.testing.assert_array_equal(bits(wide.astype(np.float32)), bits(want))


test_further = further.test()
