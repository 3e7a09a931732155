"""`emulate`: the door, with its checks, and what becomes of arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import update_wrapper
from types import MethodType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jchop._arguments import OWN_SCOPE, check_key, own_results
from jchop._core.rounding.random_bits import seed_words
from jchop._emulate._carried import rounded
from jchop._emulate._interpret import Emulation
from jchop._emulate._rules import Settings, make_settings
from jchop._emulate._trace import Program, Programs, is_stored
from jchop._program.control import as_jax
from jchop._program.run import interpret
from jchop._program.seeds import Seeds
from jchop.accumulation import MatmulSpec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.spec import Spec

Array = jax.Array

__all__ = ["Emulated", "emulate"]


def emulate(
    fun: Any = ...,
    spec: Any = ...,
    *,
    rules: Mapping[str, Any] | None = None,
    accumulate: MatmulSpec | None = None,
    key: Array | None = None,
    unknown: Literal["raise", "round_output", "carrier"] = "raise",
    max_turns: int | None = None,
) -> Any:
    """`fun` in another arithmetic: every floating-point operation of it rounded, with the signature of `fun`.

    The program that JAX traces of `fun` is run operation by operation. Arguments and constants are rounded on entry.
    For +, −, ×, ÷ and √ the *exact* result of the rounded operands is rounded once, in every mode; an integer power is
    made of such products. Elementary functions (exp, tanh, pow ...), conversions, scatters and sums across devices are
    the carrier's result rounded once more. So are calls of `jax.random`, whose results are never an excluded end. Sums
    along axes, products of matrices, convolutions, and cumulative sums and products follow `accumulate`. What only
    moves or chooses values (slices, transposes, sorting, max ...) rounds nothing; integers and booleans are untouched.
    A function of jchop is one operation. Calls, loops, branches, remat, shard_map and custom derivative rules are
    entered.

    ``jax.grad(emulate(fun, spec))`` differentiates in the carrier, at the rounded values, rounding taken for the
    identity (straight-through); ``emulate(jax.grad(fun), spec)`` computes the derivative in the arithmetic of `spec`.
    Put `jax.jit` around the result, as around any function: called as it is, it runs one operation after the other. It
    is then traced once for arguments of the same shapes, dtypes and other values, and again if an object has changed
    that `fun` reads: in its closure, its defaults or globals. Objects of classes may change unseen, so a function that
    reads those is traced in every call, which takes little beside the first one.

    Without a function the result is a decorator: ``@jc.emulate("bfloat16")``, of methods too.

    Args:
        fun: a function that JAX can trace. Arrays and Python floats among its arguments are rounded; other arguments
            reach it as they are. Left out for a decorator.
        spec: what every operation is rounded to: a `Spec`, a format, or text; None for the carrier, the dtype that the
            program computes in, which must be wide enough for the format.
        rules: other arithmetic for parts of the program, as a mapping. A key is the name of a primitive (``"exp"``), or
            a pattern (`fnmatch`) for a piece of the path of `jax.named_scope` and `jax.jit` names (``"softmax"``,
            ``"block*/norm"``). A value is a spec, None for the carrier, a `MatmulSpec` in place of `accumulate`, or a
            Python function in place of a primitive: it takes the primitive's operands, rounded, and its parameters as
            keywords; its results are rounded once. The first key that matches counts.
        accumulate: how sums are formed, a `MatmulSpec` with rounding of its own: its result is then rounded to `spec`.
            Cumulative sums, and products along axes, are sequential whatever its order. Default None: **the carrier's
            own sum**, rounded once at the end.
        key: a typed key, where anything rounds stochastically; the keyword argument ``key`` of the result takes its
            place. Each operation and each turn of a loop draws afresh; the same key draws the same again.
        unknown: what becomes of a primitive that there is no rule for: ``"raise"`` an error (default),
            ``"round_output"``, or ``"carrier"``.
        max_turns: the most turns of a `while` loop (`jax.lax.while_loop`, and `jax.lax.fori_loop` with bounds that are
            not constants). A loop whose condition still holds then ends with the values that it has, and a
            `RuntimeWarning` names the line of the condition and the numbers compared; under `jax.jit` when the program
            runs (``jax.effects_barrier()`` waits for it). In a low format ``while t < 10: t += 0.01`` may never end.
            Default None: any number of turns.

    Returns:
        The function, with one more keyword argument, ``key``, which therefore never reaches `fun`. Results have the
        dtypes that those of `fun` have. Without `fun`, a function of `fun` that returns it.

    Raises:
        TypeError: for a function that is none, arguments in another order, no spec, or rules, an accumulation or a key
            of another type.
        ValueError: for ``max_turns`` below 1; when called, for a carrier too narrow for `spec`, a stochastic spec
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
    function, spec = _arranged(fun, spec)
    if key is not None:
        check_key("key", key)
    settings = make_settings(spec, rules, accumulate, unknown, max_turns)
    if function is None:
        return lambda fun: Emulated(_checked(fun), settings, key)
    return Emulated(function, settings, key)


def _arranged(fun: Any, spec: Any) -> tuple[Callable[..., Any] | None, Any]:
    """The function, or None for a decorator, and the spec."""
    if _is_spec(fun) and spec is ...:
        return None, fun
    if spec is ... and fun is not ...:
        _checked(fun)
        raise TypeError(f"emulate: no spec; write emulate({_name(fun)}, 'bfloat16') or @emulate('bfloat16')")
    if fun is ...:
        if spec is ...:
            raise TypeError("emulate: no function and no spec; write emulate(fun, 'bfloat16') or @emulate('bfloat16')")
        if not _is_spec(spec):
            raise TypeError(f"spec={spec!r} must be a Spec, a format, its text, or None")
        return None, spec
    if _is_spec(fun):
        more = f"; the function comes first: emulate({_name(spec)}, {fun!r})" if callable(spec) else ""
        raise TypeError(f"fun={fun!r} must be a function{more}")
    return _checked(fun), spec


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, str | Spec | ElementFormat | ScaledFormat)


def _checked(fun: Any) -> Callable[..., Any]:
    if isinstance(fun, staticmethod | classmethod):
        name = type(fun).__name__
        raise TypeError(f"fun={fun!r} must be a function: put @{name} above emulate, not below it")
    if not callable(fun) or _is_spec(fun):
        raise TypeError(f"fun={fun!r} must be a function")
    return fun


def _name(fun: Any) -> str:
    return getattr(fun, "__name__", "fun")


class Emulated:
    """A function whose every operation is rounded; `emulate` makes it."""

    def __init__(self, fun: Callable[..., Any], settings: Settings, key: Array | None) -> None:
        self.fun, self.settings, self.key = fun, settings, key
        self.programs = Programs(fun, settings)
        update_wrapper(self, fun, updated=())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As functions are, the method of an instance."""
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, key: Array | None = None, **kwargs: Any) -> Any:
        """`fun` of the arguments; `key` takes the place of the key that `emulate` was given."""
        seeds = seeds_of(self.settings, self.key if key is None else key)
        program = self.programs.of(args, kwargs)
        # A program may hold a NaN that it never takes, as that of jnp.var does: jax_debug_nans looks at the results.
        with jax.disable_jit(False), jax.debug_nans(False), jax.named_scope(OWN_SCOPE):
            results = [as_jax(x) for x in run(program, self.settings.spec, seeds)]
            out = jax.tree.unflatten(program.tree, results)
            out = jax.tree.map(lambda x: x if is_stored(x) else own_results(x), out, is_leaf=is_stored)
        return jax.tree.map(jnp.copy, out) if jax.config.jax_debug_nans else out  # type: ignore[attr-defined]


def run(program: Program, spec: Spec | None, seeds: Seeds | None) -> list[Any]:
    """The results of a program: arguments and constants rounded on entry, then every operation."""
    values, constants, inside = enter(program, spec, seeds)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((values, constants, inside)))
    runner = Emulation(program.runner.max_turns) if traced else program.runner
    results = interpret(runner, program.plan, inside, values, constants)
    if runner.max_turns is not None and not traced:
        jax.effects_barrier()  # so that warnings come before the results
    return results


def enter(program: Program, spec: Spec | None, seeds: Seeds | None) -> tuple[list[Any], list[Any], Seeds | None]:
    """Arguments and constants, rounded, and the seeds of what follows."""
    entry, inside = (None, None) if seeds is None else (seeds.turn(0), seeds.turn(1))
    count = len(program.values)
    every = zip((*program.values, *program.plan.consts), program.rounds, strict=True)
    entered = [_entered(x, i, spec if rounds else None, entry) for i, (x, rounds) in enumerate(every)]
    return entered[:count], entered[count:], inside


def _entered(x: Any, number: int, spec: Spec | None, seeds: Seeds | None) -> Any:
    x = as_jax(x)
    if spec is None:
        return x
    return rounded(x, spec, seeds, number)


def seeds_of(settings: Settings, key: Array | None) -> Seeds | None:
    """The seeds of a call; None where nothing draws."""
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
