"""Scaled blocks as operations: quantized and dequantized, as codes and scales, and back; and how kernels tile them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._bits import CARRIERS, types_for
from jchop._checks import check_int
from jchop._core.rounding.codebooks import COMPARE_ALL
from jchop._core.rounding.codes import packed_size
from jchop._core.rounding.random_bits import seed_words
from jchop._core.rounding.stream_offset import AT_START, StreamOffset
from jchop._core.scaled import scales as _scales
from jchop._core.scaled.elements import widen
from jchop._core.scaled.scales import make_plan, scale_dtype
from jchop._core.scaled_blocks import (
    block_axis,
    dequantize_blocks_body,
    quantize_blocks_body,
    round_blocks_body,
    scales_shape,
)
from jchop._kernels.primitive import Kernel, make_op
from jchop._kernels.round import chunk_arguments
from jchop._kernels.scaled_tile import SUBLANES, WORDS, Problem, ScaledGpuTiling, ScaledTpuTiling
from jchop._settings import compiled
from jchop.formats import CodebookFormat
from jchop.scaling import BlockScaling

__all__ = [
    "dequantize_blocks",
    "dequantize_blocks_op",
    "fit_tensor_scale",
    "quantize_blocks",
    "quantize_blocks_op",
    "round_blocks",
    "round_blocks_op",
]

Array = jax.Array


# -- operations --------------------------------------------------------------------------------------------------------


def _words(arrays: Sequence[Array], scaling: BlockScaling, place: StreamOffset) -> Array:
    """The tensor's scale, seeds and start of an operation as the kernels take them: nine words, zero where unused.

    They are a row, not a vector: an axis that vmap adds to the blocks of a vector breaks their tiling on TPU.
    """
    parts = [jnp.zeros(1, jnp.uint32)]
    if scaling.rule == "two_level":
        parts = [lax.bitcast_convert_type(arrays[0], jnp.uint32)[None]]
        arrays = arrays[1:]
    parts += chunk_arguments(tuple(arrays), place)
    words = jnp.concatenate(parts)
    return jnp.pad(words, (0, WORDS - words.size))[None]


def _tpu() -> ModuleType:
    from jchop._kernels import scaled_tpu

    return scaled_tpu


def _gpu() -> ModuleType:
    from jchop._kernels import scaled_gpu

    return scaled_gpu


def _kernel(module: Callable[[], ModuleType], name: str) -> Callable[..., Any]:
    """A kernel by its name, with the arguments of the operation's body; its module is imported when it runs."""

    def run(x: Array, *arrays: Array, scaling: BlockScaling, place: StreamOffset = AT_START, tiling: Any = None) -> Any:
        return getattr(module(), name)(x, _words(arrays, scaling, place), scaling=scaling, tiling=tiling)

    return run


def _held(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that quantizes, its codes in a dtype of 8 bits."""

    def run(*arrays: Array, as_dtype: Any = "uint8", **static: Any) -> Any:
        codes, scales = kernel(*arrays, **static)
        return lax.bitcast_convert_type(codes, as_dtype), scales

    return run


def refuse(
    x: Any, *arrays: Any, scaling: BlockScaling, place: StreamOffset = AT_START, tiling: Any = None
) -> str | None:
    """Why no kernel takes these arguments, or None."""
    fmt = scaling.element.format
    if isinstance(fmt, CodebookFormat) and len(fmt.levels) > COMPARE_ALL:
        return f"{fmt} has more than {COMPARE_ALL} levels, which are gathered from a table"
    if place.whole is not None:
        return "the random words of a tile of a larger array (offset of starts and shape) have no kernel"
    if math.prod(x.shape) >= 1 << 31:
        return f"x has {math.prod(x.shape)} elements, and a kernel takes fewer than 2^31"
    return None


def refuse_tpu(x: Any, *arrays: Any, scaling: BlockScaling, **static: Any) -> str | None:
    """Why the TPU kernel that rounds does not take these arguments, or None."""
    if x.dtype.name in _NOT_ON_TPU:
        return f"x has dtype {x.dtype.name}, which TPU kernels do not take"
    block = scaling.block
    if block % 8 or (block % SUBLANES and SUBLANES % block) or block > _MOST_TPU:
        return f"block={block} is not 8, 16 or a multiple of 32 up to {_MOST_TPU}"
    return refuse(x, *arrays, scaling=scaling, **static)


def refuse_gpu(x: Any, *arrays: Any, scaling: BlockScaling, **static: Any) -> str | None:
    """Why the GPU kernel that rounds does not take these arguments, or None."""
    most = _MOST_GPU[Problem.of(x, scaling).last]
    if scaling.block > most:
        return f"block={scaling.block} is larger than {most}"
    return refuse(x, *arrays, scaling=scaling, **static)


def _refuse_codes(x: Any, scaling: BlockScaling) -> str | None:
    problem = Problem.of(x, scaling)
    if problem.bits > 8:
        return f"element={scaling.element} has codes of {problem.bits} bits, and they are stored in bytes"
    return problem.packs_in_view()


def refuse_codes_tpu(x: Any, *arrays: Any, scaling: BlockScaling, **static: Any) -> str | None:
    """Why the TPU kernel that quantizes does not take these arguments, or None."""
    dtype = scale_dtype(scaling)
    if dtype.name in _NOT_ON_TPU:
        return f"scale={scaling.scale} has dtype {dtype.name}, which TPU kernels do not store"
    return _refuse_codes(x, scaling) or refuse_tpu(x, *arrays, scaling=scaling, **static)


def refuse_codes_gpu(x: Any, *arrays: Any, scaling: BlockScaling, **static: Any) -> str | None:
    """Why the GPU kernel that quantizes does not take these arguments, or None."""
    problem = Problem.of(x, scaling)
    if problem.bits in (5, 7):
        return f"codes of {problem.bits} bits have no kernel; 1, 2, 3, 4, 6 and 8 have"
    if problem.last and problem.block % problem.codes_together:
        return f"a block of {problem.block} codes of {problem.bits} bits does not fill whole bytes"
    return _refuse_codes(x, scaling) or refuse_gpu(x, *arrays, scaling=scaling, **static)


#: The TPU's vector unit has neither float16 nor 64-bit numbers.
_NOT_ON_TPU = {"float16", "float64"}
#: Longest blocks: a tile of the TPU holds at least eight of them, a program of the GPU one.
_MOST_TPU = 1024
_MOST_GPU = {True: 4096, False: 256}

round_blocks_op = make_op(
    "jchop_round_blocks",
    round_blocks_body,
    tpu=Kernel(_kernel(_tpu, "round_blocks"), refuse_tpu),
    gpu=Kernel(_kernel(_gpu, "round_blocks"), refuse_gpu),
    single_cpu=partial(round_blocks_body, branch_allowed=True),
    apart=True,
)
quantize_blocks_op = make_op(
    "jchop_quantize_blocks",
    quantize_blocks_body,
    tpu=Kernel(_held(_kernel(_tpu, "quantize_blocks")), refuse_codes_tpu),
    gpu=Kernel(_held(_kernel(_gpu, "quantize_blocks")), refuse_codes_gpu),
    single=False,
    single_cpu=partial(quantize_blocks_body, branch_allowed=True),
    stores=True,
)
#: XLA reads codes and scales once and writes once, and fuses with what uses the result: there is nothing for a kernel.
dequantize_blocks_op = make_op("jchop_dequantize_blocks", dequantize_blocks_body)


# -- functions ---------------------------------------------------------------------------------------------------------


def round_blocks(
    x: Array,
    scaling: BlockScaling,
    key: Array | None = None,
    *,
    tensor_scale: Array | None = None,
    impl: str = "auto",
    tiling: ScaledTpuTiling | ScaledGpuTiling | None = None,
) -> Array:
    """`x` quantized in blocks and dequantized: a block's elements rounded to s times the values of the element format.

    Args:
        x: float16, bfloat16, float32 or float64, of at least one dimension.
        scaling: blocks, their scales and elements.
        key: a typed key, needed by a stochastic element format; the words are those of `round_to_format`.
        tensor_scale: for the rule "two_level", the float32 scale of the whole tensor. Default: `fit_tensor_scale`.
        impl: "auto", "xla" or "pallas"; only "auto" may fall back.
        tiling: the kernel's tiles, in place of the heuristic's. They do not change the result.

    Returns:
        Scale times element, rounded once to the dtype of `x`, to nearest, ties to even.

    Raises:
        TypeError: for a dtype that is no carrier.
        ValueError: for an axis that `x` does not have, a stochastic element without a key, a format that the carrier is
            too narrow for, or a bad `impl`.
        NotImplementedError: while it is lowered, where ``impl="pallas"`` and no kernel can run.

    Example:
        >>> import jax.numpy as jnp
        >>> from jchop.scaling import mx
        >>> round_blocks(jnp.array([1.0, 0.3, -7.5, 100.0]), mx("e2m1fn", block=2)).tolist()
        [1.0, 0.25, -8.0, 96.0]
    """
    with _wide(x):
        arrays = _arrays(x, scaling, key, tensor_scale)
        return round_blocks_op(x, *arrays, impl=impl, scaling=scaling, place=AT_START, tiling=tiling)


def quantize_blocks(
    x: Array,
    scaling: BlockScaling,
    key: Array | None = None,
    *,
    tensor_scale: Array | None = None,
    impl: str = "auto",
    tiling: ScaledTpuTiling | ScaledGpuTiling | None = None,
) -> tuple[Array, Array]:
    """`x` as packed codes and scales; arguments and errors as for `round_blocks`.

    Returns:
        ``(codes, scales)``. The codes are uint8, packed along the last axis: the k-bit code i of a row takes the bits
        [k i, k i + k) of the row's little-endian bit stream (low nibble first for 4 bits), and each row is padded to
        whole bytes. The scales have the shape of `x` with one for each block along the axis; they are float32,
        bfloat16, float16 or float64 where that is their format, else codes (uint8, uint16).

    Raises:
        ValueError: also for elements of more than 8 bits.

    Example:
        >>> import jax.numpy as jnp
        >>> from jchop.scaling import mx
        >>> codes, scales = quantize_blocks(jnp.array([1.0, 0.5, 8.0, -6.0]), mx("e2m1fn", block=2))
        >>> [hex(code) for code in codes.tolist()], scales.tolist()
        (['0x46', '0xd6'], [125, 128])
    """
    if scaling.element.format.bits > 8:
        raise ValueError(
            f"element={scaling.element} has codes of {scaling.element.format.bits} bits; at most 8 are stored"
        )
    with _wide(x):
        arrays = _arrays(x, scaling, key, tensor_scale)
        codes, scales = quantize_blocks_op(x, *arrays, impl=impl, scaling=scaling, place=AT_START, tiling=tiling)
        return codes, scales


def dequantize_blocks(
    codes: Array,
    scales: Array,
    scaling: BlockScaling,
    *,
    size: int | None = None,
    dtype: str = "float32",
    tensor_scale: Array | None = None,
) -> Array:
    """The numbers that `quantize_blocks` stored: what `round_blocks` gives, bit for bit.

    Args:
        codes: packed codes.
        scales: stored scales.
        scaling: as it was.
        size: length of the last axis, needed where its codes do not fill whole bytes. Default: as many as there are.
        dtype: of the result, that of the original; another one rounds scale times element to its own precision.
        tensor_scale: for "two_level", as it was.

    Raises:
        ValueError: for a size that does not fit the codes, scales of another shape, or "two_level" without
            `tensor_scale`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jchop.scaling import mx
        >>> codes, scales = jnp.array([0x46, 0xF6], jnp.uint8), jnp.array([125, 128], jnp.uint8)
        >>> dequantize_blocks(codes, scales, mx("e2m1fn", block=2)).tolist()
        [1.0, 0.5, 8.0, -12.0]
    """
    bits = scaling.element.format.bits
    size = codes.shape[-1] * 8 // bits if size is None else check_int("size", size, 0)
    shape = (*codes.shape[:-1], size)
    if packed_size(size, bits) != codes.shape[-1]:
        raise ValueError(f"size={size} codes of {bits} bits do not take {codes.shape[-1]} bytes")
    if scales.shape != scales_shape(scaling, shape):
        raise ValueError(
            f"scales has shape {scales.shape}; for {shape} and {scaling} it is {scales_shape(scaling, shape)}"
        )
    if scaling.rule == "two_level" and tensor_scale is None:
        raise ValueError("rule='two_level' needs the tensor_scale that the array was quantized under")
    arrays = () if tensor_scale is None else (tensor_scale,)
    with types_for(dtype):
        return dequantize_blocks_op(codes, scales, *arrays, scaling=scaling, size=size, dtype=dtype)


def fit_tensor_scale(x: Array, scaling: BlockScaling) -> Array:
    """The scale of a whole tensor for the rule "two_level", under which its blocks' scales have their whole range.

    The largest finite magnitude of `x` over the product of the largest scale and the largest element, as float32; 1
    where there is no finite number other than zero.

    Args:
        x: the tensor, of a carrier's dtype.
        scaling: with the rule "two_level".

    Example:
        >>> import jax.numpy as jnp
        >>> from jchop.scaling import nvfp4
        >>> float(fit_tensor_scale(jnp.array([0.5, -2688.0]), nvfp4()))
        1.0
    """
    with _wide(x):
        return _fit_tensor_scale(x, scaling=scaling)


@partial(compiled, static_argnames="scaling", inline=True)
def _fit_tensor_scale(x: Array, *, scaling: BlockScaling) -> Array:
    carrier = CARRIERS[x.dtype.name]
    return _scales.tensor_scale(widen(x, carrier), make_plan(scaling, carrier))


def _wide(x: Array) -> contextlib.AbstractContextManager:
    """64-bit data stays so, whatever the flag; what is no carrier is refused."""
    if x.dtype.name not in CARRIERS:
        raise TypeError(f"x has dtype {x.dtype}, which is no carrier; allowed: {', '.join(CARRIERS)}")
    return types_for(x.dtype)


def _arrays(x: Array, scaling: BlockScaling, key: Array | None, tensor_scale: Array | None) -> tuple[Array, ...]:
    """What an operation takes beside the array."""
    make_plan(scaling, CARRIERS[x.dtype.name])
    block_axis(scaling, x.ndim)
    tensor: tuple[Array, ...] = ()
    if scaling.rule == "two_level":
        tensor = (fit_tensor_scale(x, scaling) if tensor_scale is None else jnp.asarray(tensor_scale, jnp.float32),)
    elif tensor_scale is not None:
        raise ValueError(f"tensor_scale is for rule='two_level', not rule={scaling.rule!r}")
    if not scaling.element.rounding.stochastic:
        return tensor
    if key is None:
        raise ValueError(f"key=None, but element={str(scaling.element)!r} rounds stochastically: pass a typed key")
    return (*tensor, *seed_words(key))
