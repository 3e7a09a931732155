"""One parameter, rounded by the statistics of its inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.settings import always_jit
from jchop._core.scaled.sparse import largest_mask, sparse_mask
from jchop._quantized.program.lazy_params import unpack_param
from jchop._quantized.program.matrix_layout import MatrixLayout
from jchop._quantized.program.weight_layout import StoredAs, WeightLayout
from jchop._spec.spec import Spec
from jchop.ptq._data.columns import ElementScales, element_scales, elementwise_spec, qarray_of, with_entries
from jchop.ptq._steps.clip import clip_groups, round_under_scales
from jchop.ptq._steps.sign_round import sign_round_codes
from jchop.ptq._steps.steps import CalibrationSteps, Correction, HalfQuadratic, SignDescent, Sparse, Sweep
from jchop.ptq._steps.sweep import column_order, gptq_sweep, inverse_factor
from jchop.storage import QArray, dequantize, fit_half_quadratic

Array = jax.Array

__all__ = ["RoundingOutcome", "pruning_of", "round_parameter"]

_ROUND_PRECISION = lax.Precision.HIGHEST


class RoundingOutcome(NamedTuple):
    """A rounded parameter, and what there is to report of each of its matrices.

    Args:
        weight: the parameter.
        numbers: its numbers.
        energy: the mean square of the outputs W x, summed over them.
        before: that of the errors of the outputs if every element is rounded to nearest by itself.
        after: that of the rounded parameter.
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
) -> RoundingOutcome:
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
    dtype = jnp.promote_types(weight.dtype, jnp.float32)
    gram = gram.astype(dtype)
    nearest, final_placement = placement.pack(weight, key), placement
    pruning = pruning_of(steps, placement.spec)
    if pruning is not None and pruning is not steps.pruning:  # the format drops numbers, and these steps choose them
        assert placement.spec.scaled is not None
        placement = replace(placement, spec=replace(placement.spec, format=placement.spec.scaled.dense))
    target, no_factor = weight, jnp.zeros(layout.matrices[0], bool)
    if steps.correction is not None and cross is not None:
        new_matrices = _each_matrix(
            partial(_correct_matrix, steps.correction), layout.lay(weight).astype(dtype), gram, cross.astype(dtype)
        )
        no_factor = ~jnp.isfinite(new_matrices).all((1, 2))
        target = layout.back(new_matrices).astype(weight.dtype)
    target_matrices, mask = layout.lay(target).astype(dtype), None
    if pruning is not None and pruning.by != "loss":
        mask = _each_matrix(partial(_pruning_mask, pruning), target_matrices, gram)
        target = jnp.where(layout.back(mask), target, 0)
    if steps.scales is None:
        packed_weight = placement.pack(target, key)
    elif isinstance(steps.scales, HalfQuadratic):
        packed_weight = placement.pack(
            target, key, *fit_half_quadratic(target.reshape(placement.shape), placement.spec, **vars(steps.scales))
        )
    else:
        packed_weight = placement.pack(clip_groups(steps.scales, target, gram, placement=placement, layout=layout), key)
        if steps.sweep is None:
            packed_weight = with_entries(packed_weight, round_under_scales(packed_weight, target, layout, key)[0])
    zeros = jnp.zeros(layout.matrices[0], dtype)
    damping, tries, dead = zeros, zeros.astype(jnp.int32), (jnp.diagonal(gram, axis1=1, axis2=2) == 0).sum(1)
    if steps.sweep is not None:
        q = qarray_of(packed_weight)
        scales = element_scales(q)
        by_element = tuple(layout.lay(part) for part in scales.by_element)
        spec = elementwise_spec(q.spec)

        def descend(matrix: Array, gram: Array, by_element: tuple[Array, ...], mask: Array | None) -> Array:
            assert isinstance(steps.sweep, SignDescent)
            options: Any = {"spec": spec, "dtype": weight.dtype, "by": steps.sweep, "mask": mask}
            return sign_round_codes(matrix, gram, by_element, scales, **options)

        def sweep(
            matrix_index: Array, matrix: Array, gram: Array, by_element: tuple[Array, ...], mask: Array | None
        ) -> tuple[Array, ...]:
            matrix_key = None if key is None else jax.random.fold_in(key, matrix_index)
            options: Any = {"spec": spec, "dtype": weight.dtype, "sweep": steps.sweep, "pruning": pruning, "mask": mask}
            return _sweep_matrix(matrix, gram, by_element, scales, matrix_key, **options)

        if isinstance(steps.sweep, SignDescent):
            entries, fails = _each_matrix(descend, target_matrices, gram, by_element, mask), jnp.zeros_like(no_factor)
        else:
            numbers = jnp.arange(layout.matrices[0])
            entries, damping, tries, fails = _each_matrix(sweep, numbers, target_matrices, gram, by_element, mask)
        packed_weight = with_entries(packed_weight, layout.back(entries).reshape(q.shape))
        no_factor |= fails
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


def _sweep_matrix(
    matrix: Array,
    gram: Array,
    by_element: tuple[Array, ...],
    scales: ElementScales,
    key: Array | None,
    *,
    spec: Any,
    dtype: Any,
    sweep: Sweep | SignDescent | None,
    pruning: Sparse | None,
    mask: Array | None,
) -> tuple[Array, Array, Array, Array]:
    """The codes of a matrix (summed, kept), the damping, the number of factorizations, and whether they failed."""
    assert isinstance(sweep, Sweep)
    sparsity = None if pruning is None or mask is not None else (pruning.n, pruning.m)
    order = column_order(gram, sweep.order == "activation", 1 if sparsity is None else sparsity[1])
    factorization = inverse_factor(gram[order][:, order], jnp.asarray(sweep.damping, gram.dtype))
    # A column without an input is the first to be pruned, and by magnitudes alone if its whole group has none.
    worth = None if sparsity is None else jnp.where(factorization.dead, 0, 1 / jnp.diagonal(factorization.upper))
    codes, _ = gptq_sweep(
        matrix[order], tuple(part[order] for part in by_element), scales.scale[1:], factorization.upper, key,
        spec=spec, dtype=dtype, block=sweep.block, mask=None if mask is None else mask[order], worth=worth,
        sparsity=sparsity,
    )  # fmt: skip
    entries = jnp.zeros_like(codes).at[order].set(codes)
    return entries, factorization.damping, factorization.tries, ~jnp.isfinite(factorization.upper).all()


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
    """The sum over the columns v of a matrix (summed, kept) of v^T H v."""
    return (matrix * jnp.matmul(gram, matrix, precision=_ROUND_PRECISION)).sum()
