"""Triangular systems and factorizations, every operation rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.bit_ops import enable_x64_for
from jchop._common.checks import check_bool
from jchop._emulate.rules.linalg import (
    SpecArithmetic,
    factor_cholesky,
    factor_lu,
    factor_qr,
    solve_with_factors,
    substitute_triangular,
)
from jchop._round.arguments import SpecLike, as_array
from jchop.math.linalg._evaluate import (
    StaticPartial,
    check_permutation,
    evaluate_systems,
    matrix_order,
    right_side_axes,
)

Array = jax.Array


def solve_triangular(
    a: Any, b: Any, spec: SpecLike, key: Array | None = None, *, lower: bool = False, unit_diagonal: bool = False
) -> Any:
    """The solution of a x = b with a triangular matrix, by substitution, column by column (Higham, algorithm 8.1).

    Args:
        a: float16, bfloat16, float32 or float64, shape (..., n, n); only its triangle is read. Rounded to `spec` first.
        b: of the same dtype, or promoted as in `jax.numpy`, shape (n,), or (..., n, k) for k columns; rounded too.
        spec: a `jchop.Spec`, a format or text: the rounding of every quotient, product and difference.
        key: a typed key, needed if `spec` is stochastic; every operation draws different random words. Default None.
        lower: whether `a` is lower triangular. Default False: upper.
        unit_diagonal: whether the diagonal is taken to be 1. Default False.

    Returns:
        x, of the shape of `b`, with the leading axes of both. A zero on the diagonal gives infinities or NaN.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for shapes that do not fit.
        NotImplementedError: if it is differentiated.

    Example:
        >>> import jchop as jc
        >>> jc.math.linalg.solve_triangular([[2.0, 1.0], [0.0, 3.0]], [1.0, 1.0], "bfloat16").tolist()
        [0.33203125, 0.333984375]
    """
    check_bool("lower", lower)
    check_bool("unit_diagonal", unit_diagonal)
    a, b = as_array("a", a), as_array("b", b)
    core_ndims = (2, right_side_axes(b, matrix_order(a)))
    return evaluate_systems(
        StaticPartial(substitute_triangular, (), (("lower", lower), ("unit", unit_diagonal))),
        "ab",
        (a, b),
        core_ndims,
        spec,
        key,
    )


def lu(a: Any, spec: SpecLike, key: Array | None = None) -> Any:
    """The factors of a[p] = l u, with partial pivoting (Higham, algorithm 9.2, by outer products).

    Args:
        a: float16, bfloat16, float32 or float64, shape (..., n, n). Rounded to `spec` first.
        spec: a `jchop.Spec`, a format or text: the rounding of every quotient, product and difference.
        key: a typed key, needed if `spec` is stochastic. Default None.

    Returns:
        Two arrays: l below the diagonal (its own is 1) and u on and above it, shape (..., n, n); and p, int32, shape
        (..., n).
        A column of zeros gives NaN in l.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for a matrix that is not square.
        NotImplementedError: if it is differentiated.

    Example:
        >>> import jchop as jc
        >>> factors, p = jc.math.linalg.lu([[1.0, 2.0], [3.0, 4.0]], "bfloat16")
        >>> factors.tolist(), p.tolist()
        ([[3.0, 4.0], [0.333984375, 0.6640625]], [1, 0])
    """
    a = as_array("a", a)
    matrix_order(a)
    return evaluate_systems(_lu_factors, "a", (a,), (2,), spec, key)


def _lu_factors(arithmetic: SpecArithmetic, a: Array) -> tuple[Array, Array]:
    return factor_lu(arithmetic, a)[:2]


def lu_solve(factors: tuple[Any, Any], b: Any, spec: SpecLike, key: Array | None = None) -> Any:
    """The solution of a x = b from `jchop.math.linalg.lu` of a: two triangular systems.

    Args:
        factors: the result of `jchop.math.linalg.lu`.
        b: of their dtype, shape (n,), or (..., n, k) for k columns. Rounded to `spec` first, like the factors.
        spec: a `jchop.Spec`, a format or text: the rounding of every operation.
        key: a typed key, needed if `spec` is stochastic. Default None.

    Returns:
        x, of the shape of `b`, with the leading axes of all.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `jchop.math.linalg.lu`, or if factors[1] is not a permutation
            of the rows; a traced factors[1] is not checked.

    Example:
        >>> import jchop as jc
        >>> factors = jc.math.linalg.lu([[1.0, 2.0], [3.0, 4.0]], "bfloat16")
        >>> jc.math.linalg.lu_solve(factors, [1.0, 1.0], "bfloat16").tolist()
        [-1.0, 1.0]
    """
    if not isinstance(factors, Sequence) or len(factors) != 2:
        raise TypeError("factors must be the two arrays that jchop.math.linalg.lu gave")
    lu_matrix, p = (as_array(f"factors[{i}]", factors[i]) for i in (0, 1))
    b = as_array("b", b)
    n = matrix_order(lu_matrix, "factors[0]")
    core_ndims = (2, right_side_axes(b, n))
    check_permutation(p, n, "factors[1]")
    return evaluate_systems(
        solve_with_factors, ("factors[0]", "b"), (lu_matrix, _in_pivot_order(b, p)), core_ndims, spec, key
    )


def _in_pivot_order(b: Any, p: Any) -> Any:
    """The rows of a right-hand side in pivot order; one vector has the axes of a batch of permutations."""
    if isinstance(p, jax.Array) and not isinstance(b, jax.Array):
        with enable_x64_for(b.dtype):
            b = jnp.asarray(b)
    if b.ndim == 1:
        return b[p]
    module: Any = jnp if isinstance(b, jax.Array) else np
    indices = p.reshape(*(1,) * (b.ndim - 1 - p.ndim), *p.shape, 1)
    rows = b.reshape(*(1,) * (indices.ndim - b.ndim), *b.shape)
    return module.take_along_axis(rows, indices, axis=-2)


def cholesky(a: Any, spec: SpecLike, key: Array | None = None) -> Any:
    """The lower triangular l of a = l lᵀ (Higham, algorithm 10.2, by outer products).

    Args:
        a: float16, bfloat16, float32 or float64, shape (..., n, n), symmetric and positive definite; the lower triangle
            is read. Rounded to `spec` first.
        spec: a `jchop.Spec`, a format or text: the rounding of every root, quotient, product and difference.
        key: a typed key, needed if `spec` is stochastic. Default None.

    Returns:
        l, shape (..., n, n), zeros above the diagonal. If a pivot is negative, l is NaN from its column on.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `jchop.math.linalg.lu`.

    Example:
        >>> import jchop as jc
        >>> jc.math.linalg.cholesky([[2.0, 1.0], [1.0, 2.0]], "bfloat16").tolist()
        [[1.4140625, 0.0], [0.70703125, 1.2265625]]
    """
    a = as_array("a", a)
    matrix_order(a)
    return evaluate_systems(factor_cholesky, "a", (a,), (2,), spec, key)


def qr(a: Any, spec: SpecLike, key: Array | None = None) -> Any:
    """The factors of a = q r by Householder reflections, with q formed (Higham, sections 19.1 to 19.3; LAPACK's signs).

    With x the part of a column on and below the diagonal: beta = -sign(x_0) ‖x‖, tau = (beta - x_0) / beta, v = x /
    (x_0 - beta) except v_0 = 1, and I - tau v vᵀ is applied to the columns to the right. A column that is zero below
    the diagonal, such as the last one of a square matrix, is left as it is, with its sign (tau = 0).

    Args:
        a: float16, bfloat16, float32 or float64, shape (..., m, n) with m >= n. Rounded to `spec` first.
        spec: a `jchop.Spec`, a format or text: the rounding of every operation. The norms are not scaled, so squares
            can overflow in a format of little range.
        key: a typed key, needed if `spec` is stochastic. Default None.

    Returns:
        q of shape (..., m, m) and r of shape (..., m, n).

    Raises:
        TypeError, ValueError, NotImplementedError: as for `jchop.math.linalg.lu`, or if m < n.

    Example:
        >>> import jchop as jc
        >>> q, r = jc.math.linalg.qr([[3.0, 1.0], [4.0, 2.0]], "bfloat16")
        >>> r.tolist()
        [[-5.0, -2.203125], [0.0, 0.3984375]]
    """
    a = as_array("a", a)
    if a.ndim < 2 or a.shape[-2] < a.shape[-1]:
        raise ValueError(f"a has shape {tuple(a.shape)}; it must be (..., m, n) with m >= n")
    return evaluate_systems(factor_qr, "a", (a,), (2,), spec, key)
