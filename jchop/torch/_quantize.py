"""Tensors to codes, modules under rules, and the report of a module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from jchop._common.checks import check, check_choice, check_instance
from jchop._common.paths import matches_path, nearest_paths_hint, path_pattern
from jchop._common.text import RowReport, TableOrLine
from jchop._quantized.products.rule import Rule, RuleLike, as_rule_tuple
from jchop._spec.spec import Spec, SpecLike
from jchop._storage import QArray
from jchop.torch._functions import Quantizer, first_words
from jchop.torch._operators import check_carrier, check_tensor, outside_graphs, plan_of, rounding_words
from jchop.torch._packed import PackedTensor, pack_parameter, packed_parameters, tensor_codes

QuantizeMode = Literal["qat", "ptq", "weight_only"]
_QUANTIZE_MODES = ("qat", "ptq", "weight_only")
#: Names of the submodules that round the inputs and outputs of a layer.
INPUT_QUANTIZER, OUTPUT_QUANTIZER = "jchop_input", "jchop_output"
_TENSOR_FIELDS = ("activation", "output", "gradient")


@overload
def quantize(
    x: Tensor, rules: SpecLike, *, seed: int | None = ..., generator: torch.Generator | None = ..., copy: bool = ...
) -> QArray: ...


@overload
def quantize(x: nn.Module, rules: RuleLike, mode: QuantizeMode = ..., *, seed: int | None = ...) -> nn.Module: ...


@outside_graphs
def quantize(
    x: Tensor | nn.Module,
    rules: SpecLike | RuleLike,
    mode: QuantizeMode = "qat",
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    copy: bool = False,
) -> QArray | nn.Module:
    """Rounds a tensor to codes and scales, or makes a module round.

    **For a tensor** the result is the same as from `jchop.quantize`: a `jchop.QArray` of JAX arrays on the tensor's
    device. `jchop.torch.as_tensor` converts its leaves to tensors, and `dequantize` returns the rounded numbers.

    **For a module** the result is a copy whose layers (modules with their own parameters) round by rules, as in
    `jchop.nn.quantize`. One spec is for all weights. A mapping has a pattern ([](patterns.md)) for part of a layer's
    path, ``"head"``, ``"blocks.*.mlp"``, ``"*norm*"``. Its value is a spec of the weight, a `jchop.Rule`, or a dict of
    its fields. Several `jchop.Rule` are a list. The first that matches applies. In torch a rule may have the fields
    ``path``, ``layer`` and:

    * ``weight``, ``bias``: the parameters, rounded at each use, as parametrizations (`torch.nn.utils.parametrize`):
      ``layer.parametrizations.weight.original`` is trained. A weight is a matrix of a product, or a table that is
      looked up. Gains of norms and vectors are no weights; nor is, except in linear layers, convolutions and
      embeddings, a parameter with an axis of one element. A bias has a name that ends with "bias".
    * ``activation``: the inputs of the layer; ``output``: its outputs.
    * ``gradient``: the gradient with respect to the outputs, an operand of both products of the backward pass.

    As in `jchop.nn.quantize`, a rule that matches layers with a weight applies only its ``bias`` and ``output`` to
    layers without one, as norms. A rule for layers without a weight alone rounds all of their parameters, inputs and
    gradients.

    Scaled formats count the axes of torch's tensors. ``"mxfp8_e4m3"`` has blocks along the contracted axis of a linear
    layer. A convolution has its channels on axis 1. Gradients pass straight through the roundings. The layers' seeds
    are ``seed`` with the number of the layer and of the rounding in the layer folded in.

    ``mode`` says how parameters are kept. ``"qat"`` trains them in full precision and rounds them at each use.
    ``"ptq"`` rounds them once and stores them packed. In place of the parameter ``weight`` the layer then has a
    submodule ``weight_packed``, a `PackedTensor`, whose buffers are the codes and scales. ``layer.weight`` returns the
    numbers, which are unpacked at each use and equal the numbers of "qat", bit for bit. A stochastic rounding draws
    once, the bits of call 0 of the `Quantizer` of "qat". ``"weight_only"`` is "ptq" with rules for ``weight`` and
    ``bias`` alone.

    Args:
        x: a float tensor as in `round_to_format`, but not complex, or a module.
        rules: the rules of a module, or the spec of a tensor: a `jchop.Spec`, a format, a scaled format, or text.
        mode: ``"qat"``, ``"ptq"`` or ``"weight_only"``, for modules. Default ``"qat"``.
        seed: an integer from 0 to 2^64 - 1. The stochastic modes need it for a tensor; for a module the default is 0.
        generator: a generator in place of the seed, for tensors.
        copy: whether a tensor may be copied if JAX cannot read it in place. Default False: an error then.

    Returns:
        A `jchop.QArray`, or a module.

    Raises:
        TypeError, ValueError: as `jchop.quantize`, and for a tensor that would have to be copied. For rules that are
            invalid, match no layer, or have a field that torch cannot follow. For rules that round a weight or bias
            that no matched layer has.
        NotImplementedError: for a layer that does not access its parameters by name, as `torch.nn.LSTM`, or computes
            within one function (activations in `torch.nn.MultiheadAttention`).

    Example:
        >>> import torch, jchop as jc
        >>> q = jc.torch.quantize(torch.tensor([1.0, 0.3, -7.5, 100.0]), jc.formats.mxfp4(group=2))
        >>> jc.torch.dequantize(q)
        tensor([ 1.0000,  0.2500, -8.0000, 96.0000])
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> rules = {"2": {}, "*": jc.Rule(weight="int4(group=all)", gradient="float8_e5m2")}
        >>> low = jc.torch.quantize(model, rules)
        >>> low[0].weight.unique().numel() <= 15 * 4, low[2].weight is low[2].weight
        (True, True)
        >>> small = jc.torch.quantize(model, "int4(group=4)", "weight_only")
        >>> [f"{name} {part.dtype}" for name, part in small.state_dict().items() if name.startswith("0")]
        ['0.bias torch.float32', '0.weight_packed.qvalue torch.uint8', '0.weight_packed.scale torch.float32',
         '0.weight_packed._extra_state torch.uint8']
    """
    if isinstance(x, nn.Module):
        if generator is not None or copy:
            raise ValueError("generator= and copy= are for tensors; the roundings of a module are seeded by seed=")
        return _convert_module(x, rules, 0 if seed is None else seed, mode)
    check(mode == "qat", f"mode={mode!r} is for modules; a tensor becomes a QArray")
    check_carrier("x", x, complex_too=False)
    plan = plan_of(rules)  # type: ignore[arg-type]
    return tensor_codes(x, plan.spec, rounding_words(plan.spec, plan.draws, seed, generator), copy=copy)


# -- rules -------------------------------------------------------------------------------------------------------------


_MODULE_FIELDS = ("weight", "bias", *_TENSOR_FIELDS)
#: The specs of a layer, by the tensor that they are for.
_LayerSpecs = dict[str, Spec]


def _as_module_rules(rules: Any) -> tuple[Rule, ...]:
    """Rules of the caller, checked.

    Raises:
        TypeError, ValueError: for invalid rules, or one with a field that layers of torch cannot follow.
    """
    module_rules = as_rule_tuple(Rule(weight=rules) if isinstance(rules, torch.dtype) else rules)  # type: ignore[arg-type]
    default = Rule(product="float")
    for rule in module_rules:
        for name in (field.name for field in fields(rule) if field.name not in ("path", "layer", *_MODULE_FIELDS)):
            if getattr(rule, name) not in (None, getattr(default, name)):
                raise ValueError(
                    f"{rule}: {name}= is of jc.nn alone; rules of torch have path, layer, {', '.join(_MODULE_FIELDS)}"
                )
    return module_rules


def _matches(rule: Rule, path: str, layer: nn.Module) -> bool:
    return rule.matches(path, layer=parametrize.type_before_parametrizations(layer).__name__)


def _layer_specs(rule: Rule) -> _LayerSpecs:
    return {name: spec for name in _MODULE_FIELDS if (spec := getattr(rule, name)) is not None}


# -- modules -----------------------------------------------------------------------------------------------------------


def _convert_module(module: nn.Module, rules: Any, seed: int, mode: str) -> nn.Module:
    """A copy of `module` that rounds by rules; see `jchop.torch.quantize`."""
    check_choice("mode", mode, _QUANTIZE_MODES)
    module_rules = _as_module_rules(rules)
    for rule in module_rules if mode == "weight_only" else ():
        if names := [name for name in _TENSOR_FIELDS if getattr(rule, name) is not None]:
            raise ValueError(f"{rule} has {names[0]}, and mode='weight_only' does not; use mode='ptq'")
    result = deepcopy(module)
    layers = list(parameter_layers(result))
    used_fields: dict[Rule, set[str]] = {}
    packed_tensors: _PackedTensors | None = None if mode == "qat" else {}
    layer_rules = [next((r for r in module_rules if _matches(r, path, layer)), None) for path, layer, _ in layers]
    layer_names = [_weight_names(layer) for _, layer, _ in layers]
    weight_rules = {rule for rule, own in zip(layer_rules, layer_names, strict=True) if own}
    for index, (rule, weights, (path, layer, opaque)) in enumerate(zip(layer_rules, layer_names, layers, strict=True)):
        if rule is not None:
            roundings, names = _layer_specs(rule), parameter_names(layer)
            if rule in weight_rules:  # a gain and an input of a norm enter no product
                names = [name for name in names if name.endswith("bias") or name in weights]
                if not weights:
                    roundings = {name: spec for name, spec in roundings.items() if name in ("bias", "output")}
            _check_layer(layer, path, roundings, opaque)
            used = _equip(layer, path, roundings, names, (seed, index), packed_tensors)
            used_fields.setdefault(rule, set()).update(used)
    for rule in module_rules:
        if rule not in used_fields:
            raise ValueError(f"{rule} matches {_rule_fault(rule, layers, layer_rules)}")
        unused = [name for name in ("weight", "bias") if name in _layer_specs(rule) and name not in used_fields[rule]]
        if unused:
            raise ValueError(f"{rule}: {unused[0]} has no effect, since no layer that it matches has one")
    return result


def _rule_fault(rule: Rule, layers: list[tuple[str, nn.Module, bool]], layer_rules: list[Rule | None]) -> str:
    """Why a rule is the first match of no layer: the text of an error."""
    earlier_rules = {
        other: None for (path, layer, _), other in zip(layers, layer_rules, strict=True) if _matches(rule, path, layer)
    }
    if earlier_rules:
        return f"only layers that an earlier rule matches; put it before {', '.join(map(str, earlier_rules))}"
    for path, layer, _ in layers:
        for name in (*parameter_names(layer), *packed_parameters(layer)):
            if matches_path(rule.path, f"{path}.{name}") and not matches_path(rule.path, path):
                return f"no layer, but its parameter {name!r}: name the layer alone, as {path_pattern(path)!r}"
    return f"no layer{nearest_paths_hint([rule.path], [path for path, *_ in layers])}"


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


def _check_layer(layer: nn.Module, path: str, roundings: _LayerSpecs, opaque: bool) -> None:
    """Refuse a layer that cannot follow its rule."""
    layer_text = f"the layer {path!r} ({type(layer).__name__})"
    if isinstance(layer, nn.RNNBase):
        raise NotImplementedError(
            f"{layer_text} keeps its weights in a list, so they can be neither parametrized nor packed; the cells "
            "torch.nn.GRUCell, LSTMCell and RNNCell hold theirs by name"
        )
    tensor_fields = [name for name in _TENSOR_FIELDS if name in roundings]
    if opaque and tensor_fields:
        raise NotImplementedError(
            f"{layer_text} computes within one function of torch, in which {tensor_fields[0]} cannot be rounded"
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
    roundings: _LayerSpecs,
    names: Sequence[str],
    seed: tuple[int, ...],
    packed_tensors: _PackedTensors | None,
) -> set[str]:
    """Add roundings to a layer and to some of its parameters, and return the kinds of these."""
    kinds = set()
    for index, name in ((place, name) for place, name in enumerate(parameter_names(layer)) if name in names):
        field = "bias" if name.endswith("bias") else "weight"
        kinds.add(field)
        if field not in roundings:
            continue
        spec, own_seed = roundings[field], (*seed, 2 + index)
        try:
            if packed_tensors is not None:
                _pack_in_layer(layer, name, spec, own_seed, packed_tensors)
                continue
            # To read a parametrized parameter would compute it.
            parametrized = parametrize.is_parametrized(layer, name)
            originals = layer.parametrizations[name].parameters() if parametrized else [getattr(layer, name)]  # type: ignore[index]
            for original in originals:
                check_tensor("x", original)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} of the layer {path!r} ({type(layer).__name__}): {error}") from None
        parametrize.register_parametrization(layer, name, Quantizer(spec, seed=own_seed))
    if "activation" in roundings:
        layer.add_module(INPUT_QUANTIZER, Quantizer(roundings["activation"], seed=(*seed, 0)))
        layer.register_forward_pre_hook(_round_inputs, with_kwargs=True)
    output, gradient = roundings.get("output"), roundings.get("gradient")
    if output is not None or gradient is not None:
        layer.add_module(OUTPUT_QUANTIZER, Quantizer(output, gradient, seed=(*seed, 1)))
        layer.register_forward_hook(_round_outputs)
    return kinds


def _pack_in_layer(layer: nn.Module, name: str, spec: Spec, seed: tuple[int, ...], packed: _PackedTensors) -> None:
    """Replaces a parameter by its packed form, made once for each parameter and spec."""
    parameter = getattr(layer, name)
    if (parameter, spec) not in packed:
        plan = plan_of(spec)
        q = tensor_codes(parameter, plan.spec, first_words(seed, plan.draws), copy=True)
        packed[parameter, spec] = PackedTensor(q)
    pack_parameter(layer, name, packed[parameter, spec])


# -- hooks -------------------------------------------------------------------------------------------------------------
# They look up their module on the layer, so that a copy of the layer uses its own module.


def _round_inputs(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    quantizer = layer.get_submodule(INPUT_QUANTIZER)
    return _round_tree(quantizer, args), _round_tree(quantizer, kwargs)


def _round_outputs(layer: nn.Module, args: tuple, output: Any) -> Any:
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


@dataclass(frozen=True)
class ModuleRow:
    """A row of a report: one parameter of a module.

    Args:
        path: its path in the module.
        layer: the class of its layer.
        stored: the spec of its codes if it is packed, else its dtype.
        rounds: the spec to which it is rounded at each use; empty if it is packed or not rounded.
        shape: its shape.
        nbytes: its bytes, with scales and zero points; 0 if an earlier row has the same memory (tied parameters).
    """

    path: str
    layer: str
    stored: str
    rounds: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits for each element; NaN if there are none."""
        count = math.prod(self.shape)
        return 8 * self.nbytes / count if count else math.nan


@dataclass(frozen=True)
class ModuleReport(RowReport):
    """The parameters of a module. Its text is a table.

    Args:
        rows: a `ModuleRow` for each parameter.
    """

    rows: tuple[ModuleRow, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(row.nbytes for row in self.rows)

    @property
    def bits(self) -> float:
        """Bits for each element of all parameters; NaN if there are none."""
        count = sum(math.prod(row.shape) for row in self.rows if row.nbytes)
        return 8 * self.nbytes / count if count else math.nan

    _align = "<<<<<>>"

    def _parts(self) -> list[TableOrLine]:
        head = ("path", "layer", "stored", "rounds", "shape", "bytes", "bits")
        table: list[tuple[str, ...]] = [head]
        for row in self.rows:
            shape = " x ".join(map(str, row.shape)) or "scalar"
            sizes = f"{row.nbytes:,}", f"{row.bits:.4g}"
            table.append((row.path, row.layer, row.stored, row.rounds or "-", shape, *sizes))
        return [[*table, ("all", "", "", "", "", f"{self.nbytes:,}", f"{self.bits:.4g}")]]


def report(module: nn.Module) -> ModuleReport:
    """Lists the form, bytes and bits of each parameter of a module: packed, rounded at each use, or neither.

    Args:
        module: any module, as from `jchop.torch.quantize`.

    Returns:
        A report whose text is a table. Buffers other than packed parameters are not in it.

    Raises:
        TypeError: if `module` is not a module.

    Example:
        >>> import torch, jchop as jc
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.LayerNorm(8))
        >>> print(jc.torch.report(jc.torch.quantize(model, {"0": "nvfp4"}, mode="weight_only")))
        path      layer         stored   rounds  shape   bytes   bits
        0.weight  PackedLinear  nvfp4    -       8 x 64    292  4.562
        0.bias    PackedLinear  float32  -       8          32     32
        1.weight  LayerNorm     float32  -       8          32     32
        1.bias    LayerNorm     float32  -       8          32     32
        all                                                388  5.791
    """
    check_instance("module", module, nn.Module, "a torch.nn.Module")
    earlier_ids: set[int] = set()
    rows = []
    for path, layer, _ in parameter_layers(module):
        parameters = {**packed_parameters(layer), **{name: _parameter(layer, name) for name in parameter_names(layer)}}
        for name, value in parameters.items():
            full_path = f"{path}.{name}" if path else name
            nbytes = 0 if id(value) in earlier_ids else value.nbytes
            earlier_ids.add(id(value))
            names = full_path, type(layer).__name__, *_forms(layer, name, value)
            rows.append(ModuleRow(*names, tuple(value.shape), nbytes))
    return ModuleReport(tuple(rows))


def _parameter(layer: nn.Module, name: str) -> torch.Tensor:
    """A parameter as it is kept; for a parametrization of several parts its value."""
    if parametrize.is_parametrized(layer, name) and hasattr(layer.parametrizations[name], "original"):  # type: ignore[index]
        return layer.parametrizations[name].original  # type: ignore[index]
    return getattr(layer, name)


def _forms(layer: nn.Module, name: str, value: PackedTensor | torch.Tensor) -> tuple[str, str]:
    """The stored form of a parameter, and the specs to which it is rounded at each use."""
    if isinstance(value, PackedTensor):
        return value.spec, ""
    chain = layer.parametrizations[name] if parametrize.is_parametrized(layer, name) else ()  # type: ignore[index]
    specs = (part.rounding for part in chain if isinstance(part, Quantizer))
    return str(value.dtype).removeprefix("torch."), ", ".join(plan.spec for plan in specs if plan is not None)
