"""GGUF's blocks: the bytes of a group of numbers of one row, scales included.

Definition: https://github.com/ggml-org/llama.cpp, `ggml/src/ggml-common.h` and `gguf-py/gguf/quants.py`. All products
of scales are exact in binary32, so every number is rounded once, as in a QArray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jchop.formats import IntegerFormat
from jchop.storage._array import QArray
from jchop.storage._checkpoints.arrays import in_dtype, integer_array, pieces, unsigned
from jchop.storage._checkpoints.row import check
from jchop.storage._checkpoints.torchao import offset_array
from jchop.storage._layout import OWN, Kind


@dataclass(frozen=True)
class Block:
    """A type of GGUF.

    Args:
        name: of the type.
        count: numbers of a block.
        size: bytes of a block.
        read: makes a QArray of blocks, (rows, blocks of a row, size). None for a dtype.
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


def _half(stored: np.ndarray) -> np.ndarray:
    """Two bytes of each block as a finite number of binary16."""
    numbers = np.ascontiguousarray(stored).view("<f2")[..., 0]
    check(bool(np.isfinite(numbers).all()), "a scale is infinite or NaN")
    return numbers


def _rows(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes.reshape(codes.shape[0], -1))


def _kinds(codes: np.ndarray, scale: np.ndarray) -> list[Kind]:
    return [OWN, codes.shape[1] // scale.shape[1]]


# -- 32 numbers under one scale ----------------------------------------------------------------------------------------


def _read_q4_0(blocks: np.ndarray) -> QArray:
    scale, nibbles = _half(blocks[..., :2]), blocks[..., 2:]
    codes = _rows(np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], -1))
    return integer_array(codes, scale, None, 4, _kinds(codes, scale))


def _write_q4_0(q: QArray) -> np.ndarray:
    codes, scale = _signed(q, 4)
    halves = codes.reshape(*scale.shape, 2, 16)
    return np.concatenate([scale[..., None].view(np.uint8), halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)], -1)


def _read_q8_0(blocks: np.ndarray) -> QArray:
    scale, codes = _half(blocks[..., :2]), _rows(blocks[..., 2:]) ^ np.uint8(128)
    return integer_array(codes, scale, None, 8, _kinds(codes, scale))


def _write_q8_0(q: QArray) -> np.ndarray:
    codes, scale = _signed(q, 8)
    stored = (codes ^ np.uint8(128)).reshape(*scale.shape, 32)
    return np.concatenate([scale[..., None].view(np.uint8), stored], -1)


def _signed(q: QArray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes u and scales s of the numbers s (u - 2^(bits - 1)); a scale may be below zero."""
    found = pieces(q)
    codes, scale, zero = unsigned(found, (bits,))
    grouped = found.kinds[0] == OWN and (found.kinds[1] == 32 or scale.shape[1] * 32 == q.shape[1])
    check(
        grouped and q.shape[1] % 32 == 0,
        f"it has the grouping of {found.fmt}, not whole groups of 32 along its last axis",
    )
    middle = 1 << bits - 1
    check(bool(((zero == middle) | (zero == middle - 1)).all()), "a zero point is not in the middle")
    turned = zero != middle
    codes = np.where(np.repeat(turned, 32, 1), (1 << bits) - 1 - codes, codes).astype(np.uint8)
    return codes, np.where(turned, -in_dtype(scale, np.float16, "scales"), in_dtype(scale, np.float16, "scales"))


# -- 256 numbers, with integer scales of 16 or 32 numbers --------------------------------------------------------------


def _read_q4_k(blocks: np.ndarray) -> QArray:
    scale, low = (_half(blocks[..., at : at + 2]).astype(np.float32)[..., None] for at in (0, 2))
    packed, nibbles = blocks[..., 4:16], blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], -1)
    lows = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], -1)
    codes = _rows(np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], -2))
    factors, offsets = _rows(scale * scales), _rows(np.float32(0) - low * lows)
    check(bool((factors >= 0).all()), "a scale of Q4_K is below zero")
    return offset_array(codes, factors, offsets, IntegerFormat(4, signed=False), _kinds(codes, factors))


def _read_q6_k(blocks: np.ndarray) -> QArray:
    low, high = (
        blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64),
        blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32),
    )
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    factors = _rows(_half(blocks[..., 208:]).astype(np.float32)[..., None] * scales)
    low = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], -2).reshape(*blocks.shape[:2], 2, 4, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    codes = _rows(low | high << np.uint8(4))
    return integer_array(codes, factors, None, 6, _kinds(codes, factors))


#: The types by number, of those that are read.
BLOCKS = {
    0: Block("F32", 1, 4, dtype=np.dtype("<f4")),
    1: Block("F16", 1, 2, dtype=np.dtype("<f2")),
    2: Block("Q4_0", 32, 18, _read_q4_0, _write_q4_0, fits="int4(group=32,scale=float16)"),
    8: Block("Q8_0", 32, 34, _read_q8_0, _write_q8_0, fits="int8(group=32,scale=float16)"),
    12: Block("Q4_K", 256, 144, _read_q4_k),
    14: Block("Q6_K", 256, 210, _read_q6_k),
    24: Block("I8", 1, 1, dtype=np.dtype(np.int8)),
    25: Block("I16", 1, 2, dtype=np.dtype("<i2")),
    26: Block("I32", 1, 4, dtype=np.dtype("<i4")),
    27: Block("I64", 1, 8, dtype=np.dtype("<i8")),
    28: Block("F64", 1, 8, dtype=np.dtype("<f8")),
    30: Block("BF16", 1, 2, dtype=np.dtype(ml_dtypes.bfloat16)),
}
