"""Kernels in programs over four chips: there where no data has to move for them, and nowhere else.

The programs are compiled for chips that are not there, by partitioned.py in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
from _kernels import compiling
from _kernels.test_compile import require_compiler

import jchop

SCRIPT = Path(__file__).with_name("partitioned.py")

#: Programs of partitioned.py, and whether a kernel stands in them.
PROGRAMS = {
    "one chip": True,
    "one chip, vmap": True,
    "one chip, vmap of keys": True,
    "one chip, keys": True,
    "auto mesh": False,
    "explicit mesh": False,
    "shard_map": True,
    "shard_map, explicit mesh": True,
    "shard_map, unchecked": True,
    "shard_map, keys": True,
}


@lru_cache
def report(target: str) -> dict[str, dict]:
    environment = os.environ | compiling.ENVIRONMENT | {"PYTHONPATH": str(Path(jchop.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), target], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_kernels_stand_where_no_data_moves(target: str, pytestconfig: pytest.Config) -> None:
    require_compiler(target, pytestconfig)
    found = report(target)
    assert {name: found[name].get("kernel") for name in PROGRAMS} == PROGRAMS
    assert {name: found[name]["collectives"] for name in PROGRAMS if found[name]["collectives"]} == {}


@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_pallas_is_refused_over_several_chips(target: str, pytestconfig: pytest.Config) -> None:
    require_compiler(target, pytestconfig)
    assert "jax.shard_map" in report(target)["pallas, auto mesh"]["error"]
