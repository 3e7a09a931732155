"""Operations by name, +, −, ×, ÷, √ and fma, rounded once on rounded operands; chains of them; sums in an order.

One signature serves all interpreters of programs. 16-bit dtypes are computed in float32, other dtypes as in `basic`;
operands broadcast. The random words of a program's operations are in one stream. The words of operation n start at the
index n 2^32, and each iteration of a loop has different seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import CARRIERS, FLOAT32, Carrier, lax_where, low_mask, split_sign
from jchop._core.arithmetic import basic, exact, hardware
from jchop._core.arithmetic.double_word import square_root
from jchop._core.matmul.aligned import require_aligned_order
from jchop._core.matmul.matmul import matmul_body, spec_draws
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.grid import require_carrier, x64_remedy
from jchop._core.rounding.random_bits import SEEDS, StreamOffset, flat_index, random_words, words_like
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec, as_spec
from jchop.formats import FloatFormat
from jchop.formats.rounding import Overflow, Rounding

#: The ranges of operands; none: those of the format.
OperandRanges = Sequence[exact.ValueRange]


def round_operation(
    name: str, args: Sequence[Array], spec: Spec | None, word: Array | None = None, *, ranges: OperandRanges = ()
) -> Array:
    """The operation `name`, its exact result rounded once under `spec`.

    There is no derivative, because the operation works on bits. A caller can take the derivative of the carrier's
    operation.

    Args:
        name: one of `OPERAND_COUNTS`.
        args: float16, bfloat16, float32 or float64, all of one dtype; they broadcast against each other. Their values
            are values of the spec's format, infinities or NaN.
        spec: the rounding of the result; None: the carrier's own operation.
        word: for a stochastic spec, a random word for each element of the result; see `operation_words`.
        ranges: the range of each operand. Default: the range of the spec's format.

    Returns:
        An array of the dtype of `args`.

    Example:
        >>> import jchop as jc
        >>> up = jc.Spec("e5m2:up")
        >>> float(round_operation("add", [jnp.float32(1.0), jnp.float32(2.0**-16)], up))
        1.25
    """
    arrays = jnp.broadcast_arrays(*args) if len(args) > 1 else [args[0]]
    if spec is None:
        return _CARRIER_OPERATIONS[name](*arrays)
    dtype, carrier = arrays[0].dtype, operation_carrier(arrays[0].dtype)
    operand_ranges = tuple(ranges) or (exact.range_of(spec, carrier),) * len(arrays)
    step = _OperationStep(spec, carrier, word, operand_ranges)
    return _EXACT_OPERATIONS[name](step, *(widen_operand(x) for x in arrays)).astype(dtype)


def widen_operand(x: Array) -> Array:
    """Values of a 16-bit dtype in float32."""
    return x.astype(jnp.float32) if x.dtype.itemsize == 2 else x


def operation_carrier(dtype: Any) -> Carrier:
    """The carrier of operations on values of a dtype."""
    return CARRIERS["float64" if jnp.dtype(dtype).itemsize == 8 else "float32"]


@lru_cache(maxsize=1024)
def check_operation(spec: Spec | None, dtype: Any, argument: str = "spec") -> None:
    """Refuses a spec to which results on a dtype cannot be rounded, or whose values the dtype cannot hold.

    Raises:
        ValueError: names `argument`, and a dtype that works.
    """
    if spec is None:
        return
    exact.require_operation(spec, operation_carrier(dtype), argument)
    require_dtype_holds(spec, dtype, argument)


def require_dtype_holds(spec: Spec | None, dtype: Any, argument: str = "spec") -> None:
    """Refuses a spec with values that a dtype cannot hold."""
    carrier = CARRIERS[jnp.dtype(dtype).name]
    if spec is None or exact.holds_format(spec.format, carrier):
        return
    able = [name for name in exact.OPERATION_CARRIERS if exact.holds_format(spec.format, CARRIERS[name])]
    remedy = f"cast the operands to {able[0]}{x64_remedy(able)}" if able else "no carrier up to float64 can"
    raise ValueError(f"{argument}={str(spec)!r} has values that {carrier.name} cannot hold; {remedy}")


def check_matmul(spec: MatmulSpec, dtype: Any, allow_scales: bool = False) -> None:
    """Refuses roundings that are impossible for sums of products in `dtype`, or whose values it cannot hold.

    Args:
        spec: the arithmetic.
        dtype: of the operands.
        allow_scales: whether the operands may have a scaled format. Default False.

    Raises:
        ValueError: names the field of `spec`, and a dtype that works.
    """
    if spec.operands is not None and not (allow_scales and spec.group):
        require_carrier(as_spec(spec.operands, "operands"), operation_carrier(dtype))
    exact.require_operation(spec.product, operation_carrier(dtype), "product")
    if spec.order.aligned:
        require_aligned_order(spec, operation_carrier(dtype))
        require_dtype_holds(spec.accumulate, dtype, "accumulate")
    else:
        check_operation(spec.accumulate, dtype, "accumulate")


# -- random words ------------------------------------------------------------------------------------------------------


def operation_words(seeds: Sequence[Array], like: Array, number: int = 0) -> Array:
    """A word for each element of `like`, from the stream's part for operation `number`."""
    return words_like(like, tuple(seeds), StreamOffset(base=number << 32))


def fold_seeds(seeds: Sequence[Array], number: int, step: Array | int = 0) -> tuple[Array, ...]:
    """The seeds of iteration `step` of loop `number`: words from the stream's part for operation `number`.

    Args:
        seeds: the six words of `seed_words`, or of this function.
        number: the loop's number among the operations around it, static.
        step: the index of the iteration, below 2^29; may be traced.
    """
    step = jnp.asarray(step, jnp.uint32)
    index = step * np.uint32(8) + np.arange(SEEDS, dtype=np.uint32)
    each = random_words(tuple(seeds), index, number)
    return tuple(each[i] for i in range(SEEDS))


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OperationStep:
    """The spec and the carrier of an operation, its random words, and the ranges of its operands."""

    spec: Spec
    carrier: Carrier
    word: Array | None
    ranges: tuple[exact.ValueRange, ...]

    @property
    def rest(self) -> tuple[Spec, Carrier, Array | None]:
        return self.spec, self.carrier, self.word


def _div_operation(step: _OperationStep, x: Array, y: Array) -> Array:
    if basic.divides_narrow(step.spec, step.carrier, *step.ranges):
        return basic.divide_narrow(x, y, step.spec, step.carrier, *step.ranges)
    x, y = _barrier_unless_nearest(step, x, y)
    return _barrier_unless_nearest(step, basic.divide_and_round(x, y, *step.rest, *step.ranges))[0]


def _sqrt_operation(step: _OperationStep, x: Array) -> Array:
    if step.spec.overflow is Overflow.WRAP:
        raise ValueError(f"spec={str(step.spec)!r}: a root has no last bit, so it cannot wrap; saturate instead")
    (x,) = _barrier_unless_nearest(step, x)
    return exact.round_exact(square_root(x, step.carrier, step.spec.rounding.stochastic), *step.rest)


def _barrier_unless_nearest(step: _OperationStep, *args: Array) -> tuple[Array, ...]:
    """Operands or results behind a barrier, for a quotient or root in a mode that does not round to the nearest.

    The quirk `long_fusion_compiled_for_minutes` (`_core/xla/cpu.py`) is the reason. These modes compute more bits. The
    vectorizer follows their comparisons with zero through all the operations before them, and after a quotient.
    """
    return args if step.spec.rounding in _NEAREST_ROUNDINGS else lax.optimization_barrier(args)


_NEAREST_ROUNDINGS = (Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY, Rounding.NEAREST_ZERO)


def _is_symmetric(spec: Spec) -> bool:
    """Whether the negative of every value is a value, including -0."""
    return isinstance(spec.format, FloatFormat) and spec.format.signed and spec.format.has_negative_zero


def _hides_subnormals(step: _OperationStep) -> bool:
    """Whether an operand can be a subnormal of the carrier, which a comparison may read as zero."""
    return any(operand.quantum < 1 - step.carrier.bias for operand in step.ranges)


def _select_by_bits(step: _OperationStep, x: Array, y: Array, larger: bool) -> Array:
    """The larger or the smaller operand, compared by bits; NaN if either is NaN."""
    (xs, xm), (ys, ym) = (split_sign(v, step.carrier) for v in (x, y))
    x_key, y_key = (
        magnitude ^ lax_where(sign != 0, -1, 0).astype(magnitude.dtype) for sign, magnitude in ((xs, xm), (ys, ym))
    )
    result = lax_where((x_key > y_key) == larger, x, y)
    is_nan = (xm > step.carrier.inf) | (ym > step.carrier.inf)
    return lax_where(is_nan, jnp.asarray(np.nan, x.dtype), result)


_EXACT_OPERATIONS: dict[str, Callable[..., Array]] = {
    "add": lambda step, x, y: basic.add_and_round(x, y, *step.rest, *step.ranges),
    "sub": lambda step, x, y: basic.add_and_round(x, -y, *step.rest, *step.ranges),
    "mul": lambda step, x, y: basic.multiply_and_round(x, y, *step.rest, *step.ranges),
    "div": _div_operation,
    "square": lambda step, x: basic.multiply_and_round(x, x, *step.rest, *step.ranges * 2),
    "sqrt": _sqrt_operation,
    "fma": lambda step, x, y, z: basic.multiply_add_and_round(x, y, z, *step.rest, *step.ranges),
    "neg": lambda step, x: -x if _is_symmetric(step.spec) else round_to_spec(-x, *step.rest),
    "abs": lambda step, x: jnp.abs(x) if _is_symmetric(step.spec) else round_to_spec(jnp.abs(x), *step.rest),
    "max": lambda step, x, y: _select_by_bits(step, x, y, True) if _hides_subnormals(step) else jnp.maximum(x, y),
    "min": lambda step, x, y: _select_by_bits(step, x, y, False) if _hides_subnormals(step) else jnp.minimum(x, y),
}
#: The carrier's own operations.
_CARRIER_OPERATIONS: dict[str, Callable[..., Array]] = {
    name: getattr(lax, name, lambda x, y, z: x * y + z) for name in _EXACT_OPERATIONS
}
#: The number of operands of each operation.
OPERAND_COUNTS: Mapping[str, int] = MappingProxyType(
    {name: 3 if name == "fma" else 1 if name in ("neg", "abs", "sqrt", "square") else 2 for name in _EXACT_OPERATIONS}
)


# == chains ============================================================================================================
# Formats with the carrier's own exponents share its subnormal numbers, which cause most of the cost of an operation.
# So a chain may be tried without them. If every operand is a multiple of 2^_OPERAND_QUANTUM below 2^_OPERAND_TOP, no
# sum or product is subnormal or too large, and the ways of `arithmetic` for this narrower range give the same bits.
# The operands of the chain and the products are checked. A sum needs no check: it is no finer than its terms, and at
# most twice as large. The tried result is NaN if a number in its history was out of this range.


#: The operations of a chain: a NaN in any operand gives NaN.
CHAIN_OPERATIONS = frozenset({"add", "sub", "mul", "square", "neg", "abs"})
_KEEPS_MAGNITUDE, _CHAIN_PRODUCTS = frozenset({"neg", "abs"}), frozenset({"mul", "square"})
#: An operation: its name, the indices of its operands among the arrays and the earlier results, the specs that hold the
#: operands, and the number of its rounding in the random stream.
ChainLink = tuple[str, tuple[int, ...], tuple[Spec, ...], int]

#: Operands are multiples of 2^_QUANTUM below 2^_TOP. Products are then multiples of 2^-126 below 2^111; larger numbers
#: could not be rounded by an addition. Checked numbers must be below 2^_SEEN.
_OPERAND_QUANTUM, _OPERAND_TOP, _CHECK_TOP = -63, 55, 45


def gains_by_trial(spec: Spec) -> bool:
    """Whether trying makes a chain under a spec faster."""
    format_range = exact.range_of(spec, FLOAT32)
    return hardware.supports_scaling_sum(spec, FLOAT32) and hardware.supports_scaling_product(
        spec, FLOAT32, format_range, format_range
    )


def is_constant_in_safe_range(value: float, spec: Spec) -> bool:
    """Whether a rounded constant is in the range in which a try succeeds."""
    return value == 0 or 2.0 ** _least_safe_exponent(spec) <= abs(value) < 2.0**_CHECK_TOP


def _least_safe_exponent(spec: Spec) -> int:
    """The least e for which numbers of the spec's format from 2^e on are multiples of 2^_QUANTUM."""
    return _OPERAND_QUANTUM + exact.range_of(spec, FLOAT32).precision - 1


def chain_body(*arrays: Array, links: tuple[ChainLink, ...], shape: tuple[int, ...], result: int, spec: Spec) -> Array:
    """The result of a chain.

    Args:
        arrays: float32, of one shape, or 0-d; values of their specs, infinities or NaN. For a stochastic spec the six
            words of `seed_words` follow, and a uint32 that is added to the numbers of the operations.
        links: the operations in their order.
        shape: the shape of every result.
        result: the index of the chain's result among the arrays and the results of all operations.
        spec: the rounding of every result.
    """
    values, seeds = _split_arrays(arrays, spec)
    for name, indices, operand_specs, number in links:
        ranges = [exact.range_of(operand_spec, FLOAT32) for operand_spec in operand_specs]
        word = chain_words(seeds, shape, number) if seeds else None
        values.append(round_operation(name, [values[index] for index in indices], spec, word, ranges=ranges))
    return values[result]


def chain_words(seeds: Sequence[Array], shape: tuple[int, ...], number: int) -> Array:
    """The random words of operation `number`, given six seeds and a number that is added to it."""
    low, high = flat_index(shape)
    return random_words(seeds[:SEEDS], low, seeds[SEEDS] + jnp.uint32(number) + jnp.uint32(high))


def _split_arrays(arrays: Sequence[Array], spec: Spec) -> tuple[list[Array], Sequence[Array]]:
    """The operands, and the words of the seeds, if there are any."""
    count = len(arrays) - (SEEDS + 1 if spec_draws(spec) else 0)
    return list(arrays[:count]), arrays[count:]


def try_chain(*arrays: Array, links: tuple[ChainLink, ...], shape: tuple[int, ...], result: int, spec: Spec) -> Array:
    """The result of `chain_body`, or NaN if an intermediate number was not moderate; it is never another number."""
    precision = exact.range_of(spec, FLOAT32).precision
    values, seeds = _split_arrays(arrays, spec)
    history = [_NumberHistory(_CHECK_TOP, (x,), (x,)) for x in values]
    for name, indices, _, number in links:
        word = chain_words(seeds, shape, number) if seeds else None
        operand_histories = [history[index] for index in indices]
        ranges = [exact.ValueRange(_OPERAND_QUANTUM, precision, operand.top) for operand in operand_histories]
        values.append(round_operation(name, [values[index] for index in indices], spec, word, ranges=ranges))
        history.append(_history_of_result(name, operand_histories, values[-1]))
    return _nan_outside_safe_range(values[result], history[result], _least_safe_exponent(spec))


@dataclass(frozen=True)
class _NumberHistory:
    """The history of a number. It is below 2^top unless one of `small` is too small or one of `large` too large."""

    top: int
    small: tuple[Array, ...]
    large: tuple[Array, ...]


def _history_of_result(name: str, past: Sequence[_NumberHistory], value: Array) -> _NumberHistory:
    """The history of the result of an operation."""
    fields = ([x for each in past for x in getattr(each, field)] for field in ("small", "large"))
    small, large = (tuple({id(x): x for x in arrays}.values()) for arrays in fields)  # distinct ones
    top = max(each.top for each in past)
    if name in _KEEPS_MAGNITUDE:
        return _NumberHistory(top, small, large)
    if name in _CHAIN_PRODUCTS:
        return _NumberHistory(_CHECK_TOP, (*small, value), (*large, value))
    return (
        _NumberHistory(top + 1, small, large)
        if top < _OPERAND_TOP
        else _NumberHistory(_CHECK_TOP, small, (*large, value))
    )


def _nan_outside_safe_range(value: Array, history: _NumberHistory, least: int) -> Array:
    low, high = (np.uint32((exponent + FLOAT32.bias) << FLOAT32.fraction) for exponent in (least, _CHECK_TOP))
    smallest, largest = np.uint32(0xFFFFFFFF), np.uint32(0)
    for x in history.small:
        smallest = jnp.minimum(smallest, _magnitude_word(x) - np.uint32(1))  # zero wraps to the largest of all
    for x in history.large:
        largest = jnp.maximum(largest, _magnitude_word(x))
    return lax_where((smallest >= low - 1) & (largest < high), value, np.float32(np.nan))


def _magnitude_word(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(low_mask(31))


# == sums in an order ==================================================================================================


SumAxes = int | Sequence[int]


def sum_along(
    x: Array,
    axis: SumAxes,
    mspec: MatmulSpec,
    seeds: Array | None = None,
    *,
    value_spec: Spec | None = None,
    matmul: Callable[..., Array] = matmul_body,
) -> Array:
    """The sums of `x` along axes, in the order and with the rounding of ``mspec.accumulate``.

    A sum of x_k is the sum of products x_k 1, so the order is the same as in a matrix product. ``mspec.product`` and
    ``mspec.fused`` have no effect.

    Args:
        x: float16, bfloat16, float32 or float64, with values already rounded to ``mspec.operands``.
        axis: the axis, or several, with elements in C order.
        mspec: the arithmetic.
        seeds: twelve uint32, if ``mspec.accumulate`` draws.
        value_spec: the spec that holds the values of `x`, for a faster way. Default: ``mspec.operands``.
        matmul: the function that multiplies matrices.

    Returns:
        The sums, of the dtype of `x`; +0 for no elements.
    """
    rows, outer = _rows_of_sums(x, axis)
    spec = replace(mspec, operands=_spec_if_holds_one(value_spec or mspec.operands, x.dtype), product=None, fused=False)
    wide = rows.astype(operation_carrier(x.dtype).name)
    ones = jnp.ones((1, rows.shape[1], 1), wide.dtype)
    total = matmul(wide[None], ones, *(() if seeds is None else (seeds,)), spec=spec)
    return total.reshape(outer).astype(x.dtype)


def _spec_if_holds_one(value_spec: Spec | None, dtype: Any) -> Spec | None:
    """`value_spec` if 1 is in the range of its values, else None."""
    if value_spec is None:
        return None
    value_range = exact.range_of(value_spec, operation_carrier(dtype))
    return replace(value_spec, gradient="straight_through") if value_range.bottom <= 0 < value_range.top else None


def product_along(x: Array, axis: SumAxes, spec: Spec, seeds: Sequence[Array] | None = None) -> Array:
    """The products of `x` along axes, one factor after the other in C order from 1: c <- A(c x_k).

    Args:
        x: values that are rounded to `spec` already.
        axis: the axis, or several.
        spec: the rounding of every product.
        seeds: six uint32, if `spec` draws.
    """
    rows, outer = _rows_of_sums(x, axis)
    return _scan_recurrence("prod", rows.T, spec, seeds)[0].reshape(outer)


def cumulative_along(
    operation: str, x: Array, axis: int, spec: Spec, seeds: Sequence[Array] | None = None, *, reverse: bool = False
) -> Array:
    """Sums or products of the elements up to each one: c <- A(c + x_k) from 0, or c <- A(c x_k) from 1.

    Args:
        operation: ``"sum"`` or ``"prod"``.
        x: values that are rounded to `spec` already.
        axis: the axis.
        spec: the rounding of every step.
        seeds: six uint32, if `spec` draws.
        reverse: from the last element to the first.
    """
    columns = jnp.moveaxis(x, axis, 0)
    if not x.shape[axis]:
        return x
    _, values = _scan_recurrence(operation, columns[::-1] if reverse else columns, spec, seeds)
    return jnp.moveaxis(values[::-1] if reverse else values, 0, axis)


_RECURRENCES = {"sum": ("add", 0.0), "prod": ("mul", 1.0)}


def _scan_recurrence(operation: str, columns: Array, spec: Spec, seeds: Sequence[Array] | None) -> tuple[Array, Array]:
    """The last value and all values of c along the first axis; iteration k has the seeds of iteration k of loop 0."""
    name, start = _RECURRENCES[operation]
    ranges = _recurrence_ranges(spec, columns.dtype)

    def iterate(carry: tuple[Array, Array], column: Array) -> tuple[tuple[Array, Array], Array]:
        c, k = carry
        word = operation_words(fold_seeds(seeds, 0, k), c) if spec_draws(spec) and seeds is not None else None
        c = round_operation(name, [c, column], spec, word, ranges=ranges)
        return (c, k + jnp.uint32(1)), c

    first = jnp.full_like(columns[0] if columns.shape[0] else columns.sum(0), start)
    (last, _), values = lax.scan(iterate, (first, jnp.uint32(0)), columns)
    return last, values


def _recurrence_ranges(spec: Spec, dtype: Any) -> tuple[exact.ValueRange, exact.ValueRange]:
    """The range of c, which is a value of the format or the start 0 or 1, and the range of an element."""
    carrier = operation_carrier(dtype)
    element = exact.range_of(spec, carrier)
    return (element if element.bottom <= 0 < element.top else exact.carrier_range(carrier)), element


# -- shapes ------------------------------------------------------------------------------------------------------------


def _rows_of_sums(x: Array, axis: SumAxes) -> tuple[Array, tuple[int, ...]]:
    """A matrix with a row for each result, and the shape of the results."""
    axes = [a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis)]
    outer_axes = [a for a in range(x.ndim) if a not in axes]
    outer = tuple(x.shape[a] for a in outer_axes)
    length = math.prod(x.shape[a] for a in axes)
    return jnp.transpose(x, (*outer_axes, *sorted(axes))).reshape(math.prod(outer), length), outer
