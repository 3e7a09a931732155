"""How an array is laid out for a product, so that a scaled format has its groups along the sum, and rotated there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from jchop._common.bit_ops import reshape
from jchop._common.checks import check, check_choice, check_int
from jchop._common.settings import always_jit
from jchop._core.rounding.random_bits import random_words, seed_words
from jchop._program.bind import straight_through
from jchop._round.arguments import run_numpy
from jchop._round.round_to_format import round_keeping_nan
from jchop._spec.spec import Spec
from jchop._storage._axis_groupings import OWN_SCALE, AxisGrouping, axis_groupings, with_groupings, with_sparse_axis
from jchop.formats import ScaledFormat

# -- rotations along the sum -------------------------------------------------------------------------------------------


#: The signs of NVIDIA's Transformer Engine for its NVFP4 recipe, which torchao has too.
_NVIDIA_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def _default_signs(size: int) -> tuple[int, ...]:
    return (_NVIDIA_SIGNS * size)[:size]


@dataclass(frozen=True, repr=False)
class Hadamard:
    """Rotation of both operands of a product along its sum, by blocks, before they are rounded.

    Each block of `size` numbers v becomes ``H (signs * v) / sqrt(size)``. H is a matrix of ones and minus ones with
    orthogonal rows. It is Sylvester's if `size` is a power of two, else a product with one of Paley's. The sum of a
    product stays the same but for rounding, and an outlier is spread over its block. Numbers after the last whole block
    stay as they are. If `size` is a power of four, the elements of the matrix are powers of two.

    It is the field ``rotation`` of a `jchop.Rule`. For its use in training see NVIDIA, arXiv 2509.25149 (section 4.2),
    and Tseng et al., arXiv 2502.20586. For its use in inference see Ashkboos et al., "QuaRot", arXiv 2404.00456.

    Args:
        size: the count of numbers in a block. It is a power of two, or a power of two times the size of a matrix of
            Paley's (12, 20, 24, 28, 44, ...). ``"all"``: one block for the whole sum; if no matrix has that size, as
            few blocks as possible. Default 16.
        signs: 1 or -1 for each number of a block. Default None: the 16 signs that NVIDIA's Transformer Engine
            publishes, repeated or cut to `size`. ``"random"``: drawn in each call from the key of the product, the same
            for both operands; for backward products alone.
        products: the rotated products. ``"weight"`` (default): dw = x g alone, along its rows (tokens). ``"both"``: dx
            = g w too, along the outputs of the layer, with the weight of dx rounded anew. ``"forward"``: y = x w, along
            its inputs. There x is rotated when the program runs, and w before it is rounded, so that it is stored
            rotated. ``"all"``: all three; dw and dx are then products of the rotated x and w.

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
    signs: Sequence[int] | Literal["random"] | None = None
    products: str = "weight"

    def __post_init__(self) -> None:
        check_choice("products", self.products, ("weight", "both", "forward", "all"))
        random = self.draws
        if random and self.forward:
            raise ValueError(
                f"signs='random' with products={self.products!r}: weights of forward products are stored rotated, by "
                "known signs; use products='both' or leave signs out"
            )
        if self.size == "all":
            check(
                random or self.signs is None,
                f"signs={self.signs!r} with size='all', which is another number in each product",
            )
            return
        check_int("size", self.size, 2)
        if HadamardBlocks.of(self.size, None).blocks > 1:
            raise ValueError(
                f"size={self.size} must be 'all', a power of two, or a power of two times 12, 20, 28, 44 or another "
                "size of Paley's matrices"
            )
        if random:
            return
        signs = _default_signs(self.size) if self.signs is None else tuple(self.signs)
        if len(signs) != self.size or not set(signs) <= {1, -1}:
            raise ValueError(f"signs={self.signs!r} must be {self.size} numbers, each 1 or -1, or 'random'")
        object.__setattr__(self, "signs", tuple(int(sign) for sign in signs))

    def __repr__(self) -> str:
        more = "" if self.products == "weight" else f", products={self.products!r}"
        usual = self.size == "all" or self.signs == _default_signs(self.size)
        own = "" if usual else f", signs={self.signs!r}"
        return f"Hadamard({self.size!r}{own}{more})"

    @property
    def draws(self) -> bool:
        """Whether its signs are drawn."""
        return isinstance(self.signs, str) and self.signs == "random"

    @property
    def forward(self) -> bool:
        """Whether it rotates forward products."""
        return self.products in ("forward", "all")

    @property
    def of_input(self) -> bool:
        """Whether it rotates the products dx."""
        return self.products in ("both", "all")

    @property
    def of_weight(self) -> bool:
        """Whether it rotates the products dw."""
        return self.products != "forward"

    @property
    def matrix(self) -> np.ndarray:
        """Returns the matrix R of a block, float64: rotated = R v. Each element is 1 or -1, over the root of `size`.

        Raises:
            ValueError: for ``size="all"``, whose matrix depends on the sum, and for ``signs="random"``.
        """
        if self.size == "all" or self.draws:
            raise ValueError(f"{self} has another matrix in each product")
        return HadamardBlocks.of(self.size, None).apply(np.diag(np.asarray(self.signs, np.float64))).T

    def rotate(self, laid: Array, key: Array | None = None) -> Array:
        """Rotates the last axis of an array by blocks.

        Sums are in float32 for narrower types. If `size` is a power of two, numbers are added in pairs, so that all
        devices give the same bits.

        Args:
            laid: an array of any shape and a carrier's dtype.
            key: of ``signs="random"``, a typed key. Default None.

        Returns:
            An array of the same shape and dtype.

        Raises:
            ValueError: for ``signs="random"`` without a key, and for other signs with one.

        Example:
            >>> import jax.numpy as jnp
            >>> import jchop as jc
            >>> jc.Hadamard(4).rotate(jnp.array([8.0, 0, 0, 0, 3])).tolist()
            [4.0, 4.0, 4.0, 4.0, 3.0]
        """
        if self.draws != (key is not None):
            raise ValueError(f"key={key} with {self}: pass a key if signs='random', and only then")
        return _rotate_blocks(laid, self, key)


@partial(always_jit, static_argnums=1)
def _rotate_blocks(x: Array, rotation: Hadamard, key: Array | None) -> Array:
    """A call that products of one shape share."""
    width = x.shape[-1]
    blocks = HadamardBlocks.of(width if rotation.size == "all" else rotation.size, None) if x.size else None
    if blocks is None or width < blocks.size or blocks.block == 1:
        return x
    whole, wide = width // blocks.size * blocks.size, jnp.promote_types(x.dtype, jnp.float32)
    if key is None:
        signs = jnp.asarray(rotation.signs or _default_signs(blocks.size), wide)
    else:
        words = random_words(seed_words(key), jnp.arange(blocks.size, dtype=jnp.uint32), lane=1)
        signs = 1 - 2 * (words >> 31).astype(wide)
    y = x[..., :whole].astype(wide).reshape(*x.shape[:-1], -1, blocks.size) * signs
    y = sylvester_transform(y, blocks.power, jnp)
    if blocks.paley > 1:
        parts = y.reshape(-1, blocks.paley, blocks.power)
        matrix = jnp.asarray(paley_matrix(blocks.paley), wide)
        y = jnp.einsum("bpk,pq->bqk", parts, matrix, precision=lax.Precision.HIGHEST)
    y = (y * (1 / math.sqrt(blocks.block))).astype(x.dtype)
    return jnp.concatenate([y.reshape(*x.shape[:-1], whole), x[..., whole:]], -1)


# -- Hadamard matrices -----------------------------------------------------------------------------------------------


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
        """The number of rows of the matrix."""
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


# -- layouts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OperandLayout:
    """The axes of an operand: the free ones, in order, then the contracting ones (summed over), as one.

    Args:
        free: axes that stay axes, and are axes of the result.
        contracting: axes that become the last one, in C order.
    """

    free: tuple[int, ...]
    contracting: tuple[int, ...]

    @staticmethod
    def of(free: Sequence[int], contracting: Sequence[int]) -> OperandLayout:
        """Makes a layout of any sequences of axes."""
        return OperandLayout(tuple(free), tuple(contracting))

    @property
    def ndim(self) -> int:
        """How many axes an array has in this layout."""
        return len(self.free) + 1

    @property
    def _order(self) -> tuple[int, ...]:
        """The axes in the order of the layout."""
        return (*self.free, *self.contracting)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape that an array of `shape` has in this layout."""
        return (*(shape[axis] for axis in self.free), math.prod(shape[axis] for axis in self.contracting))

    def lay(self, x: Array, rotation: Hadamard | None = None, key: Array | None = None) -> Array:
        """Lays `x` out so, and rotates it along its last axis; `key` is of a rotation with random signs."""
        y = reshape(x.transpose(self._order), self.shape(x.shape))
        return y if rotation is None else rotation.rotate(y, key if rotation.draws else None)

    def back(self, y: Any, shape: Sequence[int]) -> Any:
        """Returns an array of `shape`, of JAX or NumPy, from its layout."""
        order = self._order
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return reshape(y, [shape[axis] for axis in order]).transpose(inverse)

    def entries(self, entries: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
        """Returns the entries of a `PartitionSpec` for the layout of an array, with a stack in front.

        They come from the entries of its axes. Of the axes that become one, the first keeps its entry.
        """
        entries, stack = (*entries, *[None] * (len(shape) - len(entries))), len(shape) - len(self._order)
        first = next((axis for axis in self.contracting if shape[stack + axis] > 1), None)
        front = (*entries[:stack], *(entries[stack + axis] for axis in self.free))
        return (*front, None if first is None else entries[stack + first])

    def spec_in_place(self, spec: Spec, shape: Sequence[int]) -> Spec | None:
        """Returns a spec that rounds an array of `shape` with its own axes as `spec` does in this layout, or None.

        It is `spec` itself if the layout is the array's own, or there are no groups. Groups along one axis need not be
        moved. But drawn bits depend on the layout, and so do sums over a group, if a rule has some, and groups of
        scales.
        """
        fmt, backward, order = spec.format, spec.gradient.round, self._order
        if not isinstance(fmt, ScaledFormat) or (fmt.group is None and fmt.channel is None and fmt.sparse is None):
            return spec
        if order == tuple(range(len(order))) and len(self.contracting) == 1:
            return spec
        if not fmt.scale_rule.by_ends or isinstance(fmt.scale, ScaledFormat):
            return None
        fastest = next(reversed(self.contracting), None)
        several = len(self.contracting) > 1
        if fmt.sparse is not None:
            elsewhere = fmt.axis_of_sparse % self.ndim < self.ndim - 1
            if elsewhere or fastest is None or (several and shape[fastest] % fmt.sparse[1]):
                return None  # its groups are along another axis, or run over several
        gradient_depends = backward is not None and (backward.rounding.stochastic or backward.scaled is not None)
        if spec.rounding.stochastic or gradient_depends:
            return None
        *free_kinds, along = axis_groupings(fmt, self.ndim)
        kinds: list[AxisGrouping] = [OWN_SCALE] * len(shape)
        for axis, kind in zip(self.free, free_kinds, strict=True):
            kinds[axis] = kind
        for axis in self.contracting if isinstance(along, str) else self.contracting[-1:]:
            kinds[axis] = along
        if isinstance(along, int) and several and shape[self.contracting[-1]] % along:
            return None  # a block over several axes
        in_place = with_groupings(fmt, kinds)
        if fmt.sparse is not None and fastest is not None:
            in_place = with_sparse_axis(in_place, fastest - len(shape))
        return replace(spec, format=in_place)


def round_in_layout(
    layout: OperandLayout | None,
    x: Array,
    spec: Spec | None,
    key: Array | None = None,
    gradient_key: Array | None = None,
    *,
    rotation: Hadamard | None = None,
    rotation_key: Array | None = None,
) -> Array:
    """`x` rotated and rounded in a layout (None: with its own axes); its dtype, shape and order of axes come back."""
    if layout is not None and rotation is not None:
        x = rotate_along_sum(layout, x, rotation, rotation_key)
    if spec is None:
        return x
    x = jnp.asarray(x)
    same = spec if layout is None else layout.spec_in_place(spec, x.shape)
    if layout is None or same is not None:
        return round_keeping_nan(x, same or spec, key, gradient_key)
    return layout.back(round_keeping_nan(layout.lay(x), spec, key, gradient_key), x.shape)


def rotate_along_sum(layout: OperandLayout, x: Array, rotation: Hadamard, key: Array | None = None) -> Array:
    """`x` rotated along the axes that a product sums over."""
    return layout.back(layout.lay(jnp.asarray(x), rotation, key), x.shape)


def keep_nan(x: Array, y: Array, spec: Spec) -> Array:
    """`y`, which is `x` rounded, with the NaN of `x`.

    Elements without a code for NaN give their largest value for it, so a model would hide that it has diverged.
    """
    if spec.scaled is None or spec.element.has_nan:
        return y
    # Functions of jnp would be traced again in every call. The rounding has its own derivative, of NaN too.
    return straight_through(lambda values, x: lax.select(lax.ne(x, x), x, values[0]), lambda y: y, [y], x)


def rounds_transpose_alike(spec: Spec | None) -> bool:
    """Whether a matrix and its transpose are rounded to the same: no groups, one of the tensor, or square tiles."""
    fmt = None if spec is None else spec.scaled
    if fmt is not None and fmt.sparse is not None:
        return False
    if fmt is None or (fmt.group is None and fmt.channel is None):
        return True
    return isinstance(fmt.group, tuple) and len(set(fmt.group)) == 1 and fmt.axis == (-2, -1)


def norm_scale_spec(spec: Spec | None) -> Spec | None:
    """The rounding of a norm's scale under the spec of a weight: it is one row, in which tiles are blocks.

    Nothing sums over it, so it keeps all its numbers under a format with `sparse`.
    """
    fmt = None if spec is None else spec.scaled
    if spec is None or fmt is None:
        return spec
    fmt = fmt if fmt.sparse is None else fmt.dense
    if isinstance(fmt.group, tuple) and fmt.axis == tuple(range(-len(fmt.group), 0)):
        fmt = fmt(group=fmt.group[-1])
    return replace(spec, format=fmt)


def check_layout_axes(field: str, spec: Spec | None, ndim: int, place: object) -> None:
    """Refuse a scaled format that names an axis which its array, of `ndim` axes in its layout, has not.

    Raises:
        ValueError: that names the field of the rule, the layer and the axes that are allowed.
    """
    if spec is None or spec.scaled is None:
        return
    try:
        spec.scaled.group_shape((1,) * ndim)
    except ValueError as error:
        axes = f"axes from {-ndim} to {ndim - 1}" if ndim else "group='tensor' alone"
        raise ValueError(
            f"{field}={str(spec)!r} of the {place}: {error}. As it is laid out there, with what a product sums over "
            f"as its last axis, it may name {axes}"
        ) from None


def check_finite(value: Any, what: str) -> None:
    """Refuse to pack infinities and NaN, most of which codes have no place for; a tracer is let through.

    Raises:
        ValueError: that counts them; `what` names the array.
    """
    if isinstance(value, Tracer) or run_numpy(lambda: jnp.isfinite(value).all()):
        return
    nan, infinite = (int(run_numpy(lambda of=of: of(value).sum())) for of in (jnp.isnan, jnp.isinf))
    raise ValueError(
        f"{what} holds {nan} NaN and {infinite} infinities among its {value.size} numbers; what is packed must be "
        "finite"
    )
