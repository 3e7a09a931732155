"""The collectives with codes on the wire.

Each is a linear function of the numbers that arrive: codes move one way, and cotangents in codes or floats the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jchop._common.bit_ops import varying_axes
from jchop._common.checks import check, check_bool, check_int
from jchop._common.gradients import CustomJvp, linear_with_transpose
from jchop._common.settings import jax_default_settings
from jchop._round.arguments import rounding_key
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import SpecLike, as_spec
from jchop.distributed import _messages as messages
from jchop.distributed._messages import TWO_SHOT, Algorithm, AxisName, Phase, Wire

Accumulate = MatmulSpec | SpecLike | None

#: Leaves with fewer elements share messages.
BUCKET = 1 << 16


def psum(
    x: Any,
    axis_name: AxisName,
    spec: SpecLike,
    key: Array | None = None,
    *,
    algorithm: Algorithm = TWO_SHOT,
    accumulate: Accumulate = None,
    bucket: int = BUCKET,
) -> Any:
    """Sums `x` over the ranks of mesh axes, with codes on the wire: a quantized all-reduce.

    There are two shots. Each rank cuts `x` into a piece for each rank, quantizes each piece by itself, and sends its
    codes and scales. The owner of a piece adds the numbers of all ranks in the order of ranks, quantizes the sum, and
    sends it to all. Every rank decodes the same codes, so all have the same bits.

    A format whose groups are blocks of the last axis, or all numbers, is applied to the vector of the elements in C
    order. So is a plain format. Small leaves of a tree are joined to one vector first. With other groups (channels,
    tiles) an array keeps its shape. It is cut between groups, along the axis that leaves the fewest numbers to be
    added.

    The derivative is as in `jax.lax.psum`: the cotangent is passed to every rank. Under ``check_vma=False`` it is
    summed over the ranks, in the codes of the spec's gradient if that is a spec, else as floats.

    Args:
        x: a float16, bfloat16, float32 or float64 array, or a pytree of them, of the same shape on every rank. Sums of
            16-bit numbers are float32.
        axis_name: a mesh axis of `jax.shard_map` (or of `jax.vmap`), or a tuple of them, the slowest first.
        spec: the format and rounding of the codes: any that `jchop.quantize` accepts. A format without NaN turns NaN
            into its largest value. With ``nan_block=True`` a NaN or an infinity makes its group NaN.
        key: a typed key, the same on every rank; required if `spec` or `accumulate` is stochastic. Default None.
        algorithm: ``"two_shot"`` (default): two roundings of each number. ``"ring"``: partial sums go round, with one
            rounding for each rank, less memory and larger errors. Or a `Hierarchical`: three roundings.
        accumulate: the arithmetic of the sums: a `jchop.MatmulSpec` without a product, or a spec for every sum. Default
            None: the carrier.
        bucket: leaves with fewer elements are joined, up to about this number. Default: 65536.

    Returns:
        Arrays like `x`, equal on all ranks bit for bit.

    Raises:
        TypeError: for a dtype that is not a carrier, or a key that is not a typed key.
        ValueError: when traced, for an axis that is not in the mesh, a missing key, or a key that differs between
            ranks. When traced, for another algorithm, a format that does not fit `x`, or a clipped gradient.

    References:
        EQuARX, arXiv 2506.17615; ZeRO++, arXiv 2306.10209. [](distributed.md) has the definition and error bounds.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> total = jax.shard_map(
        ...     lambda x: jc.distributed.psum(x, "data", "int8(group=4)"), mesh=mesh, in_specs=P(), out_specs=P())
        >>> total(jnp.array([1.0, -0.5, 0.25, 127.0])).tolist()
        [1.0, 0.0, 0.0, 127.0]
    """
    check_int("bucket", bucket, 0)
    wire, key = check_collective(axis_name, spec, key, x, algorithm, accumulate)
    backward = None if messages.types_track_axes(wire.axes) else _sum_pieces

    def add(v: Array, k: Array | None) -> Array:
        return _move_linearly(_sum_pieces, backward, wire, messages.vary_over(v, wire.axes), k)

    with jax_default_settings():
        return messages.map_buckets(x, key, add, bucket if messages.quantizes_vectors(wire.spec) else None)


def psum_scatter(
    x: Any,
    axis_name: AxisName,
    spec: SpecLike,
    key: Array | None = None,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    algorithm: Algorithm = TWO_SHOT,
    accumulate: Accumulate = None,
) -> Any:
    """Sums over ranks and gives each rank one piece of the sum: a quantized reduce-scatter.

    Each rank quantizes the pieces of `x` along an axis, each by itself, and sends them to their owners. The owners add
    the numbers in the order of ranks. The sum is not rounded again. The transpose is `all_gather` in the codes of the
    spec's gradient if that is a spec, else of floats.

    Args:
        x: as in `psum`.
        axis_name: as in `psum`.
        spec: as in `psum`; groups must not be cut.
        key: as in `psum`.
        scatter_dimension: the axis of `x` that is cut. Default 0.
        tiled: as in `jax.lax.psum_scatter`. True: a piece has 1/n of the axis. False (default): it is one of its n
            entries.
        algorithm: as in `psum`, with one rounding less.
        accumulate: as in `psum`.

    Returns:
        The piece of this rank.

    Raises:
        TypeError, ValueError: as `psum`. Also for an axis whose length the number of ranks does not divide, or pieces
            that cut groups.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> x = jnp.array([[1.0, 2.0, 4.0, 8.0], [1.0, 1.0, 1.0, 1.0]])
        >>> jax.vmap(lambda x: jc.distributed.psum_scatter(x, "i", "bfloat16", tiled=True), axis_name="i")(x).tolist()
        [[2.0, 3.0], [5.0, 9.0]]
    """
    wire, key = check_collective(axis_name, spec, key, x, algorithm, accumulate)
    check_bool("tiled", tiled)

    def moves(v: Array) -> _Moves:
        axis = collective_axis("scatter_dimension", scatter_dimension, v.ndim)
        piece_shape = _check_piece_shape(wire, v.shape, axis, tiled, f"scatter_dimension={scatter_dimension}")
        return partial(_scatter_piece, axis, tiled, piece_shape), partial(_gather_pieces, axis, tiled)

    return _move_tree(wire, x, key, moves)


def all_gather(
    x: Any, axis_name: AxisName, spec: SpecLike, key: Array | None = None, *, axis: int = 0, tiled: bool = False
) -> Any:
    """Joins the arrays of all ranks on every rank, with codes on the wire.

    Each rank quantizes its array and sends it; every rank, the sender too, decodes the same codes. The transpose is
    `psum_scatter` in the codes of the spec's gradient if that is a spec, else of floats.

    With ``tiled=True`` and ``axis=0`` the result is bit for bit the whole array rounded to `spec`, with the key
    ``fold_in(fold_in(key, 0), 2)``. This needs a format without a scale of the whole array or of all numbers along the
    axis.

    Args:
        x: as in `psum`.
        axis_name: as in `psum`.
        spec: as in `psum`; groups must not be cut.
        key: as in `psum`.
        axis: the axis of the result along which arrays are joined. Default 0.
        tiled: as in `jax.lax.all_gather`. True: arrays are concatenated. False (default): they are stacked along a new
            axis.

    Returns:
        The joined arrays, equal on all ranks.

    Raises:
        TypeError, ValueError: as `psum_scatter`.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> x = jnp.array([[1.0, 2.25], [4.0, 8.5]])
        >>> jax.vmap(lambda x: jc.distributed.all_gather(x, "i", "e4m3", tiled=True), axis_name="i")(x)[0].tolist()
        [1.0, 2.25, 4.0, 8.0]
    """
    wire, key = check_collective(axis_name, spec, key, x)
    check_bool("tiled", tiled)

    def moves(v: Array) -> _Moves:
        joined = collective_axis("axis", axis, v.ndim + (not tiled))
        if tiled:
            messages.check_whole_groups(wire.spec, v.shape, joined, wire.axes.size, f"axis={axis}")
        return partial(_gather_pieces, joined, tiled), partial(_scatter_piece, joined, tiled, v.shape)

    return _move_tree(wire, x, key, moves)


def all_to_all(
    x: Any,
    axis_name: AxisName,
    spec: SpecLike,
    key: Array | None = None,
    *,
    split_axis: int = 0,
    concat_axis: int = 0,
    tiled: bool = False,
) -> Any:
    """Sends piece p of every rank's array to rank p, with codes on the wire.

    The transpose is `all_to_all` with the axes exchanged, in the codes of the spec's gradient if that is a spec, else
    of floats.

    Args:
        x: as in `psum`.
        axis_name: as in `psum`.
        spec: as in `psum`; groups must not be cut.
        key: as in `psum`.
        split_axis: the axis of `x` that is cut. Default 0.
        concat_axis: the axis of the result along which pieces are joined, in the order of their senders. Default 0.
        tiled: as in `jax.lax.all_to_all`. True: pieces have 1/n of the axis and are concatenated. False (default): they
            are its n entries and are stacked.

    Returns:
        The pieces for this rank.

    Raises:
        TypeError, ValueError: as `psum_scatter`.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> x = jnp.array([[1.0, 2.25], [4.0, 8.5]])
        >>> jax.vmap(lambda x: jc.distributed.all_to_all(x, "i", "e4m3"), axis_name="i")(x).tolist()
        [[1.0, 4.0], [2.25, 8.0]]
    """
    wire, key = check_collective(axis_name, spec, key, x)
    check_bool("tiled", tiled)

    def moves(v: Array) -> _Moves:
        split = collective_axis("split_axis", split_axis, v.ndim)
        concat = collective_axis("concat_axis", concat_axis, v.ndim)
        _check_piece_shape(wire, v.shape, split, tiled, f"split_axis={split_axis}")
        return partial(_exchange_pieces, split, concat, tiled), partial(_exchange_pieces, concat, split, tiled)

    return _move_tree(wire, x, key, moves)


def ppermute(
    x: Any, axis_name: AxisName, spec: SpecLike, key: Array | None = None, *, perm: Sequence[tuple[int, int]]
) -> Any:
    """Receives the array of another rank, with codes on the wire; zeros on a rank that none sends to.

    The transpose is `ppermute` in the other direction, in the codes of the spec's gradient if that is a spec, else of
    floats.

    Args:
        x: as in `psum`.
        axis_name: as in `psum`.
        spec: as in `psum`.
        key: as in `psum`.
        perm: pairs (source rank, target rank), each source and each target once at most.

    Returns:
        Arrays like `x`.

    Raises:
        TypeError, ValueError: as `psum`. Also for a permutation with a rank that does not exist or comes twice.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> x = jnp.array([1.0, 2.0, 8.5])
        >>> shift = lambda x: jc.distributed.ppermute(x, "i", "e4m3", perm=[(0, 1), (1, 2), (2, 0)])
        >>> jax.vmap(shift, axis_name="i")(x).tolist()
        [8.0, 1.0, 2.0]
    """
    wire, key = check_collective(axis_name, spec, key, x)
    last = wire.axes.size - 1
    pairs = tuple((check_int("perm", a, 0, last), check_int("perm", b, 0, last)) for a, b in perm)
    for ranks in zip(*pairs, strict=True):
        check(len(set(ranks)) == len(ranks), f"perm={list(pairs)} has a rank twice as a source or as a target")
    inverse = tuple((target, source) for source, target in pairs)

    return _move_tree(wire, x, key, lambda _: (partial(_permute_array, pairs), partial(_permute_array, inverse)))


# -- arguments ---------------------------------------------------------------------------------------------------------


def check_collective(
    axis_name: AxisName, spec: SpecLike, key: Any, x: Any, algorithm: Any = TWO_SHOT, accumulate: Accumulate = None
) -> tuple[Wire, Array | None]:
    """The static arguments of a collective, and its key if something draws."""
    spec = as_spec(spec, scaled=True)
    if spec.gradient.clipped:
        raise ValueError(f"spec={str(spec)!r} has a clipped gradient, which collectives do not have; allowed: "
                         "straight-through, or a spec")  # fmt: skip
    if spec.scaled is not None and spec.scaled.sparse is not None:
        raise ValueError(f"spec={str(spec)!r} drops numbers, and messages hold codes of all; leave sparse out")
    axes = messages.as_rank_axes(axis_name)
    messages.stages_of(algorithm, axes)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(x) if hasattr(leaf, "dtype")}
    arithmetic = messages.sum_arithmetic(accumulate, dtypes)
    stochastic: list[Any] = [s for s in (spec, spec.gradient.round) if s is not None and s.rounding.stochastic]
    stochastic += [arithmetic] if arithmetic is not None and arithmetic.stochastic else []
    key = rounding_key(key, bool(stochastic), stochastic[0] if stochastic else None)
    if key is not None and (varying := set(axes.names) & set(varying_axes(key))):
        raise ValueError(f"key differs along {sorted(map(str, varying))}; pass the same key on every rank: the number "
                         "of the rank is folded in")  # fmt: skip
    return Wire(axes, spec, algorithm, arithmetic), key


def collective_axis(name: str, axis: int, ndim: int) -> int:
    """An axis of arrays with `ndim` axes, counted from the first."""
    check(ndim, f"{name}={axis!r}: x has an array without axes")
    return check_int(name, axis, -ndim, ndim - 1) % ndim


def _check_piece_shape(wire: Wire, shape: tuple[int, ...], axis: int, tiled: bool, name: str) -> tuple[int, ...]:
    """The shape of a piece along an axis, of which each rank must get the same."""
    count = wire.axes.size
    if shape[axis] % count if tiled else shape[axis] != count:
        length = f"a multiple of {count}" if tiled else f"{count}, or tiled=True"
        raise ValueError(f"{name}: x has shape {shape}, and {count} ranks along {wire.axes.name!r} need a length of "
                         f"{length} there")  # fmt: skip
    if not tiled:
        return (*shape[:axis], *shape[axis + 1 :])
    piece_shape = (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])
    messages.check_whole_groups(wire.spec, piece_shape, axis, count, name)
    return piece_shape


# -- a collective and its derivative -----------------------------------------------------------------------------------


_MoveFunction = Callable[[Wire, Array, Any], Array]
#: How an array moves, and how its cotangent does; None if that moves as a float in any case.
_Moves = tuple[_MoveFunction, _MoveFunction | None]


def _move_codes(
    forward: _MoveFunction, backward: _MoveFunction | None, wire: Wire, x: Array, key: Array | None
) -> Array:
    """`x` moved by `forward`, in codes; cotangents move by `backward`. Arrays without elements move as they are."""
    return forward(wire if x.size else replace(wire, floats=True), x, key)


_move_linearly = CustomJvp(_move_codes, nondiff_argnums=(0, 1, 2))


@_move_linearly.defjvp
def _move_jvp(
    forward: _MoveFunction, backward: _MoveFunction | None, wire: Wire, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    """A tangent moves as floats; its cotangent in codes, if there is a spec and another way back for it."""
    x, key = primals
    result, spec = _move_linearly(forward, backward, wire, x, key), wire.spec.gradient.round

    def move(tangent: Array, *_: Array) -> Array:
        return forward(replace(wire, floats=True), tangent, None)

    if spec is None or backward is None or not x.size:
        return result, move(tangents[0])

    def pull_back(cotangent: Array, *keys: Array) -> Array:
        with jax_default_settings():
            cotangent = messages.vary_over(cotangent, wire.axes)
            return _move_linearly(backward, forward, replace(wire, spec=spec), cotangent, *(keys or [None]))

    keys = [] if key is None else [messages.fold_in_numbers(key, Phase.BACKWARD)]
    return result, linear_with_transpose(move, pull_back, tangents[0], *keys)


def _move_tree(wire: Wire, x: Any, key: Array | None, moves: Callable[[Array], _Moves]) -> Any:
    """A tree of which every leaf moves, and its cotangent, as `moves` says for it."""

    def move_leaf(v: Array, k: Array | None) -> Array:
        return _move_linearly(*moves(v), wire, messages.vary_over(v, wire.axes), k)

    with jax_default_settings():
        return messages.map_leaves(x, key, move_leaf)


def _sum_pieces(wire: Wire, x: Array, key: Any) -> Array:
    if wire.floats:
        return lax.psum(x, wire.axes.name)
    cut = messages.plan_piece_cut(x.shape or (1,), wire.spec, wire.axes.size)
    piece_sum = messages.reduce_scatter(wire, cut.pieces(x.reshape(cut.shape)), key)
    return cut.join(messages.gather_numbers(wire, piece_sum, key, x.dtype, to="invarying")).reshape(x.shape)


def _scatter_piece(axis: int, tiled: bool, shape: tuple[int, ...], wire: Wire, x: Array, key: Any) -> Array:
    if wire.floats:
        return messages.psum_scatter_over(x, wire.axes, axis, tiled)
    piece_sum = messages.reduce_scatter(wire, messages.split_axis(x, axis, wire.axes.size, tiled), key)
    return piece_sum.astype(x.dtype).reshape(shape)


def _gather_pieces(axis: int, tiled: bool, wire: Wire, x: Array, key: Any) -> Array:
    if wire.floats:
        return messages.all_gather_over(x, wire.axes, axis, tiled=tiled)
    return messages.join_axis(messages.gather_numbers(wire, x, key, x.dtype, to="varying"), axis, tiled)


def _exchange_pieces(split: int, concat: int, tiled: bool, wire: Wire, x: Array, key: Any) -> Array:
    """An all_to_all whose pieces are rounded, sent as codes, and joined."""
    if wire.floats:
        return lax.all_to_all(x, wire.axes.name, split, concat, tiled=tiled)
    pieces = messages.split_axis(x, split, wire.axes.size, tiled)
    messages.check_draw_count(wire.spec, pieces.shape[0], pieces[0].size)
    send_key = messages.fold_in_numbers(key, Phase.SEND, 0, wire.axes.rank)
    move = partial(messages.exchange, wire.axes)
    arrived = messages.send_messages(pieces, wire.spec, send_key, jnp.arange(wire.axes.size), move)
    return messages.join_axis(arrived, concat, tiled)


def _permute_array(perm: tuple[tuple[int, int], ...], wire: Wire, x: Array, key: Any) -> Array:
    """`x` of the rank that sends to this one; zeros on a rank that none sends to."""
    axes = wire.axes
    if wire.floats:
        return messages.ppermute_over(x, axes, perm)
    messages.check_draw_count(wire.spec, axes.size, x.size)
    send_key, move = messages.fold_in_numbers(key, Phase.SEND, 0), partial(messages.ppermute_over, axes=axes, perm=perm)
    (message,) = messages.send_messages(x[None], wire.spec, send_key, axes.rank[None], move)
    targets = {target for _, target in perm}
    if len(targets) == axes.size:
        return message
    receives = jnp.array([rank in targets for rank in range(axes.size)])[axes.rank]
    return jnp.where(receives, message, jnp.zeros_like(message))
