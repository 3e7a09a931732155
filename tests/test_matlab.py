"""MATLAB chop's words, fed as MATLAB feeds Python, against exact arithmetic."""

from __future__ import annotations

import array
from types import SimpleNamespace
from typing import Any

import exact
import jax
import numpy as np
import oracle
import pytest
from each_case import each

import jchop as jc
from jchop import matlab

# Format, its values, and the exponents of the numbers that are rounded.
FORMATS = [
    ("h", oracle.ieee(5, 10), 32),
    ("fp8-e4m3", oracle.ieee(4, 3), 12),
    ("q52", oracle.ieee(5, 2), 20),
    ("b", oracle.ieee(8, 7, subnormals=False), 128),
    ("tf32", oracle.ieee(8, 10), 130),
    ("single", oracle.ieee(8, 23), 130),
]
MODES = {1: "nearest_even", 2: "up", 3: "down", 4: "toward_zero"}


@pytest.mark.in_turn(5)
@pytest.mark.parametrize(("name", "values", "reach"), FORMATS, ids=[row[0] for row in FORMATS])
def test_formats_and_directions(name: str, values: oracle.FloatSet, reach: int) -> None:
    x = exact.numbers(120, -reach, reach)
    x[2:5] = np.inf, -np.inf, np.nan
    for number, mode in MODES.items():
        exact.assert_same(matlab.chop(x, {"format": name, "round": float(number)}), exact.rounded(x, values, mode))


@each("subnormal", [0, 1])
def test_a_number_below_half_of_the_smallest_is_rounded_once(subnormal: int) -> None:
    """MATLAB's rounds it to half of the smallest number first, and then up."""
    smallest = 2.0**-14 if subnormal == 0 else 2.0**-24
    x = np.array([0.5, 1 - 2.0**-40, 1 + 2.0**-40]) * smallest * [1, 0.5, 0.5]
    np.testing.assert_array_equal(matlab.chop(x, {"subnormal": subnormal}), [0, 0, smallest])


def test_other_options() -> None:
    x = exact.numbers(120, -20, 20)
    flushed = oracle.ieee(5, 10, subnormals=False)
    exact.assert_same(matlab.chop(x, {"subnormal": 0.0}), exact.rounded(x, flushed))
    exact.assert_same(matlab.chop(x, format="bfloat16", subnormal=1), exact.rounded(x, oracle.ieee(8, 7)))
    custom = {"format": "custom", "params": array.array("d", [5.0, 7.0])}
    exact.assert_same(matlab.chop(x, custom), exact.rounded(x, oracle.ieee(4, 4)))
    of_any_emax = oracle.FloatSet(5, 3, 10, emax=10)
    for number, mode in MODES.items():
        exact.assert_same(
            matlab.chop(x, {"format": "c", "params": [4, 10], "round": number}), exact.rounded(x, of_any_emax, mode)
        )
    exact.assert_same(matlab.chop(x * 2.0**900, format="q52", explim=0), exact.rounded(x, oracle.ieee(9, 2)) * 2.0**900)
    assert matlab.chop(np.float32(1e30), {"format": "q43", "explim": False, "round": []}).dtype == np.float32


def test_what_matlab_passes() -> None:
    x = np.arange(1, 7).reshape(2, 3) / 3.0
    wanted = exact.rounded(x, oracle.ieee(4, 3))
    fortran: Any = np.asfortranarray(x)
    cases = [
        (memoryview(fortran), (2, 3)),  # a matrix
        (fortran.astype(np.float32), (2, 3)),
        (array.array("d", x.ravel()), (6,)),  # a row
        (x.tolist(), (2, 3)),
        (np.zeros((0, 3)), (0, 3)),
    ]
    options = SimpleNamespace(format="q43", subnormal=1.0, round=[], flip=0.0, p=[], explim="")
    for data, shape in cases:
        got = matlab.chop(data, options)
        assert isinstance(got, np.ndarray) and got.shape == shape
        if got.size:
            exact.assert_same(
                got.reshape(2, 3), wanted if got.dtype == np.float64 else exact.rounded(data, oracle.ieee(4, 3))
            )
    assert matlab.chop(memoryview(fortran)).flags.f_contiguous
    assert jc.matlab is matlab  # loaded when first used
    scalar = matlab.chop(1 / 3, {"format": "q43"})
    assert isinstance(scalar, np.float64) and scalar == wanted[0, 0]


def test_random_rounding() -> None:
    x = exact.numbers(300, -16, 17)
    values = oracle.ieee(5, 2)
    low, high = exact.neighbours(x, values)
    for mode in (5, 6):
        got = matlab.chop(x, {"format": "q52", "round": mode, "seed": 3.0})
        assert ((got == low) | (got == high) | (np.abs(x) > 57344)).all() and (got != low).any() and (got != high).any()
        np.testing.assert_array_equal(got, matlab.chop(x, {"format": "q52", "round": mode, "seed": 3}))
    text = "e5m2:stochastic:propagate"
    np.testing.assert_array_equal(
        matlab.chop(x, format="q52", round=5, seed=3), jc.round_to_format(x, text, jax.random.key(3))
    )
    assert np.abs(matlab.chop(np.full(50, 60000.0), format="q52", round=5, seed=3)).max() == 57344


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_random_numbers_of_the_callers_own(dtype: Any) -> None:
    x = np.array([[1.0, 1.125, -1.125], [1.0625, -1.1875, 3e-5]], dtype)
    drawn = np.array([[0.0, 0.49, 0.51], [0.24, 0.76, 0.999]])
    asked = []

    def randfunc(n: int) -> np.ndarray:
        asked.append(n)
        return drawn.ravel(order="F")

    # e5m2 around 1 has steps of 1/4: the discarded fractions are 0, 1/2, 1/2; 1/4, 3/4, and that of 3e-5 / 2^-16.
    got = matlab.chop(x, {"format": "q52", "round": 5, "randfunc": randfunc})
    assert asked == [6]
    np.testing.assert_array_equal(got, np.array([[1, 1.25, -1.0], [1.25, -1.0, 2.0**-16]]))
    half = matlab.chop(x, {"format": "q52", "round": 6, "randfunc": randfunc})
    np.testing.assert_array_equal(half, np.array([[1, 1.25, -1.0], [1.25, -1.0, 2.0**-16]]))
    for wrong in (lambda n: [0.5], lambda n: [1.0] * n):
        with pytest.raises(ValueError, match=r"randfunc\(6\) must return 6 numbers"):
            matlab.chop(x, {"round": 5, "randfunc": wrong})


def test_flips() -> None:
    x = np.random.default_rng(0).standard_normal((4, 50))
    got = matlab.chop(x, {"format": "h", "flip": 1, "p": 0.25, "seed": 9})
    np.testing.assert_array_equal(got, jc.flip_bits(x, "binary16", 0.25, jax.random.key(9)))
    assert 20 < (got != matlab.chop(x, {"format": "h"})).sum() < 80


@pytest.mark.smoke
def test_refused() -> None:
    for error, said, options in (
        (ValueError, "format='e5m2' must be one of 'q43'", {"format": "e5m2"}),
        (ValueError, "option 'mode' is not known", {"mode": 1}),
        (ValueError, "round=7", {"round": 7.0}),
        (TypeError, "round=1.5", {"round": 1.5}),
        (ValueError, "subnormal=2 must be 0 or 1", {"subnormal": 2}),
        (ValueError, "must be .t, emax.", {"format": "custom"}),
        (ValueError, "t from 1 to 53", {"format": "custom", "params": [54, 10]}),
        (ValueError, "pass seed or randfunc", {"round": 5}),
        (ValueError, "pass seed", {"flip": 1}),
        (ValueError, "p=2", {"flip": 1, "p": 2, "seed": 1}),
        (TypeError, "options=3", 3),
    ):
        with pytest.raises(error, match=said):
            matlab.chop(1.0, options)
    with pytest.raises(TypeError, match="int64"):
        matlab.chop(np.arange(3))
