"""Damaged checkpoints of every layout: a result or an error of one line; no crash, no hang, little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_checkpoints import search

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="timers of POSIX")
def test_some_damaged_checkpoints(tmp_path: Path) -> None:
    assert search(tmp_path, 400) == []


@pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc of Linux")
@pytest.mark.slow
def test_thousands_of_damaged_checkpoints_in_little_memory(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "tests/hostile_checkpoints.py"), str(tmp_path), "20000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "0 faults", run.stdout[-4000:]
