"""Chains of elementwise operations, each result rounded once: in full, or tried as if all numbers were moderate.

Formats with the carrier's own exponents share its subnormal numbers, which cause most of the cost of an operation. So a
chain may be tried without them. If every operand is a multiple of 2^_OPERAND_QUANTUM below 2^_OPERAND_TOP, no sum or
product is subnormal or too large, and the ways of `arithmetic` for this narrower range give the same bits. The operands
of the chain and the products are checked. A sum needs no check: it is no finer than its terms, and at most twice as
large. The tried result is NaN if a number in its history was out of this range.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT32
from jchop._core.arithmetic import hardware
from jchop._core.arithmetic.ranges import ValueRange, range_of
from jchop._core.matmul.operations import round_operation, spec_draws
from jchop._core.rounding.random_bits import SEEDS, flat_index, random_words
from jchop._spec.spec import Spec

Array = jax.Array


#: The operations of a chain: a NaN in any operand gives NaN.
CHAIN_OPERATIONS = frozenset({"add", "sub", "mul", "square", "neg", "abs"})
_KEEPS_MAGNITUDE, _CHAIN_PRODUCTS = frozenset({"neg", "abs"}), frozenset({"mul", "square"})
#: An operation: its name, the indices of its operands among the arrays and the earlier results, the specs that hold the
#: operands, and the number of its rounding in the random stream.
ChainLink = tuple[str, tuple[int, ...], tuple[Spec, ...], int]

#: Operands are multiples of 2^_QUANTUM below 2^_TOP. Products are then multiples of 2^-126 below 2^111; larger numbers
#: could not be rounded by an addition. Checked numbers must be below 2^_SEEN.
_OPERAND_QUANTUM, _OPERAND_TOP, _CHECK_TOP = -63, 55, 45


def gains_by_trial(spec: Spec) -> bool:
    """Whether trying makes a chain under a spec faster."""
    format_range = range_of(spec, FLOAT32)
    return hardware.supports_scaling_sum(spec, FLOAT32) and hardware.supports_scaling_product(
        spec, FLOAT32, format_range, format_range
    )


def is_constant_in_safe_range(value: float, spec: Spec) -> bool:
    """Whether a rounded constant is in the range in which a try succeeds."""
    return value == 0 or 2.0 ** _least_safe_exponent(spec) <= abs(value) < 2.0**_CHECK_TOP


def _least_safe_exponent(spec: Spec) -> int:
    """The least e for which numbers of the spec's format from 2^e on are multiples of 2^_QUANTUM."""
    return _OPERAND_QUANTUM + range_of(spec, FLOAT32).precision - 1


def chain_body(*arrays: Array, links: tuple[ChainLink, ...], shape: tuple[int, ...], result: int, spec: Spec) -> Array:
    """The result of a chain.

    Args:
        arrays: float32, of one shape, or 0-d; values of their specs, infinities or NaN. For a stochastic spec the six
            words of `seed_words` follow, and a uint32 that is added to the numbers of the operations.
        links: the operations in their order.
        shape: the shape of every result.
        result: the index of the chain's result among the arrays and the results of all operations.
        spec: the rounding of every result.
    """
    values, seeds = _split_arrays(arrays, spec)
    for name, indices, operand_specs, number in links:
        ranges = [range_of(operand_spec, FLOAT32) for operand_spec in operand_specs]
        word = chain_words(seeds, shape, number) if seeds else None
        values.append(round_operation(name, [values[index] for index in indices], spec, word, ranges=ranges))
    return values[result]


def chain_words(seeds: Sequence[Array], shape: tuple[int, ...], number: int) -> Array:
    """The random words of operation `number`, given six seeds and a number that is added to it."""
    low, high = flat_index(shape)
    return random_words(seeds[:SEEDS], low, seeds[SEEDS] + jnp.uint32(number) + jnp.uint32(high))


def _split_arrays(arrays: Sequence[Array], spec: Spec) -> tuple[list[Array], Sequence[Array]]:
    """The operands, and the words of the seeds, if there are any."""
    count = len(arrays) - (SEEDS + 1 if spec_draws(spec) else 0)
    return list(arrays[:count]), arrays[count:]


def try_chain(*arrays: Array, links: tuple[ChainLink, ...], shape: tuple[int, ...], result: int, spec: Spec) -> Array:
    """The result of `chain_body`, or NaN if an intermediate number was not moderate; it is never another number."""
    precision = range_of(spec, FLOAT32).precision
    values, seeds = _split_arrays(arrays, spec)
    history = [_NumberHistory(_CHECK_TOP, (x,), (x,)) for x in values]
    for name, indices, _, number in links:
        word = chain_words(seeds, shape, number) if seeds else None
        operand_histories = [history[index] for index in indices]
        ranges = [ValueRange(_OPERAND_QUANTUM, precision, operand.top) for operand in operand_histories]
        values.append(round_operation(name, [values[index] for index in indices], spec, word, ranges=ranges))
        history.append(_history_of_result(name, operand_histories, values[-1]))
    return _nan_outside_safe_range(values[result], history[result], _least_safe_exponent(spec))


@dataclass(frozen=True)
class _NumberHistory:
    """The history of a number. It is below 2^top unless one of `small` is too small or one of `large` too large."""

    top: int
    small: tuple[Array, ...]
    large: tuple[Array, ...]


def _history_of_result(name: str, past: Sequence[_NumberHistory], value: Array) -> _NumberHistory:
    """The history of the result of an operation."""
    small, large = (_distinct_arrays(getattr(each, field) for each in past) for field in ("small", "large"))
    top = max(each.top for each in past)
    if name in _KEEPS_MAGNITUDE:
        return _NumberHistory(top, small, large)
    if name in _CHAIN_PRODUCTS:
        return _NumberHistory(_CHECK_TOP, (*small, value), (*large, value))
    return (
        _NumberHistory(top + 1, small, large)
        if top < _OPERAND_TOP
        else _NumberHistory(_CHECK_TOP, small, (*large, value))
    )


def _distinct_arrays(parts: Iterable[Sequence[Array]]) -> tuple[Array, ...]:
    return tuple({id(x): x for part in parts for x in part}.values())


def _nan_outside_safe_range(value: Array, history: _NumberHistory, least: int) -> Array:
    low, high = (np.uint32((exponent + FLOAT32.bias) << FLOAT32.fraction) for exponent in (least, _CHECK_TOP))
    smallest, largest = np.uint32(0xFFFFFFFF), np.uint32(0)
    for x in history.small:
        smallest = jnp.minimum(smallest, _magnitude_word(x) - np.uint32(1))  # zero wraps to the largest of all
    for x in history.large:
        largest = jnp.maximum(largest, _magnitude_word(x))
    return bit_ops.lax_where((smallest >= low - 1) & (largest < high), value, np.float32(np.nan))


def _magnitude_word(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(bit_ops.low_mask(31))
