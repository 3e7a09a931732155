"""A program run beside itself in the carrier, operation by operation, and what is seen on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jchop._emulate._interpret import run_step, with_rounded_operands
from jchop._emulate._known import is_float
from jchop._emulate._step import Step
from jchop._program.bind import bind, constant_of
from jchop._program.control import where_active
from jchop._program.seeds import Seeds
from jchop._program.step import CALLS, Plan, carry_count

__all__ = ["Measure", "measure"]

#: A value of the emulated program, and what the carrier has in its place.
Pair = tuple[Any, Any]


@dataclass
class Measure:
    """What was seen of some results."""

    overflows: int = 0
    underflows: int = 0
    infinities: int = 0
    nans: int = 0
    smallest: float = math.inf
    largest: float = -math.inf
    error: float = -math.inf
    deviation: float = -math.inf

    def facts(self) -> dict[str, Any]:
        """The fields, NaN where nothing was seen."""
        return {name: v if isinstance(v, int) or math.isfinite(v) else math.nan for name, v in vars(self).items()}

    def add(self, other: Measure | None) -> None:
        """What another one saw, too."""
        if other is None:
            return
        for name in ("overflows", "underflows", "infinities", "nans"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.smallest = min(self.smallest, other.smallest)
        for name in ("largest", "error", "deviation"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    @classmethod
    def of(cls, low: Any, same: Any, carrier: Any) -> Measure:
        """Of results, of the carrier's results of the same operands, and of those of the program in the carrier."""
        low, same, carrier = (np.asarray(x, np.float64) for x in (low, same, carrier))
        magnitude = np.abs(low[np.isfinite(low) & (low != 0)])
        return cls(
            int(np.sum(~np.isfinite(low) & np.isfinite(same))),
            int(np.sum((low == 0) & (same != 0))),
            int(np.sum(np.isinf(low))),
            int(np.sum(np.isnan(low))),
            float(magnitude.min(initial=math.inf)),
            float(magnitude.max(initial=-math.inf)),
            _relative(low, same),
            _relative(low, carrier),
        )


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    """The largest |got - want| / |want| where both are finite; a zero that should be one has no error."""
    use = np.isfinite(got) & np.isfinite(want) & ((want != 0) | (got == 0))
    got, want = got[use], want[use]
    return float(np.max(np.abs(got - want) / np.where(want == 0, 1, np.abs(want)), initial=-math.inf))


def measure(
    plan: Plan,
    seeds: Seeds | None,
    args: Sequence[Pair],
    found: dict[int, Measure],
    constants: Sequence[Any] | None = None,
) -> list[Pair]:
    """The results of a planned program on values that are known, and in `found` what was seen of each step."""
    env: dict[Any, Pair] = dict(
        zip(plan.jaxpr.constvars, zip(constants or plan.consts, plan.consts, strict=True), strict=True)
    )
    env.update(zip(plan.jaxpr.invars, args, strict=True))

    def read(v: Any) -> Pair:
        if isinstance(v, Literal):
            return constant_of(v), constant_of(v)
        return env[v]

    for step in plan.steps:
        out = _step(step, seeds, [read(v) for v in step.eqn.invars], found)
        env.update(zip(step.eqn.outvars, out, strict=True))
    return [read(v) for v in plan.jaxpr.outvars]


def _step(step: Step, seeds: Seeds | None, args: list[Pair], found: dict[int, Measure]) -> list[Pair]:
    walk = _LOOPS.get(step.name, _call if step.inner else None) if step.kind == "control" else None
    if step.name == "shard_map":
        walk = None
    if walk is not None:
        low = with_rounded_operands(step, seeds, [pair[0] for pair in args])
        return walk(step, seeds, [(x, pair[1]) for x, pair in zip(low, args, strict=True)], found)
    low, carrier = ([pair[i] for pair in args] for i in (0, 1))
    results = run_step(step, seeds, low)
    plain = bind(step.eqn.primitive, step.eqn.params, *carrier)
    if step.kind not in ("control", "untouched", "compared", "structural", "extremum", "own"):
        same = bind(step.eqn.primitive, step.eqn.params, *low)
        for v, *three in zip(step.eqn.outvars, results, same, plain, strict=True):
            if is_float(v.aval):
                found.setdefault(id(step), Measure()).add(Measure.of(*three))
    return list(zip(results, plain, strict=True))


def _turn(seeds: Seeds | None, number: int, turn: int = 0) -> Seeds | None:
    return None if seeds is None else seeds.turn(number, turn)


def _call(step: Step, seeds: Seeds | None, args: list[Pair], found: dict[int, Measure]) -> list[Pair]:
    return measure(step.inner[0], _turn(seeds, step.number), args, found)


def _solve(step: Step, seeds: Seeds | None, args: list[Pair], found: dict[int, Measure]) -> list[Pair]:
    lengths = step.eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return _call(step, seeds, [*args[first : first + lengths.solve], *args[sum(lengths) :]], found)


def _cond(step: Step, seeds: Seeds | None, args: list[Pair], found: dict[int, Measure]) -> list[Pair]:
    index = min(max(int(args[0][0]), 0), len(step.inner) - 1)
    return measure(step.inner[index], _turn(seeds, step.number + index), args[1:], found)


def _scan(step: Step, seeds: Seeds | None, args: list[Pair], found: dict[int, Measure]) -> list[Pair]:
    params = step.eqn.params
    consts, carried = carry_count(params)
    fixed, carry, xs = args[:consts], args[consts : consts + carried], args[consts + carried :]
    order = range(params["length"])
    each: list[list[Pair]] = []
    for turn, k in enumerate(reversed(order) if params["reverse"] else order):
        row = [(x[0][k], x[1][k]) for x in xs]
        out = measure(step.inner[0], _turn(seeds, step.number, turn), [*fixed, *carry, *row], found)
        carry, ys = out[:carried], out[carried:]
        each.append(ys)
    if params["reverse"]:
        each.reverse()
    avals = [v.aval for v in step.eqn.outvars[carried:]]

    def stacked(i: int, which: int) -> Any:
        return jnp.stack([ys[i][which] for ys in each]) if each else jnp.zeros(avals[i].shape, avals[i].dtype)

    return [*carry, *((stacked(i, 0), stacked(i, 1)) for i in range(len(avals)))]


def _while(step: Step, seeds: Seeds | None, args: list[Pair], found: dict[int, Measure]) -> list[Pair]:
    test, body = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
    first, fixed, carry = args[:test], args[test : test + body], args[test + body :]
    turn = 0
    active = jnp.asarray(True)

    def goes_on() -> Any:
        return active & measure(step.inner[0], _turn(seeds, step.number, turn), [*first, *carry], found)[0][0]

    while bool(jnp.any(active := goes_on())):
        out = measure(step.inner[1], _turn(seeds, step.number + 1, turn), [*fixed, *carry], found)
        carry = [
            (where_active(active, one[0], two[0]), where_active(active, one[1], two[1]))
            for one, two in zip(out, carry, strict=True)
        ]
        turn += 1
    return carry


_LOOPS = {
    **{name: _call for name in CALLS if name != "shard_map"},
    "custom_linear_solve": _solve,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
