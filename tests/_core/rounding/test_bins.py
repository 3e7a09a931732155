"""Thresholds found by leading bits beside NumPy's search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jchop._core.rounding.codebooks import Bins, make_bins, take_in_bounds

_DRAWN = np.random.default_rng(5)
#: Increasing integers: of both signs, of one, next to zero, few.
THRESHOLDS = [
    np.unique(_DRAWN.integers(-(1 << 30), 1 << 30, 200)),
    np.unique(_DRAWN.integers(1 << 20, 1 << 30, 90)),
    np.array([-5_000, -900, 0, 700, 5_000]),
    np.array([1, 800, 1_700]),
    np.array([1 << 22]),
]


def reached(bins: Bins, thresholds: np.ndarray, values: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """How many thresholds are reached: `values` are put into bins, `exact` are compared."""
    value = jnp.asarray(values, jnp.int32)
    below = np.asarray(take_in_bounds(jnp.asarray(bins.below), bins.place(value < 0, jnp.abs(value)))).astype(int)
    return below + (exact >= thresholds[below])


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("which", range(len(THRESHOLDS)))
def test_every_threshold_is_found(which: int, rng: np.random.Generator) -> None:
    thresholds = THRESHOLDS[which]
    near = rng.choice([*thresholds, 0], 10_000) + rng.integers(-3, 4, 10_000)
    values = np.concatenate([near, rng.integers(-(1 << 31) + 64, (1 << 31) - 64, 10_000)])
    for margin in (0, 16):
        bins = make_bins(tuple(thresholds.tolist()), margin)
        assert bins is not None and len(bins.below) <= 8192
        guesses = values + rng.integers(-margin, margin + 1, values.shape)
        expected = np.searchsorted(thresholds, values, side="right")
        np.testing.assert_array_equal(reached(bins, thresholds, guesses, values), expected)


def test_thresholds_that_are_too_close_have_no_bins() -> None:
    assert make_bins((1 << 20, 1 << 28, (1 << 28) + 1)) is None
    assert make_bins((1 << 28, (1 << 28) + 20), margin=16) is None
    assert make_bins((100, 102)) is not None
    assert make_bins((0, 1)) is None


def test_bins_are_as_few_as_can_be() -> None:
    bins = make_bins((1 << 20, 1 << 21, 1 << 22))
    assert bins is not None and len(bins.below) < 16 and not bins.negative


@pytest.mark.smoke
def test_taking_keeps_the_dtype() -> None:
    table = jnp.asarray([3, 1, 2], jnp.uint8)
    taken = jax.jit(take_in_bounds)(table, jnp.asarray([[2, 0]]))
    assert taken.dtype == jnp.uint8 and taken.tolist() == [[2, 3]]
