"""Tensors of a safetensors file in parts: those of the devices of one process, read and written without the others."""

from __future__ import annotations

import itertools
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from jchop._common.files import atomic_file, part_path
from jchop.storage._files.safetensors import TensorEntry, TensorFile, header_of

Array = jax.Array


def spans_processes(leaf: Any) -> bool:
    """Whether a part of an array is in another process alone."""
    return isinstance(leaf, Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def contiguous_runs(shape: Sequence[int], index: Sequence[slice]) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of the runs of a part that are contiguous in C order, in that order.

    Args:
        shape: of the whole array.
        index: for each axis the part, of step 1.
    """
    bounds = [each.indices(n)[:2] for each, n in zip(index, shape, strict=True)]
    cut = [axis for axis, (n, (start, stop)) in enumerate(zip(shape, bounds, strict=True)) if (start, stop) != (0, n)]
    last = cut[-1] if cut else 0
    inner = math.prod(shape[last + 1 :])
    start, stop = bounds[last] if bounds else (0, 1)
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for places in itertools.product(*(range(*each) for each in bounds[:last])):
        before = sum(at * step for at, step in zip(places, steps, strict=False))
        yield before + start * inner, (stop - start) * inner


# -- reading -----------------------------------------------------------------------------------------------------------


def read_to_devices(file: TensorFile, name: str, sharding: Any) -> Array:
    """A tensor on the devices of a sharding; this process reads the parts of its own devices, one at a time."""
    entry = file.entries[name]
    last_part: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        bounds = tuple(each.indices(n)[:2] for each, n in zip(index, entry.shape, strict=True))
        if bounds not in last_part:
            last_part.clear()  # devices with the same part are neighbours, mostly
            last_part[bounds] = _read_part(file, name, bounds)
        return last_part[bounds]

    return jax.make_array_from_callback(entry.shape, sharding, part)


def _read_part(file: TensorFile, name: str, bounds: Sequence[tuple[int, int]]) -> np.ndarray:
    entry = file.entries[name]
    result = np.empty([stop - start for start, stop in bounds], entry.dtype)
    flat, at = result.reshape(-1), 0
    for start, count in contiguous_runs(entry.shape, [slice(*each) for each in bounds]):
        flat[at : at + count] = file.read(name, start, count)
        at += count
    return result


# -- writing -----------------------------------------------------------------------------------------------------------


def write_together(
    path: Path, tensors: Mapping[str, Any], entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]
) -> None:
    """Writes one file from all processes; each writes the parts of its devices, and the first one the other arrays.

    The new file has its name when all processes have written. If one of them fails, all raise an error, and the old
    file stays.

    Args:
        path: of the file, which is the same for all processes.
        tensors: arrays by name.
        entries: as from `place_tensors`.
        metadata: texts for the header.
    """
    from jax.experimental import multihost_utils

    for name, entry in entries.items():
        if entry.bits < 8:
            raise TypeError(f"leaf {name!r} of {entry.dtype}: several processes write whole bytes, not halves")
    header, first = header_of(entries, metadata), jax.process_index() == 0
    token = multihost_utils.broadcast_one_to_all(np.frombuffer(secrets.token_bytes(8), np.uint8)).tobytes().hex()
    with ExitStack() as stack:

        def begin() -> IO[bytes] | None:
            if not first:
                return None
            file = stack.enter_context(atomic_file(path, token))
            file.write(header)
            file.truncate(len(header) + sum(entry.nbytes for entry in entries.values()))
            file.flush()
            return file

        def write(file: IO[bytes] | None) -> None:
            mine = file or stack.enter_context(part_path(path, token).open("r+b"))
            for name, entry in entries.items():
                _write_own_parts(mine, len(header) + entry.start, entry, tensors[name], first)
            mine.flush()
            os.fsync(mine.fileno())

        shared_file = _in_all_processes(path, begin)
        _in_all_processes(path, lambda: write(shared_file))
        _in_all_processes(path, stack.close)


def _write_own_parts(file: IO[bytes], start: int, entry: TensorEntry, array: Any, first: bool) -> None:
    """Writes the parts of an array that this process answers for: each part is written by one process."""
    parts = [(tuple(slice(None) for _ in entry.shape), array)] if first else []
    if isinstance(array, Array) and not array.is_fully_addressable:
        parts = [(shard.index, shard.data) for shard in array.addressable_shards if shard.replica_id == 0]
    for index, data in parts:
        flat, at = np.ascontiguousarray(np.asarray(data), entry.dtype).reshape(-1), 0
        for place, count in contiguous_runs(entry.shape, index):
            file.seek(start + place * entry.dtype.itemsize)
            file.write(flat[at : at + count].view(np.uint8).data)
            at += count


def _in_all_processes(path: Path, action: Callable[[], Any]) -> Any:
    """The result of an action, when all processes have done it.

    Raises:
        OSError: if another process failed; its number is in the message.
    """
    from jax.experimental import multihost_utils

    result = fault = None
    try:
        result = action()
    except Exception as error:  # whatever it is, the others have to hear of it before it is raised
        fault = error
    successes = np.asarray(multihost_utils.process_allgather(np.int32(fault is None))).reshape(-1)
    if fault is not None:
        raise fault
    if not successes.all():
        processes = ", ".join(map(str, np.flatnonzero(~successes)))
        raise OSError(f"{path} is not written, since it failed in the processes {processes}; an old file is unchanged")
    return result
