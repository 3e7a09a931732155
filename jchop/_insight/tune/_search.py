"""The cheapest formats for sites, by errors that are measured or that add up; plain Python, no JAX."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

#: The level of each site, a place in the menu.
LevelAssignment = tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """An assignment of levels to sites, its cost and its error."""

    assignment: LevelAssignment
    cost: float
    error: float


class _BudgetError(Exception):
    """The budget is spent."""


@dataclass
class AssignmentSearch:
    """A search, which measures every assignment at most once.

    Args:
        sites: their number.
        levels: the number of formats.
        measure: the error of an assignment; NaN counts as infinite.
        cost: the cost of an assignment.
        tolerance: the largest error allowed.
        evaluations: the most measurements.
        seconds: the most seconds; None for any number.
        progress: called after each measurement with their number, the most, and the cheapest assignment within the
            tolerance, if one is known.
        trials: all that was measured.
    """

    sites: int
    levels: int
    measure: Callable[[LevelAssignment], float]
    cost: Callable[[LevelAssignment], float]
    tolerance: float
    evaluations: int
    seconds: float | None = None
    progress: Callable[[int, int, Trial | None], None] | None = None
    trials: dict[LevelAssignment, Trial] = field(default_factory=dict)
    best: Trial | None = None
    out_of_budget: bool = False

    def run(self) -> Trial | None:
        """The cheapest assignment found within the tolerance; None if there is none.

        The search starts from the uniform assignment of the smallest error, and from the cheapest feasible one. It
        lowers the site with the least error per saved cost, as long as the tolerance allows; then it exchanges pairs.
        """
        self._end = None if self.seconds is None else time.monotonic() + self.seconds
        try:
            uniform = [self._trial((level,) * self.sites) for level in range(self.levels)]
            finest = min(uniform, key=lambda trial: (trial.error, trial.cost))
            starts = [self._reduce_error(finest)]
            feasible = [trial for trial in uniform if trial.error <= self.tolerance]
            starts += [min(feasible, key=lambda trial: (trial.cost, trial.error))] if feasible else []
            lowest = min(uniform, key=lambda trial: (trial.cost, trial.error))
            starts += [self._raise_levels(lowest)]
            for start in dict.fromkeys(trial for trial in starts if trial is not None):
                self._exchange_levels(self._lower_levels(start))
        except _BudgetError:
            self.out_of_budget = True
        return self.best

    def within_tolerance(self, most: int) -> list[Trial]:
        """The cheapest measured assignments within the tolerance, the cheapest first."""
        trials = [trial for trial in self.trials.values() if trial.error <= self.tolerance]
        return sorted(trials, key=lambda trial: (trial.cost, trial.error, trial.assignment))[:most]

    def front(self) -> list[Trial]:
        """The measured assignments that no other one beats in cost and error, the cheapest first."""
        return pareto_front(trial for trial in self.trials.values() if math.isfinite(trial.error))

    def _trial(self, assignment: LevelAssignment) -> Trial:
        """The measured error and the cost of an assignment; each is measured once, within the budget."""
        if assignment in self.trials:
            return self.trials[assignment]
        if len(self.trials) >= self.evaluations or (self._end is not None and time.monotonic() > self._end):
            raise _BudgetError
        error = self.measure(assignment)
        trial = Trial(assignment, self.cost(assignment), math.inf if math.isnan(error) else error)
        self.trials[assignment] = trial
        is_better = self.best is None or (trial.cost, trial.error) < (self.best.cost, self.best.error)
        if trial.error <= self.tolerance and is_better:
            self.best = trial
        if self.progress is not None:
            self.progress(len(self.trials), self.evaluations, self.best)
        return trial

    def _neighbour(self, trial: Trial, *moves: tuple[int, int]) -> LevelAssignment:
        """An assignment with other levels at some sites; a move is (site, level)."""
        levels = list(trial.assignment)
        for site, level in moves:
            levels[site] = level
        return tuple(levels)

    def _moves(self, trial: Trial) -> list[tuple[int, int]]:
        """Every change of one site of an assignment, as (site, level)."""
        return [(s, v) for s in range(self.sites) for v in range(self.levels) if v != trial.assignment[s]]

    def _lower_levels(self, current: Trial) -> Trial:
        """Lowers one site after the other, always with the least error per saved cost.

        A move waits with the score of its last measurement. It is measured again when it comes first, and taken if it
        is still first.
        """
        queue: list[tuple[float, float, int, int]] = []
        for site, level in self._moves(current):
            self._queue_move(queue, current, site, level)
        while queue:
            _, _, site, level = heapq.heappop(queue)
            if level == current.assignment[site]:
                continue
            remeasured: list[tuple[float, float, int, int]] = []
            self._queue_move(remeasured, current, site, level)
            if not remeasured:
                continue
            if queue and queue[0] < remeasured[0]:
                heapq.heappush(queue, remeasured[0])
                continue
            current = self._trial(self._neighbour(current, (site, level)))
        return current

    def _queue_move(self, queue: list[tuple[float, float, int, int]], current: Trial, site: int, level: int) -> None:
        assignment = self._neighbour(current, (site, level))
        saving = current.cost - self.cost(assignment)
        if saving <= 0:
            return
        trial = self._trial(assignment)
        if trial.error <= self.tolerance:
            heapq.heappush(queue, ((trial.error - current.error) / saving, -saving, site, level))

    def _raise_levels(self, current: Trial) -> Trial | None:
        """From a cheap assignment, the changes that lower the error most for their cost, until it is allowed."""
        while current.error > self.tolerance:
            trials = [self._trial(self._neighbour(current, move)) for move in self._moves(current)]
            trials = [trial for trial in trials if trial.error < current.error and trial.cost > current.cost]
            if not trials:
                return None

            def worth(trial: Trial, current: Trial = current) -> float:
                gain = current.error - max(trial.error, self.tolerance)
                return math.inf if math.isinf(current.error) else gain / (trial.cost - current.cost)

            current = max(trials, key=lambda trial: (worth(trial), -trial.error, -trial.cost))
        return current

    def _reduce_error(self, now: Trial) -> Trial | None:
        """From an assignment of small error, the changes that lower it most, until it is allowed."""
        while now.error > self.tolerance:
            best = min(
                (self._trial(self._neighbour(now, move)) for move in self._moves(now)), key=lambda trial: trial.error
            )
            if best.error >= now.error:
                return None
            now = best
        return now

    def _exchange_levels(self, current: Trial | None) -> None:
        """Exchanges: one site changes its level, or one is lowered and another one changes, if that is cheaper."""
        while current is not None:
            current = self._cheaper_neighbour(current)

    def _cheaper_neighbour(self, current: Trial) -> Trial | None:
        """The costliest allowed assignment below the cost of `current` that changes one or two sites; None for none."""
        moves = self._moves(current)
        pairs = [((s, v), (t, w)) for s, v in moves for t, w in moves if s < t]
        assignments = [self._neighbour(current, *change) for change in [*((move,) for move in moves), *pairs]]
        cheaper = [(-cost, assignment) for assignment in assignments if (cost := self.cost(assignment)) < current.cost]
        # Options that save little are the likeliest to be allowed; their savings add up.
        for _, assignment in sorted(cheaper):
            trial = self._trial(assignment)
            if trial.error <= self.tolerance:
                return trial
        return None


def pareto_front(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that no other one beats in cost and error, the cheapest first."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (trial.cost, trial.error, trial.assignment)):
        if not front or trial.error < front[-1].error:
            front.append(trial)
    return front


def front_of_sums(costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]]) -> list[Trial]:
    """The front of assignments whose costs and errors are sums over the sites.

    Site by site, each assignment so far is joined with each level. Assignments that another one beats are left out: a
    part of the best whole is the best part of its cost. So the front is exact, for any number of sites.

    Args:
        costs: a number for each level of each site.
        errors: a number for each level of each site; less is better.
    """
    front = [Trial((), 0, 0.0)]
    for site_costs, site_errors in zip(costs, errors, strict=True):
        levels = list(enumerate(zip(site_costs, site_errors, strict=True)))
        front = pareto_front(
            Trial((*trial.assignment, level), trial.cost + cost, trial.error + error)
            for trial in front
            for level, (cost, error) in levels
        )
    return front
