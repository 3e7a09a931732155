"""`round_to_format`: the one primitive, with its checks, keys and gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import Carrier, enable_x64_for
from jchop._common.checks import as_numpy, check, check_choice, check_int, keyword_hints
from jchop._common.gradients import CustomJvp, on_cotangent
from jchop._common.settings import always_jit
from jchop._core.rounding.elements import overflow_mask
from jchop._core.rounding.grid import most_random_bits, require_carrier
from jchop._core.rounding.random_bits import SEEDS, STREAM_START, StreamOffset, draw_words, seed_words, words_like
from jchop._kernels.primitive import IMPLEMENTATIONS, Impl
from jchop._kernels.scaled import (
    require_scaled_plan,
    round_op,
    round_scaled,
    round_with_hardware_bits_op,
    scaled_overflow,
)
from jchop._round.arguments import (
    Key,
    Keys,
    as_array,
    carrier_of_dtype,
    check_key,
    rounding_keys,
    run_numpy,
    stream_offset,
)
from jchop._spec.spec import Gradient, Spec, SpecLike, as_spec
from jchop.formats import ScaledFormat


@keyword_hints(
    dict.fromkeys(
        ("rounding", "mode", "overflow", "saturate", "stochastic", "random_bits"), "the spec 'e4m3:stochastic:saturate'"
    )
    | {"seed": "key=jax.random.key(0)", "rng": "key=jax.random.key(0)", "dtype": "x.astype(dtype)"}
)
def round_to_format(
    x: Any,
    spec: SpecLike,
    key: Key = None,
    *,
    offset: Any = 0,
    gradient_key: Key = None,
    impl: Impl = "auto",
    generator: Literal["counter", "hardware"] = "counter",
    bits: Any = None,
) -> Any:
    """`x` rounded once, exactly, to the values of a number format.

    Every element becomes the neighbour that the spec's rounding mode names. Integer operations on its bits decide, so
    every backend returns the same bits. Values of the format never move; NaN stays NaN. Under a scaled format the
    groups of `x` choose their scales. The result is s times the element that x / s is rounded to, rounded once to the
    dtype of `x`.

    Works under jit (with `spec` static), vmap, scan, remat, shard_map and export. Derivatives are straight-through
    unless the spec says otherwise, in forward and reverse mode; second derivatives are zero. Under ``jax_debug_nans`` a
    NaN in the result is an error, as in every function of JAX, also if the format overflows to NaN.

    Args:
        x: float16, bfloat16, float32, float64, complex64 or complex128 (by parts), any shape. A JAX array gives a JAX
            array. A NumPy array, scalar, list, buffer or anything with ``__array__`` gives NumPy. A dask array gives a
            dask array, with the bits of the whole. The dtype is kept, and float64 data is rounded from float64 for
            every state of ``jax_enable_x64``.
        spec: a `Spec`, a format (rounded to nearest, ties to even), or a text like ``"e5m2:stochastic:saturate"`` or
            ``"int8(channel=0)"``.
        key: a typed key (`jax.random.key`), needed by the stochastic modes; the other modes do not look at it. The
            random bits of an element depend on the key and on its flat index alone.
        offset: the position of `x` in a larger array, so that a part is rounded as in the whole. For a contiguous chunk
            it is the flat (C order) index of its first element, an int or a traced integer. Otherwise it is ``(starts,
            shape)``: one start for each axis and the shape of the whole. Default 0. It only selects the random bits:
            the groups of a scaled format begin at the first element of `x`.
        gradient_key: a typed key, needed if ``spec.gradient`` rounds the cotangent stochastically.
        impl: ``"auto"`` (default) for the faster program, ``"xla"`` for the portable body. ``"pallas"`` for the TPU's
            or GPU's kernel of a scaled format, with an error if it cannot run. The bits are the same.
        generator: ``"counter"`` (default), or ``"hardware"`` for the TPU's own random bits, seeded with `key`: cheaper
            there, and not reproducible. They depend on tiling, chip and version, and there is no `offset` for them.
        bits: the random integers R of a stochastic mode, in place of a key. They are integers of the shape of `x`, for
            example from a shift register of your own. The lowest N bits of each are used. N is the spec's
            `random_bits`; without it 32, or 64 for float64, and one less for variants B and C. ``"stochastic_equal"``
            reads the highest of them.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: for a dtype that is not a carrier (integers, booleans, float8 ...), a masked array, or a key that is
            not a typed key.
        ValueError: for an unknown text, a stochastic spec without a key, or one key given as both. For a carrier that
            cannot hold every result of the spec, as float16 data to bfloat16: the message names a carrier that can. For
            an array without the axes that a scaled format names. For an `offset` that is no place for `x`, below 2^64.
        NotImplementedError: when compiled, if ``impl="pallas"`` or ``generator="hardware"`` cannot run; it says why.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> jc.round_to_format(jnp.array([0.1, 1000.0]), "float8_e4m3fn:saturate").tolist()
        [0.1015625, 448.0]
        >>> jc.round_to_format(jnp.array([[7.0, 1.2], [70.0, 33.0]]), "int4(channel=0)").tolist()
        [[7.0, 1.0], [70.0, 30.0]]
        >>> spec = jc.Spec("bfloat16", rounding="stochastic")
        >>> jc.round_to_format(jnp.float32(1.001), spec, jax.random.key(0)).dtype
        dtype('float32')
        >>> jc.round_to_format(jnp.full(4, 1.0625), "e4m3:stochastic:random_bits=4", bits=jnp.arange(6, 10)).tolist()
        [1.0, 1.0, 1.125, 1.125]
    """
    options = _round_options(as_spec(spec, scaled=True), impl, generator, offset)
    if bits is not None and not isinstance(bits, Array):
        bits = np.asarray(bits)  # of 64 bits for every state of jax_enable_x64
    if isinstance(x, Array):
        return _round_array(x, options, key, offset, gradient_key, bits)
    if is_dask(x):
        check(bits is None, "bits are not for a dask array; pass a key")
        if options.hardware or not (type(offset) is int and offset == 0):
            raise ValueError(f"offset={offset!r}: a dask array is a whole; it takes no offset, and generator='counter'")
        _require_results_fit(options.spec, x, carrier_of_dtype(x.dtype))
        rounder = partial(_round_numpy_block, replace(options, spec=replace(options.spec, gradient=Gradient())))
        return round_dask_blocks(x, rounder, options.spec.scaled, rounding_keys(options.spec, key, gradient_key)[0])
    return _round_numpy(x, options, key, offset, gradient_key, bits)


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
    check_key("key", key)
    if not isinstance(shape, Sequence):
        raise TypeError(f"shape={shape!r} must be a tuple of integers >= 0")
    shape = tuple(check_int(f"shape={shape!r}: length", size, 0) for size in shape)
    place, starts = stream_offset(offset, shape)
    return draw_words(seed_words(key), shape, place, starts, width)


def round_keeping_nan(x: Array, spec: Spec, key: Key = None, gradient_key: Key = None) -> Array:
    """`round_to_format` of an array, with its NaN also where the elements of a scaled format have no code for it.

    They give their largest value for it, so a model would hide that it has diverged.
    """
    return _round_array(x, _RoundOptions(spec, "auto", False, keep_nan=True), key, 0, gradient_key)


# -- static arguments --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RoundOptions:
    """The static arguments of one rounding, without its place in the random stream."""

    spec: Spec
    impl: str
    hardware: bool  # random bits of the device's own generator
    keep_nan: bool = False  # also where the elements of a scaled format have no code for it


def _round_options(spec: Spec, impl: str, generator: str, offset: Any) -> _RoundOptions:
    check_choice("impl", impl, IMPLEMENTATIONS)
    check_choice("generator", generator, ("counter", "hardware"))
    if generator == "counter":
        return _RoundOptions(spec, impl, False)
    for wrong, what in (
        (not spec.rounding.stochastic, f"has no effect under rounding={spec.rounding.value!r}"),
        (spec.gradient.clipped, "cannot tell the backward pass what overflowed (gradient='clipped')"),
        (impl == "xla", "is a kernel's: impl='xla' has none"),
        (spec.scaled is not None, "is not for scaled formats"),
        (not (type(offset) is int and offset == 0), f"has bits without a place in a larger array: offset={offset!r}"),
    ):
        check(not wrong, f"generator='hardware' {what}; use generator='counter'")
    return _RoundOptions(spec, "pallas", True)


# -- by kind of input --------------------------------------------------------------------------------------------------


def _round_array(
    x: Array | np.ndarray, options: _RoundOptions, key: Key, offset: Any, gradient_key: Key, bits: Any = None
) -> Array:
    spec = options.spec
    carrier = carrier_of_dtype(x.dtype)
    _require_results_fit(spec, x, carrier)
    if spec.gradient.round is not None:
        _require_results_fit(spec.gradient.round, x, carrier)
    if bits is not None:
        _check_bits(x, options, key, offset, bits)
    keys = rounding_keys(spec, key, gradient_key, has_bits=bits is not None)
    place, starts = stream_offset(offset, x.shape, 2 if x.dtype.kind == "c" else 1)
    with enable_x64_for(carrier.name):
        if bits is None:
            return _round_with_keys(x, keys, starts, options=options, place=place)
        # The word of an element begins with its random integer.
        word = jnp.asarray(bits).astype(f"uint{carrier.work_width}")
        word = word << (carrier.work_width - (spec.random_bits or most_random_bits(spec, carrier)))
        seeds = ((word,), None if keys[1] is None else seed_words(keys[1]))
        return _compiled_round(replace(options, impl="xla"), place, jnp.asarray(x), seeds, starts)


def _round_numpy(x: Any, options: _RoundOptions, key: Key, offset: Any, gradient_key: Key, bits: Any = None) -> Any:
    array = as_array("x", x)
    if array.dtype.kind in "iu" and isinstance(x, int | list | tuple):
        exact = ((array >= -(2**53)) & (array <= 2**53)).all()
        check(exact, "x has integers beyond 2**53, which float64 does not hold: pass an array of floats")
        array = array.astype(np.float64)
    result = run_numpy(
        lambda: _round_array(array, options, key, offset, gradient_key, bits),
        key=key,
        gradient_key=gradient_key,
        offset=offset,
        bits=bits,
    )
    return result if isinstance(x, np.ndarray) else result[()]


def _round_numpy_block(options: _RoundOptions, block: np.ndarray, key: Key = None, offset: Any = 0) -> np.ndarray:
    return _round_numpy(block, options, key, offset, None)


# -- the traced part ---------------------------------------------------------------------------------------------------


@partial(always_jit, static_argnames=("options", "place"), inline=True)
def _round_with_keys(
    x: Array | np.ndarray, keys: Keys, starts: tuple, *, options: _RoundOptions, place: StreamOffset
) -> Array:
    seeds = tuple(None if key is None else seed_words(key) for key in keys)
    return _round_with_gradient(options, place, jnp.asarray(x), seeds, starts)


@partial(CustomJvp, nondiff_argnums=(0, 1))
def _round_with_gradient(options: _RoundOptions, place: StreamOffset, x: Array, seeds: tuple, starts: tuple) -> Array:
    op = round_with_hardware_bits_op if options.hardware else round_op
    op = op if options.spec.scaled is None else partial(round_scaled, keep_nan=options.keep_nan)
    op = partial(op, impl=options.impl)
    return _from_real_view(_apply_to_real_view(op, x, seeds[0], options.spec, place, starts), x.dtype)


@_round_with_gradient.defjvp
def _round_jvp(options: _RoundOptions, place: StreamOffset, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    x, seeds, starts = primals
    tangent = tangents[0]
    gradient = options.spec.gradient
    if gradient.clipped:
        beyond = _apply_to_real_view(
            _element_overflow if options.spec.scaled is None else scaled_overflow,
            x,
            seeds[0],
            options.spec,
            place,
            starts,
        )
        tangent = _from_real_view(jnp.where(beyond, 0, _real_view(tangent)), tangent.dtype)
    if gradient.round is not None:
        impl = "auto" if gradient.round.scaled is None else options.impl  # plain rounding has no kernel
        rule = _RoundCotangent(_RoundOptions(gradient.round, impl, False), place, seeds[1] is not None)
        tangent = on_cotangent(rule, tangent, *(seeds[1] or ()), *starts)
    return _round_with_gradient(options, place, x, seeds, starts), tangent


@dataclass(frozen=True)
class _RoundCotangent:
    """Rounds a cotangent; the residuals are its seeds, if it draws, and the traced starts."""

    options: _RoundOptions
    place: StreamOffset
    draws: bool

    def __call__(self, cotangent: Array, *residuals: Array) -> Array:
        seeds, starts = (residuals[:SEEDS], residuals[SEEDS:]) if self.draws else (None, residuals)
        return _compiled_round(self.options, self.place, cotangent, (seeds, None), starts)


_compiled_round = always_jit(_round_with_gradient, static_argnums=(0, 1), inline=True)


def _apply_to_real_view(
    op: Callable[..., Array], x: Array, seeds: tuple | None, spec: Spec, place: StreamOffset, starts: tuple
) -> Array:
    """`op` of the real numbers of `x`; complex numbers have two parts, along a last axis, each with a separate word."""
    parts = _real_view(x)
    if seeds is None:
        return op(parts, spec=spec)
    if jnp.iscomplexobj(x):
        place = replace(place, static_starts=(*place.static_starts, 0))
        if place.whole is not None:
            place = replace(place, whole=(*place.whole, 2))
        else:  # a chunk: rows of a real and an imaginary part each
            place = replace(place, whole=(1 << 32, 2), base=2 * place.base, shape=(x.size, 2))
    return op(parts, *seeds, *starts, spec=spec, place=place)


def _element_overflow(x: Array, *seeds_and_starts: Array, spec: Spec, place: StreamOffset = STREAM_START) -> Array:
    return overflow_mask(
        x, spec, carrier_of_dtype(x.dtype), words_like(x, seeds_and_starts, place) if seeds_and_starts else None
    )


def _real_view(x: Array) -> Array:
    """The real numbers of an array: itself, or real and imaginary parts along a new last axis."""
    return jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x


def _from_real_view(parts: Array, dtype: Any) -> Array:
    """The inverse of `_real_view`."""
    return lax.complex(parts[..., 0], parts[..., 1]) if jnp.issubdtype(dtype, jnp.complexfloating) else parts


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_bits(x: Array | np.ndarray, options: _RoundOptions, key: Key, offset: Any, bits: Any) -> None:
    spec = options.spec
    for wrong, why in (
        (not spec.rounding.stochastic, f"have no effect under rounding={spec.rounding.value!r}"),
        (key is not None, "take the place of key; pass one of them"),
        (options.hardware or not (type(offset) is int and offset == 0), "have no offset and no generator"),
        (options.impl == "pallas", "are for impl='xla'"),
        (spec.scaled is not None and spec.scaled.sparse is not None, f"are not for the sparse spec={str(spec)!r}"),
        (x.dtype.kind == "c", f"are for real numbers; x has dtype {x.dtype}"),
    ):
        check(not wrong, f"bits {why}")
    is_integer = bits.shape == x.shape and jnp.issubdtype(bits.dtype, jnp.integer)
    check(is_integer, f"bits has shape {bits.shape} and dtype {bits.dtype}; it must be integers of shape {x.shape}")


def _require_results_fit(spec: Spec, x: Array | np.ndarray, carrier: Carrier) -> None:
    """Refuse an array that cannot hold the results of `spec`."""
    if spec.scaled is None:
        require_carrier(spec, carrier)
        return
    if np.dtype(x.dtype).kind == "c":
        raise TypeError(f"x has dtype {x.dtype}; a scaled format, as spec={str(spec)!r}, takes real numbers")
    require_scaled_plan(spec, x.shape, carrier.name)


# == arrays of Dask ====================================================================================================


def is_dask(x: object) -> bool:
    """Whether `x` is a dask array, without importing dask."""
    module = sys.modules.get("dask.array")
    return module is not None and isinstance(x, module.Array)


def round_dask_blocks(
    x: Any, rounder: Callable[..., Any], scaled_format: ScaledFormat | None, key: jax.Array | None
) -> Any:
    """The dask array of the rounded blocks of `x`.

    The random bits of an element depend on its index in the whole array, so the blocks do not change the result.

    Args:
        x: a dask array.
        rounder: ``rounder(block, key=key, offset=(starts, shape))``.
        scaled_format: the scaled format of the result, whose groups no chunk may cut; None for an element format.
        key: the typed key of a stochastic rounding, or None.

    Raises:
        ValueError: for chunks of unknown size if random bits or groups depend on it, or chunks that cut groups.
    """
    if any(map(math.isnan, x.shape)) and (key is not None or scaled_format is not None):
        raise ValueError(
            "x has chunks of unknown size, so the index of its elements is unknown; x.compute_chunk_sizes()"
        )
    if scaled_format is not None:
        _check_chunk_groups(scaled_format, x)
    # A key is passed as its words: dask hashes the contents of a graph, and sends them to other processes.
    words = None if key is None else (np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key)))
    meta = np.empty((0,) * x.ndim, x.dtype)
    return x.map_blocks(partial(_round_dask_block, rounder, words), dtype=x.dtype, meta=meta)


def _round_dask_block(
    rounder: Callable[..., Any], words: tuple[np.ndarray, str] | None, block: Any, block_info: Any = None
) -> np.ndarray:
    block = as_numpy("x", block)
    if words is None:
        return rounder(block)
    info = block_info[0]
    starts = tuple(int(start) for start, _ in info["array-location"])
    key = jax.random.wrap_key_data(jnp.asarray(words[0]), impl=words[1])
    return rounder(block, key=key, offset=(starts, tuple(map(int, info["shape"]))))


def _check_chunk_groups(fmt: ScaledFormat, x: Any) -> None:
    """Refuse chunks that end within a group."""
    several = [axis for axis, sizes in enumerate(x.chunks) if len(sizes) > 1]
    for axis in several:
        for at in list(accumulate(x.chunks[axis]))[:-1]:
            if fmt.scale_rule.tensor_scale or not _begins_a_group(fmt, x.shape, axis, at):
                raise ValueError(
                    f"x has chunks {x.chunks[axis]} along axis {axis}, which cut groups of {fmt}; x.rechunk puts "
                    "whole groups into a chunk"
                )


def _begins_a_group(fmt: ScaledFormat, shape: tuple[int, ...], axis: int, at: int) -> bool:
    """Whether a new group begins at index `at` of an axis; if scales are scaled, also a new group of scales."""
    if fmt.sparse is not None and fmt.axis_of_sparse % len(shape) == axis and at % fmt.sparse[1]:
        return False
    below, above = (fmt.scale_shape((*shape[:axis], n, *shape[axis + 1 :])) for n in (at, at + 1))
    if at > 0 and above[axis] == below[axis]:
        return False
    return not isinstance(fmt.scale, ScaledFormat) or _begins_a_group(fmt.scale, above, axis, below[axis])
