"""The error of a result against that of the carrier, as one number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._emulate.paired.measure import as_double_precision

ErrorMetric = Callable[[Any, Any], Any]
#: The values of `by`.
GRANULARITIES = ("scope", "equation")


def _norm_of_leaves(values: list[np.ndarray]) -> float:
    return math.sqrt(math.fsum(float(np.sum(np.abs(x) ** 2)) for x in values))


#: Of the errors of all numbers of a result, and the result: the norm over that of the result, the norm, the largest.
ERROR_METRICS: dict[str, Callable[[list[np.ndarray], list[np.ndarray]], float]] = {
    "relative": lambda errors, exact: _norm_of_leaves(errors) / (_norm_of_leaves(exact) or 1.0),
    "absolute": lambda errors, exact: _norm_of_leaves(errors),
    "largest": lambda errors, exact: max(float(np.max(np.abs(x), initial=0.0)) for x in errors),
}


def check_finite_result(name: str, exact: Any) -> None:
    """Refuses an input whose result in the carrier has no finite number: every error by name would be 0."""
    numbers = _inexact_leaves(exact)
    if not any(np.isfinite(x).any() for x in numbers):
        kind = "finite" if numbers else "real"
        raise ValueError(
            f"{name}: the result of fun has no {kind} number, so it has no error; pass a function as metric"
        )


def error_by_metric(metric: str | ErrorMetric, low: Any, exact: Any) -> float:
    """The error by name, or by a function of both results; not finite becomes infinite.

    By name, an infinity or NaN that both results have in the same place is no error.

    Raises:
        ValueError: for a negative error.
        TypeError: for a function that gives no number.
    """
    if callable(metric):
        out = np.asarray(metric(low, exact))
        if out.size != 1 or (out.dtype.kind not in "fiu" and not jnp.issubdtype(out.dtype, jnp.floating)):
            raise TypeError(f"metric={metric!r} must give a real number, but gives {out!r}")
        number = float(out.reshape(()))
    else:
        pairs = list(zip(_inexact_leaves(low), _inexact_leaves(exact), strict=True))
        with np.errstate(all="ignore"):
            common = [~np.isfinite(y) & ((x == y) | (np.isnan(x) & np.isnan(y))) for x, y in pairs]
            errors = [np.where(c, 0, x) - np.where(c, 0, y) for c, (x, y) in zip(common, pairs, strict=True)]
            number = ERROR_METRICS[metric](errors, [np.where(c, 0, y) for c, (_, y) in zip(common, pairs, strict=True)])
    if number < 0:
        raise ValueError(f"metric={metric!r} gave {number}; an error is not negative")
    return number if math.isfinite(number) else math.inf


def _inexact_leaves(tree: Any) -> list[np.ndarray]:
    leaves = (leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact))
    return list(map(as_double_precision, leaves))
