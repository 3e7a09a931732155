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
from further import Further

import jchop

further = Further()

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


ALL = "two_shot,ring,hierarchical,gather,scatter,exchange,permute"


@further.first
@pytest.mark.parametrize(
    ("processes", "devices", "names"), [(1, 2, "gather,permute"), pytest.param(4, 2, ALL, marks=pytest.mark.slow)]
)
def processes_get_the_replayed_bits(processes: int, devices: int, names: str, tmp_path: Path) -> None:
    """And so does one process, which needs no other to be started."""
    if processes > 1:
        run_processes(Path(process.__file__), processes, str(devices), str(tmp_path), names)
    ranks = processes * devices
    x = np.random.default_rng(0).standard_normal((ranks, *process.SHAPE)).astype(np.float32)
    key = jax.random.key(7)
    own, pieces = replay.fold(key, 0), np.stack([process.pieces_of(each, ranks) for each in x])
    sent = [
        [replay.sent(piece, replay.fold(own, replay.SEND, 0, rank), to) for to, piece in enumerate(pieces[rank])]
        for rank in range(ranks)
    ]
    moved = np.zeros_like(x)
    for source, target in process.turned(ranks):
        moved[target] = replay.sent(x[source], replay.fold(own, replay.SEND, 0), source)
    wanted = {
        "two_shot": replay.psum(list(x), key),
        "ring": replay.psum(list(x), key, replay.ring),
        "hierarchical": replay.psum(list(x), key, replay.two_stages, processes, devices),
        "gather": replay.gather(x, own),
    }
    each = {"scatter": replay.exchange(pieces, own), "exchange": np.stack(sent).swapaxes(0, 1), "permute": moved}
    found = {} if processes > 1 else process.shards_of(processes, devices, names)
    for number in range(processes if processes > 1 else 0):
        with np.load(tmp_path / f"{number}.npz") as file:
            found |= dict(file)
    assert set(found) == {f"{name} {rank}" for name in names.split(",") for rank in range(ranks)}
    for name, value in found.items():
        case, rank = name.split()
        same = each[case][int(rank)] if case in each else wanted[case]
        np.testing.assert_array_equal(value.view(np.uint32), np.asarray(same).view(np.uint32), name)


test_further = further.test()
