"""Writes GGUF files: each array twice asked for, first for its type and bytes, then for the bytes themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jchop._checkpoints.gguf_blocks import GGUF_BLOCKS
from jchop._checkpoints.record import ModelArray, WriteJob
from jchop._common.files import write_atomically
from jchop.storage._array import QArray
from jchop.storage._files.gguf import GGUFWriter


def write_gguf(jobs: Sequence[WriteJob], target: Path, *, progress: Callable[[str, int, int], None]) -> None:
    """Writes arrays to a GGUF file, in one step.

    Raises:
        ValueError: for an array that no type of GGUF holds.
    """
    total, position = 2 * sum(job.nbytes for job in jobs), 0
    places: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for job in jobs:
        value = job.make()
        kind, data = _gguf_type_and_bytes(job.name, value)
        places[job.name] = (kind, tuple(value.shape), data.nbytes)
        position += job.nbytes
        progress(job.name, position, total)

    def write(file: Any) -> None:
        at = position
        writer = GGUFWriter(file, places, {"general.architecture": "unknown"})
        for job in jobs:
            writer.write(job.name, _gguf_type_and_bytes(job.name, job.make())[1])
            at += job.nbytes
            progress(job.name, at, total)
        writer.finish()

    write_atomically(target, write)


def _gguf_type_and_bytes(name: str, value: ModelArray) -> tuple[int, np.ndarray]:
    """The type of an array by number, and its bytes."""
    if not isinstance(value, QArray):
        for number, block in GGUF_BLOCKS.items():
            if block.dtype is not None and block.dtype == value.dtype:  # NumPy takes None for float64
                return number, np.ascontiguousarray(value)
        dtypes = ", ".join(str(block.dtype) for block in GGUF_BLOCKS.values() if block.dtype is not None)
        raise ValueError(f"{name!r} is of dtype {value.dtype}; a GGUF file has {dtypes}")
    reasons = []
    for number, block in GGUF_BLOCKS.items():
        if block.write is not None:
            try:
                return number, block.write(value)
            except ValueError as error:
                reasons.append(f"{block.name}: {error}")
    fits = ", ".join(block.fits for block in GGUF_BLOCKS.values() if block.write is not None)
    raise ValueError(f"{name!r} of {value.spec} cannot be written to a GGUF file ({'; '.join(reasons)}). It has {fits}")
