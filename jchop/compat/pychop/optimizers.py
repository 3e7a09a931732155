"""Pychop's optimizers for torch: `torch.optim` with ``chop=``, which rounds their moments after each step.

The paper's take ``exp_bits=``, ``sig_bits=`` and ``rmode=`` instead of ``chop=``, and are named ``QuantizedRMSProp``,
not ``QuantizedRMSprop``. `jchop.torch.OptimLP` also rounds gradients, weights and an accumulator.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

from jchop._files import require_extra

require_extra("jchop.compat.pychop.optimizers", "torch", ("torch",))

import torch  # noqa: E402

from jchop.compat.pychop._words import WORDS  # noqa: E402

_OPTIMIZERS = {name: name for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "RMSprop", "SGD")} | {
    "RMSProp": "RMSprop"
}
_PREFIXES = ("Quantized", "IQuantized")

__all__ = [prefix + name for prefix in _PREFIXES for name in _OPTIMIZERS]  # pyright: ignore[reportUnsupportedDunderAll]


class _RoundingState(torch.optim.Optimizer):
    """A mixin for optimizers of torch: rounds tensors of their state by ``chop`` after each step."""

    prefix: ClassVar[str]

    def __init__(self, params: Any, *args: Any, chop: Any = None, **options: Any) -> None:
        self.chop = WORDS[self.prefix].quantizer(chop, options)
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


def __getattr__(name: str) -> Any:
    for prefix in _PREFIXES:
        if name.startswith(prefix) and name.removeprefix(prefix) in _OPTIMIZERS:
            return _optimizer(name, prefix, _OPTIMIZERS[name.removeprefix(prefix)])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@lru_cache(maxsize=len(_PREFIXES) * len(_OPTIMIZERS))  # a class for each name
def _optimizer(name: str, prefix: str, of: str) -> type[torch.optim.Optimizer]:
    text = f"`torch.optim.{of}` with ``chop=``, a quantizer of its moments; None (default) for none."
    body = {"__doc__": text, "__module__": __name__, "prefix": prefix}
    return type(name, (_RoundingState, getattr(torch.optim, of)), body)
