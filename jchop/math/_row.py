"""Builds a function from a row of the table: round the operands, compute, round the result once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jchop._common.gradients import CustomJvp, moved_by
from jchop._common.settings import always_jit, split_prng_key
from jchop._core.arithmetic.ranges import ValueRange
from jchop._core.matmul.operations import check_operation, operation_words, require_dtype_holds, widen_operand
from jchop._core.rounding.grid import require_carrier
from jchop._core.rounding.random_bits import seed_words
from jchop._kernels.elementary import elementary_op, supports_function
from jchop._kernels.operation import operation_on_device
from jchop._round.arguments import Array, SpecLike, as_operands, carrier_of_dtype, rounding_key, run_on_operands
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, as_spec

#: The exact result rounded once: the name of an `operation`, or a function (operands, spec, random words) -> result.
ExactOperation = str | Callable[[tuple[Array, ...], Spec, Array | None], Array]


class UnaryFunction(Protocol):
    """A function of one array."""

    row: MathRow

    def __call__(self, x: Any, spec: SpecLike, key: Array | None = None) -> Any: ...


class BinaryFunction(Protocol):
    """A function of two arrays, which broadcast."""

    def __call__(self, x: Any, y: Any, spec: SpecLike, key: Array | None = None) -> Any: ...


class TernaryFunction(Protocol):
    """A function of three arrays, which broadcast."""

    def __call__(self, x: Any, y: Any, z: Any, spec: SpecLike, key: Array | None = None) -> Any: ...


@dataclass(frozen=True)
class MathRow:
    """A function of the table.

    Args:
        name: as in `jax.numpy`.
        operands: the names of its arguments.
        carrier: the function in the carrier, which also defines the derivative. Its floating-point results are rounded,
            integers are not.
        formula: its mathematics, as text.
        exact: the function that rounds the exact result once; None if the carrier's result is rounded.
        complex_too: whether operands may be complex.
        carrier_is_exact: whether the carrier's result is exact, without `exact`.
        elementary: the name of a function of `_core.elementary`, whose exact value is rounded once under the
            formats that it `supports_function`.
    """

    name: str
    operands: tuple[str, ...]
    carrier: Callable[..., Any]
    formula: str
    exact: ExactOperation | None = None
    complex_too: bool = False
    carrier_is_exact: bool = False
    elementary: str | None = None


# -- calling -----------------------------------------------------------------------------------------------------------


def call_row(row: MathRow, operands: tuple[Any, ...], spec: SpecLike, key: Array | None) -> Any:
    """The function of `row` at `operands`."""
    spec = as_spec(spec)
    arrays = as_operands(row.operands, operands, complex_too=row.complex_too)
    dtype = arrays[0].dtype
    require_carrier(spec, carrier_of_dtype(dtype))
    if row.exact is not None:
        check_operation(spec, dtype)
    elif not row.carrier_is_exact:
        require_dtype_holds(spec, carrier_of_dtype(dtype).name)
    check_cotangent_rounding(spec)
    key = rounding_key(key, spec.rounding.stochastic, spec)
    return run_on_operands(partial(_apply_row, row, spec), arrays, key)


def check_cotangent_rounding(spec: Spec) -> None:
    """Refuses a spec with a stochastic rounding of cotangents."""
    backward = spec.gradient.round
    if backward is not None and backward.rounding.stochastic:
        raise ValueError(
            f"spec={str(spec)!r} rounds cotangents stochastically, for which there is no key here; use round_to_format "
            "with a gradient_key on the operands instead"
        )


@partial(always_jit, static_argnums=(0, 1), inline=True)
def _apply_row(row: MathRow, spec: Spec, *operands_and_key: Any) -> Any:
    *operands, key = operands_and_key
    count = len(operands)
    keys = [None] * (count + 1) if key is None else list(split_prng_key(key, count + 1))
    arguments = (widen_operand(round_to_format(jnp.asarray(x), spec, k)) for x, k in zip(operands, keys, strict=False))
    return as_dtype(row_result(row, spec, tuple(arguments), keys[-1]), operands[0].dtype)


def row_result(row: MathRow, spec: Spec, operands: tuple[Array, ...], key: Array | None) -> Any:
    """The function at operands that are already rounded and of a wide dtype."""
    if row.exact is not None:
        return _exact_result(row, spec, operands, key)
    if row.elementary is not None and supports_function(row.elementary, spec):
        return _exact_result(replace(row, exact=_ElementaryFunction(row.elementary)), spec, operands, key)
    return _round_results(row.carrier(*operands), spec, key)


def evaluate_function(function: UnaryFunction, x: Array, spec: Spec | None, key: Array | None = None) -> Array:
    """A function of the table inside another one, at rounded values of a wide dtype; None: the carrier's."""
    return function.row.carrier(x) if spec is None else row_result(function.row, spec, (x,), key)


def _round_results(values: Any, spec: Spec, key: Array | None) -> Any:
    """Each floating-point result rounded; several results have different keys."""
    if not isinstance(values, tuple):
        return round_to_format(values, spec, key)
    keys = [None] * len(values) if key is None else [jax.random.fold_in(key, i) for i in range(len(values))]
    return tuple(
        round_to_format(value, spec, k) if jnp.issubdtype(value.dtype, jnp.floating) else value
        for value, k in zip(values, keys, strict=True)
    )


def as_dtype(values: Any, dtype: Any) -> Any:
    """Results cast to the dtype of 16-bit operands."""
    if dtype.itemsize > 2:
        return values
    return jax.tree.map(lambda v: v.astype(dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v, values)


@partial(CustomJvp, nondiff_argnums=(0, 1))
def _exact_result(row: MathRow, spec: Spec, operands: tuple[Array, ...], key: Array | None) -> Array:
    operands = tuple(jnp.broadcast_arrays(*operands))
    word = None if key is None else operation_words(seed_words(key), operands[0])
    if isinstance(row.exact, str):
        return operation_on_device(row.exact, operands, spec, word)
    assert row.exact is not None
    return row.exact(operands, spec, word)


@partial(_exact_result.defjvp, symbolic_zeros=True)
def _exact_result_jvp(row: MathRow, spec: Spec, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """The derivative of the carrier's function with its result rounded, so that the spec's gradient rule applies."""
    operands, key = primals

    def smooth(*operands: Array) -> Array:
        return round_to_format(row.carrier(*operands), spec, key)

    return _exact_result(row, spec, operands, key), moved_by(smooth, operands, tangents[0])


@dataclass(frozen=True)
class _ElementaryFunction:
    """A function of `_core.elementary`."""

    name: str

    def __call__(self, operands: tuple[Array, ...], spec: Spec, word: Array | None) -> Array:
        return elementary_op(*operands, *([] if word is None else [word]), name=self.name, spec=spec)


# -- operations inside other functions ---------------------------------------------------------------------------------


def exact_operation(
    name: str,
    operands: tuple[Array, ...],
    spec: Spec | None,
    key: Array | None = None,
    ranges: tuple[ValueRange, ...] = (),
) -> Array:
    """An `operation` with the carrier's derivative; with `ranges` for arbitrary values of the carrier."""
    if spec is None:
        return _JNP_OPERATIONS[name](*operands)
    exact = _OperationInRanges(name, ranges) if ranges else name
    names = tuple("xyz"[: len(operands)])
    return _exact_result(MathRow(name, names, _JNP_OPERATIONS[name], "", exact), spec, operands, key)


@dataclass(frozen=True)
class _OperationInRanges:
    """An operation on operands of other ranges than the spec's."""

    name: str
    ranges: tuple[ValueRange, ...]

    def __call__(self, operands: tuple[Array, ...], spec: Spec, word: Array | None) -> Array:
        return operation_on_device(self.name, operands, spec, word, ranges=self.ranges)


_JNP_OPERATIONS: dict[str, Callable[..., Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "sqrt": jnp.sqrt,
    "fma": lambda x, y, z: x * y + z,
}


# -- construction ------------------------------------------------------------------------------------------------------


def unary_function(
    name: str, carrier: Callable[..., Any], formula: str, example: tuple[str, str], **more: Any
) -> UnaryFunction:
    """A function of one array; `example` has arguments and result in bfloat16, as text; `more`: fields of `MathRow`."""
    row = MathRow(name, ("x",), carrier, formula=formula, **more)

    def function(x: Any, spec: SpecLike, key: Array | None = None) -> Any:
        return call_row(row, (x,), spec, key)

    return with_row_docstring(function, row, example)


def binary_function(
    name: str, carrier: Callable[..., Any], formula: str, example: tuple[str, str], **more: Any
) -> BinaryFunction:
    """A function of two arrays, otherwise as `unary_function`."""
    row = MathRow(name, ("x", "y"), carrier, formula=formula, **more)

    def function(x: Any, y: Any, spec: SpecLike, key: Array | None = None) -> Any:
        return call_row(row, (x, y), spec, key)

    return with_row_docstring(function, row, example)


def ternary_function(
    name: str, carrier: Callable[..., Any], formula: str, example: tuple[str, str], **more: Any
) -> TernaryFunction:
    """A function of three arrays, otherwise as `unary_function`."""
    row = MathRow(name, ("x", "y", "z"), carrier, formula=formula, **more)

    def function(x: Any, y: Any, z: Any, spec: SpecLike, key: Array | None = None) -> Any:
        return call_row(row, (x, y, z), spec, key)

    return with_row_docstring(function, row, example)


def with_row_docstring(function: Any, row: MathRow, example: tuple[str, str]) -> Any:
    """`function` with the name and the docstring of its row."""
    function.__name__ = function.__qualname__ = row.name
    function.__module__ = "jchop.math"
    function.row = row
    function.__doc__ = inspect.cleandoc(_FUNCTION_DOCSTRING).format(
        formula=row.formula,
        how=_accuracy_text(row),
        operands="\n".join(f"    {name}: {_operand_text(row)}." for name in row.operands),
        split=f"{len(row.operands) + 1}: {'the operand' if len(row.operands) == 1 else 'each operand'} and the result",
        call=f"float(jc.math.{row.name}({example[0]}, 'bfloat16'))",
        result=example[1],
    )
    return function


def _accuracy_text(row: MathRow) -> str:
    if row.exact is not None or row.carrier_is_exact:
        return _EXACT_TEXT
    if row.elementary is None:
        return _CARRIER_RESULT_TEXT
    return _CORRECT_ROUNDING_TEXT if len(row.operands) == 1 else _CLOSE_RESULT_TEXT


def _operand_text(row: MathRow) -> str:
    broadcasts = "; the operands broadcast and are promoted as in `jax.numpy`" if len(row.operands) > 1 else ""
    more = ", complex64 or complex128 (by parts)" if row.complex_too else ""
    return f"float16, bfloat16, float32 or float64{more}, any shape{broadcasts}"


_EXACT_TEXT = """\
The operands are rounded to `spec`; then the exact result is rounded to it once, in every mode, without an intermediate
rounding to the carrier."""
_CORRECT_ROUNDING_TEXT = """\
The operands are rounded to `spec`; then the function's value, known to 36 bits or more, is rounded to it once: every
result is right, in every mode, under formats of up to 16 bits that float32 holds (docs/math.md). Under binary32 and
wider formats it is the carrier's result (float32, or float64 for float64 data), rounded once more."""
_CLOSE_RESULT_TEXT = """\
The operands are rounded to `spec`; then the function's value, known to about 44 bits, is rounded to it once, in every
mode, under formats of up to 16 bits that float32 holds (docs/math.md). Under binary32 and wider formats it is the
carrier's result (float32, or float64 for float64 data), rounded once more."""
_CARRIER_RESULT_TEXT = """\
The operands are rounded to `spec`; then the carrier's result (float32, or float64 for float64 data) is rounded to it
once more. The result can be wrong if the carrier's result is an ulp off, or if the device reads subnormal numbers of
the carrier as zero."""
_FUNCTION_DOCSTRING = """\
{formula}, with `jax.numpy`'s name and meaning, in an emulated arithmetic.

{how}

Derivatives are the derivatives of the carrier's function at the rounded operands, straight-through as in
`jchop.round_to_format`. Works under jit (`spec` static), vmap, scan and remat.

Args:
{operands}
    spec: a `jchop.Spec`, a format, or text such as ``"e5m2:stochastic"``.
    key: a typed key, required if `spec` is stochastic; it is split into {split}. Default None.

Returns:
    Results of the operands' dtype, float32 or float64 for integers; NumPy if they are NumPy arrays, numbers or lists,
    else JAX. Outside the domain NaN.

Raises:
    TypeError: for a dtype that is neither a carrier nor of integers or booleans, or a key that is not a typed key.
    ValueError: for a stochastic spec without a key, or a carrier that is too narrow for the spec.

Example:
    >>> import jchop as jc
    >>> {call}
    {result}
"""
