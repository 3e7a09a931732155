"""The examples run, and show that training in a few bits works."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_cases import EXAMPLES, load
from flax import nnx

import jchop as jc

pytestmark = pytest.mark.slow


def test_the_example_prints_and_draws(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    digits, picture = load("qat_digits"), tmp_path / "digits.png"
    monkeypatch.setattr(sys, "argv", ["qat_digits.py", "--small", "--plot", str(picture)])
    digits.main()
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[0] == "weights" and [line[0] for line in lines] == ["float32", *digits.FORMATS[::2]]
    float32, _, two_bits = (list(map(float, line[1:])) for line in lines)
    assert two_bits[0] < float32[0] - 0.1 and two_bits[1] > float32[1] - 0.03
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_two_bits_lose_nothing_once_trained() -> None:
    digits = load("qat_digits")
    before, after, size = digits.run(digits.FORMATS[-1:], steps=600, tuning=300)[digits.FORMATS[-1]]
    assert before < 0.97 and after >= 0.98
    assert size < 26_000  # of 340,008


def test_training_in_stochastic_e5m2_is_as_good_as_in_float32() -> None:
    digits = load("qat_digits")
    x, y, test_x, test_y = digits.data()
    plain = digits.Network(256, rngs=nnx.Rngs(0))
    rule = jc.nn.Rule(weight="e5m2", activation="e5m2:stochastic", gradient="e5m2:stochastic")
    rounded = jc.nn.quantize(plain, rule, rngs=nnx.Rngs(rounding=0))
    for model in (plain, rounded):
        digits.train(model, x, y, steps=600, rate=1e-3, seed=0)
    assert digits.accuracy(rounded, test_x, test_y) >= digits.accuracy(plain, test_x, test_y) - 0.005


def test_sums_in_e5m2_collapse_to_nearest_and_not_stochastically(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    accumulators, picture = load("accumulators"), tmp_path / "accumulators.png"
    monkeypatch.setattr(sys, "argv", ["accumulators.py", "--small", "--plot", str(picture)])
    accumulators.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    nearest, stochastic = (float(row[1]) for row in rows)
    assert nearest < stochastic - 0.05
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_transformer_learns_in_eight_bits(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    training, picture = load("transformer_training"), tmp_path / "training.png"
    monkeypatch.setattr(sys, "argv", ["transformer_training.py", "--small", "--plot", str(picture)])
    training.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    exact, rounded = (float(line[-1]) for line in lines)
    assert exact < 3.4 and abs(rounded - exact) < 0.1 and picture.read_bytes().startswith(b"\x89PNG")


def test_the_transformer_is_packed(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    packing, picture = load("ptq_transformer"), tmp_path / "packing.png"
    monkeypatch.setattr(sys, "argv", ["ptq_transformer.py", "--small", "--plot", str(picture)])
    packing.main()
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    exact, eight, four = (float(rows[name][0]) for name in ("float32", "mxfp8_e4m3", "mxfp4"))
    assert abs(eight - exact) < 0.02 * exact and exact < four < 1.3 * exact
    assert int(rows["mxfp4"][1]) < 0.17 * int(rows["float32"][1]) and picture.read_bytes().startswith(b"\x89PNG")


LEAST = {"int8 × int8": 39, "int8 × int8, 128": 39.5, "e4m3fn × e4m3fn": 28, "cache int8": 41, "int4, cache int8": 19}


@pytest.mark.parametrize(("kind", "names"), [("paged", tuple(LEAST)), ("rolling", ("int4, cache int8",))])
def test_a_transformer_is_served_from_packed_weights_and_a_packed_cache(kind: str, names: tuple[str, ...]) -> None:
    """Width 128, depth 2, prompts of up to 48 tokens; decibels of all their logits."""
    serving = load("serving")
    rows = {name: (snr, served) for name, snr, served in serving.table(serving.SMALL, kind, 12, ("float32", *names))}
    assert {name: rows[name][0] for name in names if not LEAST[name] <= rows[name][0] < 60} == {}
    exact, packed = rows["float32"][1], rows["int4, cache int8"][1]
    assert packed.weights < 0.3 * exact.weights and packed.cache < 0.32 * exact.cache  # letters stay in float32
    assert exact.tokens.shape == packed.tokens.shape == (4, 12)


def test_kinds_of_caches_serve_the_same_tokens() -> None:
    """A rolling cache attends to a window, which holds all tokens here."""
    serving = load("serving")
    sizes = serving.Sizes(width=64, depth=1, heads=4, letters=32, prompt=20, window=40)
    tokens = [
        serving.serve(serving.make(sizes), serving.CHOICES["cache int8"], sizes, kind, 8).tokens
        for kind in ("full", "rolling", "paged")
    ]
    np.testing.assert_array_equal(tokens[1], tokens[0])
    np.testing.assert_array_equal(tokens[2], tokens[0])
