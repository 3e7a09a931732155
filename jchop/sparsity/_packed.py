"""Packed arrays without their zeros: the codes of n of every m numbers, and their places."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._arguments import has_tracer
from jchop._core.rounding.codes import pack as pack_bits
from jchop._core.rounding.codes import unpack as unpack_bits
from jchop.formats._grouping import axis_indexes
from jchop.sparsity._masks import check_pattern
from jchop.spec import Spec
from jchop.storage import QArray
from jchop.storage._codes import gather, hold, raw, spread

__all__ = ["SparseArray", "pack"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "places", "scale"],
    meta_fields=["spec", "shape", "axis", "pattern", "dtype"],
)
@dataclass(frozen=True, eq=False)
class SparseArray:
    """A `jchop.QArray` of which n of every m numbers are stored, as codes and places; a pytree. `pack` makes it.

    Args:
        codes: those of the numbers that stay, n for each group, in the order of the array with its sparse axis moved to
            the end; packed along that axis, as those of a QArray.
        places: which number of its group each of them is, in as many bits as m - 1 has, packed alike.
        scale: as in the QArray.
        spec: as in the QArray.
        shape: of the array.
        axis: the sparse axis, from 0.
        pattern: n and m.
        dtype: as in the QArray.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> x = jnp.array([[1.0, 0.0, 0.0, -7.0, 0.0, 2.0, 0.0, 0.0]])
        >>> sparse = jc.sparsity.pack(jc.quantize(x, jc.int4(channel=0)), 2, 4, axis=1)
        >>> sparse.codes.nbytes, sparse.places.nbytes, (jc.dequantize(sparse.unpack()) == x).all().item()
        (2, 1, True)
    """

    codes: Any
    places: Any
    scale: Any
    spec: Spec
    shape: tuple[int, ...]
    axis: int
    pattern: tuple[int, int]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def unpack(self) -> QArray:
        """The array with its zeros, bit for bit that which was packed (-0 may be 0); under jit, too."""
        (n, m), element = self.pattern, self.spec.element
        size = self.shape[self.axis]
        groups = -(-size // m)
        bits = (m - 1).bit_length()
        codes = spread(jnp.asarray(self.codes), element, groups * n)
        places = unpack_bits(jnp.asarray(self.places), bits, groups * n)
        codes, places = (v.reshape(*v.shape[:-1], groups, n) for v in (codes, places))
        match = places[..., None] == jnp.arange(m, dtype=places.dtype)
        value = jnp.where(match, codes[..., None], 0).sum(-2, dtype=codes.dtype)
        whole = jnp.where(match.any(-2), value, np.asarray(_zero_of(self.spec), codes.dtype))
        entries = jnp.moveaxis(whole.reshape(*whole.shape[:-2], groups * m)[..., :size], -1, self.axis)
        return QArray(hold(gather(entries, element), element), self.scale, None, self.spec, self.shape[-1], self.dtype)


def pack(q: QArray, n: int, m: int, *, axis: int = -2) -> SparseArray:
    """A packed array of which at most n of every m codes along an axis are not zero, stored without the others.

    With 2 of 4, int4 has 3 bits for each number of the array, and its scales: two codes of 4 bits and two places of 2
    bits in every four. `SparseArray.unpack` gives the array back. It is a form to store: products take the array that
    is unpacked.

    Args:
        q: what `jchop.quantize` gives, or `jchop.ptq.quantize` with `jchop.ptq.sparse`; not within jit.
        n: how many stay, from 1 to m - 1.
        m: of how many.
        axis: the axis along which they are counted; the last group may be shorter. Default -2: the inputs of a weight
            of shape (inputs, outputs).

    Raises:
        TypeError: if `q` is no concrete `QArray`.
        ValueError: if a group has more numbers that are not zero; for a format without a zero, or with zero points.

    Example:
        >>> import jax, jchop as jc
        >>> w = jax.random.normal(jax.random.key(0), (128, 64))
        >>> q = jc.quantize(w * jc.sparsity.mask(w, 2, 4, axis=0), "int4(group=128,axis=0,scale=bfloat16)")
        >>> sparse = jc.sparsity.pack(q, 2, 4)
        >>> 8 * q.nbytes / w.size, 8 * sparse.nbytes / w.size
        (4.125, 3.125)
    """
    if not isinstance(q, QArray) or has_tracer(q):
        raise TypeError(f"q={q!r:.200} must be a QArray outside jit")
    (n, m), _ = check_pattern(n, m)
    place = axis_indexes("axis", axis, q.shape)[0]
    element, zero = q.spec.element, _zero_of(q.spec)
    if zero is None or q.zero_point is not None:
        raise ValueError(f"q has spec={str(q.spec)!r}; a sparse array needs a format with a zero and no zero points")
    entries = np.asarray(spread(raw(q.qvalue, element), element, q.shape[-1]))
    lines = np.moveaxis(entries, place, -1)
    extra = -lines.shape[-1] % m
    lines = np.pad(lines, [*[(0, 0)] * (lines.ndim - 1), (0, extra)], constant_values=zero)
    groups = lines.reshape(*lines.shape[:-1], -1, m)
    negative = element.code_of(-0.0)
    nothing = groups == zero if negative is None else (groups == zero) | (groups == negative)
    most = int((~nothing).sum(-1).max(initial=0))
    if most > n:
        raise ValueError(f"q has {most} of {m} numbers along axis={axis} that are not zero; n={n} allows fewer")
    chosen = np.sort(np.argsort(nothing * 1 + (groups == zero), axis=-1, kind="stable")[..., :n], axis=-1)
    codes = np.take_along_axis(groups, chosen, -1).reshape(*lines.shape[:-1], -1)
    places = chosen.astype(np.uint8).reshape(codes.shape)
    packed = jnp.asarray(gather(codes, element)), pack_bits(jnp.asarray(places), (m - 1).bit_length())
    return SparseArray(*packed, q.scale, q.spec, q.shape, place, (n, m), q.dtype)


def _zero_of(spec: Spec) -> int | None:
    """The code of zero; None if there is none."""
    return spec.element.code_of(0)
