"""Sums of products over named axes: dot, inner, outer, tensordot, vdot, einsum, trace, conv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common.bit_ops import gather_axes
from jchop._common.checks import check, check_instance, check_int
from jchop._common.settings import jax_default_settings
from jchop._round.arguments import Array, Key, as_operands
from jchop._spec.accumulation import SumSpecLike, as_matmul_spec
from jchop._spec.spec import SpecLike
from jchop.math._call import as_sum_spec, check_axis, run_sums
from jchop.math._elementwise import multiply
from jchop.math._matmul import matmul

__all__ = ["conv", "dot", "einsum", "inner", "outer", "tensordot", "trace", "vdot"]


def dot(a: Any, b: Any, spec: SumSpecLike, key: Key = None) -> Any:
    """The sum of products over the last axis of `a` and the last but one of `b`, as `jax.numpy.dot`.

    It is `jchop.math.matmul` of `a` and `b`, each reshaped to one matrix; a scalar is multiplied with every element.

    Args:
        a: float16, bfloat16, float32 or float64, shape (..., k).
        b: of the same dtype, or promoted as in `jax.numpy`, shape (..., k, n) or (k,).
        spec: as in `jchop.math.matmul`.
        key: as in `jchop.math.matmul`.

    Returns:
        An array of shape ``a.shape[:-1] + b.shape[:-2] + b.shape[-1:]``.

    Raises:
        TypeError, ValueError: as for `jchop.math.matmul`.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.dot([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], "e5m2"))
        32.0
    """
    x, y = as_operands("ab", (a, b))
    if not x.ndim or not y.ndim:
        shape = x.shape or y.shape
        left, right = (x.reshape(-1, 1), y.reshape(1, 1)) if x.ndim else (x.reshape(1, 1), y.reshape(1, -1))
        return matmul(left, right, spec, key).reshape(shape)[()]
    if y.ndim <= 2:
        return matmul(x, y, spec, key)
    k = y.shape[-2]
    columns = y.transpose(y.ndim - 2, *range(y.ndim - 2), y.ndim - 1).reshape(k, -1)
    return matmul(x, columns, spec, key).reshape(*x.shape[:-1], *y.shape[:-2], y.shape[-1])


def einsum(
    subscripts: str,
    *operands: Any,
    spec: SumSpecLike,
    key: Key = None,
    optimize: bool | str | Sequence[tuple[int, ...]] = False,
) -> Any:
    """Sums of products by Einstein's convention, as `jax.numpy.einsum`.

    Two arrays: each sum runs over the indices that are missing in the result. They run in the order of their first
    appearance in `subscripts`, the last one fastest. Products and sums are rounded as in `jchop.math.matmul`; sums of
    one array as in `jchop.math.sum`.

    More arrays are contracted in pairs, by default from left to right: the first two, the result with the third, and so
    on. Each pair is an einsum of two arrays. Its result keeps the indices that the others or the final result have, in
    the order of their first appearance. It has the dtype of the operands, and is rounded to ``spec.operands`` again for
    the next product.

    Args:
        subscripts: letters and commas, and ``->`` with the indices of the result; by default these are the letters that
            appear once, sorted. No ellipsis.
        operands: arrays, float16, bfloat16, float32 or float64, which are promoted to one dtype.
        spec: as in `jchop.math.matmul`; for one array as in `jchop.math.sum`.
        key: as there.
        optimize: the order of the pairs. False (default): from left to right. True or a text like ``"optimal"`` and
            ``"greedy"``: the path that `jax.numpy.einsum_path` finds. Or a path: the places of the pair of each
            contraction, among the arrays that are left; a result is appended to them.

    Returns:
        An array of the dtype of the operands.

    Raises:
        TypeError, ValueError: as for `jchop.math.matmul`, for subscripts that do not fit, or a path that does not
            consist of pairs.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.math.einsum("ij,kj->ik", jnp.ones((2, 9)), jnp.ones((1, 9)), spec="e5m2").tolist()
        [[8.0], [8.0]]
        >>> float(jc.math.einsum("i,ij,j->", jnp.ones(2), jnp.ones((2, 9)), jnp.ones(9), spec="e5m2"))
        16.0
    """
    arrays = as_operands([f"operands[{i}]" for i in range(len(operands))], operands) if operands else []
    terms, result = _parse_subscripts(subscripts, [array.shape for array in arrays])
    if len(arrays) == 1:
        return run_sums(_einsum_of_one, as_sum_spec(spec), arrays, key, term=terms[0], result=result)
    options = {"terms": tuple(terms), "result": result, "path": _contraction_path(subscripts, arrays, optimize)}
    return run_sums(_contract_in_pairs, as_matmul_spec(spec), arrays, key, **options)


def tensordot(
    a: Any, b: Any, spec: SumSpecLike, key: Key = None, *, axes: int | Sequence[int | Sequence[int]] = 2
) -> Any:
    """Sums of products over axes of two arrays, as `jax.numpy.tensordot`; each is rounded as in `jchop.math.matmul`.

    A sum runs over the axes of `a` in ascending order, the last one fastest.

    Args:
        a: float16, bfloat16, float32 or float64, any shape.
        b: of the same dtype, or promoted as in `jax.numpy`.
        spec: as in `jchop.math.matmul`.
        key: as in `jchop.math.matmul`.
        axes: a number n means the last n axes of `a` and the first n of `b`, in order. Otherwise a pair of axes, or of
            sequences of them, which belong together. Default 2.

    Returns:
        An array with the other axes of `a` and then the other axes of `b`.

    Raises:
        TypeError, ValueError: as for `jchop.math.matmul`, or for axes that do not fit.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.math.tensordot(jnp.ones((2, 3, 4)), jnp.ones((3, 4, 1)), "e5m2").tolist()
        [[8.0], [8.0]]
    """
    x, y = as_operands("ab", (a, b))
    dimensions = _tensordot_axes(axes, x.shape, y.shape), ((), ())
    return run_sums(lax.dot_general, as_matmul_spec(spec), (x, y), key, dimension_numbers=dimensions)


def inner(a: Any, b: Any, spec: SumSpecLike, key: Key = None) -> Any:
    """Sums of products over the last axis of both arrays, as `jax.numpy.inner`, rounded as in `jchop.math.matmul`.

    Args:
        a: float16, bfloat16, float32 or float64, shape (..., k), or a scalar.
        b: of the same dtype, or promoted as in `jax.numpy`, shape (..., k), or a scalar.
        spec: as in `jchop.math.matmul`.
        key: as in `jchop.math.matmul`.

    Returns:
        An array of shape ``a.shape[:-1] + b.shape[:-1]``; a scalar is multiplied with every element.

    Raises:
        TypeError, ValueError: as for `jchop.math.matmul`.

    Example:
        >>> import jchop as jc
        >>> jc.math.inner([1.0, 2.0, 3.0], [[4.0, 5.0, 6.0], [1.0, 1.0, 1.0]], "e5m2").tolist()
        [32.0, 6.0]
    """
    x, y = as_operands("ab", (a, b))
    return tensordot(x, y, spec, key, axes=0 if not x.ndim or not y.ndim else ((-1,), (-1,)))


def vdot(a: Any, b: Any, spec: SumSpecLike, key: Key = None) -> Any:
    """The sum of products of all elements, in C order, as `jax.numpy.vdot` of real arrays.

    It is `jchop.math.matmul` of both arrays as vectors.

    Args:
        a: float16, bfloat16, float32 or float64, any shape.
        b: of the same dtype, or promoted as in `jax.numpy`, with as many elements.
        spec: as in `jchop.math.matmul`.
        key: as in `jchop.math.matmul`.

    Returns:
        A scalar of their dtype.

    Raises:
        TypeError, ValueError: as for `jchop.math.matmul`, or for another number of elements.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.vdot([[1.0, 2.0], [3.0, 4.0]], [[1.0, 1.0], [1.0, 3.0]], "e5m2"))
        16.0
    """
    x, y = as_operands("ab", (a, b))
    check(x.size == y.size, f"a has shape {x.shape} and b has shape {y.shape}: they must have as many elements")
    return matmul(x.ravel(), y.ravel(), spec, key)


def outer(a: Any, b: Any, spec: SpecLike, key: Key = None) -> Any:
    """The product of each element of `a` and each of `b`, as `jax.numpy.outer`, rounded once as `jchop.math.multiply`.

    Args:
        a: float16, bfloat16, float32 or float64, n elements in C order; each is rounded to `spec` once.
        b: of the same dtype, or promoted as in `jax.numpy`, m elements.
        spec: a `jchop.Spec`, a format, or its text.
        key: as in `jchop.math.multiply`.

    Returns:
        An array of shape (n, m).

    Raises:
        TypeError, ValueError: as for `jchop.math.multiply`.

    Example:
        >>> import jchop as jc
        >>> jc.math.outer([1.5, 2.0], [1.25, 3.0], "e5m2").tolist()
        [[2.0, 4.0], [2.5, 6.0]]
    """
    x, y = as_operands("ab", (a, b))
    return multiply(x.reshape(-1, 1), y.reshape(-1), spec, key)


def trace(x: Any, spec: SumSpecLike, key: Key = None, *, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """The sum along a diagonal, as `jax.numpy.trace`: `jchop.math.sum` of the diagonal, from its first element.

    Args:
        x: float16, bfloat16, float32 or float64, of two axes or more.
        spec: as in `jchop.math.sum`.
        key: as in `jchop.math.sum`.
        offset: the diagonal; positive ones are above the main diagonal. Default 0.
        axis1: the axis of the rows. Default 0.
        axis2: the axis of the columns. Default 1.

    Returns:
        An array of the dtype of `x` without these axes.

    Raises:
        TypeError, ValueError: as for `jchop.math.sum`, or for axes that `x` does not have.

    Example:
        >>> import jchop as jc
        >>> float(jc.math.trace([[1.0, 2.0], [3.0, 1.25]], "e5m2"))
        2.0
    """
    (array,) = as_operands("x", (x,))
    first, second = check_axis(axis1, array.ndim, "axis1"), check_axis(axis2, array.ndim, "axis2")
    check(first != second, f"axis1={axis1!r} and axis2={axis2!r} are the same axis of an array of shape {array.shape}")
    offset = check_int("offset", offset)
    array = gather_axes(array, (first - array.ndim, second - array.ndim))  # before the trace: the same draws
    return run_sums(_trace, as_sum_spec(spec), (array,), key, offset=offset, axis1=first, axis2=second)


def _trace(x: Array, **options: int) -> Array:
    return jnp.sum(jnp.diagonal(x, **options), -1)


def conv(
    x: Any,
    kernel: Any,
    spec: SumSpecLike,
    key: Key = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: Literal["VALID", "SAME"] | Sequence[tuple[int, int]] = "VALID",
    dilation: int | Sequence[int] = 1,
) -> Any:
    """A convolution of neural networks (the kernel is not mirrored), as `jax.lax.conv_with_general_padding`.

    The sum of an output element runs over the input channels and then the positions of the kernel, in C order of
    `kernel`. Every product and every sum is rounded as in `jchop.math.matmul`. The padding is +0.

    Args:
        x: float16, bfloat16, float32 or float64, shape (n, c, ...space).
        kernel: of the same dtype, or promoted as in `jax.numpy`, shape (m, c, ...window).
        spec: as in `jchop.math.matmul`.
        key: as in `jchop.math.matmul`.
        stride: step of the windows, one for all axes or one each. Default 1.
        padding: ``"VALID"`` (default), ``"SAME"``, or (before, after) for each axis.
        dilation: distance between positions of the kernel, one for all axes or one each. Default 1.

    Returns:
        Shape (n, m, ...space of the result).

    Raises:
        TypeError, ValueError: as for `jchop.math.matmul`, or for shapes that do not match.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.math.conv(jnp.ones((1, 9, 3)), jnp.ones((1, 9, 2)), "e5m2").tolist()
        [[[8.0, 8.0]]]
    """
    mspec = as_matmul_spec(spec)
    arrays = as_operands(("x", "kernel"), (x, kernel))
    window = _conv_window(arrays[0].shape, arrays[1].shape, stride, padding, dilation)
    return run_sums(lax.conv_general_dilated, mspec, arrays, key, **window)


# -- subscripts --------------------------------------------------------------------------------------------------------


def _parse_subscripts(subscripts: str, shapes: list[tuple[int, ...]]) -> tuple[list[str], str]:
    """The indices of each operand, and of the result."""
    check_instance("subscripts", subscripts, str, "text such as 'ij,jk->ik'")
    inputs, arrow, result = subscripts.replace(" ", "").partition("->")
    terms, letters = inputs.split(","), inputs.replace(",", "")
    if not arrow:
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    for is_wrong, why in (
        (not (letters + result).isalpha() and letters + result, "allowed are letters, commas and '->', no ellipsis"),
        (len(terms) != len(shapes), f"it names {len(terms)} arrays, and {len(shapes)} are given"),
        (len(set(result)) < len(result), "the result has an index twice"),
        (not set(result) <= set(letters), "the result has an index that no array has"),
    ):
        check(not is_wrong, f"subscripts={subscripts!r}: {why}")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        check(len(term) == len(shape), f"subscripts={subscripts!r}: {term!r} does not fit an array of shape {shape}")
        for letter, size in zip(term, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"subscripts={subscripts!r}: index {letter!r} has the lengths {sizes[letter]}, {size}")
    return terms, result


def _tensordot_axes(axes: Any, left: tuple[int, ...], right: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The summed axes of both arrays, in the order of the first array's axes."""
    message = f"axes={axes!r} must be a number, or two axes or sequences of as many axes"
    if isinstance(axes, int):
        count = check_int("axes", axes, 0, min(len(left), len(right)))
        axes = (range(len(left) - count, len(left)), range(count))
    check(isinstance(axes, Sequence) and len(axes) == 2, message)
    axis_lists = [list(side) if isinstance(side, Sequence) else [side] for side in axes]
    shapes = (left, right)
    first, second = ([check_axis(a, len(s), "axes") for a in side] for side, s in zip(axis_lists, shapes, strict=True))
    check(len(first) == len(second) and len(set(first)) == len(first) and len(set(second)) == len(second), message)
    pairs = sorted(zip(first, second, strict=True))
    for one, other in pairs:
        if left[one] != right[other]:
            raise ValueError(f"axes: axis {one} of a has length {left[one]}, axis {other} of b {right[other]}")
    return tuple(one for one, _ in pairs), tuple(other for _, other in pairs)


_ContractionPath = tuple[tuple[int, ...], ...]


def _contraction_path(subscripts: str, arrays: list[Any], optimize: Any) -> _ContractionPath:
    """The indices of each pair among the remaining arrays, to which the pair's result is appended."""
    if optimize is False or len(arrays) == 2:
        return ((0, 1), *((n, 0) for n in range(len(arrays) - 2, 0, -1)))
    if optimize is True or isinstance(optimize, str):
        shapes = [np.broadcast_to(np.float32(0), array.shape) for array in arrays]
        with jax_default_settings():
            steps = jnp.einsum_path(subscripts, *shapes, optimize=optimize)[0]
    else:
        steps = optimize
    path = [tuple(step) for step in steps if not isinstance(step, str)]
    count = len(arrays)
    for step in path:
        indices = {check_int("optimize", index, 0, count - 1) for index in step}
        if len(indices) != 2 or len(step) != 2:
            raise ValueError(f"optimize={optimize!r}: {step} is not a pair of the {count} arrays that are left")
        count -= 1
    check(count == 1, f"optimize={optimize!r} leaves {count} arrays; {len(arrays) - 1} pairs are needed")
    return tuple(path)


# -- contraction -------------------------------------------------------------------------------------------------------


def _take_diagonals(x: Any, term: str) -> tuple[Any, str]:
    """`x` without repeated indices."""
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            first = term.index(letter)
            second = term.index(letter, first + 1)
            x = jnp.diagonal(x, axis1=first, axis2=second)
            term = term[:first] + term[first + 1 : second] + term[second + 1 :] + letter
    return x, term


def _einsum_of_one(x: Array, *, term: str, result: str) -> Array:
    x, term = _take_diagonals(x, term)
    missing = [letter for letter in term if letter not in result]
    order = [term.index(letter) for letter in (*result, *missing)]
    return jnp.sum(x.transpose(order), tuple(range(len(result), len(term))))


def _contract_in_pairs(*arrays: Array, terms: tuple[str, ...], result: str, path: _ContractionPath) -> Array:
    """The einsum of arrays, two at a time along `path`; `terms` are the letters of their axes."""
    remaining = list(zip(terms, arrays, strict=True))
    for step_index, places in enumerate(path):
        (left, a), (right, b) = (remaining[place] for place in places)
        remaining = [pair for place, pair in enumerate(remaining) if place not in places]
        live_letters = "".join(term for term, _ in remaining) + result
        output = result
        if step_index < len(path) - 1:
            output = "".join(letter for letter in dict.fromkeys(left + right) if letter in live_letters)
        remaining.append((output, _contract_pair((left, right), output, a, b)))
    return remaining[0][1]


def _contract_pair(terms: tuple[str, str], result: str, a: Array, b: Array) -> Array:
    """The einsum of two arrays as one dot_general: shared letters of the result are batch axes."""
    (x, left), (y, right) = _take_diagonals(a, terms[0]), _take_diagonals(b, terms[1])
    sizes = dict(zip(left + right, x.shape + y.shape, strict=True))
    contracting = [letter for letter in dict.fromkeys(left + right) if letter not in result]
    batch = [letter for letter in result if letter in left and letter in right]
    rows = [letter for letter in result if letter in left and letter not in right]
    columns = [letter for letter in result if letter in right and letter not in left]
    x = _arrange_axes(x, left, [*batch, *rows, *contracting], sizes)
    y = _arrange_axes(y, right, [*batch, *columns, *contracting], sizes)
    outer, summed = tuple(range(len(batch))), range(-len(contracting), 0)
    summed_axes = [tuple(axis + v.ndim for axis in summed) for v in (x, y)]
    out = lax.dot_general(x, y, ((summed_axes[0], summed_axes[1]), (outer, outer)))
    axes = [*batch, *rows, *columns]
    return out.transpose([axes.index(letter) for letter in result])


def _arrange_axes(x: Array, term: str, axes: list[str], sizes: dict[str, int]) -> Array:
    """`x` with the axes `axes`, broadcast along missing ones."""
    x = x.transpose([term.index(letter) for letter in axes if letter in term])
    x = jnp.expand_dims(x, [i for i, letter in enumerate(axes) if letter not in term])
    return jnp.broadcast_to(x, [sizes[letter] for letter in axes])


# -- convolution -------------------------------------------------------------------------------------------------------


def _conv_window(
    x: tuple[int, ...], kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any
) -> dict[str, Any]:
    """The static arguments of the convolution, each with one entry for each spatial axis."""
    if len(x) < 3 or len(x) != len(kernel) or x[1] != kernel[1]:
        raise ValueError(
            f"x has shape {x} and kernel has shape {kernel}: they must be (n, c, *space) and (m, c, *window) with as "
            "many axes and the same c"
        )
    axes = len(x) - 2
    strides, dilations = _per_spatial_axis("stride", stride, axes), _per_spatial_axis("dilation", dilation, axes)
    dilated_sizes = [(size - 1) * step + 1 for size, step in zip(kernel[2:], dilations, strict=True)]
    pads = _conv_padding(padding, x[2:], dilated_sizes, strides)
    for size, span, pad in zip(x[2:], dilated_sizes, pads, strict=True):
        if size + pad[0] + pad[1] < span or span < 1:
            raise ValueError(f"x has shape {x}, too small for a kernel of shape {kernel} with padding={padding!r}")
    return {"window_strides": strides, "padding": pads, "rhs_dilation": dilations}


def _per_spatial_axis(name: str, value: Any, axis_count: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * axis_count
    check(len(values) == axis_count, f"{name}={value!r} must be one integer, or one for each of {axis_count} axes")
    return tuple(check_int(name, v, 1) for v in values)


def _conv_padding(
    padding: Any, sizes: Sequence[int], dilated_sizes: list[int], strides: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if padding in ("VALID", "SAME"):
        return tuple(lax.padtype_to_pads(sizes, dilated_sizes, strides, padding))
    pairs = [] if isinstance(padding, str) or np.ndim(padding) != 2 else [tuple(pair) for pair in padding]
    if len(pairs) != len(sizes) or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"padding={padding!r} must be 'VALID', 'SAME' or (before, after) for each of {len(sizes)} axes"
        )
    return tuple((check_int("padding", low, 0), check_int("padding", high, 0)) for low, high in pairs)
