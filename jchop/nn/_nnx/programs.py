"""Models whose programs are quantized: every method runs under rules, whatever the classes of its layers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any

import jax
from flax import nnx

from jchop._products.quantize_fn import QuantizedFunction, check_fields
from jchop._products.rule import Rule
from jchop._products.scales.observed import Observed
from jchop._products.scales.sites import Scales
from jchop._products.traced.report import ProgramReport
from jchop._products.traced.resolved import check_weights
from jchop._products.weights import is_packed
from jchop.nn._nnx.attach import fork
from jchop.nn._nnx.modules import modules_of
from jchop.nn._nnx.variables import QuantizedParam, packed_variable
from jchop.nn._scale_state import KeptScales
from jchop.ptq._quantize import calibrated
from jchop.ptq._report import PtqReport
from jchop.ptq._run import changed_batches

Array = jax.Array

__all__ = [
    "Inputs",
    "calibrate_program",
    "fit_program",
    "is_method",
    "is_program",
    "methods_of",
    "quantize_program",
    "report_program",
]

#: Example arguments of the model's call; or of several methods, by their names.
Inputs = tuple[Any, ...] | Mapping[str, tuple[Any, ...]]

_PARAMETERS = (nnx.Param, QuantizedParam)
#: The attributes that hold the rules of a model, the stream of its stochastic roundings, and its kept scales.
_RULES, _STREAM, _SCALES = "quantization_rules", "quantization_stream", "quantization_scales"


#: The advice of an error for a program that has to be traced.
EXAMPLES = (
    "pass example arguments of the model's call, inputs=(x,), or of other methods, inputs={'decode': (x,)}; "
    "jax.ShapeDtypeStruct will do"
)


def quantize_program(
    model: Any, rules: Sequence[Rule], mode: str, inputs: Inputs | None, rngs: nnx.Rngs | None
) -> None:
    """Give a model the class whose methods run under rules, in place; pack its parameters unless ``mode="qat"``.

    Raises:
        ValueError: as `jchop.quantize_fn`; for packing without `inputs`.
    """
    if is_program(model):
        if any(isinstance(v, QuantizedParam) for v in jax.tree.leaves(nnx.state(model), is_leaf=_is_variable)):
            raise ValueError("model is packed already; quantize the model that it was made from")
        model.__class__ = type(model).__mro__[1]
    check_fields(rules)
    held: KeptScales | None = getattr(model, _SCALES, None)
    known = held.scales if held is not None and getattr(model, _RULES) == tuple(rules) else Scales({}, {})
    if held is not None:
        delattr(model, _SCALES)
    keeping = next((rule for rule in rules if rule.scale_from is not None), None)
    if keeping is not None and inputs is None:
        raise ValueError(
            f"inputs=None, but {keeping} keeps scales, whose places the program says: pass example arguments of the "
            "model's call, inputs=(x,)"
        )
    scales = known if inputs is None or keeping is None else _started(model, rules, inputs, known)
    stochastic = [rule for rule in rules if rule.stochastic]
    if mode == "qat" and inputs is not None:
        graph, params, rest = _split(model)  # the errors of rules come here, not in the first call
        functions = _functions(model, graph, rules, inputs).values()
        check_weights([low.resolved(params, rest, args) for low, args in functions])
    if mode != "qat":
        if inputs is None:
            raise ValueError(f"inputs=None, but a program that is packed has to be traced: {EXAMPLES}")
        key = fork(stochastic[0], rngs, "the model")() if any(map(_draws_weights, rules)) else None
        packed = _pack(model, rules, inputs, scales, key)
        learned = {name: scale for name, scale in scales.learned.items() if name not in packed}
        scales = scales._replace(learned=learned)
    _give_rules(model, rules, rngs, scales)


def _give_rules(model: Any, rules: Sequence[Rule], rngs: nnx.Rngs | None, scales: Scales) -> None:
    """Give a model the class whose methods run under rules."""
    stochastic = [rule for rule in rules if rule.stochastic]
    if stochastic:
        setattr(model, _STREAM, nnx.data(fork(stochastic[0], rngs, "the model")))
    if scales.learned or scales.stats:
        setattr(model, _SCALES, nnx.data(KeptScales(scales)))
    setattr(model, _RULES, nnx.static(tuple(rules)))
    model.__class__ = _class_of(type(model))


def _started(model: Any, rules: Sequence[Rule], inputs: Inputs, known: Scales) -> Scales:
    """The scales that rules keep in the methods of a model, those that are known as they are."""
    graph, params, rest = _split(model)
    learned, stats = {}, {}
    for low, args in _functions(model, graph, rules, inputs).values():
        begun = low.start(params, rest, args, from_data=False)
        learned, stats = {**begun.learned, **learned}, {**begun.stats, **stats}
    return Scales({**learned, **known.learned}, {**stats, **known.stats})


def calibrate_program(model: Any, method: str, combine: str) -> Callable[[], None]:
    """Make a model of which the program is quantized note its data; what is returned ends that, and fixes ranges."""
    observed = Observed(method, combine)
    if not hasattr(model, _SCALES):
        setattr(model, _SCALES, nnx.data(KeptScales(Scales({}, {}))))
    getattr(model, _SCALES).observed = nnx.static(observed)

    def end() -> None:
        setattr(model, _SCALES, nnx.data(KeptScales(observed.into(getattr(model, _SCALES).scales))))

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
    low = _function(model, graph, _method(type(model), "__call__"), tuple(rules), type(model))
    given = changed_batches(batches, lambda args: (rest, _Given(args, {}).split()))
    packed, report = calibrated(low, params, given, steps, sequential, key, progress)
    _put_packed(model, packed)
    _give_rules(model, rules, rngs, Scales({}, {}))
    return report


def report_program(
    model: Any, rules: Sequence[Rule], inputs: Inputs, platform: str | None = None
) -> dict[str, ProgramReport]:
    """The report of each method."""
    graph, params, rest = _split(model)
    functions = _functions(model, graph, rules, inputs)
    return {name: low.report(params, rest, args, platform=platform) for name, (low, args) in functions.items()}


def is_program(model: Any) -> bool:
    """Whether the methods of a model run under rules."""
    return hasattr(type(model), "_quantized_program")


def _draws_weights(rule: Rule) -> bool:
    return any(spec is not None and spec.rounding.stochastic for spec in (rule.weight, rule.bias))


def methods_of(inputs: Inputs) -> dict[str, tuple[Any, ...]]:
    """Arguments by the name of the method."""
    given = dict(inputs) if isinstance(inputs, Mapping) else {"__call__": inputs}
    for name, args in given.items():
        if not isinstance(args, tuple | list):
            raise TypeError(f"inputs: {args!r} must be a tuple of arguments of {name!r}, such as (x,)")
    return {name: tuple(args) for name, args in given.items()}


def _method(cls: type, name: str) -> Callable[..., Any]:
    found = inspect.getattr_static(cls, name, None)
    if not is_method(found):
        raise ValueError(f"inputs: {cls.__name__} has no method {name!r}")
    return found


def is_method(value: Any) -> bool:
    """Whether an attribute of a class is a function, also one that `flax.nnx.jit` and the like have wrapped."""
    wrapped = callable(value) and hasattr(value, "__wrapped__") and not isinstance(value, type)
    return inspect.isfunction(value) or (wrapped and not isinstance(value, staticmethod | classmethod))


# -- the class ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _class_of(plain: type) -> type:
    """A class like `plain` whose methods run under the rules of the model."""
    own = {name for cls in (nnx.Module, *nnx.Module.__mro__) for name in vars(cls)} - {"__call__"}
    found = {
        name: value
        for name in dir(plain)
        if name not in own and (name == "__call__" or not name.startswith("_"))
        if is_method(value := inspect.getattr_static(plain, name))
    }
    methods = {name: _interpreted(plain, value) for name, value in found.items()}
    doc = {"__doc__": plain.__doc__, "__module__": plain.__module__, "_quantized_program": True}
    return type(plain.__name__, (plain,), {**methods, **doc})


def _interpreted(plain: type, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        stream = getattr(self, _STREAM, None)
        graph, params, rest = _split(self)
        low = _function(self, graph, method, getattr(self, _RULES), plain)
        given = _Given(args, kwargs)
        key, held = None if stream is None else stream(), getattr(self, _SCALES, None)
        how = partial(low, params, rest, given.split(), key=key)
        if held is None:
            out, after, states = how()
        elif held.observed is not None:
            (out, after, states), seen = low.observe(params, rest, given.split(), scales=held.scales, key=key)
            held.observed.see(seen)
        elif held.use_running_average:
            out, after, states = how(scales=held.scales)
        else:
            (out, after, states), scales = low.update(params, rest, given.split(), scales=held.scales, key=key)
            held.take(scales.stats)
        nnx.update(self, after)
        given.update(states)
        return out

    return run


def _split(model: Any) -> tuple[Any, Any, Any]:
    """The graph of a model, its parameters, and all else that it holds: its kept scales apart, which are none here."""
    graph, scales, params, rest = nnx.split(model, nnx.PathContains(_SCALES), _PARAMETERS, ...)
    return graph, params, (rest, scales)


def _functions(
    model: Any, graph: Any, rules: Sequence[Rule], inputs: Inputs
) -> dict[str, tuple[QuantizedFunction, _Arguments]]:
    """The methods that have example arguments, as functions, with these."""
    return {
        name: (_function(model, graph, _method(type(model), name), tuple(rules), type(model)), _Given(args, {}).split())
        for name, args in methods_of(inputs).items()
    }


def _function(
    model: Any, graph: Any, method: Callable[..., Any], rules: tuple[Rule, ...], plain: type
) -> QuantizedFunction:
    """A method as a function of parameters, other state and arguments; of equal graphs one that is traced once."""
    classes = _classes_of(model) if any(rule.layer is not None for rule in rules) else ()
    try:
        hash(graph)
    except TypeError:  # an attribute that cannot be compared
        return _new_function(graph, method, rules, plain, classes)
    return _kept_function(graph, method, rules, plain, classes)


def _classes_of(model: Any) -> tuple[tuple[str, str], ...]:
    """The path of each variable, with the class of the module that holds it."""
    return tuple(
        ("/".join(filter(None, (path, name))), type(placed.module).__name__)
        for placed in modules_of(model)
        for path in placed.paths
        for name in placed.own
    )


def _new_function(
    graph: Any, method: Callable[..., Any], rules: tuple[Rule, ...], plain: type, classes: tuple[tuple[str, str], ...]
) -> QuantizedFunction:
    def pure(params: Any, rest: Any, given: _Arguments) -> tuple[Any, Any, Any]:
        copy = nnx.merge(graph, params, *rest)
        copy.__class__ = plain  # so that methods call each other as they are
        merged = given.merge()
        args, kwargs = merged.values
        out = method(copy, *args, **kwargs)
        return out, _split(copy)[2][0], merged.states()

    return QuantizedFunction(pure, rules, classes=dict(classes))


_kept_function = lru_cache(maxsize=256)(_new_function)


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
    """The place of a module among arguments."""


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
    check_weights([low.resolved(params, rest, args) for low, args in functions])
    for low, args in functions:  # packed for the first method that rounds it
        params = low.pack_more(params, rest, args, scales=scales, key=key)
    _put_packed(model, params)
    return {name for name in scales.learned if re.search(r"_weight_scale$", name)}


def _put_packed(model: Any, params: Any) -> None:
    """Put packed parameters in the places of others, and the numbers of those that changed in theirs."""
    for path, value in nnx.to_flat_state(params):
        numbers = value.get_value()
        if not is_packed(numbers) and numbers is not (held := _variable_at(model, path)).get_value():
            held.set_value(numbers)
    made = {
        id(_variable_at(model, path)): packed_variable(_variable_at(model, path), value.get_value())
        for path, value in nnx.to_flat_state(params)
        if is_packed(value.get_value())
    }
    _replace(model, made)


def _is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


def _variable_at(model: Any, path: tuple[Any, ...]) -> Any:
    node = model
    for key in path:
        node = _children(node)[key]
    return node


def _children(node: Any) -> dict[Any, Any]:
    return dict(nnx.graph.get_node_impl(node).node_dict(node))  # type: ignore[union-attr]


def _replace(model: Any, made: Mapping[int, nnx.Variable]) -> None:
    """Put other variables in the places of some, in every module that holds them."""
    nodes = [node for _, node in nnx.iter_graph(model) if nnx.graph.is_node(node) and not _is_variable(node)]
    for node in nodes:
        for key, child in _children(node).items():
            if id(child) not in made:
                continue
            if isinstance(key, str) and hasattr(node, key):
                setattr(node, key, made[id(child)])
            else:
                node[key] = made[id(child)]
