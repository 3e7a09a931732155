"""A program run with the operands of its products rounded, and with kept scales: state in, state out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from jchop._common.paths import common_path_pattern
from jchop._common.settings import split_prng_key
from jchop._program.bind import bind
from jchop._program.control import Interpret, ScanOrder, ScanTurn, WhileParts, roles_of, turns_around
from jchop._program.run import Runner, interpret
from jchop._program.step import CUSTOM_CALLS, HIGH_CALLS, PLAIN_CALLS, ProgramPlan
from jchop._quantized.products.codes import CodedArray, block_along_sum
from jchop._quantized.products.contraction import OperandForms, ProductRoundings, contract
from jchop._quantized.products.operand_layout import OperandLayout, round_in_layout
from jchop._quantized.products.product import DotProduct, OperandSwap
from jchop._quantized.products.scale_from import LSQ
from jchop._quantized.products.scales import round_under_state
from jchop._quantized.program.adapters import add_lora_delta, reorder_rows
from jchop._quantized.program.call import Keys, LazyParam, RoundedAndFull, is_packed_param, rounded_value
from jchop._quantized.program.param_uses import ProductStep
from jchop._quantized.program.provenance import MOVE_PRIMITIVES
from jchop._quantized.program.scale_slots import ScaleSlot
from jchop._storage._quantize import multiply_in_own_dtype

#: Moves of one array, under which elements, scales and zero points stay beside each other.
_CODE_MOVES = MOVE_PRIMITIVES - {"concatenate", "dynamic_update_slice", "optimization_barrier", "pad", "stack"}
#: Moves after which a product takes a parameter with an adapter still as a whole; of a stack, casts alone.
_ADAPTER_CASTS = frozenset({"convert_element_type", "copy", "optimization_barrier"})
_ADAPTER_MOVES = _ADAPTER_CASTS | {"transpose", "reshape", "squeeze", "expand_dims"}


class QuantizedRunner(Runner):
    """Runs a program with the products under rules.

    Args:
        roundings: of each product that rounds more than its weights, by the identity of its step.
        paths: of the parameters, for messages.
    """

    def __init__(self, roundings: dict[int, ProductRoundings], paths: Sequence[str] = ()) -> None:
        self.roundings, self.paths = roundings, paths
        self._busy: dict[int, bool] = {}
        #: Products of codes whose weight has none, by the path of the weight, in a run that has not ended.
        self.without_codes: dict[str, tuple[ProductStep, ProductRoundings]] = {}
        #: Whether a run may find a weight without codes; False after one that did not.
        self.is_doubtful = any(how.codes and not how.stored_only and how.weight >= 0 for how in roundings.values())

    def prepare(self, part: ProductStep, env: dict[Any, Any], seeds: Keys | None) -> None:
        """Parameters are rounded once, before the first equation that computes with them."""
        for i, v in enumerate(part.operands):
            param = None if isinstance(v, core.Literal) else env[v]
            if isinstance(param, LazyParam) and not self._passes(part, i, param):
                env[v] = param.numbers(seeds)

    def finish(self, value: Any, seeds: Keys | None) -> Any:
        """A result, which is an array."""
        return rounded_value(value.numbers(seeds) if isinstance(value, LazyParam) else value)

    def _passes(self, step: ProductStep, i: int, param: LazyParam) -> bool:
        """Whether a program within a step takes a parameter before it is rounded."""
        role = roles_of(step)[i] if step.kind == "control" else "other"
        if role == "fixed":  # its codes are multiplied as they are stored: nothing is computed again in each turn
            return param.codes and is_packed_param(param.value)
        return role == "passed" or (role == "sliced" and param.stack > 0)

    def control(self, step: ProductStep, seeds: Keys | None, args: list[Any]) -> list[Any]:
        """Programs without a rounding are left whole, with their own derivatives."""
        if not any(isinstance(x, LazyParam | RoundedAndFull) for x in args) and not self._is_busy(step):
            return bind(step.eqn.primitive, step.eqn.params, *args)
        if step.name in CUSTOM_CALLS and not self._is_busy(step):
            return bind(step.eqn.primitive, step.eqn.params, *map(rounded_value, args))
        forms = {"passed": lambda x: x, "fixed": lambda x: x, "sliced": _as_scan_input}
        args = [forms.get(role, rounded_value)(x) for x, role in zip(args, roles_of(step), strict=True)]
        return super().control(step, seeds, args)

    def _is_busy(self, step: ProductStep) -> bool:
        if id(step) not in self._busy:
            inner = (one for plan in step.inner for one in plan.walk())
            self._busy[id(step)] = any(id(one) in self.roundings for one in inner)
        return self._busy[id(step)]

    def run(self, part: ProductStep, seeds: Keys | None, args: list[Any]) -> list[Any]:
        """The results of an equation; operands of products are rounded, and moves keep a parameter's codes."""
        if part.moves and any(isinstance(x, RoundedAndFull) for x in args):
            return self._move_param(part, args)
        if part.call is not None:
            return self._declared_call(part, part.call.layouts, seeds, list(map(rounded_value, args)))
        if part.product is not None and any(map(_adapter_of, args)):
            return [self._adapter_product(part, seeds, args)]
        if part.product is not None:
            args = _with_factors_on_inputs(part, args)
        if id(part) in self.roundings:
            return [self._product(part, seeds, args)]
        return bind(part.eqn.primitive, part.eqn.params, *map(rounded_value, args))

    def check_codes(self) -> None:
        """Refuse a run, at its end, in which weights had no codes.

        Raises:
            ValueError: that names all of them, and the rule that leaves them in floats.
        """
        failures, self.without_codes = self.without_codes, {}
        if failures:
            raise ValueError(_no_codes_message(failures, self.paths))

    def _adapter_product(self, part: ProductStep, seeds: Keys | None, args: list[Any]) -> Array:
        """A product of a parameter that has an adapter."""
        side = next(i for i, x in enumerate(args) if _adapter_of(x) is not None)
        adapter, x = _adapter_of(args[side]), rounded_value(args[1 - side])
        (y,) = self.run(part, seeds, [replace(x, adapter=None) if i == side else x for i, x in enumerate(args)])
        assert adapter is not None
        return add_lora_delta(adapter, part, side, x, y, None if seeds is None else seeds.turn(part.number, 1).key)

    def enter(self, step: ProductStep, seeds: Keys | None, args: list[Any], inner: Interpret) -> list[Any]:
        """The results of a step that holds programs; the results of a plain call may be parameters that have moved."""
        if step.name in PLAIN_CALLS:
            inner = partial(interpret, _InlineRunner(self))
        return super().enter(step, seeds, args, inner)

    def operand(
        self, step: ProductStep, x: Array, roundings: ProductRoundings, key: Any
    ) -> tuple[Array, ProductRoundings, Any]:
        """The operand of data, the roundings that remain, and their key."""
        return x, roundings, key

    def _move_param(self, part: ProductStep, args: list[Any]) -> list[Any]:
        """Numbers that move with those before their rounding; codes move alone, and a cast leaves them as they are."""
        run = partial(bind, part.eqn.primitive, part.eqn.params)
        beside = [(x.adapter, x.factors) if isinstance(x, RoundedAndFull) else (None, None) for x in args]
        has_stack = any(adapter is not None and adapter.stack for adapter, _ in beside)
        moves = _ADAPTER_CASTS if has_stack else _ADAPTER_MOVES
        if part.name in moves and any(value is not None for pair in beside for value in pair):
            alone = [replace(x, adapter=None, factors=None) if isinstance(x, RoundedAndFull) else x for x in args]
            outs = zip(self._move_param(part, alone), beside, strict=True)
            return [replace(out, adapter=adapter, factors=factors) for out, (adapter, factors) in outs]
        low, full = run(*map(rounded_value, args)), run(*(x.full if isinstance(x, RoundedAndFull) else x for x in args))
        first, *rest = args
        moving = first.codes if isinstance(first, RoundedAndFull) else None
        codes: list[CodedArray | None] = [None] * len(low)
        if moving is not None and not any(isinstance(x, RoundedAndFull) for x in rest):
            fill = part.eqn.params.get("fill_value")  # beyond the end of the array that a gather reads
            if part.name == "convert_element_type":
                codes = [moving]
            elif part.name in _CODE_MOVES and (fill is None or fill != fill):
                codes = [moving.map_arrays(lambda v, i=i: _move_code_part(part, v, rest)[i]) for i in range(len(low))]
        return [RoundedAndFull(*each) for each in zip(low, full, codes, strict=True)]

    def _declared_call(
        self, step: ProductStep, layouts: Sequence[OperandLayout | None], seeds: Keys | None, args: list[Any]
    ) -> list[Any]:
        """A call whose sums a rule declares, as a whole, of rounded data and parameters."""
        how, count = self.roundings.get(id(step)), 2 * len(args)
        if how is not None:
            key = None if seeds is None or not how.stochastic else seeds.turn(step.number).key
            keys = [None] * count if key is None else split_prng_key(key, count)
            for i, layout in enumerate(layouts):
                if layout is not None and step.data[i]:
                    args[i] = round_in_layout(layout, args[i], how.left, *keys[2 * i : 2 * i + 2])
        return bind(step.eqn.primitive, step.eqn.params, *args)

    def _product(self, step: ProductStep, seeds: Keys | None, args: list[Any]) -> Array:
        """A product of rounded operands, in codes if its rule and its weight have them."""
        roundings = self.roundings[id(step)]
        weight = roundings.weight
        assert step.product is not None
        key = None if seeds is None or not roundings.stochastic else seeds.turn(step.number).key
        product = OperandSwap(step.product) if weight == 0 else step.product
        x, w = (args[1], args[0]) if weight == 0 else (args[0], args[1])
        x, w = _cast_integers(x, w), _cast_integers(w, x)
        extra = tuple(map(rounded_value, args[2:]))
        x, roundings, key = self.operand(step, rounded_value(x), roundings, key)
        if weight < 0:  # both operands are data
            return contract(product, x, rounded_value(w), roundings, OperandForms(key, extra=extra))
        full = w.full if isinstance(w, RoundedAndFull) else w
        codes = w.codes if isinstance(w, RoundedAndFull) and roundings.codes else None
        if roundings.codes and roundings.right is not None and codes is None:  # an error, when all of them are known
            path = next((self.paths[use.leaf] for use in step.uses[weight] if use.leaf < len(self.paths)), "*")
            if not roundings.stored_only:
                self.without_codes.setdefault(path, (step, roundings))
            roundings = replace(roundings, codes=False)
        if codes is not None and roundings.right is not None:
            group = block_along_sum(roundings.right, product.forward.right.ndim)
            block = group and math.gcd(group, *(use.block_of(group) for use in step.uses[weight]))
            codes = replace(codes, block=block)
        return contract(product, x, full, roundings, OperandForms(key, rounded_value(w), codes, extra=extra))


class _InlineRunner(Runner):
    """Another runner, for a program whose results stay the same: arrays, or parameters that have moved."""

    def __init__(self, runner: QuantizedRunner) -> None:
        self.prepare, self.run, self.control = runner.prepare, runner.run, runner.control

    def finish(self, value: Any, seeds: Keys | None) -> Any:
        """A result of the program; a parameter that has only moved is rounded now."""
        return value.numbers(seeds) if isinstance(value, LazyParam) else value


def _adapter_of(x: Any) -> Any:
    return x.adapter if isinstance(x, RoundedAndFull) else None


def _with_factors_on_inputs(step: ProductStep, args: list[Any]) -> list[Any]:
    """The operands of a product; one beside a parameter with factors is multiplied by these."""
    side = next((i for i, x in enumerate(args) if isinstance(x, RoundedAndFull) and x.factors is not None), None)
    if side is None:
        return args
    w, x, (use,), product = args[side], rounded_value(args[1 - side]), step.uses[side], step.product
    assert isinstance(product, DotProduct) and use.view is not None
    axes, layouts = product.contracting[1 - side], product.forward
    factors = reorder_rows(w.factors[:, None], use.view.contracting).reshape([x.shape[axis] for axis in axes])
    free = (layouts.right if side == 0 else layouts.left).free
    factors = jnp.expand_dims(factors.transpose(np.argsort(axes)), tuple(free))
    x = multiply_in_own_dtype(_cast_integers(x, w.low), factors)
    pair = [replace(w, factors=None), x]
    return [*(pair if side == 0 else reversed(pair)), *args[2:]]


def _no_codes_message(failures: dict[str, tuple[ProductStep, ProductRoundings]], paths: Sequence[str]) -> str:
    """Why weights have no codes, and how to change that."""
    path, *others = failures
    step, roundings = failures[path]
    why = "computed with before the product, or put in another order, or sent between devices"
    if all(use.is_intact for use in step.uses[roundings.weight]):
        why = (
            "joined with others, padded, chosen by a branch, carried by a loop, or an argument of shard_map or of a "
            "function with a derivative of its own"
        )
    rest = f", like {len(others)} other{'s' * (len(others) > 1)}, such as {others[0]!r}," if others else ""
    pattern = path if path == "*" else common_path_pattern(failures, (path for path in paths if path not in failures))
    return (
        f"product='codes': the weight {path!r}{rest} of {step.where} is {why}, so "
        f"it has no codes there; put Rule({pattern!r}, ...) without product before {roundings.place.rule}"
    )


def _move_code_part(part: ProductStep, v: Array, rest: list[Any]) -> list[Any]:
    """A move of elements, scales or zero points; where scales are NaN beyond the end, integers are 0."""
    params = part.eqn.params
    if part.name == "gather" and params["fill_value"] is not None and not jnp.issubdtype(v.dtype, jnp.inexact):
        params = {**params, "fill_value": 0}
    return bind(part.eqn.primitive, params, v, *rest)


def _as_scan_input(x: Any) -> Any:
    """A stack of which each turn of a loop takes one."""
    if not isinstance(x, RoundedAndFull) or x.codes is None:
        return x
    if x.stack:
        return replace(x, stack=x.stack - 1)
    return replace(x, codes=replace(x.codes, qarray=None))  # the scales of the stored array have no axis of turns


def _cast_integers(x: Any, other: Any) -> Any:
    """An operand; integers as floats of the other's type, as the product itself takes them."""
    if isinstance(x, RoundedAndFull) or jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return x.astype(rounded_value(other).dtype)


# -- kept scales -------------------------------------------------------------------------------------------------------


class ScaleStateRunner(QuantizedRunner):
    """Products under rules and kept scales; made for one call.

    Args:
        plain: the products without kept scales.
        slots: of products, by the identity of their steps.
        entries_of_scan: of each scan the names that have an entry for each iteration.
        entries: by name. Without a range that `calibrate` may fix, the range of the array itself is used.
        mode: ``"fixed"``: entries stay. ``"update"``: `updates` has them after the call. ``"observe"``: `updates` has
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
        y, after = round_under_state(slot.source, entry, x, slot.spec, key, self.mode == "fixed")
        if slot.follows and self.mode == "update":
            self.updates[slot.name] = self.entries[slot.name] = after.astype(entry.dtype)
        return y

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
            after = entries | updates
            observed = (updates.get(name, blank) for name, blank in blanks.items())
            return [*out, *(after[name] for name in last), *observed]

        out = super().enter(step, seeds, [*args, *entry_values], run)
        count = len(step.eqn.outvars)
        self._take(dict(zip((*last, *blanks), out[count:], strict=True)))
        return out[:count]

    def scan(self, step: ProductStep, turn: ScanTurn, start: Any, xs: Any, order: ScanOrder) -> tuple[Any, Any]:
        """A loop carries entries, and returns the entries of single iterations as stacks."""
        rows = {name: self.entries[name] for name in self.entries_of_scan.get(id(step), ()) if name in self.entries}
        carried, updated_names = self._carried_entries(step, rows)

        def turn_with_entries(carry: Any, row: Any, count: Any) -> tuple[Any, Any]:
            (values, entries), (x, own) = carry, row
            (values, ys), updates = self._inside(partial(turn, values, x, count), {**entries, **own})
            kept = updates.keys() if self.mode == "observe" else own.keys() & updated_names
            taken = {name: new for name, new in updates.items() if name in kept}
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
        """The entries that a loop carries, which belong to no single iteration, and the names that it updates."""
        slots = self._slots_in(step)
        names = [slot.name for slot in slots if slot.name in self.entries and slot.name not in rows]
        updated = self._updated_names(slots) if self.mode == "update" else set()
        return {name: self.entries[name] for name in names}, updated

    def _inside(self, run: Callable[[], Any], entries: dict[str, Array]) -> tuple[Any, dict[str, Array]]:
        """The results of a program within, and the updates of its entries."""
        outer = self.entries, self.updates
        self.entries, self.updates = entries, {}
        try:
            return run(), self.updates
        finally:
            self.entries, self.updates = outer

    def _take(self, updates: Mapping[str, Array]) -> None:
        """Keeps updated entries of scales; in a run that updates, later layers read them."""
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
            aval = inner.eqn.invars[1 - self.roundings[id(inner)].weight].aval
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
