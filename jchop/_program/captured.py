"""The objects that a function reads beside its arguments: closures, defaults, globals, and their parts.

A traced program may be used again only while these objects are the same. JAX's own caches do not compare them:
`jax.jit` keeps the values of the first call.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

__all__ = ["captured", "same_objects"]

#: Objects that never change.
_STILL = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum, np.generic, np.dtype, np.ufunc),
    *(types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType),
    types.CodeType,
)
#: Equal objects of these types are the same.
_BY_VALUE = (int, str, bytes)
#: The most objects of a walk; a larger walk stops.
_MOST = 2000
#: Folders of files whose functions read no changing globals.
_LIBRARIES = (
    *{f"{path}{os.sep}" for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")},
    *(f"{Path(file).parent}{os.sep}" for file in (jax.__file__, np.__file__)),
    f"{Path(__file__).parents[1]}{os.sep}",
)


class _MayChangeError(Exception):
    """An object may change unseen."""


def captured(*roots: Any) -> tuple[Any, ...] | None:
    """Every object that functions reach, in a fixed order; None if one may change unseen, as objects of classes do.

    Args:
        roots: functions and other objects that a call depends on.

    Example:
        >>> scale = [2.0]
        >>> double = lambda x: scale[0] * x
        >>> before = captured(double)
        >>> same_objects(before, captured(double))
        True
        >>> scale[0] = 3.0
        >>> same_objects(before, captured(double))
        False
        >>> captured(np.ones(3)) is None
        True
    """
    try:
        return tuple(_Walk().of_all(roots))
    except _MayChangeError:
        return None


def same_objects(before: tuple[Any, ...] | None, after: tuple[Any, ...] | None) -> bool:
    """Whether two walks met the same objects."""
    if before is None or after is None or len(before) != len(after):
        return False
    return all(map(_is_same, before, after))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in _BY_VALUE and a == b)


class _Walk:
    """A walk over objects; each object is entered once."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}  # keeps the objects, so that no id is used again

    def of_all(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            yield from self.of(value)

    def of(self, value: Any) -> Iterator[Any]:
        if isinstance(value, _STILL) or id(value) in self.seen:
            yield value
            return
        self.seen[id(value)] = value
        if len(self.seen) > _MOST or isinstance(value, Tracer):
            raise _MayChangeError
        parts = self.parts(value)
        yield from (type(value), len(parts)) if parts else (value,)
        yield from self.of_all(parts)

    def parts(self, value: Any) -> Sequence[Any]:
        """The parts of an object; none if it never changes."""
        if type(value) in (tuple, list):
            return value
        if type(value) is dict:
            return (*value, *value.values())
        if isinstance(value, types.FunctionType):
            return tuple(_parts_of_function(value))
        if isinstance(value, types.MethodType):
            return (value.__func__, value.__self__)
        if isinstance(value, functools.partial):
            return (value.func, value.args, value.keywords)
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and _is_frozen(value):
            return (type(value), *(getattr(value, field.name) for field in dataclasses.fields(value)))
        if type(value).__module__.partition(".")[0] == "jax" and hasattr(value, "__wrapped__") and vars(value):
            return tuple(vars(value).values())  # functions with derivative rules
        if _is_still(value):
            return ()
        raise _MayChangeError


def _is_frozen(value: Any) -> bool:
    return type(value).__dataclass_params__.frozen


def _is_still(value: Any) -> bool:
    """Whether an object without parts never changes, or as good as never."""
    if isinstance(value, jax.Array):
        return not hasattr(jax.typeof(value), "inner_aval")  # no mutable reference
    if isinstance(value, types.ModuleType):
        return not _is_of_user(value)
    if isinstance(value, type):
        return not _is_of_user(sys.modules.get(value.__module__))
    # JAX does not compare the objects that a jitted function reads, either.
    return hasattr(value, "__wrapped__") and hasattr(value, "lower") and hasattr(value, "trace")


def _parts_of_function(function: types.FunctionType) -> Iterator[Any]:
    code = function.__code__
    yield from (code, function.__defaults__, function.__kwdefaults__)
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    if _is_user_file(code.co_filename):
        yield from _globals_of(code, function.__globals__)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _globals_of(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """The globals that a function names, and the attributes that it names of the user's modules."""
    for name in code.co_names:
        value = names.get(name, getattr(builtins, name, None))
        if isinstance(value, types.ModuleType) and _is_of_user(value):
            yield from (getattr(value, part) for part in code.co_names if hasattr(value, part))
        else:
            yield value
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant, names)


def _is_of_user(module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return module is None or module.__name__ not in sys.builtin_module_names
    return _is_user_file(file)


@functools.lru_cache(maxsize=4096)
def _is_user_file(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, "<frozen"))
