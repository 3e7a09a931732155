"""A process that is killed while it saves leaves the last complete file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jchop

SCRIPT = Path(__file__).with_name("killed_saves.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_never_leave_a_torn_file(tmp_path: Path, kills: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(jchop.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    words = done.stdout.split()
    assert words[:2] == ["kills", f"{kills},"]
    assert int(words[5].rstrip(",")) >= kills // 5, done.stdout  # killed while a file was written
