"""The layouts of compressed-tensors, and similar layouts of DeepSeek and gpt-oss.

Integers are packed into words or stand one by one, as 8-bit floats do; floats of 4 or 8 bits stand in small groups.
Definition: https://github.com/vllm-project/compressed-tensors, `compressors/pack_quantized` and `naive_quantized`.
Words have no gaps. Before version 0.18 no code crossed a word, so words of 3, 5, 6 and 7 bits had spare bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from jax.core import Tracer

from jchop._checkpoints import row
from jchop._common.checks import check
from jchop._common.files import short_text
from jchop._spec.spec import Spec
from jchop._storage._array import QArray
from jchop._storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, axis_groupings
from jchop._storage._codes import batch_axes, load_codes, store_codes
from jchop.formats import IntegerFormat
from jchop.formats._catalogue import float4_e2m1fn, float8_e4m3fn, float8_e8m0fnu
from jchop.formats.scaled.catalogue import mxfp4, mxfp8_e4m3, nvfp4

#: Widths that may be packed.
_PACK_WIDTHS = range(2, 9)
#: The first version whose words have no gaps.
DENSE_VERSION = (0, 18)


# -- the arguments of a weight in the configuration --------------------------------------------------------------------


def _module_arguments(facts: row.LayoutFacts) -> list[row.LayoutFacts]:
    """The arguments of the weights of the groups that name the module in their targets; else of all groups."""
    groups = row.config_groups(facts).values()
    own = [group for group in groups if facts.get("module") in row.fact_field(group, "targets", list, [])]
    return [weights for group in own or groups if isinstance(weights := group.get("weights"), dict)]


def _group_sizes(weights: row.LayoutFacts, shape: tuple[int, int]) -> tuple[int, int] | None:
    """The sizes of the groups along both axes, by the arguments of a weight; None if they do not have them."""
    strategy, size = weights.get("strategy"), row.fact_field(weights, "group_size", int)
    if strategy == "block":
        block = weights.get("block_structure")
        structure: Any = list(map(int, re.findall(r"\d{1,9}", block))) if isinstance(block, str) else block
        ok = isinstance(structure, list) and len(structure) == 2 and all(type(n) is int and n > 0 for n in structure)
        check(ok, f"block_structure={short_text(block)} must be two integers above zero")
        return min(structure[0], shape[0]), min(structure[1], shape[1])
    if strategy in ("tensor", "channel") or size == -1:
        return (shape[0] if strategy == "tensor" else 1), shape[1]
    check(size is None or size > 0, f"group_size={size} must be an integer above zero, or -1")
    return None if size is None else (1, min(size, shape[1]))


def _module_group_sizes(
    facts: row.LayoutFacts, shape: tuple[int, int], scales: tuple[int, ...], bits: int
) -> tuple[int, int] | None:
    """The sizes of the groups of a weight of a module; None if the configuration does not have them.

    Raises:
        ValueError: if several groups of the configuration fit.
    """
    own = [weights for weights in _module_arguments(facts) if weights.get("num_bits", bits) == bits]
    claims = {_group_sizes(weights, shape) if scales != (1, 1) else None for weights in own}  # one fits all strategies
    candidates = sorted(sizes for sizes in claims if sizes is not None)
    fitting = [sizes for sizes in candidates if tuple(-(-n // m) for n, m in zip(shape, sizes, strict=True)) == scales]
    check(len(fitting) < 2, f"groups of {fitting} fit; a group with the module's name in its targets says which")
    return fitting[0] if fitting else None if None in claims or not candidates else candidates[0]


def activation_arguments(spec: Spec) -> dict[str, Any] | None:
    """The arguments of inputs that are rounded when the model runs; None for a format that has no name there."""
    fmt = spec.scaled
    elements = {IntegerFormat(8): "int", float8_e4m3fn: "float", float4_e2m1fn: "float"}
    if fmt is None or fmt.element not in elements or fmt.zero_point is not None or fmt.scale_rule.tensor_scale:
        return None
    rows, last = axis_groupings(fmt, 2)
    if rows not in (OWN_SCALE, WHOLE_AXIS) or (rows == WHOLE_AXIS and last != WHOLE_AXIS) or last == OWN_SCALE:
        return None
    strategy = "tensor" if rows == WHOLE_AXIS else "token" if last == WHOLE_AXIS else "group"
    arguments = {"num_bits": fmt.element.bits, "type": elements[fmt.element], "symmetric": True, "dynamic": True}
    arguments |= {"strategy": strategy, "group_size": last if strategy == "group" else None}
    return arguments | ({"scale_dtype": "torch.uint8"} if fmt.scale == float8_e8m0fnu else {})


# -- pack-quantized: words of int32 along the last axis, codes + 2^(bits - 1) ------------------------------------------


def _read_pack(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    """The array of integers packed in words, with zero points packed or not, in groups or an order of columns."""
    words, shape = parts["weight_packed"], row.two_lengths(parts["weight_shape"])
    scale = row.as_scales(parts["weight_scale"], shape)
    check(words.shape[0] == shape[0], f"weight_packed has {words.shape[0]} rows, and weight_shape {list(shape)}")
    zero = parts.get("weight_zero_point")
    bits, each = _word_form(words, shape, zero if zero is not None and zero.dtype == row.WORD else None, facts)
    codes = row.codes_from_words(words, bits, shape[1], each)
    if zero is not None and zero.dtype == row.INT8:  # of strategies whose zero points are not packed
        zero = _unpacked_zero(zero, scale, bits)
    elif zero is not None:
        zero_shape = (row.word_count(shape[0], bits, each), scale.shape[1])
        ok = zero.dtype == row.WORD and zero.shape == zero_shape
        check(ok, f"weight_zero_point must be int32 of shape {list(zero_shape)}")
        zero = row.codes_from_words(zero.T, bits, shape[0], each).T.astype(np.int32)
        check(scale.shape[0] == shape[0], "weight_zero_point needs a scale for each row")
    index = parts.get("weight_g_idx")
    if index is None or (index < 0).all():  # -1 everywhere: no order was chosen
        kinds = row.kinds_from(shape, scale.shape, _module_group_sizes(facts, shape, scale.shape, bits))
        return row.integer_array(codes, scale, zero, bits, kinds)
    return integer_array_by_index(codes, scale, zero, index, bits)


def _unpacked_zero(zero: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """Zero points of signed codes, one for each scale, as zero points of unsigned codes."""
    ok = zero.dtype == row.INT8 and zero.size == scale.size
    check(ok, "weight_zero_point must be int8, one for each scale")
    return zero.reshape(scale.shape).astype(np.int32) + (1 << (bits - 1))


def integer_array_by_index(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, index: np.ndarray, bits: int
) -> QArray:
    """Codes whose column j is in the group ``index[j]``: groups of neighbours, else a scale for each element."""
    columns, count = codes.shape[1], scale.shape[1]
    ok = index.shape == (columns,) and np.issubdtype(index.dtype, np.integer)
    ok = ok and bool(((index >= 0) & (index < count)).all())
    check(ok, f"g_idx must be {columns} integers from 0 to {count - 1}")
    size = int((index != 0).argmax()) or columns  # the first group is whole, and the last may be smaller
    if np.array_equal(index, np.arange(columns) // size) and count == -(-columns // size):
        return row.integer_array(codes, scale, zero, bits, row.kinds_from(codes.shape, scale.shape, (1, size)))
    spread_zero = None if zero is None else zero[:, index]
    return row.integer_array(codes, scale[:, index], spread_zero, bits, [OWN_SCALE, OWN_SCALE])


def _word_form(
    word_rows: np.ndarray, shape: tuple[int, int], zero: np.ndarray | None, facts: row.LayoutFacts
) -> tuple[int, int | None]:
    """The width of the codes, and how many are in each word if some of its bits are spare; else None.

    The configuration names widths and the version. The numbers of words and spare bits show the rest.
    """
    (out, columns), words = shape, word_rows.shape[1]
    config_widths = {row.fact_field(weights, "num_bits", int, 8) for weights in _module_arguments(facts)}
    longest = columns if zero is None else max(shape)
    gaps = {bits: (None, 32 // bits) if 32 % bits and longest > 32 // bits else (None,) for bits in _PACK_WIDTHS}
    forms = [(bits, each) for bits in _PACK_WIDTHS if bits in config_widths or not config_widths for each in gaps[bits]]
    forms = [form for form in forms if row.word_count(columns, *form) == words]
    text = f"{words} words for {columns} columns"
    of = f", of which the configuration names {' and '.join(map(str, sorted(config_widths)))}" if config_widths else ""
    check(bool(forms), f"{text} are no codes of 2 to 8 bits{of}")
    if version := re.match(r"(\d{1,4})\.(\d{1,4})", str(facts.get("version"))):
        place = -1 if (int(version[1]), int(version[2])) < DENSE_VERSION else 0
        forms = [(bits, each) for bits, each in forms if each == gaps[bits][place]] or forms
    if zero is not None:
        forms = [form for form in forms if row.word_count(out, *form) == zero.shape[0]] or forms
    if len(forms) > 1:
        forms = [form for form in forms if _spare_is_zero(word_rows, columns, *form)] or forms
    widths = sorted({bits for bits, _ in forms})
    remedy = "a group with the module's name in its targets" if len(widths) > 1 else "the version of compressed-tensors"
    check(len(forms) == 1, f"{text} may be codes of {widths} bits in several forms; {remedy} says which")
    return forms[0]


def _spare_is_zero(word_rows: np.ndarray, columns: int, bits: int, each: int | None) -> bool:
    """Whether the bits that hold no codes are zero: in each word, or at the end of a row."""
    last = columns * bits - 32 * (word_rows.shape[1] - 1)
    words, used = (word_rows[:, -1:], last) if each is None else (word_rows, bits * each)
    return used == 32 or not (np.ascontiguousarray(words).view(np.uint32) >> np.uint32(used)).any()


def _with_one_scale(parts: dict[str, Any], facts: dict[str, Any]) -> row.WrittenWeight:
    """A weight whose scale and zero point of strategy ``tensor`` are vectors of one number."""
    ends = ("weight_scale", "weight_zero_point") if facts["strategy"] == "tensor" else ()
    return parts | {end: parts[end].reshape(1) for end in ends if end in parts}, facts


def _write_pack(q: QArray, exact: bool) -> row.WrittenWeight:
    """The tensors and facts of integers in words; zero points only if one is not the middle of the codes."""
    weight, index = row.group_by_column(row.pieces(q))
    others = "which compressed-tensors since 0.20 does not have; gptq and gptq_v2 hold them"
    check(index is None, f"its columns are in groups of any order (g_idx), {others}")
    codes, scale, zero = row.unsigned_pieces(weight, _PACK_WIDTHS)
    bits = weight.fmt.element.bits
    symmetric = bool((zero == 1 << (bits - 1)).all())
    facts = row.weight_arguments(weight, "int", symmetric)
    if facts["strategy"] != "tensor":
        row.row_group_size(weight)
    parts = {
        "weight_packed": row.codes_to_words(codes, bits),
        "weight_scale": scale,
        "weight_shape": np.array(q.shape, np.int64),
    }
    if not symmetric:
        parts["weight_zero_point"] = row.codes_to_words(row.zero_codes(zero, bits).T, bits).T
        if facts["strategy"] == "tensor":  # which is not packed
            parts["weight_zero_point"] = (zero - (1 << (bits - 1))).astype(np.int8)
    return _with_one_scale(parts, facts)


PACK_ROW = row.LayoutRow(
    "pack-quantized", ("weight_packed", "weight_scale", "weight_shape"),
    row.look_for_matrix("weight_packed", row.WORD), _read_pack, _write_pack, "int4(group=128,scale=bfloat16)",
    ("weight_zero_point", "weight_g_idx"), ("weight_shape", row.two_lengths), inputs_last=True,
)  # fmt: skip


# -- int-quantized: int8 and a scale -----------------------------------------------------------------------------------


def _read_integer(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    weight = parts["weight"]
    scale, zero = row.as_scales(parts["weight_scale"], weight.shape), parts.get("weight_zero_point")
    if zero is not None:
        zero = _unpacked_zero(zero, scale, 8)
    codes = weight.view(np.uint8) ^ np.uint8(128)
    kinds = row.kinds_from(weight.shape, scale.shape, _module_group_sizes(facts, weight.shape, scale.shape, 8))
    return row.integer_array(codes, scale, zero, 8, kinds)


def _write_integer(q: QArray, exact: bool) -> row.WrittenWeight:
    weight = row.pieces(q)
    codes, scale, zero = row.unsigned_pieces(weight, (8,))
    parts = {"weight": (codes ^ np.uint8(128)).view(np.int8), "weight_scale": scale}
    symmetric = bool((zero == 128).all())
    if not symmetric:
        parts["weight_zero_point"] = (row.zero_codes(zero, 8) ^ np.uint8(128)).view(np.int8)
    return _with_one_scale(parts, row.weight_arguments(weight, "int", symmetric))


_LOOK_FOR_INT8, _SCALED_PARTS = row.look_for_matrix("weight", row.INT8), ("weight_scale", "weight")
_INTEGER_FITS, _INTEGER_OPTIONAL = "int8(channel=0)", ("weight_zero_point",)
INTEGER_ROW = row.LayoutRow(
    "int-quantized", _SCALED_PARTS, _LOOK_FOR_INT8, _read_integer, _write_integer, _INTEGER_FITS, _INTEGER_OPTIONAL
)


# -- float-quantized: e4m3 and a scale ---------------------------------------------------------------------------------


def _read_float(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    weight, scale = parts["weight"], row.as_scales(parts["weight_scale"], parts["weight"].shape)
    return float8_array(weight, scale, _module_group_sizes(facts, weight.shape, scale.shape, 8))


def float8_array(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None) -> QArray:
    """A weight of float8_e4m3fn, times scales of tensor, rows, groups or blocks."""
    scale = row.as_scales(scale, weight.shape)
    if block is None:
        counts = tuple(-(-n // 128) for n in weight.shape)
        block = (128, 128) if scale.shape == counts else None
    kinds = row.kinds_from(weight.shape, scale.shape, block)
    return row.float_array(weight.view(np.uint8), scale, float8_e4m3fn, kinds)


def _write_float(q: QArray, exact: bool) -> row.WrittenWeight:
    weight = row.pieces(q, float8_e4m3fn)
    parts = {"weight": weight.codes.view(row.FLOAT8), "weight_scale": row.float_scales(weight)}
    return _with_one_scale(parts, row.weight_arguments(weight, "float", True))


_FLOAT_FITS, _LOOK_FOR_FLOAT8 = "float8_e4m3fn(channel=0)", row.look_for_matrix("weight", row.FLOAT8)
FLOAT_ROW = row.LayoutRow("float-quantized", _SCALED_PARTS, _LOOK_FOR_FLOAT8, _read_float, _write_float, _FLOAT_FITS)


# -- DeepSeek: e4m3 in tiles of 128 x 128, each times a binary32 number or a power of two (e8m0) -----------------------

# Definition: https://github.com/deepseek-ai/DeepSeek-V3, `inference/kernel.py` (`weight_dequant`). Despite its name,
# ``weight_scale_inv`` is the factor.


def _read_tiles(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    """The array of float8 with one scale for each tile of `weight_block_size`, or one for all."""
    block = row.fact_field(facts, "weight_block_size", list, [128, 128])
    ok = len(block) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in block)
    check(ok, f"weight_block_size={block} must be two integers above zero")
    weight, scale = parts["weight"], parts["weight_scale_inv"]
    if scale.dtype == np.uint8 and facts.get("scale_fmt") == "ue8m0":
        scale = scale.view(row.EXPONENT8)
    if scale.size == 1 and facts.get("weight_block_size") is None:
        return float8_array(weight, scale, None)
    counts = tuple(-(-n // size) for n, size in zip(weight.shape, block, strict=True))
    ok = tuple(scale.shape) == counts
    check(ok, f"weight_scale_inv has shape {list(scale.shape)}, and tiles of {block} have {list(counts)}")
    return float8_array(weight, scale, (block[0], block[1]))


def _write_tiles(q: QArray, exact: bool) -> row.WrittenWeight:
    """The tensors and facts of float8 in tiles of 128 x 128; scales that are powers of two stay so."""
    weight = row.pieces(q, float8_e4m3fn)
    sizes = zip(weight.kinds, row.group_lengths(weight), q.shape, strict=True)
    tiles = all(kind == 128 or (not isinstance(kind, int) and size == n <= 128) for kind, size, n in sizes)
    check(tiles, f"it has the grouping of {weight.fmt}, not tiles of 128 x 128")
    facts: dict[str, Any] = {"weight_block_size": [128, 128]}
    if weight.fmt.scale == float8_e8m0fnu:
        facts["scale_fmt"], scale = "ue8m0", weight.scale.view(row.EXPONENT8)
    else:
        scale = row.cast_exactly(row.float_scales(weight), np.float32, "scales")
    return {"weight": weight.codes.view(row.FLOAT8), "weight_scale_inv": scale}, facts


_TILE_PARTS, _TILE_FITS = ("weight_scale_inv", "weight"), "float8_e4m3fn(group=(128,128))"
FP8_TILES = row.LayoutRow("fp8", _TILE_PARTS, _LOOK_FOR_FLOAT8, _read_tiles, _write_tiles, _TILE_FITS)


#: A scale for the whole weight, ``weight_scale``, as the same method has it without blocks.
FP8_ONE_SCALE = replace(FLOAT_ROW, name="fp8 with one scale", write=row.only_read, fits=FP8_TILES.fits)


# -- floats of 4 or 8 bits in small groups: NVFP4, MXFP4 and MXFP8 of compressed-tensors, and gpt-oss's MXFP4 ----------

# Definition: https://github.com/vllm-project/compressed-tensors, `compressors/nvfp4`, `mxfp4`, `mxfp8`. The scale of a
# group of NVFP4 is the quotient of an e4m3 number and the scale of the tensor, rounded to binary32. gpt-oss:
# https://github.com/openai/gpt-oss, `gpt_oss/torch/weights.py`.


#: NVFP4 with the subnormal scales that files have.
NVFP4_FORMAT = nvfp4(scale=float8_e4m3fn)
#: The code of NaN of e8m0, and the code of 1 of e8m0 and e4m3.
_E8M0_NAN, _E8M0_ONE, _E4M3_ONE = 255, np.uint8(127), np.uint8(0x38)


def _check_scale_counts(shape: tuple[int, ...], scale: np.ndarray, group: int) -> None:
    counts = (shape[0], shape[1] // group)
    ok = shape[1] % group == 0 and scale.shape == counts
    check(ok, f"weight_scale has shape {list(scale.shape)}, and groups of {group} in {list(shape)} have {list(counts)}")


# -- nvfp4 -------------------------------------------------------------------------------------------------------------


def _read_nvfp4(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    divisor = _tensor_scale(parts, "weight_global_scale")
    with np.errstate(over="ignore"):
        factor = np.float32(1) / divisor
    return _nvfp4_array(parts["weight_packed"], parts["weight_scale"], lambda s: s / divisor, factor, facts)


def _read_nvfp4_of_modelopt(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    factor = _tensor_scale(parts, "weight_scale_2")
    return _nvfp4_array(parts["weight"], parts["weight_scale"], lambda s: s * factor, factor, facts)


def _tensor_scale(parts: row.TensorParts, name: str) -> np.float32:
    whole = parts[name]
    check(whole.dtype == np.float32 and whole.size == 1, f"{name} must be one float32 number")
    number = np.float32(whole.reshape(()))
    check(bool(np.isfinite(number) and number > 0), f"{name}={number} must be a finite number above 0")
    return number


def _nvfp4_array(
    packed_codes: np.ndarray, scale: np.ndarray, combine: Callable, factor: np.float32, facts: row.LayoutFacts
) -> QArray:
    """A weight under scales of e4m3 for 16 numbers and one of the tensor.

    Args:
        packed_codes: two in each byte.
        scale: of the groups.
        combine: gives the float32 scales of the groups from the numbers of e4m3.
        factor: the scale of the tensor; the products by it may differ from the combined scales in their last bit.
        facts: which say whether every bit is kept; the groups then have float32 scales unless the products are equal.
    """
    codes = row.unpack_bits(packed_codes, 4, 2 * packed_codes.shape[1])
    _check_scale_counts(codes.shape, scale, 16)
    check(scale.dtype == row.FLOAT8, f"weight_scale is of dtype {scale.dtype}, and must be float8_e4m3fn")
    numbers = scale.astype(np.float32)
    check(bool(np.isfinite(numbers).all()), "a scale is NaN")
    with np.errstate(over="ignore"):
        combined = combine(numbers)
    check(bool(np.isfinite(combined).all()), "a scale is infinite times the scale of the tensor")
    few, exact = np.unique(np.abs(numbers)), facts.get("exact", True) is True
    usable = np.isfinite(factor) and factor > 0 and not (numbers < 0).any()
    if not usable or (exact and not _same_products(few, factor, combine(few))):
        return row.float_array(codes, combined, float4_e2m1fn, [OWN_SCALE, 16])
    return nvfp4_array(codes, scale.view(np.uint8), factor)


def nvfp4_array(codes: np.ndarray, scale: np.ndarray, factor: np.float32) -> QArray:
    """Codes of e2m1 under codes of scales of e4m3 for 16 numbers, times a factor of all."""
    codes, scale = row.replace_zero_scales(codes, scale, [OWN_SCALE, 16], codes & np.uint8(8), _E4M3_ONE)
    return row.qarray_of_codes(codes, (scale, np.asarray(factor)), None, NVFP4_FORMAT)


def nvfp4_array_of_one(codes: np.ndarray, scale: np.ndarray) -> QArray:
    """The same with a factor of one."""
    check(bool((scale < 127).all()), "a scale is no number of e4m3 from 0 to 448")
    return nvfp4_array(codes, scale, np.float32(1))


def _same_products(numbers: np.ndarray, factor: Any, scales: np.ndarray) -> bool:
    """Whether e s and e n factor are the same binary32 numbers for all elements e, numbers n and their scales s.

    Products of a factor and two short numbers are exact in binary64.
    """
    levels = np.arange(8, dtype=np.uint8).view(row.FLOAT4).astype(np.float32)
    with np.errstate(over="ignore"):
        stored = np.outer(scales.astype(np.float32), levels).astype(np.float32)
        exact = np.outer(numbers.astype(np.float64), levels.astype(np.float64)) * np.float64(factor)
        return np.array_equal(stored, exact.astype(np.float32))


def _divisor_of_e4m3(few: np.ndarray) -> np.float32:
    """The number d with the ascending quotients `few` = fl(s / d) of numbers s of e4m3; ValueError if there is none.

    The largest quotient is the quotient of one of the numbers of e4m3, so few divisors are possible.
    """
    levels = np.arange(126, 0, -1, dtype=np.uint8).view(row.FLOAT8).astype(np.float32)
    if not few.size:
        return np.float32(1)
    with np.errstate(over="ignore", divide="ignore"):
        near = (levels / few[-1]).view(np.int32)
        for steps in (0, 1, -1, 2, -2) if few.size <= levels.size else ():
            divisors = (near + np.int32(steps)).view(np.float32)
            for divisor in divisors[np.isfinite(divisors) & (divisors > 0)]:
                if np.array_equal((few * divisor).astype(row.FLOAT8).astype(np.float32) / divisor, few):
                    return divisor
    raise ValueError("its scales are not those of e4m3 over one divisor")


def _write_nvfp4(q: QArray, exact: bool) -> row.WrittenWeight:
    """The tensors and facts of NVFP4: codes, scales in float8, and the inverse of the tensor scale."""
    weight = row.pieces(q)
    xp = row.numpy_of(weight.codes)
    ok = weight.fmt.element == float4_e2m1fn and weight.kinds == (OWN_SCALE, 16)
    check(ok, "it is not nvfp4 with groups of 16 along its last axis")
    check(q.shape[1] % 16 == 0, f"its last axis of {q.shape[1]} is no multiple of 16")
    if weight.fmt.scale_rule.tensor_scale:
        scale, factor = weight.scale[0].view(row.FLOAT8), np.float32(weight.scale[1])
        with np.errstate(over="ignore", divide="ignore"):
            divisor = np.float32(1) / factor
        check(bool(np.isfinite(divisor) and divisor > 0), f"its tensor scale {factor} has no reciprocal")
        numbers = np.asarray(xp.unique(scale.view(np.uint8))).view(row.FLOAT8).astype(np.float32)
        with np.errstate(over="ignore"):
            quotients = numbers / divisor
        check(
            not exact or _same_products(numbers, factor, quotients),
            f"the layout divides by 1 / {factor}, and some numbers would differ in their last bit: exact=False "
            "(--inexact of the command line) permits this, and a tensor scale that is a power of two avoids it",
        )
    else:
        quotients = row.cast_exactly(row.float_scales(weight), np.float32, "scales").view(np.int32)
        used = (weight.codes.reshape(*quotients.shape, 16) & 7).any(-1)  # the others are of zeros under any scale
        few = np.asarray(xp.unique(quotients[used]))
        divisor = _divisor_of_e4m3(few.view(np.float32))
        table = np.append((few.view(np.float32) * divisor).astype(row.FLOAT8).view(np.uint8), _E4M3_ONE)
        places = xp.where(used, xp.searchsorted(few, quotients), few.size)
        scale = xp.take(table, places).view(row.FLOAT8)
    parts = {"weight_packed": row.pack_bits(weight.codes, 4), "weight_scale": scale}
    facts = row.weight_arguments(weight, "float", True)
    facts |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    return parts | {"weight_global_scale": divisor.reshape(1)}, facts


_LOOK_FOR_NIBBLES = row.look_for_matrix("weight_packed", row.BYTE, each=2)
_NVFP4_PARTS = ("weight_packed", "weight_scale", "weight_global_scale")
NVFP4_ROW = row.LayoutRow("nvfp4-pack-quantized", _NVFP4_PARTS, _LOOK_FOR_NIBBLES, _read_nvfp4, _write_nvfp4, "nvfp4")


# NVIDIA's ModelOpt. Definition: https://github.com/NVIDIA/Model-Optimizer, `torch/export` and
# `torch/quantization/qtensor`. Its scale of the tensor is a factor, and in compressed-tensors a divisor.


def _read_float_of_modelopt(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    scale = parts["weight_scale"]
    if scale.ndim == 4 and scale.shape[1] == scale.shape[3] == 1:  # of blocks, with an axis for each inside
        scale = scale.reshape(scale.shape[0], scale.shape[2])
    return float8_array(parts["weight"], scale, None)


MODELOPT_ROWS = (
    row.LayoutRow(
        "modelopt nvfp4", ("weight_scale_2", "weight", "weight_scale"), row.look_for_matrix("weight", row.BYTE, each=2),
        _read_nvfp4_of_modelopt, row.only_read, "nvfp4",
    ),
    row.LayoutRow(
        "modelopt fp8", _SCALED_PARTS, _LOOK_FOR_FLOAT8, _read_float_of_modelopt, row.only_read, _FLOAT_FITS
    ),
)  # fmt: skip


# -- mxfp4 and mxfp8: exponents + 127 ----------------------------------------------------------------------------------


def _check_exponents(scale: Any) -> Any:
    """Exponents + 127. In a traced program they are not known, and stay as they are."""
    check(scale.dtype == row.BYTE, f"weight_scale is of dtype {scale.dtype}, and must be uint8")
    check(isinstance(scale, Tracer) or not (scale == _E8M0_NAN).any(), "a scale is 255, the code of NaN")
    return scale


def _mx_row(name: str, fmt: Any, parts: tuple[str, ...], look: row.LookForShape) -> row.LayoutRow:
    """A row of codes in one tensor and exponents in ``weight_scale``."""
    (part,), bits = {*parts} - {"weight_scale"}, fmt.element.bits

    def read(tensors: row.TensorParts, facts: row.LayoutFacts) -> QArray:
        rows, scale = tensors[part].view(np.uint8), tensors["weight_scale"]
        codes = row.unpack_bits(rows, bits, rows.shape[1] * 8 // bits)
        _check_scale_counts(codes.shape, scale, 32)
        return row.qarray_of_codes(codes, _check_exponents(scale), None, fmt)

    def write(q: QArray, exact: bool) -> row.WrittenWeight:
        weight = row.pieces(q)
        same = (weight.fmt.element, weight.fmt.scale, weight.kinds) == (fmt.element, fmt.scale, (OWN_SCALE, 32))
        check(same and weight.zero is None, f"it is not {fmt} along its last axis")
        check(q.shape[1] % 32 == 0, f"its last axis of {q.shape[1]} is no multiple of 32")
        facts = row.weight_arguments(weight, "float", True) | {"scale_dtype": "torch.uint8"}
        codes = row.pack_bits(weight.codes, bits).view(row.BYTE if bits < 8 else row.FLOAT8)
        return {part: codes, "weight_scale": _check_exponents(weight.scale)}, facts

    return row.LayoutRow(name, parts, look, read, write, str(fmt))


_LOOK_FOR_MXFP8 = row.look_for_matrix("weight", row.FLOAT8, weight_scale=row.BYTE)
MXFP4_ROW = _mx_row("mxfp4-pack-quantized", mxfp4, ("weight_packed", "weight_scale"), _LOOK_FOR_NIBBLES)
MXFP8_ROW = _mx_row("mxfp8-quantized", mxfp8_e4m3, _SCALED_PARTS, _LOOK_FOR_MXFP8)


# DeepSeek-V4 has such tiles and mxfp4 experts in one model, and calls both scales ``scale``. Definition:
# https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash, `inference/convert.py`.


def _read_point_tiles(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    return _read_tiles({"weight": parts["weight"], "weight_scale_inv": parts["scale"]}, facts)


def _deepseek_experts(scale: str) -> row.LayoutRow:
    def read(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
        names = {"weight_packed": "weight", "weight_scale": scale}
        return MXFP4_ROW.read({name: parts[own].view(row.BYTE) for name, own in names.items()}, facts)

    look = row.look_for_matrix("weight", row.INT8, each=2, **{scale: row.EXPONENT8})
    return row.LayoutRow("mxfp4 experts", (scale, "weight"), look, read, row.only_read, _TILE_FITS)


DEEPSEEK_V4_ROWS = (
    row.LayoutRow(
        "fp8 of DeepSeek-V4", ("scale", "weight"), _LOOK_FOR_FLOAT8, _read_point_tiles, row.only_read, _TILE_FITS
    ),
    _deepseek_experts("scale"), _deepseek_experts("weight_scale_inv"),
)  # fmt: skip


# -- gpt-oss: mxfp4 of any number of axes, each group in 16 bytes ------------------------------------------------------


def _look_blocks(entries: row.TensorEntries) -> tuple[int, ...] | None:
    blocks, scales = entries.values()
    *outer, groups, size = blocks.shape if len(blocks.shape) > 2 else (0, 0)
    ok = blocks.dtype == scales.dtype == row.BYTE and size == 16 and scales.shape == (*outer, groups) and groups
    return (*outer, 32 * groups) if ok else None


def _read_blocks(parts: row.TensorParts, facts: row.LayoutFacts) -> QArray:
    blocks, scales = parts.values()
    numbers = store_codes(np.ascontiguousarray(blocks).reshape(*blocks.shape[:-2], -1), mxfp4.element)
    return QArray(numbers, _check_exponents(scales), None, Spec(mxfp4), 32 * scales.shape[-1], np.dtype(np.float32))


def _gpt_oss_row(blocks: str, scales: str, name: str) -> row.LayoutRow:
    def write(q: QArray, exact: bool) -> row.WrittenWeight:
        check(q.spec.scaled == mxfp4 and q.ndim > 1, "it is not mxfp4 along the last of two axes or more")
        check(batch_axes(q.spec, q.shape, q.scale) == 0, "vmap added axes to its scales")
        check(q.shape[-1] % 32 == 0, f"its last axis of {q.shape[-1]} is no multiple of 32")
        codes = load_codes(q.qvalue, mxfp4.element).reshape(*q.shape[:-1], -1, 16)
        return {blocks: codes, scales: _check_exponents(q.scale)}, {}

    return row.LayoutRow(name, (blocks, scales), _look_blocks, _read_blocks, write, "mxfp4")


GPT_OSS_ROW = _gpt_oss_row("_blocks", "_scales", "gpt-oss")
GPT_OSS_POINT_ROW = _gpt_oss_row(".blocks", ".scales", "gpt-oss of OpenAI")
