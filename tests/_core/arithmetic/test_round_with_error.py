"""Sums and products with an error term, at the very words where a stochastic mode turns; against exact rationals."""

from __future__ import annotations

from typing import Any

import cases
import jax
import numpy as np
import oracle
import oracle_arithmetic
import pytest
from oracle import Special

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic.exact import range_of
from jchop._core.arithmetic.hardware import has_constant_drop, word_surplus_bits
from jchop._core.matmul.operations import round_operation

MODES = ("nearest_even", "nearest_away", "down", "odd", "stochastic", "stochastic_b", "stochastic_equal")
COUNT = 400


pytestmark = pytest.mark.usefixtures("x64", "neighbours_kept")


def numbers(fmt: oracle.FloatSet, exponents: np.ndarray, carrier: str, rng: np.random.Generator) -> np.ndarray:
    """Values of a format with about these exponents, powers of two and the numbers next to them often."""
    one = 1 << fmt.m
    count = rng.choice([one, one + 1, 2 * one - 1, -1], len(exponents))
    count = np.where(count < 0, rng.integers(one, 2 * one, len(exponents)), count)
    least, top = fmt.normal_exponent, fmt.normal_exponent + 2**fmt.e - 3
    exponents = np.minimum(exponents, top)
    count >>= np.clip(least - exponents, 0, fmt.m + 1)
    value = np.ldexp(count.astype(np.float64), np.maximum(exponents, least) - fmt.m)
    return (value * rng.choice([-1.0, 1.0], len(value))).astype(carrier)


def pairs(name: str, fmt: oracle.FloatSet, carrier: str, rng: np.random.Generator) -> list[np.ndarray]:
    """Sums of terms up to 70 binades apart and products next to the ends of the range; zeros, infinities, NaN."""
    least, top = fmt.normal_exponent - fmt.m, fmt.normal_exponent + 2**fmt.e - 3
    first = rng.choice([rng.integers(least, least + 60, COUNT), rng.integers(least, top + 1, COUNT), [top] * COUNT])
    first = np.where(rng.integers(0, 4, COUNT) == 0, rng.integers(-64, -56, COUNT), first)
    if name == "add":
        second = first - rng.choice([rng.integers(0, 70, COUNT), rng.integers(0, 3, COUNT)])
    else:
        ends = [rng.integers(least - 45, fmt.normal_exponent + 3, COUNT), rng.integers(top - 2, top + 3, COUNT)]
        second = np.where(rng.integers(0, 4, COUNT) > 0, *ends) - first
        first[:80], second[:80] = rng.integers(-66, -59, (2, 80))  # the largest that are subnormal as a product
    both = [numbers(fmt, np.asarray(e), carrier, rng) for e in (first, second)]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, np.ldexp(1.0, least)], carrier)
    grid = np.meshgrid(special, special)
    return [np.concatenate([v, g.ravel()]) for v, g in zip(both, grid, strict=True)]


def turning(exact: list[oracle.Value], fmt: oracle.FloatSet, width: int) -> np.ndarray:
    """The first word with which `Rounding.STOCHASTIC` takes the neighbour away from zero."""
    nus = [0 if isinstance(v, Special) else oracle.neighbours(fmt, abs(v))[1] for v in exact]
    return np.array([2**width - 1 - max(nu * 2**width // 1 - 1, 0) for nu in nus], f"uint{width}")


#: Formats, their carrier, and whether a word has more bits beyond those that are dropped than a float has.
FORMATS = [
    ("bfloat16", oracle.ieee(8, 7), "float32", False),
    ("e8m14", oracle.ieee(8, 14), "float32", False),
    ("e8m15", oracle.ieee(8, 15), "float32", True),
    ("e5m10", oracle.ieee(5, 10), "float32", False),
    ("e8m23", oracle.ieee(8, 23), "float64", False),
]


@pytest.mark.parametrize(
    ("text", "fmt", "kind", "wide", "modes"),
    [(*FORMATS[3], ("stochastic",)), *(pytest.param(*row, MODES, marks=pytest.mark.slow) for row in FORMATS)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_at_the_words_that_decide(
    text: str, fmt: oracle.FloatSet, kind: str, wide: bool, modes: tuple[str, ...], rng: np.random.Generator
) -> None:
    carrier, width = oracle.CARRIERS[kind], 64 if kind == "float64" else 32
    specs = [jc.Spec(text, rounding=mode) for mode in modes] + [
        jc.Spec(text, rounding="stochastic", overflow="propagate")
    ]
    assert (word_surplus_bits(specs[0], CARRIERS[kind]) > CARRIERS[kind].fraction) == wide
    known = (range_of(specs[0], CARRIERS[kind]),) * 2
    for name in ("add", "mul"):
        args = pairs(name, fmt, kind, rng)
        exact = {
            down: oracle_arithmetic.exact_results("add" if name == "add" else "multiply", args, carrier, down)
            for down in (False, True)
        }
        turn = turning(exact[False], fmt, width)
        step = rng.integers(-1, 2, len(turn))
        word = (turn + step.astype(turn.dtype)).astype(turn.dtype)
        run = jax.jit(lambda args, word, name=name: [round_operation(name, args, s, word, ranges=known) for s in specs])
        results: list[Any] = run(args, word)
        for spec, got in zip(specs, results, strict=True):
            mode, n = spec.rounding.value, width - (spec.rounding.value == "stochastic_b")
            want = [
                oracle.round_exact(fmt, v, mode, spec.overflow.value, n=n, r=int(r) >> width - n)
                for v, r in zip(exact[mode == "down"], word, strict=True)
            ]
            bits = np.array([oracle.to_bits(v, carrier) for v in want], carrier.words)
            where = cases.differences(np.asarray(got), bits, carrier)
            shown = [([a[i].item().hex() for a in args], hex(word[i]), got[i], want[i]) for i in where[:5]]
            assert not len(where), (name, str(spec), len(where), shown)


def test_formats_with_one_number_of_dropped_bits() -> None:
    for text, constant in {
        "e4m3": True,
        "bfloat16:saturate": True,
        "e5m10:stochastic": True,
        "e5m10:stochastic_c": False,
        "e4m3(subnormals=false)": False,
        "float8_e4m3fnuz": False,
        "binary32": False,
        "e9m10": False,
        "integer8": False,
        "codebook(-1,0,1)": False,
    }.items():
        assert has_constant_drop(jc.Spec(text), CARRIERS["float32"]) == constant, text
