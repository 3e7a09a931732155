"""Modules of Equinox, whose methods run under rules as programs; Equinox is imported where there is a module of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

import jax
import numpy as np

from jchop._arguments import check_key
from jchop._products.quantize_fn import QuantizedFunction, check_fields
from jchop._products.rule import Rule
from jchop._products.scale_from import LSQ
from jchop._products.scales.sites import Scales
from jchop._products.traced.call import is_held
from jchop._products.traced.report import ProgramReport
from jchop._products.traced.resolved import check_weights
from jchop.nn._nnx.classes import Inputs, Part, body_of, methods_of, plain_class
from jchop.nn._nnx.layers import Mode, check_modes

Array = jax.Array

__all__ = [
    "arrays_of",
    "calibrate_module",
    "functions_of",
    "is_array",
    "is_module",
    "plain_of",
    "quantize_module",
    "report_module",
    "rules_of",
    "scales_of",
    "with_class",
]

#: The fields that hold the rules of a module and its kept scales; the keyword argument of its methods that has a key.
_RULES, _SCALES, _KEY = "quantization_rules", "quantization_scales", "rounding_key"


def is_module(model: Any) -> bool:
    """Whether a model is a module of Equinox."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(model, equinox.Module)


def quantize_module(model: Any, rules: Sequence[Rule], mode: Mode, inputs: Inputs | None, key: Array | None) -> Any:
    """A module of a class whose methods run under rules; its parameters are packed unless ``mode="qat"``.

    Raises:
        ValueError: as `jchop.quantize_fn`; for packing without `inputs`.
        NotImplementedError: for scales that follow the data of calls.
    """
    check_modes(rules, mode, program=True)
    check_fields(rules)
    if key is not None:
        check_key("key", key)
    for rule in rules:
        if rule.scale_from is not None and not isinstance(rule.scale_from, LSQ):
            raise NotImplementedError(
                f"{rule}: a module of Equinox does not change when it is called, so its scales cannot follow the data; "
                "jchop.quantize_fn(...).update returns them, and jchop.nn.calibrate fixes ranges"
            )
    has_codes = any(is_held(leaf) for leaf in jax.tree.leaves(model, is_leaf=is_held))
    if has_codes:
        raise ValueError("model is packed already; quantize the module that it was made from")
    before = scales_of(model) if rules_of(model) == tuple(rules) else Scales({}, {})
    if inputs is None and (mode != "qat" or any(rule.scale_from is not None for rule in rules)):
        raise ValueError(
            "inputs=None, but a program that is packed, or keeps scales, has to be traced: pass example arguments of "
            "the model's call, inputs=(x,), or of other methods, inputs={'decode': (x,)}; jax.ShapeDtypeStruct will do"
        )
    plain = plain_of(model)
    scales = Scales({}, {})
    functions = () if inputs is None else functions_of(model, rules, inputs).values()
    for function, args in functions:
        new_scales = function.start(plain, *args, from_data=False)
        scales = Scales({**new_scales.learned, **scales.learned}, {**new_scales.stats, **scales.stats})
    if functions:  # the errors of rules come here, not in the first call
        check_weights([function.resolved(plain, *args) for function, args in functions])
    scales = Scales({**scales.learned, **before.learned}, {**scales.stats, **before.stats})
    if mode != "qat":
        for function, args in functions:  # packed for the first method that rounds it
            plain = function.pack_more(plain, *args, scales=scales, key=key)
        remaining = {name: scale for name, scale in scales.learned.items() if not name.endswith("_weight_scale")}
        scales = scales._replace(learned=remaining)
    return with_class(plain, rules, scales)


def report_module(
    model: Any, rules: Sequence[Rule], inputs: Inputs | None, platform: str | None
) -> dict[str, ProgramReport]:
    """The report of each method.

    Raises:
        ValueError: without `inputs`.
    """
    if inputs is None:
        raise ValueError(
            "inputs=None, but the report of a module of Equinox is that of its program: pass example arguments of the "
            "model's call, inputs=(x,)"
        )
    plain = plain_of(model)
    return {
        name: function.report(plain, *args, platform=platform)
        for name, (function, args) in functions_of(model, rules, inputs).items()
    }


def calibrate_module(model: Any, batches: Iterable[Any], method: str, combine: str, run: Any, progress: Any) -> Any:
    """A module with fixed scales of activations, found by running it on data; as `jchop.nn.calibrate`."""
    rules = rules_of(model)
    if not rules:
        raise ValueError("model is not quantized; jchop.nn.quantize makes a module that can be calibrated")
    function = QuantizedFunction((lambda plain, batch: plain(batch)) if run is None else run, rules)
    plain, scales = plain_of(model), scales_of(model)
    calls = ((batch,) for batch in batches)
    scales = function.calibrate(plain, calls, method=method, combine=combine, scales=scales, progress=progress)
    return with_class(plain, rules, scales)


def arrays_of(model: Any) -> Any:
    """A module with None in place of all that is no array."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, model)


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a module is an array, or stands for one."""
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def functions_of(
    model: Any, rules: Sequence[Rule], inputs: Inputs
) -> dict[str, tuple[QuantizedFunction, tuple[Any, ...]]]:
    """The methods that have example arguments, as functions of a plain module, arguments and keywords, with these."""
    arguments = methods_of(inputs, type(plain_of(model)))
    return {name: (_function(name, Part(tuple(rules))), call_arguments) for name, call_arguments in arguments.items()}


# -- the class ---------------------------------------------------------------------------------------------------------


def plain_of(model: Any) -> Any:
    """A module with the classes that it and the modules in it had before it was quantized."""
    return _copied(model, None) if hasattr(type(model), _RULES) else model


def rules_of(model: Any) -> tuple[Rule, ...]:
    """The rules of a module; of a plain one, none."""
    return _part_of(model).rules if hasattr(type(model), _RULES) else ()


def scales_of(model: Any) -> Scales:
    """The kept scales of a module."""
    return getattr(model, _SCALES, None) or Scales({}, {})


def with_class(plain: Any, rules: Sequence[Rule], scales: Scales) -> Any:
    """A module whose methods, and those of the modules in it, run under rules."""
    keeps = bool(scales.learned or scales.stats)
    part = Part(tuple(rules), keeps=keeps or any(rule.scale_from is not None for rule in rules))
    module = _copied(plain, part)
    object.__setattr__(module, _SCALES, scales if keeps else None)
    return module


def _part_of(model: Any) -> Part:
    """The place of a module under rules."""
    return getattr(model, _RULES) or Part(())


def _copied(node: Any, part: Part | None, path: tuple[str, ...] = (), before: Part | None = None) -> Any:
    """A module under the rules of a part, or without rules; a module in it that has other rules stays as it is."""
    children, tree = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda n: n is not node)
    if is_held(node) or any(child is node for _, child in children) or not (children or is_module(node)):
        return node
    if (has_rules := hasattr(type(node), _RULES)) and before is not None and _part_of(node).rules != before.rules:
        return node
    before = before or (_part_of(node) if has_rules else Part(()))
    keys = [jax.tree_util.keystr(key, simple=True, separator="/") for key, _ in children]
    parts = zip(keys, children, strict=True)
    copy = jax.tree.unflatten(tree, [_copied(child, part, (*path, key), before) for key, (_, child) in parts])
    if not is_module(node):
        return copy
    own = {name: value for name, value in vars(copy).items() if name not in (_RULES, _SCALES)}
    copy = object.__new__(plain_class(type(node)) if part is None else _class_of(plain_class(type(node))))
    more = {} if part is None else {_RULES: replace(part, path=path), _SCALES: None}
    for name, value in {**own, **more}.items():
        object.__setattr__(copy, name, value)
    return copy


@lru_cache(maxsize=1024)
def _class_of(plain: Any) -> type:
    """A class like `plain` whose methods run under the rules of the module."""
    import equinox

    body = body_of(plain, equinox.Module, _interpreted, _class_of)
    body |= {_RULES: equinox.field(static=True, default=None), _SCALES: equinox.field(default=None)}
    return type(plain)(plain.__name__, (plain,), {**body, "__annotations__": {_RULES: Any, _SCALES: Any}})


def _interpreted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Any, *args: Any, rounding_key: Array | None = None, **kwargs: Any) -> Any:
        part, scales = _part_of(self), scales_of(self)
        function, params = _function(name, part), part.nest(_bare(self))
        stochastic = next((rule for rule in part.rules if rule.stochastic), None)
        without = [(stochastic is not None and rounding_key is None), bool(part.path) and part.keeps]
        if any(without) and function.resolved(params, args, kwargs).rounds:
            if not without[0]:
                part.refuse_state("kept scales")
            raise ValueError(
                f"{_KEY}=None, but {stochastic} rounds stochastically: pass a typed key for each call, "
                f"model(x, {_KEY}=jax.random.key(0))"
            )
        key = jax.random.key(0) if without[0] else rounding_key  # nothing draws from it
        scales = scales._replace(stats=jax.lax.stop_gradient(scales.stats))
        return function(params, args, kwargs, scales=scales, key=key)

    return run


def _bare(model: Any) -> Any:
    """A module under rules without kept scales."""
    copy = object.__new__(type(model))
    for name, value in {**vars(model), _SCALES: None}.items():
        object.__setattr__(copy, name, value)
    return copy


@lru_cache(maxsize=256)
def _function(name: str, part: Part) -> QuantizedFunction:
    def call(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return getattr(plain_of(part.take_out(model)), name)(*args, **kwargs)

    return QuantizedFunction(call, part.rules, whole=not part.path)
