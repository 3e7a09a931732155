"""Checks of arguments. Numbers may be traced, as by `optax.inject_hyperparams`; then their values are not checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check_int
from jchop._round.arguments import has_tracer


class NumberRange(NamedTuple):
    """The allowed numbers of an argument: a text for messages, and the test."""

    text: str
    test: Callable[[float], bool]


FROM_ZERO = NumberRange("a finite number >= 0", lambda v: 0 <= v < math.inf)
ABOVE_ZERO = NumberRange("a finite number above 0", lambda v: 0 < v < math.inf)
BELOW_ONE = NumberRange("a number >= 0 and below 1", lambda v: 0 <= v < 1)
#: Normal numbers of float32: no device reads them as zero, and none becomes infinite.
NORMAL_FLOAT32 = NumberRange("a number from 2^-126 to 2^127 (normal in float32)", lambda v: 2.0**-126 <= v <= 2.0**127)
ABOVE_ONE = NumberRange(
    "a finite number larger than 1 (in float32)", lambda v: v <= 2.0**127 and bool(np.float32(v) > 1)
)


def check_number(name: str, value: Any, limits: NumberRange, *, schedule: bool = False) -> Any:
    """`value`, checked to be one real number of a range. If it is traced, only dtype and shape are checked.

    Args:
        name: name of the argument.
        value: a number, an array without axes, or a schedule.
        limits: the range.
        schedule: whether a function is allowed.

    Raises:
        TypeError, ValueError: for anything else.
    """
    if schedule and callable(value):
        return value
    dtype = np.result_type(value) if isinstance(value, int | float) else getattr(value, "dtype", np.dtype(object))
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not real or getattr(value, "shape", ()) != ():
        raise TypeError(f"{name}={value!r} must be {limits.text}{' or a schedule' if schedule else ''}")
    if not has_tracer(value) and not limits.test(float(value)):
        raise ValueError(f"{name}={value!r} must be {limits.text}")
    return value


def check_count(name: str, value: Any, low: int) -> Any:
    """`value`, checked to be an integer from `low` to 2^31 - 1, the most that a state counts.

    If it is traced, only dtype and shape are checked.
    """
    if not has_tracer(value):
        return check_int(name, value, low, (1 << 31) - 1)
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.shape != ():
        raise TypeError(f"{name}={value!r} must be an integer >= {low}")
    return value


def check_static_size(name: str, value: Any, default: int) -> int:
    """`value`, checked to be an integer >= 1; `default` for None. It shapes the program, so it cannot be traced.

    Raises:
        TypeError, ValueError: for anything else.
    """
    if has_tracer(value):
        raise TypeError(
            f"{name}={value!r} is traced, and must be an integer >= 1 that is known beforehand: say "
            f"static_args={name!r} to optax.inject_hyperparams"
        )
    return default if value is None else check_int(name, value, 1)


def check_carrier_dtype(name: str, value: Any) -> Any:
    """`value` as the dtype of a carrier, or None."""
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in CARRIERS:
        raise TypeError(f"{name}={value!r} must be one of {', '.join(CARRIERS)}")
    return dtype


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """`inner` with support for extra arguments.

    Raises:
        TypeError: for a value that is not an Optax transformation.
    """
    if not callable(getattr(inner, "init", None)) or not callable(getattr(inner, "update", None)):
        raise TypeError(f"inner={inner!r} must be an Optax transformation, such as optax.sgd(0.1)")
    return optax.with_extra_args_support(inner)
