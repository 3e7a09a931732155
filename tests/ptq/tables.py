"""Tables of cases that take a test each some at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest


def some_of(table: Iterable[str], parts: int, first: int = 1) -> Any:
    """Marks a test whose argument `names` are some cases of a table: the first by default, the others in slow parts."""
    names = [*table]
    rest = names[first:]
    slow = [pytest.param(rest[part::parts], marks=pytest.mark.slow) for part in range(parts)]
    return pytest.mark.parametrize("names", [names[:first], *slow], ids=lambda some: some[0])


@contextlib.contextmanager
def case(name: str) -> Iterator[None]:
    """Names the case in the error of a test that has several."""
    try:
        yield
    except Exception as error:
        error.add_note(f"the case {name!r}")
        raise
