"""Low-rank adapters (LoRA) beside the layers of a model, packed or not: added, trained alone, merged, taken away."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jchop._common.checks import check, check_instance
from jchop._common.paths import matches_path
from jchop.nn._nnx import programs
from jchop.nn._nnx.layer_kinds import NNX_KINDS, attach
from jchop.nn._nnx.layers import FLAX_CLASSES, layer_entries, strip_rounding
from jchop.nn._nnx.nodes import keys_as_path, replace_nodes
from jchop.nn._nnx.rounding_modules import RoundedPromotion, rounding_module_in
from jchop.nn._shared import lora_rule
from jchop.nn._shared.program_classes import ExampleInputs, plain_class
from jchop.nn._trees import lora
from jchop.nn._trees.equinox_modules import check_flax_or_equinox
from jchop.storage import QArray
from jchop.storage._axis_groupings import map_over_stack

Array = jax.Array


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

    def __init__(self, base: nnx.Module, lora_a: Array, lora_b: Array, rule: lora_rule.LoraRule, dropout: Any) -> None:
        self.base = base
        self.lora_a, self.lora_b = nnx.LoRAParam(lora_a), nnx.LoRAParam(lora_b)
        self.rule, self.dropout = rule, dropout

    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
        y = self.base(x, *args, **kwargs)  # type: ignore[operator]
        inputs = x if self.dropout is None else self.dropout(x)
        dtype = getattr(self.base, "dtype", None)
        inputs, a, b = dtypes.promote_dtype((inputs, self.lora_a[...], self.lora_b[...]), dtype=dtype)
        return lora_rule.add_adapter_output(y, inputs, a, b, getattr(self.base, "axis", (-1,)), self.rule)


def add_lora(
    model: Any,
    rules: lora_rule.LoraRule | Iterable[lora_rule.LoraRule],
    *,
    rngs: nnx.Rngs | None = None,
    original: Any = None,
    key: Array | None = None,
    inputs: ExampleInputs | None = None,
    fun: Any = None,
) -> Any:
    """A copy of a model with adapters beside its linear layers, whatever their weights are packed in.

    Adapters are `flax.nnx.LoRAParam`. To train them alone, differentiate and optimize these:
    ``nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))`` and ``nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)``.
    Packed weights have no gradient, so a backward pass holds no array of the size of a weight except the unpacked one.

    In a module of Equinox, and in a pytree of parameters, a parameter that reaches products of matrices, and nothing
    else, becomes an `AdaptedParam` in its place; also one of a stack that a scan runs over. `lora_mask` says which
    arrays to train. The products of the program add ``factor * (x A B)``. Dropout is applied in calls with a key:
    ``low(params, x, key=key)``, or ``model(x, rounding_key=key)`` in Equinox. With `inputs` a model of NNX has adapters
    beside such parameters, too, in the attribute ``quantization_adapters`` of the module that holds one; dropout is
    applied until ``model.eval()``.

    Args:
        model: a module of Flax NNX, as from `jchop.nn.quantize` in mode "ptq" or "weight_only", or unquantized. A
            module of Equinox likewise. Or parameters of `fun`, packed or not.
        rules: a `LoraRule`, or several; the first that matches a layer's path applies, or that of a parameter.
        rngs: NNX: `flax.nnx.Rngs` with the streams ``params`` and, for dropout, ``dropout``.
        original: the model before it was packed, which "loftq" and "pissa" need for packed layers. Default None.
        key: Equinox and parameters: a typed key for the first values of A.
        inputs: example arguments of the call, ``(x,)`` or ``{"x": x}``, or their shapes; of models also those of
            methods, ``{"decode": (x,)}``. Without them, rules may match only the linear layers of a model of NNX.
            Default None.
        fun: parameters: the result of `jchop.quantize_fn` that takes them.

    Returns:
        The model; a matched layer is an `Adapted` that holds it as ``base``. If the model is itself a matched layer, an
        `Adapted`.

    Raises:
        TypeError: for rules or a model that are none.
        ValueError: for a rule that matches no linear layer, a layer that is no `flax.nnx.Linear` or `LinearGeneral`
            without `batch_axis`, another parameter without `inputs`, one that other operations take, a rank above its
            sizes with "loftq" or "pissa", or a missing `original`.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
        >>> packed = jc.nn.quantize(model, jc.Rule("layers/0", weight="nf4"), "ptq")
        >>> adapted = jc.nn.add_lora(packed, jc.nn.LoraRule("layers/0", rank=4, alpha=8), rngs=nnx.Rngs(2))
        >>> x = jnp.ones((3, 64))
        >>> bool((adapted(x) == packed(x)).all()), len(nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam)))
        (True, 2)
    """
    lora_rules = lora_rule.as_lora_rules(rules)
    if not isinstance(model, nnx.Module):
        if fun is None:
            check_flax_or_equinox("model", model, "; parameters need fun=")
        if rngs is not None:
            raise TypeError("rngs is for modules of Flax NNX; others take key=")
        return lora.add_lora_to_tree(model, lora_rules, key, inputs, fun, original)
    for name, value in (("key", key), ("fun", fun)):
        if value is not None:
            raise TypeError(f"{name} is for modules of Equinox and parameters; one of Flax NNX takes rngs=")
    check_instance("rngs", rngs, nnx.Rngs, "flax.nnx.Rngs, for example nnx.Rngs(0)")
    assert rngs is not None
    result: Any = nnx.merge(*nnx.split(model), copy=True)
    if inputs is not None or programs.is_nnx_program(result):
        targets = _nnx_adapter_targets(result, inputs)
        exact = None if original is None else nnx.state(original, nnx.Param)
        params = lora.tree_with_adapters(
            programs.params_with_adapters(result), lora_rules, rngs.params(), targets, exact
        )
        programs.set_program_params(result, params, programs.program_rules(result), rngs)
        return result
    before = {} if original is None else {entry.paths[0]: entry.module for entry, _ in layer_entries(original)}
    adapters: dict[int, Adapted] = {}
    used: set[int] = set()
    paths: list[str] = []
    for entry, kind in layer_entries(result):
        layer, path = entry.module, entry.paths[0]
        number = next((i for i, rule in enumerate(lora_rules) if matches_path(rule.path, *entry.paths)), None)
        paths += entry.paths
        if number is None or kind is None or not kind.parameters or not hasattr(layer, "kernel"):
            continue
        used.add(number)
        adapters[id(layer)] = _adapt_layer(layer, path, lora_rules[number], rngs, before.get(path))
    lora_rule.check_lora_rules_match(lora_rules, used, paths)
    return replace_nodes(result, adapters)


def _nnx_adapter_targets(model: nnx.Module, inputs: ExampleInputs | None) -> lora.AdapterTargets:
    """The parameters of a program that may have adapters; without `inputs` the weights of its linear layers.

    Each layer is then traced alone. A call of the model refuses an adapter whose weight other operations take.
    """
    if inputs is not None:
        return lora.program_adapter_targets(programs.trace_nnx_programs(model, inputs))
    entries = list(layer_entries(model))
    linear: list[Any] = [entry.module for entry, kind in entries if kind is not None and _is_linear_layer(entry.module)]
    layers = {id(layer.kernel): layer for layer in linear}
    others = {
        id(v)
        for entry, kind in entries
        if kind is not None
        for name, v in entry.variables.items()
        if kind.parameters.get(name) != "weight" or kind.operation in ("", "embedding")
    }
    flat, targets = dict(nnx.to_flat_state(programs.params_with_adapters(model))), lora.AdapterTargets()
    for variable_id, keys in programs.variable_paths(model).items():
        value, layer = flat[keys].get_value(), layers.get(variable_id)
        if layer is not None and value.ndim == sum(map(len, _linear_axis_sizes(layer))):
            (targets[keys_as_path(keys)],) = lora.program_adapter_targets(
                [programs.trace_nnx_part(layer, _linear_example_input(layer))]
            ).values()
        elif value.ndim > 1 and variable_id not in others:
            targets[keys_as_path(keys)] = value, _NEEDS_INPUTS_MESSAGE, None
    return targets


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


#: Why a parameter outside of linear layers has no adapter.
_NEEDS_INPUTS_MESSAGE = (
    "only the program says which operations take it: pass example arguments of the model's call, inputs=(x,)"
)


def merge_lora(model: Any, *, requantize: bool = False) -> Any:
    """A copy of a model with its adapters added to the weights, W + factor A B, and without adapters.

    Args:
        model: as from `add_lora`.
        requantize: whether a packed weight is packed again by its rule, which rounds the sum. Default False: the layer
            becomes one of Flax with a weight in full precision, and its rule has no effect any more; nor in a module of
            Equinox. Parameters in full precision are rounded by `jchop.quantize_fn`: call its function itself.

    Returns:
        The model with the layers in their own places. Parameters without adapters are the same, packed ones still
        packed: `jchop.dequantize` unpacks those of a pytree.

    Raises:
        ValueError: for a model without adapters.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        >>> adapted = jc.nn.add_lora(model, jc.nn.LoraRule("*", rank=2), rngs=nnx.Rngs(1))
        >>> merged = jc.nn.merge_lora(adapted)
        >>> type(merged).__name__, bool((merged.kernel[...] == model.kernel[...]).all())
        ('Linear', True)
    """
    if not isinstance(model, nnx.Module):
        return lora.merge_lora_tree(model, requantize)
    result: Any = nnx.merge(*nnx.split(model), copy=True)
    if programs.is_nnx_program(result) and programs.has_adapters(result):
        params = programs.params_with_adapters(result)
        rules = lora.rules_excluding_params(
            programs.program_rules(result), lora.params_unpacked_by_merge(params, requantize), params
        )
        programs.set_program_params(result, lora.merge_lora_tree(params, requantize), rules, None)
        return result
    adapted = _adapted_layers(result)
    for layer in adapted.values():
        weight = lora_rule.merge_lora_weight(
            _linear_weight(layer.base), layer.lora_a[...], layer.lora_b[...], layer.rule
        )
        _set_linear_weight(layer.base, weight, requantize)
    return replace_nodes(result, {id(layer): layer.base for layer in adapted.values()})


def split_lora(model: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The model without its adapters, and the adapters by path.

    Args:
        model: as from `add_lora`.

    Returns:
        A copy of the model with the layers in their own places; and for the path of each layer a dict of ``lora_a``,
        ``lora_b`` and the ``rule``. A parameter in Equinox or a pytree has the path of its layer if it is called
        ``weight`` or ``kernel``, else its own.

    Raises:
        ValueError: for a model without adapters.

    Example:
        >>> import jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
        >>> adapted = jc.nn.add_lora(model, jc.nn.LoraRule("*", rank=2), rngs=nnx.Rngs(1))
        >>> base, adapters = jc.nn.split_lora(adapted)
        >>> type(base.layers[0]).__name__, list(adapters), adapters["layers/0"]["lora_a"].shape
        ('Linear', ['layers/0'], (8, 2))
    """
    if not isinstance(model, nnx.Module):
        return lora.split_lora_tree(model)
    result: Any = nnx.merge(*nnx.split(model), copy=True)
    if programs.is_nnx_program(result) and programs.has_adapters(result):
        bare, tree_adapters = lora.split_lora_tree(programs.params_with_adapters(result))
        programs.set_program_params(result, bare, programs.program_rules(result), None)
        return result, tree_adapters
    adapted = _adapted_layers(result)
    adapters = {
        path: {"lora_a": layer.lora_a[...], "lora_b": layer.lora_b[...], "rule": layer.rule}
        for path, layer in adapted.items()
    }
    return replace_nodes(result, {id(layer): layer.base for layer in adapted.values()}), adapters


def _adapted_layers(model: nnx.Module) -> dict[str, Adapted]:
    """The layers with adapters, by path.

    Raises:
        ValueError: if there is none.
    """
    layers = {keys_as_path(path): node for path, node in nnx.iter_graph(model) if isinstance(node, Adapted)}
    check(layers, "model has no adapters; jchop.nn.add_lora makes them")
    return layers


def save_lora(folder: str | os.PathLike[str], model: Any) -> None:
    """Writes the adapters of a model alone to a folder: ``adapter_model.safetensors`` and ``adapter_config.json``.

    The layout is PEFT's: ``base_model.model.PATH.lora_A.weight`` has the shape (rank, in), ``lora_B``
    (out, rank), and ``adapter_config.json`` has ranks, alphas and the rate of dropout. PEFT computes the same factors.

    Args:
        folder: a folder, which is created.
        model: as from `jchop.nn.add_lora`.

    Raises:
        ValueError: for a model without adapters, or with several rates of dropout or stacks of layers, which PEFT does
            not have. For a folder that another call writes to.
        OSError: if a file cannot be written; the old files stay.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
        >>> adapted = jc.nn.add_lora(model, jc.nn.LoraRule("*", rank=2), rngs=nnx.Rngs(1))
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> jc.nn.save_lora(folder, adapted)
        >>> again = jc.nn.load_lora(folder, model)
        >>> bool((again(jnp.ones((1, 8))) == adapted(jnp.ones((1, 8)))).all())
        True
    """
    lora_rule.write_adapters(folder, split_lora(model)[1])


def load_lora(
    folder: str | os.PathLike[str],
    model: Any,
    *,
    rngs: nnx.Rngs | None = None,
    inputs: ExampleInputs | None = None,
    fun: Any = None,
) -> Any:
    """A copy of a model with the adapters of a folder of `save_lora` or PEFT: LoRA and rank-stabilized LoRA.

    As in PEFT, a key of ``rank_pattern`` or ``alpha_pattern`` is a regular expression of the end of a path, and the
    first one that matches decides.

    Args:
        folder: with ``adapter_model.safetensors`` and ``adapter_config.json``.
        model: of Flax NNX or Equinox, or parameters of `fun`, packed or not, without adapters; names in the file are
            paths of its layers.
        rngs: NNX: `flax.nnx.Rngs` for dropout. Default None: adapters have no dropout.
        inputs: as in `add_lora`.
        fun: parameters: as in `add_lora`.

    Returns:
        The model, as from `jchop.nn.add_lora`.

    Raises:
        ValueError: for damaged files, names that are no linear layer of the model, or other shapes; for adapters that
            compute something else, such as DoRA, or belong to a base that PEFT changes, such as PiSSA.
        OSError: if a file cannot be read.

    Example:
        >>> import jchop as jc
        >>> jc.nn.load_lora("no folder", None)
        Traceback (most recent call last):
        TypeError: model=None must be a module of Flax NNX or Equinox; parameters need fun=
    """
    if not isinstance(model, nnx.Module):
        if fun is None:
            check_flax_or_equinox("model", model, "; parameters need fun=")
        return lora.tree_with_file_adapters(folder, model, lora.tree_adapter_targets(model, inputs, fun))
    result: Any = nnx.merge(*nnx.split(model), copy=True)
    if inputs is not None or programs.is_nnx_program(result):
        params = lora.tree_with_file_adapters(
            folder, programs.params_with_adapters(result), _nnx_adapter_targets(result, inputs)
        )
        programs.set_program_params(result, params, programs.program_rules(result), rngs)
        return result
    layers = {path: entry.module for entry, _ in layer_entries(result) for path in entry.paths}
    linear_layers = {path: layer for path, layer in layers.items() if _is_linear_layer(layer)}
    adapters: dict[int, Adapted] = {}
    for path, (a, b, rule) in lora_rule.read_adapters(
        folder, linear_layers, lambda path: _linear_weight(linear_layers[path]).shape[-2:]
    ).items():
        if _linear_weight(linear_layers[path]).ndim > 2:
            raise ValueError(f"{folder}: the layer {path!r} is a stack, which a file of PEFT has not")
        rule = rule if rngs is not None else replace(rule, dropout=0.0)
        dropout = nnx.Dropout(rule.dropout, rngs=rngs) if rule.dropout and rngs is not None else None
        adapters[id(linear_layers[path])] = Adapted(linear_layers[path], a, b, rule, dropout)
    return replace_nodes(result, adapters)


# -- one layer ---------------------------------------------------------------------------------------------------------


def _adapt_layer(layer: Any, path: str, rule: lora_rule.LoraRule, rngs: nnx.Rngs, original: Any) -> Adapted:
    what = f"{type(layer).__name__} at {path!r}, by {rule}"
    if not _is_linear_layer(layer):
        raise ValueError(
            f"{what}: adapters are for flax.nnx.Linear and LinearGeneral (without batch_axis); exclude the layer with "
            f"'!{path}'"
        )
    has_codes = isinstance(layer.kernel.get_value(), QArray)
    exact = None if original is None else _linear_weight(original)
    a, b, rest = lora_rule.initial_stack_adapters(
        rule, what, lambda _: rngs.params(), _linear_weight(layer), exact, has_codes
    )
    if rest is not None:
        _set_linear_weight(layer, rest, True)
    return Adapted(layer, a, b, rule, _adapter_dropout(rule.dropout, rngs, a.shape[:-2]) if rule.dropout else None)


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


def _linear_weight(layer: Any) -> Array:
    """The weight of a linear layer, (in, out), unpacked; the axes of a stack of layers come in front."""
    inside, out = _linear_axis_sizes(layer)
    numbers = _kernel_numbers(layer)
    stack = numbers.shape[: numbers.ndim - len(inside) - len(out)]
    return numbers.reshape(*stack, math.prod(inside), math.prod(out))


def _kernel_numbers(layer: Any) -> Array:
    value = layer.kernel.get_value()
    if not isinstance(value, QArray):
        return value
    promote = rounding_module_in(layer, "promote_dtype", RoundedPromotion)
    assert promote is not None
    form = dict(promote.packed_params)["kernel"]
    stack = len(value.shape) - len(form.codes_shape)
    return map_over_stack(stack, lambda one: form.numbers(one, one.dtype), value)


def _set_linear_weight(layer: Any, weight: Array, again: bool) -> None:
    """Replaces the weight of a layer; a packed one is packed `again`, or the layer becomes one of Flax."""
    if not isinstance(layer.kernel.get_value(), QArray):
        layer.kernel[...] = weight.reshape(layer.kernel.shape)
        return
    promote = rounding_module_in(layer, "promote_dtype", RoundedPromotion)
    assert promote is not None and promote.place.rule is not None
    base = FLAX_CLASSES[type(layer)]
    if layer.bias is not None and isinstance(layer.bias.get_value(), QArray):
        raise ValueError(f"{promote.place}: its bias is packed, too; leave bias out of the rule to change the weight")
    shape = _kernel_numbers(layer).shape
    strip_rounding(layer, NNX_KINDS[base])
    layer.kernel = nnx.Param(weight.reshape(shape))
    if again:
        attach(layer, NNX_KINDS[base], promote.place.rule, promote.place.path, packs=True, rngs=None)
    else:
        layer.__class__ = base
