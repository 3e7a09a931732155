"""Quantized models of Flax and Equinox: rules assign specs to tensors. Needs Flax (`pip install ".[flax]"`)."""

# ruff: noqa: E402

from typing import TYPE_CHECKING, Any

from jchop._common.files import require_extra

require_extra("jchop.nn", "flax", ("flax",))

from flax import nnx

from jchop._common.on_demand import on_demand
from jchop._quantized.program.adapters import AdaptedParam
from jchop.nn import linen
from jchop.nn._arrays import load, quantize_params, save, shard
from jchop.nn._fit import Folded, calibrate, correct_biases, fold_batch_norms
from jchop.nn._nnx.layers import QUANTIZED_CLASSES, quantize
from jchop.nn._nnx.lora import Adapted, add_lora, load_lora, merge_lora, save_lora, split_lora
from jchop.nn._nnx.nodes import QuantizedParam
from jchop.nn._nnx.rounding_modules import ActivationRange, AmaxHistory, LearnedScale
from jchop.nn._recipes import keep_wide, recipe
from jchop.nn._report import ModelReport, report
from jchop.nn._shared.lora_rule import LoraRule
from jchop.nn._trees.lora import lora_mask

#: The quantized layers.
BatchNorm: Any = QUANTIZED_CLASSES[nnx.BatchNorm]
Conv: Any = QUANTIZED_CLASSES[nnx.Conv]
ConvTranspose: Any = QUANTIZED_CLASSES[nnx.ConvTranspose]
Einsum: Any = QUANTIZED_CLASSES[nnx.Einsum]
Embed: Any = QUANTIZED_CLASSES[nnx.Embed]
GRUCell: Any = QUANTIZED_CLASSES[nnx.GRUCell]
GroupNorm: Any = QUANTIZED_CLASSES[nnx.GroupNorm]
InstanceNorm: Any = QUANTIZED_CLASSES[nnx.InstanceNorm]
LSTMCell: Any = QUANTIZED_CLASSES[nnx.LSTMCell]
LayerNorm: Any = QUANTIZED_CLASSES[nnx.LayerNorm]
Linear: Any = QUANTIZED_CLASSES[nnx.Linear]
LinearGeneral: Any = QUANTIZED_CLASSES[nnx.LinearGeneral]
LoRA: Any = QUANTIZED_CLASSES[nnx.LoRA]
LoRALinear: Any = QUANTIZED_CLASSES[nnx.LoRALinear]
MultiHeadAttention: Any = QUANTIZED_CLASSES[nnx.MultiHeadAttention]
OptimizedLSTMCell: Any = QUANTIZED_CLASSES[nnx.OptimizedLSTMCell]
RMSNorm: Any = QUANTIZED_CLASSES[nnx.RMSNorm]
SimpleCell: Any = QUANTIZED_CLASSES[nnx.SimpleCell]

if TYPE_CHECKING:
    from jchop._checkpoints.models import load_checkpoint, save_checkpoint
    from jchop._insight.layers import BitAllocation, Sensitivity, allocate_bits, sensitivity
    from jchop.ptq._models import quantize_with_data

__getattr__, __dir__ = on_demand(
    __name__,
    (),
    {
        "jchop._checkpoints.models": ("load_checkpoint", "save_checkpoint"),
        "jchop._insight.layers": ("BitAllocation", "Sensitivity", "allocate_bits", "sensitivity"),
        "jchop.ptq._models": ("quantize_with_data",),
    },
    {
        name: f"jchop.{name}"
        for name in ("Rule", "LSQ", "DelayedScaling", "MovingAverage", "KVCache", "dot_product_attention")
    }
    | {"tune": "jchop.nn.allocate_bits(model, menu, batches, loss=loss, bits=4.5)"},
)

__all__ = [
    "ActivationRange",
    "Adapted",
    "AdaptedParam",
    "AmaxHistory",
    "BatchNorm",
    "BitAllocation",
    "Conv",
    "ConvTranspose",
    "Einsum",
    "Embed",
    "Folded",
    "GRUCell",
    "GroupNorm",
    "InstanceNorm",
    "LSTMCell",
    "LayerNorm",
    "LearnedScale",
    "Linear",
    "LinearGeneral",
    "LoRA",
    "LoRALinear",
    "LoraRule",
    "ModelReport",
    "MultiHeadAttention",
    "OptimizedLSTMCell",
    "QuantizedParam",
    "RMSNorm",
    "Sensitivity",
    "SimpleCell",
    "add_lora",
    "allocate_bits",
    "calibrate",
    "correct_biases",
    "fold_batch_norms",
    "keep_wide",
    "linen",
    "load",
    "load_checkpoint",
    "load_lora",
    "lora_mask",
    "merge_lora",
    "quantize",
    "quantize_params",
    "quantize_with_data",
    "recipe",
    "report",
    "save",
    "save_checkpoint",
    "save_lora",
    "sensitivity",
    "shard",
    "split_lora",
]
