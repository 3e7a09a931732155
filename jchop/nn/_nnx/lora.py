"""Adapters of low rank (LoRA) in models of NNX: beside parameters of programs, and around linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array

from jchop._common.checks import check
from jchop._quantized.program.adapters import AdaptedParam, LoraAdapter
from jchop._quantized.program.call import CallArguments
from jchop._quantized.program.provenance import MatrixLayout
from jchop._quantized.program.weight_layout import WeightLayout
from jchop._storage import QArray
from jchop.nn._nnx import programs
from jchop.nn._nnx.layer_kinds import NNX_KINDS
from jchop.nn._nnx.layers import FLAX_CLASSES, layer_entries, strip_rounding
from jchop.nn._nnx.nodes import ModuleEntry, keys_as_path, replace_nodes
from jchop.nn._nnx.rounding_modules import RoundedPromotion, rounding_module_in
from jchop.nn._shared.lora_rule import LoraRule, add_adapter_output
from jchop.nn._shared.program_classes import ExampleInputs, plain_class
from jchop.nn._trees.lora import (
    AdaptableModel,
    AdapterTarget,
    AdapterTargets,
    as_matrix,
    program_adapter_targets,
    replace_leaves,
    rules_excluding_params,
)


class Adapted(nnx.Module):
    """A layer with an adapter: ``base(x) + factor * (x A B)``. `add_lora` makes it.

    Attributes:
        base: the layer.
        lora_a: A, of shape (in, rank), a `flax.nnx.LoRAParam`. Several axes of inputs are flattened to one. The axes of
            a stack of layers (`flax.nnx.vmap`) come in front.
        lora_b: B, of shape (rank, out), likewise.

    Example:
        >>> from flax import nnx
        >>> import jchop as jc
        >>> layer = jc.nn.add_lora(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jc.nn.LoraRule("*", rank=2), rngs=nnx.Rngs(1))
        >>> type(layer).__name__, layer.lora_a.shape, layer.lora_b.shape
        ('Adapted', (8, 2), (2, 4))
    """

    def __init__(self, base: nnx.Module, adapter: LoraAdapter, rngs: nnx.Rngs | None) -> None:
        self.base = base
        self.lora_a, self.lora_b = nnx.LoRAParam(adapter.lora_a), nnx.LoRAParam(adapter.lora_b)
        self.rule: LoraRule = adapter.rule if rngs is not None else replace(adapter.rule, dropout=0.0)
        rate, stack = self.rule.dropout, adapter.lora_a.shape[:-2]
        self.dropout = _adapter_dropout(rate, rngs, stack) if rate and rngs is not None else None

    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
        y = self.base(x, *args, **kwargs)  # type: ignore[operator]
        inputs = x if self.dropout is None else self.dropout(x)
        dtype = getattr(self.base, "dtype", None)
        inputs, a, b = dtypes.promote_dtype((inputs, self.lora_a[...], self.lora_b[...]), dtype=dtype)
        return add_adapter_output(y, inputs, a, b, getattr(self.base, "axis", (-1,)), self.rule)

    @property
    def param(self) -> AdaptedParam:
        """The kernel with its adapter."""
        value, layout, placement = _kernel_target(self.base)
        assert isinstance(layout, MatrixLayout)
        return AdaptedParam(value, LoraAdapter(self.lora_a[...], self.lora_b[...], layout, self.rule, placement))


class AdaptableProgram(AdaptableModel):
    """A model of NNX with the parameters of its programs; without `inputs`, with the weights of its linear layers.

    Each layer is then traced alone. A call of the model refuses an adapter whose weight other operations take.
    """

    @cached_property
    def params(self) -> Any:
        """The parameters, parameters with adapters as `AdaptedParam`."""
        return programs.params_with_adapters(self.model)

    @property
    def adapted(self) -> dict[str, AdaptedParam]:
        """The parameters that have adapters, by path."""
        flat = ((keys_as_path(keys), leaf.get_value()) for keys, leaf in nnx.to_flat_state(self.params))
        return {path: value for path, value in flat if isinstance(value, AdaptedParam)}

    def draws(self, number: int) -> Callable[[int], Array]:
        """The keys of a target by its number; the first call draws the key of all targets from `rngs`."""
        self.key = self.rngs.params() if self.key is None else self.key
        return super().draws(number)

    def programs(self, inputs: ExampleInputs) -> Iterable[tuple[Any, CallArguments]]:
        """The program of each method that has example inputs, with its call."""
        return programs.nnx_methods(self.model, programs.program_rules(self.model)).traced(inputs)

    @cached_property
    def targets(self) -> AdapterTargets:
        """The parameters that may have adapters, by path: of the programs, or of each linear layer traced alone."""
        if self.inputs is not None:
            return super().targets
        entries = [(entry, kind) for entry, kind in layer_entries(self.model) if kind is not None]
        linear: list[Any] = [entry.module for entry, _ in entries if _is_linear_layer(entry.module)]
        layers = {id(layer.kernel): layer for layer in linear}
        others = {
            id(v)
            for entry, kind in entries
            for name, v in entry.variables.items()
            if kind.parameters.get(name) != "weight" or kind.operation in ("", "embedding")
        }
        flat, targets = dict(nnx.to_flat_state(self.params)), AdapterTargets()
        for variable_id, keys in programs.variable_paths(self.model).items():
            value, layer = flat[keys].get_value(), layers.get(variable_id)
            if layer is not None and value.ndim == sum(map(len, _linear_axis_sizes(layer))):
                program = programs.trace_nnx_part(layer, _linear_example_input(layer))
                (targets[keys_as_path(keys)],) = program_adapter_targets([program]).values()
            elif value.ndim > 1 and variable_id not in others:
                targets[keys_as_path(keys)] = AdapterTarget(value, _NEEDS_INPUTS_MESSAGE)
        return targets

    def originals(self, original: Any) -> Any:
        """The parameters of a model that was not packed, by path, each with None: it has its target's layout."""
        return super().originals(nnx.state(original, nnx.Param))

    def put(self, leaves: Iterable[tuple[str, Any]], unpacked: Sequence[str] = ()) -> Any:
        """The model, changed in place: other parameters at some paths, and no rule that rounds those at `unpacked`."""
        rules = programs.program_rules(self.model)
        rules = rules_excluding_params(rules, unpacked, self.params) if unpacked else rules
        params = replace_leaves(self.params, dict(leaves))
        programs.set_program_params(self.model, params, rules, self.rngs)
        return self.model


class AdaptableLayers(AdaptableModel):
    """A model of NNX whose linear layers are wrapped, in `Adapted`."""

    @cached_property
    def wrapped(self) -> dict[str, Adapted]:
        """The layers with adapters, by path."""
        return {keys_as_path(path): node for path, node in nnx.iter_graph(self.model) if isinstance(node, Adapted)}

    @cached_property
    def entries(self) -> dict[str, ModuleEntry]:
        """The layers with kernels, by the first path of each."""
        return entries_with_kernels(self.model)

    @property
    def adapted(self) -> dict[str, AdaptedParam]:
        """The kernels that have adapters, by the path of the layer."""
        return {path: node.param for path, node in self.wrapped.items()}

    @cached_property
    def targets(self) -> AdapterTargets:
        """The kernels that may have adapters, by the path of the layer."""
        return {path: _kernel_target(entry.module) for path, entry in self.entries.items()}

    def draws(self, number: int) -> Callable[[int], Array]:
        """The keys of a target: each call draws the next one from `rngs`."""
        return lambda _: self.rngs.params()

    def names(self, path: str) -> tuple[str, ...]:
        """The names that a layer has in files and in rules: all its paths."""
        return tuple(self.entries[path].paths) if path in self.entries else (path,)

    def originals(self, original: Any) -> Any:
        """By path, the kernels of a model that was not packed, each with its layout as a matrix."""
        return {path: _kernel_target(entry.module)[:2] for path, entry in entries_with_kernels(original).items()}

    def put(self, leaves: Iterable[tuple[str, Any]], unpacked: Sequence[str] = ()) -> Any:
        """The model with other kernels at some paths, in place; a layer with an adapter is wrapped in `Adapted`."""
        replacements: dict[int, nnx.Module] = {}
        for path, leaf in leaves:
            node: Any = self.wrapped[path] if path in self.wrapped else self.entries[path].module
            layer, is_adapted = node.base if isinstance(node, Adapted) else node, isinstance(leaf, AdaptedParam)
            _set_kernel(layer, path, leaf.base if is_adapted else leaf)
            replacements[id(node)] = Adapted(layer, leaf.adapter, self.rngs) if is_adapted else layer
        return replace_nodes(self.model, replacements)


def adaptable_nnx(model: Any, inputs: ExampleInputs | None = None, rngs: nnx.Rngs | None = None) -> AdaptableModel:
    """A model of NNX as a program if it is one, or is traced; else as layers."""
    is_wrapped = any(isinstance(node, Adapted) for _, node in nnx.iter_graph(model))
    is_program = inputs is not None or (programs.is_nnx_program(model) and not is_wrapped)
    copy = nnx.merge(*nnx.split(model), copy=True)
    return (AdaptableProgram if is_program else AdaptableLayers)(copy, inputs, rngs=rngs)


# -- one layer ---------------------------------------------------------------------------------------------------------

#: Why a parameter outside of linear layers has no adapter.
_NEEDS_INPUTS_MESSAGE = (
    "only the program says which operations take it: pass example arguments of the model's call, inputs=(x,)"
)


def entries_with_kernels(model: Any) -> dict[str, ModuleEntry]:
    """The layers that have a kernel, by the first path of each."""
    entries = (entry for entry, kind in layer_entries(model) if kind is not None and kind.parameters)
    return {entry.paths[0]: entry for entry in entries if hasattr(entry.module, "kernel")}


def _linear_example_input(layer: Any) -> jax.ShapeDtypeStruct:
    """An argument of a linear layer."""
    axes, sizes = getattr(layer, "axis", (-1,)), _linear_axis_sizes(layer)[0]
    shape = [1] * (1 + max(axis + 1 if axis >= 0 else -axis for axis in axes))
    for axis, n in zip(axes, sizes, strict=True):
        shape[axis] = n
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)


def _linear_axis_sizes(layer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of the axes of inputs and of outputs of a linear layer."""
    inside, out = layer.in_features, layer.out_features
    return (inside, out) if isinstance(layer, nnx.LinearGeneral) else ((inside,), (out,))


def _adapter_dropout(rate: float, rngs: nnx.Rngs, stack: tuple[int, ...]) -> nnx.Dropout:
    """A dropout; of a stack of layers one that is stacked, too: each layer has a stream of its own."""
    if not stack:
        return nnx.Dropout(rate, rngs=rngs)
    make = lambda key: nnx.Dropout(rate, rngs=nnx.Rngs(dropout=key))  # noqa: E731
    for _ in stack:
        make = nnx.vmap(make)
    return make(jax.random.split(rngs.dropout(), stack))


def _is_linear_layer(layer: Any) -> bool:
    """Whether a layer, quantized or not, may have an adapter."""
    cls = plain_class(type(layer))
    return FLAX_CLASSES.get(cls, cls) in (nnx.Linear, nnx.LinearGeneral) and not getattr(layer, "batch_axis", None)


def _kernel_target(layer: Any) -> AdapterTarget:
    """The kernel of a layer; of a packed one as the codes lie."""
    value = layer.kernel.get_value()
    if not _is_linear_layer(layer):
        kind = plain_class(type(layer)).__name__
        return AdapterTarget(
            value, f"it is of a {kind}, and adapters are for flax.nnx.Linear and LinearGeneral (without batch_axis)"
        )
    inside, out = _linear_axis_sizes(layer)
    shape, placement = (*inside, *out), None
    along, free = tuple(range(len(inside))), tuple(range(len(inside), len(shape)))
    if isinstance(value, QArray):
        promote = rounding_module_in(layer, "promote_dtype", RoundedPromotion)
        assert promote is not None
        form = dict(promote.packed_params)["kernel"]
        shape = form.codes_shape
        if form.layout is not None:
            along, free = (len(shape) - 1,), tuple(range(len(shape) - 1))
        placement = WeightLayout(form.spec, shape, len(shape))
    return AdapterTarget(value, MatrixLayout(shape, shape, (), along, free), placement)


def _set_kernel(layer: Any, path: str, value: Any) -> None:
    """Replace the kernel of a layer; where a packed one becomes an array, the layer becomes one of Flax."""
    variable = layer.kernel
    before = variable.get_value()
    if isinstance(value, QArray):
        if value is not before:
            layer.kernel = variable.copy(value)  # another layer may hold the variable
    elif not isinstance(before, QArray):
        variable[...] = value
    else:
        is_packed = layer.bias is not None and isinstance(layer.bias.get_value(), QArray)
        check(not is_packed, f"{path!r}: its bias is packed, too; leave bias out of the rule, or pass requantize=True")
        layout, base, sizes = _kernel_target(layer).layout, FLAX_CLASSES[type(layer)], _linear_axis_sizes(layer)
        assert isinstance(layout, MatrixLayout)
        matrix = as_matrix(value, layout)
        strip_rounding(layer, NNX_KINDS[base])
        layer.kernel = nnx.Param(matrix.reshape(*matrix.shape[:-2], *sizes[0], *sizes[1]))
        layer.__class__ = base
