"""Rounding to logarithmic takums, and their codes, by tables of magnitudes in binary64."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from jchop import _bits
from jchop._bits import Carrier
from jchop._core.rounding.bins import take
from jchop._core.rounding.codebooks import pick_level
from jchop._core.rounding.modes import threshold
from jchop.formats import LogTakumFormat
from jchop.formats._log_takum import log_takum_firsts, log_takum_levels
from jchop.rounding import Rounding

Array = jax.Array


def round_log(magnitude: Array, negative: Array, mode: Rounding, fmt: LogTakumFormat) -> Array:
    """|x| rounded by a deterministic mode, as magnitude bits of float64; no number but 0 becomes 0."""
    levels = _levels(fmt.bits)
    above, below = (_firsts(fmt.bits, mode, side) for side in (False, True))
    rounded = pick_level(magnitude, above, levels)
    if (above != below).any():
        rounded = jnp.where(negative, pick_level(magnitude, below, levels), rounded)
    return jnp.where(magnitude == 0, 0, rounded)


def encode_log(sign: Array, magnitude: Array, fmt: LogTakumFormat, carrier: Carrier) -> Array:
    """The codes of values of `fmt`, as integers of the carrier's work dtype."""
    levels = _levels(fmt.bits)
    code = pick_level(magnitude, levels[1:], np.arange(1, fmt.max_code + 1, dtype=levels.dtype))
    code = jnp.where(magnitude == 0, 0, jnp.where(magnitude > carrier.inf, -fmt.max_code - 1, code))
    return jnp.where((sign != 0) & (magnitude <= carrier.inf), -code, code) & _bits.low_mask(fmt.bits)


def decode_log(codes: Array, fmt: LogTakumFormat, carrier: Carrier) -> Array:
    """The values of codes in [0, 2^n), given in the work dtype of float64."""
    spare = carrier.work_width - fmt.bits
    count = codes << spare >> spare  # two's complement
    table = np.concatenate([np.zeros(1, carrier.work), _levels(fmt.bits), np.array([carrier.nan], carrier.work)])
    magnitude = take(jnp.asarray(table), jnp.abs(count))
    sign = jnp.where((count < 0) & (count > -fmt.max_code - 1), jnp.full_like(magnitude, carrier.sign_bit), 0)
    return _bits.join(sign, magnitude, carrier)


def _levels(bits: int) -> np.ndarray:
    return log_takum_levels(bits).view(np.int64)


@lru_cache(maxsize=64)
def _firsts(bits: int, mode: Rounding, negative: bool) -> np.ndarray:
    """For each code k from 1 on, the smallest magnitude bits that become k + 1.

    `threshold` has the point of the mode between neighbours at 0 and 1, or -1 and 0: a value, or the middle, for which
    the point between the strings stands here.
    """
    levels = _levels(bits)
    points = {0: levels[:-1] + 1, 1: levels[1:], Fraction(1, 2): log_takum_firsts(bits).view(np.int64)}

    def first(odd: int) -> np.ndarray:  # for codes k with this last bit
        low, index = (-1, 1 - odd) if negative else (0, odd)
        return points[abs(threshold(mode, index, Fraction(low), Fraction(low + 1))[0])]

    return np.where(np.arange(1, len(levels)) % 2 == 1, first(1), first(0))
