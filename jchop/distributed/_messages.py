"""Codes between ranks: mesh axes, pieces of arrays that cut no groups, messages, sums in the order of ranks."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jchop._common.bit_ops import varying_axes
from jchop._common.checks import as_numpy
from jchop._core.matmul.operations import check_matmul, operation_carrier, spec_draws, sum_along
from jchop._core.rounding.random_bits import seed_words
from jchop._kernels.products.matmul import matmul_op
from jchop._round.arguments import carrier_of_dtype
from jchop._round.round_to_format import round_to_format
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop._storage import QArray, dequantize, quantize
from jchop._storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, AxisGrouping, axis_groupings
from jchop.formats import ScaledFormat

#: The name of a mesh axis, or several names, of which the last varies fastest between ranks.
AxisName = Any


@dataclass(frozen=True)
class RankAxes:
    """Mesh axes that a collective runs over.

    Args:
        names: their names, the slowest first.
        sizes: the number of ranks along each.
    """

    names: tuple[Any, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def each(self) -> list[RankAxes]:
        """The axes, one by one."""
        return [RankAxes((name,), (size,)) for name, size in zip(self.names, self.sizes, strict=True)]

    @property
    def name(self) -> Any:
        """The argument of collectives of `jax.lax`."""
        return self.names[0] if len(self.names) == 1 else self.names

    @property
    def rank(self) -> Array:
        """The number of this rank."""
        return lax.axis_index(self.name)


def as_rank_axes(axis_name: AxisName) -> RankAxes:
    """The axes of a name or of several names.

    Raises:
        ValueError: for a name that is not an axis here, one that is named twice, or no name.
    """
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"axis_name={axis_name!r} must be a mesh axis, or several different ones")
    sizes = []
    for name in names:
        try:
            sizes.append(int(lax.axis_size(name)))
        except (NameError, KeyError, TypeError, ValueError):
            mesh_axes = tuple(map(str, jax.sharding.get_abstract_mesh().axis_names))
            mesh_text = ", ".join(map(repr, mesh_axes)) if mesh_axes else "none"
            raise ValueError(
                f"axis_name={axis_name!r}: {name!r} is not an axis here; axes of the mesh: {mesh_text}. Call it inside "
                "jax.shard_map or jax.vmap over the axis"
            ) from None
    return RankAxes(names, tuple(sizes))


def _in_vmap(axes: RankAxes) -> bool:
    """Whether some axes are axes of `jax.vmap`, whose collectives take one axis at a time."""
    return not set(axes.names) <= set(jax.sharding.get_abstract_mesh().axis_names)


def all_gather_over(x: Array, axes: RankAxes, axis: int = 0, *, tiled: bool = False, to: str = "varying") -> Array:
    """`jax.lax.all_gather` over all axes."""
    if len(axes.names) == 1 or not _in_vmap(axes):
        return lax.all_gather(x, axes.name, axis=axis, tiled=tiled, to=to)
    x = x if tiled else lax.expand_dims(x, [axis])
    for name in reversed(axes.names):
        x = lax.all_gather(x, name, axis=axis, tiled=True, to=to)
    return x


def psum_scatter_over(x: Array, axes: RankAxes, axis: int, tiled: bool) -> Array:
    """`jax.lax.psum_scatter` over all axes."""
    if len(axes.names) == 1 or not _in_vmap(axes):
        return lax.psum_scatter(x, axes.name, scatter_dimension=axis, tiled=tiled)
    for name in axes.names:
        x = lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
    return x if tiled else lax.squeeze(x, [axis])


def ppermute_over(x: Array, axes: RankAxes, perm: tuple[tuple[int, int], ...]) -> Array:
    """`jax.lax.ppermute` over all axes. In `jax.vmap` it takes one axis, and pairs with every rank."""
    if not _in_vmap(axes) or (len(axes.names) == 1 and len(perm) == axes.size):
        return lax.ppermute(x, axes.name, perm)
    sources = {target: source for source, target in perm}
    source_rank = jnp.asarray([sources.get(rank, axes.size) for rank in range(axes.size)])[axes.rank]
    return all_gather_over(x, axes).at[source_rank].get(mode="fill", fill_value=0)


def types_track_axes(axes: RankAxes) -> bool:
    """Whether types say along which axes a value differs: inside `jax.shard_map` unless ``check_vma=False``."""
    return set(axes.names) <= set(varying_axes(axes.rank))


def vary_over(x: Array, axes: RankAxes) -> Array:
    """`x`, with a type that differs between the ranks of `axes`."""
    missing = tuple(name for name in axes.names if name not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing and types_track_axes(axes) else x


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
    """The numbers that arrive, if `move` moves their codes, in `dtype`. Default: the dtype of the messages."""
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
    """Algorithm of a sum over two mesh axes, one after the other: three roundings, less data between nodes.

    The ranks along `inner` exchange codes and add them. The partial sums are quantized again, exchanged along `outer`
    and added. So each rank sends 1/I of its numbers along `outer`, with I ranks along `inner`. It is a value for the
    argument `algorithm` of the sums of `jchop.distributed`. Their `axis_name` then has these two names.

    Args:
        inner: name of the mesh axis with fast links, inside a node.
        outer: name of the mesh axis between nodes.

    Raises:
        ValueError: if both are the same axis.

    References:
        ZeRO++, arXiv 2306.10209, section 3.3 (qgZ).

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> levels = jc.distributed.Hierarchical("chip", "node")
        >>> total = lambda x: jc.distributed.psum(x, ("node", "chip"), "int8(group=4)", algorithm=levels)
        >>> jax.vmap(jax.vmap(total, axis_name="chip"), axis_name="node")(jnp.ones((2, 2, 1)))[0, 0].tolist()
        [4.0]
    """

    inner: Any
    outer: Any

    def __post_init__(self) -> None:
        if self.inner == self.outer:
            raise ValueError(f"inner={self.inner!r} and outer={self.outer!r} must be two different mesh axes")


Algorithm = str | Hierarchical


def stages_of(algorithm: Any, axes: RankAxes) -> tuple[RankAxes, ...] | None:
    """The axes of each exchange of a sum; None for the ring.

    Raises:
        ValueError: for another algorithm, or axes that differ from the axes of the hierarchy.
    """
    if isinstance(algorithm, Hierarchical):
        if {algorithm.inner, algorithm.outer} != set(axes.names):
            raise ValueError(
                f"algorithm={algorithm} is over two axes, and axis_name={axes.name!r}; pass "
                f"axis_name=({algorithm.outer!r}, {algorithm.inner!r})"
            )
        return tuple(sorted(axes.each, key=lambda axis: axis.name == algorithm.outer))
    if algorithm == TWO_SHOT:
        return (axes,)
    if algorithm == RING:
        return None
    raise ValueError(
        f"algorithm={algorithm!r} must be {TWO_SHOT!r}, {RING!r} or jchop.distributed.Hierarchical(inner, outer)"
    )


@dataclass(frozen=True)
class Wire:
    """The static arguments of a collective.

    Args:
        axes: the mesh axes.
        spec: of the codes.
        algorithm: of sums.
        accumulate: the arithmetic of sums; None for the carrier.
        floats: whether numbers move as they are: tangents, and cotangents without a spec.
    """

    axes: RankAxes
    spec: Spec
    algorithm: Algorithm
    accumulate: MatmulSpec | None
    floats: bool = False


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
    """Exchanges of codes along one stage after the other, each followed by a sum of the codes that arrived."""
    axes, shape = wire.axes, pieces.shape[1:]
    sum_dtype = operation_carrier(pieces.dtype).name
    # One axis of pieces for each stage that is left, in the order of the mesh axes.
    remaining_axes = [axes] if len(stages) == 1 else axes.each
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
    q = encode_messages(piece[None], wire.spec, fold_in_numbers(key, Phase.GATHER), wire.axes.rank[None])
    return move_leaves(q, lambda leaf: leaf[0])


def gather_codes(wire: Wire, q: QArray, *, to: str) -> QArray:
    """The codes of all ranks, along a new first axis."""
    axes = wire.axes
    stages = stages_of(wire.algorithm, axes) or (axes,)
    to = to if types_track_axes(axes) else "varying"
    for stage in reversed(stages):
        q = move_leaves(q, lambda leaf, over=stage: all_gather_over(leaf, over, to=to))
    if len(stages) > 1:
        order = [stages.index(axis) for axis in axes.each]
        q = move_leaves(
            q, lambda leaf: leaf.transpose(*order, *range(len(order), leaf.ndim)).reshape(-1, *leaf.shape[len(order) :])
        )
    return q


def exchange(axes: RankAxes, leaf: Array) -> Array:
    """Entry p of the first axis goes to rank p."""
    return lax.all_to_all(leaf, axes.name, 0, 0, tiled=True)


def quantizes_vectors(spec: Spec) -> bool:
    """Whether a spec quantizes vectors: each number by itself, in blocks of the last axis, or all under one scale."""
    return all(fmt.channel is None and (fmt.group is None or fmt.axis == -1) for fmt in _formats_of_groups(spec))


def _formats_of_groups(spec: Spec) -> list[ScaledFormat]:
    """The scaled format, the scaled format of its scales, and so on."""
    formats = []
    part: Any = spec.scaled
    while isinstance(part, ScaledFormat):
        formats.append(part)
        part = part.scale
    return formats


def split_axis(x: Array, axis: int, count: int, tiled: bool = True) -> Array:
    """(count, ...): the equal parts of an axis; its entries unless `tiled`."""
    x = x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :]) if tiled else x
    return jnp.moveaxis(x, axis, 0)


def join_axis(pieces: Array, axis: int, tiled: bool = True) -> Array:
    """The inverse of `split_axis`."""
    split = jnp.moveaxis(pieces, 0, axis)
    return split.reshape(*split.shape[:axis], -1, *split.shape[axis + 2 :]) if tiled else split


@dataclass(frozen=True)
class PieceCut:
    """The cut of arrays into one piece for each rank.

    Args:
        count: the number of ranks.
        shape: of the array, or of the vector of several joined arrays.
        axis: the axis of the cut.
        length: of a piece along it.
    """

    count: int
    shape: tuple[int, ...]
    axis: int
    length: int

    def pieces(self, x: Array) -> Array:
        """(count, ...): the pieces; the last number is repeated up to the length of the last pieces."""
        missing = self.count * self.length - self.shape[self.axis]
        if missing:
            x = jnp.pad(x, [(0, missing if axis == self.axis else 0) for axis in range(x.ndim)], mode="edge")
        return split_axis(x, self.axis, self.count)

    def join(self, pieces: Array) -> Array:
        """The array of pieces."""
        return jax.lax.slice_in_dim(join_axis(pieces, self.axis), 0, self.shape[self.axis], axis=self.axis)


def plan_piece_cut(shape: Sequence[int], spec: Spec, count: int) -> PieceCut:
    """The cut of an array between groups.

    A piece of a vector holds whole groups, if it holds more than one. Another array is cut between groups, along the
    axis that is not under one scale and leaves the fewest numbers to be added.

    Raises:
        ValueError: for a format that has an axis that the array lacks, or groups that span every axis.
    """
    shape = tuple(shape)
    groups = (OWN_SCALE,) * len(shape) if spec.scaled is None else axis_groupings(spec.scaled, len(shape))
    if quantizes_vectors(spec):
        axis = len(shape) - 1
        return PieceCut(count, shape, axis, _piece_length(shape[axis], groups[axis], count))
    lengths = {
        axis: _piece_length(n, groups[axis], count, 0) for axis, n in enumerate(shape) if groups[axis] != WHOLE_AXIS
    }
    if not lengths:
        raise ValueError(f"spec={str(spec)!r} has groups that span every axis of x, of shape {shape}, so it cannot be "
                         "cut into pieces; use a format whose groups are blocks or all numbers")  # fmt: skip
    axis = min(lengths, key=lambda axis: lengths[axis] * count / max(shape[axis], 1))
    return PieceCut(count, shape, axis, lengths[axis])


def _piece_length(n: int, grouping: AxisGrouping, count: int, most_cut: int = 1) -> int:
    """The least length of `count` equal pieces of an axis of length n, of whole groups if of more than `most_cut`."""
    length = -(-n // count)
    return -(-length // grouping) * grouping if isinstance(grouping, int) and length > grouping * most_cut else length


def check_whole_groups(spec: Spec, shape: Sequence[int], axis: int, count: int, name: str) -> None:
    """Refuses parts along an axis that cut blocks of it.

    Args:
        spec: of the codes.
        shape: of a part.
        axis: of the cut.
        count: the number of parts.
        name: the argument whose parts they are, with its axis.
    """
    if spec.scaled is None or not shape:
        return
    groupings = [axis_groupings(fmt, len(shape))[axis] for fmt in _formats_of_groups(spec)]
    block = math.prod(grouping for grouping in groupings if isinstance(grouping, int))
    if shape[axis] % block:
        total = shape[axis] * count
        part_counts = [n for n in range(1, math.isqrt(total) * 8 + 2) if total % (n * block) == 0]
        counts_text = ", ".join(map(str, part_counts[:12])) or "none"
        raise ValueError(
            f"{name}: {count} parts of length {shape[axis]} cut groups of {block} of spec={str(spec)!r}; numbers of "
            f"parts that fit a length of {total}: {counts_text}"
        )


# -- trees -------------------------------------------------------------------------------------------------------------


def carrier_leaves(x: Any) -> tuple[list[Array], Any]:
    """The leaves of a tree as JAX arrays, and its structure.

    Raises:
        TypeError: for a leaf of a dtype that is no carrier; the error has its path.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(x)
    leaves = []
    for path, leaf in paths:
        name = f"x{jax.tree_util.keystr(path)}"
        array = leaf if isinstance(leaf, Array) else as_numpy(name, leaf)
        carrier_of_dtype(array.dtype, name, complex_too=False)
        leaves.append(jnp.asarray(array))
    return leaves, structure


def map_leaves(x: Any, key: Array | None, function: Callable[[Array, Array | None], Array]) -> Any:
    """`function` of every leaf of a tree, with the key and the number of the leaf folded in; empty leaves unchanged."""
    leaves, structure = carrier_leaves(x)
    return structure.unflatten([function(leaf, fold_in_numbers(key, index)) for index, leaf in enumerate(leaves)])


def map_buckets(x: Any, key: Array | None, function: Callable[[Array, Array | None], Array], bucket: int | None) -> Any:
    """`function` of every leaf of a tree as a vector; small ones of one dtype are one vector.

    Args:
        x: the tree.
        key: the key; the number of the vector is folded in.
        function: has a vector and gives one of the same length.
        bucket: leaves of fewer elements are joined. None: leaves keep their shapes; leaves without elements stay.
    """
    if bucket is None:
        return map_leaves(x, key, lambda leaf, k: function(leaf, k) if leaf.size else leaf)
    leaves, structure = carrier_leaves(x)
    results: list[Array] = list(leaves)
    for bucket_index, members in enumerate(_bucket_members(leaves, bucket)):
        vector = jnp.concatenate([leaves[at].reshape(-1) for at in members])
        result = function(vector, fold_in_numbers(key, bucket_index))
        ends = list(itertools.accumulate(leaves[at].size for at in members))
        for leaf_index, end in zip(members, ends, strict=True):
            results[leaf_index] = result[end - leaves[leaf_index].size : end].reshape(leaves[leaf_index].shape)
    return structure.unflatten(results)


def _bucket_members(leaves: list[Array], bucket: int) -> list[list[int]]:
    """The numbers of the leaves of each vector, in the order of their first leaves; leaves without numbers have none.

    A bucket is closed when it has `bucket` elements.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[Any, Any], list[int]] = {}
    for leaf_index, leaf in enumerate(leaves):
        if not leaf.size:
            continue
        if leaf.size >= bucket:
            buckets.append([leaf_index])
            continue
        dtype_and_axes = (leaf.dtype, varying_axes(leaf))
        if dtype_and_axes not in open_buckets:
            buckets.append(open_buckets.setdefault(dtype_and_axes, []))
        open_buckets[dtype_and_axes].append(leaf_index)
        if sum(leaves[i].size for i in open_buckets[dtype_and_axes]) >= bucket:
            del open_buckets[dtype_and_axes]
    return buckets
