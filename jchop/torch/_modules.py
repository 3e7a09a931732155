"""Converts modules to round their weights, activations and gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from jchop._common.checks import check_choice
from jchop._common.paths import matches_path, nearest_paths_hint, path_pattern
from jchop._spec.spec import Spec
from jchop.torch._bridge import check_tensor
from jchop.torch._packed import PackedTensor, pack_parameter, packed_parameters, tensor_codes
from jchop.torch._plan import plan_of
from jchop.torch._quantizer import Quantizer, first_words
from jchop.torch._rules import ModuleRoundings, as_module_rules, first_match

__all__ = ["QuantizeMode", "convert_module", "parameter_layers", "parameter_names"]

QuantizeMode = Literal["qat", "ptq", "weight_only"]
_QUANTIZE_MODES = ("qat", "ptq", "weight_only")
#: Names of the submodules that round the inputs and outputs of a layer.
INPUT_QUANTIZER, OUTPUT_QUANTIZER = "jchop_input", "jchop_output"
_TENSOR_FIELDS = ("activation", "output", "gradient")


def convert_module(module: nn.Module, rules: Mapping[str, Mapping[str, Any]], seed: int, mode: str) -> nn.Module:
    """A copy of `module` that rounds by rules; see `jchop.torch.quantize`."""
    check_choice("mode", mode, _QUANTIZE_MODES)
    module_rules = as_module_rules(rules)
    for pattern, roundings in module_rules.items() if mode == "weight_only" else ():
        if fields := [name for name in _TENSOR_FIELDS if getattr(roundings, name) is not None]:
            raise ValueError(f"rules[{pattern!r}] has {fields[0]}, and mode='weight_only' does not; use mode='ptq'")
    result = copy.deepcopy(module)
    layers = list(parameter_layers(result))
    used_fields: dict[str, set[str]] = {}
    packed_tensors: _PackedTensors | None = None if mode == "qat" else {}
    patterns = [first_match(path, module_rules) for path, *_ in layers]
    layer_names = [_weight_names(layer) for _, layer, _ in layers]
    weight_patterns = {pattern for pattern, own in zip(patterns, layer_names, strict=True) if own}
    for index, (pattern, weights, (path, layer, opaque)) in enumerate(zip(patterns, layer_names, layers, strict=True)):
        if pattern is not None:
            roundings, names = module_rules[pattern], parameter_names(layer)
            if pattern in weight_patterns:  # a gain and an input of a norm enter no product
                names = [name for name in names if name.endswith("bias") or name in weights]
                if not weights:
                    roundings = ModuleRoundings(bias=roundings.bias, output=roundings.output)
            _check_layer(layer, path, roundings, opaque)
            used_fields.setdefault(pattern, set()).update(
                _equip(layer, path, roundings, names, (seed, index), packed_tensors)
            )
    for pattern, roundings in module_rules.items():
        if pattern not in used_fields:
            raise ValueError(f"rules: {pattern!r} matches {_pattern_fault(pattern, module_rules, layers)}")
        unused = [name for name in ("weight", "bias") if getattr(roundings, name) and name not in used_fields[pattern]]
        if unused:
            raise ValueError(f"rules[{pattern!r}]: {unused[0]} has no effect, since no layer that it matches has one")
    return result


def _pattern_fault(
    pattern: str, rules: Mapping[str, ModuleRoundings], layers: list[tuple[str, nn.Module, bool]]
) -> str:
    """What a pattern matches that is the first match of no layer."""
    paths = [path for path, _, _ in layers]
    earlier_patterns = dict.fromkeys(first_match(path, rules) for path in paths if matches_path(pattern, path))
    if not earlier_patterns:
        for path, layer, _ in layers:
            for name in (*parameter_names(layer), *packed_parameters(layer)):
                if matches_path(pattern, f"{path}.{name}"):
                    return f"no layer, but its parameter {name!r}: name the layer alone, as {path_pattern(path)!r}"
        return f"no layer{nearest_paths_hint([pattern], paths)}"
    names = ", ".join(map(repr, earlier_patterns))
    clause = f"rule {names} takes" if len(earlier_patterns) == 1 else f"rules {names} take"
    return f"only layers that the earlier {clause}; put {pattern!r} first"


#: The packed form of each parameter and spec, so that tied parameters share it. It keeps the parameters alive.
_PackedTensors = dict[tuple[nn.Parameter, Spec], PackedTensor]


def parameter_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules with their own parameters, their paths, and whether an enclosing function computes them."""
    opaque: tuple[str, ...] = ()
    for path, layer in module.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            opaque += (f"{path}." if path else "",)
        has_parameters = parameter_names(layer) or packed_parameters(layer)
        if has_parameters and not isinstance(layer, parametrize.ParametrizationList):
            yield path, layer, f"{path}.".startswith(opaque)


def parameter_names(layer: nn.Module) -> list[str]:
    """The names of a layer's parameters, including parametrized ones."""
    names = [name for name, _ in layer.named_parameters(recurse=False)]
    return [*names, *getattr(layer, "parametrizations", ())]


def _weight_names(layer: nn.Module) -> list[str]:
    """The names of a layer's parameters that a product takes as a matrix, or that are tables to look up."""
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return []
    names = [name for name in parameter_names(layer) if not name.endswith("bias")]
    shapes = {name: getattr(layer, name).shape for name in names if not is_lazy(getattr(layer, name))}
    return [
        name
        for name, shape in shapes.items()
        if (name == "weight" and isinstance(layer, _PRODUCT_LAYERS)) or (len(shape) > 1 and 1 not in shape)
    ]


#: Layers whose weight may have an axis of one element; in others such a parameter is added, or scales.
_PRODUCT_LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag)


def _check_layer(layer: nn.Module, path: str, roundings: ModuleRoundings, opaque: bool) -> None:
    """Refuse a layer that cannot follow its rule."""
    layer_text = f"the layer {path!r} ({type(layer).__name__})"
    if isinstance(layer, nn.RNNBase):
        raise NotImplementedError(
            f"{layer_text} keeps its weights in a list, so they can be neither parametrized nor packed; the cells "
            "torch.nn.GRUCell, LSTMCell and RNNCell hold theirs by name"
        )
    fields = [name for name in _TENSOR_FIELDS if getattr(roundings, name) is not None]
    if opaque and fields:
        raise NotImplementedError(
            f"{layer_text} computes within one function of torch, in which {fields[0]} cannot be rounded"
        )
    if any(is_lazy(parameter) for parameter in layer.parameters(recurse=False)):
        raise ValueError(f"{layer_text} has no weights yet: run it once first")
    parametrizations = getattr(layer, "parametrizations", {})
    if (
        packed_parameters(layer)
        or hasattr(layer, INPUT_QUANTIZER)
        or any(isinstance(p, Quantizer) for name in parametrizations for p in parametrizations[name])
    ):
        raise ValueError(f"{layer_text} is quantized already; quantize the original module")


def _equip(
    layer: nn.Module,
    path: str,
    roundings: ModuleRoundings,
    names: Sequence[str],
    seed: tuple[int, ...],
    packed_tensors: _PackedTensors | None,
) -> set[str]:
    """Add roundings to a layer and to some of its parameters, and return the kinds of these."""
    kinds = set()
    for index, name in ((place, name) for place, name in enumerate(parameter_names(layer)) if name in names):
        field = "bias" if name.endswith("bias") else "weight"
        kinds.add(field)
        spec = getattr(roundings, field)
        if spec is not None and packed_tensors is None:
            _check_readable(layer, path, name)
            parametrize.register_parametrization(layer, name, Quantizer(spec, seed=(*seed, 2 + index)))
        elif spec is not None and packed_tensors is not None:
            _pack_in_layer(layer, path, name, spec, (*seed, 2 + index), packed_tensors)
    if roundings.activation is not None:
        layer.add_module(INPUT_QUANTIZER, Quantizer(roundings.activation, seed=(*seed, 0)))
        layer.register_forward_pre_hook(_round_inputs, with_kwargs=True)
    if roundings.output is not None or roundings.gradient is not None:
        layer.add_module(OUTPUT_QUANTIZER, Quantizer(roundings.output, roundings.gradient, seed=(*seed, 1)))
        layer.register_forward_hook(_round_outputs)
    return kinds


def _check_readable(layer: nn.Module, path: str, name: str) -> None:
    """Refuse a parameter whose numbers JAX cannot read: its parametrization would fail without its name."""
    with _name_in_errors(layer, path, name):
        if parametrize.is_parametrized(layer, name):  # reading it would compute it
            for original in layer.parametrizations[name].parameters():  # type: ignore[index]
                check_tensor("x", original)
        else:
            check_tensor("x", getattr(layer, name))


@contextmanager
def _name_in_errors(layer: nn.Module, path: str, name: str) -> Iterator[None]:
    """Puts a parameter and its layer in front of errors."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} of the layer {path!r} ({type(layer).__name__}): {error}") from None


def _pack_in_layer(
    layer: nn.Module, path: str, name: str, spec: Spec, seed: tuple[int, ...], packed_tensors: _PackedTensors
) -> None:
    """Replace a parameter of a layer by its codes and scales."""
    parameter = getattr(layer, name)
    if (parameter, spec) not in packed_tensors:
        plan = plan_of(spec)
        with _name_in_errors(layer, path, name):
            q = tensor_codes(parameter, plan.spec, first_words(seed, plan.draws), copy=True)
            packed_tensors[parameter, spec] = PackedTensor(q)
    pack_parameter(layer, name, packed_tensors[parameter, spec])


# Hooks look up their module on the layer, so that a copy of the layer uses its own module.


def _round_inputs(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    quantizer = layer.get_submodule(INPUT_QUANTIZER)
    return _round_tree(quantizer, args), _round_tree(quantizer, kwargs)


def _round_outputs(layer: nn.Module, args: tuple, output: Any) -> Any:
    del args
    if not isinstance(output, torch.Tensor | tuple | list | dict):
        raise TypeError(
            f"{type(layer).__name__} returns {type(output).__name__}, whose tensors cannot be found for rounding"
        )
    return _round_tree(layer.get_submodule(OUTPUT_QUANTIZER), output)


def _round_tree(quantizer: nn.Module, value: Any) -> Any:
    """A value with all of its tensors rounded."""
    if isinstance(value, torch.Tensor):
        return quantizer(value)
    if isinstance(value, dict):
        return {name: _round_tree(quantizer, part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_round_tree(quantizer, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
