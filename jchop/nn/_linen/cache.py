"""Keys and values that an attention layer of Linen keeps packed, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jchop.nn._cache import empty, with_token
from jchop.spec import Spec
from jchop.storage import QArray, dequantize, quantize

Array = jax.Array

__all__ = ["CACHE", "Decoding", "is_filled", "pack_fresh"]

#: The collection that Linen's attention keeps its keys and values in.
CACHE = "cache"
_NAMES = ("cached_key", "cached_value")


def is_filled(layer: Any) -> bool:
    """Whether an attention layer has a cache to decode from."""
    return layer.has_variable(CACHE, _NAMES[0])


@dataclass(frozen=True)
class Decoding:
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
    def of(layer: Any, spec: Spec) -> Decoding:
        """Begin a step: put keys and values in full precision in place of the packed ones.

        Raises:
            ValueError: for a cache that is not packed.
        """
        caches = tuple(layer.get_variable(CACHE, name) for name in _NAMES)
        if not all(isinstance(q, QArray) for q in caches):
            raise ValueError(
                f"the cache of {type(layer).__name__} at {'/'.join(layer.path)!r} is not packed: take the one that "
                "`init` of the quantized module returns"
            )
        for name, q in zip(_NAMES, caches, strict=True):
            layer.put_variable(CACHE, name, dequantize(q))
        return Decoding(layer, spec, caches, layer.get_variable(CACHE, "cache_index"))

    def put_token(self, *full: Array) -> tuple[Array, ...]:
        """Keys and values with the new token rounded, from those with it in full precision; the cache takes it."""
        updates = []
        for name, q, whole in zip(_NAMES, self.caches, full, strict=True):
            token = lax.dynamic_slice_in_dim(whole, self.index, 1, whole.ndim - 3)
            updates.append(with_token(q, quantize(token.astype(q.dtype), self.spec), self.index))
            self.layer.put_variable(CACHE, name, updates[-1])
        return tuple(dequantize(q, whole.dtype) for q, whole in zip(updates, full, strict=True))


def pack_fresh(layer: Any, spec: Spec) -> None:
    """Pack the empty cache that a call without one has made."""
    for name in _NAMES:
        value = layer.get_variable(CACHE, name)
        layer.put_variable(CACHE, name, empty(value.shape, value.dtype, spec))
