"""Models whose programs are quantized: every method runs under rules, whatever the classes of its layers."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from typing import Any

import jax
import numpy as np
from flax import nnx

from jchop._products.adapters import AdaptedParam, Adapter
from jchop._products.quantize_fn import QuantizedFunction, check_fields
from jchop._products.rule import Rule
from jchop._products.scales.observed import Observed
from jchop._products.scales.sites import Scales
from jchop._products.traced.report import ProgramReport
from jchop._products.traced.resolved import check_weights
from jchop._products.weights import is_packed
from jchop.nn._nnx.attach import fork
from jchop.nn._nnx.classes import Inputs, Part, body_of, method_of, methods_of, plain_class
from jchop.nn._nnx.modules import Keys, modules_of
from jchop.nn._nnx.variables import UNPACKED_CLASS, QuantizedParam, packed_variable
from jchop.nn._scale_state import KeptScales
from jchop.ptq._quantize import calibrated
from jchop.ptq._report import PtqReport
from jchop.ptq._run import changed_batches

Array = jax.Array

__all__ = [
    "adapted_params",
    "calibrate_program",
    "fit_program",
    "has_adapters",
    "is_program",
    "names_of",
    "put_params",
    "quantize_program",
    "report_program",
    "rules_of",
    "traced_part",
    "traced_programs",
]

_PARAMETERS = (nnx.Param, QuantizedParam)
#: The attributes that hold the rules of a model, the stream of its stochastic roundings, its kept scales, and of the
#: modules below it their places.
_RULES, _STREAM, _SCALES = "quantization_rules", "quantization_stream", "quantization_scales"
_PART = "quantization_part"
#: The attribute of a module that holds the adapters of its parameters, by the names of these.
_ADAPTERS = "quantization_adapters"


#: The advice of an error for a program that has to be traced.
EXAMPLES = (
    "pass example arguments of the model's call, inputs=(x,) or inputs={'x': x}, or of other methods, "
    "inputs={'decode': (x,)}; jax.ShapeDtypeStruct will do"
)


def quantize_program(
    model: Any, rules: Sequence[Rule], mode: str, inputs: Inputs | None, rngs: nnx.Rngs | None
) -> None:
    """Give a model the class whose methods run under rules, in place; pack its parameters unless ``mode="qat"``.

    Raises:
        ValueError: as `jchop.quantize_fn`; for packing without `inputs`.
    """
    packed_flags = (isinstance(v, QuantizedParam) for v in jax.tree.leaves(nnx.state(model), is_leaf=_is_variable))
    if is_program(model) and any(packed_flags):
        raise ValueError("model is packed already; quantize the model that it was made from")
    check_fields(rules)
    program_scales: KeptScales | None = getattr(model, _SCALES, None)
    old_scales = (
        program_scales.scales
        if program_scales is not None and _part_of(model).rules == tuple(rules)
        else Scales({}, {})
    )
    if is_program(model):
        _make_plain(model)
    keeping = next((rule for rule in rules if rule.scale_from is not None), None)
    if keeping is not None and inputs is None:
        raise ValueError(
            f"inputs=None, but {keeping} keeps scales, whose places the program says: pass example arguments of the "
            "model's call, inputs=(x,)"
        )
    scales = old_scales if inputs is None or keeping is None else _started(model, rules, inputs, old_scales)
    stochastic = [rule for rule in rules if rule.stochastic]
    if mode == "qat" and inputs is not None:
        graph, params, rest = _split(model)  # the errors of rules come here, not in the first call
        functions = _functions(model, graph, rules, inputs).values()
        check_weights([function.resolved(params, rest, args) for function, args in functions])
    if mode != "qat":
        if inputs is None:
            raise ValueError(f"inputs=None, but a program that is packed has to be traced: {EXAMPLES}")
        key = fork(stochastic[0], rngs, "the model")() if any(map(_draws_weights, rules)) else None
        packed_names = _pack(model, rules, inputs, scales, key)
        remaining = {name: scale for name, scale in scales.learned.items() if name not in packed_names}
        scales = scales._replace(learned=remaining)
    _give_rules(model, rules, rngs, scales)


def _give_rules(model: Any, rules: Sequence[Rule], rngs: nnx.Rngs | None, scales: Scales) -> None:
    """Give a model the class whose methods run under rules."""
    stochastic = [rule for rule in rules if rule.stochastic]
    if stochastic:
        setattr(model, _STREAM, nnx.data(fork(stochastic[0], rngs, "the model")))
    if scales.learned or scales.stats:
        setattr(model, _SCALES, nnx.data(KeptScales(scales)))
    _place(model, tuple(rules), bool(scales.learned or scales.stats))
    setattr(model, _RULES, nnx.static(tuple(rules)))


def _place(model: Any, rules: tuple[Rule, ...], keeps: bool) -> None:
    """Give every module of a model its class and its place, so that its methods are under rules, too.

    Raises:
        ValueError: for an attribute that stands for a method and belongs to one module.
    """
    keeps |= any(rule.scale_from is not None for rule in rules)
    entries = [entry for entry in modules_of(model) if not isinstance(entry.module, KeptScales)]
    holders = Counter(id(variable) for entry in entries for _ in entry.keys for variable in entry.variables.values())
    model_paths = names_of(model) if max(holders.values(), default=1) > 1 else {}
    for entry in entries:
        module: Any = entry.module
        if is_program(module):  # of a model that has been quantized by itself
            continue
        _check_attributes(module, entry.paths[0])
        own = names_of(module) if model_paths else {}
        names = ((path, model_paths[variable_id]) for variable_id, path in own.items())
        other_names = tuple((path, full) for path, full in names if full != (*entry.keys[0], *path))
        if module is not model:
            setattr(module, _PART, nnx.static(Part(rules, entry.keys[0], other_names, keeps)))
        module.__class__ = _class_of(plain_class(type(module)))


def names_of(model: Any) -> dict[int, Keys]:
    """The paths of parameters, by the identities of their variables."""
    return {id(_variable_at(model, path)): path for path, _ in nnx.to_flat_state(nnx.state(model, _PARAMETERS))}


def _check_attributes(module: Any, path: str) -> None:
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


def _started(model: Any, rules: Sequence[Rule], inputs: Inputs, old_scales: Scales) -> Scales:
    """The scales that rules keep in the methods of a model, those that are known as they are."""
    graph, params, rest = _split(model)
    learned_scales, stats = {}, {}
    for function, args in _functions(model, graph, rules, inputs).values():
        new_scales = function.start(params, rest, args, from_data=False)
        learned_scales, stats = {**new_scales.learned, **learned_scales}, {**new_scales.stats, **stats}
    return Scales({**learned_scales, **old_scales.learned}, {**stats, **old_scales.stats})


def calibrate_program(model: Any, method: str, combine: str) -> Callable[[], None]:
    """Make a model of which the program is quantized note its data; what is returned ends that, and fixes ranges."""
    observer = Observed(method, combine)
    if not hasattr(model, _SCALES):
        setattr(model, _SCALES, nnx.data(KeptScales(Scales({}, {}))))
    getattr(model, _SCALES).observer = nnx.static(observer)

    def end() -> None:
        setattr(model, _SCALES, nnx.data(KeptScales(observer.into(getattr(model, _SCALES).scales))))
        for module in _parts_in(model, _part_of(model).rules):
            if (part := getattr(module, _PART, None)) is not None:
                setattr(module, _PART, nnx.static(replace(part, keeps=True)))

    return end


def fit_program(
    model: Any,
    rules: Sequence[Rule],
    batches: Iterable[Any],
    steps: Any,
    sequential: bool | None,
    rngs: nnx.Rngs | None,
    progress: Callable[[int], object] | None,
) -> PtqReport:
    """Round the parameters of a model with data, in place, and give it the class whose methods run under rules.

    Raises:
        ValueError: as `jchop.ptq.quantize`; for a model that runs under rules already.
    """
    if is_program(model):
        raise ValueError("model is quantized already; give the model that it was made from")
    check_fields(rules)
    stochastic = [rule for rule in rules if rule.stochastic]
    key = fork(stochastic[0], rngs, "the model")() if stochastic else None
    graph, params, rest = _split(model)
    function = _function(model, graph, method_of(type(model), "__call__"), Part(tuple(rules)))
    calls = changed_batches(batches, lambda args: (rest, _Given(args, {}).split()))
    packed_params, report = calibrated(function, params, calls, steps, sequential, key, progress)
    _put_packed(model, packed_params)
    _give_rules(model, rules, rngs, Scales({}, {}))
    return report


def report_program(
    model: Any, rules: Sequence[Rule], inputs: Inputs, platform: str | None = None
) -> dict[str, ProgramReport]:
    """The report of each method."""
    graph, params, rest = _split(model)
    functions = _functions(model, graph, rules, inputs)
    return {
        name: function.report(params, rest, args, platform=platform) for name, (function, args) in functions.items()
    }


def is_program(model: Any) -> bool:
    """Whether the methods of a model run under rules."""
    return hasattr(type(model), "_quantized_program")


def _draws_weights(rule: Rule) -> bool:
    return any(spec is not None and spec.rounding.stochastic for spec in (rule.weight, rule.bias))


def _part_of(model: Any) -> Part:
    """The place of a module under rules: in a model, or that of the model itself."""
    return getattr(model, _PART, None) or Part(getattr(model, _RULES))


def _parts_in(model: Any, rules: tuple[Rule, ...]) -> list[Any]:
    """The modules of a model that run under rules; those under other rules have been quantized by themselves."""
    nodes = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module) and is_program(node)]
    return [node for node in nodes if _part_of(node).rules == rules]


def _make_plain(model: Any) -> None:
    """Give modules under rules the classes and attributes that they had before, in place."""
    for module in _parts_in(model, _part_of(model).rules):
        module.__class__ = plain_class(type(module))
        for name in (_RULES, _STREAM, _SCALES, _PART, _ADAPTERS):
            if name in vars(module):
                delattr(module, name)


# -- the class ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _class_of(plain: type) -> type:
    """A class like `plain` whose methods run under the rules of the model."""
    base = next(base for base in (nnx.List, nnx.Dict, nnx.Module) if issubclass(plain, base))
    return type(plain.__name__, (plain,), body_of(plain, base, _interpreted, _class_of))


def _interpreted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        stream, program_scales, part = getattr(self, _STREAM, None), getattr(self, _SCALES, None), _part_of(self)
        graph, params, rest = _split(self)
        arguments = _Given(args, kwargs)
        params, dropout = (params, None) if not rest[2] else _with_adapters(self, params)
        params = part.params_in_model(params)
        function = _function(self, graph, method, part)
        key = None if stream is None else stream()
        if stream is None and program_scales is None:
            key = _key_of_part(part, function, params, rest, arguments) if dropout is None else dropout
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


def _key_of_part(part: Part, function: QuantizedFunction, params: Any, rest: Any, arguments: _Given) -> Array | None:
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


def _split(model: Any) -> tuple[Any, Any, Any]:
    """The graph of a model, its parameters, and all else that it holds: its kept scales and adapters apart."""
    apart = nnx.PathContains(_SCALES), nnx.PathContains(_ADAPTERS)
    graph, scales, adapters, params, rest = nnx.split(model, *apart, _PARAMETERS, ...)
    return graph, params, (rest, scales, adapters)


def _functions(
    model: Any, graph: Any, rules: Sequence[Rule], inputs: Inputs
) -> dict[str, tuple[QuantizedFunction, _Arguments]]:
    """The methods that have example arguments, as functions, with these."""
    cls, part = plain_class(type(model)), Part(tuple(rules))
    return {
        name: (_function(model, graph, method_of(cls, name), part), _Given(*arguments).split())
        for name, arguments in methods_of(inputs, cls).items()
    }


def _function(model: Any, graph: Any, method: Callable[..., Any], part: Part) -> QuantizedFunction:
    """A method as a function of parameters, other state and arguments; of equal graphs one that is traced once."""
    classes = _classes_of(model, part) if any(rule.layer is not None for rule in part.rules) else ()
    try:
        hash(graph)
    except TypeError:  # an attribute that cannot be compared
        return _new_function(graph, method, part, classes)
    return _kept_function(graph, method, part, classes)


def _classes_of(model: Any, part: Part) -> tuple[tuple[str, str], ...]:
    """The path of each variable, with the class of the module that holds it."""
    return tuple(
        ("/".join(filter(None, (*map(str, part.path), path, name))), type(entry.module).__name__)
        for entry in modules_of(model)
        for path in entry.paths
        for name in entry.variables
    )


def _new_function(
    graph: Any, method: Callable[..., Any], part: Part, classes: tuple[tuple[str, str], ...]
) -> QuantizedFunction:
    def pure(params: Any, rest: Any, arguments: _Arguments) -> tuple[_After, Any]:
        copy = nnx.merge(graph, part.params_in_part(params), *rest)
        if is_program(copy):
            _make_plain(copy)  # so that methods call each other as they are
        _unpack(copy)
        before, call_arguments = _attributes(copy), arguments.merge()
        args, kwargs = call_arguments.values
        out = method(copy, *args, **kwargs)
        return _After.of(out, copy, before), call_arguments.states()

    return QuantizedFunction(pure, part.rules, classes=dict(classes), whole=not part.path)


_kept_function = lru_cache(maxsize=256)(_new_function)


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Static:
    """What is no array: in a result, or in attributes by the path of the module and the name."""

    value: Any


@partial(jax.tree_util.register_dataclass, data_fields=["out", "state", "attributes"], meta_fields=[])
@dataclass(frozen=True)
class _After:
    """The result of a method, and what it has changed in a model: all state but parameters, and attributes."""

    out: Any
    state: Any
    attributes: _Static

    @classmethod
    def of(cls, out: Any, model: Any, before: Mapping[Any, Any]) -> _After:
        """The result of a call; modules of the model in it are named by their paths."""
        paths = {id(node): path for path, node in nnx.iter_graph(model) if nnx.graph.is_graph_node(node)}

        def as_static(leaf: Any) -> Any:
            in_model = id(leaf) in paths and not isinstance(leaf, nnx.Variable)
            return _Static(_Node(paths[id(leaf)])) if in_model else leaf if _is_result(leaf) else _Static(leaf)

        out = jax.tree.map(as_static, out, is_leaf=nnx.graph.is_graph_node)
        after = _attributes(model)
        now = {at: after.get(at, _GONE) for at in {**before, **after}}
        changes = {at: value for at, value in now.items() if before.get(at, _GONE) is not value}
        return cls(out, _split(model)[2][0], _Static(changes))

    def update(self, model: Any) -> Any:
        """Change a model likewise, and give the result of the method."""
        for (path, name), value in self.attributes.value.items():
            if value is _GONE:
                delattr(_variable_at(model, path), name)
            else:
                setattr(_variable_at(model, path), name, value)
        nnx.update(model, self.state)

        def restore(leaf: Any) -> Any:
            value = leaf.value if isinstance(leaf, _Static) else leaf
            return _variable_at(model, value.path) if isinstance(value, _Node) else value

        return jax.tree.map(restore, self.out, is_leaf=lambda leaf: isinstance(leaf, _Static))


#: In the place of an attribute that a method has deleted, or given an array.
_GONE = _Static(None)


def _is_result(leaf: Any) -> bool:
    return nnx.graph.is_graph_node(leaf) or isinstance(
        leaf, jax.Array | np.ndarray | np.generic | float | int | complex
    )


def _attributes(model: Any) -> dict[tuple[Keys, str], Any]:
    """The attributes of the modules of a model that hold neither arrays nor modules."""
    return {
        (path, name): value
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
        for name, value in vars(node).items()
        if not name.startswith("_pytree__") and not nnx.is_data(value)
    }


def _unpack(model: Any) -> None:
    """Put parameters of the classes that they had in the places of packed ones, in a copy that holds their numbers."""
    packed_variables = {id(node): node for _, node in nnx.iter_graph(model) if isinstance(node, QuantizedParam)}
    replacements = {}
    for variable_id, variable in packed_variables.items():
        metadata = variable.get_metadata()
        replacements[variable_id] = metadata.pop(UNPACKED_CLASS, nnx.Param)(variable.get_raw_value(), **metadata)
    _replace(model, replacements)


@partial(jax.tree_util.register_dataclass, data_fields=["leaves", "states"], meta_fields=["tree", "graphs"])
@dataclass(frozen=True)
class _Arguments:
    """Arguments, with the state of modules among them apart."""

    leaves: list[Any]
    states: list[Any]
    tree: Any
    graphs: tuple[Any, ...]

    def merge(self) -> _Given:
        """The arguments themselves, modules as copies."""
        nodes = iter([nnx.merge(graph, state) for graph, state in zip(self.graphs, self.states, strict=True)])
        leaves = [next(nodes) if isinstance(leaf, _Node) else leaf for leaf in self.leaves]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return _Given(args, kwargs)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Node:
    """The place of a module among arguments, or in a model."""

    path: Keys = ()


class _Given:
    """Arguments of a method. A call changes the state of modules among them (streams of keys, caches)."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values = args, kwargs
        self._leaves, self._tree = jax.tree.flatten(self.values, is_leaf=nnx.graph.is_graph_node)
        self._nodes = [leaf for leaf in self._leaves if nnx.graph.is_graph_node(leaf)]

    def split(self) -> _Arguments:
        """The arguments as arrays."""
        parts = [nnx.split(node) for node in self._nodes]
        leaves = [_Node() if nnx.graph.is_graph_node(leaf) else leaf for leaf in self._leaves]
        return _Arguments(leaves, [state for _, state in parts], self._tree, tuple(graph for graph, _ in parts))

    def states(self) -> list[Any]:
        """The state of each module."""
        return [nnx.state(node) for node in self._nodes]

    def update(self, states: Sequence[Any]) -> None:
        """Give the modules the state that they have after the call."""
        for node, state in zip(self._nodes, states, strict=True):
            nnx.update(node, state)


# -- packed parameters -------------------------------------------------------------------------------------------------


def _pack(model: Any, rules: Sequence[Rule], inputs: Inputs, scales: Scales, key: Array | None) -> set[str]:
    """Store parameters packed; the names of the learned scales that have become part of them."""
    graph, params, rest = _split(model)
    functions = _functions(model, graph, rules, inputs).values()
    check_weights([function.resolved(params, rest, args) for function, args in functions])
    for function, args in functions:  # packed for the first method that rounds it
        params = function.pack_more(params, rest, args, scales=scales, key=key)
    _put_packed(model, params)
    return {name for name in scales.learned if re.search(r"_weight_scale$", name)}


def _put_packed(model: Any, params: Any) -> None:
    """Put packed parameters in the places of others, and the numbers of those that changed in theirs."""
    for path, value in nnx.to_flat_state(params):
        numbers = value.get_value()
        if not is_packed(numbers) and numbers is not (variable := _variable_at(model, path)).get_value():
            variable.set_value(numbers)
    replacements = {
        id(_variable_at(model, path)): packed_variable(_variable_at(model, path), value.get_value())
        for path, value in nnx.to_flat_state(params)
        if is_packed(value.get_value())
    }
    _replace(model, replacements)


def _is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


def _variable_at(model: Any, path: tuple[Any, ...]) -> Any:
    node = model
    for key in path:
        node = _children(node)[key]
    return node


def _children(node: Any) -> dict[Any, Any]:
    return dict(nnx.graph.get_node_impl(node).node_dict(node))  # type: ignore[union-attr]


def _replace(model: Any, replacements: Mapping[int, nnx.Variable]) -> None:
    """Put other variables in the places of some, in every module that holds them."""
    nodes = [node for _, node in nnx.iter_graph(model) if nnx.graph.is_node(node) and not _is_variable(node)]
    for node in nodes:
        for key, child in _children(node).items():
            if id(child) not in replacements:
                continue
            if isinstance(key, str) and hasattr(node, key):
                setattr(node, key, replacements[id(child)])
            else:
                node[key] = replacements[id(child)]


# -- adapters ----------------------------------------------------------------------------------------------------------


class Beside(nnx.Module):
    """An adapter of a parameter of a program, in the module that holds the parameter.

    Attributes:
        lora_a: A, (in, rank), with the axes of a stack in front.
        lora_b: B, (rank, out), likewise.
    """

    def __init__(self, adapter: Adapter, rngs: nnx.Rngs | None) -> None:
        self.lora_a, self.lora_b = nnx.LoRAParam(adapter.lora_a), nnx.LoRAParam(adapter.lora_b)
        self.how = nnx.static(_Static(replace(adapter, lora_a=None, lora_b=None)))
        rate = adapter.rule.dropout
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate and rngs is not None else None

    @property
    def adapter(self) -> Adapter:
        """The adapter; without dropout after `eval`."""
        how, drops = self.how.value, self.dropout is not None and not self.dropout.deterministic
        rule = how.rule if drops else replace(how.rule, dropout=0.0)
        return replace(how, lora_a=self.lora_a[...], lora_b=self.lora_b[...], rule=rule)


def adapted_params(model: Any) -> Any:
    """The parameters of a program, those with adapters as `AdaptedParam`."""
    return _with_adapters(model, _split(model)[1])[0]


def _with_adapters(model: Any, params: Any) -> tuple[Any, Array | None]:
    """The parameters of a model with their adapters, and a key if these have dropout."""
    flat, paths, key = dict(nnx.to_flat_state(params)), names_of(model), None
    for entry in modules_of(model):
        for name, param_adapter in vars(entry.module).get(_ADAPTERS, {}).items():
            path = paths[id(entry.variables[name])]
            variable, adapter = flat[path], param_adapter.adapter
            flat[path] = variable.replace(AdaptedParam(_base(variable.get_value()), adapter))
            key = param_adapter.dropout.rngs() if adapter.rule.dropout and key is None else key
    return nnx.from_flat_state(flat), key


def _base(value: Any) -> Any:
    return value.base if isinstance(value, AdaptedParam) else value


def put_params(model: Any, params: Any, rules: tuple[Rule, ...], rngs: nnx.Rngs | None) -> None:
    """Give a model other parameters, with or without adapters, and rules, in place."""
    if not is_program(model):
        _place(model, rules, False)
        setattr(model, _RULES, nnx.static(rules))
    for module in _parts_in(model, _part_of(model).rules):
        if _RULES in vars(module):
            setattr(module, _RULES, nnx.static(rules))
        else:
            setattr(module, _PART, nnx.static(replace(getattr(module, _PART), rules=rules)))
    flat = dict(nnx.to_flat_state(params))
    values = {id(_variable_at(model, path)): value.get_value() for path, value in flat.items()}
    adapters = {key: Beside(value.adapter, rngs) for key, value in values.items() if isinstance(value, AdaptedParam)}
    for entry in modules_of(model):
        if not is_program(entry.module):
            continue
        own = {name: adapters[id(variable)] for name, variable in entry.variables.items() if id(variable) in adapters}
        if own:
            setattr(entry.module, _ADAPTERS, nnx.Dict(own))
        elif _ADAPTERS in vars(entry.module):
            delattr(entry.module, _ADAPTERS)
    replacements = {}
    for path in flat:
        variable = _variable_at(model, path)
        value = _base(values[id(variable)])
        if isinstance(variable, QuantizedParam) and not is_packed(value):
            metadata = variable.get_metadata()
            replacements[id(variable)] = metadata.pop(UNPACKED_CLASS, nnx.Param)(value, **metadata)
        elif value is not variable.get_value():
            variable.set_value(value)
    _replace(model, replacements)


def traced_programs(model: Any, inputs: Inputs) -> list[tuple[Any, Any]]:
    """The programs of methods of a model, each with its call."""
    graph, params, rest = _split(model)
    rules = rules_of(model)
    return [function.traced(params, rest, args) for function, args in _functions(model, graph, rules, inputs).values()]


def traced_part(module: Any, *args: Any) -> tuple[Any, Any]:
    """The program of the call of a module of a model, under the model's rules, with that call."""
    graph, params, rest = _split(module)
    part = _part_of(module)
    function = _function(module, graph, method_of(plain_class(type(module)), "__call__"), part)
    return function.traced(part.params_in_model(params), rest, _Given(args, {}).split())


def rules_of(model: Any) -> tuple[Rule, ...]:
    """The rules of a program; of a plain model, none."""
    return _part_of(model).rules if is_program(model) else ()


def has_adapters(model: Any) -> bool:
    """Whether a parameter of a program has an adapter."""
    return any(isinstance(node, Beside) for _, node in nnx.iter_graph(model))
