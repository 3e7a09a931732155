"""Specs and keys as arguments of operators of torch: text with facts about it, and words from seeds and generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch

from jchop._common.checks import check_int
from jchop._spec.spec import Gradient, Spec, as_spec

Tensor = torch.Tensor
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


# -- words -------------------------------------------------------------------------------------------------------------


def key_words(numbers: Sequence[int]) -> Tensor:
    """Words of 32 bits as an int32 tensor of the same bits."""
    return torch.tensor([number - (1 << 32) if number >> 31 else number for number in numbers], dtype=torch.int32)


def words_of_seed(seed: int, *fold_ins: int, name: str = "seed") -> Tensor:
    """The words of ``jax.random.key(seed)``, with numbers folded in."""
    seed = check_int(name, seed, 0, (1 << 64) - 1)
    return key_words((seed >> 32, seed & 0xFFFF_FFFF, *fold_ins))


def rounding_words(
    spec: str, draws: bool, seed: int | None, generator: torch.Generator | None, name: str = "seed"
) -> Tensor:
    """The words of one rounding; none if the spec is not stochastic.

    Raises:
        TypeError, ValueError: for an invalid seed, or if neither seed nor generator is given.
    """
    if seed is not None and generator is not None:
        raise ValueError(f"{name}={seed!r} and generator= are given; pass one of them")
    if not draws:
        return key_words(())
    if seed is not None:
        return words_of_seed(seed, name=name)
    if generator is None:
        raise ValueError(f"spec={spec!r} rounds stochastically: pass {name}=, an integer, or generator=")
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator={generator!r} must be a torch.Generator")
    return generator_words(generator)


def generator_words(generator: torch.Generator | None = None) -> Tensor:
    """The words of a key, from a generator; None: torch's global one of the CPU."""
    device = "cpu" if generator is None else generator.device
    return torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, generator=generator, device=device)
