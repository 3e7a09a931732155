"""The programs of examples/hosts beside the libraries that they name: the same losses as by hand."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hosts

HOSTS = Path(__file__).resolve().parents[1] / "examples/hosts"
#: Packages of each program, and the largest difference from the numbers by hand. Tunix has another sum of the loss.
PROGRAMS = {
    "maxtext": (["flax"], 0.0),
    "keras_train": (["keras"], 0.0),
    "haliax_mlp": (["haliax", "aqt", "jmp", "jaxtyping", "equinox"], 0.0),
    "bonsai_qwen3": (["bonsai", "jaxtyping"], 0.0),
    "tunix_qlora": (["tunix", "metrax", "clu", "wrapt"], 2e-6),
}


def test_every_program_has_a_test() -> None:
    assert {path.stem for path in HOSTS.glob("*.py")} == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_trains_or_generates_as_by_hand(name: str) -> None:
    """In a process of its own, in which Keras has its backend."""
    packages, bound = PROGRAMS[name]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    root = str(HOSTS.parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", str(HOSTS / f"{name}.py")]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    differences = re.findall(r"by hand: ([\d.e-]+)$", ended.stdout, re.MULTILINE)
    assert differences and all(float(each) <= bound for each in differences), ended.stdout
    for ours, hand in re.findall(r"tokens: ([\d ]+) \| by hand: ([\d ]+) \|", ended.stdout):
        assert ours == hand
