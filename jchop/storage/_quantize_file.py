"""Quantizes a safetensors file chunk by chunk into another one, in bounded memory."""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import first_names
from jchop._common.decibels import decibels
from jchop._common.files import write_atomically
from jchop._common.paths import matches_path, nearest_paths_hint, path_pattern
from jchop._core.rounding.grid import carrier_holds
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.storage._array import QArray
from jchop.storage._axis_groupings import axes_from_end
from jchop.storage._chunks import Chunk, GroupExtremes, chunks, plan_chunk_cut, quantize_chunk
from jchop.storage._codes import native_dtype
from jchop.storage._files.safetensors import TensorEntry, TensorFile, TensorWriter, place_tensors
from jchop.storage._quantize import dequantize, quantize
from jchop.storage._save import (
    QARRAYS_KEY,
    qarray_description,
    qarray_metadata,
    qarray_tensor_names,
    qarray_tensors,
    qarrays_in,
)

#: Bytes of a tensor that are processed at once.
CHUNK_BYTES = 1 << 25


@dataclass(frozen=True)
class TensorRule:
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
    """How many elements are not finite before or after, by what became of them.

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


@dataclass(frozen=True)
class _TensorJob:
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
        descriptions = qarrays_in(file) | {job.name: job.description for job in jobs if job.description is not None}
        texts = {name: text for name, text in file.metadata.items() if name != QARRAYS_KEY}
        total, reports = sum(job.entry.nbytes for job in jobs), []

        def write(out: Any) -> None:
            writer, start = TensorWriter(out, entries, texts | qarray_metadata(descriptions)), 0
            for job in jobs:
                tell = partial(_tell_progress, progress, job.name, start, total)
                reports.append(_convert_tensor(file, job, writer, seed, chunk, tell))
                start += job.entry.nbytes
            writer.finish()

        write_atomically(target, write)
    return reports


def _tell_progress(progress: Callable[[str, int, int], None], name: str, before: int, total: int, part: int) -> None:
    progress(name, before + part, total)


# -- conversion of each tensor -----------------------------------------------------------------------------------------


def _tensor_jobs(file: TensorFile, rules: Sequence[TensorRule]) -> list[_TensorJob]:
    descriptions = qarrays_in(file)
    part_names_of_file = {part for name, fields in descriptions.items() for part in qarray_tensor_names(name, fields)}
    used: set[int] = set()
    jobs = []
    for name, entry in sorted(file.entries.items(), key=lambda item: item[1].start):
        index = next((i for i, rule in enumerate(rules) if matches_path(rule.pattern, name)), None)
        if name in part_names_of_file:
            index, why = None, "copied: part of a QArray"
        elif index is None:
            why = "copied: no rule"
        elif entry.dtype.name not in CARRIERS:
            index, why = None, f"copied: {entry.dtype.name} is not quantized"
        else:
            why = ""
            used.add(index)
        jobs.append(_tensor_job(name, entry, None if index is None else rules[index], why))
    idle = [rule for i, rule in enumerate(rules) if i not in used]
    refuse_idle_rules(idle, [job.name for job in jobs if job.spec is None], descriptions)
    count = Counter(output for job in jobs for output in job.outputs)
    if twice := [name for name, times in count.items() if times > 1]:
        raise ValueError(f"quantized tensors would have the names of others: {', '.join(twice)}")
    return jobs


def refuse_idle_rules(idle: Sequence[TensorRule], names: Iterable[str], qarray_names: Iterable[str]) -> None:
    """Refuses rules that quantize nothing.

    Args:
        idle: the rules.
        names: of the tensors that no rule quantizes, for the error.
        qarray_names: the names of arrays that are codes and scales already.

    Raises:
        ValueError: if there are such rules.
    """
    if not idle:
        return
    matches = {rule: [name for name in qarray_names if matches_path(rule.pattern, name)] for rule in idle}
    owners = list(dict.fromkeys(name for hits in matches.values() for name in hits))
    note = f"; packed already: {first_names(owners)}" if owners else ""
    patterns = [rule.pattern for rule, hits in matches.items() if not hits]
    texts = ", ".join(f"'{rule.pattern}={rule.spec}'" for rule in idle)
    near = nearest_paths_hint(patterns, names) if patterns else ""
    raise ValueError(f"no tensor is quantized by {texts}{note}{near}. `jchop inspect` lists the names")


def tensor_rule_error(rule: TensorRule, name: str, shape: Sequence[int], error: Exception) -> ValueError:
    """The error for a tensor that a rule cannot quantize, with a rule that leaves it out."""
    other = f"{rule.pattern} !{path_pattern(name)}={rule.spec}"
    return ValueError(f"tensor {name!r} of shape {list(shape)}: {error}; the rule {other!r} leaves it as it is")


def _tensor_job(name: str, entry: TensorEntry, rule: TensorRule | None, why: str) -> _TensorJob:
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
    outputs = {
        part: TensorEntry(np.dtype(leaf.dtype), tuple(leaf.shape)) for part, leaf in qarray_tensors(name, q).items()
    }
    return _TensorJob(name, entry, spec, "", outputs, qarray_description(q))


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
    file: TensorFile,
    job: _TensorJob,
    writer: TensorWriter,
    seed: int | None,
    chunk_bytes: int,
    progress: Callable[[int], None],
) -> TensorReport:
    """Reads, converts and writes one tensor."""
    entry, spec = job.entry, job.spec
    after = sum(output.nbytes for output in job.outputs.values())
    to = job.why or str(spec)
    report = TensorReport(job.name, entry.dtype.name, entry.shape, to, entry.nbytes, after, copied=spec is None)
    if spec is None:
        step = max(chunk_bytes // entry.dtype.itemsize // 2 * 2, 2)  # even: a file has two numbers of four bits a byte
        for at in range(0, math.prod(entry.shape), step):
            x = file.read(job.name, at, min(step, math.prod(entry.shape) - at))
            writer.write(job.name, x)
            progress((at + x.size) * entry.bits // 8)
        return report
    fmt = None if spec.scaled is None else axes_from_end(spec.scaled, len(entry.shape))
    cut = plan_chunk_cut(entry.shape, entry.dtype.itemsize, fmt, chunk_bytes)

    def read(chunk: Chunk) -> np.ndarray:
        return file.read(job.name, chunk.start, math.prod(chunk.shape)).reshape(chunk.shape)

    extremes = GroupExtremes.of(entry.shape, cut, fmt, read)
    key = None
    if spec.rounding.stochastic:
        key = jax.random.fold_in(jax.random.key(seed or 0), zlib.crc32(job.name.encode()))
    for chunk in chunks(entry.shape, cut):
        x = read(chunk)
        result = _quantize_chunk(x, job, spec, key, chunk, extremes)
        if isinstance(result, QArray):
            _write_chunk_parts(writer, job.name, result, chunk)
            result = dequantize(result)
        else:
            writer.write(job.name, result)
        report.add(x, result)
        progress((chunk.start + x.size) * entry.dtype.itemsize)
    return report


def _quantize_chunk(
    x: np.ndarray, job: _TensorJob, spec: Spec, key: Any, chunk: Chunk, extremes: GroupExtremes | None
) -> QArray | np.ndarray:
    x = x.astype(_tensor_carrier(job.entry, spec))
    offset = (chunk.starts, job.entry.shape) if chunk.starts else 0
    native = _native_dtype_of(spec)
    if native is not None:
        return round_to_format(x, spec, key, offset=offset).astype(native)
    return quantize_chunk(x, spec, key, offset, chunk, extremes)


def _write_chunk_parts(writer: TensorWriter, name: str, q: QArray, chunk: Chunk) -> None:
    """Writes the parts of a chunk; scales that chunks share are written with the first one."""
    for part, array in qarray_tensors(name, q).items():
        repeats = part.endswith(".tensor_scale") and chunk.start > 0
        if part.endswith((".qvalue", ".places")) or (chunk.is_first_of_groups and not repeats):
            writer.write(part, array)
