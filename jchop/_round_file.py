"""A .npy file larger than memory, rounded chunk by chunk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from jchop._checks import check_int
from jchop._files import write_atomically
from jchop._round import round_to_format
from jchop.formats import ElementFormat, ScaledFormat
from jchop.spec import Spec, as_spec
from jchop.storage._layout import from_end
from jchop.storage._pieces import Extremes, Piece, pieces, plan_cut
from jchop.storage._quantize import dequantize, quantize

__all__ = ["round_file"]


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

    The file is read through a memory map and rounded chunk by chunk, each with the random bits of its place, so that
    the result is what `round_to_format` gives of the whole array, bit for bit, however it is cut. Where chunks share a
    scale (``"int8(group=tensor)"``), the file is read twice.

    `dst` appears in one step, when all of it is written: whatever goes wrong on the way, a kill included, `src` stays
    as it is and `dst` has its old content or none. A killed process may leave a file ``.NAME.PID.part`` beside it.

    Args:
        src: a .npy file of float16, float32, float64, complex64 or complex128, any shape, in C or Fortran order.
        dst: the file to write, of the shape and dtype of `src`; it may be `src`. Element formats keep the order of
            `src`, scaled formats write in C order.
        spec: as in `round_to_format`.
        key: a typed key (`jax.random.key`), needed by the stochastic modes.
        progress: True to report on stderr, or a function that is called with the elements done and in all. Default
            False.
        chunk: about how many bytes are rounded at once, where the groups of a scaled format allow. Default 32 MiB.

    Raises:
        OSError: where a file cannot be read or written.
        TypeError, ValueError: for what is no .npy file of numbers, and as `round_to_format` for `spec` and `key`.

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
    source, target = Path(src), Path(dst)
    if target.suffix != ".npy":
        raise ValueError(f"dst={str(dst)!r} must be the name of a .npy file")
    tell = _teller(progress, target.name)
    array = _mapped(source)
    write_atomically(target, lambda file: _write(file, _Plan.of(array, spec, chunk), spec, key, tell))


def _mapped(source: Path) -> np.ndarray:
    try:
        return np.load(source, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"src={str(source)!r} is no .npy file that can be mapped: {error}") from None


def _teller(progress: bool | Callable[[int, int], object], name: str) -> Callable[[int, int], object]:
    if callable(progress):
        return progress
    if not isinstance(progress, bool):
        raise TypeError(f"progress={progress!r} must be True, False, or a function of two integers")
    if not progress:
        return lambda done, total: None
    return lambda done, total: print(f"{name}: {done} of {total} elements", file=sys.stderr)


@dataclass(frozen=True)
class _Plan:
    """How a file is cut.

    Args:
        array: the mapped array.
        turned: whether axes are cut in reverse, as the elements of a file in Fortran order lie.
        listed: the pieces, in the order of the new file.
        extremes: of what pieces share scales by; None where none do.
    """

    array: np.ndarray
    turned: bool
    listed: tuple[Piece, ...]
    extremes: Extremes | None

    @classmethod
    def of(cls, array: np.ndarray, spec: Spec, chunk: int) -> _Plan:
        turned = spec.scaled is None and array.flags.f_contiguous and not array.flags.c_contiguous
        fmt = None if spec.scaled is None else from_end(spec.scaled, array.ndim)
        shape = array.shape[::-1] if turned else array.shape
        cut = plan_cut(shape, array.dtype.itemsize, fmt, chunk)
        extremes = None
        if fmt is not None and cut.needs_extremes:
            extremes = Extremes.of(shape, cut, fmt)
            for piece in pieces(shape, cut):
                extremes.see(_read(array, piece), piece)
        return cls(array, turned, tuple(pieces(shape, cut)), extremes)

    def __iter__(self) -> Iterator[tuple[np.ndarray, Piece]]:
        """Each piece of the array, as the array has its axes, and where it lies."""
        for piece in self.listed:
            if self.turned:
                piece = replace(piece, starts=piece.starts[::-1], shape=piece.shape[::-1])
            yield _read(self.array, piece), piece


def _read(array: np.ndarray, piece: Piece) -> np.ndarray:
    """A copy in memory, of native byte order."""
    place = tuple(slice(start, start + n) for start, n in zip(piece.starts, piece.shape, strict=True))
    return np.array(array[place], array.dtype.newbyteorder("="))


def _write(file: IO[bytes], plan: _Plan, spec: Spec, key: Any, tell: Callable[[int, int], object]) -> None:
    array = plan.array
    header = {
        "descr": np.lib.format.dtype_to_descr(array.dtype.newbyteorder("=")),
        "fortran_order": plan.turned,
        "shape": array.shape,
    }
    np.lib.format.write_array_header_1_0(file, header)  # pyright: ignore[reportArgumentType]
    done = 0
    tell(done, array.size)
    for x, piece in plan:
        rounded = _rounded(x, spec, key, (piece.starts, array.shape), piece, plan.extremes)
        file.write(np.ascontiguousarray(rounded.T if plan.turned else rounded).data)
        done += rounded.size
        tell(done, array.size)
    file.flush()
    os.fsync(file.fileno())


def _rounded(x: np.ndarray, spec: Spec, key: Any, offset: Any, piece: Piece, extremes: Extremes | None) -> np.ndarray:
    if extremes is None:
        return round_to_format(x, spec, key, offset=offset if x.ndim else 0)
    # The scales are those of the piece with the extremes in front; the elements are rounded without them, in place.
    plain = replace(spec, rounding="nearest_even", random_bits=None)
    seen = extremes.drop(quantize(extremes.add(x, piece), plain))
    return dequantize(quantize(x, spec, key, scale=seen.scale, zero_point=seen.zero_point, offset=offset))
