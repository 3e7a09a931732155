"""`round_to_format`: the one primitive, with its checks, keys and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._bits import CARRIERS, Carrier
from jchop._checks import check_int
from jchop._reference.elements import overflowed, round_elements
from jchop._reference.grid import require_carrier
from jchop._reference.random_bits import random_bits as _words
from jchop._reference.random_bits import seed_words
from jchop.formats import ElementFormat
from jchop.gradients import on_cotangent
from jchop.spec import Spec, as_spec

Array = jax.Array
_Keys = tuple[Array | None, Array | None]


def round_to_format(
    x: Any,
    spec: Spec | ElementFormat | str,
    key: Array | None = None,
    *,
    offset: Any = 0,
    gradient_key: Array | None = None,
) -> Any:
    """`x` rounded once, exactly, to the values of a number format.

    Every element takes the neighbour that the spec's rounding mode names, decided by integer operations on its bits, so
    the result is the same bits on every backend. Values of the format never move; NaN stays NaN.

    Works under jit (with `spec` static), vmap, scan, remat, shard_map and export. Derivatives are straight-through
    unless the spec says otherwise, in forward and reverse mode; second derivatives are zero.

    Args:
        x: float16, bfloat16, float32, float64, complex64 or complex128 (by parts), any shape. A JAX array gives a JAX
            array; a NumPy array, scalar, list, buffer or anything with ``__array__`` gives NumPy. The dtype is kept,
            and float64 data is rounded from float64 whatever the state of ``jax_enable_x64``.
        spec: a `Spec`, a format (rounded to nearest, ties to even), or text such as ``"e5m2:stochastic:saturate"``.
        key: a typed key (`jax.random.key`), needed by the stochastic modes; the other modes do not look at it. The
            random bits of an element depend on the key and on its flat index alone.
        offset: where `x` lies in a larger array, so that a part is rounded as it would be in the whole: the flat (C
            order) index of its first element if it is a contiguous chunk, an int or a traced integer; or ``(starts,
            shape)``: one start for each axis and the shape of the whole. Default 0.
        gradient_key: a typed key, needed where ``spec.gradient`` rounds the cotangent stochastically.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: for a dtype that is no carrier (integers, booleans, float8 ...), or a key that is not a typed key.
        ValueError: for an unknown text, a stochastic spec without a key, or a carrier that cannot hold every result
            of the spec (float16 data to bfloat16, say); the message names a carrier that can.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> jc.round_to_format(jnp.array([0.1, 1000.0]), "float8_e4m3fn:saturate").tolist()
        [0.1015625, 448.0]
        >>> spec = jc.Spec("bfloat16", rounding="stochastic")
        >>> jc.round_to_format(jnp.float32(1.001), spec, jax.random.key(0)).dtype
        dtype('float32')
    """
    spec = as_spec(spec)
    if isinstance(x, Array):
        return _round_array(x, spec, key, offset, gradient_key)
    return _round_numpy(x, spec, key, offset, gradient_key)


def random_bits(key: Array, shape: Any, *, width: int = 32, offset: Any = 0) -> Array:
    """The random words that `round_to_format` draws for an array of `shape`; see docs/randomness.md.

    A stochastic spec of N random bits reads the top N bits of an element's word, and ``stochastic_equal`` the top one.

    Args:
        key: a typed key (`jax.random.key`).
        shape: shape of the array.
        width: 32, or 64 as for float64 data, which needs ``jax_enable_x64``. Default 32.
        offset: as in `round_to_format`. Default 0.

    Returns:
        uint32 (or uint64) words.

    Raises:
        TypeError, ValueError: for a key that is not a typed key, or another width.

    Example:
        >>> import jax, jchop as jc
        >>> whole = jc.random_bits(jax.random.key(0), (8,))
        >>> bool((jc.random_bits(jax.random.key(0), (4,), offset=4) == whole[4:]).all())
        True
    """
    if width not in (32, 64):
        raise ValueError(f"width={width!r} must be 32 or 64")
    if width == 64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError("width=64 needs 64-bit integers: set jax_enable_x64, or use jax.enable_x64(True) as a context")
    _check_key("key", key)
    place, starts = _place(offset, tuple(shape))
    return _draw(seed_words(key), tuple(shape), place, starts, width)


# -- by kind of input --------------------------------------------------------------------------------------------------


def _round_array(
    x: Array | np.ndarray, spec: Spec, key: Array | None, offset: Any, gradient_key: Array | None
) -> Array:
    carrier = _carrier(x.dtype)
    require_carrier(spec, carrier)
    if spec.gradient.round is not None:
        require_carrier(spec.gradient.round, carrier)
    keys = _keys(spec, key, gradient_key)
    place, starts = _place(offset, x.shape)
    if carrier.width == 64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        with jax.enable_x64(True):
            return _round(x, keys, starts, spec=spec, place=place)
    return _round(x, keys, starts, spec=spec, place=place)


def _round_numpy(x: Any, spec: Spec, key: Array | None, offset: Any, gradient_key: Array | None) -> Any:
    array = np.asarray(x)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    carrier = _carrier(array.dtype)
    for name, value in (("key", key), ("gradient_key", gradient_key), ("offset", offset)):
        if isinstance(value, Array | tuple) and any(
            isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)
        ):
            raise TypeError(
                f"{name} is traced but x is a NumPy value, whose result could not be NumPy; pass jax.numpy.asarray(x)"
            )
    # 64-bit data stays so, whatever the flag.
    with jax.enable_x64(True) if carrier.width == 64 else contextlib.nullcontext():
        rounded = _round_array(array, spec, key, offset, gradient_key)
        if isinstance(rounded, jax.core.Tracer):  # within a trace a NumPy value is a constant, rounded now
            with jax.ensure_compile_time_eval():
                rounded = _round_array(array, spec, key, offset, gradient_key)
    result = np.array(rounded)
    return result if isinstance(x, np.ndarray) else result[()]


# -- where x lies in the random stream ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """The static part of an offset: what stands in it for a traced start is None."""

    known: tuple[int | None, ...]
    whole: tuple[int, ...] | None = None  # the shape of the whole array; None for a contiguous chunk
    base: int = 0  # a known index added to all

    def offset(self, starts: tuple) -> Any:
        """With its traced starts, what `_reference.random_bits` takes."""
        rest = iter(starts)
        each = tuple(next(rest) if start is None else start for start in self.known)
        return each[0] if self.whole is None else (each, self.whole)


_AT_START = _Place((0,))


def _place(offset: Any, shape: tuple[int, ...]) -> tuple[_Place, tuple]:
    """The static part of `offset`, and its starts; known ones are traced too, lest each offset be compiled anew."""
    if type(offset) is int and offset == 0:
        return _AT_START, ()
    if not isinstance(offset, tuple):
        start, high = _start(offset)
        return _Place((None,), base=high), (start,)
    pair = len(offset) == 2 and all(isinstance(entry, tuple | list) for entry in offset)
    if not pair or not len(offset[0]) == len(offset[1]) == len(shape):
        raise ValueError(f"offset={offset!r} must be (starts, shape), each with {len(shape)} entries as x has axes")
    whole = tuple(check_int("offset: shape of the whole", size, 0, 1 << 32) for size in offset[1])
    for start, size, total in zip(offset[0], shape, whole, strict=True):
        if size > total or (not isinstance(start, Array) and start + size > total):
            raise ValueError(f"offset={offset!r}: a part of shape {shape} does not lie within the whole")
    return _Place((None,) * len(shape), whole), tuple(_start(start)[0] for start in offset[0])


def _start(start: Any) -> tuple[Any, int]:
    """A start as an integer scalar that is not static, and a static multiple of 2^32 that goes on top of it."""
    if isinstance(start, Array):
        if start.shape != () or not jnp.issubdtype(start.dtype, jnp.integer):
            raise TypeError(
                f"offset has an entry of shape {start.shape} and dtype {start.dtype}; allowed: integer scalars"
            )
        return start, 0
    start = check_int("offset", start, 0, (1 << 64) - 1)
    low, high = start % (1 << 32), start >> 32 << 32
    return (np.int32(low) if low < 1 << 31 else np.uint32(low)), high


# -- the traced part ---------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("spec", "place"), inline=True)
def _round(x: Array | np.ndarray, keys: _Keys, starts: tuple, *, spec: Spec, place: _Place) -> Array:
    seeds = tuple(None if key is None else seed_words(key) for key in keys)
    assert isinstance(x, Array)  # jit has made it one
    return _with_gradient(spec, place, x, seeds, starts)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _with_gradient(spec: Spec, place: _Place, x: Array, seeds: tuple, starts: tuple) -> Array:
    return _joined(_forward(round_elements, x, seeds[0], spec, place, starts), x.dtype)


@_with_gradient.defjvp
def _jvp(spec: Spec, place: _Place, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    x, seeds, starts = primals
    tangent = tangents[0]
    gradient = spec.gradient
    if gradient.clipped:
        beyond = _forward(overflowed, x, seeds[0], spec, place, starts)
        tangent = _joined(jnp.where(beyond, 0, _parts(tangent)), tangent.dtype)
    if gradient.round is not None:
        tangent = on_cotangent(
            _RoundCotangent(gradient.round, place, seeds[1] is not None), tangent, *(seeds[1] or ()), *starts
        )
    return _with_gradient(spec, place, x, seeds, starts), tangent


@dataclass(frozen=True)
class _RoundCotangent:
    """Rounds a cotangent to `spec`; the residuals are its seeds, if it draws, and the traced starts."""

    spec: Spec
    place: _Place
    draws: bool

    def __call__(self, cotangent: Array, *residuals: Array) -> Array:
        seeds, starts = (residuals[:_SEEDS], residuals[_SEEDS:]) if self.draws else (None, residuals)
        return _rounded(self.spec, self.place, cotangent, (seeds, None), starts)


_SEEDS = 6  # words that `seed_words` gives
_rounded = jax.jit(_with_gradient, static_argnums=(0, 1), inline=True)


def _forward(
    body: Callable[..., Array], x: Array, seeds: tuple | None, spec: Spec, place: _Place, starts: tuple
) -> Array:
    """`body` of the real numbers of `x`, with the words of each; complex numbers have two, along a last axis."""
    carrier, parts = _carrier(x.dtype), _parts(x)
    if seeds is None:
        return body(parts, spec, carrier, None)
    if not jnp.iscomplexobj(x):
        word = _draw(seeds, x.shape, place, starts, carrier.work_width)
        return body(parts, spec, carrier, _sharded_as(parts, word))
    if place.whole is not None:
        place, shape = replace(place, known=(*place.known, 0), whole=(*place.whole, 2)), parts.shape
    else:  # a chunk: rows of a real and an imaginary part each
        place, shape = replace(place, known=(*place.known, 0), whole=(1 << 32, 2), base=2 * place.base), (x.size, 2)
    word = _draw(seeds, shape, place, starts, carrier.work_width)
    return body(parts, spec, carrier, _sharded_as(parts, word.reshape(parts.shape)))


def _sharded_as(x: Array, word: Array) -> Array:
    """`word` with the sharding of `x` in its type, where meshes are explicit; elsewhere nothing."""
    return word | jnp.zeros_like(x, word.dtype)


def _parts(x: Array) -> Array:
    """The real numbers of an array: itself, or real and imaginary parts along a new last axis."""
    return jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x


def _joined(parts: Array, dtype: Any) -> Array:
    """The inverse of `_parts`."""
    return lax.complex(parts[..., 0], parts[..., 1]) if jnp.issubdtype(dtype, jnp.complexfloating) else parts


def _draw(seeds: tuple, shape: tuple[int, ...], place: _Place, starts: tuple, width: int) -> Array:
    words = _words(seeds, shape, place.offset(starts), width, place.base)
    if width == 32:
        return words
    high, low = (half.astype(jnp.uint64) for half in words)
    return (high << 32) | low


# -- checks ------------------------------------------------------------------------------------------------------------

_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_BY_DTYPE = {jnp.dtype(name): CARRIERS[_COMPLEX.get(name, name)] for name in (*CARRIERS, *_COMPLEX)}


def _carrier(dtype: Any) -> Carrier:
    carrier = _BY_DTYPE.get(dtype)
    if carrier is None:
        raise TypeError(
            f"x has dtype {dtype}, which is no carrier; allowed: {', '.join(map(str, _BY_DTYPE))}. Convert it "
            "first, for example x.astype('float32')"
        )
    return carrier


def _keys(spec: Spec, key: Array | None, gradient_key: Array | None) -> _Keys:
    """The keys that `spec` draws from, checked; None where it draws nothing."""
    backward = spec.gradient.round
    draws = (spec.rounding.stochastic, backward is not None and backward.rounding.stochastic)
    for name, given, needed, what in zip(_KEY_NAMES, (key, gradient_key), draws, ("", " cotangents"), strict=True):
        if given is not None:
            _check_key(name, given)
        elif needed:
            raise ValueError(
                f"{name}=None, but spec={str(spec)!r} rounds{what} stochastically: pass a typed key, for example "
                f"{name}=jax.random.key(0)"
            )
    return key if draws[0] else None, gradient_key if draws[1] else None


_KEY_NAMES = ("key", "gradient_key")


def _check_key(name: str, key: Any) -> None:
    if not (isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        got = f"an array of dtype {key.dtype}" if isinstance(key, Array) else repr(key)
        raise TypeError(
            f"{name}={got} must be a typed key, as jax.random.key(0) gives (jax.random.wrap_key_data makes one of "
            "raw words)"
        )
    if key.shape != ():
        raise ValueError(
            f"{name} has shape {key.shape}, but one key is drawn from; use jax.vmap over x and the keys together"
        )
