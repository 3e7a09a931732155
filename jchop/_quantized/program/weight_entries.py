"""The entries of parameters among kept scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jchop._quantized.products.scale_from import LSQ, DelayedScaling, ScaleFrom
from jchop._quantized.program.scale_slots import Scales
from jchop._quantized.program.weight_layout import WeightLayout, WeightScaleState
from jchop._quantized.scales.formulas import update_history
from jchop.storage._axis_groupings import map_over_stack

Array = jax.Array

__all__ = ["weight_scale_entry", "weight_scale_state"]


def weight_scale_state(
    name: str, placement: WeightLayout, source: ScaleFrom, value: Array, scales: Scales
) -> tuple[WeightScaleState, dict[str, Array]]:
    """The kept scales of a parameter, and its history after the call."""
    if isinstance(source, LSQ):
        return WeightScaleState(weight_scale_entry(scales, name, placement.fit_scales, value), source), {}
    assert isinstance(source, DelayedScaling)
    stack = value.ndim - placement.ndim

    def history_like(v: Any) -> Array:
        return jnp.zeros((*v.shape[:stack], source.length))

    def update_one(both: tuple[Array, Array]) -> tuple[Array, Array]:
        return update_history(source, *both)

    span, after = map_over_stack(stack, update_one, (weight_scale_entry(scales, name, history_like, value), value))
    return WeightScaleState(span, source), {name: after}


def weight_scale_entry(scales: Scales | None, name: str, like: Callable[[Any], Any], value: Any) -> Array:
    """An entry of a parameter, in the shape that `like` gives for it."""
    entry = None if scales is None else scales.entries.get(name)
    if entry is None:
        raise ValueError(f"scales has no {name!r}: pass scales=low.start(params, ...), or what training made of it")
    shape = jax.eval_shape(like, jax.ShapeDtypeStruct(value.shape, value.dtype)).shape
    if entry.shape != shape:
        raise ValueError(f"scales: {name!r} has shape {entry.shape}, and its rule needs {shape}: it is of another rule")
    return entry
