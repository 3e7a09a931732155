"""Rounding modes and overflow rules.

Throughout, x is the exact real input, and lo <= |x| <= hi its neighbours in the format F without an upper exponent
limit. The discarded fraction is nu = (|x| - lo) / q, with q = hi - lo. R is a uniform integer of N random bits.
"""

from __future__ import annotations

import enum
from typing import TypeVar

from jchop._common.checks import close_names_hint, quote

__all__ = ["Overflow", "Rounding"]


class Rounding(enum.Enum):
    """The neighbour of x that a rounding returns. Values in F are unchanged in every mode.

    Every function that accepts a member also accepts its text: the value (``"nearest_even"``) or a short name
    (``"rne"``).

    Example:
        >>> import jchop as jc
        >>> float(jc.round_to_format(1.1, jc.Spec("e5m2", rounding=jc.Rounding.UP)))
        1.25
    """

    #: the nearer; on a tie the one whose last significand bit is 0 (IEEE 754 roundTiesToEven)
    NEAREST_EVEN = "nearest_even"
    #: the nearer; on a tie hi in magnitude (IEEE 754 roundTiesToAway)
    NEAREST_AWAY = "nearest_away"
    #: the nearer; on a tie lo in magnitude
    NEAREST_ZERO = "nearest_zero"
    #: toward +inf (IEEE 754 roundTowardPositive)
    UP = "up"
    #: toward -inf (IEEE 754 roundTowardNegative)
    DOWN = "down"
    #: lo in magnitude (IEEE 754 roundTowardZero)
    TOWARD_ZERO = "toward_zero"
    #: x if it is in F, else the neighbour whose last significand bit is 1 (P3109 ToOdd)
    ODD = "odd"
    #: hi if floor(nu 2^N) + R >= 2^N, else lo (P3109 StochasticA; proportional, unbiased)
    STOCHASTIC = "stochastic"
    #: hi if floor(nu 2^(N+1)) + 2R + 1 >= 2^(N+1), else lo (P3109 StochasticB)
    STOCHASTIC_B = "stochastic_b"
    #: hi if rne(nu 2^N) + R >= 2^N, else lo (P3109 StochasticC)
    STOCHASTIC_C = "stochastic_c"
    #: x if it is in F, else hi or lo with probability 1/2 each
    STOCHASTIC_EQUAL = "stochastic_equal"

    __repr__ = enum.Enum.__str__  # an expression, so that the repr of a Spec is one

    @property
    def stochastic(self) -> bool:
        """Whether the mode draws random bits and therefore needs a key."""
        return self in _STOCHASTIC_MODES


class Overflow(enum.Enum):
    """The result for a value whose rounded magnitude exceeds the largest finite one of F.

    Example:
        >>> import jchop as jc
        >>> float(jc.round_to_format(1e9, "float8_e5m2")), float(jc.round_to_format(1e9, "float8_e5m2:saturate"))
        (inf, 57344.0)
    """

    #: inf if the mode rounds outward (NaN if F has no inf), the largest finite value if it rounds inward (P3109 SatNone
    #: for the formats of `p3109`, which without inf take the largest finite value)
    IEEE = "ieee"
    #: always the largest finite value, infinities included (OCP saturating, P3109 SatFinite)
    SATURATE = "saturate"
    #: finite values saturate, infinities stay, or become NaN if F has no inf (P3109 SatPropagate for the formats of
    #: `p3109`, which without inf take the largest finite value)
    PROPAGATE = "propagate"
    #: two's complement wrap-around; fixed point and integers only
    WRAP = "wrap"

    __repr__ = enum.Enum.__str__


_STOCHASTIC_MODES = frozenset(
    {Rounding.STOCHASTIC, Rounding.STOCHASTIC_B, Rounding.STOCHASTIC_C, Rounding.STOCHASTIC_EQUAL}
)

#: Common short names of the members.
ROUNDING_ALIASES = {
    "nearest": Rounding.NEAREST_EVEN,
    "rne": Rounding.NEAREST_EVEN,
    "rna": Rounding.NEAREST_AWAY,
    "rnz": Rounding.NEAREST_ZERO,
    "ru": Rounding.UP,
    "rd": Rounding.DOWN,
    "rz": Rounding.TOWARD_ZERO,
    "rtz": Rounding.TOWARD_ZERO,
    "truncate": Rounding.TOWARD_ZERO,
    "ro": Rounding.ODD,
    "sr": Rounding.STOCHASTIC,
    "stochastic_a": Rounding.STOCHASTIC,
}

_Member = TypeVar("_Member", Rounding, Overflow)


def _enum_member(kind: type[_Member], value: object, argument: str, aliases: dict[str, _Member]) -> _Member:
    if isinstance(value, kind):
        return value
    names = {member.value: member for member in kind} | aliases
    if isinstance(value, str) and value in names:
        return names[value]
    hint = close_names_hint(value, names) if isinstance(value, str) else ""
    raise ValueError(f"{argument}={quote(value)} is not known{hint or '; allowed: ' + ', '.join(names)}")


def as_rounding(value: object) -> Rounding:
    """The member for `value`: a member, its value or a short name."""
    return _enum_member(Rounding, value, "rounding", ROUNDING_ALIASES)


def as_overflow(value: object) -> Overflow:
    """The member for `value`: a member or its value."""
    return _enum_member(Overflow, value, "overflow", {})
