"""Converts modules to round their weights, activations and gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from jchop._paths import nearest_paths
from jchop.torch._quantizer import Quantizer
from jchop.torch._rules import Roundings, as_rules, first_match

__all__ = ["quantize_module"]

#: Names of the submodules that round the inputs and outputs of a layer.
INPUT, OUTPUT = "jchop_input", "jchop_output"
_PASSING = ("activation", "output", "gradient")


def quantize_module(module: nn.Module, rules: Mapping[str, Mapping[str, Any]], seed: int) -> nn.Module:
    """A copy of `module` that rounds by rules; see `jchop.torch.quantize`."""
    checked = as_rules(rules)
    result = copy.deepcopy(module)
    layers = list(_layers(result))
    used: dict[str, set[str]] = {}
    for number, (path, layer, opaque) in enumerate(layers):
        pattern = first_match(path, checked)
        if pattern is not None:
            _check_layer(layer, path, checked[pattern], opaque)
            used.setdefault(pattern, set()).update(_equip(layer, checked[pattern], (seed, number)))
    for pattern, roundings in checked.items():
        if pattern not in used:
            near = nearest_paths([pattern], [path for path, _, _ in layers])
            raise ValueError(f"rules: {pattern!r} matches no layer that an earlier rule left{near}")
        idle = [name for name in ("weight", "bias") if getattr(roundings, name) and name not in used[pattern]]
        if idle:
            raise ValueError(f"rules[{pattern!r}]: {idle[0]} has no effect, since no layer that it matches has one")
    return result


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules with their own parameters, their paths, and whether an enclosing function computes them."""
    opaque: tuple[str, ...] = ()
    for path, layer in module.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            opaque += (f"{path}." if path else "",)
        if _own_parameters(layer) and not isinstance(layer, parametrize.ParametrizationList):
            yield path, layer, f"{path}.".startswith(opaque)


def _own_parameters(layer: nn.Module) -> list[str]:
    """The names of a layer's parameters, including parametrized ones."""
    names = [name for name, _ in layer.named_parameters(recurse=False)]
    return [*names, *getattr(layer, "parametrizations", ())]


def _check_layer(layer: nn.Module, path: str, roundings: Roundings, opaque: bool) -> None:
    """Refuse a layer that cannot follow its rule."""
    what = f"the layer {path!r} ({type(layer).__name__})"
    if isinstance(layer, nn.RNNBase):
        raise NotImplementedError(f"{what} keeps its weights in a list, which parametrizations do not support")
    passing = [name for name in _PASSING if getattr(roundings, name) is not None]
    if opaque and passing:
        raise NotImplementedError(
            f"{what} computes within one function of torch, in which {passing[0]} cannot be rounded"
        )
    if any(is_lazy(parameter) for parameter in layer.parameters(recurse=False)):
        raise ValueError(f"{what} has no weights yet: run it once first")
    parametrizations = getattr(layer, "parametrizations", {})
    if hasattr(layer, INPUT) or any(
        isinstance(p, Quantizer) for name in parametrizations for p in parametrizations[name]
    ):
        raise ValueError(f"{what} is quantized already; quantize the original module")


def _equip(layer: nn.Module, roundings: Roundings, seed: tuple[int, ...]) -> set[str]:
    """Add roundings to a layer, and return the kinds of its parameters."""
    seen = set()
    for place, name in enumerate(_own_parameters(layer)):
        field = "bias" if name.endswith("bias") else "weight"
        seen.add(field)
        spec = getattr(roundings, field)
        if spec is not None:
            parametrize.register_parametrization(layer, name, Quantizer(spec, seed=(*seed, 2 + place)))
    if roundings.activation is not None:
        layer.add_module(INPUT, Quantizer(roundings.activation, seed=(*seed, 0)))
        layer.register_forward_pre_hook(_round_inputs, with_kwargs=True)
    if roundings.output is not None or roundings.gradient is not None:
        layer.add_module(OUTPUT, Quantizer(roundings.output, roundings.gradient, seed=(*seed, 1)))
        layer.register_forward_hook(_round_outputs)
    return seen


# Hooks look up their module on the layer, so that a copy of the layer uses its own module.


def _round_inputs(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    quantizer = layer.get_submodule(INPUT)
    return _rounded(quantizer, args), _rounded(quantizer, kwargs)


def _round_outputs(layer: nn.Module, args: tuple, output: Any) -> Any:
    del args
    if not isinstance(output, torch.Tensor | tuple | list | dict):
        raise TypeError(
            f"{type(layer).__name__} returns {type(output).__name__}, whose tensors cannot be found for rounding"
        )
    return _rounded(layer.get_submodule(OUTPUT), output)


def _rounded(quantizer: nn.Module, value: Any) -> Any:
    """A value with all of its tensors rounded."""
    if isinstance(value, torch.Tensor):
        return quantizer(value)
    if isinstance(value, dict):
        return {name: _rounded(quantizer, part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_rounded(quantizer, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
