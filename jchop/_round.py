"""`round_to_format`: the one primitive, with its checks, keys and gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._bits import CARRIERS, Carrier
from jchop._checks import as_numpy, check_choice, check_int
from jchop._core.rounding.elements import overflowed
from jchop._core.rounding.grid import require_carrier
from jchop._core.rounding.random_bits import SEEDS, seed_words
from jchop._core.rounding.stream_offset import AT_START, StreamOffset, draw, words_like
from jchop._dask import is_dask, round_blocks
from jchop._kernels.primitive import IMPLEMENTATIONS, Impl
from jchop._kernels.round import round_op, round_with_hardware_bits_op
from jchop._kernels.scaled import overflowed_scaled, require_scaled, round_scaled
from jchop._settings import compiled
from jchop.formats import ElementFormat, ScaledFormat
from jchop.gradients import on_cotangent
from jchop.spec import Gradient, Spec, as_spec

Array = jax.Array
_Keys = tuple[Array | None, Array | None]


def round_to_format(
    x: Any,
    spec: Spec | ElementFormat | ScaledFormat | str,
    key: Array | None = None,
    *,
    offset: Any = 0,
    gradient_key: Array | None = None,
    impl: Impl = "auto",
    generator: Literal["counter", "hardware"] = "counter",
) -> Any:
    """`x` rounded once, exactly, to the values of a number format.

    Every element takes the neighbour that the spec's rounding mode names, decided by integer operations on its bits, so
    the result is the same bits on every backend. Values of the format never move; NaN stays NaN. Under a scaled format
    the groups of `x` choose their scales, and x is s times the element that x / s is rounded to, rounded once to the
    dtype of `x`.

    Works under jit (with `spec` static), vmap, scan, remat, shard_map and export. Derivatives are straight-through
    unless the spec says otherwise, in forward and reverse mode; second derivatives are zero. Under ``jax_debug_nans`` a
    NaN in the result is an error, as in every function of JAX, also where the format overflows to NaN.

    Args:
        x: float16, bfloat16, float32, float64, complex64 or complex128 (by parts), any shape. A JAX array gives a JAX
            array; a NumPy array, scalar, list, buffer or anything with ``__array__`` gives NumPy; a dask array gives a
            dask array, of the bits that the whole would have. The dtype is kept, and float64 data is rounded from
            float64 whatever the state of ``jax_enable_x64``.
        spec: a `Spec`, a format (rounded to nearest, ties to even), or text such as ``"e5m2:stochastic:saturate"`` or
            ``"int8(channel=0)"``.
        key: a typed key (`jax.random.key`), needed by the stochastic modes; the other modes do not look at it. The
            random bits of an element depend on the key and on its flat index alone.
        offset: where `x` lies in a larger array, so that a part is rounded as it would be in the whole: the flat (C
            order) index of its first element if it is a contiguous chunk, an int or a traced integer; or ``(starts,
            shape)``: one start for each axis and the shape of the whole. Default 0. It places the random bits alone:
            the groups of a scaled format are those of `x`.
        gradient_key: a typed key, needed where ``spec.gradient`` rounds the cotangent stochastically.
        impl: ``"xla"`` for the portable body, ``"pallas"`` for the TPU's or GPU's kernel and an error where it cannot
            run, ``"auto"`` (default) for whichever is faster; the bits are the same.
        generator: ``"counter"`` (default), or ``"hardware"`` for the TPU's own random bits, seeded with `key`: cheaper
            there, and not reproducible. They depend on tiling, chip and version, and there is no `offset` for them.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: for a dtype that is no carrier (integers, booleans, float8 ...), a masked array, or a key that is not
            a typed key.
        ValueError: for an unknown text, a stochastic spec without a key, one key given as both, a carrier that cannot
            hold every result of the spec (float16 data to bfloat16, say; the message names a carrier that can), an
            array without the axes that a scaled format names, or an `offset` that is no place for `x`, below 2^64.
        NotImplementedError: when compiled, where ``impl="pallas"`` or ``generator="hardware"`` cannot run; it says why.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> jc.round_to_format(jnp.array([0.1, 1000.0]), "float8_e4m3fn:saturate").tolist()
        [0.1015625, 448.0]
        >>> jc.round_to_format(jnp.array([[7.0, 1.2], [70.0, 33.0]]), "int4(channel=0)").tolist()
        [[7.0, 1.0], [70.0, 30.0]]
        >>> spec = jc.Spec("bfloat16", rounding="stochastic")
        >>> jc.round_to_format(jnp.float32(1.001), spec, jax.random.key(0)).dtype
        dtype('float32')
    """
    how = _how(as_spec(spec, scaled=True), impl, generator, offset)
    if isinstance(x, Array):
        return _round_array(x, how, key, offset, gradient_key)
    if is_dask(x):
        return _round_dask(x, how, key, offset, gradient_key)
    return _round_numpy(x, how, key, offset, gradient_key)


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
        TypeError, ValueError: for a key that is not a typed key, another width, a shape that is none, or words beyond
            the index 2^64 - 1.

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
    if not isinstance(shape, Sequence):
        raise TypeError(f"shape={shape!r} must be a tuple of integers >= 0")
    shape = tuple(check_int("shape", size, 0) for size in shape)
    place, starts = _place(offset, shape)
    return draw(seed_words(key), shape, place, starts, width)


# -- what is static ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _How:
    """What is static of one rounding, beside its place in the random stream."""

    spec: Spec
    impl: str
    hardware: bool  # random bits of the device's own generator


def _how(spec: Spec, impl: str, generator: str, offset: Any) -> _How:
    check_choice("impl", impl, IMPLEMENTATIONS)
    check_choice("generator", generator, ("counter", "hardware"))
    if generator == "counter":
        return _How(spec, impl, False)
    for wrong, what in (
        (not spec.rounding.stochastic, f"says nothing under rounding={spec.rounding.value!r}"),
        (spec.gradient.clipped, "cannot tell the backward pass what overflowed (gradient='clipped')"),
        (impl == "xla", "is a kernel's: impl='xla' has none"),
        (spec.scaled is not None, "is not for scaled formats"),
        (not (type(offset) is int and offset == 0), f"has bits without a place in a larger array: offset={offset!r}"),
    ):
        if wrong:
            raise ValueError(f"generator='hardware' {what}; use generator='counter'")
    return _How(spec, "pallas", True)


# -- by kind of input --------------------------------------------------------------------------------------------------


def _round_array(x: Array | np.ndarray, how: _How, key: Array | None, offset: Any, gradient_key: Array | None) -> Array:
    spec = how.spec
    carrier = _carrier(x.dtype)
    _require(spec, x, carrier)
    if spec.gradient.round is not None:
        _require(spec.gradient.round, x, carrier)
    keys = _keys(spec, key, gradient_key)
    place, starts = _place(offset, x.shape, 2 if x.dtype.kind == "c" else 1)
    if carrier.width == 64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        with jax.enable_x64(True):
            return _round(x, keys, starts, how=how, place=place)
    return _round(x, keys, starts, how=how, place=place)


def _round_numpy(x: Any, how: _How, key: Array | None, offset: Any, gradient_key: Array | None) -> Any:
    array = as_numpy("x", x)
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
        rounded = _round_array(array, how, key, offset, gradient_key)
        if isinstance(rounded, jax.core.Tracer):  # within a trace a NumPy value is a constant, rounded now
            with jax.ensure_compile_time_eval():
                rounded = _round_array(array, how, key, offset, gradient_key)
    result = np.array(rounded)
    return result if isinstance(x, np.ndarray) else result[()]


def _round_dask(x: Any, how: _How, key: Array | None, offset: Any, gradient_key: Array | None) -> Any:
    if how.hardware or not (type(offset) is int and offset == 0):
        raise ValueError(f"offset={offset!r}: a dask array is a whole; it takes no offset, and generator='counter'")
    _require(how.spec, x, _carrier(x.dtype))
    rounder = partial(_round_block, replace(how, spec=replace(how.spec, gradient=Gradient())))
    return round_blocks(x, rounder, how.spec.scaled, _keys(how.spec, key, gradient_key)[0])


def _round_block(how: _How, block: np.ndarray, key: Array | None = None, offset: Any = 0) -> np.ndarray:
    return _round_numpy(block, how, key, offset, None)


# -- where x lies in the random stream ---------------------------------------------------------------------------------


def _place(offset: Any, shape: tuple[int, ...], words: int = 1) -> tuple[StreamOffset, tuple]:
    """The static part of `offset`, and its starts; known ones are traced too, lest each offset be compiled anew.

    `words` is how many words an element draws. Those of known indexes from 2^64 on, which there are not, are refused.
    """
    if type(offset) is int and offset == 0:
        return AT_START, ()
    if not isinstance(offset, tuple):
        start, high = _start(offset)
        if not isinstance(offset, Array):
            _check_last(offset, int(offset) + math.prod(shape), words)
        return StreamOffset((None,), base=high), (start,)
    pair = len(offset) == 2 and all(isinstance(entry, tuple | list) for entry in offset)
    if not pair or not len(offset[0]) == len(offset[1]) == len(shape):
        raise ValueError(f"offset={offset!r} must be (starts, shape), each with {len(shape)} entries as x has axes")
    whole = tuple(check_int("offset: shape of the whole", size, 0, 1 << 32) for size in offset[1])
    for start, size, total in zip(offset[0], shape, whole, strict=True):
        if size > total or (not isinstance(start, jax.core.Tracer) and start + size > total):
            raise ValueError(f"offset={offset!r}: a part of shape {shape} does not lie within the whole")
    _check_last(offset, math.prod(whole), words)
    return StreamOffset((None,) * len(shape), whole), tuple(_start(start)[0] for start in offset[0])


def _check_last(offset: Any, end: int, words: int) -> None:
    if end * words > 1 << 64:
        raise ValueError(
            f"offset={offset!r}: the last element would have index {end - 1}, and random bits end at index "
            f"{(1 << 64) // words - 1}"
        )


def _start(start: Any) -> tuple[Any, int]:
    """A start as an integer scalar that is not static, and a static multiple of 2^32 that goes on top of it."""
    if isinstance(start, Array):
        if start.shape != () or not jnp.issubdtype(start.dtype, jnp.integer):
            raise TypeError(
                f"offset has an entry of shape {start.shape} and dtype {start.dtype}; allowed: integer scalars"
            )
        if isinstance(start, jax.core.Tracer):
            return start, 0
    start = check_int("offset", start, 0, (1 << 64) - 1)
    low, high = start % (1 << 32), start >> 32 << 32
    return (np.int32(low) if low < 1 << 31 else np.uint32(low)), high


# -- the traced part ---------------------------------------------------------------------------------------------------


@partial(compiled, static_argnames=("how", "place"), inline=True)
def _round(x: Array | np.ndarray, keys: _Keys, starts: tuple, *, how: _How, place: StreamOffset) -> Array:
    seeds = tuple(None if key is None else seed_words(key) for key in keys)
    return _with_gradient(how, place, jnp.asarray(x), seeds, starts)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _with_gradient(how: _How, place: StreamOffset, x: Array, seeds: tuple, starts: tuple) -> Array:
    op = round_with_hardware_bits_op if how.hardware else round_op if how.spec.scaled is None else round_scaled
    op = partial(op, impl=how.impl)
    return _joined(_forward(op, x, seeds[0], how.spec, place, starts), x.dtype)


@_with_gradient.defjvp
def _jvp(how: _How, place: StreamOffset, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    x, seeds, starts = primals
    tangent = tangents[0]
    gradient = how.spec.gradient
    if gradient.clipped:
        beyond = _forward(
            _overflowed if how.spec.scaled is None else overflowed_scaled, x, seeds[0], how.spec, place, starts
        )
        tangent = _joined(jnp.where(beyond, 0, _parts(tangent)), tangent.dtype)
    if gradient.round is not None:
        rule = _RoundCotangent(_How(gradient.round, how.impl, False), place, seeds[1] is not None)
        tangent = on_cotangent(rule, tangent, *(seeds[1] or ()), *starts)
    return _with_gradient(how, place, x, seeds, starts), tangent


@dataclass(frozen=True)
class _RoundCotangent:
    """Rounds a cotangent; the residuals are its seeds, if it draws, and the traced starts."""

    how: _How
    place: StreamOffset
    draws: bool

    def __call__(self, cotangent: Array, *residuals: Array) -> Array:
        seeds, starts = (residuals[:SEEDS], residuals[SEEDS:]) if self.draws else (None, residuals)
        return _rounded(self.how, self.place, cotangent, (seeds, None), starts)


_rounded = compiled(_with_gradient, static_argnums=(0, 1), inline=True)


def _forward(
    op: Callable[..., Array], x: Array, seeds: tuple | None, spec: Spec, place: StreamOffset, starts: tuple
) -> Array:
    """`op` of the real numbers of `x`; complex numbers have two, along a last axis, each with a word of its own."""
    parts = _parts(x)
    if seeds is None:
        return op(parts, spec=spec)
    if jnp.iscomplexobj(x):
        place = replace(place, known=(*place.known, 0))
        if place.whole is not None:
            place = replace(place, whole=(*place.whole, 2))
        else:  # a chunk: rows of a real and an imaginary part each
            place = replace(place, whole=(1 << 32, 2), base=2 * place.base, shape=(x.size, 2))
    return op(parts, *seeds, *starts, spec=spec, place=place)


def _overflowed(x: Array, *drawn: Array, spec: Spec, place: StreamOffset = AT_START) -> Array:
    return overflowed(x, spec, _carrier(x.dtype), words_like(x, drawn, place) if drawn else None)


def _parts(x: Array) -> Array:
    """The real numbers of an array: itself, or real and imaginary parts along a new last axis."""
    return jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x


def _joined(parts: Array, dtype: Any) -> Array:
    """The inverse of `_parts`."""
    return lax.complex(parts[..., 0], parts[..., 1]) if jnp.issubdtype(dtype, jnp.complexfloating) else parts


# -- checks ------------------------------------------------------------------------------------------------------------


def _require(spec: Spec, x: Array | np.ndarray, carrier: Carrier) -> None:
    """Refuse an array that cannot hold the results of `spec`."""
    if spec.scaled is None:
        require_carrier(spec, carrier)
        return
    if np.dtype(x.dtype).kind == "c":
        raise TypeError(f"x has dtype {x.dtype}; a scaled format, as spec={str(spec)!r}, takes real numbers")
    require_scaled(spec, x.shape, carrier.name)


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
    if all(draws) and _same_key(key, gradient_key):
        raise ValueError(
            "gradient_key is the same as key, so x and its cotangent would be rounded by the same random bits; pass "
            "two keys, for example key, gradient_key = jax.random.split(key)"
        )
    return key if draws[0] else None, gradient_key if draws[1] else None


def _same_key(key: Any, other: Any) -> bool:
    """Whether two keys are one; traced keys are, when they are the same object."""
    if key is other:
        return True
    if isinstance(key, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
        return False
    return key.dtype == other.dtype and np.array_equal(jax.random.key_data(key), jax.random.key_data(other))


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
