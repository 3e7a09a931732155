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
from jax import Array, lax

from jchop._common.bit_ops import CARRIERS
from jchop._common.settings import always_jit
from jchop._core.arithmetic.basic import ValueRange, range_of
from jchop._core.elementary.functions import elementary_function, supports_function
from jchop._core.matmul.operations import operation_carrier, round_operation, spec_draws, widen_operand
from jchop._core.rounding.elements import round_to_spec
from jchop._core.xla.sizes import if_static
from jchop._emulate.rules.functions import CARRIER_FUNCTIONS, NamedFunction
from jchop._emulate.rules.rules import EXACT, ArithmeticChoice, ValueFact, is_carrier_float, spec_of_fact
from jchop._kernels.operation import elementary_op, operation_on_device
from jchop._kernels.primitive import make_op
from jchop._program.bind import bind, straight_through
from jchop._program.seeds import SeedDraw
from jchop._program.step import ProgramStep
from jchop._spec.spec import Spec

#: Smaller operations are fused with their neighbours: XLA vectorizes the result, and a call would not be faster.
LEAST_APART = 1 << 14

# -- tasks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Everything static about one rounded equation; equal tasks are traced once."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    kind: str
    spec: Spec
    known: tuple[Spec | None, ...]
    apart: bool = False  # of exact operations

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.primitive, self.params, self.kind, self.spec, self.known))

    def plain(self, *args: Array) -> Any:
        """The result of the primitive itself."""
        out = bind(self.primitive, dict(self.params), *args)
        return out if self.primitive.multiple_results else out[0]


def run_task(task: Task, args: Sequence[Array], words: Sequence[Array | SeedDraw] = ()) -> list[Any]:
    """The results of a task, given a draw for each rounding that draws, or its words."""
    out = _run_task_with_derivative(task, list(args), list(words))
    return list(out) if task.primitive.multiple_results else [out]


@partial(always_jit, static_argnums=0)
def _run_task_with_derivative(task: Task, args: list[Array], words: list[Any]) -> Any:
    if task.kind == "elementary":  # without draws it is an operation by itself
        apart = bool(words) and _has_exact_elementary(task, args)
    else:
        large = any(if_static(lambda x=x: x.size >= LEAST_APART) for x in args)
        apart = task.kind == "exact" and (task.apart or large)
    return straight_through(partial(_run_task_apart if apart else _run_task_words, task), task.plain, args, words)


def _run_task_words(task: Task, args: Sequence[Array], words: Sequence[Any]) -> Any:
    words = [one.words() if isinstance(one, SeedDraw) else one for one in words]
    return _TASK_RULES[task.kind](task, args, words)


def _run_task_apart(task: Task, args: Sequence[Array], words: Sequence[Any]) -> Array:
    elementary = task.kind == "elementary"
    leaves, tree = jax.tree.flatten((jnp.broadcast_arrays(*args) if elementary else list(args), list(words)))
    return (_elementary_op if elementary else _operation_op)(*leaves, task=task, tree=tree)


def _task_body(*leaves: Array, task: Task, tree: Any) -> Array:
    return _run_task_words(task, *jax.tree.unflatten(tree, leaves))


#: Compiled apart, because XLA would compile and compute an operation once for each use. The words of its draws are made
#: in it, and not by a loop of their own.
_operation_op = make_op("jchop_operation", _task_body, no_inline=True)
_elementary_op = make_op("jchop_elementary", _task_body, like_first=True, no_inline=True)


def _run_operation(task: Task, args: Sequence[Array], words: list[Array]) -> Array:
    """An operation of `_core`; a maximum or minimum is one of the operands."""
    carrier, name = operation_carrier(args[0].dtype), task.primitive.name
    ranges = tuple(range_of(fact, carrier) for fact in task.known)
    if task.kind == "extremum":
        return round_operation(name, args, task.spec, ranges=ranges)
    return operation_on_device(EXACT[name], args, task.spec, words[0] if words else None, ranges=ranges)


def _run_power(task: Task, args: Sequence[Array], words: list[Array]) -> Array:
    """x^n by squaring, as in the carrier. Every product is rounded, and for n < 0 the quotient."""
    (x,), spec, exponent = args, task.spec, dict(task.params)["y"]
    word_iter = iter(words)

    def op(name: str, *operands: Array) -> Array:
        return round_operation(name, operands, spec, next(word_iter) if spec_draws(spec) else None)

    total, square, n = None, x, abs(exponent)
    while n:
        if n & 1:
            total = square if total is None else op("mul", total, square)
        n >>= 1
        if n:
            square = op("mul", square, square)
    one = _round_to_spec(jnp.ones_like(x), spec, None) if not spec_draws(spec) else jnp.ones_like(x)
    if total is None:
        return one
    if exponent > 0:
        return total
    carrier = operation_carrier(x.dtype)
    word = next(word_iter) if spec_draws(spec) else None
    return round_operation("div", [one, total], spec, word, ranges=(range_of(None, carrier), range_of(spec, carrier)))


def power_draws(exponent: int) -> int:
    """The most operations in a power."""
    return 2 * abs(exponent).bit_length() + 1


def _run_elementary(task: Task, args: Sequence[Array], words: list[Array]) -> Any:
    """The exact value if there is a rule for the function and the format, else the carrier's result; rounded once."""
    if isinstance(task.primitive, NamedFunction) and task.primitive.exact is not None:
        operands = tuple(map(widen_operand, jnp.broadcast_arrays(*args)))
        return task.primitive.exact(operands, task.spec, words[0] if words else None).astype(args[0].dtype)
    if _has_exact_elementary(task, args):
        run = elementary_function if words else elementary_op  # with draws it is compiled apart already
        return run(*jnp.broadcast_arrays(*args), *words[:1], name=task.primitive.name, spec=task.spec)
    return _run_carrier_op(task, args, words)


def _has_exact_elementary(task: Task, args: Sequence[Array]) -> bool:
    return supports_function(task.primitive.name, task.spec) and all(map(is_carrier_float, args))


def _run_carrier_op(task: Task, args: Sequence[Array], words: list[Array]) -> Any:
    """The results of the carrier's operation, rounded to the task's spec."""
    carrier_function = CARRIER_FUNCTIONS.get(task.primitive.name)
    out = bind(task.primitive, dict(task.params), *args) if carrier_function is None else [carrier_function(*args)]
    word_iter = iter(words)
    out = [
        _round_to_spec(x, task.spec, next(word_iter) if spec_draws(task.spec) else None) if is_carrier_float(x) else x
        for x in out
    ]
    return out if task.primitive.multiple_results else out[0]


def _run_carrier_sum(task: Task, args: Sequence[Array], words: list[Array]) -> Any:
    """The carrier's own sum, in full precision, rounded once."""
    params = dict(task.params)
    if "precision" in params:
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    out = bind(task.primitive, params, *args)[0]
    return _round_to_spec(out, task.spec, words[0] if words else None)


def _run_conversion(task: Task, args: Sequence[Array], words: list[Array]) -> Array:
    """A conversion. An integer that the carrier does not hold is the sum of two parts, rounded once."""
    (x,), dtype = args, dict(task.params)["new_dtype"]
    word = words[0] if words else None
    carrier = operation_carrier(dtype)
    integer = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize * 8 > carrier.fraction + 1
    if integer and x.dtype.itemsize == 4:
        high, low = (x >> 16).astype(carrier.name), (x & 0xFFFF).astype(carrier.name)
        parts = [high * 65536.0, low]
        return round_operation(
            "add", parts, task.spec, word, ranges=(ValueRange(16, 16, 33), ValueRange(0, 16, 17))
        ).astype(dtype)
    if is_carrier_float(x):
        return _round_to_spec(lax.convert_element_type(x, dtype), task.spec, word)
    return _round_to_spec(x.astype(carrier.name), task.spec, word).astype(dtype)


_TASK_RULES: dict[str, Callable[..., Any]] = {
    "exact": _run_operation,
    "extremum": _run_operation,
    "power": _run_power,
    "elementary": _run_elementary,
    "made": _run_carrier_op,
    "accumulating": _run_carrier_sum,
    "converted": _run_conversion,
}


# -- rounding ----------------------------------------------------------------------------------------------------------


def _round_to_spec(x: Array, spec: Spec, word: Any) -> Array:
    return round_to_spec(x, spec, CARRIERS[x.dtype.name], word)


@partial(always_jit, static_argnums=1)
def round_value(x: Array, spec: Spec, word: Array | SeedDraw | None = None) -> Array:
    """`x` rounded, given a draw or its words if the spec draws; the derivative is the identity's."""

    def run(args: list[Array], word: Array | SeedDraw | None) -> Array:
        if not isinstance(word, SeedDraw):
            return _round_to_spec(args[0], spec, word)
        leaves, tree = jax.tree.flatten(word)
        return _round_value_op(args[0], *leaves, spec=spec, tree=tree)

    return straight_through(run, lambda x: x, [x], word)


def _round_value_body(x: Array, *leaves: Array, spec: Spec, tree: Any) -> Array:
    return _round_to_spec(x, spec, jax.tree.unflatten(tree, leaves).words())


#: Compiled apart for the same reasons. Roundings of arrays of one shape differ in the numbers of their draws, which are
#: operands, so XLA's CPU backend compiles one of them.
_round_value_op = make_op("jchop_rounded", _round_value_body, like_first=True, no_inline=True)


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomDraw:
    """An equation of a call of `jax.random`.

    Args:
        inner: the result variables of all equations of the same call.
        leaves: for each result, whether equations outside of the call use it.
        calls: whether the equation is a call; then its literals are the user's arguments.
    """

    inner: frozenset[Any]
    leaves: tuple[bool, ...]
    calls: bool


@dataclass(frozen=True, kw_only=True)
class EmulatedStep(ProgramStep):
    """A step of a plan: one equation and its arithmetic.

    Args:
        choice: its arithmetic.
        rounds: which operands are rounded first.
        counts: the places of operands that are counts, which are not rounded.
        draw: its place in a call of `jax.random`.
        apart: whether it is compiled apart from its neighbours, for every size.
    """

    choice: ArithmeticChoice
    rounds: tuple[bool, ...] = ()
    counts: tuple[int, ...] = ()
    known: tuple[ValueFact, ...] = ()  # of the operands, after their rounding
    out: tuple[ValueFact, ...] = ()
    draw: RandomDraw | None = None
    apart: bool = False

    def alike(self, other: Any) -> bool:
        """Whether a step of an equal equation has the same arithmetic; the steps of their programs aside."""
        draws = (each.draw and (each.draw.leaves, each.draw.calls) for each in (self, other))  # data that a run reads
        mine, its = ((each.choice, each.rounds, each.apart, next(draws)) for each in (self, other))
        return super().alike(other) and mine == its

    @cached_property
    def task(self) -> Task:
        """The static data of the equation, whose results must be rounded."""
        assert self.choice.spec is not None
        params = tuple(sorted(self.eqn.params.items()))
        known = tuple(map(spec_of_fact, self.known))
        return Task(self.eqn.primitive, params, self.kind, self.choice.spec, known, self.apart)
