"""AutoGPTQ and AutoAWQ: integers in words of a matrix (in, out), with scales and zero points (groups, out).

Definition: https://github.com/AutoGPTQ/AutoGPTQ, `nn_modules/qlinear`; https://github.com/casper-hansen/AutoAWQ,
`utils/packing_utils.py`. The numbers are s (u - z). The QArray is the transpose, (out, in), as in the model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from jchop._checkpoints.arrays import (
    as_scales,
    cast_exactly,
    codes_from_words,
    codes_to_words,
    group_by_column,
    group_lengths,
    integer_array,
    kinds_from,
    pieces,
    row_group_size,
    unsigned_pieces,
    zero_codes,
)
from jchop._checkpoints.compressed_tensors import integer_array_by_index
from jchop._checkpoints.row import WORD, LayoutFacts, LayoutRow, TensorEntries, TensorParts, fact_field, is_matrix
from jchop._common.checks import check
from jchop.storage._array import QArray

_GPTQ_PARTS = ("qweight", "qzeros", "scales")
#: Widths of AutoGPTQ.
_GPTQ_WIDTHS = (2, 3, 4, 8)


def _config_group(facts: LayoutFacts, columns: int) -> tuple[int, int] | None:
    """The sizes of the groups of a weight along both axes; None if the configuration does not have them."""
    size = fact_field(facts, "group_size", int)
    return None if size is None else (1, columns if size == -1 else min(size, columns))


# -- GPTQ --------------------------------------------------------------------------------------------------------------


def _gptq_form(entries: TensorEntries, bits: int | None) -> tuple[int, int, int] | None:
    """(bits, in, out) of words of AutoGPTQ; None if the tensors have another form."""
    words, zeros, scales = entries["qweight"], entries["qzeros"], entries["scales"]
    if not (is_matrix(words, WORD) and is_matrix(zeros, WORD) and is_matrix(scales)):
        return None
    out = words.shape[1]
    width = zeros.shape[1] * 32 // out
    fits = width in _GPTQ_WIDTHS and zeros.shape[1] * 32 == out * width and words.shape[0] * 32 % width == 0
    if not fits or (bits is not None and bits != width):
        return None
    return width, words.shape[0] * 32 // width, out


def _look_gptq(entries: TensorEntries) -> tuple[int, ...] | None:
    form = _gptq_form(entries, None)
    return None if form is None else (form[2], form[1])


def _read_gptq(parts: TensorParts, facts: LayoutFacts, *, offset: int) -> QArray:
    words, zeros = parts["qweight"], parts["qzeros"]
    own = bool(fact_field(facts, "dynamic", dict))  # modules may have their own bits and groups
    form = _gptq_form(parts, None if own else fact_field(facts, "bits", int))  # type: ignore[arg-type]
    check(form is not None, f"bits={facts.get('bits')} of the configuration does not fit qzeros of shape {zeros.shape}")
    assert form is not None
    bits, columns, out = form
    scales = parts["scales"]
    check(scales.shape == (zeros.shape[0], out), f"scales have shape {list(scales.shape)}, not {[zeros.shape[0], out]}")
    codes = np.ascontiguousarray(codes_from_words(words.T, bits, columns))
    scale = np.ascontiguousarray(as_scales(scales, scales.shape).T)
    zero = codes_from_words(zeros, bits, out).T.astype(np.int32) + offset
    index = parts.get("g_idx")
    if index is None:
        block = None if own else _config_group(facts, columns)
        return integer_array(codes, scale, zero, bits, kinds_from(codes.shape, scale.shape, block))
    return integer_array_by_index(codes, scale, zero, index, bits)


def _write_gptq(q: QArray, exact: bool, *, offset: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    weight, index = group_by_column(pieces(q))
    size = row_group_size(weight) or q.shape[1]
    codes, scale, zero = unsigned_pieces(weight, _GPTQ_WIDTHS)
    bits, (out, columns) = weight.fmt.element.bits, q.shape
    for name, n in (("in", columns), ("out", out)):
        check(n % 32 == 0, f"its axis {name} has {n} indices, which is no multiple of 32")
    low = zero - offset
    check(
        bool(((low >= 0) & (low < 1 << bits)).all()),
        f"the layout stores zero points minus {offset} in {bits} bits, and they range from {zero.min()} to {zero.max()}"
        + ("; gptq_v2 would fit" if offset and zero.min() >= 0 and zero.max() < 1 << bits else ""),
    )
    scales = cast_exactly(np.ascontiguousarray(scale.T), np.float16, "scales")
    parts = {
        "qweight": np.ascontiguousarray(codes_to_words(codes, bits).T),
        "qzeros": codes_to_words(np.ascontiguousarray(low.T.astype(np.uint8)), bits),
        "scales": scales,
        "g_idx": (np.arange(columns) // size).astype(np.int32) if index is None else index,
    }
    symmetric = bool((zero == 1 << (bits - 1)).all())
    facts = {"bits": bits, "group_size": size, "whole": size >= columns, "sym": symmetric}
    facts["desc_act"] = index is not None
    return parts, facts


def _gptq_row(name: str, offset: int) -> LayoutRow:
    """A row; version 1 adds 1 to the stored zero points."""
    read, write = partial(_read_gptq, offset=offset), partial(_write_gptq, offset=offset)
    fits = "int4(group=128,scale=float16) with both axes multiples of 32"
    return LayoutRow(name, _GPTQ_PARTS, _look_gptq, read, write, fits, ("g_idx",))


GPTQ, GPTQ_V2 = _gptq_row("gptq", 1), _gptq_row("gptq_v2", 0)


# -- AWQ: words along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 -------------------------------------------------

_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])


def _look_awq(entries: TensorEntries) -> tuple[int, ...] | None:
    words, zeros, scales = entries["qweight"], entries["qzeros"], entries["scales"]
    ok = is_matrix(words, WORD) and is_matrix(zeros, WORD) and is_matrix(scales)
    return (8 * words.shape[1], words.shape[0]) if ok and scales.shape[1] == 8 * words.shape[1] else None


def _read_awq(parts: TensorParts, facts: LayoutFacts) -> QArray:
    words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    check(fact_field(facts, "bits", int, 4) == 4, f"bits={facts.get('bits')}, and AutoAWQ has 4 bits alone")
    out = 8 * words.shape[1]
    check(scales.shape == (zeros.shape[0], out), f"scales have shape {list(scales.shape)}, not {[zeros.shape[0], out]}")
    check(zeros.shape[1] == words.shape[1], "qweight and qzeros have different numbers of columns")
    codes = np.ascontiguousarray(_from_awq_order(words).T)
    scale = np.ascontiguousarray(as_scales(scales, scales.shape).T)
    zero = _from_awq_order(zeros).T.astype(np.int32)
    return integer_array(
        codes, scale, zero, 4, kinds_from(codes.shape, scale.shape, _config_group(facts, codes.shape[1]))
    )


def _from_awq_order(words: np.ndarray) -> np.ndarray:
    """The codes of rows of words; nibble i of a word is number ORDER[i] of its eight."""
    nibbles = codes_from_words(words, 4, 8 * words.shape[1]).reshape(*words.shape, 8)
    return nibbles[..., np.argsort(_AWQ_ORDER)].reshape(words.shape[0], -1)


def _to_awq_order(codes: np.ndarray) -> np.ndarray:
    eights = codes.reshape(codes.shape[0], -1, 8)[..., _AWQ_ORDER]
    return codes_to_words(np.ascontiguousarray(eights.reshape(codes.shape)), 4)


def _write_awq(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    weight = pieces(q)
    row_group_size(weight)
    size = group_lengths(weight)[1]
    codes, scale, zero = unsigned_pieces(weight, (4,))
    check(q.shape[0] % 8 == 0, f"its axis out has {q.shape[0]} indices, which is no multiple of 8")
    check(q.shape[1] % size == 0, f"its groups of {size} do not divide its axis in of {q.shape[1]}")
    parts = {
        "qweight": _to_awq_order(np.ascontiguousarray(codes.T)),
        "qzeros": _to_awq_order(np.ascontiguousarray(zero_codes(zero, 4).T)),
        "scales": cast_exactly(np.ascontiguousarray(scale.T), np.float16, "scales"),
    }
    return parts, {"bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}


AWQ = LayoutRow("awq", _GPTQ_PARTS, _look_awq, _read_awq, _write_awq, "int4(group=128,scale=float16)")
