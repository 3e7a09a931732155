"""Matrix products: `matmul`, with every product and sum rounded; `matmul_double`, from products of 8-bit integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jchop._common.bit_ops import CARRIERS, FLOAT32, in_auto_mesh, split_sign
from jchop._common.checks import as_numpy, check, check_bool, check_choice, check_float, keyword_hints
from jchop._common.gradients import CustomJvp
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.arithmetic.basic import multiply_and_round
from jchop._core.arithmetic.exact import carrier_range
from jchop._core.elementary import pairs
from jchop._core.elementary.pairs import FloatPair
from jchop._core.matmul.matmul import MatmulPlan, matmul_body
from jchop._core.matmul.operations import check_matmul, operation_carrier, spec_draws
from jchop._core.rounding.codes import decode_elements
from jchop._core.rounding.random_bits import seed_words
from jchop._core.xla.gpu import pad_to_whole_words
from jchop._kernels.primitive import IMPLEMENTATIONS, Impl, by_platform
from jchop._kernels.products.matmul import matmul_op
from jchop._round.arguments import Key, as_operands, rounding_key, run_on_operands
from jchop._round.round_to_format import round_to_format
from jchop._spec.accumulation import MatmulSpec, SumSpecLike, as_matmul_spec
from jchop._spec.spec import Spec
from jchop._storage import quantize
from jchop._storage._codes import decode_unscaled
from jchop.math._call import broadcast_shape, round_to_dtype


@keyword_hints(
    dict.fromkeys(("accumulate", "product", "operands", "order", "fused"), "MatmulSpec('e4m3fn', accumulate='e8m9')")
)
def matmul(a: Any, b: Any, spec: SumSpecLike, key: Key = None, *, impl: Impl = "auto", trace: bool = False) -> Any:
    """The matrix product of `a` and `b` in an emulated arithmetic: operands, every product and every sum rounded.

    Each rounding is applied once, to the exact result of its operation, without an intermediate rounding to the
    carrier, in every mode. The sums are formed in the order of `spec`. With the orders ``sequential``, ``blocked`` and
    ``pairwise`` the result is the same bits on every device. With ``matrix_unit`` it is the same if the sum of a block
    is exact in the carrier. Otherwise it depends on the additions of the device. For the errors of the orders see N. J.
    Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., chapters 3 and 4.

    The arithmetic is emulated in a carrier: float32, or float64 if `a` and `b` are float64. Operands with 16 bits are
    widened to float32, and the result is cast to their dtype. If ``spec.accumulate`` is None, sums are formed in the
    carrier, in the given order, **not** in a 16-bit dtype. The result is rounded to that dtype at the end, as in
    `jax.numpy.matmul`. Products of a fused multiply-add or of a matrix unit are not rounded.

    Works under jit (with `spec` static), vmap, scan, remat, shard_map and export. Derivatives are straight-through: the
    derivatives of the carrier's product of the rounded operands at full precision, in forward and reverse mode.

    Args:
        a: the left factor, float16, bfloat16, float32 or float64, shape (..., m, k), or (k,) as in `jax.numpy.matmul`.
        b: the right factor, of the same dtype, or promoted as in `jax.numpy`, shape (..., k, n) or (k,). The leading
            axes broadcast.
        spec: a `jchop.MatmulSpec`: the roundings and the order of the sums. A `jchop.Spec`, a format or text applies to
            the operands, every product and every sum, in sequential order.
        key: a typed key (`jax.random.key`), required if any rounding of `spec` is stochastic. It is split into four,
            for the elements of `a`, the elements of `b`, the products and the sums. The word of a product or sum of the
            output element with the flat (C order) index o has the index ``step 2^32 + o`` in the stream. The step
            is k for the product a_k b_k and for its sequential addition, also in a block. It is K + j for the addition
            of block j to the total (j in ``matrix_unit`` order). In pairwise order it is the first index of the right
            part. So the bits do not depend on tiling, device or sharding. Inside `jax.shard_map` each shard counts its
            own elements and needs a different key (`jax.random.fold_in`).
        impl: ``"auto"`` (default) for the faster program, ``"xla"`` for the portable body. ``"pallas"`` for the TPU's
            or GPU's kernel, with an error if it cannot run.
        trace: for the accumulator after each step in place of the product, as a testbench compares it. Default False.

    Returns:
        The product, of the shape of `jax.numpy.matmul` and the dtype of `a` and `b`. It is a NumPy array if both are
        NumPy arrays or convertible to them, else a JAX array. With k = 0 it is +0. With `trace` the sums along a first
        axis, in the carrier. In sequential order there is one after each product, with ``promote_every`` one after each
        promoted part, else one after each block. They have no derivatives, and do not include the tensor scales of
        operands.

    Raises:
        TypeError: for a dtype that is neither a carrier nor of integers or booleans. For an invalid spec, or a key that
            is not a typed key.
        ValueError: for shapes that do not match, or a stochastic spec without a key. For a carrier that is too narrow
            for a rounding: the message names a suitable dtype. For too many elements or steps for the random stream.
        NotImplementedError: at compilation, if ``impl="pallas"`` cannot run; the message has the reason.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> ones = jnp.ones(100)
        >>> float(jc.math.matmul(ones, ones, jc.MatmulSpec(accumulate="e5m2")))
        8.0
        >>> float(jc.math.matmul(ones, ones, jc.MatmulSpec(accumulate="e5m2", order="pairwise")))
        96.0
        >>> jc.math.matmul(ones[:5], ones[:5], jc.MatmulSpec(order="blocked(2)"), trace=True).tolist()
        [2.0, 4.0, 5.0]
    """
    spec = as_matmul_spec(spec)
    check_choice("impl", impl, IMPLEMENTATIONS)
    x, y = as_operands("ab", (a, b))
    carrier = operation_carrier(x.dtype)
    check_matmul(spec, x.dtype, allow_scales=True)
    check_matmul_shapes(x.shape, y.shape)
    if check_bool("trace", trace) and (spec.order.kind == "pairwise" or impl == "pallas"):
        raise ValueError(f"trace=True has no accumulator for order='{spec.order}' and impl={impl!r}")
    key = rounding_key(key, spec.stochastic, spec)
    if key is not None:
        _check_random_stream_size(x, y, MatmulPlan(spec, carrier, x.shape[-1]))
    return run_on_operands(partial(_traced_matmul, spec=spec, impl=impl, trace=trace), (x, y), key)


# -- the traced part ---------------------------------------------------------------------------------------------------


@partial(always_jit, static_argnames=("spec", "impl", "trace"), inline=True)
def _traced_matmul(a: Array, b: Array, key: Key, *, spec: MatmulSpec, impl: str, trace: bool) -> Array:
    return in_auto_mesh(
        partial(_matmul_of_any_shape, spec=spec, impl=impl, trace=trace),
        *(a, b, key),
        along=((-1,), (-2 if b.ndim > 1 else -1,), ()),
        like=lambda a, b, key: jnp.stack([jnp.matmul(a, b)] * _steps(a.shape[-1], spec)) if trace else jnp.matmul(a, b),
    )


def _matmul_of_any_shape(a: Array, b: Array, key: Key, *, spec: MatmulSpec, impl: str, trace: bool) -> Array:
    """The product of arrays as NumPy's matmul has it, in the order of a MatmulSpec, with random words of `key`."""
    keys = None if key is None else split_prng_key(key, 4)
    x, y = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    draws = spec_draws(spec.product) or spec_draws(spec.accumulate)
    seeds = None if keys is None or not draws else jnp.stack([*seed_words(keys[2]), *seed_words(keys[3])])
    left, right = (
        _matmul_operand(v, i, spec.operands, None if keys is None else keys[i]) for i, v in enumerate((x, y))
    )

    def multiply(left: Sequence[Array], right: Sequence[Array]) -> Array:
        scaled_parts = tuple(v for pair in zip(left[1:], right[1:], strict=True) for v in pair)
        if trace:
            operands = scaled_parts[:4] or (left[0], right[0])
            return matmul_body(*operands, *(() if seeds is None else (seeds,)), spec=spec, trace=True)
        return _batch_product(spec, impl, a.dtype, left[0], right[0], seeds, scaled_parts)

    if y.ndim == 2:  # one matrix for all rows of x
        # In two steps: explicit shardings support no other reshape.
        rows = [v.reshape(math.prod(v.shape[:-1]), v.shape[-1])[None] for v in left]
        out = jnp.squeeze(multiply(rows, [v[None] for v in right]), -3)
    else:
        batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        out = multiply([_as_one_batch(v, batch) for v in left], [_as_one_batch(v, batch) for v in right])
    return out.reshape(out.shape[:trace] + _matmul_shape(a, b))


def _steps(k: int, spec: MatmulSpec) -> int:
    """The number of accumulators of a trace."""
    return -(-k // (spec.order.promote_every or spec.order.block or 1))


def _matmul_shape(a: Any, b: Any) -> tuple[int, ...]:
    """The shape of the product."""
    return (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *a.shape[:-1][-1:], *b.shape[1:][-1:])


def _matmul_operand(x: Array, side: int, spec: Spec | None, key: Key) -> tuple[Array, ...]:
    """The rounded numbers; of a scaled format also the elements, the scales of groups, and a scale of each row.

    The groups lie along the summed axis. Derivatives use the numbers alone.
    """
    wide = x.astype(jnp.float32) if x.dtype.itemsize == 2 else x
    if spec is None or spec.scaled is None:
        return (wide if spec is None else round_to_format(wide, spec, key),)
    rows = wide if side == 0 else wide.swapaxes(-1, -2)
    qarray = quantize(rows, spec)
    elements = decode_unscaled(qarray.qvalue, spec.scaled.element, rows.shape[-1], FLOAT32)
    scales, *tensor_scales = qarray.scale if isinstance(qarray.scale, tuple) else (qarray.scale,)
    if not jnp.issubdtype(scales.dtype, jnp.floating):
        scales = decode_elements(scales, spec.scaled.scale_format, FLOAT32)
    row_scales = jnp.broadcast_to(tensor_scales[0], (*rows.shape[:-1], 1)) if tensor_scales else None
    parts = [round_to_format(rows, spec), elements, scales.astype(jnp.float32), *[row_scales] * bool(tensor_scales)]
    return tuple(v if side == 0 else v.swapaxes(-1, -2) for v in parts)


def _as_one_batch(x: Array, batch: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(x, batch + x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:])


@partial(CustomJvp, nondiff_argnums=(0, 1, 2))
def _batch_product(
    spec: MatmulSpec, impl: str, dtype: Any, x: Array, y: Array, seeds: Array | None, scaled_parts: tuple[Array, ...]
) -> Array:
    """The product of rounded arrays of shapes (batch, m, k) and (batch, k, n).

    If they have a scaled format, `scaled_parts` has the elements, the scales and the scales of rows and columns, of
    each side.
    """
    a, b, *scales = scaled_parts[:4] or (x, y)
    result = matmul_op(a, b, *scales, *(() if seeds is None else (seeds,)), impl=impl, spec=spec)
    if scaled_parts[4:]:
        result = _multiply_scales(result, _multiply_scales(scaled_parts[4], scaled_parts[5]))
    return round_to_dtype(result, spec, dtype)


def _multiply_scales(x: Array, y: Array) -> Array:
    """The float32 product, to nearest."""
    carrier = FLOAT32
    full_range = carrier_range(carrier)
    x, y = jnp.broadcast_arrays(x, y)
    return multiply_and_round(x, y, None, carrier, None, full_range, full_range)


@partial(_batch_product.defjvp, symbolic_zeros=True)
def _batch_product_jvp(spec: MatmulSpec, impl: str, dtype: Any, primals: tuple, tangents: tuple) -> tuple[Array, Any]:
    x, y = primals[:2]
    dx, dy = tangents[:2]
    out = _batch_product(spec, impl, dtype, *primals)
    tangent = _sum_of_products((dx, y), (x, dy))
    return out, jnp.zeros_like(out) if tangent is None else tangent.astype(dtype)


def _sum_of_products(*factors: tuple[Any, Any]) -> Array | None:
    """The sum of the carrier's products at full precision, without products of a zero; None if none is left."""
    terms = [
        jnp.matmul(left, right, precision=lax.Precision.HIGHEST)
        for left, right in factors
        if not isinstance(left, SymbolicZero) and not isinstance(right, SymbolicZero)
    ]
    return sum(terms[1:], terms[0]) if terms else None


# -- checks ------------------------------------------------------------------------------------------------------------


def check_matmul_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    for name, shape in (("a", a), ("b", b)):
        check(shape, f"{name} is a scalar; a matrix product needs at least one axis")
    if a[-1] != b[-2:][0]:
        raise ValueError(
            f"a has shape {a} and b has shape {b}: the last axis of a and the {'last but one' if b[1:] else 'only'} "
            "axis of b must be of one length"
        )
    broadcast_shape(f"a has shape {a} and b has shape {b}: their leading axes do not broadcast", a[:-2], b[:-2])


def _check_random_stream_size(a: Any, b: Any, plan: MatmulPlan) -> None:
    """Steps and output elements are numbered in 32 bits each."""
    if not plan.draws:
        return
    for what, count in (("elements in the product", math.prod(_matmul_shape(a, b))), ("steps of a sum", 2 * plan.k)):
        if count > 1 << 32:
            raise ValueError(f"{count} {what} are more than the 2^32 that random bits are drawn for; use smaller parts")


# == double precision, from products of 8-bit integers =================================================================


#: Bits of a slice. A digit is an integer from -127 to 127, and from -64 to 64 in all slices but the first.
_SLICE_BITS = 7
#: The most slices, and the largest number of products of two digits whose sum int32 holds for sure.
_MOST_SLICES, _EXACT_TERMS = 9, 1 << 17
#: The error of s slices is below this times 2^(-7 s).
_ERROR_FACTOR = 4.2


def matmul_double(a: Any, b: Any, *, tolerance: float = 2.0**-53) -> Any:
    """The matrix product of `a` and `b` in double precision, computed with products of 8-bit integers.

    The scheme of Ozaki et al. (Numer. Algorithms 59 (2012) 95; on integer units Ootomo, Ozaki and Yokota, arXiv
    2306.11975). Each row of `a` and each column of `b` is divided by a power of two. Then it is cut into s slices of 7
    bits, of integers from -127 to 127. The products of slices i and j with i + j <= s, counted from 0, are matrix
    products of int8. Their int32 sums are exact, and int8 units compute them. They are added from the smallest to the
    largest.

    With k the number of products in a sum and m the largest magnitudes of a row and of a column, each result c has

        abs(error) <= 4.2 * 2^(-7 s) k m_a m_b + 2^-52 (abs(c) + 2^-6 k m_a m_b),

    and 2^-46 in place of 2^-52 for pairs. So numbers that are far smaller than others of their row keep fewer bits. The
    default, s = 8, is about as exact as a float64 product if a row spans few orders of magnitude. An infinity or NaN
    has the effect that it has in `jax.numpy.matmul`. Subnormal numbers may count as zero, as on the device.

    Works under jit, vmap and grad, in forward and reverse mode. The derivative is the product of the dtype at highest
    precision: float64, or float32 for a pair. The low parts of a pair have the derivatives of the high ones.

    Args:
        a: the left factor, of shape (..., m, k), or (k,) as in `jax.numpy.matmul`. Either a float64 array, or integers
            or lists that become one. Or, for devices without float64, a pair (high, low) of float32 arrays of one
            shape, which stands for high + low. The magnitude of low is at most half a unit in the last place of high.
        b: the right factor, of the same kind, of shape (..., k, n) or (k,). The leading axes broadcast.
        tolerance: the first term of the error over k m_a m_b, from 4.6e-19 to 1. The number of slices is the least that
            reaches it: 8 for the default 2^-53, 4 for 2e-8. The work grows as its square.

    Returns:
        The product, of the shape of `jax.numpy.matmul`. It is float64, and NumPy if both factors are NumPy arrays or
        lists. If the factors are pairs, it is a pair of float32 arrays.

    Raises:
        TypeError: for factors that are neither float64 nor pairs of float32, or one of each kind.
        ValueError: for shapes that do not match, or a tolerance out of range.

    Example:
        >>> import numpy as np, jchop as jc
        >>> jc.math.matmul_double([[1.0, 2.0**-30]], [[1.0], [2.0**-30]]).tolist() == [[1 + 2.0**-60]]
        True
        >>> third = np.float32(1 / 3)
        >>> high, low = jc.math.matmul_double(([third], [third * 2.0**-26]), ([third], [0.0]))
        >>> float(high) + float(low) == float(third) ** 2 * (1 + 2.0**-26)
        True
    """
    slices = slice_count(tolerance)
    if isinstance(a, tuple) != isinstance(b, tuple):
        raise TypeError("a and b must be of one kind: two float64 arrays, or two pairs (high, low) of float32 arrays")
    if isinstance(a, tuple):
        x, y = _as_float32_pair("a", a), _as_float32_pair("b", b)
        check_matmul_shapes(x[0].shape, y[0].shape)
        return run_on_operands(partial(_traced_product_by_slices, count=slices), (*x, *y), None)
    x, y = as_operands("ab", (a, b))
    if x.dtype.name != "float64":
        raise TypeError(
            f"a and b have dtype {x.dtype} and must be float64 (with jax_enable_x64), or pairs (high, low) of float32 "
            "arrays, as in (x, zeros)"
        )
    check_matmul_shapes(x.shape, y.shape)
    return run_on_operands(partial(_traced_product_by_slices, count=slices), (x, y), None)


def slice_count(tolerance: float) -> int:
    """The least number of slices s with 4.2 2^(-7 s) <= tolerance.

    Raises:
        TypeError, ValueError: for a tolerance that is no number in the range of `matmul_double`.
    """
    errors = [_ERROR_FACTOR * 2.0 ** (-_SLICE_BITS * count) for count in range(1, _MOST_SLICES + 1)]
    tolerance = check_float("tolerance", tolerance, errors[-1], 1)
    return next(count for count, error in enumerate(errors, 1) if error <= tolerance)


def _as_float32_pair(name: str, value: tuple) -> tuple[Any, Any]:
    """The parts of a pair, float32 arrays of one shape."""
    if len(value) != 2:
        raise TypeError(f"{name} has {len(value)} parts; a pair (high, low) has two")
    parts = []
    for part in value:
        part = part if isinstance(part, Array) else as_numpy(name, part)
        is_float32 = isinstance(part, Array | np.ndarray) and part.dtype.name == "float32"
        if not is_float32 and (isinstance(part, Array) or np.any(part != part.astype(np.float32))):
            raise TypeError(f"{name} has a part of dtype {part.dtype}; the parts of a pair are float32 arrays")
        parts.append(part if is_float32 else part.astype(np.float32))
    if parts[0].shape != parts[1].shape:
        raise ValueError(f"{name} has parts of the shapes {parts[0].shape} and {parts[1].shape}, which must be equal")
    return parts[0], parts[1]


# -- the traced part ---------------------------------------------------------------------------------------------------


@partial(always_jit, static_argnames=("count",), inline=True)
def _traced_product_by_slices(*parts_and_key: Any, count: int) -> Any:
    """The product of two arrays, or of two pairs as a pair, by slices of digits; the last argument, a key, is None."""
    parts = tuple(map(jnp.asarray, parts_and_key[:-1]))
    half = len(parts) // 2
    product = _product_by_slices(parts[:half], parts[half:], count)
    return product[0] if half == 1 else product


@partial(CustomJvp, nondiff_argnums=(2,))
def _product_by_slices(a: tuple[Array, ...], b: tuple[Array, ...], count: int) -> tuple[Array, ...]:
    """The product of numbers given as sums of one or two arrays, as such a sum."""
    shape = jax.eval_shape(jnp.matmul, a[0], b[0]).shape
    a = tuple(part[None] if part.ndim == 1 else part for part in a)
    b = tuple(part[:, None] if part.ndim == 1 else part for part in b)
    (left, left_exponent), (right, right_exponent) = _slice_digits(a, -1, count), _slice_digits(b, -2, count)
    product = _sum_of_slice_products(left, right, count, is_pair=len(a) == 2)
    product = tuple(_times_power_of_two(part, left_exponent + right_exponent) for part in product)
    is_finite = jnp.isfinite(a[0]).all() & jnp.isfinite(b[0]).all()
    product = lax.cond(is_finite, lambda *_: product, lambda x, y: _with_infinities_and_nan(product, x, y), a[0], b[0])
    return tuple(part.reshape(shape) for part in product)


@partial(_product_by_slices.defjvp, symbolic_zeros=True)
def _product_by_slices_jvp(count: int, primals: tuple, tangents: tuple) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The product and its tangent, da b + a db, from the first arrays of the sums."""
    (a, b), (da, db) = primals, tangents
    out = _product_by_slices(a, b, count)
    tangent = _sum_of_products(*((d, b[0]) for d in da), *((a[0], d) for d in db))
    first = jnp.zeros_like(out[0]) if tangent is None else tangent
    return out, (first, *map(jnp.zeros_like, out[1:]))


def _with_infinities_and_nan(total: tuple[Array, ...], a: Array, b: Array) -> tuple[Array, ...]:
    """The results, with the infinities and NaN that the factors' ones give: terms are counted, by integers too."""
    (a_sign, a_inf, a_nan, a_zero), (b_sign, b_inf, b_nan, b_zero) = map(_sign_inf_nan_zero, (a, b))
    finite = a_sign * (1 - abs(a_inf))  # so that inf times inf is one term
    zeros, ones = jnp.zeros_like(a_sign), jnp.ones_like(a_sign)
    left = [(a_inf, finite, zeros, zeros), (abs(a_inf), abs(finite), zeros, zeros), (a_nan, ones, abs(a_inf), a_zero)]
    zeros, ones = jnp.zeros_like(b_sign), jnp.ones_like(b_sign)
    right = [(b_sign, b_inf, zeros, zeros), (abs(b_sign), abs(b_inf), zeros, zeros), (ones, b_nan, b_zero, abs(b_inf))]
    columns = jnp.stack([jnp.concatenate(parts, -1) for parts in left], -3)
    rows = jnp.stack([jnp.concatenate(parts, -2) for parts in right], -3)
    counts = _int8_matmul(columns, rows)
    # The infinite terms, of which terms of unlike signs cancel; their number; the number of terms that are NaN.
    infinity_signs, infinite_terms, nan_terms = (counts[..., i, :, :] for i in range(3))
    special = jnp.where(infinity_signs < 0, -jnp.inf, jnp.inf).astype(total[0].dtype)
    special = jnp.where((nan_terms > 0) | (abs(infinity_signs) != infinite_terms), jnp.nan, special)
    is_finite = (infinite_terms == 0) & (nan_terms == 0)
    return (jnp.where(is_finite, total[0], special), *(jnp.where(is_finite, part, 0) for part in total[1:]))


def _sign_inf_nan_zero(x: Array) -> tuple[Array, ...]:
    """Four arrays of int8: signs, 0 for NaN; signs of infinities alone; 1 for NaN; 1 for zero."""
    sign = jnp.where(jnp.isnan(x), 0, jnp.sign(x)).astype(jnp.int8)
    return sign, sign * jnp.isinf(x), jnp.isnan(x).astype(jnp.int8), (x == 0).astype(jnp.int8)


def _slice_digits(x: tuple[Array, ...], axis: int, count: int) -> tuple[Array, Array]:
    """The digits of x 2^(7 - e) in base 128, the first before the point, on a new first axis; and e.

    There is one e for each row (axis -1) or column (axis -2).
    """
    carrier = CARRIERS[x[0].dtype.name]
    x = tuple(jnp.where(jnp.isfinite(part), part, 0) for part in x)
    magnitude = split_sign(x[0], carrier)[1].max(axis, keepdims=True, initial=0)
    # The least e with |x| < (1 - 2^-8) 2^e, so that no first digit is 128.
    upper = magnitude + (1 << (carrier.fraction - _SLICE_BITS))
    exponent = jnp.where(magnitude == 0, 0, (upper >> carrier.fraction) - carrier.bias + 1).astype(jnp.int32)

    def split_digit(remainder: tuple[Array, ...], _: None) -> tuple[tuple[Array, ...], Array]:
        digit = jnp.round(remainder[0])
        high = remainder[0] - digit
        remainder = tuple(pairs.two_sum(high, remainder[1])) if remainder[1:] else (high,)
        return tuple(part * (1 << _SLICE_BITS) for part in remainder), digit.astype(jnp.int8)

    # A loop, because XLA would compute the digits before a digit anew for each use.
    _, digits = lax.scan(
        split_digit, tuple(_times_power_of_two(part, _SLICE_BITS - exponent) for part in x), None, length=count
    )
    return digits, exponent


def _times_power_of_two(x: Array, exponent: Array) -> Array:
    """The numbers x 2^exponent, by two factors, since one may be beyond the range of a carrier."""
    carrier = CARRIERS[x.dtype.name]
    half = exponent >> 1
    for exponent_part in (half, exponent - half):
        factor_bits = (exponent_part.astype(carrier.work) + carrier.bias) << carrier.fraction
        x = x * lax.bitcast_convert_type(factor_bits, x.dtype)
    return x


def _sum_of_slice_products(left: Array, right: Array, count: int, is_pair: bool) -> tuple[Array, ...]:
    """The sum of the products of slices whose numbers add up to at most `count`, the smallest first.

    It is a loop with one product, since XLA compiles each product of integers for a CPU in a tenth of a second.
    """
    slice_pairs = [(i, j) for i in range(count) for j in range(count) if i + j <= count]
    order = np.array(sorted(slice_pairs, key=sum, reverse=True), np.int32)
    dtype = np.float32 if is_pair else np.float64
    units = (2.0 ** (-_SLICE_BITS * (order.sum(1) + 2))).astype(dtype)
    shape = jax.eval_shape(jnp.matmul, left[0], right[0]).shape
    zero = jnp.zeros(shape, dtype)

    def add(total: tuple[Array, ...], step: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
        (i, j), unit = step
        a, b = (lax.dynamic_index_in_dim(v, n, keepdims=False) for v, n in ((left, i), (right, j)))
        for start in range(0, max(a.shape[-1], 1), _EXACT_TERMS):
            stop = start + _EXACT_TERMS
            product = _int8_matmul(a[..., start:stop], b[..., start:stop, :])
            term = _as_float_sum(product, unit, is_pair)
            total = tuple(FloatPair(*total) + FloatPair(*term)) if is_pair else (total[0] + term[0],)
        return total, None

    return lax.scan(add, (zero, zero) if is_pair else (zero,), (jnp.asarray(order), jnp.asarray(units)))[0]


def _int8_matmul(a: Array, b: Array) -> Array:
    """The product of matrices of int8, exact in int32."""

    def multiply_int8(a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, preferred_element_type=jnp.int32)

    return by_platform(
        lambda a, b: multiply_int8(pad_to_whole_words(a), pad_to_whole_words(b, -2)), a, b, cpu=multiply_int8
    )


def _as_float_sum(integers: Array, unit: Array, is_pair: bool) -> tuple[Array, ...]:
    """Integers of 32 bits times a power of two, exactly: float64, or a sum of two float32 numbers."""
    if not is_pair:
        return (integers.astype(jnp.float64) * unit,)
    high = integers >> 12
    parts = high.astype(jnp.float32) * (unit * 4096), (integers & 4095).astype(jnp.float32) * unit
    return tuple(pairs.two_sum(*parts))
