"""`emulate`: the public function, its checks, and its arguments and results."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import update_wrapper
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from jchop._common.on_demand import load_name
from jchop._core.rounding.random_bits import seed_words
from jchop._emulate import paired
from jchop._emulate.rules.carrier_ops import round_with_draw
from jchop._emulate.rules.interpret import EmulationRunner
from jchop._emulate.rules.rules import Settings, make_settings
from jchop._emulate.rules.trace import EmulatedProgram, ProgramCache, ProgramEntry, has_codes, trace_program
from jchop._program.control import as_jax_value, with_weak_types
from jchop._program.run import interpret
from jchop._program.seeds import Seeds
from jchop._program.step import user_line
from jchop._round.arguments import JCHOP_SCOPE, check_key, mark_results
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec, SpecLike
from jchop.formats import ElementFormat, ScaledFormat


class _EmulateOptions(TypedDict, total=False):
    rules: Mapping[str, Any] | None
    accumulate: Any
    key: Any
    unknown: Any
    narrow: Literal["raise", "carrier"]
    max_turns: int | None
    stop_at: Literal["overflow", "nan", "invalid"] | None


@overload
def emulate(fun: Callable[..., Any], spec: Any, **options: Unpack[_EmulateOptions]) -> EmulatedFunction: ...


@overload
def emulate(
    spec: SpecLike | None, /, **options: Unpack[_EmulateOptions]
) -> Callable[[Callable[..., Any]], EmulatedFunction]: ...


def emulate(
    fun: Any = ...,
    spec: Any = ...,
    *,
    rules: Mapping[str, Any] | None = None,
    accumulate: MatmulSpec | None = None,
    key: Array | None = None,
    unknown: Literal["raise", "round_output", "carrier"] = "raise",
    narrow: Literal["raise", "carrier"] = "raise",
    max_turns: int | None = None,
    stop_at: Literal["overflow", "nan", "invalid"] | None = None,
) -> Any:
    """Rounds every floating-point operation of `fun` to `spec`; the signature stays the same.

    JAX traces `fun` to a program, which runs operation by operation. Arguments and constants are rounded on entry. For
    +, −, ×, ÷ and √ the *exact* result of the rounded operands is rounded once, in every mode. An integer power is a
    sequence of these products. For formats of up to 16 bits, exp, log, pow, atan2 and the other elementary functions of
    `jchop.math` round the exact value once. So do functions that JAX composes of several operations (hypot, log10 ...).

    Other functions (lgamma ...), conversions and sums across devices round the carrier's result once more. So do calls
    of `jax.random`; their results are never an excluded end of the interval. `accumulate` decides sums along axes,
    products of matrices, convolutions, cumulative sums and products, and scatters that add, subtract or multiply.
    Operations that only move or choose values (slices, transposes, sorting, max ...) round nothing. Integers, booleans
    and the counts of means do not change. Constants at limits of the carrier become limits of the format. A function of
    jchop is one operation. Operations within calls, loops, branches, remat, shard_map and functions with custom
    derivative rules are rounded, too.

    ``jax.grad(emulate(fun, spec))`` differentiates in the carrier, at the rounded values. The derivative of rounding is
    then the identity (straight-through). ``emulate(jax.grad(fun), spec)`` computes the derivative in the arithmetic of
    `spec`.

    Put `jax.jit` around the result, as around any function. Without it, the operations run one after the other. With
    it, equations that repeat, as in unrolled layers, are compiled once, as a loop that gives the same bits. An eager
    call traces `fun` once for arguments of the same shapes, dtypes and other values. It traces again if an object that
    `fun` reads has changed: in its closure, its defaults or globals. Objects of classes may change unseen. A function
    that reads them is traced in every call, in much less time than the first call needs.

    Without a function the result is a decorator, also for methods: ``@jc.emulate("bfloat16")``.

    Args:
        fun: a function that JAX can trace. Arrays and Python floats among its arguments are rounded; other arguments
            are passed unchanged. Omitted for a decorator.
        spec: the rounding of every operation: a `Spec`, a format, or text. None: no rounding. The carrier is the dtype
            of the program. It must be wide enough for the format.
        rules: other arithmetic for parts of the program, as a mapping. A key is a pattern ([](patterns.md)) for a piece
            of the path of an operation. The path has the names of `jax.named_scope` and `jax.jit`, then the primitive:
            ``"exp"``, ``"block*/norm"``, ``"softmax/exp"``, ``"!softmax"``. A key with a line, as ``"model.py:20"`` or
            ``"model.py:20/add"``, names operations by source. A value is a spec, None for the carrier, ``"wide"``, a
            `MatmulSpec` in place of `accumulate`, or a Python function in place of a primitive. After None the next
            operation rounds the results. After ``"wide"`` no operation that reads them does; they stay wide where they
            are moved, chosen or negated. The function gets the primitive's rounded operands, and the parameters as
            keywords; its results are rounded once. The first key that matches counts.
        accumulate: the order and the roundings of sums, a `MatmulSpec`. The sum is then rounded to `spec`. Cumulative
            sums, and products along axes, are sequential for every order. Default None: **the carrier's own sum**,
            rounded once at the end.
        key: a typed key, needed if a rounding is stochastic. The keyword argument ``key`` of the result replaces it.
            Each operation and each turn of a loop draws different bits. The same key gives the same bits again.
        unknown: the treatment of primitives without a rule. ``"raise"`` raises an error (default), ``"round_output"``
            rounds the operands and the carrier's results, ``"carrier"`` rounds nothing.
        narrow: the treatment of arrays in `fun` whose dtype has fewer bits than the widest argument, as float16 in a
            program of float32. ``"raise"`` (default) raises an error if the dtype cannot hold the format. ``"carrier"``
            computes them in the dtype of the widest argument; conversions to their dtypes then round to `spec` alone.
            Results keep their dtypes.
        max_turns: the most turns of a `while` loop: `jax.lax.while_loop`, and `jax.lax.fori_loop` with bounds that are
            not constants. If the condition still holds then, the loop ends with its present values. A `RuntimeWarning`
            names the line of the condition and the numbers compared. Under `jax.jit` the warning comes when the program
            runs (``jax.effects_barrier()`` waits for it). In a low format ``while t < 10: t += 0.01`` may never end.
            Default None: a loop ends with NaN when a turn keeps all bits that its condition depends on. An eager call
            then warns.
        stop_at: the event that ends a call with a `FloatingPointError`, as ``jax_debug_nans`` does for NaN of the
            carrier. ``"overflow"`` is the first result that is finite in the carrier, but not in the format, or that
            saturates or wraps there. ``"nan"`` is the first NaN, and ``"invalid"`` the first NaN of operands without
            NaN. The error names the operation, its operands, line, turn and scope. The program runs one operation after
            the other beside the same program in the carrier, loops turn by turn. So it is much slower, and not possible
            under `jax.jit` or `jax.grad`. Default None.

    Returns:
        The function, with one more keyword argument, ``key``, which is not passed to `fun`. A ``key`` of `fun` itself
        is passed by position. Results have the dtypes of the results of `fun`. Without `fun`, a decorator.

    Raises:
        TypeError: for a `fun` that is not a function, arguments in another order, or no spec. For rules, an
            accumulation or a key of another type. When called, for traced arguments with ``stop_at``. When called with
            ``key``, if no rounding draws from it and `fun` has a parameter ``key`` without a value.
        FloatingPointError: when called, for the event ``stop_at``.
        ValueError: for ``max_turns`` below 1. When called, for a carrier too narrow for `spec`, a stochastic spec
            without a key, or a rule that matches nothing.
        NotImplementedError: when called, for a primitive without a rule, if ``unknown="raise"``.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> low = jc.emulate(lambda x: jnp.sum(x * x) / 3, "e5m2", accumulate=jc.MatmulSpec(accumulate="e5m2"))
        >>> float(low(jnp.ones(100)))
        2.5
        >>> @jc.emulate("e5m2")
        ... def third(x):
        ...     return x / 3
        >>> float(third(1.0)), third.__name__
        (0.3125, 'third')
    """
    function, spec = _function_and_spec(fun, spec)
    if key is not None:
        check_key("key", key)
    settings = make_settings(spec, rules, accumulate, unknown, max_turns, stop_at, narrow)
    if function is None:
        return lambda fun: EmulatedFunction(_check_function(fun), settings, key)
    return EmulatedFunction(function, settings, key)


def _function_and_spec(fun: Any, spec: Any) -> tuple[Callable[..., Any] | None, Any]:
    """The function, or None for a decorator, and the spec."""
    if _is_spec(fun) and spec is ...:
        return None, fun
    if spec is ...:
        missing = "no function and no spec" if fun is ... else "no spec"
        name = "fun" if fun is ... else _function_name(_check_function(fun))
        raise TypeError(f"emulate: {missing}; write emulate({name}, 'bfloat16') or @emulate('bfloat16')")
    if fun is ...:
        if not _is_spec(spec):
            raise TypeError(f"spec={spec!r} must be a Spec, a format, its text, or None")
        return None, spec
    if _is_spec(fun):
        more = f"; the function comes first: emulate({_function_name(spec)}, {fun!r})" if callable(spec) else ""
        raise TypeError(f"fun={fun!r} must be a function{more}")
    return _check_function(fun), spec


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, str | Spec | ElementFormat | ScaledFormat)


def _check_function(fun: Any) -> Callable[..., Any]:
    if isinstance(fun, staticmethod | classmethod):
        name = type(fun).__name__
        raise TypeError(f"fun={fun!r} must be a function: put @{name} above emulate, not below it")
    if not callable(fun) or _is_spec(fun):
        raise TypeError(f"fun={fun!r} must be a function")
    return fun


def _function_name(fun: Any) -> str:
    return getattr(fun, "__name__", "fun")


class LazyMethod:
    """A method that a wing gives, loaded when first used."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __get__(self, low: Any, owner: type | None = None) -> Any:
        function = load_name(self.module, self.name)
        return function if low is None else MethodType(function, low)


class EmulatedFunction:
    """A function with every operation rounded, as `emulate` returns it, with the tools that look into it.

    A decorated method is looked into by its class: ``Model.step.report(model, x)``.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> low = jc.emulate(lambda x: jnp.exp(x) * x, "e4m3")
        >>> [row.primitive for row in low.report(jnp.array([1.0, 8.0])).rows]
        ['exp', 'mul']
        >>> sorted(row.primitive for row in low.blame(jnp.array([1.0, 1.5])).rows)
        ['exp', 'mul']
    """

    if TYPE_CHECKING:

        def report(self, *args: Any, **options: Any) -> Any: ...
        def blame(self, *args: Any, **options: Any) -> Any: ...
        def what_if(self, *args: Any, **options: Any) -> Any: ...
        def native(self, *args: Any, **options: Any) -> Any: ...
        def ranges(self, batches: Any, **options: Any) -> Any: ...

    else:
        report = LazyMethod("jchop._insight.reports.report", "report")
        blame = LazyMethod("jchop._insight.reports.blame", "blame")
        what_if = LazyMethod("jchop._insight.reports.gains", "what_if")
        native = LazyMethod("jchop._insight.native", "native")
        ranges = LazyMethod("jchop._insight.reports.lines", "ranges")

    def __init__(self, fun: Callable[..., Any], settings: Settings, key: Array | None) -> None:
        self.fun, self.settings, self.key = fun, settings, key
        self.programs = ProgramCache(fun, settings)
        update_wrapper(self, fun, updated=())
        if (own := _signature_of(fun)) is not None:
            self.__signature__ = _signature_with_key(own)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the function to an instance, as plain functions do."""
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, key: Array | None = None, **kwargs: Any) -> Any:
        """Calls `fun` in the arithmetic; `key` replaces the key of `emulate`."""
        seeds = seeds_of_call(self, key, args, kwargs)
        program = self._program(key, args, kwargs)
        # A program may compute a NaN that it never uses, as jnp.var does, or begin a maximum with -inf, so
        # jax_debug_nans and jax_debug_infs check the results only.
        check = jax.config.jax_debug_nans or jax.config.jax_debug_infs  # type: ignore[attr-defined]
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False), jax.named_scope(JCHOP_SCOPE):
            if self.settings.stop_at is None:
                results = run_program(program, self.settings.spec, seeds)
            else:
                results = _run_until_event(self.fun, self.settings, args, kwargs, seeds)
            out = jax.tree.unflatten(program.tree, with_weak_types(results, program.source.outvars))
            out = jax.tree.map(lambda x: x if has_codes(x) else mark_results(x), out, is_leaf=has_codes)
        return jax.tree.map(jnp.copy, out) if check else out

    def _program(self, key: Array | None, args: Any, kwargs: Any) -> EmulatedProgram:
        try:
            return self.programs.of(args, kwargs)
        except TypeError as error:
            if key is not None and _takes_key(self.fun, args, kwargs) and "'key'" in str(error):
                raise TypeError(f"{error}; {_OWN_KEY_ADVICE}") from error
            raise


def seeds_of_call(low: EmulatedFunction, key: Array | None, args: Any, kwargs: Any) -> Seeds | None:
    """The seeds of a call with these arguments; `key` replaces the key of `emulate`."""
    if key is not None and not low.settings.stochastic and _takes_key(low.fun, args, kwargs):
        raise TypeError(
            f"key: no rounding is stochastic, and fun={_function_name(low.fun)} does not get it; {_OWN_KEY_ADVICE}"
        )
    return call_seeds(low.settings, low.key if key is None else key)


_OWN_KEY_ADVICE = "pass fun's own key by position, or as lambda x: fun(x, key=...); key= is the key of the roundings"


def _signature_of(fun: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):  # some builtin functions have none
        return None


def _signature_with_key(own: inspect.Signature) -> inspect.Signature:
    """The signature of an emulated function; a `key` of the function itself leaves no room for another."""
    if "key" in own.parameters:
        return own
    parameters = list(own.parameters.values())
    end = len(parameters) - any(p.kind is p.VAR_KEYWORD for p in parameters)
    parameters.insert(end, inspect.Parameter("key", inspect.Parameter.KEYWORD_ONLY, default=None))
    return own.replace(parameters=parameters)


def _takes_key(fun: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function has a parameter `key` that these arguments leave free."""
    own = _signature_of(fun)
    key = None if own is None else own.parameters.get("key")
    if own is None or key is None or key.kind not in (key.POSITIONAL_OR_KEYWORD, key.KEYWORD_ONLY):
        return False
    try:
        own.bind(*args, **kwargs, key=None)
    except TypeError:
        return False
    return True


def run_program(program: EmulatedProgram, spec: Spec | None, seeds: Seeds | None) -> list[Any]:
    """The results of a program: arguments and constants rounded on entry, then every operation."""
    values, constants, inside = round_on_entry(program, spec, seeds)
    in_trace = any(isinstance(x, Tracer) for x in jax.tree.leaves((values, constants, inside)))
    runner = EmulationRunner(program.runner.max_turns) if in_trace else program.runner
    results = interpret(runner, program.plan, inside, values, constants)
    if not in_trace:
        jax.effects_barrier()  # so that warnings come before the results
    return results


def _run_until_event(
    fun: Callable[..., Any], settings: Settings, args: Any, kwargs: Any, seeds: Seeds | None
) -> list[Any]:
    """The results of a program without the event `stop_at`."""
    program = trace_program(fun, settings, args, kwargs)  # traced again, because an equal program may have other lines
    if any(isinstance(x, Tracer) for x in program.values):
        raise TypeError(
            f"stop_at={settings.stop_at!r} needs arguments that are not traced: call the function outside of jax.jit, "
            "jax.vmap and derivatives"
        )
    beside = paired.PairedRun(paired.CarrierReference(), settings.max_turns or (1 << 32) - 1, settings.stop_at)
    outer = user_line()
    try:
        entry = round_on_entry(program, settings.spec, seeds)
        results = beside.whole(program, settings.spec, entry, paired.argument_names(args, kwargs))
    except paired.StopEventError as stop:
        raise FloatingPointError(
            paired.text_of_event(stop, program.plan, outer, paired.first_line_of(fun, outer))
        ) from None
    for note in dict.fromkeys(beside.notes):
        warnings.warn(note, RuntimeWarning, stacklevel=3)
    return [low for low, _ in results]


def round_on_entry(program: EmulatedProgram, spec: Spec | None, seeds: Seeds | None) -> ProgramEntry:
    """The rounded arguments and constants, and the seeds of the operations."""
    entry, inside = (None, None) if seeds is None else (seeds.turn(0), seeds.turn(1))
    count = len(program.values)
    values = list(map(as_jax_value, (*program.values, *program.plan.consts)))
    if spec is not None:
        every = enumerate(zip(values, program.rounds, strict=True))
        values = [round_with_draw(x, spec, entry, i) if rounds else x for i, (x, rounds) in every]
    return values[:count], values[count:], inside


def call_seeds(settings: Settings, key: Array | None) -> Seeds | None:
    """The seeds of a call; None if nothing draws."""
    if key is not None:
        check_key("key", key)
    if not settings.stochastic:
        return None
    if key is None:
        raise ValueError(
            "key=None, but the arithmetic rounds stochastically: pass a typed key, for example key=jax.random.key(0), "
            "to emulate or to the function that it returns"
        )
    return Seeds(seed_words(key))
