"""A program run with kept scales: state in, state out, through loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.settings import split_prng_key
from jchop._program.control import ScanOrder, ScanTurn, WhileParts, roles_of, turns_around
from jchop._program.step import HIGH_CALLS, PLAIN_CALLS, ProgramPlan
from jchop._quantized.products.contraction import ProductRoundings
from jchop._quantized.products.scale_from import LSQ, DelayedScaling, MovingAverage
from jchop._quantized.program.param_uses import ProductStep
from jchop._quantized.program.runner import QuantizedRunner
from jchop._quantized.program.scale_slots import ScaleSlot
from jchop._quantized.scales.formulas import round_in_range, round_lsq_operand, update_history, update_range

Array = jax.Array


class ScaleStateRunner(QuantizedRunner):
    """Products under rules and kept scales; made for one call.

    Args:
        plain: the products without kept scales.
        slots: of products, by the identity of their steps.
        entries_of_scan: of each scan the names that have an entry for each iteration.
        entries: by name. A range that `calibrate` may fix and that is missing is that of the array itself.
        mode: ``"fixed"``: entries stay. ``"update"``: `updates` has those after the call. ``"observe"``: `updates` has
            the arrays themselves, which are not rounded.
    """

    def __init__(
        self,
        plain: QuantizedRunner,
        slots: Mapping[int, ScaleSlot],
        entries_of_scan: Mapping[int, tuple[str, ...]],
        entries: Mapping[str, Array],
        mode: Literal["fixed", "update", "observe"],
    ) -> None:
        super().__init__(plain.roundings, plain.paths)
        self.slots, self.entries_of_scan, self.mode = slots, entries_of_scan, mode
        self.entries = {} if mode == "observe" else dict(entries)
        self.updates: dict[str, Array] = {}
        self._slots_within: dict[int, tuple[ScaleSlot, ...]] = {}

    # -- one product ---------------------------------------------------------------------------------------------------

    def operand(
        self, step: ProductStep, x: Array, roundings: ProductRoundings, key: Any
    ) -> tuple[Array, ProductRoundings, Any]:
        """The operand of data, rounded under its kept scale."""
        slot = self.slots.get(id(step))
        if slot is None or (self.mode != "observe" and slot.source is None and slot.name not in self.entries):
            return x, roundings, key
        roundings = replace(roundings, left=None)
        if self.mode == "observe":
            self.updates[slot.name] = lax.stop_gradient(x).astype(jnp.float32)
            return x, roundings, key
        round_key, key = (None, None) if key is None else split_prng_key(key)
        return self._round_input(slot, x, round_key), roundings, key

    def _round_input(self, slot: ScaleSlot, x: Array, key: Array | None) -> Array:
        entry = self.entries.get(slot.name)
        if entry is None or entry.shape != (shape := slot.shape[len(slot.stack) :]):
            raise ValueError(_entry_error(slot, entry, shape if entry is not None else ()))
        source = slot.source
        if isinstance(source, LSQ):
            return round_lsq_operand(source, None, x, slot.spec, entry, key)
        span = after = entry
        if isinstance(source, MovingAverage):
            span = after = update_range(source, entry, x, self.mode == "fixed")
        elif isinstance(source, DelayedScaling):
            span, after = update_history(source, entry, x)
        if slot.follows and self.mode == "update":
            self.updates[slot.name] = self.entries[slot.name] = after.astype(entry.dtype)
        return round_in_range(x, slot.spec, span, key)

    # -- programs within -----------------------------------------------------------------------------------------------

    def enter(self, step: ProductStep, seeds: Any, args: list[Any], inner: Callable[..., list[Any]]) -> list[Any]:
        """The results of a step that holds programs; entries are more operands of it, and more results."""
        slots = self._slots_in(step)
        if not slots or step.name in (*PLAIN_CALLS, *HIGH_CALLS) or "carried" in roles_of(step):  # loops have their own
            return super().enter(step, seeds, args, inner)
        names = [slot.name for slot in slots if slot.name in self.entries]
        entry_values = [self.entries[name] for name in names]
        last = [name for name in names if name in self._updated_names(slots)] if self.mode == "update" else []
        blanks = self._arrays_in(step, slots) if self.mode == "observe" else {}

        def run(plan: ProgramPlan, seeds: Any, args: Sequence[Any]) -> list[Any]:
            count = len(plan.jaxpr.invars)
            entries = dict(zip(names, args[count:], strict=True))
            out, updates = self._inside(partial(inner, plan, seeds, args[:count]), entries)
            all_entries = entries | updates
            return [
                *out,
                *(all_entries[name] for name in last),
                *(updates.get(name, blank) for name, blank in blanks.items()),
            ]

        out = super().enter(step, seeds, [*args, *entry_values], run)
        count = len(step.eqn.outvars)
        self._take(dict(zip((*last, *blanks), out[count:], strict=True)))
        return out[:count]

    def scan(self, step: ProductStep, turn: ScanTurn, start: Any, xs: Any, order: ScanOrder) -> tuple[Any, Any]:
        """A loop carries entries, and gives and stacks those of single iterations."""
        rows = {name: self.entries[name] for name in self.entries_of_scan.get(id(step), ()) if name in self.entries}
        carried, updated_names = self._carried_entries(step, rows)

        def turn_with_entries(carry: Any, row: Any, count: Any) -> tuple[Any, Any]:
            (values, entries), (x, own) = carry, row
            (values, ys), updates = self._inside(partial(turn, values, x, count), {**entries, **own})
            taken = {
                name: new
                for name, new in updates.items()
                if self.mode == "observe" or (name in own and name in updated_names)
            }
            return (values, {name: updates.get(name, old) for name, old in entries.items()}), (ys, taken)

        (last, after), (ys, taken) = super().scan(step, turn_with_entries, (start, carried), (xs, rows), order)
        self._take({**{name: after[name] for name in after if name in updated_names}, **taken})
        return last, ys

    def while_loop(self, step: ProductStep, loop: WhileParts, start: Any) -> Any:
        """A loop carries entries; its data cannot be observed."""
        slots = self._slots_in(step)
        if slots and self.mode == "observe":
            raise NotImplementedError(
                f"{slots[0].place}: data within a `while` loop cannot be observed; let the loop be a scan, or give "
                "its product a rule without a scale for the whole array"
            )
        carried, updated_names = self._carried_entries(step, {})

        def next_of(carry: Any, count: Any) -> Any:
            values, updates = self._inside(partial(loop.next_of, carry[0], count), carry[1])
            return values, {name: updates.get(name, old) for name, old in carry[1].items()}

        def goes_on(carry: Any, count: Any) -> Any:
            return self._inside(partial(loop.goes_on, carry[0], count), carry[1])[0]

        parts = WhileParts(lambda carry, count: loop.condition(carry[0], count), goes_on, next_of)
        last, after = super().while_loop(step, parts, (start, carried))
        self._take({name: after[name] for name in after if name in updated_names})
        return last

    def _carried_entries(self, step: ProductStep, rows: Mapping[str, Array]) -> tuple[dict[str, Array], set[str]]:
        """The entries that a loop carries, which are those of no single iteration, and the names that it updates."""
        slots = self._slots_in(step)
        names = [slot.name for slot in slots if slot.name in self.entries and slot.name not in rows]
        return {name: self.entries[name] for name in names}, self._updated_names(
            slots
        ) if self.mode == "update" else set()

    def _inside(self, run: Callable[[], Any], entries: dict[str, Array]) -> tuple[Any, dict[str, Array]]:
        """The results of a program within, and the updates of its entries."""
        outer = self.entries, self.updates
        self.entries, self.updates = entries, {}
        try:
            return run(), self.updates
        finally:
            self.entries, self.updates = outer

    def _take(self, updates: Mapping[str, Array]) -> None:
        self.updates.update(updates)
        if self.mode == "update":
            self.entries.update(updates)

    def _slots_in(self, step: ProductStep) -> tuple[ScaleSlot, ...]:
        if id(step) not in self._slots_within:
            inner = (self.slots.get(id(s)) for plan in step.inner for s in plan.walk())
            self._slots_within[id(step)] = tuple(slot for slot in inner if slot is not None)
        return self._slots_within[id(step)]

    @staticmethod
    def _updated_names(slots: Sequence[ScaleSlot]) -> set[str]:
        return {slot.name for slot in slots if slot.follows}

    def _arrays_in(self, step: ProductStep, slots: Sequence[ScaleSlot]) -> dict[str, Array]:
        """Arrays of NaN, which stand for the data of a branch that was not taken."""
        shapes = {}
        for inner, around in (pair for plan in step.inner for pair in plan.walk_within() if id(pair[0]) in self.slots):
            aval = inner.eqn.invars[1 - self.roundings[id(inner)][1]].aval
            lengths = [length for _, length in turns_around(around)]
            shapes[self.slots[id(inner)].name] = jnp.full((*lengths, *aval.shape), jnp.nan)
        return {slot.name: shapes[slot.name] for slot in slots}


def _entry_error(slot: ScaleSlot, entry: Array | None, shape: tuple[int, ...]) -> str:
    if entry is None:
        more = ", or for a learned scale what calibrate returns" if isinstance(slot.source, LSQ) else ""
        return f"scales has no {slot.name!r} of the {slot.place}: pass scales=low.start(params, ...){more}"
    return (
        f"scales: {slot.name!r} of the {slot.place} has shape {entry.shape} in a call, and its rule needs {shape}: it "
        "belongs to a function with another rule"
    )
