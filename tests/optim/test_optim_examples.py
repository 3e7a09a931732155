"""The examples of low-precision training run, draw, and show what they say."""

# Optax types every state as a tree of arrays, which has no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportCallIssue=false
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_cases import load


@pytest.fixture
def rows(request: pytest.FixtureRequest, monkeypatch: Any, capsys: Any, tmp_path: Path) -> dict[str, list[float]]:
    """The numbers that an example prints at its small size, by row; it has drawn a picture too."""
    name, picture = request.param, tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--small", "--plot", str(picture)])
    load(name).main()
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert printed.pop() == f"wrote {picture}"
    columns = [line.split("  ") for line in printed[1:]]
    return {c[0].strip(): [float(x.strip().rstrip("%")) for x in c[1:] if x.strip()] for c in columns}


def nearest_stands_still_and_the_others_follow(rows: dict[str, list[float]]) -> None:
    first, last = rows["float32"]
    assert last < first
    for name in ("stochastic", "compensated"):
        assert abs(rows[f"bfloat16, {name}"][1] - last) < 0.2 * (first - last)
    assert rows["bfloat16, nearest"][1] - last > 0.5 * (first - last)


def packed_state_is_small_and_the_loss_the_same(rows: dict[str, list[float]]) -> None:
    assert rows["adamw_fp8"][0] < 0.3 * rows["optax.adamw"][0]
    assert rows["adamw_fp8"][2] < 2


def the_fp8_recipe_learns_as_float32_does(rows: dict[str, list[float]]) -> None:
    assert max(rows["float32"]) < 8 and max(rows["FP8 recipe"]) < 8


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    ("rows", "check"),
    [
        ("stagnation", nearest_stands_still_and_the_others_follow),
        ("optimizers", packed_state_is_small_and_the_loss_the_same),
        ("swalp", the_fp8_recipe_learns_as_float32_does),
    ],
    indirect=["rows"],
)
def test_an_example_shows_what_it_says(
    rows: dict[str, list[float]], check: Callable[[dict[str, list[float]]], None]
) -> None:
    check(rows)
