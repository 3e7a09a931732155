"""Products of floats with codes of weights alone, which are never written as floats whole.

On a CPU panel by panel along the sum, each decoded where it is multiplied: a block, if scales change along the sum;
else 128 numbers, or 1,024 for more than 256 rows of floats. On other devices by the kernel of `dequantize_matmul` if it
takes such codes, else as other products of codes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._arguments import OWN_SCOPE, own_results
from jchop._bits import CARRIERS
from jchop._core.arithmetic.dequantize_matmul import exact_in
from jchop._core.rounding.codes import decode_elements
from jchop._kernels.primitive import by_platform
from jchop._kernels.products.dequantize_matmul import dequantize_matmul
from jchop._products.codes import Coded, multiply, scaled
from jchop.formats import FloatFormat, UniformFormat
from jchop.storage import QArray
from jchop.storage._codes import decode_plain

Array = jax.Array

__all__ = ["multiply_weights", "reads"]

_FEW_ROWS, _SHORT, _LONG = 256, 128, 1024


def multiply_weights(x: Array, w: Coded, leading: bool, dtype: Any) -> Array:
    """The product of (m, k) and weights with k as their first axis or their last, as (m, n).

    Args:
        x: floats.
        w: laid out as (n, k); its `stored` array, if it has one, as (k, n) or (n, k).
        leading: whether k is the first axis of the weights.
        dtype: of the result.
    """

    def by_panels(x: Array, w: Coded) -> Array:
        with jax.named_scope(OWN_SCOPE):
            return own_results(_panels(x, w, leading, dtype))

    def on_device(x: Array, w: Coded) -> Array:
        return _by_kernel(x, w, dtype) if leading and _fits(x, w, dtype) else _as_others(x, w, dtype)

    return by_platform(on_device, x, w, cpu=by_panels)


def _as_others(x: Array, w: Coded, dtype: Any) -> Array:
    right = replace(w.moved(lambda v: v[None]), block=w.block)
    return multiply(Coded(x[None], None, None), right, dtype)[0]


def _panels(x: Array, w: Coded, leading: bool, dtype: Any) -> Array:
    """The scaled sums of the panels, added from the first to the last."""
    work = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
    count, x = x.shape[1], x.astype(work)
    block = count if w.block is None or w.scale is None else min(w.block, count)
    inner = block < count
    size = block if inner else min(_SHORT if x.shape[0] <= _FEW_ROWS else _LONG, count)
    shared, panel = _reader(w, leading, work)
    columns = shared if leading else 1  # of which each has numbers of its own

    def of(rows: Array, start: Any) -> list[Array]:
        """A number of each column in the block of a place, for each place in a byte."""
        row = lax.dynamic_index_in_dim(rows, start // block, 0, keepdims=False).astype(work)
        return list(row.reshape(-1, columns).T)

    # One number of each block, before the loop, so that it does not carry a number for each element.
    scales, zeros = (None if v is None else v[:, ::block].T for v in (w.scale, w.zero))

    def term(start: Any, size: int) -> list[Array]:
        parts = panel(start, size)
        if zeros is not None:
            own = of(zeros, start)
            parts = [v - (own[i] if leading else own[0][:, None]) for i, v in enumerate(parts)]
        given = lax.dynamic_slice_in_dim(x, start, size, 1)
        if leading:
            sums = [_dot(given, v, 0, work) for v in parts]
        else:
            apart = given.reshape(-1, size // shared, shared)
            sums = [reduce(operator.add, (_dot(apart[..., i], v, 1, work) for i, v in enumerate(parts)))]
        return sums if not inner or scales is None else list(map(scaled, sums, of(scales, start)))

    def add(total: list[Array], start: Any, size: int) -> list[Array]:
        return [a + b for a, b in zip(total, term(start, size), strict=True)]

    whole, rest = divmod(count, size)
    total = [jnp.zeros((x.shape[0], w.elements.shape[0] // columns), work)] * columns
    total = lax.fori_loop(0, whole, lambda i, total: add(total, i * size, size), total)
    total = add(total, whole * size, rest) if rest else total
    if not inner and scales is not None:
        total = list(map(scaled, total, of(scales, 0)))
    return jnp.stack(total, -1).reshape(x.shape[0], -1).astype(dtype)


def _dot(x: Array, numbers: Array, axis: int, work: Any) -> Array:
    dims = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, numbers, dims, precision=lax.Precision.HIGHEST, preferred_element_type=work)


def _reader(w: Coded, leading: bool, work: Any) -> tuple[int, Callable[[Any, int], list[Array]]]:
    """How many elements share a byte, and a function of a place along the sum and a number of elements there.

    The function gives these as floats, (size, n) or (n, size): one array for each place in a byte, since to put them
    side by side takes longer than to multiply them apart.
    """
    axis, stored, carrier = 0 if leading else 1, w.stored, CARRIERS["float32"]
    if stored is None:
        elements = lax.optimization_barrier(w.elements.T if leading else w.elements)  # as they would lie if stored
        return 1, lambda start, size: [lax.dynamic_slice_in_dim(elements, start, size, axis).astype(work)]
    fmt, values = stored.spec.element, stored.qvalue
    bits = fmt.bits if fmt.bits < 8 else 8  # of an element, in the unit of `values`
    shared = 8 // bits if 8 % bits == 0 and stored.shape[1] % (8 // bits) == 0 else 1

    def read(start: Any, size: int) -> list[Array]:
        along = 8 if leading else bits
        part = lax.dynamic_slice_in_dim(values, start * along // 8, -(-size * along // 8), axis)
        if shared == 1:
            numbers = [decode_plain(part, fmt, stored.shape[1] if leading else size, carrier)]
        else:
            mask = jnp.uint8((1 << bits) - 1)
            numbers = [decode_elements((part >> (bits * i)) & mask, fmt, carrier) for i in range(shared)]
        return [v.astype(work) + w.shift if w.shift else v.astype(work) for v in numbers]

    return shared, read


def _fits(x: Array, w: Coded, dtype: Any) -> bool:
    """Whether the kernel takes such operands."""
    if w.stored is None or w.scale is None or w.zero is not None or w.stored.spec.scaled is None:
        return False
    fmt = w.stored.spec.element
    return (
        isinstance(fmt, FloatFormat | UniformFormat) and fmt.bits in (2, 4, 8) and exact_in(fmt, "float32")
        and jnp.promote_types(x.dtype, dtype).name in ("float32", "bfloat16")
    )  # fmt: skip


def _by_kernel(x: Array, w: Coded, dtype: Any) -> Array:
    assert w.stored is not None and w.scale is not None
    group = x.shape[1] if w.block is None else min(w.block, x.shape[1])
    codes = lax.bitcast_convert_type(w.stored.qvalue, jnp.uint8)
    scales = w.scale[:, ::group].T.astype(jnp.float32)
    x = x.astype(jnp.promote_types(x.dtype, dtype))
    return dequantize_matmul(x, codes, scales, format=w.stored.spec.element, group=group).astype(dtype)


def reads(stored: QArray, leading: bool, block: int | None) -> bool:
    """Whether panels of a stored matrix can be read from its bytes."""
    bits = stored.spec.element.bits
    whole = all(size * bits % 8 == 0 for size in (block or _SHORT, stored.shape[-1]))
    return stored.ndim == 2 and (leading or bits >= 8 or whole)
