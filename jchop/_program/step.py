"""The parts of a plan: the step of one equation with its line of source, and the steps of a jaxpr."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.extend import source_info_util

from jchop._round.arguments import JCHOP_RESULT, JCHOP_SCOPE

# -- sources -----------------------------------------------------------------------------------------------------------


#: Folders and files of code that is not the user's; decorators of the standard library stand between others' frames.
_LIBRARY_PATHS = (
    f"{Path(jax.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__,
    functools.__file__,
)  # fmt: skip
#: Libraries of layers, wherever they are installed.
_LAYER_LIBRARIES = tuple(f"{os.sep}site-packages{os.sep}{name}{os.sep}" for name in ("equinox", "flax", "haiku"))


def source_line_of(info: Any, outer: str = "") -> str:
    """File and line of the innermost frame outside of JAX, jchop and libraries of layers, or `outer`."""
    frames = () if info.traceback is None else info.traceback.frames
    lines = (f"{f.file_name}:{f.line_num}" for f in frames if not is_library_file(f.file_name))
    return next(lines, outer)


def source_function_of(info: Any) -> str:
    """File and function of the innermost frame outside of JAX, jchop and libraries of layers; else empty."""
    frames = () if info.traceback is None else info.traceback.frames
    names = (f"{f.file_name}:{f.function_name}" for f in frames if not is_library_file(f.file_name))
    return next(names, "")


def text_of_line(source: str) -> str:
    """The text of a line of source, given as file and line; empty if it cannot be read."""
    file, _, line = source.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


@functools.lru_cache(maxsize=4096)
def is_library_file(file: str) -> bool:
    """Whether a file is part of JAX, jchop or a library of layers."""
    return file.startswith(_LIBRARY_PATHS) or any(part in file for part in _LAYER_LIBRARIES)


def user_line() -> str:
    """The user's line that calls this function."""
    return source_line_of(source_info_util.current())


#: Calls of another program, by the way in which the call is built again.
PLAIN_CALLS = ("jit", "pjit", "closed_call", "core_call", "call", "composite")
#: Primitives of a higher level, which newer versions of JAX have for some functions; they expand to other primitives.
HIGH_CALLS = ("call_hi_primitive",)
REMAT_CALLS = ("remat", "remat2", "checkpoint")
CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call")
#: Functions with a rule of their own for batches, which are opened.
BATCHED_CALLS = ("custom_vmap_call",)
CALLS = (*PLAIN_CALLS, *HIGH_CALLS, *REMAT_CALLS, *CUSTOM_CALLS, "shard_map")


@dataclass(frozen=True, kw_only=True)
class ProgramStep:
    """A step of a plan: one equation and its treatment.

    Args:
        eqn: the equation.
        kind: the rule for it; ``"control"`` if it holds programs.
        scope: the path of its `jax.named_scope` and `jax.jit` names.
        number: the number of its first random draw.
        known: the facts about its operands.
        out: the facts about its results.
        inner: the plans of the programs that it holds.
        later: plans the program of its rule for batches, which is traced in a run; None without a rule for batches.
    """

    eqn: Any
    kind: str
    scope: str
    number: int
    known: tuple[Any, ...] = ()
    out: tuple[Any, ...] = ()
    inner: tuple[ProgramPlan, ...] = ()
    later: Callable[[Any], ProgramPlan] | None = None

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.eqn.primitive.name

    @property
    def place(self) -> str:
        """The file and line that it comes from; its scope if JAX knows none; else "no source"."""
        return source_line_of(self.eqn.source_info) or self.scope or "no source"

    @property
    def operands(self) -> Sequence[Any]:
        """The variables of its operands."""
        return self.eqn.invars

    @property
    def results(self) -> Sequence[Any]:
        """The variables of its results."""
        return self.eqn.outvars

    @property
    def result_number(self) -> int:
        """The number of the rounding of its first result."""
        return self.number + len(self.eqn.invars)

    def alike(self, other: Any) -> bool:
        """Whether a step of an equal equation is treated in the same way; the steps of their programs aside."""
        return (self.kind, self.known, self.out) == (other.kind, other.known, other.out)


@dataclass(frozen=True)
class ProgramPlan:
    """The steps of a jaxpr."""

    jaxpr: Any
    consts: tuple[Any, ...]
    steps: tuple[Any, ...]  # of a class derived from Step
    out: tuple[Any, ...]

    def walk(self) -> Iterator[Any]:
        """Every step. The steps of inner plans follow the step that holds the plan."""
        return (step for step, _ in self.walk_within())

    def walk_within(self, around: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Every step, with the steps whose programs hold it, the outermost first."""
        for step in self.steps:
            yield step, around
            for plan in step.inner:
                yield from plan.walk_within((*around, step))


def jaxpr_of(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jaxpr and its constants; newer versions of JAX keep them in one object."""
    return getattr(value, "jaxpr", value), tuple(getattr(value, "consts", ()))


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of the programs that they hold."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in programs_of(eqn):
            yield from equations_of(inner)


def programs_of(eqn: Any) -> Iterator[Any]:
    """The jaxprs, without their constants, among the parameters of an equation."""
    for param in eqn.params.values():
        for value in param if isinstance(param, tuple | list) else (param,):
            jaxpr = getattr(value, "jaxpr", value)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def carry_count(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


_TRANSFORM_MARKS = re.compile(r"\w+\(|\)")


def scope_of(outer: str, name_stack: Any, name: str | None = None) -> str:
    """The path of scopes of an equation without the marks of transformations: ``vmap(jvp(f))/g`` becomes ``f/g``."""
    parts = [outer, _TRANSFORM_MARKS.sub("", str(name_stack)), name or ""]
    return "/".join(part for part in parts if part)


def is_reference(x: Any) -> bool:
    """Whether a value is a mutable reference (`jax.new_ref`), or a variable has the type of one."""
    return isinstance(x, jax.Ref) or hasattr(x, "inner_aval")


def is_jchop_result(eqn: Any, scope: str) -> bool:
    """Whether an equation marks the result of a public function of jchop that no other public function calls."""
    return eqn.primitive.name == JCHOP_RESULT and scope.split("/").count(JCHOP_SCOPE) == 1


def is_jchop_scope(scope: str) -> bool:
    """Whether an equation of this scope is part of a public function of jchop, which defines its own arithmetic."""
    return JCHOP_SCOPE in scope.split("/")
