"""The examples of emulated arithmetic run, draw, and show what they say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_cases import load
from further import Further

further = Further()

Lines = list[list[str]]


@pytest.fixture
def run(monkeypatch: Any, capsys: Any, tmp_path: Path) -> Callable[[str], Lines]:
    """The words that an example prints at its small size; it has drawn a picture too."""

    def lines(command: str) -> Lines:
        (name, *words), picture = command.split(), tmp_path / "picture.png"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--small", *words, "--plot", str(picture)])
        load(name).main()
        assert picture.read_bytes().startswith(b"\x89PNG")
        printed = capsys.readouterr().out.splitlines()
        assert printed.pop() == f"wrote {picture}"
        return [line.replace("|", " ").split() for line in printed]

    return lines


def factors_are_off_by_a_few_units(lines: Lines) -> None:
    assert lines[0] == ["float8_e4m3", "bfloat16", "binary16"] and [line[0] for line in lines[1:]] == [
        "LU",
        "QR",
        "Cholesky",
    ]
    assert all(0.05 < float(line[i]) < 10 for line in lines[1:] for i in (1, 3, 5))


def refinement_needs_gmres_at_condition_1e5(lines: Lines) -> None:
    head, _, easy, _, hard, _ = lines
    assert head == ["κ", "binary16,", "lu", "binary16,", "gmres(6)"]
    assert 10 <= float(easy[0]) < 100 and 1e5 <= float(hard[0]) < 1e6
    good = [cell.startswith("**") for cell in (*easy[1:], *hard[1:])]
    assert good == [True, True, False, True]


def refinement_in_double_precision(lines: Lines) -> None:
    _, _, easy, _, hard, _ = lines
    assert [cells[2].startswith("**") and float(cells[2].strip("*")) < 2.0**-52 for cells in (easy, hard)] == [
        True,
        True,
    ]
    assert float(easy[1].strip("*")) < 1e-9 < 1e-7 < float(hard[1])


def a_long_sum_to_nearest_is_lost_but_in_pairs_or_stochastically(lines: Lines) -> None:
    assert lines[0] == ["n", "64", "512", "4096"]
    errors = {" ".join(line[:-3]): [float(word) for word in line[-3:]] for line in lines[1:]}
    short, _, long = errors["sequential"]
    assert short < 0.05 and long > 0.8
    others = [errors[name] for name in ("blocked(32)", "pairwise", "stochastic", "stochastic, pairwise")]
    assert max(map(max, others)) < 0.1
    assert all(error < bound for error, bound in zip(errors["stochastic"], errors["√n u"], strict=True))


def sums_of_512_positive_fp8_numbers_need_promotion(lines: Lines) -> None:
    assert lines[1] == ["products", "128", "512"]
    errors = {" ".join(line[:-2]): float(line[-1]) for line in lines[2:6]}
    assert errors["Hopper"] > 0.005 > 0.001 > errors["Hopper, promoted every 128"] > 1e-4 > 1e-6 > errors["Blackwell"]


def the_lorenz_system_stands_still_to_nearest_and_not_stochastically(lines: Lines) -> None:
    assert [line[0] for line in lines[1:]] == ["float8_e5m2:stochastic", "bfloat16", "bfloat16:stochastic"]
    eight, nearest, stochastic = lines[1:]
    assert nearest[3:] == ["0", "of", "100"] and int(stochastic[3]) > 90
    assert 20 < float(stochastic[1]) < 28 and 6 < float(stochastic[2]) < 11  # as in binary32: 23.9 and 8.5
    assert 20 < float(eight[1]) < 28


def a_step_of_the_lorenz_system_is_eulers() -> None:
    import jax

    lorenz = load("lorenz")
    state = np.array([1.5, 2.5, 20.0], np.float32)
    got = lorenz.step(jax.numpy.asarray(state), 2.0**-6, "binary32", jax.random.key(0))
    x, y, z = state.astype(float)
    slopes = np.array([10 * (y - x), x * (28 - z) - y, x * y - lorenz.BETA * z])
    np.testing.assert_allclose(got, state + slopes * 2.0**-6, rtol=1e-6)


EXAMPLES: dict[str, Callable[[Lines], None]] = {
    "tensor_cores": sums_of_512_positive_fp8_numbers_need_promotion,
    "summation": a_long_sum_to_nearest_is_lost_but_in_pairs_or_stochastically,
    "backward_error": factors_are_off_by_a_few_units,
    "refinement": refinement_needs_gmres_at_condition_1e5,
    "refinement --working binary64": refinement_in_double_precision,
    "lorenz": the_lorenz_system_stands_still_to_nearest_and_not_stochastically,
}


@further.first
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("command", ["a step of lorenz", *EXAMPLES])
def an_example_shows_what_it_says(command: str, run: Callable[[str], Lines]) -> None:
    if command == "a step of lorenz":
        a_step_of_the_lorenz_system_is_eulers()
    else:
        EXAMPLES[command](run(command))


test_further = further.test()
