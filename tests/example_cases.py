"""The examples, as modules that tests run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: The program of each example: a file, or that of a folder.
SCRIPTS = {path.stem: path for path in EXAMPLES.glob("*.py")} | {
    path.parent.name: path for path in EXAMPLES.glob("*/__main__.py")
}


def load(name: str) -> Any:
    """An example, fresh, so that what a test changes in it stays with that test."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS[name])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses of Python 3.11 look for the names of annotations
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module
