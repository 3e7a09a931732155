"""GGUF's blocks: the bytes of a group of numbers of one row, scales included.

Definition: https://github.com/ggml-org/llama.cpp, `ggml/src/ggml-common.h` and `gguf-py/gguf/quants.py`. All products
of scales are exact in binary32, so every number is rounded once, as in a QArray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from jchop._checkpoints.layouts import offset_array
from jchop._checkpoints.row import cast_exactly, integer_array, pieces, unsigned_pieces
from jchop._common.checks import check
from jchop.formats import IntegerFormat
from jchop.storage._array import QArray
from jchop.storage._axis_groupings import OWN_SCALE, AxisGrouping


@dataclass(frozen=True)
class GGUFBlock:
    """A type of GGUF.

    Args:
        name: of the type.
        count: numbers of a block.
        size: bytes of a block.
        read: makes a QArray of blocks, (rows, blocks of a row, size). None for a dtype, or if jchop does not read them.
        write: the reverse, or None. It raises a ValueError for a QArray that has no such form.
        dtype: of the numbers, if a block is one number.
        fits: a spec that can be written.
    """

    name: str
    count: int
    size: int
    read: Callable[[np.ndarray], QArray] | None = None
    write: Callable[[QArray], np.ndarray] | None = None
    dtype: np.dtype | None = None
    fits: str = ""


def _block_scale(data: np.ndarray) -> np.ndarray:
    """Two bytes of each block as a finite number of binary16."""
    numbers = np.ascontiguousarray(data).view("<f2")[..., 0]
    check(bool(np.isfinite(numbers).all()), "a scale is infinite or NaN")
    return numbers


def _code_rows(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes.reshape(codes.shape[0], -1))


def _row_kinds(codes: np.ndarray, scale: np.ndarray) -> list[AxisGrouping]:
    return [OWN_SCALE, codes.shape[1] // scale.shape[1]]


# -- 32 numbers under one scale ----------------------------------------------------------------------------------------


def _nibble_codes(data: np.ndarray) -> np.ndarray:
    """Codes of 32 numbers: 16 bytes of nibbles, the low ones first, after a fifth bit of each code, if there is one."""
    fifth, nibbles = data[..., :-16], data[..., -16:]
    codes = np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], -1)
    return _code_rows(codes | np.unpackbits(fifth, axis=-1, bitorder="little") << np.uint8(4) if fifth.size else codes)


def _read_symmetric(blocks: np.ndarray, bits: int) -> QArray:
    scale, codes = _block_scale(blocks[..., :2]), _nibble_codes(blocks[..., 2:])
    return integer_array(codes, scale, None, bits, _row_kinds(codes, scale))


def _read_offset(blocks: np.ndarray, bits: int) -> QArray:
    scale, low, codes = _block_scale(blocks[..., :2]), _block_scale(blocks[..., 2:4]), _nibble_codes(blocks[..., 4:])
    check(bool((scale >= 0).all()), "a scale is below zero")
    return offset_array(codes, scale, low, IntegerFormat(bits, signed=False), _row_kinds(codes, scale))


def _write_q4_0(q: QArray) -> np.ndarray:
    codes, scale = _symmetric_codes(q, 4)
    halves = codes.reshape(*scale.shape, 2, 16)
    return np.concatenate([scale[..., None].view(np.uint8), halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)], -1)


def _read_q8_0(blocks: np.ndarray) -> QArray:
    scale, codes = _block_scale(blocks[..., :2]), _code_rows(blocks[..., 2:]) ^ np.uint8(128)
    return integer_array(codes, scale, None, 8, _row_kinds(codes, scale))


def _write_q8_0(q: QArray) -> np.ndarray:
    codes, scale = _symmetric_codes(q, 8)
    data = (codes ^ np.uint8(128)).reshape(*scale.shape, 32)
    return np.concatenate([scale[..., None].view(np.uint8), data], -1)


def _symmetric_codes(q: QArray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes u and scales s of the numbers s (u - 2^(bits - 1)); a scale may be below zero."""
    q = q.reshape(-1, q.shape[-1]) if q.ndim > 2 and 0 not in q.shape else q
    weight = pieces(q)
    codes, scale, zero = unsigned_pieces(weight, (bits,))
    fits = weight.kinds[0] == OWN_SCALE and (weight.kinds[1] == 32 or scale.shape[1] * 32 == q.shape[1])
    check(
        fits and q.shape[1] % 32 == 0,
        f"it has the grouping of {weight.fmt}, not whole groups of 32 along its last axis",
    )
    middle = 1 << (bits - 1)
    check(bool(((zero == middle) | (zero == middle - 1)).all()), "a zero point is not in the middle")
    flip = zero != middle
    codes = np.where(np.repeat(flip, 32, 1), (1 << bits) - 1 - codes, codes).astype(np.uint8)
    return codes, np.where(flip, -cast_exactly(scale, np.float16, "scales"), cast_exactly(scale, np.float16, "scales"))


# -- 256 numbers, with integer scales of 16 or 32 numbers --------------------------------------------------------------


def _read_offset_k(blocks: np.ndarray, bits: int) -> QArray:
    scale, low = (_block_scale(blocks[..., at : at + 2]).astype(np.float32)[..., None] for at in (0, 2))
    packed_scales, nibbles = blocks[..., 4:16], blocks[..., -128:].reshape(*blocks.shape[:2], 4, 1, 32)
    first, second, rest = packed_scales[..., :4], packed_scales[..., 4:8], packed_scales[..., 8:]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], -1)
    lows = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], -1)
    codes = np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], -2)
    if bits == 5:  # a bit of byte k for number k of each of the eight groups
        fifth = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little").swapaxes(-1, -2)
        codes |= fifth.reshape(codes.shape) << np.uint8(4)
    codes = _code_rows(codes)
    factors, offsets = _code_rows(scale * scales), _code_rows(np.float32(0) - low * lows)
    check(bool((factors >= 0).all()), "a scale is below zero")
    return offset_array(codes, factors, offsets, IntegerFormat(bits, signed=False), _row_kinds(codes, factors))


def _read_q6_k(blocks: np.ndarray) -> QArray:
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    factors = _code_rows(_block_scale(blocks[..., 208:]).astype(np.float32)[..., None] * scales)
    low = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], -2).reshape(*blocks.shape[:2], 2, 4, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    codes = _code_rows(low | high << np.uint8(4))
    return integer_array(codes, factors, None, 6, _row_kinds(codes, factors))


#: Name, numbers and bytes of a block of the types that are not read, by number.
_UNREAD_TYPES = {
    9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
#: The types by number.
GGUF_BLOCKS = {
    0: GGUFBlock("F32", 1, 4, dtype=np.dtype("<f4")),
    1: GGUFBlock("F16", 1, 2, dtype=np.dtype("<f2")),
    2: GGUFBlock("Q4_0", 32, 18, partial(_read_symmetric, bits=4), _write_q4_0, fits="int4(group=32,scale=float16)"),
    3: GGUFBlock("Q4_1", 32, 20, partial(_read_offset, bits=4)),
    6: GGUFBlock("Q5_0", 32, 22, partial(_read_symmetric, bits=5)),
    7: GGUFBlock("Q5_1", 32, 24, partial(_read_offset, bits=5)),
    8: GGUFBlock("Q8_0", 32, 34, _read_q8_0, _write_q8_0, fits="int8(group=32,scale=float16)"),
    12: GGUFBlock("Q4_K", 256, 144, partial(_read_offset_k, bits=4)),
    13: GGUFBlock("Q5_K", 256, 176, partial(_read_offset_k, bits=5)),
    14: GGUFBlock("Q6_K", 256, 210, _read_q6_k),
    24: GGUFBlock("I8", 1, 1, dtype=np.dtype(np.int8)),
    25: GGUFBlock("I16", 1, 2, dtype=np.dtype("<i2")),
    26: GGUFBlock("I32", 1, 4, dtype=np.dtype("<i4")),
    27: GGUFBlock("I64", 1, 8, dtype=np.dtype("<i8")),
    28: GGUFBlock("F64", 1, 8, dtype=np.dtype("<f8")),
    30: GGUFBlock("BF16", 1, 2, dtype=np.dtype(ml_dtypes.bfloat16)),
    **{number: GGUFBlock(*row) for number, row in _UNREAD_TYPES.items()},
}
#: The numbers of those that are read.
READABLE_TYPES = tuple(
    number for number, block in GGUF_BLOCKS.items() if block.read is not None or block.dtype is not None
)
