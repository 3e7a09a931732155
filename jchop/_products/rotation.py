"""Hadamard rotations of the operands of backward products, along their sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jchop._checks import check_choice, check_int
from jchop._settings import compiled

Array = jax.Array

__all__ = ["Hadamard"]

#: The signs of NVIDIA's Transformer Engine for its NVFP4 recipe, which torchao has too.
_PUBLISHED = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_SIZES = (4, 16, 64, 256)


def _published(size: int) -> tuple[int, ...]:
    return (_PUBLISHED * size)[:size]


@dataclass(frozen=True, repr=False)
class Hadamard:
    """A rotation of both operands of a backward product along its sum, by blocks, before they are rounded.

    Each block of `size` numbers v becomes ``H (signs * v) / sqrt(size)``, H Sylvester's matrix of ones and minus ones.
    The matrix is orthogonal and its elements are powers of two, so the sum of a product stays the same but for
    rounding. An outlier is spread over its block. Numbers after the last whole block stay as they are.

    A `jchop.Rule` takes it as ``rotation=``. See NVIDIA, arXiv 2509.25149 (section 4.2), and Tseng et al.,
    arXiv 2502.20586, for its use in training.

    Args:
        size: the numbers of a block: 4, 16, 64 or 256. Default 16.
        signs: 1 or -1 for each number of a block. Default None: those that NVIDIA's Transformer Engine publishes for 16
            numbers, repeated or cut to `size`.
        products: ``"weight"``: the product dw = x g alone, along its rows (tokens); ``"both"``: dx = g w too, along the
            outputs of the layer. The weight of dx is then rounded anew. Default ``"weight"``.

    Raises:
        TypeError, ValueError: for an invalid argument.

    Example:
        >>> import jchop as jc
        >>> jc.Hadamard(4).signs
        (1, 1, 1, -1)
        >>> jc.Hadamard(4).matrix.tolist()[0]
        [0.5, 0.5, 0.5, -0.5]
    """

    size: int = 16
    signs: Sequence[int] | None = None
    products: str = "weight"

    def __post_init__(self) -> None:
        check_int("size", self.size)
        if self.size not in _SIZES:
            raise ValueError(f"size={self.size} must be one of {', '.join(map(str, _SIZES))}")
        check_choice("products", self.products, ("weight", "both"))
        signs = _published(self.size) if self.signs is None else tuple(self.signs)
        if len(signs) != self.size or not set(signs) <= {1, -1}:
            raise ValueError(f"signs={self.signs!r} must be {self.size} numbers, each 1 or -1")
        object.__setattr__(self, "signs", tuple(int(sign) for sign in signs))

    def __repr__(self) -> str:
        more = "" if self.products == "weight" else f", products={self.products!r}"
        own = "" if self.signs == _published(self.size) else f", signs={self.signs}"
        return f"Hadamard({self.size}{own}{more})"

    @property
    def matrix(self) -> np.ndarray:
        """The matrix R of a block, float64: rotated = R v. Each element is 1 or -1, over the root of `size`."""
        rows = np.arange(self.size)
        ones = np.array([[(row & column).bit_count() for column in rows.tolist()] for row in rows.tolist()])
        return (1 - 2 * (ones % 2)) * np.asarray(self.signs) / math.isqrt(self.size)

    def rotate(self, laid: Array) -> Array:
        """Rotate the last axis of an array by blocks.

        Sums are in pairs, in float32 for narrower types, so that every device gives the same bits.

        Args:
            laid: of any shape and a carrier's dtype.

        Returns:
            An array of the same shape and dtype.

        Example:
            >>> import jax.numpy as jnp
            >>> import jchop as jc
            >>> jc.Hadamard(4).rotate(jnp.array([8.0, 0, 0, 0, 3])).tolist()
            [4.0, 4.0, 4.0, 4.0, 3.0]
        """
        return _rotated(laid, self)


@partial(compiled, static_argnums=1)
def _rotated(laid: Array, rotation: Hadamard) -> Array:
    """A call that products of one shape share."""
    size = rotation.size
    whole = laid.shape[-1] // size * size
    if not whole or not laid.size:
        return laid
    wide = jnp.promote_types(laid.dtype, jnp.float32)
    blocks = laid[..., :whole].astype(wide).reshape(*laid.shape[:-1], -1, size) * jnp.asarray(rotation.signs, wide)
    for step in range(size.bit_length() - 1):
        pairs = blocks.reshape(*blocks.shape[:-1], -1, 2, 2**step)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        blocks = jnp.stack([first + second, first - second], -2).reshape(blocks.shape)
    rotated = (blocks * (1 / math.isqrt(size))).astype(laid.dtype)
    return jnp.concatenate([rotated.reshape(*laid.shape[:-1], whole), laid[..., whole:]], -1)
