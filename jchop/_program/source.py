"""The line of source that an equation comes from."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import jax
from jax.extend import source_info_util

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


def is_library_file(file: str) -> bool:
    """Whether a file is part of JAX, jchop or a library of layers."""
    return file.startswith(_LIBRARY_PATHS) or any(part in file for part in _LAYER_LIBRARIES)


def user_line() -> str:
    """The user's line that calls this function."""
    return source_line_of(source_info_util.current())
