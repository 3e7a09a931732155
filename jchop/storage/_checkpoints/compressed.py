"""compressed-tensors: integers packed into words, and integers or 8-bit floats one by one.

Definition: https://github.com/vllm-project/compressed-tensors, `compressors/pack_quantized` and `naive_quantized`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jchop.formats import float8_e4m3fn
from jchop.storage._array import QArray
from jchop.storage._checkpoints.arrays import (
    along_rows,
    as_scales,
    by_index,
    facts_of,
    float_array,
    float_scales,
    integer_array,
    kinds_from,
    pieces,
    unsigned,
)
from jchop.storage._checkpoints.integers import from_words, to_words, words_of
from jchop.storage._checkpoints.row import Entries, Facts, Parts, Row, check, field, matrix
from jchop.storage._layout import OWN, Kind

_WORD, _BYTE = np.dtype("<i4"), np.dtype(np.int8)
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
#: Widths that may be packed.
_WIDTHS = range(2, 9)


# -- pack-quantized: words of int32 along the last axis, codes + 2^(bits - 1) ------------------------------------------


def _look_packed(entries: Entries) -> tuple[int, ...] | None:
    packed = entries["weight_packed"]
    return packed.shape if packed.dtype == _WORD and matrix(packed) else None


def _read_packed(parts: Parts, facts: Facts) -> QArray:
    packed, shape = parts["weight_packed"], _shape(parts["weight_shape"])
    scale = as_scales(parts["weight_scale"], shape)
    check(packed.shape[0] == shape[0], f"weight_packed has {packed.shape[0]} rows, and weight_shape {list(shape)}")
    bits = _bits(packed.shape[1], shape[1], facts)
    codes = from_words(packed, bits, shape[1])
    zero = parts.get("weight_zero_point")
    if zero is not None:
        wanted = (words_of(shape[0], bits), scale.shape[1])
        check(zero.dtype == _WORD and zero.shape == wanted, f"weight_zero_point must be int32 of shape {list(wanted)}")
        zero = from_words(zero.T, bits, shape[0]).T.astype(np.int32)
        check(scale.shape[0] == shape[0], "weight_zero_point needs a scale for each row")
    index = parts.get("weight_g_idx")
    if index is None or (index < 0).all():  # -1 everywhere: no order was chosen
        return integer_array(codes, scale, zero, bits, kinds_from(shape, scale.shape))
    return ordered(codes, scale, zero, index, bits)


def ordered(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, index: np.ndarray, bits: int) -> QArray:
    """Codes whose column j is in the group ``index[j]``: groups of neighbours, else a scale for each element."""
    columns, count = codes.shape[1], scale.shape[1]
    ok = index.shape == (columns,) and np.issubdtype(index.dtype, np.integer)
    check(
        ok and bool(((index >= 0) & (index < count)).all()), f"g_idx must be {columns} integers from 0 to {count - 1}"
    )
    size = -(-columns // count)
    if np.array_equal(index, np.arange(columns) // size):
        kinds: list[Kind] = [OWN, size] if count > 1 else kinds_from(codes.shape, scale.shape)
        return integer_array(codes, scale, zero, bits, kinds)
    spread_zero = None if zero is None else zero[:, index]
    return integer_array(codes, scale[:, index], spread_zero, bits, [OWN, OWN])


def _shape(stored: np.ndarray) -> tuple[int, int]:
    ok = np.issubdtype(stored.dtype, np.integer) and stored.shape == (2,) and bool((stored > 0).all())
    check(ok and bool((stored < 1 << 31).all()), "weight_shape must be two integers above zero and below 2^31")
    return int(stored[0]), int(stored[1])


def _bits(words: int, columns: int, facts: Facts) -> int:
    """The width of the codes that fits the words, and the groups of the module if several do."""
    groups = [group for group in field(facts, "config_groups", dict, {}).values() if isinstance(group, dict)]
    own = [group for group in groups if facts.get("module") in field(group, "targets", list, [])]
    weights = [group.get("weights") for group in own or groups]
    named = {field(weight, "num_bits", int, 0) for weight in weights if isinstance(weight, dict)}
    fitting = [bits for bits in _WIDTHS if words_of(columns, bits) == words]
    check(bool(fitting), f"{words} words for {columns} columns are no codes of 2 to 8 bits")
    chosen = [bits for bits in fitting if bits in named]
    said = f"{words} words for {columns} columns may be codes of {fitting} bits"
    check(len(chosen) == 1 or len(fitting) == 1, f"{said}; a group with the module's name in its targets says which")
    return chosen[0] if len(chosen) == 1 else fitting[0]


def _write_packed(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    found, index = by_index(pieces(q))
    along_rows(found)
    codes, scale, zero = unsigned(found, _WIDTHS)
    bits = found.fmt.element.bits
    parts = {"weight_packed": to_words(codes, bits), "weight_scale": scale, "weight_shape": np.array(q.shape, np.int64)}
    symmetric = bool((zero == 1 << bits - 1).all())
    if not symmetric:
        check(bool(((zero >= 0) & (zero < 1 << bits)).all()), f"a zero point is no code of {bits} bits")
        parts["weight_zero_point"] = np.ascontiguousarray(to_words(zero.astype(np.uint8).T, bits).T)
    if index is None:
        return parts, facts_of(found, "int", symmetric)
    return {**parts, "weight_g_idx": index}, {**facts_of(found, "int", symmetric), "actorder": "group"}


PACKED = Row(
    "pack-quantized",
    "weight_packed",
    ("weight_packed", "weight_scale", "weight_shape"),
    _look_packed,
    _read_packed,
    _write_packed,
    "int4(group=128,scale=bfloat16)",
    ("weight_zero_point", "weight_g_idx"),
    ("weight_shape", _shape),
)


# -- int-quantized: int8 and a scale -----------------------------------------------------------------------------------


def _look_integer(entries: Entries) -> tuple[int, ...] | None:
    weight = entries["weight"]
    return weight.shape if weight.dtype == _BYTE and matrix(weight) else None


def _read_integer(parts: Parts, facts: Facts) -> QArray:
    weight = parts["weight"]
    scale, zero = as_scales(parts["weight_scale"], weight.shape), parts.get("weight_zero_point")
    if zero is not None:
        check(zero.dtype == _BYTE and zero.size == scale.size, "weight_zero_point must be int8, one for each scale")
        zero = zero.reshape(scale.shape).astype(np.int32) + 128
    codes = weight.view(np.uint8) ^ np.uint8(128)
    return integer_array(codes, scale, zero, 8, kinds_from(weight.shape, scale.shape))


def _write_integer(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    found = pieces(q)
    codes, scale, zero = unsigned(found, (8,))
    parts = {"weight": (codes ^ np.uint8(128)).view(np.int8), "weight_scale": scale}
    symmetric = bool((zero == 128).all())
    if not symmetric:
        check(bool(((zero >= 0) & (zero < 256)).all()), "a zero point is no code of 8 bits")
        parts["weight_zero_point"] = (zero - 128).astype(np.int8)
    return parts, facts_of(found, "int", symmetric)


INTEGER = Row(
    "int-quantized",
    "weight_scale",
    ("weight", "weight_scale"),
    _look_integer,
    _read_integer,
    _write_integer,
    "int8(channel=0)",
    ("weight_zero_point",),
)


# -- float-quantized: e4m3 and a scale ---------------------------------------------------------------------------------


def _look_float(entries: Entries) -> tuple[int, ...] | None:
    weight, scale = entries["weight"], entries["weight_scale"]
    ok = weight.dtype == _FLOAT8 and scale.dtype != np.dtype(np.uint8) and matrix(weight)
    return weight.shape if ok else None


def _read_float(parts: Parts, facts: Facts) -> QArray:
    return float8_array(parts["weight"], parts["weight_scale"], None)


def float8_array(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None) -> QArray:
    """A weight of float8_e4m3fn, times scales of tensor, rows, groups or blocks."""
    scale = as_scales(scale, weight.shape)
    if block is None:
        counts = tuple(-(-n // 128) for n in weight.shape)
        block = (128, 128) if scale.shape == counts else None
    return float_array(weight.view(np.uint8), scale, float8_e4m3fn, kinds_from(weight.shape, scale.shape, block))


def _write_float(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    found = pieces(q)
    check(found.fmt.element == float8_e4m3fn, "its elements are not float8_e4m3fn")
    return {"weight": found.codes.view(_FLOAT8), "weight_scale": float_scales(found)}, facts_of(found, "float", True)


FLOAT = Row(
    "float-quantized",
    "weight_scale",
    ("weight", "weight_scale"),
    _look_float,
    _read_float,
    _write_float,
    "float8_e4m3fn(channel=0)",
)
