"""GGUF files: a header of keys and tensors, then the data; read with checks before memory is allocated, and written.

Definition: https://github.com/ggml-org/ggml, `docs/gguf.md`. Versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jchop._checkpoints import row
from jchop._checkpoints.compressed_tensors import nvfp4_array_of_one
from jchop._checkpoints.layouts import offset_array
from jchop._common.checks import check, place_in_errors
from jchop._common.files import MOST_ENTRIES, RegularFile, open_regular_file, short_text
from jchop._storage._array import QArray
from jchop._storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, AxisGrouping, over_elements
from jchop.formats import IntegerFormat
from jchop.formats.scaled.catalogue import mxfp4

_GGUF_MAGIC = b"GGUF"
#: The number of bytes of a value by type; strings (8) and arrays (9) have their own.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING_TYPE, _ARRAY_TYPE, _UINT32_TYPE, _INT32_TYPE, _FLOAT32_TYPE, _BOOL_TYPE = 8, 9, 4, 5, 6, 7
_ALIGNMENT_KEY = "general.alignment"
#: The longest name, in bytes; the most axes of a tensor; the most strings in an array; the deepest arrays.
_LONGEST_NAME, _MOST_GGUF_AXES, _MOST_STRINGS, _DEEPEST = 1 << 12, 4, 1 << 21, 3


class GGUFTensor(NamedTuple):
    """A tensor of a file: its type by number, its shape in C order, its first byte in the data and its bytes."""

    kind: int
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GGUFKeys(NamedTuple):
    """The keys of a file: how many, their bytes, and the alignment of tensors that is among them."""

    count: int
    data: bytes
    alignment: int = 32


class GGUFFile(RegularFile):
    """A GGUF file open for reading: it reads the header at once, the bytes of each tensor on request.

    Each part of the header is checked against the bytes that are left.

    Args:
        path: of the file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a valid GGUF file, or has no tensor of a type that is known.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, self._read_header)

    def read(self, name: str) -> np.ndarray:
        """The bytes of a tensor.

        Raises:
            ValueError: if the file has become shorter, or the tensor does not fit in memory.
        """
        blob = self.tensors[name]
        return self.read_bytes(self._data + blob.start, blob.nbytes, f"tensor {short_text(name)}")

    def read_keys(self) -> GGUFKeys:
        """The keys of the file, such as the tokenizer, as they are."""
        count, start, size, alignment = self._keys
        return GGUFKeys(count, self.read_bytes(start, size, "the keys").tobytes(), alignment)

    def _read_header(self) -> None:
        self._remaining_bytes, self._strings = self.file_size, 0
        with place_in_errors(f"{self.path} is not a GGUF file"):
            check(self._bytes(4) == _GGUF_MAGIC, "it does not begin with GGUF")
            if (version := self._number(4)) not in (2, 3):
                raise ValueError(f"version {version} is not 2 or 3")
            tensors, keys = self._number(8), self._number(8)
            for name, count in (("tensors", tensors), ("keys", keys)):
                if count > min(MOST_ENTRIES, self._remaining_bytes):
                    raise ValueError(f"it has {count} {name}, more than its bytes or {MOST_ENTRIES}")
            alignment, start = 32, self._file.tell()
            for _ in range(keys):
                key, kind = self._read_string(), self._number(4)
                if key == _ALIGNMENT_KEY and kind == _UINT32_TYPE:
                    alignment = self._number(4)
                    if not 1 <= alignment <= 1 << 20 or alignment & alignment - 1:
                        raise ValueError(f"the alignment {alignment} is no power of two up to 2^20")
                else:
                    self._skip_value(kind, 0)
            self._keys = keys, start, self._file.tell() - start, alignment
            self.tensors: dict[str, GGUFTensor] = {}
            for _ in range(tensors):
                name = self._read_string()
                check(name not in self.tensors, f"tensor {short_text(name)} is duplicated")
                self.tensors[name] = self._tensor(name, alignment)
            unknown = [name for name, blob in self.tensors.items() if blob.kind not in GGUF_BLOCKS]
            if unknown and len(unknown) == len(self.tensors):
                kind, types = self.tensors[unknown[0]].kind, ", ".join(map(str, GGUF_BLOCKS))
                raise ValueError(f"tensor {short_text(unknown[0])} has type {kind}; known are {types}")
            self._data = -(-(self.file_size - self._remaining_bytes) // alignment) * alignment
            at, size = 0, self.file_size - self._data
            for name, blob in sorted(self.tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
                apart = blob.start >= at and blob.start + blob.nbytes <= size
                check(apart, f"tensor {short_text(name)} overlaps another or the end of the file")
                at = blob.start + blob.nbytes

    def _tensor(self, name: str, alignment: int) -> GGUFTensor:
        """Reads the entry of a tensor: its shape, outermost axis first, its type, and its place in the data."""
        if (axes := self._number(4)) > _MOST_GGUF_AXES:
            raise ValueError(f"tensor {short_text(name)} has {axes} axes, and at most {_MOST_GGUF_AXES} are allowed")
        shape = tuple(self._number(8) for _ in range(axes))[::-1]
        kind, start = self._number(4), self._number(8)
        if math.prod(n or 1 for n in shape) >> 58 or start % alignment:
            raise ValueError(f"tensor {short_text(name)} has shape {list(shape)} at byte {start}, which is not allowed")
        block = GGUF_BLOCKS.get(kind, _UNKNOWN_BLOCK)
        if block.count > 1 and (not shape or shape[-1] % block.count):
            raise ValueError(f"tensor {short_text(name)} of shape {list(shape)} has no whole blocks of {block.count}")
        return GGUFTensor(kind, shape, start, math.prod(shape) // block.count * block.size)

    def _bytes(self, count: int) -> bytes:
        self._take(count)
        data = self._file.read(count)
        check(len(data) >= count, "it ends within its header")
        return data

    def _take(self, count: int) -> None:
        check(count <= self._remaining_bytes, "it ends within its header")
        self._remaining_bytes -= count

    def _number(self, size: int) -> int:
        return int.from_bytes(self._bytes(size), "little")

    def _read_string(self) -> str:
        if (length := self._number(8)) > _LONGEST_NAME:
            raise ValueError(f"a name of {length} bytes is longer than {_LONGEST_NAME}")
        return self._bytes(length).decode("utf-8")

    def _skip(self, count: int) -> None:
        self._take(count)
        self._file.seek(count, os.SEEK_CUR)

    def _skip_value(self, kind: int, depth: int) -> None:
        if kind in _VALUE_BYTES:
            self._skip(_VALUE_BYTES[kind])
        elif kind == _STRING_TYPE:
            self._skip(self._number(8))
        else:
            known = kind == _ARRAY_TYPE and depth < _DEEPEST
            check(known, f"a key has a value of type {kind}, which is not known or nested too deep")
            inner, count = self._number(4), self._number(8)
            if inner in _VALUE_BYTES:
                self._skip(_VALUE_BYTES[inner] * count)
                return
            self._strings += count
            check(self._strings <= _MOST_STRINGS, f"its keys have more than {_MOST_STRINGS} texts")
            for _ in range(count):
                self._skip_value(inner, depth + 1)


# -- writing -----------------------------------------------------------------------------------------------------------


def gguf_header(
    tensors: Mapping[str, tuple[int, tuple[int, ...], int]], keys: GGUFKeys | None = None
) -> tuple[bytes, dict[str, int], int]:
    """The header of a GGUF file of version 3, the first byte of each tensor in the file, and the end of the file.

    Args:
        tensors: type, shape in C order and bytes of each tensor.
        keys: of the file. Default: the fewest that a file has.

    Raises:
        ValueError: for a name that is too long, or too many axes.
    """
    if keys is None:
        keys = gguf_keys_of({"general.quantization_version": 2, "general.architecture": "unknown"})
    header = _GGUF_MAGIC + _int_bytes(3, 4) + _int_bytes(len(tensors), 8) + _int_bytes(keys.count, 8) + keys.data
    at, places = 0, {}
    for name, (kind, shape, nbytes) in tensors.items():
        if len(shape) > _MOST_GGUF_AXES:
            raise ValueError(f"tensor {name!r} has {len(shape)} axes; a GGUF file has at most {_MOST_GGUF_AXES}")
        header += _string_bytes(name) + _int_bytes(len(shape), 4)
        header += b"".join(_int_bytes(n, 8) for n in shape[::-1]) + _int_bytes(kind, 4) + _int_bytes(at, 8)
        places[name] = at
        at += -(-nbytes // keys.alignment) * keys.alignment
    header += bytes(-len(header) % keys.alignment)
    return header, {name: len(header) + place for name, place in places.items()}, len(header) + at


def gguf_keys_of(values: Mapping[str, Any]) -> GGUFKeys:
    """Keys with booleans, unsigned integers, floats, texts, lists of texts, and arrays of int32 and float32."""
    return GGUFKeys(len(values), b"".join(_string_bytes(name) + _value_bytes(value) for name, value in values.items()))


def _value_bytes(value: Any) -> bytes:
    """A value, after its type."""
    if isinstance(value, bool):
        return _int_bytes(_BOOL_TYPE, 4) + _int_bytes(value, 1)
    if isinstance(value, int):
        return _int_bytes(_UINT32_TYPE, 4) + _int_bytes(value, 4)
    if isinstance(value, float):
        return _int_bytes(_FLOAT32_TYPE, 4) + np.array(value, "<f4").tobytes()
    if isinstance(value, str):
        return _int_bytes(_STRING_TYPE, 4) + _counted_bytes(value.encode("utf-8"))
    kind = _STRING_TYPE if isinstance(value, list) else _INT32_TYPE if value.dtype == np.int32 else _FLOAT32_TYPE
    data = b"".join(map(_string_bytes, value)) if isinstance(value, list) else value.tobytes()
    return _int_bytes(_ARRAY_TYPE, 4) + _int_bytes(kind, 4) + _int_bytes(len(value), 8) + data


def _int_bytes(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def _string_bytes(text: str) -> bytes:
    data = text.encode("utf-8")
    if len(data) > _LONGEST_NAME:
        raise ValueError(f"the name {short_text(text)} has more than {_LONGEST_NAME} bytes, the most of a GGUF file")
    return _counted_bytes(data)


def _counted_bytes(data: bytes) -> bytes:
    return _int_bytes(len(data), 8) + data


def is_gguf(path: Path) -> bool:
    """Whether a regular file begins as a GGUF file, or has the name of one."""
    with open_regular_file(path) as file:
        return file.read(4) == _GGUF_MAGIC or path.suffix.lower() == ".gguf"


# -- GGUF's blocks: the bytes of a group of numbers of one row, scales included ----------------------------------------

# Definition: https://github.com/ggml-org/llama.cpp, `ggml/src/ggml-common.h` and `gguf-py/gguf/quants.py`. All products
# of scales are exact in binary32, so every number is rounded once, as in a QArray.


class GGUFBlock(NamedTuple):
    """A type of GGUF.

    Args:
        name: of the type.
        count: numbers of a block.
        size: bytes of a block.
        read: makes a QArray of blocks, (rows, blocks of a row, size). None for a dtype, or if jchop does not read them.
        write: the reverse, or None. It raises a ValueError for a QArray that has no form in blocks.
        dtype: of the numbers, if a block is one number.
        fits: a spec that can be written. Empty for the K types, which hold what was read of them.
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


def _block_codes(data: np.ndarray, bits: int = 4) -> np.ndarray:
    """Codes of 32 numbers: a byte of int8 each, or 16 bytes of nibbles, the low ones first, after fifth bits of all."""
    if bits == 8:
        return _code_rows(data) ^ np.uint8(128)
    fifth, nibbles = data[..., :-16], data[..., -16:]
    codes = np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], -1)
    return _code_rows(codes | np.unpackbits(fifth, axis=-1, bitorder="little") << np.uint8(4) if fifth.size else codes)


def _read_symmetric(blocks: np.ndarray, bits: int) -> QArray:
    scale, codes = _block_scale(blocks[..., :2]), _block_codes(blocks[..., 2:], bits)
    return row.integer_array(codes, scale, None, bits, _row_kinds(codes, scale))


def _read_offset(blocks: np.ndarray, bits: int) -> QArray:
    scale, low, codes = _block_scale(blocks[..., :2]), _block_scale(blocks[..., 2:4]), _block_codes(blocks[..., 4:])
    check(bool((scale >= 0).all()), "a scale is below zero")
    return offset_array(codes, scale, low, IntegerFormat(bits, signed=False), _row_kinds(codes, scale))


def _write_block_codes(*parts: np.ndarray, codes: np.ndarray, bits: int = 4) -> np.ndarray:
    """Blocks of the bytes of scales, (rows, blocks, ...), and of codes of 32 numbers; `_block_codes` reads these."""
    codes = codes.reshape(*parts[0].shape[:2], 32)
    if bits == 8:
        return np.concatenate([*parts, codes ^ np.uint8(128)], -1)
    fifth = [np.packbits(codes >> np.uint8(4), axis=-1, bitorder="little")] if bits > 4 else []
    low = codes & np.uint8(15)
    return np.concatenate([*parts, *fifth, low[..., :16] | low[..., 16:] << np.uint8(4)], -1)


def _write_symmetric(q: QArray, bits: int) -> np.ndarray:
    codes, scale = _symmetric_codes(q, bits, np.float16)
    return _write_block_codes(scale[..., None].view(np.uint8), codes=codes, bits=bits)


def _write_offset(q: QArray, bits: int) -> np.ndarray:
    codes, *parts = _offset_codes(q, bits, np.float16)
    return _write_block_codes(*(numbers[..., None].view(np.uint8) for numbers in parts), codes=codes, bits=bits)


def _offset_codes(q: QArray, bits: int, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes u, scales s and offsets z of the numbers s u + z in groups of 32."""
    weight = _row_groups(q)
    element = IntegerFormat(bits, signed=False)
    check((weight.fmt.element, weight.fmt.zero_point) == (element, "float"), "it has no integers plus a number")
    parts = (row.float_scales(weight), "scales"), (weight.zero, "zero points")
    return weight.codes, *(row.cast_exactly(numbers, dtype, name) for numbers, name in parts)


def _write_mxfp4(q: QArray) -> np.ndarray:
    weight = _row_groups(q)
    check((weight.fmt.element, weight.fmt.scale, weight.zero) == (mxfp4.element, mxfp4.scale, None), "it is not mxfp4")
    return _write_block_codes(weight.scale[..., None], codes=weight.codes)


def _row_groups(q: QArray, size: int = 32, count: int = 32) -> row.Pieces:
    """A weight of any number of axes in pieces, as a matrix with groups of one size in rows of whole blocks."""
    weight = row.pieces(q.reshape(-1, q.shape[-1]) if q.ndim > 2 and 0 not in q.shape else q)
    (rows, last), columns = weight.kinds, weight.codes.shape[1]
    fits = rows == OWN_SCALE and (last == size or (last == WHOLE_AXIS and columns == size))
    check(fits, f"it has the grouping of {weight.fmt}, not groups of {size} along its last axis")
    check(columns % count == 0, f"its last axis of {columns} is no multiple of {count}")
    return weight


def _symmetric_codes(q: QArray, bits: int, dtype: Any, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Codes u and scales s of the numbers s (u - 2^(bits - 1)); a scale may be below zero."""
    weight = _row_groups(q, size)
    codes, scale, zero = row.unsigned_pieces(weight, (bits,))
    middle = 1 << (bits - 1)
    check(bool(((zero == middle) | (zero == middle - 1)).all()), "a zero point is not in the middle")
    flip = zero != middle
    codes = np.where(np.repeat(flip, size, 1), (1 << bits) - 1 - codes, codes).astype(np.uint8)
    scale = row.cast_exactly(scale, dtype, "scales")
    return codes, np.where(flip, -scale, scale)


#: The levels of IQ4_NL and IQ4_XS. No level is -128, so a negative scale has the codes of the other sign.
_IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _level_array(nibbles: np.ndarray, scale: np.ndarray) -> QArray:
    """Levels of IQ4 times scales, as integers of 8 bits."""
    kinds = _row_kinds(nibbles, scale)
    codes = _IQ4_LEVELS[nibbles]
    codes = np.where(over_elements(scale < 0, kinds, codes.shape), -codes, codes)
    return row.integer_array(codes.view(np.uint8) ^ np.uint8(128), np.abs(scale), None, 8, kinds)


def _read_iq4_nl(blocks: np.ndarray) -> QArray:
    return _level_array(_block_codes(blocks[..., 2:]), _block_scale(blocks[..., :2]))


def _read_mxfp4_blocks(blocks: np.ndarray) -> QArray:
    exponents = np.ascontiguousarray(blocks[..., 0])
    check(not (exponents == 255).any(), "a scale is 255, the code of NaN")
    return row.qarray_of_codes(_block_codes(blocks[..., 1:]), exponents, None, mxfp4)


# -- 64 numbers in four groups under e4m3 scales -----------------------------------------------------------------------


def _read_nvfp4_blocks(blocks: np.ndarray) -> QArray:
    scale = _code_rows(blocks[..., :4])
    codes = _code_rows(_bit_fields(blocks[..., 4:].reshape(*blocks.shape[:2], 4, 8), 4))
    return nvfp4_array_of_one(codes, scale)


# -- 256 numbers, with integer scales of 16 or 32 numbers --------------------------------------------------------------


def _bit_fields(data: np.ndarray, bits: int) -> np.ndarray:
    """The fields of so many bits of bytes, (..., n), the low ones first, as (..., 8 / bits, n)."""
    return data[..., None, :] >> np.arange(0, 8, bits, dtype=np.uint8)[:, None] & np.uint8((1 << bits) - 1)


def _k_scale(blocks: np.ndarray, at: int) -> np.ndarray:
    return _block_scale(blocks[..., at : at + 2]).astype(np.float32)[..., None]


def _offset_k(codes: np.ndarray, factors: np.ndarray, lows: np.ndarray, bits: int) -> QArray:
    """Numbers f u - l of blocks."""
    codes, factors, offsets = _code_rows(codes), _code_rows(factors), _code_rows(np.float32(0) - lows)
    check(bool((factors >= 0).all()), "a scale is below zero")
    return offset_array(codes, factors, offsets, IntegerFormat(bits, signed=False), _row_kinds(codes, factors))


def _symmetric_k(codes: np.ndarray, scale: np.ndarray, scales: np.ndarray, bits: int) -> QArray:
    """Numbers of blocks under a scale for each, times small integers."""
    codes, factors = _code_rows(codes), _code_rows(scale * scales.astype(np.float32))
    return row.integer_array(codes, factors, None, bits, _row_kinds(codes, factors))


def _read_q2_k(blocks: np.ndarray) -> QArray:
    factors, lows = blocks[..., :16] & np.uint8(15), blocks[..., :16] >> np.uint8(4)
    codes = _bit_fields(blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 32), 2)
    return _offset_k(codes, _k_scale(blocks, 80) * factors, _k_scale(blocks, 82) * lows, 2)


def _read_q3_k(blocks: np.ndarray) -> QArray:
    low = _bit_fields(blocks[..., 32:96].reshape(*blocks.shape[:2], 2, 32), 2).reshape(*blocks.shape[:2], 256)
    high = _bit_fields(blocks[..., :32], 1).reshape(low.shape)
    scales = _bit_fields(blocks[..., 96:104], 4).reshape(*blocks.shape[:2], 16)
    scales = scales | _bit_fields(blocks[..., 104:108], 2).reshape(scales.shape) << np.uint8(4)
    return _symmetric_k(low | high << np.uint8(2), _k_scale(blocks, 108), scales.astype(np.int8) - np.int8(32), 3)


def _read_offset_k(blocks: np.ndarray, bits: int) -> QArray:
    """The array of Q4_K or Q5_K: blocks of 256 numbers, in eight groups with scale and offset of 6 bits."""
    packed_scales = blocks[..., 4:16]
    first, second, rest = packed_scales[..., :4], packed_scales[..., 4:8], packed_scales[..., 8:]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], -1)
    lows = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], -1)
    codes = _bit_fields(blocks[..., -128:].reshape(*blocks.shape[:2], 4, 32), 4)
    if bits == 5:  # a bit of byte k for number k of each of the eight groups
        codes |= _bit_fields(blocks[..., 16:48], 1).reshape(codes.shape) << np.uint8(4)
    return _offset_k(codes, _k_scale(blocks, 0) * scales, _k_scale(blocks, 2) * lows, bits)


def _read_q6_k(blocks: np.ndarray) -> QArray:
    low = _bit_fields(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64), 4)
    high = _bit_fields(blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32), 2)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _symmetric_k(low.reshape(high.shape) | high << np.uint8(4), _k_scale(blocks, 208), scales, 6)


def _join_fields(codes: np.ndarray, bits: int) -> np.ndarray:
    """The reverse of `_bit_fields`, as the bytes of blocks."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(codes << shifts, axis=-2).reshape(*codes.shape[:2], -1)


def _split_scales(numbers: np.ndarray, largest: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The binary16 scale of each block, as bytes, and the integers times which it is the numbers of groups.

    Args:
        numbers: (rows, blocks, groups) in float32.
        largest: integers that may be that of the largest number; llama.cpp chooses the first.
    """
    flat, least = numbers.reshape(-1, numbers.shape[-1]), min(0, *largest)
    most = np.take_along_axis(flat, np.abs(flat).argmax(-1, keepdims=True), -1)
    scale, factors = np.zeros(most.shape, np.float16), np.zeros(flat.shape, np.int16)
    left = np.flatnonzero(most)
    for integer in largest if left.size else ():
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            one = (most[left] / np.float32(integer)).astype(np.float16)
            counts = np.rint(flat[left] / one.astype(np.float32))
            fits = (counts * one.astype(np.float32) == flat[left]) & (counts >= least) & (counts <= max(largest))
        fits = fits.all(-1)
        scale[left[fits]], factors[left[fits]] = one[fits], counts[fits]
        left = left[~fits]
    check(not left.size, "its scales are not integers times a number of binary16 for each block, as those of a file")
    return scale.reshape(*numbers.shape[:2], 1).view(np.uint8), factors.reshape(numbers.shape)


def _k_groups(codes: np.ndarray, scale: np.ndarray, zeros: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of blocks of 256; under a scale that stands for zero both are zero."""
    check(scale.dtype == np.float32 and codes.shape[1] % 256 == 0, "it has no float32 scales for whole blocks of 256")
    scale = scale.reshape(scale.shape[0], codes.shape[1] // 256, -1)
    codes = codes.reshape(*scale.shape, -1)
    used = (codes != zeros).any(-1) | (scale != 1)
    return np.where(used[..., None], codes, 0).astype(np.uint8), np.where(used, scale, np.float32(0))


def _write_offset_k(q: QArray, bits: int) -> np.ndarray:
    """The blocks of Q4_K or Q5_K of an array with float offsets, as bytes (rows, blocks, bytes)."""
    codes, scale, offsets = _offset_codes(q, bits, np.float32)
    codes, scale = _k_groups(codes, scale, 0)
    integers = range(63, 0, -1)
    whole, factors = _split_scales(scale, integers)
    least, lows = _split_scales(np.float32(0) - offsets.reshape(scale.shape), integers)
    factors, lows = factors.astype(np.uint8), lows.astype(np.uint8)
    packed = [part[..., :4] | part[..., 4:] >> 4 << 6 for part in (factors, lows)]
    packed.append(factors[..., 4:] & 15 | lows[..., 4:] << 4)
    fifth = [_join_fields(codes >> np.uint8(4), 1)] if bits == 5 else []
    low = (codes & np.uint8(15)).reshape(*codes.shape[:2], 4, 2, 32)
    return np.concatenate([whole, least, *packed, *fifth, _join_fields(low, 4)], -1)


def _write_q6_k(q: QArray) -> np.ndarray:
    """The blocks of Q6_K, as bytes: 256 numbers in sixteen groups with int8 factors of a float16 scale."""
    codes, scale = _symmetric_codes(q, 6, np.float32, 16)
    codes, scale = _k_groups(codes, scale, 32)
    whole, factors = _split_scales(scale, [-128, *(sign * n for n in range(127, 0, -1) for sign in (1, -1))])
    low = (codes & np.uint8(15)).reshape(*codes.shape[:2], 2, 2, 64)
    high = (codes >> np.uint8(4)).reshape(*codes.shape[:2], 2, 4, 32)
    signed = factors.astype(np.int8).view(np.uint8)
    return np.concatenate([_join_fields(low, 4), _join_fields(high, 2), signed, whole], -1)


def _read_iq4_xs(blocks: np.ndarray) -> QArray:
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    low = _bit_fields(blocks[..., 4:8], 4).swapaxes(-1, -2).reshape(high.shape)
    scales = (low | high.astype(np.uint8) << np.uint8(4)).astype(np.int8) - np.int8(32)
    nibbles = _bit_fields(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16), 4)
    return _level_array(_code_rows(nibbles), _code_rows(_k_scale(blocks, 0) * scales.astype(np.float32)))


# -- 256 numbers from -1 to 1 under one scale; in TQ2_0 also 2 ---------------------------------------------------------


def _ternary(codes: np.ndarray, scale: np.ndarray) -> QArray:
    """The array of codes 0, 1, 2 for -1, 0, 1, under a scale for each group."""
    codes = _code_rows(codes)
    return row.integer_array(codes, scale, np.ones(scale.shape, np.int32), 2, _row_kinds(codes, scale))


def _read_tq1_0(blocks: np.ndarray) -> QArray:
    parts = []
    for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):  # count digits of three in each byte
        powers = 3 ** np.arange(count, dtype=np.uint8)[:, None]
        digits = (blocks[..., None, start:stop] * powers.astype(np.uint8)).astype(np.uint16) * 3 >> 8
        parts.append(digits.astype(np.uint8).reshape(*blocks.shape[:2], -1))
    return _ternary(np.concatenate(parts, -1), _block_scale(blocks[..., 52:]))


def _read_tq2_0(blocks: np.ndarray) -> QArray:
    codes = _bit_fields(blocks[..., :64].reshape(*blocks.shape[:2], 2, 32), 2)
    return _ternary(codes, _block_scale(blocks[..., 64:]))


#: Name, numbers and bytes of a block of the types that are not read, by number.
_UNREAD_TYPES = {
    9: ("Q8_1", 32, 40), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    29: ("IQ1_M", 256, 56), 41: ("Q1_0", 128, 18),
}  # fmt: skip
#: Name and dtype of the types that are not quantized, by number.
_PLAIN_TYPES = {
    number: (name, np.dtype(dtype))
    for number, name, dtype in (
        (0, "F32", "<f4"), (1, "F16", "<f2"), (24, "I8", "i1"), (25, "I16", "<i2"), (26, "I32", "<i4"),
        (27, "I64", "<i8"), (28, "F64", "<f8"), (30, "BF16", ml_dtypes.bfloat16),
    )
}  # fmt: skip
#: Specs of a width that types hold.
_FITS, _OFFSET_FITS = "int{}(group=32,scale=float16)".format, "uint{}(group=32,scale=float16,zero_point=float)".format
#: The types by number.
GGUF_BLOCKS = {
    **{number: GGUFBlock(name, 1, dtype.itemsize, dtype=dtype) for number, (name, dtype) in _PLAIN_TYPES.items()},
    12: GGUFBlock("Q4_K", 256, 144, partial(_read_offset_k, bits=4), partial(_write_offset_k, bits=4)),
    13: GGUFBlock("Q5_K", 256, 176, partial(_read_offset_k, bits=5), partial(_write_offset_k, bits=5)),
    14: GGUFBlock("Q6_K", 256, 210, _read_q6_k, _write_q6_k),
    2: GGUFBlock("Q4_0", 32, 18, partial(_read_symmetric, bits=4), partial(_write_symmetric, bits=4), fits=_FITS(4)),
    3: GGUFBlock("Q4_1", 32, 20, partial(_read_offset, bits=4), partial(_write_offset, bits=4), fits=_OFFSET_FITS(4)),
    6: GGUFBlock("Q5_0", 32, 22, partial(_read_symmetric, bits=5), partial(_write_symmetric, bits=5), fits=_FITS(5)),
    7: GGUFBlock("Q5_1", 32, 24, partial(_read_offset, bits=5), partial(_write_offset, bits=5), fits=_OFFSET_FITS(5)),
    8: GGUFBlock("Q8_0", 32, 34, partial(_read_symmetric, bits=8), partial(_write_symmetric, bits=8), fits=_FITS(8)),
    10: GGUFBlock("Q2_K", 256, 84, _read_q2_k),
    11: GGUFBlock("Q3_K", 256, 110, _read_q3_k),
    20: GGUFBlock("IQ4_NL", 32, 18, _read_iq4_nl),
    23: GGUFBlock("IQ4_XS", 256, 136, _read_iq4_xs),
    34: GGUFBlock("TQ1_0", 256, 54, _read_tq1_0),
    35: GGUFBlock("TQ2_0", 256, 66, _read_tq2_0),
    39: GGUFBlock("MXFP4", 32, 17, _read_mxfp4_blocks, _write_mxfp4, fits="mxfp4"),
    40: GGUFBlock("NVFP4", 64, 36, _read_nvfp4_blocks),
    **{number: GGUFBlock(*facts) for number, facts in _UNREAD_TYPES.items()},
}
#: Where the bytes of an unknown type end is not known.
_UNKNOWN_BLOCK = GGUFBlock("", 1, 0)
#: The numbers of those that are read.
READABLE_TYPES = tuple(number for number, block in GGUF_BLOCKS.items() if block.read or block.dtype is not None)
