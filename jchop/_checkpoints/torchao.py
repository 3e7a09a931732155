"""torchao's safetensors: tensor subclasses taken apart, with a record of each in the metadata of the file.

Definition: https://github.com/pytorch/ao, `prototype/safetensors`, and the classes in
`quantization/quantize_/workflows`: `Int8Tensor` and `IntxUnpackedToInt8Tensor` are s (e - z), `Float8Tensor` s e, and
`Int4Tensor`, with scales and zero points (groups, out), s e + z.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jchop._checkpoints.arrays import (
    SCALE_FORMATS,
    Pieces,
    as_scales,
    float_array,
    float_scales,
    group_lengths,
    integer_array,
    kinds_from,
    over_elements,
    pack_bits,
    pieces,
    qarray_of_codes,
    row_group_size,
    unpack_bits,
    unsigned_pieces,
)
from jchop._checkpoints.row import (
    FLOAT8,
    INT8,
    LayoutFacts,
    LayoutRow,
    TensorParts,
    fact_field,
    is_matrix,
    look_for_matrix,
)
from jchop._common.checks import check
from jchop.formats import IntegerFormat, ScaledFormat
from jchop.formats._catalogue import float8_e4m3fn
from jchop.storage._array import QArray
from jchop.storage._axis_groupings import AxisGrouping, grouping_fields
from jchop.storage._files.json import short_text
from jchop.storage._files.safetensors import are_counts


def _grouping(facts: LayoutFacts, shape: tuple[int, ...], scale: np.ndarray) -> tuple[np.ndarray, list[AxisGrouping]]:
    block = fact_field(facts, "block_size", list, [])
    ok = are_counts(block) and len(block) in (0, len(shape)) and all(0 < n < 1 << 31 for n in block)
    check(ok, f"block_size={short_text(block)} must have an integer above 0 for each axis")
    if block:
        counts = tuple(-(-n // size) for n, size in zip(shape, block, strict=True))
        check(scale.size == np.prod(counts), f"scales of shape {list(scale.shape)} do not fit blocks of {block}")
        scale = scale.reshape(counts)
    scale = as_scales(scale, shape)
    return scale, kinds_from(shape, scale.shape, tuple(block) if block else None)


def _target_bits(facts: LayoutFacts) -> int:
    """The width of the elements of a tensor of int8: that of its target dtype."""
    target = fact_field(facts, "target_dtype", dict, {})
    match = re.fullmatch(r"int([2-8])", str(target.get("_data", "int8")))
    check(match is not None, f"target_dtype={short_text(target)} must be one of int2 to int8")
    assert match is not None
    return int(match[1])


def _read_int8(parts: TensorParts, facts: LayoutFacts) -> QArray:
    codes, bits = parts["qdata"], _target_bits(facts)
    check(codes.dtype == INT8, f"qdata is of dtype {codes.dtype}, and must be int8")
    half = 1 << (bits - 1)
    check(bool(((codes >= -half) & (codes < half)).all()), f"an element is no integer of {bits} bits")
    scale, kinds = _grouping(facts, codes.shape, parts["scale"])
    zero = parts.get("zero_point")
    if zero is not None:
        check(zero.size == scale.size, "zero_point must have one number for each scale")
        numbers = zero.reshape(scale.shape).astype(np.float64)
        ok = (np.abs(numbers) <= 256) & (numbers == np.round(numbers))
        check(bool(ok.all()), "a zero point is no integer, which only integers shift")
        zero = numbers.astype(np.int32) + half
    return integer_array((codes.astype(np.int16) + half).astype(np.uint8), scale, zero, bits, kinds)


def _read_float8(parts: TensorParts, facts: LayoutFacts) -> QArray:
    codes = parts["qdata"]
    check(codes.dtype == FLOAT8, f"qdata is of dtype {codes.dtype}, and must be float8_e4m3fn")
    scale, kinds = _grouping(facts, codes.shape, parts["scale"])
    return float_array(codes.view(np.uint8), scale, float8_e4m3fn, kinds)


def _read_int4(parts: TensorParts, facts: LayoutFacts) -> QArray:
    packed_codes = parts["qdata"]
    check(
        packed_codes.dtype.itemsize == 1 and "act_pre_scale" not in parts,
        "qdata must be bytes, without an act_pre_scale",
    )
    codes = unpack_bits(packed_codes.view(np.uint8), 4, 2 * packed_codes.shape[1])
    scale, zero = parts["scale"], parts["zero_point"]
    ok = is_matrix(scale) and scale.shape == zero.shape and scale.dtype == zero.dtype
    check(ok and scale.shape[1] == codes.shape[0], "scale and zero_point must both have the shape (groups, out)")
    scale = np.ascontiguousarray(as_scales(scale, scale.shape).T)
    zero = np.ascontiguousarray(as_scales(zero, zero.shape).T)
    check(bool((scale >= 0).all()), "a scale is below zero")
    _, kinds = _grouping(facts, codes.shape, scale)
    return offset_array(codes, scale, zero, IntegerFormat(4), kinds)


def offset_array(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, element: IntegerFormat, kinds: list[AxisGrouping]
) -> QArray:
    """The numbers s e + z; under a scale of zero the codes become those of zero."""
    if (nothing := scale == 0).any():
        codes = np.where(over_elements(nothing, kinds, codes.shape), np.uint8(0), codes)
        scale = np.where(nothing, scale.dtype.type(1), scale)
    fmt = ScaledFormat(element, scale=SCALE_FORMATS[scale.dtype], zero_point="float", **grouping_fields(kinds))
    return qarray_of_codes(codes, scale, zero, fmt)


# -- writing -----------------------------------------------------------------------------------------------------------


def _block_size(weight: Pieces) -> list[int]:
    """The sizes of the groups; ValueError if they do not divide the axes."""
    block, shape = group_lengths(weight), weight.codes.shape
    fits = all(n % size == 0 for n, size in zip(shape, block, strict=True))
    check(fits, f"its groups of {block} do not divide its shape {list(shape)}")
    return block


def _torchao_record(
    name: str, data: dict[str, Any], parts: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict]:
    return parts, {"_type": name, "_data": data, "_tensor_data_names": list(parts)}


def _dtype_record(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def _write_int8(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    weight = pieces(q)
    codes, scale, zero = unsigned_pieces(weight, range(2, 9))
    half = 1 << (weight.fmt.element.bits - 1)
    shift = zero - half
    check(bool(((shift >= -128) & (shift < 128)).all()), "a zero point is no integer of 8 bits")
    parts = {"qdata": (codes.astype(np.int16) - half).astype(np.int8), "scale": scale}
    parts["zero_point"] = shift.astype(np.int8)
    data = {"target_dtype": _dtype_record(f"int{weight.fmt.element.bits}"), "block_size": _block_size(weight)}
    data |= {"dtype": _dtype_record(str(scale.dtype)), "apply_int8_act_asym_per_token_quant": False}
    return _torchao_record("IntxUnpackedToInt8Tensor", data, parts)


def _write_float8(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    weight = pieces(q, float8_e4m3fn)
    parts = {"qdata": weight.codes.view(FLOAT8), "scale": float_scales(weight)}
    data = {"block_size": _block_size(weight), "mm_config": None, "act_quant_kwargs": None}
    data |= {
        "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
        "dtype": _dtype_record(str(np.dtype(q.dtype))),
    }
    return _torchao_record("Float8Tensor", data, parts)


def _write_int4(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    weight = pieces(q)
    check(
        weight.fmt.zero_point == "float" and weight.fmt.element == IntegerFormat(4),
        "it is not int4 with float zero points",
    )
    row_group_size(weight)
    scale, zero = float_scales(weight), weight.zero
    assert zero is not None
    parts = {"qdata": pack_bits(weight.codes, 4).view(np.int8), "scale": np.ascontiguousarray(scale.T)}
    parts["zero_point"] = np.ascontiguousarray(zero.T)
    return _torchao_record("Int4Tensor", {"block_size": _block_size(weight), "shape": list(q.shape)}, parts)


def _torchao_row(
    name: str, parts: tuple[str, ...], read: Callable, write: Callable, fits: str, optional: tuple = ()
) -> LayoutRow:
    look = look_for_matrix("qdata", each=2 if read is _read_int4 else 1)
    return LayoutRow(name, parts, look, read, write, fits, optional)


_INT8_ROW = _torchao_row("Int8Tensor", ("qdata", "scale"), _read_int8, _write_int8, "int8(channel=0)", ("zero_point",))
_INT4_FITS, _INT4_PARTS = "int4(group=128,scale=bfloat16,zero_point=float)", ("qdata", "scale", "zero_point")
_TORCHAO_LIST = (
    _INT8_ROW,
    replace(_INT8_ROW, name="IntxUnpackedToInt8Tensor", fits="int4(group=32)"),
    _torchao_row("Float8Tensor", ("qdata", "scale"), _read_float8, _write_float8, "float8_e4m3fn(channel=0)"),
    _torchao_row("Int4Tensor", _INT4_PARTS, _read_int4, _write_int4, _INT4_FITS, ("act_pre_scale",)),
)
#: The rows by the type in the record of a weight.
TORCHAO_ROWS = {row.name: row for row in _TORCHAO_LIST}
