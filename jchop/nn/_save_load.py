"""`save` and `load`: quantized models in safetensors files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jchop._common.checks import short_repr
from jchop._quantized.program.weight_layout import StoredAs
from jchop.nn._trees.equinox_modules import is_array_leaf, is_equinox_module, module_arrays
from jchop.storage import QArray, load_safetensors, save_safetensors
from jchop.storage._files.json import json_object, short_text
from jchop.storage._files.safetensors import TensorFile, are_counts

#: The metadata key for packed parameters that are stored in another shape than their own: JSON, which maps the name of
#: each to its shape, and to how many axes the stored array has for one of a stack.
LAYOUTS_METADATA_KEY = "jchop.packed"


def save(path: str | os.PathLike[str], model: Any, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes the arrays of a Flax model, quantized or not, to a safetensors file for `load`.

    Packed parameters stay packed. The names of tensors are paths in the model (``layers.0.kernel.qvalue``,
    ``params.Dense_0.bias``), as in `jchop.save_safetensors`.

    Args:
        path: path of the file, which is created in one step.
        model: a module of Flax NNX or Equinox, or the variables of a Linen module, as from
            `jchop.nn.linen.Quantized.pack`.
        metadata: texts for the header of the file. Default: none.

    Raises:
        TypeError: for another model, or metadata that is not text.
        ValueError, OSError: as `jchop.save_safetensors`.

    Example:
        >>> import tempfile, pathlib, jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> dense = jc.nn.linen.quantize(linen.Dense(2), jc.Rule(weight="int4(group=all)"))
        >>> x = jnp.ones((1, 8))
        >>> variables = dense.pack(dense.init(jax.random.key(0), x), x)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> jc.nn.save(path, variables)
        >>> bool((dense.apply(jc.nn.load(path), x) == dense.apply(variables, x)).all())
        True
    """
    if isinstance(model, nnx.Module):
        model = nnx.to_pure_dict(nnx.state(model))
    elif is_equinox_module(model):
        model = module_arrays(model)
    elif not isinstance(model, Mapping):
        raise TypeError(
            f"model={short_repr(model)} must be a module of Flax NNX or Equinox, or variables of a Linen module"
        )
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
    if like is not None and not isinstance(like, nnx.Module | Mapping) and not is_equinox_module(like):
        raise TypeError(
            f"like={short_repr(like)} must be a module of Flax NNX or Equinox, or variables of a Linen module"
        )
    if isinstance(like, nnx.Module):
        graph, state = nnx.split(nnx.merge(*nnx.split(like), copy=True))  # with variables of its own
        like_tree = nnx.to_pure_dict(state)
        file_tree = load_safetensors(path, like=_storable_tree(like_tree))
        nnx.replace_by_pure_dict(state, jax.tree.map(_restore_leaf, like_tree, file_tree, is_leaf=_is_packed_leaf))
        return nnx.merge(graph, state)
    if is_equinox_module(like):
        like_tree = module_arrays(like)
        file_tree = load_safetensors(path, like=_storable_tree(like_tree))
        model_tree = jax.tree.map(_restore_leaf, like_tree, file_tree, is_leaf=_is_packed_leaf)
        arrays = iter(jax.tree.leaves(model_tree))
        return jax.tree.map(lambda leaf: next(arrays) if is_array_leaf(leaf) else leaf, like)
    if like is not None:
        file_tree = load_safetensors(path, like=_storable_tree(like))
        return jax.tree.map(_restore_leaf, like, file_tree, is_leaf=_is_packed_leaf)
    with TensorFile(path) as file:
        layouts_text = file.metadata.get(LAYOUTS_METADATA_KEY, "{}")
    file_tree = load_safetensors(path, nested=True)
    try:
        layouts = json_object(layouts_text)
        path_leaves, tree = jax.tree_util.tree_flatten_with_path(file_tree, is_leaf=_is_packed_leaf)
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
        return leaf.stored
    if _is_typed_key(leaf):
        return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)
    return leaf


def _restore_leaf(like: Any, leaf: Any) -> Any:
    """A leaf that `_storable_leaf` gave, as it is in a tree like the one given to that."""
    if isinstance(like, StoredAs):
        return replace(like, stored=leaf)
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
    return StoredAs(array, shape[stack:], axes)


def _tensor_name(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def _is_packed_leaf(leaf: Any) -> bool:
    return isinstance(leaf, StoredAs | QArray)


def _is_typed_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
