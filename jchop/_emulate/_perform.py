"""Runs single equations: the values of the emulated arithmetic, the derivative of the carrier's primitive.

Rounding works on bits, which have no derivative. So every rounded equation is an operation with the tangent of its
primitive at the rounded operands: straight-through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._bits import CARRIERS
from jchop._core.arithmetic.basic import Range, range_of
from jchop._core.arithmetic.operations import draws, operation, operation_carrier
from jchop._core.rounding.elements import round_elements
from jchop._emulate._known import Known, is_float
from jchop._emulate._rules import EXACT
from jchop._kernels.elementary import elementary_op, rounds
from jchop._kernels.operation import operation_on_device
from jchop._kernels.primitive import make_op
from jchop._program.bind import bind, straight_through
from jchop._settings import compiled
from jchop.spec import Spec

Array = jax.Array

#: Smaller operations are fused with their neighbours: XLA vectorizes the result, and a call would not be faster.
LEAST_APART = 1 << 14

__all__ = ["Task", "perform", "round_value"]


# -- tasks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Everything static about one rounded equation; equal tasks are traced once."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    kind: str
    spec: Spec
    known: tuple[Known, ...]
    apart: bool = False  # of exact operations

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.primitive, self.params, self.kind, self.spec, self.known))

    def plain(self, *args: Array) -> Any:
        out = bind(self.primitive, dict(self.params), *args)
        return out if self.primitive.multiple_results else out[0]

    def run(self, args: Sequence[Array], drawn: Sequence[Array]) -> Any:
        return _RUNS[self.kind](self, args, list(drawn))


def perform(task: Task, args: Sequence[Array], drawn: Sequence[Array] = ()) -> list[Any]:
    """The results of a task, given a random word array for each rounding that draws."""
    out = _perform(task, list(args), list(drawn))
    return list(out) if task.primitive.multiple_results else [out]


@partial(compiled, static_argnums=0)
def _perform(task: Task, args: list[Array], drawn: list[Array]) -> Any:
    apart = task.kind == "exact" and (task.apart or max(math.prod(x.shape) for x in args) >= LEAST_APART)
    run = _run_apart if apart else Task.run
    return straight_through(partial(run, task), task.plain, args, drawn)


def _run_apart(task: Task, args: Sequence[Array], drawn: Sequence[Array]) -> Array:
    return _operation_op(*args, *drawn, task=task, count=len(args))


def _body(*arrays: Array, task: Task, count: int) -> Array:
    return task.run(arrays[:count], arrays[count:])


#: Compiled apart, because XLA would compile and compute an operation once for each use.
_operation_op = make_op("jchop_operation", _body, apart=True)


def _exact(task: Task, args: Sequence[Array], drawn: list[Array]) -> Array:
    name = EXACT[task.primitive.name]
    return operation_on_device(name, args, task.spec, drawn[0] if drawn else None, ranges=_ranges(task, args))


def _ranges(task: Task, args: Sequence[Array]) -> tuple[Range, ...]:
    carrier = operation_carrier(args[0].dtype)
    return tuple(range_of(known, carrier) for known in task.known)


def _extremum(task: Task, args: Sequence[Array], drawn: list[Array]) -> Array:
    del drawn
    return operation(task.primitive.name, args, task.spec, ranges=_ranges(task, args))


def _power(task: Task, args: Sequence[Array], drawn: list[Array]) -> Array:
    """x^n by squaring, as in the carrier. Every product is rounded, and for n < 0 the quotient."""
    (x,), spec, exponent = args, task.spec, dict(task.params)["y"]
    taken = iter(drawn)

    def op(name: str, *operands: Array) -> Array:
        return operation(name, operands, spec, next(taken) if draws(spec) else None)

    total, square, n = None, x, abs(exponent)
    while n:
        if n & 1:
            total = square if total is None else op("mul", total, square)
        n >>= 1
        if n:
            square = op("mul", square, square)
    one = _round(jnp.ones_like(x), spec, None) if not draws(spec) else jnp.ones_like(x)
    if total is None:
        return one
    if exponent > 0:
        return total
    carrier = operation_carrier(x.dtype)
    word = next(taken) if draws(spec) else None
    return operation("div", [one, total], spec, word, ranges=(range_of(None, carrier), range_of(spec, carrier)))


def power_draws(exponent: int) -> int:
    """The most operations in a power."""
    return 2 * abs(exponent).bit_length() + 1


def _elementary(task: Task, args: Sequence[Array], drawn: list[Array]) -> Any:
    """The exact value if `rounds` has the function and format, else the carrier's result; rounded once."""
    if rounds(task.primitive.name, task.spec) and all(map(is_float, args)):
        operands = jnp.broadcast_arrays(*args)  # JAX's primitives of two operands stretch axes of size 1
        return elementary_op(*operands, *drawn[:1], name=task.primitive.name, spec=task.spec)
    return _made(task, args, drawn)


def _made(task: Task, args: Sequence[Array], drawn: list[Array]) -> Any:
    out = bind(task.primitive, dict(task.params), *args)
    taken = iter(drawn)
    out = [_round(x, task.spec, next(taken) if draws(task.spec) else None) if is_float(x) else x for x in out]
    return out if task.primitive.multiple_results else out[0]


def _summed(task: Task, args: Sequence[Array], drawn: list[Array]) -> Any:
    """The carrier's own sum, in full precision, rounded once."""
    params = dict(task.params)
    if "precision" in params:
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    out = bind(task.primitive, params, *args)[0]
    return _round(out, task.spec, drawn[0] if drawn else None)


def _converted(task: Task, args: Sequence[Array], drawn: list[Array]) -> Array:
    """A conversion. An integer that the carrier does not hold is the sum of two parts, rounded once."""
    (x,), dtype = args, dict(task.params)["new_dtype"]
    word = drawn[0] if drawn else None
    carrier = operation_carrier(dtype)
    integer = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize * 8 > carrier.fraction + 1
    if integer and x.dtype.itemsize == 4:
        high, low = (x >> 16).astype(carrier.name), (x & 0xFFFF).astype(carrier.name)
        parts = [high * 65536.0, low]
        return operation("add", parts, task.spec, word, ranges=(Range(16, 16, 33), Range(0, 16, 17))).astype(dtype)
    if is_float(x):
        return _round(lax.convert_element_type(x, dtype), task.spec, word)
    return _round(x.astype(carrier.name), task.spec, word).astype(dtype)


_RUNS: dict[str, Callable[..., Any]] = {
    "exact": _exact,
    "extremum": _extremum,
    "power": _power,
    "elementary": _elementary,
    "made": _made,
    "accumulating": _summed,
    "converted": _converted,
}


# -- rounding ----------------------------------------------------------------------------------------------------------


def _round(x: Array, spec: Spec, word: Array | None) -> Array:
    return round_elements(x, spec, CARRIERS[x.dtype.name], word)


@partial(compiled, static_argnums=1)
def round_value(x: Array, spec: Spec, word: Array | None = None) -> Array:
    """`x` rounded; the derivative is the identity's."""
    return straight_through(lambda args, word: _round(args[0], spec, word), lambda x: x, [x], word)
