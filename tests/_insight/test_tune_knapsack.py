"""One choice for each group under a budget: against all choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jchop._insight.tune._search import front_of_sums


def test_the_front_is_that_of_all_choices() -> None:
    for seed in range(12):
        compare_with_all(seed)


def compare_with_all(seed: int) -> None:
    draw = np.random.default_rng(seed)
    groups, options = int(draw.integers(1, 7)), 3
    costs = draw.integers(1, 12, (groups, options)).tolist()
    scores = draw.normal(size=(groups, options)).round(2).tolist()
    every = [
        (sum(costs[i][j] for i, j in enumerate(chosen)), sum(scores[i][j] for i, j in enumerate(chosen)))
        for chosen in itertools.product(range(options), repeat=groups)
    ]
    front = front_of_sums(costs, scores)
    for budget in range(max(cost for cost, _ in every) + 1):
        found = next((one for one in reversed(front) if one.cost <= budget), None)
        best = min((score for cost, score in every if cost <= budget), default=None)
        assert (found is None) == (best is None)
        if found is not None:
            assert found.error == pytest.approx(best) and found.cost <= budget
            assert found.cost == sum(costs[i][j] for i, j in enumerate(found.assignment))
    ends = [(one.cost, one.error) for one in front]
    assert ends == sorted(ends) and [s for _, s in ends] == sorted((s for _, s in ends), reverse=True)
