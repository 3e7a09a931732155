"""Links of training that sum over ranks in codes: errors that are kept, and few exchanges."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jchop._common.bit_ops import varying_like
from jchop._common.checks import check, check_int
from jchop._common.settings import jax_default_settings, split_prng_key
from jchop._core.matmul.operations import operation_carrier
from jchop._round.arguments import rounding_key
from jchop._spec.spec import SpecLike, as_spec
from jchop.distributed import _messages as messages
from jchop.distributed._collectives import BUCKET, Accumulate, check_collective
from jchop.distributed._messages import AxisName, Phase, Wire


class FeedbackState(NamedTuple):
    """State of `psum_with_feedback` on one rank: errors of the pieces sent and of the sums owned; and the key."""

    sent: tuple[Array, ...]
    total: tuple[Array, ...]
    key: Array | None


class Transformation(NamedTuple):
    """A pair of functions, as `optax.GradientTransformation`."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def psum_with_feedback(
    axis_name: AxisName,
    spec: SpecLike,
    key: Array | None = None,
    *,
    accumulate: Accumulate = None,
    bucket: int = BUCKET,
) -> Transformation:
    """Sums updates over ranks, as a link of an Optax chain, and keeps the errors of both roundings.

    A rank adds the error of its last messages to the pieces that it sends. The owner of a piece adds the error of the
    last sum. With the error e: c = x + e, q = round(c), and the new error is c - q. Over many steps the sum of results
    differs from the sum of updates by one error of each rank and one of the owner. So even formats of one bit can
    train. Without errors a step is `psum` with ``algorithm="two_shot"``.

    If a number is not finite on any rank, or in a sum, all results of the step are NaN on every rank. This is so in any
    format. The errors stay as they were. Skip the step then, for example by `jchop.optim.skip_nonfinite`.

    Both functions run inside `jax.shard_map`. The state differs between ranks. With a leading axis for the ranks it
    passes in and out of `jax.shard_map` by ``PartitionSpec(axis_name)``.

    Args:
        axis_name: as in `psum`.
        spec: as in `psum`; even formats so coarse that single sums mean little.
        key: a typed key, required if `spec` or `accumulate` is stochastic. Each step splits it. Default None.
        accumulate: as in `psum`.
        bucket: as in `psum`.

    Returns:
        The functions ``init(params)`` and ``update(updates, state, params=None)``, for `optax.chain`. The state has
        `sent` and `total`, the errors of the pieces sent and of the sums owned, and `key`.

    Raises:
        TypeError, ValueError: as `psum`.

    References:
        1-bit Adam, arXiv 2102.02888, algorithm 1; Karimireddy et al., arXiv 1901.09847.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> tx = jc.distributed.psum_with_feedback("i", "fixed4.0")
        >>> def steps(x):
        ...     state = tx.init(x)
        ...     first, state = tx.update(x, state)
        ...     return first, tx.update(x, state)[0]
        >>> [y[0].tolist() for y in jax.vmap(steps, axis_name="i")(jnp.array([[0.375], [0.375]]))]
        [[0.0], [2.0]]
    """
    spec = as_spec(spec, scaled=True)
    check_int("bucket", bucket, 0)
    bucket_size = bucket if messages.quantizes_vectors(spec) else None

    def init(params: Any) -> FeedbackState:
        wire, start_key = check_collective(axis_name, spec, key, params, accumulate=accumulate)
        send_errors: list[Array] = []
        sum_errors: list[Array] = []

        def zeros(v: Array, _: Array | None) -> Array:
            pieces = messages.plan_piece_cut(v.shape, wire.spec, wire.axes.size).pieces(v)
            error = messages.vary_over(jnp.zeros(pieces.shape, operation_carrier(v.dtype).name), wire.axes)
            send_errors.append(error)
            sum_errors.append(error[0])
            return v

        with jax_default_settings():
            messages.map_buckets(params, None, zeros, bucket_size)
        return FeedbackState(tuple(send_errors), tuple(sum_errors), start_key)

    def update(updates: Any, state: FeedbackState, params: Any = None, **extra: Any) -> tuple[Any, FeedbackState]:
        wire, step_key = check_collective(axis_name, spec, state.key, updates, accumulate=accumulate)
        errors = zip(state.sent, state.total, strict=True)
        new_errors: list[tuple[Array, Array]] = []

        def step(v: Array, k: Array | None) -> Array:
            result, step_errors = _feedback_step(wire, v, k, *next(errors))
            new_errors.append(step_errors)
            return result

        with jax_default_settings():
            next_key, sum_key = (None, None) if step_key is None else split_prng_key(step_key)
            results = messages.map_buckets(updates, sum_key, step, bucket_size)
            send_errors, sum_errors = zip(*new_errors, strict=True) if new_errors else ((), ())
            new, old = (send_errors, sum_errors), (state.sent, state.total)
            # Errors of numbers that are not finite, or of sums, are not; then they are not on any rank.
            finite = [jnp.isfinite(error).all() for error in jax.tree.leaves(new)] or [jnp.asarray(True)]
            is_finite = lax.pmin(jnp.stack(finite).all().astype(jnp.int32), wire.axes.name) > 0
            send_errors, sum_errors = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new, old)
            results = jax.tree.map(lambda y: jnp.where(is_finite, y, jnp.nan) if jnp.size(y) else y, results)
        return results, FeedbackState(send_errors, sum_errors, next_key)

    rounding_key(key, spec.rounding.stochastic, spec)
    return Transformation(init, update)


def _feedback_step(
    wire: Wire, v: Array, key: Array | None, send_error: Array, sum_error: Array
) -> tuple[Array, tuple[Array, Array]]:
    """The sum over ranks, and the new errors of the pieces sent and of the sum owned."""
    axes, cut = wire.axes, messages.plan_piece_cut(v.shape, wire.spec, wire.axes.size)
    pieces = cut.pieces(messages.vary_over(v, axes)).astype(send_error.dtype) + send_error
    send_key = messages.fold_in_numbers(key, Phase.SEND, 0, axes.rank)
    q = messages.encode_messages(pieces, wire.spec, send_key, jnp.arange(axes.size))
    new_send_error = pieces - messages.decode_messages(q, pieces.dtype)
    arrived = messages.decode_messages(messages.move_leaves(q, partial(messages.exchange, axes)), pieces.dtype)
    sum_key = messages.fold_in_numbers(key, Phase.SUM, 0, axes.rank)
    piece_sum = messages.sum_in_rank_order(arrived[:, None], wire.accumulate, sum_key, axes.rank[None])[0] + sum_error
    q = messages.encode_piece(wire, piece_sum, key)
    new_sum_error = piece_sum - messages.decode_messages(q, piece_sum.dtype)
    total = cut.join(messages.decode_messages(messages.gather_codes(wire, q, to="invarying"), v.dtype))
    return total, (new_send_error, new_sum_error)


# -- few exchanges -----------------------------------------------------------------------------------------------------


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
    """Trains with few exchanges: `every` steps of each rank by itself, then one step of an outer optimizer.

    At an exchange, `outer` gets the parameters of the last exchange minus the rank's own, in place of a gradient, and
    sums it over ranks. Its first link is `psum_with_feedback`, or a sum without memory:
    ``optax.stateless(lambda u, _: jchop.distributed.psum(u, "data", spec))``. DiLoCo's outer optimizer follows, with
    the mean over n ranks: ``optax.scale(1 / n), optax.sgd(0.7, momentum=0.9, nesterov=True)``. Between exchanges
    nothing moves. `update` runs inside `jax.shard_map`.

    The anchor in the state has the same bits on every rank. After an exchange, `optax.apply_updates` gives parameters
    that differ from it by a rounding of the addition at most. The next exchange corrects this. Save and evaluate the
    anchor.

    Args:
        inner: the Optax transformation of a rank's own steps.
        outer: the Optax transformation of the exchanges; its updates are the same on every rank.
        every: the number of steps of `inner` to an exchange, from 1 on.

    Returns:
        The functions ``init(params)`` and ``update(updates, state, params)``, as an Optax transformation. The state has
        `count`, `anchor`, `inner` and `outer`; it differs between ranks.

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
            raise TypeError(f"{name}={transformation!r} must be an Optax transformation, with init and update")

    def init(params: Any) -> DilocoState:
        anchor = jax.tree.map(jnp.asarray, params)
        return DilocoState(jnp.zeros((), jnp.int32), anchor, inner.init(params), outer.init(params))

    def update(updates: Any, state: DilocoState, params: Any = None, **extra: Any) -> tuple[Any, DilocoState]:
        check(params is not None, "params=None: diloco compares them with those of the last exchange; pass params")
        inner_updates, inner_state = inner.update(updates, state.inner, params, **extra)
        count = state.count + 1

        def keep_anchor() -> tuple[Any, Any, Any]:
            return (jax.tree.map(_cast_like, inner_updates, params), state.anchor, state.outer)

        def exchange() -> tuple[Any, Any, Any]:
            rank_params = jax.tree.map(_add_in_dtype, params, inner_updates)
            difference = jax.tree.map(jnp.subtract, state.anchor, rank_params)
            outer_updates, outer_state = outer.update(difference, state.outer, state.anchor)
            anchor = jax.tree.map(_add_in_dtype, state.anchor, outer_updates)
            change = jax.tree.map(lambda new, old, step: _cast_like(new - old, step), anchor, params, inner_updates)
            return change, anchor, outer_state

        change, anchor, outer_state = lax.cond(count == every, exchange, keep_anchor)
        return change, DilocoState(count % every, anchor, inner_state, outer_state)

    return Transformation(init, update)


def _add_in_dtype(x: Array, change: Array) -> Array:
    return jnp.asarray(x + change).astype(x.dtype)


def _cast_like(x: Array, other: Array) -> Array:
    """`x` with the type of both, since branches have results of one type."""
    return varying_like(x.astype(other.dtype), other)
