"""Rows of the report of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jchop._common.text import TableOrLine, Tables, format_decibels
from jchop._quantized.products.rule import Rule

#: A parameter that stays in full precision: its path, its shape, and the reason.
WideParam = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True)
class LayerRow:
    """One layer.

    Args:
        path: its path in the model.
        layer: its class.
        rule: its rule as text; empty if no rule matches.
        specs: the fields of the rule that apply to it; empty if it rounds nothing.
        bytes_before: bytes of its own parameters.
        bytes_after: bytes of its own parameters, with those that the rule rounds stored packed.
        supported: whether the layer can be quantized.
        also: its other paths. Rules match all of them, and its bytes count once.
        wide: (path, shape, reason) of each of its own parameters that stays in full precision.
        operands: the types of the operands that reach the units of the platform in its forward product; empty without a
            platform or a product.
        stored: (name, spec as text) of each of its own parameters that is packed already.
        weight_snr: signal-to-noise ratio of its weights in dB, with batches; infinite if they are exact, None without
            a rule.
        activation_snr: the same of its results with its inputs alone rounded.
        output_snr: the same of its results with all its roundings, on the inputs that the model without rules gives it.
            Both are nan if the model calls it within a transformation of JAX.
    """

    path: str
    layer: str
    rule: str
    specs: tuple[tuple[str, str], ...]
    bytes_before: int
    bytes_after: int
    supported: bool = True
    also: tuple[str, ...] = ()
    wide: tuple[WideParam, ...] = ()
    operands: str = ""
    stored: tuple[tuple[str, str], ...] = ()
    weight_snr: float | None = None
    activation_snr: float | None = None
    output_snr: float | None = None


@dataclass(frozen=True)
class ModelReport(Tables):
    """The layers of a model. Its text is a table, and a line for each parameter that stays in full precision.

    Args:
        rows: a `LayerRow` for each layer.
    """

    rows: tuple[LayerRow, ...]

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Bytes of all parameters, with those that rules round stored packed."""
        return sum(row.bytes_after for row in self.rows)

    @property
    def wide(self) -> tuple[WideParam, ...]:
        """The path, the shape and the reason of each parameter that stays in full precision."""
        return tuple(wide for row in self.rows for wide in row.wide)

    @property
    def _align(self) -> str:
        return "<<<>>" + ">>>" * self._has_ratios

    @property
    def _has_ratios(self) -> bool:
        return any(row.output_snr is not None for row in self.rows)

    def _parts(self) -> list[TableOrLine]:
        ratio_heads = ("weights dB", "inputs dB", "results dB") if self._has_ratios else ()
        head = ("path", "layer", "rounds", "bytes", "packed", *ratio_heads)
        body = [
            (
                ", ".join([row.path or "(the model)", *row.also]),
                row.layer,
                _describe_roundings(row),
                str(row.bytes_before),
                str(row.bytes_after),
                *(_ratio_cells(row) if ratio_heads else ()),
            )
            for row in self.rows
        ]
        total = ("", "", "", str(self.bytes_before), str(self.bytes_after), *("" for _ in ratio_heads))
        operand_rows = [row for row in self.rows if row.operands]
        lines = [f"multiplies: {row.path or '(the model)'}: {row.operands}" for row in operand_rows]
        return [[head, *body, total], *lines, *(f"stays wide: {path} {shape}: {why}" for path, shape, why in self.wide)]


def _ratio_cells(row: LayerRow) -> list[str]:
    ratios = (row.weight_snr, row.activation_snr, row.output_snr)
    return ["" if ratio is None else format_decibels(ratio) for ratio in ratios]


def _describe_roundings(row: LayerRow) -> str:
    if not row.supported:
        return "cannot be quantized" if row.rule else "nothing, and cannot be quantized"
    packed_text = ", ".join(f"{name} is {spec}" for name, spec in row.stored)
    return ", ".join(f"{name}={spec}" for name, spec in row.specs) or packed_text or "nothing"


def why_wide(layer: str, quantizable: bool, rule: Rule | None, role: str | None, effective: Rule | None) -> str | None:
    """The reason why a parameter of a layer stays in full precision; None if it does not.

    Args:
        layer: its class.
        quantizable: whether the class can be quantized.
        rule: the rule of the layer.
        role: the field of a rule for the parameter; None if there is none.
        effective: what the rule rounds in this layer.
    """
    if rule is None:
        return "no rule matches"
    if not rule.rounds:
        return f"{rule} rounds nothing"
    if not quantizable:
        return f"{layer} cannot be quantized as a layer, only in its program"
    if role is None:
        return f"no field of a rule is for this parameter of {layer}"
    if getattr(rule, role) is None:
        return f"{rule} has no {role}"
    return None if getattr(effective, role) is not None else f"{rule} leaves norms, since it decides other layers, too"


def bytes_of_tree(tree: Any) -> int:
    """The bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
