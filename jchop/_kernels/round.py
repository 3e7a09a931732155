"""Rounding of elements as an operation, with the body for XLA and the kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jchop._common.bit_ops import CARRIERS
from jchop._core.rounding.codebooks import refuse_table
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.random_bits import SEEDS, STREAM_START, StreamOffset, words_like
from jchop._kernels.primitive import Kernel, make_op
from jchop._spec.spec import Spec
from jchop.formats import LogTakumFormat

__all__ = ["round_op", "round_with_hardware_bits_op"]

Array = jax.Array


def round_elements_body(
    x: Array, *seeds_and_starts: Array, spec: Spec, place: StreamOffset = STREAM_START, tiling: Any = None
) -> Array:
    """`x` rounded under `spec`.

    Args:
        x: values of a carrier, any shape.
        seeds_and_starts: for the stochastic modes, the words of `seed_words`, then the traced starts of `place`.
        spec: a specification that the carrier holds.
        place: the position of `x` in the random stream.
        tiling: a tiling, used by kernels only.
    """
    del tiling
    return round_to_spec(
        x, spec, CARRIERS[x.dtype.name], words_like(x, seeds_and_starts, place) if seeds_and_starts else None
    )


def kernel_seeds_and_start(seeds_and_starts: tuple[Array, ...], place: StreamOffset) -> tuple[Array, ...]:
    """Seeds and start for the kernels, if any: one array each, the start as low and high word."""
    if not seeds_and_starts:
        return ()
    starts = seeds_and_starts[SEEDS:]
    low, high = starts[0] if starts else jnp.uint32(0), jnp.uint32(0)
    if low.dtype.itemsize == 8:
        high = (low >> 32).astype(jnp.uint32)
    low = low.astype(jnp.uint32)
    base = jnp.uint32(place.base & 0xFFFF_FFFF), jnp.uint32(place.base >> 32)
    total = low + base[0]
    carry = ((low & base[0]) | ((low | base[0]) & ~total)) >> 31
    return jnp.stack(seeds_and_starts[:SEEDS]), jnp.stack([total, high + base[1] + carry])


def _run_tpu_round(
    x: Array, *seeds_and_starts: Array, spec: Spec, place: StreamOffset = STREAM_START, tiling: Any = None
) -> Array:
    from jchop._kernels import round_tpu

    return round_tpu.tpu_round_elements(x, *kernel_seeds_and_start(seeds_and_starts, place), spec=spec, tiling=tiling)


def _run_gpu_round(
    x: Array, *seeds_and_starts: Array, spec: Spec, place: StreamOffset = STREAM_START, tiling: Any = None
) -> Array:
    from jchop._kernels import round_gpu

    return round_gpu.gpu_round_elements(x, *kernel_seeds_and_start(seeds_and_starts, place), spec=spec, tiling=tiling)


def _refuse_round(
    x: jax.ShapeDtypeStruct, *seeds_and_starts: Any, spec: Spec, place: StreamOffset = STREAM_START, tiling: Any = None
) -> str | None:
    if (reason := refuse_table(spec.format)) is not None:
        return reason
    if isinstance(spec.format, LogTakumFormat):
        return f"{spec.format} has values and points between them that are gathered from tables"
    if place.whole is not None:
        return "the random words of a tile of a larger array (offset of starts and shape, or complex x) have no kernel"
    if x.size >= 1 << 31:
        return f"x has {x.size} elements, and a kernel takes fewer than 2^31"
    return None


def _refuse_tpu_round(x: jax.ShapeDtypeStruct, *seeds_and_starts: Any, **static: Any) -> str | None:
    if x.dtype.name in _ROUND_DTYPES_NOT_ON_TPU:
        return f"x has dtype {x.dtype.name}, which TPU kernels do not take"
    return _refuse_round(x, *seeds_and_starts, **static)


#: Dtypes that the TPU's vector unit does not have.
_ROUND_DTYPES_NOT_ON_TPU = {"float16", "float64"}


def _never_profitable(*_: Any, **__: Any) -> bool:
    """The kernel is never preferred: XLA also reads and writes each element once, and fuses with other operations."""
    return False


round_op = make_op(
    "jchop_round",
    round_elements_body,
    tpu=Kernel(_run_tpu_round, _refuse_tpu_round, _never_profitable),
    gpu=Kernel(_run_gpu_round, _refuse_round, _never_profitable),
    like_first=True,
)


def _run_hardware_round(
    x: Array, *seeds_and_starts: Array, spec: Spec, place: StreamOffset = STREAM_START, tiling: Any = None
) -> Array:
    from jchop._kernels import round_tpu

    return round_tpu.tpu_round_with_hardware_bits(x, jnp.stack(seeds_and_starts[:SEEDS]), spec=spec, tiling=tiling)


#: Rounding with bits of the TPU's own generator; the body only defines the type of the result.
round_with_hardware_bits_op = make_op(
    "jchop_round_with_hardware_bits", round_elements_body, tpu=Kernel(_run_hardware_round, _refuse_tpu_round)
)
