"""Adapters beside parameters: of pytrees, and of all models with parameters in pytrees (`AdaptableModel`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jchop._common.checks import check_instance
from jchop._quantized.products.rule import ROUNDING_FIELDS, Rule, rule_index
from jchop._quantized.program.adapters import AdaptedParam
from jchop._quantized.program.call import CallArguments, is_packed_param, unpack_param
from jchop._quantized.program.provenance import MatrixLayout
from jchop._quantized.program.weight_layout import WeightLayout
from jchop._quantized.quantize_fn import QuantizedFunction
from jchop._storage._axis_groupings import map_over_stack
from jchop.nn._shared.program_classes import ExampleInputs
from jchop.nn._trees.equinox_modules import (
    equinox_methods,
    equinox_rules,
    equinox_scales,
    module_under_rules,
    plain_module,
)

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


@dataclass
class AdaptableModel:
    """A pytree of parameters of a function, some with adapters; other models are subclasses.

    Args:
        model: it.
        inputs: example arguments.
        fun: the function of the parameters.
        rngs: NNX: the streams of keys.
        key: for the first values of A.
    """

    model: Any
    inputs: ExampleInputs | None = None
    fun: Any = None
    rngs: Any = None
    key: Any = None

    @property
    def adapted(self) -> dict[str, AdaptedParam]:
        """The parameters with adapters, by path."""
        return {path: leaf for path, leaf in leaves_by_path(self.model).items() if isinstance(leaf, AdaptedParam)}

    @cached_property
    def targets(self) -> AdapterTargets:
        """The parameters that may have adapters, by path.

        Raises:
            ValueError: without example arguments.
        """
        if self.inputs is None:
            raise ValueError(
                "inputs=None: the program says which parameters may have adapters; pass example arguments, inputs=(x,)"
            )
        return program_adapter_targets(self.programs(self.inputs))

    def programs(self, inputs: ExampleInputs) -> Iterable[tuple[Any, CallArguments]]:
        """The programs of the model, each with its call."""
        check_instance("fun", self.fun, QuantizedFunction, "a result of jchop.quantize_fn, which runs the parameters")
        check_instance("inputs", inputs, tuple | list | Mapping, "a tuple or a dict of arguments after the parameters")
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
        return [self.fun.traced(self.model, *args, **kwargs)]

    def draws(self, number: int) -> Callable[[int], Array]:
        """The keys of a target, of the number, by the number of the layer in a stack."""
        return partial(jax.random.fold_in, jax.random.fold_in(self.key, number))

    def names(self, path: str) -> tuple[str, ...]:
        """The names that a parameter has in files and in rules, besides its path."""
        return (adapter_name(path),)

    def originals(self, original: Any) -> dict[str, tuple[Any, Any]]:
        """Parameters before they were packed, with their layouts if these differ from the layouts of the targets."""
        return {path: (leaf, None) for path, leaf in leaves_by_path(original).items()}

    def put(self, leaves: Iterable[tuple[str, Any]], unpacked: Sequence[str] = ()) -> Any:
        """The model with other parameters at some paths; the parameters at `unpacked` had been packed."""
        return replace_leaves(self.model, dict(leaves))


class AdaptableEquinox(AdaptableModel):
    """A module of Equinox."""

    def programs(self, inputs: ExampleInputs) -> Iterable[tuple[Any, CallArguments]]:
        """The program of each method that has example inputs, with its call."""
        return equinox_methods(self.model, equinox_rules(self.model)).traced(inputs)

    def put(self, leaves: Iterable[tuple[str, Any]], unpacked: Sequence[str] = ()) -> Any:
        """The module with other parameters at some paths; one of Equinox alone if no rule has an effect."""
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
    """Rules that leave the parameters `excluded` of a model as they are, without rules that match nothing any more."""
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
            rounded = program.rounded_params.get(leaf)
            targets[path] = AdapterTarget(call.values[leaf], layout, None if rounded is None else rounded.layout)
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


def param_numbers(value: Any) -> Array:
    """The numbers of a parameter, packed or not."""
    return unpack_param(value) if is_packed_param(value) else jnp.asarray(value)


def as_matrix(value: Any, layout: MatrixLayout) -> Array:
    """A parameter as a matrix (in, out), with the axes of a stack in front."""
    numbers = param_numbers(value)
    return map_over_stack(numbers.ndim - len(layout.shape), lambda one: layout.lay(one)[0], numbers)
