"""Sums of pieces over ranks, in codes: each rank gets the sum of one piece; and the gathering of pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._core.matmul.operations import operation_carrier
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop.distributed._algorithms import Algorithm, stages_of
from jchop.distributed._axes import RankAxes, all_gather_over, ppermute_over, types_track_axes
from jchop.distributed._messages import (
    Phase,
    check_draw_count,
    decode_messages,
    encode_messages,
    fold_in_numbers,
    move_leaves,
    sum_in_rank_order,
)
from jchop.storage import QArray

Array = jax.Array


@dataclass(frozen=True)
class Wire:
    """The static arguments of a collective.

    Args:
        axes: the mesh axes.
        spec: of the codes.
        algorithm: of sums.
        accumulate: the arithmetic of sums; None for the carrier.
    """

    axes: RankAxes
    spec: Spec
    algorithm: Algorithm
    accumulate: MatmulSpec | None


def reduce_scatter(wire: Wire, pieces: Array, key: Array | None) -> Array:
    """The sum over ranks of this rank's piece, in float32 or float64.

    Args:
        wire: the collective.
        pieces: (ranks, ...): piece p is for rank p.
        key: the key, if something draws.
    """
    check_draw_count(wire.spec, pieces.shape[0], pieces[0].size)
    stages = stages_of(wire.algorithm, wire.axes)
    return _ring_sum(wire, pieces, key) if stages is None else _exchange_and_sum(wire, stages, pieces, key)


def _exchange_and_sum(wire: Wire, stages: tuple[RankAxes, ...], pieces: Array, key: Array | None) -> Array:
    """Exchanges of codes along one stage after the other, each followed by a sum of what arrived."""
    axes, shape = wire.axes, pieces.shape[1:]
    sum_dtype = operation_carrier(pieces.dtype).name
    # One axis of pieces for each stage that is left, in the order of the mesh axes.
    remaining_axes = (
        [axes] if len(stages) == 1 else [RankAxes((n,), (s,)) for n, s in zip(axes.names, axes.sizes, strict=True)]
    )
    indexes = jnp.arange(axes.size, dtype=jnp.uint32).reshape([stage.size for stage in remaining_axes])
    values = pieces.reshape(*indexes.shape, *shape)
    for stage_index, stage in enumerate(stages):
        stage_axis = remaining_axes.index(stage)
        remaining_axes.pop(stage_axis)
        values, indexes = jnp.moveaxis(values, stage_axis, 0), jnp.moveaxis(indexes, stage_axis, 0)
        shape_left = indexes.shape[1:]
        q = encode_messages(
            values.reshape(-1, *shape),
            wire.spec,
            fold_in_numbers(key, Phase.SEND, stage_index, axes.rank),
            indexes.reshape(-1),
        )
        q = move_leaves(q, lambda leaf, name=stage.name: lax.all_to_all(leaf, name, 0, 0, tiled=True))
        messages = decode_messages(q, sum_dtype).reshape(stage.size, -1, *shape)
        indexes = lax.dynamic_index_in_dim(indexes, stage.rank, 0, keepdims=False)
        sum_key = fold_in_numbers(key, Phase.SUM, stage_index, axes.rank)
        values = sum_in_rank_order(messages, wire.accumulate, sum_key, indexes.reshape(-1)).reshape(*shape_left, *shape)
    return values


def _ring_sum(wire: Wire, pieces: Array, key: Array | None) -> Array:
    """The partial sum of piece p starts at rank p + 1, and each rank adds its numbers; rank p adds last."""
    axes, count = wire.axes, wire.axes.size
    sum_dtype = operation_carrier(pieces.dtype).name
    ring = tuple((rank, (rank + 1) % count) for rank in range(count))

    def piece_of(index: Array) -> Array:
        return lax.dynamic_index_in_dim(pieces, index, 0, keepdims=False).astype(sum_dtype)

    def hop(partial_sum: Array, step: Array) -> tuple[Array, None]:
        send_index = (axes.rank + 2 * count - step - 1) % count
        q = encode_messages(
            partial_sum[None], wire.spec, fold_in_numbers(key, Phase.SEND, step, axes.rank), send_index[None]
        )
        q = move_leaves(q, lambda leaf: ppermute_over(leaf, axes, ring))
        sum_index = (axes.rank + 2 * count - step - 2) % count
        messages = jnp.stack([decode_messages(q, sum_dtype)[0], piece_of(sum_index)])[:, None]
        sum_key = fold_in_numbers(key, Phase.SUM, step, axes.rank)
        return sum_in_rank_order(messages, wire.accumulate, sum_key, sum_index[None])[0], None

    first = piece_of((axes.rank + count - 1) % count)
    return lax.scan(hop, first, jnp.arange(count - 1, dtype=jnp.int32))[0]


def gather_numbers(wire: Wire, piece: Array, key: Array | None, dtype: Any, *, to: str) -> Array:
    """The pieces of all ranks, along a new first axis. Each rank decodes the same codes, so all get the same bits.

    Args:
        wire: the collective.
        piece: this rank's piece.
        key: the key, if the spec draws.
        dtype: of the result.
        to: ``"varying"`` or ``"invarying"``: the type of the result along the axes, as in `jax.lax.all_gather`.
    """
    return decode_messages(gather_codes(wire, encode_piece(wire, piece, key), to=to), dtype)


def encode_piece(wire: Wire, piece: Array, key: Array | None) -> QArray:
    """The codes of this rank's piece, before they are gathered."""
    check_draw_count(wire.spec, wire.axes.size, piece.size)
    return move_leaves(
        encode_messages(piece[None], wire.spec, fold_in_numbers(key, Phase.GATHER), wire.axes.rank[None]),
        lambda leaf: leaf[0],
    )


def gather_codes(wire: Wire, q: QArray, *, to: str) -> QArray:
    """The codes of all ranks, along a new first axis."""
    axes = wire.axes
    stages = stages_of(wire.algorithm, axes) or (axes,)
    to = to if types_track_axes(axes) else "varying"
    for stage in reversed(stages):
        q = move_leaves(q, lambda leaf, over=stage: all_gather_over(leaf, over, to=to))
    if len(stages) > 1:
        order = [stages.index(RankAxes((n,), (s,))) for n, s in zip(axes.names, axes.sizes, strict=True)]
        q = move_leaves(q, lambda leaf: _join_stage_axes(leaf, order))
    return q


def _join_stage_axes(leaf: Array, order: list[int]) -> Array:
    """Leading axes in another order, joined."""
    transposed_leaf = leaf.transpose(*order, *range(len(order), leaf.ndim))
    return transposed_leaf.reshape(-1, *leaf.shape[len(order) :])


def exchange_numbers(wire: Wire, pieces: Array, key: Array | None) -> Array:
    """(ranks, ...): the pieces that every rank sent to this one; piece p of `pieces` is sent to rank p."""
    check_draw_count(wire.spec, pieces.shape[0], pieces[0].size)
    q = encode_messages(
        pieces, wire.spec, fold_in_numbers(key, Phase.SEND, 0, wire.axes.rank), jnp.arange(wire.axes.size)
    )
    q = move_leaves(q, lambda leaf: lax.all_to_all(leaf, wire.axes.name, 0, 0, tiled=True))
    return decode_messages(q, pieces.dtype)


def permute_numbers(wire: Wire, x: Array, key: Array | None, perm: tuple[tuple[int, int], ...]) -> Array:
    """`x` of the rank that sends to this one; zeros on a rank that none sends to."""
    check_draw_count(wire.spec, wire.axes.size, x.size)
    q = encode_messages(x[None], wire.spec, fold_in_numbers(key, Phase.SEND, 0), wire.axes.rank[None])
    message = decode_messages(move_leaves(q, lambda leaf: ppermute_over(leaf, wire.axes, perm)), x.dtype)[0]
    targets = {target for _, target in perm}
    if len(targets) == wire.axes.size:
        return message
    receives = jnp.array([rank in targets for rank in range(wire.axes.size)])[wire.axes.rank]
    return jnp.where(receives, message, jnp.zeros_like(message))
