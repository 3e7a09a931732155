"""Files rounded chunk by chunk: the same as whole, and whole or not there at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jchop as jc

ROOT = Path(__file__).resolve().parents[2]
KEY = jax.random.key(7)


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def rounded(folder: Path, x: np.ndarray, spec: Any, **options: Any) -> np.ndarray:
    np.save(folder / "in.npy", x)
    jc.round_file(folder / "in.npy", folder / "out.npy", spec, KEY, **options)
    assert sorted(path.name for path in folder.iterdir()) == ["in.npy", "out.npy"]
    return np.load(folder / "out.npy")


@pytest.mark.in_turn(13)
@pytest.mark.parametrize(
    ("spec", "x"),
    [
        ("e4m3:stochastic", numbers(7, 5, 3)),
        ("e4m3:stochastic", np.asfortranarray(numbers(7, 5, 3))),
        ("binary16:stochastic", numbers(41, dtype=np.float64)),
        ("e5m2:stochastic", numbers(6, 5).astype(np.complex64)),
        ("e5m2", numbers(6, 5).astype(">f4")),
        ("e5m2:stochastic", np.float16(1.1)),
        ("e5m2", numbers(0, 3)),
        ("int4(group=4):stochastic", np.asfortranarray(numbers(5, 24))),
        ("int8(channel=1):stochastic", numbers(4, 3, 8)),
        ("int8(channel=1):stochastic", np.asfortranarray(numbers(4, 3, 8))),
        ("nvfp4", np.asfortranarray(numbers(3, 4, 32))),
        ("int4(group=4)", numbers(0, 24)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype}{list(value.shape)}",
)
def test_chunks_are_the_whole(tmp_path: Path, spec: str, x: np.ndarray) -> None:
    x = np.asarray(x)
    got = rounded(tmp_path, x, spec, chunk=100)
    assert got.dtype == x.dtype.newbyteorder("=")
    np.testing.assert_array_equal(got, jc.round_to_format(x, spec, KEY))
    if jc.Spec(spec).scaled is None and x.ndim == 3:
        assert got.flags.f_contiguous == x.flags.f_contiguous


@pytest.mark.smoke
def test_progress_and_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, told = numbers(64), []
    rounded(tmp_path, x, "e5m2", chunk=64, progress=lambda done, total: told.append((done, total)))
    assert told == [(16 * i, 64) for i in range(5)]
    path = tmp_path / "in.npy"
    jc.round_file(path, path, "e5m2", progress=True)
    np.testing.assert_array_equal(np.load(path), jc.round_to_format(x, "e5m2"))
    assert capsys.readouterr().err.splitlines() == ["in.npy: 0 of 64 elements", "in.npy: 64 of 64 elements"]


def test_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "in.npy", tmp_path / "out.npy"
    np.save(source, numbers(4))
    np.save(tmp_path / "integers.npy", np.arange(3))
    (tmp_path / "text.npy").write_text("no array")
    target.write_bytes(b"old")
    for error, said, call in (
        (ValueError, "pass a typed key", lambda: jc.round_file(source, target, "e5m2:stochastic")),
        (ValueError, "must be the name of a .npy file", lambda: jc.round_file(source, tmp_path / "out.bin", "e5m2")),
        (ValueError, "chunk=0", lambda: jc.round_file(source, target, "e5m2", chunk=0)),
        (TypeError, "progress=3", lambda: jc.round_file(source, target, "e5m2", progress=3)),  # type: ignore[arg-type]
        (TypeError, "int64", lambda: jc.round_file(tmp_path / "integers.npy", target, "e5m2")),
        (ValueError, "src=.*is not a .npy file", lambda: jc.round_file(tmp_path / "text.npy", target, "e5m2")),
        (ValueError, "src=.*is a folder", lambda: jc.round_file(tmp_path, target, "e5m2")),
        (FileNotFoundError, "nothing", lambda: jc.round_file(tmp_path / "nothing.npy", target, "e5m2")),
    ):
        with pytest.raises(error, match=said):
            call()
    assert target.read_bytes() == b"old" and not list(tmp_path.glob(".*"))


@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed by SIGKILL")
def test_a_kill_a_pipe_and_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    """A kill leaves both files as they were. No pipe is waited for. Of mapped memory SIGBUS would be the end."""
    source, target = tmp_path / "in.npy", tmp_path / "out.npy"
    np.save(source, numbers(1000))
    before = source.read_bytes()
    for order in "CF":
        np.save(tmp_path / f"{order}.npy", np.asarray(numbers(256, 256), order=order))  # type: ignore[arg-type]
    os.mkfifo(tmp_path / "pipe.npy")
    code = f"""
import os, signal, sys, jchop as jc
os.chdir({str(tmp_path)!r})
def said(source, spec, **options):
    try:
        jc.round_file(source, "out.npy", spec, **options)
    except ValueError as error:
        print(error, flush=True)
said("pipe.npy", "e5m2")
for name in ("C.npy", "F.npy"):
    said(name, "int8(channel=0)", progress=lambda done, total: os.truncate(name, 20_000), chunk=8192)
print(sorted(os.listdir()), flush=True)
def tell(done, total):
    if done >= 500:
        os.kill(os.getpid(), signal.SIGKILL)
said("in.npy", "e5m2", progress=tell, chunk=400)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (killed.returncode, killed.stderr) == (-signal.SIGKILL, "")
    of_pipe, *of_short, there = killed.stdout.splitlines()
    assert of_pipe.endswith("is not a regular file, but a pipe or a device: it cannot be read in parts")
    assert len(of_short) == 2 and all(line.endswith("it became shorter while it was read") for line in of_short)
    assert there == "['C.npy', 'F.npy', 'in.npy', 'pipe.npy']"
    assert source.read_bytes() == before and not target.exists()
    assert len(list(tmp_path.glob(".out.npy.*.part"))) == 1
