"""`emulate`: any function of JAX in another arithmetic, every operation rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from jchop._emulate._emulate import Emulated
from jchop._emulate._emulate import emulate as _emulate
from jchop._emulate._report import Report, Row, report

__all__ = ["Report", "Row", "emulate"]


class _Face(Protocol):
    """The function, and the function that stands on it."""

    report: Callable[..., Report]

    def __call__(
        self,
        fun: Callable[..., Any],
        spec: Any,
        *,
        rules: Mapping[str, Any] | None = ...,
        accumulate: Any = ...,
        key: Any = ...,
        unknown: Any = ...,
    ) -> Emulated: ...


emulate = cast(_Face, _emulate)
emulate.report = report
