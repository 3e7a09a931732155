"""Properties of formats, in Pychop's order."""

from __future__ import annotations

from jchop.matlab import FORMATS, float_format

__all__ = ["float_params"]

Params = tuple[float, float, float, float, int, int, int, int]


def float_params(prec: str | None = None) -> Params | dict[str, Params]:
    """(u, xmins, xmin, xmax, p, emins, emin, emax) of a format: MATLAB chop's ``float_params``.

    Args:
        prec: a format's name, as in `jchop.matlab.chop`. Default None: a dict of all formats by name.

    Returns:
        Unit roundoff, smallest positive and smallest normal value, largest value, significand bits, and the exponents
        of these three values, emins, emin and emax.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> from jchop.compat.pychop import float_params
        >>> float_params("q43")
        (0.0625, 0.001953125, 0.015625, 240.0, 4, -9, -6, 7)
    """
    if prec is None:
        return {name: _params(*facts) for name, facts in FORMATS.items()}
    if prec not in FORMATS:
        raise ValueError(f"prec={prec!r} must be one of {', '.join(map(repr, FORMATS))}")
    return _params(*FORMATS[prec])


def _params(t: int, emax: int) -> Params:
    fmt = float_format(t, emax)
    xmins, xmin, xmax = (float(value) for value in (fmt.smallest, fmt.smallest_normal, fmt.max))
    return 2.0**-t, xmins, xmin, xmax, t, fmt.emin - fmt.frac_bits, fmt.emin, fmt.emax
