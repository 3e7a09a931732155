"""One choice for each group at the least total score under a budget, exactly; plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KnapsackChoice", "choice_within_budget", "knapsack_front"]


@dataclass(frozen=True)
class KnapsackChoice:
    """A choice for each group.

    Args:
        cost: the sum of the costs.
        score: the sum of the scores.
        options: the number of the option of each group.
    """

    cost: int
    score: float
    options: tuple[int, ...]


def knapsack_front(costs: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> list[KnapsackChoice]:
    """The choices that no other one beats in cost and score, the cheapest first.

    Group by group, each choice so far is joined with each option, and those that another one beats are left out: a
    part of the best whole is the best part of its cost. So the front is exact, for any number of groups.

    Args:
        costs: an integer for each option of each group.
        scores: a number for each option of each group; less is better.
    """
    front = [KnapsackChoice(0, 0.0, ())]
    for group_costs, group_scores in zip(costs, scores, strict=True):
        candidates = [
            KnapsackChoice(one.cost + cost, one.score + score, (*one.options, option))
            for one in front
            for option, (cost, score) in enumerate(zip(group_costs, group_scores, strict=True))
        ]
        candidates.sort(key=lambda one: (one.cost, one.score, one.options))
        front = []
        for choice in candidates:
            if not front or choice.score < front[-1].score:
                front.append(choice)
    return front


def choice_within_budget(front: Sequence[KnapsackChoice], budget: int) -> KnapsackChoice | None:
    """The choice of the least score that costs no more than the budget; None if every one costs more."""
    return next((choice for choice in reversed(front) if choice.cost <= budget), None)
