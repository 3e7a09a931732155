"""Pychop's optimizers for torch: `torch.optim` with ``chop=``, which rounds their moments after each step.

The paper's take ``exp_bits=``, ``sig_bits=`` and ``rmode=`` instead of ``chop=``, and are named ``QuantizedRMSProp``,
not ``QuantizedRMSprop``. `jchop.torch.OptimLP` also rounds gradients, weights and an accumulator.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jchop.compat._torch import torch
from jchop.compat.pychop._quantizers import QUANTIZER_WORDS, class_lookup

_TORCH_OPTIMIZERS = {name: name for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "RMSprop", "SGD")}
_TORCH_OPTIMIZERS["RMSProp"] = "RMSprop"
_OPTIMIZER_PREFIXES = ("Quantized", "IQuantized")

__all__ = [prefix + name for prefix in _OPTIMIZER_PREFIXES for name in _TORCH_OPTIMIZERS]  # pyright: ignore[reportUnsupportedDunderAll]


class _RoundingOptimizer(torch.optim.Optimizer):
    """A mixin for optimizers of torch: rounds tensors of their state by ``chop`` after each step."""

    prefix: ClassVar[str]

    def __init__(self, params: Any, *args: Any, chop: Any = None, **options: Any) -> None:
        self.chop = QUANTIZER_WORDS[self.prefix].quantizer(chop, options)
        super().__init__(params, *args, **options)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """A step of the optimizer.

        Args:
            closure: as for every optimizer of torch.
        """
        loss = super().step(closure)
        if self.chop is not None:
            with torch.no_grad():
                for parameter, state in self.state.items():
                    for value in state.values():
                        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim:
                            value.copy_(self.chop(value))
        return loss


_OPTIMIZER_TEXT = "`torch.optim.{}` with ``chop=``, a quantizer of its moments; None (default) for none."
_OPTIMIZER_TEXTS: dict[str, str] = dict.fromkeys(_OPTIMIZER_PREFIXES, _OPTIMIZER_TEXT)
_class_of_optimizer = class_lookup(_RoundingOptimizer, torch.optim, _TORCH_OPTIMIZERS, _OPTIMIZER_TEXTS)


def __getattr__(name: str) -> Any:  # a function, for type checkers
    return _class_of_optimizer(name)
