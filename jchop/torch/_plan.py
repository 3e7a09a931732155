"""Specs as arguments of operators of torch: text, and facts about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch

from jchop._spec.spec import Gradient, Spec, as_spec
from jchop.formats import ElementFormat, ScaledFormat

__all__ = ["SpecPlan", "TorchSpecLike", "clips_gradient", "compile_constant", "outside_graphs", "plan_of"]

TorchSpecLike = Spec | ElementFormat | ScaledFormat | str
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def compile_constant(function: AnyFunction) -> AnyFunction:
    """A function whose results are constants for torch.compile, like its arguments.

    Equivalent to `torch.compiler.assume_constant_result`, which would import the compiler and take seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: AnyFunction) -> AnyFunction:
    """A function that torch.compile does not trace: its graph ends before a call, and another one begins after it.

    Equivalent to `torch.compiler.disable`, which would import the compiler and take seconds.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and _disable_compile(function):
            return function.outside(*args, **kwargs)  # type: ignore[attr-defined]
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@compile_constant
def _disable_compile(function: Any) -> bool:
    """True; runs while torch.compile traces, which finds the new attribute afterwards."""
    function.outside = torch.compiler.disable(function)
    return True


class SpecPlan(NamedTuple):
    """The facts of a spec: constants for torch.compile."""

    spec: str  # without the rounding of the cotangent
    draws: bool
    gradient: str | None
    gradient_draws: bool


@compile_constant
def plan_of(spec: Any) -> SpecPlan:
    """The plan of a spec, a format or a text."""
    return _cached_plan(spec if isinstance(spec, str) else as_spec(spec, scaled=True))


@lru_cache(maxsize=256)
def _cached_plan(value: Spec | str) -> SpecPlan:
    spec = as_spec(value, scaled=True)
    backward = spec.gradient.round
    forward = replace(spec, gradient=Gradient(clipped=spec.gradient.clipped))
    return SpecPlan(
        str(forward),
        spec.rounding.stochastic,
        None if backward is None else str(backward),
        backward is not None and backward.rounding.stochastic,
    )


@compile_constant
def clips_gradient(spec: str) -> bool:
    """Whether the gradient is zero for values that overflow."""
    return as_spec(spec, scaled=True).gradient.clipped
