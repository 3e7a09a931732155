"""e^(l/2) for the l of takum strings of up to 33 bits, rounded once to binary64, by integer arithmetic.

The power is the product of four numbers from tables, of the exponent of l and of three parts of its fraction. Each is
known to 128 bits after the point, and so is the product, but for its last few bits. Of 2^32 powers none is expected
within 2^-120 of a binary64 number or of a point between two, where those bits would matter.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import FLOAT64
from jchop._core.rounding.bins import take_in_bounds
from jchop._core.rounding.tapered import takum_exponent
from jchop.formats._log_takum import POWER_BITS, sqrt_e_power

Array = jax.Array

#: Limbs of 32 bits: one before the point, four after it.
_TAKUM_LIMBS, _TAKUM_LIMB_BITS = 5, 32
_TAKUM_LIMB_MASK = np.uint64((1 << _TAKUM_LIMB_BITS) - 1)
#: The least exponent of l, and the bits of its fraction in three parts, the last of which is a string's 28th.
_LEAST_TAKUM_EXPONENT, _FRACTION_PARTS = -255, (10, 9, 9)


def takum_power(string: Array, bits: int, *, above: bool = False) -> Array:
    """Magnitude bits of the binary64 number nearest to the power of a positive string, or of the next one above it.

    Args:
        string: integers of int64, 1 to 2^(bits - 1) - 1.
        bits: of the whole string, with its sign; at most 33.
        above: whether the number is the smallest one above the power.
    """
    string = lax.optimization_barrier(string)  # XLA would compute it, and every limb, again for each use
    exponent, fraction_bits = takum_exponent(string, bits)
    fraction = (string & (jnp.ones_like(string) << fraction_bits) - 1) << (sum(_FRACTION_PARTS) - fraction_bits)
    wholes, shifts, *parts = _takum_power_tables()
    limbs = _limbs_from_table(wholes, exponent - _LEAST_TAKUM_EXPONENT)
    place = sum(_FRACTION_PARTS)
    for table, size in zip(parts, _FRACTION_PARTS, strict=True):
        place -= size
        limbs = lax.optimization_barrier(
            _multiply_takum_limbs(limbs, _limbs_from_table(table, fraction >> place & (1 << size) - 1))
        )
    lead = (limbs[0] >> 1).astype(jnp.int64)  # the power is 1 to 4 times 2^shift
    # 53 bits and one more. No power is a binary64 number or lies between two, so that bit decides.
    head = limbs[0] << 53 | limbs[1] << 21 | limbs[2] >> 11
    head = (head >> lead.astype(jnp.uint64)).astype(jnp.int64)
    significand = (head >> 1) + 1 if above else (head + 1) >> 1
    bias = FLOAT64.bias - 1  # the leading bit of the significand counts one, too
    magnitude = (
        (take_in_bounds(jnp.asarray(shifts), exponent - _LEAST_TAKUM_EXPONENT) + lead + bias) << FLOAT64.fraction
    ) + significand
    one = jnp.full_like(magnitude, FLOAT64.bias << FLOAT64.fraction)  # the one power that is a number
    return lax.optimization_barrier(bit_ops.lax_where((exponent == 0) & (fraction == 0), one + above, magnitude))


def _limbs_from_table(table: np.ndarray, index: Array) -> list[Array]:
    return [take_in_bounds(jnp.asarray(column), index) for column in table]


def _multiply_takum_limbs(a: list[Array], b: list[Array]) -> list[Array]:
    """The product of two numbers, cut after its last limb; the columns after that but one are left out."""
    low = [jnp.zeros_like(a[0]) for _ in range(_TAKUM_LIMBS + 2)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            if i + j <= _TAKUM_LIMBS:
                term = x * y
                low[i + j] += term & _TAKUM_LIMB_MASK
                if i + j:
                    low[i + j - 1] += term >> _TAKUM_LIMB_BITS
    carry = low[_TAKUM_LIMBS] >> _TAKUM_LIMB_BITS
    out: list[Array] = []
    for column in reversed(low[:_TAKUM_LIMBS]):
        total = column + carry
        out.append(total & _TAKUM_LIMB_MASK)
        carry = total >> _TAKUM_LIMB_BITS
    return out[::-1]


@lru_cache(maxsize=1)
def _takum_power_tables() -> tuple[np.ndarray, ...]:
    """The limbs of e^(c/2) over a power of two, the exponents of those, and the limbs of e^(f/2) of each part f."""
    places = _TAKUM_LIMB_BITS * (_TAKUM_LIMBS - 1)
    wholes = _successive_powers(Fraction(_LEAST_TAKUM_EXPONENT), Fraction(1), -2 * _LEAST_TAKUM_EXPONENT)
    shifts = [whole.bit_length() - 1 - POWER_BITS for whole in wholes]
    scaled_wholes = [whole >> (POWER_BITS + shift - places) for whole, shift in zip(wholes, shifts, strict=True)]
    parts, place = [], 1
    for size in _FRACTION_PARTS:
        place <<= size
        steps = _successive_powers(Fraction(0), Fraction(1, place), 1 << size)
        parts.append(_columns_of_limbs([step >> (POWER_BITS - places) for step in steps]))
    return _columns_of_limbs(scaled_wholes), np.array(shifts, np.int64), *parts


def _successive_powers(start: Fraction, step: Fraction, count: int) -> list[int]:
    """e^(l/2) 2^UNIT for l = start, start + step ..., to 300 bits and more."""
    powers, factor = [sqrt_e_power(start)], sqrt_e_power(step)
    for _ in range(count - 1):
        powers.append(powers[-1] * factor >> POWER_BITS)
    return powers


def _columns_of_limbs(values: list[int]) -> np.ndarray:
    """Numbers as columns of limbs, the highest first."""
    limbs = [
        [value >> _TAKUM_LIMB_BITS * i & int(_TAKUM_LIMB_MASK) for value in values]
        for i in reversed(range(_TAKUM_LIMBS))
    ]
    return np.array(limbs, np.uint64)
