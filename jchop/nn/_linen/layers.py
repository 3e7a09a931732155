"""What a program does not show of Linen's layers: their results, their norms, and caches of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax import lax

from jchop._common.settings import split_prng_key
from jchop._quantized.products.operand_layout import check_layout_axes, norm_scale_spec, round_in_layout
from jchop._quantized.products.rule import ROUNDING_FIELDS, Location, Rule, is_stochastic, param_rule_index, rule_index
from jchop._quantized.program.weight_layout import WeightLayout, weight_layout_of
from jchop._spec.spec import Spec
from jchop.nn._shared.cache import cache_with_token, empty_packed_cache
from jchop.storage import QArray, dequantize, quantize

Array = jax.Array
LinenPath = tuple[str, ...]

#: The collection that Linen's attention keeps its keys and values in.
CACHE_COLLECTION = "cache"
_CACHE_VARIABLES = ("cached_key", "cached_value")
_NORMS = (nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm)
_ATTENTIONS = (nn.MultiHeadDotProductAttention, nn.MultiHeadAttention)
#: What layers compute with their parameters, as a rule's `operation` names it.
_OPERATIONS: Mapping[type, str] = MappingProxyType(
    {
        **dict.fromkeys((nn.Dense, nn.DenseGeneral, nn.Einsum, *_ATTENTIONS), "dot_general"),
        **dict.fromkeys((nn.Conv, nn.ConvTranspose), "conv"),
        nn.Embed: "embedding",
    }
)
_ARGUMENT_ARRAY_TYPES = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


class ModuleCall(NamedTuple):
    """A module that runs: its class, and the shapes of its own parameters by name."""

    cls: type
    shapes: Mapping[str, tuple[int, ...]]

    def rule_number(self, path: LinenPath, rules: Sequence[Rule]) -> int | None:
        """The index of the first rule that matches it."""
        return rule_index("/".join(path), rules, self.cls.__name__, _OPERATIONS.get(self.cls, ""))

    @property
    def is_layer(self) -> bool:
        """Whether a rule may round something in it that is neither a parameter nor a product."""
        return self.cls in (*_NORMS, *_ATTENTIONS)


def module_calls(
    module: nn.Module, variables: Any, args: tuple[Any, ...], rngs: Any, kwargs: Any
) -> dict[LinenPath, ModuleCall]:
    """The modules that run, by path, from a call that computes nothing.

    Args:
        module: of Linen.
        variables: unpacked.
        args: of the module; only shapes of arrays count.
        rngs: streams of keys.
        kwargs: as of Linen's `apply`.
    """
    calls: dict[LinenPath, ModuleCall] = {}
    leaves, structure = jax.tree.flatten(args)
    arrays = [leaf for leaf in leaves if isinstance(leaf, _ARGUMENT_ARRAY_TYPES)]

    def record_call(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        y = call(*args, **kwargs)
        params = nn.meta.unbox(dict(context.module.variables).get("params", {}))
        shapes = {name: value.shape for name, value in params.items() if isinstance(value, jax.Array)}
        calls[context.module.path] = ModuleCall(type(context.module), shapes)
        return y

    def run(variables: Any, rngs: Any, arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        values = [next(remaining) if isinstance(leaf, _ARGUMENT_ARRAY_TYPES) else leaf for leaf in leaves]
        return module.apply(variables, *jax.tree.unflatten(structure, values), rngs=rngs, **kwargs)

    with nn.intercept_methods(record_call):
        jax.eval_shape(run, variables, rngs, arrays)
    return calls


# -- norms -------------------------------------------------------------------------------------------------------------


class NormRounding(NamedTuple):
    """A norm whose rule decides norms alone, and so rounds what no product takes: its scale and its input.

    Args:
        number: of its rule.
        scale: how its scale is rounded; None if it is not.
    """

    number: int
    scale: WeightLayout | None


def may_round_norms(rules: Sequence[Rule], paths: Sequence[LinenPath]) -> bool:
    """Whether a rule may decide norms alone: only a call of the module shows it.

    Args:
        rules: the rules.
        paths: of all parameters.
    """
    scaled = {path[:-1] for path in paths if path[-1] == "scale"}
    decided = {param_rule_index("/".join(path), rules) for path in paths if path[:-1] not in scaled}
    return any(
        rule.layer is not None
        or rule.operation is not None
        or ((rule.weight is not None or rule.activation is not None) and number not in decided)
        for number, rule in enumerate(rules)
    )


def norm_roundings(rules: Sequence[Rule], calls: Mapping[LinenPath, ModuleCall]) -> dict[LinenPath, NormRounding]:
    """The norms that rules round, by path: rules that decide no other layer."""
    numbers = {path: call.rule_number(path, rules) for path, call in calls.items()}
    wide = {numbers[path] for path, call in calls.items() if call.shapes and call.cls not in _NORMS}
    norms = {}
    for path, number in numbers.items():
        if number is None or number in wide or calls[path].cls not in _NORMS:
            continue
        rule, shape = rules[number], calls[path].shapes.get("scale")
        spec = norm_scale_spec(rule.weight)
        if spec is not None and shape is not None:
            check_layout_axes("weight", spec, len(shape), Location(calls[path].cls.__name__, "/".join(path), rule))
        scale = None if spec is None or shape is None else weight_layout_of(shape, None, spec)
        if scale is not None or rule.activation is not None:
            norms[path] = NormRounding(number, scale)
    return norms


def rules_excluding_layers(
    rules: Sequence[Rule], layers: Sequence[str], calls: Mapping[LinenPath, ModuleCall]
) -> tuple[Rule, ...]:
    """Rules that leave some layers alone, without those that then match none, and fields that then say nothing."""
    all_rules = (Rule(" ".join(f"/{path}/" if path else "/" for path in layers)), *rules)
    norms, used = norm_roundings(rules, calls), dict[int, set[str]]()
    for path, call in calls.items():
        numbers = {call.rule_number(path, all_rules)}
        for name in call.shapes:
            operation = _OPERATIONS.get(call.cls, "")
            numbers.add(param_rule_index("/".join((*path, name)), all_rules, call.cls.__name__, operation))
        fields: Iterable[str] = ROUNDING_FIELDS if call.shapes else ()
        if call.cls in _NORMS:
            fields = ("bias", "output", *(("weight", "activation") if path in norms else ()))
        elif call.cls in _ATTENTIONS:
            fields = [name for name in ROUNDING_FIELDS if name not in ("weight", "bias", "output", "scale_from")]
        for number in numbers if fields else ():
            if number is not None:
                used.setdefault(number, set()).update(fields)
    idle = {number: dict.fromkeys(name for name in ROUNDING_FIELDS if name not in used[number]) for number in used}
    return tuple(replace(rule, **idle[number]) for number, rule in enumerate(all_rules) if number in used)


# -- the interceptor ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerRoundings:
    """An interceptor for `flax.linen.intercept_methods` that rounds inputs of norms, and results, and packs caches.

    Args:
        rules: the rules.
        norms: the norms whose input is rounded.
        used: filled with the rules, by number, and their fields that had an effect.
        results: whether results and inputs are rounded, or caches packed alone.
    """

    rules: Sequence[Rule]
    norms: Mapping[LinenPath, NormRounding] = field(default_factory=dict)
    used: set[tuple[int, str]] = field(default_factory=set)
    results: bool = True

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        owner = ModuleCall(type(layer), {})
        number = owner.rule_number(layer.path, self.rules)
        if number is None or context.method_name not in ("__call__", "attend"):
            return call(*args, **kwargs)
        rule = self.rules[number]
        round_array = partial(self._round, layer, number)
        if self.results and rule.activation is not None and layer.path in self.norms:
            args = (round_array("activation", rule.activation, args[0]), *args[1:])
        if owner.cls in _ATTENTIONS and rule.cache is not None:
            self.used.add((number, "cache"))
            call = partial(_call_with_packed_cache, call, layer, rule.cache) if layer.decode else call
        y = call(*args, **kwargs)
        if not self.results or rule.output is None or not _has_params(layer):
            return y
        return jax.tree.map(partial(round_array, "output", rule.output), y)

    def _round(self, layer: nn.Module, number: int, name: str, spec: Spec, x: Array) -> Array:
        rule = self.rules[number]
        self.used.add((number, name))
        check_layout_axes(name, spec, x.ndim, Location(type(layer).__name__, "/".join(layer.path), rule))
        keys = split_prng_key(layer.make_rng(rule.stochastic_stream)) if is_stochastic(spec) else (None, None)
        return round_in_layout(None, x, spec, *keys)

    def check_fields(self) -> None:
        """Refuse a rule with an `output` or a `cache` that no layer of the call has had.

        Raises:
            ValueError: that names the field.
        """
        for number, rule in enumerate(self.rules):
            idle = [name for name in ("output", "cache") if getattr(rule, name) is not None]
            if idle := [name for name in idle if (number, name) not in self.used]:
                raise ValueError(
                    f"{rule}: {', '.join(idle)} has no effect on any layer that runs. It is of "
                    f"{'attention' if 'cache' in idle else 'modules with parameters of their own'}"
                )


def _has_params(layer: nn.Module) -> bool:
    """Whether a module has parameters of its own, apart from those of modules in it."""
    params = nn.meta.unbox(dict(layer.variables).get("params", {}))
    return any(isinstance(value, jax.Array) for value in params.values())


def _call_with_packed_cache(call: Callable[..., Any], layer: Any, spec: Spec, *args: Any, **kwargs: Any) -> Any:
    """A call of attention that decodes: it packs the token into its cache, or begins one.

    Linen's own code puts the new token into arrays in full precision, so it is shown those; the function of attention
    takes the token out of them again, and into the packed ones.
    """
    if not layer.has_variable(CACHE_COLLECTION, _CACHE_VARIABLES[0]):
        y = call(*args, **kwargs)
        for name in _CACHE_VARIABLES:
            value = layer.get_variable(CACHE_COLLECTION, name)
            layer.put_variable(CACHE_COLLECTION, name, empty_packed_cache(value.shape, value.dtype, spec))
        return y
    caches = [layer.get_variable(CACHE_COLLECTION, name) for name in _CACHE_VARIABLES]
    if not all(isinstance(q, QArray) for q in caches):
        raise ValueError(
            f"the cache of {type(layer).__name__} at {'/'.join(layer.path)!r} is not packed: take the one that "
            "`init` of the quantized module returns"
        )
    for name, q in zip(_CACHE_VARIABLES, caches, strict=True):
        layer.put_variable(CACHE_COLLECTION, name, dequantize(q))
    index, attention_fn = layer.get_variable(CACHE_COLLECTION, "cache_index"), layer.attention_fn

    @wraps(attention_fn)  # Linen passes only the arguments of its signature
    def attend(query: Array, *full: Array, **options: Any) -> Array:
        numbers = []
        for name, cache, array in zip(_CACHE_VARIABLES, caches, full, strict=True):
            token = lax.dynamic_slice_in_dim(array, index, 1, array.ndim - 3)
            cache = cache_with_token(cache, quantize(token.astype(cache.dtype), spec), index)
            layer.put_variable(CACHE_COLLECTION, name, cache)
            numbers.append(dequantize(cache, array.dtype))
        return attention_fn(query, *numbers, **options)

    object.__setattr__(layer, "attention_fn", attend)  # a layer of Linen is made anew for each call
    return call(*args, **kwargs)
