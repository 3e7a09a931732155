"""What all calls share: the package under watch, a key, inputs by name."""

# Tables of calls, one a line.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cases
import cases_scaled
import jax
import jax.numpy as jnp
import numpy as np

import jchop
from digests import Call, face

jc: Any = face.Face()
KEY = jax.random.key(20240229)
MODES = [mode.value for mode in jchop.Rounding]
STOCHASTIC = [mode.value for mode in jchop.Rounding if mode.stochastic]
ELEMENT = cases.NAMED | cases.CUSTOM | cases.P3109 | cases.WIDE | cases.DOUBLE | cases.FIXED


def key_for(text: Any) -> jax.Array | None:
    return KEY if "stochastic" in str(text) else None


def rng_for(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


def hard(text: str, carrier: str = "float32", count: int = 2048) -> np.ndarray:
    """Ties, subnormal numbers, overflow, infinities and NaN of a format."""
    return cases.adversarial(ELEMENT.get(text, cases.NAMED["float8_e5m2"]), carrier, count, rng_for(text + carrier))


@functools.cache
def _blocks(carrier: str) -> np.ndarray:
    return cases_scaled.adversarial(jchop.formats.float8_e4m3fn, 48, carrier, 16, rng_for(carrier))


def blocks(carrier: str = "float32") -> np.ndarray:
    """Blocks of 48 that are hard to scale."""
    return _blocks(carrier).copy()


def normal(name: str, shape: tuple[int, ...], dtype: Any = np.float32, scale: float = 1.0) -> np.ndarray:
    return (rng_for(name).standard_normal(shape) * scale).astype(dtype)


def coarse(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Small multiples of 1/8: their products and short sums are exact in float32, in any order."""
    return (rng_for(name).integers(-24, 25, shape) / 8).astype(dtype)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def files_of(where: Path) -> dict[str, bytes]:
    return {str(file.relative_to(where)): file.read_bytes() for file in sorted(where.rglob("*")) if file.is_file()}


def several(
    name: str, function: Callable[..., Any], *args: Any, loose: bool = False, torch: bool = False, **cases: dict[str, Any]
) -> Iterator[Call]:
    """Calls of one function with the same operands; ``cases`` are their other arguments."""
    for case, kwargs in cases.items():
        yield Call(f"{name} {case}", functools.partial(_call, function, args, kwargs), loose, torch)


def _call(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return function(*(arg() if callable(arg) and getattr(arg, "__name__", "") == "make" else arg for arg in args), **kwargs)


def f32(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32)
