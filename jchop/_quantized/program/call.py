"""The arguments of a call of a function of parameters, taken apart; batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.bit_ops import CARRIERS
from jchop._quantized.program.adapters import AdaptedParam, LoraAdapter
from jchop._quantized.program.provenance import FROM_DATA, FROM_KEYS, NO_PROVENANCE, Provenance, param_provenance
from jchop._quantized.program.weight_layout import StoredAs
from jchop.storage import QArray

Array = jax.Array


def batch_arguments(batch: Any) -> tuple[Any, ...]:
    """The arguments of a call that a batch stands for: a tuple of them, or the only one."""
    return batch if isinstance(batch, tuple) else (batch,)


def enumerate_batches(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Batches with their numbers, from 1.

    Raises:
        ValueError: at the end, if there was none.
    """
    count = 0
    for count, batch in enumerate(batches, start=1):
        yield count, batch
    if not count:
        raise ValueError("batches has no batch")


class CallArguments:
    """The arguments of a call, taken apart: the arrays of the parameters, then those of the others.

    The values of parameters with adapters are these without, and `adapters` has those, by the number of the parameter.
    """

    def __init__(self, params: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        leaves_with_path, self.tree = jax.tree_util.tree_flatten_with_path(
            ((params, *args), kwargs), is_leaf=is_param_leaf
        )
        self.leaves = [leaf for _, leaf in leaves_with_path]
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, _ARRAY_LEAF_TYPES)]
        array_leaves = [self.leaves[i] for i in self.places]
        self.adapters: dict[int, LoraAdapter] = {
            i: x.adapter for i, x in enumerate(array_leaves) if isinstance(x, AdaptedParam)
        }
        self.values = [x.base if isinstance(x, AdaptedParam) else x for x in array_leaves]
        paths = (leaves_with_path[i][0] for i in self.places)
        self.keys = tuple(_strip_box(path[2:]) for path in paths if path[:2] == _PATH_OF_PARAMS)
        self.paths = tuple(jax.tree_util.keystr(keys, simple=True, separator="/") for keys in self.keys)
        self.count = len(self.keys)
        self.params = params
        self.abstract = [x if isinstance(x, Array) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.values]

    def with_values(self, values: Sequence[Any]) -> Any:
        """The arguments, ``((params, ...), keywords)``, with other arrays in their places."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(self.tree, leaves)

    @property
    def classes(self) -> dict[str, str]:
        """The class of the node of the pytree that holds each parameter, by the path of the parameter."""
        return {path: _holder_class(self.params, keys) for path, keys in zip(self.paths, self.keys, strict=True)}

    @property
    def facts(self) -> list[Provenance]:
        """What is known of the arrays."""
        facts = []
        for i, x in enumerate(self.abstract):
            number = not jnp.issubdtype(x.dtype, jax.dtypes.extended)
            if i >= self.count:
                facts.append(FROM_DATA if number else FROM_KEYS)
            else:
                facts.append(param_provenance(i, x.shape) if number and x.dtype.name in CARRIERS else NO_PROVENANCE)
        return facts

    @property
    def signature(self) -> Any:
        """What a traced program depends on; None if that cannot be compared."""
        static = tuple(
            (i, type(leaf), leaf) for i, leaf in enumerate(self.leaves) if not isinstance(leaf, _ARRAY_LEAF_TYPES)
        )
        avals = tuple(jax.typeof(x) if isinstance(x, Array) else (x.shape, x.dtype) for x in self.abstract)
        settings = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
        signature = (self.tree, self.paths, avals, static, settings)
        try:
            hash(signature)
        except TypeError:
            return None
        return signature


def _strip_box(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """A path without the ``value`` of the box (a variable, its sharding) that a parameter is in."""
    has_box = len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
    return path[:-1] if has_box else path


def _holder_class(node: Any, path: tuple[Any, ...]) -> str:
    """The class of the node that holds the end of a path; empty if a node on the way gives no names of its parts."""
    for key in path[:-1]:
        if isinstance(key, jax.tree_util.GetAttrKey):
            node = getattr(node, key.name, None)
        elif isinstance(key, jax.tree_util.DictKey | jax.tree_util.SequenceKey):
            node = node[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
        else:
            return ""
    return type(node).__name__


def is_param_leaf(leaf: Any) -> bool:
    """Whether a node of a pytree is one parameter: packed, or with an adapter."""
    return isinstance(leaf, _PARAM_LEAF_TYPES)


_PARAM_LEAF_TYPES = QArray, StoredAs, AdaptedParam
_ARRAY_LEAF_TYPES = (*_PARAM_LEAF_TYPES, Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_PATH_OF_PARAMS = (jax.tree_util.SequenceKey(0),) * 2  # in ((params, ...), keywords)
