"""Arrays of .npz files for the commands: what is read, and damaged and hostile files."""

from __future__ import annotations

import io
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_case import each

from jchop._cli import _function_commands
from jchop._cli._function_commands import load_arrays


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def test_arrays_are_read(tmp_path: Path) -> None:
    """Compressed ones, too, also of zeros, whose file is small beside them."""
    x = {"a": np.arange(3.0), "zeros": np.zeros((1 << 10, 1 << 10))}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **x)
        found = load_arrays("--data", tmp_path / "x.npz")
        assert list(found) == list(x) and all((found[name] == x[name]).all() for name in x)


def _flagged(data: bytes, bit: int, method: int) -> bytes:
    """An archive of one member, with a flag and a method in both of its headers."""
    changed = bytearray(data)
    for place in (data.find(b"PK\3\4") + 6, data.find(b"PK\1\2") + 8):
        changed[place] |= bit
        changed[place + 2] = method
    return bytes(changed)


@each("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 1, 9, 93, 99])
def test_other_compression_is_refused(tmp_path: Path, method: int) -> None:
    whole = method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    path = archive(tmp_path / "x.npz", {"x.npy": npy(np.ones(9))}, method if whole else zipfile.ZIP_DEFLATED)
    path.write_bytes(_flagged(path.read_bytes(), 0, method))
    with pytest.raises(
        ValueError, match=r"--data .*x\.npz must be a \.npz file .*compressed in another way than deflate"
    ):
        load_arrays("--data", path)


def test_encryption_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", {"x.npy": npy(np.ones(9))})
    path.write_bytes(_flagged(path.read_bytes(), 1, zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match=r"'x\.npy' in it is encrypted"):
        load_arrays("--data", path)


@each("members", [1, 3])
def test_archives_of_much_memory_are_refused(tmp_path: Path, members: int, monkeypatch: Any) -> None:
    """A small file whose arrays take a thousand times its bytes together is an error before they are read."""
    monkeypatch.setattr(_function_commands, "_MAX_ARRAY_BYTES", 1 << 16)
    data = npy(np.zeros((1 << 17) // members))
    path = archive(tmp_path / "x.npz", {f"{i}.npy": data for i in range(members)})
    with pytest.raises(ValueError, match=r"its arrays take 1048\d+ bytes, over 64 times those of the file"):
        load_arrays("--data", path)
    monkeypatch.undo()
    assert len(load_arrays("--data", path)) == members


HUGE = (
    b"\x93NUMPY\1\0\x76\0"
    + b"{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999,), }".ljust(117)
    + b"\n"
)


@each(
    "said, data",
    [
        ("is no array", {"x.txt": b"hello"}),
        ("Unable to allocate", {"x.npy": HUGE}),
        ("single array", npy(np.ones(3))),
        ("not a zip file", b"hello"),
        ("has no array", {}),
    ],
)
def test_other_files_are_refused(tmp_path: Path, said: str, data: dict[str, bytes] | bytes) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(data) if isinstance(data, bytes) else archive(path, data)
    with pytest.raises(ValueError, match=said) as error:
        load_arrays("--data", path)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="FIFOs of POSIX")
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(ValueError, match="a pipe or a device"):
        load_arrays("--data", tmp_path / "x.npz")


@pytest.mark.parametrize("count", [100, pytest.param(6000, marks=pytest.mark.slow)])
def test_damaged_files_end_in_an_error(tmp_path: Path, count: int) -> None:
    """Whatever bytes differ: arrays, or a ValueError of one line."""
    path, originals = tmp_path / "x.npz", []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        originals.append(archive(path, {"x.npy": npy(np.ones((4, 4)))}, method).read_bytes())
    for seed in range(count):
        draw = random.Random(seed)
        data = bytearray(originals[seed % 2])
        for _ in range(draw.choice((1, 2, 8))):
            data[draw.randrange(len(data))] = draw.choice((0, 1, 128, 255, draw.randrange(256)))
        path.write_bytes(data[: draw.randrange(len(data))] if draw.random() < 0.2 else data)
        try:
            load_arrays("--data", path)
        except ValueError as error:
            assert "\n" not in str(error)
