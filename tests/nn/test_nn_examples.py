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


@pytest.mark.parametrize(
    ("name", "check", "more"),
    [
        ("qat_digits", digits, ["--steps", "150", "--tuning", "60", "--hidden", "32"]),
        pytest.param("accumulators", sums, [], marks=slow),
        pytest.param("transformer_training", transformer, [], marks=slow),
        pytest.param("ptq_transformer", packed, [], marks=slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_example_prints_and_draws(
    name: str, check: Any, more: list[str], monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example, picture = load(name), tmp_path / "drawn.png"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--small", *more, "--plot", str(picture)])
    example.main()
    check([line.split() for line in capsys.readouterr().out.splitlines()])
    assert picture.read_bytes().startswith(b"\x89PNG")


LEAST = {"int8 × int8": 39, "int8 × int8, 128": 39.5, "e4m3fn × e4m3fn": 28, "cache int8": 41, "int4, cache int8": 19}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("full", ()),
        pytest.param("rolling", ("int4, cache int8",), marks=slow),
        pytest.param("paged", tuple(LEAST), marks=slow),
    ],
)
def test_a_transformer_is_served_from_packed_weights_and_a_packed_cache(kind: str, names: tuple[str, ...]) -> None:
    """By default the tokens of two kinds of caches alone; then of width 128, depth 2, prompts of up to 48 tokens."""
    serving = load("serving")
    if kind == "full":  # a rolling cache attends to a window, which holds all tokens here
        sizes = serving.Sizes(width=16, depth=1, heads=2, kv_heads=1, letters=16, batch=2, prompt=16, window=24)
        choice = serving.Choice(serving.by_codes("int4(group=8)"), "int8(group=all)")
        params = serving.make(sizes)
        full, rolling = (serving.serve(params, choice, sizes, kind, 6).tokens for kind in ("full", "rolling"))
        np.testing.assert_array_equal(rolling, full)
        return
    rows = {name: (snr, served) for name, snr, served in serving.table(serving.SMALL, kind, 12, ("float32", *names))}
    assert {name: rows[name][0] for name in names if not LEAST[name] <= rows[name][0] < 60} == {}  # decibels
    exact, low = rows["float32"][1], rows["int4, cache int8"][1]
    assert low.weights < 0.3 * exact.weights and low.cache < 0.32 * exact.cache  # letters stay in float32
    assert exact.tokens.shape == low.tokens.shape == (4, 12)
