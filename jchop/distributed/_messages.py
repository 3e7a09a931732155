"""Messages: arrays that travel as codes and scales; and sums of the numbers that arrive, in the order of ranks."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._core.matmul.operations import check_matmul, operation_carrier, spec_draws
from jchop._core.matmul.sums import sum_along
from jchop._core.rounding.random_bits import seed_words
from jchop._kernels.products.matmul import matmul_op
from jchop._round.round_to_format import round_to_format
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop.storage import QArray, dequantize, quantize

Array = jax.Array
_MAX_MESSAGE_DRAWS = 1 << 32


class Phase(enum.IntEnum):
    """The part of a collective that draws; a number of the definition in docs/distributed.md."""

    SEND = 0
    SUM = 1
    GATHER = 2
    BACKWARD = 3


def fold_in_numbers(key: Array | None, *numbers: Any) -> Array | None:
    """The key with numbers folded in, one after the other."""
    for number in numbers:
        key = None if key is None else jax.random.fold_in(key, number)
    return key


# -- codes -------------------------------------------------------------------------------------------------------------


def encode_messages(messages: Array, spec: Spec, key: Array | None, indexes: Any) -> QArray:
    """Each of the arrays along the first axis, quantized by itself.

    Element j of the message with place p draws the word at index ``p size + j``.

    Args:
        messages: (k, ...).
        spec: of the codes.
        key: the key, if `spec` draws.
        indexes: k integers: the number of each message among all messages of the collective.
    """
    if not spec_draws(spec):
        return jax.vmap(lambda message: quantize(message, spec))(messages)
    size = math.prod(messages.shape[1:])
    starts = jnp.asarray(indexes, jnp.uint32) * jnp.uint32(size)
    return jax.vmap(lambda message, start: quantize(message, spec, key, offset=start))(messages, starts)


def check_draw_count(spec: Spec, count: int, size: int) -> None:
    """Refuses random words beyond index 2^32, for which starts would need 64 bits."""
    if spec_draws(spec) and count * size >= _MAX_MESSAGE_DRAWS:
        raise ValueError(f"x has {count * size} numbers on the wire, and a stochastic spec draws for fewer than 2^32; "
                         "pass a part of x at a time")  # fmt: skip


def move_leaves(q: Any, function: Callable[[Array], Array]) -> Any:
    """The leaves of a QArray, or of another tree, each moved in the same way.

    Short floats move as integers of the same bits: XLA's CPU backend would move them as float32.
    """
    return jax.tree.map(lambda leaf: _move_as_bits(leaf, function), q)


def _move_as_bits(leaf: Array, function: Callable[[Array], Array]) -> Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize > 2:
        return function(leaf)
    bits = lax.bitcast_convert_type(leaf, jnp.dtype(f"u{leaf.dtype.itemsize}"))
    return lax.bitcast_convert_type(function(bits), leaf.dtype)


def decode_messages(q: QArray, dtype: Any) -> Array:
    """The numbers of messages that arrived. The barrier keeps products with scales out of the sums that follow."""
    return lax.optimization_barrier(dequantize(q, dtype))


# -- sums --------------------------------------------------------------------------------------------------------------


def sum_arithmetic(value: Any, dtypes: Any) -> MatmulSpec | None:
    """The arithmetic of sums over ranks: None for the carrier.

    Raises:
        TypeError, ValueError: for a product, or an accumulator that numbers of `dtypes` do not allow.
    """
    if value is None:
        return None
    spec = value if isinstance(value, MatmulSpec) else MatmulSpec(accumulate=value)
    if spec.product is not None or spec.fused:
        raise ValueError(f"accumulate={str(spec)!r}: a sum has no products; leave product=None and fused=False")
    for dtype in dtypes:
        check_matmul(spec, operation_carrier(dtype).name)
    return spec


def sum_in_rank_order(messages: Array, accumulate: MatmulSpec | None, key: Array | None, indexes: Array) -> Array:
    """The sum over the first axis, rank 0 first.

    Args:
        messages: (ranks, k, ...), float32 or float64.
        accumulate: the arithmetic. None: c <- c + x_r in the dtype, from the numbers of rank 0.
        key: the key, if `accumulate` draws.
        indexes: k integers, the number of each sum.
    """
    if accumulate is None:
        return lax.scan(lambda c, x: (c + x, None), messages[0], messages[1:])[0]

    def sum_rows(rows: Array, index: Array) -> Array:
        row_key = fold_in_numbers(key, index)
        if accumulate.operands is not None:
            rows = round_to_format(rows, accumulate.operands, fold_in_numbers(row_key, 0))
        sum_key = fold_in_numbers(row_key, 1) if spec_draws(accumulate.accumulate) else None
        seeds = None if sum_key is None else jnp.stack([*seed_words(sum_key)] * 2)
        return sum_along(rows, 0, accumulate, seeds, matmul=matmul_op)

    return jax.vmap(sum_rows, in_axes=(1, 0))(messages, jnp.asarray(indexes, jnp.uint32))
