"""The error of a result against that of the carrier, as one number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ErrorMetric = Callable[[Any, Any], Any]
#: The values of `by`.
GRANULARITIES = ("scope", "equation")


def _norm_of_leaves(values: list[np.ndarray]) -> float:
    return math.sqrt(math.fsum(float(np.sum(np.abs(x) ** 2)) for x in values))


def _relative_norm_of_error(low: list[np.ndarray], exact: list[np.ndarray]) -> float:
    return _norm_of_error(low, exact) / (_norm_of_leaves(exact) or 1.0)


def _norm_of_error(low: list[np.ndarray], exact: list[np.ndarray]) -> float:
    return _norm_of_leaves([x - y for x, y in zip(low, exact, strict=True)])


def _maximum_of_error(low: list[np.ndarray], exact: list[np.ndarray]) -> float:
    return max(float(np.max(np.abs(x - y), initial=0.0)) for x, y in zip(low, exact, strict=True))


#: Errors of all numbers of a result: the norm of the error over that of the result, the norm, the largest magnitude.
ERROR_METRICS: dict[str, Callable[[list[np.ndarray], list[np.ndarray]], float]] = {
    "relative": _relative_norm_of_error,
    "absolute": _norm_of_error,
    "largest": _maximum_of_error,
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
        numbers = [_inexact_leaves(tree) for tree in (low, exact)]
        with np.errstate(all="ignore"):
            number = ERROR_METRICS[metric](*_without_common_nonfinite(*numbers))
    if number < 0:
        raise ValueError(f"metric={metric!r} gave {number}; an error is not negative")
    return number if math.isfinite(number) else math.inf


def _without_common_nonfinite(
    low: list[np.ndarray], exact: list[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Both, with zeros in the places of an infinity or a NaN that they have in common."""
    common = [~np.isfinite(y) & ((x == y) | (np.isnan(x) & np.isnan(y))) for x, y in zip(low, exact, strict=True)]
    both = ([np.where(c, 0, v) for c, v in zip(common, side, strict=True)] for side in (low, exact))
    return next(both), next(both)


def _inexact_leaves(tree: Any) -> list[np.ndarray]:
    out = []
    for leaf in jax.tree.leaves(tree):
        dtype = jax.typeof(leaf).dtype
        if jnp.issubdtype(dtype, jnp.inexact):
            out.append(np.asarray(leaf).astype(np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else float))
    return out
