"""Rounding of elements as an operation; XLA's code moves no more bytes than a kernel would, and fuses with others."""

from __future__ import annotations

from typing import Any

import jax

from jchop._common.bit_ops import CARRIERS
from jchop._core.rounding.codebooks import refuse_table
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.random_bits import STREAM_START, StreamOffset, words_like
from jchop._kernels.primitive import Kernel, make_op
from jchop._kernels.tiles import kernel_function, refuse_tpu_dtype
from jchop._spec.spec import Spec

Array = jax.Array


def _round_elements(x: Array, *seeds_and_starts: Array, spec: Spec, place: StreamOffset = STREAM_START) -> Array:
    """`x` rounded under `spec`.

    Args:
        x: values of a carrier, any shape.
        seeds_and_starts: for the stochastic modes, the words of `seed_words`, then the traced starts of `place`.
        spec: a specification that the carrier holds.
        place: the position of `x` in the random stream.
    """
    return round_to_spec(
        x, spec, CARRIERS[x.dtype.name], words_like(x, seeds_and_starts, place) if seeds_and_starts else None
    )


def _refuse_hardware_bits(x: Any, *seeds_and_starts: Any, spec: Spec, place: StreamOffset = STREAM_START) -> str | None:
    if place.whole is not None:
        return "complex x has two random words for each element"
    return refuse_tpu_dtype("x", x.dtype) or refuse_table(spec.format)


round_op = make_op("jchop_round", _round_elements, like_first=True)
#: Rounding with bits of the TPU's own generator; the body only defines the type of the result.
round_with_hardware_bits_op = make_op(
    "jchop_round_with_hardware_bits",
    _round_elements,
    tpu=Kernel(kernel_function("round_tpu", "tpu_round_with_hardware_bits"), _refuse_hardware_bits),
)
