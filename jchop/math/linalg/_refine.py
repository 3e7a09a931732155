"""Iterative refinement in three precisions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check_choice, check_int
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.matmul.operations import spec_draws, widen_operand
from jchop._core.rounding.random_bits import seed_words
from jchop._emulate.rules.functions import carrier_frexp
from jchop._emulate.rules.linalg import SpecArithmetic, factor_lu, solve_with_factors
from jchop._round.arguments import SpecLike, as_array, as_operands, rounding_key, run_on_operands
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, as_spec
from jchop.math._call import as_dtype
from jchop.math.linalg._evaluate import (
    batch_shape,
    check_linalg_specs,
    map_systems,
    matrix_order,
    right_side_axes,
    without_derivative,
)
from jchop.math.linalg._krylov import minimal_residual

Array = jax.Array


@dataclass(frozen=True)
class _RefinementPlan:
    """The static data of a refinement."""

    factor: Spec
    working: Spec
    residual: Spec
    method: str
    steps: int
    inner: int


def refine(
    a: Any,
    b: Any,
    *,
    factor: SpecLike,
    working: SpecLike,
    residual: SpecLike,
    key: Array | None = None,
    method: Literal["lu", "gmres"] = "lu",
    steps: int = 10,
    inner: int = 10,
) -> Any:
    """Iterative refinement of a x = b in three precisions: of the factors a = l u, of x, and of the residual b - a x.

    With l u = a in ``factor`` and x the solution from it, in every step: r = b - a x in ``residual``, rounded to
    ``working``; a d = r; and x + d in ``working``. d comes from the factors in ``factor`` (``method="lu"``), or from
    GMRES in ``working`` on (l u)⁻¹ a d = (l u)⁻¹ r, with products with (l u)⁻¹ a in ``residual`` (``method="gmres"``).
    With unit roundoffs u_f, u, u_r = u² and κ the condition number in the maximum norm, the iterates converge to a
    backward error of about u if κ u_f, for GMRES κ² u_f² u, is somewhat less than 1: E. Carson and N. J. Higham, SIAM
    J. Sci. Comput. 40 (2018) A817-A847, table 5.1; for binary16, binary32 and binary64 up to κ of 10³ to 10⁴, and 10⁸.

    The residual is scaled exactly, by a power of two, to a largest element of 1/2 to 1, so that it does not vanish in a
    format of little range. The matrix is not scaled: its elements and the elements of u must be in the range of
    ``factor``.

    Args:
        a: float32 or float64 (or of 16 bits), shape (..., n, n); rounded to ``working`` first.
        b: of the same dtype, or promoted as in `jax.numpy`, shape (n,), or (..., n, k) for k columns, each of which is
            a system; rounded to ``working`` first.
        factor: a `jchop.Spec`, a format or text, of the factorization.
        working: the spec of x.
        residual: the spec of residuals; the dtype must hold it.
        key: a typed key, needed if any of these specs is stochastic. System i of a batch, in C order, draws from
            ``jax.random.fold_in(key, i)``, and column j as iteration j of a loop. Default None.
        method: ``"lu"`` (default) or ``"gmres"``.
        steps: the number of steps. Default 10.
        inner: the number of GMRES steps in each step. Default 10.

    Returns:
        All iterates, shape (steps + 1, n), or (..., steps + 1, n, k), the first from the factors alone, or zeros if it
        overflows.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for shapes that do not fit.
        NotImplementedError: if it is differentiated.

    Example:
        >>> import jchop as jc
        >>> how = dict(factor="bfloat16", working="binary32", residual="binary64")
        >>> x = jc.math.linalg.refine([[3.0, 1.0], [1.0, 2.0]], [5.0, 5.0], steps=4, **how)
        >>> x[-1].tolist()
        [1.0, 2.0]
    """
    check_choice("method", method, ("lu", "gmres"))
    a, b = as_array("a", a), as_array("b", b)
    b_ndim = right_side_axes(b, matrix_order(a))
    names = ("factor", "working", "residual")
    specs = [as_spec(spec, name) for spec, name in zip((factor, working, residual), names, strict=True)]
    plan = _RefinementPlan(
        specs[0], specs[1], specs[2], method, check_int("steps", steps, 0), check_int("inner", inner, 1)
    )
    arrays = as_operands("ab", (a, b))
    check_linalg_specs(specs, arrays[0].dtype, names)
    stochastic = next((spec for spec in specs if spec_draws(spec)), None)
    batch = batch_shape("ab", arrays, (2, b_ndim))
    key = rounding_key(key, stochastic is not None, stochastic)
    return run_on_operands(partial(_traced_refine, plan, b_ndim, batch), arrays, key)


@partial(always_jit, static_argnums=(0, 1, 2), inline=True)
def _traced_refine(
    plan: _RefinementPlan, b_ndim: int, batch: tuple[int, ...], a: Array, b: Array, key: Array | None
) -> Array:
    return map_systems(partial(_refine_system, plan), (2, b_ndim), batch, [jnp.asarray(a), jnp.asarray(b)], key)


def _refine_system(plan: _RefinementPlan, a: Array, b: Array, key: Array | None) -> Array:
    keys = [None] * 5 if key is None else list(split_prng_key(key, 5))
    operands = [widen_operand(round_to_format(x, plan.working, k)) for x, k in zip((a, b), keys, strict=False)]
    return as_dtype(without_derivative(partial(_refinement_iterates, plan), operands, keys[2:]), a.dtype)


def _refinement_iterates(plan: _RefinementPlan, operands: list[Array], keys: list[Array | None]) -> Array:
    a, b = operands
    if not b.size:
        return jnp.zeros((plan.steps + 1, *b.shape), b.dtype)
    factor, working, residual = (
        SpecArithmetic(spec, None if k is None or not spec_draws(spec) else seed_words(k), a.dtype)
        for spec, k in zip((plan.factor, plan.working, plan.residual), keys, strict=True)
    )
    lu_matrix, p, _ = factor_lu(factor, factor.rounded(a))
    if b.ndim == 1:
        return _column_iterates(plan, (a, lu_matrix, p), b, factor, working, residual)

    def column(j: Array, b: Array) -> Array:
        return _column_iterates(plan, (a, lu_matrix, p), b, factor.at(j), working.at(j), residual.at(j))

    return jax.vmap(column, (0, 1), 2)(jnp.arange(b.shape[1], dtype=jnp.uint32), b)


def _column_iterates(
    plan: _RefinementPlan,
    matrix: tuple[Array, Array, Array],
    b: Array,
    factor: SpecArithmetic,
    working: SpecArithmetic,
    residual: SpecArithmetic,
) -> Array:
    """The iterates of one right-hand side, with the matrix, its factors and its rows in pivot order."""
    a, lu_matrix, p = matrix

    def from_factors(ops: SpecArithmetic, r: Array) -> Array:
        """(l u)⁻¹ r by the given factors, with `r` of any size."""
        scale = _residual_scale(r)
        return solve_with_factors(ops, lu_matrix, ops.rounded(r[p] / scale)) * scale

    def update(factor_ops: SpecArithmetic, ops: SpecArithmetic, residual_ops: SpecArithmetic, r: Array) -> Array:
        if plan.method == "lu":
            return ops.rounded(from_factors(factor_ops, r))
        scale = _residual_scale(r)

        def image(inner_ops: SpecArithmetic, v: Array) -> Array:
            high_ops = residual_ops.at(inner_ops.iteration)
            return inner_ops.rounded(solve_with_factors(high_ops, lu_matrix, high_ops.matmul(a, v)[p]))

        rhs = ops.rounded(solve_with_factors(residual_ops, lu_matrix, (r / scale)[p]))
        return ops.rounded(minimal_residual(ops, image, rhs, plan.inner)[0] * scale)

    def body(x: Array, i: Array) -> tuple[Array, Array]:
        factor_ops, ops, residual_ops = factor.at(i), working.at(i), residual.at(i)
        r = ops.rounded(residual_ops.sub(b, residual_ops.matmul(a, x)))
        x = ops.add(x, update(factor_ops, ops, residual_ops, r))
        return x, x

    start = from_factors(factor, b)
    x = working.rounded(jnp.where(jnp.isfinite(start).all(), start, 0))
    _, iterates = lax.scan(body, x, jnp.arange(plan.steps, dtype=jnp.uint32))
    return jnp.concatenate([x[None], iterates])


def _residual_scale(r: Array) -> Array:
    """The power of two above all magnitudes, a normal number; 1 if they are zero or not finite."""
    bias = CARRIERS[r.dtype.name].bias
    largest = jnp.max(jnp.abs(r))
    exponent = jnp.clip(carrier_frexp(largest)[1], 2 - bias, bias - 1)
    return jnp.ldexp(jnp.ones_like(largest), exponent)
