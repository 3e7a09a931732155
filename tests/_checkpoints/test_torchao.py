"""Beside torchao 0.18: its published codes and signal-to-noise ratios for one matrix of normal numbers.

Our quotients are exact; torchao multiplies by a reciprocal that is rounded to float32, and so moves a few codes. Where
it does, its own arithmetic is repeated here to see that the digest is reached from there, and ours is compared with a
division in float64, which is exact enough not to move any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jchop as jc
from jchop import QArray
from jchop._storage import fit_half_quadratic

RNG = np.random.default_rng(0)
W = (RNG.standard_normal((512, 1024)) * 0.02).astype(np.float32)
X = RNG.standard_normal((64, 1024)).astype(np.float32)

#: Text of the format, dB of W, dB of X W^T where published.
RATIOS = [
    ("int8(channel=0,rule=half_range)", 42.09, 42.07),
    ("int8(group=tensor,rule=half_range)", 39.41, 39.41),
    ("int8(group=128,rule=half_range)", 43.69, 43.73),
    ("int4(group=32,rule=half_range)", 20.46, 20.42),
    ("int4(group=32,zero_point=integer)", 21.86, None),
    ("int4(group=32,zero_point=float)", 22.14, 22.13),
    ("int4(group=128,zero_point=float)", 20.00, 19.92),
    ("int4(group=32,rule=no_clip)", 20.73, None),
    ("int2(group=32,rule=half_range)", 6.52, None),
    ("int3(group=32,rule=half_range)", 13.84, None),
    ("int5(group=32,rule=half_range)", 26.76, None),
    ("int6(group=32,rule=half_range)", 32.92, None),
    ("float8_e4m3fn(channel=0)", 31.55, 31.52),
    ("e3m2fn(channel=0)", 25.59, None),
    ("e2m3fn(channel=0)", 31.06, None),
    ("e2m2(channel=0,infinities=false,nans=none)", 24.98, None),
    ("mxfp8_e4m3", 30.66, None),
    ("mxfp8_e4m3(rule=rceil)", 31.53, None),
    ("mxfp4", 18.86, None),
    ("mxfp4(rule=even)", 19.02, None),
    ("mxfp4(rule=ceil)", 17.26, None),
    ("nvfp4", 20.43, None),
    ("nvfp4(rule=absmax)", 17.71, None),
    ("nf4", 20.73, 20.76),
]


def decibels(exact: np.ndarray, got: np.ndarray) -> float:
    exact = exact.astype(np.float64)
    return 20 * float(np.log10(np.linalg.norm(exact) / np.linalg.norm(exact - got)))


def digest(codes: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(codes).tobytes()).hexdigest()[:12]


def entries(q: QArray) -> np.ndarray:
    """A code for each element, by NumPy alone: bits of a row in little-endian order."""
    assert q.spec.scaled is not None and q.length is not None
    bits = q.spec.scaled.bits
    rows = np.unpackbits(np.asarray(q.qvalue).view(np.uint8), axis=-1, bitorder="little")
    rows = rows[..., : q.length * bits].reshape(*q.shape, bits)
    return (rows << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)


def signed(codes: np.ndarray, bits: int) -> np.ndarray:
    return (codes << 8 - bits).astype(np.uint8).view(np.int8) >> 8 - bits


@pytest.fixture(scope="module")
def stored() -> Callable[[str], QArray]:
    """Each format compiles and runs once."""
    made: dict[str, QArray] = {}

    def quantized(text: str) -> QArray:
        if text not in made:
            made[text] = jc.quantize(W, text)
        return made[text]

    return quantized


@pytest.mark.parametrize("rows", [RATIOS[:1], *(RATIOS[1:][i::5] for i in range(5))], ids=lambda rows: rows[0][0])
@pytest.mark.in_turn(1000)
def test_ratios(stored: Callable[[str], QArray], rows: list[tuple[str, float, float | None]]) -> None:
    for text, of_w, of_y in rows:
        got = jc.dequantize(stored(text))
        assert (text, decibels(W, got)) == (text, pytest.approx(of_w, abs=0.05))
        if of_y is not None:
            assert (text, decibels(X @ W.T, X @ got.T)) == (text, pytest.approx(of_y, abs=0.05))


Stored = Callable[[str], QArray]


def codes_that_are_theirs(stored: Stored) -> None:
    assert digest(np.asarray(stored("int8(group=tensor,rule=half_range)").qvalue)) == "fd6cb85665fd"
    assert digest(signed(entries(stored("int4(group=32,zero_point=integer)")), 4)) == "f05b0cd0f009"
    assert digest(np.asarray(stored("mxfp8_e4m3").qvalue)) == "b1df183e0d7e"
    assert digest(np.asarray(stored("mxfp4").qvalue)) == "60593f98e3d1"
    assert digest(np.asarray(stored("nvfp4(rule=absmax)").qvalue)) == "2676e841d651"


def tinygemm_codes_are_theirs(stored: Stored) -> None:
    """Theirs count from 0, and ours from -8. They round each step to float32, ours are scales that are rounded once."""
    for group, published in ((32, "ed55aecbbbdd"), (128, "514e78c77664")):
        q = stored(f"int4(group={group},zero_point=float)")
        assert digest(entries(q) ^ 8) == published
        x = W.reshape(512, -1, group)
        low, high = x.min(-1).astype(np.float64), x.max(-1).astype(np.float64)
        np.testing.assert_array_equal(q.scale, ((high - low) / 15).astype(np.float32))
        middle = low + 8 * np.asarray(q.scale, np.float64)
        np.testing.assert_array_equal(q.zero_point, middle.astype(np.float32))


def half_quadratic_zero_points(stored: Stored) -> None:
    """HQQ in groups of 32: 22.44 dB, and 22.42 of the product, from whole zero points."""
    text = "int4(group=32,zero_point=float)"
    scale, zero_point = fit_half_quadratic(W, text, whole_start=True)
    np.testing.assert_array_equal(scale, stored(text).scale)
    got = jc.dequantize(jc.quantize(W, text, scale=scale, zero_point=zero_point))
    assert decibels(W, got) == pytest.approx(22.44, abs=0.05)
    assert decibels(X @ W.T, X @ got.T) == pytest.approx(22.42, abs=0.05)


def nf4_with_their_levels(stored: Stored) -> None:
    """Theirs are rounded to four decimals; packed high nibble first."""
    levels = np.round(jc.formats.nf4.element.values(), 4).astype(np.float32)
    codes = entries(jc.quantize(W, jc.formats.nf4(element=jc.formats.CodebookFormat(tuple(map(float, levels))))))
    assert digest(codes[:, ::2] << 4 | codes[:, 1::2]) == "9439be8080e3"


def integers_differ_by_their_reciprocal_alone(
    stored: Stored, text: str, group: int, bits: int, published: str, moved: int
) -> None:
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    x = W.reshape(512, -1, group)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32((high - low) / 2)
    theirs = np.clip(np.rint(x * (np.float32(1) / scale)), low, high).astype(np.int8).reshape(W.shape)
    exact = np.clip(np.rint(x.astype(np.float64) / scale), low, high).astype(np.int8).reshape(W.shape)
    ours = signed(entries(stored(text)), bits)
    assert digest(theirs) == published
    np.testing.assert_array_equal(ours, exact)
    assert np.count_nonzero(ours != theirs) == moved


def floats_differ_by_their_division_alone(stored: Stored) -> None:
    for text, dtype, largest, published in (
        ("float8_e4m3fn(channel=0)", ml_dtypes.float8_e4m3fn, 448, "5d3f21eb3de4"),
        ("e3m2fn(channel=0)", ml_dtypes.float6_e3m2fn, 28, "0b6e27810e3e"),
    ):
        scale = np.abs(W).max(-1, keepdims=True) / np.float32(largest)
        theirs = np.clip(W / scale, -largest, largest).astype(dtype).view(np.uint8)
        assert digest(theirs) == published
        ours = entries(stored(text))
        (row, column), *more = np.argwhere(ours != theirs)
        # float32 rounds the one quotient that lies beside a tie onto it.
        quotient, rounded = float(W[row, column]) / float(scale[row, 0]), W[row, column] / scale[row, 0]
        values = [float(codes[row, column : column + 1].view(dtype)[0]) for codes in (ours, theirs)]
        assert not more and sum(values) / 2 == float(rounded) != quotient
        assert abs(quotient - values[0]) < abs(quotient - values[1])


def the_dynamic_map_is_as_good_as_theirs(stored: Stored) -> None:
    x = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    assert decibels(x, jc.dequantize(jc.quantize(x, jc.formats.dynamic8))) == pytest.approx(39.27, abs=0.1)


CHECKS: dict[str, tuple[Any, ...]] = {
    "int8": (integers_differ_by_their_reciprocal_alone, RATIOS[0][0], 1024, 8, "399c56139f09", 62),
    "int4": (integers_differ_by_their_reciprocal_alone, RATIOS[3][0], 32, 4, "90e523431c9c", 2496),
    "same": (codes_that_are_theirs,),
    "tinygemm": (tinygemm_codes_are_theirs,),
    "half-quadratic": (half_quadratic_zero_points,),
    "nf4": (nf4_with_their_levels,),
    "floats": (floats_differ_by_their_division_alone,),
    "dynamic": (the_dynamic_map_is_as_good_as_theirs,),
}


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("name", CHECKS)
def test_codes_beside_theirs(name: str, stored: Stored) -> None:
    check, *given = CHECKS[name]
    check(stored, *given)
