"""Which layers a module of Linen has, and which rule each has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np
from flax import linen as nn
from flax.core import Scope
from flax.core.tracers import current_trace
from flax.traverse_util import flatten_dict

from jchop._common.paths import nearest_paths_hint
from jchop._quantized.products.operand_layout import OperandLayout, check_layout_axes
from jchop._quantized.products.rule import (
    ROUNDING_FIELDS,
    Location,
    Rule,
    exclusion_advice,
    refuse_code_products,
    refuse_forward_rotation,
    rule_index,
)
from jchop._quantized.products.scale_from import LSQ
from jchop._spec.spec import Spec
from jchop.nn._linen.layer_kinds import LINEN_KINDS, LinenKind, learned_scale_name
from jchop.nn._nnx.attach import pack_param
from jchop.nn._nnx.layer_kinds import PRODUCT_RULE_FIELDS, rules_for_norms
from jchop.nn._shared.program_classes import is_plain_flax_layer
from jchop.storage import QArray

LinenPath = tuple[str, ...]

__all__ = [
    "LayerMatch",
    "LinenLayerRule",
    "LinenPath",
    "ModuleCalls",
    "linen_layer_rules",
    "linen_params",
    "linen_rule_index",
    "match_linen_layers",
    "module_calls",
]  # fmt: skip

#: The modules that ran, by path, each with the shapes of its parameters by name.
ModuleCalls = Mapping[LinenPath, tuple[nn.Module, Mapping[str, tuple[int, ...]]]]

#: The fields of attention with products of its own.
_ATTENTION_EINSUM_FIELDS = ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")
#: The modules of Flax that change the parameters of a layer.
_KERNEL_WRAPPERS = (nn.SpectralNorm, nn.WeightNorm)
_ARGUMENT_ARRAY_TYPES = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class LayerMatch:
    """A layer that a rule matches.

    Args:
        layer: the layer; None if a module has parameters but did not run.
        rule: what its rule rounds in it.
        shapes: of its parameters in its call, by name.
        kernel_change: what changes its kernel before its call; empty if nothing is known to.
    """

    layer: Any
    rule: Rule
    shapes: Mapping[str, tuple[int, ...]]
    kernel_change: str = ""

    @property
    def kind(self) -> LinenKind:
        """Its row of `LINEN_KINDS`."""
        return LINEN_KINDS[type(self.layer)]

    def layout(self, name: str) -> OperandLayout | None:
        """The axes of a parameter as the product has them; None: its last axis alone is summed over."""
        is_weight = self.kind.parameters[name] == "weight"
        return self.kind.layout(self.layer, len(self.shapes[name])) if self.kind.layout and is_weight else None

    @property
    def place(self) -> Location:
        """Its location, for errors."""
        return Location(type(self.layer).__name__, "/".join(self.layer.path), self.rule)

    def spec(self, name: str) -> Spec | None:
        """The spec of its rule for a parameter."""
        return self.kind.spec(self.rule, name)

    def check_axes(self) -> None:
        """Refuse formats of parameters that name axes which those have not."""
        for name, role in self.kind.parameters.items():
            if name in self.shapes:
                layout = self.layout(name)
                check_layout_axes(role, self.spec(name), layout.ndim if layout else len(self.shapes[name]), self.place)

    def pack_param(self, name: str, value: Any, key: Any = None, scale: Any = None) -> tuple[QArray, OperandLayout]:
        """A parameter as its rule packs it, and the layout it has then."""
        spec = self.spec(name)
        assert spec is not None
        ndim = len(self.shapes[name])
        last_axis = OperandLayout(tuple(range(ndim - 1)), (ndim - 1,))
        layout, stack_ndim = self.layout(name) or last_axis, self.stack_ndim(name, value)
        codes, codes_layout = pack_param(self.in_compute_dtype(value), layout, stack_ndim, spec, key, scale)
        return codes, codes_layout or last_axis

    def times_mask(self, name: str, value: Any) -> Any:
        """A parameter as the product rounds it: the kernel of a convolution times its mask.

        Raises:
            NotImplementedError: for a kernel that is changed outside its layer, or by a mask that is not at hand.
        """
        if self.kind.hook is None or self.kind.parameters[name] != "weight":
            return value  # it is rounded before the layer sees it, packed or not
        mask = getattr(self.layer, "mask", None)
        advice = "Quantize the program instead, by program=True, or leave the layer: "
        advice += exclusion_advice(["/".join(self.layer.path)], self.rule)
        if self.kernel_change:
            raise NotImplementedError(
                f"{name} of the {self.place} is changed by {self.kernel_change} before the product, and packed numbers "
                f"are rounded before that. {advice}"
            )
        if isinstance(mask, jax.core.Tracer):
            raise NotImplementedError(
                f"mask of the {self.place} is computed while the module runs, and its packed {name} is rounded after "
                f"the mask: make the mask by NumPy, or outside. {advice}"
            )
        return value if mask is None else value * mask

    def packed_spec(self, name: str, shape: tuple[int, ...], dtype: Any) -> Spec | None:
        """The spec of a parameter as its rule packs it."""
        if name not in self.kind.parameters or (spec := self.spec(name)) is None:
            return None
        key = jax.eval_shape(lambda: jax.random.key(0)) if spec.rounding.stochastic else None
        value = jax.ShapeDtypeStruct(shape, dtype)
        return jax.eval_shape(lambda value, key: self.pack_param(name, value, key)[0], value, key).spec

    @property
    def needs_run(self) -> bool:
        """Whether the initial state of its rule depends on the input of a call."""
        learns_scale = isinstance(self.rule.scale_from, LSQ) and self.rule.activation is not None
        caches = self.kind.caches and self.rule.cache is not None and self.layer.decode
        return (learns_scale and self.kind.keeps_scales) or caches

    def in_compute_dtype(self, value: Any) -> Any:
        """A parameter in the dtype that the layer computes in."""
        dtype = getattr(self.layer, "dtype", None)
        return value if dtype is None else value.astype(dtype)

    def stack_ndim(self, name: str, value: Any) -> int:
        """How many axes in front a parameter has of a stack of layers, as `flax.linen.scan` makes one.

        Raises:
            NotImplementedError: for a stack along another axis.
        """
        shape = self.shapes[name]
        stack_ndim = value.ndim - len(shape)
        if value.shape[stack_ndim:] != shape:
            raise NotImplementedError(
                f"{type(self.layer).__name__} at {'/'.join(self.layer.path)!r}: {name} of shape {value.shape} is a "
                f"stack of {shape}, and its layers must lie along the first axis: variable_axes={{'params': 0}}"
            )
        return stack_ndim


def linen_params(variables: Any) -> dict[LinenPath, Any]:
    """The parameters by path."""
    return flatten_dict(dict(variables).get("params", {}))


def match_linen_layers(
    module: nn.Module, rules: Sequence[Rule], variables: Any, args: tuple[Any, ...], rngs: Any, kwargs: Any
) -> dict[LinenPath, LayerMatch]:
    """The layers that rules match, by path, from a call that computes nothing.

    Args:
        module: of Linen.
        rules: the rules.
        variables: unpacked.
        args: of the module; only shapes of arrays count.
        rngs: streams of keys.
        kwargs: as of Linen's `apply`.

    Raises:
        ValueError: for a rule that matches no layer, or has a field without effect on any of them.
        NotImplementedError: for a module with parameters that is no known layer, or an inaccessible product.
    """
    return _match_linen_rules(rules, *_trace_module_calls(module, variables, args, rngs, kwargs), variables)


def module_calls(module: nn.Module, variables: Any, args: tuple[Any, ...], rngs: Any, kwargs: Any) -> ModuleCalls:
    """The layers that run in an abstract call; arguments as for `match_linen_layers`."""
    return _trace_module_calls(module, variables, args, rngs, kwargs)[0]


def _trace_module_calls(
    module: nn.Module, variables: Any, args: tuple[Any, ...], rngs: Any, kwargs: Any
) -> tuple[ModuleCalls, dict[LinenPath, str]]:
    """The layers that run in an abstract call, and what changes the kernels of some before."""
    kernel_changes: dict[LinenPath, str] = {}
    enclosing: list[nn.Module] = []
    outer_trace: Any = None
    argument_ids: set[int] = set()
    calls: dict[LinenPath, tuple[nn.Module, dict[str, tuple[int, ...]]]] = {}
    leaves, structure = jax.tree.flatten(args)
    arrays = [leaf for leaf in leaves if isinstance(leaf, _ARGUMENT_ARRAY_TYPES)]

    def record_call(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        enclosing.append(context.module)
        try:
            y = call(*args, **kwargs)
        finally:
            enclosing.pop()
        params = nn.meta.unbox(dict(context.module.variables).get("params", {}))
        shapes = {name: value.shape for name, value in params.items() if isinstance(value, jax.Array)}
        # The module itself holds tracers, which would outlive their trace.
        path = context.module.path
        if "kernel" in params:
            wrapper = next((m for m in reversed(enclosing) if isinstance(m, _KERNEL_WRAPPERS)), None)
            # A kernel comes as the tracer that was given, unless it is changed or a transformation (scan, remat) traces
            # anew; there only Flax's own wrappers are known.
            is_outside = current_trace() == outer_trace
            if (id(params["kernel"]) not in argument_ids) if is_outside else wrapper is not None:
                kernel_changes[path] = "nn.map_variables" if wrapper is None else f"nn.{type(wrapper).__name__}"
        calls[path] = context.module.clone(parent=Scope({}, path=path)), shapes
        return y

    def run(variables: Any, rngs: Any, arrays: list[Any]) -> Any:
        nonlocal outer_trace
        outer_trace = current_trace()
        argument_ids.update(map(id, jax.tree.leaves(variables)))
        remaining = iter(arrays)
        values = [next(remaining) if isinstance(leaf, _ARGUMENT_ARRAY_TYPES) else leaf for leaf in leaves]
        return module.apply(variables, *jax.tree.unflatten(structure, values), rngs=rngs, **kwargs)

    with nn.intercept_methods(record_call):
        jax.eval_shape(run, variables, rngs, arrays)
    return calls, kernel_changes


def params_by_layer(calls: ModuleCalls, variables: Any) -> dict[LinenPath, dict[str, Any]]:
    """The parameters by name of everything that has some, and of every layer that ran."""
    params: dict[LinenPath, dict[str, Any]] = {}
    for path, value in linen_params(variables).items():
        params.setdefault(path[:-1], {})[path[-1]] = value
    return params | {
        path: {} for path, (layer, _) in calls.items() if type(layer) in LINEN_KINDS and path not in params
    }


def linen_rule_index(path: LinenPath, layer: Any, rules: Sequence[Rule]) -> int | None:
    """The index of the first rule that matches a layer, which is None if a module has parameters but did not run."""
    kind = LINEN_KINDS.get(type(layer))
    return rule_index(
        "/".join(path), rules, "" if layer is None else type(layer).__name__, "" if kind is None else kind.operation
    )


class LinenLayerRule(NamedTuple):
    """What rules say for a layer.

    Args:
        params: its parameters by name.
        number: of its rule; None if none matches.
        effective_rule: what that rule rounds in this layer (`rules_for_norms`).
    """

    params: dict[str, Any]
    number: int | None
    effective_rule: Rule | None


def linen_layer_rules(calls: ModuleCalls, rules: Sequence[Rule], variables: Any) -> dict[LinenPath, LinenLayerRule]:
    """As `params_by_layer`, each with its rule."""
    params = params_by_layer(calls, variables)
    layers = {path: calls[path][0] if path in calls else None for path in params}
    kinds = {path: LINEN_KINDS.get(type(layer)) for path, layer in layers.items()}
    indices = {path: linen_rule_index(path, layer, rules) for path, layer in layers.items()}
    of_norms = rules_for_norms(rules, [(index, kinds[path]) for path, index in indices.items() if index is not None])

    def effective_rule(index: int | None, kind: LinenKind | None) -> Rule | None:
        return None if index is None else (rules if kind is None or kind.operation else of_norms)[index]

    return {
        path: LinenLayerRule(params[path], index, effective_rule(index, kinds[path])) for path, index in indices.items()
    }


def _match_linen_rules(
    rules: Sequence[Rule], calls: ModuleCalls, kernel_changes: Mapping[LinenPath, str], variables: Any
) -> dict[LinenPath, LayerMatch]:
    layer_rules = linen_layer_rules(calls, rules, variables)
    matches: dict[LinenPath, tuple[int, LayerMatch]] = {}
    for path, (_, index, effective_rule) in layer_rules.items():
        layer, shapes = calls.get(path, (None, {}))
        if index is not None and effective_rule is not None:
            matches[path] = index, LayerMatch(layer, effective_rule, shapes, kernel_changes.get(path, ""))
    idle = [number for number in range(len(rules)) if not any(number == n for n, _ in matches.values())]
    if idle:
        hint = nearest_paths_hint([rules[n].path for n in idle], ["/".join(path) for path in layer_rules])
        raise ValueError(
            f"{', '.join(str(rules[n]) for n in idle)} matches no layer, or only such as an earlier rule matches{hint}"
        )
    matches = {path: pair for path, pair in matches.items() if _rule_fields_in_use(pair[1].rule)}
    for path, (_, match) in matches.items():
        _check_layer_match(path, match)
    for index, rule in enumerate(rules):
        matched = {path: match for path, (n, match) in matches.items() if n == index}
        rule_fields = [(match.rule, match.kind.fields(layer_rules[path].params)) for path, match in matched.items()]
        unused_fields = [
            name
            for name in _rule_fields_in_use(rule)
            if not any(name in fields and name in _rule_fields_in_use(effective) for effective, fields in rule_fields)
        ]
        if unused_fields:
            raise ValueError(
                f"{rule}: {', '.join(unused_fields)} has no effect on any of its layers: "
                f"{', '.join(sorted({type(match.layer).__name__ for match in matched.values()}))}"
            )
    return {path: match for path, (_, match) in matches.items()}


def _rule_fields_in_use(rule: Rule) -> list[str]:
    return [name for name in ROUNDING_FIELDS if getattr(rule, name) is not None]


def _check_layer_match(path: LinenPath, match: LayerMatch) -> None:
    layer, rule = match.layer, match.rule
    layer_text = f"{type(layer).__name__} at {'/'.join(path)!r}"
    kind = LINEN_KINDS.get(type(layer))
    param_names = set() if kind is None else {*kind.parameters, *map(learned_scale_name, ("weight", "activation"))}
    extra_params = sorted(match.shapes.keys() - param_names)
    own = f" ({', '.join(extra_params)})" if extra_params else ""
    if kind is None or extra_params or not is_plain_flax_layer(layer, type(layer), nn.Module):
        raise NotImplementedError(
            f"{layer_text} has parameters{own} and is none of the plain layers that can be quantized: "
            f"{', '.join(cls.__name__ for cls in LINEN_KINDS)}. Quantize the program instead, by program=True, "
            f"or leave it: {exclusion_advice(['/'.join(path)], rule)}"
        )
    refuse_forward_rotation(rule, layer_text)
    if set(kind.refuses) & set(PRODUCT_RULE_FIELDS):
        refuse_code_products(rule, layer_text, "Flax gives no access to its product")
    wrong = [name for name in kind.refuses if getattr(rule, name) is not None]
    if wrong:
        raise NotImplementedError(
            f"{layer_text}: {', '.join(wrong)} cannot be had, since Flax gives no access to its product. "
            f"{exclusion_advice(['/'.join(path)], rule, ', ...')}"
        )
    match.check_axes()
    hooks = (kind.hook[0], f"{kind.hook[0]}_cls", *_ATTENTION_EINSUM_FIELDS) if kind.hook is not None else ()
    default_functions = (None, nn.dot_product_attention)
    own = [name for name in hooks if not any(getattr(layer, name, None) is function for function in default_functions)]
    if own:
        raise ValueError(f"{layer_text} has a {own[0]} of its own, in whose place the rounding would stand")
