"""Carriers and the arithmetic on their bits, against NumPy's dtypes and exact fractions."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from each_case import each
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jchop._common import bit_ops
from jchop._common.bit_ops import CARRIERS

NAMES = list(CARRIERS)


@each("name", NAMES)
def test_a_carrier_is_what_its_dtype_is(name: str) -> None:
    carrier, info = CARRIERS[name], ml_dtypes.finfo(name)
    width = np.dtype(name).itemsize * 8 if name != "bfloat16" else 16
    assert (carrier.name, carrier.fraction, carrier.width) == (name, info.nmant, width)
    assert carrier.bias == 1 - info.minexp and carrier.max == Fraction(float(info.max))
    assert Fraction(2) ** carrier.tiny_exponent == Fraction(float(info.smallest_subnormal))
    assert carrier.work == np.dtype(f"int{carrier.work_width}") and carrier.work_width == max(width, 32)
    word = {16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
    bits = [int(np.array(value, name).view(word)) for value in (np.inf, np.nan, -0.0)]
    assert [carrier.inf, carrier.nan, carrier.sign_bit % (1 << width)] == bits


@each("name", NAMES)
def test_bits_of_exact_numbers(name: str) -> None:
    carrier, exact = CARRIERS[name], oracle.CARRIERS[name]
    tiny, ulp = Fraction(2) ** carrier.tiny_exponent, Fraction(1, 1 << carrier.fraction)
    for low, bits in (
        (Fraction(0), 0),
        (tiny, 1),
        (tiny * ((1 << carrier.fraction) - 1), (1 << carrier.fraction) - 1),
        (tiny * (1 << carrier.fraction), 1 << carrier.fraction),
        (Fraction(1), carrier.bias << carrier.fraction),
        (Fraction(3), (carrier.bias + 1 << carrier.fraction) + (1 << carrier.fraction - 1)),
        (carrier.max, carrier.inf - 1),
    ):
        assert oracle.to_bits(low, exact) == bits == carrier.magnitude_bits(low) == carrier.magnitude_bits(-low)
        above = low + tiny * ulp
        assert carrier.toward_zero(low) == carrier.toward_zero(-low) == (bits, True)
        assert carrier.toward_zero(above) == (bits, False) and carrier.magnitude_bits(above) is None
        assert (carrier.ceil_bits(low), carrier.ceil_bits(above)) == (bits, bits + 1)
        assert carrier.ceil_bits(-low) == carrier.ceil_bits(-above) == -bits
    beyond = Fraction(2) ** (carrier.bias + 1)
    assert carrier.toward_zero(beyond) == (carrier.inf, True) and carrier.magnitude_bits(beyond) is None


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", NAMES)
def test_bits_of_arrays(name: str) -> None:
    carrier = CARRIERS[name]
    tiny = Fraction(2) ** carrier.tiny_exponent
    with jax.enable_x64(True):
        x = np.array([0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, float(tiny), -float(carrier.max)], name)
        sign, magnitude = bit_ops.split_sign(jnp.asarray(x), carrier)
        assert sign.dtype == magnitude.dtype == carrier.work
        expected = [0, 0, *[carrier.magnitude_bits(Fraction(3, 2))] * 2, *[carrier.inf] * 2, 1, carrier.inf - 1]
        assert magnitude.tolist() == expected
        assert sign.tolist() == [carrier.sign_bit * (i % 2) for i in range(8)]
        joined = np.asarray(bit_ops.join_sign(sign, magnitude, carrier))
        assert joined.dtype == x.dtype and joined.tobytes() == x.tobytes()
        assert bit_ops.ordered_integers(sign, magnitude).tolist() == [m * (-1) ** i for i, m in enumerate(expected)]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_counts(name: str) -> None:
    carrier = CARRIERS[name]
    counts = [1, 2, 3, 4, 5, (1 << carrier.fraction) - 1, 1 << carrier.fraction, (2 << carrier.fraction) - 1]
    with jax.enable_x64(True):
        logs = jax.jit(partial(bit_ops.floor_log2_integers, carrier=carrier))(np.array(counts, carrier.work))
        assert logs.tolist() == [count.bit_length() - 1 for count in counts]
        firsts = carrier.tiny_exponent, carrier.tiny_exponent + carrier.fraction - 1, -1, carrier.bias - 60
        pairs = [(n, first + i) for first in firsts for n in (0, *counts) for i in (0, 1)]
        held = [(n, e) for n, e in pairs if carrier.magnitude_bits(n * Fraction(2) ** e) is not None]
        n, e = (np.array(part, carrier.work) for part in zip(*held, strict=True))
        expected = [carrier.magnitude_bits(n * Fraction(2) ** e) for n, e in held]
        assert jax.jit(partial(bit_ops.compose_magnitude, carrier=carrier))(n, e).tolist() == expected


@each("width", [32, 64])
def test_words(width: int) -> None:
    with jax.enable_x64(True):
        each = jnp.array([0, 1, 5, width - 2], f"int{width}")
        assert bit_ops.low_mask(each).tolist() == [0, 1, 31, (1 << width - 2) - 1]  # type: ignore[union-attr]
        assert [bit_ops.low_mask(count) for count in (0, 1, 5)] == [0, 1, 31]
        words = jnp.array([0, 1, (1 << width - 1) - 1, 1 << width - 1, (1 << width) - 1], f"uint{width}")
        assert bit_ops.top_bit(words).tolist() == [False, False, False, True, True]
        for count in (0, 1, width - 1):
            expected = [int(word) >> count for word in np.asarray(words)]
            assert bit_ops.shift_right(words, count).tolist() == expected
            assert bit_ops.shift_right(words, jnp.full(5, count, f"int{width}")).tolist() == expected


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")
def test_where_gives_all_operands_one_sharding() -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"))  # with explicit axes
    x, column = np.arange(32, dtype=np.int32).reshape(8, 4), np.arange(8).reshape(8, 1) % 2
    placed = jax.device_put(x, NamedSharding(mesh, P("a", "b"))), jax.device_put(column, NamedSharding(mesh, P("a")))
    got = jax.jit(lambda x, c: (bit_ops.lax_where(c == 0, x, 7), bit_ops.lax_where(x > 9, c, x)))(*placed)
    np.testing.assert_array_equal(got[0], np.where(column == 0, x, 7))
    np.testing.assert_array_equal(got[1], np.where(x > 9, column, x))
