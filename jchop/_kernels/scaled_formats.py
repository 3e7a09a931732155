"""Scaled formats as operations: rounded, as codes and scales, and back, each grouping by the way that suits it.

Blocks along one axis go to `scaled`, which has kernels for them; everything else to the bodies of `grouped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from jchop._bits import types_for
from jchop._core.rounding.codes import packed_size
from jchop._core.rounding.stream_offset import AT_START, StreamOffset
from jchop._core.scaled.scales import scale_dtype
from jchop._core.scaled_bodies import (
    Stored,
    dequantize_body,
    fit_body,
    flat,
    overflowed_body,
    plan_of,
    quantize_body,
    round_body,
    scaling_of,
    unflat,
)
from jchop._kernels.primitive import make_op
from jchop._kernels.scaled import dequantize_blocks_op, fit_tensor_scale, quantize_blocks_op, round_blocks_op
from jchop._settings import compiled
from jchop.formats import ScaledFormat
from jchop.scaling import RULES, BlockScaling
from jchop.spec import Spec

__all__ = [
    "dequantize_scaled",
    "fit_scaled",
    "overflowed_scaled",
    "quantize_scaled",
    "require_scaled",
    "round_scaled",
    "stored_shapes",
]

Array = jax.Array

round_grouped_op = make_op(
    "jchop_round_grouped", round_body, single_cpu=partial(round_body, branch_allowed=True), apart=True
)
quantize_grouped_op = make_op(
    "jchop_quantize_grouped",
    quantize_body,
    single=False,
    single_cpu=partial(quantize_body, branch_allowed=True),
    stores=True,
)
dequantize_grouped_op = make_op("jchop_dequantize_grouped", dequantize_body)
fit_grouped_op = make_op(
    "jchop_fit_grouped", fit_body, single=False, single_cpu=partial(fit_body, branch_allowed=True), stores=True
)


# -- what is static ----------------------------------------------------------------------------------------------------


def require_scaled(spec: Spec, shape: Sequence[int], dtype: str) -> None:
    """Refuse an array that cannot be rounded to a scaled format.

    Raises:
        ValueError: for an array without the axes that the format names, or a carrier that is too narrow for it.
    """
    _format(spec).group_shape(shape)
    plan_of(spec, dtype)
    inner = _format(spec).scale
    if isinstance(inner, ScaledFormat):
        inner.group_shape(shape)
        plan_of(Spec(inner), "float32")


def stored_shapes(spec: Spec, shape: Sequence[int]) -> tuple[Any, Stored, Any]:
    """What `quantize_scaled` gives for an array of `shape`, as `jax.ShapeDtypeStruct`."""
    fmt, bits = _storable(spec), _format(spec).bits
    row = (*shape[:-1], packed_size(shape[-1] if shape else 1, bits))
    codes = jax.ShapeDtypeStruct(row, jnp.uint8)
    counts = fmt.scale_shape(shape)
    own = scale_dtype(scaling_of(spec))
    zero_point = jax.ShapeDtypeStruct(counts, own if fmt.zero_point == "float" else jnp.int32)
    if isinstance(fmt.scale, ScaledFormat):
        codes_of_scales, *more = stored_shapes(Spec(fmt.scale), counts)
        scale: Stored = (codes_of_scales, *(part for part in more if part is not None))
    else:
        scale = jax.ShapeDtypeStruct(counts, own)
        if fmt.rule == "two_level":
            scale = (scale, jax.ShapeDtypeStruct((), jnp.float32))
    return codes, scale, zero_point if fmt.zero_point else None


def _format(spec: Spec) -> ScaledFormat:
    if spec.scaled is None:
        raise ValueError(f"spec={str(spec)!r} is not scaled; a scaled format is needed, such as 'int8(group=128)'")
    return spec.scaled


def _storable(spec: Spec) -> ScaledFormat:
    fmt = _format(spec)
    if fmt.bits > 8:
        raise ValueError(f"spec={str(spec)!r} has codes of {fmt.bits} bits; at most 8 are stored")
    return fmt


@lru_cache(maxsize=1024)
def _blocks(spec: Spec, shape: tuple[int, ...]) -> BlockScaling | None:
    """The format as blocks along one axis, where it is no more than that."""
    fmt = _format(spec)
    plain = isinstance(fmt.group, int) and isinstance(fmt.axis, int) and not fmt.zero_point
    if not plain or isinstance(fmt.scale, ScaledFormat) or fmt.rule not in RULES:
        return None
    assert isinstance(fmt.group, int) and isinstance(fmt.axis, int)
    return replace(scaling_of(spec), block=fmt.group, axis=fmt.axis) if 1 < fmt.group < shape[fmt.axis] else None


def _empty(shape: Sequence[int]) -> bool:
    return 0 in shape


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


# -- functions ---------------------------------------------------------------------------------------------------------


def round_scaled(x: Array, *drawn: Array, spec: Spec, place: StreamOffset = AT_START, impl: str = "auto") -> Array:
    """`x` rounded to a scaled format: what `dequantize_scaled` makes of what `quantize_scaled` gives, bit for bit.

    Args:
        x: a carrier.
        drawn: for a stochastic spec the words of `seed_words`, then the traced starts that `place` leaves open.
        spec: of a scaled format, which `require_scaled` let pass.
        place: where `x` lies in the random stream.
        impl: "auto", "xla" or "pallas".
    """
    if _empty(x.shape):
        return x
    blocks = _blocks(spec, x.shape)
    if blocks is None:
        return round_grouped_op(x, *drawn, impl=impl, spec=spec, place=place)
    return round_blocks_op(x, *_tensor(x, blocks), *drawn, impl=impl, scaling=blocks, place=place, tiling=None)


def overflowed_scaled(x: Array, *drawn: Array, spec: Spec, place: StreamOffset = AT_START) -> Array:
    """Where the rounded x / s + z lies beyond the ends of the element format, with the arguments of `round_scaled`."""
    if _empty(x.shape):
        return jnp.zeros_like(x, bool)
    return overflowed_body(x, *drawn, spec=spec, place=place)


def quantize_scaled(
    x: Array,
    *drawn: Array,
    spec: Spec,
    place: StreamOffset = AT_START,
    scale: Stored = None,
    zero_point: Array | None = None,
    impl: str = "auto",
    as_dtype: Any = "uint8",
) -> tuple[Array, Stored, Array | None]:
    """`x` as codes, scales and zero points.

    Args:
        x: a carrier.
        drawn: as for `round_scaled`.
        spec: of a scaled format with elements of at most 8 bits.
        place: as for `round_scaled`.
        scale: the scales, as `fit_scaled` gives them. Default: fitted to `x`.
        zero_point: the zero points, needed with `scale` by a format that has them.
        impl: "auto", "xla" or "pallas".
        as_dtype: of the codes, 8 bits.

    Returns:
        ``(codes, scale, zero_point)``. The codes are of `as_dtype`, packed along the last axis (a 0-d array as a row of
        one). The scales have the shape ``fmt.scale_shape(x.shape)`` and the dtype of their format where it is float16,
        bfloat16, float32 or float64, else they are codes (uint8, uint16). Under the rule "two_level" a pair: they and
        the float32 scale of the tensor. Where scales are quantized again their packed codes, and their scales (and
        zero points). Zero points are int32 of the same shape, or of the dtype of the scales where they are numbers;
        None for a format without.

    Raises:
        ValueError: for an array, a scale or a zero point that does not fit the format.
    """
    fmt = _storable(spec)
    require_scaled(spec, x.shape, x.dtype.name)
    given = _given(spec, x.shape, scale, zero_point)
    if _empty(x.shape):
        codes, *rest = _zeros(stored_shapes(spec, x.shape))
        return codes.astype(as_dtype), *rest
    blocks = None if given else _blocks(spec, x.shape)
    with types_for(x.dtype):
        if blocks is None:
            codes, *rest = _quantize_grouped(x, given, drawn, spec=spec, place=place, impl=impl, as_dtype=as_dtype)
            return codes, *unflat(rest, fmt)
        codes, scales, *tensor = _quantize_blocks(x, drawn, blocks=blocks, place=place, impl=impl, as_dtype=as_dtype)
        return codes, (scales, *tensor) if tensor else scales, None


def dequantize_scaled(
    qvalue: Array, scale: Stored, zero_point: Array | None = None, *, spec: Spec, shape: Sequence[int], dtype: str
) -> Array:
    """The numbers that `quantize_scaled` stored.

    Args:
        qvalue: packed codes.
        scale: as stored.
        zero_point: as stored.
        spec: as it was.
        shape: of the array.
        dtype: of the result, a carrier; that of the original gives what `round_scaled` gives.

    Raises:
        ValueError: for codes, scales or zero points of another shape or dtype.
    """
    shape = tuple(shape)
    require_scaled(spec, shape, dtype)
    codes = stored_shapes(spec, shape)[0]
    if qvalue.shape != codes.shape or qvalue.dtype != codes.dtype:
        raise ValueError(f"qvalue is {qvalue.dtype}{qvalue.shape}; for {spec} and {shape} it is uint8{codes.shape}")
    stored = _given(spec, shape, scale, zero_point)
    if not stored:
        raise ValueError(f"scale=None: {spec} needs the scales that the array was quantized under")
    with types_for(dtype):
        if _empty(shape):
            return jnp.zeros(shape, dtype)
        return _dequantize(qvalue, stored, spec=spec, shape=shape, dtype=dtype)


def fit_scaled(x: Array, *, spec: Spec) -> tuple[Stored, Array | None]:
    """The scales and zero points that `quantize_scaled` would choose for `x`, as it stores them."""
    fmt = _format(spec)
    require_scaled(spec, x.shape, x.dtype.name)
    if _empty(x.shape):
        _, scale, zero_point = _zeros(stored_shapes(spec, x.shape))
        return scale, zero_point
    with types_for(x.dtype):
        return unflat(_fit(x, spec=spec), fmt)


def _given(spec: Spec, shape: Sequence[int], scale: Stored, zero_point: Array | None) -> tuple[Array, ...]:
    """Scales and zero points, checked, as a tuple of arrays; empty where they are to be fitted."""
    if scale is None:
        if zero_point is not None:
            raise ValueError("zero_point is given without scale; the two are fitted together")
        return ()
    _, *expected = stored_shapes(spec, shape)
    names = ("scale", "zero_point")
    for name, value, wanted in zip(names, (scale, zero_point), expected, strict=True):
        leaves = jax.tree.map(lambda leaf: (leaf.shape, jnp.dtype(leaf.dtype).name), value)
        needed = jax.tree.map(lambda leaf: (leaf.shape, jnp.dtype(leaf.dtype).name), wanted)
        if leaves != needed:
            raise ValueError(f"{name} has shape and dtype {leaves}; for {spec} and {tuple(shape)} it is {needed}")
    return flat(scale, zero_point)


# -- compiled ----------------------------------------------------------------------------------------------------------


@partial(compiled, static_argnames=("spec", "place", "impl", "as_dtype"), inline=True)
def _quantize_grouped(
    x: Array, given: tuple, drawn: tuple, *, spec: Spec, place: StreamOffset, impl: str, as_dtype: Any
) -> tuple:
    more = {"spec": spec, "given": len(given), "place": place, "as_dtype": as_dtype}
    return quantize_grouped_op(x, *given, *drawn, impl=impl, **more)


@partial(compiled, static_argnames=("blocks", "place", "impl", "as_dtype"), inline=True)
def _quantize_blocks(
    x: Array, drawn: tuple, *, blocks: BlockScaling, place: StreamOffset, impl: str, as_dtype: Any
) -> tuple:
    tensor = _tensor(x, blocks)
    more = {"scaling": blocks, "place": place, "tiling": None, "as_dtype": as_dtype}
    out = quantize_blocks_op(x, *tensor, *drawn, impl=impl, **more)
    return (*out, *tensor)


@partial(compiled, static_argnames=("spec", "shape", "dtype"), inline=True)
def _dequantize(codes: Array, stored: tuple, *, spec: Spec, shape: tuple[int, ...], dtype: str) -> Array:
    blocks = _blocks(spec, shape)
    if blocks is None:
        return dequantize_grouped_op(codes, *stored, spec=spec, shape=shape, dtype=dtype)
    return dequantize_blocks_op(codes, *stored, scaling=blocks, size=shape[-1], dtype=dtype)


@partial(compiled, static_argnames="spec", inline=True)
def _fit(x: Array, *, spec: Spec) -> tuple:
    return fit_grouped_op(x, spec=spec)


def _tensor(x: Array, blocks: BlockScaling) -> tuple[Array, ...]:
    """The scale of the tensor that blocks of the rule "two_level" take."""
    return (fit_tensor_scale(x, blocks),) if blocks.rule == "two_level" else ()
