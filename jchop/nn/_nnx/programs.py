"""Models whose programs are quantized: every method runs under rules, whatever the classes of its layers."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax import Array

from jchop._common.checks import check
from jchop._quantized.products.rule import Rule
from jchop._quantized.program.adapters import AdaptedParam, LoraAdapter
from jchop._quantized.program.call import is_packed_param
from jchop._quantized.program.scale_slots import ScaleCalibration, Scales
from jchop._quantized.quantize_fn import QuantizedFunction, check_rule_fields
from jchop.nn._nnx.layer_kinds import fork_rounding_stream
from jchop.nn._nnx.nodes import (
    Keys,
    QuantizedParam,
    module_entries,
    node_at,
    packed_nnx_variable,
    replace_nodes,
    unpacked_nnx_variable,
)
from jchop.nn._nnx.rounding_modules import ProgramScales
from jchop.nn._shared.program_classes import Examples, MethodFunctions, ProgramPart, class_body, method_of, plain_class

T = TypeVar("T")

_PARAMETER_TYPES = (nnx.Param, QuantizedParam)
#: The attributes that hold the rules of a module and its place in the model; and in the model alone the stream of
#: stochastic roundings, and kept scales.
_PART_ATTRIBUTE = "quantization_part"
_STREAM_ATTRIBUTE, _SCALES_ATTRIBUTE = "quantization_stream", "quantization_scales"
#: The attribute of a module that holds the adapters of its parameters, by the names of these.
_ADAPTERS_ATTRIBUTE = "quantization_adapters"


def quantize_program(model: Any, rules: Sequence[Rule], mode: str, rngs: nnx.Rngs | None, examples: Examples) -> Any:
    """Give a model the class whose methods run under rules, in place; pack its parameters unless ``mode="qat"``.

    Returns:
        The report of rounding with batches; None without them.

    Raises:
        ValueError: as `jchop.quantize_fn`; for packing without examples.
    """
    is_packed = is_nnx_program(model) and any(isinstance(node, QuantizedParam) for _, node in nnx.iter_graph(model))
    check(not is_packed, "model is packed already; quantize the model that it was made from")
    check_rule_fields(rules)
    program_scales: ProgramScales | None = getattr(model, _SCALES_ATTRIBUTE, None)
    has_same_rules = program_scales is not None and _nnx_program_part(model).rules == tuple(rules)
    scales = program_scales.scales if program_scales is not None and has_same_rules else Scales({}, {})
    if is_nnx_program(model):
        _strip_program(model)
    examples.check(rules, mode)
    report = None
    if examples.given:
        drawn = [
            rule for rule in rules if rule.stochastic and (examples.batches is not None or _draws_for_params(rule))
        ]
        key = fork_rounding_stream(drawn[0], rngs, "the model")() if mode != "qat" and drawn else None
        params, scales, report = nnx_methods(model, rules).round(mode, scales, key, examples)
        if mode != "qat":
            _put_params(model, params)
    _attach_program_rules(model, tuple(rules), rngs, scales)
    return report


def _draws_for_params(rule: Rule) -> bool:
    """Whether the rounding of a parameter is stochastic."""
    return any(spec is not None and spec.rounding.stochastic for spec in (rule.weight, rule.bias))


def _attach_program_rules(model: Any, rules: tuple[Rule, ...], rngs: nnx.Rngs | None, scales: Scales) -> None:
    """Give every module of a model the class whose methods run under rules, and its place.

    Raises:
        ValueError: for an attribute that stands for a method and belongs to one module.
    """
    stochastic = [rule for rule in rules if rule.stochastic]
    if stochastic:
        setattr(model, _STREAM_ATTRIBUTE, nnx.data(fork_rounding_stream(stochastic[0], rngs, "the model")))
    keeps = bool(scales.learned or scales.stats)
    if keeps:
        setattr(model, _SCALES_ATTRIBUTE, nnx.data(ProgramScales(scales)))
    keeps |= any(rule.scale_from is not None for rule in rules)
    entries = [entry for entry in module_entries(model) if not isinstance(entry.module, ProgramScales)]
    holders = Counter(id(variable) for entry in entries for _ in entry.keys for variable in entry.variables.values())
    model_paths = variable_paths(model) if max(holders.values(), default=1) > 1 else {}
    for entry in entries:
        module: Any = entry.module
        if is_nnx_program(module):  # of a model that has been quantized by itself
            continue
        _refuse_method_attributes(module, entry.paths[0])
        own = variable_paths(module) if model_paths else {}
        names = ((path, model_paths[variable_id]) for variable_id, path in own.items())
        other_names = tuple((path, full) for path, full in names if full != (*entry.keys[0], *path))
        part = ProgramPart(rules, entry.keys[0], other_names, keeps and module is not model)
        setattr(module, _PART_ATTRIBUTE, nnx.static(part))
        module.__class__ = _nnx_program_class(plain_class(type(module)))


def variable_paths(model: Any) -> dict[int, Keys]:
    """The paths of parameters, by the identities of their variables."""
    return {id(node_at(model, path)): path for path, _ in nnx.to_flat_state(nnx.state(model, _PARAMETER_TYPES))}


def _refuse_method_attributes(module: Any, path: str) -> None:
    """Refuse methods as attributes: they belong to the module that they were taken from, and not to a copy."""
    for name, value in vars(module).items():
        binds_module = inspect.ismethod(value) and plain_class(type(value.__self__)) is plain_class(type(module))
        class_attribute = inspect.getattr_static(type(module), name, None)
        shadows = (
            inspect.isfunction(class_attribute)
            and class_attribute.__qualname__.endswith(f".{name}")
            and inspect.isroutine(value)
        )
        if binds_module or shadows:
            raise ValueError(
                f"{name} of {type(module).__name__} at {path!r} is a function of one object, which copies of the "
                "model do not run: make it a method of a class, or del the attribute"
            )


def calibrate_program(model: Any, method: str, combine: str) -> Callable[[], None]:
    """Make a model with a quantized program record its data. Call the result to stop that and to fix ranges."""
    observer = ScaleCalibration(method, combine)
    if not hasattr(model, _SCALES_ATTRIBUTE):
        setattr(model, _SCALES_ATTRIBUTE, nnx.data(ProgramScales(Scales({}, {}))))
    getattr(model, _SCALES_ATTRIBUTE).observer = nnx.static(observer)

    def end() -> None:
        setattr(
            model, _SCALES_ATTRIBUTE, nnx.data(ProgramScales(observer.into(getattr(model, _SCALES_ATTRIBUTE).scales)))
        )
        for module in _modules_under_rules(model, _nnx_program_part(model).rules):
            if module is not model:
                setattr(module, _PART_ATTRIBUTE, nnx.static(replace(_nnx_program_part(module), keeps=True)))

    return end


def is_nnx_program(model: Any) -> bool:
    """Whether the methods of a model run under rules."""
    return hasattr(type(model), "_quantized_program")


def _nnx_program_part(model: Any) -> ProgramPart:
    """The place of a module under rules: in a model, or the place of the model itself."""
    return getattr(model, _PART_ATTRIBUTE)


def _modules_under_rules(model: Any, rules: tuple[Rule, ...]) -> list[Any]:
    """The modules of a model that run under rules; those under other rules have been quantized by themselves."""
    nodes = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module) and is_nnx_program(node)]
    return [node for node in nodes if _nnx_program_part(node).rules == rules]


def _strip_program(model: Any) -> None:
    """Give modules under rules the classes and attributes that they had before, in place."""
    for module in _modules_under_rules(model, _nnx_program_part(model).rules):
        module.__class__ = plain_class(type(module))
        for name in (_STREAM_ATTRIBUTE, _SCALES_ATTRIBUTE, _PART_ATTRIBUTE, _ADAPTERS_ATTRIBUTE):
            if name in vars(module):
                delattr(module, name)


# -- the class ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _nnx_program_class(plain: type) -> type:
    """A class like `plain` whose methods run under the rules of the model."""
    base = next(base for base in (nnx.List, nnx.Dict, nnx.Module) if issubclass(plain, base))
    return type(plain.__name__, (plain,), class_body(plain, base, _nnx_method_under_rules, _nnx_program_class))


def _nnx_method_under_rules(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        stream, program_scales = (getattr(self, name, None) for name in (_STREAM_ATTRIBUTE, _SCALES_ATTRIBUTE))
        part = _nnx_program_part(self)
        graph, params, (other_state, kept_scales, adapters) = _split_program_state(self)
        arguments, nodes = _ArgumentArrays.of(args, kwargs)
        params, dropout = _params_and_dropout_key(self, params) if adapters else (params, None)
        operands = part.params_in_model(params), (other_state, kept_scales, adapters), arguments
        function = _nnx_method_function(self, graph, method, part)
        key = None if stream is None else stream()
        if stream is None and program_scales is None:
            key = _part_call_key(part, function, *operands) if dropout is None else dropout
        if program_scales is None:
            after, state = function(*operands, key=key)
        elif program_scales.observer is not None:
            (after, state), observations = function.observe(*operands, scales=program_scales.scales, key=key)
            program_scales.observer.see(observations)
        elif program_scales.use_running_average:
            after, state = function(*operands, scales=program_scales.scales, key=key)
        else:
            (after, state), scales = function.update(*operands, scales=program_scales.scales, key=key)
            program_scales.take(scales.stats)
        if nodes:
            nnx.update(nnx.List(nodes), state)
        return after.update(self)

    return run


def _part_call_key(
    part: ProgramPart, function: QuantizedFunction, params: Any, rest: Any, arguments: _ArgumentArrays
) -> Array | None:
    """A key for the call of a part, which draws nothing.

    Raises:
        ValueError: if the part rounds, and needs state that the model alone has.
    """
    needs = {"a stream of keys": any(rule.stochastic for rule in part.rules), "kept scales": part.keeps}
    missing = [what for what, needs_it in needs.items() if needs_it]
    if not missing:
        return None
    if function.resolved(params, rest, arguments).rounds:
        part.refuse_state(missing[0])
    return jax.random.key(0)


def _split_program_state(model: Any) -> tuple[Any, Any, Any]:
    """The graph of a model, its parameters, and all other state as (rest, kept scales, adapters)."""
    apart = nnx.PathContains(_SCALES_ATTRIBUTE), nnx.PathContains(_ADAPTERS_ATTRIBUTE)
    graph, scales, adapters, params, rest = nnx.split(model, *apart, _PARAMETER_TYPES, ...)
    return graph, params, (rest, scales, adapters)


def nnx_methods(model: Any, rules: Sequence[Rule]) -> MethodFunctions:
    """The methods of a model under rules, as functions of parameters, other state and arguments."""
    (graph, params, rest), cls, part = _split_program_state(model), plain_class(type(model)), ProgramPart(tuple(rules))
    return MethodFunctions(
        params,
        cls,
        lambda name: _nnx_method_function(model, graph, method_of(cls, name), part),
        lambda args, kwargs: (rest, _ArgumentArrays.of(args, kwargs)[0]),
    )


def _nnx_method_function(model: Any, graph: Any, method: Callable[..., Any], part: ProgramPart) -> QuantizedFunction:
    """A method as a function of parameters, other state and arguments; of equal graphs one that is traced once."""
    classes = _variable_module_classes(model, part) if any(rule.layer is not None for rule in part.rules) else ()
    try:
        hash((graph, method))
    except TypeError:  # an attribute that cannot be compared
        return _new_nnx_method_function(graph, method, part, classes)
    return _cached_nnx_method_function(graph, method, part, classes)


def _variable_module_classes(model: Any, part: ProgramPart) -> tuple[tuple[str, str], ...]:
    """The path of each variable, with the class of the module that holds it."""
    return tuple(
        ("/".join(filter(None, (*map(str, part.path), path, name))), type(entry.module).__name__)
        for entry in module_entries(model)
        for path in entry.paths
        for name in entry.variables
    )


def _new_nnx_method_function(
    graph: Any, method: Callable[..., Any], part: ProgramPart, classes: tuple[tuple[str, str], ...]
) -> QuantizedFunction:
    """A method of a model as a function of parameters, other state and arguments, under rules."""

    def pure(params: Any, rest: Any, arguments: _ArgumentArrays) -> tuple[_MethodResult, Any]:
        copy = nnx.merge(graph, part.params_in_part(params), *rest)
        if is_nnx_program(copy):
            _strip_program(copy)  # so that methods call each other as they are
        _restore_param_classes(copy)
        before, ((args, kwargs), nodes) = _static_attributes(copy), arguments.merge()
        out = method(copy, *args, **kwargs)
        return _MethodResult.of(out, copy, before), nnx.state(nodes) if nodes else None

    return QuantizedFunction(pure, part.rules, classes=dict(classes), whole=not part.path)


_cached_nnx_method_function = lru_cache(maxsize=256)(_new_nnx_method_function)


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _NonArray:
    """A value that is no array: in a result, or in attributes by the path of the module and the name."""

    value: Any


@partial(jax.tree_util.register_dataclass, data_fields=["out", "state", "attributes"], meta_fields=[])
@dataclass(frozen=True)
class _MethodResult:
    """The result of a method, and its changes of a model: all state but parameters, and attributes."""

    out: Any
    state: Any
    attributes: _NonArray

    @classmethod
    def of(cls, out: Any, model: Any, before: Mapping[Any, Any]) -> _MethodResult:
        """The result of a call, and the changes of its model.

        Args:
            out: the result; a module of the model in it becomes the path of the module, other values that are no
                arrays become static.
            model: the model after the call.
            before: `_static_attributes` of the model before the call.
        """
        paths = {id(node): path for path, node in nnx.iter_graph(model) if nnx.graph.is_graph_node(node)}

        def as_static(leaf: Any) -> Any:
            if id(leaf) in paths and not isinstance(leaf, nnx.Variable):
                return _NonArray(_ModulePlace(paths[id(leaf)]))
            stays = nnx.graph.is_graph_node(leaf) or isinstance(
                leaf, jax.Array | np.ndarray | np.generic | float | int | complex
            )
            return leaf if stays else _NonArray(leaf)

        _, _, (rest, _, _) = _split_program_state(model)
        after = _static_attributes(model)
        now = {at: after.get(at, _NO_ATTRIBUTE) for at in {**before, **after}}
        changes = {at: value for at, value in now.items() if before.get(at, _NO_ATTRIBUTE) is not value}
        return cls(jax.tree.map(as_static, out, is_leaf=nnx.graph.is_graph_node), rest, _NonArray(changes))

    def update(self, model: Any) -> Any:
        """Change a model likewise, and give the result of the method."""
        for (path, name), value in self.attributes.value.items():
            if value is _NO_ATTRIBUTE:
                delattr(node_at(model, path), name)
            else:
                setattr(node_at(model, path), name, value)
        nnx.update(model, self.state)

        def restore(leaf: Any) -> Any:
            value = leaf.value if isinstance(leaf, _NonArray) else leaf
            return node_at(model, value.path) if isinstance(value, _ModulePlace) else value

        return jax.tree.map(restore, self.out, is_leaf=lambda leaf: isinstance(leaf, _NonArray))


#: In the place of an attribute that a method has deleted, or given an array.
_NO_ATTRIBUTE = _NonArray(None)


def _static_attributes(model: Any) -> dict[tuple[Keys, str], Any]:
    """The attributes of the modules of a model that hold neither arrays nor modules."""
    return {
        (path, name): value
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
        for name, value in vars(node).items()
        if not name.startswith("_pytree__") and not nnx.is_data(value)
    }


def _restore_param_classes(model: Any) -> None:
    """Put parameters of the classes that they had in the places of packed ones, in a copy that holds their numbers."""
    nodes = (node for _, node in nnx.iter_graph(model) if isinstance(node, QuantizedParam))
    replace_nodes(model, {id(node): unpacked_nnx_variable(node, node.get_raw_value()) for node in nodes})


@partial(jax.tree_util.register_dataclass, data_fields=["leaves", "state"], meta_fields=["tree", "graph"])
@dataclass(frozen=True)
class _ArgumentArrays:
    """Arguments of a method, with the state of modules among them (streams of keys, caches), which a call changes."""

    leaves: list[Any]
    state: Any
    tree: Any
    graph: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_ArgumentArrays, list[Any]]:
        """Arguments as arrays, and the modules among them."""
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=nnx.graph.is_graph_node)
        nodes = [leaf for leaf in leaves if nnx.graph.is_graph_node(leaf)]
        leaves = [_ModulePlace() if nnx.graph.is_graph_node(leaf) else leaf for leaf in leaves]
        graph, state = nnx.split(nnx.List(nodes)) if nodes else (None, None)
        return cls(leaves, state, tree, graph), nodes

    def merge(self) -> tuple[Any, Any]:
        """The arguments themselves, and the modules among them, which are copies."""
        nodes = [] if self.graph is None else nnx.merge(self.graph, self.state)
        remaining = iter(nodes)
        leaves = [next(remaining) if isinstance(leaf, _ModulePlace) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.tree, leaves), nodes


@jax.tree_util.register_static
@dataclass(frozen=True)
class _ModulePlace:
    """The place of a module among arguments, or in a model."""

    path: Keys = ()


def _put_params(model: Any, params: Any) -> None:
    """Put parameters, packed or not, in the places of others, in place; adapters stand elsewhere."""
    replacements: dict[int, nnx.Variable] = {}
    for path, new in nnx.to_flat_state(params):
        variable, value = node_at(model, path), new.get_value()
        value = value.base if isinstance(value, AdaptedParam) else value
        if is_packed_param(value) and not isinstance(variable, QuantizedParam):
            replacements[id(variable)] = packed_nnx_variable(variable, value)
        elif isinstance(variable, QuantizedParam) and not is_packed_param(value):
            replacements[id(variable)] = unpacked_nnx_variable(variable, value)
        elif value is not variable.get_value():
            variable.set_value(value)
    replace_nodes(model, replacements)


# -- adapters ----------------------------------------------------------------------------------------------------------


class ParamAdapter(nnx.Module):
    """An adapter of a parameter of a program, in the module that holds the parameter.

    Attributes:
        lora_a: A, (in, rank), with the axes of a stack in front.
        lora_b: B, (rank, out), likewise.
    """

    def __init__(self, adapter: LoraAdapter, rngs: nnx.Rngs | None) -> None:
        self.lora_a, self.lora_b = nnx.LoRAParam(adapter.lora_a), nnx.LoRAParam(adapter.lora_b)
        self.how = nnx.static(_NonArray(replace(adapter, lora_a=None, lora_b=None)))
        rate = adapter.rule.dropout
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate and rngs is not None else None

    @property
    def adapter(self) -> LoraAdapter:
        """The adapter; without dropout after `eval`."""
        how, drops = self.how.value, self.dropout is not None and not self.dropout.deterministic
        rule = how.rule if drops else replace(how.rule, dropout=0.0)
        return replace(how, lora_a=self.lora_a[...], lora_b=self.lora_b[...], rule=rule)


def params_with_adapters(model: Any) -> Any:
    """The parameters of a program, parameters with adapters as `AdaptedParam`."""
    return _params_and_dropout_key(model, _split_program_state(model)[1])[0]


def _params_and_dropout_key(model: Any, params: Any) -> tuple[Any, Array | None]:
    """The parameters of a model with their adapters, and a key if these have dropout."""
    flat, paths, key = dict(nnx.to_flat_state(params)), variable_paths(model), None
    for entry in module_entries(model):
        for name, param_adapter in vars(entry.module).get(_ADAPTERS_ATTRIBUTE, {}).items():
            path = paths[id(entry.variables[name])]
            adapter, value = param_adapter.adapter, flat[path].get_value()
            base = value.base if isinstance(value, AdaptedParam) else value  # tied, and seen before
            flat[path] = flat[path].replace(AdaptedParam(base, adapter))
            key = param_adapter.dropout.rngs() if adapter.rule.dropout and key is None else key
    return nnx.from_flat_state(flat), key


def set_program_params(model: Any, params: Any, rules: tuple[Rule, ...], rngs: nnx.Rngs | None) -> None:
    """Give a model other parameters, with or without adapters, and rules, in place."""
    if not is_nnx_program(model):
        _attach_program_rules(model, rules, rngs, Scales({}, {}))
    for module in _modules_under_rules(model, _nnx_program_part(model).rules):
        setattr(module, _PART_ATTRIBUTE, nnx.static(replace(_nnx_program_part(module), rules=rules)))
    values = {id(node_at(model, path)): value.get_value() for path, value in nnx.to_flat_state(params)}
    adapters = {
        key: ParamAdapter(value.adapter, rngs) for key, value in values.items() if isinstance(value, AdaptedParam)
    }
    for entry in module_entries(model):
        if not is_nnx_program(entry.module):
            continue
        own = {name: adapters[id(variable)] for name, variable in entry.variables.items() if id(variable) in adapters}
        if own:
            setattr(entry.module, _ADAPTERS_ATTRIBUTE, nnx.Dict(own))
        elif _ADAPTERS_ATTRIBUTE in vars(entry.module):
            delattr(entry.module, _ADAPTERS_ATTRIBUTE)
    _put_params(model, params)


def trace_nnx_part(module: Any, *args: Any) -> tuple[Any, Any]:
    """The program of the call of a module of a model, under the model's rules, with that call."""
    graph, params, rest = _split_program_state(module)
    part = _nnx_program_part(module)
    function = _nnx_method_function(module, graph, method_of(plain_class(type(module)), "__call__"), part)
    return function.traced(part.params_in_model(params), rest, _ArgumentArrays.of(args, {})[0])


def program_rules(model: Any) -> tuple[Rule, ...]:
    """The rules of a program; of a plain model, none."""
    return _nnx_program_part(model).rules if is_nnx_program(model) else ()
