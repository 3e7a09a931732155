"""The examples run, and show what they say."""

import sys

import numpy as np
import pytest
from example_cases import load


def test_harmonic_prints_and_draws(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "harmonic.png"
    monkeypatch.setattr(sys, "argv", ["harmonic.py", "--terms", "300", "--plot", str(picture)])
    load("harmonic").main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 8 and picture.read_bytes().startswith(b"\x89PNG")


def test_harmonic_stops_where_nearest_must_and_goes_on_stochastically():
    harmonic = load("harmonic")
    sums = {name: np.asarray(values) for name, values in harmonic.table(3000).items()}
    # In e5m2 the sum stays at 2: the next number is 2.5, and every term from 1/4 on is rounded away.
    assert sums["float8_e5m2"][-1] == 2.0 and sums["float8_e4m3fn"][-1] == 3.0
    assert sums["bfloat16"][-1] == 5.0625  # the well-known limit of bfloat16
    exact = np.cumsum(1 / np.arange(1, 3001))
    assert sums["binary16:stochastic"][-1] == pytest.approx(exact[-1], abs=0.3)
    assert sums["bfloat16:stochastic"][-1] == pytest.approx(exact[-1], abs=1.0)
