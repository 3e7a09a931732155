"""PyTorch in low precision: rounding, storage, products, modules and optimizers, without copies.

Needs PyTorch (`pip install ".[torch]"`), which no other part of jchop imports, except `jchop.compat`.
"""

from jchop._common.files import require_extra
from jchop._common.on_demand import on_demand

require_extra("jchop.torch", "torch", ("torch",))

from jchop.torch._functions import Quantizer, matmul, round_to_format  # noqa: E402
from jchop.torch._operators import as_jax, as_tensor  # noqa: E402
from jchop.torch._optim import OptimLP  # noqa: E402
from jchop.torch._packed import PackedTensor, dequantize  # noqa: E402
from jchop.torch._quantize import ModuleReport, quantize, report  # noqa: E402

__all__ = [
    "ModuleReport",
    "OptimLP",
    "PackedTensor",
    "Quantizer",
    "as_jax",
    "as_tensor",
    "dequantize",
    "matmul",
    "quantize",
    "report",
    "round_to_format",
]

__getattr__, __dir__ = on_demand(
    "jchop.torch",
    elsewhere={
        "round_to_format_": "round_to_format(tensor, spec, inplace=True)",
        "quantize_": "quantize(module, rules), which returns a copy",
        "float_quantize": "round_to_format(tensor, spec)",
    },
)
