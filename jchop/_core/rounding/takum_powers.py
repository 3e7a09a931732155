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

from jchop import _bits
from jchop._bits import CARRIERS
from jchop._core.rounding.bins import take
from jchop._core.rounding.tapered import takum_exponent
from jchop.formats._log_takum import UNIT, power

Array = jax.Array

_CARRIER = CARRIERS["float64"]
#: Limbs of 32 bits: one before the point, four after it.
_LIMBS, _LIMB = 5, 32
_MASK = np.uint64((1 << _LIMB) - 1)
#: The least exponent of l, and the bits of its fraction in three parts, the last of which is a string's 28th.
_LEAST, _PARTS = -255, (10, 9, 9)


def power_of_string(string: Array, bits: int, *, above: bool = False) -> Array:
    """Magnitude bits of the binary64 number nearest to the power of a positive string, or of the next one above it.

    Args:
        string: integers of int64, 1 to 2^(bits - 1) - 1.
        bits: of the whole string, with its sign; at most 33.
        above: whether the number is the smallest one above the power.
    """
    string = lax.optimization_barrier(string)  # XLA would compute it, and every limb, again for each use
    exponent, fraction_bits = takum_exponent(string, bits)
    fraction = (string & (jnp.ones_like(string) << fraction_bits) - 1) << (sum(_PARTS) - fraction_bits)
    wholes, shifts, *parts = _tables()
    limbs = _limbs(wholes, exponent - _LEAST)
    place = sum(_PARTS)
    for table, size in zip(parts, _PARTS, strict=True):
        place -= size
        limbs = lax.optimization_barrier(_product(limbs, _limbs(table, fraction >> place & (1 << size) - 1)))
    lead = (limbs[0] >> 1).astype(jnp.int64)  # the power is 1 to 4 times 2^shift
    # 53 bits and one more. No power is a binary64 number or lies between two, so that bit decides.
    head = limbs[0] << 53 | limbs[1] << 21 | limbs[2] >> 11
    head = (head >> lead.astype(jnp.uint64)).astype(jnp.int64)
    significand = (head >> 1) + 1 if above else (head + 1) >> 1
    bias = _CARRIER.bias - 1  # the leading bit of the significand counts one, too
    magnitude = ((take(jnp.asarray(shifts), exponent - _LEAST) + lead + bias) << _CARRIER.fraction) + significand
    one = jnp.full_like(magnitude, _CARRIER.bias << _CARRIER.fraction)  # the one power that is a number
    return lax.optimization_barrier(_bits.where((exponent == 0) & (fraction == 0), one + above, magnitude))


def _limbs(table: np.ndarray, index: Array) -> list[Array]:
    return [take(jnp.asarray(column), index) for column in table]


def _product(a: list[Array], b: list[Array]) -> list[Array]:
    """The product of two numbers, cut after its last limb; the columns after that but one are left out."""
    low = [jnp.zeros_like(a[0]) for _ in range(_LIMBS + 2)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            if i + j <= _LIMBS:
                term = x * y
                low[i + j] += term & _MASK
                if i + j:
                    low[i + j - 1] += term >> _LIMB
    carry = low[_LIMBS] >> _LIMB
    out: list[Array] = []
    for column in reversed(low[:_LIMBS]):
        total = column + carry
        out.append(total & _MASK)
        carry = total >> _LIMB
    return out[::-1]


@lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, ...]:
    """The limbs of e^(c/2) over a power of two, the exponents of those, and the limbs of e^(f/2) of each part f."""
    places = _LIMB * (_LIMBS - 1)
    wholes = _ladder(Fraction(_LEAST), Fraction(1), -2 * _LEAST)
    shifts = [whole.bit_length() - 1 - UNIT for whole in wholes]
    scaled_wholes = [whole >> (UNIT + shift - places) for whole, shift in zip(wholes, shifts, strict=True)]
    parts, place = [], 1
    for size in _PARTS:
        place <<= size
        steps = _ladder(Fraction(0), Fraction(1, place), 1 << size)
        parts.append(_columns([step >> (UNIT - places) for step in steps]))
    return _columns(scaled_wholes), np.array(shifts, np.int64), *parts


def _ladder(start: Fraction, step: Fraction, count: int) -> list[int]:
    """e^(l/2) 2^UNIT for l = start, start + step ..., to 300 bits and more."""
    powers, factor = [power(start)], power(step)
    for _ in range(count - 1):
        powers.append(powers[-1] * factor >> UNIT)
    return powers


def _columns(values: list[int]) -> np.ndarray:
    """Numbers as columns of limbs, the highest first."""
    limbs = [[value >> _LIMB * i & int(_MASK) for value in values] for i in reversed(range(_LIMBS))]
    return np.array(limbs, np.uint64)
