"""Training with few exchanges: steps of each rank alone, then one exchange of what they changed."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.bit_ops import varying_axes
from jchop._common.checks import check_int
from jchop.distributed._feedback import Transformation

Array = jax.Array


class DilocoState(NamedTuple):
    """State of `diloco` on one rank.

    Args:
        count: the steps since the last exchange, int32.
        anchor: the parameters after the last exchange: the same bits on every rank.
        inner: the state of the inner transformation, a rank's own.
        outer: the state of the outer transformation.
    """

    count: Array
    anchor: Any
    inner: Any
    outer: Any


def diloco(inner: Any, outer: Any, every: int) -> Transformation:
    """Training with few exchanges: `every` steps of each rank by itself, then one step of an outer optimizer.

    At an exchange, `outer` gets the parameters of the last exchange minus the rank's own, as if that were a gradient,
    and sums it over ranks: its first link is `psum_with_feedback`, or a sum without memory such as
    ``optax.stateless(lambda u, _: jchop.distributed.psum(u, "data", spec))``. DiLoCo's outer optimizer follows, with
    the mean over n ranks: ``optax.scale(1 / n), optax.sgd(0.7, momentum=0.9, nesterov=True)``. Between exchanges
    nothing moves. `update` runs inside `jax.shard_map`.

    The anchor in the state has the same bits on every rank. The parameters that `optax.apply_updates` gives differ from
    it by a rounding of the addition at most; the next exchange corrects that. Save and evaluate the anchor.

    Args:
        inner: the Optax transformation of a rank's own steps.
        outer: the Optax transformation of the exchanges; its updates are the same on every rank.
        every: the number of steps of `inner` to an exchange, from 1 on.

    Returns:
        The functions ``init(params)`` and ``update(updates, state, params)``, as an Optax transformation. The state is
        a `DilocoState`; it differs between ranks.

    Raises:
        TypeError: for a value that is not a transformation.
        ValueError: for `every` below 1, or an update without parameters.

    References:
        DiLoCo, arXiv 2311.08105, algorithm 1; INTELLECT-1, arXiv 2412.01152, for exchanges in int8.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc, optax
        >>> mean = optax.stateless(lambda u, _: jc.distributed.psum(u, "i", "int8(group=tensor)") / 2)
        >>> tx = jc.distributed.diloco(optax.sgd(1.0), optax.chain(mean, optax.sgd(1.0)), every=2)
        >>> def train(gradient):
        ...     params = jnp.zeros(1)
        ...     state = tx.init(params)
        ...     for _ in range(2):
        ...         updates, state = tx.update(gradient, state, params)
        ...         params = optax.apply_updates(params, updates)
        ...     return params
        >>> jax.vmap(train, axis_name="i")(jnp.array([[1.0], [3.0]])).tolist()
        [[-4.0], [-4.0]]
    """
    check_int("every", every, 1, (1 << 31) - 1)
    for name, transformation in (("inner", inner), ("outer", outer)):
        if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
            raise TypeError(
                f"{name}={transformation!r} must be an Optax transformation, with the functions init and update"
            )

    def init(params: Any) -> DilocoState:
        anchor = jax.tree.map(jnp.asarray, params)
        return DilocoState(jnp.zeros((), jnp.int32), anchor, inner.init(params), outer.init(params))

    def update(updates: Any, state: DilocoState, params: Any = None, **extra: Any) -> tuple[Any, DilocoState]:
        if params is None:
            raise ValueError("params=None: diloco compares them with those of the last exchange; pass params")
        inner_updates, inner_state = inner.update(updates, state.inner, params, **extra)
        count = state.count + 1

        def keep_anchor() -> tuple[Any, Any, Any]:
            return jax.tree.map(_vary_and_cast_like, inner_updates, params), state.anchor, state.outer

        def exchange() -> tuple[Any, Any, Any]:
            rank_params = jax.tree.map(_add_in_dtype, params, inner_updates)
            outer_updates, outer_state = outer.update(
                jax.tree.map(jnp.subtract, state.anchor, rank_params), state.outer, state.anchor
            )
            anchor = jax.tree.map(_add_in_dtype, state.anchor, outer_updates)
            change = jax.tree.map(
                lambda new, old, step: _vary_and_cast_like(new - old, step), anchor, params, inner_updates
            )
            return change, anchor, outer_state

        change, anchor, outer_state = lax.cond(count == every, exchange, keep_anchor)
        return change, DilocoState(count % every, anchor, inner_state, outer_state)

    return Transformation(init, update)


def _add_in_dtype(x: Array, change: Array) -> Array:
    return jnp.asarray(x + change).astype(x.dtype)


def _vary_and_cast_like(x: Array, other: Array) -> Array:
    """`x`, with a type that differs between ranks along the axes of both: branches have results of one type."""
    x = x.astype(other.dtype)
    missing = tuple(name for name in varying_axes(other) if name not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
