"""Adapters beside parameters of pytrees: of modules of Equinox, and of functions that `jchop.quantize_fn` runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jchop._arguments import check_key
from jchop._paths import matches_path
from jchop._products.adapters import AdaptedParam, Adapter
from jchop._products.matrices import MatrixLayout
from jchop._products.placement import Placement
from jchop._products.quantize_fn import QuantizedFunction
from jchop._products.rule import FIELDS, Rule, rule_of
from jchop._products.traced.call import Call, is_held
from jchop._products.weights import is_packed, numbers_of
from jchop.nn._lora_rule import LoraRule, check_used, first_adapters, merged_weight
from jchop.nn._nnx.classes import Inputs
from jchop.nn._trees.modules import functions_of, is_module, plain_of, rules_of, scales_of, with_class
from jchop.storage._layout import over_stack

Array = jax.Array

#: By the path of a parameter that reaches products: its value, it as a matrix or why it is none, its rounding.
Places = dict[str, tuple[Any, MatrixLayout | str, Placement | None]]

__all__ = [
    "add_to_tree", "check_tree", "left_alone", "load_to_tree", "lora_mask", "merge_tree", "places_of", "split_tree",
    "with_adapters", "with_loaded", "without",
]  # fmt: skip

#: Names of a parameter that stand for its layer in a file of PEFT.
_WEIGHTS = ("weight", "kernel")


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
    check_tree(model)

    def mask(node: Any) -> Any:
        false = jax.tree.map(lambda _: False, node)
        if not isinstance(node, AdaptedParam):
            return false
        return replace(false, adapter=jax.tree.map(lambda _: True, node.adapter))

    return jax.tree.map(mask, model, is_leaf=is_held)


def check_tree(model: Any) -> None:
    """Refuse a pytree without adapters."""
    if not any(isinstance(leaf, AdaptedParam) for leaf in jax.tree.leaves(model, is_leaf=is_held)):
        raise ValueError("model has no adapters; jchop.nn.add_lora makes them")


def add_to_tree(
    model: Any, rules: Sequence[LoraRule], key: Array | None, inputs: Inputs | None, fun: Any, original: Any
) -> Any:
    """A model with adapters beside the parameters that reach products of matrices."""
    if key is None:
        raise ValueError("key=None: the first values of adapters are random; pass a typed key, key=jax.random.key(0)")
    check_key("key", key)
    return with_adapters(model, rules, key, _places(model, inputs, fun), original)


def with_adapters(model: Any, rules: Sequence[LoraRule], key: Array, places: Places, original: Any) -> Any:
    """A pytree of parameters with adapters at places that rules match."""
    before = {} if original is None else _by_path(original)
    adapters: dict[str, AdaptedParam] = {}
    used: set[int] = set()
    for number, (path, (value, layout, placement)) in enumerate(places.items()):
        rule_index = next((i for i, rule in enumerate(rules) if matches_path(rule.path, path)), None)
        if rule_index is None:
            continue
        used.add(rule_index)
        rule, what = rules[rule_index], f"the parameter {path!r}, by {rules[rule_index]}"
        if isinstance(layout, str):
            raise ValueError(f"{what}: {layout}; exclude it with '!{path}'")
        if rule.init != "zeros":
            _check_plain(what, value, placement)
        keys = jax.random.fold_in(key, number)
        adapters[path] = _adapted(rule, what, value, layout, placement, before.get(path), keys)
    check_used(rules, used, list(places))
    return _with_leaves(model, adapters)


def load_to_tree(
    folder: str | os.PathLike[str], model: Any, inputs: Inputs | None, fun: Any, read: Callable[..., Any]
) -> Any:
    """A model with the adapters of a folder, which `read` reads."""
    return with_loaded(folder, model, _places(model, inputs, fun), read)


def with_loaded(folder: str | os.PathLike[str], model: Any, targets: Places, read: Callable[..., Any]) -> Any:
    """A pytree of parameters with the adapters of a folder."""
    place_by_name = {_name(path): (path, *place) for path, place in targets.items()}
    able: dict[str, tuple[str, Any, Any, Placement | None]] = {
        name: place for name, place in place_by_name.items() if isinstance(place[2], MatrixLayout)
    }
    adapters = {}
    for name, (a, b, rule) in read(folder, able, lambda name: able[name][2].matrices[1:]).items():
        path, value, layout, placement = able[name]
        if value.ndim != len(layout.shape):
            raise ValueError(f"{folder}: the parameter {path!r} is a stack, which a file of PEFT has not")
        adapters[path] = AdaptedParam(value, Adapter(a, b, layout, rule, placement))
    return _with_leaves(model, adapters)


def merge_tree(model: Any, requantize: bool) -> Any:
    """A model with adapters added to the parameters."""
    check_tree(model)
    adapters = {path: leaf for path, leaf in _by_path(model).items() if isinstance(leaf, AdaptedParam)}
    params = {path: _merged(path, leaf, requantize) for path, leaf in adapters.items()}
    result = _with_leaves(model, params)
    alone = left_alone(model, requantize)
    if not is_module(model):
        return result
    rules = rules_of(model)
    remaining = without(rules, alone, model)
    has_codes = any(map(is_packed, _by_path(result).values()))
    drops_rules = bool(alone) and not has_codes and not any(map(_rounds_more, remaining))
    return plain_of(result) if drops_rules or not rules else with_class(plain_of(result), remaining, scales_of(model))


def without(rules: Sequence[Rule], alone: Sequence[str], model: Any) -> tuple[Rule, ...]:
    """Rules that leave the parameters `alone` of a model as they are, without those that match nothing any more."""
    new_rules, paths = (*(Rule(f"/{path}/") for path in alone), *rules), list(_by_path(model))
    old_matches, new_matches = (
        {some[n] for path in paths if (n := rule_of(path, some)) is not None} for some in (rules, new_rules)
    )
    return tuple(rule for rule in new_rules if rule in new_matches or rule not in old_matches)


def left_alone(model: Any, requantize: bool) -> list[str]:
    """The packed parameters with adapters that a merge leaves in full precision."""
    adapters = {path: leaf for path, leaf in _by_path(model).items() if isinstance(leaf, AdaptedParam)}
    return [path for path, leaf in adapters.items() if is_packed(leaf.base) and not requantize]


def split_tree(model: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """A model without its adapters, and these by path."""
    check_tree(model)
    adapters: dict[str, dict[str, Any]] = {}
    bases = {}
    for path, leaf in _by_path(model).items():
        if not isinstance(leaf, AdaptedParam):
            continue
        if _name(path) in adapters:
            raise ValueError(f"two parameters of {_name(path)!r} have adapters, which a file cannot tell apart")
        bases[path], own = leaf.base, leaf.adapter
        adapters[_name(path)] = {"lora_a": own.lora_a, "lora_b": own.lora_b, "rule": own.rule}
    bare = _with_leaves(model, bases)
    return (plain_of(bare) if is_module(bare) and not rules_of(bare) else bare), adapters


# -- parts -------------------------------------------------------------------------------------------------------------


def _rounds_more(rule: Rule) -> bool:
    """Whether a rule rounds anything but parameters."""
    return any(getattr(rule, name) is not None for name in FIELDS if name not in ("weight", "bias"))


def _name(path: str) -> str:
    """The path of the layer that a parameter is the weight of; of another one its own."""
    front, _, last = path.rpartition("/")
    return front if last in _WEIGHTS and front else path


def _by_path(model: Any) -> dict[str, Any]:
    call = Call(model, (), {})
    return {path: call.leaves[place] for path, place in zip(call.paths, call.places, strict=False)}


def _places(model: Any, inputs: Inputs | None, fun: Any) -> Places:
    """The parameters that reach products."""
    if inputs is None:
        raise ValueError(
            "inputs=None: the program says which parameters may have adapters; pass example arguments, inputs=(x,)"
        )
    if is_module(model):
        if fun is not None:
            raise TypeError("fun is for parameters of a function; a module of Equinox has methods")
        functions = functions_of(model, rules_of(model), inputs).values()
        programs = [function.traced(plain_of(model), *args) for function, args in functions]
    else:
        if not isinstance(fun, QuantizedFunction):
            raise TypeError(f"fun={fun!r} must be a result of jchop.quantize_fn, which runs the parameters")
        if not isinstance(inputs, tuple | list | Mapping):
            raise TypeError(f"inputs={inputs!r} must be a tuple, or a dict, of arguments after the parameters")
        by_name = isinstance(inputs, Mapping)
        programs = [fun.traced(model, **inputs) if by_name else fun.traced(model, *inputs)]
    return places_of(programs)


def places_of(programs: Iterable[tuple[Any, Call]]) -> Places:
    """The parameters that reach products in programs, each with its call."""
    places: Places = {}
    for program, call in programs:
        for leaf, layout in program.adaptable.items():
            path = program.paths[leaf]
            before = places.get(path)
            if before is not None and before[1] != layout:
                layout = "methods of the model sum over different axes of it"
            placement = program.placements.get(leaf)
            places[path] = call.values[leaf], layout, None if placement is None else placement[0]
    return places


def _check_plain(what: str, value: Any, placement: Placement | None) -> None:
    if is_packed(value) and (placement is None or placement.rotation is not None):
        raise ValueError(f"{what}: it is packed {'by no rule' if placement is None else 'rotated'}, so it can't change")


def _adapted(
    rule: LoraRule,
    what: str,
    value: Any,
    layout: MatrixLayout,
    placement: Placement | None,
    original: Any,
    key: Array,
) -> AdaptedParam:
    stack = value.ndim - len(layout.shape)
    lay = lambda x: over_stack(stack, lambda one: layout.lay(one)[0], x)  # noqa: E731
    has_codes = is_packed(value)
    weight = lay(numbers_of(value) if has_codes else jnp.asarray(value))
    exact = None if original is None else lay(numbers_of(original) if is_packed(original) else jnp.asarray(original))
    a, b, rest = first_adapters(rule, what, partial(jax.random.fold_in, key), weight, exact, has_codes)
    if rest is not None:
        numbers = over_stack(stack, lambda one: layout.back(one[None]), rest)
        value = placement.pack(numbers) if has_codes and placement is not None else numbers
    return AdaptedParam(value, Adapter(a, b, layout, rule, placement))


def _merged(path: str, leaf: AdaptedParam, requantize: bool) -> Any:
    own, layout, base = leaf.adapter, leaf.adapter.layout, leaf.base
    if is_packed(base):
        _check_plain(f"the parameter {path!r}", base, own.placement)

    def one(parts: tuple[Array, Array, Array]) -> Array:
        weight, a, b = parts
        return layout.back(merged_weight(layout.lay(weight)[0], a, b, own.rule)[None])

    numbers = numbers_of(base) if is_packed(base) else jnp.asarray(base)
    result = over_stack(own.stack, one, (numbers, own.lora_a, own.lora_b))
    return own.placement.pack(result) if requantize and is_packed(base) and own.placement is not None else result


def _with_leaves(model: Any, replacements: Mapping[str, Any]) -> Any:
    """A model with other parameters at some paths; a module of Equinox runs under its rules, or under none."""
    plain = plain_of(model) if is_module(model) else model
    call = Call(plain, (), {})
    leaves = list(call.leaves)
    for path, place in zip(call.paths, call.places, strict=False):
        leaves[place] = replacements.get(path, leaves[place])
    tree = jax.tree.unflatten(call.tree, leaves)[0][0]
    return with_class(tree, rules_of(model), scales_of(model)) if is_module(model) else tree
