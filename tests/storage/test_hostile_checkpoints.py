"""Damaged checkpoints of every layout: a result or an error of one line; no crash, no hang, little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_checkpoints import search

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="timers and limits of POSIX, /proc of Linux")
@pytest.mark.parametrize("count", [400, pytest.param(8000, marks=pytest.mark.slow)])
def test_damaged_checkpoints(tmp_path: Path, count: int) -> None:
    """Some here, and thousands by a process of little memory."""
    if count == 400:
        assert search(tmp_path, 400) == []
        return
    argv = [sys.executable, str(ROOT / "tests/hostile_checkpoints.py"), str(tmp_path), str(count)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "0 faults", run.stdout[-4000:]
