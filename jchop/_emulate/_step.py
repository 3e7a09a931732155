"""The parts of a plan: one equation and what becomes of it, and the steps of a jaxpr."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jchop._emulate._known import Known
from jchop._emulate._rules import Choice

__all__ = ["Plan", "Step", "carry_count", "jaxpr_of"]


@dataclass(frozen=True)
class Step:
    """One equation and what becomes of it."""

    eqn: Any
    kind: str
    scope: str
    choice: Choice
    rounds: tuple[bool, ...]  # which operands are rounded first
    known: tuple[Known, ...]  # of the operands, once rounded
    out: tuple[Known, ...]
    number: int  # of the first of its roundings
    inner: tuple[Plan, ...] = ()

    @property
    def name(self) -> str:
        """The primitive."""
        return self.eqn.primitive.name

    @property
    def result_number(self) -> int:
        """The number of the rounding of its first result."""
        return self.number + len(self.eqn.invars)


@dataclass(frozen=True)
class Plan:
    """The steps of a jaxpr."""

    jaxpr: Any
    consts: tuple[Any, ...]
    steps: tuple[Step, ...]
    out: tuple[Known, ...]

    def walk(self) -> Iterator[Step]:
        """Every step, those of inner plans after the one they belong to."""
        for step in self.steps:
            yield step
            for plan in step.inner:
                yield from plan.walk()


def jaxpr_of(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jaxpr and its constants; newer versions of JAX keep them in one object."""
    return getattr(value, "jaxpr", value), tuple(getattr(value, "consts", ()))


def carry_count(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))
