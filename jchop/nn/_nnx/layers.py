"""The quantized layers: a generated class for each layer of Flax, and the conversion of Flax's layers to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
from flax import nnx

from jchop._checks import check_choice
from jchop._paths import nearest_paths
from jchop._products.rule import FIELDS, Rule, as_rules, left_alone, rule_of_parameter, rules_of
from jchop.nn import _cache
from jchop.nn._nnx import hooks
from jchop.nn._nnx.attach import Tied, attach, attach_emulated
from jchop.nn._nnx.classes import is_as_written, plain_class
from jchop.nn._nnx.kinds import KINDS, Kind, for_norms
from jchop.nn._nnx.modules import Placed, modules_of
from jchop.nn._nnx.programs import EXAMPLES, is_program
from jchop.nn._nnx.variables import QuantizedParam
from jchop.nn._scale_state import Source

Array = jax.Array
Mode = Literal["qat", "ptq", "weight_only", "emulate"]
MODES = ("qat", "ptq", "weight_only", "emulate")

__all__ = [
    "CLASSES", "MODES", "Decided", "Mode", "apply", "check_modes", "check_unquantized", "check_wrapped",
    "decided_layers", "layers_of", "needs_program", "own_parameters", "placed_layers", "strip",
]  # fmt: skip


# What a quantized layer adds to one of Flax stands in the class itself: a class with one more parent could not become
# that of a layer that is there already.
def _call(base: type) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.emulation is not None:
            return self.emulation(base.__call__, self, args, kwargs)
        return _finished(self, base.__call__(self, *args, **kwargs))

    return __call__


def _finished(layer: Any, y: Any) -> Any:
    return y if layer.output is None else layer.output(y)


def _attend(self: Any, query: Array, out_sharding: Any = None) -> Array:
    """The product of `query` with every embedding, as that of `flax.nnx.Embed`."""
    query, embedding = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
    y = self.product(query, embedding, (((query.ndim - 1,), (1,)), ((), ())), out_sharding=out_sharding)
    return _finished(self, y)


_usual_attention = _call(nnx.MultiHeadAttention)


def _attention(
    self: Any,
    inputs_q: Array,
    inputs_k: Array | None = None,
    inputs_v: Array | None = None,
    *,
    decode: bool | None = None,
    **more: Any,
) -> Array:
    if self.cache is None or not (self.decode if decode is None else decode):
        return _usual_attention(self, inputs_q, inputs_k, inputs_v, decode=decode, **more)
    if inputs_k is not None or inputs_v is not None:
        raise ValueError("inputs_k and inputs_v have no effect with a packed cache, which holds keys and values")
    return _cache.attend(self, self.cache, inputs_q, **more)


def _init_cache(self: Any, input_shape: Sequence[int], dtype: Any = jax.numpy.float32) -> None:
    """An empty cache for sequences of `input_shape`, (..., length, features), packed if the rule has a `cache`."""
    if self.cache is None:
        nnx.MultiHeadAttention.init_cache(self, tuple(input_shape), dtype)
    else:
        _cache.init_cache(self, input_shape, dtype, self.cache)


_MORE: Mapping[type, Mapping[str, Any]] = MappingProxyType(
    {
        nnx.Embed: {"attend": _attend},
        nnx.MultiHeadAttention: {"__call__": _attention, "init_cache": _init_cache, "cache": None},
    }
)
#: Made of layers alone: there is nothing to round in them but those.
_MADE_OF_LAYERS = (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell)


def _initialize(base: type) -> Any:
    def __init__(self: Any, *args: Any, rule: Rule, rngs: nnx.Rngs, mode: Mode = "qat", **kwargs: Any) -> None:
        base.__init__(self, *args, rngs=rngs, **kwargs)
        apply(self, as_rules(rule), mode, rngs)

    return __init__


def _make(base: type) -> type:
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
        {"__call__": _call(base), "output": None, "emulation": None, **_MORE.get(base, {})} if base in KINDS else {}
    )
    return type(name, (base,), {"__init__": _initialize(base), "__doc__": doc, "__module__": __name__, **attributes})


#: The quantized class of each class of Flax.
CLASSES: Mapping[type, type] = MappingProxyType({base: _make(base) for base in (*KINDS, *_MADE_OF_LAYERS)})
BatchNorm: Any = CLASSES[nnx.BatchNorm]
Conv: Any = CLASSES[nnx.Conv]
ConvTranspose: Any = CLASSES[nnx.ConvTranspose]
Einsum: Any = CLASSES[nnx.Einsum]
Embed: Any = CLASSES[nnx.Embed]
GRUCell: Any = CLASSES[nnx.GRUCell]
GroupNorm: Any = CLASSES[nnx.GroupNorm]
InstanceNorm: Any = CLASSES[nnx.InstanceNorm]
LSTMCell: Any = CLASSES[nnx.LSTMCell]
LayerNorm: Any = CLASSES[nnx.LayerNorm]
Linear: Any = CLASSES[nnx.Linear]
LinearGeneral: Any = CLASSES[nnx.LinearGeneral]
LoRA: Any = CLASSES[nnx.LoRA]
LoRALinear: Any = CLASSES[nnx.LoRALinear]
MultiHeadAttention: Any = CLASSES[nnx.MultiHeadAttention]
OptimizedLSTMCell: Any = CLASSES[nnx.OptimizedLSTMCell]
RMSNorm: Any = CLASSES[nnx.RMSNorm]
SimpleCell: Any = CLASSES[nnx.SimpleCell]


def placed_layers(model: nnx.Module) -> Iterator[tuple[Placed, Kind | None]]:
    """Every module with parameters of its own or a row of `NNX_KINDS`, with its paths, and that row.

    A layer that computes more than its class says, since other code has changed it, has no row.
    """
    for entry in modules_of(model):
        cls = plain_class(type(entry.module))
        cls = cls if cls in KINDS else _base(cls)
        if isinstance(entry.module, hooks.Site | Source):
            continue
        if (kind := KINDS.get(cls)) is not None or own_parameters(entry):
            yield entry, kind if kind is not None and _is_plain(entry, cls, kind) else None


def _is_plain(entry: Placed, cls: type, kind: Kind) -> bool:
    """Whether a layer computes what its class says, and nothing that other libraries have put into it."""
    more = own_parameters(entry).keys() - kind.parameters.keys()
    return not more and is_as_written(entry.module, cls, nnx.Module)


def layers_of(model: nnx.Module) -> Iterator[tuple[str, Any, Kind | None]]:
    """As `layer_entries`: the first path of each, the module itself, and its row."""
    for entry, kind in placed_layers(model):
        yield entry.paths[0], entry.module, kind


def _base(cls: type) -> Any:
    """The class of Flax that a class was made from."""
    return next((base for base, quantized_class in CLASSES.items() if quantized_class is cls), None)


def rules_for(entry: Placed, kind: Kind | None, rules: Sequence[Rule]) -> list[int]:
    """As `module_rule_indexes`, of a module that has a row of `NNX_KINDS` or none."""
    return rules_of(entry.paths, rules, type(entry.module).__name__, "" if kind is None else kind.operation)


class Decided(NamedTuple):
    """A layer of a model, and what rules say for it.

    Args:
        entry: the layer.
        kind: its row of `NNX_KINDS`.
        numbers: the rules that match it, by number; all say the same.
        rule: its rule, as given; None if none matches.
        effective_rule: what that rule rounds in this layer (`rules_for_norms`).
    """

    entry: Placed
    kind: Kind | None
    numbers: list[int]
    rule: Rule | None
    effective_rule: Rule | None


def decided_layers(model: nnx.Module, rules: Sequence[Rule]) -> list[Decided]:
    """As `layer_entries`, each with its rule."""
    matches = [(entry, kind, rules_for(entry, kind, rules)) for entry, kind in placed_layers(model)]
    of_norms = for_norms(rules, ((number, kind) for _, kind, numbers in matches for number in numbers))

    def of(numbers: list[int], kind: Kind | None) -> tuple[Rule | None, Rule | None]:
        if not numbers:
            return None, None
        rule = rules[numbers[0]]
        return rule, rule if kind is None or kind.operation else of_norms[numbers[0]]

    return [Decided(entry, kind, numbers, *of(numbers, kind)) for entry, kind, numbers in matches]


def own_parameters(entry: Placed) -> dict[str, nnx.Variable]:
    """The parameters of a module by name, without those of modules below it."""
    return {name: value for name, value in entry.variables.items() if isinstance(value, nnx.Param | QuantizedParam)}


def apply(model: nnx.Module, rules: Sequence[Rule], mode: str, rngs: nnx.Rngs | None) -> None:
    """Quantize every layer of a model that a rule matches, in place."""
    check_modes(rules, mode)
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs={rngs!r} must be flax.nnx.Rngs, for example nnx.Rngs(rounding=0)")
    layer_rules = decided_layers(model, rules)
    _check_rules(rules, layer_rules)
    tied: Tied = {}
    for entry, kind, _, matching_rule, effective_rule in layer_rules:
        rule = matching_rule if mode == "emulate" else effective_rule
        if rule is None or not rule.rounds:
            continue
        layer, path = entry.module, entry.paths[0]
        if kind is None:
            raise NotImplementedError(
                f"{type(layer).__name__} at {path!r} has parameters ({', '.join(own_parameters(entry))}) and is "
                f"none of the layers that can be quantized: {', '.join(sorted(cls.__name__ for cls in KINDS))}. "
                f"{left_alone(entry.paths, rule)}"
            )
        before = strip(layer, kind)
        layer.__class__ = CLASSES.get(type(layer), type(layer))
        if mode == "emulate":
            attach_emulated(layer, kind, rule, path, rngs)
        else:
            attach(layer, kind, rule, path, packs=mode != "qat", rngs=rngs, before=before, tied=tied)


def check_unquantized(model: nnx.Module, rules: Sequence[Rule]) -> None:
    """Refuse layers that round parameters already which rules for the program of a model are to round, or pack any.

    Raises:
        ValueError: that names the layer.
    """
    for entry, kind in placed_layers(model):
        if kind is None or plain_class(type(entry.module)) in KINDS:
            continue
        layer = type(entry.module).__name__
        packed_names = [name for name in kind.parameters if isinstance(getattr(entry.module, name), QuantizedParam)]
        if packed_names:
            raise ValueError(
                f"{layer} at {entry.paths[0]!r} has its {packed_names[0]} packed already; give the model that it was "
                "made from"
            )
        for name in sorted(_rounded_parameters(entry.module, kind)):
            role = kind.parameters[name]
            paths = ["/".join(filter(None, (path, name))) for path in entry.paths]
            numbers = (rule_of_parameter(path, rules, layer, kind.operation) for path in paths)
            if any(number is not None and getattr(rules[number], role) is not None for number in numbers):
                raise ValueError(
                    f"{layer} at {entry.paths[0]!r} rounds its {name} already; give the model that it was made from"
                )


def _rounded_parameters(layer: Any, kind: Kind) -> set[str]:
    """The parameters of a layer that it rounds in each call; of a norm none, as of a program."""
    if not kind.operation:
        return set()
    if getattr(layer, "emulation", None) is not None:
        return set(kind.parameters)
    product = None if kind.product is None else hooks.site_in(layer, kind.product[0])
    promote = hooks.site_in(layer, "promote_dtype")
    names = {name for name, *_ in promote.specs} if isinstance(promote, hooks.Promote) else set()
    if isinstance(product, hooks.Product) and product.how.right is not None:
        names |= {name for name, role in kind.parameters.items() if role == "weight"}
    return names & set(kind.parameters)


def check_wrapped(model: nnx.Module) -> None:
    """Refuse packed layers in a wrapper that changes parameters in its calls, which would leave them as they are.

    Raises:
        NotImplementedError: that names the wrapper.
    """
    for entry in modules_of(model):
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


def check_modes(rules: Sequence[Rule], mode: str, program: bool = False) -> None:
    """Refuse a mode that is none, and fields of rules that it does not have."""
    check_choice("mode", mode, MODES)
    if program and mode == "emulate":
        raise ValueError("mode='emulate' is for layers of Flax: leave out inputs, or use jchop.emulate on the function")
    for rule in rules:
        _check_mode(rule, mode)


def needs_program(model: nnx.Module, rules: Sequence[Rule], mode: str) -> bool:
    """Whether a rule that rounds matches a module with parameters that is no layer of Flax."""
    if mode == "emulate" or is_program(model):
        return mode != "emulate"
    return bool(_outside(model, rules))


def _outside(model: nnx.Module, rules: Sequence[Rule]) -> list[tuple[Placed, Rule]]:
    """The modules with parameters that are no layers of Flax, each with the rule that rounds it."""
    modules = [(entry, rules_for(entry, kind, rules)) for entry, kind in placed_layers(model) if kind is None]
    return [(entry, rules[numbers[0]]) for entry, numbers in modules if numbers and rules[numbers[0]].rounds]


def check_traceable(model: nnx.Module, rules: Sequence[Rule]) -> None:
    """Refuse to pack the program of a model without arguments to trace it with.

    Raises:
        ValueError: that names the modules for which the program is quantized.
    """
    modules = [] if is_program(model) else _outside(model, rules)
    if not modules:
        return
    names = ", ".join(f"{entry.paths[0]!r} ({type(entry.module).__name__})" for entry, _ in modules[:3])
    names += f" and {len(modules) - 3} more" if len(modules) > 3 else ""
    paths = [path for entry, _ in modules for path in entry.paths]
    raise ValueError(
        f"inputs=None, but rules match {names}, whose parameters no plain layer of Flax holds. So the program of the "
        f"model is quantized, and one that is packed has to be traced: {EXAMPLES}. "
        f"{left_alone(paths, modules[0][1])}"
    )


def strip(layer: Any, kind: Kind) -> Any:
    """Put Flax's functions back in the places of rounding modules, so that a layer can be quantized in another way.

    Returns:
        The rounding module of the product, whose scales may be kept; None if there was none.
    """
    if type(layer) in KINDS:
        return None
    before = None
    if kind.slots and isinstance(promote := hooks.site_in(layer, "promote_dtype"), hooks.Promote):
        layer.promote_dtype = nnx.static(promote.base)
    if kind.product is not None and isinstance(product := hooks.site_in(layer, kind.product[0]), hooks.Product):
        before = product
        setattr(layer, kind.product[0], nnx.static(kind.product[2][0]))
    for name in ("output", "emulation", "cache"):
        if name in vars(layer):
            delattr(layer, name)
    return before


def _check_rules(rules: Sequence[Rule], layer_rules: Sequence[Decided]) -> None:
    """Refuse rules that match no layer, and fields without effect on any layer that they match."""
    for number, rule in enumerate(rules):
        matches = [one for one in layer_rules if number in one.numbers]
        if not matches:
            paths = [path for one in layer_rules for path in one.entry.paths]
            raise ValueError(
                f"{rule} matches no layer with parameters, or only layers that an earlier rule matches"
                f"{nearest_paths([rule.path], paths)}. jchop.nn.report(model) lists the layers"
            )
        rule_fields = [
            (one.effective_rule, one.kind.fields(one.entry.module)) for one in matches if one.kind is not None
        ]
        used = {
            name
            for effective_rule, fields in rule_fields
            for name in fields
            if getattr(effective_rule, name) is not None
        }
        idle = [name for name in FIELDS if getattr(rule, name) is not None and name not in used]
        if idle and len(rule_fields) == len(matches):
            raise ValueError(
                f"{rule}: {', '.join(idle)} has no effect on any of its layers: "
                f"{', '.join(sorted({type(one.entry.module).__name__ for one in matches}))}"
            )


#: The fields of a rule that a mode allows, and its purpose.
_FIELDS = {
    "weight_only": (("weight", "bias", "cache", "scale_from"), "rounds weights, biases and caches; use mode='ptq'"),
    "emulate": (("activation", "matmul"), "rounds every operation to activation, with the sums of matmul"),
}


def _check_mode(rule: Rule, mode: str) -> None:
    if mode not in _FIELDS:
        return
    mode_fields, why = _FIELDS[mode]
    wrong = [name for name in FIELDS if getattr(rule, name) is not None and name not in mode_fields]
    if wrong:
        raise ValueError(f"{rule} has {', '.join(wrong)}, and mode={mode!r} {why}")
