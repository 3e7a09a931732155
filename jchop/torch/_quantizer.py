"""`Quantizer`: a module that rounds its input, and the gradient in the backward pass."""

from __future__ import annotations

import torch
from torch import nn

from jchop._common.checks import check_int
from jchop._spec.spec import Gradient, as_spec
from jchop.torch._plan import SpecPlan, TorchSpecLike, plan_of
from jchop.torch._round import round_gradient, round_straight_through
from jchop.torch._words import generator_words, key_words

__all__ = ["Quantizer", "first_words"]

Tensor = torch.Tensor
_FORWARD_DRAW, _BACKWARD_DRAW = 0, 1


class Quantizer(nn.Module):
    """Rounds a tensor in the forward pass, and its gradient in the backward pass, like QPyTorch's module.

    The gradient passes straight through the forward rounding (or is clipped, if ``forward`` has ``gradient=clipped``)
    and is then rounded to ``backward``. Integers and booleans are unchanged. A tensor that JAX cannot read in place is
    copied.

    A stochastic module counts its calls in a buffer, ``calls``. Call n draws the same bits as `jchop.round_to_format`
    with ``fold_in(fold_in(key(seed), n), 0)``, with the functions of `jax.random`, and its gradient draws the bits with
    ``..., 1)``.

    Args:
        forward: a `jchop.Spec`, a format, or text. Default None: not rounded.
        backward: the spec of the gradient. Default None: not rounded.
        seed: an integer from 0 to 2^64 - 1, or several integers: the first is the seed, the others, below 2^32, are
            folded into its key. Default 0. Modules with the same seed draw the same bits in the same call. None: each
            call draws a key from torch's global generator, and there is no buffer.

    Raises:
        TypeError, ValueError: for an invalid spec or seed.

    References:
        Zhang et al., QPyTorch: A Low-Precision Arithmetic Simulation Framework, arXiv 1910.04540.

    Example:
        >>> import torch, jchop as jc
        >>> quantizer = jc.torch.Quantizer("float8_e4m3fn", "float8_e5m2")
        >>> x = torch.tensor([1.1, 2.3], requires_grad=True)
        >>> quantizer(x).detach()
        tensor([1.1250, 2.2500])
        >>> (quantizer(x) * torch.tensor([1.1, 2.3])).sum().backward()
        >>> x.grad
        tensor([1.0000, 2.5000])
    """

    calls: Tensor

    def __init__(
        self,
        forward: TorchSpecLike | None = None,
        backward: TorchSpecLike | None = None,
        *,
        seed: int | tuple[int, ...] | None = 0,
    ) -> None:
        super().__init__()
        self.rounding = None if forward is None else plan_of(as_spec(forward, "forward", scaled=True))
        if self.rounding is not None and self.rounding.gradient is not None:
            if backward is not None:
                raise ValueError(f"forward={str(forward)!r} rounds the gradient, but so does backward={backward!r}")
            backward = self.rounding.gradient
        self.gradient = None if backward is None else _plan_of_gradient(backward)
        self.words = None if seed is None else _seed_numbers(seed)
        if self._counts_calls:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int32))

    @property
    def stochastic(self) -> bool:
        """Whether either rounding draws random bits."""
        return any(plan is not None and plan.draws for plan in (self.rounding, self.gradient))

    def forward(self, x: Tensor) -> Tensor:
        """`x` rounded.

        Args:
            x: a tensor of any shape and dtype; integers and booleans are unchanged.
        """
        if not (x.is_floating_point() or x.is_complex()):
            return x
        call = self._next_call() if self._counts_calls else None
        if self.rounding is not None:
            x = round_straight_through(
                x, self.rounding.spec, self._words(self.rounding.draws, call, _FORWARD_DRAW), True
            )
        if self.gradient is not None:
            x = round_gradient(x, self.gradient.spec, self._words(self.gradient.draws, call, _BACKWARD_DRAW))
        return x

    def right_inverse(self, x: Tensor) -> Tensor:
        """`x` itself: an assigned parametrized weight is kept unrounded, and rounded at each use."""
        return x

    def extra_repr(self) -> str:
        """The specs, in the representation of the module."""
        plans = {"forward": self.rounding, "backward": self.gradient}
        return ", ".join(f"{name}={plan.spec}" for name, plan in plans.items() if plan is not None)

    @property
    def _counts_calls(self) -> bool:
        return self.stochastic and self.words is not None

    def _next_call(self) -> Tensor:
        call = self.calls.clone()
        self.calls += 1
        return call

    def _words(self, draws: bool, call: Tensor | None, draw: int) -> Tensor:
        if not draws:
            return key_words(())
        if self.words is None or call is None:
            return generator_words()
        draw_word = torch.full((1,), draw, dtype=torch.int32, device=call.device)
        return torch.cat([key_words(self.words).to(call.device), call.reshape(1), draw_word])


def first_words(seed: tuple[int, ...], draws: bool) -> Tensor:
    """The words of the forward rounding in the first call of a `Quantizer` with this seed; none without draws."""
    return key_words((*_seed_numbers(seed), 0, _FORWARD_DRAW) if draws else ())


def _plan_of_gradient(backward: TorchSpecLike) -> SpecPlan:
    spec = as_spec(backward, "backward", scaled=True)
    if spec.gradient != Gradient():
        raise ValueError(f"backward={str(spec)!r} is for a gradient, and cannot have a gradient itself")
    return plan_of(spec)


def _seed_numbers(seed: int | tuple[int, ...]) -> tuple[int, ...]:
    first, *fold_ins = seed if isinstance(seed, tuple) else (seed,)
    first = check_int("seed", first, 0, (1 << 64) - 1)
    return (first >> 32, first & 0xFFFF_FFFF, *(check_int("seed", fold_in, 0, (1 << 32) - 1) for fold_in in fold_ins))
