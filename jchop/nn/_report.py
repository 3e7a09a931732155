"""`report`: the effect of rules on each layer of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jchop._common.checks import check_choice, short_repr
from jchop._common.decibels import format_decibels
from jchop._common.text import TableOrLine, Tables
from jchop._quantized.products.chip_operands import OPERANDS_BY_PLATFORM, operand_types_on
from jchop._quantized.products.rule import ROUNDING_FIELDS, Location, Rule, as_rule_tuple
from jchop._quantized.program.report import ProgramReport
from jchop.nn._nnx.attach import check_param_axes, packed_param_shape
from jchop.nn._nnx.layers import NnxLayerRule, entry_parameters, nnx_layer_rules
from jchop.nn._nnx.programs import report_program
from jchop.nn._nnx.rounding_modules import RoundedConvolution
from jchop.nn._nnx.variables import QuantizedParam
from jchop.nn._ratios import LayerRatios, layer_ratios
from jchop.nn._shared.program_classes import ExampleInputs
from jchop.nn._trees.equinox_modules import is_equinox_module, report_equinox_module
from jchop.storage import QArray

__all__ = ["LayerRow", "ModelReport", "WideParam", "bytes_of_tree", "report", "why_wide"]

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
        more = ("weights dB", "inputs dB", "results dB") if self._has_ratios else ()
        head = ("path", "layer", "rounds", "bytes", "packed", *more)
        body = [
            (
                ", ".join([row.path or "(the model)", *row.also]),
                row.layer,
                _describe_roundings(row),
                str(row.bytes_before),
                str(row.bytes_after),
                *(_ratio_cells(row) if more else ()),
            )
            for row in self.rows
        ]
        total = ("", "", "", str(self.bytes_before), str(self.bytes_after), *("" for _ in more))
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


@overload
def report(
    model: nnx.Module,
    rules: Rule | Iterable[Rule] | None = ...,
    *,
    inputs: None = ...,
    platform: str | None = ...,
    batches: Iterable[Any] | None = ...,
) -> ModelReport: ...
@overload
def report(
    model: Any, rules: Rule | Iterable[Rule], *, inputs: tuple[Any, ...], platform: str | None = ...
) -> ProgramReport: ...
@overload
def report(
    model: Any,
    rules: Rule | Iterable[Rule],
    *,
    inputs: Mapping[str, Any],
    platform: str | None = ...,
) -> dict[str, ProgramReport]: ...
def report(
    model: Any,
    rules: Rule | Iterable[Rule] | None = None,
    *,
    inputs: ExampleInputs | None = None,
    platform: str | None = None,
    batches: Iterable[Any] | None = None,
) -> ModelReport | ProgramReport | dict[str, ProgramReport]:
    """The effect of rules on a model, without quantizing it: on each layer, or with `inputs` on its program.

    Args:
        model: a module of Flax NNX, or of Equinox with `inputs`; its arrays may be abstract (`jax.eval_shape`).
        rules: as in `quantize`. Default None: no rule, so the table lists the layers.
        inputs: as in `quantize`: example arguments of the model's call, or of several methods. Default None.
        platform: ``"cpu"``, ``"v5e"``, ``"v6e"``, ``"v7x"``, ``"a100"``, ``"h200"`` or ``"b200"``. The report
            then says which types of operands reach its units in each forward product under a rule. Default None.
        batches: inputs of the model. The table then has the signal-to-noise ratio of the weights of each layer under a
            rule, of its inputs and of its results, in dB: 10 log10(Σ y² / Σ (y - z)²) with y without roundings. Each
            layer is run on the inputs that it has in the model without rules. Not with `inputs`. Default None.

    Returns:
        With `inputs` the report of `jchop.quantize_fn`, which has a row for every parameter and every product; of
        several methods, one for each, by name.

        Without, a `ModelReport`, whose text is a table: path, layer, roundings, and the bytes of parameters before and
        after packing. It includes layers without a rule; of parameters that are packed already it names the format.
        Under rules, a line follows for each parameter that stays in full precision, with its shape and the reason.
        Products in the model's own code are not listed.

    Raises:
        TypeError, ValueError: for invalid rules, rules that disagree about one module, and specs in which a parameter
            cannot be packed; for `batches` without rules, without one, with `inputs`, or with a rule that rounds
            stochastically.

    Example:
        >>> import jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(1)))
        >>> print(jc.nn.report(model, jc.nn.Rule("layers/0", weight="int4(group=all)")))
        path      layer      rounds                          bytes  packed
        layers/0  Linear     weight=int4(group=all)            144      48
        layers/1  LayerNorm  nothing                            32      32
                                                               176      80
        stays wide: layers/0/bias (4,): Rule('layers/0', weight=int4(group=all)) has no bias
        stays wide: layers/1/bias (4,): no rule matches
        stays wide: layers/1/scale (4,): no rule matches
    """
    all_rules = () if rules is None else as_rule_tuple(rules)
    program = is_equinox_module(model)
    if not program and not isinstance(model, nnx.Module):
        raise TypeError(
            f"model={short_repr(model)} must be a module of Flax NNX or Equinox; one of Linen has "
            "jchop.nn.linen.Quantized.report"
        )
    if platform is not None:
        check_choice("platform", platform, tuple(OPERANDS_BY_PLATFORM))
    if batches is not None:
        wrongs = (("inputs", inputs is not None), ("no rules", not all_rules), ("no layers of Flax NNX", program))
        for name, wrong in wrongs:
            if wrong:
                raise ValueError(f"batches: ratios of layers need rules, and no `inputs`; there are {name}")
        if any(rule.stochastic for rule in all_rules):
            raise ValueError("batches: a rule rounds stochastically; ratios need deterministic roundings")
    if inputs is not None or program:
        if not all_rules:
            raise ValueError("rules=None: a report of a program needs rules")
        of_program: Any = report_equinox_module if program else report_program
        reports = of_program(model, all_rules, inputs, platform)
        return reports if isinstance(inputs, Mapping) else reports["__call__"]
    decisions = nnx_layer_rules(model, all_rules)
    rows = [_nnx_layer_row(one, bool(all_rules), platform) for one in decisions]
    if batches is None:
        return ModelReport(tuple(rows))
    layer_rules = {
        row.path: one.effective_rule
        for row, one in zip(rows, decisions, strict=True)
        if row.specs and one.effective_rule is not None
    }
    ratios = layer_ratios(model, all_rules, layer_rules, batches)
    return ModelReport(tuple(_row_with_ratios(row, ratios[row.path]) if row.path in ratios else row for row in rows))


def _row_with_ratios(row: LayerRow, ratios: LayerRatios) -> LayerRow:
    return replace(row, weight_snr=ratios.weights, activation_snr=ratios.inputs, output_snr=ratios.results)


def why_wide(layer: str, quantizable: bool, rule: Rule | None, role: str | None, own: Rule | None) -> str | None:
    """The reason why a parameter of a layer stays in full precision; None if it does not.

    Args:
        layer: its class.
        quantizable: whether the class can be quantized.
        rule: the rule of the layer.
        role: the field of a rule for the parameter; None if there is none.
        own: what the rule rounds in this layer.
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
    return None if getattr(own, role) is not None else f"{rule} leaves norms, since it decides other layers, too"


def _nnx_layer_row(one: NnxLayerRule, under_rules: bool, platform: str | None) -> LayerRow:
    entry, kind, _, matching_rule, rule = one
    (path, *also), layer = entry.paths, entry.module
    name, rule_text, own = (
        type(layer).__name__,
        "" if matching_rule is None else str(matching_rule),
        entry_parameters(entry),
    )
    before = sum(map(bytes_of_tree, own.values()))
    wide = []
    for key, value in own.items() if under_rules else ():
        why = why_wide(name, kind is not None, matching_rule, None if kind is None else kind.parameters.get(key), rule)
        if why is not None and isinstance(value, nnx.Param):
            wide.append(("/".join(filter(None, (path, key))), tuple(value.shape), why))
    packed_values = {key: value.get_value() for key, value in own.items() if isinstance(value, QuantizedParam)}
    packed_specs = tuple((key, str(q.spec)) for key, q in packed_values.items() if isinstance(q, QArray))
    more: dict[str, Any] = {"also": tuple(also), "wide": tuple(wide), "stored": packed_specs}
    if kind is None or rule is None:
        return LayerRow(path, name, rule_text, (), before, before, kind is not None, **more)
    fields = kind.fields(layer)
    specs = tuple((f, str(getattr(rule, f))) for f in ROUNDING_FIELDS if f in fields and getattr(rule, f) is not None)
    check_param_axes(layer, kind, Location(name, path, rule))
    after = before
    for parameter in kind.parameters:
        value, spec = getattr(layer, parameter), kind.spec(rule, parameter)
        if isinstance(value, nnx.Param) and spec is not None:
            after += bytes_of_tree(packed_param_shape(layer, kind, parameter, spec)) - bytes_of_tree(value)
    if platform is not None and kind.product is not None and not isinstance(layer, nnx.Embed):
        carrier = jnp.dtype(getattr(layer, "dtype", None) or getattr(layer, "param_dtype", "float32")).name
        matrices = kind.product[1] is not RoundedConvolution
        more["operands"] = operand_types_on(platform, rule, carrier, bool(kind.parameters), matrices)
    return LayerRow(path, name, rule_text, specs, before, after, **more)


def bytes_of_tree(tree: Any) -> int:
    """The bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
