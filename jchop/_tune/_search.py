"""The cheapest assignment of levels to sites whose measured error is within a tolerance; plain Python, no JAX."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Found", "Search"]

#: The level of each site, a place in the menu.
Assignment = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A measured assignment."""

    assignment: Assignment
    cost: float
    error: float


class _SpentError(Exception):
    """The budget is spent."""


@dataclass
class Search:
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
        seen: all that was measured.
    """

    sites: int
    levels: int
    measure: Callable[[Assignment], float]
    cost: Callable[[Assignment], float]
    tolerance: float
    evaluations: int
    seconds: float | None = None
    progress: Callable[[int, int, Found | None], None] | None = None
    seen: dict[Assignment, Found] = field(default_factory=dict)
    best: Found | None = None
    spent: bool = False

    def run(self) -> Found | None:
        """The cheapest assignment found within the tolerance; None if there is none.

        From the uniform assignment of the smallest error, and from the cheapest feasible uniform one, the search lowers
        the site with the least error per saved cost, as long as the tolerance allows; then it exchanges pairs.
        """
        self._end = None if self.seconds is None else time.monotonic() + self.seconds
        try:
            uniform = [self._at((level,) * self.sites) for level in range(self.levels)]
            finest = min(uniform, key=lambda found: (found.error, found.cost))
            starts = [self._repaired(finest)]
            feasible = [found for found in uniform if found.error <= self.tolerance]
            starts += [min(feasible, key=lambda found: (found.cost, found.error))] if feasible else []
            lowest = min(uniform, key=lambda found: (found.cost, found.error))
            starts += [self._raised(lowest)]
            for start in dict.fromkeys(found for found in starts if found is not None):
                self._polished(self._lowered(start))
        except _SpentError:
            self.spent = True
        return self.best

    def allowed(self, most: int) -> list[Found]:
        """The cheapest measured assignments within the tolerance, the cheapest first."""
        within = [found for found in self.seen.values() if found.error <= self.tolerance]
        return sorted(within, key=lambda found: (found.cost, found.error, found.assignment))[:most]

    def front(self) -> list[Found]:
        """The measured assignments that no other one beats in cost and error, the cheapest first."""
        out: list[Found] = []
        for found in sorted(self.seen.values(), key=lambda found: (found.cost, found.error, found.assignment)):
            if math.isfinite(found.error) and (not out or found.error < out[-1].error):
                out.append(found)
        return out

    def _at(self, assignment: Assignment) -> Found:
        if assignment in self.seen:
            return self.seen[assignment]
        if len(self.seen) >= self.evaluations or (self._end is not None and time.monotonic() > self._end):
            raise _SpentError
        error = self.measure(assignment)
        found = Found(assignment, self.cost(assignment), math.inf if math.isnan(error) else error)
        self.seen[assignment] = found
        better = self.best is None or (found.cost, found.error) < (self.best.cost, self.best.error)
        if found.error <= self.tolerance and better:
            self.best = found
        if self.progress is not None:
            self.progress(len(self.seen), self.evaluations, self.best)
        return found

    def _with(self, found: Found, *moves: tuple[int, int]) -> Assignment:
        levels = list(found.assignment)
        for site, level in moves:
            levels[site] = level
        return tuple(levels)

    def _moves(self, found: Found) -> list[tuple[int, int]]:
        return [(s, v) for s in range(self.sites) for v in range(self.levels) if v != found.assignment[s]]

    def _lowered(self, now: Found) -> Found:
        """Lowers one site after the other, always with the least error per saved cost.

        A move waits with the score of its last measurement. It is measured again when it comes first, and taken if it
        is still first.
        """
        waiting: list[tuple[float, float, int, int]] = []
        for site, level in self._moves(now):
            self._wait(waiting, now, site, level)
        while waiting:
            _, _, site, level = heapq.heappop(waiting)
            if level == now.assignment[site]:
                continue
            again: list[tuple[float, float, int, int]] = []
            self._wait(again, now, site, level)
            if not again:
                continue
            if waiting and waiting[0] < again[0]:
                heapq.heappush(waiting, again[0])
                continue
            now = self._at(self._with(now, (site, level)))
        return now

    def _wait(self, waiting: list[tuple[float, float, int, int]], now: Found, site: int, level: int) -> None:
        after = self._with(now, (site, level))
        saved = now.cost - self.cost(after)
        if saved <= 0:
            return
        found = self._at(after)
        if found.error <= self.tolerance:
            heapq.heappush(waiting, ((found.error - now.error) / saved, -saved, site, level))

    def _raised(self, now: Found) -> Found | None:
        """From a cheap assignment, the changes that lower the error most for their cost, until it is allowed."""
        while now.error > self.tolerance:
            after = [self._at(self._with(now, move)) for move in self._moves(now)]
            after = [found for found in after if found.error < now.error and found.cost > now.cost]
            if not after:
                return None

            def worth(found: Found, now: Found = now) -> float:
                gain = now.error - max(found.error, self.tolerance)
                return math.inf if math.isinf(now.error) else gain / (found.cost - now.cost)

            now = max(after, key=lambda found: (worth(found), -found.error, -found.cost))
        return now

    def _repaired(self, now: Found) -> Found | None:
        """From an assignment of small error, the changes that lower it most, until it is allowed."""
        while now.error > self.tolerance:
            best = min((self._at(self._with(now, move)) for move in self._moves(now)), key=lambda found: found.error)
            if best.error >= now.error:
                return None
            now = best
        return now

    def _polished(self, now: Found) -> Found:
        """Exchanges: one site changes its level, or one is lowered and another one changes, if that is cheaper."""
        while True:
            better = self._cheaper(now)
            if better is None:
                return now
            now = better

    def _cheaper(self, now: Found) -> Found | None:
        moves = self._moves(now)
        ones = [(move,) for move in moves]
        pairs = [(one, two) for one in moves for two in moves if one[0] < two[0]]
        found: list[tuple[float, Assignment]] = []
        for change in [*ones, *pairs]:
            after = self._with(now, *change)
            cost = self.cost(after)
            if cost < now.cost:
                found.append((cost, after))
        # Those that save little are the likeliest to be allowed; what they save adds up.
        for _, after in sorted(found, key=lambda pair: (-pair[0], pair[1])):
            tried = self._at(after)
            if tried.error <= self.tolerance:
                return tried
        return None
