"""Signal-to-noise ratio in decibels."""

import math

import numpy as np


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


def decibels_of_arrays(x: np.ndarray, error: np.ndarray) -> float:
    """`decibels` of the squares of two arrays, of which no square overflows or is lost.

    Example:
        >>> decibels_of_arrays(np.array([3e200, 4e200]), np.array([0.0, 5e199]))
        20.0
    """
    worst, largest = (float(np.abs(v).max(initial=0.0)) for v in (error, x))
    if worst == 0 or math.isinf(worst) or largest == 0:
        return decibels(largest, worst)
    exponents = [math.frexp(value)[1] for value in (largest, worst)]
    power, noise = (float(np.sum(np.ldexp(v, -exp) ** 2)) for v, exp in zip((x, error), exponents, strict=True))
    return decibels(power, noise) + 20 * (exponents[0] - exponents[1]) * math.log10(2)


def format_decibels(ratio: float) -> str:
    """A result of `decibels` in a table: ``"exact"`` without an error, ``"lost"`` without a signal.

    Example:
        >>> format_decibels(20.04), format_decibels(math.inf), format_decibels(-math.inf)
        ('20.0', 'exact', 'lost')
    """
    if math.isinf(ratio):
        return "exact" if ratio > 0 else "lost"
    return f"{ratio:.1f}"
