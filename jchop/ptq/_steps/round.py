"""One parameter, rounded by the statistics of its inputs: clipped scales, SignRound, GPTQ's sweep, pruning."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

from jchop._common.settings import always_jit
from jchop._core.scaled.groups import largest_mask, sparse_mask
from jchop._core.scaled_bodies import unflatten_scales
from jchop._quantized.program.call import unpack_param
from jchop._quantized.program.provenance import MatrixLayout
from jchop._quantized.program.weight_layout import StoredAs, WeightLayout
from jchop._spec.spec import Spec
from jchop._storage import QArray, dequantize, fit_half_quadratic, quantize
from jchop._storage._axis_groupings import OWN_SCALE, axis_groupings, with_groupings
from jchop._storage._codes import pack_entries, repeat_over_groups, unpack_entries
from jchop.formats import ScaledFormat
from jchop.formats._catalogue import binary32
from jchop.formats.rounding import Rounding
from jchop.ptq._steps.steps import CalibrationSteps, Clip, Correction, HalfQuadratic, SignDescent, Sparse, Sweep

#: The part of the error of a group that a clipped range must save before a sweep.
_LEAST_GAIN = 0.3

_ROUND_PRECISION = lax.Precision.HIGHEST


# -- codes under scales that are chosen before, and a sweep over columns ----------------------------------------------


@partial(jax.tree_util.register_dataclass, data_fields=["scale", "zero"], meta_fields=["spec", "dtype"])
@dataclass(frozen=True)
class ElementScales:
    """Scales and zero points as they are stored, one for each element.

    Args:
        spec: of a vector in which each element has its scale.
        dtype: of the numbers that codes stand for.
        scale: none for a plain format; the second of two is the scale of the tensor, and has no axis.
        zero: None for a format without zero points.
    """

    spec: Spec
    dtype: Any
    scale: tuple[Array, ...] = ()
    zero: Array | None = None

    @property
    def by_element(self) -> tuple[Array, ...]:
        """The arrays that have a number for each element."""
        return (*self.scale[:1], *(() if self.zero is None else (self.zero,)))

    def with_elements(self, by_element: Sequence[Array]) -> ElementScales:
        """These of other elements, by the arrays `by_element`."""
        first, zero = tuple(by_element[:1]), by_element[1] if len(by_element) > 1 else None
        return replace(self, scale=(*first, *self.scale[1:]), zero=zero)

    def round(self, numbers: Array, key: Array | None = None) -> tuple[Array, Array]:
        """The codes of a vector, one entry for each element, and their numbers."""
        scale = self.scale if len(self.scale) > 1 else next(iter(self.scale), None)
        q = quantize(numbers, self.spec, key, impl="xla", scale=scale, zero_point=self.zero)
        return unpack_entries(q.qvalue, self.spec.element, len(numbers)), dequantize(q, self.dtype)


def qarray_of(packed_weight: QArray | StoredAs) -> QArray:
    """The array that holds the codes of a packed parameter."""
    return packed_weight.stored if isinstance(packed_weight, StoredAs) else packed_weight


def element_scales(q: QArray) -> ElementScales:
    """The scales of each element of an array that has no axes of a stack."""
    fmt, spec = q.spec.scaled, _elementwise_spec(q.spec)
    if fmt is None:
        return ElementScales(spec, q.dtype)
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
    return ElementScales(spec, q.dtype, scale, None if q.zero_point is None else repeat_to_elements(q.zero_point))


def _elementwise_spec(spec: Spec) -> Spec:
    """A spec under which each element of a vector has a scale of its own."""
    fmt = spec.scaled
    if fmt is None:
        return spec
    elementwise_format = with_groupings(fmt, (OWN_SCALE,))
    if isinstance(fmt.scale, ScaledFormat):
        elementwise_format = replace(elementwise_format, scale=binary32, rule=None)  # the caller passes scales
    return replace(spec, format=elementwise_format)


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
    """The order of columns: by falling diagonal entries, or as they lie.

    Args:
        gram: the matrix H.
        by_activation: whether by its diagonal.
        m: how many consecutive columns stay together, in their own falling order. Groups are in the order of their
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

    With the columns in reversed order H = L L^T. So J L J (J reverses) is the upper factor R of H = R R^T, and R^-1 the
    one sought. This takes one factorization and one triangular inverse. The inverse of H itself is never computed.

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


@partial(always_jit, static_argnames=("block", "sparsity"))
def gptq_sweep(
    columns: Array,
    scales: ElementScales,
    upper: Array,
    key: Array | None,
    *,
    block: int,
    mask: Array | None = None,
    worth: Array | None = None,
    sparsity: tuple[int, int] | None = None,
) -> tuple[Array, Array]:
    """The codes of a matrix, column after column, and the loss of each row.

    The error of a column, over the diagonal entry of U, is taken off later columns, in the ratios of that row of
    U. Within a small block this happens at once, and beyond it by a product of matrices when a block is done. The lines
    of the algorithm are from Frantar et al., "GPTQ" (2022); lines that prune are from Frantar and Alistarh, "SparseGPT"
    (2023).

    Args:
        columns: the matrix, a row for each of its columns, in the order of the sweep.
        scales: of its elements, in the same order.
        upper: the factor U.
        key: a typed key if the rounding is stochastic.
        block: how many columns make up a block, at least; whole groups of columns that are pruned together.
        mask: which elements are not zero, in the order of the sweep. Default: all, or as `sparsity` chooses.
        worth: of an element of each column, 1 / U_jj for one whose input is not always zero; with `sparsity`.
        sparsity: n and m. Of every m columns of the sweep each row keeps the n elements with the largest product of
            magnitude and worth. Magnitudes are taken when the sweep reaches the group.

    Returns:
        The codes, one entry for each element, in the order of the sweep; and the sum of squared errors of each row.
    """
    count = len(columns)
    sizes = _nested_blocks(count, block, 1 if sparsity is None else sparsity[1])
    padding = sizes[-1] - count
    by_element = [jnp.pad(part, [(0, padding), (0, 0)], mode="edge") for part in scales.by_element]
    columns = jnp.pad(columns, [(0, padding), (0, 0)])
    upper = jnp.pad(upper, [(0, padding), (0, padding)]) + jnp.diag(
        (jnp.arange(count + padding) >= count).astype(upper.dtype)
    )
    mask = None if mask is None else jnp.pad(mask, [(0, padding), (0, 0)])
    worth = None if worth is None else jnp.pad(worth, [(0, padding)])

    def round_at_index(index: Array, column: Array) -> tuple[Array, Array]:
        parts = [lax.dynamic_index_in_dim(part, index, keepdims=False) for part in by_element]
        column_key = None if key is None else jax.random.fold_in(key, index)
        entries, numbers = scales.with_elements(parts).round(column, column_key)
        return entries, numbers.astype(column.dtype)

    code_dtype = jax.eval_shape(lambda: round_at_index(jnp.int32(0), columns[0])[0]).dtype

    def sweep_columns(start: Array, matrix: Array, upper: Array) -> tuple[Array, Array]:
        def choose_mask(i: Array, matrix: Array, mask: Array) -> Array:
            assert sparsity is not None and worth is not None
            magnitude = jnp.abs(lax.dynamic_slice_in_dim(matrix, i, sparsity[1]))
            score = magnitude * lax.dynamic_slice_in_dim(worth, start + i, sparsity[1])[:, None]
            return lax.dynamic_update_slice_in_dim(mask, largest_mask((score, magnitude), *sparsity), i, 0)

        def sweep_column(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            matrix, codes, *masks = state
            if sparsity is not None:
                masks = [lax.cond(i % sparsity[1] == 0, choose_mask, lambda i, part, stay: stay, i, matrix, *masks)]
            column, upper_row = (lax.dynamic_index_in_dim(v, i, keepdims=False) for v in (matrix, upper))
            target = jnp.where(lax.dynamic_index_in_dim(masks[0], i, keepdims=False), column, 0) if masks else column
            entries, numbers = round_at_index(start + i, target)
            error = (column - numbers) / upper_row[i]
            matrix = lax.dynamic_update_index_in_dim(matrix - upper_row[:, None] * error[None, :], error, i, 0)
            return matrix, lax.dynamic_update_index_in_dim(codes, entries, i, 0), *masks

        masks = [] if mask is None else [lax.dynamic_slice_in_dim(mask, start, len(matrix))]
        if sparsity is not None:
            masks = [jnp.ones(matrix.shape, bool)]
        errors, codes, *_ = lax.fori_loop(
            0, len(matrix), sweep_column, (matrix, jnp.zeros(matrix.shape, code_dtype), *masks)
        )
        return errors, codes

    def sweep_block(depth: int, start: Array, matrix: Array, upper: Array) -> tuple[Array, Array]:
        """The errors, which replace the columns one by one, and the codes of a block at `start`."""
        if depth == 0:
            return sweep_columns(start, matrix, upper)
        size = sizes[depth - 1]

        def sweep_part(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            matrix, codes = state
            at = index * size
            upper_rows = lax.dynamic_slice_in_dim(upper, at, size)
            errors, part_codes = sweep_block(
                depth - 1, start + at, lax.dynamic_slice_in_dim(matrix, at, size),
                lax.dynamic_slice_in_dim(upper_rows, at, size, axis=1),
            )  # fmt: skip
            matrix = matrix - jnp.matmul(upper_rows.T, errors, precision=_ROUND_PRECISION)
            parts = (matrix, errors), (codes, part_codes)
            return tuple(lax.dynamic_update_slice_in_dim(whole, part, at, 0) for whole, part in parts)  # type: ignore[return-value]

        return lax.fori_loop(0, len(matrix) // size, sweep_part, (matrix, jnp.zeros(matrix.shape, code_dtype)))

    errors, codes = sweep_block(len(sizes) - 1, jnp.int32(0), columns, upper)
    return codes[:count], (errors * errors).sum(0)


#: How many columns are brought up to date one by one, and how many blocks are brought up to date by one product.
_LEAST_BLOCK, _BLOCKS_OF_BLOCK = 16, 8


def _nested_blocks(count: int, block: int, group: int) -> list[int]:
    """The sizes of blocks within blocks of a sweep over columns, ascending; the last holds all `count` columns.

    Each is a multiple of the one before, and of `group`. A column changes its own small block, which stays in a cache.
    All other changes are products of matrices.
    """
    block = -(-min(block, count) // group) * group
    least = min(block, -(-_LEAST_BLOCK // group) * group)
    sizes = [least, -(-block // least) * least]
    outer = -(-count // (sizes[1] * _BLOCKS_OF_BLOCK))
    sizes.append(-(-count // (outer * sizes[1])) * sizes[1])
    return [*dict.fromkeys([*sizes, outer * sizes[2]])]


# -- the steps of one parameter ---------------------------------------------------------------------------------------


def clip_groups(
    step: Clip, target: Array, gram: Array, worth: Array | None, *, placement: WeightLayout, layout: MatrixLayout
) -> Array:
    """A parameter whose groups are clipped so that the errors of its product are least.

    Each group is rounded by itself. Its share of the error comes from its own inputs: tr(E^T H E), with the group's
    errors E and its rows and columns of H. Before a sweep, which takes the error of a column off the
    others, the rest of each error counts. Numbers then move, so a share must save `_LEAST_GAIN` of it, or the
    group keeps its range. Numbers beyond the ends of the clipped group keep their values, and are rounded to the ends
    of its scale.

    Args:
        step: the step.
        target: the parameter.
        gram: the mean H of x x^T over the inputs, (batch, summed, summed).
        worth: of the columns in the sweep after it, `column_worth` of each matrix, (batch, summed); None without one.
        placement: its rounding.
        layout: it as matrices.
    """
    nearest_placement, numbers = placement_to_nearest(placement), group_numbers(placement, layout, jnp)
    fmt = placement.spec.scaled
    count = 1 if fmt is None else math.prod(fmt.scale_shape(placement.shape))
    matrices = layout.lay(target).astype(gram.dtype)
    group_products = _inner_products(placement, layout, gram)
    if worth is not None:
        remaining = (worth * worth)[:, :, None]
        group_products = lambda error: error * remaining  # noqa: E731
    groups = numbers.reshape(-1)
    low, high = (bound(matrices.reshape(-1), groups, count) for bound in (jax.ops.segment_min, jax.ops.segment_max))

    def clip_to(share: Array) -> Array:
        return jnp.clip(matrices, (share * low)[numbers], (share * high)[numbers])

    def try_share(iteration: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        best_share, least_loss = state
        share = (1 - iteration * (1 - step.least) / step.points).astype(matrices.dtype)
        packed_weight = nearest_placement.pack(layout.back(clip_to(share)).astype(target.dtype))
        _, values = round_under_scales(packed_weight, target, layout)
        error = matrices - layout.lay(values).astype(matrices.dtype)
        losses = jax.ops.segment_sum((error * group_products(error)).reshape(-1), groups, count)
        if worth is not None:
            losses = jnp.where(iteration == 0, losses * (1 - _LEAST_GAIN), losses)
        is_better = losses < least_loss
        return jnp.where(is_better, share, best_share), jnp.minimum(losses, least_loss)

    initial_state = jnp.ones(count, matrices.dtype), jnp.full(count, jnp.inf, matrices.dtype)
    best, _ = lax.fori_loop(0, step.points + 1, try_share, initial_state)
    return layout.back(clip_to(best)).astype(target.dtype)


def placement_to_nearest(placement: WeightLayout) -> WeightLayout:
    """A placement without random numbers."""
    if not placement.spec.rounding.stochastic:
        return placement
    return replace(placement, spec=replace(placement.spec, rounding=Rounding.NEAREST_EVEN, random_bits=None))


def group_numbers(placement: WeightLayout, layout: MatrixLayout, xp: Any) -> Any:
    """The number of the group of each element of a parameter that is laid out as matrices; 0 without groups.

    Args:
        placement: its rounding.
        layout: it as matrices.
        xp: `jax.numpy`, or `numpy` for a constant.
    """
    fmt, shape = placement.spec.scaled, placement.shape
    numbers = xp.zeros(shape, np.int32)
    if fmt is not None:
        for axis, (size, counts) in enumerate(zip(fmt.group_shape(shape), fmt.scale_shape(shape), strict=True)):
            indexes = (xp.arange(shape[axis], dtype=np.int32) // size).reshape([-1, *[1] * (len(shape) - axis - 1)])
            numbers = numbers * counts + indexes
    return layout.lay(numbers.reshape(layout.shape))


def _inner_products(placement: WeightLayout, layout: MatrixLayout, gram: Array) -> Callable[[Array], Array]:
    """The product of H, without its entries between elements of different groups, with a matrix of each batch."""
    numbers = group_numbers(placement, layout, np)
    first_number = numbers[:1, :, :1]
    if not (numbers - first_number == (numbers - first_number)[:, :1]).all():  # columns are cut in different ways

        def column_dot(args: tuple[Array, Array, Array]) -> Array:
            gram, groups, error = args
            return jnp.matmul(jnp.where(groups[:, None] == groups, gram, 0), error, precision=_ROUND_PRECISION)

        def products_by_column(error: Array) -> Array:
            groups = group_numbers(placement, layout, jnp)
            parts = [groups.swapaxes(1, 2), error.swapaxes(1, 2)]
            return lax.map(lambda v: lax.map(lambda w: column_dot((v[0], *w)), v[1:]), (gram, *parts)).swapaxes(1, 2)

        return products_by_column
    pattern = first_number[0, :, 0]
    count, size = len(pattern), int((pattern == pattern[:1]).sum())
    if size and count % size == 0 and (np.unique(pattern, return_inverse=True)[1] == np.arange(count) // size).all():
        split_gram = gram.reshape(-1, count // size, size, count // size, size)
        blocks = jnp.moveaxis(jnp.diagonal(split_gram, axis1=1, axis2=3), -1, 1)

        def products_by_block(error: Array) -> Array:
            parts = error.reshape(error.shape[0], -1, size, error.shape[2])
            return jnp.matmul(blocks, parts, precision=_ROUND_PRECISION).reshape(error.shape)

        return products_by_block
    group_gram = jnp.where(pattern[:, None] == pattern, gram, 0)
    return lambda error: jnp.matmul(group_gram, error, precision=_ROUND_PRECISION)


def round_under_scales(
    packed_weight: QArray | StoredAs, target: Array, layout: MatrixLayout, key: Array | None = None
) -> tuple[Array, Array]:
    """The codes and the numbers of a parameter, in its shape, under the scales of a packed one."""
    scales = element_scales(qarray_of(packed_weight))
    parts = [part.reshape(-1) for part in scales.by_element]
    entries, numbers = scales.with_elements(parts).round(target.reshape(-1), key)
    return entries.reshape(layout.shape), numbers.reshape(layout.shape)


def neighbours(matrix: Array, scales: ElementScales) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The codes and numbers around each number; beyond the end of the format, the ones at the end, twice."""

    def towards(mode: str) -> tuple[Array, Array]:
        own = replace(scales, spec=replace(scales.spec, rounding=mode, random_bits=None, overflow="saturate"))

        def round_row(column: Array, *parts: Array) -> tuple[Array, Array]:
            return own.with_elements(parts).round(column)

        entries, numbers = jax.vmap(round_row)(matrix, *scales.by_element)
        return entries, numbers.astype(matrix.dtype)

    down, up = towards("down"), towards("up")
    is_negative = down[1] > up[1]  # under a negative scale
    below = tuple(jnp.where(is_negative, u, d) for d, u in zip(down, up, strict=True))
    above = tuple(jnp.where(is_negative, d, u) for d, u in zip(down, up, strict=True))
    return below, above  # type: ignore[return-value]


def param_neighbours(packed_weight: QArray | StoredAs, target: Array, stack: int) -> tuple[Array, Array]:
    """The numbers around each number of a parameter with `stack` axes of a stack, under the scales of a packed one."""
    below, above = [], []
    for turn in np.ndindex(*target.shape[:stack]):
        scales = element_scales(qarray_of(jax.tree.map(lambda v, turn=turn: v[turn], packed_weight)))
        rows = scales.with_elements([part.reshape(1, -1) for part in scales.by_element])
        for numbers, (_, own) in zip((below, above), neighbours(target[turn].reshape(1, -1), rows), strict=True):
            numbers.append(own)
    return tuple(jnp.concatenate(numbers).reshape(target.shape) for numbers in (below, above))  # type: ignore[return-value]


def fraction_of_gap(matrix: Array, below: Array, above: Array) -> tuple[Array, Array]:
    """Where each number is between its neighbours, from 0 to 1, and their distance."""
    gap = above - below
    return jnp.where(gap > 0, (matrix - below) / jnp.where(gap > 0, gap, 1), 0), gap


def move_offset(offset: Array, slope_sum: Array, i: Any, iterations: int, rate: float) -> Array:
    """The offset after a step against the signs of gradients."""
    return jnp.clip(offset - rate * (1 - i / iterations) / iterations * jnp.sign(slope_sum), -0.5, 0.5)


@partial(always_jit, static_argnames=("iterations", "rate", "momentum"))
def sign_descent(
    matrix: Array, gram: Array, below: Array, above: Array, *, iterations: int, rate: float, momentum: float
) -> tuple[Array, Array]:
    """Which numbers of a matrix take the neighbour above, and the error of the product in each column of it.

    A number at the fraction f of the way between its neighbours takes the one above if f + v > 1/2. The offset v is
    within [-1/2, 1/2]. Offsets begin with 0, and move against the sign of the gradient of tr(E^T H E), for the errors
    E of rounding. The gradient is summed up with momentum, and the rate falls to 0. The best offsets of each column
    are kept, to nearest among them.

    Args:
        matrix: the numbers, (summed, kept).
        gram: the mean H of x x^T.
        below: the neighbours that are not larger.
        above: the neighbours that are not smaller.
        iterations: how many steps.
        rate: the first rate times the number of steps.
        momentum: the share of the sum of gradients that is kept in each step.
    """
    fraction, gap = fraction_of_gap(matrix, below, above)

    def step(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        offset, slope_sum, best, least_loss = state
        takes_above = (fraction + offset > 0.5) & (gap > 0)
        error = jnp.where(takes_above, above, below) - matrix
        slope = jnp.matmul(gram, error, precision=_ROUND_PRECISION)
        loss = (error * slope).sum(0)
        is_better = loss < least_loss
        slope_sum = momentum * slope_sum + slope
        offset = move_offset(offset, slope_sum, i, iterations, rate)
        return offset, slope_sum, jnp.where(is_better[None, :], takes_above, best), jnp.minimum(loss, least_loss)

    zeros = jnp.zeros_like(matrix)
    initial_state = zeros, zeros, jnp.zeros(matrix.shape, bool), jnp.full(matrix.shape[1], jnp.inf, matrix.dtype)
    _, _, best, least_loss = lax.fori_loop(0, iterations + 1, step, initial_state)
    return best, least_loss


class RoundingOutcome(NamedTuple):
    """A rounded parameter, and facts for the report of each of its matrices.

    Args:
        weight: the parameter.
        numbers: its numbers.
        energy: the mean square of the outputs W x, summed over them.
        before: the mean square of the errors of the outputs if every element is rounded to nearest by itself.
        after: the mean square of the errors of the outputs of the rounded parameter.
        damping: of the factorization; 0 without one.
        tries: how many factorizations there were.
        dead: how many columns had no input but zero.
        zeros: the share of numbers that are zero.
        no_factor: whether there is no factorization even so.
    """

    weight: QArray | StoredAs
    numbers: Array
    energy: Array
    before: Array
    after: Array
    damping: Array
    tries: Array
    dead: Array
    zeros: Array
    no_factor: Array


@partial(always_jit, static_argnames=("placement", "layout", "steps"))
def round_parameter(
    weight: Array,
    gram: Array,
    cross: Array | None,
    key: Array | None,
    *,
    placement: WeightLayout,
    layout: MatrixLayout,
    steps: CalibrationSteps,
    above: Array | None = None,
) -> RoundingOutcome:
    """A parameter without axes of a stack, rounded.

    Args:
        weight: the parameter.
        gram: the mean of y y^T over the inputs y of its product, (batch, summed, summed).
        cross: the mean of y (x - y)^T with the inputs x in full precision; None if nothing is corrected.
        key: a typed key if the rounding is stochastic.
        placement: its rounding.
        layout: it as matrices.
        steps: the steps to take.
        above: which numbers take the neighbour above; None if the steps choose it.
    """
    dtype = jnp.promote_types(weight.dtype, jnp.float32)
    gram = gram.astype(dtype)
    nearest, final_placement = placement.pack(weight, key), placement
    pruning = pruning_of(steps, placement.spec)
    if pruning is not None and pruning is not steps.pruning:  # the format drops numbers, and these steps choose them
        assert placement.spec.scaled is not None
        placement = replace(placement, spec=replace(placement.spec, format=placement.spec.scaled.dense))
    target, no_factor = weight, jnp.zeros(layout.matrix_shape[0], bool)
    if steps.correction is not None and cross is not None:
        new_matrices = _each_matrix(
            partial(_correct_matrix, steps.correction), layout.lay(weight).astype(dtype), gram, cross.astype(dtype)
        )
        no_factor = ~jnp.isfinite(new_matrices).all((1, 2))
        target = layout.back(new_matrices).astype(weight.dtype)
    order_and_factor, worth = None, None
    if isinstance(steps.sweep, Sweep):
        order_and_factor = _each_matrix(partial(_order_and_factor, steps.sweep, pruning), gram)
        worth = _each_matrix(column_worth, *order_and_factor)
    target_matrices, mask = layout.lay(target).astype(dtype), None
    if pruning is not None and pruning.by != "loss":
        mask = _each_matrix(partial(_pruning_mask, pruning), target_matrices, gram)
        target = jnp.where(layout.back(mask), target, 0)
    if steps.scales is None or placement.spec.scaled is None:
        packed_weight = placement.pack(target, key)
    elif isinstance(steps.scales, HalfQuadratic):
        packed_weight = placement.pack(
            target, key, *fit_half_quadratic(target.reshape(placement.shape), placement.spec, **vars(steps.scales))
        )
    else:
        clipped = clip_groups(steps.scales, target, gram, worth, placement=placement, layout=layout)
        packed_weight = placement.pack(clipped, key)
        if steps.sweep is None:
            packed_weight = with_entries(packed_weight, round_under_scales(packed_weight, target, layout, key)[0])
    zeros = jnp.zeros(layout.matrix_shape[0], dtype)
    damping, tries, dead = zeros, zeros.astype(jnp.int32), (jnp.diagonal(gram, axis1=1, axis2=2) == 0).sum(1)
    if steps.sweep is not None:
        q = qarray_of(packed_weight)
        scales = element_scales(q)
        choose = partial(_choose_codes, steps.sweep, pruning, scales, key)
        by_element = tuple(layout.lay(part) for part in scales.by_element)
        numbers = jnp.arange(layout.matrix_shape[0])
        chosen = None if above is None else layout.lay(above)
        entries = _each_matrix(choose, numbers, target_matrices, gram, by_element, mask, order_and_factor, chosen)
        packed_weight = with_entries(packed_weight, layout.back(entries).reshape(q.shape))
    if order_and_factor is not None:
        _, factor = order_and_factor
        damping, tries = factor.damping, factor.tries
        no_factor |= ~jnp.isfinite(factor.upper).all((1, 2))
    packed_weight = _in_sparse_format(packed_weight, final_placement)
    values = unpack_param(packed_weight)
    differences = [layout.lay(v).astype(dtype) for v in (weight, weight - unpack_param(nearest), weight - values)]
    energy, before, after = (_each_matrix(_quadratic_form, v, gram) for v in differences)
    return RoundingOutcome(
        packed_weight, values, energy, before, after, damping, tries, dead, (values == 0).mean(dtype=dtype), no_factor
    )


def pruning_of(steps: CalibrationSteps, spec: Spec) -> Sparse | None:
    """How a weight is pruned: by the step, or by its format with `sparse`.

    The sweep of GPTQ prunes as SparseGPT does; other steps keep the largest numbers. Without any of them the format
    itself does, as it rounds.
    """
    fmt = spec.scaled
    if fmt is None or fmt.sparse is None or (steps.pruning is None and steps.sweep is None and steps.scales is None):
        return steps.pruning
    by = "loss" if isinstance(steps.sweep, Sweep) else "magnitude"
    return Sparse(*fmt.sparse, by if steps.pruning is None else steps.pruning.by)


def _in_sparse_format(packed_weight: QArray | StoredAs, placement: WeightLayout) -> QArray | StoredAs:
    """A pruned parameter with the codes of its numbers alone that are not zero, if its format has `sparse`."""
    spec, q = placement.spec, qarray_of(packed_weight)
    if spec.scaled is None or spec.scaled.sparse is None or q.places is not None:
        return packed_weight
    mask = sparse_mask(dequantize(q), spec.scaled)
    sparse_array = q.thinned(mask, spec, spec.scaled.axis_of_sparse % q.ndim)
    return replace(packed_weight, stored=sparse_array) if isinstance(packed_weight, StoredAs) else sparse_array


def _each_matrix(function: Any, *args: Any) -> Any:
    """Apply a function to each matrix, the first axis of all arguments; without a loop if there is one."""
    if jax.tree.leaves(args)[0].shape[0] == 1:
        out = function(*jax.tree.map(lambda v: v[0], args))
        return jax.tree.map(lambda v: v[None], out)
    return lax.map(lambda matrix_args: function(*matrix_args), args)


def _choose_codes(
    step: Sweep | SignDescent,
    pruning: Sparse | None,
    scales: ElementScales,
    key: Array | None,
    index: Array,
    matrix: Array,
    gram: Array,
    by_element: tuple[Array, ...],
    mask: Array | None,
    order_and_factor: tuple[Array, InverseFactor] | None,
    takes_above: Array | None,
) -> Array:
    """The codes of a matrix (summed, kept) under scales by element.

    `mask` has the numbers that are not pruned; None for all. `takes_above` are choices of neighbours that are made.
    """
    if isinstance(step, SignDescent):
        kept = matrix if mask is None else jnp.where(mask, matrix, 0)
        below, above = neighbours(kept, scales.with_elements(by_element))
        options = {"iterations": step.iterations, "rate": step.rate, "momentum": step.momentum}
        descent = partial(sign_descent, matrix, gram, below[1], above[1], **options)
        return jnp.where(descent()[0] if takes_above is None else takes_above, above[0], below[0])
    assert order_and_factor is not None
    order, factor = order_and_factor
    sparsity = _sweep_sparsity(pruning) if mask is None else None
    matrix_key = None if key is None else jax.random.fold_in(key, index)
    codes, _ = gptq_sweep(
        matrix[order], scales.with_elements([part[order] for part in by_element]), factor.upper, matrix_key,
        block=step.block, mask=None if mask is None else mask[order],
        worth=None if sparsity is None else column_worth(order, factor)[order], sparsity=sparsity,
    )  # fmt: skip
    return jnp.zeros_like(codes).at[order].set(codes)


def _sweep_sparsity(pruning: Sparse | None) -> tuple[int, int] | None:
    """N and m of the pruning that a sweep does."""
    return (pruning.n, pruning.m) if pruning is not None and pruning.by == "loss" else None


def _order_and_factor(step: Sweep, pruning: Sparse | None, gram: Array) -> tuple[Array, InverseFactor]:
    """The order of the columns in a sweep, and the factor of the inverse of H in that order."""
    _, m = _sweep_sparsity(pruning) or (1, 1)
    order = column_order(gram, step.order == "activation", m)
    return order, inverse_factor(gram[order][:, order], jnp.asarray(step.damping, gram.dtype))


def column_worth(order: Array, factor: InverseFactor) -> Array:
    """The rest of an error of each column once the columns after it have taken it up: 1 / U_jj, 0 without an input.

    So a column without an input is the first to be pruned, and by magnitudes alone if its whole group has none.
    """
    worth = jnp.where(factor.dead, 0, 1 / jnp.diagonal(factor.upper))
    return jnp.zeros_like(worth).at[order].set(worth)


def _pruning_mask(pruning: Sparse, matrix: Array, gram: Array) -> Array:
    """Which numbers of a matrix (summed, kept) stay, if that is chosen before they are rounded."""
    magnitude = jnp.abs(matrix)
    output_magnitude = (magnitude * jnp.sqrt(jnp.diagonal(gram))[:, None],) if pruning.by == "inputs" else ()
    return largest_mask((*output_magnitude, magnitude), pruning.n, pruning.m)


def _correct_matrix(correction: Correction, matrix: Array, gram: Array, cross: Array) -> Array:
    """A matrix (summed, kept) that makes up for errors of its inputs."""
    mean = jnp.diagonal(gram).mean()
    mean = jnp.where(mean > 0, mean, 1)  # no input reached it
    system = gram + correction.damping * mean * jnp.eye(gram.shape[0], dtype=gram.dtype)
    right_side = jnp.matmul(cross, matrix, precision=_ROUND_PRECISION)
    return matrix + correction.strength * jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(system), right_side)


def _quadratic_form(matrix: Array, gram: Array) -> Array:
    """The sum over the columns v of a matrix (summed, kept) of v^T H v.

    H is symmetric, so the products of a large one leave out blocks above its diagonal.
    """
    size = matrix.shape[0]
    part = size if size < _LEAST_SYMMETRIC else -(-size // 4)
    total = jnp.zeros((), matrix.dtype)
    for at in range(0, size, part):
        rows, gram_rows = matrix[at : at + part], gram[at : at + part]
        product = jnp.matmul(gram_rows[:, at : at + part], rows, precision=_ROUND_PRECISION)
        if at:
            product += 2 * jnp.matmul(gram_rows[:, :at], matrix[:at], precision=_ROUND_PRECISION)
        total += (rows * product).sum()
    return total


#: The rows of H from which its symmetry saves more time than the parts of its products cost.
_LEAST_SYMMETRIC = 1024
