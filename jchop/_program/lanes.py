"""Programs on concrete values in several lanes, such as samples: loops run turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._program.control import Interpret, ScanOrder, ScanTurn, WhileParts, as_jax_value
from jchop._program.loop_limits import text_of_stop
from jchop._program.run import Runner
from jchop._program.seeds import Seeds
from jchop._program.shards import ShardAxes, ShardMap, map_shards, seeds_of_turn, shard_row
from jchop._program.step import ProgramStep

#: A value: a sequence with an entry for each lane.
LaneValue = Any
#: The number of turns from which a `while` loop is long.
_LONG_LOOP = 64


class LaneRunner(Runner):
    """Runs a plan on values of several lanes, of which some choose paths. A use of it is a subclass.

    Seeds are a sequence, too. All shards of a `shard_map` run at once.
    """

    #: Runs the steps of one lane.
    runner: Runner
    #: Sentences about loops that were stopped.
    notes: list[str]
    max_turns: int
    differentiates = False
    #: The lanes that run now, and choose their paths.
    lanes: Sequence[int] = (0,)
    #: The turns of the loops around, and how many of these are `while` loops.
    turn: tuple[int, ...] = ()
    while_depth = 0
    #: The axes of the mesh, which values have first.
    axes: ShardAxes = ()

    # -- the part of a use ---------------------------------------------------------------------------------------------

    def map_lanes(self, move: Callable[[Any], Any], value: LaneValue) -> LaneValue:
        """The value with its numbers in another place."""
        raise NotImplementedError

    def row(self, value: LaneValue, k: int) -> LaneValue:
        """Row k of arrays."""
        return self.map_lanes(lambda x: shard_row(x, k, self.axes), value)

    def stack(self, rows: list[LaneValue], aval: Any) -> LaneValue:
        """The results of the turns of a scan along a first axis."""
        raise NotImplementedError

    def choose(self, active: Mapping[int, Any], new: LaneValue, old: LaneValue) -> LaneValue:
        """New values where lanes are active, each for all loops or shards of a batch or for some; else the old ones."""
        raise NotImplementedError

    def path_value(self, value: LaneValue, lane: int) -> Any:
        """What chooses the path of a lane: an index of branches, a condition."""
        return value[lane]

    def rounded_operands(self, step: Any, seeds: Any, args: list[LaneValue]) -> list[LaneValue]:
        """The operands of an equation that holds programs, in the form that it takes."""
        return args

    def check_long(self) -> None:
        """Called when a `while` loop has made many turns."""

    # -- equations that hold programs ----------------------------------------------------------------------------------

    def context(self, part: Any) -> AbstractContextManager[Any]:
        """The settings of JAX for a part; a mesh is none of them here."""
        return nullcontext() if self.axes else super().context(part)

    def control(self, step: Any, seeds: Any, args: list[LaneValue]) -> list[LaneValue]:
        """The results of an equation that holds programs."""
        return super().control(step, seeds, self.rounded_operands(step, seeds, args))

    def inside(self, seeds: Sequence[Seeds | None], number: int, turn: Any = 0) -> list[Seeds | None]:
        """The seeds of one turn of a program within an equation."""
        return [seeds_of_turn(self.axes, one, number, turn) for one in seeds]

    def switch(self, index: Any, branches: Sequence[Callable[[Any], Any]], operands: Any) -> Any:
        """The results of the branches that lanes, or shards of a lane, take."""
        lanes, out = self.lanes, None
        chosen = {i: np.clip(np.asarray(self.path_value(index, i)), 0, len(branches) - 1) for i in lanes}
        for k in map(int, np.unique(np.stack(list(chosen.values())))):
            self.lanes = [i for i in lanes if np.any(chosen[i] == k)]
            new = branches[k](operands)
            active = {i: jnp.asarray(chosen[i] == k) for i in self.lanes}
            out = new if out is None else [self.choose(active, *pair) for pair in zip(new, out, strict=True)]
        self.lanes = lanes
        return out

    def scan(self, step: Any, turn: ScanTurn, start: Any, xs: Any, order: ScanOrder) -> tuple[Any, Any]:
        """The last carried values and the stacked results, turn by turn."""
        places, outer, carry = range(order.length), self.turn, start
        each: list[list[LaneValue]] = []
        for count, k in enumerate(reversed(places) if order.reverse else places):
            self.turn = (*outer, count)
            carry, ys = turn(carry, [self.row(x, k) for x in xs], count)
            each.append(ys)
        self.turn = outer
        if order.reverse:
            each.reverse()
        avals = [v.aval for v in step.eqn.outvars[len(start) :]]
        return carry, [self.stack([ys[i] for ys in each], aval) for i, aval in enumerate(avals)]

    def while_loop(self, step: Any, loop: WhileParts, start: Any) -> Any:
        """The values with which each lane ends; a loop whose values no longer change is stopped."""
        lanes, outer, carry, turn = self.lanes, self.turn, start, 0
        active = {i: jnp.asarray(True) for i in lanes}
        draws = any(seeds is not None for seeds in loop.condition(start, 0)[0]) or bool(step.eqn.effects)
        self.while_depth += 1
        while True:
            self.turn = (*outer, turn)
            holds = loop.goes_on(carry, turn)
            active = {i: active[i] & self.path_value(holds, i) for i in self.lanes}
            self.lanes = [i for i in self.lanes if bool(jnp.any(active[i]))]
            if not self.lanes:
                break
            if turn >= self.max_turns:
                self._note_stop(step, f"after max_turns={turn} turns", *loop.condition(carry, turn))
                break
            if turn == _LONG_LOOP:
                self.check_long()
            active = {i: active[i] for i in self.lanes}
            new = [self.choose(active, *pair) for pair in zip(loop.next_of(carry, turn), carry, strict=True)]
            turn += 1
            if not draws and all(same_bits(x[i], y[i]) for x, y in zip(new, carry, strict=True) for i in self.lanes):
                why = f"after {turn} turns, as its values no longer change and it would never end"
                self._note_stop(step, why, *loop.condition(carry, turn))
                break
            carry = new
        self.lanes, self.turn, self.while_depth = lanes, outer, self.while_depth - 1
        return carry

    def _note_stop(self, step: ProgramStep, why: str, seeds: Sequence[Seeds | None], args: Sequence[LaneValue]) -> None:
        """Adds a sentence about a `while` loop that is stopped, with its line and the numbers compared."""
        lane, steps = self.lanes[0], list[ProgramStep]()

        def look(seeds: Seeds | None, args: list[Any]) -> tuple[Any, list[list[Any]]]:
            comparisons, holds = self.runner.watch(step.inner[0], seeds, args)
            steps[:] = [one for one, _ in comparisons]
            return holds, [values for _, values in comparisons]

        values = map_shards(self.axes, look, seeds[lane], [x[lane] for x in args])
        self.notes.append(text_of_stop(step, steps, why, *values))

    def shard_map(self, step: Any, seeds: Sequence[Any], args: list[LaneValue], interpret: Interpret) -> list[Any]:
        """All shards at once."""
        shards = ShardMap(step, self.axes)
        parts = [self.map_lanes(cut, x) for cut, x in zip(shards.cuts(), args, strict=True)]
        self.axes = shards.axes
        out = interpret(step.inner[0], [shards.seeds(one) for one in seeds], parts)
        self.axes = shards.outer
        return [self.map_lanes(join, x) for join, x in zip(shards.joins(), out, strict=True)]


def same_bits(one: Any, two: Any) -> bool:
    """Whether two values have the same bits."""
    one, two = as_jax_value(one), as_jax_value(two)
    if jnp.issubdtype(one.dtype, jax.dtypes.extended):
        one, two = jax.random.key_data(one), jax.random.key_data(two)
    return np.asarray(one).tobytes() == np.asarray(two).tobytes()
