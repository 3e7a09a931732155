"""Low-rank adapters (LoRA) beside the layers of a Linen module: a collection of variables, which trains alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.traverse_util import flatten_dict, unflatten_dict

from jchop._common.checks import check_bool, short_repr
from jchop._common.paths import matches_path
from jchop._common.settings import split_prng_key
from jchop._quantized.products.rule import ROUNDING_FIELDS, Rule
from jchop._round.arguments import check_key
from jchop.nn._linen.layer_kinds import LINEN_KINDS
from jchop.nn._linen.layers import (
    LinenPath,
    linen_layer_rules,
    linen_params,
    linen_rule_index,
    match_linen_layers,
    module_calls,
)
from jchop.nn._linen.quantized import Packed, Quantized, unpack_variables
from jchop.nn._shared.lora_rule import (
    LoraRule,
    add_adapter_output,
    as_lora_rules,
    check_lora_rules_match,
    initial_adapter,
    merge_lora_weight,
    weight_as_matrix,
)
from jchop.nn._shared.peft_files import read_adapters, write_adapters

Array = jax.Array

__all__ = ["LORA_COLLECTION", "Adapted", "add_lora", "load_lora", "merge_lora", "save_lora", "split_lora"]

#: The collection of adapters, and the arrays of each.
LORA_COLLECTION, _ADAPTER_ARRAYS = "lora", ("lora_a", "lora_b")
#: The layers that may have one.
_DENSE_LAYERS = nn.Dense, nn.DenseGeneral


@dataclass(frozen=True)
class Adapted:
    """A module with adapters, ``y + factor * (x A B)`` for the result y of a layer; a result of `add_lora`.

    Args:
        module: a module of Linen, or a `Quantized` one.
        rules: the rule of each adapter, by the path of its layer.
    """

    module: nn.Module | Quantized
    rules: tuple[tuple[str, LoraRule], ...]

    def apply(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """The result of the module with its adapters, with the arguments of Linen's `apply`.

        Args:
            variables: as from `add_lora`; adapters are in the collection ``"lora"``.
            args: arguments of the module.
            rngs: streams of keys by name. With a stream ``"dropout"`` adapters have the dropout of their rules.
            kwargs: of the module and of Linen's `apply`.

        Raises:
            ValueError: for variables without these adapters, or an adapter of a layer that is no Dense or DenseGeneral.
        """
        base, adapters = _split_adapters(self, variables)
        with nn.intercept_methods(_AdapterInterceptor(adapters)):
            return self.module.apply(base, *args, rngs=rngs, **kwargs)


@dataclass(frozen=True, eq=False)
class _AdapterInterceptor:
    """An interceptor for `flax.linen.intercept_methods` that adds what adapters give."""

    adapters: Mapping[str, Mapping[str, Any]]

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        adapter = self.adapters.get("/".join(layer.path))
        y = call(*args, **kwargs)
        if adapter is None or context.method_name != "__call__":
            return y
        if not isinstance(layer, _DENSE_LAYERS):
            raise ValueError(_not_dense_message(layer, "/".join(layer.path)))
        rule, inputs = adapter["rule"], args[0] if args else kwargs["inputs"]
        if rule.dropout and layer.has_rng("dropout"):
            mask = jax.random.bernoulli(layer.make_rng("dropout"), 1 - rule.dropout, inputs.shape)
            inputs = jnp.where(mask, inputs / (1 - rule.dropout), 0)
        x, a, b = promote_dtype(inputs, adapter["lora_a"], adapter["lora_b"], dtype=layer.dtype)
        return add_adapter_output(y, x, a, b, _dense_axes(layer)[0], rule)


def add_lora(
    module: nn.Module | Quantized,
    variables: Any,
    rules: LoraRule | Iterable[LoraRule],
    *args: Any,
    key: Array,
    original: Any = None,
    rngs: Any = None,
    **kwargs: Any,
) -> tuple[Adapted, Any]:
    """Adapters beside the Dense and DenseGeneral layers of a module of Linen, whatever their weights are packed in.

    Adapters are variables in the collection ``"lora"``. To train them alone, differentiate these:
    ``jax.grad(lambda lora: loss(adapted.apply({**variables, "lora": lora}, x)))(variables["lora"])``.

    Args:
        module: a module of Linen, or a result of `quantize` without `program`.
        variables: its variables, packed or not.
        rules: a `LoraRule`, or several; the first that matches a layer's path applies.
        args: example arguments of the module, of which only shapes are used.
        key: a typed key for the first values of A.
        original: the variables before they were packed, which "loftq" and "pissa" need for packed layers. Default None.
        rngs: streams of keys of the module, by name.
        kwargs: as of `apply`.

    Returns:
        The module with adapters, and the variables with theirs.

    Raises:
        TypeError: for rules or a module that are none.
        ValueError: for a rule that matches no linear layer, a layer that is no Dense or DenseGeneral with one matrix, a
            rank above its sizes with "loftq" or "pissa", a missing `original`, or variables that have adapters.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> x = jnp.ones((3, 64))
        >>> dense = jc.nn.linen.quantize(linen.Dense(8), jc.nn.Rule(weight="nf4"))
        >>> packed = dense.pack(dense.init(jax.random.key(0), x), x)
        >>> rule = jc.nn.LoraRule("*", rank=4, alpha=8)
        >>> adapted, variables = jc.nn.linen.add_lora(dense, packed, rule, x, key=jax.random.key(1))
        >>> bool((adapted.apply(variables, x) == dense.apply(packed, x)).all()), variables["lora"]["lora_a"].shape
        (True, (64, 4))
    """
    lora_rules, plain = as_lora_rules(rules), _linen_module_of(module)
    check_key("key", key)
    if LORA_COLLECTION in variables:
        raise ValueError("variables have adapters already; merge_lora or split_lora takes them out")
    shapes = jax.eval_shape(unpack_variables, variables)
    calls = module_calls(plain, shapes, args, rngs, kwargs)
    params, original_params = dict(linen_params(variables)), linen_params({} if original is None else original)
    new_adapters: dict[LinenPath, Array] = {}
    base_weights: dict[LinenPath, Array] = {}
    layer_rules: dict[str, LoraRule] = {}
    used: set[int] = set()
    for path, (layer, _) in sorted(calls.items()):
        layer_path = "/".join(path)
        index = next((i for i, rule in enumerate(lora_rules) if matches_path(rule.path, layer_path)), None)
        kernel = params.get((*path, "kernel"))
        if index is None or kernel is None:
            continue
        used.add(index)
        rule, has_codes = lora_rules[index], isinstance(kernel, Packed)
        if not isinstance(layer, _DENSE_LAYERS):
            raise ValueError(f"{_not_dense_message(layer, layer_path)}; exclude the layer with '!{layer_path}'")
        key, layer_key = split_prng_key(key)
        axis_counts = tuple(map(len, _dense_axes(layer)))
        exact = (
            weight_as_matrix(_linen_param_numbers(original_params[*path, "kernel"]), *axis_counts)
            if (*path, "kernel") in original_params
            else None
        )
        what = f"{type(layer).__name__} at {layer_path!r}, by {rule}"
        weight = weight_as_matrix(_linen_param_numbers(kernel), *axis_counts)
        a, b, base = initial_adapter(rule, what, lambda layer_key=layer_key: layer_key, weight, exact, has_codes)
        new_adapters |= {(*path, "lora_a"): a, (*path, "lora_b"): b}
        base_weights |= {} if base is None else {path: base}
        layer_rules[layer_path] = rule
    check_lora_rules_match(lora_rules, used, ["/".join(path) for path in calls])
    if base_weights:
        matches = (
            match_linen_layers(plain, module.rules, shapes, args, rngs, kwargs) if isinstance(module, Quantized) else {}
        )
        params |= {
            (*path, "kernel"): _replace_param_value(params[*path, "kernel"], rest, matches.get(path))
            for path, rest in base_weights.items()
        }
    result = {**variables, "params": unflatten_dict(params), LORA_COLLECTION: unflatten_dict(new_adapters)}
    return Adapted(module, tuple(sorted(layer_rules.items()))), result


def merge_lora(
    adapted: Adapted, variables: Any, *args: Any, requantize: bool = False, rngs: Any = None, **kwargs: Any
) -> tuple[nn.Module | Quantized, Any]:
    """The module without adapters, and its variables with the adapters added to the weights, W + factor A B.

    Args:
        adapted: as from `add_lora`.
        variables: those of it.
        args: example arguments of the module, of which only shapes are used.
        requantize: whether a packed weight is packed again by its rule, which rounds the sum. Default False: the weight
            is in full precision, and its rule has no effect any more.
        rngs: streams of keys of the module, by name.
        kwargs: as of `apply`.

    Returns:
        The module, a plain one if no rule is left that rounds, and the variables.

    Raises:
        ValueError: for variables without these adapters.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> dense, x = linen.Dense(8), jnp.ones((3, 64))
        >>> plain, rule = dense.init(jax.random.key(0), x), jc.nn.LoraRule("*", rank=4)
        >>> adapted, variables = jc.nn.linen.add_lora(dense, plain, rule, x, key=jax.random.key(1))
        >>> module, merged = jc.nn.linen.merge_lora(adapted, variables, x)
        >>> type(module).__name__, bool((merged["params"]["kernel"] == plain["params"]["kernel"]).all())
        ('Dense', True)
    """
    check_bool("requantize", requantize)
    base, adapters = _split_adapters(adapted, variables)
    module, plain, params = adapted.module, _linen_module_of(adapted.module), dict(linen_params(base))
    shapes = jax.eval_shape(unpack_variables, base)
    rules = module.rules if isinstance(module, Quantized) else ()
    matches = match_linen_layers(plain, rules, shapes, args, rngs, kwargs) if requantize and rules else {}
    packed_paths = [place for place in adapters if isinstance(params[*_linen_path(place), "kernel"], Packed)]
    for layer_path, adapter in adapters.items():
        kernel = params[*(path := _linen_path(layer_path)), "kernel"]
        weight = merge_lora_weight(_linen_param_numbers(kernel), adapter["lora_a"], adapter["lora_b"], adapter["rule"])
        params[*path, "kernel"] = _replace_param_value(kernel, weight, matches.get(path))
    result = {**base, "params": unflatten_dict(params)}
    if requantize or not packed_paths:
        return module, result
    remaining = _rules_excluding_layers(rules, packed_paths, module_calls(plain, shapes, args, rngs, kwargs), shapes)
    return (Quantized(plain, remaining) if any(rule.rounds for rule in remaining) else plain), result


def split_lora(adapted: Adapted, variables: Any) -> tuple[nn.Module | Quantized, Any, dict[str, dict[str, Any]]]:
    """The module without its adapters, its variables, and the adapters by path.

    Args:
        adapted: as from `add_lora`.
        variables: those of it.

    Returns:
        The module; its variables; and for the path of each layer a dict of ``lora_a``, ``lora_b`` and the ``rule``.

    Raises:
        ValueError: for variables without these adapters.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> dense, x = linen.Dense(8), jnp.ones((3, 64))
        >>> plain, rule = dense.init(jax.random.key(0), x), jc.nn.LoraRule("*", rank=4)
        >>> adapted, variables = jc.nn.linen.add_lora(dense, plain, rule, x, key=jax.random.key(1))
        >>> module, base, adapters = jc.nn.linen.split_lora(adapted, variables)
        >>> module is dense, list(base), adapters[""]["lora_b"].shape
        (True, ['params'], (4, 8))
    """
    return adapted.module, *_split_adapters(adapted, variables)


def save_lora(folder: str | os.PathLike[str], adapted: Adapted, variables: Any) -> None:
    """Writes the adapters alone to a folder, in the layout of PEFT, as `jchop.nn.save_lora` does.

    Args:
        folder: a folder, which is created.
        adapted: as from `add_lora`.
        variables: those of it.

    Raises:
        ValueError: for variables without these adapters, or several rates of dropout, which PEFT does not have.
        OSError: if a file cannot be written.

    Example:
        >>> import tempfile, pathlib, jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> net, x = linen.Sequential([linen.Dense(8), linen.relu]), jnp.ones((3, 64))
        >>> plain, rule = net.init(jax.random.key(0), x), jc.nn.LoraRule("*", rank=4)
        >>> adapted, variables = jc.nn.linen.add_lora(net, plain, rule, x, key=jax.random.key(1))
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> jc.nn.linen.save_lora(folder, adapted, variables)
        >>> again, loaded = jc.nn.linen.load_lora(folder, net, plain)
        >>> bool((again.apply(loaded, x) == adapted.apply(variables, x)).all())
        True
    """
    write_adapters(folder, _split_adapters(adapted, variables)[1])


def load_lora(folder: str | os.PathLike[str], module: nn.Module | Quantized, variables: Any) -> tuple[Adapted, Any]:
    """A module with the adapters of a folder of `save_lora` or PEFT.

    Args:
        folder: with ``adapter_model.safetensors`` and ``adapter_config.json``.
        module: a module of Linen, or a result of `quantize` without `program`.
        variables: its variables, packed or not, without adapters; names in the file are paths of its layers.

    Returns:
        The module with adapters, and the variables with theirs, as from `add_lora`.

    Raises:
        ValueError: for damaged files, names that are no layer with a kernel, or other shapes.
        OSError: if a file cannot be read.

    Example:
        >>> import jchop as jc
        >>> jc.nn.linen.load_lora("no folder", None, {})
        Traceback (most recent call last):
        TypeError: module=None must be a module of Flax Linen, or a result of jchop.nn.linen.quantize
    """
    _linen_module_of(module)
    kernels = {"/".join(path[:-1]): leaf for path, leaf in linen_params(variables).items() if path[-1] == "kernel"}
    adapters = read_adapters(folder, kernels, lambda layer_path: nn.meta.unbox(kernels[layer_path]).shape)
    arrays = {
        (*_linen_path(layer_path), name): array
        for layer_path, adapter in adapters.items()
        for name, array in zip(_ADAPTER_ARRAYS, adapter, strict=False)
    }
    rules = tuple((layer_path, adapters[layer_path][2]) for layer_path in sorted(adapters))
    return Adapted(module, rules), {**variables, LORA_COLLECTION: unflatten_dict(arrays)}


# -- parts -------------------------------------------------------------------------------------------------------------


def _linen_module_of(module: Any) -> nn.Module:
    core = module.module if isinstance(module, Quantized) else module
    if isinstance(core, nn.Module):
        return core
    raise TypeError(
        f"module={short_repr(module)} must be a module of Flax Linen, or a result of jchop.nn.linen.quantize"
    )


def _linen_path(path: str) -> LinenPath:
    return tuple(path.split("/")) if path else ()


def _not_dense_message(layer: Any, path: str) -> str:
    return f"{type(layer).__name__} at {path!r}: adapters are for flax.linen.Dense and DenseGeneral"


def _dense_axes(layer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of inputs that a layer sums over, and the sizes of the axes of its outputs."""
    axis = getattr(layer, "axis", -1)
    both = ((value,) if isinstance(value, int) else tuple(value) for value in (axis, layer.features))
    return next(both), next(both)


def _split_adapters(model: Adapted, variables: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The variables without adapters, and the adapters by path, as `split_lora` gives them."""
    base = dict(variables)
    arrays: Any = flatten_dict(dict(base.pop(LORA_COLLECTION, {})))
    array_paths = {(*_linen_path(place), part): (place, part) for place, _ in model.rules for part in _ADAPTER_ARRAYS}
    if difference := set(arrays) ^ set(array_paths):
        raise ValueError(
            f"variables['{LORA_COLLECTION}'] and the adapters of the module differ in {'/'.join(min(difference))!r}"
        )
    adapters: dict[str, dict[str, Any]] = {place: {"rule": rule} for place, rule in model.rules}
    for keys, (place, name) in array_paths.items():
        adapters[place][name] = arrays[keys]
    return base, adapters


def _linen_param_numbers(leaf: Any) -> Array:
    """The numbers of a parameter: packed, in a box, or as they are."""
    return leaf.unpack() if isinstance(leaf, Packed) else jnp.asarray(nn.meta.unbox(leaf))


def _replace_param_value(leaf: Any, weight: Array, match: Any) -> Any:
    """A new weight in the form of a parameter; a packed one is packed again as `match` says, if there is one."""
    if not isinstance(leaf, Packed):
        return nn.meta.replace_boxed(leaf, weight.reshape(nn.meta.unbox(leaf).shape))
    weight = weight.reshape(leaf.shape)
    if match is None:
        return weight
    codes, layout = match.pack_param("kernel", weight)
    return Packed(codes, layout, weight.shape)


def _rules_excluding_layers(rules: tuple[Rule, ...], paths: list[str], calls: Any, shapes: Any) -> tuple[Rule, ...]:
    """Rules that leave some layers alone, without those that then match none, and fields that then say nothing."""
    all_rules = (Rule(" ".join(f"/{place}/" if place else "/" for place in paths)), *rules)
    used: dict[int | None, set[str]] = {}
    for path, (params, _, rule) in linen_layer_rules(calls, rules, shapes).items():
        layer = calls[path][0] if path in calls else None
        kind = LINEN_KINDS.get(type(layer))
        fields = () if kind is None else {name for name in kind.fields(params) if getattr(rule, name, None) is not None}
        used.setdefault(linen_rule_index(path, layer, all_rules), set()).update(fields)
    idle_fields = {index: dict.fromkeys(name for name in ROUNDING_FIELDS if name not in used[index]) for index in used}
    return tuple(replace(rule, **idle_fields[index]) for index, rule in enumerate(all_rules) if index in used)
