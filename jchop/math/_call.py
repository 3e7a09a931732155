"""Calls of functions: arguments are checked; an emulated function is compiled once for each spec and its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.checks import check, check_int
from jchop._common.settings import always_jit
from jchop._core.matmul.operations import check_matmul, check_operation, require_dtype_holds, widen_operand
from jchop._core.rounding.grid import CARRIER_SPECS, require_carrier
from jchop._core.rounding.random_bits import seed_words
from jchop._emulate.emulate import run_program
from jchop._emulate.rules.functions import FUNCTIONS, NamedFunction
from jchop._emulate.rules.rules import ArithmeticChoice, Settings
from jchop._emulate.rules.trace import trace_program
from jchop._program.bind import straight_through
from jchop._program.seeds import Seeds
from jchop._round.arguments import Array, Key, as_array, as_operands, carrier_of_dtype, rounding_key, run_on_operands
from jchop._round.round_to_format import round_to_format
from jchop._spec.accumulation import MatmulSpec, as_matmul_spec
from jchop._spec.spec import Gradient, Spec, SpecLike, as_spec
from jchop.formats.rounding import Rounding

#: Axes; None means all.
Axes = int | Sequence[int] | None
#: The same, counted from 0.
AxisIndices = tuple[int, ...]


# -- the arithmetic ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _MathSettings(Settings):
    """The settings of `emulate` for a function of this package. Only its operands, not its constants, are rounded.

    In a function with sums, all that follows a sum is rounded as the sums are.
    """

    def choose(self, primitive: str, scope: str, used: set[str] | None = None, line: str = "") -> ArithmeticChoice:
        """The arithmetic of a primitive."""
        spec, how = self.spec, self.accumulate
        if primitive in _SUMS:
            return ArithmeticChoice(None, how, rounds_operands=False)
        if primitive in _UNROUNDED:
            spec = None
        elif how is not None and primitive in _AFTER_SUMS:
            spec = without_gradient(how.accumulate)
        return ArithmeticChoice(spec, None, rounds_operands=False)


_SUMS = frozenset({"reduce_sum", "reduce_prod", "cumsum", "cumprod", "dot_general", "conv_general_dilated"})
#: Counts and indexes.
_UNROUNDED = frozenset({"convert_element_type", "iota"})
_AFTER_SUMS = frozenset({"div", "sqrt", "log", "add"})


def run_emulated(
    function: Callable[..., Any],
    spec: Spec | MatmulSpec,
    operands: Sequence[Any],
    key: Key,
    own: NamedFunction | None = None,
    **options: Any,
) -> Any:
    """The emulated function of checked operands, compiled once for each function, spec and options.

    Args:
        function: of operands in the carrier; a narrower dtype is widened. Equal functions are one object.
        spec: the arithmetic, a `MatmulSpec` for functions with sums.
        operands: the arrays; all floating-point numbers are rounded.
        key: the argument `key`.
        own: a function that is one operation, if `function` calls one that `emulate` does not know.
        options: hashable keyword arguments of `function`.
    """
    draws = spec.stochastic if isinstance(spec, MatmulSpec) else spec.rounding.stochastic
    call = partial(_traced_call, function, tuple(options.items()), spec, own)
    return run_on_operands(call, operands, rounding_key(key, draws, spec))


@partial(always_jit, static_argnums=(0, 1, 2, 3), inline=True)
def _traced_call(
    function: Any, options: Any, spec: Spec | MatmulSpec, own: NamedFunction | None, *operands_and_key: Any
) -> Any:
    """A function of JAX emulated under a spec; its operands are rounded first, and their gradient rule holds."""
    *operands, key = operands_and_key
    function, sums = partial(function, **dict(options)), spec if isinstance(spec, MatmulSpec) else None
    rounding = spec.operands if isinstance(spec, MatmulSpec) else spec
    plain = without_gradient(rounding)
    functions = FUNCTIONS if own is None else (*FUNCTIONS, own)
    how = None if sums is None else replace(sums, operands=plain)
    settings = _MathSettings(plain, (), how, "raise", functions=functions)

    def run(arrays: list[Array], key: Key) -> Any:
        program = trace_program(function, settings, arrays, {})
        results = run_program(program, plain, None if key is None else Seeds(seed_words(key)))
        return jax.tree.unflatten(program.tree, results)

    arrays = [widen_operand(jnp.asarray(x)) if _is_float(x) else jnp.asarray(x) for x in operands]
    if rounding is None or rounding == plain:
        out = run(arrays, key)
    else:
        out = _with_gradient_rule(rounding, function if sums is None else None, run, arrays, key)
    return as_dtype(out, operands[0].dtype, sums)


def without_gradient(spec: Spec | None) -> Spec | None:
    return spec if spec is None or spec.gradient == Gradient() else replace(spec, gradient=Gradient())


def _with_gradient_rule(spec: Spec, function: Any, run: Any, arrays: list[Array], key: Key) -> Any:
    """The results with the gradient rule of the spec: of operands, and of results if the function is given."""
    keys = [None if key is None else jax.random.fold_in(key, i) for i in range(len(arrays))]
    arrays = [round_to_format(x, spec, k) if _is_float(x) else x for x, k in zip(arrays, keys, strict=True)]
    if function is None:
        return run(arrays, key)
    rule = spec if key is None else replace(spec, rounding=Rounding.NEAREST_EVEN)

    def plain(*arrays: Array) -> Any:
        return jax.tree.map(lambda x: round_to_format(x, rule) if _is_float(x) else x, function(*arrays))

    return straight_through(run, plain, arrays, key)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def as_dtype(values: Any, dtype: Any, how: MatmulSpec | None = None) -> Any:
    """Results cast to the dtype of 16-bit operands."""
    return jax.tree.map(lambda x: round_to_dtype(x, how, dtype) if _is_float(x) else x, values)


def round_to_dtype(result: Array, how: MatmulSpec | None, dtype: Any) -> Array:
    """A result cast to a 16-bit dtype, rounded to it if the sums are the carrier's."""
    if result.dtype == dtype or dtype.itemsize > 2:
        return result
    if how is not None and how.accumulate is None:
        result = round_to_format(result, CARRIER_SPECS[dtype.name])
    return result.astype(dtype)


# -- arguments ---------------------------------------------------------------------------------------------------------


def as_math_operands(
    names: Sequence[str], values: Sequence[Any], spec: SpecLike, accuracy: str = "exact", complex_too: bool = False
) -> tuple[Spec, list[Any]]:
    """The spec of every rounding and the operands, checked.

    Args:
        names: the names of the operands.
        values: the operands.
        spec: the argument `spec`.
        accuracy: ``"exact"`` if exact results are rounded, ``"held"`` if there is nothing to round, else another word.
        complex_too: whether operands may be complex.
    """
    spec, arrays = as_spec(spec), as_operands(names, values, complex_too=complex_too)
    carrier = carrier_of_dtype(arrays[0].dtype)
    require_carrier(spec, carrier)
    if accuracy == "exact":
        check_operation(spec, arrays[0].dtype)
    elif accuracy != "held":
        require_dtype_holds(spec, carrier.name)
    backward = spec.gradient.round
    if backward is not None and backward.rounding.stochastic:
        raise ValueError(
            f"spec={str(spec)!r} rounds cotangents stochastically, for which there is no key here; use round_to_format "
            "with a gradient_key on the operands instead"
        )
    return spec, arrays


def as_sum_spec(value: Any) -> MatmulSpec:
    """A MatmulSpec without a product; a plain spec applies to operands and sums."""
    if not isinstance(value, MatmulSpec):
        spec = as_matmul_spec(value).operands
        return MatmulSpec(operands=spec, accumulate=spec)
    if value.product is not None or value.fused:
        raise ValueError(f"spec={str(value)!r}: a sum has no products; leave product=None and fused=False")
    return value


def run_sums(
    function: Callable[..., Any], spec: MatmulSpec, arrays: Sequence[Any], key: Any, more: str = "", **options: Any
) -> Any:
    """`run_emulated` of a function with sums, checked; it also rounds other results as the fields `more` say."""
    check_matmul(spec, arrays[0].dtype)
    for name in more.split():
        check_operation(getattr(spec, name), arrays[0].dtype, name)
    return run_emulated(function, spec, arrays, key, **options)


def check_axis(axis: Any, ndim: int, name: str = "axis") -> int:
    """`axis` as a nonnegative integer."""
    check(ndim, f"{name}={axis!r}, but x is a scalar; it needs at least one axis")
    return check_int(name, axis, -ndim, ndim - 1) % ndim


def as_axis_indices(axis: Any, ndim: int) -> AxisIndices:
    """The axes as nonnegative integers, in order; None means all."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple(check_axis(a, ndim) for a in (axis if isinstance(axis, Sequence) else (axis,)))
    check(len(set(axes)) == len(axes), f"axis={axis!r} names an axis twice")
    return tuple(sorted(axes))


def as_mask_operands(where: Any, shape: tuple[int, ...]) -> tuple[Array | np.ndarray, ...]:
    """The argument `where` as an operand, which must broadcast to `shape`; nothing for None."""
    if where is None:
        return ()
    mask = as_array("where", where)
    if mask.dtype != np.bool_:
        raise TypeError(f"where has dtype {mask.dtype}; it must be of booleans")
    refusal = f"where has shape {mask.shape}, which does not broadcast to that of x, {shape}"
    check(broadcast_shape(refusal, mask.shape, shape) == shape, refusal)
    return (mask,)


def broadcast_shape(refusal: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which some shapes broadcast; ValueError with a text if they do not."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(refusal) from None
