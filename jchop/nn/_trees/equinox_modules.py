"""Modules of Equinox, whose methods run under rules as programs; Equinox is imported where there is a module of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

import jax
from flax import nnx
from jax import Array

from jchop._common.checks import check, check_instance
from jchop._common.on_demand import is_module_of
from jchop._quantized.products.rule import Rule
from jchop._quantized.products.scale_from import LSQ
from jchop._quantized.program.call import is_param_leaf
from jchop._quantized.program.scale_slots import Scales
from jchop._quantized.quantize_fn import QuantizedFunction, check_rule_fields
from jchop._round.arguments import check_key
from jchop.nn._shared.program_classes import (
    Examples,
    LayerMode,
    MethodFunctions,
    ModelCall,
    ProgramPart,
    check_layer_modes,
    class_body,
    plain_class,
)

#: The fields that hold the rules of a module and its kept scales; the keyword argument of its methods that has a key.
_RULES_FIELD, _SCALES_FIELD, _KEY_ARGUMENT = "quantization_rules", "quantization_scales", "rounding_key"


def is_equinox_module(model: Any) -> bool:
    """Whether a model is a module of Equinox."""
    return is_module_of("equinox", model)


def check_flax_or_equinox(name: str, model: Any, more: str = "") -> None:
    """Refuse an object that is no module of NNX or Equinox; `more` follows in the error."""
    if not is_equinox_module(model):
        check_instance(name, model, nnx.Module, f"a module of Flax NNX or Equinox{more}")


def quantize_equinox_module(
    model: Any, rules: Sequence[Rule], mode: LayerMode, key: Array | None, examples: Examples
) -> tuple[Any, Any]:
    """A module of a class whose methods run under rules, and the report of rounding with batches, or None.

    Its parameters are packed unless ``mode="qat"``.

    Raises:
        ValueError: as `jchop.quantize_fn`; for packing without examples.
        NotImplementedError: for scales that follow the data of calls.
    """
    check_layer_modes(rules, mode, program=True)
    check_rule_fields(rules)
    if key is not None:
        check_key("key", key)
    for rule in rules:
        if rule.scale_from is not None and not isinstance(rule.scale_from, LSQ):
            raise NotImplementedError(
                f"{rule}: a module of Equinox does not change when it is called, so its scales cannot follow the data; "
                "jchop.quantize_fn(...).update returns them, and jchop.nn.calibrate fixes ranges"
            )
    has_codes = any(is_param_leaf(leaf) for leaf in jax.tree.leaves(model, is_leaf=is_param_leaf))
    check(not has_codes, "model is packed already; quantize the module that it was made from")
    scales = equinox_scales(model) if equinox_rules(model) == tuple(rules) else Scales({}, {})
    examples.check(rules, mode)
    plain, report = plain_module(model), None
    if examples.given:
        plain, scales, report = equinox_methods(model, rules).round(mode, scales, key, examples)
    return module_under_rules(plain, rules, scales), report


def calibrate_equinox_module(
    model: Any, batches: Iterable[Any], method: str, combine: str, call: Any, progress: Any
) -> Any:
    """A module with fixed scales of activations, found by running it on data; as `jchop.nn.calibrate`."""
    rules = equinox_rules(model)
    check(rules, "model is not quantized; jchop.nn.quantize makes a module that can be calibrated")
    function = QuantizedFunction((lambda plain, *args: plain(*args)) if call is None else call, rules)
    plain, scales = plain_module(model), equinox_scales(model)
    scales = function.calibrate(plain, batches, method=method, combine=combine, scales=scales, progress=progress)
    return module_under_rules(plain, rules, scales)


def equinox_methods(model: Any, rules: Sequence[Rule]) -> MethodFunctions:
    """The methods of a module under rules, as functions of a plain module, arguments and keywords."""
    plain, part = plain_module(model), ProgramPart(tuple(rules))
    function = lambda name: _equinox_method_function(name, part)  # noqa: E731
    return MethodFunctions(plain, type(plain), function, lambda args, kwargs: (args, kwargs))


# -- the class ---------------------------------------------------------------------------------------------------------


def plain_module(model: Any) -> Any:
    """A module with the classes that it and the modules in it had before it was quantized."""
    return _rebuild_module(model, None) if hasattr(type(model), _RULES_FIELD) else model


def equinox_rules(model: Any) -> tuple[Rule, ...]:
    """The rules of a module; of a plain one, none."""
    return _equinox_program_part(model).rules if hasattr(type(model), _RULES_FIELD) else ()


def equinox_scales(model: Any) -> Scales:
    """The kept scales of a module."""
    return getattr(model, _SCALES_FIELD, None) or Scales({}, {})


def module_under_rules(plain: Any, rules: Sequence[Rule], scales: Scales) -> Any:
    """A module whose methods, and the methods of the modules in it, run under rules."""
    keeps = bool(scales.learned or scales.stats)
    part = ProgramPart(tuple(rules), keeps=keeps or any(rule.scale_from is not None for rule in rules))
    module = _rebuild_module(plain, part)
    object.__setattr__(module, _SCALES_FIELD, scales if keeps else None)
    return module


def _equinox_program_part(model: Any) -> ProgramPart:
    """The place of a module under rules."""
    return getattr(model, _RULES_FIELD) or ProgramPart(())


def _rebuild_module(
    node: Any, part: ProgramPart | None, path: tuple[str, ...] = (), old_part: ProgramPart | None = None
) -> Any:
    """A module under the rules of a part, or without rules; a module in it that has other rules stays as it is."""
    children, tree = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda n: n is not node)
    if is_param_leaf(node) or any(child is node for _, child in children) or not (children or is_equinox_module(node)):
        return node
    own_part = _equinox_program_part(node) if hasattr(type(node), _RULES_FIELD) else None
    if own_part is not None and old_part is not None and own_part.rules != old_part.rules:
        return node
    old_part = old_part or own_part or ProgramPart(())
    keys = [jax.tree_util.keystr(key, simple=True, separator="/") for key, _ in children]
    items = zip(keys, children, strict=True)
    copy = jax.tree.unflatten(tree, [_rebuild_module(child, part, (*path, key), old_part) for key, (_, child) in items])
    if not is_equinox_module(node):
        return copy
    fields = {name: value for name, value in vars(copy).items() if name not in (_RULES_FIELD, _SCALES_FIELD)}
    copy = object.__new__(plain_class(type(node)) if part is None else _equinox_program_class(plain_class(type(node))))
    rule_fields = {} if part is None else {_RULES_FIELD: replace(part, path=path), _SCALES_FIELD: None}
    for name, value in {**fields, **rule_fields}.items():
        object.__setattr__(copy, name, value)
    return copy


@lru_cache(maxsize=1024)
def _equinox_program_class(plain: Any) -> type:
    """A class like `plain` whose methods run under the rules of the module."""
    import equinox

    body = class_body(plain, equinox.Module, _equinox_method_under_rules, _equinox_program_class)
    body |= {_RULES_FIELD: equinox.field(static=True, default=None), _SCALES_FIELD: equinox.field(default=None)}
    return type(plain)(plain.__name__, (plain,), {**body, "__annotations__": {_RULES_FIELD: Any, _SCALES_FIELD: Any}})


def _equinox_method_under_rules(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Any, *args: Any, rounding_key: Array | None = None, **kwargs: Any) -> Any:
        part, scales = _equinox_program_part(self), equinox_scales(self)
        function, params = _equinox_method_function(name, part), part.nest(_without_scales(self))
        stochastic = next((rule for rule in part.rules if rule.stochastic), None)
        without = [(stochastic is not None and rounding_key is None), bool(part.path) and part.keeps]
        if any(without) and function.resolved(params, args, kwargs).rounds:
            if not without[0]:
                part.refuse_state("kept scales")
            raise ValueError(
                f"{_KEY_ARGUMENT}=None, but {stochastic} rounds stochastically: pass a typed key for each call, "
                f"model(x, {_KEY_ARGUMENT}=jax.random.key(0))"
            )
        key = jax.random.key(0) if without[0] else rounding_key  # nothing draws from it
        scales = scales._replace(stats=jax.lax.stop_gradient(scales.stats))
        return function(params, args, kwargs, scales=scales, key=key)

    return run


def _without_scales(model: Any) -> Any:
    """A module under rules without kept scales."""
    copy = object.__new__(type(model))
    for name, value in {**vars(model), _SCALES_FIELD: None}.items():
        object.__setattr__(copy, name, value)
    return copy


@lru_cache(maxsize=256)
def _equinox_method_function(name: str | ModelCall, part: ProgramPart) -> QuantizedFunction:
    """A method, by its name, or a function of the module, as a function of the module, arguments and keywords."""

    def run(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        plain = plain_module(part.take_out(model))
        return getattr(plain, name)(*args, **kwargs) if isinstance(name, str) else name(plain, *args, **kwargs)

    return QuantizedFunction(run, part.rules, whole=not part.path)
