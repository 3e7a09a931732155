"""Hadamard rotations of the operands of products, along their sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common.checks import check_choice, check_int
from jchop._common.settings import always_jit
from jchop._quantized.products.hadamard import HadamardBlocks, paley_matrix, sylvester_transform

Array = jax.Array

__all__ = ["Hadamard"]

#: The signs of NVIDIA's Transformer Engine for its NVFP4 recipe, which torchao has too.
_NVIDIA_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def _default_signs(size: int) -> tuple[int, ...]:
    return (_NVIDIA_SIGNS * size)[:size]


@dataclass(frozen=True, repr=False)
class Hadamard:
    """A rotation of both operands of a product along its sum, by blocks, before they are rounded.

    Each block of `size` numbers v becomes ``H (signs * v) / sqrt(size)``, H a matrix of ones and minus ones with
    orthogonal rows: Sylvester's if `size` is a power of two, else its product with one of Paley's. So the sum of a
    product stays the same but for rounding, and an outlier is spread over its block. Numbers after the last whole block
    stay as they are. If `size` is a power of four, the elements of the matrix are powers of two.

    A `jchop.Rule` takes it as ``rotation=``. See NVIDIA, arXiv 2509.25149 (section 4.2), and Tseng et al.,
    arXiv 2502.20586, for its use in training; Ashkboos et al., "QuaRot", arXiv 2404.00456, for its use in inference.

    Args:
        size: the numbers of a block: a power of two, or a power of two times the size of a matrix of Paley's (12, 20,
            24, 28, 44, ...). ``"all"``: those of the sum; if there is no such matrix, as few blocks as there can be.
            Default 16.
        signs: 1 or -1 for each number of a block. Default None: those that NVIDIA's Transformer Engine publishes for 16
            numbers, repeated or cut to `size`.
        products: ``"weight"``: the product dw = x g alone, along its rows (tokens); ``"both"``: dx = g w too, along the
            outputs of the layer, with the weight of dx rounded anew; ``"forward"``: the product y = x w, along its
            inputs: x is rotated when the program runs, and w before it is rounded, so that it is stored rotated;
            ``"all"``: all three, dx and dw being products of the x and w that are rotated already. Default
            ``"weight"``.

    Raises:
        TypeError, ValueError: for an invalid argument.

    Example:
        >>> import jchop as jc
        >>> jc.Hadamard(4).signs
        (1, 1, 1, -1)
        >>> jc.Hadamard(4).matrix.tolist()[0]
        [0.5, 0.5, 0.5, -0.5]
    """

    size: int | Literal["all"] = 16
    signs: Sequence[int] | None = None
    products: str = "weight"

    def __post_init__(self) -> None:
        check_choice("products", self.products, ("weight", "both", "forward", "all"))
        if self.size == "all":
            if self.signs is not None:
                raise ValueError(f"signs={self.signs!r} with size='all', which is another number in each product")
            return
        check_int("size", self.size, 2)
        if HadamardBlocks.of(self.size, None).blocks > 1:
            raise ValueError(
                f"size={self.size} must be 'all', a power of two, or a power of two times 12, 20, 28, 44 or another "
                "size of Paley's matrices"
            )
        signs = _default_signs(self.size) if self.signs is None else tuple(self.signs)
        if len(signs) != self.size or not set(signs) <= {1, -1}:
            raise ValueError(f"signs={self.signs!r} must be {self.size} numbers, each 1 or -1")
        object.__setattr__(self, "signs", tuple(int(sign) for sign in signs))

    def __repr__(self) -> str:
        more = "" if self.products == "weight" else f", products={self.products!r}"
        usual = self.size == "all" or self.signs == _default_signs(self.size)
        own = "" if usual else f", signs={self.signs}"
        return f"Hadamard({self.size!r}{own}{more})"

    @property
    def forward(self) -> bool:
        """Whether it is of forward products."""
        return self.products in ("forward", "all")

    @property
    def of_input(self) -> bool:
        """Whether it is of the products dx."""
        return self.products in ("both", "all")

    @property
    def of_weight(self) -> bool:
        """Whether it is of the products dw."""
        return self.products != "forward"

    @property
    def matrix(self) -> np.ndarray:
        """The matrix R of a block, float64: rotated = R v. Each element is 1 or -1, over the root of `size`.

        Raises:
            ValueError: for ``size="all"``, which has no one matrix.
        """
        if self.size == "all":
            raise ValueError("size='all' has another matrix in each product")
        return HadamardBlocks.of(self.size, None).apply(np.diag(np.asarray(self.signs, np.float64))).T

    def rotate(self, laid: Array) -> Array:
        """Rotate the last axis of an array by blocks.

        Sums are in float32 for narrower types. If `size` is a power of two they are in pairs, so that all devices give
        the same bits.

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
        return _rotate_blocks(laid, self)


@partial(always_jit, static_argnums=1)
def _rotate_blocks(x: Array, rotation: Hadamard) -> Array:
    """A call that products of one shape share."""
    width = x.shape[-1]
    blocks = HadamardBlocks.of(width if rotation.size == "all" else rotation.size, None) if x.size else None
    if blocks is None or width < blocks.size or blocks.block == 1:
        return x
    whole, signs = width // blocks.size * blocks.size, rotation.signs or _default_signs(blocks.size)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = x[..., :whole].astype(wide).reshape(*x.shape[:-1], -1, blocks.size) * jnp.asarray(signs, wide)
    y = sylvester_transform(y, blocks.power, jnp)
    if blocks.paley > 1:
        parts = y.reshape(-1, blocks.paley, blocks.power)
        y = jnp.einsum(
            "bpk,pq->bqk", parts, jnp.asarray(paley_matrix(blocks.paley), wide), precision=lax.Precision.HIGHEST
        )
    y = (y * (1 / math.sqrt(blocks.block))).astype(x.dtype)
    return jnp.concatenate([y.reshape(*x.shape[:-1], whole), x[..., whole:]], -1)
