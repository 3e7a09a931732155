"""Names of a package that are loaded when first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from jchop._common.checks import close_names_hint


def load_name(module: str, name: str) -> Any:
    """An attribute of a module that is loaded when first used."""
    return getattr(import_module(module), name)


def is_module_of(library: str, value: Any) -> bool:
    """Whether a value is a `Module` of a library, which is not imported for this."""
    loaded = sys.modules.get(library)
    return loaded is not None and isinstance(value, loaded.Module)


def on_demand(
    package: str,
    modules: Sequence[str] = (),
    names: Mapping[str, Sequence[str]] = MappingProxyType({}),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package with names that are loaded when first used.

    The core has no import of a wing: its packages say by a text where a name of a wing stands.

    Args:
        package: its name.
        modules: the names of its modules.
        names: for each other module the names that the package has from it.
        elsewhere: for names that users try, the text to write instead.

    Raises:
        AttributeError: by the first function, for a name that the package has not.
    """
    homes = {name: home for home, own in names.items() for name in own}

    def load(name: str) -> Any:
        if name in homes:
            value = load_name(homes[name], name)
        elif name in modules:
            value = import_module(f"{package}.{name}")
        else:
            write = elsewhere.get(name)
            hint = close_names_hint(name, public_names()) if write is None else f"; write {write}"
            raise AttributeError(f"module {package!r} has no attribute {name!r}{'' if name.startswith('_') else hint}")
        setattr(sys.modules[package], name, value)
        return value

    def public_names() -> list[str]:
        return sorted({*getattr(sys.modules[package], "__all__", homes), *modules})

    return load, public_names
