"""Low-rank adapters (LoRA) beside the parameters of a Linen module: a collection of variables, which trains alone."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jchop._common.checks import check, check_bool, check_instance
from jchop._quantized.program.adapters import AdaptedParam, LoraAdapter
from jchop._quantized.program.provenance import MatrixLayout
from jchop._round.arguments import check_key
from jchop.nn._linen.quantized import (
    Quantized,
    flat_params,
    module_calls,
    nest_params,
    rules_excluding_layers,
    with_box_of,
)
from jchop.nn._shared.lora_rule import LoraRule, as_lora_rules, read_adapters, write_adapters
from jchop.nn._trees.lora import (
    AdapterTargets,
    adapter_name,
    merge_lora_tree,
    params_unpacked_by_merge,
    program_adapter_targets,
    tree_with_adapters,
)
from jchop.storage import dequantize

Array = jax.Array

#: The collection of adapters, and the arrays of each.
LORA_COLLECTION, _ADAPTER_ARRAYS = "lora", ("lora_a", "lora_b")


@dataclass(frozen=True)
class Adapted:
    """A module with adapters, which add ``factor * (x A B)`` to products; a result of `add_lora`.

    Args:
        module: a module of Linen, or a `Quantized` one.
        rules: the rule of each adapter, by the path of its layer.
        layouts: of each adapter the path of its parameter, and that as a matrix.
    """

    module: nn.Module | Quantized
    rules: tuple[tuple[str, LoraRule], ...]
    layouts: tuple[tuple[str, MatrixLayout], ...] = field(default=(), compare=False, repr=False)

    def apply(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """The result of the module with its adapters, with the arguments of Linen's `apply`.

        Args:
            variables: as from `add_lora`; adapters are in the collection ``"lora"``.
            args: arguments of the module.
            rngs: streams of keys by name. With a stream ``"dropout"`` adapters have the dropout of their rules.
            kwargs: of the module and of Linen's `apply`.

        Raises:
            ValueError: for variables without these adapters, or an adapter whose parameter other operations take.
        """
        base, adapters = _split_adapters(self, variables)
        low, drops = _as_quantized(self.module), isinstance(rngs, Mapping) and "dropout" in rngs
        key = low.key(rngs)
        if drops and key is None and any(rule.dropout for _, rule in self.rules):
            key = rngs["dropout"]
            typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            key = key if typed else jax.random.wrap_key_data(key)
        params = _params_with_adapters(self, base["params"], adapters, drops=drops)
        return low.apply_with_key(key, {**base, "params": params}, args, rngs, kwargs)


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
    """Adapters beside the parameters of a module of Linen that reach products, whatever they are packed in.

    They are those of `jchop.nn.add_lora` for parameters: beside the kernels of Dense and DenseGeneral layers, and other
    matrices, also of a stack that a scan runs over. The products of the program add ``factor * (x A B)``.

    Adapters are variables in the collection ``"lora"``. To train them alone, differentiate these:
    ``jax.grad(lambda lora: loss(adapted.apply({**variables, "lora": lora}, x)))(variables["lora"])``.

    Args:
        module: a module of Linen, or a result of `quantize`.
        variables: its variables, packed or not.
        rules: a `LoraRule`, or several; the first that matches the path of a layer, or of its parameter, applies.
        args: example arguments of the module, of which only shapes are used.
        key: a typed key for the first values of A.
        original: the variables before they were packed, which "loftq" and "pissa" need for packed layers. Default None.
        rngs: streams of keys of the module, by name.
        kwargs: as of `apply`.

    Returns:
        The module with adapters, and the variables with theirs.

    Raises:
        TypeError: for rules or a module that are none.
        ValueError: for a rule that matches no linear layer, a parameter that other operations than products of matrices
            take, a rank above its sizes with "loftq" or "pissa", a missing `original`, or variables that have adapters.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> x = jnp.ones((3, 64))
        >>> dense = jc.nn.linen.quantize(linen.Dense(8), jc.Rule(weight="nf4"))
        >>> packed = dense.pack(dense.init(jax.random.key(0), x), x)
        >>> rule = jc.nn.LoraRule("*", rank=4, alpha=8)
        >>> adapted, variables = jc.nn.linen.add_lora(dense, packed, rule, x, key=jax.random.key(1))
        >>> bool((adapted.apply(variables, x) == dense.apply(packed, x)).all()), variables["lora"]["lora_a"].shape
        (True, (64, 4))
    """
    lora_rules, low = as_lora_rules(rules), _as_quantized(module)
    check_key("key", key)
    check(LORA_COLLECTION not in variables, "variables have adapters already; merge_lora or split_lora takes them out")
    targets = program_adapter_targets([low.traced(variables, args, rngs, kwargs)])
    exact = None if original is None else dict(original)["params"]
    leaves = flat_params(tree_with_adapters(dict(variables)["params"], lora_rules, key, targets, exact))
    adapted: dict[str, AdaptedParam] = {
        name: value for name, leaf in leaves.items() if isinstance(value := nn.meta.unbox(leaf), AdaptedParam)
    }
    leaves |= {name: with_box_of(leaves[name], value.base) for name, value in adapted.items()}
    order = sorted(adapted, key=_layer_name)
    result = Adapted(
        module,
        tuple((_layer_name(name), adapted[name].adapter.rule) for name in order),
        tuple((name, adapted[name].adapter.layout) for name in order),
    )
    arrays = {name: (adapted[name].adapter.lora_a, adapted[name].adapter.lora_b) for name in order}
    return result, {**variables, "params": nest_params(leaves), LORA_COLLECTION: _lora_collection(arrays)}


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
    module, low = adapted.module, _as_quantized(adapted.module)
    targets = program_adapter_targets([low.traced(base, args, rngs, kwargs)])
    params = _params_with_adapters(adapted, base["params"], adapters, targets)
    result = {**base, "params": merge_lora_tree(params, requantize)}
    names = params_unpacked_by_merge(params, requantize)
    if not names:
        return module, result
    calls = module_calls(low.module, dequantize(base), args, rngs, kwargs)
    remaining = rules_excluding_layers(low.rules, [_layer_name(name) for name in names], calls)
    return (Quantized(low.module, remaining) if any(rule.rounds for rule in remaining) else low.module), result


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
        module: a module of Linen, or a result of `quantize`.
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
    _as_quantized(module)
    leaves = {name: nn.meta.unbox(leaf) for name, leaf in flat_params(dict(variables)["params"]).items()}
    kernels = {_layer_name(name): name for name in leaves if name.rpartition("/")[2] == "kernel"}
    adapters = read_adapters(folder, kernels, lambda name: tuple(leaves[kernels[name]].shape))
    order = sorted(adapters)
    layouts = {}
    for name in order:
        shape, axes = tuple(leaves[kernels[name]].shape), range(len(leaves[kernels[name]].shape))
        split = next(i for i in axes[1:] if math.prod(shape[:i]) == adapters[name][0].shape[0])
        layouts[kernels[name]] = MatrixLayout(shape, shape, (), tuple(axes[:split]), tuple(axes[split:]))
    result = Adapted(module, tuple((name, adapters[name][2]) for name in order), tuple(layouts.items()))
    arrays = {kernels[name]: adapters[name][:2] for name in order}
    return result, {**variables, LORA_COLLECTION: _lora_collection(arrays)}


# -- parts -------------------------------------------------------------------------------------------------------------


def _as_quantized(module: Any) -> Quantized:
    """A module under its rules; a plain one under none."""
    if isinstance(module, Quantized):
        return module
    words = "a module of Flax Linen, or a result of jchop.nn.linen.quantize"
    return Quantized(check_instance("module", module, nn.Module, words), ())


def _layer_name(name: str) -> str:
    """The path of the layer whose kernel a parameter is; of another one its own."""
    return "" if name == "kernel" else adapter_name(name)


def _array_path(layer: str, part: str) -> str:
    return f"{layer}/{part}".lstrip("/")


def _lora_collection(arrays: Mapping[str, tuple[Array, Array]]) -> dict[str, Any]:
    """The collection of adapters, from their arrays by the paths of their parameters."""
    pairs = [(_layer_name(name), zip(_ADAPTER_ARRAYS, both, strict=True)) for name, both in arrays.items()]
    return nest_params({_array_path(layer, part): array for layer, parts in pairs for part, array in parts})


def _params_with_adapters(
    adapted: Adapted,
    params: Any,
    adapters: Mapping[str, Any],
    targets: AdapterTargets | None = None,
    drops: bool = True,
) -> Any:
    """The parameters, those with adapters as `AdaptedParam`; with dropout if the call `drops`."""
    leaves = flat_params(params)
    for name, layout in adapted.layouts:
        adapter = adapters[_layer_name(name)]
        rule = adapter["rule"] if drops else replace(adapter["rule"], dropout=0.0)
        placement = None if targets is None else targets[name][2]
        lora = LoraAdapter(adapter["lora_a"], adapter["lora_b"], layout, rule, placement)
        leaves[name] = with_box_of(leaves[name], AdaptedParam(nn.meta.unbox(leaves[name]), lora))
    return nest_params(leaves)


def _split_adapters(model: Adapted, variables: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The variables without adapters, and the adapters by path, as `split_lora` gives them."""
    base = dict(variables)
    arrays = flat_params(base.pop(LORA_COLLECTION, {}))
    array_paths = {_array_path(name, part): (name, part) for name, _ in model.rules for part in _ADAPTER_ARRAYS}
    if difference := set(arrays) ^ set(array_paths):
        raise ValueError(f"variables['{LORA_COLLECTION}'] and the adapters of the module differ in {min(difference)!r}")
    adapters: dict[str, dict[str, Any]] = {name: {"rule": rule} for name, rule in model.rules}
    for keys, (name, part) in array_paths.items():
        adapters[name][part] = arrays[keys]
    return base, adapters
