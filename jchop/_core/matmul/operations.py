"""Operations by name: the exact result of +, −, ×, ÷, √ and fma rounded once, on rounded operands.

One signature serves all interpreters of programs. 16-bit dtypes are computed in float32, other dtypes as in `basic`;
operands broadcast. The random words of a program's operations are in one stream: the words of operation n start at the
index n 2^32, and each iteration of a loop has different seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common import bit_ops
from jchop._common.bit_ops import CARRIERS, Carrier
from jchop._core.arithmetic import basic
from jchop._core.arithmetic.double_word import square_root
from jchop._core.arithmetic.exact import round_exact
from jchop._core.arithmetic.ranges import OPERATION_CARRIERS, ValueRange, holds_format, range_of, require_operation
from jchop._core.matmul.aligned import require_aligned_order
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.grid import require_carrier, x64_remedy
from jchop._core.rounding.random_bits import SEEDS, StreamOffset, random_words, words_like
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec, as_spec
from jchop.formats import FloatFormat
from jchop.formats.rounding import Overflow, Rounding

Array = jax.Array


def round_operation(
    name: str, args: Sequence[Array], spec: Spec | None, word: Array | None = None, *, ranges: Sequence[ValueRange] = ()
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
    operand_ranges = tuple(ranges) or (range_of(spec, carrier),) * len(arrays)
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
    require_operation(spec, operation_carrier(dtype), argument)
    require_dtype_holds(spec, dtype, argument)


def require_dtype_holds(spec: Spec | None, dtype: Any, argument: str = "spec") -> None:
    """Refuses a spec with values that a dtype cannot hold."""
    carrier = CARRIERS[jnp.dtype(dtype).name]
    if spec is None or holds_format(spec.format, carrier):
        return
    able = [name for name in OPERATION_CARRIERS if holds_format(spec.format, CARRIERS[name])]
    remedy = f"cast the operands to {able[0]}{x64_remedy(able)}" if able else "no carrier up to float64 can"
    raise ValueError(f"{argument}={str(spec)!r} has values that {carrier.name} cannot hold; {remedy}")


def check_matmul(spec: MatmulSpec, dtype: Any, allow_scales: bool = False) -> None:
    """Refuses roundings that are impossible for sums of products in `dtype`, or whose values it cannot hold.

    Args:
        spec: the arithmetic.
        dtype: that of the operands.
        allow_scales: whether the operands may have a scaled format. Default False.

    Raises:
        ValueError: names the field of `spec`, and a dtype that works.
    """
    if spec.operands is not None and not (allow_scales and spec.group):
        require_carrier(as_spec(spec.operands, "operands"), operation_carrier(dtype))
    require_operation(spec.product, operation_carrier(dtype), "product")
    if spec.order.aligned:
        require_aligned_order(spec, operation_carrier(dtype))
        require_dtype_holds(spec.accumulate, dtype, "accumulate")
    else:
        check_operation(spec.accumulate, dtype, "accumulate")


# -- random words ------------------------------------------------------------------------------------------------------


def spec_draws(spec: Spec | None) -> bool:
    """Whether a rounding under `spec` takes random words."""
    return spec is not None and spec.rounding.stochastic


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
    ranges: tuple[ValueRange, ...]

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
    return round_exact(square_root(x, step.carrier, step.spec.rounding.stochastic), *step.rest)


def _barrier_unless_nearest(step: _OperationStep, *args: Array) -> tuple[Array, ...]:
    """Operands or results behind a barrier, for a quotient or root in a mode that does not round to the nearest.

    The quirk `long_fusion_compiled_for_minutes` (`_core/xla/cpu.py`) is the reason: such modes compute more bits, and
    have comparisons with zero that the vectorizer follows through all the operations before them, and after a quotient.
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
    (xs, xm), (ys, ym) = (bit_ops.split_sign(v, step.carrier) for v in (x, y))
    x_key, y_key = (
        magnitude ^ bit_ops.lax_where(sign != 0, -1, 0).astype(magnitude.dtype)
        for sign, magnitude in ((xs, xm), (ys, ym))
    )
    result = bit_ops.lax_where((x_key > y_key) == larger, x, y)
    is_nan = (xm > step.carrier.inf) | (ym > step.carrier.inf)
    return bit_ops.lax_where(is_nan, jnp.asarray(np.nan, x.dtype), result)


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
