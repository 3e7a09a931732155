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


def test_the_recipe_learns():
    example = load()
    assert example.train(example.IBM, 3, 16) > 0.7


def test_it_prints_a_row_for_each_recipe(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torch_training.py", "--epochs", "0", "--hidden", "8"])
    example = load()
    example.main()
    assert [line[:28].strip() for line in capsys.readouterr().out.splitlines()] == list(example.RECIPES)


def test_nearest_loses_without_the_accumulator(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torch_training.py", "--small"])
    load().main()
    rows = {line[:28].strip(): float(line[28:]) for line in capsys.readouterr().out.splitlines()}
    nearest = rows.pop("e5m2 alone, to nearest")
    assert len(rows) == 3 and nearest < min(rows.values()) - 0.02
