"""Rules that assign specs to the tensors of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jchop._common.paths import check_path_pattern, matches_path
from jchop._spec.spec import Gradient, Spec, as_spec

__all__ = ["ModuleRoundings", "as_module_rules", "first_match"]


@dataclass(frozen=True)
class ModuleRoundings:
    """The specs of one module's tensors; None rounds nothing."""

    weight: Spec | None = None
    bias: Spec | None = None
    activation: Spec | None = None
    output: Spec | None = None
    gradient: Spec | None = None


_MODULE_FIELDS = tuple(field.name for field in fields(ModuleRoundings))


def as_module_rules(rules: Any) -> dict[str, ModuleRoundings]:
    """Rules of the caller, checked.

    Raises:
        TypeError, ValueError: for invalid rules.
    """
    if not isinstance(rules, Mapping) or not rules:
        raise TypeError(f"rules={rules!r} must be a dict such as {{'*': dict(weight='float8_e4m3fn')}}")
    return {
        check_path_pattern("rules: pattern", pattern, "'blocks.*.mlp'"): _as_module_roundings(pattern, value)
        for pattern, value in rules.items()
    }


def first_match(path: str, rules: Mapping[str, ModuleRoundings]) -> str | None:
    """The first pattern that matches part of a dotted path; None if there is none."""
    return next((pattern for pattern in rules if matches_path(pattern, path)), None)


def _as_module_roundings(pattern: str, entries: Any) -> ModuleRoundings:
    if not isinstance(entries, Mapping) or not set(entries) <= set(_MODULE_FIELDS):
        raise TypeError(
            f"rules[{pattern!r}]={entries!r} must be a dict with some of the keys {', '.join(_MODULE_FIELDS)}"
        )
    specs = {
        name: None if value is None else as_spec(value, f"rules[{pattern!r}]: {name}", scaled=True)
        for name, value in entries.items()
    }
    gradient = specs.get("gradient")
    if gradient is not None and gradient.gradient != Gradient():
        raise ValueError(f"rules[{pattern!r}]: gradient={str(gradient)!r} cannot have a gradient itself")
    return ModuleRoundings(**specs)
