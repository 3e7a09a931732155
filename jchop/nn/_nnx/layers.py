"""The quantized layers: a class for each layer of Flax, and layers of a model converted into them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array

from jchop._common.checks import check_instance
from jchop._quantized.products.rule import (
    ROUNDING_FIELDS,
    Rule,
    exclusion_advice,
    module_rule_indexes,
    param_rule_index,
    refuse_idle_rules,
)
from jchop.nn._nnx.layer_kinds import NNX_KINDS, NnxKind, PackedVariables, attach, attach_emulation
from jchop.nn._nnx.nodes import ModuleEntry, QuantizedParam, module_entries
from jchop.nn._nnx.rounding_modules import (
    RoundedProduct,
    RoundedPromotion,
    RoundingModule,
    ScaleState,
    rounding_module_in,
)
from jchop.nn._shared import cache, program_classes


# The additions of a quantized layer to one of Flax stand in the class itself: a class with one more parent could not
# become the class of a layer that is there already.
def _make_layer_call(base: type) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.emulation is not None:
            return self.emulation(base.__call__, self, args, kwargs)
        return _round_layer_output(self, base.__call__(self, *args, **kwargs))

    return __call__


def _round_layer_output(layer: Any, y: Any) -> Any:
    return y if layer.output is None else layer.output(y)


def _embed_attend(self: Any, query: Array, out_sharding: Any = None) -> Array:
    """The product of `query` with every embedding, as in `flax.nnx.Embed`."""
    query, embedding = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
    y = self.product(query, embedding, (((query.ndim - 1,), (1,)), ((), ())), out_sharding=out_sharding)
    return _round_layer_output(self, y)


_call_flax_attention = _make_layer_call(nnx.MultiHeadAttention)


def _call_quantized_attention(
    self: Any,
    inputs_q: Array,
    inputs_k: Array | None = None,
    inputs_v: Array | None = None,
    *,
    decode: bool | None = None,
    **more: Any,
) -> Array:
    if self.cache is None or not (self.decode if decode is None else decode):
        return _call_flax_attention(self, inputs_q, inputs_k, inputs_v, decode=decode, **more)
    if inputs_k is not None or inputs_v is not None:
        raise ValueError("inputs_k and inputs_v have no effect with a packed cache, which holds keys and values")
    return cache.attend_from_cache(self, self.cache, inputs_q, **more)


def _init_attention_cache(self: Any, input_shape: Sequence[int], dtype: Any = jax.numpy.float32) -> None:
    """An empty cache for sequences of `input_shape`, (..., length, features), packed if the rule has a `cache`."""
    if self.cache is None:
        nnx.MultiHeadAttention.init_cache(self, tuple(input_shape), dtype)
        return
    shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
    for name in ("cached_key", "cached_value"):
        setattr(self, name, nnx.data(nnx.Cache(cache.empty_packed_cache(shape, dtype, self.cache))))
    self.cache_index = nnx.data(nnx.Cache(jax.numpy.array(0, jax.numpy.int32)))


_EXTRA_LAYER_ATTRIBUTES: Mapping[type, Mapping[str, Any]] = MappingProxyType(
    {
        nnx.Embed: {"attend": _embed_attend},
        nnx.MultiHeadAttention: {
            "__call__": _call_quantized_attention,
            "init_cache": _init_attention_cache,
            "cache": None,
        },
    }
)
#: Made of layers alone: there is nothing to round in them but those.
_RECURRENT_CELLS = (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell)


def _make_layer_init(base: type) -> Any:
    def __init__(
        self: Any, *args: Any, rule: Rule, rngs: nnx.Rngs, mode: program_classes.LayerMode = "qat", **kwargs: Any
    ) -> None:
        base.__init__(self, *args, rngs=rngs, **kwargs)
        quantize_layers(self, program_classes.rules_of_mode(rule, mode), mode, rngs)

    return __init__


def _make_quantized_class(base: type) -> type:
    name = base.__name__
    doc = f"""`flax.nnx.{name}`, quantized.

    Args:
        args: as for the layer of Flax.
        rule: a `Rule`; its path has no effect.
        rngs: as of the layer of Flax; stochastic roundings draw from the stream that the rule names.
        mode: as in `quantize`. Default ``"qat"``.
        kwargs: as for the layer of Flax.
    """
    attributes = (
        {"__call__": _make_layer_call(base), "output": None, "emulation": None, **_EXTRA_LAYER_ATTRIBUTES.get(base, {})}
        if base in NNX_KINDS
        else {}
    )
    return type(
        name, (base,), {"__init__": _make_layer_init(base), "__doc__": doc, "__module__": "jchop.nn", **attributes}
    )


#: The quantized class of each class of Flax.
QUANTIZED_CLASSES: Mapping[type, type] = MappingProxyType(
    {base: _make_quantized_class(base) for base in (*NNX_KINDS, *_RECURRENT_CELLS)}
)


#: The class of Flax of each quantized class.
FLAX_CLASSES: Mapping[type, type] = {quantized_class: base for base, quantized_class in QUANTIZED_CLASSES.items()}


def layer_entries(model: nnx.Module) -> Iterator[tuple[ModuleEntry, NnxKind | None]]:
    """Every module with parameters of its own or a row of `NNX_KINDS`, with its paths, and that row.

    A layer that computes more than its class says, since other code has changed it, has no row.
    """
    for entry in module_entries(model):
        cls = program_classes.plain_class(type(entry.module))
        cls = FLAX_CLASSES.get(cls, cls)
        if isinstance(entry.module, RoundingModule | ScaleState):
            continue
        kind, names = NNX_KINDS.get(cls), entry_parameters(entry).keys()
        is_plain = kind is not None and names <= kind.parameters.keys()
        if kind is not None or names:
            yield (
                entry,
                kind if is_plain and program_classes.is_plain_flax_layer(entry.module, cls, nnx.Module) else None,
            )


def nnx_layers(model: nnx.Module) -> Iterator[tuple[str, Any, NnxKind | None]]:
    """The layers of `layer_entries`: the first path of each, the module itself, and its row of `NNX_KINDS`."""
    for entry, kind in layer_entries(model):
        yield entry.paths[0], entry.module, kind


class NnxLayerRule(NamedTuple):
    """A layer of a model, and its rule.

    Args:
        entry: the layer.
        kind: its row of `NNX_KINDS`.
        numbers: the rules that match it, by number; all say the same.
        rule: its rule, as given; None if none matches.
        effective_rule: that rule with the roundings that it does in this layer.
    """

    entry: ModuleEntry
    kind: NnxKind | None
    numbers: list[int]
    rule: Rule | None
    effective_rule: Rule | None


def nnx_layer_rules(model: nnx.Module, rules: Sequence[Rule]) -> list[NnxLayerRule]:
    """The layers of `layer_entries`, each with its rule."""
    matches = []
    for entry, kind in layer_entries(model):
        operation = "" if kind is None else kind.operation
        matches.append((entry, kind, module_rule_indexes(entry.paths, rules, type(entry.module).__name__, operation)))
    wide = {n for _, kind, numbers in matches if kind is None or kind.operation for n in numbers}

    def of(numbers: list[int], kind: NnxKind | None) -> tuple[Rule | None, Rule | None]:
        if not numbers:
            return None, None
        rule = rules[numbers[0]]
        return rule, rule if kind is None or kind.operation or numbers[0] not in wide else _rule_for_norm(rule)

    return [NnxLayerRule(entry, kind, numbers, *of(numbers, kind)) for entry, kind, numbers in matches]


def _rule_for_norm(rule: Rule) -> Rule:
    """A rule that decides other layers, too, as it is for a norm.

    A scale and an input of a norm enter no product, so programs leave them as they are under the same rule.
    """
    names = ("path", "layer", "operation", "output", "bias", "stochastic_stream")
    return Rule(**{name: getattr(rule, name) for name in names})


def entry_parameters(entry: ModuleEntry) -> dict[str, nnx.Variable]:
    """The parameters of a module by name, without the parameters of modules below it."""
    return {name: value for name, value in entry.variables.items() if isinstance(value, nnx.Param | QuantizedParam)}


def quantize_layers(
    model: nnx.Module, rules: Sequence[Rule], mode: str, rngs: nnx.Rngs | None, donate: bool = False
) -> None:
    """Quantize every layer of a model that a rule matches, in place; `donate` deletes each array that is packed."""
    program_classes.check_layer_modes(rules, mode)
    check_instance("rngs", rngs, nnx.Rngs | None, "flax.nnx.Rngs, for example nnx.Rngs(rounding=0)")
    layer_rules = nnx_layer_rules(model, rules)
    _check_nnx_rules_have_effect(rules, layer_rules)
    tied: PackedVariables = {}
    every = (v for entry in module_entries(model) for v in entry.variables.values()) if donate else ()
    uses = Counter(id(v.get_raw_value()) for v in every)
    for entry, kind, _, matching_rule, effective_rule in layer_rules:
        rule = matching_rule if mode == "emulate" else effective_rule
        if rule is None or not rule.rounds:
            continue
        layer, path = entry.module, entry.paths[0]
        if kind is None:
            raise NotImplementedError(
                f"{type(layer).__name__} at {path!r} has parameters ({', '.join(entry_parameters(entry))}) and is "
                f"none of the layers that can be quantized: {', '.join(sorted(cls.__name__ for cls in NNX_KINDS))}. "
                f"{exclusion_advice(entry.paths, rule)}"
            )
        before = strip_rounding(layer, kind)
        layer.__class__ = QUANTIZED_CLASSES.get(type(layer), type(layer))
        if mode == "emulate":
            attach_emulation(layer, kind, rule, path, rngs)
        else:
            attach(layer, kind, rule, path, packs=mode != "qat", rngs=rngs, before=before, tied=tied)
        for name, variable in entry.variables.items() if donate else ():
            array: Any = variable.get_raw_value()
            if getattr(layer, name, variable) is not variable:  # it is packed
                uses[id(array)] -= 1
                if not uses[id(array)]:
                    array.delete()


def refuse_quantized_layers(model: nnx.Module, rules: Sequence[Rule]) -> None:
    """Refuse layers that round parameters already which rules for the program of a model are to round, or pack any.

    Raises:
        ValueError: that names the layer.
    """
    for entry, kind in layer_entries(model):
        if kind is None or program_classes.plain_class(type(entry.module)) in NNX_KINDS:
            continue
        layer = type(entry.module).__name__
        packed_names = [name for name in kind.parameters if isinstance(getattr(entry.module, name), QuantizedParam)]
        if packed_names:
            raise ValueError(
                f"{layer} at {entry.paths[0]!r} has its {packed_names[0]} packed already; give the model that it was "
                "made from"
            )
        for name in sorted(_rounded_param_names(entry.module, kind)):
            role = kind.parameters[name]
            paths = ["/".join(filter(None, (path, name))) for path in entry.paths]
            numbers = (param_rule_index(path, rules, layer, kind.operation) for path in paths)
            if any(number is not None and getattr(rules[number], role) is not None for number in numbers):
                raise ValueError(
                    f"{layer} at {entry.paths[0]!r} rounds its {name} already; give the model that it was made from"
                )


def _rounded_param_names(layer: Any, kind: NnxKind) -> set[str]:
    """The parameters of a layer that it rounds in each call; of a norm none, as of a program."""
    if not kind.operation:
        return set()
    if getattr(layer, "emulation", None) is not None:
        return set(kind.parameters)
    product = None if kind.product is None else rounding_module_in(layer, kind.product[0], RoundedProduct)
    promote = rounding_module_in(layer, "promote_dtype", RoundedPromotion)
    names = set() if promote is None else {name for name, *_ in promote.specs}
    if product is not None and product.how.right is not None:
        names |= {name for name, role in kind.parameters.items() if role == "weight"}
    return names & set(kind.parameters)


def check_norm_wrappers(model: nnx.Module) -> None:
    """Refuse packed layers in a wrapper that changes parameters in its calls, which would leave them as they are.

    Raises:
        NotImplementedError: that names the wrapper.
    """
    for entry in module_entries(model):
        wrapper: Any = entry.module
        if isinstance(wrapper, nnx.SpectralNorm):
            changes = lambda _, value: value.get_value().ndim > 1  # noqa: E731
        elif isinstance(wrapper, nnx.WeightNorm):
            changes = wrapper.variable_filter
        else:
            continue
        packed_state = nnx.to_flat_state(nnx.state(wrapper.layer_instance, QuantizedParam))
        names = ["/".join(map(str, path)) for path, value in packed_state if changes(path, value)]
        if names:
            name = type(wrapper).__name__
            raise NotImplementedError(
                f"{name} at {entry.paths[0]!r} normalizes {', '.join(names)} of its layer_instance in each call, "
                f"which cannot be done to packed numbers. Use mode='qat', pass inputs=(x,), or call the model once and "
                f"put the layer_instance, whose parameters are normalized then, in the place of the {name}"
            )


def strip_rounding(layer: Any, kind: NnxKind) -> Any:
    """Put Flax's functions back in the places of rounding modules, so that a layer can be quantized in another way.

    Returns:
        The rounding module of the product, whose scales may be kept; None if there was none.
    """
    if type(layer) in NNX_KINDS:
        return None
    promote = rounding_module_in(layer, "promote_dtype", RoundedPromotion)
    if promote is not None:
        layer.promote_dtype = nnx.static(promote.base)
    before = None if kind.product is None else rounding_module_in(layer, kind.product[0], RoundedProduct)
    if before is not None and kind.product is not None:
        setattr(layer, kind.product[0], nnx.static(kind.product[2][0]))
    for name in ("output", "emulation", "cache"):
        if name in vars(layer):
            delattr(layer, name)
    return before


def _check_nnx_rules_have_effect(rules: Sequence[Rule], layer_rules: Sequence[NnxLayerRule]) -> None:
    """Refuse rules that match no layer, and fields without effect on any layer that they match."""
    in_use = {number for one in layer_rules for number in one.numbers}
    idle_rules = [rule for number, rule in enumerate(rules) if number not in in_use]
    paths, advice = (
        [path for one in layer_rules for path in one.entry.paths],
        ". jchop.nn.report(model) lists the layers",
    )
    refuse_idle_rules(idle_rules, "layer with parameters", paths, advice)
    for number, rule in enumerate(rules):
        matches = [one for one in layer_rules if number in one.numbers]
        rule_fields = [
            (one.effective_rule, one.kind.fields(one.entry.module)) for one in matches if one.kind is not None
        ]
        used = {
            name
            for effective_rule, fields in rule_fields
            for name in fields
            if getattr(effective_rule, name) is not None
        }
        idle = [name for name in ROUNDING_FIELDS if getattr(rule, name) is not None and name not in used]
        if idle and len(rule_fields) == len(matches):
            raise ValueError(
                f"{rule}: {', '.join(idle)} has no effect on any of its layers: "
                f"{', '.join(sorted({type(one.entry.module).__name__ for one in matches}))}"
            )


def set_layer_bias(layer: Any, value: Array) -> None:
    """Give a layer a bias, in place of the one that it has or has not."""
    if layer.bias is None:
        layer.use_bias = True
        layer.bias = nnx.data(nnx.Param(value))
    else:
        layer.bias[...] = value


def add_zero_biases(model: nnx.Module, rules: Sequence[Rule]) -> None:
    """Give layers whose weight is rounded a bias of zeros, in place, if they have none."""
    for entry, kind, _, rule, _ in nnx_layer_rules(model, rules):
        layer: Any = entry.module
        if kind is None or rule is None or rule.weight is None or type(layer) not in _LAYERS_WITH_BIAS:
            continue
        if layer.bias is None:
            kernel = layer.kernel[...]
            stack = kernel.shape[: kernel.ndim - 2 - len(getattr(layer, "kernel_size", ()))]
            set_layer_bias(layer, jax.numpy.zeros((*stack, layer.out_features), kernel.dtype))


#: Layers with one bias for each channel, the last axis of their results.
_LAYERS_WITH_BIAS = (nnx.Linear, nnx.Conv, nnx.ConvTranspose)
