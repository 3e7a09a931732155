"""`report`: what rules make of each layer of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jchop.nn._equip import QuantizedParam, packed_shape
from jchop.nn._kinds import Kind
from jchop.nn._layers import layers_of
from jchop.nn._rule import FIELDS, Rule, as_rules, rule_of

__all__ = ["LayerRow", "ModelReport", "report"]


@dataclass(frozen=True)
class LayerRow:
    """One layer.

    Args:
        path: where it stands in the model.
        layer: its class.
        rule: the rule that it gets, as text; empty where none matches.
        specs: what it rounds: the fields of the rule that say something for it. Empty: nothing.
        bytes_before: of its own parameters.
        bytes_after: of those with what the rule rounds stored packed.
        supported: whether the layer can be quantized.
    """

    path: str
    layer: str
    rule: str
    specs: tuple[tuple[str, str], ...]
    bytes_before: int
    bytes_after: int
    supported: bool = True


@dataclass(frozen=True)
class ModelReport:
    """The layers of a model; as text, a table.

    Args:
        rows: a `LayerRow` for each layer.
    """

    rows: tuple[LayerRow, ...]

    @property
    def bytes_before(self) -> int:
        """Of all parameters."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Of all parameters, with what rules round stored packed."""
        return sum(row.bytes_after for row in self.rows)

    def __str__(self) -> str:
        head = ("path", "layer", "rounds", "bytes", "packed")
        body = [
            (row.path or "(the model)", row.layer, _described(row), str(row.bytes_before), str(row.bytes_after))
            for row in self.rows
        ]
        total = ("", "", "", str(self.bytes_before), str(self.bytes_after))
        table = [head, *body, total]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        right = (False, False, False, True, True)
        return "\n".join(
            "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True))
            for line in table
        )


def _described(row: LayerRow) -> str:
    if not row.supported:
        return "cannot be quantized" if row.rule else "nothing, and cannot be quantized"
    return ", ".join(f"{name}={spec}" for name, spec in row.specs) or "nothing"


def report(model: nnx.Module, rules: Rule | Iterable[Rule] | None = None) -> ModelReport:
    """What becomes of each layer of a model under rules, before anything is done.

    Args:
        model: a module of Flax NNX; its arrays may be shapes alone (`jax.eval_shape`).
        rules: as in `quantize`. Default None: no rule, so the table lists the layers.

    Returns:
        A `ModelReport`, whose text is a table: path, layer, what is rounded to what, and the bytes of parameters as
        they are and packed. Layers that no rule matches are there, too. A product that the model itself writes has no
        line.

    Raises:
        TypeError, ValueError: for rules that are none, and specs that a parameter cannot be packed in.

    Example:
        >>> import jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(1)))
        >>> print(jc.nn.report(model, jc.nn.Rule("layers/0", weight="int4(group=all)")))
        path      layer      rounds                          bytes  packed
        layers/0  Linear     weight=int4(group=all)            144      48
        layers/1  LayerNorm  nothing                            32      32
                                                               176      80
    """
    given = () if rules is None else as_rules(rules)
    return ModelReport(tuple(_row(path, layer, kind, given) for path, layer, kind in layers_of(model)))


def _row(path: str, layer: Any, kind: Kind | None, rules: tuple[Rule, ...]) -> LayerRow:
    number = rule_of(path, rules)
    rule = None if number is None else rules[number]
    name, shown = type(layer).__name__, "" if rule is None else str(rule)
    before = sum(_bytes(value) for value in vars(layer).values() if isinstance(value, nnx.Param | QuantizedParam))
    if kind is None or rule is None:
        return LayerRow(path, name, shown, (), before, before, kind is not None)
    fields = kind.fields(layer)
    specs = tuple((f, str(getattr(rule, f))) for f in FIELDS if f in fields and getattr(rule, f) is not None)
    after = before
    for parameter, role in kind.parameters.items():
        value, spec = getattr(layer, parameter), getattr(rule, role)
        if isinstance(value, nnx.Param) and spec is not None:
            after += _bytes(packed_shape(layer, kind, parameter, spec)) - _bytes(value)
    return LayerRow(path, name, shown, specs, before, after)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
