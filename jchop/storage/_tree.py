"""Pytrees with packed arrays."""

from __future__ import annotations

from typing import Any

import jax

from jchop.storage._array import PackedParam, QArray, refuse_qarray_dicts
from jchop.storage._quantize import dequantize


def dequantize_params(params: Any) -> Any:
    """A pytree with every `QArray` replaced by its numbers, for losses, gradients and optimizers.

    Args:
        params: a pytree of arrays and QArrays. A parameter that `jchop.quantize_fn(...).pack` stored in another shape
            becomes an array in its own shape.

    Returns:
        A pytree of arrays.

    Raises:
        TypeError: for leaves of a QArray in a dict, as of a checkpoint that was restored without a target.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> params = {"w": jc.quantize(jnp.ones((2, 4)), jc.int8(channel=0)), "b": jnp.zeros(4)}
        >>> jc.storage.dequantize_params(params)["w"].shape
        (2, 4)
    """
    refuse_qarray_dicts("params", params)

    def has_codes(leaf: Any) -> bool:
        return isinstance(leaf, QArray | PackedParam)

    return jax.tree.map(lambda leaf: dequantize(leaf) if has_codes(leaf) else leaf, params, is_leaf=has_codes)
