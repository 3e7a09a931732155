"""Packed arrays without their zeros: the codes of n of every m numbers, and their places."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from jchop._common.settings import always_jit
from jchop._core.scaled.sparse import sparse_mask
from jchop._round.arguments import has_tracer
from jchop.formats.scaled.scaled import axis_indexes
from jchop.sparsity._masks import check_sparsity_pattern
from jchop.storage import QArray, dequantize
from jchop.storage._array import check_qarray

__all__ = ["pack"]


def pack(q: QArray, n: int, m: int, *, axis: int = -2) -> QArray:
    """A packed array of which at most n of every m numbers along an axis are not zero, stored without the others.

    The result has the numbers of `q`, and is what `jchop.quantize` gives for the format with ``sparse=n:m``: with 2 of
    4, int4 has 3 bits for each number of the array, and its scales. A rule with such a format needs no `pack`.

    Args:
        q: of a scaled format: what `jchop.quantize` gives, or `jchop.ptq.quantize` with `jchop.ptq.sparse`; not within
            jit.
        n: how many stay, from 1 to m - 1.
        m: of how many, up to 64.
        axis: the axis along which they are counted; the last group may be shorter. Default -2: the inputs of a weight
            of shape (inputs, outputs).

    Returns:
        A `QArray`; -0 may be 0.

    Raises:
        TypeError: if `q` is no concrete `QArray`.
        ValueError: if a group has more numbers that are not zero; for a plain format, or one that drops numbers.

    Example:
        >>> import jax, jchop as jc
        >>> w = jax.random.normal(jax.random.key(0), (128, 64))
        >>> q = jc.quantize(w * jc.sparsity.mask(w, 2, 4, axis=0), "int4(group=128,axis=0,scale=bfloat16)")
        >>> sparse = jc.sparsity.pack(q, 2, 4)
        >>> str(sparse.spec), 8 * q.nbytes / w.size, 8 * sparse.nbytes / w.size
        ('int4(group=128,axis=-2,scale=bfloat16,sparse=2:4)', 4.125, 3.125)
    """
    check_qarray("q", q)
    if has_tracer(q):
        raise TypeError(f"q={q!r} is traced; it must be a QArray outside jit")
    pattern, _ = check_sparsity_pattern(n, m)
    fmt, axis_index = q.spec.scaled, axis_indexes("axis", axis, q.shape)[0]
    if fmt is None or fmt.sparse is not None:
        raise ValueError(
            f"q has spec={str(q.spec)!r}; a packed array needs a scaled format that keeps all numbers, as "
            "'float8_e4m3fn(group=tensor)'"
        )
    numbers = dequantize(q)
    is_nonzero = np.moveaxis(np.asarray(numbers) != 0, axis_index, -1)
    is_nonzero = np.pad(is_nonzero, [*[(0, 0)] * (is_nonzero.ndim - 1), (0, -is_nonzero.shape[-1] % m)])
    most = int(is_nonzero.reshape(*is_nonzero.shape[:-1], -1, m).sum(-1).max(initial=0))
    if most > n:
        raise ValueError(f"q has {most} of {m} numbers along axis={axis} that are not zero; n={n} allows fewer")
    spec = replace(q.spec, format=fmt(sparse=pattern, sparse_axis=axis_index))
    return q.thinned(_largest_of_groups(jax.numpy.asarray(numbers), spec.scaled), spec, axis_index)


_largest_of_groups = always_jit(sparse_mask, static_argnums=1)
