"""bitsandbytes' NF4: codes of the flat weight, the first in the high nibble, with or without double quantization.

Definition: https://github.com/bitsandbytes-foundation/bitsandbytes, `functional.py` (`QuantState.as_dict`,
`dequantize_4bit`). With double quantization the scale of a block is map[code] * nested_absmax + offset in binary32.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from jchop._checkpoints.arrays import cast_exactly, float_scales, pack_bits, pieces, qarray_of_codes, unpack_bits
from jchop._checkpoints.row import BYTE, LayoutFacts, LayoutRow, TensorParts, fact_field
from jchop._common.checks import check
from jchop.formats.scaled.catalogue import nf4
from jchop.storage._array import QArray
from jchop.storage._axis_groupings import OWN_SCALE
from jchop.storage._files.json import json_object, short_text
from jchop.storage._files.safetensors import are_counts

_NF4_STATE = ".quant_state.bitsandbytes__nf4"
_NF4_MAP = np.array([float(level) for level in nf4.element.levels], np.float32)  # type: ignore[attr-defined]
#: The longest record of a weight, in bytes.
_LONGEST_NF4_STATE = 1 << 12
#: The code of zero.
_NF4_ZERO = np.uint8(7)


def _quant_state(data: np.ndarray) -> dict[str, Any]:
    """The record of a weight: JSON in bytes."""
    check(
        data.dtype == BYTE and data.ndim == 1 and data.size <= _LONGEST_NF4_STATE, "the quant_state is not a short text"
    )
    try:
        return json_object(data.tobytes().decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"the quant_state is not JSON: {error}") from None


def _shape_in_state(data: np.ndarray) -> tuple[int, ...]:
    shape = fact_field(_quant_state(data), "shape", list, [])
    ok = are_counts(shape) and len(shape) >= 2 and min(shape) > 0
    check(ok, f"shape={short_text(shape)} must be two or more integers above 0")
    return tuple(shape)


def _read_nf4(parts: TensorParts, facts: LayoutFacts) -> QArray:
    state, weight, shape = _quant_state(parts[_NF4_STATE]), parts[""], _shape_in_state(parts[_NF4_STATE])
    size, (out, columns) = fact_field(state, "blocksize", int, 64), shape[-2:]
    count = math.prod(shape)
    check(size > 0 and size % 2 == 0 and weight.dtype == BYTE, f"blocksize={size} must be an even number above 0")
    check(weight.size == -(-count // 2), f"shape={shape} does not fit {weight.size} bytes")
    check(np.array_equal(parts[".quant_map"], _NF4_MAP), "quant_map is not the table of NF4")
    absmax = _absmax(parts, state)
    check(absmax.size == -(-count // size), f"{absmax.size} scales do not fit {count} numbers in blocks of {size}")
    size = min(size, count)
    if columns % size and (size % columns or out % (size // columns)):  # blocks cross rows: groups of parts of them
        whole, size = size, math.gcd(size, columns)
        absmax = np.repeat(absmax, whole // size)[: count // size]
    codes = unpack_bits(weight.reshape(-1), 4, 2 * weight.size)
    codes = codes.reshape(-1, 2)[:, ::-1].reshape(-1)[:count].reshape(shape)  # the first is in the high nibble
    rows = max(1, size // columns)
    scale = absmax.reshape(*shape[:-2], out // rows, max(1, columns // size))
    if (nothing := scale == 0).any():
        nothing = np.repeat(np.repeat(nothing, rows, -2), columns // scale.shape[-1], -1)
        codes = np.where(nothing, _NF4_ZERO, codes)
        scale = np.where(scale == 0, np.float32(1), scale)
    check(bool((scale > 0).all()), "a scale is below zero")
    fmt = nf4(group=size) if size <= columns else nf4(group=(rows, "all"), axis=(-2, -1))
    return qarray_of_codes(codes, scale, None, fmt)


def _absmax(parts: TensorParts, state: dict[str, Any]) -> np.ndarray:
    """The scales of the blocks in binary32."""
    absmax = parts[".absmax"].reshape(-1)
    nested_absmax = parts.get(".nested_absmax")
    if nested_absmax is None:
        check(absmax.dtype == np.float32, f"absmax is of dtype {absmax.dtype}, and must be float32")
    else:
        table = parts.get(".nested_quant_map")
        check(table is not None and table.shape == (256,) and table.dtype == np.float32, "nested_quant_map is no table")
        assert table is not None
        size = fact_field(state, "nested_blocksize", int, 256)
        ok = absmax.dtype == BYTE and nested_absmax.dtype == np.float32 and size > 0
        check(ok and nested_absmax.size == -(-absmax.size // size), "nested_absmax does not fit the blocks of absmax")
        offset = fact_field(state, "nested_offset", (int, float), 0.0)
        check(
            abs(offset) <= float(np.finfo(np.float32).max),
            f"nested_offset={short_text(offset)} is no number of float32",
        )
        with np.errstate(over="ignore", invalid="ignore"):
            factors = np.repeat(nested_absmax.reshape(-1), min(size, absmax.size))[: absmax.size]
            absmax = table[absmax] * factors + np.float32(offset)
    check(bool(np.isfinite(absmax).all()), "a scale is infinite or NaN")
    return absmax


def _write_nf4(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    weight = pieces(q, nf4.element)
    rows, last = weight.kinds
    check(
        rows == OWN_SCALE and isinstance(last, int),
        f"it has the grouping of {weight.fmt}, not groups along its last axis",
    )
    assert isinstance(last, int)
    check(q.shape[1] % last == 0 and last % 2 == 0, f"its groups of {last} do not divide its last axis of {q.shape[1]}")
    scale = cast_exactly(float_scales(weight), np.float32, "scales")
    nibbles = weight.codes.reshape(-1, 2)[:, ::-1].reshape(1, -1)
    state = {"quant_type": "nf4", "blocksize": last, "dtype": str(np.dtype(q.dtype)), "shape": list(q.shape)}
    parts = {
        "": pack_bits(np.ascontiguousarray(nibbles), 4).reshape(-1, 1),
        ".absmax": scale.reshape(-1),
        ".quant_map": _NF4_MAP,
        _NF4_STATE: np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    return parts, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}


NF4_ROW = LayoutRow(
    "bitsandbytes",
    (_NF4_STATE, "", ".absmax", ".quant_map"),
    lambda entries: (2 * math.prod(entries[""].shape),) if entries[""].dtype == BYTE else None,
    _read_nf4,
    _write_nf4,
    "nf4",
    (".nested_absmax", ".nested_quant_map"),
    (_NF4_STATE, _shape_in_state),
)
