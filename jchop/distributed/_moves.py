"""The collectives of one array with their derivatives: codes one way, and codes or floats the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._settings import own_settings
from jchop.distributed._axes import Axes, axes_are_tracked, vary
from jchop.distributed._messages import Phase, fold
from jchop.distributed._pieces import plan_cut
from jchop.distributed._reduce import Wire, exchange, gather, permute, reduce_scatter

Array = jax.Array


# -- sums on every rank -----------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_everywhere(wire: Wire, x: Array, key: Array | None) -> Array:
    cut = plan_cut(x.shape, wire.spec, wire.axes.size) if x.ndim else plan_cut((1,), wire.spec, wire.axes.size)
    own = reduce_scatter(wire, cut.pieces(x.reshape(cut.shape)), key)
    return cut.joined(gather(wire, own, key, x.dtype, to="invarying")).reshape(x.shape)


def _psum_fwd(wire: Wire, x: Array, key: Array | None) -> tuple[Array, Array | None]:
    return sum_everywhere(wire, x, key), key


def _psum_bwd(wire: Wire, key: Array | None, cotangent: Array) -> tuple[Array, None]:
    with own_settings():
        if axes_are_tracked(wire.axes):
            return vary(cotangent, wire.axes), None
        back = _backward(wire)
        if back is None:
            return lax.psum(cotangent, wire.axes.name), None
        return sum_everywhere(back, cotangent, fold(key, Phase.BACKWARD)), None


sum_everywhere.defvjp(_psum_fwd, _psum_bwd)


def _backward(wire: Wire) -> Wire | None:
    """The collective of cotangents; None if they move as floats."""
    spec = wire.spec.gradient.round
    return None if spec is None else replace(wire, spec=spec)


# -- the other collectives, and their derivatives ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Exact:
    """A collective of floats, for cotangents without a spec."""

    axes: Axes


_Moves = Callable[[Any, Array, Any], Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def move_linearly(there: _Moves, back: _Moves, wire: Wire, x: Array, key: Array | None) -> Array:
    """`x` moved by `there`, in codes; cotangents are moved by `back`. Arrays without elements move as they are."""
    return there(wire if x.size else _Exact(wire.axes), x, key)


def _move_fwd(there: _Moves, back: _Moves, wire: Wire, x: Array, key: Array | None) -> tuple[Array, Array | None]:
    return move_linearly(there, back, wire, x, key), key


def _move_bwd(there: _Moves, back: _Moves, wire: Wire, key: Array | None, cotangent: Array) -> tuple[Array, None]:
    with own_settings():
        over = _backward(wire) if cotangent.size else None
        cotangent = vary(cotangent, wire.axes)
        return back(_Exact(wire.axes) if over is None else over, cotangent, fold(key, Phase.BACKWARD)), None


move_linearly.defvjp(_move_fwd, _move_bwd)


def _pieces(x: Array, axis: int, tiled: bool, count: int) -> Array:
    """(count, ...): the pieces along an axis."""
    if not tiled:
        return jnp.moveaxis(x, axis, 0)
    split = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)


def _placed(pieces: Array, axis: int, tiled: bool) -> Array:
    """Pieces joined along an axis."""
    moved = jnp.moveaxis(pieces, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :]) if tiled else moved


def scattered(axis: int, tiled: bool, part: tuple[int, ...], wire: Wire | _Exact, x: Array, key: Any) -> Array:
    if isinstance(wire, _Exact):
        return lax.psum_scatter(x, wire.axes.name, scatter_dimension=axis, tiled=tiled)
    own = reduce_scatter(wire, _pieces(x, axis, tiled, wire.axes.size), key)
    return own.astype(x.dtype).reshape(part)


def gathered(axis: int, tiled: bool, wire: Wire | _Exact, x: Array, key: Any) -> Array:
    if isinstance(wire, _Exact):
        return lax.all_gather(x, wire.axes.name, axis=axis, tiled=tiled)
    return _placed(gather(wire, x, key, x.dtype, to="varying"), axis, tiled)


def exchanged(split: int, concat: int, tiled: bool, wire: Wire | _Exact, x: Array, key: Any) -> Array:
    if isinstance(wire, _Exact):
        return lax.all_to_all(x, wire.axes.name, split, concat, tiled=tiled)
    return _placed(exchange(wire, _pieces(x, split, tiled, wire.axes.size), key), concat, tiled)


def permuted(perm: tuple[tuple[int, int], ...], wire: Wire | _Exact, x: Array, key: Any) -> Array:
    return lax.ppermute(x, wire.axes.name, perm) if isinstance(wire, _Exact) else permute(wire, x, key, perm)
