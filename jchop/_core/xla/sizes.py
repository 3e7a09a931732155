"""Sizes of arrays that a program may learn only when it runs: the symbolic shapes of `jax.export`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.errors import InconclusiveDimensionOperation


def are_static(shape: Sequence[Any]) -> bool:
    """Whether no length of a shape is symbolic."""
    return all(isinstance(n, int) for n in shape)


def if_static(comparison: Callable[[], bool], otherwise: bool = False) -> bool:
    """The result of a comparison of sizes that chooses between two ways to the same numbers.

    Args:
        comparison: a function that compares.
        otherwise: the result if the sizes are symbolic and the comparison is open. Default False.
    """
    try:
        return bool(comparison())
    except InconclusiveDimensionOperation:
        return otherwise
