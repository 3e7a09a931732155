"""The public names, and what the calls give them: a proxy of the package that notes names and arguments."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from types import ModuleType
from typing import Any

from digests import FOLDER
from jchop._emulate.emulate import LazyMethod

MODULES = ("", "formats", "math", "math.linalg", "storage", "nn", "optim", "ptq", "distributed", "sparsity",
           "study", "plot", "matlab", "compat.pychop", "compat.pychop.layers", "compat.pychop.optimizers",
           "compat.pychop.math_func", "compat.pychop.ptq", "compat.qtorch", "compat.qtorch.quant",
           "compat.qtorch.auto_low", "compat.qtorch.optim", "compat.piquant", "torch")  # fmt: skip
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
HAS_TORCH = importlib.util.find_spec("torch") is not None

#: name -> arguments that were given another value than the default. Filled while calls run.
SEEN: dict[str, set[str]] = {}


def note(name: str, *arguments: str) -> None:
    SEEN.setdefault(name, set()).update(arguments)


def module_of(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"jchop.{name}".rstrip("."))
    except ModuleNotFoundError:
        if HAS_TORCH:
            raise
        return None


def members(module: ModuleType | None) -> dict[str, Any]:
    """What a module exports, but for what needs torch where there is none."""
    found: dict[str, Any] = {}
    for name in getattr(module, "__all__", ()):
        try:
            found[name] = getattr(module, name)
        except ModuleNotFoundError:
            if HAS_TORCH:
                raise
    return found


def methods_of(kind: type) -> dict[str, Any]:
    """The public functions and properties that jchop defines for a class."""
    found = {}
    for owner in reversed(kind.__mro__):
        if owner.__module__.startswith("jchop"):
            found |= {name: value for name, value in vars(owner).items() if not name.startswith("_")}
    found = {name: getattr(kind, name) if isinstance(value, LazyMethod) else value for name, value in found.items()}
    plain = (staticmethod, classmethod, property, functools.cached_property)
    # torch wraps the `step` of an optimizer's class, its own or jchop's, when it makes the first one, and marks it.
    found = {name: value.__wrapped__ if hasattr(value, "hooked") else value for name, value in found.items()}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, plain) or (inspect.isfunction(value) and value.__module__.startswith("jchop"))
    }


@functools.cache
def names() -> dict[str, Any]:
    """Every public object under its first name: of the modules, of results that the reference page lists, methods."""
    found: dict[str, Any] = {}
    first: dict[int, str] = {}

    def put(name: str, value: Any) -> None:
        if not isinstance(value, ModuleType) and first.setdefault(id(value), name) == name:
            found[name] = value

    for where in MODULES:
        for name, value in members(module_of(where)).items():
            put(f"{where}.{name}".lstrip("."), functools.partial(value) if where.endswith("math_func") else value)
    page = (FOLDER.parents[1] / "docs/api.md").read_text("utf-8")
    for where, name in re.findall(r"auto(?:class|function):: (jchop\.?[\w.]*?)\.?(\w+)$", page, re.MULTILINE):
        if module := module_of(where.removeprefix("jchop").lstrip(".")):
            path = where.removeprefix("jchop").lstrip(".")
            put(f"({name})" if "._" in where else f"{path}.{name}".lstrip("."), getattr(module, name))
    for name, kind in [*found.items()]:
        if isinstance(kind, type) and not issubclass(kind, enum.Enum):
            for method, value in methods_of(kind).items():
                put(f"{name}.{method}", value)
    return found


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """The arguments of a name that can be given by name: of a class those of its constructor."""
    value = names()[name]
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property | functools.cached_property | enum.EnumType) or not callable(value):
        return {}
    if not isinstance(value, type) and not inspect.isroutine(value):
        return {}  # a format that can be called
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p for p in found if p.kind not in VARIABLE and p.name not in ("self", "cls")}


def _differs(value: Any, default: Any) -> bool:
    if value is default:
        return False
    if value is None or not isinstance(default, bool | int | float | str | tuple):
        return True
    try:
        return not bool(value == default) or type(value) is not type(default)
    except ValueError:  # of an array
        return True


def _note_call(name: str, function: Any, args: Any, kwargs: Any) -> None:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return
    found = bound.signature.parameters
    given = ((n, v) for n, v in bound.arguments.items() if found[n].kind not in VARIABLE)
    note(name, *(n for n, v in given if _differs(v, found[n].default)))


def _noting(name: str, function: Any, *, everywhere: bool = False) -> Any:
    """A function that notes what the files of this folder give it; with ``everywhere`` any caller counts."""

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if everywhere or sys._getframe(1).f_code.co_filename.startswith(str(FOLDER)):
            _note_call(name, function, args, kwargs)
            note(name, *(("()",) if hasattr(noted, "makes") else ()))
        return function(*args, **kwargs)

    return noted


class Face:
    """The package or one of its modules; what it returns notes its calls."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._kept: dict[str, tuple[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self._kept:
            path = f"{self._path}.{name}".lstrip(".")
            value = getattr(importlib.import_module(f"jchop.{self._path}".rstrip(".")), name)
            self._kept[name] = (path, value)
        where, value = self._kept[name]
        if isinstance(value, ModuleType):
            return Face(where)
        path: str = by_id().get(id(value), where)
        if isinstance(value, type):
            if isinstance(value, enum.EnumType):
                note(path)
            return value
        if not inspect.isfunction(value):
            note(path)
            return value
        noted = _noting(path, value, everywhere=True)
        return noted


@functools.cache
def by_id() -> dict[int, str]:
    return {id(value): name for name, value in names().items()}


def note_types(types: set[type]) -> None:
    for kind in {base for one in types for base in one.__mro__}:
        if name := by_id().get(id(kind)):
            note(name)


def facts(value: Any) -> dict[str, Any]:
    """All public properties of an object."""
    found = {}
    note_types({type(value)})
    for name, kind in methods_of(type(value)).items():
        if isinstance(kind, property | functools.cached_property):
            note(by_id().get(id(kind), name))
            try:
                found[name] = getattr(value, name)
            except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
                found[name] = type(error).__name__
    return found


def watch() -> None:
    """Lets constructors and methods of public classes note what they are given."""
    makers: list[tuple[type, str, Any]] = []
    for name, kind in names().items():
        if not isinstance(kind, type) or isinstance(kind, enum.EnumType):
            continue
        maker = "__new__" if issubclass(kind, tuple) else "__init__"
        owner = next(base for base in kind.__mro__ if maker in vars(base))
        if owner.__module__.startswith("jchop") and not getattr(owner, "_is_protocol", False):
            by_another = type(kind) is not type and type(kind).__name__ != "ABCMeta"
            makers.append((kind, maker, _watched_maker(name, vars(owner)[maker], everywhere=by_another)))
    for kind, maker, function in makers:  # all are wrapped before one is replaced
        setattr(kind, maker, function)
    for name, value in names().items():
        owner_name, _, method = name.rpartition(".")
        owner = names().get(owner_name)
        if not isinstance(owner, type) or isinstance(value, property | functools.cached_property):
            continue
        owner = next(kind for kind in owner.__mro__ if method in vars(kind))
        wrap = type(value) if isinstance(value, staticmethod | classmethod) else (lambda function: function)
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        setattr(owner, method, wrap(_noting(name, function, everywhere=method in ("forward", "step"))))


def _watched_maker(name: str, maker: Any, everywhere: bool) -> Any:
    function = maker.__func__ if isinstance(maker, staticmethod) else maker
    noted = _noting(name, function, everywhere=everywhere)
    noted.makes = True
    return staticmethod(noted) if isinstance(maker, staticmethod) else noted
