"""Quantized models of Flax: rules that say which tensor is rounded to what."""

from jchop.nn import linen
from jchop.nn._calibrate import calibrate
from jchop.nn._equip import QuantizedParam
from jchop.nn._layers import (
    BatchNorm,
    Conv,
    ConvTranspose,
    Einsum,
    Embed,
    GroupNorm,
    GRUCell,
    InstanceNorm,
    LayerNorm,
    Linear,
    LinearGeneral,
    LoRA,
    LoRALinear,
    LSTMCell,
    MultiHeadAttention,
    OptimizedLSTMCell,
    RMSNorm,
    SimpleCell,
)
from jchop.nn._params import quantize_params
from jchop.nn._recipes import recipe
from jchop.nn._report import LayerRow, ModelReport, report
from jchop.nn._rule import Rule
from jchop.nn._static import ActivationRange
from jchop.nn._surgery import quantize

__all__ = [
    "ActivationRange",
    "BatchNorm",
    "Conv",
    "ConvTranspose",
    "Einsum",
    "Embed",
    "GRUCell",
    "GroupNorm",
    "InstanceNorm",
    "LSTMCell",
    "LayerNorm",
    "LayerRow",
    "Linear",
    "LinearGeneral",
    "LoRA",
    "LoRALinear",
    "ModelReport",
    "MultiHeadAttention",
    "OptimizedLSTMCell",
    "QuantizedParam",
    "RMSNorm",
    "Rule",
    "SimpleCell",
    "calibrate",
    "linen",
    "quantize",
    "quantize_params",
    "recipe",
    "report",
]
