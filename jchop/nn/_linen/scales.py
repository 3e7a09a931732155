"""Kept scales of Linen's layers: their variables, and the rounding of operands under them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jchop._products.contraction import Roundings
from jchop._products.layout import Layout
from jchop._products.scale_from import LSQ, DelayedScaling, MovingAverage, ScaleFrom
from jchop._products.scales.formulas import moved, remembered, round_stepwise, round_within, span_of, step_of
from jchop._settings import split
from jchop.nn._linen.kinds import scale_name
from jchop.nn._linen.layers import Found, Path
from jchop.nn._nnx.attach import fitted
from jchop.spec import Spec

Array = jax.Array

__all__ = ["STATE", "begun", "prepared"]

#: The collection of ranges and histories; learned scales are parameters.
STATE = "scale_stats"
#: The operands of a product, each with the field of a rule that rounds it.
_OPERANDS = (("left", "activation"), ("right", "weight"))


def prepared(
    layer: Any, source: ScaleFrom | None, layout: Layout, how: Roundings, x: Array, w: Array, key: Array | None,
    starting: bool,
) -> tuple[Array, Array, Roundings, Array | None]:  # fmt: skip
    """The operands of a product, rounded if their scales are kept, and the remaining roundings.

    Args:
        layer: a bound layer of Linen, in its call.
        source: the source of scales; None: from each array.
        layout: of the kernel.
        how: the roundings of the product.
        x: the input.
        w: the kernel.
        key: of the product.
        starting: whether the call is to begin scales, not to follow data.
    """
    if source is None:
        return x, w, how, key
    operands = [x, w]
    for i, (side, role) in enumerate(_OPERANDS):
        spec = getattr(how, side)
        if spec is None or role not in source.fields:
            continue
        operand_key, key = (None, None) if key is None else split(key)
        operand_layout = layout if role == "weight" else None
        operands[i] = _rounded(layer, source, role, spec, operand_layout, operands[i], operand_key, starting)
        how = replace(how, **{side: None})
    return operands[0], operands[1], how, key


def _rounded(
    layer: Any, source: ScaleFrom, role: str, spec: Spec, layout: Layout | None, x: Array, key: Array | None,
    starting: bool,
) -> Array:  # fmt: skip
    if isinstance(source, LSQ):
        name = scale_name(role)
        if starting and role == "activation":
            if not layer.has_variable("params", name):
                layer.put_variable("params", name, step_of(span_of(x), spec))
            return x  # as `calibrate` runs a layer: its input is seen, not rounded
        shape = () if layout is None else None  # that of a kernel is for `quantize` to see
        return round_stepwise(source, layout, x, spec, _held(layer, "params", name, shape), key)
    fixed = starting or not layer.is_mutable_collection(STATE)
    if isinstance(source, MovingAverage):
        name = f"{role}_range"
        span = after = moved(source, _held(layer, STATE, name, (2,)), x, fixed)
    else:
        assert isinstance(source, DelayedScaling)
        name = f"{role}_history"
        span, after = remembered(source, _held(layer, STATE, name, (source.length,)), x)
    if not fixed:
        layer.put_variable(STATE, name, after)
    return round_within(x, spec, span, key)


def begun(layers: Mapping[Path, Found], params: Mapping[Path, Array]) -> dict[str, dict[Path, Array]]:
    """The state of layers before their first call: by collection, then by path.

    The learned scale of an activation is not among them: `round_linen_operands` begins it, in a call on data.

    Args:
        layers: by path.
        params: by path.
    """
    new: dict[str, dict[Path, Array]] = {}
    for path, match in layers.items():
        if match.kind.keeps_scales:
            for collection, name, value in _begin(match, params[(*path, "kernel")]):
                new.setdefault(collection, {})[(*path, name)] = value
    return new


def _begin(match: Found, kernel: Array) -> Iterator[tuple[str, str, Array]]:
    rule, layout, stack = match.rule, match.layout("kernel"), match.stack_ndim("kernel", kernel)
    source, shape = rule.scale_from, kernel.shape[:stack]
    for role in () if source is None else source.fields:
        spec = getattr(rule, role)
        if spec is None:
            continue
        if isinstance(source, MovingAverage):
            yield STATE, f"{role}_range", jnp.full((*shape, 2), jnp.nan)
        elif isinstance(source, DelayedScaling):
            yield STATE, f"{role}_history", jnp.zeros((*shape, source.length))
        elif role == "weight":
            assert layout is not None
            yield "params", scale_name(role), fitted(match.in_compute_dtype(kernel), layout, stack, spec)


def _held(layer: Any, collection: str, name: str, shape: tuple[int, ...] | None) -> Array:
    if not layer.has_variable(collection, name):
        raise ValueError(
            f"{type(layer).__name__} at {'/'.join(layer.path)!r} has no {name!r} in variables[{collection!r}]: take "
            "the variables that `init` returns, or `start` for those that are there; in flax.linen.scan, vmap and RNN "
            "that collection must have its place, as in variable_axes"
        )
    value = layer.get_variable(collection, name)
    if shape is not None and value.shape != shape:
        raise ValueError(
            f"{name!r} in variables[{collection!r}] of {type(layer).__name__} at {'/'.join(layer.path)!r} has shape "
            f"{value.shape}, and its rule needs {shape}: it belongs to a model with another rule"
        )
    return value
