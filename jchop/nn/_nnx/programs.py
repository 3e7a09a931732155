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

from jchop._quantized.products.rule import Rule
from jchop._quantized.program.adapters import AdaptedParam, LoraAdapter
from jchop._quantized.program.call import is_packed_param
from jchop._quantized.program.quantized_program import check_weight_rules
from jchop._quantized.program.report import ProgramReport
from jchop._quantized.program.scale_slots import ScaleCalibration, Scales, merge_scales, scales_after_packing
from jchop._quantized.quantize_fn import QuantizedFunction, check_rule_fields
from jchop.nn._nnx.attach import fork_rounding_stream
from jchop.nn._nnx.modules import Keys, module_entries
from jchop.nn._nnx.variables import UNPACKED_CLASS, QuantizedParam, packed_nnx_variable
from jchop.nn._shared.program_classes import (
    ExampleInputs,
    ProgramPart,
    class_body,
    method_inputs,
    method_of,
    plain_class,
)
from jchop.nn._shared.scale_state import ProgramScales

Array = jax.Array

T = TypeVar("T")

_PARAMETER_TYPES = (nnx.Param, QuantizedParam)
#: The attributes that hold the rules of a model, the stream of its stochastic roundings, its kept scales, and of the
#: modules below it their places.
_RULES_ATTRIBUTE, _STREAM_ATTRIBUTE, _SCALES_ATTRIBUTE = (
    "quantization_rules",
    "quantization_stream",
    "quantization_scales",
)
_PART_ATTRIBUTE = "quantization_part"
#: The attribute of a module that holds the adapters of its parameters, by the names of these.
_ADAPTERS_ATTRIBUTE = "quantization_adapters"


#: The advice of an error for a program that has to be traced.
INPUTS_ADVICE = (
    "pass example arguments of the model's call, inputs=(x,) or inputs={'x': x}, or of other methods, "
    "inputs={'decode': (x,)}; jax.ShapeDtypeStruct will do"
)


def quantize_program(
    model: Any, rules: Sequence[Rule], mode: str, inputs: ExampleInputs | None, rngs: nnx.Rngs | None
) -> None:
    """Give a model the class whose methods run under rules, in place; pack its parameters unless ``mode="qat"``.

    Raises:
        ValueError: as `jchop.quantize_fn`; for packing without `inputs`.
    """
    packed_flags = (isinstance(v, QuantizedParam) for v in jax.tree.leaves(nnx.state(model), is_leaf=_is_variable))
    if is_nnx_program(model) and any(packed_flags):
        raise ValueError("model is packed already; quantize the model that it was made from")
    check_rule_fields(rules)
    program_scales: ProgramScales | None = getattr(model, _SCALES_ATTRIBUTE, None)
    old_scales = (
        program_scales.scales
        if program_scales is not None and _nnx_program_part(model).rules == tuple(rules)
        else Scales({}, {})
    )
    if is_nnx_program(model):
        _strip_program(model)
    keeping = next((rule for rule in rules if rule.scale_from is not None), None)
    if keeping is not None and inputs is None:
        raise ValueError(
            f"inputs=None, but {keeping} keeps scales, whose places the program says: pass example arguments of the "
            "model's call, inputs=(x,)"
        )
    scales = (
        old_scales if inputs is None or keeping is None else _initial_program_scales(model, rules, inputs, old_scales)
    )
    stochastic = [rule for rule in rules if rule.stochastic]
    if mode == "qat" and inputs is not None:
        graph, params, rest = _split_program_state(model)  # the errors of rules come here, not in the first call
        functions = _nnx_method_functions(model, graph, rules, inputs).values()
        check_weight_rules([function.resolved(params, rest, args) for function, args in functions])
    if mode != "qat":
        if inputs is None:
            raise ValueError(f"inputs=None, but a program that is packed has to be traced: {INPUTS_ADVICE}")
        key = (
            fork_rounding_stream(stochastic[0], rngs, "the model")()
            if any(map(_rounds_params_stochastically, rules))
            else None
        )
        _pack_program(model, rules, inputs, scales, key)
        scales = scales_after_packing(scales)
    _attach_program_rules(model, rules, rngs, scales)


def _attach_program_rules(model: Any, rules: Sequence[Rule], rngs: nnx.Rngs | None, scales: Scales) -> None:
    """Give a model the class whose methods run under rules."""
    stochastic = [rule for rule in rules if rule.stochastic]
    if stochastic:
        setattr(model, _STREAM_ATTRIBUTE, nnx.data(fork_rounding_stream(stochastic[0], rngs, "the model")))
    if scales.learned or scales.stats:
        setattr(model, _SCALES_ATTRIBUTE, nnx.data(ProgramScales(scales)))
    _set_program_parts(model, tuple(rules), bool(scales.learned or scales.stats))
    setattr(model, _RULES_ATTRIBUTE, nnx.static(tuple(rules)))


def _set_program_parts(model: Any, rules: tuple[Rule, ...], keeps: bool) -> None:
    """Give every module of a model its class and its place, so that its methods are under rules, too.

    Raises:
        ValueError: for an attribute that stands for a method and belongs to one module.
    """
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
        if module is not model:
            setattr(module, _PART_ATTRIBUTE, nnx.static(ProgramPart(rules, entry.keys[0], other_names, keeps)))
        module.__class__ = _nnx_program_class(plain_class(type(module)))


def variable_paths(model: Any) -> dict[int, Keys]:
    """The paths of parameters, by the identities of their variables."""
    return {id(_node_at(model, path)): path for path, _ in nnx.to_flat_state(nnx.state(model, _PARAMETER_TYPES))}


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


def _initial_program_scales(model: Any, rules: Sequence[Rule], inputs: ExampleInputs, old_scales: Scales) -> Scales:
    """The scales that rules keep in the methods of a model, those that are known as they are."""
    graph, params, rest = _split_program_state(model)
    scales = Scales({}, {})
    for function, args in _nnx_method_functions(model, graph, rules, inputs).values():
        scales = merge_scales(function.start(params, rest, args, from_data=False), scales)
    return merge_scales(scales, old_scales)


def calibrate_program(model: Any, method: str, combine: str) -> Callable[[], None]:
    """Make a model of which the program is quantized note its data; what is returned ends that, and fixes ranges."""
    observer = ScaleCalibration(method, combine)
    if not hasattr(model, _SCALES_ATTRIBUTE):
        setattr(model, _SCALES_ATTRIBUTE, nnx.data(ProgramScales(Scales({}, {}))))
    getattr(model, _SCALES_ATTRIBUTE).observer = nnx.static(observer)

    def end() -> None:
        setattr(
            model, _SCALES_ATTRIBUTE, nnx.data(ProgramScales(observer.into(getattr(model, _SCALES_ATTRIBUTE).scales)))
        )
        for module in _modules_under_rules(model, _nnx_program_part(model).rules):
            if (part := getattr(module, _PART_ATTRIBUTE, None)) is not None:
                setattr(module, _PART_ATTRIBUTE, nnx.static(replace(part, keeps=True)))

    return end


def round_program_by(
    model: Any, rules: Sequence[Rule], rngs: nnx.Rngs | None, round_params: Callable[..., tuple[Any, T]]
) -> T:
    """Round the parameters of a model, in place, and give it the class whose methods run under rules.

    Args:
        model: a model of NNX.
        rules: its rules.
        rngs: the streams of keys.
        round_params: of the function of the model's call, its parameters, a function from the arguments of the model to
            those of its function after the parameters, and a key; the packed parameters, and what is returned.

    Raises:
        ValueError: for a model that runs under rules already.
    """
    if is_nnx_program(model):
        raise ValueError("model is quantized already; give the model that it was made from")
    check_rule_fields(rules)
    stochastic = [rule for rule in rules if rule.stochastic]
    key = fork_rounding_stream(stochastic[0], rngs, "the model")() if stochastic else None
    graph, params, rest = _split_program_state(model)
    function = _nnx_method_function(model, graph, method_of(type(model), "__call__"), ProgramPart(tuple(rules)))
    arguments = lambda args: (rest, _MethodArguments(args, {}).split())  # noqa: E731
    packed_params, report = round_params(function, params, arguments, key)
    _put_packed_params(model, packed_params)
    _attach_program_rules(model, rules, rngs, Scales({}, {}))
    return report


def report_program(
    model: Any, rules: Sequence[Rule], inputs: ExampleInputs, platform: str | None = None
) -> dict[str, ProgramReport]:
    """The report of each method."""
    graph, params, rest = _split_program_state(model)
    functions = _nnx_method_functions(model, graph, rules, inputs)
    return {
        name: function.report(params, rest, args, platform=platform) for name, (function, args) in functions.items()
    }


def is_nnx_program(model: Any) -> bool:
    """Whether the methods of a model run under rules."""
    return hasattr(type(model), "_quantized_program")


def _rounds_params_stochastically(rule: Rule) -> bool:
    return any(spec is not None and spec.rounding.stochastic for spec in (rule.weight, rule.bias))


def _nnx_program_part(model: Any) -> ProgramPart:
    """The place of a module under rules: in a model, or that of the model itself."""
    return getattr(model, _PART_ATTRIBUTE, None) or ProgramPart(getattr(model, _RULES_ATTRIBUTE))


def _modules_under_rules(model: Any, rules: tuple[Rule, ...]) -> list[Any]:
    """The modules of a model that run under rules; those under other rules have been quantized by themselves."""
    nodes = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module) and is_nnx_program(node)]
    return [node for node in nodes if _nnx_program_part(node).rules == rules]


def _strip_program(model: Any) -> None:
    """Give modules under rules the classes and attributes that they had before, in place."""
    for module in _modules_under_rules(model, _nnx_program_part(model).rules):
        module.__class__ = plain_class(type(module))
        for name in (_RULES_ATTRIBUTE, _STREAM_ATTRIBUTE, _SCALES_ATTRIBUTE, _PART_ATTRIBUTE, _ADAPTERS_ATTRIBUTE):
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
        stream, program_scales, part = (
            getattr(self, _STREAM_ATTRIBUTE, None),
            getattr(self, _SCALES_ATTRIBUTE, None),
            _nnx_program_part(self),
        )
        graph, params, rest = _split_program_state(self)
        arguments = _MethodArguments(args, kwargs)
        params, dropout = (params, None) if not rest[2] else _params_and_dropout_key(self, params)
        params = part.params_in_model(params)
        function = _nnx_method_function(self, graph, method, part)
        key = None if stream is None else stream()
        if stream is None and program_scales is None:
            key = _part_call_key(part, function, params, rest, arguments) if dropout is None else dropout
        call = partial(function, params, rest, arguments.split(), key=key)
        if program_scales is None:
            after, states = call()
        elif program_scales.observer is not None:
            (after, states), observations = function.observe(
                params, rest, arguments.split(), scales=program_scales.scales, key=key
            )
            program_scales.observer.see(observations)
        elif program_scales.use_running_average:
            after, states = call(scales=program_scales.scales)
        else:
            (after, states), scales = function.update(
                params, rest, arguments.split(), scales=program_scales.scales, key=key
            )
            program_scales.take(scales.stats)
        arguments.update(states)
        return after.update(self)

    return run


def _part_call_key(
    part: ProgramPart, function: QuantizedFunction, params: Any, rest: Any, arguments: _MethodArguments
) -> Array | None:
    """A key for the call of a part, which draws nothing.

    Raises:
        ValueError: if the part rounds, and needs what the model alone has.
    """
    needs = {"a stream of keys": any(rule.stochastic for rule in part.rules), "kept scales": part.keeps}
    missing = [what for what, needs_it in needs.items() if needs_it]
    if not missing:
        return None
    if function.resolved(params, rest, arguments.split()).rounds:
        part.refuse_state(missing[0])
    return jax.random.key(0)


def _split_program_state(model: Any) -> tuple[Any, Any, Any]:
    """The graph of a model, its parameters, and all else that it holds: its kept scales and adapters apart."""
    apart = nnx.PathContains(_SCALES_ATTRIBUTE), nnx.PathContains(_ADAPTERS_ATTRIBUTE)
    graph, scales, adapters, params, rest = nnx.split(model, *apart, _PARAMETER_TYPES, ...)
    return graph, params, (rest, scales, adapters)


def _nnx_method_functions(
    model: Any, graph: Any, rules: Sequence[Rule], inputs: ExampleInputs
) -> dict[str, tuple[QuantizedFunction, _ArgumentArrays]]:
    """The methods that have example arguments, as functions, with these."""
    cls, part = plain_class(type(model)), ProgramPart(tuple(rules))
    return {
        name: (_nnx_method_function(model, graph, method_of(cls, name), part), _MethodArguments(*arguments).split())
        for name, arguments in method_inputs(inputs, cls).items()
    }


def _nnx_method_function(model: Any, graph: Any, method: Callable[..., Any], part: ProgramPart) -> QuantizedFunction:
    """A method as a function of parameters, other state and arguments; of equal graphs one that is traced once."""
    classes = _variable_module_classes(model, part) if any(rule.layer is not None for rule in part.rules) else ()
    try:
        hash(graph)
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
    def pure(params: Any, rest: Any, arguments: _ArgumentArrays) -> tuple[_MethodResult, Any]:
        copy = nnx.merge(graph, part.params_in_part(params), *rest)
        if is_nnx_program(copy):
            _strip_program(copy)  # so that methods call each other as they are
        _restore_param_classes(copy)
        before, call_arguments = _static_attributes(copy), arguments.merge()
        args, kwargs = call_arguments.values
        out = method(copy, *args, **kwargs)
        return _MethodResult.of(out, copy, before), call_arguments.states()

    return QuantizedFunction(pure, part.rules, classes=dict(classes), whole=not part.path)


_cached_nnx_method_function = lru_cache(maxsize=256)(_new_nnx_method_function)


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _NonArray:
    """What is no array: in a result, or in attributes by the path of the module and the name."""

    value: Any


@partial(jax.tree_util.register_dataclass, data_fields=["out", "state", "attributes"], meta_fields=[])
@dataclass(frozen=True)
class _MethodResult:
    """The result of a method, and what it has changed in a model: all state but parameters, and attributes."""

    out: Any
    state: Any
    attributes: _NonArray

    @classmethod
    def of(cls, out: Any, model: Any, before: Mapping[Any, Any]) -> _MethodResult:
        """The result of a call; modules of the model in it are named by their paths."""
        paths = {id(node): path for path, node in nnx.iter_graph(model) if nnx.graph.is_graph_node(node)}

        def as_static(leaf: Any) -> Any:
            in_model = id(leaf) in paths and not isinstance(leaf, nnx.Variable)
            return (
                _NonArray(_ModulePlace(paths[id(leaf)]))
                if in_model
                else leaf
                if _is_result_leaf(leaf)
                else _NonArray(leaf)
            )

        out = jax.tree.map(as_static, out, is_leaf=nnx.graph.is_graph_node)
        after = _static_attributes(model)
        now = {at: after.get(at, _NO_ATTRIBUTE) for at in {**before, **after}}
        changes = {at: value for at, value in now.items() if before.get(at, _NO_ATTRIBUTE) is not value}
        return cls(out, _split_program_state(model)[2][0], _NonArray(changes))

    def update(self, model: Any) -> Any:
        """Change a model likewise, and give the result of the method."""
        for (path, name), value in self.attributes.value.items():
            if value is _NO_ATTRIBUTE:
                delattr(_node_at(model, path), name)
            else:
                setattr(_node_at(model, path), name, value)
        nnx.update(model, self.state)

        def restore(leaf: Any) -> Any:
            value = leaf.value if isinstance(leaf, _NonArray) else leaf
            return _node_at(model, value.path) if isinstance(value, _ModulePlace) else value

        return jax.tree.map(restore, self.out, is_leaf=lambda leaf: isinstance(leaf, _NonArray))


#: In the place of an attribute that a method has deleted, or given an array.
_NO_ATTRIBUTE = _NonArray(None)


def _is_result_leaf(leaf: Any) -> bool:
    return nnx.graph.is_graph_node(leaf) or isinstance(
        leaf, jax.Array | np.ndarray | np.generic | float | int | complex
    )


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
    packed_variables = {id(node): node for _, node in nnx.iter_graph(model) if isinstance(node, QuantizedParam)}
    replacements = {}
    for variable_id, variable in packed_variables.items():
        metadata = variable.get_metadata()
        replacements[variable_id] = metadata.pop(UNPACKED_CLASS, nnx.Param)(variable.get_raw_value(), **metadata)
    _replace_variables(model, replacements)


@partial(jax.tree_util.register_dataclass, data_fields=["leaves", "states"], meta_fields=["tree", "graphs"])
@dataclass(frozen=True)
class _ArgumentArrays:
    """Arguments, with the state of modules among them apart."""

    leaves: list[Any]
    states: list[Any]
    tree: Any
    graphs: tuple[Any, ...]

    def merge(self) -> _MethodArguments:
        """The arguments themselves, modules as copies."""
        nodes = iter([nnx.merge(graph, state) for graph, state in zip(self.graphs, self.states, strict=True)])
        leaves = [next(nodes) if isinstance(leaf, _ModulePlace) else leaf for leaf in self.leaves]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return _MethodArguments(args, kwargs)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _ModulePlace:
    """The place of a module among arguments, or in a model."""

    path: Keys = ()


class _MethodArguments:
    """Arguments of a method. A call changes the state of modules among them (streams of keys, caches)."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values = args, kwargs
        self._leaves, self._tree = jax.tree.flatten(self.values, is_leaf=nnx.graph.is_graph_node)
        self._nodes = [leaf for leaf in self._leaves if nnx.graph.is_graph_node(leaf)]

    def split(self) -> _ArgumentArrays:
        """The arguments as arrays."""
        parts = [nnx.split(node) for node in self._nodes]
        leaves = [_ModulePlace() if nnx.graph.is_graph_node(leaf) else leaf for leaf in self._leaves]
        return _ArgumentArrays(leaves, [state for _, state in parts], self._tree, tuple(graph for graph, _ in parts))

    def states(self) -> list[Any]:
        """The state of each module."""
        return [nnx.state(node) for node in self._nodes]

    def update(self, states: Sequence[Any]) -> None:
        """Give the modules the state that they have after the call."""
        for node, state in zip(self._nodes, states, strict=True):
            nnx.update(node, state)


# -- packed parameters -------------------------------------------------------------------------------------------------


def _pack_program(model: Any, rules: Sequence[Rule], inputs: ExampleInputs, scales: Scales, key: Array | None) -> None:
    """Store parameters packed, in place."""
    graph, params, rest = _split_program_state(model)
    functions = _nnx_method_functions(model, graph, rules, inputs).values()
    check_weight_rules([function.resolved(params, rest, args) for function, args in functions])
    for function, args in functions:  # packed for the first method that rounds it
        params = function.pack_more(params, rest, args, scales=scales, key=key)
    _put_packed_params(model, params)


def _put_packed_params(model: Any, params: Any) -> None:
    """Put packed parameters in the places of others, and the numbers of those that changed in theirs."""
    for path, value in nnx.to_flat_state(params):
        numbers = value.get_value()
        if not is_packed_param(numbers) and numbers is not (variable := _node_at(model, path)).get_value():
            variable.set_value(numbers)
    replacements = {
        id(_node_at(model, path)): packed_nnx_variable(_node_at(model, path), value.get_value())
        for path, value in nnx.to_flat_state(params)
        if is_packed_param(value.get_value())
    }
    _replace_variables(model, replacements)


def _is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


def _node_at(model: Any, path: tuple[Any, ...]) -> Any:
    node = model
    for key in path:
        node = _node_children(node)[key]
    return node


def _node_children(node: Any) -> dict[Any, Any]:
    return dict(nnx.graph.get_node_impl(node).node_dict(node))  # type: ignore[union-attr]


def _replace_variables(model: Any, replacements: Mapping[int, nnx.Variable]) -> None:
    """Put other variables in the places of some, in every module that holds them."""
    nodes = [node for _, node in nnx.iter_graph(model) if nnx.graph.is_node(node) and not _is_variable(node)]
    for node in nodes:
        for key, child in _node_children(node).items():
            if id(child) not in replacements:
                continue
            if isinstance(key, str) and hasattr(node, key):
                setattr(node, key, replacements[id(child)])
            else:
                node[key] = replacements[id(child)]


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
    """The parameters of a program, those with adapters as `AdaptedParam`."""
    return _params_and_dropout_key(model, _split_program_state(model)[1])[0]


def _params_and_dropout_key(model: Any, params: Any) -> tuple[Any, Array | None]:
    """The parameters of a model with their adapters, and a key if these have dropout."""
    flat, paths, key = dict(nnx.to_flat_state(params)), variable_paths(model), None
    for entry in module_entries(model):
        for name, param_adapter in vars(entry.module).get(_ADAPTERS_ATTRIBUTE, {}).items():
            path = paths[id(entry.variables[name])]
            variable, adapter = flat[path], param_adapter.adapter
            flat[path] = variable.replace(AdaptedParam(_without_adapter(variable.get_value()), adapter))
            key = param_adapter.dropout.rngs() if adapter.rule.dropout and key is None else key
    return nnx.from_flat_state(flat), key


def _without_adapter(value: Any) -> Any:
    return value.base if isinstance(value, AdaptedParam) else value


def set_program_params(model: Any, params: Any, rules: tuple[Rule, ...], rngs: nnx.Rngs | None) -> None:
    """Give a model other parameters, with or without adapters, and rules, in place."""
    if not is_nnx_program(model):
        _set_program_parts(model, rules, False)
        setattr(model, _RULES_ATTRIBUTE, nnx.static(rules))
    for module in _modules_under_rules(model, _nnx_program_part(model).rules):
        if _RULES_ATTRIBUTE in vars(module):
            setattr(module, _RULES_ATTRIBUTE, nnx.static(rules))
        else:
            setattr(module, _PART_ATTRIBUTE, nnx.static(replace(getattr(module, _PART_ATTRIBUTE), rules=rules)))
    flat = dict(nnx.to_flat_state(params))
    values = {id(_node_at(model, path)): value.get_value() for path, value in flat.items()}
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
    replacements = {}
    for path in flat:
        variable = _node_at(model, path)
        value = _without_adapter(values[id(variable)])
        if isinstance(variable, QuantizedParam) and not is_packed_param(value):
            metadata = variable.get_metadata()
            replacements[id(variable)] = metadata.pop(UNPACKED_CLASS, nnx.Param)(value, **metadata)
        elif value is not variable.get_value():
            variable.set_value(value)
    _replace_variables(model, replacements)


def trace_nnx_programs(model: Any, inputs: ExampleInputs) -> list[tuple[Any, Any]]:
    """The programs of methods of a model, each with its call."""
    graph, params, rest = _split_program_state(model)
    rules = program_rules(model)
    return [
        function.traced(params, rest, args)
        for function, args in _nnx_method_functions(model, graph, rules, inputs).values()
    ]


def trace_nnx_part(module: Any, *args: Any) -> tuple[Any, Any]:
    """The program of the call of a module of a model, under the model's rules, with that call."""
    graph, params, rest = _split_program_state(module)
    part = _nnx_program_part(module)
    function = _nnx_method_function(module, graph, method_of(plain_class(type(module)), "__call__"), part)
    return function.traced(part.params_in_model(params), rest, _MethodArguments(args, {}).split())


def program_rules(model: Any) -> tuple[Rule, ...]:
    """The rules of a program; of a plain model, none."""
    return _nnx_program_part(model).rules if is_nnx_program(model) else ()


def has_adapters(model: Any) -> bool:
    """Whether a parameter of a program has an adapter."""
    return any(isinstance(node, ParamAdapter) for _, node in nnx.iter_graph(model))
