"""`dot`, `einsum` and `ragged_dot` of stored arrays, whose codes are multiplied."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jchop._common.checks import call_hint, check_choice
from jchop._common.settings import always_jit
from jchop._program.bind import straight_through
from jchop._quantized.products.codes import CodedArray, check_code_format, encode_operand, expand_codes
from jchop._quantized.products.contraction import einsum_dimensions
from jchop._quantized.products.operand_layout import OperandLayout
from jchop._quantized.products.product import DotProduct, RaggedProduct
from jchop._round.arguments import JCHOP_SCOPE, as_array, carrier_of_dtype, is_integer_or_bool, mark_results
from jchop._storage import QArray, dequantize
from jchop._storage._array import refuse_qarray_dicts
from jchop._storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, axis_groupings
from jchop._storage._codes import batch_axes, spec_of_part
from jchop._storage._qwix import tokamax_ragged_dot


@call_hint("jchop.dot(x, w) of codes, or jchop.math.dot(x, w, 'bfloat16') of floats in an arithmetic")
def dot(x: Any, w: Any, *, dtype: Any = None) -> Array:
    """Multiplies the last axis of `x` with the last but one of `w`, by codes where an operand is stored.

    Args:
        x: a `QArray` or a float array, (..., k).
        w: a `QArray` or a float array, (k, n).
        dtype: the dtype of the result. Default: the common dtype of both operands.

    Returns:
        The product, (..., n), with sums as in `einsum`.

    Raises:
        TypeError, ValueError: as `einsum`.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> w = jc.quantize(jnp.array([[1.0, -2.0], [0.5, 4.0], [3.0, 1.0]]), "int8(group=all,axis=0)")
        >>> x = jc.quantize(jnp.array([[1.0, 2.0, 127.0]]), "int8(group=all)")
        >>> jc.dot(x, w)
        Array([[382.98425, 133.98425]], dtype=float32)
    """
    x, w = _checked_operands(x, w)
    for name, value, least in (("x", x, 1), ("w", w, 2)):
        if value.ndim < least or (name == "w" and value.ndim > least):
            raise ValueError(f"{name} has shape {tuple(value.shape)}; x must be (..., k) and w (k, n)")
    letters = "abcdefghij"[: x.ndim - 1]
    return einsum(f"{letters}y,yz->{letters}z", x, w, dtype=dtype)


@call_hint("jchop.einsum(subscripts, x, w) of codes, or jchop.math.einsum(subscripts, x, w, spec=spec) of floats")
def einsum(subscripts: str, x: Any, w: Any, *, dtype: Any = None) -> Array:
    """Computes `jax.numpy.einsum` of two arrays, by codes where an operand is stored.

    Integers of at most 8 bits are summed exactly in blocks that share their scales. The sums are scaled and added from
    the first block to the last, each step rounded in float32. Codes of floats are multiplied as float8 where float8 has
    their values. An operand that is no `QArray` is multiplied as it is, by elements in floating point. Its derivative
    is the derivative of the product with the stored numbers. Stored arrays have no derivative.

    Args:
        subscripts: a text as ``"ij,jk->ik"``, with the result.
        x: a `QArray` or a float array.
        w: a `QArray` or a float array.
        dtype: the dtype of the result. Default: the common dtype of both operands.

    Returns:
        The product.

    Raises:
        TypeError: if neither operand is a `QArray`.
        ValueError: for other subscripts, shapes that do not fit, a format whose codes cannot be multiplied, or groups
            that are no blocks along the sum.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> heads = jc.quantize(jnp.ones((4, 2, 8)), "int4(group=8)")
        >>> jc.einsum("bd,hed->bhe", jnp.ones((3, 8)), heads).shape
        (3, 4, 2)
    """
    x, w = _checked_operands(x, w)
    (contracting, batch), order, (left, right) = einsum_dimensions(subscripts, x.ndim, w.ndim)
    sizes: dict[str, int] = {}
    for name, letters, value in (("x", left, x), ("w", right, w)):
        for letter, n in zip(letters, value.shape, strict=True):
            if sizes.setdefault(letter, n) != n:
                raise ValueError(f"subscripts={subscripts!r}: {letter!r} is {sizes[letter]} in x and {n} in {name}")
    return _qarray_product(DotProduct(contracting, batch, (x.ndim, w.ndim)), x, w, dtype, order=order)


def ragged_dot(
    x: Any, w: Any, group_sizes: Any, *, dtype: Any = None, impl: Literal["auto", "tokamax"] = "auto"
) -> Array:
    """Multiplies rows with the matrices of their experts (`jax.lax.ragged_dot`), by codes where an operand is stored.

    The first ``group_sizes[0]`` rows of `x` are multiplied by ``w[0]``, the next by ``w[1]``, and so on. Rows beyond
    them give zeros.

    Args:
        x: a `QArray` or a float array, (m, k).
        w: a `QArray` or a float array, (experts, k, n).
        group_sizes: the number of rows of each expert, integers of shape (experts,).
        dtype: the dtype of the result. Default: the common dtype of both operands.
        impl: ``"tokamax"`` for ``tokamax.ragged_dot`` of operands as by `to_qwix`. Default ``"auto"``, jchop's product.

    Returns:
        The products, (m, n), with sums as in `einsum`.

    Raises:
        TypeError, ValueError: as `einsum`; as `to_qwix`.
        ModuleNotFoundError: without tokamax, if it is asked for.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> experts = jc.quantize(jnp.stack([jnp.eye(4), 2 * jnp.eye(4)]), "int8(group=all,axis=1)")
        >>> jc.ragged_dot(jnp.ones((3, 4)), experts, jnp.array([1, 2]))[:, 0]
        Array([1., 2., 2.], dtype=float32)
    """
    x, w = _checked_operands(x, w)
    sizes = jnp.asarray(group_sizes)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or sizes.shape != w.shape[:1]:
        raise ValueError(
            f"x, w and group_sizes have shapes {tuple(x.shape)}, {tuple(w.shape)} and {sizes.shape}; they must be "
            "(m, k), (experts, k, n) and (experts,)"
        )
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes has dtype {sizes.dtype}; it must be of integers")
    check_choice("impl", impl, ("auto", "tokamax"))
    if impl == "tokamax":
        return tokamax_ragged_dot(x, w, sizes, jnp.result_type(x.dtype, w.dtype) if dtype is None else dtype)
    return _qarray_product(RaggedProduct.of_rows(), x, w, dtype, sizes)


def _checked_operands(*operands: Any) -> list[Any]:
    """Both operands, of which one is a `QArray`; the other is a JAX array of numbers that a product can promote."""
    refuse_qarray_dicts("x", operands[0])
    refuse_qarray_dicts("w", operands[1])
    if not any(isinstance(value, QArray) for value in operands):
        raise TypeError("x, w: one of them must be a QArray; jchop.math.dot takes floats")
    arrays = []
    for name, value in zip("xw", operands, strict=True):
        as_it_is = isinstance(value, QArray) or hasattr(value, "__jax_array__")  # as a variable of Flax
        array = value if as_it_is else as_array(name, value)
        if not is_integer_or_bool(array.dtype):
            carrier_of_dtype(array.dtype, name)
        arrays.append(array if as_it_is else jnp.asarray(array))
    return arrays


def _qarray_product(
    product: DotProduct | RaggedProduct, x: Any, w: Any, dtype: Any, *extra: Array, order: tuple[int, ...] = (0, 1)
) -> Array:
    """A product of operands of which one at least is stored; `extra` are the sizes of a ragged one.

    The axes of the result are in this order.
    """
    contracting = product.forward.left.contracting, product.forward.right.contracting
    blocks = tuple(
        _qarray_block(name, value, axes) for name, value, axes in zip("xw", (x, w), contracting, strict=True)
    )
    dtype = jnp.result_type(x.dtype, w.dtype) if dtype is None else jnp.dtype(dtype)
    floats = [value if isinstance(value, QArray) else jnp.asarray(value) for value in (x, w)]
    return _run_qarray_product(product, blocks, dtype, order, *floats, extra)


@partial(always_jit, static_argnums=(0, 1, 2, 3), inline=True)
def _run_qarray_product(
    product: DotProduct | RaggedProduct,
    blocks: tuple,
    dtype: Any,
    order: tuple[int, ...],
    x: Any,
    w: Any,
    extra: tuple[Array, ...],
) -> Array:
    """The product, compiled once for arguments of the same shapes and specs if it is called outside of a trace."""
    leaves, tree = jax.tree.flatten((x, w, extra))

    def run(leaves: list[Array], _: None) -> Array:
        x, w, extra = jax.tree.unflatten(tree, leaves)
        left, right = map(_qarray_operand, (x, w), product.forward, blocks)
        return product.by_codes("forward", left, right, (x.shape, w.shape), dtype, *extra)

    def plain(*leaves: Array) -> Array:
        """The product of the numbers, for the derivative; stored arrays have none."""
        x, w, extra = jax.tree.unflatten(tree, leaves)
        numbers = [lax.stop_gradient(dequantize(v)) if isinstance(v, QArray) else v for v in (x, w)]
        wide = jnp.result_type(*numbers)
        return product(*(v.astype(wide) for v in numbers), *extra).astype(dtype)

    with jax.named_scope(JCHOP_SCOPE):
        return mark_results(straight_through(run, plain, leaves, None).transpose(order))


def _qarray_block(name: str, q: Any, contracting: tuple[int, ...]) -> int | None:
    """How many numbers of a checked operand share a scale along the sum; None for all."""
    if not contracting:
        raise ValueError("the product sums over no axis; multiply jchop.dequantize of each operand with JAX")
    if not isinstance(q, QArray):
        return None
    check_code_format(name, q.spec, "product", f"multiply jchop.dequantize({name}) with JAX, as x @ w does")
    if (fmt := spec_of_part(q.spec, q.ndim).scaled) is None:
        return None
    *slow, last = (axis_groupings(fmt, q.ndim, batch_axes(q.spec, q.shape, q.scale))[axis] for axis in contracting)
    if last == WHOLE_AXIS and all(kind == WHOLE_AXIS for kind in slow):
        return None
    if isinstance(last, int) and (
        not slow or (q.shape[contracting[-1]] % last == 0 and all(k == OWN_SCALE for k in slow))
    ):
        return last
    raise ValueError(
        f"{name}: the groups of {str(q.spec)!r} are no blocks along the sum, over axes {contracting} of {q.shape}; "
        "quantize with groups along these axes"
    )


def _qarray_operand(value: Any, layout: OperandLayout, block: int | None) -> CodedArray:
    if not isinstance(value, QArray):
        return encode_operand(layout.lay(value), None)
    coded_array = expand_codes(value)
    return replace(coded_array.map_arrays(layout.lay), block=block, qarray=coded_array.qarray, shift=coded_array.shift)
