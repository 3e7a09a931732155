"""Floats of 4 or 8 bits in small groups: NVFP4, MXFP4 and MXFP8 of compressed-tensors, and gpt-oss's MXFP4.

Definition: https://github.com/vllm-project/compressed-tensors, `compressors/nvfp4`, `mxfp4`, `mxfp8`. The scale of a
group of NVFP4 is the quotient of an e4m3 number and the scale of the tensor, rounded to binary32. gpt-oss:
https://github.com/openai/gpt-oss, `gpt_oss/torch/weights.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jchop._checkpoints.arrays import (
    float_array,
    pack_bits,
    pieces,
    qarray_of_codes,
    replace_zero_scales,
    unpack_bits,
    weight_arguments,
)
from jchop._checkpoints.row import (
    BYTE,
    FLOAT4,
    FLOAT8,
    LayoutFacts,
    LayoutRow,
    LookForShape,
    TensorEntries,
    TensorParts,
    look_for_matrix,
)
from jchop._common.checks import check
from jchop._spec.spec import Spec
from jchop.formats._catalogue import float4_e2m1fn, float8_e4m3fn
from jchop.formats.scaled.catalogue import mxfp4, mxfp8_e4m3, nvfp4
from jchop.storage._array import QArray
from jchop.storage._axis_groupings import OWN_SCALE
from jchop.storage._codes import load_codes, store_codes
from jchop.storage._decode import batch_axes

ArrayFunction = Callable[[np.ndarray], np.ndarray]
#: NVFP4 with the subnormal scales that files have.
_NVFP4_FORMAT = nvfp4(scale=float8_e4m3fn)
#: The code of NaN of e8m0, and the code of 1 of e8m0 and e4m3.
_E8M0_NAN, _E8M0_ONE, _E4M3_ONE = 255, np.uint8(127), np.uint8(0x38)


def _check_scale_counts(shape: tuple[int, ...], scale: np.ndarray, group: int) -> None:
    counts = (shape[0], shape[1] // group)
    ok = shape[1] % group == 0 and scale.shape == counts
    check(ok, f"weight_scale has shape {list(scale.shape)}, and groups of {group} in {list(shape)} have {list(counts)}")


# -- nvfp4 -------------------------------------------------------------------------------------------------------------


def _read_nvfp4(parts: TensorParts, facts: LayoutFacts) -> QArray:
    packed_codes, scale, whole = parts["weight_packed"], parts["weight_scale"], parts["weight_global_scale"]
    codes = unpack_bits(packed_codes, 4, 2 * packed_codes.shape[1])
    _check_scale_counts(codes.shape, scale, 16)
    check(scale.dtype == FLOAT8, f"weight_scale is of dtype {scale.dtype}, and must be float8_e4m3fn")
    check(whole.dtype == np.float32 and whole.size == 1, "weight_global_scale must be one float32 number")
    divisor = whole.reshape(())
    check(bool(np.isfinite(divisor) and divisor > 0), f"weight_global_scale={divisor} must be a finite number above 0")
    numbers = scale.astype(np.float32)
    check(bool(np.isfinite(numbers).all()), "a scale is NaN")
    with np.errstate(over="ignore"):
        quotients = numbers / divisor
    check(bool(np.isfinite(quotients).all()), "a scale is infinite after the division by weight_global_scale")
    factor = _nvfp4_factor(np.abs(numbers), divisor, facts.get("exact", True) is True)
    if factor is None or (numbers < 0).any():
        return float_array(codes, quotients, float4_e2m1fn, [OWN_SCALE, 16])
    codes, scale_codes = replace_zero_scales(codes, scale.view(np.uint8), np.uint8(8), _E4M3_ONE, [OWN_SCALE, 16])
    return qarray_of_codes(codes, (scale_codes, factor), None, _NVFP4_FORMAT)


def _nvfp4_factor(numbers: np.ndarray, divisor: np.ndarray, exact: bool) -> np.ndarray | None:
    """The factor with the same products as the quotients by `divisor`; None if there is none.

    Products of a factor and two short numbers are exact in binary64.
    """
    with np.errstate(over="ignore"):
        factor = np.float32(1) / divisor
    if not np.isfinite(factor) or factor == 0:
        return None
    return np.asarray(factor) if not exact or _same_products(np.unique(numbers), factor, divisor) else None


def _same_products(numbers: np.ndarray, factor: Any, divisor: Any) -> bool:
    """Whether e fl(s / divisor) and e s factor are the same binary32 numbers for all scales s and elements e."""
    levels = np.arange(8, dtype=np.uint8).view(FLOAT4).astype(np.float32)
    with np.errstate(over="ignore"):
        quotients = np.outer(numbers.astype(np.float32) / np.float32(divisor), levels).astype(np.float32)
        exact = np.outer(numbers.astype(np.float64), levels.astype(np.float64)) * np.float64(factor)
        return np.array_equal(quotients, exact.astype(np.float32))


def _write_nvfp4(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    weight = pieces(q)
    two_level = weight.fmt.element == float4_e2m1fn and weight.fmt.scale_rule.tensor_scale
    check(two_level and weight.kinds == (OWN_SCALE, 16), "it is not nvfp4 with groups of 16 along its last axis")
    check(q.shape[1] % 16 == 0, f"its last axis of {q.shape[1]} is no multiple of 16")
    scale, factor = weight.scale[0].view(FLOAT8), np.float32(weight.scale[1])
    with np.errstate(over="ignore", divide="ignore"):
        divisor = np.float32(1) / factor
    check(bool(np.isfinite(divisor) and divisor > 0), f"its tensor scale {factor} has no reciprocal")
    check(
        not exact or _same_products(np.unique(scale.astype(np.float32)), factor, divisor),
        f"the layout divides by 1 / {factor}, and some numbers would differ in their last bit: exact=False permits "
        "this, and a tensor scale that is a power of two avoids it",
    )
    parts = {"weight_packed": pack_bits(weight.codes, 4), "weight_scale": scale}
    facts = weight_arguments(weight, "float", True) | {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    return parts | {"weight_global_scale": divisor.reshape(1)}, facts


_LOOK_FOR_NIBBLES = look_for_matrix("weight_packed", BYTE, each=2)
_NVFP4_PARTS = ("weight_packed", "weight_scale", "weight_global_scale")
NVFP4_ROW = LayoutRow("nvfp4-pack-quantized", _NVFP4_PARTS, _LOOK_FOR_NIBBLES, _read_nvfp4, _write_nvfp4, "nvfp4")


# -- mxfp4 and mxfp8: exponents + 127 ----------------------------------------------------------------------------------


def _check_exponents(scale: np.ndarray) -> np.ndarray:
    check(scale.dtype == BYTE, f"weight_scale is of dtype {scale.dtype}, and must be uint8")
    check(not (scale == _E8M0_NAN).any(), "a scale is 255, the code of NaN")
    return scale


def _mx_row(
    name: str, fmt: Any, parts: tuple[str, ...], look: LookForShape, unpack: ArrayFunction, pack: ArrayFunction
) -> LayoutRow:
    """A row of codes in one tensor, which two functions unpack and pack, and exponents in ``weight_scale``."""
    (part,) = {*parts} - {"weight_scale"}

    def read(tensors: TensorParts, facts: LayoutFacts) -> QArray:
        codes, scale = unpack(tensors[part]), tensors["weight_scale"]
        _check_scale_counts(codes.shape, scale, 32)
        return qarray_of_codes(codes, _check_exponents(scale), None, fmt)

    def write(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        weight = pieces(q)
        same = (weight.fmt.element, weight.fmt.scale, weight.kinds) == (fmt.element, fmt.scale, (OWN_SCALE, 32))
        check(same and weight.zero is None, f"it is not {fmt} along its last axis")
        check(q.shape[1] % 32 == 0, f"its last axis of {q.shape[1]} is no multiple of 32")
        facts = weight_arguments(weight, "float", True) | {"scale_dtype": "torch.uint8"}
        return {part: pack(weight.codes), "weight_scale": _check_exponents(weight.scale)}, facts

    return LayoutRow(name, parts, look, read, write, str(fmt))


MXFP4_ROW = _mx_row(
    "mxfp4-pack-quantized",
    mxfp4,
    ("weight_packed", "weight_scale"),
    _LOOK_FOR_NIBBLES,
    lambda rows: unpack_bits(rows, 4, 2 * rows.shape[1]),
    lambda codes: pack_bits(codes, 4),
)
MXFP8_ROW = _mx_row(
    "mxfp8-quantized",
    mxfp8_e4m3,
    ("weight_scale", "weight"),
    look_for_matrix("weight", FLOAT8, weight_scale=BYTE),
    lambda weight: weight.view(np.uint8),
    lambda codes: codes.view(FLOAT8),
)


# -- gpt-oss: mxfp4 of any number of axes, each group in 16 bytes ------------------------------------------------------


def _look_blocks(entries: TensorEntries) -> tuple[int, ...] | None:
    blocks, scales = entries.values()
    *outer, groups, size = blocks.shape if len(blocks.shape) > 2 else (0, 0)
    ok = blocks.dtype == scales.dtype == BYTE and size == 16 and scales.shape == (*outer, groups) and groups
    return (*outer, 32 * groups) if ok else None


def _read_blocks(parts: TensorParts, facts: LayoutFacts) -> QArray:
    blocks, scales = parts.values()
    numbers = store_codes(np.ascontiguousarray(blocks).reshape(*blocks.shape[:-2], -1), mxfp4.element)
    return QArray(numbers, _check_exponents(scales), None, Spec(mxfp4), 32 * scales.shape[-1], np.dtype(np.float32))


def _gpt_oss_row(blocks: str, scales: str, name: str) -> LayoutRow:
    def write(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        check(q.spec.scaled == mxfp4 and q.ndim > 1, "it is not mxfp4 along the last of two axes or more")
        check(batch_axes(q.spec, q.shape, q.scale) == 0, "vmap added axes to its scales")
        check(q.shape[-1] % 32 == 0, f"its last axis of {q.shape[-1]} is no multiple of 32")
        codes = load_codes(np.asarray(q.qvalue), mxfp4.element).reshape(*q.shape[:-1], -1, 16)
        return {blocks: codes, scales: _check_exponents(np.asarray(q.scale))}, {}

    return LayoutRow(name, (blocks, scales), _look_blocks, _read_blocks, write, "mxfp4")


GPT_OSS_ROW = _gpt_oss_row("_blocks", "_scales", "gpt-oss")
GPT_OSS_POINT_ROW = _gpt_oss_row(".blocks", ".scales", "gpt-oss of OpenAI")
