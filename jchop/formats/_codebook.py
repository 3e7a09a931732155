"""Codebooks: sorted tables of levels, and the published ones."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

import numpy as np

from jchop.formats._base import ElementFormat, Number

_MAX_LEVELS = 1 << 16


@dataclass(frozen=True, repr=False)
class CodebookFormat(ElementFormat):
    """A table of levels, each coded by its index. There is no -0, inf or NaN.

    Rounding to nearest returns the larger index on a tie (`NEAREST_EVEN`, the default). `NEAREST_AWAY` returns the
    larger magnitude, `NEAREST_ZERO` the smaller magnitude, and `ODD` the neighbour of odd index. Values beyond the ends
    saturate.

    Args:
        levels: strictly increasing finite numbers, 1 to 65,536 of them. A carrier that cannot hold every level is
            refused.

    Raises:
        TypeError, ValueError: for levels that are not finite numbers in strictly increasing order.

    Example:
        >>> import jchop as jc
        >>> ternary = jc.formats.CodebookFormat((-1.0, 0.0, 1.0))
        >>> jc.round_to_format([0.4, 0.5, -3.0], ternary).tolist()
        [0.0, 1.0, -1.0]
    """

    levels: tuple[float, ...]

    def __post_init__(self) -> None:
        if isinstance(self.levels, str):
            raise TypeError(f"levels={self.levels!r} must be a sequence of numbers, not text")
        try:
            levels = tuple(float(level) + 0.0 for level in self.levels)
        except (TypeError, ValueError):
            raise TypeError(f"levels={self.levels!r} must be a sequence of numbers") from None
        except OverflowError:
            raise ValueError(f"levels={self.levels!r} must be finite in binary64") from None
        if not 1 <= len(levels) <= _MAX_LEVELS:
            raise ValueError(f"levels has {len(levels)} entries; allowed: 1 to {_MAX_LEVELS}")
        if not all(map(math.isfinite, levels)):
            raise ValueError(f"levels={levels!r} must be finite")
        for original, level in zip(self.levels, levels, strict=True):
            if original != level:
                raise ValueError(f"levels holds {original!r}, which binary64 cannot hold exactly; give a float")
        if any(low >= high for low, high in itertools.pairwise(levels)):
            raise ValueError(f"levels={levels!r} must be strictly increasing")
        object.__setattr__(self, "levels", levels)

    @property
    def bits(self) -> int:
        """Width of an index in bits."""
        return max(1, (len(self.levels) - 1).bit_length())

    @property
    def signed(self) -> bool:
        """Whether a level is negative."""
        return self.levels[0] < 0

    @property
    def max(self) -> Number:
        """Largest level."""
        return self.levels[-1]

    @property
    def min(self) -> Number:
        """Smallest level."""
        return self.levels[0]

    @property
    def smallest(self) -> Number | None:
        """Smallest positive level; None if there is none."""
        return next((level for level in self.levels if level > 0), None)

    def value_of(self, code: int) -> Number | None:
        """The level of one index; None past the end of the table."""
        return self.levels[code] if code < len(self.levels) else None

    def code_of(self, value: Number) -> int | None:
        """The index of one level; None if `value` is not a level."""
        index = bisect.bisect_left(self.levels, value) if value == value else len(self.levels)
        return index if index < len(self.levels) and self.levels[index] == value else None

    @property
    def text(self) -> str:
        """The format in the text grammar, as ``codebook(-1.0,0.0,1.0)``."""
        return f"codebook({','.join(map(repr, self.levels))})"


def nf4_levels() -> CodebookFormat:
    """NormalFloat: quantiles of N(0, 1), scaled to [-1, 1] (Dettmers et al., arXiv 2305.14314, appendix E)."""
    negative = (
        1.0, 0.6961928009986877, 0.5250730514526367, 0.39491748809814453, 0.28444138169288635,
        0.18477343022823334, 0.09105003625154495,
    )  # fmt: skip
    positive = (
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434,
        0.5626170039176941, 0.7229568362236023, 1.0,
    )  # fmt: skip
    return CodebookFormat((*(-level for level in negative), 0.0, *positive))


def normal_levels(bits: int) -> CodebookFormat:
    """The levels of least mean squared error for N(0, 1): the means of their cells (Max, IRE Trans. IT-6 (1960) 7)."""
    positive = {
        2: (0.452780035, 1.510417608),
        3: (0.245094179, 0.756005281, 1.343909279, 2.151945705),
        4: (0.12839503, 0.388048299, 0.656759119, 0.942340456, 1.256231197, 1.618046386, 2.069017227, 2.732589571),
    }[bits]
    levels = [float(np.float32(level)) for level in positive]
    return CodebookFormat((*(-level for level in reversed(levels)), *levels))


def dynamic_levels(bits: int, signed: bool = True, zero: bool = True) -> CodebookFormat:
    """The dynamic map: decimal exponents from 10^-(bits - 2) up; the other bits are the fraction.

    It is built as in bitsandbytes, in binary32 (``create_dynamic_map``; Dettmers, arXiv 1511.04561). Decade i of bits -
    1 holds means of neighbours, times 10^(i - bits + 2). The neighbours are 2^i + 1 equally spaced numbers from 0.1 to
    1. An unsigned map has twice as many intervals. The levels 0 and 1 are added.

    Args:
        bits: width of a code.
        signed: whether to add the negative of each mean. Default True.
        zero: whether 0 is a level. If not, the decade below the lowest has one level in its place, for an unsigned map.
            DE-0 of Li et al. (arXiv 2309.01507, section 4.1) has no level there. Default True.
    """
    magnitudes: list[float] = []
    for i in range(0 if zero else -1, bits - 1):
        bounds = _float32_linspace(2 ** (i + (not signed)) + 1)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        magnitudes += (np.float32(10.0 ** (i - bits + 2)) * means).tolist()
    negative = [-magnitude for magnitude in magnitudes] if signed else []
    return CodebookFormat(tuple(sorted([*([0.0] if zero else []), 1.0, *magnitudes, *negative])))


def softsign_levels() -> CodebookFormat:
    """Z / (2 - |z|), rounded to binary32, for z = i / 127 from -1 to 1: equal steps of 2 x / (1 + |x|)."""
    return CodebookFormat(tuple(float(np.float32(i / (254 - abs(i)))) for i in range(-127, 128)))


def _float32_linspace(count: int) -> np.ndarray:
    """Equally spaced binary32 numbers from 0.1 to 1, computed from both ends to the middle, as in PyTorch.

    Each is a product and a sum, rounded once: the published tables come from processors with fused multiply-add.
    binary64 holds both exactly.
    """
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(count - 1))
    index = np.arange(count)
    low, high = first + step * index, last - step * (count - 1 - index)
    return np.where(index < count // 2, low, high).astype(np.float32)
