"""Functions are traced and planned, once for arguments of the same shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jchop._arguments import is_tensor
from jchop._emulate._interpret import Eager
from jchop._emulate._known import at_limits, is_float, is_number
from jchop._emulate._plan import Planner
from jchop._emulate._rules import KINDS, Function, Settings
from jchop._paths import matches_path, nearest_paths
from jchop._program.captured import captured, same_objects
from jchop._program.control import as_jax
from jchop._program.owned import with_own_constants
from jchop._program.planner import taken_by_others
from jchop._program.same import same_program
from jchop._program.step import Plan, jaxpr_of
from jchop._program.widened import Widening, carrier_of
from jchop.accumulation import MatmulSpec
from jchop.storage import QArray

Array = jax.Array

__all__ = ["Program", "Programs", "in_jax", "is_moved", "is_stored", "trace"]

#: The most programs of a function that are kept.
_MOST_TRACES = 64


@dataclass(frozen=True)
class Program:
    """A function traced and planned for some arguments.

    Args:
        plan: its plan.
        values: the arguments that are its variables.
        rounds: for each value, then for each constant, whether it is rounded on entry.
        tree: the tree structure of the results.
        runner: runs it outside of a trace.
        source: the jaxpr that was planned.
    """

    plan: Plan
    values: tuple[Any, ...]
    rounds: tuple[bool, ...]
    tree: Any
    runner: Eager
    source: Any


def trace(fun: Callable[..., Any], settings: Settings, args: Any, kwargs: Any) -> Program:
    """The program of `fun` for these arguments."""
    return Programs(fun, settings).of(args, kwargs)


def _refuse_tensors(args: Any, kwargs: Any) -> None:
    for prefix, values in (("args", args), ("kwargs", kwargs)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(values):
            if is_tensor(leaf):
                name = prefix + jax.tree_util.keystr(path)
                raise TypeError(f"{name} is a torch.Tensor; pass the array jchop.torch.as_jax({name})")


def is_moved(value: Any) -> bool:
    """Whether an argument is a variable of the program."""
    return isinstance(value, Array | np.ndarray | np.generic | float | complex)


def in_jax(args: Any) -> Any:
    """Arguments for a call of the function itself, whose variables are arrays of JAX, as in the program."""
    return jax.tree.map(lambda x: as_jax(x) if is_moved(x) else x, args)


def is_stored(value: Any) -> bool:
    """Whether a value has codes and scales, which are not rounded."""
    return isinstance(value, QArray)


@dataclass(frozen=True)
class _Traced:
    """A function of arrays only, as a key of JAX's cache, and the objects that `fun` read during tracing.

    The function does not refer to this object: in a cycle it would stay in JAX's cache after its last use.

    Args:
        function: the function; it empties `read` when it is traced.
        read: the result of `reachable_objects` after that.
    """

    function: Callable[..., Any]
    read: list[tuple[Any, ...] | None]


@dataclass
class Programs:
    """The programs of a function under some settings.

    A function is not traced again if its closure, globals and arguments are the same objects as before. If it is traced
    again, because objects have changed or may change unseen, the plan is kept if only constants of the program differ.
    Neither cache holds the arguments of a call.
    """

    fun: Callable[..., Any]
    settings: Settings
    _functions: dict[Any, _Traced] = field(default_factory=dict)
    _programs: list[Program] = field(default_factory=list)
    _lock: Any = field(default_factory=Lock)

    def __reduce__(self) -> Any:
        """Copies and pickles contain no programs."""
        return Programs, (self.fun, self.settings)

    def of(self, args: Any, kwargs: Any) -> Program:
        """The program for these arguments.

        Arrays and Python floats are its variables; other arguments are passed unchanged.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_variable = tuple(map(is_moved, leaves))
        values = tuple(leaf for leaf, m in zip(leaves, is_variable, strict=True) if m)
        others = tuple(None if m else leaf for leaf, m in zip(leaves, is_variable, strict=True))
        if any(map(is_tensor, others)):
            _refuse_tensors(args, kwargs)
        key, entry = self._function_of_variables(tree, is_variable, others)
        with jax.disable_jit(False):  # loops, branches and the names of calls are parts of the program
            source, shapes = jax.make_jaxpr(entry.function, return_shape=True)(*values)
        read = list(entry.read)  # other threads may trace it, too
        if not read:  # after the trace: objects that it changes itself are not a change
            entry.read[:] = read = [captured(self.fun, others)]
            self._keep(key, entry, read[0])
        jaxpr, consts = jaxpr_of(source)
        if read[0] is None:  # it may have arrays of NumPy, which may change
            jaxpr = jaxpr_of(with_own_constants(source, (None,) * len(consts)))[0]
        units = jax.tree.leaves((args, kwargs), is_leaf=is_stored)
        are_codes = [is_stored(unit) for unit in units for _ in jax.tree.leaves(unit)]
        rounds = tuple(not s for s, m in zip(are_codes, is_variable, strict=True) if m)
        in_trace = any(isinstance(x, Tracer) for x in (*values, *consts))
        program = self._program(jaxpr, consts, rounds, jax.tree.structure(shapes), in_trace)
        return replace(program, values=values, plan=replace(program.plan, consts=self._entering(program)))

    def _entering(self, program: Program) -> tuple[Any, ...]:
        """The constants; those that are rounded on entry with the format's limits in place of the carrier's."""
        consts = program.plan.consts
        rounds = program.rounds[len(program.rounds) - len(consts) :]
        floats = [r and is_float(x) and not isinstance(x, Tracer) for r, x in zip(rounds, consts, strict=True)]
        return tuple(_at_limits(x, self.settings.spec) if k else x for k, x in zip(floats, consts, strict=True))

    def _function_of_variables(
        self, tree: Any, is_variable: tuple[bool, ...], others: tuple[Any, ...]
    ) -> tuple[Any, _Traced]:
        """A key and the function of the variables; the earlier one if it read nothing that has changed."""
        key = (tree, is_variable, tuple(x if isinstance(x, int | str | bool) else None for x in others))
        try:
            old = self._functions.get(key)
        except Exception:  # a tree may hold objects that cannot be hashed or compared
            key = old = None
        before = None if old is None else next(iter(old.read), None)
        if old is not None and before is not None and same_objects(before, captured(self.fun, others)):
            return key, old
        fun, read = self.fun, []

        def flat(*values: Any) -> Any:
            read.clear()
            variables = iter(values)
            every = [next(variables) if m else x for m, x in zip(is_variable, others, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, every)
            return fun(*args, **kwargs)

        flat.__wrapped__ = fun  # type: ignore[attr-defined] # JAX's errors name it
        return key, _Traced(flat, read)

    def _keep(self, key: Any, entry: _Traced, read: tuple[Any, ...] | None) -> None:
        """Keeps a function that may be used again: one that has read nothing that may change unseen."""
        if key is None:
            return
        with self._lock:
            self._functions.pop(key, None)
            if read is not None:
                self._functions[key] = entry
            while len(self._functions) > _MOST_TRACES:
                del self._functions[next(iter(self._functions))]

    def _program(
        self, jaxpr: Any, consts: tuple[Any, ...], free: tuple[bool, ...], tree: Any, in_trace: bool
    ) -> Program:
        widening = self._widening(jaxpr.invars, free)
        rounds, has_plan = self._rounds(jaxpr.invars, free, widening), False
        for old in tuple(self._programs):
            same = old.rounds[: len(free)] == rounds and same_program(old.source, jaxpr, rules=False)
            if same and _is_equal(old.tree, tree):
                if not in_trace or same_program(old.source, jaxpr):
                    return replace(old, plan=replace(old.plan, consts=consts))
                has_plan = True  # with other derivative rules; the old plan has compiled programs
        new = self._make(jaxpr, free, tree, widening)
        if not has_plan and not any(isinstance(x, Tracer) for x in consts):
            with self._lock:
                self._programs.insert(0, replace(new, plan=replace(new.plan, consts=())))
                del self._programs[_MOST_TRACES:]
        return replace(new, plan=replace(new.plan, consts=consts))

    def _widening(self, variables: Any, free: tuple[bool, ...]) -> Widening | None:
        if self.settings.narrow != "carrier":
            return None
        carrier = carrier_of([v for v, f in zip(variables, free, strict=True) if f])

        def constant(value: Any, name: str, scope: str) -> Any:
            spec = self.settings.choose(name, scope).spec
            return value if spec is None else at_limits(value, spec)

        return Widening(carrier, KINDS, constant)

    def _rounds(self, variables: Any, free: Any, widening: Widening | None) -> tuple[bool, ...]:
        """Which variables are rounded on entry; narrower ones are rounded where they are converted."""
        numbers = (is_number(v.aval) and not (widening and widening.is_narrower(v.aval)) for v in variables)
        return tuple(self.settings.spec is not None and f and n for f, n in zip(free, numbers, strict=True))

    def _make(self, jaxpr: Any, free: tuple[bool, ...], tree: Any, widening: Widening | None) -> Program:
        planner = Planner(self.settings, widening)
        others = taken_by_others(jaxpr)
        entering = (*free, *(v in others for v in jaxpr.constvars))
        rounds = self._rounds((*jaxpr.invars, *jaxpr.constvars), entering, widening)
        facts = tuple(self.settings.spec if r else None for r in rounds)
        wide = jaxpr if widening is None else widening.program(jaxpr)
        plan = planner.plan(wide, facts[: len(free)], constants=facts[len(free) :])
        _check_rules(self.settings, planner.used, plan)
        return Program(plan, (), rounds, tree, Eager(self.settings.max_turns), jaxpr)


def _at_limits(x: Any, spec: Any) -> Any:
    if isinstance(x, Array) and not x.is_fully_addressable:
        return x
    new = at_limits(x, spec)
    return jax.device_put(new, x.sharding) if isinstance(x, Array) and new is not x else new


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # an array's error, or any error of a class of another package
        return False


def _check_rules(settings: Settings, used: set[str], plan: Plan) -> None:
    steps = [step for step in plan.walk() if step.kind != "own"]
    idle = [f"{rule[0]!r} {_why_unused(*rule, steps)}" for rule in settings.rules if rule[0] not in used]
    if idle:
        raise ValueError(f"rules: {'; '.join(idle)}. emulate.report shows all paths")


def _why_unused(pattern: str, value: Any, steps: list[Any]) -> str:
    """Why a rule has no effect on these steps."""
    whole, paths = not isinstance(value, Function), [f"{step.scope}/{step.name}" for step in steps]
    names = [
        step.name
        for step, path in zip(steps, paths, strict=True)
        if matches_path(pattern, path if whole else step.name)
    ]
    if not names:
        near = nearest_paths([pattern], [path.strip("/") for path in paths])
        return f"matches no primitive{' and no scope' if whole else ''} of the program{near}"
    if isinstance(value, MatmulSpec) and all(KINDS.get(name) != "accumulating" for name in names):
        return "gives a MatmulSpec to no sum"
    return "comes after a rule that matches all the same"
