"""Runs single equations: the values of the emulated arithmetic, the derivative of the carrier's primitive; draws.

Rounding works on bits, which have no derivative. So every rounded equation is an operation with the tangent of its
primitive at the rounded operands: straight-through.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal

from jchop._common.bit_ops import CARRIERS, ordered_integers, split_sign
from jchop._common.checks import short_repr
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
from jchop._program.step import PLAIN_CALLS, ProgramStep, SeedDraw, Seeds, jaxpr_of
from jchop._spec.spec import Spec
from jchop.formats.rounding import Rounding

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


# == operations of the carrier, their results rounded once: `nextafter`, which gives neighbours in the format; draws ===


#: The first draw number of imaginary parts.
_FIRST_IMAGINARY_DRAW = 1 << 30


def run_in_carrier(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The carrier's results of an equation, rounded once if the plan has a spec; derivatives are the carrier's."""
    return round_results(step, seeds, _carrier_results(step, args))


def round_results(step: EmulatedStep, seeds: Seeds | None, results: list[Any]) -> list[Any]:
    """The results of an equation rounded to the specs of its plan."""
    pairs = enumerate(zip(results, step.out, strict=True), step.result_number)
    return [round_with_draw(x, spec, seeds, number) if isinstance(spec, Spec) else x for number, (x, spec) in pairs]


def _carrier_results(step: EmulatedStep, args: list[Any]) -> list[Any]:
    """The carrier's results, or the results of the user's rule."""
    eqn, function = step.eqn, step.choice.function
    if function is None:
        return bind(eqn.primitive, eqn.params, *args)
    name = f"rules[{step.name!r}]"
    try:
        out = function.call(*args, **eqn.params)
    except TypeError as error:
        if _takes_arguments(function.call, args, eqn.params):
            raise
        raise TypeError(
            f"{name} is a function that does not take what it is called with: the operands, of which there are "
            f"{len(args)}, and the primitive's parameters as keywords ({', '.join(eqn.params) or 'here none'}); write "
            f"it as lambda x, **params: ...; Python: {error}"
        ) from error
    want = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    try:
        results = [jnp.asarray(x) for x in (out if eqn.primitive.multiple_results else [out])]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} returned {short_repr(out)}; the primitive has arrays of (shape, dtype) {want}"
        ) from error
    got = [(x.shape, x.dtype) for x in results]
    if got != want:
        raise TypeError(f"{name} returned arrays of (shape, dtype) {got}; the primitive has {want}")
    return results


def _takes_arguments(function: Any, args: list[Any], params: dict[str, Any]) -> bool:
    """Whether a function has parameters for these arguments."""
    try:
        inspect.signature(function).bind(*args, **params)
    except TypeError:
        return False
    except ValueError:  # some builtin functions have no signature
        pass
    return True


def round_with_draw(x: Array, spec: Spec, seeds: Seeds | None, number: int) -> Array:
    """`x`, or its two parts, rounded with the draw of this number; the derivative is the identity's."""
    has_parts, draw = jnp.iscomplexobj(x), None
    if spec_draws(spec):
        assert seeds is not None
        draw = seeds.draw(jax.eval_shape(lax.real, x) if has_parts else jax.typeof(x), number)
    return (_round_complex if has_parts else round_value)(x, spec, draw)


@partial(always_jit, static_argnums=1)
def _round_complex(x: Array, spec: Spec, draw: SeedDraw | None) -> Array:
    later = None if draw is None else draw.later(_FIRST_IMAGINARY_DRAW)
    return lax.complex(round_value(lax.real(x), spec, draw), round_value(lax.imag(x), spec, later))


def run_nextafter(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """`nextafter`: the next value of the format, which is the carrier's next value rounded in that direction."""
    del seeds
    spec = step.choice.spec
    if spec is None:
        return bind(step.eqn.primitive, step.eqn.params, *args)

    def run(values: list[Array], _: None) -> Array:
        x, y = values
        next_value = lax.nextafter(x, y)
        down, up = (round_toward(next_value, spec, way) for way in (Rounding.DOWN, Rounding.UP))
        return jnp.where(is_less_by_bits(y, x), down, up)

    return [straight_through(run, lax.nextafter, list(jnp.broadcast_arrays(*args)), None)]


def is_less_by_bits(x: Array, y: Array) -> Array:
    """Whether x < y, by bits: a device may take subnormal numbers for zero."""
    carrier = CARRIERS[x.dtype.name]
    return ordered_integers(*split_sign(x, carrier)) < ordered_integers(*split_sign(y, carrier))


def round_toward(x: Array, spec: Spec, rounding: Rounding) -> Array:
    """The next value of the format in a direction, or `x` itself if it is one."""
    return round_value(x, Spec(spec.format, rounding, flush=spec.flush))


# -- random draws ------------------------------------------------------------------------------------------------------
#
# Random draws: a call of a function of `jax.random` is one operation of the carrier, rounded once.
#
# Intermediate values are not rounded: a rounded uniform number may be 0, and its logarithm would be infinite.
# Tracebacks tell which equations belong to a call, also for functions that JAX does not compile apart
# (`jax.random.categorical`).


@lru_cache(maxsize=1)
def _random_files() -> frozenset[str]:
    """The source files of the functions of `jax.random`."""
    functions = (inspect.unwrap(f) for f in vars(jax.random).values() if callable(f))
    return frozenset(f.__code__.co_filename for f in functions if inspect.isfunction(f))


def draws_of(jaxpr: Any) -> dict[int, RandomDraw]:
    """The equations of a jaxpr that belong to calls of `jax.random`, by their id."""
    if not any(_is_key_variable(v) for eqn in jaxpr.eqns for v in eqn.invars):
        return {}
    home = str(getattr(jaxpr.debug_info, "func_src_info", "")).rpartition(":")[0]
    calls = [_random_call_of(eqn, home) for eqn in jaxpr.eqns]
    results_of: dict[Hashable, set[Any]] = {}
    readers: dict[Any, set[Hashable]] = {v: {None} for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn, call in zip(jaxpr.eqns, calls, strict=True):
        results_of.setdefault(call, set()).update(eqn.outvars)
        for v in eqn.invars:
            if not isinstance(v, Literal):
                readers.setdefault(v, set()).add(call)
    draws = {}
    for eqn, call in zip(jaxpr.eqns, calls, strict=True):
        if call is not None:
            leaves = tuple(bool(readers.get(v, set()) - {call}) for v in eqn.outvars)
            draws[id(eqn)] = RandomDraw(frozenset(results_of[call]), leaves, eqn.primitive.name in PLAIN_CALLS)
    return draws


def _is_key_variable(v: Any) -> bool:
    return hasattr(v.aval, "dtype") and jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)


def _random_call_of(eqn: Any, home: str) -> Hashable | None:
    """The frames around the call of `jax.random` that made the equation; None for other equations.

    Frames outside of the jaxpr's function (`home`) are not searched: JAX may take a traced function from a cache.
    """
    frames = eqn.source_info.traceback
    if frames is None:
        return None
    codes, places = frames.raw_frames()
    outermost = None
    for i, code in enumerate(codes):
        if home == f"{code.co_name} at {code.co_filename}":
            break
        if code.co_filename in _random_files():
            outermost = i
    if outermost is None:
        return None
    return tuple((id(code), place) for code, place in list(zip(codes, places, strict=True))[outermost + 1 :])


# -- ends --------------------------------------------------------------------------------------------------------------

#: Functions whose results grow with their random bits, and are never one of the ends of their interval.
_MONOTONE_DRAWS = ("_uniform", "_truncated_normal")


def run_draw(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The results of a draw, rounded once; derivatives are the carrier's."""
    results, spec = run_in_carrier(step, seeds, args), step.choice.spec
    limits = None if spec is None else _draw_limits(step, args)
    if spec is None or limits is None:
        return results
    return [_clamp_to_limits(results[0], spec, limits), *results[1:]]  # then values that a derivative needs


def _draw_limits(step: EmulatedStep, args: list[Any]) -> tuple[Array, Array] | None:
    """The least and the largest result that a draw may have, in the carrier; None for a draw without excluded ends."""
    draws = any(map(_is_key_variable, step.eqn.invars))  # else a part before the draw
    if draws and step.eqn.params.get("name") in _MONOTONE_DRAWS:
        run = partial(_run_with_bits, jaxpr_of(step.eqn.params["jaxpr"]), args)
        least, largest = (lax.stop_gradient(run(bits)[0]) for bits in (0, -1))
        # The end is the last operand, or the one of a program's derivative: the operands are the least and the length.
        ends = [args[-1], *([args[-2] + args[-1]] if len(args) > 2 else [])]
        among = jnp.any(jnp.stack([_equals_end(largest, end) for end in ends]), 0)
        return least, jnp.where(among, lax.nextafter(largest, least), largest)
    if step.name == "rng_uniform":
        least, end = args
        return least, lax.nextafter(end, least)
    return None


def _equals_end(x: Array, end: Any) -> Array:
    """Whether a result equals the end of its interval, by a rounding of the carrier; the end may have batch axes."""
    end = jnp.asarray(end)
    shapes = {end.shape, (*end.shape, *(1,) * (x.ndim - end.ndim))}
    fits = [shape for shape in shapes if all(n in (1, m) for n, m in zip(shape[::-1], x.shape[::-1], strict=False))]
    return sum((x == end.reshape(shape) for shape in fits), jnp.zeros(x.shape, bool))


def _run_with_bits(program: tuple[Any, tuple[Any, ...]], args: list[Any], bits: int) -> list[Array]:
    """The results of a program if every random bit is the given one."""
    jaxpr, consts = program
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        values = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        if eqn.primitive.name == "random_bits":
            (v,) = eqn.outvars
            out = [jnp.full(v.aval.shape, bits, jnp.int32).astype(v.aval.dtype)]
        elif "jaxpr" in eqn.params and any(map(_is_key_variable, eqn.invars)):
            out = _run_with_bits(jaxpr_of(eqn.params["jaxpr"]), values, bits)
        else:
            out = bind(eqn.primitive, eqn.params, *values)
        env.update(zip(eqn.outvars, out, strict=True))
    return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def _clamp_to_limits(x: Array, spec: Spec, limits: tuple[Array, Array]) -> Array:
    """`x`, which is rounded, moved to the nearest value of the format within the limits, if there is one.

    Only results at an excluded end are moved; rounding toward zero would move all results.
    """

    def run(values: list[Array], limits: tuple[Array, Array]) -> Array:
        (x,) = values
        least, largest = round_toward(limits[0], spec, Rounding.UP), round_toward(limits[1], spec, Rounding.DOWN)
        least, largest = (jnp.broadcast_to(v, x.shape) for v in (least, largest))
        inside = jnp.where(is_less_by_bits(x, least), least, jnp.where(is_less_by_bits(largest, x), largest, x))
        return jnp.where(is_less_by_bits(largest, least) | jnp.isnan(x), x, inside)

    return straight_through(run, lambda x: x, [x], limits)
