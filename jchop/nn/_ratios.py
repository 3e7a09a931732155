"""Signal-to-noise ratios of tensors of layers: weights, inputs and results, on the inputs that the model gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx.tracers import TraceState

from jchop._common.text import decibels
from jchop._quantized.products.rule import Rule
from jchop.nn._nnx.attach import exact_and_rounded_param, param_layout
from jchop.nn._nnx.layer_kinds import NnxKind
from jchop.nn._nnx.layers import nnx_layers
from jchop.nn._nnx.quantize import quantize

Array = jax.Array


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Args:
        path: of the layer.
        method: the name of the method: ``"attend"`` of an Embed, else ``"__call__"``.
        args: its arguments.
        kwargs: its arguments by keyword.
        result: what it gave.
    """

    path: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def of(self, layers: Mapping[str, Any]) -> Any:
        """What another layer gives for the same call; `layers` has it by its path."""
        return getattr(layers[self.path], self.method)(*self.args, **self.kwargs)


@dataclass(frozen=True)
class LayerRatios:
    """10 log10(Σ x² / Σ (x - z)²) in dB of the tensors x of a layer and the rounded ones z; infinite if z is exact.

    It is nan of inputs and results if `record_layer_calls` does not give the calls of the layer.

    Args:
        weights: of its weights.
        inputs: of its results with its inputs rounded, and nothing else.
        results: of its results with all its roundings, on the inputs that it has in the model without rules.
    """

    weights: float
    inputs: float
    results: float


def weight_names(module: Any, kind: NnxKind) -> list[str]:
    """The names of the parameters with the role of weights."""
    return [name for name, role in kind.parameters.items() if role == "weight" and getattr(module, name) is not None]


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
    """A copy of a model, whose layers return what `see` says of their calls, and the layers whose calls cannot be seen.

    Those are called within a transformation of JAX, which hands out no arrays, or are stacks, called layer by layer.
    They are added in calls of the copy.

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
    """What `run` gives for a copy of the model, the calls of its layers, and the layers whose calls cannot be kept.

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
    """Has a layer note its calls, and return what `record_call` gives."""
    base = type(module)

    def record_method(method: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return record_call(LayerCall(path, method, args, kwargs, getattr(base, method)(self, *args, **kwargs)))

        return call

    methods = {name: record_method(name) for name in ("__call__", "attend") if hasattr(base, name)}
    module.__class__ = type(base.__name__, (base,), methods)


def layer_ratios(
    model: nnx.Module, rules: Sequence[Rule], layer_rules: dict[str, Rule], batches: Iterable[Any]
) -> dict[str, LayerRatios]:
    """The ratios of layers, by path.

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
    if not count:
        raise ValueError("batches: there must be at least one")
    layers = {path: (module, kind) for path, module, kind in nnx_layers(model)}
    ratios = {}
    for path, (power, input_noise, result_noise) in sums.items():
        module, kind = layers[path]
        assert kind is not None
        has_calls = power and path not in unknown
        results = (decibels(power, input_noise), decibels(power, result_noise)) if has_calls else (math.nan, math.nan)
        ratios[path] = LayerRatios(weight_ratio(module, kind, layer_rules[path]), *results)
    return ratios


def _sum_squares_of_leaves(tree: Any, other: Any) -> float:
    """The sum of the squares of all numbers of a result, or of its differences from another one."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    others = [0.0] * len(leaves) if other is None else [np.asarray(x, np.float64) for x in jax.tree.leaves(other)]
    return math.fsum(float(np.sum((x - y) ** 2)) for x, y in zip(leaves, others, strict=True))
