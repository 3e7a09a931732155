"""The layouts of AutoGPTQ and AutoAWQ, of bitsandbytes, and of torchao."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jchop._checkpoints import row
from jchop._checkpoints.compressed_tensors import NVFP4_FORMAT, integer_array_by_index, nvfp4_array_of_one
from jchop._common.checks import check, place_in_errors
from jchop._common.files import json_object, short_text
from jchop._storage._array import QArray
from jchop._storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, AxisGrouping, grouping_fields, over_elements
from jchop._storage._files.safetensors import are_counts
from jchop.formats import IntegerFormat, ScaledFormat
from jchop.formats._catalogue import float8_e4m3fn
from jchop.formats.scaled.catalogue import mxfp4, mxfp8_e4m3, nf4

_GPTQ_PARTS = ("qweight", "qzeros", "scales")
#: Widths of AutoGPTQ.
_GPTQ_WIDTHS = (2, 3, 4, 8)


# -- GPTQ: words of a matrix (in, out), with scales and zero points (groups, out) --------------------------------------

# Definition: https://github.com/AutoGPTQ/AutoGPTQ, `nn_modules/qlinear`; https://github.com/casper-hansen/AutoAWQ,
# `utils/packing_utils.py`. The numbers are s (u - z). The QArray is the transpose, (out, in), as in the model.


def _gptq_form(entries: row.TensorEntries) -> tuple[int, int, int] | None:
    """(bits, in, out) of words of AutoGPTQ; None if the tensors have another form."""
    words, zeros, scales = entries["qweight"], entries["qzeros"], entries["scales"]
    if not (row.is_matrix(words, row.WORD) and row.is_matrix(zeros, row.WORD) and row.is_matrix(scales)):
        return None
    out = words.shape[1]
    width = zeros.shape[1] * 32 // out
    fits = width in _GPTQ_WIDTHS and zeros.shape[1] * 32 == out * width and words.shape[0] * 32 % width == 0
    if not fits:
        return None
    return width, words.shape[0] * 32 // width, out


def _look_gptq(entries: row.TensorEntries) -> tuple[int, ...] | None:
    form = _gptq_form(entries)
    return None if form is None else (form[2], form[1])


def _read_gptq(parts: row.TensorParts, facts: row.LayoutFacts, *, offset: int) -> QArray:
    """The array of words along the inputs; `offset` is added to the zero points that are stored."""
    words, zeros = parts["qweight"], parts["qzeros"]
    form, widths = _gptq_form(parts), row.module_fields(facts, "bits")  # type: ignore[arg-type]
    text = " or ".join(str(width) for width in widths)
    fits = form is not None and widths & {form[0], None}
    check(bool(fits), f"bits={text} of the configuration does not fit qzeros of shape {zeros.shape}")
    assert form is not None
    bits, columns, out = form
    codes = row.codes_from_words(words.T, bits, columns)
    zero = row.codes_from_words(zeros, bits, out).astype(np.int32) + offset
    return _integers_by_columns(codes, parts, zero, bits, facts)


def _integers_by_columns(
    codes: np.ndarray, parts: row.TensorParts, zero: np.ndarray, bits: int, facts: row.LayoutFacts
) -> QArray:
    """Codes (out, in) under scales and zero points (groups, out).

    Args:
        codes: of the weight.
        parts: its tensors.
        zero: its zero points.
        bits: of a code.
        facts: which have the size of the groups.
    """
    scales, index, columns = parts["scales"], parts.get("g_idx"), codes.shape[1]
    check(scales.shape == zero.shape, f"scales have shape {list(scales.shape)}, not {list(zero.shape)}")
    codes, zero = np.ascontiguousarray(codes), zero.T
    scale = np.ascontiguousarray(row.as_scales(scales, scales.shape).T)
    if index is not None:
        return integer_array_by_index(codes, scale, zero, index, bits)
    sizes = row.module_fields(facts, "group_size")
    given = {columns if size == -1 else min(size, columns) for size in sizes if size is not None}
    fitting = [size for size in sorted(given) if size > 0 and -(-columns // size) == scale.shape[1]]
    fitting = [size for size in fitting if size * scale.shape[1] == columns] or fitting
    check(len(fitting) < 2, f"groups of {fitting} fit, and no field of the configuration names the module")
    block = None if not given or (not fitting and None in sizes) else (1, (fitting or sorted(given))[0])
    return row.integer_array(codes, scale, zero, bits, row.kinds_from(codes.shape, scale.shape, block))


def _write_gptq(q: QArray, exact: bool, *, offset: int) -> row.WrittenWeight:
    """The tensors and facts of GPTQ, transposed to (in, out); zero points are stored minus `offset`."""
    weight, index = row.group_by_column(row.pieces(q))
    size = row.row_group_size(weight) or q.shape[1]
    codes, scale, zero = row.unsigned_pieces(weight, _GPTQ_WIDTHS)
    bits, (out, columns) = weight.fmt.element.bits, q.shape
    for name, n in (("in", columns), ("out", out)):
        check(n % 32 == 0, f"its axis {name} has {n} indices, which is no multiple of 32")
    low, least, most = zero - offset, zero.min(), zero.max()
    other = "; gptq_v2 would fit" if offset and least >= 0 and most < 1 << bits else ""
    where = f"minus {offset} in {bits} bits, and they range from {least} to {most}{other}"
    check(bool(((low >= 0) & (low < 1 << bits)).all()), f"the layout stores zero points {where}")
    scales = row.cast_exactly(scale.T, np.float16, "scales")
    parts = {
        "qweight": row.codes_to_words(codes, bits).T,
        "qzeros": row.codes_to_words(low.T.astype(np.uint8), bits),
        "scales": scales,
        "g_idx": (np.arange(columns) // size).astype(np.int32) if index is None else index,
    }
    symmetric = bool((zero == 1 << (bits - 1)).all())
    facts = {"bits": bits, "group_size": size, "whole": size >= columns, "sym": symmetric}
    facts["desc_act"] = index is not None
    return parts, facts


def _gptq_row(name: str, offset: int) -> row.LayoutRow:
    """A row; version 1 adds 1 to the stored zero points."""
    read, write = partial(_read_gptq, offset=offset), partial(_write_gptq, offset=offset)
    fits = "int4(group=128,scale=float16) with both axes multiples of 32"
    return row.LayoutRow(name, _GPTQ_PARTS, _look_gptq, read, write, fits, ("g_idx",))


GPTQ, GPTQ_V2 = _gptq_row("gptq", 1), _gptq_row("gptq_v2", 0)


# -- AWQ: words along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 -------------------------------------------------

_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])


def _look_awq(entries: row.TensorEntries) -> tuple[int, ...] | None:
    words, zeros, scales = entries["qweight"], entries["qzeros"], entries["scales"]
    ok = row.is_matrix(words, row.WORD) and row.is_matrix(zeros, row.WORD) and row.is_matrix(scales)
    return (8 * words.shape[1], words.shape[0]) if ok and scales.shape[1] == 8 * words.shape[1] else None


def _read_awq(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    words, zeros = parts["qweight"], parts["qzeros"]
    widths = row.module_fields(facts, "bits")
    check(bool(widths & {4, None}), f"bits={' or '.join(map(str, widths))}, and AutoAWQ has 4 bits alone")
    check(zeros.shape[1] == words.shape[1], "qweight and qzeros have different numbers of columns")
    return _integers_by_columns(_from_awq_order(words).T, parts, _from_awq_order(zeros).astype(np.int32), 4, facts)


def _from_awq_order(words: np.ndarray) -> np.ndarray:
    """The codes of rows of words; nibble i of a word is number ORDER[i] of its eight."""
    nibbles = row.codes_from_words(words, 4, 8 * words.shape[1]).reshape(*words.shape, 8)
    return nibbles[..., np.argsort(_AWQ_ORDER)].reshape(words.shape[0], -1)


def _to_awq_order(codes: np.ndarray) -> np.ndarray:
    eights = codes.reshape(codes.shape[0], -1, 8)[..., _AWQ_ORDER]
    return row.codes_to_words(eights.reshape(codes.shape), 4)


def _write_awq(q: QArray, exact: bool) -> row.WrittenWeight:
    """The tensors and facts of AWQ, transposed to (in, out), eight codes of a word in AWQ's order."""
    weight = row.pieces(q)
    row.row_group_size(weight)
    size = row.group_lengths(weight)[1]
    codes, scale, zero = row.unsigned_pieces(weight, (4,))
    check(q.shape[0] % 8 == 0, f"its axis out has {q.shape[0]} indices, which is no multiple of 8")
    check(q.shape[1] % size == 0, f"its groups of {size} do not divide its axis in of {q.shape[1]}")
    parts = {
        "qweight": _to_awq_order(codes.T),
        "qzeros": _to_awq_order(row.zero_codes(zero, 4).T),
        "scales": row.cast_exactly(scale.T, np.float16, "scales"),
    }
    return parts, {"bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}


AWQ = row.LayoutRow("awq", _GPTQ_PARTS, _look_awq, _read_awq, _write_awq, "int4(group=128,scale=float16)")


# -- MLX: dense words of a weight (out, in), with scales and biases (out, groups) --------------------------------------

# Definition: https://github.com/ml-explore/mlx, `mlx/backend/cpu/quantized.cpp` (`affine_dequantize`). The numbers are
# s u + b in float32. Scales of both signs are usual.


def _mlx_facts(facts: row.LayoutFacts) -> row.LayoutFacts:
    """The fields of a module: its own, or the fields of all."""
    own = facts.get(str(facts.get("module")))
    return own if isinstance(own, dict) else facts


def _mlx_bits(facts: row.LayoutFacts, words: int, groups: int) -> int:
    """The width of the codes of a module, which its own field of the configuration may have."""
    own = _mlx_facts(facts)
    bits = row.fact_field(own, "bits", int, row.fact_field(facts, "bits", int, 4))
    size = row.fact_field(own, "group_size", int, row.fact_field(facts, "group_size", int, 64))
    mode = own.get("mode", "affine")
    check(mode == "affine", f"mode={short_text(mode)} is not read beside biases")
    check(bits in (2, 3, 4, 5, 6, 8) and size > 0, f"bits={bits} and group_size={size} are not those of MLX")
    fits = words * 32 == groups * size * bits
    check(fits, f"{words} words and {groups} groups do not fit bits={bits} and group_size={size} of the configuration")
    return bits


def _read_mlx(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    """The array of MLX's codes, scales and offsets; a negative scale is made positive by reversing the codes."""
    words, stored, offsets = parts["weight"], parts["scales"], parts["biases"]
    ok = row.is_matrix(stored) and stored.shape == offsets.shape and stored.shape[0] == words.shape[0]
    check(ok and stored.dtype == offsets.dtype, "scales and biases must both have the shape (out, groups)")
    scale, low = (row.as_scales(part, part.shape).astype(np.float32) for part in (stored, offsets))
    bits = _mlx_bits(facts, words.shape[1], scale.shape[1])
    codes = row.codes_from_words(words, bits, words.shape[1] * 32 // bits)
    kinds = row.kinds_from(codes.shape, scale.shape)
    most, below = (1 << bits) - 1, scale < 0
    codes = np.where(over_elements(below, kinds, codes.shape), most - codes, codes).astype(np.uint8)
    exact = low.astype(np.float64) + np.where(below, most * scale.astype(np.float64), 0)  # |s| (most - u) + this
    low = row.cast_exactly(exact, np.float32, "offsets of scales below zero")
    return offset_array(codes, np.abs(scale), low, IntegerFormat(bits, signed=False), kinds)


MLX_ROW = row.LayoutRow(
    "mlx", ("biases", "weight", "scales"), row.look_for_matrix("weight", np.dtype("<u4")), _read_mlx, row.only_read, "",
)  # fmt: skip
#: The formats of the modes without biases: the scales of groups are bytes.
MLX_MODES = {"mxfp4": mxfp4, "mxfp8": mxfp8_e4m3, "nvfp4": NVFP4_FORMAT}


def _read_mlx_mode(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    words, scale, mode = parts["weight"], parts["scales"], _mlx_facts(facts).get("mode", facts.get("mode"))
    check(type(mode) is str and mode in MLX_MODES, f"mode={short_text(mode)} is not one of {', '.join(MLX_MODES)}")
    fmt = MLX_MODES[str(mode)]
    codes = row.codes_from_words(words, fmt.element.bits, words.shape[1] * 32 // fmt.element.bits)
    counts = (codes.shape[0], codes.shape[1] // fmt.group)
    check(codes.shape[1] % fmt.group == 0 and scale.shape == counts, f"scales of {mode} must have shape {list(counts)}")
    if mode == "nvfp4":
        return nvfp4_array_of_one(codes, scale)
    check(not (scale == 255).any(), "a scale is 255, the code of NaN")
    return row.qarray_of_codes(codes, scale, None, fmt)


MLX_MODE_ROW = row.LayoutRow(
    "mlx floats", ("scales", "weight"), row.look_for_matrix("weight", np.dtype("<u4"), scales=row.BYTE),
    _read_mlx_mode, row.only_read, "",
)  # fmt: skip


# -- HQQ: bytes or words whose fields, the highest first, are parts of all rows of groups -----------------------------

# Definition: https://github.com/mobiusml/hqq, `core/bitpack.py` and `core/quantize.py`. The numbers are s (u - z) with
# floats z, which the program computes in 16 bits. Facts are tensors, too.

#: The width of codes by packing; words have ten of 3 bits.
_HQQ_WIDTHS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
_HQQ_OTHERS = (
    "group_size", "nbits", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype",
    "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip


def _hqq_integer(data: np.ndarray, name: str) -> int:
    check(data.size == 1 and np.issubdtype(data.dtype, np.integer), f"{name} must be an integer")
    return int(data.item())


def _read_hqq(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    """The array of HQQ, whose groups of `group_size` numbers run along axis 0 or 1 of the flat weight."""
    shape, text = row.two_lengths(parts["shape"]), parts["packing"]
    packing = text.astype(np.uint8).tobytes()[:16].decode("latin-1")
    check(packing in _HQQ_WIDTHS, f"packing={short_text(packing)} must be one of {', '.join(_HQQ_WIDTHS)}")
    axis = _hqq_integer(parts["axis"], "axis")
    check(axis in (0, 1), f"axis={axis} must be 0 or 1")
    size = _hqq_integer(parts["group_size"], "group_size") if "group_size" in parts else shape[axis]
    bits, count = _HQQ_WIDTHS[packing], math.prod(shape)
    check(size > 0 and count % size == 0, f"group_size={size} does not divide shape={list(shape)}")
    words = np.ascontiguousarray(parts["W_q"]).view(np.dtype("<u4") if bits == 3 else np.uint8)
    fields = range(27, -1, -3) if bits == 3 else range(8 - bits, -1, -bits)
    codes = np.concatenate([(words >> shift & ((1 << bits) - 1)).astype(np.uint8) for shift in fields])
    rows = (size, count // size) if axis == 0 else (count // size, size)
    ok = codes.shape[0] >= rows[0] and codes.shape[1] == rows[1] and (bits == 3 or codes.shape[0] == rows[0])
    check(ok, f"W_q of shape {list(parts['W_q'].shape)} does not fit shape={list(shape)} and group_size={size}")
    codes = codes[: rows[0]].reshape(shape)
    scale, zero = parts["scale"], parts["zero"]
    check(scale.size == zero.size == count // size, f"scale and zero must have {count // size} numbers each")
    scale, zero = (row.as_scales(part, part.shape).astype(np.float32) for part in (scale, zero))
    check(bool((scale >= 0).all()), "a scale is below zero")
    low = row.cast_exactly(-scale.astype(np.float64) * zero.astype(np.float64), np.float32, "offsets")
    if axis == 1 and shape[1] % size == 0:
        kinds: list[AxisGrouping] = [OWN_SCALE, size]
        scale, low = (part.reshape(shape[0], -1) for part in (scale, low))
    else:  # groups of columns apart, or that cross rows
        kinds = [OWN_SCALE, OWN_SCALE]
        spread = (lambda part: np.tile(part, size)) if axis == 0 else (lambda part: np.repeat(part, size))
        scale, low = (spread(part.reshape(-1)).reshape(shape) for part in (scale, low))
    return offset_array(codes, scale, low, IntegerFormat(max(bits, 2), signed=False), kinds)


HQQ_ROW = row.LayoutRow(
    "hqq", ("W_q", "scale", "zero", "shape", "axis", "packing"), row.look_for_matrix("W_q"), _read_hqq,
    row.only_read, "", _HQQ_OTHERS, ("shape", row.two_lengths),
)  # fmt: skip


# -- LLM.int8 of bitsandbytes: int8 and the largest number of each row -------------------------------------------------

# Definition: https://github.com/bitsandbytes-foundation/bitsandbytes, `functional.py` (`int8_vectorwise_dequant`). It
# multiplies codes by ``SCB`` and the product by 1 / 127; the scale here is their product, rounded once.


def _read_llm_int8(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    codes, most, order = parts["weight"], parts["SCB"], parts.get("weight_format")
    check(order is None or bool((order == 0).all()), "weight_format is not 0, that of rows")
    ok = most.dtype == np.float32 and most.shape == codes.shape[:1]
    check(ok, f"SCB must be float32 of shape {list(codes.shape[:1])}")
    scale = row.as_scales(most, codes.shape).reshape(-1, 1) * np.float32(1 / 127)
    return row.integer_array(codes.view(np.uint8) ^ np.uint8(128), scale, None, 8, [OWN_SCALE, WHOLE_AXIS])


LLM_INT8_ROW = row.LayoutRow(
    "LLM.int8", ("SCB", "weight"), row.look_for_matrix("weight", row.INT8), _read_llm_int8, row.only_read, "",
    ("weight_format",),
)  # fmt: skip


# -- bitsandbytes' NF4: codes of the flat weight, the first in the high nibble, with or without double quantization ----

# Definition: https://github.com/bitsandbytes-foundation/bitsandbytes, `functional.py` (`QuantState.as_dict`,
# `dequantize_4bit`). With double quantization the scale of a block is map[code] * nested_absmax + offset in binary32.


_NF4_STATE = ".quant_state.bitsandbytes__nf4"
_NF4_MAP = np.array([float(level) for level in nf4.element.levels], np.float32)  # type: ignore[attr-defined]
#: The longest record of a weight, in bytes.
_LONGEST_NF4_STATE = 1 << 12
#: The code of zero.
_NF4_ZERO = np.uint8(7)


def _quant_state(data: np.ndarray) -> dict[str, Any]:
    """The record of a weight: JSON in bytes."""
    short = data.dtype == row.BYTE and data.ndim == 1 and data.size <= _LONGEST_NF4_STATE
    check(short, "the quant_state is not a short text")
    with place_in_errors("the quant_state is not JSON"):
        return json_object(data.tobytes().decode("utf-8"))


def _shape_in_state(data: np.ndarray) -> tuple[int, ...]:
    shape = row.fact_field(_quant_state(data), "shape", list, [])
    ok = are_counts(shape) and len(shape) >= 2 and min(shape) > 0
    check(ok, f"shape={short_text(shape)} must be two or more integers above 0")
    return tuple(shape)


def _read_nf4(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    """The array of NF4 in blocks of the flat weight; blocks that cross rows are divided."""
    state, weight, shape = _quant_state(parts[_NF4_STATE]), parts[""], _shape_in_state(parts[_NF4_STATE])
    size, (out, columns) = row.fact_field(state, "blocksize", int, 64), shape[-2:]
    count = math.prod(shape)
    check(size > 0 and size % 2 == 0 and weight.dtype == row.BYTE, f"blocksize={size} must be an even number above 0")
    check(weight.size == -(-count // 2), f"shape={shape} does not fit {weight.size} bytes")
    check(np.array_equal(parts[".quant_map"], _NF4_MAP), "quant_map is not the table of NF4")
    absmax = _absmax(parts, state)
    check(absmax.size == -(-count // size), f"{absmax.size} scales do not fit {count} numbers in blocks of {size}")
    size = min(size, count)
    if columns % size and (size % columns or out % (size // columns)):  # blocks cross rows: groups of parts of them
        whole, size = size, math.gcd(size, columns)
        absmax = np.repeat(absmax, whole // size)[: count // size]
    codes = row.unpack_bits(weight.reshape(-1), 4, 2 * weight.size)
    codes = codes.reshape(-1, 2)[:, ::-1].reshape(-1)[:count].reshape(shape)  # the first is in the high nibble
    rows = max(1, size // columns)
    scale = absmax.reshape(*shape[:-2], out // rows, max(1, columns // size))
    kinds = [*(OWN_SCALE,) * (len(shape) - 2), rows, columns // scale.shape[-1]]
    codes, scale = row.replace_zero_scales(codes, scale, kinds, _NF4_ZERO)
    check(bool((scale > 0).all()), "a scale is below zero")
    fmt = nf4(group=size) if size <= columns else nf4(group=(rows, "all"), axis=(-2, -1))
    return row.qarray_of_codes(codes, scale, None, fmt)


def _absmax(parts: row.TensorParts, state: dict[str, Any]) -> np.ndarray:
    """The scales of the blocks in binary32."""
    absmax = parts[".absmax"].reshape(-1)
    nested_absmax = parts.get(".nested_absmax")
    if nested_absmax is None:
        check(absmax.dtype == np.float32, f"absmax is of dtype {absmax.dtype}, and must be float32")
    else:
        table = parts.get(".nested_quant_map")
        check(table is not None and table.shape == (256,) and table.dtype == np.float32, "nested_quant_map is no table")
        assert table is not None
        size = row.fact_field(state, "nested_blocksize", int, 256)
        ok = absmax.dtype == row.BYTE and nested_absmax.dtype == np.float32 and size > 0
        check(ok and nested_absmax.size == -(-absmax.size // size), "nested_absmax does not fit the blocks of absmax")
        offset = row.fact_field(state, "nested_offset", (int, float), 0.0)
        fits = abs(offset) <= float(np.finfo(np.float32).max)
        check(fits, f"nested_offset={short_text(offset)} is no number of float32")
        with np.errstate(over="ignore", invalid="ignore"):
            factors = np.repeat(nested_absmax.reshape(-1), min(size, absmax.size))[: absmax.size]
            absmax = table[absmax] * factors + np.float32(offset)
    check(bool(np.isfinite(absmax).all()), "a scale is infinite or NaN")
    return absmax


def _write_nf4(q: QArray, exact: bool) -> row.WrittenWeight:
    """The tensors and facts of NF4 as bitsandbytes stores it, the first of two codes in the high bits."""
    weight = row.pieces(q, nf4.element)
    rows, last = weight.kinds
    by_row = rows == OWN_SCALE and isinstance(last, int)
    check(by_row, f"it has the grouping of {weight.fmt}, not groups along its last axis")
    assert isinstance(last, int)
    check(q.shape[1] % last == 0 and last % 2 == 0, f"its groups of {last} do not divide its last axis of {q.shape[1]}")
    scale = row.cast_exactly(row.float_scales(weight), np.float32, "scales")
    nibbles = weight.codes.reshape(-1, 2)[:, ::-1].reshape(1, -1)
    state = {"quant_type": "nf4", "blocksize": last, "dtype": str(np.dtype(q.dtype)), "shape": list(q.shape)}
    parts = {
        "": row.pack_bits(nibbles, 4).reshape(-1, 1),
        ".absmax": scale.reshape(-1),
        ".quant_map": _NF4_MAP,
        _NF4_STATE: np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    return parts, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}


def _look_nf4(entries: row.TensorEntries) -> tuple[int, ...] | None:
    return (2 * math.prod(entries[""].shape),) if entries[""].dtype == row.BYTE else None


_NF4_PARTS, _NF4_OPTIONAL = (_NF4_STATE, "", ".absmax", ".quant_map"), (".nested_absmax", ".nested_quant_map")
_NF4_PEEK = (_NF4_STATE, _shape_in_state)
NF4_ROW = row.LayoutRow("bitsandbytes", _NF4_PARTS, _look_nf4, _read_nf4, _write_nf4, "nf4", _NF4_OPTIONAL, _NF4_PEEK)


# -- torchao's safetensors: tensor subclasses taken apart, with a record of each in the metadata of the file -----------

# Definition: https://github.com/pytorch/ao, `prototype/safetensors`, and the classes in
# `quantization/quantize_/workflows`: `Int8Tensor` and `IntxUnpackedToInt8Tensor` are s (e - z), `Float8Tensor` s e, and
# `Int4Tensor`, with scales and zero points (groups, out), s e + z.


def _grouping(facts: row.LayoutFacts, shape: Sequence[int], scale: np.ndarray) -> tuple[np.ndarray, list[AxisGrouping]]:
    """The scales in the shape of groups, and the length of a group along each axis."""
    block = row.fact_field(facts, "block_size", list, [])
    ok = are_counts(block) and len(block) in (0, len(shape)) and all(0 < n < 1 << 31 for n in block)
    check(ok, f"block_size={short_text(block)} must have an integer above 0 for each axis")
    if block:
        counts = tuple(-(-n // size) for n, size in zip(shape, block, strict=True))
        check(scale.size == np.prod(counts), f"scales of shape {list(scale.shape)} do not fit blocks of {block}")
        scale = scale.reshape(counts)
    scale = row.as_scales(scale, shape)
    return scale, row.kinds_from(shape, scale.shape, tuple(block) if block else None)


def _read_int8(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    """The array of torchao's integers of `target_dtype`, stored as int8, with integer zero points."""
    codes, target = parts["qdata"], row.fact_field(facts, "target_dtype", dict, {})
    match = re.fullmatch(r"int([2-8])", str(target.get("_data", "int8")))
    check(match is not None, f"target_dtype={short_text(target)} must be one of int2 to int8")
    assert match is not None
    bits = int(match[1])
    check(codes.dtype == row.INT8, f"qdata is of dtype {codes.dtype}, and must be int8")
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
    return row.integer_array((codes.astype(np.int16) + half).astype(np.uint8), scale, zero, bits, kinds)


def _read_float8(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    codes = parts["qdata"]
    check(codes.dtype == row.FLOAT8, f"qdata is of dtype {codes.dtype}, and must be float8_e4m3fn")
    scale, kinds = _grouping(facts, codes.shape, parts["scale"])
    return row.float_array(codes.view(np.uint8), scale, float8_e4m3fn, kinds)


def _read_int4(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    """The array of torchao's int4, two codes in a byte, with float zero points of shape (groups, out)."""
    packed_codes = parts["qdata"]
    ok = packed_codes.dtype.itemsize == 1 and "act_pre_scale" not in parts
    check(ok, "qdata must be bytes, without an act_pre_scale")
    codes = row.unpack_bits(packed_codes.view(np.uint8), 4, 2 * packed_codes.shape[1])
    scale, zero = parts["scale"], parts["zero_point"]
    ok = row.is_matrix(scale) and scale.shape == zero.shape and scale.dtype == zero.dtype
    check(ok and scale.shape[1] == codes.shape[0], "scale and zero_point must both have the shape (groups, out)")
    scale = np.ascontiguousarray(row.as_scales(scale, scale.shape).T)
    zero = np.ascontiguousarray(row.as_scales(zero, zero.shape).T)
    check(bool((scale >= 0).all()), "a scale is below zero")
    _, kinds = _grouping(facts, codes.shape, scale)
    return offset_array(codes, scale, zero, IntegerFormat(4), kinds)


def offset_array(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, element: IntegerFormat, kinds: list[AxisGrouping]
) -> QArray:
    """The numbers s e + z. Under a scale of zero all codes become the code of zero."""
    codes, scale = row.replace_zero_scales(codes, scale, kinds, np.uint8(0))
    fmt = ScaledFormat(element, scale=row.SCALE_FORMATS[scale.dtype], zero_point="float", **grouping_fields(kinds))
    return row.qarray_of_codes(codes, scale, zero, fmt)


# -- writing -----------------------------------------------------------------------------------------------------------


def _block_size(weight: row.Pieces) -> list[int]:
    """The sizes of the groups; ValueError if they do not divide the axes."""
    block, shape = row.group_lengths(weight), weight.codes.shape
    fits = all(n % size == 0 for n, size in zip(shape, block, strict=True))
    check(fits, f"its groups of {block} do not divide its shape {list(shape)}")
    return block


#: The field of the facts that is not in the record of a weight: the configuration by which torchao makes it.
TORCHAO_CONFIG = "config"


def _torchao_record(
    name: str, data: dict[str, Any], parts: dict[str, np.ndarray], config: str, options: dict[str, Any]
) -> row.WrittenWeight:
    facts = {"_type": name, "_data": data, "_tensor_data_names": list(parts)}
    return parts, facts | {TORCHAO_CONFIG: {"_type": config, "_version": 2, "_data": options}}


def _dtype_record(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def _write_int8(q: QArray, exact: bool) -> row.WrittenWeight:
    weight = row.pieces(q)
    codes, scale, zero = row.unsigned_pieces(weight, range(2, 9))
    half = 1 << (weight.fmt.element.bits - 1)
    shift = zero - half
    check(bool(((shift >= -128) & (shift < 128)).all()), "a zero point is no integer of 8 bits")
    parts = {"qdata": (codes.astype(np.int16) - half).astype(np.int8), "scale": scale}
    parts["zero_point"] = shift.astype(np.int8)
    data = {"target_dtype": _dtype_record(f"int{weight.fmt.element.bits}"), "block_size": _block_size(weight)}
    data |= {"dtype": _dtype_record(str(np.dtype(q.dtype))), "activation_quantization": None}
    size = data["block_size"][1]
    rows = {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}}
    groups = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": size}}
    options = {"weight_dtype": data["target_dtype"], "granularity": rows if size == q.shape[1] else groups}
    options["mapping_type"] = {"_type": "MappingType", "_data": "ASYMMETRIC" if shift.any() else "SYMMETRIC"}
    return _torchao_record("IntxUnpackedToInt8Tensor", data, parts, "IntxWeightOnlyConfig", options)


def _write_float8(q: QArray, exact: bool) -> row.WrittenWeight:
    weight = row.pieces(q, float8_e4m3fn)
    parts = {"qdata": weight.codes.view(row.FLOAT8), "scale": row.float_scales(weight)}
    data = {"block_size": _block_size(weight), "mm_config": None, "act_quant_kwargs": None}
    data |= {
        "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
        "dtype": _dtype_record(str(np.dtype(q.dtype))),
    }
    return _torchao_record("Float8Tensor", data, parts, "Float8WeightOnlyConfig", {})


def _write_int4(q: QArray, exact: bool) -> row.WrittenWeight:
    weight = row.pieces(q)
    ok = weight.fmt.zero_point == "float" and weight.fmt.element == IntegerFormat(4)
    check(ok, "it is not int4 with float zero points")
    row.row_group_size(weight)
    scale, zero = row.float_scales(weight), weight.zero
    assert zero is not None
    parts = {"qdata": row.pack_bits(weight.codes, 4).view(np.int8), "scale": scale.T, "zero_point": zero.T}
    data = {"block_size": _block_size(weight), "shape": list(q.shape)}
    return _torchao_record("Int4Tensor", data, parts, "Int4WeightOnlyConfig", {"group_size": data["block_size"][1]})


def _torchao_row(
    name: str, parts: tuple[str, ...], read: Callable, write: Callable, fits: str, optional: tuple = ()
) -> row.LayoutRow:
    look = row.look_for_matrix("qdata", each=2 if read is _read_int4 else 1)
    return row.LayoutRow(name, parts, look, read, write, fits, optional)


_INT8_ROW = _torchao_row("Int8Tensor", ("qdata", "scale"), _read_int8, _write_int8, "int8(channel=0)", ("zero_point",))
_INT4_FITS, _INT4_PARTS = "int4(group=128,scale=bfloat16,zero_point=float)", ("qdata", "scale", "zero_point")
_TORCHAO_LIST = (
    _INT8_ROW,
    replace(_INT8_ROW, name="IntxUnpackedToInt8Tensor", fits="int4(group=32)"),
    _torchao_row("Float8Tensor", ("qdata", "scale"), _read_float8, _write_float8, "float8_e4m3fn(channel=0)"),
    _torchao_row("Int4Tensor", _INT4_PARTS, _read_int4, _write_int4, _INT4_FITS, ("act_pre_scale",)),
)
#: The rows by the type in the record of a weight.
TORCHAO_ROWS = {one.name: one for one in _TORCHAO_LIST}
