"""Writing files whole or not at all, and naming the extra that a missing package belongs to."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Lets `write` fill a file beside `path`, then puts it in the place of `path` in one step.

    Whatever goes wrong on the way, `path` keeps its old content and nothing is left behind.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            write(file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def require_extra(purpose: str, extra: str, packages: tuple[str, ...]) -> None:
    """Raises ModuleNotFoundError, naming the extra that would bring them, where one of `packages` is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        raise ModuleNotFoundError(f'{purpose} needs {names}: pip install "jchop[{extra}]"', name=missing[0])
