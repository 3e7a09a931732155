"""A model as a tree of arrays: `quantize_params` and `shard` by patterns of paths, `save` and `load` in a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jchop._common.checks import check
from jchop._common.files import json_object, short_text
from jchop._common.paths import check_path_pattern, matches_path, nearest_paths_hint
from jchop._common.settings import split_prng_key
from jchop._quantized.products.operand_layout import check_finite
from jchop._quantized.products.rule import ROUNDING_FIELDS, Location, Rule, RuleLike, as_rule_tuple, rule_index
from jchop._quantized.program.weight_layout import StoredAs
from jchop.nn._trees.equinox_modules import check_flax_or_equinox, is_equinox_module
from jchop.storage import QArray, load_safetensors, quantize, save_safetensors, shardings
from jchop.storage._array import check_group_sharding
from jchop.storage._files.safetensors import TensorFile, are_counts

Array = jax.Array


def quantize_params(params: Any, rules: RuleLike, key: Array | None = None) -> Any:
    """A pytree of parameters with those that rules match stored packed, as `jchop.QArray`.

    For models of any library: `jchop.storage.dequantize_params` gives the arrays back, within `jax.jit` each where it
    is used. The tree has no products, so the axes of a scaled format are those of the arrays themselves: for a kernel
    (in, out) blocks along the sum are ``"int4(group=32,axis=0)"``, and a scale for each output is
    ``"int8(channel=1)"``.

    Args:
        params: a pytree of arrays.
        rules: a `Rule`, or several, whose patterns are for paths of leaves (``"kernel"``), the first that matches
            counting, and which have a weight alone, or nothing.
        key: a typed key if a rule is stochastic; it is split, one for each leaf.

    Returns:
        The tree with QArrays in place of arrays. Leaves that no rule matches are the same arrays.

    Raises:
        TypeError: for rules that are none, or a matched leaf that is no array of a carrier dtype.
        ValueError: for a rule that matches no leaf or has another field than a weight; a stochastic one without a key;
            infinities or NaN in a leaf to be packed; an array without the axes that its format names.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> params = {"dense": {"kernel": jnp.ones((64, 8)), "bias": jnp.zeros(8)}}
        >>> packed = jc.nn.quantize_params(params, jc.Rule("kernel", weight="int4(group=32,axis=0)"))
        >>> packed["dense"]["kernel"].nbytes, jc.storage.dequantize_params(packed)["dense"]["kernel"].shape
        (320, (64, 8))
    """
    all_rules = as_rule_tuple(rules)
    for rule in all_rules:
        wrong = [name for name in ROUNDING_FIELDS if name != "weight" and getattr(rule, name) is not None]
        wrong += [name for name in ("layer", "operation") if getattr(rule, name) is not None]
        if wrong:
            raise ValueError(f"{rule}: parameters have a weight alone, and {', '.join(wrong)} has no effect on them")
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    if key is not None and not (isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(f"key={key!r} must be a typed key, as jax.random.key(0) gives")
    keys = [None] * len(leaves) if key is None else list(split_prng_key(key, len(leaves)))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    rule_indices = [rule_index(path, all_rules) for path in paths]
    idle_rules = [rule for index, rule in enumerate(all_rules) if index not in rule_indices]
    if idle_rules:
        raise ValueError(
            f"{', '.join(map(str, idle_rules))} matches no leaf, or only such as an earlier rule matches"
            f"{nearest_paths_hint([rule.path for rule in idle_rules], paths)}"
        )
    return jax.tree.unflatten(
        tree,
        [
            leaf if index is None else _quantize_leaf(path, leaf, all_rules[index], key)
            for path, index, (_, leaf), key in zip(paths, rule_indices, leaves, keys, strict=True)
        ],
    )


def _quantize_leaf(path: str, leaf: Any, rule: Rule, key: Array | None) -> Any:
    if rule.weight is None:
        return leaf
    try:
        array = leaf if isinstance(leaf, Array) else jnp.asarray(leaf)
        qarray = quantize(array, rule.weight, key)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the leaf {path!r}, by {rule}: {error}") from None
    check_finite(array, f"weight of the {Location('leaf', path, rule)}")
    return qarray


def shard(model: Any, mesh: Mesh, rules: Mapping[str, PartitionSpec]) -> Any:
    """A model, or any pytree, placed on the devices of a mesh: packed parameters too, between their groups.

    Args:
        model: a module of Flax NNX; or a pytree of arrays and QArrays, such as variables of Linen, parameters, or the
            state of an optimizer.
        mesh: the mesh.
        rules: `jax.sharding.PartitionSpec` by patterns ([](patterns.md)) for paths such as ``layers/0/kernel``; the
            first that matches counts. Its entries are for the axes of the array as it is stored. Arrays that no pattern
            matches are copied to every device.

    Returns:
        A module or tree like `model`, of the same numbers.

    Raises:
        TypeError: for rules that are not PartitionSpecs by patterns.
        ValueError: for a pattern that matches no array, a mesh axis that does not exist, an array without so many axes,
            or a rule that cuts an axis unevenly or cuts groups; the message says which sizes of the mesh axis fit.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> params = {"kernel": jc.quantize(jnp.ones((64, 32)), "int4(group=16)"), "bias": jnp.zeros(32)}
        >>> placed = jc.nn.shard(params, mesh, {"kernel": P("fsdp")})
        >>> [tuple(part.sharding.spec) for part in (placed["kernel"].qvalue, placed["kernel"].scale)]
        [('fsdp', None), ('fsdp', None)]
    """
    _check_partition_rules(mesh, rules)
    arrays, rebuild = split_arrays(model)
    return rebuild(_shard_tree(arrays, mesh, rules))


def split_arrays(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The arrays of a model as a pytree, and a function that gives a model like it of other arrays."""
    if isinstance(model, nnx.Module):
        graph, state = nnx.split(nnx.merge(*nnx.split(model), copy=True))  # with variables of its own

        def rebuild_module(arrays: Any) -> Any:
            nnx.replace_by_pure_dict(state, arrays)
            return nnx.merge(graph, state)

        return nnx.to_pure_dict(state), rebuild_module
    if not is_equinox_module(model):
        return model, lambda arrays: arrays
    is_array = lambda leaf: isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)  # noqa: E731

    def rebuild_equinox_module(arrays: Any) -> Any:
        leaves = iter(jax.tree.leaves(arrays))
        return jax.tree.map(lambda leaf: next(leaves) if is_array(leaf) else leaf, model)

    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, model), rebuild_equinox_module


def _check_partition_rules(mesh: Any, rules: Any) -> None:
    if not isinstance(rules, Mapping) or not all(isinstance(spec, PartitionSpec) for spec in rules.values()):
        raise TypeError(f"rules={rules!r} must map patterns to jax.sharding.PartitionSpec")
    for pattern, spec in rules.items():
        check_path_pattern("rules", pattern)
        for entry in spec:
            for axis in entry if isinstance(entry, tuple) else (entry,):
                if axis is not None and axis not in mesh.axis_names:
                    raise ValueError(f"rules[{pattern!r}]={spec}: the mesh has no axis {axis!r}; its axes: "
                                     f"{mesh.axis_names}")  # fmt: skip


def _shard_tree(tree: Any, mesh: Mesh, rules: Mapping[str, PartitionSpec]) -> Any:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, QArray))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    patterns = [next((pattern for pattern in rules if matches_path(pattern, path)), None) for path in paths]
    if idle := [pattern for pattern in rules if pattern not in patterns]:
        raise ValueError(f"rules: {', '.join(map(repr, idle))} matches no array, or only such as an earlier pattern "
                         f"matches{nearest_paths_hint(idle, paths)}")  # fmt: skip
    specs = [PartitionSpec() if pattern is None else rules[pattern] for pattern in patterns]
    return structure.unflatten(
        [
            _shard_leaf(path, leaf, NamedSharding(mesh, spec))
            for path, (_, leaf), spec in zip(paths, leaves, specs, strict=True)
        ]
    )


def _shard_leaf(path: str, leaf: Any, sharding: NamedSharding) -> Any:
    ndim = len(getattr(leaf, "shape", ()))
    spec = sharding.spec
    check(len(spec) <= ndim, f"{path}: {spec} names {len(spec)} axes, and the array has {ndim}")
    if isinstance(leaf, QArray):
        check_group_sharding(leaf, sharding, path)
        return jax.device_put(leaf, shardings(leaf, sharding))
    try:
        return jax.device_put(leaf, sharding)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


#: The metadata key for packed parameters that are stored in another shape than their own: JSON, which maps the name of
#: each to its shape, and to how many axes the stored array has for one of a stack.
LAYOUTS_METADATA_KEY = "jchop.packed"


def save(path: str | os.PathLike[str], model: Any, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes the arrays of a Flax model, quantized or not, to a safetensors file for `load`.

    Packed parameters stay packed. The names of tensors are paths in the model (``layers.0.kernel.qvalue``,
    ``params.Dense_0.bias``), as in `jchop.save_safetensors`.

    Args:
        path: path of the file, which is created in one step.
        model: a module of Flax NNX or Equinox, or the variables of a Linen module, as `pack` of a
            quantized one gives them.
        metadata: texts for the header of the file. Default: none.

    Raises:
        TypeError: for another model, or metadata that is not text.
        ValueError, OSError: as `jchop.save_safetensors`.

    Example:
        >>> import tempfile, pathlib, jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> dense = jc.nn.quantize(linen.Dense(2), jc.Rule(weight="int4(group=all)"))
        >>> x = jnp.ones((1, 8))
        >>> variables = dense.pack(dense.init(jax.random.key(0), x), x)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> jc.nn.save(path, variables)
        >>> bool((dense.apply(jc.nn.load(path), x) == dense.apply(variables, x)).all())
        True
    """
    if not isinstance(model, Mapping):
        check_flax_or_equinox("model", model, ", or variables of a Linen module")
    model, _ = split_arrays(model)
    if metadata is not None and LAYOUTS_METADATA_KEY in metadata:
        raise ValueError(f"metadata has an entry {LAYOUTS_METADATA_KEY!r}, which is jchop's own")
    layouts = {
        _tensor_name(keys): {"shape": leaf.shape, "axes": leaf.ndim_stored}
        for keys, leaf in jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_packed_leaf)[0]
        if isinstance(leaf, StoredAs)
    }
    if layouts:
        metadata = {**(metadata or {}), LAYOUTS_METADATA_KEY: json.dumps(layouts)}
    save_safetensors(path, _storable_tree(model), metadata=metadata)


def load(path: str | os.PathLike[str], like: Any = None) -> Any:
    """A model that was written by `save`.

    Args:
        path: path of the file.
        like: a module of Flax NNX with the structure, specs, shapes and dtypes of the saved one; under
            `flax.nnx.eval_shape` its construction allocates no arrays. Or a module of Equinox (under
            `equinox.filter_eval_shape`), or variables of Linen, which are compared in the same way. Default: none, for
            variables of Linen.

    Returns:
        A new module with the arrays of the file, or variables in nested dicts. Typed keys of random streams are
        restored in a module; without `like` they are arrays of integers.

    Raises:
        ValueError: for an invalid file, or one that differs from `like`; the message names the array.
        OSError: if it cannot be read.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> def quantized():
        ...     return jc.nn.quantize(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jc.Rule(weight="int4(group=all)"), "ptq")
        >>> path, model = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors", quantized()
        >>> jc.nn.save(path, model)
        >>> loaded = jc.nn.load(path, nnx.eval_shape(quantized))
        >>> bool((loaded(jnp.ones((1, 8))) == model(jnp.ones((1, 8)))).all()), loaded.kernel[...].nbytes
        (True, 32)
    """
    if like is not None:
        if not isinstance(like, Mapping):
            check_flax_or_equinox("like", like, ", or variables of a Linen module")
        like_tree, rebuild = split_arrays(like)
        file_tree = load_safetensors(path, like=_storable_tree(like_tree))
        return rebuild(jax.tree.map(_restore_leaf, like_tree, file_tree, is_leaf=_is_packed_leaf))
    with TensorFile(path) as file:
        layouts_text = file.metadata.get(LAYOUTS_METADATA_KEY, "{}")
    file_tree = load_safetensors(path, nested=True)
    try:
        layouts = json_object(layouts_text)
        path_leaves, tree = jax.tree_util.tree_flatten_with_path(
            file_tree, is_leaf=lambda leaf: _is_packed_leaf(leaf) or _has_factors(leaf)
        )
        leaves = {_tensor_name(keys): leaf for keys, leaf in path_leaves}
        if unknown := set(layouts) - set(leaves):
            raise ValueError(f"there is no array {short_text(min(unknown))}")
        leaves |= {name: _restore_packed_param(leaves[name], fields) for name, fields in layouts.items()}
    except ValueError as error:
        raise ValueError(f"{path}: bad metadata {LAYOUTS_METADATA_KEY!r} ({error})") from None
    return jax.tree.unflatten(tree, leaves.values())


# -- leaves that a file cannot hold as they are ------------------------------------------------------------------------


def _storable_tree(tree: Any) -> Any:
    """A tree of arrays and QArrays: packed parameters without their layout, typed keys as integers."""
    return jax.tree.map(_storable_leaf, tree, is_leaf=_is_packed_leaf)


def _storable_leaf(leaf: Any) -> Any:
    if isinstance(leaf, StoredAs):
        return leaf.stored if leaf.input_factors is None else {name: getattr(leaf, name) for name in _WITH_FACTORS}
    if _is_typed_key(leaf):
        return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)
    return leaf


def _restore_leaf(like: Any, leaf: Any) -> Any:
    """A leaf that `_storable_leaf` gave, as it is in a tree like the one given to that."""
    if isinstance(like, StoredAs):
        return replace(like, **(leaf if _has_factors(leaf) else {"stored": leaf}))
    if _is_typed_key(like):
        key_impls: list[Any] = []
        jax.eval_shape(lambda key: key_impls.append(jax.random.key_impl(key)), like)
        return jax.random.wrap_key_data(leaf, impl=key_impls[0])
    return leaf


def _restore_packed_param(array: Any, fields: Any) -> StoredAs:
    """A packed parameter of a shape that a file says.

    Raises:
        ValueError: if that is no shape of the stored array.
    """
    factors = None
    if _has_factors(array):
        array, factors = (array[name] for name in _WITH_FACTORS)
    if not isinstance(fields, dict) or set(fields) != {"shape", "axes"} or not are_counts(fields["shape"]):
        raise ValueError(f"{short_text(fields)} must be an object of shape, a list of integers >= 0, and axes")
    if not isinstance(array, QArray):
        raise ValueError(f"an array of shape {list(array.shape)} is stored, and {short_text(fields)} needs a QArray")
    shape, axes = tuple(fields["shape"]), fields["axes"]
    stack = array.ndim - axes if are_counts([axes]) and axes else -1
    if (
        not 0 <= stack <= len(shape)
        or array.shape[:stack] != shape[:stack]
        or math.prod(array.shape) != math.prod(shape)
    ):
        raise ValueError(f"{short_text(fields)} is no shape of a QArray of shape {list(array.shape)}")
    if factors is not None and not (
        len(factors.shape) == len(shape) and all(n in (1, m) for n, m in zip(factors.shape, shape, strict=True))
    ):
        raise ValueError(f"input_factors of shape {list(factors.shape)} do not fit {short_text(fields)}")
    return StoredAs(array, shape[stack:], axes, factors)


#: The parts in which a file holds a packed parameter whose inputs have factors.
_WITH_FACTORS = ("stored", "input_factors")


def _has_factors(leaf: Any) -> bool:
    return isinstance(leaf, dict) and set(leaf) == set(_WITH_FACTORS)


def _tensor_name(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def _is_packed_leaf(leaf: Any) -> bool:
    return isinstance(leaf, StoredAs | QArray)


def _is_typed_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
