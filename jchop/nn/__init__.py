"""Quantized models of Flax and Equinox: rules assign specs to tensors. Needs Flax (`pip install ".[flax]"`)."""

# ruff: noqa: E402

from typing import TYPE_CHECKING

from jchop._common.files import require_extra

require_extra("jchop.nn", "flax", ("flax",))

from jchop._common.on_demand import on_demand
from jchop._quantized.program.adapters import AdaptedParam
from jchop.nn import linen
from jchop.nn._bias import correct_biases
from jchop.nn._calibrate import calibrate
from jchop.nn._folding import Folded, fold_batch_norms
from jchop.nn._nnx.layers import (
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
from jchop.nn._nnx.lora import Adapted, add_lora, load_lora, merge_lora, save_lora, split_lora
from jchop.nn._nnx.quantize import quantize
from jchop.nn._nnx.variables import QuantizedParam
from jchop.nn._params import quantize_params
from jchop.nn._recipes import keep_wide, recipe
from jchop.nn._report import report
from jchop.nn._save_load import load, save
from jchop.nn._shard import shard
from jchop.nn._shared.lora_rule import LoraRule
from jchop.nn._shared.model_report import LayerRow, ModelReport
from jchop.nn._shared.scale_state import ActivationRange, AmaxHistory, LearnedScale
from jchop.nn._trees.lora import lora_mask

if TYPE_CHECKING:
    from jchop._checkpoints.models import load_checkpoint, save_checkpoint
    from jchop._insight.layers import LayerTuning, Sensitivity, SensitivityRow, TunedLayer, sensitivity, tune
    from jchop.ptq._models import quantize_with_data

__getattr__, __dir__ = on_demand(
    __name__,
    (),
    {
        "jchop._checkpoints.models": ("load_checkpoint", "save_checkpoint"),
        "jchop._insight.layers": ("LayerTuning", "Sensitivity", "SensitivityRow", "TunedLayer", "sensitivity", "tune"),
        "jchop.ptq._models": ("quantize_with_data",),
    },
    {
        name: f"jchop.{name}"
        for name in ("Rule", "LSQ", "DelayedScaling", "MovingAverage", "KVCache", "dot_product_attention")
    },
)

__all__ = [
    "ActivationRange",
    "Adapted",
    "AdaptedParam",
    "AmaxHistory",
    "BatchNorm",
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
    "LayerRow",
    "LayerTuning",
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
    "SensitivityRow",
    "SimpleCell",
    "TunedLayer",
    "add_lora",
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
    "tune",
]
