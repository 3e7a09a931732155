"""Many quick cases in one test: an item of pytest for each of them would take longer than most of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

_SHOWN = 8  # failed cases, in the message


def each(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like ``pytest.mark.parametrize``, in one test: all cases run, and the message names those that failed.

    Each case has a folder of its own under `tmp_path`, and what it does to `monkeypatch` ends with it.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [row if len(keys) > 1 else (row,) for row in rows]
    assert table

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_cases(**fixtures: Any) -> None:
            __tracebackhide__ = True
            failed: list[tuple[str, BaseException]] = []
            for number, row in enumerate(table):
                own = fixtures | dict(zip(keys, row, strict=True))
                if "tmp_path" in fixtures:
                    own["tmp_path"] = fixtures["tmp_path"] / str(number)
                    own["tmp_path"].mkdir()
                try:
                    with pytest.MonkeyPatch.context() as patch:
                        if "monkeypatch" in fixtures:
                            own["monkeypatch"] = patch
                        test(**own)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append((", ".join(map(_shown, row)), error))
            if failed:
                first = "; ".join(f"({case})" for case, _ in failed[:_SHOWN])
                lines = [f"  ({case}) {type(error).__name__}: {str(error)[:300]}" for case, error in failed[:_SHOWN]]
                text = "\n".join([f"{len(failed)} of {len(table)} cases: {first}", *lines])
                raise AssertionError(text) from failed[0][1]

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        assert len(others) == len(signature.parameters) - len(keys), f"{keys} are no parameters of {test.__name__}"
        all_cases.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return all_cases

    return decorate


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)[:80]
