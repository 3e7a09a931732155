"""Checks that take long, as cases of one test of their file: one of them is run by default, the others are slow.

further = Further()

@further.first
def a_short_one(): ...

@further
@pytest.mark.parametrize("text", TEXTS)
def a_long_one(text): ...

test_further = further.test()
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest


class Further:
    """Takes checks, which are marked and parametrized as tests are, and may name fixtures."""

    def __init__(self) -> None:
        self.cases: list[tuple[str, Callable[..., Any], dict[str, Any], list[Any]]] = []

    def __call__(self, check: Callable[..., Any]) -> Callable[..., Any]:
        self.cases += _cases(check)
        return check

    def first(self, check: Callable[..., Any]) -> Callable[..., Any]:
        """The check whose first case is run by default."""
        self.cases = _cases(check) + self.cases
        return check

    def test(self) -> Callable[..., None]:
        """The test of all checks so far."""
        table = [
            pytest.param(check, given, id=name, marks=[*marks, *[pytest.mark.slow] * (place > 0)])
            for place, (name, check, given, marks) in enumerate(self.cases)
        ]

        @pytest.mark.parametrize(("check", "given"), table)
        def test_further(check: Callable[..., Any], given: dict[str, Any], request: pytest.FixtureRequest) -> None:
            for mark in getattr(check, "pytestmark", ()):
                for name in mark.args if mark.name == "usefixtures" else ():
                    request.getfixturevalue(name)
            names = [name for name in inspect.signature(check).parameters if name not in given]
            check(**given, **{name: request.getfixturevalue(name) for name in names})

        return test_further


def _cases(check: Callable[..., Any]) -> list[Any]:
    marks: list[pytest.Mark] = list(getattr(check, "pytestmark", ()))
    own = [mark for mark in marks if mark.name not in ("parametrize", "in_turn", "usefixtures")]
    rows = [_rows(*mark.args, **mark.kwargs) for mark in marks if mark.name == "parametrize"]
    found = []
    for chosen in itertools.product(*rows):
        name = "-".join([check.__name__, *(text for text, _, _ in chosen)])
        given = {key: value for _, values, _ in chosen for key, value in values.items()}
        found.append((name, check, given, own + [mark for *_, more in chosen for mark in more]))
    return found


def _rows(names: Any, values: Any, ids: Any = None) -> list[tuple[str, dict[str, Any], list[Any]]]:
    """Of each case of a `parametrize` its name, its arguments and its marks."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = []
    given = list(ids) if ids is not None and not callable(ids) else None
    for place, case in enumerate(values):
        marks = [mark for mark in getattr(case, "marks", ()) if mark.name != "slow"]
        known = getattr(case, "id", None) or (given[place] if given else None)
        case = case.values if hasattr(case, "marks") else (case,) if len(names) == 1 else tuple(case)
        name = known or "-".join(_word(value, place, ids if callable(ids) else None) for value in case)
        rows.append((str(name), dict(zip(names, case, strict=True)), marks))
    return rows


def _word(value: Any, place: int, made: Callable[[Any], object] | None) -> str:
    """What stands for a value in the name of a case."""
    word = made(value) if made else None
    if word is None:
        word = value if isinstance(value, str | int | float) else getattr(value, "__name__", place)
    return str(word)
