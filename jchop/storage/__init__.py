"""Arrays stored as packed codes and scales, in memory and in files."""

from typing import TYPE_CHECKING

from jchop._common.on_demand import on_demand
from jchop.storage._array import QArray, shardings
from jchop.storage._quantize import dequantize, dequantize_params, fit_half_quadratic, fit_scale, quantize
from jchop.storage._qwix import from_qwix, to_qwix
from jchop.storage._save import load_safetensors, save_safetensors

if TYPE_CHECKING:
    from jchop._checkpoints.checkpoint import load_checkpoint
    from jchop._checkpoints.writer import save_checkpoint

__getattr__, __dir__ = on_demand(
    __name__,
    (),
    {"jchop._checkpoints.checkpoint": ("load_checkpoint",), "jchop._checkpoints.writer": ("save_checkpoint",)},
)

__all__ = [
    "QArray", "dequantize", "dequantize_params", "fit_half_quadratic", "fit_scale", "from_qwix", "load_checkpoint",
    "load_safetensors", "quantize", "save_checkpoint", "save_safetensors", "shardings", "to_qwix",
]  # fmt: skip
