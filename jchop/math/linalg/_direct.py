"""Calls of linear algebra; triangular systems and factorizations, every operation rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jchop._common.bit_ops import enable_x64_for
from jchop._common.checks import check, check_bool
from jchop._common.gradients import CustomJvp
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.matmul.operations import check_operation, spec_draws, widen_operand
from jchop._core.rounding.grid import require_carrier
from jchop._core.rounding.random_bits import seed_words
from jchop._emulate.rules import linalg
from jchop._emulate.rules.linalg import SpecArithmetic, factor_cholesky, solve_with_factors, substitute_triangular
from jchop._round.arguments import Key, as_array, as_operands, carrier_of_dtype, rounding_key, run_on_operands
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Gradient, Spec, SpecLike, as_spec
from jchop.math._call import as_dtype, broadcast_shape

# == calls: rounded operands, the arithmetic, and an error for derivatives =============================================


@dataclass(frozen=True)
class StaticPartial:
    """A function with its first arguments and keywords. Equal ones are compiled once; a partial equals only itself."""

    function: Callable[..., Any]
    first: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    def __call__(self, *args: Any) -> Any:
        return self.function(*self.first, *args, **dict(self.keywords))


def evaluate_systems(
    function: Callable[..., Any],
    names: Sequence[str],
    operands: Sequence[Any],
    core_ndims: Sequence[int],
    specs: Mapping[str, SpecLike],
    key: Key,
    constants: Sequence[Any] = (),
    rounding: str = "spec",
) -> Any:
    """``function(*arithmetics, *operands, *constants)`` on rounded, wide operands, for each system of a batch.

    Args:
        function: a function of the arithmetics and the operands of one system.
        names: the names of the operands.
        operands: arrays; the axes before the axes of one system are batch axes, and broadcast.
        core_ndims: the number of axes of each operand of one system.
        specs: the rounding of every operation of each arithmetic, by the names of the arguments.
        key: for a batch, system i, in C order, draws from ``jax.random.fold_in(key, i)``.
        constants: further arguments, common to all systems, which are not rounded.
        rounding: the name of the spec to which the operands are rounded.
    """
    checked_specs = {name: as_spec(spec, name) for name, spec in specs.items()}
    arrays = as_operands(names, operands)
    for name, spec in checked_specs.items():
        require_carrier(spec, carrier_of_dtype(arrays[0].dtype))
        check_operation(spec, arrays[0].dtype, name)
        check(spec.gradient == Gradient(), f"{name}={str(spec)!r} has a gradient, and this function has no derivative")
    stochastic = next(filter(spec_draws, checked_specs.values()), None)
    key = rounding_key(key, stochastic is not None, stochastic)
    shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(names, arrays, strict=True))
    batch = broadcast_shape(
        f"the leading axes of the operands do not broadcast: {shapes}",
        *(array.shape[: array.ndim - core_ndim] for array, core_ndim in zip(arrays, core_ndims, strict=True)),
    )
    first = (function, checked_specs[rounding], tuple(checked_specs.values()), len(arrays))
    traced = partial(_traced_systems, StaticPartial(_evaluate_system, first), tuple(core_ndims), batch)
    return run_on_operands(traced, (*arrays, *constants), key)


@partial(always_jit, static_argnums=(0, 1, 2), inline=True)
def _traced_systems(
    system: Callable[..., Any], ndims: tuple[int, ...], batch: tuple[int, ...], *operands_and_key: Any
) -> Any:
    """``system(*operands, key)`` for each system of a batch; operands beyond `ndims` belong to all of them."""
    *arrays, key = operands_and_key
    operands = [jnp.asarray(x) for x in arrays]
    if not batch:
        return system(*operands, key)
    count = math.prod(batch)
    axes: list[int | None] = [None] * len(operands)
    for i, core_ndim in enumerate(ndims):
        x = operands[i]
        if x.ndim > core_ndim:
            core_shape = x.shape[x.ndim - core_ndim :]
            operands[i], axes[i] = jnp.broadcast_to(x, batch + core_shape).reshape(count, *core_shape), 0
    keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(count, dtype=jnp.uint32))
    results = jax.vmap(system, in_axes=(*axes, None if key is None else 0), axis_size=count)(*operands, keys)
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), results)


def _evaluate_system(
    function: Callable[..., Any], rounding: Spec, specs: tuple[Spec, ...], count: int, *operands_and_key: Any
) -> Any:
    """The operands and then the arithmetics draw from parts of the key."""
    *arrays, key = operands_and_key
    keys = [None] * (count + len(specs)) if key is None else list(split_prng_key(key, count + len(specs)))
    values = [widen_operand(round_to_format(x, rounding, k)) for x, k in zip(arrays[:count], keys, strict=False)]

    def call(operands: list[Array], keys: list[Array | None]) -> Any:
        arithmetics = (
            SpecArithmetic(spec, None if k is None or not spec_draws(spec) else seed_words(k), operands[0].dtype)
            for spec, k in zip(specs, keys, strict=True)
        )
        return function(*arithmetics, *operands)

    return as_dtype(_without_derivative(call, [*values, *arrays[count:]], keys[count:]), arrays[0].dtype)


@partial(CustomJvp, nondiff_argnums=(0,))
def _without_derivative(function: Callable[..., Any], operands: Any, keys: Any) -> Any:
    """``function(operands, keys)``, and an error if it is differentiated."""
    return function(operands, keys)


@_without_derivative.defjvp
def _refuse_derivative(function: Callable[..., Any], primals: tuple, tangents: tuple) -> Any:
    raise NotImplementedError(
        "functions of jchop.math.linalg have no derivative; jchop.emulate of jax.numpy.linalg.solve and its like runs "
        "the same algorithms and has that of the carrier"
    )


def matrix_order(a: Any, name: str = "a") -> int:
    """The order of a matrix, or of each in a batch."""
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"{name} has shape {tuple(a.shape)}; it must be a square matrix, (..., n, n)")
    return a.shape[-1]


def check_permutation(p: Any, n: int, name: str) -> None:
    """Refuses an array that is not a permutation of n rows; the numbers of a traced array are not checked."""
    if p.shape[-1:] != (n,) or not jnp.issubdtype(p.dtype, jnp.integer):
        raise ValueError(f"{name} has shape {p.shape} and dtype {p.dtype}; it must be {n} integers")
    if not isinstance(p, Tracer) and np.any(np.sort(np.asarray(p)) != np.arange(n)):
        raise ValueError(f"{name}={np.asarray(p).tolist()} must be a permutation of 0 to {n - 1}")


def right_side_axes(b: Any, n: int, name: str = "b") -> int:
    """The number of axes of a right-hand side of one system: 1 for a vector of n elements, 2 for (..., n, k)."""
    if b.shape != (n,) and (b.ndim < 2 or b.shape[-2] != n):
        raise ValueError(f"{name} has shape {tuple(b.shape)}; it must be ({n},), or (..., {n}, k) for k columns")
    return min(b.ndim, 2)


def solve_triangular(
    a: Any, b: Any, spec: SpecLike, key: Key = None, *, lower: bool = False, unit_diagonal: bool = False
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
    substitute = StaticPartial(substitute_triangular, (), (("lower", lower), ("unit", unit_diagonal)))
    return evaluate_systems(substitute, "ab", (a, b), core_ndims, {"spec": spec}, key)


def lu(a: Any, spec: SpecLike, key: Key = None) -> Any:
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
    return evaluate_systems(_lu_factors, "a", (a,), (2,), {"spec": spec}, key)


def _lu_factors(arithmetic: SpecArithmetic, a: Array) -> tuple[Array, Array]:
    return linalg.factor_lu(arithmetic, a)[:2]


def lu_solve(factors: tuple[Any, Any], b: Any, spec: SpecLike, key: Key = None) -> Any:
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
    operands = (lu_matrix, _in_pivot_order(b, p))
    return evaluate_systems(solve_with_factors, ("factors[0]", "b"), operands, core_ndims, {"spec": spec}, key)


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


def cholesky(a: Any, spec: SpecLike, key: Key = None) -> Any:
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
    return evaluate_systems(factor_cholesky, "a", (a,), (2,), {"spec": spec}, key)


def qr(a: Any, spec: SpecLike, key: Key = None) -> Any:
    """The factors of a = q r by Householder reflections, with q formed (Higham, sections 19.1 to 19.3; LAPACK's signs).

    Let x be the part of a column on and below the diagonal. Then beta = -sign(x_0) ‖x‖ and tau = (beta - x_0) / beta. v
    is x / (x_0 - beta), except v_0 = 1. I - tau v vᵀ is applied to the columns to the right. A column that is zero
    below the diagonal, as the last one of a square matrix, stays as it is, with its sign (tau = 0).

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
    return evaluate_systems(linalg.factor_qr, "a", (a,), (2,), {"spec": spec}, key)
