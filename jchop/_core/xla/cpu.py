"""The quirks of XLA's CPU backend, and the functions that work around them.

Other files name the quirk that they work around. `tests/_core/xla/test_cpu.py` shows each in a small program, and names
the versions of jaxlib without it. It fails when a quirk is gone; then its workaround can be removed. Where only the
time tells, `benchmarks/quirks.py` measures it.

The quirks, first of bits, then of run time, then of compile time. Each is given by the wrong bits, or the slow code, of
a plain program:

* `subnormals_read_as_zero`: Arithmetic and comparisons take a subnormal operand for zero, and give zero for a subnormal
  result.
  Workaround: Rounding is integer arithmetic on bits (`_core/rounding/`); exact arithmetic on float32 scales its
  operands (`_core/arithmetic/hardware.py`); `max` and `min` compare bits (`_core/matmul/operations.py`).
* `product_contracted_with_sum`: x s + y is one fused multiply-add, so the product is not rounded.
  Workaround: `prevent_fma`; arithmetic in which no inexact product meets a sum (`_core/arithmetic/`).
* `conversion_pair_deleted`: A product in bfloat16 that is then converted to float32 is not rounded to bfloat16.
  Workaround: Rounding makes no use of conversions (`_core/rounding/elements.py`).
* `constants_of_sums_combined`: (x + a) - a with a constant a is x.
  Workaround: a is a multiple of the scale (`_core/scaled/tiles.py`).
* `zero_plus_minus_zero`: 0 + x with a constant 0 is x, and so -0 for x = -0.
  Workaround: The 0 that a sum starts from is computed from the operands (`_core/matmul/matmul.py`).
* `quotient_by_one_number_is_product`: x / b with a number b that has no other use is x (1 / b), so the quotient may
  differ in its last bit.
  Workaround: Exact quotients (`_core/arithmetic/double_word.py`). None for Adam's 1 - b^t, a quotient of Optax
  (docs/distributed.md).
* `maximum_loses_nan`: The maximum of many numbers, one of them NaN, is a number, and may be less than one that precedes
  the NaN.
  Workaround: A sum tells whether all numbers are finite (`_largest_magnitude` in `_core/scaled/elements.py`,
  `optim/_chain.py`), or the maximum is taken of the bits (`_emulate/rules/functions.py`).
* `selected_float8_changes_nan`: `where` of float8 converts to float16 and back: a NaN loses its sign and its payload.
  Workaround: Codes are selected as integers (`_select_leaf` in `optim/_chain.py`).
* `signalling_nan_becomes_quiet`: An operation on bfloat16 makes a signalling NaN quiet where nothing should change.
  Workaround: The tests take every NaN for the same.
* `order_of_sums_by_orientation`: x w and the transpose of wᵀ xᵀ have other bits: their sums have another order.
  Workaround: Products of `nn` keep the orientation that Flax gives them (`jchop/_quantized/products/product.py`).
* `sums_ordered_by_fusion`: A sum of numbers that are computed in its loop has other bits than the sum of the same
  numbers in memory.
  Workaround: Parameters are read from memory, packed or not, if a program computes with them itself. So is the matrix
  of a product with one row or one column (`materialize` in `_kernels/primitive.py`).
* `barriers_removed_before_fusion`: An `optimization_barrier` does not keep operations from being fused: a scale is
  computed for every element.
  Workaround: `materialize_per_group`.
* `independent_results_come_first`: The weights of all layers are unpacked before the first product, also with a barrier
  between layers. So all of them are in memory together.
  Workaround: `compute_after` (`unshard` in `distributed/_parts.py`).
* `computed_once_for_each_use`: A result with several uses is computed in the loop of each, in scalar code if that loop
  moves axes.
  Workaround: A body is compiled as a call (`no_inline` in `_kernels/primitive.py`). A chain of operations has one
  result (`_emulate/rules/interpret.py`). A packed leaf is made in a branch (`optim/_state.py`). Seeds are divided by 1
  (`compute_once`).
* `constants_enter_calls`: A constant operand is written into the function that is called, so calls that differ only in
  constants are compiled one by one.
  Workaround: The number of a draw is behind a barrier (`hide_constant`).
* `maximum_along_rows_is_scalar`: The maximum of integers along the last axis is scalar code.
  Workaround: `integer_maximum`.
* `maxima_merged`: A maximum of maxima becomes one maximum over both axes.
  Workaround: A barrier between the two steps of `integer_maximum`.
* `integers_written_before_maximum`: The bits of numbers are written to memory before the largest of each column is
  found; numbers are not.
  Workaround: The maximum of numbers is tried first (`_largest_magnitude` in `_core/scaled/elements.py`).
* `write_into_part_has_one_thread`: A computation that is fused with a write into a part of an array runs in one thread.
  Workaround: Results are written one turn later (`loop_over_chunks` in `optim/_state.py`).
* `short_floats_converted_whole`: A loop that writes a part of an array of float8 converts the whole array in every
  turn.
  Workaround: The loop carries words (`_short_floats_as_words` in `optim/_state.py`).
* `stack_of_short_floats_converted`: A loop that takes one entry of an array of float8 converts the whole array to
  float16 before the first turn.
  Workaround: `loop_slice`, in the loops over panels (`_quantized/products/code_products.py`), and `loop_entry`, in
  `unshard` (`distributed/_parts.py`) and in the loops of programs (`_program/control.py`).
* `rows_of_two_axes_moved`: For a product that sums over two axes of rows, one operand is transposed in memory first.
  Workaround: The rows become one axis (`DotProduct` in `jchop/_quantized/products/product.py`).
* `slice_fused_into_loop`: A slice at a place known only at run time is fused into the arithmetic, which is then scalar
  code.
  Workaround: The parts of the next turn are sliced in this one (`_in_chunks` in `_core/matmul/matmul.py`).
* `one_row_of_integers_is_widened`: For a product of int8 with one row, the matrix is written as int32; with more rows
  it is read as it is.
  Workaround: `dot_with_two_rows`; `dot_with_one_row` if the rows of the matrix are the last axis of memory.
* `long_sums_of_integers_are_scalar`: A sum of products of int8, along any axis but the last of memory, is vector code
  only if it has few numbers.
  Workaround: `dot_with_one_row`.
* `matrix_of_one_row_is_written`: For a product of floats with one row, the matrix is computed and written first. Then
  one thread reads it.
  Workaround: `dot_with_one_float_row`.
* `tall_integers_read_in_columns`: A product of int8 with 4,096 rows of weights or more takes up to six times the time
  of its parts of 512 rows.
  Workaround: `suits_panels` in `_quantized/products/code_products.py`.
* `long_fusion_compiled_for_minutes`: Long integer arithmetic that is fused with the operations before it is compiled
  for a minute or more.
  Workaround: Barriers between the stages (`_barrier_unless_nearest` in `_core/matmul/operations.py`,
  `_scales_of_ranges` in `_core/scaled/zero_points.py`). Places among nodes in memory (`interp` in
  `math/_elementwise.py`), and the mean in a variance (`math/_reductions.py`).
* `known_results_computed_by_compiler`: The compiler computes results of constants alone, slowly.
  Workaround: A barrier before the first state is packed (`pack_by_plan` in `optim/_pack.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jchop._common.bit_ops import FLOAT32
from jchop._common.settings import always_jit
from jchop._core.xla.sizes import are_static, if_static

#: The most parts of an axis, fewer for a long axis; and the fewest numbers of a part.
_MOST_PARTS, _MOST_PARTS_OF_LONG, _LONG_AXIS, _LEAST_PART = 32, 16, 1 << 12, 8
#: Arrays of as many elements are materialized apart.
_LARGE_ARRAY = 1 << 16


def branch_in_functions(predicate: Array, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
    """`jax.lax.cond` of functions without arguments, each compiled as a separate function.

    XLA writes the operands of a branch to memory. A branch may repeat an expression of the program around it, such as
    the bits of the same numbers. The removal of common expressions would make its result an operand of the branch.
    """
    return lax.cond(predicate, lambda: always_jit(yes)(), lambda: always_jit(no)())


def materialize_per_group(values: Any) -> Any:
    """A pytree of arrays, computed once for each group, although each is then broadcast over elements.

    Quirk `barriers_removed_before_fusion`. XLA does not repeat a division for every element. So on CPUs each array is
    divided by 1; a barrier keeps XLA from removing this 1. Small arrays of one shape are divided together, because each
    division is a loop to compile. A large array has a loop of its own: to put it beside others costs more time.
    """
    leaves, structure = jax.tree.flatten(lax.optimization_barrier(values))
    return structure.unflatten(_divide_by_one_on_cpu(*leaves) if leaves else leaves)


def _divide_leaves_by_one(*leaves: Array) -> list[Array]:
    """The leaves divided by one as integers, which XLA cannot see through; small ones of one type at once."""
    words = [_integer_of_bits(x) for x in leaves]
    for kind in dict.fromkeys(map(jax.typeof, words)):
        places = [place for place, word in enumerate(words) if jax.typeof(word) == kind]
        group = [words[place] for place in places]
        apart = len(group) == 1 or if_static(lambda x=group[0]: x.size >= _LARGE_ARRAY)
        parts = map(_divide_by_one, group) if apart else _divide_by_one(jnp.stack(group))
        for place, part in zip(places, parts, strict=True):
            words[place] = part
    return [
        word != 0 if x.dtype == bool else lax.bitcast_convert_type(word, x.dtype)
        for word, x in zip(words, leaves, strict=True)
    ]


def _primitive_on_cpu(name: str, fun: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
    """A function that returns its arrays, in programs for CPUs; in others nothing. It has no derivative."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays: list(arrays))
    primitive.def_abstract_eval(lambda *avals: list(avals))
    mlir.register_lowering(primitive, lambda ctx, *arrays: arrays)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=True), platform="cpu")
    batching.primitive_batchers[primitive] = lambda arrays, dims: (primitive.bind(*arrays), dims)
    return primitive.bind


_divide_by_one_on_cpu = _primitive_on_cpu("jchop_apart_on_cpu", _divide_leaves_by_one)
_barrier_on_cpu = _primitive_on_cpu("jchop_barrier_on_cpu", lambda *arrays: list(lax.optimization_barrier(arrays)))


def _integer_of_bits(x: Array) -> Array:
    """The bits of numbers as integers; 1 or 0 for a condition, in a byte if there are many."""
    return (
        x.astype(jnp.int8 if if_static(lambda: x.size >= _LARGE_ARRAY) else jnp.int32)
        if jnp.issubdtype(x.dtype, bool)
        else lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    )


def _divide_by_one(words: Array) -> Array:
    return lax.div(words, lax.optimization_barrier(jnp.ones((), words.dtype)))  # an array would be kept by loops


def compute_once(numbers: Sequence[Array]) -> tuple[Array, ...]:
    """Scalars of one dtype of integers, computed once, and not again in the loop of each use.

    Quirk `computed_once_for_each_use`. A division is not repeated. On other devices the last barrier does the same.
    """
    together = _divide_by_one(jnp.stack(numbers))
    return lax.optimization_barrier(tuple(together[place] for place in range(len(numbers))))


def hide_constant(number: int) -> Array:
    """A constant of a traced program as an operand (uint32). Quirk `constants_enter_calls`."""
    return lax.optimization_barrier(jnp.uint32(number))


@jax.custom_jvp
def compute_after(values: Any, earlier: Array) -> Any:
    """A pytree of arrays, unchanged, that no compiler can compute before the numbers of `earlier`.

    Quirk `independent_results_come_first`. The bits of each number are combined with a zero. It is the bit above
    the largest number without a sign: a compiler has no reason to see that.
    """
    if not earlier.size:
        return values
    width = (
        jnp.finfo(earlier.dtype).bits if jnp.issubdtype(earlier.dtype, jnp.floating) else jnp.iinfo(earlier.dtype).bits
    )
    word = jnp.max(lax.bitcast_convert_type(lax.stop_gradient(earlier), jnp.dtype(f"uint{width}")))
    zero = word & word.dtype.type((1 << (width - 1)) - 1)
    zero = lax.shift_right_logical(zero, word.dtype.type(width - 1))

    def one(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x | zero.astype(x.dtype)
        bits = _unsigned_bits(x)
        return lax.bitcast_convert_type(bits | zero.astype(bits.dtype), x.dtype)

    return jax.tree.map(one, values)


@compute_after.defjvp
def _compute_after_jvp(primals: tuple[Any, Array], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return compute_after(*primals), tangents[0]


def _unsigned_bits(x: Array) -> Array:
    """The bits of floats as unsigned integers."""
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))


def is_short_float(x: Any) -> bool:
    """Whether the numbers are floats of fewer bits than the backend computes with."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32


def loop_entry(stack: Array, index: Array) -> Array:
    """The entry of an array at an index along its first axis, in a loop over the entries."""
    return lax.squeeze(loop_slice(stack, index, 1, 0), (0,))


def loop_slice(x: Array, start: Any, size: int, axis: int) -> Array:
    """`jax.lax.dynamic_slice_in_dim`, in a loop over the parts of an array.

    Quirk `stack_of_short_floats_converted`. The part is taken of the bits. A barrier with the index keeps XLA from
    reading the bits of the whole array before the loop.
    """
    part = _slice_of_bits if is_short_float(x) else lax.dynamic_slice_in_dim
    return part(x, start, size, axis)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _slice_of_bits(x: Array, start: Any, size: int, axis: int) -> Array:
    x, start = lax.optimization_barrier((x, start))
    return lax.bitcast_convert_type(lax.dynamic_slice_in_dim(_unsigned_bits(x), start, size, axis), x.dtype)


@_slice_of_bits.defjvp
def _slice_of_bits_jvp(size: int, axis: int, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _slice_of_bits(*primals, size, axis), lax.dynamic_slice_in_dim(tangents[0], primals[1], size, axis)


def integer_maximum(x: Array, axis: int | tuple[int, ...], keepdims: bool = True) -> Array:
    """`jnp.max` of integers, on CPUs in two steps along the last axis.

    Quirk `maximum_along_rows_is_scalar`. The first step compares parts of the axis: that loop is unrolled, so
    neighbours form vectors. With explicit shardings, an axis that may be split between devices stays whole.
    """
    axes = (axis,) if isinstance(axis, int) else axis
    if x.ndim - 1 in axes and jax.typeof(x).sharding.spec[-1] is None and (parts := _count_parts(x.shape[-1])) > 1:
        x = jnp.max(x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts), axis=-2)
        (x,) = _barrier_on_cpu(x)  # maxima_merged
    return jnp.max(x, axis=axes, keepdims=keepdims)


def _count_parts(length: int) -> int:
    if not are_static((length,)):
        return 1
    most = _MOST_PARTS if length <= _LONG_AXIS else _MOST_PARTS_OF_LONG
    return max((n for n in range(2, most + 1) if length % n == 0 and length // n >= _LEAST_PART), default=1)


def dot_with_two_rows(dot: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """The product (batch, m, n) of (batch, m, k) and (batch, n, k), with a row of zeros more where there is one row.

    Quirk `one_row_of_integers_is_widened`.
    """
    wide = (jnp.pad(v, ((0, 0), (0, int(v.shape[1] == 1)), (0, 0))) for v in (a, b))
    return dot(*wide)[:, : a.shape[1], : b.shape[1]]


#: The numbers of a sum in vector code; and of so many sums XLA writes each, which it may merge with the sum of fewer.
_SUM_LENGTHS, _LEAST_SUMS = (32, 16, 8), 48


def dot_with_one_row(row: Array, matrix: Array) -> Array | None:
    """The product (batch, 1, n), int32, of int8 (batch, 1, k) and (batch, n, k); None if k is below 384.

    For a matrix whose n is the last axis of memory: the numbers of a sum lie apart. Quirk
    `long_sums_of_integers_are_scalar`: sums of up to 32 products are written, and added.
    """
    batch, n, k = matrix.shape
    terms = next((terms for terms in _SUM_LENGTHS if k // terms >= _LEAST_SUMS), None)
    if terms is None:
        return None
    sums, head = k // terms, k // terms * terms
    x, y = (v.astype(jnp.int32) for v in (materialize_per_group(row), matrix.swapaxes(1, 2)))
    products = x[..., :head].reshape(batch, sums, terms, 1) * y[:, :head].reshape(batch, sums, terms, n)
    total = jnp.sum(lax.optimization_barrier(jnp.sum(products, 2)), 1, keepdims=True)
    return total if head == k else total + jnp.sum(x[:, 0, head:, None] * y[:, head:], 1, keepdims=True)


def dot_with_one_float_row(*parts: tuple[Array, Sequence[Array]]) -> list[Array]:
    """The products of rows (1, k) with matrices (k, n), added over two parts of k of one length, a multiple of 8.

    Quirk `matrix_of_one_row_is_written`: sums of 8 products, one after the other, are computed where numbers are
    decoded. These sums are then added likewise. Two arrays are summed together, as XLA gives a single sum of floats to
    a library.

    Args:
        parts: two rows, and with each the matrices.
    """
    terms = [(row.T * matrix).reshape(-1, 8, matrix.shape[1]) for row, matrices in parts for matrix in matrices]
    pairs, zeros = list(zip(terms[::2], terms[1::2], strict=True)), (jnp.zeros((), terms[0].dtype),) * 2
    for axis in (1, 0):
        pairs = [lax.reduce(pair, zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), (axis,)) for pair in pairs]
    terms = [term for pair in pairs for term in pair]
    return [(a + b)[None] for a, b in zip(terms[: len(terms) // 2], terms[len(terms) // 2 :], strict=True)]


def prevent_fma(product: Array, factor: Array) -> Array:
    """A float32 product with a nonnegative factor, rounded before it enters a sum.

    Quirk `product_contracted_with_sum`. Between the product and the sum is an integer operation that changes no bit. No
    compiler can know this if the factor is read from memory.
    """
    bits = lax.bitcast_convert_type(product, jnp.int32)
    sign = lax.bitcast_convert_type(factor, jnp.int32) & FLOAT32.sign_bit
    return lax.bitcast_convert_type(bits | sign, jnp.float32)
