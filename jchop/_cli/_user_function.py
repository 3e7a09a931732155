"""A function of the user, ``module:function``, and its arguments from a file."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pkgutil
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from jchop._common.checks import check, close_names_hint, short_repr
from jchop._common.files import open_regular_file
from jchop._program.step import is_library_file


@contextlib.contextmanager
def imports_from_here() -> Iterator[None]:
    """Has imports find modules of the current folder: those of a function's module, and those that it makes itself."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def load_function(argument: str, text: str) -> Callable[..., Any]:
    """The function of ``module:function``; modules of the current folder are found, too.

    It takes arguments that are by keyword alone as positional ones, too, after the others. A call raises ValueError if
    JAX cannot trace the function, or the function raises an error.

    Args:
        argument: name of the argument of the command, for errors.
        text: what was given.

    Raises:
        ValueError: for a text of another form, a name that cannot be imported, or an object that is no function.
    """
    module, colon, name = text.partition(":")
    if not (colon and name) or not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        raise ValueError(f"{argument} {text!r} must be MODULE:FUNCTION, as 'model:apply' for a function of model.py")
    try:
        with imports_from_here():
            function = pkgutil.resolve_name(text)
    except SyntaxError as error:
        reason = f"{error.filename}, line {error.lineno}: {error.msg}"
        raise ValueError(f"{argument} {text!r} cannot be loaded: {reason}") from None
    except Exception as error:  # those of the module, too
        files = (path.stem for path in Path().glob("*.py"))
        hint = (
            close_names_hint(name, vars(sys.modules[module]))
            if module in sys.modules
            else close_names_hint(module, files)
        )
        raise ValueError(f"{argument} {text!r} cannot be loaded: {error}{hint}") from None
    check(callable(function), f"{argument} {text!r} is {type(function).__name__}, and no function")

    positional_count, keywords = _keyword_only_arguments(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from jax.errors import JAXIndexError, JAXTypeError

        try:
            keyword_values = dict(zip(keywords, args[positional_count:], strict=False))
            return function(
                *args[:positional_count], *args[positional_count + len(keywords) :], **keyword_values, **kwargs
            )
        except (JAXIndexError, JAXTypeError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ValueError(
                f"{argument} {text!r} cannot be traced by JAX: {reason}; "
                "use jax.numpy and jax.lax in place of float, int, if, while, x[mask] and NumPy"
            ) from None
        except Exception as error:
            detail = f": {error}" if str(error) else ""
            raise ValueError(
                f"{argument} {text!r} raised {type(error).__name__}{_error_place(error)}{detail}"
            ) from None

    return call


def _keyword_only_arguments(function: Callable[..., Any]) -> tuple[int, list[str]]:
    """How many arguments come before those by keyword alone, and the names of these."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # as of functions in C
        return 0, []
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):  # which takes all that is positional
        return 0, []
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters), keywords


def _error_place(error: Exception) -> str:
    """The innermost line of the user that an error comes from; empty if the call itself is wrong."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f" at {os.path.basename(f.filename)}:{f.lineno}" for f in frames if not is_library_file(f.filename)]
    return lines[-1] if lines else ""


#: Compressed arrays in memory may take so many bytes, or else so many times the bytes of their file.
_MAX_ARRAY_BYTES, _MAX_EXPANSION = 1 << 26, 64


def load_arrays(argument: str, path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name; ValueError for another file, or one without arrays."""
    with open_regular_file(path, f"{argument} {path}") as file:
        try:
            _check_npz(file)
            with np.load(file, allow_pickle=False) as arrays:
                arrays_by_name = {name: arrays[name] for name in arrays.files}
            if others := [name for name, array in arrays_by_name.items() if not isinstance(array, np.ndarray)]:
                raise ValueError(f"{short_repr(others[0])} in it is no array")
        except Exception as error:  # of damaged files zipfile, zlib and NumPy raise errors of any kind
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"{argument} {path} must be a .npz file of arrays, as numpy.savez writes it: {reason}"
            ) from None
    check(arrays_by_name, f"{argument} {path} has no array")
    return arrays_by_name


def _check_npz(file: BufferedReader) -> None:
    """Refuses what is no archive of numpy.savez, and one whose arrays take memory out of proportion to the file."""
    head = file.read(6)
    file.seek(0)
    check(head != b"\x93NUMPY", "it is a single array")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    for member in members:
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"{short_repr(member.filename)} in it is encrypted, or compressed in another way than deflate"
            )
    size = sum(member.file_size for member in members)
    if size > max(_MAX_ARRAY_BYTES, _MAX_EXPANSION * os.fstat(file.fileno()).st_size):
        raise ValueError(
            f"its arrays take {size} bytes, over {_MAX_EXPANSION} times those of the file; use numpy.savez"
        )
    file.seek(0)


def load_arguments(argument: str, path: Path, function: Callable[..., Any]) -> tuple[Any, ...]:
    """The arrays of a .npz file as the arguments of a function, in their order."""
    arrays = load_arrays(argument, path)
    return tuple(arrays[name] for name in argument_order(list(arrays), function, f"{argument} {path}"))


def argument_order(names: Sequence[str], function: Callable[..., Any], file: str, *, after: int = 0) -> list[str]:
    """The names of arrays in the order of the arguments: by name, or those without names in their order.

    Args:
        names: of the arrays; ``arr_0`` and so on if they have none.
        function: takes them as positional arguments.
        file: the argument of the command with its value, for errors.
        after: how many arguments come before. Default 0.

    Raises:
        ValueError: for arrays that are not the first arguments.
    """
    default_names = [f"arr_{i}" for i in range(len(names))]
    if sorted(names) == sorted(default_names):
        return default_names
    parameters = list(inspect.signature(function).parameters)[after:]
    order = [name for name in parameters if name in names]
    if len(order) < len(names) or order != parameters[: len(order)]:
        place = " after the parameters" if after else ""
        raise ValueError(
            f"{file} has the arrays {', '.join(sorted(names))}, and the function takes {', '.join(parameters)}{place}; "
            "save them under these names, the first ones, or without names"
        )
    return order
