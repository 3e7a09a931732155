"""Keys or values of tokens in slots, packed or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from jchop._quantized.products.rule import check_cache_spec
from jchop._spec.spec import Spec, as_spec, parse
from jchop.storage import QArray, dequantize, quantize
from jchop.storage._axis_groupings import axes_from_end

Array = jax.Array

#: Rows of slots, slots, heads, head_dim.
KV_NDIM = 4
#: The position of a slot without a token.
NO_TOKEN = -1


@partial(jax.tree_util.register_dataclass, data_fields=("words",), meta_fields=("spec", "size", "dtype"))
@dataclass(frozen=True, eq=False)
class KVRows:
    """Keys or values in rows of slots: for each slot those of one token.

    Args:
        words: the leaves of a QArray, or the numbers, each in the shape (rows, slots, heads, ...). Floats of fewer than
            32 bits are there as integers of the same bits, as XLA's CPU backend would convert all of them in every
            write (`short_floats_converted_whole`).
        spec: the spec of the QArray; None for numbers.
        size: head_dim.
        dtype: of the numbers.
    """

    words: tuple[Array, ...]
    spec: Spec | None
    size: int
    dtype: np.dtype

    @staticmethod
    def empty(shape: Sequence[int], spec: Spec | None, dtype: Any) -> KVRows:
        """Zeros: no tokens yet."""
        leaves = jax.eval_shape(partial(_quantize_kv_rows, spec=spec), jax.ShapeDtypeStruct(tuple(shape), dtype))
        words = tuple(jnp.zeros(leaf.shape, _kv_word_dtype(leaf.dtype)) for leaf in jax.tree.leaves(leaves))
        return KVRows(words, spec, shape[-1], np.dtype(dtype))

    def part(self, take: Callable[[Array], Array]) -> KVRows:
        """Some of the slots; `take` gives them of any leaf."""
        return replace(self, words=tuple(map(take, self.words)))

    def heads_first(self) -> KVRows:
        """With the axis of heads before that of slots."""
        return self.part(lambda word: jnp.swapaxes(word, 1, 2))

    def write(self, new: Array, row: Array, slot: Array) -> KVRows:
        """With new tokens in their slots; those whose row does not exist are not written."""
        leaves = jax.tree.leaves(_quantize_kv_rows(new.astype(self.dtype), self.spec))
        words = (
            old.at[row, slot].set(lax.bitcast_convert_type(leaf, old.dtype), mode="drop")
            for old, leaf in zip(self.words, leaves, strict=True)
        )
        return replace(self, words=tuple(words))

    def tokens(self) -> QArray | Array:
        """The tokens as a QArray or an array."""
        tree, dtypes = _kv_rows_structure(self.spec, self.size, self.dtype)
        leaves = (lax.bitcast_convert_type(word, dtype) for word, dtype in zip(self.words, dtypes, strict=True))
        return jax.tree.unflatten(tree, leaves)

    def numbers(self) -> Array:
        """The tokens as numbers."""
        tokens = self.tokens()
        return dequantize(tokens) if isinstance(tokens, QArray) else tokens


def masked_numbers(rows: KVRows, positions: Array) -> Array:
    """Keys or values as numbers, 0 in slots without a token: another sequence's NaN times a weight of 0 is NaN.

    Args:
        rows: the keys or values.
        positions: those of their tokens, in the shape of `rows` without head_dim; the axis of heads may have length 1.
    """
    return jnp.where((positions != NO_TOKEN)[..., None], rows.numbers(), jnp.zeros((), rows.dtype))


def kv_rows_spec(name: str, spec: Any) -> Spec | None:
    """The spec of keys or values, with axes counted from the end; None stores the numbers as they are.

    Raises:
        TypeError, ValueError: for a spec that rounds tokens or heads together, or draws random bits.
    """
    if spec is None:
        return None
    spec = as_spec(spec, name, scaled=True)
    if spec.scaled is not None:
        try:
            spec = replace(spec, format=axes_from_end(spec.scaled, KV_NDIM))
        except ValueError as error:
            raise ValueError(f"{name}={str(spec)!r}: {error}") from None
    check_cache_spec(name, spec)
    return spec


def _quantize_kv_rows(x: Array, spec: Spec | None) -> QArray | Array:
    return x if spec is None else quantize(x, spec)


@lru_cache(maxsize=64)
def _kv_rows_structure(spec: Spec | None, size: int, dtype: np.dtype) -> tuple[Any, tuple[np.dtype, ...]]:
    """The structure of stored tokens, and the dtypes of its leaves."""
    token = jax.eval_shape(
        partial(_quantize_kv_rows, spec=spec), jax.ShapeDtypeStruct((1,) * (KV_NDIM - 1) + (size,), dtype)
    )
    leaves, tree = jax.tree.flatten(token)
    return tree, tuple(leaf.dtype for leaf in leaves)


def _kv_word_dtype(dtype: Any) -> np.dtype:
    short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(f"u{dtype.itemsize}") if short else np.dtype(dtype)


# -- jax.export --------------------------------------------------------------------------------------------------------


def _kv_rows_to_bytes(static: tuple[Spec | None, int, np.dtype]) -> bytes:
    spec, size, dtype = static
    return json.dumps([None if spec is None else str(spec), size, np.dtype(dtype).name]).encode()


def _kv_rows_from_bytes(data: bytes) -> tuple[Spec | None, int, np.dtype]:
    text, size, dtype = json.loads(data)
    return None if text is None else parse(text), size, jnp.dtype(dtype)


export.register_pytree_node_serialization(
    KVRows,
    serialized_name="jchop.KVCache.Rows",
    serialize_auxdata=_kv_rows_to_bytes,
    deserialize_auxdata=_kv_rows_from_bytes,
)
