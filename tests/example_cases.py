"""The examples, as modules that tests run."""

from __future__ import annotations

import importlib.util
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
    spec.loader.exec_module(module)
    return module
