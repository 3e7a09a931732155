"""What is summed over the inputs of a product: the Gram matrix, magnitudes, and their number."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jchop._core.elementary import pairs
from jchop._core.elementary.pairs import Pair

Array = jax.Array

__all__ = ["Sums", "added", "of_rows", "value"]

#: How many rows one matrix product sums over; sums of more are sums of pairs.
_ROWS = 1024


class Sums(NamedTuple):
    """Sums over the rows x (tokens) of the matrices of a product; y are those of the other trajectory.

    Args:
        gram: of x x^T, (batch, summed, summed).
        cross: of x (y - x)^T, in the same shape; None if there is one trajectory.
        total: of x, (batch, summed).
        shift: of y - x; None if there is one trajectory.
        magnitude: of |x|, (batch, summed).
        largest: the largest |x|.
        count: how many rows there were, (batch,).
    """

    gram: Pair
    cross: Pair | None
    total: Pair
    shift: Pair | None
    magnitude: Pair
    largest: Array
    count: Pair


def value(pair: Pair) -> Array:
    """A pair as one number."""
    return pair.hi + pair.lo


def added(a: Sums, b: Sums) -> Sums:
    """The sums over the rows of both."""
    cross = None if a.cross is None or b.cross is None else pairs.add(a.cross, b.cross)
    shift = None if a.shift is None or b.shift is None else pairs.add(a.shift, b.shift)
    return Sums(
        pairs.add(a.gram, b.gram),
        cross,
        pairs.add(a.total, b.total),
        shift,
        pairs.add(a.magnitude, b.magnitude),
        jnp.maximum(a.largest, b.largest),
        pairs.add(a.count, b.count),
    )


def of_rows(x: Array, y: Array | None = None, mask: Array | None = None) -> Sums:
    """The sums over rows.

    A product of matrices sums over `_ROWS_PER_PRODUCT` rows in the carrier; the sums of those are compensated.

    Args:
        x: (batch, rows, summed).
        y: of the other trajectory, in the same shape; default None.
        mask: which rows count, (batch, rows). Default: all.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    both = [x] if y is None else [x, y.astype(x.dtype)]
    batch, rows, _ = x.shape
    if mask is not None:
        both = [jnp.where(mask[..., None], v, 0) for v in both]
    number = jnp.full((batch,), rows) if mask is None else mask.sum(1)
    count = number.astype(x.dtype)
    chunk = min(_ROWS, max(rows, 1))
    parts = [_chunks(v, chunk) for v in both]

    def add_chunk(before: Sums, some: list[Array]) -> tuple[Sums, None]:
        return added(before, _of_chunk(some, jnp.zeros_like(count))), None

    first = _of_chunk([v[0] for v in parts], count)
    return lax.scan(add_chunk, first, [v[1:] for v in parts])[0] if rows > chunk else first


def _chunks(x: Array, chunk: int) -> Array:
    """Rows in chunks, the last one filled up with zeros: (chunks, batch, rows, summed)."""
    batch, rows, inputs = x.shape
    x = jnp.pad(x, [(0, 0), (0, -rows % chunk), (0, 0)])
    return x.reshape(batch, -1, chunk, inputs).swapaxes(0, 1)


def _of_chunk(both: list[Array], count: Array) -> Sums:
    """The sums over one chunk, of x and, if there is one, y."""

    def product(a: Array, b: Array) -> Pair:
        return pairs.single(jnp.einsum("btk,btl->bkl", a, b, precision=lax.Precision.HIGHEST))

    x, *y = both
    size = jnp.abs(x)
    cross = product(x, y[0] - x) if y else None
    total, shift = pairs.single(x.sum(1)), pairs.single((y[0] - x).sum(1)) if y else None
    return Sums(
        product(x, x), cross, total, shift, pairs.single(size.sum(1)), size.max(1, initial=0), pairs.single(count)
    )
