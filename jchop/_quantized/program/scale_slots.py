"""Where a program keeps scales: the operands whose scales are state, and the shapes of that state."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jchop._common.paths import path_pattern
from jchop._program.control import operands_of_role, roles_of, turns_around
from jchop._program.step import CUSTOM_CALLS, ProgramPlan
from jchop._quantized.products.contraction import ProductRoundings
from jchop._quantized.products.rule import ScaleFrom
from jchop._quantized.products.scale_from import LSQ, DelayedScaling, MovingAverage, has_tensor_scale
from jchop._quantized.products.scales import (
    RANGE,
    SCALE,
    STATE_KINDS,
    RangeObserver,
    check_calibration_data,
    initial_scale,
    range_observer_for,
    state_shape,
)
from jchop._quantized.program.param_uses import ProductStep
from jchop._spec.spec import Gradient, Spec

#: The names of entries, which end with the kinds of state.
_ENTRY_NAME = re.compile(rf"(.*)_(activation|weight)_({'|'.join(STATE_KINDS.values())})(_[0-9]+)?")


def state_kind(name: str) -> str:
    """The kind of state of an entry."""
    return next(kind for kind in STATE_KINDS.values() if re.search(rf"_{kind}(_[0-9]+)?$", name))


class Scales(NamedTuple):
    """The kept scales of a program: a pytree, like an Optax state.

    Args:
        learned: scales that are parameters (`LSQ`), by name. Train them with the model's.
        stats: ranges (least, largest) and histories of magnitudes, by name. Calls on data update them.

    A name is the path of the product's parameter, then ``activation`` or ``weight``, then ``range``, ``history`` or
    ``scale``: ``"mlp/kernel_activation_range"``. Scales of a stack of layers, in a scan, have its axis in front.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> rule = jc.Rule(weight="int8", activation="int8", scale_from=jc.MovingAverage(0.5))
        >>> low = jc.quantize_fn(lambda p, x: x @ p["w"], rule)
        >>> params, x = {"w": jnp.ones((2, 2))}, jnp.array([[1.0, -2.0]])
        >>> y, scales = low.update(params, x, scales=low.start(params, x))
        >>> {name: span.tolist() for name, span in scales.stats.items()}
        {'w_activation_range': [-2.0, 1.0]}
    """

    learned: dict[str, Array] = {}  # noqa: RUF012  a named tuple's default is never changed here
    stats: dict[str, Array] = {}  # noqa: RUF012

    @property
    def entries(self) -> dict[str, Array]:
        """All scales, ranges and histories, by name."""
        return {**self.stats, **self.learned}


def scales_after_packing(scales: Scales) -> Scales:
    """The scales without the scales of parameters, which become parts of packed ones."""
    return scales._replace(
        learned={name: v for name, v in scales.learned.items() if not name.endswith("_weight_scale")}
    )


def merge_scales(scales: Scales, known: Scales) -> Scales:
    """Scales with others, that are known, in their places."""
    return Scales({**scales.learned, **known.learned}, {**scales.stats, **known.stats})


@dataclass(frozen=True)
class ScaleSlot:
    """A product whose data operand has kept scales, or may have a fixed range.

    Args:
        name: of its entry.
        spec: of the operand.
        source: the rule's; None for a range that `calibrate` may fix.
        loops: the lengths of the scans around it, and whether it has an entry for each turn.
        place: of the product, for errors.
        in_branch: whether calls may not reach it.
    """

    name: str
    spec: Spec
    source: ScaleFrom | None
    loops: tuple[tuple[int, bool], ...]
    place: Any = field(default=None, compare=False)
    in_branch: bool = False

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes of stacks of layers in front of its entry."""
        return tuple(length for length, own in self.loops if own)

    @property
    def kind(self) -> str:
        """The kind of its entry."""
        return RANGE if self.source is None else STATE_KINDS[type(self.source)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its entry."""
        return (*self.stack, *state_shape(self.source))

    @property
    def follows(self) -> bool:
        """Whether calls on data update the entry."""
        return isinstance(self.source, MovingAverage | DelayedScaling)

    def start(self) -> Array:
        """The entry before the first call; a learned scale has none."""
        return jnp.full(self.shape, jnp.nan, jnp.float32) if self.kind == RANGE else jnp.zeros(self.shape)


def scale_slots_of(
    plan: ProgramPlan, roundings: Mapping[int, ProductRoundings], paths: Sequence[str]
) -> tuple[dict[int, ScaleSlot], dict[int, tuple[str, ...]]]:
    """The slots of a program by the identity of their steps, and of each scan the names with an entry an iteration.

    Raises:
        NotImplementedError: for a source of scales in a program of which nothing but results can come back.
    """
    slots: dict[int, ScaleSlot] = {}
    entries_of_scan: dict[int, tuple[str, ...]] = {}
    counts: dict[str, int] = {}
    for step, around in plan.walk_within():
        product_roundings = roundings.get(id(step), ProductRoundings())
        left, weight, rule = product_roundings.left, product_roundings.weight, product_roundings.place.rule
        if rule is None or weight < 0 or left is None or product_roundings.codes:
            continue
        source = rule.scale_from if rule.scale_from is not None and "activation" in rule.scale_from.fields else None
        # Without a source, an operand that is rounded once under one scale may have a fixed range.
        once = has_tensor_scale(left) and product_roundings.keeps_left and left.gradient == Gradient()
        if source is None and not once:
            continue
        leaf: int = step.uses[weight][0].leaf
        name = f"{paths[leaf] or 'params'}_activation_{RANGE if source is None else STATE_KINDS[type(source)]}"
        enclosure = _enclosure_text(around)
        if enclosure and source is None:
            continue
        # The state of a while loop can be carried, its data not be seen.
        if enclosure and (enclosure != _WHILE_LOOP or isinstance(source, LSQ)):
            raise NotImplementedError(
                f"{rule}: scale_from of {step.where}, which is within "
                f"{enclosure}, out of which its data cannot come. Put Rule({path_pattern(paths[leaf])!r}, ...) without "
                "scale_from before it"
            )
        counts[name] = counts.get(name, 0) + 1
        name = name if counts[name] == 1 else f"{name}_{counts[name] - 1}"
        loops, in_branch = [], any(outer.name == "cond" for outer in around)
        for scan, length in turns_around(around):
            sliced = operands_of_role(scan, "sliced", scan.known)
            takes_apart = any(origin.leaf == leaf for fact in sliced for origin in fact.origins)
            loops.append((length, takes_apart))
            if takes_apart:
                entries_of_scan[id(scan)] = (*entries_of_scan.get(id(scan), ()), name)
        place = product_roundings.place
        slots[id(step)] = ScaleSlot(name, left, source, tuple(loops), place, in_branch)
    return slots, entries_of_scan


def check_entry_names(names: Iterable[str], slots: Iterable[ScaleSlot], rules: Mapping[str, Any]) -> None:
    """Refuse entries of another function or other rules, and fixed ranges of some products alone.

    Without a fixed range all activations have the scales of each array. An entry may be of a product that the program
    has for other shapes, and none is known of a branch that no batch reached.

    Args:
        names: of the entries.
        slots: of the program.
        rules: of the parameters, by path.

    Raises:
        ValueError: that names the missing entries, and the entries that have no use.
    """
    present, slot_of_name = set(names), {slot.name: slot for slot in slots}
    fixed = {name for name, slot in slot_of_name.items() if slot.source is None}
    extra = sorted(name for name in present if name not in slot_of_name and not _may_have_entry(name, rules))
    reached = sorted(name for name in fixed - present if not slot_of_name[name].in_branch)
    missing = reached if fixed & present or extra else []
    problems = [f"has no {name!r}" for name in missing] + [f"has {name!r}, which has no use here" for name in extra]
    if problems:
        raise ValueError(
            f"scales {', '.join(problems)}: pass what start, update or calibrate returned for this function, these "
            "rules and, among the batches, arguments of these shapes"
        )


def _may_have_entry(name: str, rules: Mapping[str, Any]) -> bool:
    """Whether a parameter has a rule under which an entry of this name is kept."""
    match = _ENTRY_NAME.fullmatch(name)
    rule = None if match is None else rules.get(match[1])
    if match is None or rule is None or getattr(rule, match[2]) is None:
        return False
    source = rule.scale_from if rule.scale_from is not None and match[2] in rule.scale_from.fields else None
    if source is None:
        return match[2] == "activation" and match[3] == RANGE
    return match[3] == STATE_KINDS[type(source)]


_WHILE_LOOP = "a while loop"
_ENCLOSURE_NAMES = dict.fromkeys(CUSTOM_CALLS, "a function with a derivative of its own") | {"while": _WHILE_LOOP}


def _enclosure_text(around: Sequence[ProductStep]) -> str:
    """The steps that data cannot come out of; empty if they come out of all steps around."""
    closed = (step for step in around if "passed" not in roles_of(step) and not turns_around([step]))
    names = [_ENCLOSURE_NAMES.get(step.name, step.name) for step in closed]
    return next((name for name in names if name != _WHILE_LOOP), names[0] if names else "")


# -- calibration -----------------------------------------------------------------------------------------------------


def per_iteration(slot: ScaleSlot, x: Array, function: Callable[[Array], Array]) -> dict[tuple[int, ...], Array]:
    """A function of the data of each entry of a slot: of its iterations, by index; of other loops, all together."""
    own = [axis for axis, (_, mine) in enumerate(slot.loops) if mine]
    by_index = jnp.moveaxis(x, own, range(len(own)))
    return {index: function(by_index[index]) for index in np.ndindex(*slot.stack)}


def stack_entries(
    slot: ScaleSlot, values: Mapping[tuple[int, ...], Array], function: Callable[[Array], Array] = jnp.asarray
) -> Array:
    """The entry of a slot from a function of the value of each iteration."""
    each = [function(values[index]) for index in np.ndindex(*slot.stack)]
    return jnp.stack(each).reshape(*slot.stack, *each[0].shape)


class ScaleCalibration:
    """The statistics that the slots of a program have collected.

    Args:
        method: as of `calibrate`.
        combine: as of `calibrate`.
    """

    def __init__(self, method: str, combine: str) -> None:
        self._make = range_observer_for(method, combine)
        self._slots: dict[str, tuple[ScaleSlot, dict[tuple[int, ...], RangeObserver]]] = {}

    def see(self, arrays: Mapping[str, tuple[ScaleSlot, Array]]) -> None:
        """Note the data of one call."""
        for slot, data in arrays.values():
            if isinstance(slot.source, DelayedScaling):
                continue
            _, observers = self._slots.setdefault(slot.name, (slot, {}))
            for index, x in per_iteration(slot, data, lambda x: x).items():
                if isinstance(x, Tracer):
                    raise ValueError(
                        "calibrate of a program runs on data, and cannot be part of a traced function, as under "
                        "jax.jit or nnx.eval_shape"
                    )
                if not bool(jnp.isnan(x).all()):  # else a branch was not taken
                    check_calibration_data(x, f"product of {slot.name!r}")
                    observers.setdefault(index, self._make(slot.spec)).see(x)

    def into(self, scales: Scales) -> Scales:
        """Scales with the entries of all slots that have seen data.

        Raises:
            ValueError: if there is none.
        """
        new = Scales({}, {})
        for name, (slot, observers) in self._slots.items():
            spans = {index: span for index, one in observers.items() if (span := one.range()) is not None}
            if len(spans) < math.prod(slot.stack):
                continue
            if slot.kind == SCALE:
                new.learned[name] = stack_entries(slot, spans, lambda span, s=slot: initial_scale(span, s.spec))
            else:
                new.stats[name] = stack_entries(slot, spans)
        if not new.entries:
            raise ValueError(
                "no product of the program has an activation with one scale for the whole array, such as 'int8', "
                "without a gradient of its own, backward roundings or a history, and data that is finite"
            )
        return merge_scales(scales, new)
