"""QPyTorch's functions on NumPy and JAX: its value sets and its edge cases against exact arithmetic."""

from __future__ import annotations

import exact
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from further import Further

from jchop.compat.qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint
from jchop.compat.qtorch.quant import block_quantize, fixed_point_quantize, float_quantize

further = Further()

KEY = jax.random.key(2)


def without_specials(exp: int, man: int) -> oracle.FloatSet:
    """Floating point whose top exponent has values."""
    return oracle.FloatSet(exp, man, (1 << exp - 1) - 1, inf=False, nan="none")


@further.first
def value_sets() -> None:
    x = np.arange(-30, 30, 0.05).astype(np.float32)
    for exp, man in ((2, 2), (2, 3), (3, 2), (3, 0)):
        wanted = exact.rounded(x, without_specials(exp, man), "nearest_away", "saturate")
        exact.assert_same(float_quantize(x, exp, man, rounding="nearest"), wanted)
    top = np.array([131008, 131071.5, 1e30, -1e30, np.inf, -np.inf, np.nan, -0.0, 65519], np.float32)
    wanted = np.array([131008, 131008, 131008, -131008, 131008, -131008, np.nan, -0.0, 65504.0])
    exact.assert_same(float_quantize(top, 5, 10, "nearest"), wanted)


def test_powers_of_two() -> None:
    x = np.array([0, 0.124, 0.125, 0.374, 0.375, 0.7, 0.75, 1.49, 1.5, -3, 6, 11, 12, 25, -100], np.float32)
    wanted = [0, 0, 0.25, 0.25, 0.5, 0.5, 1, 1, 2, -4, 8, 8, 16, 16, -16]  # QPyTorch's results
    assert float_quantize(x, 3, 0, rounding="nearest").tolist() == wanted
    assert float_quantize(x, 2, 0, "nearest").tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2, -4, 4, 4, 4, 4, -4]
    assert set(float_quantize(np.full(200, 0.75, np.float32), 2, 0, key=KEY).tolist()) == {0, 1}


def test_halves_and_subnormals() -> None:
    half = np.array([65504, 65519, -65519, 65535], np.float32)
    assert float_quantize(half, 5, 10, "nearest").tolist() == [65504, 65504, -65504, 65536]
    wide = np.array([2.0**127 * 1021 / 512, 2.0**127 * 1023 / 512], np.float32)
    exact.assert_same(float_quantize(wide, 8, 7, "nearest"), np.full(2, 2.0**127 * (2 - 2.0**-7)))
    for exp, n, man in ((5, 2.0**-14, 10), (8, 2.0**-126, 7)):
        x = n * np.array(
            [1, 0.5, 2.0**-man, 2.0 ** -(man + 1), 2.0 ** -(man + 2), 1 - 2.0**-man, 1 - 2.0 ** -(man + 1)]
        )
        wanted = n * np.array([1, 0.5, 2.0**-man, 2.0**-man, 0, 1 - 2.0**-man, 1])
        exact.assert_same(float_quantize(x.astype(np.float32), exp, man, "nearest"), wanted)
    before_a_tie = np.array([0x36FFFFFF], np.uint32).view(np.float32)
    assert float_quantize(before_a_tie, 5, 2, "nearest") == 0  # QPyTorch rounds it up
    assert float_quantize(3.1516, 8, 1, "nearest") == 3 and float_quantize(1097.0, 2, 23, "nearest") == 8 - 2.0**-21
    assert float_quantize(np.float32(1.5), 8, 23, "nearest") == 1.5  # QPyTorch negates it


def test_fixed_point() -> None:
    x = np.linspace(-2, 2, 101).astype(np.float32)
    got = fixed_point_quantize(x, 5, 4, rounding="nearest")
    exact.assert_same(got, exact.rounded(x, oracle.fixed(1, 4)))
    assert (got.min(), got.max()) == (-1, 0.9375)
    symmetric = fixed_point_quantize(x, 5, 4, symmetric=True, rounding="nearest")
    exact.assert_same(symmetric, exact.rounded(x, oracle.fixed(1, 4, symmetric=True)))
    odd = np.array([8388609, 3.0, 5e20, -1.3125, -0.03], np.float32)
    unlimited = fixed_point_quantize(odd, 5, 4, clamp=False, rounding="nearest")
    assert isinstance(unlimited, np.ndarray) and unlimited.tolist() == [8388609, 3, np.float32(5e20), -1.3125, 0]
    on_jax = fixed_point_quantize(jnp.asarray(odd), 5, 4, clamp=False, rounding="nearest")
    assert isinstance(on_jax, jax.Array)
    np.testing.assert_array_equal(on_jax, unlimited)
    assert fixed_point_quantize(2.5, 8, 0, rounding="nearest") == 2  # no fraction bits, which QPyTorch refuses
    ends = np.array([-0.03, np.inf, -np.inf, np.nan], np.float32)
    ends = fixed_point_quantize(ends, 5, 4, clamp=False, rounding="nearest")
    np.testing.assert_array_equal(ends, [0, np.inf, -np.inf, np.nan])
    assert not np.signbit(ends[0])


def test_a_clamp_may_have_no_gradient() -> None:
    for number in (FloatingPoint(5, 2), FixedPoint(5, 4)):
        assert [number.spec("nearest", clipped=clipped).gradient.clipped for clipped in (False, True)] == [False, True]


def test_blocks() -> None:
    top = 1 - 2.0**-4
    x = np.linspace(-top, top, 999).astype(np.float32)
    x = x[np.abs(x * 16) % 1 != 0.5]  # ties are told apart
    exact.assert_same(np.abs(block_quantize(x, 5, rounding="nearest")), np.abs(exact.rounded(x, oracle.fixed(1, 4))))
    x = np.array([[1.0, 0.3, -0.1], [16.0, 3.1, 7.9]], np.float32)
    # An exponent for each row: quanta 2^(0 + 2 - 4) and 2^(4 + 2 - 4).
    assert block_quantize(x, 4, dim=0, rounding="nearest").tolist() == [[1, 0.25, -0.0], [16, 4, 8]]
    huge = np.array([2.0**127, 2.0**126, 1.0], np.float32)  # beyond what QPyTorch's addition holds
    assert block_quantize(huge, 4, rounding="nearest").tolist() == [2.0**127, 2.0**126, 0]


@further
def stochastic_rounding_is_unbiased() -> None:
    x = np.full(20000, 0.3, np.float32)
    for got, step in (
        (fixed_point_quantize(x, 7, 6, key=KEY), 2.0**-6),
        (float_quantize(x, 6, 5, key=KEY), 2.0**-7),
        (block_quantize(x, 6, key=KEY), 2.0**-6),
        (float_quantize(x * 2.0**-17, 5, 2, key=KEY), 2.0**-16),  # QPyTorch never rounds these up
    ):
        scale = 1 if step > 2.0**-10 else 2.0**-17
        assert len(set(got.tolist())) == 2
        assert abs(got.astype(np.float64).mean() - 0.3 * scale) < 5 * step / 2 / np.sqrt(x.size) + 1e-8 * scale
    assert (float_quantize(x, 6, 5, key=KEY) != float_quantize(x, 6, 5, key=jax.random.key(3))).any()


def test_refused() -> None:
    x = np.ones(2, np.float32)
    for error, said, call in (
        (ValueError, "exp=9", lambda: FloatingPoint(9, 2)),
        (ValueError, "man=-1", lambda: float_quantize(x, 5, -1)),
        (ValueError, "rounding='up'", lambda: float_quantize(x, 5, 2, "up")),
        (ValueError, "pass a typed key", lambda: float_quantize(x, 5, 2)),
        (TypeError, "clamp=1", lambda: FixedPoint(5, 4, clamp=1)),  # type: ignore[arg-type]
        (ValueError, "wl=1", lambda: BlockFloatingPoint(1)),
        (ValueError, "dim=-2", lambda: BlockFloatingPoint(4, -2)),
        (ValueError, "for fixed point", lambda: BlockFloatingPoint(4).spec("nearest", clipped=True)),
    ):
        with pytest.raises(error, match=said):
            call()


test_further = further.test()
