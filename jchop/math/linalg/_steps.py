"""The arithmetic of an algorithm: operations on arrays of rounded values, each with random words of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jchop._bits import CARRIERS
from jchop._kernels.matmul import matmul_op
from jchop._reference.grid import require_carrier
from jchop._reference.operations import check_operation, draws, fold_seeds, operation, words
from jchop._reference.random_bits import seed_words
from jchop._reference.ranges import Range, carrier_range
from jchop._reference.sums import sum_along
from jchop._round import round_to_format
from jchop.accumulation import MatmulSpec
from jchop.formats import binary32, binary64
from jchop.math._door import SpecLike, as_operands, checked_key, own_carrier, run, widened
from jchop.math._family import as_dtype
from jchop.spec import Spec, as_spec

Array = jax.Array

#: The format that is a carrier's own, whose arithmetic is that of the hardware.
_OWN = {"float32": Spec(binary32), "float64": Spec(binary64)}


class Steps:
    """Operations in the arithmetic of one spec; each call in a program draws from a part of the stream of its own.

    Args:
        spec: what every result is rounded to.
        seeds: six uint32 where it draws, else None.
        dtype: float32 or float64; its own format is left to the hardware.
        turn: of the loop that it is for.
    """

    def __init__(self, spec: Spec, seeds: Sequence[Array] | None, dtype: Any, turn: Any = 0) -> None:
        self.spec, self.seeds, self.dtype, self.turn = spec, seeds, dtype, turn
        self._in = None if spec == _OWN[dtype.name] else spec
        self._numbers = itertools.count()

    def at(self, step: Any) -> Steps:
        """The same arithmetic in turn `step` of a loop."""
        seeds = None if self.seeds is None else fold_seeds(self.seeds, next(self._numbers), step)
        return Steps(self.spec, seeds, self.dtype, step)

    def _operation(self, name: str, *operands: Array, ranges: Sequence[Range] = ()) -> Array:
        number = next(self._numbers)
        operands = tuple(jnp.broadcast_arrays(*operands))
        word = None if self.seeds is None else words(self.seeds, operands[0], number)
        return operation(name, operands, self._in, word, ranges=ranges)

    def add(self, x: Array, y: Array) -> Array:
        """The sum x + y."""
        return self._operation("add", x, y)

    def sub(self, x: Array, y: Array) -> Array:
        """The difference x - y."""
        return self._operation("sub", x, y)

    def mul(self, x: Array, y: Array) -> Array:
        """The product x y."""
        return self._operation("mul", x, y)

    def div(self, x: Array, y: Array) -> Array:
        """The quotient x / y."""
        return self._operation("div", x, y)

    def sqrt(self, x: Array) -> Array:
        """The root √x."""
        return self._operation("sqrt", x)

    def matmul(self, a: Array, b: Array) -> Array:
        """A product of matrices, or of a matrix and a vector, every sum in sequential order."""
        spec = self._in
        columns = b if b.ndim == 2 else b[:, None]
        seeds = self._twelve()
        how = MatmulSpec(spec, spec, spec)
        out = matmul_op(a[None], columns[None], *(() if seeds is None else (seeds,)), spec=how)[0]
        return out if b.ndim == 2 else out[:, 0]

    def dot(self, x: Array, y: Array) -> Array:
        """The sum of products of two vectors."""
        return self.matmul(x[None], y)[0]

    def sum(self, x: Array) -> Array:
        """The sum over the first axis."""
        return sum_along(x, 0, MatmulSpec(self._in, accumulate=self._in), self._twelve(), matmul=matmul_op)

    def norm(self, x: Array) -> Array:
        """The Euclidean norm √(Σ x_k²)."""
        return self.sqrt(self.dot(x, x))

    def _twelve(self) -> Array | None:
        if self.seeds is None:
            return None
        number = next(self._numbers)
        return jnp.stack([*fold_seeds(self.seeds, number, 0), *fold_seeds(self.seeds, number, 1)])

    def rounded(self, x: Array) -> Array:
        """Any values of the carrier, rounded."""
        if self._in is None:
            return x
        whole = carrier_range(CARRIERS[x.dtype.name])
        return self._operation("add", x, jnp.where(jnp.signbit(x), -0.0, 0.0).astype(x.dtype), ranges=(whole, whole))


# -- the door ----------------------------------------------------------------------------------------------------------


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
        require_carrier(spec, own_carrier(dtype))
        check_operation(spec, dtype, name)
        if spec.gradient != type(spec.gradient)():
            raise ValueError(f"{name}={str(spec)!r} has a gradient, and this function has no derivative")


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _evaluate(function: Callable[..., Any], spec: Spec, count: int, *operands_and_key: Any) -> Any:
    *operands, key = operands_and_key
    keys = [None] * (count + 1) if key is None else list(jax.random.split(key, count + 1))
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
        "functions of jchop.math.linalg have no derivative; differentiate those of jax.scipy.linalg, or use "
        "jax.lax.custom_linear_solve around them"
    )


def square(a: Any, name: str = "a") -> int:
    """The order of a matrix."""
    shape = getattr(a, "shape", None) or jnp.shape(a)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"{name} has shape {tuple(shape)}; it must be a square matrix (jax.vmap takes many)")
    return shape[0]


def right_side(b: Any, n: int) -> None:
    """Refuse a right-hand side that is no vector of n elements."""
    if jnp.shape(b) != (n,):
        raise ValueError(f"b has shape {jnp.shape(b)}; it must be ({n},) (jax.vmap takes many)")
