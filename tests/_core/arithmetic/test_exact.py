"""Exact numbers with more bits than the carrier: the dropped part as a word, and overflow of codebooks."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic.basic import _exact_of_sum_and_error  # pyright: ignore[reportPrivateUsage]
from jchop._core.arithmetic.exact import ExactResult, _share_of_exact, carrier_range, exact_overflow_mask  # pyright: ignore[reportPrivateUsage]
from jchop._core.rounding.grid import make_grid
from jchop._core.rounding.modes import BelowSmallest, RandomBits

CARRIER, WIDTH = CARRIERS["float32"], 32


@pytest.mark.parametrize("text", ["integer8", "e4m3"])
def test_the_dropped_part_as_a_word(text: str, rng: np.random.Generator) -> None:
    """floor(nu 2^32) and whether bits are lost, for gaps from one to 2^70 units in the last place."""
    spec, (quantum, frac_bits) = jc.Spec(text), {"integer8": (0, 7), "e4m3": (-9, 3)}[text]
    exponent = np.arange(quantum - 46, quantum + 2).repeat(3)
    value = np.ldexp(1 + rng.integers(0, 2**23, len(exponent)) * 2.0**-23, exponent).astype(np.float32)
    rest = rng.integers(0, 2**32, len(value), dtype=np.uint32) * (np.arange(len(value)) % 3 > 0).astype(np.uint32)
    magnitude = jnp.asarray(value.view(np.int32))

    @jax.jit
    def shares(magnitude: jax.Array, rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        v = ExactResult(jnp.zeros_like(magnitude), magnitude, magnitude > 0, rest, magnitude < 0)
        return _share_of_exact(v, make_grid(spec.format, CARRIER))  # type: ignore[arg-type, return-value]

    share, lost = map(np.asarray, shares(magnitude, jnp.asarray(rest)))
    for x, more, e, got, sticky in zip(value, rest.tolist(), exponent.tolist(), share, lost, strict=True):
        exact = Fraction(float(x)) + Fraction(more, 2**WIDTH) * Fraction(2) ** (e - 23)
        gap = Fraction(2) ** max(quantum, e - frac_bits)
        word = exact / gap % 1 * 2**WIDTH
        assert (int(got), bool(sticky)) == (word // 1, word % 1 != 0), (float(x).hex(), more)


def test_the_part_below_the_smallest_value_as_a_word() -> None:
    """Of a number below the smallest positive value: the floor of its share, and whether bits are lost."""
    grid = make_grid(jc.Spec("e4m3").format, CARRIER)  # type: ignore[arg-type]
    x = np.ldexp(np.array([0, 1, 1 + 2.0**-23, 1.5, 1 + 2.0**-9, 1]), [0, -10, -40, -11, -32, -60])
    magnitude = jnp.asarray(x.astype(np.float32).view(np.int32))
    draw = RandomBits(jnp.zeros(6, jnp.uint32), 32)
    share, lost = BelowSmallest(magnitude, magnitude < 0, draw, grid).share
    word = [Fraction(float(v)) * 2**9 * 2**WIDTH for v in x]
    assert share.tolist() == [w // 1 for w in word]
    assert jnp.asarray(lost).tolist() == [w % 1 != 0 for w in word]


def test_an_error_far_below_the_last_place() -> None:
    """The word is the floor of the error, not the next integer; the rest is said to be there."""
    spec, total = jc.Spec("e9m30:stochastic"), carrier_range(CARRIER)
    one = jnp.full(3, CARRIER.bias << CARRIER.fraction, jnp.int32)
    error = jnp.float32([2.0**-24, 2.0**-60, 2.0**-23 * (0.25 + 2.0**-24)])
    v = _exact_of_sum_and_error(jnp.zeros_like(one), one, error, total, spec, CARRIER)
    assert v.rest.tolist() == [2**31, 0, 2**30 + 2**8]
    assert v.sticky.tolist() == [False, True, False]


@pytest.mark.parametrize("ends", [(-0.5, 2.0), (0.5, 2.0), (-2.0, -0.5)])
def test_numbers_beyond_the_ends_of_a_codebook(ends: tuple[float, float]) -> None:
    """Exact ones, and ones that are larger in magnitude by half a unit in the last place."""
    some = [0, 0.25, 0.5, 1, 2, 3, np.inf, np.nan, np.nextafter(np.float32(0.5), np.float32(0))]
    value = np.array(some, np.float32).repeat(4)
    sign, inexact = np.arange(36) % 2 == 1, (np.arange(36) % 4 > 1) & np.isfinite(value)
    magnitude, rest = jnp.asarray(value.view(np.int32)), jnp.asarray(inexact.astype(np.uint32) << 31)
    v = ExactResult(jnp.where(sign, jnp.int32(-(2**31)), 0), magnitude, jnp.asarray(inexact), rest, magnitude < 0)
    exact = np.where(sign, -1.0, 1.0) * (value.astype(np.float64) + inexact * np.ldexp(1.0, -26))
    found = exact_overflow_mask(v, jc.Spec(jc.formats.CodebookFormat(ends)), CARRIER, None)
    np.testing.assert_array_equal(found, (exact < ends[0]) | (exact > ends[1]))
