"""The objects that a function reads beside its arguments: closures, defaults, globals, and their parts.

A traced program may be used again only while these objects are the same. JAX's own caches do not compare them:
`jax.jit` keeps the values of the first call.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import functools
import importlib.util
import itertools
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

#: Types whose objects never change; objects of subclasses may have attributes.
_SCALARS = (bool, int, float, complex, str, bytes)
#: Types whose objects never change, nor objects of subclasses.
_IMMUTABLE_TYPES = (
    *(type(None), type(Ellipsis), np.generic, np.dtype, np.ufunc),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.CodeType),
)
#: Equal objects of these types are the same.
_BY_VALUE = (int, str, bytes)
#: The most objects of a walk; a larger walk stops.
_MOST_OBJECTS = 2000
#: The modules of the standard library whose results depend on their arguments alone. Logging has no results.
_PURE_MODULES = (
    *("abc", "bisect", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum", "fractions"),
    *("functools", "heapq", "itertools", "logging", "math", "numbers", "operator", "re", "statistics", "string"),
    *("struct", "textwrap", "types", "typing", "warnings"),
)
#: Builtin functions that read variables, modules or files by their names.
_READERS = frozenset((globals, locals, vars, eval, exec, open, input, __import__))
_MISSING = object()
#: Instructions that load globals.
_GLOBAL_OPCODES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
#: Folders of files whose functions read no changing globals, except for modules with state.
_LIBRARY_FOLDERS = (
    *{f"{path}{os.sep}" for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")},
    *(f"{Path(file).parent}{os.sep}" for file in (jax.__file__, np.__file__)),
    f"{Path(__file__).parents[1]}{os.sep}",
)


class _MayChangeError(Exception):
    """An object may change unseen."""


def reachable_objects(*roots: Any) -> tuple[Any, ...] | None:
    """Every object that functions reach, in a fixed order; None if one may change unseen.

    Objects of classes may, and results of modules with state: the environment, the clock, random numbers.

    Args:
        roots: functions and other objects that a call depends on.

    Example:
        >>> scale = [2.0]
        >>> double = lambda x: scale[0] * x
        >>> before = reachable_objects(double)
        >>> same_objects(before, reachable_objects(double))
        True
        >>> scale[0] = 3.0
        >>> same_objects(before, reachable_objects(double))
        False
        >>> reachable_objects(np.ones(3)) is None
        True
    """
    try:
        return tuple(_walk_objects(roots, {}))
    except _MayChangeError:
        return None


def same_objects(before: tuple[Any, ...] | None, after: tuple[Any, ...] | None) -> bool:
    """Whether two walks met the same objects."""
    if before is None or after is None or len(before) != len(after):
        return False
    pairs = zip(before, after, strict=True)
    return all(a is b or (type(a) is type(b) and type(a) in _BY_VALUE and a == b) for a, b in pairs)


def _walk_objects(values: Iterable[Any], objects: dict[int, Any]) -> Iterator[Any]:
    """Every object among the values and their parts; those in `objects`, which keeps them, are not entered again."""
    for value in values:
        if type(value) in _SCALARS or isinstance(value, _IMMUTABLE_TYPES) or id(value) in objects:
            yield value
            continue
        objects[id(value)] = value  # so that no id is used again
        if len(objects) > _MOST_OBJECTS or isinstance(value, Tracer):
            raise _MayChangeError
        parts = _parts_of_object(value)
        yield from (type(value), len(parts)) if parts else (value,)
        yield from _walk_objects(parts, objects)


def _parts_of_object(value: Any) -> Sequence[Any]:
    """The parts of an object; none if it never changes."""
    if type(value) in (tuple, list):
        return value
    if type(value) is dict:
        return (*value, *value.values())
    if isinstance(value, enum.Enum):
        return tuple(part for name, part in vars(value).items() if name != "__objclass__")
    if isinstance(value, types.FunctionType):
        return tuple(_parts_of_function(value))
    if isinstance(value, types.MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        return _parts_of_builtin(value)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_dataclass and type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return (type(value), *(getattr(value, field.name) for field in dataclasses.fields(value)))
    if type(value).__module__.partition(".")[0] == "jax" and hasattr(value, "__wrapped__") and vars(value):
        return tuple(vars(value).values())  # functions with derivative rules
    # Functions that JAX compiles; it does not compare the objects that such a function reads, either.
    of_jax = type(value).__module__.partition(".")[0] in ("jax", "jaxlib")
    if of_jax and all(hasattr(value, name) for name in ("__wrapped__", "lower", "trace")):
        return tuple(part for name, part in vars(value).items() if not name.startswith("_"))
    if _is_immutable(value):
        return ()
    raise _MayChangeError


def _is_immutable(value: Any) -> bool:
    """Whether an object without parts never changes, or as good as never."""
    if isinstance(value, jax.Array):
        return not hasattr(jax.typeof(value), "inner_aval")  # no mutable reference
    if isinstance(value, types.ModuleType):
        return not _is_user_module(value) and not _has_state(value.__name__)
    if isinstance(value, type):
        return not _is_user_module(sys.modules.get(value.__module__)) and not _has_state(value.__module__)
    return False


def _parts_of_builtin(function: Any) -> Sequence[Any]:
    """The object that a builtin method is bound to; the method itself is made anew at each access."""
    owner = function.__self__
    if owner is not None and not isinstance(owner, types.ModuleType):
        return (function.__name__, owner)
    if function in _READERS or _has_state(function.__module__ or ""):
        raise _MayChangeError
    return ()


def _parts_of_function(function: types.FunctionType) -> Iterator[Any]:
    code, of_user = function.__code__, _is_user_file(function.__code__.co_filename)
    if not of_user and _has_state(function.__globals__.get("__name__", "")):
        raise _MayChangeError
    yield from (code, function.__defaults__, function.__kwdefaults__)
    yield from (cell.cell_contents for cell in function.__closure__ or () if _has_contents(cell))
    if function.__dict__:
        yield from (x for pair in function.__dict__.items() if of_user or pair[0] != "__wrapped__" for x in pair)
    if of_user:
        yield from (_value_of_read(read, function.__globals__) for read in _global_reads(code))


def _has_contents(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class _GlobalRead(NamedTuple):
    """A global or a module that code loads, and the attributes that it takes of it: `np.random.rand`.

    Args:
        name: of the global, or of the module.
        attributes: the names, in their order.
        level: of an import within a function: the number of dots before the name. A global has -1.
    """

    name: str
    attributes: tuple[str, ...] = ()
    level: int = -1


def _value_of_read(read: _GlobalRead, names: dict[str, Any]) -> Any:
    """The result of a read: the first object that is no module, or the last module."""
    if read.level >= 0:
        value = _module_of_read(read, names)
    else:
        value = names[read.name] if read.name in names else getattr(builtins, read.name, None)
    for name in read.attributes:
        if not isinstance(value, types.ModuleType):
            break
        part = vars(value).get(name, _MISSING)
        if _is_user_module(value):
            if part is _MISSING:  # a module may compute its attributes
                raise _MayChangeError
        elif not isinstance(part, types.ModuleType | types.BuiltinFunctionType):
            break  # libraries do not change, except for their modules with state
        value = part
    return value


def _module_of_read(read: _GlobalRead, names: dict[str, Any]) -> types.ModuleType:
    """The module of an import within a function; nothing is imported here."""
    name = read.name
    if read.level:
        package = names.get("__package__") or getattr(names.get("__spec__"), "parent", None)
        try:
            name = importlib.util.resolve_name("." * read.level + name, package)
        except ImportError:
            raise _MayChangeError from None
    module = sys.modules.get(name)
    if not isinstance(module, types.ModuleType):
        raise _MayChangeError
    return module


@functools.lru_cache(maxsize=4096)
def _global_reads(code: types.CodeType) -> tuple[_GlobalRead, ...]:
    """The globals and the modules that a function and the functions within it load."""
    return tuple(dict.fromkeys(_reads_within(code, {})))


def _reads_within(code: types.CodeType, outer: dict[str, list[_GlobalRead]]) -> Iterator[_GlobalRead]:
    """The reads of code within functions that have bound modules to variables by imports."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    variables = {name: list(reads) for name, reads in outer.items() if name in code.co_freevars}
    yield from _import_reads(steps, variables)
    if "__globals__" in code.co_names:
        yield _GlobalRead("globals")
    cells = {*code.co_cellvars, *code.co_freevars}
    for at, step in enumerate(steps):
        names = _loads_of(step)
        for offset, name in enumerate(names, 1 - len(names)):
            if name in cells and "LOAD_FAST" in step.opname:
                continue  # the cell, for a function within
            # The attributes that the next instructions take of the object.
            loads = itertools.takewhile(lambda step: step.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[at + 1 :])
            attributes = () if offset else tuple(load.argval for load in loads)
            for read in (*([_GlobalRead(name)] if step.opname in _GLOBAL_OPCODES else ()), *variables.get(name, ())):
                yield read._replace(attributes=(*read.attributes, *attributes))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _reads_within(constant, variables)


def _loads_of(step: dis.Instruction) -> tuple[str, ...]:
    """The variables that an instruction loads; some instructions load two, or store one and load one."""
    if step.opname in _GLOBAL_OPCODES or (step.opname.startswith("LOAD_") and "DEREF" in step.opname):
        return (step.argval,)
    if "LOAD_FAST" not in step.opname:
        return ()
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return names[1:] if step.opname.startswith("STORE_") else names


def _import_reads(steps: Sequence[dis.Instruction], variables: dict[str, list[_GlobalRead]]) -> Iterator[_GlobalRead]:
    """Adds the variables of imports to `variables`; gives the imports to globals and to attributes of classes."""
    module = last = None
    for at, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, names = steps[at - 2].argval, steps[at - 1].argval
            module = _GlobalRead(step.argval, (), level)
            is_whole = steps[at + 1].opname == "IMPORT_FROM"  # `from a.b import c`, `import a.b as c`; the rest binds a
            last = module if is_whole else module._replace(name=step.argval.partition(".")[0])
        elif step.opname == "IMPORT_FROM" and module is not None:
            last = module._replace(attributes=(step.argval,)) if names else module
        elif step.opname.startswith("STORE_") and last is not None:
            name = step.argval[0] if isinstance(step.argval, tuple) else step.argval
            variables.setdefault(name, []).append(last)
            if step.opname in ("STORE_GLOBAL", "STORE_NAME"):  # other functions may read it
                yield last
            last = None


def _is_user_module(module: Any) -> bool:
    if not isinstance(module, types.ModuleType):
        return True
    file = vars(module).get("__file__")  # a module may compute other attributes
    return module.__name__ not in sys.builtin_module_names if file is None else _is_user_file(file)


@functools.lru_cache(maxsize=4096)
def _is_user_file(file: str) -> bool:
    return not file.startswith((*_LIBRARY_FOLDERS, "<frozen"))


@functools.lru_cache(maxsize=4096)
def _has_state(module: str) -> bool:
    """Whether functions of a module read more than their arguments: the environment, the clock, random states."""
    root = module.partition(".")[0]
    of_python = root in sys.stdlib_module_names and root.removeprefix("_") not in _PURE_MODULES
    return of_python or f"{module}.".startswith("numpy.random.")
