"""`emulate` with its report: the core has the function, and no import of reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, cast, overload

from jchop._emulate.emulate import EmulatedFunction
from jchop._emulate.emulate import emulate as _emulate
from jchop._insight.reports.report import Report, report
from jchop._spec.spec import Spec
from jchop.formats import ElementFormat

__all__ = ["emulate"]


class _EmulateFunction(Protocol):
    """`emulate`, with `report` as an attribute."""

    report: Callable[..., Report]

    @overload
    def __call__(
        self,
        fun: Callable[..., Any],
        spec: Any,
        *,
        rules: Mapping[str, Any] | None = ...,
        accumulate: Any = ...,
        key: Any = ...,
        unknown: Any = ...,
        narrow: Literal["raise", "carrier"] = ...,
        max_turns: int | None = ...,
        stop_at: Literal["overflow", "nan", "invalid"] | None = ...,
    ) -> EmulatedFunction: ...

    @overload
    def __call__(
        self,
        spec: Spec | ElementFormat | str | None,
        *,
        rules: Mapping[str, Any] | None = ...,
        accumulate: Any = ...,
        key: Any = ...,
        unknown: Any = ...,
        narrow: Literal["raise", "carrier"] = ...,
        max_turns: int | None = ...,
        stop_at: Literal["overflow", "nan", "invalid"] | None = ...,
    ) -> Callable[[Callable[..., Any]], EmulatedFunction]: ...


emulate = cast(_EmulateFunction, _emulate)
emulate.report = report
