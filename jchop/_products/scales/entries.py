"""The entries of parameters among kept scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jchop._products.placement import Kept, Placement
from jchop._products.scale_from import LSQ, DelayedScaling, ScaleFrom
from jchop._products.scales.formulas import remembered
from jchop._products.scales.sites import Scales
from jchop.storage._layout import over_stack

Array = jax.Array

__all__ = ["entry_of", "weight_entry"]


def weight_entry(
    name: str, placement: Placement, source: ScaleFrom, value: Array, scales: Scales
) -> tuple[Kept, dict[str, Array]]:
    """The kept scales of a parameter, and its history after the call."""
    if isinstance(source, LSQ):
        return Kept(entry_of(scales, name, placement.fit_scales, value), source), {}
    assert isinstance(source, DelayedScaling)
    stack = value.ndim - placement.ndim

    def history_like(v: Any) -> Array:
        return jnp.zeros((*v.shape[:stack], source.length))

    def update_one(both: tuple[Array, Array]) -> tuple[Array, Array]:
        return remembered(source, *both)

    span, after = over_stack(stack, update_one, (entry_of(scales, name, history_like, value), value))
    return Kept(span, source), {name: after}


def entry_of(scales: Scales | None, name: str, like: Callable[[Any], Any], value: Any) -> Array:
    """An entry of a parameter, in the shape that `like` gives for it."""
    entry = None if scales is None else scales.entries.get(name)
    if entry is None:
        raise ValueError(f"scales has no {name!r}: pass scales=low.start(params, ...), or what training made of it")
    shape = jax.eval_shape(like, jax.ShapeDtypeStruct(value.shape, value.dtype)).shape
    if entry.shape != shape:
        raise ValueError(f"scales: {name!r} has shape {entry.shape}, and its rule needs {shape}: it is of another rule")
    return entry
