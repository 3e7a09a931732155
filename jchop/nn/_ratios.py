"""Signal over error of the tensors of layers: weights, inputs and results, on the inputs that the model gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jchop._decibels import decibels
from jchop._products.rule import Rule
from jchop.nn._nnx.attach import laid_and_rounded
from jchop.nn._nnx.kinds import Kind
from jchop.nn._nnx.layers import layers_of
from jchop.nn._nnx.surgery import quantize

__all__ = ["Ratios", "calls_of", "ratios_of", "weight_ratio", "weights_of"]

Array = jax.Array


@dataclass(frozen=True)
class Ratios:
    """10 log10(Σ x² / Σ (x - z)²) in dB of the tensors x of a layer and the rounded ones z; infinite if z is exact.

    Args:
        weights: of its weights.
        inputs: of its results with its inputs rounded, and nothing else.
        results: of its results with all its roundings, on the inputs that it has in the model without rules.
    """

    weights: float
    inputs: float
    results: float


def weights_of(module: Any, kind: Kind) -> list[str]:
    """The names of the parameters with the role of weights."""
    return [name for name, role in kind.parameters.items() if role == "weight" and getattr(module, name) is not None]


def weight_ratio(module: Any, kind: Kind, rule: Rule | None) -> float:
    """Signal over error of the weights of a layer."""
    power = noise = 0.0
    for name in weights_of(module, kind):
        spec = None if rule is None else kind.spec(rule, name)
        if spec is not None:
            exact, low = (np.asarray(x, np.float64) for x in laid_and_rounded(module, kind, name, spec))
            power, noise = power + float(np.sum(exact**2)), noise + float(np.sum((low - exact) ** 2))
    return decibels(power, noise)


def calls_of(
    model: nnx.Module, run: Callable[[Any], Any], paths: Iterable[str], probes: Sequence[Array] | None = None
) -> tuple[Any, list[tuple[str, Any, Any, Any]]]:
    """What `run` gives for a copy of the model, and the calls of its layers: path, arguments, keywords and result.

    Args:
        model: a model, which is not changed.
        run: a function of the copy.
        paths: of the layers whose calls are noted.
        probes: an array for each call, which is added to its result.
    """
    copy = nnx.merge(*nnx.split(model), copy=True)
    calls: list[tuple[str, Any, Any, Any]] = []
    wanted = set(paths)
    for path, module, _ in list(layers_of(copy)):
        if path in wanted:
            _watch(module, path, calls, probes)
    return run(copy), calls


def _watch(module: Any, path: str, calls: list[Any], probes: Sequence[Array] | None) -> None:
    """Has a layer note its calls, and add the next probe to each result."""
    base = type(module)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = base.__call__(self, *args, **kwargs)
        number = len(calls)
        calls.append((path, args, kwargs, y))
        return y if probes is None else y + probes[number]

    module.__class__ = type(base.__name__, (base,), {"__call__": __call__})


def ratios_of(
    model: nnx.Module, rules: Sequence[Rule], chosen: dict[str, Rule], batches: Iterable[Any]
) -> dict[str, Ratios]:
    """The ratios of layers, by path.

    Args:
        model: a module that is not quantized.
        rules: all rules; none is stochastic.
        chosen: of each layer under a rule, its path and the rule.
        batches: inputs of the model.

    Raises:
        ValueError: without batches.
    """
    inputs_only = [Rule(rule.path, activation=rule.activation) for rule in rules]
    under, inside = (
        {path: module for path, module, _ in layers_of(quantize(model, each))} for each in (rules, inputs_only)
    )
    sums = {path: np.zeros(3) for path in chosen}
    count = 0
    for batch in batches:
        count += 1
        for path, args, kwargs, y in calls_of(model, lambda copy, batch=batch: copy(batch), chosen)[1]:
            errors = [_squares(low[path](*args, **kwargs), y) for low in (inside, under)]
            sums[path] += (_squares(y, None), *errors)
    if not count:
        raise ValueError("batches: there must be at least one")
    layers = {path: (module, kind) for path, module, kind in layers_of(model)}
    found = {}
    for path, (power, of_inputs, of_results) in sums.items():
        module, kind = layers[path]
        assert kind is not None
        results = (decibels(power, of_inputs), decibels(power, of_results)) if power else (math.nan, math.nan)
        found[path] = Ratios(weight_ratio(module, kind, chosen[path]), *results)
    return found


def _squares(tree: Any, other: Any) -> float:
    """The sum of the squares of all numbers of a result, or of its differences from another one."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    others = [0.0] * len(leaves) if other is None else [np.asarray(x, np.float64) for x in jax.tree.leaves(other)]
    return math.fsum(float(np.sum((x - y) ** 2)) for x, y in zip(leaves, others, strict=True))
