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

from jchop._files import one_writer, open_regular, remove_parts, write_atomically
from jchop.storage._checkpoints.written import Job, Record, config_of, metadata_of, tensors_of
from jchop.storage._files.json import document
from jchop.storage._files.safetensors import Entry, TensorWriter, lay_out
from jchop.storage._files.shards import CONFIG, INDEX, JOURNAL, SINGLE

#: Bytes of arrays that make one file, and the most that are in memory together, except for a larger array.
SHARD = 1 << 28
Progress = Callable[[str, int, int], None]


def write_folder(
    jobs: Sequence[Job],
    target: Path,
    layout: str,
    *,
    config: Mapping[str, Any],
    exact: bool,
    shard_bytes: int,
    run: str,
    others: Sequence[Path] = (),
    progress: Progress,
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
    plan = _plan(jobs, shard_bytes)
    facts = [run, layout, exact, [[job.name for job in part] for part in plan]]
    names = [SINGLE] if len(plan) == 1 else [_shard(number, len(plan)) for number in range(len(plan))]
    position, total = 0, sum(job.nbytes for job in jobs)
    with one_writer(target):
        records = _begin(target, facts, names if run else [])
        remove_parts(target, [*names, JOURNAL, INDEX, CONFIG, *(path.name for path in others)])
        continues = bool(records)
        try:
            for number, (name, part) in enumerate(zip(names, plan, strict=True)):
                if number == len(records):
                    tell = _after(progress, position, total)
                    records.append(_write(target / name, part, layout, exact, shard_bytes, tell))
                    _write_journal(target, facts, records)
                position += sum(job.nbytes for job in part)
                progress(name, position, total)
            _finish(target, names, records, layout, config)
            _copy(others, target)
        except BaseException as error:
            if not run or not records or isinstance(error, ValueError):  # no run goes on, or it would end here, too
                for name in (*names, INDEX, JOURNAL):
                    (target / name).unlink(missing_ok=True)
            raise
        (target / JOURNAL).unlink()  # the last step: without it the same call goes on
    return continues


def _finish(
    target: Path, names: Sequence[str], records: Sequence[Mapping[str, Any]], layout: str, config: Mapping[str, Any]
) -> None:
    """Writes the index and the configuration."""
    record = Record()
    for one in records:
        record.rows |= one["rows"]
        record.plain |= one["plain"]
    full_config = config_of(layout, config, record)
    if len(names) > 1:
        homes = {tensor: name for name, one in zip(names, records, strict=True) for tensor in one["tensors"]}
        _write_json(
            target / INDEX, {"metadata": {"total_size": sum(one["size"] for one in records)}, "weight_map": homes}
        )
    if full_config:
        _write_json(target / CONFIG, full_config)


def _shard(number: int, count: int) -> str:
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def _copy(others: Sequence[Path], target: Path) -> None:
    for path in others:
        if not (target / path.name).exists():
            with open_regular(path) as file:
                mode = os.fstat(file.fileno()).st_mode & 0o777
                write_atomically(target / path.name, lambda out, file=file: shutil.copyfileobj(file, out), mode)


def write_file(jobs: Sequence[Job], target: Path, layout: str, *, exact: bool, progress: Progress) -> None:
    """Writes arrays to one file, in one step."""
    _write(target, jobs, layout, exact, SHARD, _after(progress, 0, sum(job.nbytes for job in jobs)), config=False)


def _plan(jobs: Sequence[Job], shard_bytes: int) -> list[list[Job]]:
    plan: list[list[Job]] = [[]]
    size = 0
    for job in jobs:
        if plan[-1] and size + job.nbytes > shard_bytes:
            plan.append([])
            size = 0
        plan[-1].append(job)
        size += job.nbytes
    return plan


def _begin(target: Path, facts: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """The facts of the finished files, of such names, of an unfinished run of the same arrays."""
    journal = target / JOURNAL
    if journal.exists():
        with open_regular(journal) as file:
            try:
                content = document(file.read().decode("utf-8"))
                if content["run"] == _digest(facts, content["done"]):
                    there = zip(names, content["done"], strict=False)
                    return [one for _, one in itertools.takewhile(lambda pair: (target / pair[0]).exists(), there)]
            except (ValueError, KeyError, TypeError):
                pass
        raise ValueError(
            f"{target} has an unfinished run of other arrays or options: remove the folder, or repeat that run"
        )
    if tensors := sorted(path.name for path in target.iterdir() if path.suffix == ".safetensors" or path.name == INDEX):
        raise ValueError(f"{target} has tensors already ({tensors[0]}); write to a new folder")
    _write_journal(target, facts, [])
    return []


def _write_journal(target: Path, facts: Any, records: Sequence[Any]) -> None:
    _write_json(target / JOURNAL, {"run": _digest(facts, records), "done": records})


def _digest(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _after(progress: Progress, before: int, total: int) -> Callable[[str, int], None]:
    return lambda name, count: progress(name, before + count, total)


def _write(
    path: Path,
    jobs: Sequence[Job],
    layout: str,
    exact: bool,
    most: int,
    progress: Callable[[str, int], None],
    config: bool = True,
) -> dict[str, Any]:
    """Writes one file, with at most so many bytes of tensors in memory; the record of it."""
    record, position = Record(config=config), 0
    with tempfile.TemporaryFile(dir=path.parent) as file:
        tensors = _Tensors(file, most)
        for job in jobs:
            for name, array in tensors_of(layout, job.name, job.make(), exact, record).items():
                tensors.add(name, array)
            position += job.nbytes
            progress(job.name, position)
        entries = lay_out(tensors.entries)

        def write(file: Any) -> None:
            writer = TensorWriter(file, entries, metadata_of(layout, record))
            for name in entries:
                writer.write(name, tensors.read(name))
            writer.finish()

        write_atomically(path, write)
    size = sum(entry.nbytes for entry in entries.values())
    return {"rows": record.rows, "plain": record.plain, "tensors": list(entries), "size": size}


class _Tensors:
    """Tensors that are kept until the header of their file is known: some in memory, the others in a file."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self.entries: dict[str, Entry] = {}
        self._file, self._space = file, most
        self._arrays: dict[str, np.ndarray] = {}
        self._starts: dict[str, int] = {}

    def add(self, name: str, array: np.ndarray) -> None:
        if name in self.entries:
            raise ValueError(f"two arrays have a tensor of the name {name!r}")
        self.entries[name] = Entry(array.dtype, tuple(array.shape))
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
