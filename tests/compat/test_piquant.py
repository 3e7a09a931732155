"""pi-quant's words: codes, their layout, and numbers, against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import ml_dtypes
import numpy as np
import oracle
import pytest
from further import Further

from jchop.compat import piquant
from jchop.compat.piquant import ReduceOp, RoundMode

further = Further()

BITS = {"uint8": 8, "uint4": 4, "uint2": 2}


def numbers(size: int = 41) -> np.ndarray:
    return np.random.default_rng(3).uniform(-1, 2, size).astype(np.float32)


def exact(x: Any) -> Fraction:
    return Fraction(float(x))


def unpacked(codes: np.ndarray, bits: int, count: int) -> list[int]:
    """Element k in bits k * b of the bytes, the lowest first."""
    stream = int.from_bytes(codes.tobytes(), "little")
    return [stream >> bits * k & (1 << bits) - 1 for k in range(count)]


@further
@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("name", "dtype"), [("uint4", ml_dtypes.bfloat16), ("uint2", np.float32)])
def there_and_back(name: str, dtype: Any) -> None:
    x = numbers().astype(dtype)
    top = (1 << BITS[name]) - 1
    scale, zero = piquant.compute_quant_params(x, name)
    assert scale == np.float32(float((exact(x.max()) - exact(x.min())) / top))
    assert zero == oracle.rne(-exact(x.min()) / exact(scale))
    codes = piquant.quantize(x, name, scale=scale, zero_point=zero)
    # Halves of the codes go up; they are not negative, so that this is floor(. + 1/2).
    wanted = [min(max((exact(v) / exact(scale) + zero + Fraction(1, 2)) // 1, 0), top) for v in x]
    assert unpacked(codes, BITS[name], x.size) == wanted
    back = piquant.dequantize(codes, dtype, scale=scale, zero_point=zero, quant_dtype=name, shape=x.shape)
    assert back.dtype == dtype
    rounds = (lambda v: np.float32(float(v)).astype(dtype)) if dtype == np.float32 else (lambda v: dtype(float(v)))
    np.testing.assert_array_equal(back, np.array([rounds((c - zero) * exact(scale)) for c in wanted], dtype))


def test_set_and_add() -> None:
    codes, out = np.array([[0, 1], [2, 255]], np.uint8), np.full((2, 2), 10, np.float32)
    given = piquant.dequantize(codes, scale=0.5, zero_point=1, reduce_op=ReduceOp.ADD, out=out)
    assert given is out and out.tolist() == [[9.5, 10.0], [10.5, 137.0]]
    piquant.dequantize(codes, scale=0.5, zero_point=1, out=out)
    assert out.tolist() == [[-0.5, 0.0], [0.5, 127.0]]
    packed, tail = np.array([0b11_10_01_00, 0b01], np.uint8), np.ones(5, np.float32)
    piquant.dequantize(
        packed, scale=1.0, zero_point=0, quant_dtype="uint2", shape=(5,), reduce_op=ReduceOp.ADD, out=tail
    )
    assert tail.tolist() == [1, 2, 3, 4, 2]


def test_where_the_original_is_wrong() -> None:
    x = np.array([np.inf, 3e9, -np.inf, 0.49999997, 2.0**23 + 1], np.float32)
    assert piquant.quantize(x, scale=1.0, zero_point=0).tolist() == [255, 255, 0, 0, 255]
    scale, zero = piquant.compute_quant_params(np.array([3.0, 5.0, np.nan, np.inf], np.float32))
    assert (scale, zero) == (np.float32(5 / 255), 0)
    scale, zero = piquant.compute_quant_params(np.full(4, 1000, np.float32))
    assert piquant.quantize(np.full(4, 1000, np.float32), scale=scale, zero_point=zero).tolist() == [255] * 4


@further.first
def the_last_codes_are_zero_points() -> None:
    x = np.array([-300.0, -255.0, -1.0, 0.0], np.float32)
    codes = piquant.quantize(x, scale=1.0, zero_point=255)
    assert codes.tolist() == [0, 0, 254, 255]
    assert piquant.dequantize(codes, scale=1.0, zero_point=255).tolist() == [-255, -255, -1, 0]
    assert piquant.quantize(-x, scale=1.0, zero_point=0).tolist() == [255, 255, 1, 0]


def test_stochastic() -> None:
    x = np.full(4000, 0.3, np.float32)
    codes = piquant.quantize(x, scale=1.0, zero_point=7, round_mode=RoundMode.STOCHASTIC, key=jax.random.key(0))
    assert set(codes.tolist()) == {7, 8} and abs(codes.mean() - 7.3) < 0.03


def test_refused() -> None:
    x, codes = numbers(4), np.zeros(4, np.uint8)
    for error, said, call in (
        (ValueError, "quant_dtype='int8'", lambda: piquant.quantize(x, "int8", scale=1.0, zero_point=0)),
        (TypeError, "must be a NumPy array", lambda: piquant.quantize([1.0], scale=1.0, zero_point=0)),  # type: ignore[arg-type]
        (ValueError, "array.dtype='float64'", lambda: piquant.compute_quant_params(x.astype(float))),
        (ValueError, "array is empty", lambda: piquant.compute_quant_params(x[:0])),
        (ValueError, "scale=0.0", lambda: piquant.quantize(x, scale=0.0, zero_point=0)),
        (ValueError, "zero_point", lambda: piquant.quantize(x, "uint4", scale=1.0, zero_point=16)),
        (ValueError, "zero_point=256 must be", lambda: piquant.quantize(x, scale=1.0, zero_point=256)),
        (ValueError, "zero_point=-1 must be", lambda: piquant.quantize(x, scale=1.0, zero_point=-1)),
        (ValueError, "zero_point=256 must be", lambda: piquant.dequantize(codes, scale=1.0, zero_point=256)),
        (ValueError, "zero_point=-1 must be", lambda: piquant.dequantize(codes, scale=1.0, zero_point=-1)),
        (
            ValueError,
            "pass a typed key",
            lambda: piquant.quantize(x, scale=1.0, zero_point=0, round_mode=RoundMode.STOCHASTIC),
        ),
        (ValueError, "shape=None", lambda: piquant.dequantize(codes, scale=1.0, zero_point=0, quant_dtype="uint4")),
        (ValueError, "out=None", lambda: piquant.dequantize(codes, scale=1.0, zero_point=0, reduce_op=ReduceOp.ADD)),
        (ValueError, "out has shape", lambda: piquant.dequantize(codes, scale=1.0, zero_point=0, out=x[:2])),
        (TypeError, "codes has dtype", lambda: piquant.dequantize(x, scale=1.0, zero_point=0)),
    ):
        with pytest.raises(error, match=said):
            call()


test_further = further.test()
