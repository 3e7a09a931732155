"""Kept scales of Linen's layers: their variables, and the rounding of operands under them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jchop._common.settings import split_prng_key
from jchop._quantized.products.contraction import ProductRoundings
from jchop._quantized.products.operand_layout import OperandLayout
from jchop._quantized.products.scale_from import LSQ, DelayedScaling, MovingAverage, ScaleFrom
from jchop._quantized.scales.formulas import (
    finite_range,
    initial_scale,
    round_in_range,
    round_lsq_operand,
    update_history,
    update_range,
)
from jchop._spec.spec import Spec
from jchop.nn._linen.layer_kinds import learned_scale_name
from jchop.nn._linen.layers import LayerMatch, LinenPath
from jchop.nn._nnx.attach import fit_param_scales

Array = jax.Array

__all__ = ["SCALE_COLLECTION", "initial_linen_scales", "round_linen_operands"]

#: The collection of ranges and histories; learned scales are parameters.
SCALE_COLLECTION = "scale_stats"
#: The operands of a product, each with the field of a rule that rounds it.
_OPERAND_ROLES = (("left", "activation"), ("right", "weight"))


def round_linen_operands(
    layer: Any, source: ScaleFrom | None, layout: OperandLayout, how: ProductRoundings, x: Array, w: Array,
    key: Array | None, starts_scales: bool,
) -> tuple[Array, Array, ProductRoundings, Array | None]:  # fmt: skip
    """The operands of a product, rounded if their scales are kept, and the remaining roundings.

    Args:
        layer: a bound layer of Linen, in its call.
        source: the source of scales; None: from each array.
        layout: of the kernel.
        how: the roundings of the product.
        x: the input.
        w: the kernel.
        key: of the product.
        starts_scales: whether the call is to begin scales, not to follow data.
    """
    if source is None:
        return x, w, how, key
    operands = [x, w]
    for i, (side, role) in enumerate(_OPERAND_ROLES):
        spec = getattr(how, side)
        if spec is None or role not in source.fields:
            continue
        operand_key, key = (None, None) if key is None else split_prng_key(key)
        operand_layout = layout if role == "weight" else None
        operands[i] = _round_linen_operand(
            layer, source, role, spec, operand_layout, operands[i], operand_key, starts_scales
        )
        how = replace(how, **{side: None})
    return operands[0], operands[1], how, key


def _round_linen_operand(
    layer: Any, source: ScaleFrom, role: str, spec: Spec, layout: OperandLayout | None, x: Array, key: Array | None,
    starts_scales: bool,
) -> Array:  # fmt: skip
    if isinstance(source, LSQ):
        name = learned_scale_name(role)
        if starts_scales and role == "activation":
            if not layer.has_variable("params", name):
                layer.put_variable("params", name, initial_scale(finite_range(x), spec))
            return x  # as `calibrate` runs a layer: its input is seen, not rounded
        shape = () if layout is None else None  # that of a kernel is for `quantize` to see
        return round_lsq_operand(source, layout, x, spec, _scale_variable(layer, "params", name, shape), key)
    is_fixed = starts_scales or not layer.is_mutable_collection(SCALE_COLLECTION)
    if isinstance(source, MovingAverage):
        name = f"{role}_range"
        span = stats = update_range(source, _scale_variable(layer, SCALE_COLLECTION, name, (2,)), x, is_fixed)
    else:
        assert isinstance(source, DelayedScaling)
        name = f"{role}_history"
        span, stats = update_history(source, _scale_variable(layer, SCALE_COLLECTION, name, (source.length,)), x)
    if not is_fixed:
        layer.put_variable(SCALE_COLLECTION, name, stats)
    return round_in_range(x, spec, span, key)


def initial_linen_scales(
    layers: Mapping[LinenPath, LayerMatch], params: Mapping[LinenPath, Array]
) -> dict[str, dict[LinenPath, Array]]:
    """The state of layers before their first call: by collection, then by path.

    The learned scale of an activation is not among them: `round_linen_operands` begins it, in a call on data.

    Args:
        layers: by path.
        params: by path.
    """
    scales: dict[str, dict[LinenPath, Array]] = {}
    for path, match in layers.items():
        if match.kind.keeps_scales:
            for collection, name, value in _initial_layer_scales(match, params[(*path, "kernel")]):
                scales.setdefault(collection, {})[(*path, name)] = value
    return scales


def _initial_layer_scales(match: LayerMatch, kernel: Array) -> Iterator[tuple[str, str, Array]]:
    rule, layout, stack = match.rule, match.layout("kernel"), match.stack_ndim("kernel", kernel)
    source, shape = rule.scale_from, kernel.shape[:stack]
    for role in () if source is None else source.fields:
        spec = getattr(rule, role)
        if spec is None:
            continue
        if isinstance(source, MovingAverage):
            yield SCALE_COLLECTION, f"{role}_range", jnp.full((*shape, 2), jnp.nan)
        elif isinstance(source, DelayedScaling):
            yield SCALE_COLLECTION, f"{role}_history", jnp.zeros((*shape, source.length))
        elif role == "weight":
            assert layout is not None
            yield (
                "params",
                learned_scale_name(role),
                fit_param_scales(match.in_compute_dtype(kernel), layout, stack, spec),
            )


def _scale_variable(layer: Any, collection: str, name: str, shape: tuple[int, ...] | None) -> Array:
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
