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

from jchop import _bits
from jchop._bits import CARRIERS
from jchop._core.arithmetic import subnormal_scaling
from jchop._core.arithmetic.basic import Range, range_of
from jchop._core.arithmetic.operations import draws, operation
from jchop._core.rounding.random_bits import SEEDS, flat_index, random_words
from jchop.spec import Spec

Array = jax.Array

__all__ = ["ELEMENTWISE", "Link", "chain_body", "gains", "is_in_safe_range", "try_chain", "words_of"]

#: The operations of a chain: a NaN in any operand gives NaN.
ELEMENTWISE = frozenset({"add", "sub", "mul", "square", "neg", "abs"})
_KEEPS_MAGNITUDE, _PRODUCTS = frozenset({"neg", "abs"}), frozenset({"mul", "square"})
#: An operation: its name, the indices of its operands among the arrays and the earlier results, the specs that hold the
#: operands, and the number of its rounding in the random stream.
Link = tuple[str, tuple[int, ...], tuple[Spec, ...], int]

_CARRIER = CARRIERS["float32"]
#: Operands are multiples of 2^_QUANTUM below 2^_TOP. Products are then multiples of 2^-126 below 2^111; larger numbers
#: could not be rounded by an addition. Checked numbers must be below 2^_SEEN.
_QUANTUM, _TOP, _SEEN = -63, 55, 45


def gains(spec: Spec) -> bool:
    """Whether trying makes a chain under a spec faster."""
    whole = range_of(spec, _CARRIER)
    return subnormal_scaling.adds(spec, _CARRIER) and subnormal_scaling.multiplies(spec, _CARRIER, whole, whole)


def is_in_safe_range(value: float, spec: Spec) -> bool:
    """Whether a rounded constant is in the range in which a try succeeds."""
    return value == 0 or 2.0 ** _least(spec) <= abs(value) < 2.0**_SEEN


def _least(spec: Spec) -> int:
    """The least e for which numbers of the spec's format from 2^e on are multiples of 2^_QUANTUM."""
    return _QUANTUM + range_of(spec, _CARRIER).precision - 1


def chain_body(*arrays: Array, links: tuple[Link, ...], shape: tuple[int, ...], result: int, spec: Spec) -> Array:
    """The result of a chain.

    Args:
        arrays: float32, of one shape, or 0-d; values of their specs, infinities or NaN. For a stochastic spec the six
            words of `seed_words` follow, and a uint32 that is added to the numbers of the operations.
        links: the operations in their order.
        shape: the shape of every result.
        result: the index of the chain's result among the arrays and the results of all operations.
        spec: the rounding of every result.
    """
    values, seeds = _parted(arrays, spec)
    for name, places, operand_specs, number in links:
        ranges = [range_of(operand_spec, _CARRIER) for operand_spec in operand_specs]
        word = words_of(seeds, shape, number) if seeds else None
        values.append(operation(name, [values[place] for place in places], spec, word, ranges=ranges))
    return values[result]


def words_of(seeds: Sequence[Array], shape: tuple[int, ...], number: int) -> Array:
    """The random words of operation `number`, given six seeds and a number that is added to it."""
    low, high = flat_index(shape)
    return random_words(seeds[:SEEDS], low, seeds[SEEDS] + jnp.uint32(number) + jnp.uint32(high))


def _parted(arrays: Sequence[Array], spec: Spec) -> tuple[list[Array], Sequence[Array]]:
    """The operands, and the words of the seeds, if there are any."""
    count = len(arrays) - (SEEDS + 1 if draws(spec) else 0)
    return list(arrays[:count]), arrays[count:]


def try_chain(*arrays: Array, links: tuple[Link, ...], shape: tuple[int, ...], result: int, spec: Spec) -> Array:
    """The result of `chain_body`, or NaN if an intermediate number was not moderate; it is never another number."""
    precision = range_of(spec, _CARRIER).precision
    values, seeds = _parted(arrays, spec)
    history = [_History(_SEEN, (x,), (x,)) for x in values]
    for name, places, _, number in links:
        word = words_of(seeds, shape, number) if seeds else None
        past = [history[place] for place in places]
        ranges = [Range(_QUANTUM, precision, each.top) for each in past]
        values.append(operation(name, [values[place] for place in places], spec, word, ranges=ranges))
        history.append(_after(name, past, values[-1]))
    return _where_in_safe_range(values[result], history[result], _least(spec))


@dataclass(frozen=True)
class _History:
    """The history of a number. It is below 2^top unless one of `small` is too small or one of `large` too large."""

    top: int
    small: tuple[Array, ...]
    large: tuple[Array, ...]


def _after(name: str, past: Sequence[_History], value: Array) -> _History:
    """The history of the result of an operation."""
    small, large = (_union(getattr(each, field) for each in past) for field in ("small", "large"))
    top = max(each.top for each in past)
    if name in _KEEPS_MAGNITUDE:
        return _History(top, small, large)
    if name in _PRODUCTS:
        return _History(_SEEN, (*small, value), (*large, value))
    return _History(top + 1, small, large) if top < _TOP else _History(_SEEN, small, (*large, value))


def _union(parts: Iterable[Sequence[Array]]) -> tuple[Array, ...]:
    return tuple({id(x): x for part in parts for x in part}.values())


def _where_in_safe_range(value: Array, history: _History, least: int) -> Array:
    low, high = (np.uint32((exponent + _CARRIER.bias) << _CARRIER.fraction) for exponent in (least, _SEEN))
    smallest, largest = np.uint32(0xFFFFFFFF), np.uint32(0)
    for x in history.small:
        smallest = jnp.minimum(smallest, _magnitude(x) - np.uint32(1))  # zero wraps to the largest of all
    for x in history.large:
        largest = jnp.maximum(largest, _magnitude(x))
    return _bits.where((smallest >= low - 1) & (largest < high), value, np.float32(np.nan))


def _magnitude(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(_bits.low_mask(31))
