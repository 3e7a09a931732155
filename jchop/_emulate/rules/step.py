"""One equation of an emulated program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jchop._emulate.rules.rules import ArithmeticChoice
from jchop._emulate.rules.run_task import Task
from jchop._program import step

if TYPE_CHECKING:
    from jchop._emulate.rules.value_facts import ValueFact


@dataclass(frozen=True)
class RandomDraw:
    """An equation of a call of `jax.random`.

    Args:
        inner: the result variables of all equations of the same call.
        leaves: for each result, whether equations outside of the call use it.
        calls: whether the equation is a call; then its literals are the user's arguments.
    """

    inner: frozenset[Any]
    leaves: tuple[bool, ...]
    calls: bool


@dataclass(frozen=True, kw_only=True)
class EmulatedStep(step.ProgramStep):
    """One equation and its arithmetic.

    Args:
        choice: its arithmetic.
        rounds: which operands are rounded first.
        counts: the places of operands that are counts, which are not rounded.
        draw: its place in a call of `jax.random`.
        apart: whether it is compiled apart from its neighbours, for every size.
    """

    choice: ArithmeticChoice
    rounds: tuple[bool, ...] = ()
    counts: tuple[int, ...] = ()
    known: tuple[ValueFact, ...] = ()  # of the operands, after their rounding
    out: tuple[ValueFact, ...] = ()
    draw: RandomDraw | None = None
    apart: bool = False

    def alike(self, other: Any) -> bool:
        """Whether a step of an equal equation has the same arithmetic; the steps of their programs aside."""
        mine, its = ((each.choice, each.rounds, each.apart, _draw_run_facts(each.draw)) for each in (self, other))
        return super().alike(other) and mine == its

    @cached_property
    def task(self) -> Task:
        """Its static data; its results must be rounded."""
        assert self.choice.spec is not None
        params = tuple(sorted(self.eqn.params.items()))
        return Task(self.eqn.primitive, params, self.kind, self.choice.spec, self.known, self.apart)


def _draw_run_facts(draw: RandomDraw | None) -> Any:
    """The facts about a draw that a run of its step reads."""
    return None if draw is None else (draw.leaves, draw.calls)
