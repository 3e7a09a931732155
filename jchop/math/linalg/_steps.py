"""Arguments of linear algebra: operands rounded, the arithmetic made, and no derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jchop._arguments import SpecLike, as_operands, carrier_of, checked_key, run
from jchop._core.arithmetic.operations import check_operation, draws, widened
from jchop._core.rounding.grid import require_carrier
from jchop._core.rounding.random_bits import seed_words
from jchop._linalg.steps import Steps
from jchop._round import round_to_format
from jchop._settings import compiled, split
from jchop.math._family import as_dtype
from jchop.spec import Spec, as_spec

Array = jax.Array


@dataclass(frozen=True)
class Bound:
    """A function with its first arguments and keywords. Equal ones are compiled once; a partial equals only itself."""

    function: Callable[..., Any]
    first: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    def __call__(self, *args: Any) -> Any:
        return self.function(*self.first, *args, **dict(self.keywords))


def evaluate(
    function: Callable[..., Any], names: Sequence[str], operands: Sequence[Any], spec: SpecLike, key: Array | None
) -> Any:
    """``function(steps, *operands)`` on rounded, wide operands."""
    spec = as_spec(spec)
    arrays = as_operands(names, operands)
    check_specs([spec], arrays[0].dtype)
    key = checked_key(key, draws(spec), spec)
    return run(partial(_evaluate, function, spec, len(arrays)), arrays, key)


def check_specs(specs: Sequence[Spec], dtype: Any, names: Sequence[str] = ("spec",)) -> None:
    """Refuse a spec that operations on `dtype` cannot be rounded to, or that says something of gradients."""
    for name, spec in zip(names, specs, strict=True):
        require_carrier(spec, carrier_of(dtype))
        check_operation(spec, dtype, name)
        if spec.gradient != type(spec.gradient)():
            raise ValueError(f"{name}={str(spec)!r} has a gradient, and this function has no derivative")


@partial(compiled, static_argnums=(0, 1, 2), inline=True)
def _evaluate(function: Callable[..., Any], spec: Spec, count: int, *operands_and_key: Any) -> Any:
    *operands, key = operands_and_key
    keys = [None] * (count + 1) if key is None else list(split(key, count + 1))
    rounded = [widened(round_to_format(jnp.asarray(x), spec, k)) for x, k in zip(operands, keys, strict=False)]
    return as_dtype(without_derivative(partial(_in_steps, function, spec), rounded, keys[-1]), operands[0].dtype)


def _in_steps(function: Callable[..., Any], spec: Spec, operands: list[Array], key: Array | None) -> Any:
    steps = Steps(spec, None if key is None else seed_words(key), operands[0].dtype)
    return function(steps, *operands)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_derivative(function: Callable[..., Any], operands: Any, key: Any) -> Any:
    """``function(operands, key)``, and an error where it is differentiated."""
    return function(operands, key)


@without_derivative.defjvp
def _refuse(function: Callable[..., Any], primals: tuple, tangents: tuple) -> Any:
    raise NotImplementedError(
        "functions of jchop.math.linalg have no derivative; jchop.emulate of jax.numpy.linalg.solve and its like runs "
        "the same algorithms and has that of the carrier"
    )


def square(a: Any, name: str = "a") -> int:
    """The order of a matrix."""
    shape = getattr(a, "shape", None) or jnp.shape(a)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"{name} has shape {tuple(shape)}; it must be a square matrix (jax.vmap takes many)")
    return shape[0]


def permutation(p: Any, n: int, name: str) -> None:
    """Refuse an array that is no permutation of n rows; the numbers of a traced one are not known."""
    if p.shape != (n,) or not jnp.issubdtype(p.dtype, jnp.integer):
        raise ValueError(f"{name} has shape {p.shape} and dtype {p.dtype}; it must be {n} integers")
    if not isinstance(p, jax.core.Tracer) and sorted(np.asarray(p).tolist()) != list(range(n)):
        raise ValueError(f"{name}={np.asarray(p).tolist()} must be a permutation of 0 to {n - 1}")


def right_side(b: Any, n: int, name: str = "b") -> None:
    """Refuse a right-hand side that is no vector of n elements."""
    if jnp.shape(b) != (n,):
        raise ValueError(f"{name} has shape {jnp.shape(b)}; it must be ({n},) (jax.vmap takes many)")
