"""Runs single equations: the values of the emulated arithmetic, the derivative of the carrier's primitive.

Rounding works on bits, which have no derivative. So every rounded equation is an operation with the tangent of its
primitive at the rounded operands: straight-through.
"""

from __future__ import annotations

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
from jchop._core.elementary.rounded import elementary, rounds
from jchop._core.rounding.elements import round_elements
from jchop._core.sizes import if_known
from jchop._emulate._known import Known, is_float
from jchop._emulate._rules import EXACT
from jchop._kernels.elementary import elementary_op
from jchop._kernels.operation import operation_on_device
from jchop._kernels.primitive import make_op
from jchop._program.bind import bind, straight_through
from jchop._program.seeds import Draw
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

    def run(self, args: Sequence[Array], words: Sequence[Array]) -> Any:
        return _RUNS[self.kind](self, args, list(words))


def perform(task: Task, args: Sequence[Array], words: Sequence[Array | Draw] = ()) -> list[Any]:
    """The results of a task, given a draw for each rounding that draws, or its words."""
    out = _perform(task, list(args), list(words))
    return list(out) if task.primitive.multiple_results else [out]


@partial(compiled, static_argnums=0)
def _perform(task: Task, args: list[Array], words: list[Any]) -> Any:
    run = _run_apart if _is_apart(task, args, words) else _run
    return straight_through(partial(run, task), task.plain, args, words)


def _is_apart(task: Task, args: Sequence[Array], words: Sequence[Any]) -> bool:
    if task.kind == "elementary":  # without draws it is an operation by itself
        return bool(words) and _is_rounded(task, args)
    return task.kind == "exact" and (task.apart or any(if_known(lambda x=x: x.size >= LEAST_APART) for x in args))


def _run(task: Task, args: Sequence[Array], words: Sequence[Any]) -> Any:
    return task.run(args, [one.words() if isinstance(one, Draw) else one for one in words])


def _run_apart(task: Task, args: Sequence[Array], words: Sequence[Any]) -> Array:
    if task.kind == "elementary":
        leaves, tree = jax.tree.flatten((_stretched(args), list(words)))
        return _elementary_op(*leaves, task=task, tree=tree)
    leaves, tree = jax.tree.flatten((list(args), list(words)))
    return _operation_op(*leaves, task=task, tree=tree)


def _body(*leaves: Array, task: Task, tree: Any) -> Array:
    return _run(task, *jax.tree.unflatten(tree, leaves))


#: Compiled apart, because XLA would compile and compute an operation once for each use. The words of its draws are made
#: in it, and not by a loop of their own.
_operation_op = make_op("jchop_operation", _body, apart=True)
_elementary_op = make_op("jchop_elementary", _body, like_first=True, apart=True)


def _exact(task: Task, args: Sequence[Array], words: list[Array]) -> Array:
    name = EXACT[task.primitive.name]
    return operation_on_device(name, args, task.spec, words[0] if words else None, ranges=_ranges(task, args))


def _ranges(task: Task, args: Sequence[Array]) -> tuple[Range, ...]:
    carrier = operation_carrier(args[0].dtype)
    return tuple(range_of(fact, carrier) for fact in task.known)


def _extremum(task: Task, args: Sequence[Array], words: list[Array]) -> Array:
    del words
    return operation(task.primitive.name, args, task.spec, ranges=_ranges(task, args))


def _power(task: Task, args: Sequence[Array], words: list[Array]) -> Array:
    """x^n by squaring, as in the carrier. Every product is rounded, and for n < 0 the quotient."""
    (x,), spec, exponent = args, task.spec, dict(task.params)["y"]
    word_iter = iter(words)

    def op(name: str, *operands: Array) -> Array:
        return operation(name, operands, spec, next(word_iter) if draws(spec) else None)

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
    word = next(word_iter) if draws(spec) else None
    return operation("div", [one, total], spec, word, ranges=(range_of(None, carrier), range_of(spec, carrier)))


def power_draws(exponent: int) -> int:
    """The most operations in a power."""
    return 2 * abs(exponent).bit_length() + 1


def _elementary(task: Task, args: Sequence[Array], words: list[Array]) -> Any:
    """The exact value if `supports_function` has the function and format, else the carrier's result; rounded once."""
    if _is_rounded(task, args):
        run = elementary if words else elementary_op  # with draws it is compiled apart already
        return run(*_stretched(args), *words[:1], name=task.primitive.name, spec=task.spec)
    return _made(task, args, words)


def _is_rounded(task: Task, args: Sequence[Array]) -> bool:
    return rounds(task.primitive.name, task.spec) and all(map(is_float, args))


def _stretched(args: Sequence[Array]) -> list[Array]:
    """Operands of one shape: primitives of two operands stretch axes of size 1."""
    return list(jnp.broadcast_arrays(*args))


def _made(task: Task, args: Sequence[Array], words: list[Array]) -> Any:
    out = bind(task.primitive, dict(task.params), *args)
    word_iter = iter(words)
    out = [_round(x, task.spec, next(word_iter) if draws(task.spec) else None) if is_float(x) else x for x in out]
    return out if task.primitive.multiple_results else out[0]


def _summed(task: Task, args: Sequence[Array], words: list[Array]) -> Any:
    """The carrier's own sum, in full precision, rounded once."""
    params = dict(task.params)
    if "precision" in params:
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    out = bind(task.primitive, params, *args)[0]
    return _round(out, task.spec, words[0] if words else None)


def _converted(task: Task, args: Sequence[Array], words: list[Array]) -> Array:
    """A conversion. An integer that the carrier does not hold is the sum of two parts, rounded once."""
    (x,), dtype = args, dict(task.params)["new_dtype"]
    word = words[0] if words else None
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


def _round(x: Array, spec: Spec, word: Any) -> Array:
    return round_elements(x, spec, CARRIERS[x.dtype.name], word)


@partial(compiled, static_argnums=1)
def round_value(x: Array, spec: Spec, word: Array | Draw | None = None) -> Array:
    """`x` rounded, given a draw or its words if the spec draws; the derivative is the identity's."""
    run = _round_apart if isinstance(word, Draw) else _round
    return straight_through(lambda args, word: run(args[0], spec, word), lambda x: x, [x], word)


def _round_apart(x: Array, spec: Spec, draw: Draw) -> Array:
    leaves, tree = jax.tree.flatten(draw)
    return _round_op(x, *leaves, spec=spec, tree=tree)


def _round_body(x: Array, *leaves: Array, spec: Spec, tree: Any) -> Array:
    return _round(x, spec, jax.tree.unflatten(tree, leaves).words())


#: Compiled apart for the same reasons. Roundings of arrays of one shape differ in the numbers of their draws, which are
#: operands, so XLA's CPU backend compiles one of them.
_round_op = make_op("jchop_rounded", _round_body, like_first=True, apart=True)
