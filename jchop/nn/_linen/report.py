"""The effect of rules on each layer of a Linen module: the rows of `jchop.nn.report`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jchop._quantized.products.chip_operands import operand_types_on
from jchop._quantized.products.rule import ROUNDING_FIELDS, Rule
from jchop.nn._linen.layer_kinds import LINEN_KINDS
from jchop.nn._linen.layers import LayerMatch, LinenLayerRule, LinenPath, ModuleCalls, linen_layer_rules
from jchop.nn._shared.model_report import LayerRow, ModelReport, bytes_of_tree, why_wide

__all__ = ["linen_report"]


def linen_report(calls: ModuleCalls, rules: Sequence[Rule], variables: Any, platform: str | None) -> ModelReport:
    """A row for everything with parameters and for every layer that ran.

    Args:
        calls: the layers that ran.
        rules: the rules.
        variables: unpacked.
        platform: of the operands that reach its units; None for none.
    """
    layer_rules = linen_layer_rules(calls, rules, variables)
    return ModelReport(
        tuple(_linen_layer_row(path, layer_rules[path], calls, rules, platform) for path in sorted(layer_rules))
    )


def _linen_layer_row(
    path: LinenPath, layer_rule: LinenLayerRule, calls: ModuleCalls, rules: Sequence[Rule], platform: str | None
) -> LayerRow:
    layer, shapes = calls.get(path, (None, {}))
    (params, rule_index, rule), kind = layer_rule, LINEN_KINDS.get(type(layer))
    matching_rule = None if rule_index is None else rules[rule_index]
    name = "parameters" if layer is None else type(layer).__name__
    wide = []
    for key, value in params.items():
        why = why_wide(name, kind is not None, matching_rule, None if kind is None else kind.parameters.get(key), rule)
        if why is not None:
            wide.append(("/".join((*path, key)), tuple(value.shape), why))
    before = after = sum(map(bytes_of_tree, params.values()))
    specs: tuple[tuple[str, str], ...] = ()
    operands = ""
    if kind is not None and rule is not None:
        fields = kind.fields(params)
        specs = tuple(
            (f, str(getattr(rule, f))) for f in ROUNDING_FIELDS if f in fields and getattr(rule, f) is not None
        )
        match = LayerMatch(layer, rule, shapes)
        for key in [key for key in kind.parameters if key in params and match.spec(key) is not None]:
            after += bytes_of_tree(_packed_linen_shape(match, key, params[key])) - bytes_of_tree(params[key])
        if platform is not None and kind.hook is not None:
            carrier = jnp.dtype(getattr(layer, "dtype", None) or jnp.result_type(*params.values())).name
            operands = operand_types_on(platform, rule, carrier, bool(params), kind.operation == "dot_general")
    rule_text = "" if matching_rule is None else str(matching_rule)
    return LayerRow(
        "/".join(path), name, rule_text, specs, before, after, kind is not None, operands=operands, wide=tuple(wide)
    )


def _packed_linen_shape(match: LayerMatch, name: str, value: Any) -> Any:
    match.check_axes()
    return jax.eval_shape(lambda value: match.pack_param(name, value, jax.random.key(0))[0], value)
