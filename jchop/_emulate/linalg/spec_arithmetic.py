"""The arithmetic of an algorithm: operations on arrays of rounded values, each with its own random words."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic.exact import ValueRange, carrier_range
from jchop._core.matmul.operations import fold_seeds, operation_words, sum_along
from jchop._kernels.operation import operation_on_device
from jchop._kernels.products.matmul import matmul_op
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop.formats import binary32, binary64

Array = jax.Array

#: The own format of each carrier; arithmetic in it is the hardware's.
_HARDWARE_SPECS = {"float32": Spec(binary32), "float64": Spec(binary64)}


class SpecArithmetic:
    """Operations in the arithmetic of one spec; each call in a program draws from another part of the stream.

    Args:
        spec: the rounding of every result.
        seeds: six uint32 for a stochastic spec, else None.
        dtype: float32 or float64; for its own format the hardware's arithmetic is used.
        iteration: number of the loop iteration.
    """

    def __init__(self, spec: Spec, seeds: Sequence[Array] | None, dtype: Any, iteration: Any = 0) -> None:
        self.spec, self.seeds, self.dtype, self.iteration = spec, seeds, dtype, iteration
        self._spec_or_hardware = None if spec == _HARDWARE_SPECS[dtype.name] else spec
        self._numbers = itertools.count()

    def at(self, step: Any) -> SpecArithmetic:
        """The same arithmetic in iteration `step` of a loop."""
        seeds = None if self.seeds is None else fold_seeds(self.seeds, next(self._numbers), step)
        return SpecArithmetic(self.spec, seeds, self.dtype, step)

    def _operation(self, name: str, *operands: Array, ranges: Sequence[ValueRange] = ()) -> Array:
        number = next(self._numbers)
        operands = tuple(jnp.broadcast_arrays(*operands))
        word = None if self.seeds is None else operation_words(self.seeds, operands[0], number)
        return operation_on_device(name, operands, self._spec_or_hardware, word, ranges=ranges)

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
        spec = self._spec_or_hardware
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
        return sum_along(
            x,
            0,
            MatmulSpec(self._spec_or_hardware, accumulate=self._spec_or_hardware),
            self._twelve(),
            matmul=matmul_op,
        )

    def norm(self, x: Array) -> Array:
        """The Euclidean norm √(Σ x_k²)."""
        return self.sqrt(self.dot(x, x))

    def _twelve(self) -> Array | None:
        if self.seeds is None:
            return None
        number = next(self._numbers)
        return jnp.stack([*fold_seeds(self.seeds, number, 0), *fold_seeds(self.seeds, number, 1)])

    def rounded(self, x: Array) -> Array:
        """Values of the carrier, rounded."""
        if self._spec_or_hardware is None:
            return x
        whole = carrier_range(CARRIERS[x.dtype.name])
        return self._operation("add", x, jnp.where(jnp.signbit(x), -0.0, 0.0).astype(x.dtype), ranges=(whole, whole))
