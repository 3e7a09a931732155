"""Cuts a large array into chunks that are quantized separately, with the same result as for the whole array.

A chunk has one index of each axis before the cut axis, a range of the cut axis, and all of the axes after it. So its
elements are contiguous in C order, and so are its codes and scales. Axes in blocks are cut between blocks. If a scale
is shared along the cut axis, the extremes of its group are prepended to each chunk, so that the rule includes them. All
rules but "mse" and "percentile" depend only on the extremes.

`round_file` rounds a .npy file so, and `quantize_file` a safetensors file.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import jax
import numpy as np

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check, check_instance, check_int, first_names
from jchop._common.files import as_path, write_atomically
from jchop._common.paths import matches_path, nearest_paths_hint, path_pattern
from jchop._common.text import decibels
from jchop._core.rounding.grid import carrier_holds
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, SpecLike, as_spec
from jchop._storage import _axis_groupings as groupings
from jchop._storage import _save
from jchop._storage._array import QArray
from jchop._storage._codes import native_dtype
from jchop._storage._files.npy import NpyFile
from jchop._storage._files.safetensors import TensorEntry, TensorFile, TensorWriter, place_tensors
from jchop._storage._quantize import dequantize, quantize
from jchop.formats import ElementFormat, ScaledFormat

#: This number of codes of any width fills whole bytes.
_CODES_IN_WHOLE_BYTES = 8


class ChunkCut(NamedTuple):
    """The cut of an array.

    Args:
        axis: axis of the cut; None for an array without axes, which is one chunk.
        step: length of a chunk along it.
        kinds: grouping of each axis.
        needs_extremes: whether chunks share a scale.
    """

    axis: int | None
    step: int
    kinds: tuple[groupings.AxisGrouping, ...]
    needs_extremes: bool


@dataclass(frozen=True)
class Chunk:
    """A chunk of an array: its first index (by axis, and flat), and its shape."""

    starts: tuple[int, ...]
    start: int
    shape: tuple[int, ...]
    is_first_of_groups: bool


def plan_chunk_cut(shape: Sequence[int], itemsize: int, fmt: ScaledFormat | None, chunk_bytes: int) -> ChunkCut:
    """The cut of an array into chunks of about `chunk_bytes` bytes at most, if its groups allow it.

    Args:
        shape: shape of the array.
        itemsize: bytes of an element.
        fmt: the scaled format, with axes counted from the end; None for a plain one.
        chunk_bytes: bytes.
    """
    if not shape:
        return ChunkCut(None, 1, (), False)
    kinds = groupings.axis_groupings(fmt, len(shape)) if fmt is not None else (groupings.OWN_SCALE,) * len(shape)
    units, indivisible = _cut_units(fmt, len(shape))
    of_tensor, is_sparse = (fmt.scale_rule.tensor_scale, fmt.sparse is not None) if fmt is not None else (False, False)
    if is_sparse and math.prod(shape) and (of_tensor or groupings.WHOLE_AXIS in kinds):
        return ChunkCut(0, shape[0], kinds, False)  # the ends of a chunk are not the ends of its kept numbers
    sizes = [unit * math.prod(shape[axis + 1 :]) * itemsize for axis, unit in enumerate(units)]
    whole = [n > 1 and never for n, never in zip(shape, indivisible, strict=True)]
    fits = (axis for axis, unit in enumerate(units) if whole[axis] or unit > 1 or sizes[axis] <= chunk_bytes)
    axis = next(fits, len(shape) - 1)
    step = shape[axis] if whole[axis] else max(1, chunk_bytes // max(sizes[axis], 1)) * units[axis]
    parts = [*(n > 1 for n in shape[:axis]), step < shape[axis]]
    share_scale = any(several and kinds[i] == groupings.WHOLE_AXIS for i, several in enumerate(parts))
    return ChunkCut(axis, min(step, max(shape[axis], 1)), kinds, share_scale or (of_tensor and any(parts)))


def _cut_units(fmt: ScaledFormat | None, ndim: int) -> tuple[list[int], list[bool]]:
    """For each axis, the unit of which chunk lengths are multiples, and whether the axis cannot be cut."""
    units, indivisible = groupings.unit_lengths(fmt, ndim), [False] * ndim
    units[-1] *= _CODES_IN_WHOLE_BYTES
    level: Any = fmt
    if fmt is not None and fmt.scale_rule.by_extremes and not fmt.scale_rule.tensor_scale:
        level = fmt if isinstance(fmt.scale, ScaledFormat) else None  # the extremes of all chunks give the scales
    while isinstance(level, ScaledFormat):
        kinds = groupings.axis_groupings(level, ndim)
        indivisible = [whole or kind == groupings.WHOLE_AXIS for whole, kind in zip(indivisible, kinds, strict=True)]
        level = level.scale
    return units, indivisible


def chunks(shape: Sequence[int], cut: ChunkCut) -> Iterator[Chunk]:
    """The chunks of an array in C order."""
    if cut.axis is None:
        yield Chunk((), 0, (), True)
        return
    axis, rest = cut.axis, tuple(shape[cut.axis + 1 :])
    inner, start = math.prod(rest), 0
    if math.prod(shape) == 0:
        yield Chunk((0,) * len(shape), 0, tuple(shape), True)
        return
    for outer in itertools.product(*map(range, shape[:axis])):
        for first in range(0, shape[axis], cut.step):
            length = min(cut.step, shape[axis] - first)
            begins = (*outer, first)
            leads = all(at == 0 for at, kind in zip(begins, cut.kinds, strict=False) if kind == groupings.WHOLE_AXIS)
            yield Chunk((*begins, *(0 for _ in rest)), start, ((1,) * axis) + (length, *rest), leads)
            start += length * inner


@dataclass(frozen=True)
class GroupExtremes:
    """The least and the largest finite element of each group of an array that is read in chunks."""

    axis: int  # along which they are prepended to a chunk
    count: int  # number of prepended entries
    shares_axis: tuple[bool, ...]  # for each axis, whether scales are shared along it
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(
        cls, shape: Sequence[int], cut: ChunkCut, fmt: ScaledFormat | None, read: Callable[[Chunk], np.ndarray]
    ) -> Self | None:
        """The extremes of an array whose chunks `read` gives; None if no group spans chunks."""
        if fmt is None or not cut.needs_extremes:
            return None
        assert cut.axis is not None
        everywhere = fmt.scale_rule.tensor_scale
        shares_axis = tuple(everywhere or kind == groupings.WHOLE_AXIS for kind in cut.kinds)
        axis = cut.axis if everywhere else cut.kinds.index(groupings.WHOLE_AXIS)
        kind = cut.kinds[axis]
        bounds = tuple(1 if all_of else n for all_of, n in zip(shares_axis, shape, strict=True))
        count = (kind if isinstance(kind, int) else 1) * _CODES_IN_WHOLE_BYTES
        extremes = cls(axis, count, shares_axis, np.full(bounds, np.inf), np.full(bounds, -np.inf))
        for chunk in chunks(shape, cut):
            extremes._see(read(chunk), chunk)
        return extremes

    def _place(self, chunk: Chunk) -> tuple[slice, ...]:
        """The index of a chunk's groups among the extremes of all groups."""
        spans = zip(self.shares_axis, chunk.starts, chunk.shape, strict=True)
        return tuple(slice(None) if shares else slice(at, at + n) for shares, at, n in spans)

    def _see(self, x: np.ndarray, chunk: Chunk) -> None:
        """Updates the extremes with a chunk."""
        axes = tuple(axis for axis, shares in enumerate(self.shares_axis) if shares)
        place, finite = self._place(chunk), np.isfinite(x)
        wide = x.astype(np.float64)
        low = np.min(wide, axis=axes, keepdims=True, initial=np.inf, where=finite)
        high = np.max(wide, axis=axes, keepdims=True, initial=-np.inf, where=finite)
        self.low[place] = np.minimum(self.low[place], low)
        self.high[place] = np.maximum(self.high[place], high)

    def add(self, x: np.ndarray, chunk: Chunk) -> np.ndarray:
        """A chunk with the extremes prepended."""
        place = self._place(chunk)
        shape = (*x.shape[: self.axis], 1, *x.shape[self.axis + 1 :])
        ends = [np.where(np.isfinite(end[place]), end[place], 0).astype(x.dtype) for end in (self.low, self.high)]
        front = [np.broadcast_to(ends[i % 2], shape) for i in range(self.count)]
        return np.concatenate([*front, x], axis=self.axis)

    def drop(self, q: QArray) -> QArray:
        """The quantized chunk without the extremes."""
        return q[(*(slice(None),) * self.axis, slice(self.count, None))]


def quantize_chunk(
    x: np.ndarray, spec: Spec, key: Any, offset: Any, chunk: Chunk, extremes: GroupExtremes | None
) -> QArray:
    """The codes of a chunk, equal to its codes in the whole array.

    If chunks share scales, these come from the chunk with the extremes prepended. A stochastic rounding then has its
    draws in place: without the extremes.
    """
    if extremes is None:
        return quantize(x, spec, key, offset=offset)
    plain = spec if key is None else replace(spec, rounding="nearest_even", random_bits=None)
    q = extremes.drop(quantize(extremes.add(x, chunk), plain))
    return q if key is None else quantize(x, spec, key, scale=q.scale, zero_point=q.zero_point, offset=offset)


# -- a .npy file larger than memory ------------------------------------------------------------------------------------


#: A function of the number of elements done and the total number.
ElementProgress = Callable[[int, int], object]


def round_file(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    spec: SpecLike,
    key: jax.Array | None = None,
    *,
    progress: bool | Callable[[int, int], object] = False,
    chunk: int = 1 << 25,
) -> None:
    """Rounds the array of a .npy file into another one, in bounded memory.

    The file is read and rounded chunk by chunk, each with the random bits of its position. For every chunk size the
    result equals `round_to_format` of the whole array, bit for bit. If chunks share a scale (``"int8"``), the file is
    read twice.

    `dst` is created in one step, when all of it is written. After an error or a kill, `src` is unchanged and `dst` has
    its old content or does not exist. A killed process may leave a file ``.NAME.RANDOM.part`` in the same folder.

    Args:
        src: a .npy file of float16, float32, float64, complex64 or complex128. Any shape, in C or Fortran order.
        dst: the file to write, of the shape and dtype of `src`; it may be `src`. Element formats keep the order of
            `src`. Scaled formats write in C order.
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
    check(target.suffix == ".npy", f"dst={str(dst)!r} must be the name of a .npy file")
    tell = _as_element_progress(progress, target.name)
    with NpyFile(source, f"src={str(src)!r}") as file:
        rounding = RoundedChunks(file, spec, key, chunk, tell)
        write_atomically(target, lambda out: rounding.write(out, lambda x, y: None))


def _as_element_progress(progress: bool | Callable[[int, int], object], name: str) -> Callable[[int, int], object]:
    if callable(progress):
        return progress
    check_instance("progress", progress, bool, "True, False, or a function of two integers")
    if not progress:
        return lambda count, total: None
    return lambda count, total: print(f"{name}: {count} of {total} elements", file=sys.stderr)


class RoundedChunks:
    """The chunks of the array of a file, original and rounded.

    Args:
        file: the source. The axes of one in Fortran order are cut in reverse.
        spec: the rounding.
        key: key of a stochastic rounding.
        chunk_bytes: as of `plan_chunk_cut`.
        progress: called with the number of elements done and the total number.
    """

    def __init__(self, file: NpyFile, spec: Spec, key: Any, chunk_bytes: int, progress: ElementProgress) -> None:
        self._file, self._spec, self._key, self._progress = file, spec, key, progress
        self._order = -1 if spec.scaled is None and file.fortran_order else 1
        fmt = None if spec.scaled is None else groupings.axes_from_end(spec.scaled, len(file.shape))
        shape = file.shape if file.size else (0,) * len(file.shape)  # an array without elements may have many scales
        cut = plan_chunk_cut(shape[:: self._order], file.dtype.itemsize, fmt, chunk_bytes)
        self._chunks = [
            replace(chunk, starts=chunk.starts[:: self._order], shape=chunk.shape[:: self._order])
            for chunk in chunks(shape[:: self._order], cut)
        ]
        self._extremes = GroupExtremes.of(shape, cut, fmt, lambda chunk: file.read(chunk.starts, chunk.shape))

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each chunk and its rounded values, with the axes of the array."""
        count, total = 0, self._file.size
        self._progress(count, total)
        for chunk in self._chunks:
            x = self._file.read(chunk.starts, chunk.shape)
            yield x, self._round(x, chunk)
            count += x.size
            self._progress(count, total)

    def _round(self, x: np.ndarray, chunk: Chunk) -> np.ndarray:
        draws = self._spec.rounding.stochastic and x.ndim and x.size  # otherwise no index is needed
        offset = (chunk.starts, self._file.shape) if draws else 0
        if self._extremes is None:
            return round_to_format(x, self._spec, self._key, offset=offset)
        return dequantize(quantize_chunk(x, self._spec, self._key, offset, chunk, self._extremes))

    def write(self, file: IO[bytes], visit: Callable[[np.ndarray, np.ndarray], object]) -> None:
        """Writes the rounded array as a .npy file; `visit` is called with each chunk and its rounded values."""
        descr = np.lib.format.dtype_to_descr(self._file.dtype)
        header = {"descr": descr, "fortran_order": self._order < 0, "shape": self._file.shape}
        np.lib.format.write_array_header_1_0(file, header)  # pyright: ignore[reportArgumentType]
        for x, values in self:
            visit(x, values)
            file.write(np.ascontiguousarray(values.T if self._order < 0 else values).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


# -- a safetensors file larger than memory -----------------------------------------------------------------------------


#: Bytes of a tensor that are processed at once.
CHUNK_BYTES = 1 << 25


class TensorRule(NamedTuple):
    """The spec of the tensors whose name matches `pattern`."""

    pattern: str
    spec: Spec


@dataclass
class TensorReport:
    """The result for one tensor.

    Errors are over the elements that are and stay finite; `square` and `error` are sums of squares. `fates` counts the
    others.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    to: str
    before: int
    after: int
    square: float = 0.0
    error: float = 0.0
    largest: float = 0.0
    fates: Counter[str] = field(default_factory=Counter)
    copied: bool = False

    @property
    def sqnr(self) -> float:
        """Signal-to-quantization-noise ratio in dB; infinite if no element changed, NaN if only `fates` has changes."""
        changes = any(" to " in fate for fate in self.fates)
        return math.nan if changes and not self.error else decibels(self.square, self.error)

    def add(self, exact: np.ndarray, result: np.ndarray) -> None:
        """Adds the errors of a chunk."""
        x, y = exact.astype(np.float64).ravel(), result.astype(np.float64).ravel()
        self.fates += fates_of(x, y)
        finite = np.isfinite(x) & np.isfinite(y)
        x, y = x[finite], y[finite]
        self.square += float(x @ x)
        y -= x
        self.error += float(y @ y)
        self.largest = max(self.largest, float(np.abs(y).max(initial=0.0)))


_NUMBER_CLASSES = {"finite": np.isfinite, "inf": np.isinf, "nan": np.isnan}


def fates_of(exact: np.ndarray, result: np.ndarray) -> Counter[str]:
    """How many elements are not finite before or after the rounding, by kind of change.

    Example:
        >>> dict(fates_of(np.array([np.nan, np.inf, -np.inf, 1.0]), np.array([7.0, np.inf, -np.inf, 1.0])))
        {'inf kept': 2, 'nan to finite': 1}
    """
    fates: Counter[str] = Counter()
    if np.isfinite(exact).all() and np.isfinite(result).all():
        return fates
    for (before, was), (after, became) in itertools.product(_NUMBER_CLASSES.items(), repeat=2):
        count = int(np.count_nonzero(was(exact) & became(result)))
        if count and not before == after == "finite":
            fates[f"{before} kept" if before == after else f"{before} to {after}"] = count
    return fates


class _TensorJob(NamedTuple):
    """A tensor, its conversion, and its tensors in the new file."""

    name: str
    entry: TensorEntry
    spec: Spec | None
    why: str  # the reason in the report, for a tensor that is copied
    outputs: dict[str, TensorEntry]
    description: dict[str, Any] | None = None


def quantize_file(
    source: Path,
    target: Path,
    rules: Sequence[TensorRule],
    *,
    seed: int | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    chunk: int = CHUNK_BYTES,
) -> list[TensorReport]:
    """Writes `source` to `target` and quantizes tensors by rules; the first rule that matches applies.

    Tensors without a rule, of dtypes other than float16, bfloat16, float32 and float64, and the leaves of QArrays in
    the file are copied. `target` is created in one step, when all of it is written.

    Args:
        source: a safetensors file.
        target: may be `source`.
        rules: each must quantize at least one tensor.
        seed: seed of the random bits of stochastic specs; each tensor has different bits, derived from its name.
        progress: function of the name of a tensor, the bytes of the file that are done, and the total.
        chunk: bytes of a tensor that are processed at once, if its groups allow it.

    Returns:
        A report for each tensor.

    Raises:
        ValueError: for an invalid safetensors file, a rule that quantizes no tensor, or a stochastic spec without a
            seed.
    """
    with TensorFile(source) as file:
        jobs = _tensor_jobs(file, rules)
        for job in jobs:
            if job.spec is not None and job.spec.rounding.stochastic and seed is None:
                raise ValueError(f"spec={str(job.spec)!r} rounds stochastically: it needs a seed")
        entries = place_tensors({name: entry for job in jobs for name, entry in job.outputs.items()})
        own = {job.name: job.description for job in jobs if job.description is not None}
        descriptions = _save.qarrays_in(file) | own
        texts = {name: text for name, text in file.metadata.items() if name != _save.QARRAYS_KEY}
        total, reports = sum(job.entry.nbytes for job in jobs), []

        def write(out: Any) -> None:
            writer, start = TensorWriter(out, entries, texts | _save.qarray_metadata(descriptions)), 0
            for job in jobs:

                def tell(part: int, name: str = job.name, start: int = start) -> None:
                    progress(name, start + part, total)

                reports.append(_convert_tensor(file, job, writer, seed, chunk, tell))
                start += job.entry.nbytes
            writer.finish()

        write_atomically(target, write)
    return reports


# -- conversion of each tensor -----------------------------------------------------------------------------------------


def _tensor_jobs(file: TensorFile, rules: Sequence[TensorRule]) -> list[_TensorJob]:
    """The jobs of a file's tensors: each is quantized by its rule, or copied."""
    descriptions = _save.qarrays_in(file)
    parts = {part for name, fields in descriptions.items() for part in _save.qarray_tensor_names(name, fields)}
    dtypes = {name: entry.dtype.name for name, entry in file.entries.items() if name not in parts}
    chosen = choose_rules(rules, dtypes, descriptions, parts)
    jobs = []
    for name, entry in sorted(file.entries.items(), key=lambda item: item[1].start):
        why = "part of a QArray" if name in parts else "no rule"
        if name not in parts and name not in chosen and any(matches_path(rule.pattern, name) for rule in rules):
            why = f"{entry.dtype.name} is not quantized"
        jobs.append(_tensor_job(name, entry, chosen.get(name), f"copied: {why}"))
    count = Counter(output for job in jobs for output in job.outputs)
    if twice := [name for name, times in count.items() if times > 1]:
        raise ValueError(f"quantized tensors would have the names of others: {', '.join(twice)}")
    return jobs


def choose_rules(
    rules: Sequence[TensorRule], dtypes: Mapping[str, str], packed: Iterable[str], others: Iterable[str] = ()
) -> dict[str, TensorRule]:
    """The rules of tensors by name: for each tensor of a carrier's dtype the first one that matches.

    Args:
        rules: each must quantize a tensor.
        dtypes: the dtypes of tensors by name.
        packed: the names of arrays that are codes and scales already.
        others: further names that are not quantized, for the error.

    Raises:
        ValueError: for a rule that quantizes nothing.
    """
    firsts = {name: next((rule for rule in rules if matches_path(rule.pattern, name)), None) for name in dtypes}
    chosen = {name: rule for name, rule in firsts.items() if rule is not None and dtypes[name] in CARRIERS}
    idle = [rule for rule in rules if rule not in chosen.values()]
    if not idle:
        return chosen
    matches = {rule: [name for name in packed if matches_path(rule.pattern, name)] for rule in idle}
    owners = list(dict.fromkeys(name for hits in matches.values() for name in hits))
    note = f"; packed already: {first_names(owners)}" if owners else ""
    patterns = [rule.pattern for rule, hits in matches.items() if not hits]
    texts = ", ".join(f"'{rule.pattern}={rule.spec}'" for rule in idle)
    left = [name for name in (*dtypes, *others) if name not in chosen]
    near = nearest_paths_hint(patterns, left) if patterns else ""
    raise ValueError(f"no tensor is quantized by {texts}{note}{near}. `jchop inspect` lists the names")


def tensor_rule_error(rule: TensorRule, name: str, shape: Sequence[int], error: Exception) -> ValueError:
    """The error for a tensor that a rule cannot quantize, with a rule that leaves it out."""
    other = f"{rule.pattern} !{path_pattern(name)}={rule.spec}"
    return ValueError(f"tensor {name!r} of shape {list(shape)}: {error}; the rule {other!r} leaves it as it is")


def _tensor_job(name: str, entry: TensorEntry, rule: TensorRule | None, why: str) -> _TensorJob:
    """The job of one tensor, with the dtypes and shapes of the tensors that it writes."""
    if rule is None:
        return _TensorJob(name, entry, None, why, {name: TensorEntry(entry.dtype, entry.shape)})
    spec = rule.spec
    native = _native_dtype_of(spec)
    if native is not None:
        return _TensorJob(name, entry, spec, "", {name: TensorEntry(native, entry.shape)})
    x = jax.ShapeDtypeStruct(entry.shape, _tensor_carrier(entry, spec))
    key = jax.random.key(0) if spec.rounding.stochastic else None
    try:
        with jax.enable_x64(True):
            q = jax.eval_shape(lambda x: quantize(x, spec, key), x)
    except (ValueError, TypeError) as error:
        raise tensor_rule_error(rule, name, entry.shape, error) from None
    parts = _save.qarray_tensors(name, q)
    outputs = {part: TensorEntry(np.dtype(leaf.dtype), tuple(leaf.shape)) for part, leaf in parts.items()}
    return _TensorJob(name, entry, spec, "", outputs, _save.qarray_description(q))


def _native_dtype_of(spec: Spec) -> np.dtype | None:
    """The dtype of a plain format, if any: such a tensor keeps its name, and every program can read it."""
    return native_dtype(spec.format) if isinstance(spec.format, ElementFormat) else None


def _tensor_carrier(entry: TensorEntry, spec: Spec) -> np.dtype:
    """The dtype in which a tensor is rounded: its own, or float32 if a 16-bit dtype is too narrow."""
    own = CARRIERS[entry.dtype.name]
    if isinstance(spec.format, ScaledFormat) or own.width > 16 or carrier_holds(spec, own):
        return entry.dtype
    return np.dtype(np.float32)


# -- chunk by chunk ----------------------------------------------------------------------------------------------------


def _convert_tensor(
    file: TensorFile, job: _TensorJob, writer: TensorWriter, seed: int | None, chunk: int, tell: Callable[[int], None]
) -> TensorReport:
    """Reads, converts and writes one tensor."""
    entry, spec = job.entry, job.spec
    after = sum(output.nbytes for output in job.outputs.values())
    to = job.why or str(spec)
    report = TensorReport(job.name, entry.dtype.name, entry.shape, to, entry.nbytes, after, copied=spec is None)
    if spec is None:
        step = max(chunk // entry.dtype.itemsize // 2 * 2, 2)  # even: a file has two numbers of four bits a byte
        for at in range(0, math.prod(entry.shape), step):
            x = file.read(job.name, at, min(step, math.prod(entry.shape) - at))
            writer.write(job.name, x)
            tell((at + x.size) * entry.bits // 8)
        return report
    fmt = None if spec.scaled is None else groupings.axes_from_end(spec.scaled, len(entry.shape))
    cut = plan_chunk_cut(entry.shape, entry.dtype.itemsize, fmt, chunk)

    def read(chunk: Chunk) -> np.ndarray:
        return file.read(job.name, chunk.start, math.prod(chunk.shape)).reshape(chunk.shape)

    extremes = GroupExtremes.of(entry.shape, cut, fmt, read)
    key = None
    if spec.rounding.stochastic:
        key = jax.random.fold_in(jax.random.key(seed or 0), zlib.crc32(job.name.encode()))
    native, carrier = _native_dtype_of(spec), _tensor_carrier(entry, spec)
    for part in chunks(entry.shape, cut):
        x, offset = read(part), (part.starts, entry.shape) if part.starts else 0
        if native is not None:
            result = round_to_format(x.astype(carrier), spec, key, offset=offset).astype(native)
            writer.write(job.name, result)
        else:
            q = quantize_chunk(x.astype(carrier), spec, key, offset, part, extremes)
            # Scales that several chunks share are written once.
            for name, array in _save.qarray_tensors(job.name, q).items():
                repeats = name.endswith(".tensor_scale") and part.start > 0
                if name.endswith((".qvalue", ".places")) or (part.is_first_of_groups and not repeats):
                    writer.write(name, array)
            result = dequantize(q)
        report.add(x, result)
        tell((part.start + x.size) * entry.dtype.itemsize)
    return report
