"""Tables of levels beside those that others publish."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
from each_case import each

import jchop as jc
from jchop.formats import CodebookFormat


def levels_of(fmt: jc.formats.ScaledFormat) -> np.ndarray:
    assert isinstance(fmt.element, CodebookFormat)
    levels = np.array(fmt.element.levels)
    np.testing.assert_array_equal(levels.astype(np.float32), levels)
    return levels


def fused(i: int, step: np.float32, start: np.float32) -> np.float32:
    """Start + i step, rounded once: the product of 8 and 24 bits, and the sum, are exact in binary64."""
    return np.float32(float(start) + i * float(step))


def spaced(count: int) -> list[np.float32]:
    """``torch.linspace(0.1, 1, count)``: from the start in the lower half, from the end in the upper one."""
    start, end = np.float32(0.1), np.float32(1)
    step = (end - start) / np.float32(count - 1)
    lower = [fused(i, step, start) for i in range(count // 2)]
    return lower + [fused(i - count + 1, step, end) for i in range(count // 2, count)]


def create_dynamic_map(signed: bool, exponent_bits: int, total_bits: int) -> list[float]:
    """bitsandbytes' function of that name, from its description: for each exponent the means of spaced numbers."""
    spare = total_bits - signed - exponent_bits
    data = [0.0, 1.0]
    for exponent in range(exponent_bits):
        bounds = spaced(2 ** (exponent + spare) + 1)
        power = np.float32(10.0 ** (exponent - exponent_bits + 1))
        means = [power * ((low + high) / np.float32(2)) for low, high in itertools.pairwise(bounds)]
        data += [sign * float(mean) for mean in means for sign in ((1, -1) if signed else (1,))]
    assert len(data) == 2**total_bits
    return sorted(data)


@each(
    ("fmt", "arguments"),
    [(jc.formats.dynamic8, (True, 7, 8)), (jc.formats.udynamic8, (False, 7, 8)), (jc.formats.dynamic4, (True, 3, 4))],
)
def test_dynamic_maps_are_those_of_bitsandbytes(fmt, arguments):
    assert levels_of(fmt).tolist() == create_dynamic_map(*arguments)


def test_the_dynamic_map_is_the_published_one():
    """The digest of the 256 binary32 numbers that several projects have copied from bitsandbytes."""
    published = "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"
    assert hashlib.sha256(levels_of(jc.formats.dynamic8).astype("<f4").tobytes()).hexdigest() == published


def test_nf4_is_that_of_qlora():
    """arXiv 2305.14314: quantiles of N(0, 1), evenly spaced from each end to 0, over the largest one.

    The ends are at the quantile (1/2) (1/32 + 1/30) below 1; bitsandbytes has these numbers to about six digits.
    """
    levels = levels_of(jc.formats.nf4)
    offset = 0.9677083

    def quantile(p: float) -> float:
        low, high = 0.0, 8.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if math.erf(middle / math.sqrt(2)) < 2 * p - 1 else (low, middle)
        return low

    positive = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    wanted = np.array(sorted([*negative, 0.0, *positive])) / max(positive)
    np.testing.assert_allclose(levels, wanted, atol=3e-6)
    assert jc.formats.nf4.element.encode([-1.0, 0.0, 1.0]).tolist() == [0, 7, 15]
