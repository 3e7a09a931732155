"""Arrays that a program was observed to round, and the entries of scales made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jchop._quantized.products.scale_from import DelayedScaling
from jchop._quantized.program.scale_slots import SCALE, Scales, ScaleSlot
from jchop._quantized.scales.formulas import initial_scale
from jchop._quantized.scales.observers import RangeObserver, check_calibration_data, range_observer_for

Array = jax.Array

__all__ = ["ScaleCalibration", "per_iteration", "stack_entries"]


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
    """What the slots of a program have seen.

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
                if isinstance(x, jax.core.Tracer):
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
        entries: dict[str, dict[str, Any]] = {"learned": {}, "stats": {}}
        for name, (slot, observers) in self._slots.items():
            spans = {index: span for index, one in observers.items() if (span := one.range()) is not None}
            if len(spans) == len([*np.ndindex(*slot.stack)]):
                trainable = slot.kind == SCALE
                entry_from = (lambda span, s=slot: initial_scale(span, s.spec)) if trainable else (lambda span: span)
                entries["learned" if trainable else "stats"][name] = stack_entries(slot, spans, entry_from)
        if not entries["learned"] and not entries["stats"]:
            raise ValueError(
                "no product of the program has an activation with one scale for the whole array, such as 'int8', "
                "without a gradient of its own, backward roundings or a history, and data that is finite"
            )
        return Scales({**scales.learned, **entries["learned"]}, {**scales.stats, **entries["stats"]})
