"""A warning, which fails the build, for each public name that the pages do not describe.

A name counts if autodoc has made an entry for it, or if docs/api.md has it between backquotes: layers of Flax with one
more argument, and elementwise functions of one signature stand in such lists. The tables of formats have a test.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

from sphinx.util import logging

import jchop

#: Modules whose names for users are those of `jchop` itself; the others are for its own files.
INTERNAL = {"accumulation", "gradients", "rounding", "spec"}
#: The extras that the environment of the pages may lack.
OPTIONAL = {"torch", "optax", "flax", "matplotlib", "sklearn", "dask", "qwix"}


def public_names() -> list[str]:
    """The dotted names of all public modules: each name of an `__all__`, under the shortest path to it."""
    found: dict[int, str] = {}
    names = ["jchop", *(m.name for m in pkgutil.walk_packages(jchop.__path__, "jchop.") if is_public(m.name))]
    listed: list[str] = []
    for name in sorted(names, key=lambda name: name.count(".")):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] not in OPTIONAL:
                raise
            continue
        for each in getattr(module, "__all__", ()):
            thing = getattr(module, each)
            if isinstance(thing, type(jchop) | jchop.formats.ElementFormat | jchop.formats.ScaledFormat):
                continue  # a module, whose names are listed by themselves; a format, whose row is in docs/formats.md
            if found.setdefault(id(thing), f"{name}.{each}") == f"{name}.{each}":
                listed.append(f"{name}.{each}")
    return listed


def is_public(name: str) -> bool:
    """Whether a module has names for users; those of `jchop.compat` are other packages' own (docs/compat.md)."""
    parts = name.split(".")
    return not any(part.startswith("_") for part in parts) and parts[1] not in {"compat", *INTERNAL}


def missing(described: set[str], page: str) -> list[str]:
    """The public names that are neither described nor named on the page of the reference."""
    named = set(re.findall(r"`(jchop\.[\w.]+)`", page))
    return [name for name in public_names() if name not in described | named]


def check(app: Any, env: Any) -> None:
    described = set(env.get_domain("py").objects)
    page = (Path(app.srcdir) / "api.md").read_text(encoding="utf-8")
    for name in missing(described, page):
        logging.getLogger(__name__).warning("%s is public, and the pages do not describe it", name, type="coverage")


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
