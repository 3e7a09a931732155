"""Messages: arrays that travel as codes and scales; sums of the numbers that arrive, in an order; gathers of codes."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._core.matmul.operations import check_matmul, operation_carrier, spec_draws, sum_along
from jchop._core.rounding.random_bits import seed_words
from jchop._kernels.products.matmul import matmul_op
from jchop._round.round_to_format import round_to_format
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop.distributed._axes import RankAxes, all_gather_over, ppermute_over, types_track_axes
from jchop.storage import QArray, dequantize, quantize

Array = jax.Array
_MAX_MESSAGE_DRAWS = 1 << 32


class Phase(enum.IntEnum):
    """The part of a collective that draws; a number of the definition in docs/distributed.md."""

    SEND = 0
    SUM = 1
    GATHER = 2
    BACKWARD = 3


def fold_in_numbers(key: Array | None, *numbers: Any) -> Array | None:
    """The key with numbers folded in, one after the other."""
    for number in numbers:
        key = None if key is None else jax.random.fold_in(key, number)
    return key


# -- codes -------------------------------------------------------------------------------------------------------------


def encode_messages(messages: Array, spec: Spec, key: Array | None, indexes: Any) -> QArray:
    """Each of the arrays along the first axis, quantized by itself.

    Element j of the message with place p draws the word at index ``p size + j``.

    Args:
        messages: (k, ...).
        spec: of the codes.
        key: the key, if `spec` draws.
        indexes: k integers: the number of each message among all messages of the collective.
    """
    if not spec_draws(spec):
        return jax.vmap(lambda message: quantize(message, spec))(messages)
    size = math.prod(messages.shape[1:])
    starts = jnp.asarray(indexes, jnp.uint32) * jnp.uint32(size)
    return jax.vmap(lambda message, start: quantize(message, spec, key, offset=start))(messages, starts)


def check_draw_count(spec: Spec, count: int, size: int) -> None:
    """Refuses random words beyond index 2^32, for which starts would need 64 bits."""
    if spec_draws(spec) and count * size >= _MAX_MESSAGE_DRAWS:
        raise ValueError(f"x has {count * size} numbers on the wire, and a stochastic spec draws for fewer than 2^32; "
                         "pass a part of x at a time")  # fmt: skip


def move_leaves(q: Any, function: Callable[[Array], Array]) -> Any:
    """The leaves of a QArray, or of another tree, each moved in the same way.

    Short floats move as integers of the same bits: XLA's CPU backend would move them as float32.
    """
    return jax.tree.map(lambda leaf: _move_as_bits(leaf, function), q)


def _move_as_bits(leaf: Array, function: Callable[[Array], Array]) -> Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize > 2:
        return function(leaf)
    bits = lax.bitcast_convert_type(leaf, jnp.dtype(f"u{leaf.dtype.itemsize}"))
    return lax.bitcast_convert_type(function(bits), leaf.dtype)


def send_messages(
    messages: Array, spec: Spec, key: Array | None, indexes: Any, move: Callable[[Array], Array], dtype: Any = None
) -> Array:
    """The numbers that arrive in `dtype` (that of the messages), if codes are moved by `move`."""
    q = move_leaves(encode_messages(messages, spec, key, indexes), move)
    return decode_messages(q, messages.dtype if dtype is None else dtype)


def decode_messages(q: QArray, dtype: Any) -> Array:
    """The numbers of messages that arrived. The barrier keeps products with scales out of the sums that follow."""
    return lax.optimization_barrier(dequantize(q, dtype))


# -- sums --------------------------------------------------------------------------------------------------------------


def sum_arithmetic(value: Any, dtypes: Any) -> MatmulSpec | None:
    """The arithmetic of sums over ranks: None for the carrier.

    Raises:
        TypeError, ValueError: for a product, or an accumulator that numbers of `dtypes` do not allow.
    """
    if value is None:
        return None
    spec = value if isinstance(value, MatmulSpec) else MatmulSpec(accumulate=value)
    if spec.product is not None or spec.fused:
        raise ValueError(f"accumulate={str(spec)!r}: a sum has no products; leave product=None and fused=False")
    for dtype in dtypes:
        check_matmul(spec, operation_carrier(dtype).name)
    return spec


def sum_in_rank_order(messages: Array, accumulate: MatmulSpec | None, key: Array | None, indexes: Array) -> Array:
    """The sum over the first axis, rank 0 first.

    Args:
        messages: (ranks, k, ...), float32 or float64.
        accumulate: the arithmetic. None: c <- c + x_r in the dtype, from the numbers of rank 0.
        key: the key, if `accumulate` draws.
        indexes: k integers, the number of each sum.
    """
    if accumulate is None:
        return lax.scan(lambda c, x: (c + x, None), messages[0], messages[1:])[0]

    def sum_rows(rows: Array, index: Array) -> Array:
        row_key = fold_in_numbers(key, index)
        if accumulate.operands is not None:
            rows = round_to_format(rows, accumulate.operands, fold_in_numbers(row_key, 0))
        sum_key = fold_in_numbers(row_key, 1) if spec_draws(accumulate.accumulate) else None
        seeds = None if sum_key is None else jnp.stack([*seed_words(sum_key)] * 2)
        return sum_along(rows, 0, accumulate, seeds, matmul=matmul_op)

    return jax.vmap(sum_rows, in_axes=(1, 0))(messages, jnp.asarray(indexes, jnp.uint32))


# -- collectives of one array ------------------------------------------------------------------------------------------

#: Every rank sends its piece of each other rank's sum once, in codes; the sums are quantized once more.
TWO_SHOT = "two_shot"
#: Partial sums go round the ranks, and each rank quantizes them again.
RING = "ring"


@dataclass(frozen=True)
class Hierarchical:
    """A sum over `inner` ranks first, and of these sums over `outer` ranks; see `hierarchical`."""

    inner: Any
    outer: Any

    def __str__(self) -> str:
        return f"hierarchical({self.inner!r}, {self.outer!r})"


Algorithm = str | Hierarchical


def hierarchical(inner: Any, outer: Any) -> Hierarchical:
    """The algorithm of a sum over two mesh axes, one after the other: three roundings, less data between nodes.

    The ranks along `inner` exchange codes and add them; the partial sums are quantized again, exchanged along `outer`
    and added. So each rank sends 1/I of its numbers along `outer`, with I ranks along `inner`.

    Args:
        inner: name of the mesh axis with fast links, inside a node.
        outer: name of the mesh axis between nodes.

    Returns:
        A value for the argument `algorithm` of the sums of `jchop.distributed`, whose `axis_name` then has these two
        names.

    Raises:
        ValueError: if both are the same axis.

    References:
        ZeRO++, arXiv 2306.10209, section 3.3 (qgZ).

    Example:
        >>> import jchop as jc
        >>> jc.distributed.hierarchical("chip", "node")
        Hierarchical(inner='chip', outer='node')
    """
    if inner == outer:
        raise ValueError(f"inner={inner!r} and outer={outer!r} must be two different mesh axes")
    return Hierarchical(inner, outer)


def stages_of(algorithm: Any, axes: RankAxes) -> tuple[RankAxes, ...] | None:
    """The axes of each exchange of a sum; None for the ring.

    Raises:
        ValueError: for another algorithm, or axes that are not those of the hierarchy.
    """
    if isinstance(algorithm, Hierarchical):
        if {algorithm.inner, algorithm.outer} != set(axes.names):
            raise ValueError(
                f"algorithm={algorithm} is over two axes, and axis_name={axes.name!r}; pass "
                f"axis_name=({algorithm.outer!r}, {algorithm.inner!r})"
            )
        sizes = dict(zip(axes.names, axes.sizes, strict=True))
        return tuple(RankAxes((name,), (sizes[name],)) for name in (algorithm.inner, algorithm.outer))
    if algorithm == TWO_SHOT:
        return (axes,)
    if algorithm == RING:
        return None
    raise ValueError(
        f"algorithm={algorithm!r} must be {TWO_SHOT!r}, {RING!r} or a value of jchop.distributed.hierarchical(inner, "
        "outer)"
    )


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
        send_key = fold_in_numbers(key, Phase.SEND, stage_index, axes.rank)
        messages = send_messages(
            values.reshape(-1, *shape), wire.spec, send_key, indexes.reshape(-1), partial(exchange, stage), sum_dtype
        ).reshape(stage.size, -1, *shape)
        indexes = lax.dynamic_index_in_dim(indexes, stage.rank, 0, keepdims=False)
        sum_key = fold_in_numbers(key, Phase.SUM, stage_index, axes.rank)
        values = sum_in_rank_order(messages, wire.accumulate, sum_key, indexes.reshape(-1)).reshape(*shape_left, *shape)
    return values


def _ring_sum(wire: Wire, pieces: Array, key: Array | None) -> Array:
    """The partial sum of piece p starts at rank p + 1, and each rank adds its numbers; rank p adds last."""
    axes, count = wire.axes, wire.axes.size
    sum_dtype = operation_carrier(pieces.dtype).name
    turn = partial(ppermute_over, axes=axes, perm=tuple((rank, (rank + 1) % count) for rank in range(count)))

    def piece_of(index: Array) -> Array:
        return lax.dynamic_index_in_dim(pieces, index, 0, keepdims=False).astype(sum_dtype)

    def hop(partial_sum: Array, step: Array) -> tuple[Array, None]:
        send_index = (axes.rank + 2 * count - step - 1) % count
        send_key = fold_in_numbers(key, Phase.SEND, step, axes.rank)
        (arrived,) = send_messages(partial_sum[None], wire.spec, send_key, send_index[None], turn, sum_dtype)
        sum_index = (axes.rank + 2 * count - step - 2) % count
        messages = jnp.stack([arrived, piece_of(sum_index)])[:, None]
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


def exchange(axes: RankAxes, leaf: Array) -> Array:
    """Entry p of the first axis goes to rank p."""
    return lax.all_to_all(leaf, axes.name, 0, 0, tiled=True)


def exchange_numbers(wire: Wire, pieces: Array, key: Array | None) -> Array:
    """(ranks, ...): the pieces that every rank sent to this one; piece p of `pieces` is sent to rank p."""
    check_draw_count(wire.spec, pieces.shape[0], pieces[0].size)
    send_key = fold_in_numbers(key, Phase.SEND, 0, wire.axes.rank)
    return send_messages(pieces, wire.spec, send_key, jnp.arange(wire.axes.size), partial(exchange, wire.axes))


def permute_numbers(wire: Wire, x: Array, key: Array | None, perm: tuple[tuple[int, int], ...]) -> Array:
    """`x` of the rank that sends to this one; zeros on a rank that none sends to."""
    axes = wire.axes
    check_draw_count(wire.spec, axes.size, x.size)
    send_key, move = fold_in_numbers(key, Phase.SEND, 0), partial(ppermute_over, axes=axes, perm=perm)
    (message,) = send_messages(x[None], wire.spec, send_key, axes.rank[None], move)
    targets = {target for _, target in perm}
    if len(targets) == axes.size:
        return message
    receives = jnp.array([rank in targets for rank in range(axes.size)])[axes.rank]
    return jnp.where(receives, message, jnp.zeros_like(message))
