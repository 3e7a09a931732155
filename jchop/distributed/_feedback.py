"""Sums over ranks whose rounding errors are kept and added to the next sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.checks import check_int
from jchop._common.settings import jax_default_settings, split_prng_key
from jchop._core.matmul.operations import operation_carrier
from jchop._round.arguments import rounding_key
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec, as_spec
from jchop.distributed._algorithms import TWO_SHOT
from jchop.distributed._axes import AxisName, RankAxes, vary_over
from jchop.distributed._buckets import map_buckets
from jchop.distributed._collectives import BUCKET, check_collective
from jchop.distributed._messages import (
    Phase,
    decode_messages,
    encode_messages,
    fold_in_numbers,
    move_leaves,
    sum_in_rank_order,
)
from jchop.distributed._pieces import PieceCut, plan_piece_cut, quantizes_vectors
from jchop.distributed._reduce import Wire, encode_piece, gather_codes
from jchop.formats import ElementFormat, ScaledFormat

Array = jax.Array


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
    spec: Spec | ElementFormat | ScaledFormat | str,
    key: Array | None = None,
    *,
    accumulate: MatmulSpec | Spec | ElementFormat | str | None = None,
    bucket: int = BUCKET,
) -> Transformation:
    """Sums of updates over ranks as a link of an Optax chain, with the errors of both roundings kept.

    A rank adds the error of its last messages to the pieces that it sends, and the owner of a piece adds the error of
    the last sum: c = x + e, q = round(c), and the new error is c - q. Over many steps the sum of all results differs
    from the sum of all updates by one error of every rank and one of the owner. So formats of one bit train. Without
    errors a step is `psum` with ``algorithm="two_shot"``.

    If a number is not finite on any rank, or in a sum, all results of the step are NaN on every rank, in any format,
    and the errors stay as they were: a step to be skipped, as by `jchop.optim.skip_nonfinite`.

    Both functions run inside `jax.shard_map`. The state differs between ranks: with a leading axis for the ranks it
    passes in and out of `jax.shard_map` by ``PartitionSpec(axis_name)``.

    Args:
        axis_name: as in `psum`.
        spec: as in `psum`; also formats so coarse that single sums mean little.
        key: a typed key, required if `spec` or `accumulate` is stochastic. Each step splits it. Default None.
        accumulate: as in `psum`.
        bucket: as in `psum`.

    Returns:
        The functions ``init(params)`` and ``update(updates, state, params=None)``, which `optax.chain` takes. The state
        is a `FeedbackState`.

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
    bucket_size = bucket if quantizes_vectors(spec) else None

    def wire_and_key(x: Any, key: Array | None) -> tuple[Wire, Array | None]:
        return check_collective(axis_name, spec, key, TWO_SHOT, accumulate, x)

    def init(params: Any) -> FeedbackState:
        wire, start_key = wire_and_key(params, key)
        send_errors: list[Array] = []
        sum_errors: list[Array] = []

        def zeros(v: Array, _: Array | None) -> Array:
            pieces = _feedback_cut(v, wire).pieces(v)
            send_errors.append(vary_over(jnp.zeros(pieces.shape, operation_carrier(v.dtype).name), wire.axes))
            sum_errors.append(vary_over(jnp.zeros(pieces.shape[1:], operation_carrier(v.dtype).name), wire.axes))
            return v

        with jax_default_settings():
            map_buckets(params, None, zeros, bucket_size)
        return FeedbackState(tuple(send_errors), tuple(sum_errors), start_key)

    def update(updates: Any, state: FeedbackState, params: Any = None, **extra: Any) -> tuple[Any, FeedbackState]:
        del params, extra
        wire, step_key = wire_and_key(updates, state.key)
        errors = zip(state.sent, state.total, strict=True)
        new_errors: list[tuple[Array, Array]] = []

        def step(v: Array, k: Array | None) -> Array:
            result, *step_errors = _feedback_step(wire, v, k, *next(errors))
            new_errors.append((step_errors[0], step_errors[1]))
            return result

        with jax_default_settings():
            next_key, sum_key = (None, None) if step_key is None else split_prng_key(step_key)
            results = map_buckets(updates, sum_key, step, bucket_size)
            send_errors, sum_errors = zip(*new_errors, strict=True) if new_errors else ((), ())
            new, old = (send_errors, sum_errors), (state.sent, state.total)
            is_finite = _all_ranks_finite(wire.axes, new)
            send_errors, sum_errors = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new, old)
            results = jax.tree.map(lambda y: jnp.where(is_finite, y, jnp.nan) if jnp.size(y) else y, results)
        return results, FeedbackState(send_errors, sum_errors, next_key)

    rounding_key(key, spec.rounding.stochastic, spec)
    return Transformation(init, update)


def _all_ranks_finite(axes: RankAxes, errors: Any) -> Array:
    """Whether all new errors are finite on every rank: those of numbers that are not, or of sums, are not."""
    finite = [jnp.isfinite(error).all() for error in jax.tree.leaves(errors)]
    return lax.pmin(jnp.stack(finite).all().astype(jnp.int32), axes.name) > 0 if finite else jnp.asarray(True)


def _feedback_cut(v: Array, wire: Wire) -> PieceCut:
    return plan_piece_cut(v.shape, wire.spec, wire.axes.size)


def _feedback_step(
    wire: Wire, v: Array, key: Array | None, send_error: Array, sum_error: Array
) -> tuple[Array, Array, Array]:
    """The sum over ranks, and the new errors of the pieces sent and of the sum owned."""
    axes, cut = wire.axes, _feedback_cut(v, wire)
    pieces = cut.pieces(vary_over(v, axes)).astype(send_error.dtype) + send_error
    q = encode_messages(pieces, wire.spec, fold_in_numbers(key, Phase.SEND, 0, axes.rank), jnp.arange(axes.size))
    new_send_error = pieces - decode_messages(q, pieces.dtype)
    messages = decode_messages(
        move_leaves(q, lambda leaf: lax.all_to_all(leaf, axes.name, 0, 0, tiled=True)), pieces.dtype
    )
    sum_key = fold_in_numbers(key, Phase.SUM, 0, axes.rank)
    piece_sum = sum_in_rank_order(messages[:, None], wire.accumulate, sum_key, axes.rank[None])[0] + sum_error
    q = encode_piece(wire, piece_sum, key)
    new_sum_error = piece_sum - decode_messages(q, piece_sum.dtype)
    return cut.join(decode_messages(gather_codes(wire, q, to="invarying"), v.dtype)), new_send_error, new_sum_error
