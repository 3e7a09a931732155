"""SignRound: which of its two neighbours each number is rounded to, learned by signs of gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.settings import always_jit
from jchop._spec.spec import Spec
from jchop.ptq._data.columns import ElementScales, round_column
from jchop.ptq._steps.steps import SignDescent

Array = jax.Array

__all__ = ["neighbours", "sign_descent", "sign_round_codes"]

_DESCENT_PRECISION = lax.Precision.HIGHEST


def sign_round_codes(
    matrix: Array, gram: Array, by_element: tuple[Array, ...], scales: ElementScales, *, spec: Spec, dtype: Any,
    by: SignDescent, mask: Array | None = None,
) -> Array:  # fmt: skip
    """The codes of a matrix (summed, kept), one entry for each element.

    Args:
        matrix: the numbers.
        gram: the mean of x x^T over the inputs.
        by_element: scales and zero points in the shape of the matrix.
        scales: with the scale of the tensor, if the format has one.
        spec: of a column in which each element has its scale.
        dtype: of the numbers that codes stand for.
        by: the step.
        mask: which numbers are not pruned. Default: all.
    """
    below, above = neighbours(matrix if mask is None else jnp.where(mask, matrix, 0), by_element, scales, spec, dtype)
    up, _ = sign_descent(
        matrix, gram, below[1], above[1], iterations=by.iterations, rate=by.rate, momentum=by.momentum
    )  # fmt: skip
    return jnp.where(up, above[0], below[0])


def neighbours(
    matrix: Array, by_element: tuple[Array, ...], scales: ElementScales, spec: Spec, dtype: Any
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The codes and numbers that each number lies between, or twice those of the end of the format beyond it."""

    def towards(mode: str) -> tuple[Array, Array]:
        mode_spec = replace(spec, rounding=mode, random_bits=None, overflow="saturate")

        def round_row(column: Array, *parts: Array) -> tuple[Array, Array]:
            return round_column(column, *scales.quantize_args(parts), mode_spec, dtype)

        entries, numbers = jax.vmap(round_row)(matrix, *by_element)
        return entries, numbers.astype(matrix.dtype)

    down, up = towards("down"), towards("up")
    is_negative = down[1] > up[1]  # under a negative scale
    below = tuple(jnp.where(is_negative, u, d) for d, u in zip(down, up, strict=True))
    above = tuple(jnp.where(is_negative, d, u) for d, u in zip(down, up, strict=True))
    return below, above  # type: ignore[return-value]


@partial(always_jit, static_argnames=("iterations", "rate", "momentum"))
def sign_descent(
    matrix: Array, gram: Array, below: Array, above: Array, *, iterations: int, rate: float, momentum: float
) -> tuple[Array, Array]:
    """Which numbers of a matrix take the neighbour above, and the error of the product in each column of it.

    A number at the fraction f of the way between its neighbours takes the one above if f + v > 1/2, for an offset v
    within [-1/2, 1/2]. Offsets begin with 0, and move against the sign of the gradient of tr(E^T H E), summed up with
    momentum, for the errors E of rounding; the rate falls to 0. The best offsets of each column are kept, to nearest
    among them.

    Args:
        matrix: the numbers, (summed, kept).
        gram: the mean H of x x^T.
        below: the neighbours that are not larger.
        above: the neighbours that are not smaller.
        iterations: how many steps.
        rate: the first rate times the number of steps.
        momentum: the share of the sum of gradients that is kept in each step.
    """
    gap = above - below
    fraction = jnp.where(gap > 0, (matrix - below) / jnp.where(gap > 0, gap, 1), 0)

    def step(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        offset, slope_sum, best, least_loss = state
        takes_above = (fraction + offset > 0.5) & (gap > 0)
        error = jnp.where(takes_above, above, below) - matrix
        slope = jnp.matmul(gram, error, precision=_DESCENT_PRECISION)
        loss = (error * slope).sum(0)
        is_better = loss < least_loss
        slope_sum = momentum * slope_sum + slope
        offset = jnp.clip(offset - rate * (1 - i / iterations) / iterations * jnp.sign(slope_sum), -0.5, 0.5)
        return offset, slope_sum, jnp.where(is_better[None, :], takes_above, best), jnp.minimum(loss, least_loss)

    zeros = jnp.zeros_like(matrix)
    initial_state = zeros, zeros, jnp.zeros(matrix.shape, bool), jnp.full(matrix.shape[1], jnp.inf, matrix.dtype)
    _, _, best, least_loss = lax.fori_loop(0, iterations + 1, step, initial_state)
    return best, least_loss
