"""Quantized models of Flax and Equinox: rules assign specs to tensors. Needs Flax (`pip install ".[flax]"`)."""

# ruff: noqa: E402

from typing import TYPE_CHECKING, Any

from jchop._common.files import require_extra

require_extra("jchop.nn", "flax", ("flax",))

from flax import nnx

from jchop._common.on_demand import on_demand
from jchop.nn._arrays import shard
from jchop.nn._fit import calibrate, fold_batch_norms
from jchop.nn._lora import add_lora, load_lora, lora_mask, merge_lora, save_lora, split_lora
from jchop.nn._nnx.layers import QUANTIZED_CLASSES
from jchop.nn._nnx.nodes import QuantizedParam
from jchop.nn._nnx.rounding_modules import ActivationRange, AmaxHistory, LearnedScale
from jchop.nn._quantize import quantize
from jchop.nn._recipes import keep_wide, recipe
from jchop.nn._report import ModelReport, report
from jchop.nn._shared.lora_rule import LoraRule

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
    from jchop._insight.layers import BitAllocation, Sensitivity, allocate_bits, sensitivity

__getattr__, __dir__ = on_demand(
    __name__,
    (),
    {"jchop._insight.layers": ("BitAllocation", "Sensitivity", "allocate_bits", "sensitivity")},
    {
        **{
            name: f"jchop.{name}"
            for name in ("Rule", "LSQ", "DelayedScaling", "MovingAverage", "KVCache", "dot_product_attention")
        },
        "quantize_with_data": "jchop.nn.quantize(model, rules, 'ptq', batches=batches)",
        "linen": "jchop.nn.quantize(module, rules), and jchop.nn.add_lora(variables, rules, fun=...)",
        "correct_biases": "jchop.nn.quantize(model, rules, 'ptq', batches=batches, steps=[jchop.ptq.correct_biases()])",
        "quantize_params": "jchop.quantize(params, rules)",
        "save": "jchop.save(path, model)",
        "load": "jchop.load(path, like=model)",
        "save_checkpoint": "jchop.save_checkpoint(path, model, layout)",
        "load_checkpoint": "jchop.load_checkpoint(path, like=model)",
        "tune": "jchop.nn.allocate_bits(model, menu, batches, loss=loss, bits=4.5)",
    },
)

__all__ = [
    "ActivationRange",
    "AmaxHistory",
    "BatchNorm",
    "BitAllocation",
    "Conv",
    "ConvTranspose",
    "Einsum",
    "Embed",
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
    "fold_batch_norms",
    "keep_wide",
    "load_lora",
    "lora_mask",
    "merge_lora",
    "quantize",
    "recipe",
    "report",
    "save_lora",
    "sensitivity",
    "shard",
    "split_lora",
]
