"""The functions of pi-quant (``piquant.torch``) for NumPy: ``quantize``, ``dequantize``, ``compute_quant_params``.

For float32 and bfloat16 arrays and codes of 8, 4 or 2 bits, with one scale and zero point. Differences:

* ``RoundMode.STOCHASTIC`` draws for each element, from a key; the original draws one number for a whole call.
* The code is the nearest to x / s + z, rounded once; ties go up. The original multiplies by 1 / s and rounds ties away
  from zero, for some elements from 0.49999997 on.
* Infinities and numbers beyond the range become the last codes; in the original, +inf and 3e9 become code 0.
* The range of parameters contains 0 and every finite element: [3, 5] has the range [0, 5] (in the original [0, 2]). NaN
  and infinities are ignored; a NaN ends the process in the original.
* ``ReduceOp.ADD`` adds to ``out`` and returns the sum, including the last elements of 2-bit codes.
"""

from __future__ import annotations

import enum
from typing import Any

import ml_dtypes
import numpy as np
from jax import Array

from jchop._common.checks import as_numpy, check, check_choice, check_instance, check_int
from jchop._spec.spec import Spec
from jchop._storage import QArray, fit_scale
from jchop._storage import dequantize as _dequantize
from jchop._storage import quantize as _quantize
from jchop.formats import IntegerFormat, ScaledFormat

__all__ = ["ReduceOp", "RoundMode", "compute_quant_params", "dequantize", "quantize"]

_CODE_DTYPES = ("uint8", "uint4", "uint2")
_FLOAT_NAMES = ("float32", "bfloat16")


class RoundMode(enum.Enum):
    """The rounding of x / s + z to a code."""

    NEAREST = "nearest_away"  # codes are nonnegative, so ties go up
    STOCHASTIC = "stochastic"


class ReduceOp(enum.Enum):
    """The use of the dequantized numbers."""

    SET = "set"
    ADD = "add"


def compute_quant_params(array: np.ndarray, quant_dtype: str = "uint8") -> tuple[float, int]:
    """The scale s = (max - min) / (2^b - 1) of an array's range extended to 0, and the zero point z = round(-min / s).

    Args:
        array: float32 or bfloat16, any shape.
        quant_dtype: ``"uint8"`` (default), ``"uint4"`` or ``"uint2"``.

    Returns:
        The scale, a float32 value, and the zero point, a code.

    Example:
        >>> import numpy as np
        >>> from jchop.compat import piquant
        >>> piquant.compute_quant_params(np.array([-1.0, 0.5, 2.0], np.float32), "uint2")
        (1.0, 1)
    """
    vector = _as_vector("array", array)
    check(vector.size, "array is empty, so it has no range, and no scale follows from it")
    scale, zero_point = fit_scale(vector, _code_format(quant_dtype))
    return float(np.asarray(scale).item()), int(np.asarray(zero_point).item())


def quantize(
    array: np.ndarray,
    quant_dtype: str = "uint8",
    *,
    scale: float,
    zero_point: int,
    round_mode: RoundMode = RoundMode.NEAREST,
    key: Array | None = None,
) -> np.ndarray:
    """The codes clamp(round(x / scale + zero_point)).

    Args:
        array: float32 or bfloat16, any shape.
        quant_dtype: as in `compute_quant_params`.
        scale: positive.
        zero_point: a code.
        round_mode: `RoundMode.NEAREST` (default) or `RoundMode.STOCHASTIC`.
        key: a typed key (`jax.random.key`), required for stochastic rounding.

    Returns:
        uint8 codes of the shape of `array`. Codes of 4 and 2 bits are packed into a vector, the first in the lowest
        bits.

    Example:
        >>> import numpy as np
        >>> from jchop.compat import piquant
        >>> codes = piquant.quantize(np.array([-1.0, 0.5, 2.0], np.float32), "uint2", scale=1.0, zero_point=1)
        >>> bin(codes[0])
        '0b111000'
    """
    vector = _as_vector("array", array)
    check_instance("round_mode", round_mode, RoundMode, "a RoundMode")
    scales, zero_points = _scale_parameters(scale, zero_point)
    spec = Spec(_code_format(quant_dtype), round_mode.value)
    codes = _quantize(vector, spec, key, scale=scales, zero_point=zero_points)
    return codes.qvalue.reshape(array.shape) if quant_dtype == "uint8" else codes.qvalue


def dequantize(
    codes: np.ndarray,
    dequant_dtype: Any = "float32",
    *,
    scale: float,
    zero_point: int,
    quant_dtype: str = "uint8",
    shape: tuple[int, ...] | None = None,
    reduce_op: ReduceOp = ReduceOp.SET,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The numbers (code - zero_point) scale.

    Args:
        codes: a result of `quantize`.
        dequant_dtype: float32 (default) or bfloat16.
        scale: positive.
        zero_point: a code.
        quant_dtype: type of the codes. Default ``"uint8"``.
        shape: shape of the array; required for codes of 4 and 2 bits, whose bytes do not determine it.
        reduce_op: `ReduceOp.SET` (default), or `ReduceOp.ADD` to add the numbers to `out`.
        out: an array of `shape` for the result; required for `ReduceOp.ADD`.

    Returns:
        `out`, or a new array.

    Example:
        >>> import numpy as np
        >>> from jchop.compat import piquant
        >>> codes, total = np.array([0, 3], np.uint8), np.ones(2, np.float32)
        >>> piquant.dequantize(codes, scale=0.5, zero_point=1, reduce_op=piquant.ReduceOp.ADD, out=total).tolist()
        [0.5, 2.0]
    """
    fmt = _code_format(quant_dtype)
    check_instance("reduce_op", reduce_op, ReduceOp, "a ReduceOp")
    if shape is None:
        check(quant_dtype == "uint8", f"shape=None, but the bytes of {quant_dtype} codes do not determine their number")
        shape = codes.shape
    if codes.dtype != np.uint8:
        raise TypeError(f"codes has dtype {codes.dtype}; allowed: uint8")
    if out is None:
        check(reduce_op is not ReduceOp.ADD, "out=None, but ReduceOp.ADD adds to it")
        out = np.empty(shape, _float_dtype("dequant_dtype", dequant_dtype))
    elif out.shape != tuple(shape) or out.dtype != _float_dtype("dequant_dtype", dequant_dtype):
        raise ValueError(f"out has shape {out.shape} and dtype {out.dtype}, but the result {shape} and {dequant_dtype}")
    qarray = QArray(codes.reshape(-1), *_scale_parameters(scale, zero_point), Spec(fmt), int(np.prod(shape)), out.dtype)
    add_to = out.reshape(-1) if reduce_op is ReduceOp.ADD else None
    out[...] = np.asarray(_dequantize(qarray, add_to=add_to)).reshape(shape)
    return out


def _code_format(quant_dtype: str) -> ScaledFormat:
    name = quant_dtype if isinstance(quant_dtype, str) else np.dtype(quant_dtype).name
    element = IntegerFormat(int(check_choice("quant_dtype", name, _CODE_DTYPES).removeprefix("uint")), signed=False)
    return ScaledFormat(element, zero_point="integer")


def _float_dtype(name: str, dtype: Any) -> np.dtype:
    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    check_choice(name, numpy_dtype.name, _FLOAT_NAMES)
    return numpy_dtype


def _as_vector(name: str, array: np.ndarray) -> np.ndarray:
    check_instance(name, array, np.ndarray, "a NumPy array")
    _float_dtype(f"{name}.dtype", array.dtype)
    return np.ascontiguousarray(as_numpy(name, array)).reshape(-1)


def _scale_parameters(scale: float, zero_point: int) -> tuple[np.ndarray, np.ndarray]:
    check(np.isfinite(scale) and scale > 0, f"scale={scale!r} must be a positive number")
    return np.array([scale], np.float32), np.array([check_int("zero_point", zero_point, 0, 255)], np.int32)
