"""The plan of a scaled format, and the scale of a tensor."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.scaled.elements import ScaledPlan, divisor_parts, make_scaled_plan, tensor_scale


def plan_of(text: str) -> ScaledPlan:
    return make_scaled_plan(jc.Spec(text), CARRIERS["float32"])


def test_powers() -> None:
    for text, powers in {
        "mxfp8_e4m3": True,
        "int4(group=32,scale=bfloat16,rule=floor)": True,
        "int4(group=32,scale=e8m0fnu)": True,
        "int4(group=32)": False,
        "nvfp4(scale=e8m0fnu)": False,
    }.items():
        assert plan_of(text).is_power is powers, text


def test_a_plan_knows_that_of_its_scales() -> None:
    plan = plan_of("nf4(scale=int8(group=4)):up")
    assert plan.scale == jc.formats.binary32 and plan.element.rounding is jc.Rounding.UP
    assert plan.of_scales == make_scaled_plan(jc.Spec("int8(group=4)"), CARRIERS["float32"])


def test_parts_of_a_divisor() -> None:
    assert divisor_parts(Fraction(448)) == (7, 6)
    assert divisor_parts(Fraction(15, 2)) == (15, -1)
    assert divisor_parts(Fraction(3, 64)) == (3, -6)
    with pytest.raises(ValueError, match="1/3 is no integer times a power of two"):
        divisor_parts(Fraction(1, 3))


def test_scale_of_a_tensor() -> None:
    """The largest magnitude over 448 times 6; zeros, infinities and NaN do not count."""
    run = jax.jit(partial(tensor_scale, plan=plan_of("nvfp4")))
    for numbers, expected in (
        ([5376.0, np.nan, -np.inf], 2.0),
        ([0.5, -2688.0, 0.0], 1.0),
        ([0.0, -0.0, 0.0], 1.0),
        ([np.nan, np.inf, 0.0], 1.0),
        ([], 1.0),
    ):
        assert float(run(np.array(numbers, np.float32))) == expected


def test_a_scale_of_two_levels_has_the_bits_that_a_divisor_leaves() -> None:
    """24 of the 28 bits of a divisor in float32 are those of the tensor's scale."""
    assert plan_of("nvfp4(scale=e4m3)").compute.name == "float32"
    with pytest.raises(ValueError, match=r"scale=e4m4 has 5 significant bits, and float32 has room for 4"):
        plan_of("nvfp4(scale=e4m4)")


def test_the_largest_scale_is_no_overflow() -> None:
    """A NaN block needs a quotient that rounds beyond the largest scale, 448; 448 itself is a scale."""
    spec, x = (
        "int8(group=2,scale=float8_e4m3fn,nan_block=True)",
        np.array([[448 * 127, 448], [480 * 127, 448]], np.float32),
    )
    assert np.asarray(jc.round_to_format(x, spec))[0].tolist() == x[0].tolist()
    assert np.isnan(jc.round_to_format(x, spec)[1]).all()


def test_a_percentile_counts_exactly() -> None:
    """Half of 202 numbers are at most 101."""
    stored = jc.quantize(np.arange(1, 203, dtype=np.float32), "int8(group=tensor,rule=percentile(50))")
    assert np.asarray(stored.scale).tolist() == [np.float32(101) / np.float32(127)]


@pytest.mark.parametrize("kind", ["integer", "float"])
@pytest.mark.parametrize("low", [2.0**-60, 255 * 2.0**-60])
@pytest.mark.in_turn(4)
def test_a_range_just_above_a_tie_of_scales(kind: str, low: float) -> None:
    """(max - min) / 255 is a tie of bfloat16 plus a remainder, or plus far bits."""
    x = np.array([255 * (1 + 2.0**-8), -low, 0, 0], np.float32)
    stored = jc.quantize(x, f"uint8(group=4,scale=bfloat16,zero_point={kind})")
    assert np.asarray(stored.scale, np.float32).tolist() == [1 + 2.0**-7]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_of_normal_numbers_under_their_root_of_the_mean_square(bits: int) -> None:
    """Each level is the mean of its cell. Beside NumPy: scales of ragged groups to bfloat16, zeros, clipped numbers."""
    fmt = jc.formats.SCALED_CATALOGUE[f"normal{bits}"]
    levels = np.array(fmt.element.levels)  # type: ignore[attr-defined]
    ends = [-9.0, *(levels[1:] + levels[:-1]) / 2, 9.0]
    for level, low, high in zip(levels, ends[:-1], ends[1:], strict=True):
        x = np.linspace(low, high, 20001)
        density = np.exp(-x * x / 2)
        assert abs(np.trapezoid(x * density) / np.trapezoid(density) - level) < 1e-6
    x = (
        np.random.default_rng(bits).standard_normal((64, 40)).astype(np.float32)
        * np.exp(np.arange(64.0) / 2 - 16)[:, None]
    )
    x = x.astype(np.float32)
    x[3, 7] *= 40
    for group in (16, 40):
        found = np.asarray(jc.round_to_format(x, fmt(group=group)))
        for at in range(0, 40, group):
            part = x[:, at : at + group].astype(np.float64)
            root = np.sqrt((part**2).mean(1, keepdims=True)).astype(ml_dtypes.bfloat16).astype(np.float64)
            nearest = levels[np.abs(part[:, :, None] / root[:, :, None] - levels).argmin(-1)]
            np.testing.assert_array_equal(found[:, at : at + group], (nearest * root).astype(np.float32))
    assert np.abs(jc.round_to_format(np.zeros((2, 8), np.float32), fmt)).max() < 1e-38
