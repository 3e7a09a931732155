"""What is summed over the inputs of a product: the Gram matrix, magnitudes, and their number."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jchop._core.elementary import pairs
from jchop._core.elementary.pairs import FloatPair

Array = jax.Array

__all__ = ["InputSums", "add_sums", "pair_value", "sums_over_rows"]

#: How many rows one matrix product sums over; sums of more are sums of pairs.
_ROWS_PER_PRODUCT = 1024


class InputSums(NamedTuple):
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

    gram: FloatPair
    cross: FloatPair | None
    total: FloatPair
    shift: FloatPair | None
    magnitude: FloatPair
    largest: Array
    count: FloatPair


def pair_value(pair: FloatPair) -> Array:
    """A pair as one number."""
    return pair.hi + pair.lo


def add_sums(a: InputSums, b: InputSums) -> InputSums:
    """The sums over the rows of both."""
    cross = None if a.cross is None or b.cross is None else pairs.add_pairs(a.cross, b.cross)
    shift = None if a.shift is None or b.shift is None else pairs.add_pairs(a.shift, b.shift)
    return InputSums(
        pairs.add_pairs(a.gram, b.gram),
        cross,
        pairs.add_pairs(a.total, b.total),
        shift,
        pairs.add_pairs(a.magnitude, b.magnitude),
        jnp.maximum(a.largest, b.largest),
        pairs.add_pairs(a.count, b.count),
    )


def sums_over_rows(x: Array, y: Array | None = None, mask: Array | None = None) -> InputSums:
    """The sums over rows.

    A product of matrices sums over `_ROWS_PER_PRODUCT` rows in the carrier; the sums of those are compensated.

    Args:
        x: (batch, rows, summed).
        y: of the other trajectory, in the same shape; default None.
        mask: which rows count, (batch, rows). Default: all.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    operands = [x] if y is None else [x, y.astype(x.dtype)]
    batch, rows, _ = x.shape
    if mask is not None:
        operands = [jnp.where(mask[..., None], v, 0) for v in operands]
    row_counts = jnp.full((batch,), rows) if mask is None else mask.sum(1)
    count = row_counts.astype(x.dtype)
    chunk_rows = min(_ROWS_PER_PRODUCT, max(rows, 1))
    chunks = [_row_chunks(v, chunk_rows) for v in operands]

    def add_chunk(earlier_sums: InputSums, chunk: list[Array]) -> tuple[InputSums, None]:
        return add_sums(earlier_sums, _chunk_sums(chunk, jnp.zeros_like(count))), None

    first_sums = _chunk_sums([v[0] for v in chunks], count)
    return lax.scan(add_chunk, first_sums, [v[1:] for v in chunks])[0] if rows > chunk_rows else first_sums


def _row_chunks(x: Array, chunk_rows: int) -> Array:
    """Rows in chunks, the last one filled up with zeros: (chunks, batch, rows, summed)."""
    batch, rows, inputs = x.shape
    x = jnp.pad(x, [(0, 0), (0, -rows % chunk_rows), (0, 0)])
    return x.reshape(batch, -1, chunk_rows, inputs).swapaxes(0, 1)


def _chunk_sums(operands: list[Array], count: Array) -> InputSums:
    """The sums over one chunk, of x and, if there is one, y."""

    def product(a: Array, b: Array) -> FloatPair:
        return pairs.pair_of_number(jnp.einsum("btk,btl->bkl", a, b, precision=lax.Precision.HIGHEST))

    x, *y = operands
    magnitude = jnp.abs(x)
    cross = product(x, y[0] - x) if y else None
    total, shift = pairs.pair_of_number(x.sum(1)), pairs.pair_of_number((y[0] - x).sum(1)) if y else None
    return InputSums(
        product(x, x),
        cross,
        total,
        shift,
        pairs.pair_of_number(magnitude.sum(1)),
        magnitude.max(1, initial=0),
        pairs.pair_of_number(count),
    )
