"""Properties of formats, in Pychop's order."""

from __future__ import annotations

import math
from typing import Any

from jchop._common.checks import check_bool
from jchop.matlab import CHOP_FORMATS, chop_float_format

__all__ = ["float_params"]

FloatParams = tuple[float, float, float, float, int, int, int, int]


def float_params(prec: str | None = None, binary: bool = False) -> FloatParams | dict[str, Any]:
    """(u, xmins, xmin, xmax, p, emins, emin, emax) of a format: MATLAB chop's ``float_params``.

    Args:
        prec: a format's name, as in `jchop.matlab.chop`. Default None: a dict of all formats by name.
        binary: whether the dict has texts of the nearest powers of two, such as ``"2^-11"``, in place of the first four
            numbers. Default False. It has no effect on one format.

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
    check_bool("binary", binary)
    if prec is None:
        table = {name: _params_of(*facts) for name, facts in CHOP_FORMATS.items()}
        return {name: (*map(_power_text, row[:4]), *row[4:]) for name, row in table.items()} if binary else table
    if prec not in CHOP_FORMATS:
        raise ValueError(f"prec={prec!r} must be one of {', '.join(map(repr, CHOP_FORMATS))}")
    return _params_of(*CHOP_FORMATS[prec])


def _power_text(value: float) -> str:
    return f"2^{round(math.log2(value))}"


def _params_of(t: int, emax: int) -> FloatParams:
    fmt = chop_float_format(t, emax)
    xmins, xmin, xmax = (float(value) for value in (fmt.smallest, fmt.smallest_normal, fmt.max))
    return 2.0**-t, xmins, xmin, xmax, t, fmt.emin - fmt.frac_bits, fmt.emin, fmt.emax
