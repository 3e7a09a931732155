"""The safetensors file format: a header with the position of each tensor, then the bytes.

The layout is defined in https://github.com/huggingface/safetensors: eight bytes with the length of the header (little
endian), the header as JSON (for each name its dtype, shape and the range of its bytes; ``__metadata__`` maps texts to
texts), the data. The package `safetensors` would map files into memory, so that truncation by another process ends the
program; it has no float8 and no float4 for NumPy, takes the last of duplicate keys, and writes whole files from memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from jchop._common.checks import check
from jchop._common.files import RegularFile, write_atomically
from jchop.storage._files.json import MOST_ENTRIES, json_object, short_text, string_object

#: The dtypes of the format by name.
DTYPES: dict[str, np.dtype] = {
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}
_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: The dtype of which a file has two numbers in a byte, the first in the low nibble, and an array one.
_HALF_BYTE_DTYPE = DTYPES["F4"]
_METADATA_KEY = "__metadata__"
#: The longest header, in bytes, and the most axes of a tensor, as in NumPy.
_MOST_HEADER_BYTES = 1 << 24
_MOST_SAFETENSORS_AXES = 64


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Args:
        dtype: of its elements.
        shape: C order.
        start: its first byte, counted from the end of the header.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in the file."""
        return -(-math.prod(self.shape) * self.bits // 8)

    @property
    def bits(self) -> int:
        """Bits of an element in the file."""
        return 4 if self.dtype == _HALF_BYTE_DTYPE else 8 * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The name of its dtype in the format.

        Raises:
            TypeError: if the format does not have it.
        """
        if self.dtype not in _SAFETENSORS_NAMES:
            little_endian, names = self.dtype.newbyteorder("<"), ", ".join(map(str, _SAFETENSORS_NAMES))
            advice = f". Convert it, for example by x.astype({little_endian.str!r})"
            advice *= little_endian in _SAFETENSORS_NAMES
            raise TypeError(f"dtype {self.dtype} is none of a safetensors file; allowed: {names}{advice}")
        return _SAFETENSORS_NAMES[self.dtype]


class TensorFile(RegularFile):
    """A safetensors file open for reading: it reads the header at once, the bytes of each tensor on request.

    A file is refused if the reference implementation refuses it, and if it has a duplicate key. The whole header is
    checked before memory is allocated for a tensor.

    Args:
        path: of the file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a valid safetensors file; the message has the reason. Headers of more than 16 MiB,
            arrays of more than 64 axes and dtypes that JAX lacks are refused, too.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(Path(path), self._read_header)

    def read(self, name: str, start: int = 0, count: int | None = None) -> np.ndarray:
        """A whole tensor, or `count` of its elements from `start` on in C order, as a vector.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it has become shorter, or the tensor does not fit in memory.
        """
        entry = self.entries[name]
        shape = entry.shape if count is None else (count,)
        first, end = start * entry.bits // 8, -(-(start + math.prod(shape)) * entry.bits // 8)
        try:
            array = np.empty(shape, entry.dtype)
            data = array.reshape(-1).view(np.uint8) if entry.bits >= 8 else np.empty(end - first, np.uint8)
        except MemoryError:
            raise ValueError(f"{self.path}: tensor {name!r} of {entry.nbytes} bytes does not fit in memory") from None
        self.fill(data.data, self._data + entry.start + first, f"tensor {name!r}")
        if entry.bits < 8:
            codes = np.stack([data & 15, data >> 4], -1).reshape(-1)[start % 2 :][: array.size]
            array = codes.view(entry.dtype).reshape(shape)
        return array

    def _read_header(self) -> None:
        """Reads the entries and the metadata; also sets the position of the data."""
        start = self._file.read(8)
        length, size = int.from_bytes(start, "little"), self.file_size - 8
        wrong = f"{self.path} is not a safetensors file"
        why = "its first eight bytes are not the length of a header" if start else "it is empty"
        check(len(start) == 8 and length <= size, f"{wrong}: {why}")
        most = f"at most {_MOST_HEADER_BYTES}"
        check(length <= _MOST_HEADER_BYTES, f"{wrong}: its header would take {length} bytes, and {most}")
        self._data, size = 8 + length, size - length
        try:
            fields = json_object(self._file.read(length).decode("utf-8"))
            self.metadata = string_object(fields.pop(_METADATA_KEY, None), _METADATA_KEY)
            self.entries = {name: _read_entry(f"tensor {short_text(name)}", fields[name], size) for name in fields}
            _check_tensor_places(self.entries, size)
        except ValueError as error:
            raise ValueError(f"{wrong} that jchop reads: bad header ({error})") from None


def _read_entry(what: str, fields: Any, size: int) -> TensorEntry:
    """The entry of a tensor, in a file with `size` bytes of data."""
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= set(fields):
        raise ValueError(f"{what} must be an object with dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{what}: dtype {short_text(dtype)} is not known; read are {', '.join(DTYPES)}")
    if not are_counts(shape) or len(shape) > _MOST_SAFETENSORS_AXES or math.prod(n or 1 for n in shape) >> 58:
        requirement = f"a list of integers >= 0, at most {_MOST_SAFETENSORS_AXES} and of a product below 2^58"
        raise ValueError(f"{what}: shape {short_text(shape)} must be {requirement}")
    if not are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{what}: data_offsets {short_text(offsets)} do not fit: they are not two integers")
    entry = TensorEntry(DTYPES[dtype], tuple(shape), offsets[0])
    whole = math.prod(shape) * entry.bits % 8 == 0
    if offsets[1] - offsets[0] != entry.nbytes or offsets[1] > size or not whole:
        raise ValueError(f"{what}: data_offsets {offsets} do not fit shape {short_text(shape)} and the file")
    return entry


def are_counts(numbers: Any) -> bool:
    """Whether `numbers` is a list of integers >= 0, without booleans."""
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)


def _check_tensor_places(entries: Mapping[str, TensorEntry], size: int) -> None:
    """Checks that the tensors fill the data, without gaps and overlaps, like the reference implementation."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != at:
            raise ValueError(f"tensor {short_text(name)} begins at byte {entry.start} of the data, and must at {at}")
        at += entry.nbytes
    check(at == size, f"the tensors fill {at} bytes, and the file has {size}")


def place_tensors(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The same tensors in consecutive positions; wide elements come first, so that all are aligned."""
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # stable
    entries: dict[str, TensorEntry] = {}
    start = 0
    for name in order:
        entries[name] = TensorEntry(tensors[name].dtype, tensors[name].shape, start)
        start += entries[name].nbytes
    return entries


def header_of(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file before its tensors; arguments and errors are those of `TensorWriter`."""
    check(_METADATA_KEY not in entries, f"no tensor can have the name {_METADATA_KEY!r}")
    fields: dict[str, Any] = {_METADATA_KEY: dict(metadata)} if metadata else {}
    for name, entry in entries.items():
        if math.prod(entry.shape) * entry.bits % 8:
            raise ValueError(f"tensor {name!r} of {entry.dtype}{list(entry.shape)} fills no whole bytes of a file")
        fields[name] = {
            "dtype": entry.dtype_name,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.start + entry.nbytes],
        }
    header = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    header += b" " * (-len(header) % 8)
    if len(header) > _MOST_HEADER_BYTES or max(len(entries), len(metadata)) > MOST_ENTRIES:
        raise ValueError(
            f"{len(entries)} tensors and {len(metadata)} metadata make a header of {len(header)} bytes; a file has "
            f"at most {MOST_ENTRIES} of each and a header of {_MOST_HEADER_BYTES}"
        )
    return len(header).to_bytes(8, "little") + header


class TensorWriter:
    """Writes the header of a safetensors file, then chunks of tensors in any order.

    Args:
        file: open for writing, at its start, and seekable.
        entries: the tensors, as returned by `place_tensors`.
        metadata: texts for the header.

    Raises:
        TypeError: for a dtype that the format does not have.
        ValueError: for a tensor with the name of the metadata, or a header that is too long for `TensorFile`.
    """

    def __init__(self, file: IO[bytes], entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> None:
        start = header_of(entries, metadata)
        self._file, self._entries, self._data = file, entries, len(start)
        self._positions = dict.fromkeys(entries, 0)
        file.write(start)

    def write(self, name: str, chunk: np.ndarray) -> None:
        """Writes the next elements of a tensor, in C order, at their position; they fill whole bytes."""
        entry = self._entries[name]
        raw_bytes = np.ascontiguousarray(chunk, entry.dtype).reshape(-1).view(np.uint8)
        data = (raw_bytes if entry.bits >= 8 else (raw_bytes[0::2] & 15) | (raw_bytes[1::2] << 4)).data
        at = self._positions[name]
        if at + len(data) > entry.nbytes:
            raise ValueError(f"tensor {name!r} takes {entry.nbytes} bytes, and {at + len(data)} are written")
        self._file.seek(self._data + entry.start + at)
        self._file.write(data)
        self._positions[name] = at + len(data)

    def finish(self) -> None:
        """Checks that every byte was written.

        Raises:
            ValueError: if a tensor lacks bytes.
        """
        short = [name for name in self._entries if self._positions[name] != self._entries[name].nbytes]
        check(not short, f"tensors not wholly written: {', '.join(short)}")


def write_tensors(
    path: Path, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str], read: Callable[[str], np.ndarray]
) -> None:
    """Writes a file in one step; `read` gives each tensor when it is written."""

    def write(file: IO[bytes]) -> None:
        writer = TensorWriter(file, entries, metadata)
        for name in entries:
            writer.write(name, read(name))
        writer.finish()

    write_atomically(path, write)
