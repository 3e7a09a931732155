"""The elements of a stored array that lie at the ends of their format, and those that were clipped there."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jchop.formats import ElementFormat
from jchop.storage._codes import dense_codes, load_codes, pack_entries, store_codes, unpack_entries
from jchop.storage._decode import decode_qarray

__all__ = ["clip_mask", "codes_at_ends"]

#: The widest codes whose values are listed.
_MOST_TABLE_BITS = 16


@lru_cache(maxsize=32)
def _range_end_codes(fmt: ElementFormat) -> tuple[np.ndarray, np.ndarray] | None:
    """For each code: whether its value is the largest or the lowest, or infinite; and the code of the value next to it.

    Other codes are next to themselves. A lowest value of zero does not count. None for codes of more than 16 bits, and
    for values that binary64 does not hold.
    """
    if fmt.bits > _MOST_TABLE_BITS:
        return None
    codes = np.arange(1 << fmt.bits)
    table, values = fmt.decode(codes), fmt.values()
    if table.dtype == object or values.size < 2:
        return None
    at_end, nearer = np.isinf(table), codes.copy()
    for end, inner in ((values[-1], values[-2]), *([(values[0], values[1])] if values[0] < 0 else [])):
        at_end |= table == end
        nearer[table == end] = codes[table == inner][0]
    return at_end, nearer


def codes_at_ends(q: Any) -> np.ndarray | None:
    """Whether each code of a `QArray` is that of the largest or the lowest value of its format, or an infinity.

    None if the codes have more than 16 bits.
    """
    ends = _range_end_codes(q.spec.element)
    return None if ends is None else ends[0][_unsigned_codes(q)] & _sparse_mask(q)


def _unsigned_codes(q: Any) -> np.ndarray:
    """The codes, one unsigned integer for each element, in the shape of the array."""
    fmt = q.spec.element
    count = 1 if q.length is None else q.length
    codes = q.qvalue if q.places is None else dense_codes(q.qvalue, q.places, count, q.spec)[0]
    return unpack_entries(load_codes(np.asarray(codes), fmt), fmt, count).reshape(q.shape)


def _sparse_mask(q: Any) -> Any:
    """Which numbers have codes; True for all."""
    return True if q.places is None else np.asarray(dense_codes(q.qvalue, q.places, q.length, q.spec)[1])


def clip_mask(q: Any, x: np.ndarray) -> np.ndarray | None:
    """Whether each number of `x` lay so far beyond the range of its code that a longer range would have kept it better.

    That is: it is stored as the largest or the lowest value, and lies beyond it by more than half the distance to the
    value next to it. None if the codes have more than 16 bits.

    Args:
        q: a `QArray`.
        x: float64, in its shape: the numbers that it stores. Of one that is not finite the result has no meaning.
    """
    fmt = q.spec.element
    ends = _range_end_codes(fmt)
    if ends is None:
        return None
    entries = _unsigned_codes(q)
    inner = ends[1][entries].astype(entries.dtype)
    codes = inner.reshape(1) if q.length is None else inner
    inner_qvalue = store_codes(pack_entries(codes, fmt), fmt)
    with jax.enable_x64(True):
        form = q.form(np.float64)
        y = np.asarray(decode_qarray(form, q.qvalue, q.scale, q.zero_point, q.places))
        nearer = np.asarray(decode_qarray(form, inner_qvalue, q.scale, q.zero_point))
    with np.errstate(invalid="ignore"):
        beyond = (x - y) * np.sign(y - nearer)
        return _sparse_mask(q) & (beyond > np.abs(y - nearer) / 2)  # of a code at no end, y is `nearer`
