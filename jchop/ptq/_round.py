"""One parameter, rounded by the statistics of its inputs."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jchop._products.placement import Placement, StoredAs
from jchop._products.weights import numbers_of
from jchop._settings import compiled
from jchop.ptq._columns import ElementScales, MatrixLayout, element_scales, one_each, stored_of, with_entries
from jchop.ptq._sign import sign_rounded
from jchop.ptq._steps import Correction, SignDescent, Steps, Sweep
from jchop.ptq._sweep import factor, order_of, sweep
from jchop.storage import QArray

Array = jax.Array

__all__ = ["Outcome", "round_parameter"]

_PRECISION = lax.Precision.HIGHEST


class Outcome(NamedTuple):
    """A rounded parameter, and what there is to report of each of its matrices.

    Args:
        packed: the parameter.
        numbers: its numbers.
        energy: the mean square of the outputs W x, summed over them.
        before: that of the errors of the outputs if every element is rounded to nearest by itself.
        after: that of the rounded parameter.
        damping: of the factorization; 0 without one.
        tries: how many factorizations there were.
        dead: how many columns had no input but zero.
        failed: whether there is no factorization even so.
    """

    packed: QArray | StoredAs
    numbers: Array
    energy: Array
    before: Array
    after: Array
    damping: Array
    tries: Array
    dead: Array
    failed: Array


@partial(compiled, static_argnames=("placement", "layout", "steps"))
def round_parameter(
    weight: Array,
    gram: Array,
    cross: Array | None,
    key: Array | None,
    *,
    placement: Placement,
    layout: MatrixLayout,
    steps: Steps,
) -> Outcome:
    """A parameter without axes of a stack, rounded.

    Args:
        weight: the parameter.
        gram: the mean of y y^T over the inputs y of its product, (batch, summed, summed).
        cross: the mean of y (x - y)^T with the inputs x in full precision; None if nothing is corrected.
        key: a typed key if the rounding is stochastic.
        placement: its rounding.
        layout: it as matrices.
        steps: what is done.
    """
    work = jnp.promote_types(weight.dtype, jnp.float32)
    gram = gram.astype(work)
    nearest = placement.pack(weight, key)
    target, failed = weight, jnp.zeros(layout.matrices[0], bool)
    if steps.correction is not None and cross is not None:
        moved = _each(partial(_corrected, steps.correction), layout.lay(weight).astype(work), gram, cross.astype(work))
        failed = ~jnp.isfinite(moved).all((1, 2))
        target = layout.back(moved).astype(weight.dtype)
    packed = placement.pack(target, key)
    none = jnp.zeros(layout.matrices[0], work)
    damping, tries, dead = none, none.astype(jnp.int32), (jnp.diagonal(gram, axis1=1, axis2=2) == 0).sum(1)
    if steps.sweep is not None:
        stored = stored_of(packed)
        scales = element_scales(stored)
        by_element = tuple(layout.lay(part) for part in scales.by_element)
        spec = one_each(stored.spec)
        laid_target = layout.lay(target).astype(work)

        def descended(matrix: Array, gram: Array, by_element: tuple[Array, ...]) -> Array:
            assert isinstance(steps.sweep, SignDescent)
            return sign_rounded(matrix, gram, by_element, scales, spec=spec, dtype=weight.dtype, by=steps.sweep)

        def swept(number: Array, matrix: Array, gram: Array, by_element: tuple[Array, ...]) -> tuple[Array, ...]:
            drawn = None if key is None else jax.random.fold_in(key, number)
            how: Any = {"spec": spec, "dtype": weight.dtype, "sweep_by": steps.sweep}
            return _swept(matrix, gram, by_element, scales, drawn, **how)

        if isinstance(steps.sweep, SignDescent):
            entries, bad = _each(descended, laid_target, gram, by_element), jnp.zeros_like(failed)
        else:
            numbers = jnp.arange(layout.matrices[0])
            entries, damping, tries, bad = _each(swept, numbers, laid_target, gram, by_element)
        packed = with_entries(packed, layout.back(entries).reshape(stored.shape))
        failed |= bad
    low = numbers_of(packed)
    laid = [layout.lay(v).astype(work) for v in (weight, weight - numbers_of(nearest), weight - low)]
    energy, before, after = (_each(_quadratic, v, gram) for v in laid)
    return Outcome(packed, low, energy, before, after, damping, tries, dead, failed)


def _each(function: Any, *args: Any) -> Any:
    """A function of each matrix; of a single one without a loop."""
    if jax.tree.leaves(args)[0].shape[0] == 1:
        out = function(*jax.tree.map(lambda v: v[0], args))
        return jax.tree.map(lambda v: v[None], out)
    return lax.map(lambda own: function(*own), args)


def _swept(
    matrix: Array,
    gram: Array,
    by_element: tuple[Array, ...],
    scales: ElementScales,
    key: Array | None,
    *,
    spec: Any,
    dtype: Any,
    sweep_by: Sweep,
) -> tuple[Array, Array, Array, Array]:
    """The codes of a matrix (summed, kept), the damping, the number of factorizations, and whether they failed."""
    order = order_of(gram, sweep_by.order == "activation")
    found = factor(gram[order][:, order], jnp.asarray(sweep_by.damping, gram.dtype))
    codes, _ = sweep(
        matrix[order], tuple(part[order] for part in by_element), scales.scale[1:], found.upper, key,
        spec=spec, dtype=dtype, block=sweep_by.block,
    )  # fmt: skip
    entries = jnp.zeros_like(codes).at[order].set(codes)
    return entries, found.damping, found.tries, ~jnp.isfinite(found.upper).all()


def _corrected(correction: Correction, matrix: Array, gram: Array, cross: Array) -> Array:
    """A matrix (summed, kept) that makes up for errors of its inputs."""
    mean = jnp.maximum(jnp.diagonal(gram).mean(), jnp.finfo(gram.dtype).tiny)
    damped = gram + correction.damping * mean * jnp.eye(gram.shape[0], dtype=gram.dtype)
    wanted = jnp.matmul(cross, matrix, precision=_PRECISION)
    return matrix + correction.strength * jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(damped), wanted)


def _quadratic(matrix: Array, gram: Array) -> Array:
    """The sum over the columns v of a matrix (summed, kept) of v^T H v."""
    return (matrix * jnp.matmul(gram, matrix, precision=_PRECISION)).sum()
