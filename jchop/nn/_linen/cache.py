"""Keys and values that an attention layer of Linen keeps packed, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jchop._spec.spec import Spec
from jchop.nn._shared.cache import cache_with_token, empty_packed_cache
from jchop.storage import QArray, dequantize, quantize

Array = jax.Array

__all__ = ["CACHE_COLLECTION", "DecodeStep", "has_cache", "pack_empty_cache"]

#: The collection that Linen's attention keeps its keys and values in.
CACHE_COLLECTION = "cache"
_CACHE_VARIABLES = ("cached_key", "cached_value")


def has_cache(layer: Any) -> bool:
    """Whether an attention layer has a cache to decode from."""
    return layer.has_variable(CACHE_COLLECTION, _CACHE_VARIABLES[0])


@dataclass(frozen=True)
class DecodeStep:
    """One step of an attention layer with a packed cache.

    Linen's own code puts the new token into arrays in full precision, so it is shown those; `put_token` takes the token
    out of them again, and into the cache.

    Args:
        layer: the bound layer, in its call.
        spec: the spec of keys and values.
        caches: the packed keys and values before the step.
        index: the place of the new token.
    """

    layer: Any
    spec: Spec
    caches: tuple[QArray, ...]
    index: Array

    @staticmethod
    def of(layer: Any, spec: Spec) -> DecodeStep:
        """Begin a step: put keys and values in full precision in place of the packed ones.

        Raises:
            ValueError: for a cache that is not packed.
        """
        caches = tuple(layer.get_variable(CACHE_COLLECTION, name) for name in _CACHE_VARIABLES)
        if not all(isinstance(q, QArray) for q in caches):
            raise ValueError(
                f"the cache of {type(layer).__name__} at {'/'.join(layer.path)!r} is not packed: take the one that "
                "`init` of the quantized module returns"
            )
        for name, q in zip(_CACHE_VARIABLES, caches, strict=True):
            layer.put_variable(CACHE_COLLECTION, name, dequantize(q))
        return DecodeStep(layer, spec, caches, layer.get_variable(CACHE_COLLECTION, "cache_index"))

    def put_token(self, *full: Array) -> tuple[Array, ...]:
        """Keys and values with the new token rounded, from those with it in full precision; the cache takes it."""
        updates = []
        for name, cache, full_array in zip(_CACHE_VARIABLES, self.caches, full, strict=True):
            token = lax.dynamic_slice_in_dim(full_array, self.index, 1, full_array.ndim - 3)
            updates.append(cache_with_token(cache, quantize(token.astype(cache.dtype), self.spec), self.index))
            self.layer.put_variable(CACHE_COLLECTION, name, updates[-1])
        return tuple(dequantize(q, whole.dtype) for q, whole in zip(updates, full, strict=True))


def pack_empty_cache(layer: Any, spec: Spec) -> None:
    """Pack the empty cache that a call without one has made."""
    for name in _CACHE_VARIABLES:
        value = layer.get_variable(CACHE_COLLECTION, name)
        layer.put_variable(CACHE_COLLECTION, name, empty_packed_cache(value.shape, value.dtype, spec))
