"""`report`: the effect of rules on each layer of a model; signal-to-noise ratios of its weights, inputs and results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.tracers import TraceState
from jax import Array

from jchop._common.checks import check, check_choice
from jchop._common.text import RowReport, TableOrLine, decibels, format_decibels
from jchop._quantized.products.rule import ROUNDING_FIELDS, Location, Rule, RuleLike, as_rule_tuple
from jchop._quantized.program.report import OPERANDS_BY_PLATFORM, ProgramReport, operand_types_on
from jchop._storage import QArray
from jchop.nn._nnx.layer_kinds import (
    NnxKind,
    check_param_axes,
    exact_and_rounded_param,
    packed_param_shape,
    param_layout,
    weight_names,
)
from jchop.nn._nnx.layers import NnxLayerRule, entry_parameters, nnx_layer_rules, nnx_layers
from jchop.nn._nnx.programs import nnx_methods
from jchop.nn._nnx.rounding_modules import RoundedConvolution
from jchop.nn._quantize import quantize
from jchop.nn._shared.program_classes import INPUTS_ADVICE, ExampleInputs
from jchop.nn._trees.equinox_modules import check_flax_or_equinox, equinox_methods, is_equinox_module

#: A parameter that stays in full precision: its path, its shape, and the reason.
WideParam = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True)
class LayerRow:
    """A row of a report: one layer of a model.

    Args:
        path: its path in the model.
        layer: its class.
        rule: its rule as text; empty if no rule matches.
        specs: the fields of the rule that apply to it; empty if it rounds nothing.
        bytes_before: bytes of its own parameters.
        bytes_after: bytes of its own parameters, if all that the rule rounds are stored packed.
        supported: whether the layer can be quantized.
        also: its other paths. Rules match all of them, and its bytes count once.
        wide: (path, shape, reason) of each of its own parameters that stays in full precision.
        operands: the types of the operands that reach the units of the platform in its forward product; empty without a
            platform or a product.
        stored: (name, spec as text) of each of its own parameters that is packed already.
        weight_snr: signal-to-noise ratio of its weights in dB, with batches; infinite if they are exact, None without
            a rule.
        activation_snr: the same of its results with its inputs alone rounded.
        output_snr: the same of its results with all its roundings, on its inputs in the model without rules. Both are
            NaN if the model calls it within a transformation of JAX.
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
class ModelReport(RowReport):
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
        """Bytes of all parameters, if all that rules round are stored packed."""
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
                *(
                    "" if ratio is None else format_decibels(ratio)
                    for ratio in (row.weight_snr, row.activation_snr, row.output_snr)[: len(ratio_heads)]
                ),
            )
            for row in self.rows
        ]
        total = ("", "", "", str(self.bytes_before), str(self.bytes_after), *("" for _ in ratio_heads))
        operand_rows = [row for row in self.rows if row.operands]
        lines = [f"multiplies: {row.path or '(the model)'}: {row.operands}" for row in operand_rows]
        return [[head, *body, total], *lines, *(f"stays wide: {path} {shape}: {why}" for path, shape, why in self.wide)]


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
        effective: the rule with the roundings that it does in this layer.
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


@overload
def report(
    model: nnx.Module,
    rules: RuleLike | None = ...,
    *,
    inputs: None = ...,
    platform: str | None = ...,
    batches: Iterable[Any] | None = ...,
) -> ModelReport: ...
@overload
def report(model: Any, rules: RuleLike, *, inputs: tuple[Any, ...], platform: str | None = ...) -> ProgramReport: ...
@overload
def report(
    model: Any, rules: RuleLike, *, inputs: Mapping[str, Any], platform: str | None = ...
) -> dict[str, ProgramReport]: ...
def report(
    model: Any,
    rules: RuleLike | None = None,
    *,
    inputs: ExampleInputs | None = None,
    platform: str | None = None,
    batches: Iterable[Any] | None = None,
) -> ModelReport | ProgramReport | dict[str, ProgramReport]:
    """Lists the effect of rules on a model, without quantizing it: on each layer, or with `inputs` on its program.

    Args:
        model: a module of Flax NNX, or of Equinox with `inputs`; its arrays may be abstract (`jax.eval_shape`).
        rules: as in `quantize`. Default None: no rule, so the table lists the layers.
        inputs: as in `quantize`: example arguments of the model's call, or of several methods. Default None.
        platform: ``"cpu"``, ``"v5e"``, ``"v6e"``, ``"v7x"``, ``"a100"``, ``"h200"`` or ``"b200"``. The report
            then says which types of operands reach its units in each forward product under a rule. Default None.
        batches: inputs of the model. The table then has signal-to-noise ratios in dB for each layer under a rule: of
            its weights, its inputs and its results. The ratio is 10 log10(Σ y² / Σ (y - z)²) with y without roundings.
            Each layer is run on the inputs that it has in the model without rules. Not with `inputs`. Default None.

    Returns:
        With `inputs` the report of `jchop.quantize_fn`, which has a row for every parameter and every product. For
        several methods, one report for each, by name.

        Without `inputs` a `ModelReport`, whose text is a table: path, layer, roundings, and the bytes of parameters
            before and after packing. It includes layers without a rule, and names the format of parameters that are
            packed already. Under rules, a line follows for each parameter that stays in full precision, with its shape
            and the reason. Products in the model's own code are not listed.

    Raises:
        TypeError, ValueError: for invalid rules, rules that disagree about one module, and specs in which a parameter
            cannot be packed. For `batches` that are empty, without rules, with `inputs`, or with a rule that rounds
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
    check_flax_or_equinox("model", model, "; one of Linen has jchop.nn.quantize(module, rules).report")
    if platform is not None:
        check_choice("platform", platform, tuple(OPERANDS_BY_PLATFORM))
    if batches is not None:
        wrongs = (("inputs", inputs is not None), ("no rules", not all_rules), ("no layers of Flax NNX", program))
        for name, wrong in wrongs:
            check(not wrong, f"batches: ratios of layers need rules, and no `inputs`; there are {name}")
        stochastic = any(rule.stochastic for rule in all_rules)
        check(not stochastic, "batches: a rule rounds stochastically; ratios need deterministic roundings")
    if inputs is not None or program:
        check(all_rules, "rules=None: a report of a program needs rules")
        if inputs is None:
            raise ValueError(f"{INPUTS_ADVICE}; the report of a module of Equinox is that of its program")
        reports = (equinox_methods if program else nnx_methods)(model, all_rules).report(inputs, platform)
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
    for i, row in enumerate(rows):
        if row.path in ratios:
            weights, inputs_alone, results = ratios[row.path]
            rows[i] = replace(row, weight_snr=weights, activation_snr=inputs_alone, output_snr=results)
    return ModelReport(tuple(rows))


def _nnx_layer_row(decision: NnxLayerRule, under_rules: bool, platform: str | None) -> LayerRow:
    """The row of a layer: its rule, its roundings, and its bytes before and after."""
    entry, kind, _, matching_rule, rule = decision
    (path, *also), layer = entry.paths, entry.module
    name, params = type(layer).__name__, entry_parameters(entry)
    rule_text = "" if matching_rule is None else str(matching_rule)
    before = sum(map(bytes_of_tree, params.values()))
    wide = []
    for key, value in params.items() if under_rules else ():
        why = why_wide(name, kind is not None, matching_rule, None if kind is None else kind.parameters.get(key), rule)
        if why is not None and isinstance(value, nnx.Param):
            wide.append(("/".join(filter(None, (path, key))), tuple(value.shape), why))
    values = {key: value.get_value() for key, value in params.items()}
    packed_specs = tuple((key, str(value.spec)) for key, value in values.items() if isinstance(value, QArray))
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


# -- ratios ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Args:
        path: of the layer.
        method: the name of the method: ``"attend"`` of an Embed, else ``"__call__"``.
        args: its arguments.
        kwargs: its arguments by keyword.
        result: its result.
    """

    path: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def of(self, layers: Mapping[str, Any]) -> Any:
        """The result of another layer for the same call; `layers` has it by its path."""
        return getattr(layers[self.path], self.method)(*self.args, **self.kwargs)


def weight_ratio(module: Any, kind: NnxKind, rule: Rule | None) -> float:
    """The signal-to-noise ratio of the weights of a layer."""
    power = noise = 0.0
    for name in weight_names(module, kind):
        spec = None if rule is None else kind.spec(rule, name)
        if spec is not None:
            exact, rounded = (np.asarray(x, np.float64) for x in exact_and_rounded_param(module, kind, name, spec))
            power, noise = power + float(np.sum(exact**2)), noise + float(np.sum((rounded - exact) ** 2))
    return decibels(power, noise)


def watch_layer_calls(model: nnx.Module, paths: Iterable[str], see: Callable[[LayerCall], Any]) -> tuple[Any, set[str]]:
    """A copy of a model, whose layers return `see` of each call, and the layers whose calls cannot be seen.

    These layers are called within a transformation of JAX, which hands out no arrays, or are stacks, called layer by
    layer. They are added in calls of the copy.

    Args:
        model: a model, which is not changed.
        paths: of the layers that are watched.
        see: a function of each call.
    """
    copy = nnx.merge(*nnx.split(model), copy=True)
    opaque_paths: set[str] = set()
    path_set, outer_trace = set(paths), TraceState()

    def see_call(call: LayerCall, is_stack: bool) -> Any:
        if is_stack or not outer_trace.is_valid():
            opaque_paths.add(call.path)
            return call.result
        return see(call)

    for path, module, kind in list(nnx_layers(copy)):
        if path in path_set:
            stack = kind is not None and any(param_layout(module, kind, name)[1] for name in weight_names(module, kind))
            _record_calls_of(module, path, partial(see_call, is_stack=stack))
    return copy, opaque_paths


def record_layer_calls(
    model: nnx.Module, run: Callable[[Any], Any], paths: Iterable[str], probes: Sequence[Array] | None = None
) -> tuple[Any, list[LayerCall], set[str]]:
    """The result of `run` for a copy of the model, the calls of its layers, and the layers whose calls cannot be kept.

    Args:
        model: a model, which is not changed.
        run: a function of the copy.
        paths: of the layers whose calls are noted.
        probes: an array for each call, which is added to its result.
    """
    calls: list[LayerCall] = []

    def note(call: LayerCall) -> Any:
        calls.append(call)
        return call.result if probes is None else call.result + probes[len(calls) - 1]

    copy, opaque_paths = watch_layer_calls(model, paths, note)
    return run(copy), calls, opaque_paths


def _record_calls_of(module: Any, path: str, record_call: Callable[[LayerCall], Any]) -> None:
    """Has a layer note its calls, and return the result of `record_call`."""
    base = type(module)

    def record_method(method: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return record_call(LayerCall(path, method, args, kwargs, getattr(base, method)(self, *args, **kwargs)))

        return call

    methods = {name: record_method(name) for name in ("__call__", "attend") if hasattr(base, name)}
    module.__class__ = type(base.__name__, (base,), methods)


def layer_ratios(
    model: nnx.Module, rules: Sequence[Rule], layer_rules: dict[str, Rule], batches: Iterable[Any]
) -> dict[str, tuple[float, float, float]]:
    """10 log10(Σ x² / Σ (x - z)²) in dB of the tensors x of layers and the rounded ones z, by path; infinite if exact.

    These are the weights of a layer, its results with its inputs alone rounded, and its results with all its roundings.
    Its inputs are the ones in the model without rules. The last two are nan if its calls cannot be kept.

    Args:
        model: a module that is not quantized.
        rules: all rules; none is stochastic.
        layer_rules: of each layer under a rule, its path and the rule.
        batches: inputs of the model.

    Raises:
        ValueError: without batches.
    """
    inputs_only = [
        Rule(rule.path, layer=rule.layer, operation=rule.operation, activation=rule.activation) for rule in rules
    ]
    rounded, input_rounded = (
        {path: module for path, module, _ in nnx_layers(quantize(model, rule_set))} for rule_set in (rules, inputs_only)
    )
    sums = {path: np.zeros(3) for path in layer_rules}
    unknown: set[str] = set()
    count = 0
    for batch in batches:
        count += 1
        _, calls, opaque_paths = record_layer_calls(model, lambda copy, batch=batch: copy(batch), layer_rules)
        for call in calls:
            errors = [_sum_squares_of_leaves(call.of(layers), call.result) for layers in (input_rounded, rounded)]
            sums[call.path] += (_sum_squares_of_leaves(call.result, None), *errors)
        unknown |= opaque_paths
    check(count, "batches: there must be at least one")
    layers = {path: (module, kind) for path, module, kind in nnx_layers(model)}
    ratios = {}
    for path, (power, input_noise, result_noise) in sums.items():
        module, kind = layers[path]
        assert kind is not None
        has_calls = power and path not in unknown
        results = (decibels(power, input_noise), decibels(power, result_noise)) if has_calls else (math.nan, math.nan)
        ratios[path] = (weight_ratio(module, kind, layer_rules[path]), *results)
    return ratios


def _sum_squares_of_leaves(tree: Any, other: Any) -> float:
    """The sum of the squares of all numbers of a result, or of its differences from another one."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    others = [0.0] * len(leaves) if other is None else [np.asarray(x, np.float64) for x in jax.tree.leaves(other)]
    return math.fsum(float(np.sum((x - y) ** 2)) for x, y in zip(leaves, others, strict=True))
