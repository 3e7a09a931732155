"""Masks with at most n of every m numbers, along one axis or two; packed arrays without their zeros."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.checks import check, check_int
from jchop._common.settings import always_jit
from jchop._core.scaled.groups import largest_mask, sparse_mask
from jchop._round.arguments import as_operands, has_tracer, run_on_operands
from jchop._storage import QArray, dequantize
from jchop._storage._array import check_qarray
from jchop.formats.scaled.scaled import axis_indexes

#: The largest side of tiles: there are 90 masks with 2 of 4, and 2040 with 2 of 5.
_LARGEST_TILE = 4
#: How many tiles are looked at in one turn, which bounds the memory for the energies of all masks.
_TILES_PER_STEP = 1 << 14


def mask(x: Any, n: int, m: int, *, axis: int | Sequence[int] = -1) -> Any:
    """Chooses n of every m numbers, the largest in magnitude, as a boolean mask.

    Along one axis, m consecutive numbers are a group. Of equal magnitudes the first stay, and NaN counts as the
    largest. If the last group is shorter, it keeps as many as n, too.

    Along two axes, each row and each column of a tile of m x m keeps n numbers. So the matrix and its transpose are n:m
    sparse. Of all these masks (90 for 2 of 4) the result is the one whose numbers have the largest sum of squares. It
    is exact but for the rounding of these sums in the dtype, at least float32.

    For another score pass other numbers. For Wanda and a weight of shape (inputs, outputs) they are
    ``w * norms[:, None]`` with the root mean square of each input.

    Args:
        x: an array of real numbers, or a list or scalar that becomes one.
        n: the count of numbers that stay, from 1 to m - 1.
        m: the count of numbers in a group; up to 4 for tiles.
        axis: an axis, or two of them for tiles. Default -1.

    Returns:
        A boolean array in the shape of `x`, of NumPy if `x` is no JAX array.

    Raises:
        TypeError, ValueError: for arguments out of range.

    Source: Mishra et al., "Accelerating Sparse Deep Neural Networks", arXiv 2104.08378, 2021; Hubara et al.,
    "Accelerated Sparse Neural Training", arXiv 2102.08124, 2021 (tiles); Sun et al., "A Simple and Effective Pruning
    Approach for Large Language Models", arXiv 2306.11695, 2023 (Wanda).

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.sparsity.mask(jnp.array([1.0, -3.0, 2.0, 0.5]), 2, 4).tolist()
        [False, True, True, False]
        >>> tiles = jc.sparsity.mask(jnp.arange(16.0).reshape(4, 4), 2, 4, axis=(0, 1))
        >>> tiles.sum(0).tolist(), tiles.sum(1).tolist()
        ([2, 2, 2, 2], [2, 2, 2, 2])
    """
    (x,) = as_operands(["x"], [x])
    pattern, axes = check_sparsity_pattern(n, m, axis)
    axis_indexes("axis", axes[0] if len(axes) == 1 else axes, x.shape)
    return run_on_operands(lambda x, _: sparsity_mask(x, pattern, axes), [x], None)


def check_sparsity_pattern(n: object, m: object, axis: object = -1) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The numbers n and m, and one axis or two.

    Raises:
        TypeError, ValueError: that name the argument.
    """
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    check(len(axes) in (1, 2), f"axis={axis!r} must be one axis, or two for tiles")
    axis_tuple = tuple(check_int("axis", each, -(1 << 15), 1 << 15) for each in axes)
    high = _LARGEST_TILE if len(axes) == 2 else None
    most = check_int("m (the side of a tile)" if high else "m", m, 2, high)
    return (check_int("n", n, 1, most - 1), most), axis_tuple


@partial(always_jit, static_argnames=("pattern", "axes"))
def sparsity_mask(x: Array, pattern: tuple[int, int], axes: tuple[int, ...]) -> Array:
    """`mask` of JAX arrays, whose arguments are checked."""
    n, m = pattern
    numbers = jnp.moveaxis(jnp.asarray(x), axes, range(len(axes)))
    sizes = jnp.where(jnp.isnan(numbers), jnp.inf, jnp.abs(numbers))
    selection = largest_mask((sizes,), n, m) if len(axes) == 1 else _mask_tiles(sizes, n, m)
    return jnp.moveaxis(selection, range(len(axes)), axes)


@lru_cache(maxsize=16)
def tile_masks(n: int, m: int) -> np.ndarray:
    """All masks of m x m with n in each row and column, (count, m, m)."""
    rows = [row for row in itertools.product((False, True), repeat=m) if sum(row) == n]
    every = np.array(list(itertools.product(rows, repeat=m)))
    return every[(every.sum(1) == n).all(1)]


def _mask_tiles(x: Array, n: int, m: int) -> Array:
    """The best mask of each tile of the first two axes; numbers are magnitudes."""
    padded_x = jnp.pad(x, [(0, -size % m if axis < 2 else 0) for axis, size in enumerate(x.shape)])
    down, along, *rest = padded_x.shape
    blocks = padded_x.reshape(down // m, m, along // m, m, *rest)
    blocks = jnp.moveaxis(blocks, (1, 3), (-2, -1))
    tiles = blocks.reshape(-1, m * m)
    tiles = tiles.astype(jnp.promote_types(tiles.dtype, jnp.float32))
    all_masks = tile_masks(n, m).reshape(-1, m * m)

    def best(tile: Array) -> Array:
        # Squares over the largest one neither overflow nor vanish; infinities count as 1, and all others as nothing.
        # A compiler may multiply by the inverse, which is subnormal, and so zero, for the largest numbers of a dtype.
        tile = tile * jnp.where(tile.max() > 1, tile.dtype.type(2**-8), 1)
        largest = tile.max()
        share = jnp.where(jnp.isinf(largest), jnp.isinf(tile), tile / jnp.where(largest > 0, largest, 1))
        square = (share * share).astype(tile.dtype)
        return jnp.argmax(jnp.matmul(all_masks.astype(tile.dtype), square, precision=lax.Precision.HIGHEST))

    best_masks = lax.map(best, tiles, batch_size=min(_TILES_PER_STEP, max(1, len(tiles))))
    selection = jnp.asarray(all_masks)[best_masks].reshape(blocks.shape)
    return jnp.moveaxis(selection, (-2, -1), (1, 3)).reshape(padded_x.shape)[: x.shape[0], : x.shape[1]]


# -- packed arrays -----------------------------------------------------------------------------------------------------


def pack(q: QArray, n: int, m: int, *, axis: int = -2) -> QArray:
    """Stores a packed array without its zeros, if at most n of every m numbers along an axis are not zero.

    The result has the numbers of `q`, as `jchop.quantize` stores them in the format with ``sparse=n:m``. With 2 of 4,
    int4 has 3 bits for each number of the array, and its scales. A rule with a sparse format needs no `pack`.

    Args:
        q: an array of a scaled format, from `jchop.quantize` or from `QuantizedFunction.pack` with `jchop.ptq.sparse`;
            not within jit.
        n: the count of numbers that stay, from 1 to m - 1.
        m: the count of numbers in a group, up to 64.
        axis: the axis of the groups; the last group may be shorter. Default -2: the inputs of a weight
            of shape (inputs, outputs).

    Returns:
        A `QArray`; -0 may be 0.

    Raises:
        TypeError: if `q` is no concrete `QArray`.
        ValueError: if a group has more numbers that are not zero. For a plain format, or one that is sparse already.

    Example:
        >>> import jax, jchop as jc
        >>> w = jax.random.normal(jax.random.key(0), (128, 64))
        >>> q = jc.quantize(w * jc.sparsity.mask(w, 2, 4, axis=0), "int4(group=128,axis=0,scale=bfloat16)")
        >>> sparse = jc.sparsity.pack(q, 2, 4)
        >>> str(sparse.spec), 8 * q.nbytes / w.size, 8 * sparse.nbytes / w.size
        ('int4(group=128,axis=-2,scale=bfloat16,sparse=2:4)', 4.125, 3.125)
    """
    check_qarray("q", q)
    if has_tracer(q):
        raise TypeError(f"q={q!r} is traced; it must be a QArray outside jit")
    pattern, _ = check_sparsity_pattern(n, m)
    fmt, axis_index = q.spec.scaled, axis_indexes("axis", axis, q.shape)[0]
    if fmt is None or fmt.sparse is not None:
        raise ValueError(
            f"q has spec={str(q.spec)!r}; a packed array needs a scaled format that keeps all numbers, as "
            "'float8_e4m3fn(group=tensor)'"
        )
    numbers = dequantize(q)
    is_nonzero = np.moveaxis(np.asarray(numbers) != 0, axis_index, -1)
    is_nonzero = np.pad(is_nonzero, [*[(0, 0)] * (is_nonzero.ndim - 1), (0, -is_nonzero.shape[-1] % m)])
    most = int(is_nonzero.reshape(*is_nonzero.shape[:-1], -1, m).sum(-1).max(initial=0))
    check(most <= n, f"q has {most} of {m} numbers along axis={axis} that are not zero; n={n} allows fewer")
    spec = replace(q.spec, format=fmt(sparse=pattern, sparse_axis=axis_index))
    return q.thinned(_largest_of_groups(jnp.asarray(numbers), spec.scaled), spec, axis_index)


_largest_of_groups = always_jit(sparse_mask, static_argnums=1)
