"""Rounding of elements as an operation: the body of XLA and the kernels, and which of them runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jchop._bits import CARRIERS
from jchop._core.rounding.codebooks import COMPARE_ALL
from jchop._core.rounding.elements import round_elements
from jchop._core.rounding.random_bits import SEEDS
from jchop._core.rounding.stream_offset import AT_START, StreamOffset, words_like
from jchop._kernels.primitive import Kernel, make_op
from jchop.formats import CodebookFormat
from jchop.spec import Spec

__all__ = ["round_op", "round_with_hardware_bits_op"]

Array = jax.Array


def body(x: Array, *drawn: Array, spec: Spec, place: StreamOffset = AT_START, tiling: Any = None) -> Array:
    """`x` rounded under `spec`.

    Args:
        x: values of a carrier, any shape.
        drawn: for the stochastic modes, the words of `seed_words`, then the traced starts that `place` leaves open.
        spec: a specification that the carrier holds.
        place: where `x` lies in the random stream.
        tiling: a `RoundTiling`, for the kernels alone.
    """
    del tiling
    return round_elements(x, spec, CARRIERS[x.dtype.name], words_like(x, drawn, place) if drawn else None)


def chunk_arguments(drawn: tuple[Array, ...], place: StreamOffset) -> tuple[Array, ...]:
    """Seeds and start as the kernels take them, if any: an array each, the start as low and high word."""
    if not drawn:
        return ()
    starts = drawn[SEEDS:]
    low, high = starts[0] if starts else jnp.uint32(0), jnp.uint32(0)
    if low.dtype.itemsize == 8:
        high = (low >> 32).astype(jnp.uint32)
    low = low.astype(jnp.uint32)
    base = jnp.uint32(place.base & 0xFFFF_FFFF), jnp.uint32(place.base >> 32)
    total = low + base[0]
    carry = ((low & base[0]) | ((low | base[0]) & ~total)) >> 31
    return jnp.stack(drawn[:SEEDS]), jnp.stack([total, high + base[1] + carry])


def _tpu(x: Array, *drawn: Array, spec: Spec, place: StreamOffset = AT_START, tiling: Any = None) -> Array:
    from jchop._kernels import round_tpu

    return round_tpu.round_elements(x, *chunk_arguments(drawn, place), spec=spec, tiling=tiling)


def _gpu(x: Array, *drawn: Array, spec: Spec, place: StreamOffset = AT_START, tiling: Any = None) -> Array:
    from jchop._kernels import round_gpu

    return round_gpu.round_elements(x, *chunk_arguments(drawn, place), spec=spec, tiling=tiling)


def _refuse(
    x: jax.ShapeDtypeStruct, *drawn: Any, spec: Spec, place: StreamOffset = AT_START, tiling: Any = None
) -> str | None:
    if isinstance(spec.format, CodebookFormat) and len(spec.format.levels) > COMPARE_ALL:
        return f"{spec.format} has more than {COMPARE_ALL} levels, which are gathered from a table"
    if place.whole is not None:
        return "the random words of a tile of a larger array (offset of starts and shape, or complex x) have no kernel"
    if x.size >= 1 << 31:
        return f"x has {x.size} elements, and a kernel takes fewer than 2^31"
    return None


def _refuse_tpu(x: jax.ShapeDtypeStruct, *drawn: Any, **static: Any) -> str | None:
    if x.dtype.name in _NOT_ON_TPU:
        return f"x has dtype {x.dtype.name}, which TPU kernels do not take"
    return _refuse(x, *drawn, **static)


#: The TPU's vector unit has neither float16 nor 64-bit numbers.
_NOT_ON_TPU = {"float16", "float64"}


def _not_by_itself(*_: Any, **__: Any) -> bool:
    """XLA reads and writes each element once, as the kernel does, and fuses with what stands around."""
    return False


round_op = make_op(
    "jchop_round",
    body,
    tpu=Kernel(_tpu, _refuse_tpu, _not_by_itself),
    gpu=Kernel(_gpu, _refuse, _not_by_itself),
    like_first=True,
)


def _hardware(x: Array, *drawn: Array, spec: Spec, place: StreamOffset = AT_START, tiling: Any = None) -> Array:
    from jchop._kernels import round_tpu

    return round_tpu.round_with_hardware_bits(x, jnp.stack(drawn[:SEEDS]), spec=spec, tiling=tiling)


#: Rounding with bits of the TPU's own generator; it has a body only so that its result has a type.
round_with_hardware_bits_op = make_op("jchop_round_with_hardware_bits", body, tpu=Kernel(_hardware, _refuse_tpu))
