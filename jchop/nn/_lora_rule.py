"""`LoraRule`: which layers get adapters of low rank, and how they begin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from jchop._checks import check_choice, check_int
from jchop._paths import check_pattern

__all__ = ["INITS", "LoraRule"]

#: The first values of adapters: the name, and whether they need the weights before they were packed.
INITS: Final = {"zeros": False, "loftq": True, "pissa": True}


@dataclass(frozen=True)
class LoraRule:
    """Adapters for the layers whose path matches: y = base(x) + (alpha / rank) x A B (Hu et al., arXiv 2106.09685).

    Args:
        path: a pattern of paths ([](patterns.md)), as in `Rule`.
        rank: the number of columns of A and rows of B.
        alpha: the numerator of the factor. Default: `rank`, so that the factor is 1.
        dropout: the rate of dropout of x on its way to A, from 0 up to 1. Default 0.
        init: ``"zeros"``: A is random and B zero, so the first output equals the base's. ``"loftq"``: A B is the best
            approximation of this rank of the error of the packed weight (Li et al., arXiv 2310.08659, one step).
            ``"pissa"``: A B approximates the weight itself, and the base is the rest, packed again (Meng et al., arXiv
            2404.02948). Default ``"zeros"``.

    Raises:
        TypeError, ValueError: for a field out of range.

    Example:
        >>> import jchop as jc
        >>> jc.nn.LoraRule("mlp", rank=8, alpha=16).factor
        2.0
    """

    path: str
    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    init: str = "zeros"

    def __post_init__(self) -> None:
        check_pattern("path", self.path)
        check_int("rank", self.rank, 1)
        check_choice("init", self.init, tuple(INITS))
        _check_number("alpha", 1.0 if self.alpha is None else self.alpha, "above 0", lambda v: 0 < v < math.inf)
        _check_number("dropout", self.dropout, "from 0 up to 1", lambda v: 0 <= v < 1)

    @property
    def factor(self) -> float:
        """Alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def _check_number(name: str, value: Any, allowed: str, holds: Callable[[float], bool]) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a number {allowed}")
    if not holds(value):
        raise ValueError(f"{name}={value!r} must be a number {allowed}")
