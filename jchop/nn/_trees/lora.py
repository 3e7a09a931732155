"""Adapters beside parameters of pytrees: of modules of Equinox, and of functions that `jchop.quantize_fn` runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

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

#: By the path of a parameter that reaches products: its value, it as a matrix or why it is none, its rounding.
AdapterTarget = tuple[Any, MatrixLayout | str, WeightLayout | None]
AdapterTargets = dict[str, AdapterTarget]

#: Names of a parameter that stand for its layer in a file of PEFT.
_WEIGHT_NAMES = ("weight", "kernel")


def lora_mask(model: Any) -> Any:
    """A pytree like a model, True for the arrays of adapters and False for all others.

    With it adapters alone are differentiated and optimized: ``equinox.partition(model, jc.nn.lora_mask(model))`` gives
    them and the rest, and `optax.masked` takes it.

    Args:
        model: a module of Equinox, or a pytree of parameters, as from `add_lora`. (Modules of NNX have
            `flax.nnx.LoRAParam`, a filter, instead.)

    Raises:
        ValueError: for a model without adapters.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> low, x = jc.quantize_fn(lambda p, x: x @ p["w"], jc.Rule(weight="nf4")), jnp.ones((2, 64))
        >>> rule, packed = jc.nn.LoraRule("w", rank=4), low.pack({"w": jnp.ones((64, 8))}, x)
        >>> adapted = jc.nn.add_lora(packed, rule, fun=low, inputs=(x,), key=jax.random.key(0))
        >>> [leaf.shape for leaf, own in zip(*map(jax.tree.leaves, (adapted, jc.nn.lora_mask(adapted)))) if own]
        [(64, 4), (4, 8)]
    """
    adapted_params(model)

    def mask(node: Any) -> Any:
        false = jax.tree.map(lambda _: False, node)
        if not isinstance(node, AdaptedParam):
            return false
        return replace(false, adapter=jax.tree.map(lambda _: True, node.adapter))

    return jax.tree.map(mask, model, is_leaf=is_param_leaf)


def adapted_params(model: Any) -> dict[str, AdaptedParam]:
    """The parameters of a pytree with adapters, by path.

    Raises:
        ValueError: if there is none.
    """
    adapted = {path: leaf for path, leaf in _leaves_by_path(model).items() if isinstance(leaf, AdaptedParam)}
    check(adapted, "model has no adapters; jchop.nn.add_lora makes them")
    return adapted


def add_lora_to_tree(
    model: Any, rules: Sequence[LoraRule], key: Array | None, inputs: ExampleInputs | None, fun: Any, original: Any
) -> Any:
    """A model with adapters beside the parameters that reach products of matrices."""
    if key is None:
        raise ValueError("key=None: the first values of adapters are random; pass a typed key, key=jax.random.key(0)")
    check_key("key", key)
    return tree_with_adapters(model, rules, key, tree_adapter_targets(model, inputs, fun), original)


def tree_with_adapters(model: Any, rules: Sequence[LoraRule], key: Array, places: AdapterTargets, original: Any) -> Any:
    """A pytree of parameters with adapters at places that rules match."""
    original_leaves = {} if original is None else _leaves_by_path(original)
    adapters: dict[str, AdaptedParam] = {}
    used: set[int] = set()
    for target_index, (path, target) in enumerate(places.items()):
        names = path, adapter_name(path)
        number = next((i for i, rule in enumerate(rules) if matches_path(rule.path, *names)), None)
        if number is None:
            continue
        used.add(number)
        keys = jax.random.fold_in(key, target_index)
        adapters[path] = _adapt_param(rules[number], path, target, original_leaves.get(path), keys)
    check_lora_rules_match(rules, used, list(places))
    return _replace_leaves(model, adapters)


def tree_with_file_adapters(folder: str | os.PathLike[str], model: Any, targets: AdapterTargets) -> Any:
    """A pytree of parameters with the adapters of a folder."""
    target_by_name = {adapter_name(path): (path, *target) for path, target in targets.items()}
    adaptable: dict[str, tuple[str, Any, Any, WeightLayout | None]] = {
        name: target for name, target in target_by_name.items() if isinstance(target[2], MatrixLayout)
    }
    adapters = {}
    for name, (a, b, rule) in read_adapters(folder, adaptable, lambda name: adaptable[name][2].matrices[1:]).items():
        path, value, layout, placement = adaptable[name]
        if value.ndim != len(layout.shape):
            raise ValueError(f"{folder}: the parameter {path!r} is a stack, which a file of PEFT has not")
        adapters[path] = AdaptedParam(value, LoraAdapter(a, b, layout, rule, placement))
    return _replace_leaves(model, adapters)


def merge_lora_tree(model: Any, requantize: bool) -> Any:
    """A model with adapters added to the parameters."""
    params = {path: _merge_param(path, leaf, requantize) for path, leaf in adapted_params(model).items()}
    result = _replace_leaves(model, params)
    unpacked_paths = params_unpacked_by_merge(model, requantize)
    if not is_equinox_module(model):
        return result
    rules = equinox_rules(model)
    remaining = rules_excluding_params(rules, unpacked_paths, model)
    has_codes = any(map(is_packed_param, _leaves_by_path(result).values()))
    others = [name for name in ROUNDING_FIELDS if name not in ("weight", "bias")]
    rounds_more = any(getattr(rule, name) is not None for rule in remaining for name in others)
    plain = plain_module(result)
    if not rules or (unpacked_paths and not has_codes and not rounds_more):
        return plain
    return module_under_rules(plain, remaining, equinox_scales(model))


def rules_excluding_params(rules: Sequence[Rule], excluded: Sequence[str], model: Any) -> tuple[Rule, ...]:
    """Rules that leave the parameters `excluded` of a model as they are, without those that match nothing any more."""
    new_rules, paths = (*(Rule(f"/{path}/") for path in excluded), *rules), list(_leaves_by_path(model))
    old_matches, new_matches = (
        {some[n] for path in paths if (n := rule_index(path, some)) is not None} for some in (rules, new_rules)
    )
    return tuple(rule for rule in new_rules if rule in new_matches or rule not in old_matches)


def params_unpacked_by_merge(model: Any, requantize: bool) -> list[str]:
    """The packed parameters with adapters that a merge leaves in full precision."""
    adapted = adapted_params(model)
    return [path for path, leaf in adapted.items() if is_packed_param(leaf.base) and not requantize]


def split_lora_tree(model: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """A model without its adapters, and these by path."""
    adapters: dict[str, dict[str, Any]] = {}
    bases = {}
    for path, leaf in adapted_params(model).items():
        if adapter_name(path) in adapters:
            raise ValueError(f"two parameters of {adapter_name(path)!r} have adapters, which a file cannot tell apart")
        bases[path], adapter = leaf.base, leaf.adapter
        adapters[adapter_name(path)] = {"lora_a": adapter.lora_a, "lora_b": adapter.lora_b, "rule": adapter.rule}
    bare = _replace_leaves(model, bases)
    return (plain_module(bare) if is_equinox_module(bare) and not equinox_rules(bare) else bare), adapters


# -- parts -------------------------------------------------------------------------------------------------------------


def adapter_name(path: str) -> str:
    """The path of the layer that a parameter is the weight of; of another one its own."""
    layer_path, _, param_name = path.rpartition("/")
    return layer_path if param_name in _WEIGHT_NAMES and layer_path else path


def _leaves_by_path(model: Any) -> dict[str, Any]:
    call = CallArguments(model, (), {})
    return {path: call.leaves[index] for path, index in zip(call.paths, call.places, strict=False)}


def tree_adapter_targets(model: Any, inputs: ExampleInputs | None, fun: Any) -> AdapterTargets:
    """The parameters that reach products."""
    if inputs is None:
        raise ValueError(
            "inputs=None: the program says which parameters may have adapters; pass example arguments, inputs=(x,)"
        )
    if is_equinox_module(model):
        if fun is not None:
            raise TypeError("fun is for parameters of a function; a module of Equinox has methods")
        functions = equinox_method_functions(model, equinox_rules(model), inputs).values()
        programs = [function.traced(plain_module(model), *args) for function, args in functions]
    else:
        check_instance("fun", fun, QuantizedFunction, "a result of jchop.quantize_fn, which runs the parameters")
        check_instance("inputs", inputs, tuple | list | Mapping, "a tuple or a dict of arguments after the parameters")
        by_name = isinstance(inputs, Mapping)
        programs = [fun.traced(model, **inputs) if by_name else fun.traced(model, *inputs)]
    return program_adapter_targets(programs)


def program_adapter_targets(programs: Iterable[tuple[Any, CallArguments]]) -> AdapterTargets:
    """The parameters that reach products in programs, each with its call."""
    targets: AdapterTargets = {}
    for program, call in programs:
        for leaf, layout in program.adaptable.items():
            path = program.paths[leaf]
            earlier = targets.get(path)
            if earlier is not None and earlier[1] != layout:
                layout = "methods of the model sum over different axes of it"
            placement = program.placements.get(leaf)
            targets[path] = call.values[leaf], layout, None if placement is None else placement[0]
    return targets


def _check_repackable(what: str, value: Any, placement: WeightLayout | None) -> None:
    if is_packed_param(value) and (placement is None or placement.rotation is not None):
        raise ValueError(f"{what}: it is packed {'by no rule' if placement is None else 'rotated'}, so it can't change")


def _param_numbers(value: Any) -> Array:
    return unpack_param(value) if is_packed_param(value) else jnp.asarray(value)


def _adapt_param(rule: LoraRule, path: str, target: AdapterTarget, original: Any, key: Array) -> AdaptedParam:
    (value, layout, placement), what = target, f"the parameter {path!r}, by {rule}"
    if isinstance(layout, str):
        raise ValueError(f"{what}: {layout}; exclude it with '!{path}'")
    if rule.init != "zeros":
        _check_repackable(what, value, placement)
    stack = value.ndim - len(layout.shape)
    lay = lambda x: map_over_stack(stack, lambda one: layout.lay(one)[0], x)  # noqa: E731
    has_codes = is_packed_param(value)
    exact = None if original is None else lay(_param_numbers(original))
    weight = lay(_param_numbers(value))
    a, b, base = initial_stack_adapters(rule, what, partial(jax.random.fold_in, key), weight, exact, has_codes)
    if base is not None:
        numbers = map_over_stack(stack, lambda one: layout.back(one[None]), base)
        value = placement.pack(numbers) if has_codes and placement is not None else numbers
    return AdaptedParam(value, LoraAdapter(a, b, layout, rule, placement))


def _merge_param(path: str, leaf: AdaptedParam, requantize: bool) -> Any:
    own, layout, base = leaf.adapter, leaf.adapter.layout, leaf.base
    if is_packed_param(base):
        _check_repackable(f"the parameter {path!r}", base, own.placement)

    def merge_layer(parts: tuple[Array, Array, Array]) -> Array:
        weight, a, b = parts
        return layout.back(merge_lora_weight(layout.lay(weight)[0], a, b, own.rule)[None])

    result = map_over_stack(own.stack, merge_layer, (_param_numbers(base), own.lora_a, own.lora_b))
    return own.placement.pack(result) if requantize and is_packed_param(base) and own.placement is not None else result


def _replace_leaves(model: Any, replacements: Mapping[str, Any]) -> Any:
    """A model with other parameters at some paths; a module of Equinox runs under its rules, or under none."""
    plain = plain_module(model) if is_equinox_module(model) else model
    call = CallArguments(plain, (), {})
    leaves = list(call.leaves)
    for path, index in zip(call.paths, call.places, strict=False):
        leaves[index] = replacements.get(path, leaves[index])
    tree = jax.tree.unflatten(call.tree, leaves)[0][0]
    return module_under_rules(tree, equinox_rules(model), equinox_scales(model)) if is_equinox_module(model) else tree
