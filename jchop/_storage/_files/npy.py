"""Reads .npy files in parts. The header is checked against the size of the file before memory is allocated.

Arrays of numbers are accepted (the NEP 1 format, versions 1 to 3). Files are not memory-mapped: if another process
truncated a mapped file, a signal would end this one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jchop._common.checks import check, clip_text, place_in_errors
from jchop._common.files import RegularFile

_LONGEST_NPY_HEADER, _MOST_NPY_AXES = 10_000, 64  # as in NumPy

#: The longest row, in bytes, that is read whole, and the bytes of rows read at once.
_SHORT_ROW, _BLOCK = 1 << 14, 1 << 20


class NpyFile(RegularFile):
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
        check(not path.is_dir(), f"{name} is a folder, not a .npy file")
        super().__init__(path, self._read_header, name)
        self.dtype = self.file_dtype.newbyteorder("=") if dtype is None else dtype

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.shape)

    # -- the header ----------------------------------------------------------------------------------------------------

    def _read_header(self) -> None:
        """Reads dtype, order and shape; also sets the position of the elements."""
        with place_in_errors(f"{self.name} is not a .npy file that can be read"):
            start = self._file.read(12)
            check(start, "it is empty")
            is_zip = start[:2] == b"PK"
            check(not is_zip, "it is a zip archive, as .npz files are: save one of its arrays with numpy.save")
            check(start[:6] == b"\x93NUMPY", "it does not begin like one")
            check(len(start) >= 10, "it ends within its header")
            version = f"{start[6]}.{start[7]}"
            check(version in ("1.0", "2.0", "3.0"), f"its version is {version}; known are 1.0, 2.0 and 3.0")
            count = 2 if version == "1.0" else 4
            length = int.from_bytes(start[8 : 8 + count], "little")
            self._begin = 8 + count + length
            fits = length <= _LONGEST_NPY_HEADER and self._begin <= self.file_size
            check(fits, f"a header of {length} bytes, in a file of {self.file_size}")
            read_header = np.lib.format.read_array_header_1_0 if count == 2 else np.lib.format.read_array_header_2_0
            self._file.seek(8)
            try:
                self.shape, self.fortran_order, self.file_dtype = read_header(self._file)
            except Exception as error:  # the parser of Python raises errors of any kind
                line = clip_text(next(iter(str(error).splitlines()), type(error).__name__))
                raise ValueError(f"its header is not that of an array of numbers: {line}{_way_out(line)}") from None
            dtype, shape = self.file_dtype, clip_text(str(self.shape))
            is_numeric = dtype.kind in "biufc"
            check(is_numeric, f"it holds {dtype.str!r}, which is not a numeric type{_way_out(dtype.str)}")
            known = all(type(n) is int and n >= 0 for n in self.shape) and len(self.shape) <= _MOST_NPY_AXES
            check(known, f"its shape {shape} is not known; {_MOST_NPY_AXES} axes at most")
            largest = math.prod(n for n in self.shape if n) * dtype.itemsize
            check(largest < 2**63, f"its shape {shape} is too large for an array")
            need, has = self.size * dtype.itemsize, self.file_size - self._begin
            check(need == has, f"shape {shape} of {dtype} needs {need} bytes; it has {has}")

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
        self.fill(part.reshape(-1).view(np.uint8).data, self._begin + first * part.itemsize, "its elements")

    def _convert(self, part: np.ndarray) -> np.ndarray:
        """A part of the file in the dtype that the reader wants, if that changes no value."""
        if self.dtype == self.file_dtype.newbyteorder("="):
            return part.astype(self.dtype, copy=False)
        if part.dtype.kind in "biuf":
            with np.errstate(over="ignore", invalid="ignore"):
                result = part.astype(self.dtype)
                same = np.array_equal(result.astype(part.dtype), part, equal_nan=part.dtype.kind == "f")
            if same:
                return result
        raise ValueError(
            f"{self.name} holds {self.file_dtype} values that {self.dtype} cannot hold: they would be rounded twice"
        )


def _way_out(text: str) -> str:
    """The advice for a dtype that `numpy.save` writes for arrays of `ml_dtypes`."""
    advice = "; if it was saved from bfloat16 or float8, save it as float32, or in a safetensors file"
    return advice if re.search("[<>|=](V1|V2|f1)'?$", text) else ""
