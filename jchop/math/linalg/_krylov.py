"""Krylov methods and iterative refinement, every operation rounded, and the linear operators that they take."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.core import Literal as JaxprLiteral

from jchop._common.bit_ops import CARRIERS, enable_x64_for
from jchop._common.checks import call_hint, check, check_choice, check_int
from jchop._core.matmul.operations import operation_carrier
from jchop._emulate.rules.functions import carrier_frexp
from jchop._emulate.rules.linalg import SpecArithmetic, factor_lu, solve_with_factors, substitute_triangular
from jchop._round.arguments import Key, as_array, as_operands, has_tracer
from jchop._spec.spec import SpecLike
from jchop.math.linalg._direct import StaticPartial, evaluate_systems, matrix_order, right_side_axes

# == linear operators given as functions of vectors ====================================================================


@dataclass(frozen=True)
class LinearOperator:
    """A function of a vector, traced; the arrays of its trace are operands beside it.

    Operators of equal programs are equal, so that functions which differ only in arrays are compiled once.

    Args:
        text: the program as text.
        values: the parts that the text does not show: the numbers in the program, and the arrays, by their identity.
        program: the program itself.
        constants: the number of arrays that are constants of the trace; the others are arguments before the vector.
    """

    text: str
    values: tuple[Hashable, ...]
    program: Any = field(compare=False)
    constants: int

    def __call__(self, arrays: Sequence[Array], v: Array) -> Array:
        """The image of a vector, in its dtype."""
        program = ClosedJaxpr(self.program, list(arrays[: self.constants]))
        (image,) = jaxpr_as_fun(program)(*arrays[self.constants :], v)
        return image.astype(v.dtype)


def as_linear_operator(name: str, function: Callable[..., Any], n: int, dtype: Any) -> tuple[LinearOperator, list[Any]]:
    """A function of vectors of n elements of a wide dtype, traced with the settings of the user, and its arrays.

    The arrays of a function that is a pytree, for example `jax.tree_util.Partial`, are arguments of it.
    """
    leaves, tree = jax.tree.flatten(function)
    if len(leaves) == 1 and leaves[0] is function:
        leaves = []

    def apply(leaves: Sequence[Any], v: Array) -> Any:
        return (jax.tree.unflatten(tree, leaves) if leaves else function)(v)

    with enable_x64_for(dtype):
        program, result = jax.make_jaxpr(apply, return_shape=True)(leaves, jax.ShapeDtypeStruct((n,), dtype))
    images, alone = program.out_avals, jax.tree_util.treedef_is_leaf(jax.tree.structure(result))
    if not alone or len(images) != 1 or images[0].shape != (n,) or not jnp.issubdtype(images[0].dtype, jnp.floating):
        got = ("" if alone else f"a {type(result).__name__} of ") + (", ".join(map(str, images)) or "nothing")
        raise ValueError(f"{name} gives {got} for a vector of shape {(n,)}; it must give one such vector, of floats")
    operator = LinearOperator(
        str(program.jaxpr), tuple(_values_of_program(program.jaxpr, consts=False)), program.jaxpr, len(program.consts)
    )
    return operator, [*program.consts, *leaves]


def _values_of_program(value: Any, *, consts: bool = True) -> Iterator[Hashable]:
    """The numbers of a program and its inner programs, and the identities of their arrays.

    If not `consts`, the arrays of the program itself are left out; newer versions of JAX have them in every jaxpr.
    """
    if hasattr(value, "eqns"):
        yield from map(id, getattr(value, "consts", ()) if consts else ())
        atoms = [atom for eqn in value.eqns for atom in eqn.invars]
        for atom in (*atoms, *getattr(value, "jaxpr", value).outvars):
            if isinstance(atom, JaxprLiteral):
                yield id(atom.val) if np.ndim(atom.val) else np.asarray(atom.val).tobytes()
        for eqn in value.eqns:
            for param in eqn.params.values():
                yield from _values_of_program(param)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _values_of_program(item)


# == methods ===========================================================================================================


#: The product of a matrix or a linear operator and a vector, in the arithmetic of a step.
_LinearMap = Callable[[SpecArithmetic, Array], Array]


@dataclass(frozen=True)
class _KrylovPlan:
    """The static data of a solver."""

    method: Callable[[_KrylovSystem, SpecArithmetic], tuple[Array, Array]]
    names: tuple[str, ...]  # of the operands
    operators: tuple[tuple[str, LinearOperator, int, int], ...]  # functions, with the places of their constants
    maxiter: int
    restart: int

    def __call__(self, arithmetic: SpecArithmetic, *operands: Array) -> tuple[Array, Array]:
        """The operands that are rounded, the two tolerances, and the constants of operators."""
        arrays = dict(zip(self.names, operands, strict=False))
        tol, atol, *constants = operands[len(self.names) :]
        maps: dict[str, _LinearMap] = {name: _matrix_map(arrays[name]) for name in ("a", "M") if name in arrays}
        maps |= {name: _operator_map(operator, constants[i:j]) for name, operator, i, j in self.operators}
        b, x0 = arrays["b"], arrays.get("x0")
        if not b.size:
            return jnp.zeros_like(b), jnp.zeros((*b.shape[1:], self.maxiter * self.restart + 1), b.dtype)
        tol, atol = tol.astype(b.dtype), atol.astype(b.dtype)

        def solve(b: Array, x0: Array | None, arithmetic: SpecArithmetic) -> tuple[Array, Array]:
            system = _KrylovSystem(maps["a"], maps.get("M"), b, x0, tol, atol, self.maxiter, self.restart)
            return self.method(system, arithmetic)

        return _for_each_column(solve, (b, x0), (arithmetic,), (1, 0))


def _for_each_column(
    solve: Callable[..., Any], operands: Sequence[Array | None], arithmetics: Sequence[SpecArithmetic], out_axes: Any
) -> Any:
    """``solve(*operands, *arithmetics)`` of vectors, or of each column of matrices, which draws as a loop's iteration.

    Args:
        solve: a function of vectors and arithmetics.
        operands: the first is the right-hand side; others may be None.
        arithmetics: the arithmetics.
        out_axes: the axes of the columns in the results.
    """
    first = operands[0]
    assert first is not None
    if first.ndim == 1:
        return solve(*operands, *arithmetics)

    def column(j: Array, *operands: Array | None) -> Any:
        return solve(*operands, *(arithmetic.at(j) for arithmetic in arithmetics))

    axes = (None if operand is None else 1 for operand in operands)
    return jax.vmap(column, (0, *axes), out_axes)(jnp.arange(first.shape[1], dtype=jnp.uint32), *operands)


@dataclass(frozen=True)
class _KrylovSystem:
    """A system with one right-hand side."""

    image: _LinearMap
    inverse: _LinearMap | None
    b: Array
    x0: Array | None
    tol: Array
    atol: Array
    maxiter: int
    restart: int

    def limit(self, norm: Array) -> Array:
        """The norm of the residual at which to stop, for a given norm of b; computed without rounding to the spec."""
        return jnp.maximum(self.tol * norm, self.atol)

    def precondition(self, ops: SpecArithmetic, r: Array) -> Array:
        """A residual times M."""
        return r if self.inverse is None else self.inverse(ops, r)


def _matrix_map(a: Array) -> _LinearMap:
    return lambda now, v: now.matmul(a, v)


def _operator_map(operator: LinearOperator, constants: Sequence[Array]) -> _LinearMap:
    return lambda now, v: now.rounded(operator(constants, v))


def _run_krylov(
    solve: Any,
    operands: dict[str, Any],
    spec: SpecLike,
    key: Key,
    tol: Any,
    atol: Any,
    maxiter: Any,
    restart: Any = None,
) -> Any:
    """Solves a x = b for each system by a Krylov method: checks operands and options, then runs the plan."""
    arguments = {name: value for name, value in operands.items() if value is not None}
    functions = {name: value for name, value in arguments.items() if name in ("a", "M") and callable(value)}
    names = [name for name in arguments if name not in functions]
    arrays = dict(zip(names, as_operands(names, [arguments[name] for name in names]), strict=True))
    b = arrays["b"]
    check(b.ndim, "b is a scalar; it must be (n,), or (..., n, k) for k columns")
    n = matrix_order(arrays["a"]) if "a" in arrays else b.shape[0 if b.ndim == 1 else -2]
    b_ndim = right_side_axes(b, n)
    if "x0" in arrays and arrays["x0"].shape != b.shape:
        raise ValueError(f"x0 has shape {arrays['x0'].shape}; it must be that of b, {b.shape}")
    if "M" in arrays and matrix_order(arrays["M"], "M") != n:
        raise ValueError(f"M has shape {arrays['M'].shape}; it must be that of a, {(n, n)}")
    iterations = 10 * n if maxiter is None else check_int("maxiter", maxiter, 1, (1 << 31) - 1)
    cycle_length = 1 if restart is None else min(check_int("restart", restart, 1), n)
    constants: list[Any] = [_as_tolerance("tol", tol), _as_tolerance("atol", atol)]
    operators = []
    for name, function in functions.items():
        operator, operator_constants = as_linear_operator(name, function, n, operation_carrier(b.dtype).name)
        operators.append((name, operator, len(constants) - 2, len(constants) - 2 + len(operator_constants)))
        constants += operator_constants
    plan = _KrylovPlan(solve, tuple(names), tuple(operators), iterations, cycle_length)
    core_ndims = [2 if name in ("a", "M") else b_ndim for name in names]
    return evaluate_systems(plan, names, list(arrays.values()), core_ndims, {"spec": spec}, key, constants)


def _as_tolerance(name: str, value: Any) -> Any:
    """A tolerance as a scalar, which may be traced."""
    array = as_array(name, value)
    real = jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)
    if array.shape != () or not real:
        raise TypeError(f"{name}={value!r} must be a finite number >= 0")
    check(has_tracer(array) or 0 <= float(array) < math.inf, f"{name}={value!r} must be a finite number >= 0")
    return array


def cg(
    a: Any,
    b: Any,
    spec: SpecLike,
    key: Key = None,
    *,
    x0: Any = None,
    tol: Any = 1e-5,
    atol: Any = 0.0,
    maxiter: int | None = None,
    M: Any = None,
) -> Any:
    """Conjugate gradients for a x = b (Hestenes and Stiefel 1952), called as `jax.scipy.sparse.linalg.cg`.

    The residual r is the recurrence's, which drifts from b - a x. The method stops if √(rᵀr) is at most
    max(tol √(bᵀb), atol); this comparison is made in the dtype.

    Args:
        a: float16, bfloat16, float32 or float64, shape (..., n, n), symmetric and positive definite. Rounded to `spec`
            first, as are the other arrays. Or a linear operator: a pure function of a vector, float32 or float64 of
            shape (n,), whose result is rounded to `spec`. It computes in its own arithmetic, for example
            ``lambda v: jc.math.matmul(a, v, spec)``. It is traced in each call, and compiled again only if its program
            changes; arrays that it closes over may change.
        b: of the same dtype, or promoted as in `jax.numpy`, shape (n,), or (..., n, k) for k columns, each of which is
            a system.
        spec: a `jchop.Spec`, a format or text: the rounding of every operation; sums run one term after the other.
        key: a typed key, needed if `spec` is stochastic. Column j draws as iteration j of a loop. Default None.
        x0: the start, of the shape of `b`. Default None: zeros.
        tol: relative tolerance, a number of any kind. Default 1e-5; 0 with ``atol=0`` makes all steps until the
            residual is zero. Another tolerance needs no new compilation.
        atol: absolute tolerance. Default 0.
        maxiter: the most steps, >= 1. Default None: 10 n.
        M: a preconditioner, shape (..., n, n), or a linear operator: an approximate inverse of a, symmetric and
            positive definite. Default None.

    Returns:
        x, of the shape of `b` with the leading axes of all. Then rᵀr before each step and after the last one. Its shape
        is (maxiter + 1,), after the leading axes and the axis of columns. After the method stops, the last value is
        repeated.

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for shapes that do not fit.
        NotImplementedError: if it is differentiated.

    Example:
        >>> import jchop as jc
        >>> x, squares = jc.math.linalg.cg([[2.0, 1.0], [1.0, 2.0]], [3.0, 3.0], "bfloat16", maxiter=2)
        >>> x.tolist(), squares.tolist()
        ([1.0, 1.0], [18.0, 0.0, 0.0])
    """
    return _run_krylov(_cg_of_system, {"a": a, "b": b, "x0": x0, "M": M}, spec, key, tol, atol, maxiter)


def _cg_of_system(system: _KrylovSystem, arithmetic: SpecArithmetic) -> tuple[Array, Array]:
    """The solution and the history of r·r by preconditioned conjugate gradients, every operation rounded."""
    b, x0, preconditioner = system.b, system.x0, system.inverse

    def body(state: tuple[Array, ...]) -> tuple[Array, ...]:
        k, x, r, direction, r_dot_z, _, history = state
        ops = arithmetic.at(k)
        image = system.image(ops, direction)
        alpha = ops.div(r_dot_z, ops.dot(direction, image))
        x, r = ops.add(x, ops.mul(alpha, direction)), ops.sub(r, ops.mul(alpha, image))
        r_dot_r = ops.dot(r, r)
        z = system.precondition(ops, r)
        next_r_dot_z = r_dot_r if preconditioner is None else ops.dot(r, z)
        direction = ops.add(z, ops.mul(ops.div(next_r_dot_z, r_dot_z), direction))
        return k + 1, x, r, direction, next_r_dot_z, r_dot_r, history.at[k + 1].set(r_dot_r)

    def cond(state: tuple[Array, ...]) -> Array:
        return (state[0] < system.maxiter) & ~(state[5] <= limit)

    r = b if x0 is None else arithmetic.sub(b, system.image(arithmetic, x0))
    r_dot_r = arithmetic.dot(r, r)
    limit = system.limit(jnp.sqrt(r_dot_r if x0 is None else arithmetic.dot(b, b))) ** 2
    z = system.precondition(arithmetic, r)
    r_dot_z = r_dot_r if preconditioner is None else arithmetic.dot(r, z)
    history = jnp.zeros(system.maxiter + 1, b.dtype).at[0].set(r_dot_r)
    x = jnp.zeros_like(b) if x0 is None else x0
    k, x, *_, r_dot_r, history = lax.while_loop(cond, body, (jnp.int32(0), x, r, z, r_dot_z, r_dot_r, history))
    return x, jnp.where(jnp.arange(system.maxiter + 1) > k, r_dot_r, history)


def gmres(
    a: Any,
    b: Any,
    spec: SpecLike,
    key: Key = None,
    *,
    x0: Any = None,
    tol: Any = 1e-5,
    atol: Any = 0.0,
    restart: int = 20,
    maxiter: int | None = None,
    M: Any = None,
) -> Any:
    """The generalized minimal residual method for a x = b (Saad and Schultz 1986), as `jax.scipy.sparse.linalg.gmres`.

    The basis is orthogonalized by modified Gram-Schmidt, the small problem solved by Givens rotations. The method stops
    before a cycle if the norm of M (b - a x) is at most max(tol √(bᵀb), atol). This comparison is made in the dtype.

    Args:
        a: float16, bfloat16, float32 or float64, shape (..., n, n), or a linear operator as in `jchop.math.linalg.cg`.
            Rounded to `spec` first, as are the other arrays.
        b: as in `jchop.math.linalg.cg`.
        spec: a `jchop.Spec`, a format or text: the rounding of every operation; sums run one term after the other.
        key: as in `jchop.math.linalg.cg`.
        x0: the start, of the shape of `b`. Default None: zeros.
        tol: relative tolerance. Default 1e-5.
        atol: absolute tolerance. Default 0.
        restart: vectors in the basis of a cycle, >= 1, of which n are used at most. Default 20.
        maxiter: the most cycles, >= 1. Default None: 10 n.
        M: a preconditioner, shape (..., n, n), or a linear operator: an approximate inverse of a. Default None.

    Returns:
        x, as `jchop.math.linalg.cg`, and the norms of the residual from the rotations, shape (maxiter restart + 1,)
        after other axes, `restart` for each cycle. If the basis cannot grow, because the residual is zero, the rest of
        the cycle has no effect. After the method stops, the last norm is repeated.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `jchop.math.linalg.cg`.

    Example:
        >>> import jchop as jc
        >>> x, norms = jc.math.linalg.gmres([[2.0, 1.0], [0.0, 2.0]], [4.0, 4.0], "bfloat16", maxiter=1)
        >>> x.tolist()
        [0.99609375, 1.9921875]
    """
    return _run_krylov(_gmres_of_system, {"a": a, "b": b, "x0": x0, "M": M}, spec, key, tol, atol, maxiter, restart)


def _gmres_of_system(system: _KrylovSystem, arithmetic: SpecArithmetic) -> tuple[Array, Array]:
    """The solution and the history of residual norms by restarted GMRES, every operation rounded."""
    b, x0, restart = system.b, system.x0, system.restart

    def apply(ops: SpecArithmetic, v: Array) -> Array:
        return system.precondition(ops, system.image(ops, v))

    def compute_residual(ops: SpecArithmetic, x: Array) -> Array:
        return system.precondition(ops, ops.sub(b, system.image(ops, x)))

    def cycle(state: tuple[Array, ...]) -> tuple[Array, ...]:
        k, x, r, _, history = state
        ops = arithmetic.at(k)
        correction, norms = minimal_residual(ops, apply, r, restart)
        x = ops.add(x, correction)
        r = compute_residual(ops, x)
        return k + 1, x, r, ops.norm(r), lax.dynamic_update_slice(history, norms[1:], (k * restart + 1,))

    def cond(state: tuple[Array, ...]) -> Array:
        return (state[0] < system.maxiter) & ~(state[3] <= limit)

    r = system.precondition(arithmetic, b) if x0 is None else compute_residual(arithmetic, x0)
    correction, norms = minimal_residual(arithmetic, apply, r, restart)
    limit = system.limit(norms[0] if x0 is None and system.inverse is None else arithmetic.norm(b))
    is_solved = norms[0] <= limit
    x = jnp.where(is_solved, 0, correction) if x0 is None else jnp.where(is_solved, x0, arithmetic.add(x0, correction))
    history = jnp.zeros(system.maxiter * restart + 1, b.dtype).at[: restart + 1].set(norms)
    k = jnp.int32(1)
    if system.maxiter > 1:
        r = compute_residual(arithmetic, x)
        norm = jnp.where(is_solved, norms[0], arithmetic.norm(r))
        k, x, _, _, history = lax.while_loop(cond, cycle, (k, x, r, norm, history))
    last_index = jnp.where(is_solved, 0, k) * restart
    return x, jnp.where(jnp.arange(system.maxiter * restart + 1) > last_index, history[last_index], history)


def minimal_residual(
    arithmetic: SpecArithmetic, apply: Callable[[SpecArithmetic, Array], Array], b: Array, count: int
) -> tuple[Array, Array]:
    """The solution and the norms of the residual, for a matrix given as a function of vectors."""
    dtype, b_norm = b.dtype, arithmetic.norm(b)
    is_zero = b_norm == 0
    basis = jnp.zeros((count + 1, b.shape[0]), dtype).at[0].set(jnp.where(is_zero, 0, arithmetic.div(b, b_norm)))
    rhs = jnp.zeros(count + 1, dtype).at[0].set(b_norm)

    def body(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        basis, triangle, cosines, sines, rhs, norms = state
        ops = arithmetic.at(j)
        w, h = _orthogonalize(ops, basis, apply(ops, basis[j]), j)
        w_norm = ops.norm(w)
        h = _apply_rotations(ops, h, cosines, sines, j)
        c, s, radius = _givens_rotation(ops, h[j], w_norm)
        basis = basis.at[j + 1].set(jnp.where(w_norm == 0, 0, ops.div(w, w_norm)))
        # A basis that cannot grow gives a column of zeros, which the column of the identity replaces.
        breakdown = radius == 0
        h = h.at[j].set(jnp.where(breakdown, 1, radius))
        head, tail = ops.mul(c, rhs[j]), ops.mul(-s, rhs[j])
        rhs = rhs.at[j].set(jnp.where(breakdown, 0, head)).at[j + 1].set(jnp.where(breakdown, rhs[j], tail))
        return (
            basis, triangle.at[:, j].set(h), cosines.at[j].set(c), sines.at[j].set(s), rhs,
            norms.at[j + 1].set(jnp.abs(rhs[j + 1])),
        )  # fmt: skip

    zeros = jnp.zeros(count, dtype)
    norms = jnp.zeros(count + 1, dtype).at[0].set(b_norm)
    state = (basis, jnp.zeros((count, count), dtype), zeros, zeros, rhs, norms)
    basis, triangle, _, _, rhs, norms = lax.fori_loop(0, count, body, state)
    y = substitute_triangular(arithmetic.at(count), triangle, rhs[:count], lower=False, unit=False)
    return arithmetic.matmul(basis[:count].T, y), norms


def _orthogonalize(arithmetic: SpecArithmetic, basis: Array, w: Array, last_index: Array) -> tuple[Array, Array]:
    """`w` without its parts along the first vectors of the basis, up to the last one, and these parts."""
    count = basis.shape[0] - 1

    def body(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        w, h = state
        ops = arithmetic.at(i)
        coefficient = ops.dot(basis[i], w)
        return ops.sub(w, ops.mul(coefficient, basis[i])), h.at[i].set(coefficient)

    return lax.fori_loop(0, last_index + 1, body, (w, jnp.zeros(count, w.dtype)))


def _apply_rotations(arithmetic: SpecArithmetic, h: Array, cosines: Array, sines: Array, count: Array) -> Array:
    """The rotations of the earlier columns, one after the other, on a new one."""

    def body(i: Array, h: Array) -> Array:
        ops = arithmetic.at(i)
        a, b, c, s = h[i], h[i + 1], cosines[i], sines[i]
        return h.at[i].set(ops.add(ops.mul(c, a), ops.mul(s, b))).at[i + 1].set(ops.sub(ops.mul(c, b), ops.mul(s, a)))

    return lax.fori_loop(0, count, body, h)


def _givens_rotation(ops: SpecArithmetic, a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Cosine and sine that turn (a, b) to (length, 0), and the length; 1, 0 and 0 for zeros."""
    length = ops.sqrt(ops.add(ops.mul(a, a), ops.mul(b, b)))
    is_zero = length == 0
    return (jnp.where(is_zero, 1, ops.div(a, length)), jnp.where(is_zero, 0, ops.div(b, length)), length)


# == iterative refinement ==============================================================================================


@call_hint("refine(a, b, factor='binary16', working='binary32', residual='binary64')")
def refine(
    a: Any,
    b: Any,
    *,
    factor: SpecLike,
    working: SpecLike,
    residual: SpecLike,
    key: Key = None,
    method: Literal["lu", "gmres"] = "lu",
    steps: int = 10,
    inner: int = 10,
) -> Any:
    """Iterative refinement of a x = b in three precisions: of the factors a = l u, of x, and of the residual b - a x.

    Factors l u = a are in ``factor``, and x begins as the solution from them. Every step computes r = b - a x in
    ``residual``, rounded to ``working``; solves a d = r; and adds x + d in ``working``. With ``method="lu"`` d comes
    from the factors, in ``factor``. With ``method="gmres"`` d comes from GMRES in ``working`` on (l u)⁻¹ a d = (l u)⁻¹
    r, with products with (l u)⁻¹ a in ``residual``. Let u_f, u and u_r = u² be the unit roundoffs, and κ the condition
    number in the maximum norm. The iterates converge to a backward error of about u if κ u_f (for GMRES κ² u_f² u) is
    somewhat less than 1: E. Carson and N. J. Higham, SIAM J. Sci. Comput. 40 (2018) A817-A847, table 5.1; for binary16,
    binary32 and binary64 up to κ of 10³ to 10⁴, and 10⁸.

    The residual is scaled exactly, by a power of two, to a largest element of 1/2 to 1. So it does not vanish in a
    format of little range. The matrix is not scaled: its elements and the elements of u must be in the range of
    ``factor``.

    Args:
        a: float32 or float64 (or of 16 bits), shape (..., n, n); rounded to ``working`` first.
        b: of the same dtype, or promoted as in `jax.numpy`. Its shape is (n,), or (..., n, k) for k columns, each of
            which is a system. It is rounded to ``working`` first.
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
    steps, inner = check_int("steps", steps, 0), check_int("inner", inner, 1)
    specs = {"factor": factor, "working": working, "residual": residual}
    iterates = StaticPartial(_refinement_iterates, (steps, inner if method == "gmres" else None))
    return evaluate_systems(iterates, "ab", (a, b), (2, b_ndim), specs, key, rounding="working")


def _refinement_iterates(steps: int, inner: int | None, *arithmetics_and_operands: Any) -> Array:
    """The iterates; `inner` is the number of GMRES steps, None without GMRES."""
    *arithmetics, a, b = arithmetics_and_operands
    if not b.size:
        return jnp.zeros((steps + 1, *b.shape), b.dtype)
    factor = arithmetics[0]
    lu_matrix, p, _ = factor_lu(factor, factor.rounded(a))
    return _for_each_column(partial(_column_iterates, steps, inner, (a, lu_matrix, p)), (b,), arithmetics, 2)


def _column_iterates(
    steps: int, inner: int | None, matrix: tuple[Array, Array, Array], b: Array, *arithmetics: SpecArithmetic
) -> Array:
    """The iterates of one right-hand side, with the matrix, its factors and its rows in pivot order."""
    (a, lu_matrix, p), (factor, working, residual) = matrix, arithmetics

    def from_factors(ops: SpecArithmetic, r: Array) -> Array:
        """(l u)⁻¹ r by the given factors, with `r` of any size."""
        scale = _residual_scale(r)
        return solve_with_factors(ops, lu_matrix, ops.rounded(r[p] / scale)) * scale

    def update(factor_ops: SpecArithmetic, ops: SpecArithmetic, residual_ops: SpecArithmetic, r: Array) -> Array:
        if inner is None:
            return ops.rounded(from_factors(factor_ops, r))
        scale = _residual_scale(r)

        def image(inner_ops: SpecArithmetic, v: Array) -> Array:
            high_ops = residual_ops.at(inner_ops.iteration)
            return inner_ops.rounded(solve_with_factors(high_ops, lu_matrix, high_ops.matmul(a, v)[p]))

        rhs = ops.rounded(solve_with_factors(residual_ops, lu_matrix, (r / scale)[p]))
        return ops.rounded(minimal_residual(ops, image, rhs, inner)[0] * scale)

    def body(x: Array, i: Array) -> tuple[Array, Array]:
        factor_ops, ops, residual_ops = factor.at(i), working.at(i), residual.at(i)
        r = ops.rounded(residual_ops.sub(b, residual_ops.matmul(a, x)))
        x = ops.add(x, update(factor_ops, ops, residual_ops, r))
        return x, x

    start = from_factors(factor, b)
    x = working.rounded(jnp.where(jnp.isfinite(start).all(), start, 0))
    _, iterates = lax.scan(body, x, jnp.arange(steps, dtype=jnp.uint32))
    return jnp.concatenate([x[None], iterates])


def _residual_scale(r: Array) -> Array:
    """The power of two above all magnitudes, a normal number; 1 if they are zero or not finite."""
    bias = CARRIERS[r.dtype.name].bias
    largest = jnp.max(jnp.abs(r))
    exponent = jnp.clip(carrier_frexp(largest)[1], 2 - bias, bias - 1)
    return jnp.ldexp(jnp.ones_like(largest), exponent)
