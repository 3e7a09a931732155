"""Patterns for paths in trees of modules and scopes."""

from __future__ import annotations

from fnmatch import fnmatchcase


def matches_path(pattern: str, path: str, separator: str = "/") -> bool:
    """Whether a pattern (`fnmatch`) matches consecutive whole parts of a path; ``"*"`` always does.

    Example:
        >>> matches_path("blocks/*/mlp", "encoder/blocks/0/mlp/dense"), matches_path("mlp", "mlp2")
        (True, False)
    """
    return pattern == "*" or fnmatchcase(f"{separator}{path}{separator}", f"*{separator}{pattern}{separator}*")
