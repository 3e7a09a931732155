"""`matmul`: a matrix product in which every product and every sum is rounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jchop._common.bit_ops import FLOAT32, in_auto_mesh
from jchop._common.checks import check_bool, check_choice, keyword_hints
from jchop._common.gradients import CustomJvp
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.arithmetic.basic import multiply_and_round
from jchop._core.arithmetic.ranges import carrier_range
from jchop._core.matmul.matmul import MatmulPlan, matmul_body
from jchop._core.matmul.operations import check_matmul, operation_carrier
from jchop._core.rounding.codes import decode_elements
from jchop._core.rounding.random_bits import seed_words
from jchop._kernels.primitive import IMPLEMENTATIONS, Impl
from jchop._kernels.products.matmul import matmul_op
from jchop._round.arguments import as_operands, rounding_key, run_on_operands
from jchop._round.round_to_format import round_to_format
from jchop._spec.accumulation import MatmulSpec, SumSpecLike, as_matmul_spec
from jchop._spec.spec import Spec
from jchop.math._call import round_to_dtype
from jchop.storage import quantize
from jchop.storage._codes import decode_unscaled

Array = jax.Array


@keyword_hints(
    dict.fromkeys(("accumulate", "product", "operands", "order", "fused"), "MatmulSpec('e4m3fn', accumulate='e8m9')")
)
def matmul(
    a: Any, b: Any, spec: SumSpecLike, key: Array | None = None, *, impl: Impl = "auto", trace: bool = False
) -> Any:
    """The matrix product of `a` and `b` in an emulated arithmetic: operands, every product and every sum rounded.

    Each rounding is applied once, to the exact result of its operation, without an intermediate rounding to the
    carrier, in every mode. The sums are formed in the order of `spec`. With the orders ``sequential``, ``blocked`` and
    ``pairwise`` the result is the same bits on every device. With ``matrix_unit`` it is the same if the sum of a block
    is exact in the carrier; otherwise it depends on the additions of the device. For the errors of the orders see N. J.
    Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., chapters 3 and 4.

    The arithmetic is emulated in a carrier: float32, or float64 if `a` and `b` are float64. 16-bit operands are widened
    to float32, and the result is cast to their dtype. If ``spec.accumulate`` is None, the sums are formed in the
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
            for the elements of `a`, the elements of `b`, the products and the sums. The word of a product or sum has
            the index ``step 2^32 + o`` in the stream, with o the flat (C order) index of the output element. The step
            is k for the product a_k b_k and for its sequential addition, also in a block; K + j for the addition of
            block j to the total (j in ``matrix_unit`` order); and in pairwise order the first index of the right part.
            So the bits do not depend on tiling, device or sharding. Inside `jax.shard_map` each shard counts its own
            elements and needs a different key (`jax.random.fold_in`).
        impl: ``"xla"`` for the portable body, ``"pallas"`` for the TPU's or GPU's kernel, with an error if it cannot
            run, ``"auto"`` (default) for the faster one.
        trace: for the accumulator after each step in place of the product, as a testbench compares it. Default False.

    Returns:
        The product, of the shape of `jax.numpy.matmul` and the dtype of `a` and `b`; NumPy if both are NumPy arrays or
        convertible to them, else JAX. With k = 0 it is +0. With `trace` the sums along a first axis, in the carrier:
        after each product in sequential order, after each promoted part with ``promote_every``, else after each block.
        They have no derivatives, and do not include the tensor scales of operands.

    Raises:
        TypeError: for a dtype that is neither a carrier nor of integers or booleans, an invalid spec, or a key that is
            not a typed key.
        ValueError: for shapes that do not match, a stochastic spec without a key, a carrier that is too narrow for a
            rounding (the message names a suitable dtype), or too many elements or steps for the random stream.
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
def _traced_matmul(a: Array, b: Array, key: Array | None, *, spec: MatmulSpec, impl: str, trace: bool) -> Array:
    return in_auto_mesh(
        partial(_matmul_of_any_shape, spec=spec, impl=impl, trace=trace),
        *(a, b, key),
        along=((-1,), (-2 if b.ndim > 1 else -1,), ()),
        like=lambda a, b, key: jnp.stack([jnp.matmul(a, b)] * _steps(a.shape[-1], spec)) if trace else jnp.matmul(a, b),
    )


def _matmul_of_any_shape(a: Array, b: Array, key: Array | None, *, spec: MatmulSpec, impl: str, trace: bool) -> Array:
    keys = None if key is None else split_prng_key(key, 4)
    x, y = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    seeds = None if keys is None else _matmul_seeds(keys, spec)
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


def _matmul_seeds(keys: Array, spec: MatmulSpec) -> Array | None:
    """The seeds of products and sums, if either is stochastic."""
    draws = any(rounding is not None and rounding.rounding.stochastic for rounding in (spec.product, spec.accumulate))
    return jnp.stack([*seed_words(keys[2]), *seed_words(keys[3])]) if draws else None


def _matmul_operand(x: Array, side: int, spec: Spec | None, key: Array | None) -> tuple[Array, ...]:
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
    multiply = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    terms = [
        multiply(left, right)
        for left, right in ((dx, y), (x, dy))
        if not isinstance(left, SymbolicZero) and not isinstance(right, SymbolicZero)
    ]
    return out, sum(terms[1:], terms[0]).astype(dtype) if terms else jnp.zeros_like(out)


# -- checks ------------------------------------------------------------------------------------------------------------


def check_matmul_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    for name, shape in (("a", a), ("b", b)):
        if not shape:
            raise ValueError(f"{name} is a scalar; a matrix product needs at least one axis")
    if a[-1] != b[-2:][0]:
        raise ValueError(
            f"a has shape {a} and b has shape {b}: the last axis of a and the {'last but one' if b[1:] else 'only'} "
            "axis of b must be of one length"
        )
    try:
        np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError:
        raise ValueError(f"a has shape {a} and b has shape {b}: their leading axes do not broadcast") from None


def _check_random_stream_size(a: Any, b: Any, plan: MatmulPlan) -> None:
    """Steps and output elements are numbered in 32 bits each."""
    if not plan.draws:
        return
    for what, count in (("elements in the product", math.prod(_matmul_shape(a, b))), ("steps of a sum", 2 * plan.k)):
        if count > 1 << 32:
            raise ValueError(f"{count} {what} are more than the 2^32 that random bits are drawn for; use smaller parts")
