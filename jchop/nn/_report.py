"""`report`: the effect of rules on each layer of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, overload

import jax.numpy as jnp
from flax import nnx

from jchop._common.checks import check_choice, short_repr
from jchop._quantized.products.chip_operands import OPERANDS_BY_PLATFORM, operand_types_on
from jchop._quantized.products.rule import ROUNDING_FIELDS, Location, Rule, as_rule_tuple
from jchop._quantized.program.report import ProgramReport
from jchop.nn._nnx.attach import check_param_axes, packed_param_shape
from jchop.nn._nnx.layers import NnxLayerRule, entry_parameters, nnx_layer_rules
from jchop.nn._nnx.programs import report_program
from jchop.nn._nnx.rounding_modules import RoundedConvolution
from jchop.nn._nnx.variables import QuantizedParam
from jchop.nn._ratios import LayerRatios, layer_ratios
from jchop.nn._shared.model_report import LayerRow, ModelReport, bytes_of_tree, why_wide
from jchop.nn._shared.program_classes import ExampleInputs
from jchop.nn._trees.equinox_modules import is_equinox_module, report_equinox_module
from jchop.storage import QArray


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
    model: Any, rules: Rule | Iterable[Rule], *, inputs: Mapping[str, Any], platform: str | None = ...
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
        >>> print(jc.nn.report(model, jc.Rule("layers/0", weight="int4(group=all)")))
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


def _nnx_layer_row(decision: NnxLayerRule, under_rules: bool, platform: str | None) -> LayerRow:
    entry, kind, _, matching_rule, rule = decision
    (path, *also), layer = entry.paths, entry.module
    name, rule_text, params = (
        type(layer).__name__,
        "" if matching_rule is None else str(matching_rule),
        entry_parameters(entry),
    )
    before = sum(map(bytes_of_tree, params.values()))
    wide = []
    for key, value in params.items() if under_rules else ():
        why = why_wide(name, kind is not None, matching_rule, None if kind is None else kind.parameters.get(key), rule)
        if why is not None and isinstance(value, nnx.Param):
            wide.append(("/".join(filter(None, (path, key))), tuple(value.shape), why))
    packed_values = {key: value.get_value() for key, value in params.items() if isinstance(value, QuantizedParam)}
    packed_specs = tuple((key, str(qarray.spec)) for key, qarray in packed_values.items() if isinstance(qarray, QArray))
    extra_fields: dict[str, Any] = {"also": tuple(also), "wide": tuple(wide), "stored": packed_specs}
    if kind is None or rule is None:
        return LayerRow(path, name, rule_text, (), before, before, kind is not None, **extra_fields)
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
        extra_fields["operands"] = operand_types_on(platform, rule, carrier, bool(kind.parameters), matrices)
    return LayerRow(path, name, rule_text, specs, before, after, **extra_fields)
