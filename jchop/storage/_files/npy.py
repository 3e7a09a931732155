"""Reads .npy files in parts. The header is checked against the size of the file before memory is allocated.

Arrays of numbers are accepted (the NEP 1 format, versions 1 to 3). Files are not memory-mapped: if another process
truncated a mapped file, a signal would end this one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Self

import numpy as np

from jchop._common.files import open_regular_file

_NPY_MAGIC = b"\x93NUMPY"
_LONGEST_NPY_HEADER, _MOST_NPY_AXES = 10_000, 64  # as in NumPy

#: The longest row, in bytes, that is read whole, and the bytes of rows read at once.
_SHORT_ROW, _BLOCK = 1 << 14, 1 << 20


class NpyFile:
    """The array of a .npy file, as a context manager.

    Args:
        path: the file.
        name: name of the file in errors.
        dtype: dtype of the result of `read`; a number that it cannot hold is an error. Default: the dtype of the file.

    Attributes:
        shape: shape of the array.
        dtype: dtype of the result of `read`, in native byte order.
        file_dtype: dtype of the file.
        fortran_order: whether the first axis varies fastest.

    Raises:
        OSError: if the file cannot be opened or read.
        ValueError: if it is not a .npy file of numbers, or its size differs from the header.
    """

    def __init__(self, path: Path, name: str, dtype: np.dtype | None = None):
        self._path, self._name = path, name
        if path.is_dir():
            raise ValueError(f"{name} is a folder, not a .npy file")
        self._file = open_regular_file(path, name)
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self.file_dtype, self.fortran_order, self.shape = self._header()
        except BaseException:
            self._file.close()
            raise
        self.dtype = self.file_dtype.newbyteorder("=") if dtype is None else dtype

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.shape)

    # -- the header ----------------------------------------------------------------------------------------------------

    def _header(self) -> tuple[np.dtype, bool, tuple[int, ...]]:
        """dtype, order and shape; also sets the position of the elements."""
        start = self._bytes(min(10, self._size))
        if not start:
            raise self._fault("it is empty")
        if start[:2] == b"PK":
            raise self._fault("it is a zip archive, as .npz files are: save one of its arrays with numpy.save")
        if start[: len(_NPY_MAGIC)] != _NPY_MAGIC:
            raise self._fault("it does not begin like one")
        if len(start) < 10:
            raise self._fault("it ends within its header")
        version = start[6:8]
        if version not in (b"\1\0", b"\2\0", b"\3\0"):
            raise self._fault(f"its version is {'.'.join(map(str, version))}; known are 1.0, 2.0 and 3.0")
        count = 2 if version == b"\1\0" else 4
        field = start[8:] + self._bytes(min(count - 2, self._size - len(start)))
        length, self._begin = int.from_bytes(field, "little"), 8 + count + int.from_bytes(field, "little")
        if length > _LONGEST_NPY_HEADER or self._begin > self._size:
            raise self._fault(f"a header of {length} bytes, in a file of {self._size}")
        read_header = np.lib.format.read_array_header_1_0 if count == 2 else np.lib.format.read_array_header_2_0
        try:
            shape, in_fortran_order, dtype = read_header(BytesIO(field + self._bytes(length)))
        except Exception as error:  # the parser of Python raises errors of any kind
            line = _shorten(next(iter(str(error).splitlines()), type(error).__name__))
            raise self._fault(f"its header is not that of an array of numbers: {line}{_way_out(line)}") from None
        if dtype.kind not in "biufc":
            raise self._fault(f"it holds {dtype.str!r}, which is not a numeric type{_way_out(dtype.str)}")
        if not all(type(n) is int and n >= 0 for n in shape) or len(shape) > _MOST_NPY_AXES:
            raise self._fault(f"its shape {_shorten(str(shape))} is not known; {_MOST_NPY_AXES} axes at most")
        if math.prod(n for n in shape if n) * dtype.itemsize > 2**63 - 1:
            raise self._fault(f"its shape {_shorten(str(shape))} is too large for an array")
        need = math.prod(shape) * dtype.itemsize
        if self._size - self._begin != need:
            raise self._fault(
                f"shape {_shorten(str(shape))} of {dtype} needs {need} bytes; it has {self._size - self._begin}"
            )
        return dtype, in_fortran_order, shape

    def _fault(self, reason: str) -> ValueError:
        return ValueError(f"{self._name} is not a .npy file that can be read: {reason}")

    # -- the elements --------------------------------------------------------------------------------------------------

    def read(self, starts: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """A copy of a part of the array: from `starts` on, `shape` elements along each axis.

        Raises:
            ValueError: if the file has become shorter, or holds a number that `dtype` cannot hold.
        """
        order = -1 if self.fortran_order else 1
        part = np.empty(tuple(shape)[::order], self.file_dtype)
        if part.size:
            self._fill(part, self.shape[::order], tuple(starts)[::order], 0)
        return self._convert(part.T if self.fortran_order else part)

    def _fill(self, part: np.ndarray, whole: tuple[int, ...], starts: tuple[int, ...], base: int) -> None:
        """Reads `part` of an array in C order, of shape `whole`, that begins `base` elements into the file."""
        if part.shape[1:] == whole[1:]:  # contiguous in the file
            first = starts[0] * math.prod(whole[1:]) if whole else 0
            return self._read_into(part, base + first)
        row = math.prod(whole[1:])
        if row * part.itemsize > _SHORT_ROW:
            for i in range(len(part)):
                self._fill(part[i], whole[1:], starts[1:], base + (starts[0] + i) * row)
            return None
        window = tuple(slice(at, at + n) for at, n in zip(starts[1:], part.shape[1:], strict=True))
        step = max(1, _BLOCK // (row * part.itemsize))
        for i in range(0, len(part), step):
            rows = np.empty((min(step, len(part) - i), *whole[1:]), self.file_dtype)
            self._read_into(rows, base + (starts[0] + i) * row)
            part[i : i + step] = rows[(slice(None), *window)]
        return None

    def _read_into(self, part: np.ndarray, first: int) -> None:
        """Fills a contiguous part with the elements of the file from `first` on."""
        self._file.seek(self._begin + first * part.itemsize)
        view = part.reshape(-1).view(np.uint8).data
        while view:
            count = self._file.readinto(view)
            if not count:
                raise self._fault("it became shorter while it was read")
            view = view[count:]

    def _bytes(self, count: int) -> bytes:
        """The next bytes of the header."""
        got = b""
        while len(got) < count:
            more = self._file.read(count - len(got))
            if not more:
                raise self._fault("it became shorter while it was read")
            got += more
        return got

    def _convert(self, part: np.ndarray) -> np.ndarray:
        if self.dtype == self.file_dtype.newbyteorder("="):
            return part.astype(self.dtype, copy=False)
        if part.dtype.kind in "biuf":
            with np.errstate(over="ignore", invalid="ignore"):
                result = part.astype(self.dtype)
                same = np.array_equal(result.astype(part.dtype), part, equal_nan=part.dtype.kind == "f")
            if same:
                return result
        raise ValueError(
            f"{self._name} holds {self.file_dtype} values that {self.dtype} cannot hold: they would be rounded twice"
        )


def _way_out(text: str) -> str:
    """The advice for a dtype that `numpy.save` writes for arrays of `ml_dtypes`."""
    is_short_float = re.search("[<>|=](V1|V2|f1)'?$", text)
    return "; if it was saved from bfloat16 or float8, save it as float32, or in a safetensors file" * bool(
        is_short_float
    )


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."
