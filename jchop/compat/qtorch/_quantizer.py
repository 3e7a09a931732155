"""QPyTorch's quantizer module, based on the quantizer of `jchop.torch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jchop import torch as bridge
from jchop._spec.spec import Spec
from jchop.compat._torch import torch
from jchop.compat.qtorch import FixedPoint, Number


def random_source(spec: Spec, random: dict[str, Any]) -> dict[str, Any]:
    """The source of random bits: the argument, or else torch's global generator."""
    return random or ({"generator": torch.default_generator} if spec.rounding.stochastic else {})


class Quantizer(bridge.Quantizer):
    """Rounds in the forward pass, and the gradient in the backward pass: also by the name `quantizer`.

    Each stochastic rounding draws its key from torch's generator.

    Args:
        forward_number: a format, or None (default).
        backward_number: the format of the gradient, or None (default).
        forward_rounding: ``"stochastic"`` (default) or ``"nearest"``.
        backward_rounding: ``"stochastic"`` (default) or ``"nearest"``.
        clamping_grad_zero: whether the gradient of clamped numbers is zero; for fixed point.
        backward_hooks: functions of the gradient, applied before it is rounded.

    Example:
        >>> import torch
        >>> from jchop.compat.qtorch import FixedPoint
        >>> from jchop.compat.qtorch.quant import quantizer
        >>> number = FixedPoint(wl=5, fl=4)
        >>> rounds = quantizer(number, number, "nearest", "nearest", clamping_grad_zero=True)
        >>> x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
        >>> rounds(x).sum().backward()
        >>> x.grad
        tensor([0.9375, 0.9375, 0.0000])
    """

    def __init__(
        self,
        forward_number: Number | None = None,
        backward_number: Number | None = None,
        forward_rounding: str = "stochastic",
        backward_rounding: str = "stochastic",
        clamping_grad_zero: bool = False,
        backward_hooks: Iterable[Callable[[torch.Tensor], torch.Tensor]] = (),
    ) -> None:
        for name, number in (("forward_number", forward_number), ("backward_number", backward_number)):
            if number is not None and not isinstance(number, Number):
                raise TypeError(f"{name}={number!r} must be a FloatingPoint, FixedPoint or BlockFloatingPoint, or None")
        if clamping_grad_zero and forward_number is not None and not isinstance(forward_number, FixedPoint):
            raise ValueError(f"clamping_grad_zero=True is for fixed point, not forward_number={forward_number}")
        forward = None
        if forward_number is not None:
            forward = forward_number.spec(forward_rounding, clipped=clamping_grad_zero)
        backward = None if backward_number is None else backward_number.spec(backward_rounding)
        super().__init__(forward, backward, seed=None)
        self.forward_spec = forward
        self._hooks = tuple(backward_hooks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` rounded.

        Args:
            x: a tensor.
        """
        y = super().forward(x)
        if y.requires_grad:
            for hook in self._hooks:
                y.register_hook(hook)
        return y


quantizer = Quantizer


def forward_spec_of(name: str, quant: Any) -> Spec | None:
    """The forward spec of a quantizer."""
    if quant is None:
        return None
    if not isinstance(quant, Quantizer) or quant.forward_spec is None:
        raise TypeError(f"{name}={quant!r} must be a result of quantizer(forward_number=...), or None")
    return quant.forward_spec
