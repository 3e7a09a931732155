"""The examples run, and show that training in a few bits works."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_cases import EXAMPLES, load

slow = pytest.mark.slow


def digits(rows: list[list[str]]) -> None:
    """Two bits lose accuracy, and training brings it back."""
    (head, *_), *lines = rows
    assert head == "weights" and len(lines) == 3 and lines[0][0] == "float32"
    float32, _, two_bits = (list(map(float, line[1:])) for line in lines)
    assert two_bits[0] < float32[0] - 0.1 and two_bits[1] > float32[1] - 0.03


def sums(rows: list[list[str]]) -> None:
    """Sums in e5m2 collapse to nearest, and not stochastically."""
    nearest, stochastic = (float(row[1]) for row in rows[1:])
    assert nearest < stochastic - 0.05


def transformer(rows: list[list[str]]) -> None:
    """It learns in eight bits."""
    exact, rounded = (float(row[-1]) for row in rows)
    assert exact < 3.4 and abs(rounded - exact) < 0.1


def packed(rows: list[list[str]]) -> None:
    """It is packed."""
    table = {row[0]: row[1:] for row in rows[1:]}
    exact, eight, four = (float(table[name][0]) for name in ("float32", "mxfp8_e4m3", "mxfp4"))
    assert abs(eight - exact) < 0.02 * exact and exact < four < 1.3 * exact
    assert int(table["mxfp4"][1]) < 0.17 * int(table["float32"][1])


CHECKS = {"qat_digits": digits, "accumulators": sums, "transformer_training": transformer, "ptq_transformer": packed}
LEAST = {"int8 × int8": 39, "int8 × int8, 128": 39.5, "e4m3fn × e4m3fn": 28, "cache int8": 41, "int4, cache int8": 19}


def serve(kind: str, names: tuple[str, ...]) -> None:
    """Width 128, depth 2, prompts of up to 48 tokens; decibels of all their logits."""
    serving = load("serving")
    rows = {name: (snr, served) for name, snr, served in serving.table(serving.SMALL, kind, 12, ("float32", *names))}
    assert {name: rows[name][0] for name in names if not LEAST[name] <= rows[name][0] < 60} == {}
    exact, low = rows["float32"][1], rows["int4, cache int8"][1]
    assert low.weights < 0.3 * exact.weights and low.cache < 0.32 * exact.cache  # letters stay in float32
    assert exact.tokens.shape == low.tokens.shape == (4, 12)


@pytest.mark.parametrize(
    "name", ["two bits", *(pytest.param(name, marks=slow) for name in (*CHECKS, "paged", "rolling", "kinds of caches"))]
)
def test_an_example_shows_what_it_says(name: str, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    if name == "two bits":
        example = load("qat_digits")
        table = example.run(example.FORMATS[-1:], steps=150, tuning=60, hidden=32)
        (exact, *_), (before, after, size) = table["float32"], table[example.FORMATS[-1]]
        assert before < exact - 0.1 and after > exact - 0.03 and size < 1500  # of 13,864 bytes
    elif name in ("paged", "rolling"):
        serve(name, tuple(LEAST) if name == "paged" else ("int4, cache int8",))
    elif name == "kinds of caches":  # a rolling cache attends to a window, which holds all tokens here
        example = load("serving")
        sizes = example.Sizes(width=64, depth=1, heads=4, letters=32, prompt=20, window=40)
        params, choice = example.make(sizes), example.CHOICES["cache int8"]
        full, *others = (example.serve(params, choice, sizes, kind, 8).tokens for kind in ("full", "rolling", "paged"))
        for tokens in others:
            np.testing.assert_array_equal(tokens, full)
    else:
        picture = tmp_path / "drawn.png"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--small", "--plot", str(picture)])
        load(name).main()
        CHECKS[name]([line.split() for line in capsys.readouterr().out.splitlines()])
        assert picture.read_bytes().startswith(b"\x89PNG")
