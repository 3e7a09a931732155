"""Repeated steps of a plan, such as the layers of an unrolled network, found and run as a loop: compiled once.

The plan stays as it is, so reports and eager calls see every equation. Each turn draws the random words of its own
steps. So the loop has the results of the steps one after the other, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal

from jchop._common.bit_ops import varying_axes
from jchop._core.xla.cpu import is_short_float
from jchop._program.control import as_jax_value, without_weak_types
from jchop._program.jaxprs import same_constant, same_param, same_program
from jchop._program.seeds import Seeds
from jchop._program.step import ProgramPlan, ProgramStep

#: The fewest equations that a loop must save, and that a turn must have: a turn of a loop costs about a microsecond.
_LEAST_SAVING, _LEAST_TURN = 64, 16
#: The most equations in a turn, and the most places that are tried for the start of one loop.
_LONGEST_TURN, _MOST_STARTS = 4096, 32
#: The most bytes of the operands that a loop stacks: they are a copy, which exists until the loop ends.
_MOST_STACK_BYTES = 1 << 29


@dataclass(frozen=True)
class Turns:
    """Consecutive steps that are the same steps several times: the turns of a loop.

    Args:
        body: the steps of turn 1. Its arguments are the fixed operands, the carried values, and an entry of each
            column. Its results are the next carried values and an entry of each stack.
        length: the number of turns.
        stride: the random draws of a turn.
        fixed: the operands that are the same in every turn.
        start: the carried values before turn 0; None for a value that no turn reads.
        columns: for each operand that differs between turns, one for each turn.
        carry: for each carried value, the variable of its result in the last turn.
        stacks: for each stacked result, its variables in all turns.
        results: the variables that are read after the loop.
        eqn: the first equation.
    """

    body: ProgramPlan
    length: int
    stride: int
    fixed: tuple[Any, ...]
    start: tuple[Any, ...]
    columns: tuple[tuple[Any, ...], ...]
    carry: tuple[Any, ...]
    stacks: tuple[tuple[Any, ...], ...]
    results: tuple[Any, ...]
    eqn: Any

    @property
    def operands(self) -> tuple[Any, ...]:
        """The variables and literals that it reads."""
        return (*self.fixed, *(v for v in self.start if v is not None), *(v for row in self.columns for v in row))


def run_turns(
    part: Turns, seeds: Seeds | None, args: Sequence[Any], interpret: Callable[[ProgramPlan, Any, list[Any]], list[Any]]
) -> list[Any]:
    """The results of a loop, given its operands; `interpret` runs the body."""
    operands = iter(args)
    fixed = [next(operands) for _ in part.fixed]
    start = [
        jnp.zeros(v.aval.shape, v.aval.dtype) if at is None else next(operands)
        for at, v in zip(part.start, part.carry, strict=True)
    ]
    columns = [jnp.stack([as_jax_value(next(operands)) for _ in row]) for row in part.columns]

    def turn(carry: tuple[list[Any], Array], row: list[Any]) -> tuple[tuple[list[Any], Array], list[Any]]:
        values, count = carry
        # The steps have the numbers of turn 1; the difference is taken modulo 2^32.
        more = (count - jnp.uint32(1)) * jnp.uint32(part.stride)
        own = None if seeds is None else replace(seeds, shift=more if seeds.shift is None else seeds.shift + more)
        out = without_weak_types(interpret(part.body, own, [*fixed, *values, *row]))
        return (out[: len(values)], count + jnp.uint32(1)), out[len(values) :]

    (last, _), stacks = lax.scan(turn, (without_weak_types(start), jnp.uint32(0)), columns, length=part.length)
    variables, value_of = set(part.results), dict(zip(part.carry, last, strict=True))
    for row, stack in zip(part.stacks, stacks, strict=True):
        value_of |= {v: stack[t] for t, v in enumerate(row) if v in variables and v not in value_of}
    return [value_of[v] for v in part.results]


# -- search ------------------------------------------------------------------------------------------------------------


def with_turns(plan: ProgramPlan) -> list[Any]:
    """The steps of a plan, and in place of repeated ones `Turns`."""
    if sum(1 for _ in plan.walk()) < _LEAST_SAVING + _LEAST_TURN:
        return list(plan.steps)
    new_plan = replace(plan, steps=_slices_first(plan))
    sizes = [1 + sum(1 for inner in step.inner for _ in inner.walk()) for step in new_plan.steps]
    kinds, total = np.asarray(_step_classes(new_plan.steps)), np.concatenate([[0], np.cumsum(sizes)])
    parts = _find_turns(new_plan, kinds, total, 0, len(kinds))
    return parts if any(isinstance(part, Turns) for part in parts) else list(plan.steps)


def _slices_first(plan: ProgramPlan) -> tuple[Any, ...]:
    """The steps, those that take parts of an array right after the step that makes it.

    Layers may take parts of one array at other places each, which are static. Before the loop these are other values.
    """
    after: list[list[Any]] = [[] for _ in range(len(plan.steps) + 1)]
    place: dict[Any, int] = {}  # of the step that made a value; 0 for arguments
    for i, step in enumerate(plan.steps, 1):
        at = i
        if step.name in _SLICING:
            at = max((place.get(v, 0) for v in step.operands if not isinstance(v, Literal)), default=0)
        after[at].append(step)
        place.update(dict.fromkeys(step.results, at))
    return tuple(step for steps in after for step in steps)


#: The primitives that take a part of an array.
_SLICING = frozenset(("slice", "squeeze", "dynamic_slice", "split", "unstack"))


def _find_turns(plan: ProgramPlan, kinds: np.ndarray, total: np.ndarray, begin: int, end: int) -> list[Any]:
    """The parts of the steps from `begin` to `end`."""
    for first, size, length in _loop_candidates(kinds, total, begin, end):
        part = _make_turns(plan, first, size, length)
        if part is not None:
            before = _find_turns(plan, kinds, total, begin, first)
            return [*before, part, *_find_turns(plan, kinds, total, first + size * length, end)]
    return list(plan.steps[begin:end])


def _loop_candidates(kinds: np.ndarray, total: np.ndarray, begin: int, end: int) -> list[tuple[int, int, int]]:
    """The first step of a loop, the steps of a turn, and the turns; those first that save most."""
    candidates = []
    for size in range(1, min((end - begin) // 2, _LONGEST_TURN) + 1):
        equal = np.concatenate([[False], kinds[begin : end - size] == kinds[begin + size : end], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for first, last in zip(edges[::2] + begin, edges[1::2] + begin, strict=True):
            for skip in (0, size, *range(1, min(size, _MOST_STARTS))):
                place, length = int(first + skip), int(last - first - skip) // size + 1
                turn = total[place + size] - total[place] if length > 1 else 0
                saving = total[place + size * length] - total[place + size] if length > 1 else 0
                if turn >= _LEAST_TURN and saving >= _LEAST_SAVING:
                    candidates.append((-saving, size, place, length))
    return [(place, size, length) for _, size, place, length in sorted(candidates)[: 4 * _MOST_STARTS]]


def _step_classes(steps: Sequence[ProgramStep]) -> list[int]:
    """A number for each step; steps with one number are the same step on other variables."""
    classes: dict[Any, list[tuple[ProgramStep, int]]] = {}
    numbers = []
    for i, step in enumerate(steps):
        alike = classes.setdefault((step.name, step.kind, *(str(v.aval) for v in step.results)), [])
        number = next((number for other, number in alike if _same_step(step, other)), None)
        if number is None:
            number = i
            alike.append((step, i))
        numbers.append(number)
    return numbers


def _same_step(one: ProgramStep, other: ProgramStep) -> bool:
    """Whether two steps are one equation with equal facts, on variables of equal types."""
    a, b = one.eqn, other.eqn
    return (
        a.primitive is b.primitive
        and not a.effects
        and not b.effects
        and a.ctx == b.ctx
        and [_strong_type(v) for v in a.invars] == [_strong_type(v) for v in b.invars]
        and [_strong_type(v) for v in a.outvars] == [_strong_type(v) for v in b.outvars]
        and not any(varying_axes(v.aval) for v in (*a.invars, *a.outvars))
        and a.params.keys() == b.params.keys()
        and all(same_param(value, b.params[name]) for name, value in a.params.items())
        and _same_facts(one, other)
    )


def _strong_type(v: Any) -> Any:
    return v.aval.strip_weak_type() if hasattr(v.aval, "strip_weak_type") else v.aval


def _same_facts(one: ProgramStep, other: ProgramStep) -> bool:
    """Whether two steps of equal equations are treated alike, and the steps of their programs too."""
    return one.alike(other) and len(one.inner) == len(other.inner) and all(map(_same_plan, one.inner, other.inner))


def _same_plan(one: ProgramPlan, other: ProgramPlan) -> bool:
    return (
        same_program(one.jaxpr, other.jaxpr)
        and all(map(same_constant, one.consts, other.consts))
        and one.out == other.out
        and all(map(_same_facts, one.steps, other.steps))
    )


# -- one loop ----------------------------------------------------------------------------------------------------------


def _make_turns(plan: ProgramPlan, first: int, size: int, length: int) -> Turns | None:
    """The loop over `length` turns of `size` steps; None if a turn reads from another turn than itself and the last."""
    end = first + length * size
    turns = [plan.steps[place : place + size] for place in range(first, end, size)]
    stride = turns[1][0].number - turns[0][0].number
    numbers = [[step.number - t * stride for step in turn] for t, turn in enumerate(turns)]
    flow = _OperandFlow(turns)
    steps = [flow.step(row) for row in zip(*turns, strict=True)]
    if any(row != numbers[0] for row in numbers) or None in steps or flow.bytes > _MOST_STACK_BYTES:
        return None
    after = {v for step in plan.steps[end:] for v in step.operands if not isinstance(v, Literal)}
    after |= {v for v in plan.jaxpr.outvars if not isinstance(v, Literal)}
    read = {v: at for v, at in flow.origins.items() if v in after}
    # Results of earlier turns are stacked; the last turn's are carried, if the carry can begin as zeros.
    own = {at[1:] for v, at in read.items() if at[1:] not in flow.carry and not _can_begin_as_zeros(v)}
    stack_keys = own | {at[1:] for at in read.values() if at[0] < length - 1}
    last = {at[1:] for at in read.values()} - stack_keys
    carry_keys = [*flow.carry, *sorted(last - flow.carry.keys())]
    if any(_is_stack_of_bytes(turns[0][j].results[k]) for j, k in stack_keys):
        return None
    results = [turns[1][j].results[k] for j, k in (*carry_keys, *sorted(stack_keys))]
    arguments = [*flow.fixed, *(turns[0][j].results[k] for j, k in carry_keys), *(v for v, _ in flow.columns)]
    variables = SimpleNamespace(constvars=(), invars=tuple(arguments), outvars=tuple(results))  # in place of a jaxpr
    return Turns(
        body=ProgramPlan(variables, (), tuple(steps), (None,) * len(results)),
        length=length,
        stride=stride,
        fixed=tuple(flow.fixed),
        start=tuple(flow.carry.get(at) for at in carry_keys),
        columns=tuple(row for _, row in flow.columns),
        carry=tuple(turns[-1][j].results[k] for j, k in carry_keys),
        stacks=tuple(tuple(turn[j].results[k] for turn in turns) for j, k in sorted(stack_keys)),
        results=tuple(read),
        eqn=turns[0][0].eqn,
    )


class _OperandFlow:
    """Where the operands of turns come from.

    The body is turn 1, whose variables tell values of turn 0 from those that are known before the loop.
    """

    def __init__(self, turns: Sequence[Sequence[ProgramStep]]) -> None:
        #: The turn, the step and the result of each variable.
        self.origins = {
            v: (t, j, k)
            for t, turn in enumerate(turns)
            for j, step in enumerate(turn)
            for k, v in enumerate(step.results)
        }
        self.fixed: list[Any] = []
        #: The operand of turn 0 for each carried value, by the step and the result that the next turn reads.
        self.carry: dict[tuple[int, ...], Any] = {}
        #: Variables of the body, each with the operands of all turns.
        self.columns: list[tuple[Any, tuple[Any, ...]]] = []
        self._rows: dict[Any, tuple[Any, ...]] = {}

    @property
    def bytes(self) -> int:
        """The bytes of all columns."""
        return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for _, row in self.columns for v in row)

    def step(self, row: Sequence[ProgramStep]) -> ProgramStep | None:
        """The step of the body, for the steps at one place of all turns."""
        operands = [self._operand(each) for each in zip(*(step.operands for step in row), strict=True)]
        if any(v is None for v in operands):
            return None
        same = all(a is b for a, b in zip(operands, row[1].operands, strict=True))
        return row[1] if same else replace(row[1], eqn=row[1].eqn.replace(invars=operands))

    def _operand(self, row: tuple[Any, ...]) -> Any:
        """The operand of the body, for the operands of all turns; None if a loop cannot have it."""
        places: list[Any] = [None if isinstance(v, Literal) else self.origins.get(v) for v in row]
        if _one_place(places):
            return row[1]
        has_row = row[1] in self._rows if not isinstance(row[1], Literal) else False
        if places[0] is None and _one_place(places[1:]):
            self.carry[places[1][1:]] = row[0]
            return self._variable_of_row(row)
        if any(at is not None for at in places):
            return None
        if all(_same_operand(v, row[0]) for v in row):
            if isinstance(row[0], Literal):
                return row[0]
            self.fixed += [] if has_row else [row[0]]
            return self._variable_of_row(row)
        if any(_is_stack_of_bytes(v) for v in row):
            return None
        if isinstance(row[1], Literal):
            aval: Any = row[1].aval
            (new,) = jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).jaxpr.invars
            self.columns.append((new, row))
            return self.columns[-1][0]
        self.columns += [] if has_row else [(row[1], row)]
        return self._variable_of_row(row)

    def _variable_of_row(self, row: tuple[Any, ...]) -> Any:
        """The variable of turn 1, if it stands for no other operands."""
        other = self._rows.setdefault(row[1], row)
        return row[1] if all(map(_same_operand, row, other)) else None


def _one_place(places: Sequence[Any]) -> bool:
    """Whether each value is made in its own turn, and all by the same step."""
    return all(at is not None and at == (t, *places[0][1:]) for t, at in enumerate(places))


def _same_operand(a: Any, b: Any) -> bool:
    both = isinstance(a, Literal) and isinstance(b, Literal)
    return a is b or (both and _strong_type(a) == _strong_type(b) and same_constant(a.val, b.val))


def _can_begin_as_zeros(v: Any) -> bool:
    """Whether zeros of its shape and dtype have its type: it is no key, and no axis has an explicit sharding."""
    sharding = getattr(v.aval, "sharding", None)
    has_sharding = sharding is not None and any(part is not None for part in sharding.spec)
    return not has_sharding and not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)


def _is_stack_of_bytes(v: Any) -> bool:
    """Whether a value is of 8 bits: XLA's CPU backend converts a stack of such numbers in each turn."""
    return is_short_float(v.aval) and v.aval.dtype.itemsize == 1
