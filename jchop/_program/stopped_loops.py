"""Loops that were stopped: the text of a warning or a note about one."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jchop._program.step import ProgramStep, source_line_of, text_of_line

#: Primitives that compare, their signs and functions.
COMPARISONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "lt": ("<", operator.lt),
    "le": ("<=", operator.le),
    "gt": (">", operator.gt),
    "ge": (">=", operator.ge),
    "eq": ("==", operator.eq),
    "ne": ("!=", operator.ne),
}
#: The cause of a stop: another turn would give the same bits.
STUCK = (
    "after {turns} turns, as its values no longer change and it would never end (a format with more digits, or a "
    "larger step or tolerance, ends it; with max_turns= the results are the last values, else NaN)"
)
#: The most pairs of numbers that are shown of one comparison.
_MOST_PAIRS = 3


def warn_of_stop(
    step: ProgramStep,
    comparisons: Sequence[ProgramStep],
    most: int | None,
    turns: Any,
    goes_on: Any,
    operands: Sequence[Sequence[Any]],
) -> None:
    """Warn that a loop was stopped, if its condition still holds anywhere; the warning points to the condition."""
    if np.any(goes_on):
        limited = most is not None and int(turns) >= most
        when = f"after max_turns={most} turns" if limited else STUCK.format(turns=int(turns))
        warn_at_condition(step, comparisons, text_of_stop(step, comparisons, when, goes_on, operands))


def warn_at_condition(step: ProgramStep, comparisons: Sequence[ProgramStep], text: str) -> None:
    """A warning that points to the condition of a loop."""
    file, _, line = source_of_condition(step, comparisons).rpartition(":")
    registry = globals().setdefault("__warningregistry__", {})  # Python's own, so that its filters work
    warnings.warn_explicit(text, RuntimeWarning, file, int(line or 1), registry=registry)


def text_of_stop(
    step: ProgramStep, comparisons: Sequence[ProgramStep], when: str, goes_on: Any, operands: Sequence[Sequence[Any]]
) -> str:
    """A sentence about a stopped loop: the line of its condition, and the numbers that the condition compares.

    Args:
        step: the loop.
        comparisons: the comparisons of its condition.
        when: the number of turns, and the cause.
        goes_on: the condition, for every loop of a batch.
        operands: the operands of each comparison.
    """
    source = source_of_condition(step, comparisons)
    rows = zip(comparisons, operands, strict=True)
    pairs = "; ".join(dict.fromkeys(_comparison_values(one, goes_on, *map(np.asarray, pair)) for one, pair in rows))
    text = text_of_line(source)
    place = f" (scope {step.scope!r})" if step.scope else ""
    place = f" at {source}" + (f" ({text})" if text else "") if source else place
    return f"a while loop was stopped {when}; its condition{place} still holds" + (f": {pairs}" if pairs else "")


def source_of_condition(step: ProgramStep, comparisons: Sequence[ProgramStep]) -> str:
    outer = source_line_of(step.eqn.source_info)
    inside = (source_line_of(one.eqn.source_info, outer) for one in (*comparisons, *step.inner[0].steps))
    return next((line for line in inside if line), outer)


def _comparison_values(step: ProgramStep, goes_on: Any, a: np.ndarray, b: np.ndarray) -> str:
    """Pairs of numbers for which the comparison holds; if there are none, pairs for which it does not hold."""
    sign, function = COMPARISONS[step.name]
    a, b = np.broadcast_arrays(a, b)
    holds, going = np.asarray(function(a, b)), np.asarray(goes_on)
    if going.ndim <= a.ndim and a.shape[: going.ndim] == going.shape:
        going = np.broadcast_to(going.reshape(going.shape + (1,) * (a.ndim - going.ndim)), a.shape)
    else:
        going = np.ones(a.shape, bool)
    true = bool(np.any(holds & going))
    places = np.argwhere(holds & going if true else going)
    pairs = ", ".join(f"{a[tuple(i)]} {sign} {b[tuple(i)]}" for i in places[:_MOST_PAIRS])
    more = f", and {len(places) - _MOST_PAIRS} more" if len(places) > _MOST_PAIRS else ""
    return pairs + more + ("" if true else " is false")
