"""Pychop's layers for torch, and its quantization after training: ``from jchop.compat.pychop.layers import *``.

Each class is the layer of `torch.nn` of that name with ``chop=``: its parameters and its output are rounded in forward,
gradients pass straight through. Other than Pychop's, layers with parameters in ``forward`` (norms, recurrent layers)
keep the parameters that an optimizer holds, so that they train. Flax models are quantized by `jchop.nn`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from jchop._files import require_extra

require_extra("jchop.compat.pychop.layers", "torch", ("torch",))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from jchop.compat.pychop._integers import Chopi  # noqa: E402
from jchop.compat.pychop._quantizers import Chop, Chopf  # noqa: E402

ChopSTE, ChopfSTE, ChopiSTE = Chop, Chopf, Chopi

_Model = TypeVar("_Model", bound=nn.Module)
_LAYERS = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Dropout",
    "ELU",
    "Embedding",
    "GELU",
    "GRU",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LSTM",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MultiheadAttention",
    "PReLU",
    "RNN",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
]
_PREFIXES = ("Quantized", "IQuantized")
_FUNCTIONS = ["dynamic_post_quantization", "mixed_post_quantization", "post_quantization", "static_post_quantization"]

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "ChopSTE",
    "ChopfSTE",
    "ChopiSTE",
    *_FUNCTIONS,
    *(prefix + name for prefix in _PREFIXES for name in _LAYERS),
]


class _Rounding(nn.Module):
    """What is put before a layer of torch: parameters and output rounded by ``chop``."""

    def __init__(self, *args: Any, chop: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chop = chop

    def forward(self, *args: Any, **options: Any) -> Any:
        """The layer's own.

        Args:
            args: those of the layer.
            options: those of the layer.
        """
        if self.chop is None:
            return super().forward(*args, **options)
        with _rounded_parameters(self, self.chop):
            return _rounded_output(super().forward(*args, **options), self.chop)


@contextmanager
def _rounded_parameters(layer: nn.Module, chop: Any) -> Iterator[None]:
    """Lets the modules of a layer see their parameters rounded; the parameters stay what they are."""
    held = [(module, dict(module._parameters)) for module in layer.modules()]
    try:
        for module, parameters in held:
            for name, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[name] = chop(parameter)
            _relist(module)
        yield
    finally:
        for module, parameters in held:
            module._parameters.update(parameters)
            _relist(module)


def _relist(module: nn.Module) -> None:
    """Recurrent layers list their parameters a second time."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]  # type: ignore[assignment]


def _rounded_output(output: Any, chop: Any) -> Any:
    """An output rounded; of several the first."""
    if isinstance(output, tuple):
        return _rounded_output(output[0], chop), *output[1:]
    return chop(output)


def __getattr__(name: str) -> Any:
    for prefix in _PREFIXES:
        if name.startswith(prefix) and name.removeprefix(prefix) in _LAYERS:
            return _layer(name, name.removeprefix(prefix))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _layer(name: str, of: str) -> type[nn.Module]:
    text = f"`torch.nn.{of}` with ``chop=``, a quantizer of its parameters and its output; None (default) for none."
    return type(name, (_Rounding, getattr(nn, of)), {"__doc__": text, "__module__": __name__})


# -- quantization after training ---------------------------------------------------------------------------------------


def post_quantization(model: _Model, chop: Any, eval_mode: bool = True, verbose: bool = False) -> _Model:
    """A copy of a model with its weights and biases rounded.

    Args:
        model: a module of torch.
        chop: a quantizer.
        eval_mode: whether the copy is put into evaluation mode.
        verbose: whether to print the names of what is rounded.

    Example:
        >>> import torch
        >>> from jchop.compat.pychop import Chop
        >>> from jchop.compat.pychop.layers import post_quantization
        >>> layer = torch.nn.Linear(2, 2)
        >>> rounded = post_quantization(layer, Chop(4, 3))
        >>> bool((rounded.weight == Chop(4, 3)(layer.weight)).all())
        True
    """
    result = copy.deepcopy(model)
    if eval_mode:
        result.eval()
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if "weight" in name or "bias" in name:
                parameter.copy_(chop(parameter))
                if verbose:
                    print(f"rounded {name}, {tuple(parameter.shape)}")
    return result


def dynamic_post_quantization(model: _Model, chop: Any, eval_mode: bool = True, verbose: bool = False) -> _Model:
    """As `post_quantization`, and the outputs of layers are rounded in every forward pass.

    Args:
        model: a module of torch.
        chop: a quantizer, of weights and outputs.
        eval_mode: as in `post_quantization`.
        verbose: as in `post_quantization`.
    """
    return mixed_post_quantization(model, chop, chop, eval_mode=eval_mode, verbose=verbose)


def static_post_quantization(
    model: _Model, chop: Any, calibration_data: Iterable[Any], eval_mode: bool = True, verbose: bool = False
) -> _Model:
    """As `dynamic_post_quantization`, with outputs clamped first to the range that they have on data.

    Args:
        model: a module of torch.
        chop: a quantizer, of weights and outputs.
        calibration_data: inputs, or tuples that begin with one.
        eval_mode: as in `post_quantization`.
        verbose: as in `post_quantization`.
    """
    return mixed_post_quantization(model, chop, chop, calibration_data, False, eval_mode, verbose)


def mixed_post_quantization(
    model: _Model,
    weight_chop: Any,
    activation_chop: Any,
    calibration_data: Iterable[Any] | None = None,
    dynamic: bool = True,
    eval_mode: bool = True,
    verbose: bool = False,
) -> _Model:
    """A copy of a model with weights and biases rounded by one quantizer, and the outputs of layers by another.

    Args:
        model: a module of torch.
        weight_chop: a quantizer, or None.
        activation_chop: a quantizer, or None.
        calibration_data: inputs, or tuples that begin with one; needed without `dynamic`.
        dynamic: whether outputs are rounded as they are; else they are clamped first to the range that they have on
            `calibration_data`.
        eval_mode: as in `post_quantization`.
        verbose: as in `post_quantization`.

    Raises:
        ValueError: where outputs are to be clamped and there is no data.
    """
    keep = _identity if weight_chop is None else weight_chop
    result = post_quantization(model, keep, eval_mode, verbose and weight_chop is not None)
    if activation_chop is None:
        return result
    ranges: dict[nn.Module, list[float]] = {}
    if not dynamic:
        if calibration_data is None:
            raise ValueError("calibration_data=None, but dynamic=False clamps outputs to their range on it")
        ranges = _observed(result, calibration_data)
    for layer in _leaves(result):
        if dynamic or layer in ranges:
            layer.register_forward_hook(_hook(activation_chop, ranges.get(layer)))
    return result


def _identity(x: Any) -> Any:
    return x


def _leaves(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not list(module.children())]


def _hook(chop: Any, ends: list[float] | None) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        return _rounded_output(output if ends is None else output.clamp(*ends), chop)

    return hook


def _observed(model: nn.Module, data: Iterable[Any]) -> dict[nn.Module, list[float]]:
    """The least and the largest output of each layer that gives a tensor."""
    ranges: dict[nn.Module, list[float]] = {}

    def see(module: nn.Module, args: Any, output: Any) -> None:
        del args
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel():
            low, high = ranges.get(module, [float("inf"), float("-inf")])
            ranges[module] = [min(low, output.min().item()), max(high, output.max().item())]

    handles = [layer.register_forward_hook(see) for layer in _leaves(model)]
    try:
        with torch.no_grad():
            for batch in data:
                model(batch[0] if isinstance(batch, tuple | list) else batch)
    finally:
        for handle in handles:
            handle.remove()
    return ranges
