"""QPyTorch's lowering of models: ``from jchop.compat.qtorch.auto_low import sequential_lower``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from jchop._common.checks import check, check_choice
from jchop.compat._arrays import round_first
from jchop.compat._torch import nn
from jchop.compat.qtorch import Number
from jchop.compat.qtorch._quantizer import Quantizer

__all__ = ["lower", "sequential_lower"]

_TorchModel = TypeVar("_TorchModel", bound=nn.Module)
#: The files of `torch.nn.modules` that define each type of layer.
_LAYER_FILES = {
    "conv": ("conv", "fold"), "linear": ("linear",), "pool": ("pooling",), "pad": ("padding",),
    "activation": ("activation",), "normalization": ("batchnorm", "instancenorm", "normalization"),
    "dropout": ("dropout",), "loss": ("loss",),
}  # fmt: skip
#: The submodule that rounds the output of a layer.
_OUTPUT_MODULE = "jchop_output"


def sequential_lower(
    model: _TorchModel,
    layer_types: Sequence[str] = (),
    forward_number: Number | None = None,
    backward_number: Number | None = None,
    forward_rounding: str = "stochastic",
    backward_rounding: str = "stochastic",
) -> _TorchModel:
    """A copy of a model with rounded outputs of some layers, and rounded gradients of these outputs.

    Args:
        model: a module of torch.
        layer_types: some of ``"conv"``, ``"linear"``, ``"pool"``, ``"pad"``, ``"activation"``, ``"normalization"``,
            ``"dropout"`` and ``"loss"``.
        forward_number: the format of outputs.
        backward_number: the format of gradients.
        forward_rounding: ``"stochastic"`` (default) or ``"nearest"``.
        backward_rounding: ``"stochastic"`` (default) or ``"nearest"``.

    Raises:
        ValueError: for an unknown type, or one of which the model has no layer.

    Example:
        >>> import torch
        >>> from jchop.compat.qtorch import FloatingPoint
        >>> from jchop.compat.qtorch.auto_low import sequential_lower
        >>> number = FloatingPoint(5, 2)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> low = sequential_lower(model, ["linear"], number, number, "nearest", "nearest")
        >>> type(low[0]).__name__, list(low.state_dict()) == list(model.state_dict())
        ('Linear', True)
    """
    result = copy.deepcopy(model)
    lower(result, layer_types, forward_number, backward_number, forward_rounding, backward_rounding)
    return result


def lower(
    model: nn.Module,
    layer_types: Sequence[str] = (),
    forward_number: Number | None = None,
    backward_number: Number | None = None,
    forward_rounding: str = "stochastic",
    backward_rounding: str = "stochastic",
) -> None:
    """Like `sequential_lower`, in place.

    Args:
        model: a module of torch.
        layer_types: as in `sequential_lower`.
        forward_number: the format of outputs.
        backward_number: the format of gradients.
        forward_rounding: as in `sequential_lower`.
        backward_rounding: as in `sequential_lower`.
    """
    layers = []
    for layer_type in layer_types:
        files = _LAYER_FILES[check_choice("layer_types", layer_type, tuple(_LAYER_FILES))]
        matches = [module for module in model.modules() if _defining_file(module) in files]
        check(matches, f"layer_types: the model has no layer of type {layer_type!r}")
        layers += matches
    for layer in layers:
        output_quantizer = Quantizer(forward_number, backward_number, forward_rounding, backward_rounding)
        layer.add_module(_OUTPUT_MODULE, output_quantizer)
        layer.register_forward_hook(_round_output)


def _defining_file(layer: nn.Module) -> str:
    """The file of a layer's class. An attention counts as linear, and not its last layer, which is not called."""
    kind = type(layer)
    folder, _, file = kind.__module__.rpartition(".")
    if kind is nn.MultiheadAttention:
        return "linear"
    is_called = folder == "torch.nn.modules" and kind is not nn.modules.linear.NonDynamicallyQuantizableLinear
    return file if is_called else ""


def _round_output(layer: nn.Module, _: Any, output: Any) -> Any:
    return round_first(getattr(layer, _OUTPUT_MODULE), output)
