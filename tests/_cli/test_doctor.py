"""`jchop doctor`: versions, devices of several kinds, and extras as pyproject.toml has them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jchop.__main__ import main
from jchop._cli import _info

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
#: Extras for work on jchop itself.
OTHERS = {"test", "aot", "docs", "dev", "all"}


def test_versions_and_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    settings = ("64-bit mode +off", "fast math of XLA +off", r"cpu +\d+ +XLA  ")
    for words in (f"jax +{jax.__version__}", f"numpy +{np.__version__}", *settings):
        assert re.search(words, out), out


@pytest.mark.parametrize(
    ("kind", "platform", "capability", "runs", "float8"),
    [
        ("TPU v5 lite", "tpu", None, "XLA, Pallas kernels", "float8 x float8 -> float32"),
        ("TPU v6 lite", "tpu", None, "XLA, Pallas kernels", "float8 x float8 -> float32"),
        ("TPU7x", "tpu", None, "XLA, Pallas kernels", "float8 x float8 -> float32"),
        ("NVIDIA H200", "gpu", "9.0", "XLA, Pallas kernels", "float8 x float8 -> float32"),
        ("NVIDIA A100-SXM4-80GB", "gpu", "8.0", "XLA, Pallas kernels", "float16 x float16 -> float32, widened: no"),
        ("Tesla V100-SXM2-16GB", "gpu", "7.0", "XLA", None),
    ],
)
def test_chips(
    kind: str, platform: str, capability: str | None, runs: str, float8: str | None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    chip = SimpleNamespace(device_kind=kind, platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [chip] * 4)
    assert main(["doctor", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["devices"]
    assert (row["device"], row["number"], row["runs"]) == (f"{platform}: {kind}", 4, runs)
    assert row["float8"] is None if float8 is None else row["float8"].startswith(float8)


def test_a_backend_that_does_not_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def devices() -> None:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "devices", devices)
    assert main(["doctor"]) == 0
    assert "no devices: Unable to initialize backend 'tpu'" in capsys.readouterr().out


def test_extras_are_those_of_the_project(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    extras = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(_info.USER_EXTRAS) == set(extras) - OTHERS

    def brought(extra: str) -> set[str]:
        found: set[str] = set()
        for text in extras[extra]:
            more = re.match(r"jchop\[(.*)\]", text)
            found |= set().union(*map(brought, more[1].split(","))) if more else {re.split(r"[\[>=]", text)[0]}
        return found

    for extra, (packages, _) in _info.USER_EXTRAS.items():
        assert set(packages) == brought(extra)
    monkeypatch.setattr(_info, "distribution_version", lambda name: None if name == "matplotlib" else "1")
    main(["doctor"])
    out = capsys.readouterr().out
    assert re.search(r'plot .* matplotlib missing +pip install "\.\[plot\]"', out)
    assert re.search(r"optax .* optax 1 +-\n", out)
