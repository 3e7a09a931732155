"""Low-precision arithmetic in JAX: how does *this* number format change a computation?

Which values (format), which neighbour (rounding, overflow): each question is answered by a frozen value, and
`round_to_format` applies the answer, exactly.
"""

import typing as _typing

from jchop import formats
from jchop._common.on_demand import on_demand as _on_demand
from jchop._round.flip import flip_bits
from jchop._round.round_to_format import random_bits, round_to_format
from jchop._spec.accumulation import TENSOR_CORES, MatmulSpec, Order, TensorCore, tensor_core
from jchop._spec.spec import Gradient, Spec, finfo
from jchop._storage import QArray, dequantize, fit_scale, from_qwix, load, quantize, save, to_qwix
from jchop.formats.rounding import Overflow, Rounding

__version__ = "0.1.0"

if _typing.TYPE_CHECKING:
    from jchop import math
    from jchop._checkpoints.checkpoint import load_checkpoint
    from jchop._checkpoints.writer import encode_checkpoint, save_checkpoint
    from jchop._emulate.emulate import EmulatedFunction, emulate
    from jchop._insight.compare import Comparison, compare
    from jchop._insight.probe import Probe, probe
    from jchop._insight.reports.blame import Blame
    from jchop._insight.reports.digits import SignificantDigits, significant_digits
    from jchop._insight.reports.gains import WhatIf
    from jchop._insight.tune import Tuning, tune
    from jchop._kernels.remat import save_codes
    from jchop._quantized.products.operand_layout import Hadamard
    from jchop._quantized.products.qarray_products import dot, einsum, ragged_dot
    from jchop._quantized.products.rule import Rule
    from jchop._quantized.products.scale_from import LSQ, DelayedScaling, MovingAverage
    from jchop._quantized.program.scale_slots import Scales
    from jchop._quantized.quantize_fn import quantize_fn
    from jchop._serving.attention import dot_product_attention
    from jchop._serving.kv_cache import KVCache
    from jchop._storage._chunks import round_file

__getattr__, __dir__ = _on_demand(
    __name__,
    ("compat", "distributed", "math", "matlab", "nn", "optim", "plot", "ptq", "sparsity", "study", "torch"),
    {
        "jchop._checkpoints.checkpoint": ("load_checkpoint",),
        "jchop._checkpoints.writer": ("encode_checkpoint", "save_checkpoint"),
        "jchop._serving.attention": ("dot_product_attention",),
        "jchop._serving.kv_cache": ("KVCache",),
        "jchop._insight.compare": ("Comparison", "compare"),
        "jchop._insight.probe": ("Probe", "probe"),
        "jchop._insight.reports.blame": ("Blame",),
        "jchop._insight.reports.gains": ("WhatIf",),
        "jchop._insight.reports.digits": ("SignificantDigits", "significant_digits"),
        "jchop._kernels.remat": ("save_codes",),
        "jchop._emulate.emulate": ("EmulatedFunction", "emulate"),
        "jchop._quantized.products.qarray_products": ("dot", "einsum", "ragged_dot"),
        "jchop._quantized.quantize_fn": ("quantize_fn",),
        "jchop._quantized.products.operand_layout": ("Hadamard",),
        "jchop._quantized.products.rule": ("Rule",),
        "jchop._quantized.products.scale_from": ("LSQ", "DelayedScaling", "MovingAverage"),
        "jchop._quantized.program.scale_slots": ("Scales",),
        "jchop._storage._chunks": ("round_file",),
        "jchop._insight.tune": ("Tuning", "tune"),
    },
    {name: f"jchop.formats.{formats.ALIASES[name]}, or its text {name!r}" for name in formats.ALIASES}
    | {name: f"jchop.formats.{name}" for name in formats.__all__}
    | {
        "round": "jchop.round_to_format",
        "list_formats": "jchop.formats.CATALOGUE",
        "info": "jchop.finfo",
        "Format": "jchop.formats.FloatFormat(exp_bits, frac_bits)",
        "parse": "jchop.Spec(text)",
        "blame": "jchop.emulate(fun, spec).blame(*args)",
        "report": "jchop.emulate(fun, spec).report(*args)",
        "matmul": "jchop.math.matmul(x, y, spec)",
        "save_safetensors": "jchop.save(path, tree)",
        "load_safetensors": "jchop.load(path) or jchop.load(path, like=tree)",
        "dequantize_params": "jchop.dequantize(params)",
        "storage": "its names in jchop: jchop.quantize, jchop.save, jchop.save_checkpoint ...",
    },
)

__all__ = [
    "LSQ",
    "TENSOR_CORES",
    "Blame",
    "Comparison",
    "DelayedScaling",
    "EmulatedFunction",
    "Gradient",
    "Hadamard",
    "KVCache",
    "MatmulSpec",
    "MovingAverage",
    "Order",
    "Overflow",
    "Probe",
    "QArray",
    "Rounding",
    "Rule",
    "Scales",
    "SignificantDigits",
    "Spec",
    "TensorCore",
    "Tuning",
    "WhatIf",
    "compare",
    "dequantize",
    "dot",
    "dot_product_attention",
    "einsum",
    "emulate",
    "encode_checkpoint",
    "finfo",
    "fit_scale",
    "flip_bits",
    "formats",
    "from_qwix",
    "load",
    "load_checkpoint",
    "math",
    "probe",
    "quantize",
    "quantize_fn",
    "ragged_dot",
    "random_bits",
    "round_file",
    "round_to_format",
    "save",
    "save_checkpoint",
    "save_codes",
    "significant_digits",
    "tensor_core",
    "to_qwix",
    "tune",
]
