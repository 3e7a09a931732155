"""The example of a network trained in 8 bits runs, and shows what it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/torch_training.py"


def load():
    spec = importlib.util.spec_from_file_location("torch_training", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("words", ["--epochs 0 --hidden 8", pytest.param("--small", marks=pytest.mark.slow)])
def test_it_prints_a_row_for_each_recipe(words, monkeypatch, capsys):
    """The recipe learns, and to nearest without the accumulator it loses."""
    monkeypatch.setattr(sys, "argv", ["torch_training.py", *words.split()])
    example = load()
    example.main()
    rows = {line[:28].strip(): float(line[28:]) for line in capsys.readouterr().out.splitlines()}
    assert list(rows) == list(example.RECIPES)
    if words == "--small":
        nearest = rows.pop("e5m2 alone, to nearest")
        assert len(rows) == 3 and 0.7 < nearest + 0.02 < min(rows.values())
