"""The collectives of one array with their derivatives: codes one way, and codes or floats the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._common.gradients import CustomJvp, linear_with_transpose
from jchop._common.settings import jax_default_settings
from jchop.distributed._axes import (
    RankAxes,
    all_gather_over,
    ppermute_over,
    psum_scatter_over,
    types_track_axes,
    vary_over,
)
from jchop.distributed._messages import Phase, fold_in_numbers
from jchop.distributed._pieces import plan_piece_cut
from jchop.distributed._reduce import Wire, exchange_numbers, gather_numbers, permute_numbers, reduce_scatter

Array = jax.Array


# -- sums on every rank -----------------------------------------------------------------------------------------------


def _sum_everywhere(wire: Wire, x: Array, key: Array | None) -> Array:
    cut = (
        plan_piece_cut(x.shape, wire.spec, wire.axes.size)
        if x.ndim
        else plan_piece_cut((1,), wire.spec, wire.axes.size)
    )
    piece_sum = reduce_scatter(wire, cut.pieces(x.reshape(cut.shape)), key)
    return cut.join(gather_numbers(wire, piece_sum, key, x.dtype, to="invarying")).reshape(x.shape)


sum_everywhere = CustomJvp(_sum_everywhere, nondiff_argnums=(0,))


@sum_everywhere.defjvp
def _sum_jvp(wire: Wire, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    x, key = primals
    backward_wire = None if types_track_axes(wire.axes) else _cotangent_wire(wire)
    pull_back = None if backward_wire is None else partial(sum_everywhere, backward_wire)
    return sum_everywhere(wire, x, key), _move_tangent(
        lambda t: lax.psum(t, wire.axes.name), pull_back, tangents[0], key
    )


def _move_tangent(
    forward: Callable[..., Array], backward: Callable[..., Array] | None, tangent: Array, key: Array | None
) -> Array:
    """A tangent moved as floats by a linear function; its cotangent in codes, if there is another way back for it."""
    if backward is None:
        return forward(tangent)
    keys = [] if key is None else [fold_in_numbers(key, Phase.BACKWARD)]

    def pull_back(cotangent: Array, *keys: Array) -> Array:
        with jax_default_settings():
            return backward(cotangent, *(keys or [None]))

    return linear_with_transpose(lambda tangent, *keys: forward(tangent), pull_back, tangent, *keys)


def _cotangent_wire(wire: Wire) -> Wire | None:
    """The collective of cotangents; None if they move as floats."""
    spec = wire.spec.gradient.round
    return None if spec is None else replace(wire, spec=spec)


# -- the other collectives, and their derivatives ----------------------------------------------------------------------


@dataclass(frozen=True)
class _FloatWire:
    """A collective of floats, for tangents, and for cotangents without a spec."""

    axes: RankAxes


_MoveFunction = Callable[[Any, Array, Any], Array]


def _move_linearly(forward: _MoveFunction, backward: _MoveFunction, wire: Wire, x: Array, key: Array | None) -> Array:
    """`x` moved by `forward`, in codes; cotangents move by `backward`. Arrays without elements move as they are."""
    return forward(wire if x.size else _FloatWire(wire.axes), x, key)


move_linearly = CustomJvp(_move_linearly, nondiff_argnums=(0, 1, 2))


@move_linearly.defjvp
def _move_jvp(
    forward: _MoveFunction, backward: _MoveFunction, wire: Wire, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    x, key = primals
    backward_wire = _cotangent_wire(wire) if x.size else None
    pull_back = None if backward_wire is None else lambda g, key: backward(backward_wire, vary_over(g, wire.axes), key)
    tangent = _move_tangent(lambda t: forward(_FloatWire(wire.axes), t, None), pull_back, tangents[0], key)
    return move_linearly(forward, backward, wire, x, key), tangent


def _split_pieces(x: Array, axis: int, tiled: bool, count: int) -> Array:
    """(count, ...): the pieces along an axis."""
    if not tiled:
        return jnp.moveaxis(x, axis, 0)
    split = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)


def _join_pieces(pieces: Array, axis: int, tiled: bool) -> Array:
    """Pieces joined along an axis."""
    parts = jnp.moveaxis(pieces, 0, axis)
    return parts.reshape(*parts.shape[:axis], -1, *parts.shape[axis + 2 :]) if tiled else parts


def scatter_piece(axis: int, tiled: bool, shape: tuple[int, ...], wire: Wire | _FloatWire, x: Array, key: Any) -> Array:
    if isinstance(wire, _FloatWire):
        return psum_scatter_over(x, wire.axes, axis, tiled)
    piece_sum = reduce_scatter(wire, _split_pieces(x, axis, tiled, wire.axes.size), key)
    return piece_sum.astype(x.dtype).reshape(shape)


def gather_pieces(axis: int, tiled: bool, wire: Wire | _FloatWire, x: Array, key: Any) -> Array:
    if isinstance(wire, _FloatWire):
        return all_gather_over(x, wire.axes, axis, tiled=tiled)
    return _join_pieces(gather_numbers(wire, x, key, x.dtype, to="varying"), axis, tiled)


def exchange_pieces(split: int, concat: int, tiled: bool, wire: Wire | _FloatWire, x: Array, key: Any) -> Array:
    if isinstance(wire, _FloatWire):
        return lax.all_to_all(x, wire.axes.name, split, concat, tiled=tiled)
    return _join_pieces(exchange_numbers(wire, _split_pieces(x, split, tiled, wire.axes.size), key), concat, tiled)


def permute_array(perm: tuple[tuple[int, int], ...], wire: Wire | _FloatWire, x: Array, key: Any) -> Array:
    return ppermute_over(x, wire.axes, perm) if isinstance(wire, _FloatWire) else permute_numbers(wire, x, key, perm)
