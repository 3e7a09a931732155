"""Floats of 4 or 8 bits in small groups: NVFP4_ROW, MXFP4_ROW and MXFP8_ROW of compressed-tensors, and gpt-oss's MXFP4_ROW.

Definition: https://github.com/vllm-project/compressed-tensors, `compressors/nvfp4`, `mxfp4`, `mxfp8`. The scale of a
group of NVFP4_ROW is the quotient of an e4m3 number and the scale of the tensor, rounded to binary32. gpt-oss:
https://github.com/openai/gpt-oss, `gpt_oss/torch/weights.py`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jchop.formats import float4_e2m1fn, float8_e4m3fn, mxfp4, mxfp8_e4m3, nvfp4
from jchop.spec import Spec
from jchop.storage._array import QArray
from jchop.storage._checkpoints.arrays import facts_of, float_array, made, pieces, without_zeros
from jchop.storage._checkpoints.integers import pack, spread
from jchop.storage._checkpoints.row import Entries, Facts, Parts, Row, check, matrix
from jchop.storage._codes import hold, raw
from jchop.storage._decode import batch_axes
from jchop.storage._layout import OWN

_BYTE = np.dtype(np.uint8)
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)
#: NVFP4 with the subnormal scales that files have.
_NVFP4 = nvfp4(scale=float8_e4m3fn)
#: The code of NaN of e8m0, and the code of 1 of e8m0 and e4m3.
_NAN, _ONE, _ONE8 = 255, np.uint8(127), np.uint8(0x38)


def _groups(shape: tuple[int, ...], scale: np.ndarray, group: int) -> None:
    counts = (shape[0], shape[1] // group)
    ok = shape[1] % group == 0 and scale.shape == counts
    check(ok, f"weight_scale has shape {list(scale.shape)}, and groups of {group} in {list(shape)} have {list(counts)}")


def _nibbles(entries: Entries) -> tuple[int, ...] | None:
    packed_codes = entries["weight_packed"]
    return (
        (packed_codes.shape[0], 2 * packed_codes.shape[1])
        if packed_codes.dtype == _BYTE and matrix(packed_codes)
        else None
    )


# -- nvfp4 -------------------------------------------------------------------------------------------------------------


def _read_nvfp4(parts: Parts, facts: Facts) -> QArray:
    packed_codes, scale, whole = parts["weight_packed"], parts["weight_scale"], parts["weight_global_scale"]
    codes = spread(packed_codes, 4, 2 * packed_codes.shape[1])
    _groups(codes.shape, scale, 16)
    check(scale.dtype == _FLOAT8, f"weight_scale is of dtype {scale.dtype}, and must be float8_e4m3fn")
    check(whole.dtype == np.float32 and whole.size == 1, "weight_global_scale must be one float32 number")
    divisor = whole.reshape(())
    check(bool(np.isfinite(divisor) and divisor > 0), f"weight_global_scale={divisor} must be a finite number above 0")
    numbers = scale.astype(np.float32)
    check(bool(np.isfinite(numbers).all()), "a scale is NaN")
    with np.errstate(over="ignore"):
        quotients = numbers / divisor
    check(bool(np.isfinite(quotients).all()), "a scale is infinite after the division by weight_global_scale")
    factor = _factor(np.abs(numbers), divisor, facts.get("exact", True) is True)
    if factor is None or (numbers < 0).any():
        return float_array(codes, quotients, float4_e2m1fn, [OWN, 16])
    codes, scale_codes = without_zeros(codes, scale.view(np.uint8), np.uint8(8), _ONE8, [OWN, 16])
    return made(codes, (scale_codes, factor), None, _NVFP4)


def _factor(numbers: np.ndarray, divisor: np.ndarray, exact: bool) -> np.ndarray | None:
    """The factor with the same products as the quotients by `divisor`; None if there is none.

    Products of a factor and two short numbers are exact in binary64.
    """
    with np.errstate(over="ignore"):
        factor = np.float32(1) / divisor
    if not np.isfinite(factor) or factor == 0:
        return None
    distinct = np.unique(numbers)
    levels = np.arange(8, dtype=np.uint8).view(_FLOAT4).astype(np.float32)
    return np.asarray(factor) if not exact or _same(distinct, levels, factor, divisor) else None


def _same(numbers: np.ndarray, levels: np.ndarray, factor: Any, divisor: Any) -> bool:
    """Whether e fl(s / divisor) and e s factor are the same binary32 numbers for all scales s and elements e."""
    with np.errstate(over="ignore"):
        quotients = np.outer(numbers.astype(np.float32) / np.float32(divisor), levels).astype(np.float32)
        exact = np.outer(numbers.astype(np.float64), levels.astype(np.float64)) * np.float64(factor)
        return np.array_equal(quotients, exact.astype(np.float32))


def _write_nvfp4(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    weight = pieces(q)
    two_level = weight.fmt.element == float4_e2m1fn and weight.fmt.scale_rule.tensor_scale
    check(two_level and weight.kinds == (OWN, 16), "it is not nvfp4 with groups of 16 along its last axis")
    check(q.shape[1] % 16 == 0, f"its last axis of {q.shape[1]} is no multiple of 16")
    scale, factor = weight.scale[0].view(_FLOAT8), np.float32(weight.scale[1])
    with np.errstate(over="ignore", divide="ignore"):
        divisor = np.float32(1) / factor
    check(bool(np.isfinite(divisor) and divisor > 0), f"its tensor scale {factor} has no reciprocal")
    levels = np.arange(8, dtype=np.uint8).view(_FLOAT4).astype(np.float32)
    check(
        not exact or _same(np.unique(scale.astype(np.float32)), levels, factor, divisor),
        f"the layout divides by 1 / {factor}, and some numbers would differ in their last bit: exact=False permits "
        "this, and a tensor scale that is a power of two avoids it",
    )
    parts = {"weight_packed": pack(weight.codes, 4), "weight_scale": scale}
    facts = facts_of(weight, "float", True) | {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    return parts | {"weight_global_scale": divisor.reshape(1)}, facts


NVFP4 = Row(
    "nvfp4-pack-quantized",
    "weight_packed",
    ("weight_packed", "weight_scale", "weight_global_scale"),
    _nibbles,
    _read_nvfp4,
    _write_nvfp4,
    "nvfp4",
)


# -- mxfp4 and mxfp8: exponents + 127 ----------------------------------------------------------------------------------


def _exponents(scale: np.ndarray) -> np.ndarray:
    check(scale.dtype == _BYTE, f"weight_scale is of dtype {scale.dtype}, and must be uint8")
    check(not (scale == _NAN).any(), "a scale is 255, the code of NaN")
    return scale


def _read_mxfp4(parts: Parts, facts: Facts) -> QArray:
    packed_codes, scale = parts["weight_packed"], parts["weight_scale"]
    codes = spread(packed_codes, 4, 2 * packed_codes.shape[1])
    _groups(codes.shape, scale, 32)
    return made(codes, _exponents(scale), None, mxfp4)


def _write_mxfp4(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return _write_mx(q, mxfp4, lambda codes: {"weight_packed": pack(codes, 4)})


MXFP4 = Row(
    "mxfp4-pack-quantized",
    "weight_packed",
    ("weight_packed", "weight_scale"),
    _nibbles,
    _read_mxfp4,
    _write_mxfp4,
    "mxfp4",
)


def _look_mxfp8(entries: Entries) -> tuple[int, ...] | None:
    weight, scale = entries["weight"], entries["weight_scale"]
    return weight.shape if weight.dtype == _FLOAT8 and scale.dtype == _BYTE and matrix(weight) else None


def _read_mxfp8(parts: Parts, facts: Facts) -> QArray:
    weight, scale = parts["weight"], parts["weight_scale"]
    _groups(weight.shape, scale, 32)
    return made(weight.view(np.uint8), _exponents(scale), None, mxfp8_e4m3)


def _write_mxfp8(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return _write_mx(q, mxfp8_e4m3, lambda codes: {"weight": codes.view(_FLOAT8)})


def _write_mx(q: QArray, fmt: Any, store: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    weight = pieces(q)
    same = (weight.fmt.element, weight.fmt.scale, weight.kinds) == (fmt.element, fmt.scale, (OWN, 32))
    check(same and weight.zero is None, f"it is not {fmt} along its last axis")
    check(q.shape[1] % 32 == 0, f"its last axis of {q.shape[1]} is no multiple of 32")
    facts = facts_of(weight, "float", True) | {"scale_dtype": "torch.uint8"}
    return store(weight.codes) | {"weight_scale": _exponents(weight.scale)}, facts


MXFP8 = Row(
    "mxfp8-quantized",
    "weight_scale",
    ("weight", "weight_scale"),
    _look_mxfp8,
    _read_mxfp8,
    _write_mxfp8,
    "mxfp8_e4m3",
)


# -- gpt-oss: mxfp4 of any number of axes, each group in 16 bytes ------------------------------------------------------


def _look_blocks(entries: Entries) -> tuple[int, ...] | None:
    blocks, scales = entries.values()
    *outer, groups, size = blocks.shape if len(blocks.shape) > 2 else (0, 0)
    ok = blocks.dtype == scales.dtype == _BYTE and size == 16 and scales.shape == (*outer, groups) and groups
    return (*outer, 32 * groups) if ok else None


def _read_blocks(parts: Parts, facts: Facts) -> QArray:
    blocks, scales = parts.values()
    numbers = hold(np.ascontiguousarray(blocks).reshape(*blocks.shape[:-2], -1), mxfp4.element)
    return QArray(numbers, _exponents(scales), None, Spec(mxfp4), 32 * scales.shape[-1], np.dtype(np.float32))


def _blocks_of(blocks: str, scales: str, name: str) -> Row:
    def write(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        check(q.spec.scaled == mxfp4 and q.ndim > 1, "it is not mxfp4 along the last of two axes or more")
        check(batch_axes(q.spec, q.shape, q.scale) == 0, "vmap added axes to its scales")
        check(q.shape[-1] % 32 == 0, f"its last axis of {q.shape[-1]} is no multiple of 32")
        codes = raw(np.asarray(q.qvalue), mxfp4.element).reshape(*q.shape[:-1], -1, 16)
        return {blocks: codes, scales: _exponents(np.asarray(q.scale))}, {}

    return Row(name, blocks, (blocks, scales), _look_blocks, _read_blocks, write, "mxfp4")


BLOCKS = _blocks_of("_blocks", "_scales", "gpt-oss")
DOTTED = _blocks_of(".blocks", ".scales", "gpt-oss of OpenAI")
