"""The modes of quantized models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from jchop._common.checks import check_choice
from jchop._quantized.products.rule import ROUNDING_FIELDS, Rule, as_rule_tuple

LayerMode = Literal["qat", "ptq", "weight_only", "emulate"]


#: The fields of a rule that a mode allows, and its purpose.
_MODE_FIELDS = {
    "weight_only": (("weight", "bias", "cache", "scale_from"), "rounds weights, biases and caches; use mode='ptq'"),
    "emulate": (("activation", "matmul"), "rounds every operation to activation, with the sums of matmul"),
}
LAYER_MODES = ("qat", "ptq", "weight_only", "emulate")


def check_layer_modes(rules: Sequence[Rule], mode: str, program: bool = False) -> None:
    """Refuse a mode that is none, and fields of rules that it does not have."""
    check_choice("mode", mode, LAYER_MODES)
    if program and mode == "emulate":
        raise ValueError("mode='emulate' is for layers of Flax: leave out inputs, or use jchop.emulate on the function")
    for rule in rules:
        _check_rule_mode(rule, mode)


def rules_of_mode(rules: Any, mode: str) -> tuple[Rule, ...]:
    """Rules as a mode has them: weights alone are multiplied as they are stored if a rule does not say otherwise."""
    return tuple(
        replace(rule, product="auto")
        if mode == "weight_only" and rule.product is None and rule.scale_from is None
        else rule
        for rule in as_rule_tuple(rules)
    )


def _check_rule_mode(rule: Rule, mode: str) -> None:
    if mode not in _MODE_FIELDS:
        return
    mode_fields, purpose = _MODE_FIELDS[mode]
    wrong = [name for name in ROUNDING_FIELDS if getattr(rule, name) is not None and name not in mode_fields]
    if wrong:
        raise ValueError(f"{rule} has {', '.join(wrong)}, and mode={mode!r} {purpose}")
