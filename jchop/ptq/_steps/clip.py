"""Scales of groups whose ends are clipped, chosen by the errors of products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._quantized.program.matrix_layout import MatrixLayout
from jchop._quantized.program.weight_layout import StoredAs, WeightLayout
from jchop.formats.rounding import Rounding
from jchop.ptq._data.columns import element_scales, elementwise_spec, qarray_of, round_column
from jchop.ptq._steps.steps import Clip
from jchop.storage import QArray

Array = jax.Array

__all__ = ["clip_groups", "round_under_scales"]

_CLIP_PRECISION = lax.Precision.HIGHEST


def clip_groups(step: Clip, target: Array, gram: Array, *, placement: WeightLayout, layout: MatrixLayout) -> Array:
    """A parameter whose groups are clipped so that the errors of its product are least.

    Each group is rounded by itself: its share of the error is that of its own inputs, tr(E^T H E) for the errors E of
    the group and the rows and columns of H that it has. Numbers beyond the ends of the clipped group keep their values,
    and are rounded to the ends of its scale.

    Args:
        step: the step.
        target: the parameter.
        gram: the mean H of x x^T over the inputs, (batch, summed, summed).
        placement: its rounding.
        layout: it as matrices.
    """
    spec = placement.spec
    if spec.rounding.stochastic:
        spec = replace(spec, rounding=Rounding.NEAREST_EVEN, random_bits=None)
    nearest_placement, numbers = replace(placement, spec=spec), group_numbers(placement, layout, jnp)
    count = group_count(placement)
    matrices = layout.lay(target).astype(gram.dtype)
    group_products = _inner_products(placement, layout, gram)
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
        is_better = losses < least_loss
        return jnp.where(is_better, share, best_share), jnp.minimum(losses, least_loss)

    initial_state = jnp.ones(count, matrices.dtype), jnp.full(count, jnp.inf, matrices.dtype)
    best, _ = lax.fori_loop(0, step.points + 1, try_share, initial_state)
    return layout.back(clip_to(best)).astype(target.dtype)


def group_count(placement: WeightLayout) -> int:
    """How many groups a parameter has; 1 without groups."""
    fmt = placement.spec.scaled
    return 1 if fmt is None else math.prod(fmt.scale_shape(placement.shape))


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
            return jnp.matmul(jnp.where(groups[:, None] == groups, gram, 0), error, precision=_CLIP_PRECISION)

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
            return jnp.matmul(blocks, parts, precision=_CLIP_PRECISION).reshape(error.shape)

        return products_by_block
    group_gram = jnp.where(pattern[:, None] == pattern, gram, 0)
    return lambda error: jnp.matmul(group_gram, error, precision=_CLIP_PRECISION)


def round_under_scales(
    packed_weight: QArray | StoredAs, target: Array, layout: MatrixLayout, key: Array | None = None
) -> tuple[Array, Array]:
    """The codes and the numbers of a parameter, in its shape, under the scales of a packed one."""
    q = qarray_of(packed_weight)
    scales = element_scales(q)
    spec, dtype = elementwise_spec(q.spec), target.dtype
    parts = [part.reshape(-1) for part in scales.by_element]
    entries, numbers = round_column(target.reshape(-1), *scales.quantize_args(parts), spec, dtype, key)
    return entries.reshape(layout.shape), numbers.reshape(layout.shape)
