"""Rounds a .npy file larger than memory, chunk by chunk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import IO, Any

import jax
import numpy as np

from jchop._common.checks import check_int
from jchop._common.files import as_path, write_atomically
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.storage._axis_groupings import axes_from_end
from jchop.storage._chunks import Chunk, GroupExtremes, chunks, plan_chunk_cut
from jchop.storage._files.npy import NpyFile
from jchop.storage._quantize import dequantize, quantize

__all__ = ["round_file"]

#: A function of the number of elements done and the total number.
ElementProgress = Callable[[int, int], object]


def round_file(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    spec: Spec | ElementFormat | ScaledFormat | str,
    key: jax.Array | None = None,
    *,
    progress: bool | Callable[[int, int], object] = False,
    chunk: int = 1 << 25,
) -> None:
    """Rounds the array of a .npy file into another one, in bounded memory.

    The file is read and rounded chunk by chunk, each with the random bits of its position. So the result equals
    `round_to_format` of the whole array, bit for bit, for every chunk size. If chunks share a scale
    (``"int8"``), the file is read twice.

    `dst` is created in one step, when all of it is written. After an error or a kill, `src` is unchanged and `dst` has
    its old content or does not exist. A killed process may leave a file ``.NAME.RANDOM.part`` in the same folder.

    Args:
        src: a .npy file of float16, float32, float64, complex64 or complex128, any shape, in C or Fortran order.
        dst: the file to write, of the shape and dtype of `src`; it may be `src`. Element formats keep the order of
            `src`, scaled formats write in C order.
        spec: as in `round_to_format`.
        key: a typed key (`jax.random.key`), needed by the stochastic modes.
        progress: True to report on stderr, or a function of the number of elements done and the total number. Default
            False.
        chunk: approximate number of bytes that are rounded at once, if the groups of a scaled format allow it. Default
            32 MiB.

    Raises:
        OSError: if a file cannot be read or written.
        ValueError: if `src` is not a .npy file of numbers, its size differs from its header, or it becomes shorter
            meanwhile.
        TypeError, ValueError: as `round_to_format` for the dtype, `spec` and `key`.

    Example:
        >>> import os, tempfile, numpy as np, jchop as jc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     source, target = os.path.join(folder, "x.npy"), os.path.join(folder, "y.npy")
        ...     np.save(source, np.linspace(0, 1, 5))
        ...     jc.round_file(source, target, "e2m1", chunk=16)
        ...     np.load(target).tolist()
        [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    spec = as_spec(spec, scaled=True)
    chunk = check_int("chunk", chunk, 1)
    source, target = as_path("src", src), as_path("dst", dst)
    if target.suffix != ".npy":
        raise ValueError(f"dst={str(dst)!r} must be the name of a .npy file")
    tell = _as_element_progress(progress, target.name)
    with NpyFile(source, f"src={str(src)!r}") as file:
        rounding = RoundedChunks.of(file, spec, key, chunk, tell)
        write_atomically(target, lambda out: rounding.write(out, lambda x, y: None))


def _as_element_progress(progress: bool | Callable[[int, int], object], name: str) -> Callable[[int, int], object]:
    if callable(progress):
        return progress
    if not isinstance(progress, bool):
        raise TypeError(f"progress={progress!r} must be True, False, or a function of two integers")
    if not progress:
        return lambda count, total: None
    return lambda count, total: print(f"{name}: {count} of {total} elements", file=sys.stderr)


@dataclass(frozen=True)
class RoundedChunks:
    """The chunks of the array of a file, original and rounded.

    Args:
        file: the source.
        spec: the rounding.
        key: key of a stochastic rounding.
        in_fortran_order: whether axes are cut in reverse, for a file in Fortran order.
        listed: the chunks, in the order of a new file.
        extremes: the extremes of groups that span chunks; None if there are no such groups.
        progress: called with the number of elements done and the total number.
    """

    file: NpyFile
    spec: Spec
    key: Any
    in_fortran_order: bool
    chunk_list: tuple[Chunk, ...]
    extremes: GroupExtremes | None
    progress: ElementProgress

    @classmethod
    def of(cls, file: NpyFile, spec: Spec, key: Any, chunk_bytes: int, progress: ElementProgress) -> RoundedChunks:
        in_fortran_order = spec.scaled is None and file.fortran_order
        fmt = None if spec.scaled is None else axes_from_end(spec.scaled, len(file.shape))
        shape = file.shape if file.size else (0,) * len(file.shape)  # an array without elements may have many scales
        cut = plan_chunk_cut(shape[::-1] if in_fortran_order else shape, file.dtype.itemsize, fmt, chunk_bytes)
        chunk_list = tuple(
            _chunk_in_axis_order(chunk, in_fortran_order)
            for chunk in chunks(shape[::-1] if in_fortran_order else shape, cut)
        )
        extremes = None
        if fmt is not None and cut.needs_extremes:
            extremes = GroupExtremes.of(shape, cut, fmt)
            for chunk in chunk_list:
                extremes.see(file.read(chunk.starts, chunk.shape), chunk)
        return cls(file, spec, key, in_fortran_order, chunk_list, extremes, progress)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each chunk and its rounded values, with the axes of the array."""
        count, total = 0, self.file.size
        self.progress(count, total)
        for chunk in self.chunk_list:
            x = self.file.read(chunk.starts, chunk.shape)
            yield x, self._round(x, chunk)
            count += x.size
            self.progress(count, total)

    def _round(self, x: np.ndarray, chunk: Chunk) -> np.ndarray:
        draws = self.spec.rounding.stochastic and x.ndim and x.size  # otherwise no index is needed
        offset = (chunk.starts, self.file.shape) if draws else 0
        if self.extremes is None:
            return round_to_format(x, self.spec, self.key, offset=offset)
        # The scales come from the chunk with the extremes prepended. The elements are rounded without the extremes, in
        # place.
        plain = replace(self.spec, rounding="nearest_even", random_bits=None)
        qarray = self.extremes.drop(quantize(self.extremes.add(x, chunk), plain))
        codes = quantize(x, self.spec, self.key, scale=qarray.scale, zero_point=qarray.zero_point, offset=offset)
        return dequantize(codes)

    def write(self, file: IO[bytes], visit: Callable[[np.ndarray, np.ndarray], object]) -> None:
        """Writes the rounded array as a .npy file; `visit` is called with each chunk and its rounded values."""
        descr = np.lib.format.dtype_to_descr(self.file.dtype)
        header = {"descr": descr, "fortran_order": self.in_fortran_order, "shape": self.file.shape}
        np.lib.format.write_array_header_1_0(file, header)  # pyright: ignore[reportArgumentType]
        for x, values in self:
            visit(x, values)
            file.write(np.ascontiguousarray(values.T if self.in_fortran_order else values).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _chunk_in_axis_order(chunk: Chunk, in_fortran_order: bool) -> Chunk:
    return replace(chunk, starts=chunk.starts[::-1], shape=chunk.shape[::-1]) if in_fortran_order else chunk
