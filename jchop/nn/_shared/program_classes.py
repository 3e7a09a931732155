"""Helpers for models of NNX and Equinox: modes, packing, and classes whose methods run under the rules of a model."""

from __future__ import annotations

import copyreg
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import CodeType
from typing import Any, Literal, NamedTuple, cast

from flax import nnx
from jax import Array

from jchop._common.checks import check, check_choice, short_repr
from jchop._quantized.products.rule import ROUNDING_FIELDS, Rule, as_rule_tuple
from jchop._quantized.program.call import map_batches
from jchop._quantized.program.quantized_program import check_weight_rules
from jchop._quantized.program.report import ProgramReport
from jchop._quantized.program.scale_slots import Scales, merge_scales, scales_after_packing
from jchop._quantized.quantize_fn import QuantizedFunction

#: Example arguments of the model's call, positional or by their names; or of several methods, by the names of these.
ExampleInputs = tuple[Any, ...] | Mapping[str, Any]

#: A function of a model and of a batch, which runs a method.
ModelCall = Callable[..., Any]

#: The advice of an error for a program that has to be traced.
INPUTS_ADVICE = (
    "inputs=None: pass inputs=(x,), example arguments of the model's call, or inputs={'decode': (x,)}, of a method"
)


class Examples(NamedTuple):
    """Arguments that a model is quantized with; the fields are arguments of `jchop.nn.quantize`."""

    inputs: ExampleInputs | None = None
    call: ModelCall | None = None
    batches: Iterable[Any] | None = None
    steps: Any = None
    donate: bool = False

    @property
    def given(self) -> bool:
        """Whether a program can be traced."""
        return self.inputs is not None or self.batches is not None

    def check(self, rules: Sequence[Rule], mode: str) -> None:
        """Refuse a mode, or rules, that need a program which cannot be traced."""
        if not self.given and (mode != "qat" or any(rule.scale_from is not None for rule in rules)):
            raise ValueError(f"{INPUTS_ADVICE}; a program that is packed, or keeps scales, has to be traced")


class MethodFunctions(NamedTuple):
    """The methods of a model under rules, as functions of its parameters.

    Args:
        params: the parameters.
        cls: the plain class of the model.
        function: the function of a method by its name, or of a function of the model.
        operands: its operands after the parameters, of arguments by position and by name.
    """

    params: Any
    cls: type
    function: Callable[[Any], QuantizedFunction]
    operands: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]

    def calls(
        self, inputs: ExampleInputs | None, call: ModelCall | None = None
    ) -> dict[Any, tuple[QuantizedFunction, tuple[Any, ...]]]:
        """The methods that have example arguments, or `call`, as functions with operands."""
        arguments = method_inputs(inputs, self.cls, call)
        return {name: (self.function(name), self.operands(*own)) for name, own in arguments.items()}

    def traced(self, inputs: ExampleInputs) -> list[tuple[Any, Any]]:
        """The programs of methods, each with its call."""
        return [function.traced(self.params, *operands) for function, operands in self.calls(inputs).values()]

    def report(self, inputs: ExampleInputs, platform: str | None) -> dict[str, ProgramReport]:
        """The report of each method."""
        calls = self.calls(inputs).items()
        return {name: function.report(self.params, *args, platform=platform) for name, (function, args) in calls}

    def round(self, mode: str, old_scales: Scales, key: Array | None, examples: Examples) -> tuple[Any, Scales, Any]:
        """The parameters, packed unless ``mode="qat"``, the scales that the rules keep, and a report.

        Args:
            mode: as of `jchop.nn.quantize`.
            old_scales: scales that are known already.
            key: for parameters that are packed with a stochastic rounding.
            examples: its batches round parameters, first.

        Raises:
            ValueError: as `jchop.quantize_fn`; so errors of rules come here, not in the first call.
        """
        (inputs, call, batches, steps, donate), params, report = examples, self.params, None
        calls = list(self.calls(inputs, call).values())
        if batches is not None and donate and calls:
            check_weight_rules([function.resolved(params, *args) for function, args in calls])
        if batches is not None:
            function = self.function("__call__" if call is None else call)
            data = map_batches(batches, lambda args: self.operands(args, {}))
            options = {"steps": steps, "key": key, "return_report": True, "donate": donate}
            params, report = function.pack(params, batches=data, **options)
        if not calls:
            return params, old_scales, report
        scales = Scales({}, {})
        for function, args in calls:
            scales = merge_scales(function.start(params, *args, from_data=False), scales)
        check_weight_rules([function.resolved(params, *args) for function, args in calls])
        scales = merge_scales(scales, old_scales)
        if mode == "qat":
            return params, scales, report
        for function, args in calls:  # packed for the first method that rounds it
            params = function.pack_more(params, *args, scales=scales, donate=donate, key=key)
        return params, scales_after_packing(scales), report


LayerMode = Literal["qat", "ptq", "weight_only", "emulate"]
#: The fields of a rule that a mode allows, and its purpose.
_MODE_FIELDS = {
    "weight_only": (("weight", "bias", "cache", "scale_from"), "rounds weights, biases and caches; use mode='ptq'"),
    "emulate": (("activation", "matmul"), "rounds every operation to activation, with the sums of matmul"),
}


def check_layer_modes(rules: Sequence[Rule], mode: str, program: bool = False) -> None:
    """Refuse a mode that is none, and fields of rules that it does not have."""
    check_choice("mode", mode, ("qat", "ptq", "weight_only", "emulate"))
    if program and mode == "emulate":
        raise ValueError("mode='emulate' is for layers of Flax: leave out inputs, or use jchop.emulate on the function")
    mode_fields, purpose = _MODE_FIELDS.get(mode, (ROUNDING_FIELDS, ""))
    for rule in rules:
        wrong = [name for name in ROUNDING_FIELDS if getattr(rule, name) is not None and name not in mode_fields]
        if wrong:
            raise ValueError(f"{rule} has {', '.join(wrong)}, and mode={mode!r} {purpose}")


def rules_of_mode(rules: Any, mode: str) -> tuple[Rule, ...]:
    """Rules as a mode has them: weights alone are multiplied as they are stored if a rule does not say otherwise."""
    return tuple(
        replace(rule, product="auto")
        if mode == "weight_only" and rule.product is None and rule.scale_from is None
        else rule
        for rule in as_rule_tuple(rules)
    )


@dataclass(frozen=True)
class ProgramPart:
    """The place of a module in a model whose program is quantized. It is hashed once, since calls of jit need it.

    Args:
        rules: of the model.
        path: of the module in the model, as keys.
        names: parameters with other paths in the model than below `path`, since other modules hold them, too. The keys
            below the module, and the keys in the model.
        keeps: whether the model keeps scales, which a part cannot reach.
    """

    rules: tuple[Rule, ...]
    path: tuple[Any, ...] = ()
    names: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...] = ()
    keeps: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.rules, self.path, self.names, self.keeps))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return ProgramPart, (self.rules, self.path, self.names, self.keeps)  # a hash holds in one process

    def params_in_model(self, params: Any) -> Any:
        """Parameters of the module, by their paths in the model."""
        other_paths = dict(self.names)
        return _rename_params(params, lambda path: other_paths.get(path, (*self.path, *path))) if self.path else params

    def params_in_part(self, params: Any) -> Any:
        """Parameters by their paths in the model, from parameters by their paths in the module."""
        other_paths, start = {full: path for path, full in self.names}, len(self.path)
        return _rename_params(params, lambda path: other_paths.get(path, path[start:])) if self.path else params

    def nest(self, module: Any) -> Any:
        """A module of a pytree at its place in the model, in dicts."""
        for key in reversed(self.path):
            module = {key: module}
        return module

    def take_out(self, model: Any) -> Any:
        """A module out of these dicts."""
        for key in self.path:
            model = model[key]
        return model

    def refuse_state(self, what: str) -> None:
        """Refuse to run the part without the state that the model alone has.

        Raises:
            ValueError: that names the part.
        """
        path = "/".join(map(str, self.path))
        raise ValueError(
            f"the part {path!r} of a quantized model is called by itself, and its rules need {what}, which the whole "
            "model has: call a method of the model that calls the part"
        )


def _rename_params(params: Any, new_path: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Any:
    return nnx.from_flat_state([(new_path(path), value) for path, value in nnx.to_flat_state(params)])


def is_method(value: Any) -> bool:
    """Whether an attribute of a class is a function, also one that `flax.nnx.jit` and the like have wrapped."""
    is_wrapper = callable(value) and hasattr(value, "__wrapped__") and not isinstance(value, type)
    return inspect.isfunction(value) or (is_wrapper and not isinstance(value, staticmethod | classmethod))


def method_of(cls: type, name: str | ModelCall) -> Callable[..., Any]:
    """A method of a class by its name; a function of the model itself.

    Raises:
        ValueError: if there is none.
    """
    if not isinstance(name, str):
        return name
    method = inspect.getattr_static(cls, name, None)
    check(is_method(method), f"inputs: {cls.__name__} has no method {name!r}")
    return method


def plain_class(cls: type) -> type:
    """The class that a class under rules was made from; another class itself."""
    return cls.__mro__[1] if "_quantized_program" in vars(cls) else cls


def class_body(
    plain: type, base: type, wrap: Callable[[str, Callable[..., Any]], Any], make: Callable[[type], type]
) -> dict[str, Any]:
    """The attributes of a class like `plain` whose methods run under rules.

    Args:
        plain: the class.
        base: the class of the library, whose own methods stay as they are.
        wrap: a method under rules, of its name and the plain one.
        make: the class under rules of a plain one, with which its instances are pickled.
    """
    plain_methods, plain_base = _compute_methods(plain, base), cast(Any, plain)
    methods_by_code = {
        code: (name, first) for name, value in plain_methods.items() for code, first in _method_code_objects(value)
    }

    def __getattribute__(self: Any, name: str) -> Any:
        frame = sys._getframe(1)
        if frame.f_code in methods_by_code and not name.startswith("__"):
            method, first = methods_by_code[frame.f_code]
            if frame.f_locals.get(first) is self:
                raise TypeError(
                    f"{plain.__name__}.{method} of the plain class, whose products are not rounded, is called with a "
                    f"quantized module: call {'the module itself' if method == '__call__' else f'module.{method}'}"
                )
        return plain_base.__getattribute__(self, name)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        constructor, *rest = plain_base.__reduce_ex__(self, protocol)
        makes_new = constructor is copyreg.__newobj__  # type: ignore[attr-defined]
        return (_new_program_instance, (make, plain), *rest[1:]) if makes_new else (constructor, *rest)

    methods = {name: wrap(name, value) for name, value in plain_methods.items()}
    special = {"__getattribute__": __getattribute__, "__reduce_ex__": __reduce_ex__, "_quantized_program": True}
    return {**methods, **special, "__doc__": plain.__doc__, "__module__": plain.__module__}


def _compute_methods(plain: type, base: type) -> dict[str, Callable[..., Any]]:
    """The methods of a class that compute, without the methods of the base of its library."""
    base_names = {*dir(base), *getattr(plain, "__dataclass_fields__", ())}
    return {
        name: value
        for name in dir(plain)
        if name == "__call__" or not (name in base_names or name.startswith("__"))
        if is_method(value := inspect.getattr_static(plain, name))
    }


def is_plain_flax_layer(layer: Any, cls: type, base: type) -> bool:
    """Whether a layer computes as its class of Flax does: no method of the class or the layer has been replaced.

    Args:
        layer: the layer.
        cls: its class of Flax.
        base: the class of modules.
    """
    methods = _compute_methods(cls, base)
    unchecked = [*methods.values()]
    while unchecked:
        method = unchecked.pop()
        if not getattr(method, "__globals__", {"__name__": "flax."})["__name__"].startswith("flax."):
            return False
        unchecked += [method.__wrapped__] if hasattr(method, "__wrapped__") else []
    return not any(callable(value) for name, value in vars(layer).items() if name in methods)


def _new_program_instance(make: Callable[[type], type], plain: type) -> Any:
    return object.__new__(make(plain))


def _method_code_objects(method: Any) -> Iterator[tuple[CodeType, str]]:
    """The code of a method and of functions in it, each with the name that the module has there."""
    while method is not None:
        code = getattr(method, "__code__", None)
        if code is not None and code.co_argcount:
            self_name, pending = code.co_varnames[0], [code]
            while pending:
                inner_code = pending.pop()
                yield inner_code, self_name
                pending += [value for value in inner_code.co_consts if isinstance(value, CodeType)]
        method = getattr(method, "__wrapped__", None)


def method_inputs(
    inputs: ExampleInputs | None, cls: type, call: ModelCall | None = None
) -> dict[str | ModelCall, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments by position and by name, by the name of the method, or by the `call` that they are for.

    Raises:
        TypeError: for arguments that are neither a tuple nor a dict.
        ValueError: for a name that is neither a method nor an argument of the call.
    """
    if inputs is None:
        return {}
    names = inputs if isinstance(inputs, Mapping) else {}
    by_method: Mapping[Any, Any] = names
    if call is not None or not any(is_method(inspect.getattr_static(cls, name, None)) for name in names):
        by_method = {"__call__" if call is None else call: inputs}
    arguments = {}
    for name, call_inputs in by_method.items():
        method = method_of(cls, name)
        if not isinstance(call_inputs, tuple | list | Mapping):
            raise TypeError(
                f"inputs: {short_repr(call_inputs)} must be a tuple of arguments of {name!r}, such as (x,), or a "
                "dict by name"
            )
        arguments[name] = ((), dict(call_inputs)) if isinstance(call_inputs, Mapping) else (tuple(call_inputs), {})
        try:
            inspect.signature(method).bind(None, *arguments[name][0], **arguments[name][1])
        except TypeError as error:
            missing_text = (
                f"{cls.__name__} has no method {next(iter(names))!r}, and " if call_inputs is names and names else ""
            )
            method_text = f"{cls.__name__}.{name}" if call is None else "call"
            raise ValueError(f"inputs: {missing_text}{method_text} takes other arguments: {error}") from None
    return arguments
