"""Integers of a few bits in bytes and words, in NumPy: dense streams of bits, the lowest bit first."""

from __future__ import annotations

import numpy as np


def unpack_bits(rows: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The codes of rows of bytes: ``count`` for each row, one byte each.

    Code i of a row has the bits [bits * i, bits * (i + 1)) of the row's little-endian stream.
    """
    if bits == 8:
        return rows[..., :count]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (rows[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        return codes.reshape(*rows.shape[:-1], -1)[..., :count]
    stream = np.unpackbits(rows, axis=-1, count=count * bits, bitorder="little").reshape(*rows.shape[:-1], count, bits)
    codes = np.zeros(stream.shape[:-1], np.uint8)
    for bit in range(bits):
        codes |= stream[..., bit] << np.uint8(bit)
    return codes


def pack_bits(codes: np.ndarray, bits: int, multiple: int = 1) -> np.ndarray:
    """The inverse of `unpack_bits`; each row is padded with zeros to a multiple of so many bytes."""
    count = codes.shape[-1]
    size = -(-count * bits // (8 * multiple)) * multiple
    if bits == 8:
        return _pad_rows(codes, size)
    if 8 % bits == 0:
        each = 8 // bits
        groups = _pad_rows(codes, size * each).reshape(*codes.shape[:-1], size, each)
        rows = np.zeros(groups.shape[:-1], np.uint8)
        for place in range(each):
            rows |= groups[..., place] << np.uint8(bits * place)
        return rows
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)
    return _pad_rows(np.packbits(stream.reshape(*codes.shape[:-1], count * bits), axis=-1, bitorder="little"), size)


def codes_from_words(words: np.ndarray, bits: int, count: int, each: int | None = None) -> np.ndarray:
    """The codes of rows of 32-bit words: without gaps, or so many in each word."""
    if each is None:
        return unpack_bits(np.ascontiguousarray(words).view(np.uint8), bits, count)
    shifts = np.arange(0, bits * each, bits, dtype=np.uint32)
    codes = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)[..., :count]


def codes_to_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes as rows of int32, each padded to whole words."""
    return pack_bits(codes, bits, multiple=4).view("<i4")


def word_count(count: int, bits: int, each: int | None = None) -> int:
    """The number of 32-bit words for so many codes, without gaps or with so many in each word."""
    return -(-count * bits // 32) if each is None else -(-count // each)


def _pad_rows(rows: np.ndarray, size: int) -> np.ndarray:
    if rows.shape[-1] == size:
        return np.ascontiguousarray(rows)
    result = np.zeros((*rows.shape[:-1], size), rows.dtype)
    result[..., : rows.shape[-1]] = rows
    return result
