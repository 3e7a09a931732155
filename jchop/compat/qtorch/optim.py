"""QPyTorch's wrapper of optimizers: ``from jchop.compat.qtorch.optim import OptimLP``."""

from __future__ import annotations

from typing import Any

from jchop import torch as bridge
from jchop._common.checks import check
from jchop.compat._torch import torch
from jchop.compat.qtorch._quantizer import forward_spec_of

__all__ = ["OptimLP"]


class OptimLP(bridge.OptimLP):
    """An optimizer whose gradients, weights, accumulators and moments are rounded: `jchop.torch.OptimLP`.

    Args:
        optim: an optimizer of torch.
        weight_quant: a ``quantizer`` of weights; None (default), here and below: not rounded.
        grad_scaling: factor of gradients, applied before they are rounded; without ``grad_quant`` it has no effect.
        grad_quant: quantizer of gradients.
        momentum_quant: quantizer of moments.
        acc_quant: quantizer of a copy of the weights, which is kept and updated in their place.

    Example:
        >>> import torch
        >>> from jchop.compat.qtorch import FloatingPoint
        >>> from jchop.compat.qtorch.optim import OptimLP
        >>> from jchop.compat.qtorch.quant import quantizer
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> rounds = quantizer(forward_number=FloatingPoint(5, 2), forward_rounding="nearest")
        >>> optimizer = OptimLP(torch.optim.SGD([weight], lr=0.1), weight_quant=rounds)
        >>> weight.grad = torch.tensor([1.0, -1.0])
        >>> optimizer.step()
        >>> weight.tolist()
        [0.875, 1.0]
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        weight_quant: Any = None,
        grad_scaling: float = 1.0,
        grad_quant: Any = None,
        momentum_quant: Any = None,
        acc_quant: Any = None,
    ) -> None:
        check(grad_scaling > 0, f"grad_scaling={grad_scaling!r} must be positive")
        super().__init__(
            optim,
            weight=forward_spec_of("weight_quant", weight_quant),
            gradient=forward_spec_of("grad_quant", grad_quant),
            momentum=forward_spec_of("momentum_quant", momentum_quant),
            accumulator=forward_spec_of("acc_quant", acc_quant),
            gradient_scale=1.0 if grad_quant is None else grad_scaling,
            seed=None,
        )
