"""Low-rank adapters (LoRA) beside the parameters of any model: added, trained alone, merged, taken away."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jax import Array

from jchop._common.checks import check, check_bool, check_instance
from jchop._common.paths import matches_path
from jchop._quantized.products.rule import refuse_idle_rules
from jchop._quantized.program.adapters import AdaptedParam, LoraAdapter
from jchop._quantized.program.call import is_packed_param, is_param_leaf
from jchop._quantized.program.provenance import MatrixLayout
from jchop._round.arguments import check_key
from jchop._storage._axis_groupings import map_over_stack
from jchop.nn._linen.lora import AdaptableLinen, is_linen
from jchop.nn._nnx.lora import adaptable_nnx
from jchop.nn._shared.lora_rule import (
    LoraRule,
    LoraRuleLike,
    as_lora_rules,
    initial_stack_adapters,
    merge_lora_weight,
    read_adapters,
    write_adapters,
)
from jchop.nn._shared.program_classes import ExampleInputs
from jchop.nn._trees.equinox_modules import check_flax_or_equinox, is_equinox_module
from jchop.nn._trees.lora import AdaptableEquinox, AdaptableModel, AdapterTarget, as_matrix, param_numbers


def add_lora(
    model: Any,
    rules: LoraRuleLike,
    *,
    inputs: ExampleInputs | None = None,
    fun: Any = None,
    original: Any = None,
    rngs: nnx.Rngs | None = None,
    key: Array | None = None,
) -> Any:
    """Copies a model and adds adapters beside its linear layers, whatever their weights are packed in.

    * NNX: a matched linear layer becomes an ``Adapted`` that holds it as ``base``. With `inputs` every parameter that
      only products of matrices read may have an adapter, in the attribute ``quantization_adapters`` of its module. A
      and B are `flax.nnx.LoRAParam`: ``nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))`` and
      ``nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)`` train them alone. Dropout is applied until ``model.eval()``.
    * Equinox, and parameters of `fun`: a matched parameter becomes an ``AdaptedParam`` in its place, and `lora_mask`
      says which arrays to train. Dropout is applied in calls with a key: ``low(params, x, key=key)``, or
      ``model(x, rounding_key=key)`` in Equinox.
    * Linen: `model` is the variables of `fun`. Adapters are the collection ``"lora"``, which trains alone:
      ``jax.grad(lambda lora: loss(low.apply({**variables, "lora": lora}, x)))(variables["lora"])``. Dropout is applied
      with ``rngs={"dropout": key}``.

    Packed weights have no gradient. So the only array of a weight's size in a backward pass is the unpacked weight.

    Args:
        model: a module of Flax NNX or Equinox, quantized or not. Or parameters of `fun`, packed or not; for a module of
            Linen its variables.
        rules: a mapping of patterns of paths to a `LoraRule` or its fields, ``{"*": {"rank": 8}}``; a `LoraRule`, or
            several. The first that matches the path of a layer or parameter applies.
        inputs: example arguments of the call, ``(x,)`` or ``{"x": x}``, or their shapes. For models also the arguments
            of methods, ``{"decode": (x,)}``. Without them, rules may match only the linear layers of a model of NNX.
            Default None.
        fun: for parameters, the function that runs them: a result of `jchop.quantize_fn`, or of `jchop.nn.quantize` for
            Linen.
        original: the model before it was packed, which "loftq" and "pissa" need for packed layers. Default None.
        rngs: for NNX, `flax.nnx.Rngs` with the streams ``params`` and, for dropout, ``dropout``.
        key: for all but NNX, a typed key for the first values of A.

    Returns:
        The model, or the parameters or variables, with adapters.

    Raises:
        TypeError: for rules or a model of another type.
        ValueError: for a rule that matches no linear layer, or a layer that is no `flax.nnx.Linear` or `LinearGeneral`
            without `batch_axis`. For another parameter without `inputs`, or one that other operations read. For a rank
            above its sizes with "loftq" or "pissa", or a missing `original`.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
        >>> packed = jc.nn.quantize(model, jc.Rule("layers/0", weight="nf4"), "ptq")
        >>> adapted = jc.nn.add_lora(packed, {"layers/0": {"rank": 4, "alpha": 8}}, rngs=nnx.Rngs(2))
        >>> x = jnp.ones((3, 64))
        >>> bool((adapted(x) == packed(x)).all()), len(nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam)))
        (True, 2)
    """
    lora_rules = as_lora_rules(rules)
    if isinstance(model, nnx.Module):
        check_instance("rngs", rngs, nnx.Rngs, "flax.nnx.Rngs, for example nnx.Rngs(0)")
        if key is not None:
            raise TypeError("key is for modules of Equinox and parameters; one of Flax NNX takes rngs=")
    else:
        check(key is not None, "key=None: the first values of A are random; pass a typed key, key=jax.random.key(0)")
        check_key("key", key)
    whole = _traceable(model, inputs, fun, rngs, key)
    originals = {} if original is None else whole.originals(original)
    numbers = {
        path: next((i for i, rule in enumerate(lora_rules) if matches_path(rule.path, path, *whole.names(path))), None)
        for path in whole.targets
    }
    idle = [rule for i, rule in enumerate(lora_rules) if i not in numbers.values()]
    refuse_idle_rules(idle, "linear layer", [*numbers])
    return whole.put(
        (path, _adapt_param(lora_rules[i], path, whole.targets[path], originals.get(path), whole.draws(number)))
        for number, (path, i) in enumerate(numbers.items())
        if i is not None
    )


def merge_lora(model: Any, *, requantize: bool = False) -> Any:
    """Copies a model, adds its adapters to the weights, W + factor A B, and removes them.

    Args:
        model: as from `add_lora`.
        requantize: whether a packed weight is packed again by its rule, which rounds the sum. Default False: the weight
            is in full precision. In a model of NNX or Equinox its rule then has no effect any more. A result of
            `jchop.quantize_fn` and a quantized module of Linen still round them in each call: call the function or the
            module itself.

    Returns:
        The model with the layers in their own places. Parameters without adapters are the same, packed ones still
        packed. `jchop.dequantize` unpacks the parameters of a pytree.

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
    check_bool("requantize", requantize)
    whole, adapted = _with_adapters(model)
    unpacked = [path for path, leaf in adapted.items() if is_packed_param(leaf.base) and not requantize]
    return whole.put([(path, _merge_param(path, leaf, requantize)) for path, leaf in adapted.items()], unpacked)


def split_lora(model: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Separates a model from its adapters: returns the model without them, and the adapters by path.

    Args:
        model: as from `add_lora`.

    Returns:
        A copy of the model with the layers in their own places, and a dict. The dict has ``lora_a``, ``lora_b`` and the
        ``rule`` for the path of each layer. A parameter named ``weight`` or ``kernel`` has the path of its layer,
        another one its own.

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
    (whole, adapted), adapters = _with_adapters(model), dict[str, dict[str, Any]]()
    for path, leaf in adapted.items():
        name, own = whole.names(path)[0], leaf.adapter
        check(name not in adapters, f"two parameters of {name!r} have adapters, which a file cannot tell apart")
        adapters[name] = {"lora_a": own.lora_a, "lora_b": own.lora_b, "rule": own.rule}
    return whole.put([(path, leaf.base) for path, leaf in adapted.items()]), adapters


def save_lora(path: str | os.PathLike[str], model: Any) -> None:
    """Writes the adapters of a model alone to a folder: ``adapter_model.safetensors`` and ``adapter_config.json``.

    The layout is PEFT's: ``base_model.model.PATH.lora_A.weight`` has the shape (rank, in), ``lora_B``
    (out, rank), and ``adapter_config.json`` has ranks, alphas and the rate of dropout. PEFT computes the same factors.

    Args:
        path: a folder, which is created.
        model: as from `jchop.nn.add_lora`.

    Raises:
        ValueError: for a model without adapters, or with several rates of dropout or stacks of layers, which PEFT does
            not have. For a folder that another call is writing to.
        OSError: if a file cannot be written; the old files stay.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
        >>> adapted = jc.nn.add_lora(model, jc.nn.LoraRule("*", rank=2), rngs=nnx.Rngs(1))
        >>> path = pathlib.Path(tempfile.mkdtemp())
        >>> jc.nn.save_lora(path, adapted)
        >>> again = jc.nn.load_lora(path, model)
        >>> bool((again(jnp.ones((1, 8))) == adapted(jnp.ones((1, 8)))).all())
        True
    """
    write_adapters(path, split_lora(model)[1])


def load_lora(
    path: str | os.PathLike[str],
    model: Any,
    *,
    inputs: ExampleInputs | None = None,
    fun: Any = None,
    rngs: nnx.Rngs | None = None,
) -> Any:
    """Copies a model and adds the adapters of a folder of `save_lora` or PEFT: LoRA and rank-stabilized LoRA.

    As in PEFT, a key of ``rank_pattern`` or ``alpha_pattern`` is a regular expression of the end of a path. The first
    one that matches decides.

    Args:
        path: a folder with ``adapter_model.safetensors`` and ``adapter_config.json``.
        model: as in `add_lora`, without adapters; names in the file are paths of its layers.
        inputs: as in `add_lora`.
        fun: as in `add_lora`.
        rngs: for NNX, `flax.nnx.Rngs` for dropout. Default None: adapters have no dropout.

    Returns:
        The model, as from `jchop.nn.add_lora`.

    Raises:
        ValueError: for damaged files, names that are no linear layer of the model, or other shapes. For adapters with
            another computation, as DoRA, or with a base that PEFT changes, as PiSSA.
        OSError: if a file cannot be read.

    Example:
        >>> import jchop as jc
        >>> jc.nn.load_lora("no folder", None)
        Traceback (most recent call last):
        TypeError: model=None must be a module of Flax NNX or Equinox; parameters need fun=
    """
    whole = _traceable(model, inputs, fun, rngs)
    layouts = {path: target.layout for path, target in whole.targets.items()}
    matrices = {path: layout for path, layout in layouts.items() if isinstance(layout, MatrixLayout)}
    paths = {name: own for own in matrices for name in whole.names(own)}
    adapters = {}
    for name, (a, b, rule) in read_adapters(path, paths, lambda name: matrices[paths[name]].matrix_shape[1:]).items():
        own = paths[name]
        (value, _, placement), layout = whole.targets[own], matrices[own]
        check(value.ndim == len(layout.shape), f"{path}: {own!r} is a stack, which a file of PEFT has not")
        adapters[own] = AdaptedParam(value, LoraAdapter(a, b, layout, rule, placement))
    return whole.put(adapters.items())


def lora_mask(model: Any) -> Any:
    """Returns a pytree like a model: True for the arrays of adapters, False for all others.

    With it adapters alone are differentiated and optimized. ``equinox.partition(model, jc.nn.lora_mask(model))``
    separates them from the rest, and it is a mask for `optax.masked`.

    Args:
        model: a module of Equinox, a pytree of parameters, or variables of Linen, as from `add_lora`. (Modules of NNX
            have `flax.nnx.LoRAParam`, a filter, instead.)

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
    _with_adapters(model)

    def mask(node: Any) -> Any:
        own = jax.tree.map(lambda _: isinstance(node, LoraAdapter), node)
        return replace(own, adapter=mask(node.adapter)) if isinstance(node, AdaptedParam) else own

    return jax.tree.map(mask, model, is_leaf=lambda node: isinstance(node, LoraAdapter) or is_param_leaf(node))


# -- any model ---------------------------------------------------------------------------------------------------------


def _adaptable(
    model: Any, inputs: ExampleInputs | None = None, fun: Any = None, rngs: nnx.Rngs | None = None, key: Any = None
) -> AdaptableModel:
    """A model of any library with the data that its adapters need."""
    is_nnx, is_equinox = isinstance(model, nnx.Module), is_equinox_module(model)
    if fun is not None and (is_nnx or is_equinox):
        raise TypeError("fun is for parameters of a function; a module of Flax NNX or Equinox has methods")
    if is_nnx:
        return adaptable_nnx(model, inputs, rngs)
    if rngs is not None:
        raise TypeError("rngs is for modules of Flax NNX; others take key=")
    kind = AdaptableEquinox if is_equinox else AdaptableLinen if is_linen(model, fun) else AdaptableModel
    return kind(model, inputs, fun, key=key)


def _traceable(model: Any, inputs: Any, fun: Any, rngs: Any, key: Any = None) -> AdaptableModel:
    """A model whose program is known."""
    if not isinstance(model, nnx.Module) and fun is None:
        check_flax_or_equinox("model", model, "; parameters need fun=")
    return _adaptable(model, inputs, fun, rngs, key)


def _with_adapters(model: Any) -> tuple[AdaptableModel, dict[str, AdaptedParam]]:
    """A model with its parameters that have adapters.

    Raises:
        ValueError: if there is none.
    """
    whole = _adaptable(model)
    check(whole.adapted, "model has no adapters; jchop.nn.add_lora makes them")
    return whole, whole.adapted


# -- one parameter -----------------------------------------------------------------------------------------------------


def _check_repackable(what: str, value: Any, placement: Any) -> None:
    if is_packed_param(value) and (placement is None or placement.rotation is not None):
        raise ValueError(f"{what}: it is packed {'by no rule' if placement is None else 'rotated'}, so it can't change")


def _adapt_param(
    rule: LoraRule, path: str, target: AdapterTarget, original: tuple[Any, Any] | None,
    draw: Callable[[int], Array],
) -> AdaptedParam:  # fmt: skip
    """The parameter of a target with a new adapter; `original` is its value before it was packed, with its layout."""
    (value, layout, placement), what = target, f"the parameter {path!r}, by {rule}"
    if isinstance(layout, str):
        raise ValueError(f"{what}: {layout}; exclude it with '!{path}'")
    if rule.init != "zeros":
        _check_repackable(what, value, placement)
    exact = None if original is None else as_matrix(original[0], original[1] or layout)
    weight, has_codes = as_matrix(value, layout), is_packed_param(value)
    a, b, base = initial_stack_adapters(rule, what, draw, weight, exact, has_codes)
    if base is not None:
        numbers = map_over_stack(base.ndim - 2, lambda one: layout.back(one[None]), base)
        value = placement.pack(numbers) if has_codes and placement is not None else numbers
    return AdaptedParam(value, LoraAdapter(a, b, layout, rule, placement))


def _merge_param(path: str, leaf: AdaptedParam, requantize: bool) -> Any:
    """A parameter with its adapter added, W + factor A B, layer by layer of a stack; packed again if `requantize`."""
    own, layout, base = leaf.adapter, leaf.adapter.layout, leaf.base
    _check_repackable(f"the parameter {path!r}", base, own.placement)

    def merge_layer(parts: tuple[Array, Array, Array]) -> Array:
        weight, a, b = parts
        return layout.back(merge_lora_weight(layout.lay(weight)[0], a, b, own.rule)[None])

    result = map_over_stack(own.stack, merge_layer, (param_numbers(base), own.lora_a, own.lora_b))
    return own.placement.pack(result) if requantize and is_packed_param(base) and own.placement is not None else result
