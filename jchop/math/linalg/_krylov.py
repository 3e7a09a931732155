"""Conjugate gradients and GMRES, every operation rounded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._arguments import SpecLike, as_array
from jchop._checks import check_int
from jchop._linalg.direct import substitute
from jchop._linalg.steps import Steps
from jchop.math.linalg._steps import evaluate, right_side, square

Array = jax.Array


def cg(a: Any, b: Any, spec: SpecLike, key: Array | None = None, *, steps: int) -> Any:
    """Conjugate gradients for a x = b from x = 0 (Hestenes and Stiefel 1952).

    The residual is the recurrence's, which drifts from b - a x; where it becomes zero, the rest of the steps does
    nothing.

    Args:
        a: float16, bfloat16, float32 or float64, shape (n, n), symmetric and positive definite. Rounded to `spec`
            first.
        b: of the same dtype, shape (n,); rounded too.
        spec: a `jchop.Spec`, a format or text: what every operation is rounded to; sums run one term after the other.
        key: a typed key, needed where `spec` is stochastic. Default None.
        steps: how many, >= 0.

    Returns:
        x, shape (n,), and rᵀr, as the recurrence has it, before each step and after the last, shape (steps + 1,).

    Raises:
        TypeError, ValueError: as for `jchop.math.sin`, or for shapes that do not fit.
        NotImplementedError: where it is differentiated.

    Example:
        >>> import jchop as jc
        >>> x, squares = jc.math.linalg.cg([[2.0, 1.0], [1.0, 2.0]], [3.0, 3.0], "bfloat16", steps=1)
        >>> x.tolist(), squares.tolist()
        ([1.0, 1.0], [18.0, 0.0])
    """
    check_int("steps", steps, 0)
    a, b = as_array("a", a), as_array("b", b)
    right_side(b, square(a))
    return evaluate(partial(_cg, steps), "ab", (a, b), spec, key)


def _cg(count: int, steps: Steps, a: Array, b: Array) -> tuple[Array, Array]:
    def turn(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        x, r, p, squares, history = state
        now = steps.at(k)
        image = now.matmul(a, p)
        length = now.div(squares, now.dot(p, image))
        new_x, new_r = now.add(x, now.mul(length, p)), now.sub(r, now.mul(length, image))
        new_squares = now.dot(new_r, new_r)
        new_p = now.add(new_r, now.mul(now.div(new_squares, squares), p))
        done = squares == 0
        new = (new_x, new_r, new_p, new_squares)
        kept = tuple(jnp.where(done, old, value) for old, value in zip(state[:4], new, strict=True))
        return *kept, history.at[k + 1].set(kept[3])

    first = steps.dot(b, b)
    history = jnp.zeros(count + 1, b.dtype).at[0].set(first)
    x, _, _, _, history = lax.fori_loop(0, count, turn, (jnp.zeros_like(b), b, b, first, history))
    return x, history


def gmres(a: Any, b: Any, spec: SpecLike, key: Array | None = None, *, steps: int) -> Any:
    """The generalized minimal residual method for a x = b from x = 0, without restarts (Saad and Schultz 1986).

    The basis is orthogonalized by modified Gram-Schmidt, the small problem solved by Givens rotations.

    Args:
        a: float16, bfloat16, float32 or float64, shape (n, n). Rounded to `spec` first.
        b: of the same dtype, shape (n,); rounded too.
        spec: a `jchop.Spec`, a format or text: what every operation is rounded to; sums run one term after the other.
        key: a typed key, needed where `spec` is stochastic. Default None.
        steps: vectors in the basis, >= 1.

    Returns:
        x, shape (n,), and the norms of the residual as the rotations have it, shape (steps + 1,). Where the basis
        cannot grow, because the residual is zero, the rest of the steps does nothing.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `jchop.math.linalg.cg`.

    Example:
        >>> import jchop as jc
        >>> x, norms = jc.math.linalg.gmres([[2.0, 1.0], [0.0, 2.0]], [4.0, 4.0], "bfloat16", steps=2)
        >>> x.tolist()
        [0.99609375, 1.9921875]
    """
    check_int("steps", steps, 1)
    a, b = as_array("a", a), as_array("b", b)
    right_side(b, square(a))
    return evaluate(partial(_gmres, steps), "ab", (a, b), spec, key)


def _gmres(count: int, steps: Steps, a: Array, b: Array) -> tuple[Array, Array]:
    return minimal_residual(steps, lambda now, v: now.matmul(a, v), b, count)


def minimal_residual(steps: Steps, image: Callable[[Steps, Array], Array], b: Array, count: int) -> tuple[Array, Array]:
    """The solution and the norms of the residual, for a matrix that is known by its images of vectors."""
    dtype, length = b.dtype, steps.norm(b)
    empty = length == 0
    basis = jnp.zeros((count + 1, b.shape[0]), dtype).at[0].set(jnp.where(empty, 0, steps.div(b, length)))
    small = jnp.zeros(count + 1, dtype).at[0].set(length)

    def turn(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        basis, triangle, cosines, sines, small, norms = state
        now = steps.at(j)
        w, h = _orthogonalized(now, basis, image(now, basis[j]), j)
        following = now.norm(w)
        h = _rotated(now, h, cosines, sines, j)
        c, s, top = _rotation(now, h[j], following)
        basis = basis.at[j + 1].set(jnp.where(following == 0, 0, now.div(w, following)))
        # A basis that cannot grow gives a column of zeros, in whose place stands that of the identity.
        stuck = top == 0
        h = h.at[j].set(jnp.where(stuck, 1, top))
        left, right = now.mul(c, small[j]), now.mul(-s, small[j])
        small = small.at[j].set(jnp.where(stuck, 0, left)).at[j + 1].set(jnp.where(stuck, small[j], right))
        return (
            basis, triangle.at[:, j].set(h), cosines.at[j].set(c), sines.at[j].set(s), small,
            norms.at[j + 1].set(jnp.abs(small[j + 1])),
        )  # fmt: skip

    zeros = jnp.zeros(count, dtype)
    norms = jnp.zeros(count + 1, dtype).at[0].set(length)
    start = (basis, jnp.zeros((count, count), dtype), zeros, zeros, small, norms)
    basis, triangle, _, _, small, norms = lax.fori_loop(0, count, turn, start)
    y = substitute(steps.at(count), triangle, small[:count], lower=False, unit=False)
    return steps.matmul(basis[:count].T, y), norms


def _orthogonalized(steps: Steps, basis: Array, w: Array, last: Array) -> tuple[Array, Array]:
    """`w` without its parts along the first vectors of the basis, up to the last one, and these parts."""
    count = basis.shape[0] - 1

    def turn(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        w, h = state
        now = steps.at(i)
        part = now.dot(basis[i], w)
        return now.sub(w, now.mul(part, basis[i])), h.at[i].set(part)

    return lax.fori_loop(0, last + 1, turn, (w, jnp.zeros(count, w.dtype)))


def _rotated(steps: Steps, h: Array, cosines: Array, sines: Array, last: Array) -> Array:
    """The rotations of the earlier columns, one after the other, on a new one."""

    def turn(i: Array, h: Array) -> Array:
        now = steps.at(i)
        a, b, c, s = h[i], h[i + 1], cosines[i], sines[i]
        return h.at[i].set(now.add(now.mul(c, a), now.mul(s, b))).at[i + 1].set(now.sub(now.mul(c, b), now.mul(s, a)))

    return lax.fori_loop(0, last, turn, h)


def _rotation(steps: Steps, a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Cosine and sine that turn (a, b) to (length, 0), and the length; 1, 0 and 0 for zeros."""
    length = steps.sqrt(steps.add(steps.mul(a, a), steps.mul(b, b)))
    zero = length == 0
    return (
        jnp.where(zero, 1, steps.div(a, length)),
        jnp.where(zero, 0, steps.div(b, length)),
        length,
    )
