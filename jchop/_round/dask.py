"""Rounds dask arrays block by block, with the same result as for the whole array. Does not import dask."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.checks import as_numpy
from jchop.formats import ScaledFormat


def is_dask(x: object) -> bool:
    """Whether `x` is a dask array, without importing dask."""
    module = sys.modules.get("dask.array")
    return module is not None and isinstance(x, module.Array)


def round_dask_blocks(
    x: Any, rounder: Callable[..., Any], scaled_format: ScaledFormat | None, key: jax.Array | None
) -> Any:
    """The dask array of the rounded blocks of `x`.

    The random bits of an element depend on its index in the whole array, so the blocks do not change the result.

    Args:
        x: a dask array.
        rounder: ``rounder(block, key=key, offset=(starts, shape))``.
        scaled_format: the scaled format of the result, whose groups no chunk may cut; None for an element format.
        key: the typed key of a stochastic rounding, or None.

    Raises:
        ValueError: for chunks of unknown size if random bits or groups depend on it, or chunks that cut groups.
    """
    if any(map(math.isnan, x.shape)) and (key is not None or scaled_format is not None):
        raise ValueError(
            "x has chunks of unknown size, so the index of its elements is unknown; x.compute_chunk_sizes()"
        )
    if scaled_format is not None:
        _check_chunk_groups(scaled_format, x)
    # A key is passed as its words: dask hashes the contents of a graph, and sends them to other processes.
    words = None if key is None else (np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key)))
    meta = np.empty((0,) * x.ndim, x.dtype)
    return x.map_blocks(partial(_round_dask_block, rounder, words), dtype=x.dtype, meta=meta)


def _round_dask_block(
    rounder: Callable[..., Any], words: tuple[np.ndarray, str] | None, block: Any, block_info: Any = None
) -> np.ndarray:
    block = as_numpy("x", block)
    if words is None:
        return rounder(block)
    info = block_info[0]
    starts = tuple(int(start) for start, _ in info["array-location"])
    key = jax.random.wrap_key_data(jnp.asarray(words[0]), impl=words[1])
    return rounder(block, key=key, offset=(starts, tuple(map(int, info["shape"]))))


def _check_chunk_groups(fmt: ScaledFormat, x: Any) -> None:
    """Refuse chunks that end within a group."""
    several = [axis for axis, sizes in enumerate(x.chunks) if len(sizes) > 1]
    for axis in several:
        for at in list(accumulate(x.chunks[axis]))[:-1]:
            if fmt.scale_rule.tensor_scale or not _begins_a_group(fmt, x.shape, axis, at):
                raise ValueError(
                    f"x has chunks {x.chunks[axis]} along axis {axis}, which cut groups of {fmt}; x.rechunk puts "
                    "whole groups into a chunk"
                )


def _begins_a_group(fmt: ScaledFormat, shape: tuple[int, ...], axis: int, at: int) -> bool:
    """Whether a new group begins at index `at` of an axis; if scales are scaled, also a new group of scales."""
    if fmt.sparse is not None and fmt.axis_of_sparse % len(shape) == axis and at % fmt.sparse[1]:
        return False
    below, above = (fmt.scale_shape((*shape[:axis], n, *shape[axis + 1 :])) for n in (at, at + 1))
    if at > 0 and above[axis] == below[axis]:
        return False
    return not isinstance(fmt.scale, ScaledFormat) or _begins_a_group(fmt.scale, above, axis, below[axis])
