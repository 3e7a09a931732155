"""Writes folders of safetensors files, each file in one step, so that a killed run goes on after the last one."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from jchop._checkpoints.record import LayoutRecord, WriteJob, layout_config, layout_metadata, layout_tensors
from jchop._common.files import exclusive_folder, open_regular_file, remove_part_files, write_atomically
from jchop.storage._files.json import json_object
from jchop.storage._files.safetensors import TensorEntry, TensorWriter, place_tensors
from jchop.storage._files.shards import CONFIG_FILE, INDEX_FILE, JOURNAL_FILE, SINGLE_FILE

#: Bytes of arrays that make one file, and the most that are in memory together, except for a larger array.
SHARD_BYTES = 1 << 28
ByteProgress = Callable[[str, int, int], None]


def write_folder(
    jobs: Sequence[WriteJob],
    target: Path,
    layout: str,
    *,
    config: Mapping[str, Any],
    exact: bool,
    shard_bytes: int,
    run: str,
    others: Sequence[Path] = (),
    progress: ByteProgress,
) -> bool:
    """Writes arrays to a folder, its index and its configuration.

    Args:
        jobs: the arrays in the order of the files.
        target: the folder, which must not have tensors yet, except of an unfinished run of the same text.
        layout: of `LAYOUT_NAMES`, but no GGUF.
        config: fields of ``config.json``.
        exact: whether every number must stay the same.
        shard_bytes: bytes of arrays in one file.
        run: a text that differs if the arrays do; without one, no run goes on, and nothing is left of one that fails.
        others: files that are copied into the folder, unless it has one of that name.
        progress: function of a name, the bytes that are done, and the total.

    Returns:
        Whether files of an unfinished run were kept.

    Raises:
        ValueError: for arrays without a form in the layout, or a folder with other tensors or another writer.
    """
    plan = _divide_jobs(jobs, shard_bytes)
    facts = [run, layout, exact, [[job.name for job in part] for part in plan]]
    names = [SINGLE_FILE] if len(plan) == 1 else [_shard_name(number, len(plan)) for number in range(len(plan))]
    position, total = 0, sum(job.nbytes for job in jobs)
    with exclusive_folder(target):
        records = _begin_run(target, facts, names if run else [])
        remove_part_files(target, [*names, JOURNAL_FILE, INDEX_FILE, CONFIG_FILE, *(path.name for path in others)])
        continues = bool(records)
        try:
            for number, (name, part) in enumerate(zip(names, plan, strict=True)):
                if number == len(records):
                    tell = _progress_after(progress, position, total)
                    records.append(_write_tensors(target / name, part, layout, exact, shard_bytes, tell))
                    _write_journal(target, facts, records)
                position += sum(job.nbytes for job in part)
                progress(name, position, total)
            _write_index_and_config(target, names, records, layout, config)
            _copy_files(others, target)
        except BaseException as error:
            if not run or not records or isinstance(error, ValueError):  # no run goes on, or it would end here, too
                for name in (*names, INDEX_FILE, JOURNAL_FILE):
                    (target / name).unlink(missing_ok=True)
            raise
        (target / JOURNAL_FILE).unlink()  # the last step: without it the same call goes on
    return continues


def _write_index_and_config(
    target: Path, names: Sequence[str], records: Sequence[Mapping[str, Any]], layout: str, config: Mapping[str, Any]
) -> None:
    """Writes the index and the configuration."""
    record = LayoutRecord()
    for one in records:
        record.rows |= one["rows"]
        record.plain |= one["plain"]
    full_config = layout_config(layout, config, record)
    if len(names) > 1:
        homes = {tensor: name for name, one in zip(names, records, strict=True) for tensor in one["tensors"]}
        _write_json(
            target / INDEX_FILE, {"metadata": {"total_size": sum(one["size"] for one in records)}, "weight_map": homes}
        )
    if full_config:
        _write_json(target / CONFIG_FILE, full_config)


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def _copy_files(others: Sequence[Path], target: Path) -> None:
    for path in others:
        if not (target / path.name).exists():
            with open_regular_file(path) as file:
                mode = os.fstat(file.fileno()).st_mode & 0o777
                write_atomically(target / path.name, lambda out, file=file: shutil.copyfileobj(file, out), mode)


def write_file(jobs: Sequence[WriteJob], target: Path, layout: str, *, exact: bool, progress: ByteProgress) -> None:
    """Writes arrays to one file, in one step."""
    _write_tensors(
        target,
        jobs,
        layout,
        exact,
        SHARD_BYTES,
        _progress_after(progress, 0, sum(job.nbytes for job in jobs)),
        config=False,
    )


def _divide_jobs(jobs: Sequence[WriteJob], shard_bytes: int) -> list[list[WriteJob]]:
    plan: list[list[WriteJob]] = [[]]
    size = 0
    for job in jobs:
        if plan[-1] and size + job.nbytes > shard_bytes:
            plan.append([])
            size = 0
        plan[-1].append(job)
        size += job.nbytes
    return plan


def _begin_run(target: Path, facts: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """The facts of the finished files, of such names, of an unfinished run of the same arrays."""
    journal = target / JOURNAL_FILE
    if journal.exists():
        with open_regular_file(journal) as file:
            try:
                content = json_object(file.read().decode("utf-8"))
                if content["run"] == _facts_digest(facts, content["done"]):
                    there = zip(names, content["done"], strict=False)
                    return [one for _, one in itertools.takewhile(lambda pair: (target / pair[0]).exists(), there)]
            except (ValueError, KeyError, TypeError):
                pass
        raise ValueError(
            f"{target} has an unfinished run of other arrays or options: remove the folder, or repeat that run"
        )
    if tensors := sorted(
        path.name for path in target.iterdir() if path.suffix == ".safetensors" or path.name == INDEX_FILE
    ):
        raise ValueError(f"{target} has tensors already ({tensors[0]}); write to a new folder")
    _write_journal(target, facts, [])
    return []


def _write_journal(target: Path, facts: Any, records: Sequence[Any]) -> None:
    _write_json(target / JOURNAL_FILE, {"run": _facts_digest(facts, records), "done": records})


def _facts_digest(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _progress_after(progress: ByteProgress, before: int, total: int) -> Callable[[str, int], None]:
    return lambda name, count: progress(name, before + count, total)


def _write_tensors(
    path: Path,
    jobs: Sequence[WriteJob],
    layout: str,
    exact: bool,
    most: int,
    progress: Callable[[str, int], None],
    config: bool = True,
) -> dict[str, Any]:
    """Writes one file, with at most so many bytes of tensors in memory; the record of it."""
    record, position = LayoutRecord(config=config), 0
    with tempfile.TemporaryFile(dir=path.parent) as file:
        tensors = _TensorBuffer(file, most)
        for job in jobs:
            for name, array in layout_tensors(layout, job.name, job.make(), exact, record).items():
                tensors.add(name, array)
            position += job.nbytes
            progress(job.name, position)
        entries = place_tensors(tensors.entries)

        def write(file: Any) -> None:
            writer = TensorWriter(file, entries, layout_metadata(layout, record))
            for name in entries:
                writer.write(name, tensors.read(name))
            writer.finish()

        write_atomically(path, write)
    size = sum(entry.nbytes for entry in entries.values())
    return {"rows": record.rows, "plain": record.plain, "tensors": list(entries), "size": size}


class _TensorBuffer:
    """Tensors that are kept until the header of their file is known: some in memory, the others in a file."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self._file, self._space = file, most
        self._arrays: dict[str, np.ndarray] = {}
        self._starts: dict[str, int] = {}

    def add(self, name: str, array: np.ndarray) -> None:
        if name in self.entries:
            raise ValueError(f"two arrays have a tensor of the name {name!r}")
        self.entries[name] = TensorEntry(array.dtype, tuple(array.shape))
        if array.nbytes <= self._space:
            self._arrays[name] = np.asarray(array)
            self._space -= array.nbytes
        else:
            self._starts[name] = self._file.tell()
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def read(self, name: str) -> np.ndarray:
        """A tensor, or its numbers in one axis."""
        if name in self._arrays:
            return self._arrays[name]
        self._file.seek(self._starts[name])
        entry = self.entries[name]
        return np.frombuffer(self._file.read(math.prod(entry.shape) * entry.dtype.itemsize), np.uint8).view(entry.dtype)


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
