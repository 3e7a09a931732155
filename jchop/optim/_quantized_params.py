"""Packed parameters without a copy in more bits: each step unpacks, updates and packs them."""

from __future__ import annotations

from typing import Any

import jax
import optax

from jchop._round.arguments import rounding_keys
from jchop.optim._leaves import holds_codes, map_with_keys, require_shapes
from jchop.storage import QArray, dequantize
from jchop.storage._array import PackedParam
from jchop.storage._quantize import requantize

Array = jax.Array


def apply_updates(params: Any, updates: Any, key: Array | None = None) -> Any:
    """`optax.apply_updates` for parameters that include a `QArray`, which is quantized again under its spec.

    A parameter that `jchop.quantize_fn(...).pack` stored in another shape is packed in that shape again. Each array of
    a stack (`vmap`, `scan`) is quantized by itself, if it has scales of its own.

    Under a stochastic spec, ``"int8(channel=0):stochastic"``, updates below a quantum count on average, so that no copy
    in more bits is needed. The scales are fitted to the new numbers.

    Args:
        params: a pytree of arrays, some of them packed.
        updates: a pytree of plain arrays, in the shapes of `jchop.storage.dequantize_params`.
        key: a typed key for this step, needed if a `QArray` has a stochastic spec. It is split into a key for each
            leaf.

    Returns:
        A pytree like `params`.

    Raises:
        ValueError: for a stochastic spec without a key, or updates of other shapes.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc, optax
        >>> params = {"w": jc.quantize(jnp.ones((2, 4)), "int8(channel=0):stochastic", jax.random.key(0))}
        >>> tx = optax.sgd(0.1)
        >>> state = tx.init(jc.storage.dequantize_params(params))
        >>> gradients = jax.grad(lambda p: (p["w"] ** 2).sum())(jc.storage.dequantize_params(params))
        >>> updates, state = tx.update(gradients, state)
        >>> jc.optim.apply_updates(params, updates, jax.random.key(1))["w"].shape
        (2, 4)
    """

    def leaf(key: Array | None, p: Any, u: Any) -> Any:
        if not holds_codes(p):
            return optax.apply_updates(p, u)
        return requantize(p, optax.apply_updates(dequantize(p), u), key)

    require_shapes("updates", updates, "params", params)
    packed_leaves = [p for p in jax.tree.leaves(params, is_leaf=holds_codes) if holds_codes(p)]
    keys = [
        drawing_key
        for p in packed_leaves
        if (drawing_key := rounding_keys(_qarray_of_param(p).spec, key)[0]) is not None
    ]
    return map_with_keys(leaf, keys[0] if keys else None, params, updates, is_leaf=holds_codes)[1]


def _qarray_of_param(leaf: QArray | PackedParam) -> QArray:
    return leaf.stored if isinstance(leaf, PackedParam) else leaf
