"""PyTorch in low precision: rounding, storage, products, modules and optimizers, without copies.

Needs PyTorch (`pip install ".[torch]"`), which no other part of jchop imports, except `jchop.compat`.
"""

from jchop._common.files import require_extra

require_extra("jchop.torch", "torch", ("torch",))

from jchop.torch._functions import Quantizer, matmul, round_to_format, round_to_format_  # noqa: E402
from jchop.torch._operators import as_jax, as_tensor  # noqa: E402
from jchop.torch._optim import OptimLP  # noqa: E402
from jchop.torch._packed import PackedTensor, dequantize  # noqa: E402
from jchop.torch._quantize import ModuleReport, ParameterRow, quantize, report  # noqa: E402

__all__ = [
    "ModuleReport",
    "OptimLP",
    "PackedTensor",
    "ParameterRow",
    "Quantizer",
    "as_jax",
    "as_tensor",
    "dequantize",
    "matmul",
    "quantize",
    "report",
    "round_to_format",
    "round_to_format_",
]
