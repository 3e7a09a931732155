"""Codebooks: any sorted table of real levels."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

from jchop.formats._base import ElementFormat, Number

_MAX_LEVELS = 1 << 16


@dataclass(frozen=True)
class CodebookFormat(ElementFormat):
    """A table of levels, each coded by its index. There is no -0, inf or NaN.

    Rounding to nearest takes the larger index on a tie (`NEAREST_EVEN`, the default), the larger magnitude
    (`NEAREST_AWAY`) or the smaller magnitude (`NEAREST_ZERO`); `ODD` takes the neighbour of odd index. Values beyond
    the ends saturate.

    Args:
        levels: strictly increasing finite numbers, 1 to 65,536 of them. A carrier that cannot hold every level is
            refused.

    Raises:
        TypeError, ValueError: for levels that are not finite numbers in strictly increasing order.

    Example:
        >>> import jchop as jc
        >>> ternary = jc.CodebookFormat((-1.0, 0.0, 1.0))
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
