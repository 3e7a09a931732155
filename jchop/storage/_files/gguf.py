"""GGUF files: a header of keys and tensors, then the data; read with checks before memory is allocated, and written.

Definition: https://github.com/ggml-org/ggml, `docs/gguf.md`. Versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import numpy as np

from jchop._common.checks import check, place_in_errors
from jchop._common.files import MOST_ENTRIES, RegularFile, open_regular_file, short_text

_GGUF_MAGIC = b"GGUF"
#: The number of bytes of a value by type; strings (8) and arrays (9) have their own.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING_TYPE, _ARRAY_TYPE, _UINT32_TYPE = 8, 9, 4
_ALIGNMENT_KEY = "general.alignment"
#: The longest name, in bytes; the most axes of a tensor; the most strings in an array; the deepest arrays.
_LONGEST_NAME, _MOST_GGUF_AXES, _MOST_STRINGS, _DEEPEST = 1 << 12, 4, 1 << 21, 3


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of a file: its type by number, its shape in C order, its first byte in the data and its bytes."""

    kind: int
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GGUFFile(RegularFile):
    """A GGUF file open for reading: it reads the header at once, the bytes of each tensor on request.

    Args:
        path: of the file.
        sizes: numbers and bytes of a block of each type that is known.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a valid GGUF file, or has no tensor of a type that is known.
    """

    def __init__(self, path: Path, sizes: Mapping[int, tuple[int, int]]) -> None:
        super().__init__(path, lambda: self._read_header(sizes))

    def _read_header(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        with place_in_errors(f"{self.path} is not a GGUF file"):
            self.tensors, self._data = _GGUFHeader(self._file, self.file_size).read(sizes)

    def read(self, name: str) -> np.ndarray:
        """The bytes of a tensor.

        Raises:
            ValueError: if the file has become shorter, or the tensor does not fit in memory.
        """
        blob = self.tensors[name]
        try:
            data = np.empty(blob.nbytes, np.uint8)
        except MemoryError:
            raise ValueError(
                f"{self.path}: tensor {short_text(name)} of {blob.nbytes} bytes does not fit in memory"
            ) from None
        self.fill(data.data, self._data + blob.start, f"tensor {short_text(name)}")
        return data


class _GGUFHeader:
    """Reads a header part by part; each part is checked against the bytes that are left."""

    def __init__(self, file: BufferedReader, size: int) -> None:
        self._file, self._remaining_bytes, self._strings = file, size, 0

    def read(self, sizes: Mapping[int, tuple[int, int]]) -> tuple[dict[str, GGUFTensor], int]:
        total = self._remaining_bytes
        check(self._bytes(4) == _GGUF_MAGIC, "it does not begin with GGUF")
        if (version := self._number(4)) not in (2, 3):
            raise ValueError(f"version {version} is not 2 or 3")
        tensors, keys = self._number(8), self._number(8)
        for name, count in (("tensors", tensors), ("keys", keys)):
            if count > min(MOST_ENTRIES, self._remaining_bytes):
                raise ValueError(f"it has {count} {name}, more than its bytes or {MOST_ENTRIES}")
        alignment = 32
        for _ in range(keys):
            key, kind = self._read_string(), self._number(4)
            if key == _ALIGNMENT_KEY and kind == _UINT32_TYPE:
                alignment = self._number(4)
                if not 1 <= alignment <= 1 << 20 or alignment & alignment - 1:
                    raise ValueError(f"the alignment {alignment} is no power of two up to 2^20")
            else:
                self._skip_value(kind, 0)
        blobs: dict[str, GGUFTensor] = {}
        for _ in range(tensors):
            name = self._read_string()
            check(name not in blobs, f"tensor {short_text(name)} is duplicated")
            blobs[name] = self._tensor(name, sizes, alignment)
        unknown = [name for name, blob in blobs.items() if blob.kind not in sizes]
        if blobs and len(unknown) == len(blobs):
            kind, types = blobs[unknown[0]].kind, ", ".join(map(str, sizes))
            raise ValueError(f"tensor {short_text(unknown[0])} has type {kind}; known are {types}")
        data = -(-(total - self._remaining_bytes) // alignment) * alignment
        _check_gguf_places(blobs, total - data)
        return blobs, data

    def _tensor(self, name: str, sizes: Mapping[int, tuple[int, int]], alignment: int) -> GGUFTensor:
        if (axes := self._number(4)) > _MOST_GGUF_AXES:
            raise ValueError(f"tensor {short_text(name)} has {axes} axes, and at most {_MOST_GGUF_AXES} are allowed")
        shape = tuple(self._number(8) for _ in range(axes))[::-1]
        kind, start = self._number(4), self._number(8)
        if math.prod(n or 1 for n in shape) >> 58 or start % alignment:
            raise ValueError(f"tensor {short_text(name)} has shape {list(shape)} at byte {start}, which is not allowed")
        count, size = sizes.get(kind, (1, 0))  # where the bytes of an unknown type end is not known
        if count > 1 and (not shape or shape[-1] % count):
            raise ValueError(f"tensor {short_text(name)} of shape {list(shape)} has no whole blocks of {count}")
        return GGUFTensor(kind, shape, start, math.prod(shape) // count * size)

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


def _check_gguf_places(tensors: Mapping[str, GGUFTensor], size: int) -> None:
    """Checks that tensors lie within the data and do not overlap."""
    at = 0
    for name, blob in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if blob.start < at or blob.start + blob.nbytes > size:
            raise ValueError(f"tensor {short_text(name)} overlaps another or the end of the file")
        at = blob.start + blob.nbytes


# -- writing -----------------------------------------------------------------------------------------------------------


class GGUFWriter:
    """Writes the header of a GGUF file of version 3, then tensors in order.

    Args:
        file: open for writing, at its start, and seekable.
        tensors: type, shape in C order and bytes of each tensor; their places are computed.
        texts: keys with a text each.

    Raises:
        ValueError: for a name or a text that is too long.
    """

    def __init__(
        self, file: IO[bytes], tensors: Mapping[str, tuple[int, tuple[int, ...], int]], texts: Mapping[str, str]
    ):
        header = _GGUF_MAGIC + _int_bytes(3, 4) + _int_bytes(len(tensors), 8) + _int_bytes(len(texts) + 1, 8)
        header += _string_bytes("general.quantization_version") + _int_bytes(_UINT32_TYPE, 4) + _int_bytes(2, 4)
        for key, text in texts.items():
            value = text.encode()
            header += _string_bytes(key) + _int_bytes(_STRING_TYPE, 4) + _int_bytes(len(value), 8) + value
        at, places = 0, {}
        for name, (kind, shape, nbytes) in tensors.items():
            if len(shape) > _MOST_GGUF_AXES:
                raise ValueError(f"tensor {name!r} has {len(shape)} axes; a GGUF file has at most {_MOST_GGUF_AXES}")
            header += _string_bytes(name) + _int_bytes(len(shape), 4)
            header += b"".join(_int_bytes(n, 8) for n in shape[::-1]) + _int_bytes(kind, 4) + _int_bytes(at, 8)
            places[name] = at
            at += -(-nbytes // 32) * 32
        self._file, self._places, self._end = file, places, at
        file.write(header + bytes(-len(header) % 32))
        self._data = file.tell()

    def write(self, name: str, data: np.ndarray) -> None:
        """Writes the bytes of a tensor at its place."""
        self._file.seek(self._data + self._places[name])
        self._file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)

    def finish(self) -> None:
        """Fills the file up to its alignment."""
        self._file.truncate(self._data + self._end)


def _int_bytes(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def _string_bytes(text: str) -> bytes:
    data = text.encode("utf-8")
    if len(data) > _LONGEST_NAME:
        raise ValueError(f"the name {short_text(text)} has more than {_LONGEST_NAME} bytes, the most of a GGUF file")
    return _int_bytes(len(data), 8) + data


def is_gguf(path: Path) -> bool:
    """Whether a regular file begins as a GGUF file, or has the name of one."""
    with open_regular_file(path) as file:
        return file.read(4) == _GGUF_MAGIC or path.suffix.lower() == ".gguf"


def block_sizes(blocks: Mapping[int, Any]) -> dict[int, tuple[int, int]]:
    """Numbers and bytes of a block of each type."""
    return {number: (block.count, block.size) for number, block in blocks.items()}
