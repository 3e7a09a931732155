"""Adapters beside parameters: of pytrees, and of all models that have such parameters (`AdaptableModel`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jchop._common.checks import check, check_instance
from jchop._common.paths import matches_path
from jchop._quantized.products.rule import ROUNDING_FIELDS, Rule, rule_index
from jchop._quantized.program.adapters import AdaptedParam, LoraAdapter
from jchop._quantized.program.call import CallArguments, is_packed_param, is_param_leaf, unpack_param
from jchop._quantized.program.provenance import MatrixLayout
from jchop._quantized.program.weight_layout import WeightLayout
from jchop._quantized.quantize_fn import QuantizedFunction
from jchop._round.arguments import check_key
from jchop.nn._shared.lora_rule import (
    LoraRule,
    check_lora_rules_match,
    initial_stack_adapters,
    merge_lora_weight,
    read_adapters,
)
from jchop.nn._shared.program_classes import ExampleInputs
from jchop.nn._trees.equinox_modules import (
    equinox_method_functions,
    equinox_rules,
    equinox_scales,
    is_equinox_module,
    module_under_rules,
    plain_module,
)
from jchop.storage._axis_groupings import map_over_stack

Array = jax.Array

#: Names of a parameter that stand for its layer in a file of PEFT.
_WEIGHT_NAMES = ("weight", "kernel")


class AdapterTarget(NamedTuple):
    """A parameter that may have an adapter.

    Args:
        value: the parameter.
        layout: it as a matrix, or the reason why it can have no adapter.
        placement: how it is packed; None if no rule rounds it.
    """

    value: Any
    layout: MatrixLayout | str
    placement: WeightLayout | None = None


AdapterTargets = dict[str, AdapterTarget]


# -- models ------------------------------------------------------------------------------------------------------------


class AdaptableModel:
    """A pytree of parameters of a function, some with adapters; other models are subclasses.

    Args:
        model: it.
        inputs: example arguments.
        fun: what runs the parameters.
        key: for the first values of A.
    """

    def __init__(self, model: Any, inputs: ExampleInputs | None = None, fun: Any = None, key: Any = None) -> None:
        self.model, self.inputs, self.fun, self._key = model, inputs, fun, key

    @property
    def adapted(self) -> dict[str, AdaptedParam]:
        """The parameters with adapters, by path."""
        return {path: leaf for path, leaf in leaves_by_path(self.model).items() if isinstance(leaf, AdaptedParam)}

    @cached_property
    def targets(self) -> AdapterTargets:
        """The parameters that may have adapters, by path."""
        return program_adapter_targets(self.programs())

    def programs(self) -> Iterable[tuple[Any, CallArguments]]:
        """The programs of the model, each with its call."""
        check_instance("fun", self.fun, QuantizedFunction, "a result of jchop.quantize_fn, which runs the parameters")
        inputs = self.example_inputs
        check_instance("inputs", inputs, tuple | list | Mapping, "a tuple or a dict of arguments after the parameters")
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
        return [self.fun.traced(self.model, *args, **kwargs)]

    @property
    def example_inputs(self) -> ExampleInputs:
        """The example arguments.

        Raises:
            ValueError: if there are none.
        """
        if self.inputs is None:
            raise ValueError(
                "inputs=None: the program says which parameters may have adapters; pass example arguments, inputs=(x,)"
            )
        return self.inputs

    @cached_property
    def key(self) -> Array:
        """The key of all first values.

        Raises:
            ValueError: if there is none.
        """
        if self._key is None:
            raise ValueError(
                "key=None: the first values of adapters are random; pass a typed key, key=jax.random.key(0)"
            )
        check_key("key", self._key)
        return self._key

    def draws(self, number: int) -> Callable[[int], Array]:
        """The keys of a target, of the number, by the number of the layer in a stack."""
        return partial(jax.random.fold_in, jax.random.fold_in(self.key, number))

    def names(self, path: str) -> tuple[str, ...]:
        """The names that a parameter has in files and in rules, besides its path."""
        return (adapter_name(path),)

    def originals(self, original: Any) -> dict[str, tuple[Any, MatrixLayout | None]]:
        """Parameters before they were packed, with their layouts if these are not those of the targets."""
        return {path: (leaf, None) for path, leaf in leaves_by_path(original).items()}

    def put(self, leaves: Iterable[tuple[str, Any]], unpacked: Sequence[str] = ()) -> Any:
        """The model with other parameters at some paths, of which those at `unpacked` had been packed."""
        return replace_leaves(self.model, dict(leaves))


class AdaptableEquinox(AdaptableModel):
    """A module of Equinox."""

    def programs(self) -> Iterable[tuple[Any, CallArguments]]:
        """As of `AdaptableModel`."""
        if self.fun is not None:
            raise TypeError("fun is for parameters of a function; a module of Equinox has methods")
        functions = equinox_method_functions(self.model, equinox_rules(self.model), self.example_inputs).values()
        return [function.traced(plain_module(self.model), *args) for function, args in functions]

    def put(self, leaves: Iterable[tuple[str, Any]], unpacked: Sequence[str] = ()) -> Any:
        """As of `AdaptableModel`; the module is one of Equinox alone if no rule has an effect."""
        plain = replace_leaves(plain_module(self.model), dict(leaves))
        rules, params = equinox_rules(self.model), leaves_by_path(plain).values()
        if unpacked:
            rules = rules_excluding_params(rules, unpacked, plain)
            others = [name for name in ROUNDING_FIELDS if name not in ("weight", "bias")]
            rounds_more = any(getattr(rule, name) is not None for rule in rules for name in others)
            rules = rules if rounds_more or any(map(is_packed_param, params)) else ()
        if not rules and not any(isinstance(leaf, AdaptedParam) for leaf in params):
            return plain
        return module_under_rules(plain, rules, equinox_scales(self.model))


def rules_excluding_params(rules: Sequence[Rule], excluded: Sequence[str], model: Any) -> tuple[Rule, ...]:
    """Rules that leave the parameters `excluded` of a model as they are, without those that match nothing any more."""
    new_rules, paths = (*(Rule(f"/{path}/") for path in excluded), *rules), list(leaves_by_path(model))
    old_matches, new_matches = (
        {some[n] for path in paths if (n := rule_index(path, some)) is not None} for some in (rules, new_rules)
    )
    return tuple(rule for rule in new_rules if rule in new_matches or rule not in old_matches)


def adapter_name(path: str) -> str:
    """The path of the layer that a parameter is the weight of; of another one its own."""
    layer_path, _, param_name = path.rpartition("/")
    return layer_path if param_name in _WEIGHT_NAMES and layer_path else path


def program_adapter_targets(programs: Iterable[tuple[Any, CallArguments]]) -> AdapterTargets:
    """The parameters that reach products in programs, each with its call."""
    targets: AdapterTargets = {}
    for program, call in programs:
        for leaf, layout in program.adaptable.items():
            path = program.paths[leaf]
            if path in targets and targets[path].layout != layout:
                layout = "methods of the model sum over different axes of it"
            placement = program.placements.get(leaf)
            targets[path] = AdapterTarget(call.values[leaf], layout, None if placement is None else placement[0])
    return targets


def leaves_by_path(model: Any) -> dict[str, Any]:
    """The parameters of a pytree, by path."""
    call = CallArguments(model, (), {})
    return {path: call.leaves[index] for path, index in zip(call.paths, call.places, strict=False)}


def replace_leaves(model: Any, replacements: Mapping[str, Any]) -> Any:
    """A pytree with other parameters at some paths."""
    call = CallArguments(model, (), {})
    leaves = list(call.leaves)
    for path, index in zip(call.paths, call.places, strict=False):
        leaves[index] = replacements.get(path, leaves[index])
    return jax.tree.unflatten(call.tree, leaves)[0][0]


# -- what is done with them --------------------------------------------------------------------------------------------


def add_adapters(model: AdaptableModel, rules: Sequence[LoraRule], original: Any) -> Any:
    """The model with adapters beside the targets that rules match."""
    originals, targets = {} if original is None else model.originals(original), model.targets
    numbers = {
        path: next((i for i, rule in enumerate(rules) if matches_path(rule.path, path, *model.names(path))), None)
        for path in targets
    }
    check_lora_rules_match(rules, set(numbers.values()), [*targets])
    return model.put(
        (path, _adapt_param(rules[i], path, targets[path], originals.get(path), model.draws(number)))
        for number, (path, i) in enumerate(numbers.items())
        if i is not None
    )


def load_adapters(folder: str | os.PathLike[str], model: AdaptableModel) -> Any:
    """The model with the adapters of a folder."""
    layouts = {path: target.layout for path, target in model.targets.items()}
    matrices = {path: layout for path, layout in layouts.items() if isinstance(layout, MatrixLayout)}
    paths = {name: path for path in matrices for name in model.names(path)}
    adapters = {}
    for name, (a, b, rule) in read_adapters(folder, paths, lambda name: matrices[paths[name]].matrices[1:]).items():
        path = paths[name]
        (value, _, placement), layout = model.targets[path], matrices[path]
        check(value.ndim == len(layout.shape), f"{folder}: {path!r} is a stack, which a file of PEFT has not")
        adapters[path] = AdaptedParam(value, LoraAdapter(a, b, layout, rule, placement))
    return model.put(adapters.items())


def merge_adapters(model: AdaptableModel, requantize: bool) -> Any:
    """The model with its adapters added to the parameters."""
    adapted = adapted_params(model)
    unpacked = [path for path, leaf in adapted.items() if is_packed_param(leaf.base) and not requantize]
    return model.put([(path, _merge_param(path, leaf, requantize)) for path, leaf in adapted.items()], unpacked)


def split_adapters(model: AdaptableModel) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The model without its adapters, and these by the names of their layers."""
    adapters: dict[str, dict[str, Any]] = {}
    for path, leaf in adapted_params(model).items():
        name, own = model.names(path)[0], leaf.adapter
        check(name not in adapters, f"two parameters of {name!r} have adapters, which a file cannot tell apart")
        adapters[name] = {"lora_a": own.lora_a, "lora_b": own.lora_b, "rule": own.rule}
    return model.put([(path, leaf.base) for path, leaf in model.adapted.items()]), adapters


def adapted_params(model: AdaptableModel) -> dict[str, AdaptedParam]:
    """The parameters with adapters, by path.

    Raises:
        ValueError: if there is none.
    """
    adapted = model.adapted
    check(adapted, "model has no adapters; jchop.nn.add_lora makes them")
    return adapted


def adapters_mask(model: Any) -> Any:
    """A pytree like a model, True for the arrays of adapters."""

    def mask(node: Any) -> Any:
        false = jax.tree.map(lambda _: isinstance(node, LoraAdapter), node)
        if not isinstance(node, AdaptedParam):
            return false
        return replace(false, adapter=jax.tree.map(lambda _: True, node.adapter))

    return jax.tree.map(mask, model, is_leaf=lambda node: isinstance(node, LoraAdapter) or is_param_leaf(node))


# -- one parameter -----------------------------------------------------------------------------------------------------


def _check_repackable(what: str, value: Any, placement: WeightLayout | None) -> None:
    if is_packed_param(value) and (placement is None or placement.rotation is not None):
        raise ValueError(f"{what}: it is packed {'by no rule' if placement is None else 'rotated'}, so it can't change")


def param_numbers(value: Any) -> Array:
    """The numbers of a parameter, packed or not."""
    return unpack_param(value) if is_packed_param(value) else jnp.asarray(value)


def as_matrix(value: Any, layout: MatrixLayout) -> Array:
    """A parameter as a matrix (in, out), with the axes of a stack in front."""
    numbers = param_numbers(value)
    return map_over_stack(numbers.ndim - len(layout.shape), lambda one: layout.lay(one)[0], numbers)


def _adapt_param(
    rule: LoraRule, path: str, target: AdapterTarget, original: tuple[Any, MatrixLayout | None] | None,
    draw: Callable[[int], Array],
) -> AdaptedParam:  # fmt: skip
    (value, layout, placement), what = target, f"the parameter {path!r}, by {rule}"
    if isinstance(layout, str):
        raise ValueError(f"{what}: {layout}; exclude it with '!{path}'")
    if rule.init != "zeros":
        _check_repackable(what, value, placement)
    exact = None if original is None else as_matrix(original[0], original[1] or layout)
    weight, has_codes = as_matrix(value, layout), is_packed_param(value)
    a, b, base = initial_stack_adapters(rule, what, draw, weight, exact, has_codes)
    if base is not None:
        numbers = map_over_stack(base.ndim - 2, lambda one: layout.back(one[None]), base)
        value = placement.pack(numbers) if has_codes and placement is not None else numbers
    return AdaptedParam(value, LoraAdapter(a, b, layout, rule, placement))


def _merge_param(path: str, leaf: AdaptedParam, requantize: bool) -> Any:
    own, layout, base = leaf.adapter, leaf.adapter.layout, leaf.base
    _check_repackable(f"the parameter {path!r}", base, own.placement)

    def merge_layer(parts: tuple[Array, Array, Array]) -> Array:
        weight, a, b = parts
        return layout.back(merge_lora_weight(layout.lay(weight)[0], a, b, own.rule)[None])

    result = map_over_stack(own.stack, merge_layer, (param_numbers(base), own.lora_a, own.lora_b))
    return own.placement.pack(result) if requantize and is_packed_param(base) and own.placement is not None else result
