"""Orthogonal matrices of entries of one size, and products with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

__all__ = ["HadamardBlocks", "paley_matrix", "sylvester_transform"]


@dataclass(frozen=True)
class HadamardBlocks:
    """A matrix of blocks on the diagonal, each a Hadamard matrix over the root of its size, after random signs.

    Args:
        blocks: how many there are.
        paley: the size of the matrix by Paley that is a factor of each block; 1 for none.
        power: of 2, the size of the matrix by Sylvester that is the other factor.
        seed: of the signs; None for no signs.
    """

    blocks: int
    paley: int
    power: int
    seed: int | None

    @staticmethod
    def of(size: int, seed: int | None) -> HadamardBlocks:
        """The matrix of a size with the fewest blocks: one if a product of Paley's and Sylvester's matrices has it.

        Source: Paley, "On orthogonal matrices", Journal of Mathematics and Physics 12, 1933.
        """
        power = size & -size
        order, odd = 4 * (size // power), size // power
        if odd == 1:
            return HadamardBlocks(1, 1, size, seed)
        while order <= odd * power:
            if _paley_prime(order):
                return HadamardBlocks(1, order, size // order, seed)
            order *= 2
        return HadamardBlocks(odd, 1, power, seed)

    @property
    def size(self) -> int:
        """Its number of rows."""
        return self.blocks * self.block

    @property
    def block(self) -> int:
        """The number of rows of a block."""
        return self.paley * self.power

    def __str__(self) -> str:
        return f"{self.blocks} Hadamard matrices of {self.block}" if self.blocks > 1 else f"Hadamard {self.size}"

    def apply(self, x: np.ndarray) -> np.ndarray:
        """The product x R with the rows of an array, in float64."""
        x = np.asarray(x, np.float64)
        shape = x.shape
        if self.seed is not None:
            bits = jax.random.bits(jax.random.key(self.seed, impl="threefry2x32"), (self.size,), np.uint32)
            x = x * np.where(np.asarray(bits) >> 31, -1.0, 1.0)
        x = sylvester_transform(x.reshape(-1, self.paley, self.power), self.power)
        if self.paley > 1:
            x = np.einsum("bpk,pq->bqk", x, paley_matrix(self.paley), optimize=True)
        return x.reshape(shape) / math.sqrt(self.block)


def sylvester_transform(x: Any, size: int, numpy: Any = np) -> Any:
    """The products of Sylvester's matrix with blocks of `size` along the last axis, by sums and differences of pairs.

    Args:
        x: an array; its last axis is a multiple of `size`.
        size: a power of two.
        numpy: NumPy, or `jax.numpy` for an array of JAX.
    """
    shape = x.shape
    for step in range(size.bit_length() - 1):
        pairs = x.reshape(*shape[:-1], -1, 2, 2**step)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = numpy.stack([first + second, first - second], -2).reshape(shape)
    return x


def _paley_prime(order: int) -> int:
    """The prime q of which Paley's matrix of q + 1 or 2 (q + 1) rows is made; 0 if there is none."""
    for q, rest in ((order - 1, 3), (order // 2 - 1, 1)):
        if q % 4 == rest and q > 2 and all(q % d for d in range(2, math.isqrt(q) + 1)):
            return q
    return 0


@lru_cache(maxsize=32)
def paley_matrix(order: int) -> np.ndarray:
    """Paley's matrix, by the squares modulo a prime."""
    q = _paley_prime(order)
    squares = {a * a % q for a in range(1, q)}
    symbols = np.array([0, *(1 if a in squares else -1 for a in range(1, q))], np.float64)
    inner = np.pad(symbols[np.subtract.outer(np.arange(q), np.arange(q)) % q], ((1, 0), (1, 0)), constant_values=1)
    inner[0, 0] = 0
    if q % 4 == 3:
        inner[1:, 0] = -1
        return inner + np.eye(q + 1)
    return np.kron(inner, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1), [[1, -1], [-1, -1]])
