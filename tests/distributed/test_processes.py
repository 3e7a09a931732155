"""Several processes on one machine get the bits of the replay in one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from distributed import process, replay

import jchop

TESTS = Path(__file__).resolve().parents[1]


def run_processes(script: Path, processes: int, *arguments: str, timeout: float = 240) -> list[str]:
    """What several processes of a script print: it gets a free port, their number, and the number of each."""
    started = start_processes(script, processes, *arguments)
    try:
        said = [each.communicate(timeout=timeout)[0] for each in started]
    finally:
        for each in started:
            each.kill()
    for each, text in zip(started, said, strict=True):
        assert each.returncode == 0, text[-3000:]
    return said


def start_processes(script: Path, processes: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """The processes of `run_processes`, which run on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = os.pathsep.join([str(Path(jchop.__file__).parents[1]), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    return [
        subprocess.Popen(
            [sys.executable, str(script), port, str(processes), str(number), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for number in range(processes)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "cases"),
    [(2, 2, "two_shot"), pytest.param(4, 2, "two_shot,ring,hierarchical,gather", marks=pytest.mark.slow)],
)
def test_processes_get_the_replayed_bits(processes: int, devices: int, cases: str, tmp_path: Path) -> None:
    run_processes(Path(process.__file__), processes, str(devices), str(tmp_path), cases)
    ranks = processes * devices
    x = np.random.default_rng(0).standard_normal((ranks, *process.SHAPE)).astype(np.float32)
    key = jax.random.key(7)
    wanted = {
        "two_shot": replay.psum(list(x), key),
        "ring": replay.psum(list(x), key, replay.ring),
        "hierarchical": replay.psum(list(x), key, replay.two_stages, processes, devices),
        "gather": replay.gather(x, replay.fold(key, 0)),
    }
    found = {}
    for number in range(processes):
        with np.load(tmp_path / f"{number}.npz") as file:
            found |= dict(file)
    assert set(found) == {f"{name} {rank}" for name in cases.split(",") for rank in range(ranks)}
    for name, value in found.items():
        np.testing.assert_array_equal(value.view(np.uint32), wanted[name.split()[0]].view(np.uint32), name)
