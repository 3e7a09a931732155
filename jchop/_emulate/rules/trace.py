"""Functions are traced and planned, once for arguments of the same shapes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.core import Tracer

from jchop._common.paths import nearest_paths_hint
from jchop._emulate.rules import rules
from jchop._emulate.rules.interpret import EagerRunner
from jchop._emulate.rules.plan import EmulationPlanner
from jchop._program.closures import reachable_objects, same_objects
from jchop._program.control import as_jax_value
from jchop._program.jaxprs import Widening, same_program, widest_carrier, with_own_constants
from jchop._program.run import variables_outside_jchop
from jchop._program.seeds import Seeds
from jchop._program.step import ProgramPlan, equations_of, jaxpr_of, source_line_of
from jchop._round.arguments import is_torch_tensor
from jchop._spec.accumulation import MatmulSpec
from jchop._storage import QArray

#: The most programs of a function that are kept.
_MOST_TRACES = 64
#: The arguments and the constants of a program, as they are rounded on entry, and its seeds.
ProgramEntry = tuple[list[Any], list[Any], Seeds | None]


@dataclass(frozen=True)
class EmulatedProgram:
    """A function traced and planned for some arguments.

    Args:
        plan: its plan.
        values: the arguments that are its variables.
        rounds: for each value, then for each constant, whether it is rounded on entry.
        tree: the tree structure of the results.
        runner: runs it outside of a trace.
        source: the jaxpr that was planned.
        widening: of its narrower dtypes; None for none.
    """

    plan: ProgramPlan
    values: tuple[Any, ...]
    rounds: tuple[bool, ...]
    tree: Any
    runner: EagerRunner
    source: Any
    widening: Widening | None = None


def trace_program(fun: Callable[..., Any], settings: rules.Settings, args: Any, kwargs: Any) -> EmulatedProgram:
    """The program of `fun` for these arguments."""
    return ProgramCache(fun, settings).of(args, kwargs)


def _refuse_torch_tensors(args: Any, kwargs: Any) -> None:
    for prefix, values in (("args", args), ("kwargs", kwargs)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(values):
            if is_torch_tensor(leaf):
                name = prefix + jax.tree_util.keystr(path)
                raise TypeError(f"{name} is a torch.Tensor; pass the array jchop.torch.as_jax({name})")


def is_program_variable(value: Any) -> bool:
    """Whether an argument is a variable of the program."""
    return isinstance(value, Array | np.ndarray | np.generic | float | complex)


def as_program_arguments(args: Any) -> Any:
    """Arguments for a call of the function itself, whose variables are arrays of JAX, as in the program."""
    return jax.tree.map(lambda x: as_jax_value(x) if is_program_variable(x) else x, args)


def has_codes(value: Any) -> bool:
    """Whether a value has codes and scales, which are not rounded."""
    return isinstance(value, QArray)


@dataclass(frozen=True)
class _FlatFunction:
    """A function of arrays only, as a key of JAX's cache, and the objects that `fun` read during tracing.

    The function does not refer to this object: in a cycle it would stay in JAX's cache after its last use.

    Args:
        function: the function; it empties `read` when it is traced.
        read: the result of `reachable_objects` after that.
    """

    function: Callable[..., Any]
    read: list[tuple[Any, ...] | None]


@dataclass
class ProgramCache:
    """The programs of a function under some settings.

    A function is not traced again if its closure, globals and arguments are the same objects as before. If it is traced
    again, because objects have changed or may change unseen, the plan is kept if only constants of the program differ.
    Neither cache holds the arguments of a call.
    """

    fun: Callable[..., Any]
    settings: rules.Settings
    _functions: dict[Any, _FlatFunction] = field(default_factory=dict)
    _programs: list[EmulatedProgram] = field(default_factory=list)
    _lock: Any = field(default_factory=Lock)

    def __reduce__(self) -> Any:
        """Copies and pickles contain no programs."""
        return ProgramCache, (self.fun, self.settings)

    def of(self, args: Any, kwargs: Any) -> EmulatedProgram:
        """The program for these arguments.

        Arrays and Python floats are its variables; other arguments are passed unchanged.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_variable = tuple(map(is_program_variable, leaves))
        values = tuple(leaf for leaf, is_array in zip(leaves, is_variable, strict=True) if is_array)
        static_leaves = tuple(None if is_array else leaf for leaf, is_array in zip(leaves, is_variable, strict=True))
        if any(map(is_torch_tensor, static_leaves)):
            _refuse_torch_tensors(args, kwargs)
        key, flat_function = self._function_of_variables(tree, is_variable, static_leaves)
        with jax.disable_jit(False):  # loops, branches and the names of calls are parts of the program
            source, shapes = jax.make_jaxpr(flat_function.function, return_shape=True)(*values)
        objects_read = list(flat_function.read)  # other threads may trace it, too
        if not objects_read:  # after the trace: objects that it changes itself are not a change
            flat_function.read[:] = objects_read = [reachable_objects(self.fun, static_leaves)]
            self._keep(key, flat_function, objects_read[0])
        jaxpr, consts = jaxpr_of(source)
        if objects_read[0] is None:  # it may have arrays of NumPy, which may change
            jaxpr = jaxpr_of(with_own_constants(source, (None,) * len(consts)))[0]
        leaves_and_qarrays = jax.tree.leaves((args, kwargs), is_leaf=has_codes)
        are_codes = [has_codes(unit) for unit in leaves_and_qarrays for _ in jax.tree.leaves(unit)]
        rounds = tuple(not is_code for is_code, is_array in zip(are_codes, is_variable, strict=True) if is_array)
        in_trace = any(isinstance(x, Tracer) for x in (*values, *consts))
        program = self._program(jaxpr, consts, rounds, jax.tree.structure(shapes), in_trace)
        return replace(program, values=values, plan=replace(program.plan, consts=self._constants_on_entry(program)))

    def _constants_on_entry(self, program: EmulatedProgram) -> tuple[Any, ...]:
        """The constants; those that are rounded on entry with the format's limits in place of the carrier's."""
        consts, spec = list(program.plan.consts), self.settings.spec
        for i, rounds in enumerate(program.rounds[len(program.rounds) - len(consts) :]):
            x, on_host = consts[i], not isinstance(consts[i], Array)
            if not rounds or spec is None or not rules.is_carrier_float(x) or isinstance(x, Tracer):
                continue
            if on_host or x.is_fully_addressable:
                new = rules.at_format_limits(x, spec)
                consts[i] = x if new is x else new if on_host else jax.device_put(new, x.sharding)
        return tuple(consts)

    def _function_of_variables(
        self, tree: Any, is_variable: tuple[bool, ...], others: tuple[Any, ...]
    ) -> tuple[Any, _FlatFunction]:
        """A key and the function of the variables; the earlier one if it read nothing that has changed."""
        key = (tree, is_variable, tuple(x if isinstance(x, int | str | bool) else None for x in others))
        try:
            old = self._functions.get(key)
        except Exception:  # a tree may hold objects that cannot be hashed or compared
            key = old = None
        before = None if old is None else next(iter(old.read), None)
        if old is not None and before is not None and same_objects(before, reachable_objects(self.fun, others)):
            return key, old
        fun, read = self.fun, []

        def flat(*values: Any) -> Any:
            read.clear()
            variables = iter(values)
            every = [next(variables) if is_array else x for is_array, x in zip(is_variable, others, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, every)
            return fun(*args, **kwargs)

        flat.__wrapped__ = fun  # type: ignore[attr-defined] # JAX's errors name it
        return key, _FlatFunction(flat, read)

    def _keep(self, key: Any, entry: _FlatFunction, read: tuple[Any, ...] | None) -> None:
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
    ) -> EmulatedProgram:
        """The emulated program of a jaxpr: an earlier one of an equal jaxpr, else a new one that is kept."""
        widening = self._widening(jaxpr.invars, free)
        rounds, has_plan = self._rounds(jaxpr.invars, free, widening), False
        for old in tuple(self._programs):
            same = old.rounds[: len(free)] == rounds and same_program(old.source, jaxpr, rules=False)
            same = same and (not self.settings.has_lines or _lines_of(old.source) == _lines_of(jaxpr))
            if same and _trees_are_equal(old.tree, tree):
                if not in_trace or same_program(old.source, jaxpr):
                    return replace(old, plan=replace(old.plan, consts=consts))
                has_plan = True  # with other derivative rules; the old plan has compiled programs
        new = self._make(jaxpr, rounds, tree, widening)
        if not has_plan and not any(isinstance(x, Tracer) for x in consts):
            with self._lock:
                self._programs.insert(0, replace(new, plan=replace(new.plan, consts=())))
                del self._programs[_MOST_TRACES:]
        return replace(new, plan=replace(new.plan, consts=consts))

    def _widening(self, variables: Any, free: tuple[bool, ...]) -> Widening | None:
        """How equations of narrow dtypes run in the widest dtype of the free arguments, if `narrow="carrier"`."""
        if self.settings.narrow != "carrier":
            return None
        carrier = widest_carrier([v for v, f in zip(variables, free, strict=True) if f])

        def constant(value: Any, name: str, scope: str) -> Any:
            spec = self.settings.choose(name, scope).spec
            return value if spec is None else rules.at_format_limits(value, spec)

        return Widening(carrier, rules.PRIMITIVE_KINDS, constant)

    def _rounds(self, variables: Any, free: Any, widening: Widening | None) -> tuple[bool, ...]:
        """Which variables are rounded on entry; narrower ones are rounded where they are converted."""
        numbers = (rules.is_number(v.aval) and not (widening and widening.is_narrower(v.aval)) for v in variables)
        return tuple(self.settings.spec is not None and f and n for f, n in zip(free, numbers, strict=True))

    def _make(self, jaxpr: Any, rounds: tuple[bool, ...], tree: Any, widening: Widening | None) -> EmulatedProgram:
        """The new emulated program of a jaxpr, whose arguments `rounds` are rounded on entry."""
        planner, count = EmulationPlanner(self.settings, widening), len(rounds)
        others = variables_outside_jchop(jaxpr)
        rounds += self._rounds(jaxpr.constvars, [v in others for v in jaxpr.constvars], widening)
        facts = tuple(self.settings.spec if r else None for r in rounds)
        wide = jaxpr if widening is None else widening.program(jaxpr)
        plan = planner.plan(wide, facts[:count], constants=facts[count:])
        idle = [rule for rule in self.settings.rules if rule[0] not in planner.used]
        if idle:
            steps = [step for step in plan.walk() if step.kind != "own"]
            reasons = "; ".join(f"{rule[0]!r} {_why_no_effect(*rule, steps)}" for rule in idle)
            raise ValueError(f"rules: {reasons}; the report method of the emulated function shows all paths")
        return EmulatedProgram(plan, (), rounds, tree, EagerRunner(self.settings.max_turns), jaxpr, widening)


def _lines_of(jaxpr: Any) -> list[str]:
    return [source_line_of(eqn.source_info) for eqn in equations_of(jaxpr)]


def _trees_are_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # an array's error, or any error of a class of another package
        return False


def _why_no_effect(pattern: str, value: Any, steps: list[Any]) -> str:
    """Why a rule has no effect on these steps."""
    whole, paths = not isinstance(value, rules.PrimitiveFunction), [f"{step.scope}/{step.name}" for step in steps]
    pairs = zip(steps, paths, strict=True)
    names = [step.name for step, path in pairs if rules.matches_rule(pattern, path if whole else step.name, step.place)]
    if not names and rules.names_line(pattern):
        near = nearest_paths_hint([pattern], [os.path.basename(step.place) for step in steps])
        return f"matches no line of the program{near}"
    if not names:
        near = nearest_paths_hint([pattern], [path.strip("/") for path in paths])
        return f"matches no primitive{' and no scope' if whole else ''} of the program{near}"
    if isinstance(value, MatmulSpec) and all(rules.PRIMITIVE_KINDS.get(name) != "accumulating" for name in names):
        return "gives a MatmulSpec to no sum"
    return "comes after a rule that matches all the same"
