"""Products of codes: integers summed exactly, float8 multiplied as it is stored, scales behind the sums.

The sum. K numbers are summed over, in blocks in which neither operand's scale changes; e are elements, z zero points:

    block   S_g = sum of (e_x - z_x) (e_w - z_w), an exact integer if both are integers of at most 8 bits; else the sum
            that `jax.lax.dot_general` gives for float8 operands, or for both in float32, with float32 sums
    scaled  t_g = S_g, times the scale of x if that changes along the sum, times that of w likewise
    sum     y = ((t_0 + t_1) + t_2) + ..., from the first block to the last
    scales  times the scale of x if it is one along the sum, times that of w likewise

Every line is rounded to nearest in float32 (float64 for results of that dtype); the result is rounded to its dtype.
Zero points are within the range of the codes, as `quantize` fits them. So the sum of integers has one value on every
device, however many numbers it has. XLA's CPU backend computes sums of floats in panels of 1,024, added in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._arguments import OWN_SCOPE, own_results
from jchop._bits import CARRIERS
from jchop._core.xla_cpu import prevent_fma
from jchop._kernels.primitive import on_cpu_or_else
from jchop.formats import ElementFormat, FloatFormat, IntegerFormat, float8_e4m3fn, float8_e5m2
from jchop.spec import Spec
from jchop.storage import QArray, quantize
from jchop.storage._codes import decode_plain, gather, hold, native_dtype
from jchop.storage._decode import batch_axes, decode, expand
from jchop.storage._layout import WHOLE, kinds_of, scale_shape, with_kinds

Array = jax.Array

__all__ = ["Coded", "block_of", "check_codes", "coded", "matrices", "multiply", "parts_of"]


@partial(jax.tree_util.register_dataclass, data_fields=["elements", "scale", "zero"], meta_fields=["block"])
@dataclass(frozen=True, eq=False)
class Coded:
    """An array as elements, scales and zero points, each of its shape, so that all move alike.

    Args:
        elements: int8 for integers of up to 8 bits, float8 for its values, else a float dtype that holds them.
        scale: of each element; None for a plain format.
        zero: of each element, int32; None if all are zero.
        block: how many numbers along the sum have one scale; None for all.
    """

    elements: Array
    scale: Array | None
    zero: Array | None
    block: int | None = None

    def moved(self, move: Callable[[Array], Array]) -> Coded:
        """The array after a move of each of its parts."""
        scale, zero = (None if part is None else move(part) for part in (self.scale, self.zero))
        return Coded(move(self.elements), scale, zero, self.block)


# -- from numbers to codes ---------------------------------------------------------------------------------------------


def check_codes(field: str, spec: Spec, where: Any) -> None:
    """Refuse a format whose elements no unit multiplies.

    Raises:
        ValueError: that names the field and what is allowed.
    """
    fmt, scaled = spec.element, spec.scaled
    integer = isinstance(fmt, IntegerFormat) and fmt.bits <= 8
    if not (integer or isinstance(fmt, FloatFormat)):
        why = "its elements are no integers of at most 8 bits and no floats"
    elif scaled is not None and scaled.zero_point == "float":
        why = "its zero points are numbers"
    elif scaled is not None and fmt.code_of(1) is None:
        why = "its elements have no 1"
    else:
        return
    raise ValueError(
        f"{field}={str(spec)!r} of the {where}: {why}, so product='codes' cannot multiply its codes; leave product out"
    )


def block_of(spec: Spec, ndim: int) -> int | None:
    """How many numbers along the last of `ndim` axes share a scale; None for all."""
    if spec.scaled is None:
        return None
    kind = kinds_of(spec.scaled, ndim)[-1]
    return None if kind == WHOLE else kind if isinstance(kind, int) else 1


def coded(laid: Array, spec: Spec | None, key: Array | None = None) -> Coded:
    """An array, with the sum along its last axis, as codes, without derivatives; without a spec as it is."""
    laid = lax.stop_gradient(laid)
    if spec is None:
        return Coded(laid, None, None)
    return replace(parts_of(quantize(laid, spec, key)), block=block_of(spec, laid.ndim))


def parts_of(q: QArray) -> Coded:
    """The elements, scales and zero points of a stored array, repeated for each element."""
    with jax.named_scope(OWN_SCOPE):  # `emulate` rounds no scale
        elements, shift = _elements(q)
        if q.spec.scaled is None:
            return Coded(elements, None, None)
        batch = batch_axes(q.spec, q.shape, q.scale)
        kinds = kinds_of(q.spec.scaled, q.ndim, batch)

        def over(values: Array) -> Array:
            return jnp.broadcast_to(expand(values, kinds, q.shape), q.shape)

        zero = None if q.zero_point is None else over(q.zero_point).astype(jnp.int32)
        if shift:
            zero = (jnp.zeros(q.shape, jnp.int32) if zero is None else zero) - shift
        return Coded(elements, over(_scales(q, batch)), zero)


def _scales(q: QArray, batch: int) -> Array:
    """The scale of each group, with its parts multiplied: the number of an element 1 in each group."""
    assert q.spec.scaled is not None
    kinds = kinds_of(q.spec.scaled, q.ndim, batch)
    shape = (*q.shape[:batch], *scale_shape(kinds[batch:], q.shape[batch:]))
    fmt = with_kinds(q.spec.scaled, [1 if isinstance(kind, int) else kind for kind in kinds[batch:]])
    fmt = replace(fmt, scale=q.spec.scaled.scale)
    one = q.spec.element.code_of(1)
    assert one is not None
    ones = jnp.full(shape or (1,), one, jnp.uint8 if q.spec.element.bits <= 8 else jnp.uint16)
    zero = None if q.zero_point is None else jnp.zeros_like(q.zero_point)
    wide = "float64" if q.dtype == np.float64 else "float32"
    size = shape[-1] if shape else None
    single = QArray(
        hold(gather(ones, q.spec.element), q.spec.element), q.scale, zero, replace(q.spec, format=fmt), size, q.dtype
    )
    return decode(single.form(wide), single.qvalue, single.scale, single.zero_point)


def _elements(q: QArray) -> tuple[Array, int]:
    """The elements in the smallest dtype that a unit takes, and by how much unsigned integers were lowered."""
    fmt, count = q.spec.element, 1 if q.size is None else q.size
    if isinstance(fmt, IntegerFormat):
        shift = 0 if fmt.signed or fmt.bits < 8 else 128
        if fmt.bits == 8:
            raw = q.qvalue.reshape(q.shape)
            whole = raw if fmt.signed else (raw.astype(jnp.int16) - 128).astype(jnp.int8)
        else:
            whole = decode_plain(q.qvalue, fmt, count, _FLOAT32).reshape(q.shape).astype(jnp.int8)
        return whole, shift
    if native_dtype(fmt) is not None:
        return q.qvalue.reshape(q.shape), 0
    numbers = decode_plain(q.qvalue, fmt, count, _FLOAT32).reshape(q.shape)
    narrow = next((dtype for wide, dtype in _FLOAT8 if _holds(wide, fmt)), jnp.float32)
    return numbers.astype(narrow), 0


_FLOAT32 = CARRIERS["float32"]
_FLOAT8 = ((float8_e4m3fn, jnp.float8_e4m3fn), (float8_e5m2, jnp.float8_e5m2))


def _holds(wide: ElementFormat, fmt: ElementFormat) -> bool:
    """Whether every value of a format of at most 8 bits is one of another."""
    if fmt.bits > 8:
        return False
    have, wanted = wide.values(), fmt.values()
    return bool((np.isin(wanted, have) | np.isnan(wanted)).all()) and (wide.has_nan or not fmt.has_nan)


# -- the product -------------------------------------------------------------------------------------------------------


def matrices(x: Coded, batch: int) -> Coded:
    """An array in the layout of its product as (batch, rows, summed)."""
    return x.moved(lambda v: v.reshape(math.prod(v.shape[:batch]), math.prod(v.shape[batch:-1]), v.shape[-1]))


def multiply(x: Coded, w: Coded, dtype: Any) -> Array:
    """The product of (batch, m, k) and (batch, n, k), as (batch, m, n).

    Args:
        x: the first operand.
        w: the second.
        dtype: of the result.

    Raises:
        ValueError: for blocks of lengths of which neither divides the other.
    """
    count = x.elements.shape[-1]
    blocks = [count if v.block is None or v.scale is None else min(v.block, count) for v in (x, w)]
    block = min(blocks)
    if count and (max(blocks) % block and max(blocks) != count):
        raise ValueError(
            f"product='codes': the operands have scales of {blocks[0]} and of {blocks[1]} numbers along the sum; one "
            "length must divide the other"
        )
    work = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
    out = (*x.elements.shape[:2], w.elements.shape[1])
    if not count or not math.prod(out):
        return jnp.zeros(out, dtype)
    inner = [v.scale is not None and size < count for v, size in zip((x, w), blocks, strict=True)]
    with jax.named_scope(OWN_SCOPE):
        total = _sum(x, w, count, work) if block == count else _sum_of_blocks(x, w, block, inner, out, work)
        for v, within, axis in zip((x, w), inner, (2, 1), strict=True):
            if v.scale is not None and not within:
                total = _scaled(total, v.scale[..., 0], axis)
        return own_results(total.astype(dtype))


def _scaled(total: Array, scale: Array, axis: int) -> Array:
    """Sums times the scales of rows or columns, rounded before anything is added to them."""
    scale = jnp.expand_dims(scale.astype(total.dtype), axis)
    product = total * scale
    return prevent_fma(product, jnp.broadcast_to(scale, product.shape)) if total.dtype == jnp.float32 else product


def _sum_of_blocks(x: Coded, w: Coded, block: int, inner: Sequence[bool], out: tuple[int, ...], work: Any) -> Array:
    """The scaled sums of the blocks, added from the first to the last."""
    size = x.elements.shape[-1]
    count = -(-size // block)

    def cut(v: Array) -> Array:
        """(blocks, batch, rows, block); zeros fill up the last block."""
        v = jnp.pad(v, ((0, 0), (0, 0), (0, count * block - size)))
        return jnp.moveaxis(v.reshape(*v.shape[:2], count, block), 2, 0)

    def first(v: Array | None) -> Array | None:
        return None if v is None else jnp.moveaxis(v[..., ::block], 2, 0)[..., None]

    cuts = [Coded(cut(v.elements), first(v.scale), first(v.zero)) for v in (x, w)]
    lengths = np.minimum(block, size - block * np.arange(count)).astype(np.int32)

    def turn(total: Array, given: Any) -> tuple[Array, None]:
        left, right, length = given
        term = _sum(left, right, length, work)
        for v, within, axis in zip((left, right), inner, (2, 1), strict=True):
            if within:
                term = _scaled(term, v.scale[..., 0], axis)
        return total + term, None

    return lax.scan(turn, jnp.zeros(out, work), (*cuts, lengths))[0]


def _sum(x: Coded, w: Coded, length: Any, work: Any) -> Array:
    """The sums of one block of `length` numbers, in which zero points do not change."""
    if x.elements.dtype == w.elements.dtype == jnp.int8:
        return _integer_sum(x, w, length, work)
    kinds = {jnp.dtype(v.elements.dtype) for v in (x, w)}
    small = kinds <= {jnp.dtype(t) for t in (jnp.int8, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)}
    given = work if not small or any(v.zero is not None for v in (x, w)) else jnp.bfloat16
    left, right = (
        v.elements if v.zero is None else v.elements.astype(work) - _row(v.zero).astype(work) for v in (x, w)
    )
    units = kinds <= {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)}

    def native(a: Array, b: Array) -> Array:
        return _dot(a, b, work) if units else _dot(a.astype(given), b.astype(given), work)

    def by_panels(a: Array, b: Array) -> Array:
        return _panels(lambda a, b: _dot(a.astype(work), b.astype(work), work), a, b)

    return on_cpu_or_else(by_panels, native, left, right)


def _integer_sum(x: Coded, w: Coded, length: Any, work: Any) -> Array:
    """The exact sum, rounded once. One that int32 may not hold is cut, and its parts are added as halves of 16 bits."""
    widest = [128 if v.zero is None else 255 for v in (x, w)]
    most = (2**31 - 1) // math.prod(widest) // _PANEL * _PANEL
    size = x.elements.shape[-1]
    parts = []
    for start in range(0, size, most):
        a, b = (v.elements[..., start : start + most] for v in (x, w))
        total = on_cpu_or_else(_whole_sum, partial(_dot, dtype=jnp.int32), a, b)
        count = length if size <= most else min(most, size - start)
        za, zb = (None if v.zero is None else _row(v.zero) for v in (x, w))
        if zb is not None:
            total = total - jnp.sum(a, -1, jnp.int32, keepdims=True) * zb.swapaxes(1, 2)
        if za is not None:
            total = total - za * jnp.sum(b, -1, jnp.int32)[:, None]
        if za is not None and zb is not None:
            total = total + count * za * zb.swapaxes(1, 2)
        parts.append(total)
    if len(parts) == 1:
        return parts[0].astype(work)
    high, low = (jnp.sum(jnp.stack(halves), 0) for halves in zip(*((v >> 16, v & 0xFFFF) for v in parts), strict=True))
    return high.astype(work) * 65536 + low.astype(work)


#: 1,024 products of integers of 8 bits have a sum of at most 2^24: every sum on the way is exact in float32.
_PANEL = 1024


def _row(zero: Array) -> Array:
    """The zero point of each row, (batch, rows, 1)."""
    return zero[..., :1]


def _whole_sum(a: Array, b: Array) -> Array:
    """A sum of integers in float32, exact, as XLA's CPU backend has no fast product of integers."""
    wide = lambda v: v.astype(jnp.float32)  # noqa: E731
    return _panels(lambda a, b: _dot(wide(a), wide(b), jnp.float32).astype(jnp.int32), a, b)


def _panels(product: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """A product panel by panel along the sum, added from the first to the last, so that no operand is written wide."""
    whole, rest = divmod(a.shape[-1], _PANEL)
    total = product(a[..., :_PANEL], b[..., :_PANEL])

    def panel(v: Array, i: Array) -> Array:
        return lax.dynamic_slice_in_dim(v, i * _PANEL, _PANEL, 2)

    if whole > 1:
        total = lax.fori_loop(1, whole, lambda i, total: total + product(panel(a, i), panel(b, i)), total)
    return total + product(a[..., -rest:], b[..., -rest:]) if rest and whole else total


def _dot(a: Array, b: Array, dtype: Any) -> Array:
    dims = (((2,), (2,)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)
