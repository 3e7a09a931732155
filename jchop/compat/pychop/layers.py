"""Pychop's layers for torch, and its post-training quantization: ``from jchop.compat.pychop.layers import *``.

``Quantized*`` and ``IQuantized*`` are the layers of `torch.nn` of these names with ``chop=``. They round their
parameters and their output in the forward pass, and gradients pass straight through. Activations, softmax and dropout
also round their input. The paper's classes take bits instead, and round their parameters and their input:

* ``QuantizedLinear(10, 5, exp_bits=5, sig_bits=10, rmode=1)``: floating point. Both numbers may follow the sizes, as in
  ``QuantizedLinear(10, 5, 5, 10)``; in other layers this needs ``rmode=``, because otherwise they are arguments of
  torch.
* ``FPQuantizedLinear(10, 5, ibits=8, fbits=8, rmode=1)``: fixed point; ``int_bits`` and ``frac_bits`` are the same.
* ``IntQuantizedLinear(10, 5, num_bits=8)``: integers under a symmetric scale; the output is rounded too.

The paper's recurrent layers, and floating-point attention, have the batch first. ``*Attention``, ``*AvgPool`` and
``*Layer`` are MultiheadAttention, AvgPool2d, and a layer that rounds its input.

Unlike Pychop's, layers with parameters in ``forward`` (norms, recurrent layers, PReLU) keep the parameters of the
optimizer, so that they train, and convolutions follow ``padding_mode``. The computation inside recurrent and attention
layers is torch's, without rounding. The initial parameters are torch's. For Flax models use `jchop.nn`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from jchop.compat._arrays import round_first
from jchop.compat._torch import nn, torch
from jchop.compat.pychop._quantizers import QUANTIZER_WORDS, Chop, Chopf, Chopi, PychopQuantizer, class_lookup
from jchop.compat.pychop.ptq import (
    dynamic_post_quantization,
    mixed_post_quantization,
    post_quantization,
    static_post_quantization,
)

ChopSTE, ChopfSTE, ChopiSTE = Chop, Chopf, Chopi

_RECURRENT = ("RNN", "LSTM", "GRU")
#: Layers of one, two and three axes.
_AXES_LAYERS = ("AdaptiveAvgPool", "AvgPool", "BatchNorm", "Conv", "ConvTranspose", "InstanceNorm", "MaxPool")
_ACTIVATIONS = ("Dropout", "ELU", "GELU", "LeakyReLU", "PReLU", "ReLU", "SiLU", "Sigmoid", "Softmax", "Tanh")
_OTHER_LAYERS = ("Embedding", "GroupNorm", "LayerNorm", "Linear", "MultiheadAttention")
_TORCH_LAYERS = [f"{name}{axes}d" for name in _AXES_LAYERS for axes in (1, 2, 3)]
#: The name in torch of each layer of Pychop.
_TORCH_NAMES = {name: name for name in sorted([*_TORCH_LAYERS, *_ACTIVATIONS, *_OTHER_LAYERS, *_RECURRENT])} | {
    "Attention": "MultiheadAttention",
    "AvgPool": "AvgPool2d",
    "Flatten": "Flatten",
    "Layer": "Identity",
}
#: The number of arguments before exp_bits and sig_bits in the paper's layers.
_SIZE_ARGUMENTS = (
    {"Identity": 0, "LayerNorm": 1}
    | dict.fromkeys(("Linear", "MultiheadAttention", *_RECURRENT), 2)
    | {f"{name}{axes}d": size for name, size in (("Conv", 3), ("BatchNorm", 1)) for axes in (1, 2, 3)}
)
#: Layers that also round their input under ``chop=``.
_INPUT_ROUNDERS = (*_ACTIVATIONS, "Identity")
#: The inputs of a layer by name; its first arguments are the same.
_INPUT_NAMES = {"MultiheadAttention": ("query", "key", "value")}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "ChopSTE",
    "ChopfSTE",
    "ChopiSTE",
    "dynamic_post_quantization",
    "mixed_post_quantization",
    "post_quantization",
    "static_post_quantization",
    *(prefix + name for prefix in QUANTIZER_WORDS for name in _TORCH_NAMES),
    # Scripts also import these from Pychop's layers.
    "nn",
    "torch",
]


class _RoundingLayer(nn.Module):
    """A mixin for layers of torch: rounds parameters, and inputs or output, by ``chop``."""

    prefix: ClassVar[str]
    of: ClassVar[str]

    def __init__(self, *args: Any, chop: Any = None, **options: Any) -> None:
        if chop is None and args and isinstance(args[-1], PychopQuantizer | Chopi):  # the last argument in Pychop
            args, chop = args[:-1], args[-1]
        args = _bits_to_options(self.of, args, options) if self.prefix == "Quantized" else args
        quantizer = QUANTIZER_WORDS[self.prefix].quantizer(chop, options)
        is_paper_layer = quantizer is not chop
        if is_paper_layer and (self.of in _RECURRENT or (self.of, self.prefix) == ("MultiheadAttention", "Quantized")):
            options.setdefault("batch_first", True)
        if self.of == "Softmax" and not args:
            options.setdefault("dim", -1)  # as in Pychop; torch has no default
        super().__init__(*args, **options)
        self.chop = quantizer
        self.rounds_input = is_paper_layer or self.of in _INPUT_ROUNDERS
        self.rounds_output = self.of != "Identity" and (not is_paper_layer or self.prefix == "IntQuantized")

    def forward(self, *args: Any, **options: Any) -> Any:
        """The layer's forward pass, with rounding.

        Args:
            args: arguments of the layer.
            options: keyword arguments of the layer.
        """
        if self.chop is None:
            return super().forward(*args, **options)
        if self.rounds_input:
            names = _INPUT_NAMES.get(self.of, ("input",))
            args = (*(_round_floats(arg, self.chop) for arg in args[: len(names)]), *args[len(names) :])
            options |= {name: _round_floats(options[name], self.chop) for name in names if name in options}
        with _round_parameters_within(self, self.chop):
            output = super().forward(*args, **options)
        return round_first(self.chop, output) if self.rounds_output else output


def _bits_to_options(torch_name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of torch's layer; ``exp_bits, sig_bits[, rmode]`` after its sizes move to `options`."""
    size_count = _SIZE_ARGUMENTS.get(torch_name)
    if size_count is None or "exp_bits" in options or len(args) < size_count + 2:
        return args
    option_count = 2
    if torch_name in ("Identity", "Linear"):  # torch has fewer arguments here, or other types
        option_count = 3
    elif "rmode" not in options:
        return args
    options |= dict(zip(("exp_bits", "sig_bits", "rmode"), args[size_count : size_count + option_count], strict=False))
    return args[:size_count] + args[size_count + option_count :]


def _round_floats(x: Any, chop: Any) -> Any:
    """An input rounded, if it is of floating point."""
    return chop(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


@contextmanager
def _round_parameters_within(layer: nn.Module, chop: Any) -> Iterator[None]:
    """A context in which the modules of a layer use rounded parameters; the parameters themselves do not change."""
    originals = [(module, dict(module._parameters)) for module in layer.modules()]
    try:
        for module, parameters in originals:
            for name, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[name] = chop(parameter)
            _update_flat_weights(module)
        yield
    finally:
        for module, parameters in originals:
            module._parameters.update(parameters)
            _update_flat_weights(module)


def _update_flat_weights(module: nn.Module) -> None:
    """Updates the second list of parameters of recurrent layers."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]  # type: ignore[assignment]


_LAYER_TEXT = "`torch.nn.{{}}` with {}: a quantizer, or its arguments; without one, nothing is rounded."
_LAYER_TEXTS = {
    prefix: _LAYER_TEXT.format(", ".join(f"``{name}=``" for name in ("chop", *words.names)))
    for prefix, words in QUANTIZER_WORDS.items()
}
_class_of_name = class_lookup(_RoundingLayer, nn, _TORCH_NAMES, _LAYER_TEXTS)


def __getattr__(name: str) -> Any:  # a function, for type checkers
    return _class_of_name(name)
