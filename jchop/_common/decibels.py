"""Signal-to-noise ratio in decibels."""

import math


def decibels(signal: float, error: float) -> float:
    """10 log10(signal / error) of two sums of squares; infinite without an error.

    It is -infinite for an error without a signal, and for one that is not finite.

    Example:
        >>> decibels(100.0, 1.0), decibels(0.0, 0.0), decibels(0.0, 1.0), decibels(1.0, math.inf)
        (20.0, inf, -inf, -inf)
    """
    if error == 0:
        return math.inf
    ratio = signal / error
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf


def format_decibels(ratio: float) -> str:
    """A result of `decibels` in a table: ``"exact"`` without an error, ``"lost"`` without a signal.

    Example:
        >>> shown(20.04), shown(math.inf), shown(-math.inf)
        ('20.0', 'exact', 'lost')
    """
    if math.isinf(ratio):
        return "exact" if ratio > 0 else "lost"
    return f"{ratio:.1f}"
