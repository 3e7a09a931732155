"""The codes of columns under scales that are chosen before, and one sweep of GPTQ over the columns of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular

from jchop._common.settings import always_jit
from jchop._core.scaled.groups import largest_mask
from jchop._core.scaled_bodies import unflatten_scales
from jchop._quantized.program.weight_layout import StoredAs
from jchop._spec.spec import Spec
from jchop.formats import ScaledFormat, binary32
from jchop.storage import QArray, dequantize, quantize
from jchop.storage._axis_groupings import OWN_SCALE, axis_groupings, with_groupings
from jchop.storage._codes import pack_entries, unpack_entries
from jchop.storage._decode import repeat_over_groups

Array = jax.Array


@dataclass(frozen=True)
class ElementScales:
    """Scales and zero points as they are stored, one for each element.

    Args:
        scale: none for a plain format; the second of two is the scale of the tensor, and has no axis.
        zero: None for a format without zero points.
    """

    scale: tuple[Array, ...]
    zero: Array | None

    @property
    def by_element(self) -> tuple[Array, ...]:
        """The arrays that have a number for each element."""
        return (*self.scale[:1], *(() if self.zero is None else (self.zero,)))

    def quantize_args(self, by_element: Sequence[Array]) -> tuple[Any, Any]:
        """The arguments scale and zero_point of `quantize`, from a part of the arrays `by_element`."""
        if not self.scale:
            return None, None
        first, *zero = by_element
        scale = first if len(self.scale) == 1 else (first, *self.scale[1:])
        return scale, zero[0] if zero else None


def qarray_of(packed_weight: QArray | StoredAs) -> QArray:
    """The array that holds the codes of a packed parameter."""
    return packed_weight.stored if isinstance(packed_weight, StoredAs) else packed_weight


def element_scales(q: QArray) -> ElementScales:
    """The scales of each element of an array that has no axes of a stack."""
    fmt = q.spec.scaled
    if fmt is None:
        return ElementScales((), None)
    groupings = axis_groupings(fmt, q.ndim)

    def repeat_to_elements(values: Array) -> Array:
        return jnp.broadcast_to(repeat_over_groups(values, groupings, q.shape), q.shape)

    if isinstance(fmt.scale, ScaledFormat):
        scale_shape = fmt.scale_shape(q.shape)
        codes, *inner_arrays = q.scale
        inner_scale, zero = unflatten_scales(inner_arrays, fmt.scale)
        length = scale_shape[-1] if scale_shape else None
        scale_qarray = QArray(codes, inner_scale, zero, Spec(fmt.scale), length, np.dtype(np.float32))
        scales = jnp.clip(dequantize(scale_qarray), np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max)
        scale: tuple[Array, ...] = (repeat_to_elements(scales),)
    elif isinstance(q.scale, tuple):
        scale = (repeat_to_elements(q.scale[0]), q.scale[1])
    else:
        scale = (repeat_to_elements(q.scale),)
    return ElementScales(scale, None if q.zero_point is None else repeat_to_elements(q.zero_point))


def elementwise_spec(spec: Spec) -> Spec:
    """A spec under which each element of a vector has a scale of its own."""
    fmt = spec.scaled
    if fmt is None:
        return spec
    elementwise_format = with_groupings(fmt, (OWN_SCALE,))
    if isinstance(fmt.scale, ScaledFormat):
        elementwise_format = replace(elementwise_format, scale=binary32, rule=None)  # the caller passes scales
    return replace(spec, format=elementwise_format)


def round_column(
    column: Array, scale: Any, zero: Any, spec: Spec, dtype: Any, key: Array | None = None
) -> tuple[Array, Array]:
    """The codes of a vector, one entry for each element, and their numbers in `dtype`.

    `spec` is one of `elementwise_spec`.
    """
    scale_args = {} if scale is None else {"scale": scale, "zero_point": zero}
    q = quantize(column, spec, key, impl="xla", **scale_args)
    entries = unpack_entries(q.qvalue, spec.element, column.shape[0])
    return entries, dequantize(q, dtype)


def with_entries(packed_weight: QArray | StoredAs, entries: Array) -> QArray | StoredAs:
    """A packed parameter with other codes, one entry for each element, in the order of its numbers."""
    if isinstance(packed_weight, StoredAs):
        q = with_entries(packed_weight.stored, entries)
        assert isinstance(q, QArray)
        return replace(packed_weight, stored=q)
    codes = pack_entries(entries.reshape(packed_weight.shape or (1,)), packed_weight.spec.element)
    return replace(packed_weight, qvalue=codes)


#: The damping after a failed factorization is so many times the one before, at least the least; and tried so often.
_DAMPING_GROWTH, _LEAST_DAMPING, _MOST_TRIES = 4.0, 1e-6, 24
_SWEEP_PRECISION = lax.Precision.HIGHEST


class InverseFactor(NamedTuple):
    """The factor of an inverse.

    Args:
        upper: U of (H + d I)^-1 = U^T U.
        damping: d over the mean of the diagonal of H.
        tries: how many factorizations there were.
        dead: for which columns no input was anything but zero.
    """

    upper: Array
    damping: Array
    tries: Array
    dead: Array


def column_order(gram: Array, by_activation: bool, m: int = 1) -> Array:
    """The order of columns: that of falling diagonal entries, or as they lie.

    Args:
        gram: the matrix H.
        by_activation: whether by its diagonal.
        m: how many consecutive columns stay together, in their own falling order: groups come in that of their
            largest entries, and a last one that is shorter comes last. Default 1.
    """
    size = gram.shape[0]
    if not by_activation:
        return jnp.arange(size)
    negated = -jnp.diagonal(gram)
    grouped = size - size % m
    groups = negated[:grouped].reshape(-1, m)
    group_order = jnp.argsort(groups, axis=1, stable=True) + jnp.arange(0, grouped, m)[:, None]
    rest_order = grouped + jnp.argsort(negated[grouped:], stable=True)
    return jnp.concatenate([group_order[jnp.argsort(groups.min(1), stable=True)].reshape(-1), rest_order])


def inverse_factor(gram: Array, damping: Array) -> InverseFactor:
    """The factor of a Gram matrix, damped more and more until it exists.

    With the columns in reversed order H = L L^T, so J L J (J reverses) is the upper factor R of H = R R^T, and R^-1 the
    one sought: one factorization and one triangular inverse. The inverse of H itself is never computed.

    Args:
        gram: the matrix H, in the order of the sweep.
        damping: the first one to be tried.
    """
    size = gram.shape[0]
    diagonal = jnp.diagonal(gram)
    dead = diagonal == 0
    nonsingular = jnp.where(dead[:, None] | dead[None, :], 0, gram) + jnp.diag(dead.astype(gram.dtype))
    mean = jnp.where(dead.all(), 1, diagonal.sum() / jnp.maximum(1, size - dead.sum()))
    identity = jnp.eye(size, dtype=gram.dtype)

    def invert(damping: Array) -> Array:
        lower = lax.linalg.cholesky((nonsingular + damping * mean * identity)[::-1, ::-1], symmetrize_input=False)
        return solve_triangular(lower[::-1, ::-1], identity, lower=False)

    def fails(state: tuple[Array, Array, Array]) -> Array:
        upper, _, tries = state
        return ~jnp.isfinite(upper).all() & (tries < _MOST_TRIES)

    def retry(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        _, damping, tries = state
        damping = jnp.maximum(damping * _DAMPING_GROWTH, _LEAST_DAMPING)
        return invert(damping), damping, tries + 1

    upper, damping, tries = lax.while_loop(fails, retry, (invert(damping), damping, jnp.int32(1)))
    return InverseFactor(upper, damping, tries, dead)


@partial(always_jit, static_argnames=("spec", "dtype", "block", "sparsity"))
def gptq_sweep(
    columns: Array,
    by_element: tuple[Array, ...],
    tensor_scale: tuple[Array, ...],
    upper: Array,
    key: Array | None,
    *,
    spec: Spec,
    dtype: Any,
    block: int,
    mask: Array | None = None,
    worth: Array | None = None,
    sparsity: tuple[int, int] | None = None,
) -> tuple[Array, Array]:
    """The codes of a matrix, column after column, and the loss of each row.

    The error of a column, over the diagonal entry of U, is taken off the columns after it in the ratios of that row of
    U, within a block at once and beyond it when the block is done. The lines of the algorithm are those of Frantar et
    al., "GPTQ" (2022); those that prune, of Frantar and Alistarh, "SparseGPT" (2023).

    Args:
        columns: the matrix, a row for each of its columns, in the order of the sweep.
        by_element: scales and zero points in the same order.
        tensor_scale: a scale of the tensor, if the format has one.
        upper: the factor U.
        key: a typed key if the rounding is stochastic.
        spec: of a column in which each element has its scale.
        dtype: of the numbers that codes stand for.
        block: how many columns make up a block, at least; whole groups of columns that are pruned together.
        mask: which elements are not zero, in the order of the sweep. Default: all, or those of `sparsity`.
        worth: of an element of each column, 1 / U_jj for one whose input is not always zero; with `sparsity`.
        sparsity: n and m: of every m columns of the sweep each row keeps the n elements with the largest product of
            magnitude and worth, as they are when the sweep reaches the group.

    Returns:
        The codes, one entry for each element, in the order of the sweep; and the sum of squared errors of each row.
    """
    count, rows = columns.shape
    group = 1 if sparsity is None else sparsity[1]
    block = -(-min(block, count) // group) * group
    padding = -count % block
    by_element = tuple(jnp.pad(part, [(0, padding), (0, 0)], mode="edge") for part in by_element)
    work = jnp.pad(columns, [(0, padding), (0, 0)])
    upper = jnp.pad(upper, [(0, padding), (0, padding)]) + jnp.diag(
        (jnp.arange(count + padding) >= count).astype(upper.dtype)
    )
    mask = None if mask is None else jnp.pad(mask, [(0, padding), (0, 0)])
    worth = None if worth is None else jnp.pad(worth, [(0, padding)])
    scales = ElementScales((*by_element[:1], *tensor_scale), None if len(by_element) < 2 else by_element[1])

    def round_at_index(index: Array, column: Array) -> tuple[Array, Array]:
        parts = [lax.dynamic_index_in_dim(part, index, keepdims=False) for part in by_element]
        column_key = None if key is None else jax.random.fold_in(key, index)
        entries, numbers = round_column(column, *scales.quantize_args(parts), spec, dtype, column_key)
        return entries, numbers.astype(column.dtype)

    code_dtype = jax.eval_shape(lambda: round_at_index(jnp.int32(0), work[0])[0]).dtype

    def sweep_block(block_index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        work, codes, loss = state
        start = block_index * block
        upper_rows = lax.dynamic_slice_in_dim(upper, start, block)
        block_upper = lax.dynamic_slice_in_dim(upper_rows, start, block, axis=1)

        def choose_mask(i: Array, matrix: Array, mask: Array) -> Array:
            assert sparsity is not None and worth is not None
            magnitude = jnp.abs(lax.dynamic_slice_in_dim(matrix, i, group))
            score = magnitude * lax.dynamic_slice_in_dim(worth, start + i, group)[:, None]
            return lax.dynamic_update_slice_in_dim(mask, largest_mask((score, magnitude), *sparsity), i, 0)

        def sweep_column(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            matrix, errors, block_codes, *masks = state
            if sparsity is not None:
                masks = [lax.cond(i % group == 0, choose_mask, lambda i, part, stay: stay, i, matrix, *masks)]
            column, upper_row = (lax.dynamic_index_in_dim(v, i, keepdims=False) for v in (matrix, block_upper))
            target = jnp.where(lax.dynamic_index_in_dim(masks[0], i, keepdims=False), column, 0) if masks else column
            entries, numbers = round_at_index(start + i, target)
            error = (column - numbers) / upper_row[i]
            matrix = matrix - upper_row[:, None] * error[None, :]
            errors = lax.dynamic_update_index_in_dim(errors, error, i, 0)
            return matrix, errors, lax.dynamic_update_index_in_dim(block_codes, entries, i, 0), *masks

        matrix, block_codes = (lax.dynamic_slice_in_dim(v, start, block) for v in (work, codes))
        masks = [] if mask is None else [lax.dynamic_slice_in_dim(mask, start, block)]
        if sparsity is not None:
            masks = [jnp.ones(matrix.shape, bool)]
        _, errors, block_codes, *_ = lax.fori_loop(
            0, block, sweep_column, (matrix, jnp.zeros_like(matrix), block_codes, *masks)
        )
        work = work - jnp.matmul(upper_rows.T, errors, precision=_SWEEP_PRECISION)
        codes = lax.dynamic_update_slice_in_dim(codes, block_codes, start, 0)
        return work, codes, loss + (errors * errors).sum(0)

    start = (work, jnp.zeros(work.shape, code_dtype), jnp.zeros(rows, work.dtype))
    _, codes, loss = lax.fori_loop(0, (count + padding) // block, sweep_block, start)
    return codes[:count], loss
