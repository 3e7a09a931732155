"""Product of a matrix with a matrix in codes and group scales, decoded a few groups at a time.

W[k, n] = s[k // group, n] * c[k, n]. With x_g and c_g the columns of x and the rows of c in group g,

    y = sum over g of s_g * (x_g @ c_g),

so the factors of a group's products are x and the values of the codes, which bfloat16 holds. The scale multiplies their
sum (in a large group, the sums of its pieces). All sums are float32, in an order that is not part of the definition.

Codes of b bits are packed along n, 8/b to a byte. Byte j of a row holds the columns 8/b * j + p, p = 0, ..., 8/b - 1.
Part p of W has these columns for one p and all j. The parts of W are never interleaved: there is a product for each
part, and the columns of the products are interleaved.
"""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import CARRIERS, FLOAT32, lax_where, low_mask
from jchop._core.rounding.codes import decode_elements
from jchop._core.rounding.grid import carrier_holds
from jchop._spec.spec import Spec
from jchop.formats import ElementFormat

#: The number of rows of W that are decoded at a time.
_DECODE_ROWS = 512


def dequantize_matmul_body(x: Array, codes: Array, scales: Array, *, format: ElementFormat, group: int) -> Array:
    """The product x @ W, of float32 sums, rounded to the dtype of `x`.

    Args:
        x: (m, k), float32 or bfloat16.
        codes: (k, ceil(n * bits / 8)) uint8, the codes of W packed along n.
        scales: (ceil(k / group), n), float32 or bfloat16.
        format: the format of the codes, of 2, 4 or 8 bits.
        group: the number of consecutive rows of W that share a scale; the last group may be smaller.
    """
    (m, k), n = x.shape, scales.shape[1]
    if not k:
        return jnp.zeros((m, n), x.dtype)
    scale_parts = part_columns(scales, 8 // format.bits)
    full_groups = k // group
    split = full_groups * group
    if not full_groups or split == k:
        total = _product_of_equal_groups(x, codes, scale_parts, format)
    else:
        total = _product_of_equal_groups(x[:, :split], codes[:split], scale_parts[:, :full_groups], format)
        total += _product_of_equal_groups(x[:, split:], codes[split:], scale_parts[:, full_groups:], format)
    return join_columns(total, n).astype(x.dtype)


def _product_of_equal_groups(x: Array, codes: Array, scales: Array, format: ElementFormat) -> Array:
    """The sum for groups of one size, (parts, m, n / parts).

    A step takes several small groups or a piece of a large group. The last step would end beyond the array; so it
    begins earlier, and omits the rows that earlier steps have added.
    """
    groups = scales.shape[1]
    group = x.shape[1] // groups
    rows = min(group, _DECODE_ROWS)
    groups_per_step = min(max(_DECODE_ROWS // group, 1), groups)
    pieces = -(-group // rows)
    steps = -(-groups // groups_per_step) * pieces

    def step(i: Array | int) -> Array:
        first_group, offset = i // pieces * groups_per_step, i % pieces * rows
        group_start = jnp.minimum(first_group, groups - groups_per_step)
        row_start = jnp.minimum(offset, group - rows)
        xs = lax.dynamic_slice_in_dim(x, group_start * group + row_start, groups_per_step * rows, 1)
        cs = lax.dynamic_slice_in_dim(codes, group_start * group + row_start, groups_per_step * rows, 0)
        xs, cs = xs.reshape(x.shape[0], groups_per_step, rows), cs.reshape(groups_per_step, rows, codes.shape[1])
        if groups % groups_per_step or group % rows:
            is_new = group_start + lax.iota(jnp.int32, groups_per_step) >= first_group
            is_new = is_new[:, None] & (row_start + lax.iota(jnp.int32, rows) >= offset)
            xs, cs = lax_where(is_new, xs, 0), lax_where(is_new[:, :, None], cs, 0)
        ss = lax.dynamic_slice_in_dim(scales, group_start, groups_per_step, 1)
        values = decode_parts(cs, format, x.dtype)
        return jnp.stack([_sum_over_groups(xs, part, s) for part, s in zip(values, ss, strict=True)])

    total = step(jnp.int32(0))
    return lax.fori_loop(jnp.int32(1), jnp.int32(steps), lambda i, partial_sum: partial_sum + step(i), total)


def _sum_over_groups(x: Array, values: Array, scales: Array) -> Array:
    """The sum over g of s_g * (x_g @ c_g), for x (m, g, k), c (g, k, n), s (g, n)."""
    products = multiply_code_values(x, values, (((2,), (1,)), ((1,), (0,))))
    return jnp.sum(products * scales[:, None, :].astype(jnp.float32), 0)


# -- shared with the kernels -------------------------------------------------------------------------------------------

_MATRIX_DIMENSIONS = (((1,), (0,)), ((), ()))


def is_exact_in(format: ElementFormat, dtype: str) -> bool:
    """Whether a carrier holds all values of a format of up to 8 bits, nonzero ones as normal numbers, never flushed."""
    carrier = CARRIERS[dtype]
    if format.smallest is None or not carrier_holds(Spec(format), carrier):
        return False
    largest = max(Fraction(format.max), -Fraction(format.min))
    return Fraction(format.smallest) >= Fraction(2) ** (1 - carrier.bias) and largest <= carrier.max


def decode_parts(code_bytes: Array, format: ElementFormat, dtype: np.dtype) -> tuple[Array, ...]:
    """The values of bytes of codes, for each part of W, in bfloat16 if `dtype` is that and holds them, else float32."""
    words, bits = code_bytes.astype(jnp.int32), format.bits
    codes = [words >> bits * part & low_mask(bits) for part in range(8 // bits)]
    narrow = dtype == jnp.bfloat16 and is_exact_in(format, "bfloat16")
    values = [decode_elements(code, format, FLOAT32, short=True) for code in codes]
    return tuple(value.astype(jnp.bfloat16) if narrow else value for value in values)


def multiply_code_values(x: Array, values: Array, dimensions: lax.DotDimensionNumbers = _MATRIX_DIMENSIONS) -> Array:
    """The float32 product of `x` with decoded values, of bfloat16 if both are, else of float32 in full precision."""
    if x.dtype != values.dtype:
        x, values = x.astype(jnp.float32), values.astype(jnp.float32)
    precision = lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    return lax.dot_general(x, values, dimensions, precision=precision, preferred_element_type=jnp.float32)


def part_columns(scales: Array, parts: int) -> Array:
    """The columns n of (g, n) sorted by their part of W, (parts, g, ceil(n / parts)); missing columns are 0."""
    groups, n = scales.shape
    columns = jnp.pad(scales, ((0, 0), (0, -n % parts)))
    return jnp.moveaxis(columns.reshape(groups, -(-n // parts), parts), 2, 0)


def join_columns(product: Array, n: int) -> Array:
    """(parts, m, ceil(n / parts)) as (m, n), the inverse of `part_columns`."""
    parts, m, width = product.shape
    return jnp.moveaxis(product, 0, 2).reshape(m, width * parts)[:, :n]
