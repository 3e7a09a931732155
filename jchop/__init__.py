"""Low-precision arithmetic in JAX: what happens to a computation in *this* number format?

Which values (format), which neighbour (rounding, overflow): each question is answered by a frozen value, and
`round_to_format` applies the answer, exactly.
"""

from typing import TYPE_CHECKING

from jchop import formats, storage
from jchop._finfo import finfo
from jchop._on_demand import on_demand
from jchop._round.flip import flip_bits
from jchop._round.round_to_format import random_bits, round_to_format
from jchop.accumulation import MatmulSpec, Order
from jchop.formats import (
    CodebookFormat,
    ElementFormat,
    FixedFormat,
    FloatFormat,
    HiFloat8Format,
    IntegerFormat,
    LogTakumFormat,
    PositFormat,
    ScaledFormat,
    TakumFormat,
    bfloat16,
    bfp,
    binary16,
    binary32,
    binary64,
    dynamic4,
    dynamic8,
    float4_e2m1fn,
    float6_e2m3fn,
    float6_e3m2fn,
    float8_e3m4,
    float8_e4m3,
    float8_e4m3b11fnuz,
    float8_e4m3fn,
    float8_e4m3fnuz,
    float8_e5m2,
    float8_e5m2fnuz,
    float8_e8m0fnu,
    hif4,
    int2,
    int3,
    int4,
    int8,
    mxfp4,
    mxfp6_e2m3,
    mxfp6_e3m2,
    mxfp8_e4m3,
    mxfp8_e5m2,
    mxint8,
    nf4,
    nvfp4,
    nvfp4_e5m3,
    p3109,
    tf32,
    udynamic8,
    udynamic8nz,
    uint4,
    uint8,
)
from jchop.rounding import Overflow, Rounding
from jchop.spec import Gradient, Spec, parse
from jchop.storage import (
    QArray,
    dequantize,
    fit_scale,
    from_qwix,
    load_safetensors,
    quantize,
    save_safetensors,
    to_qwix,
)
from jchop.tensor_cores import TENSOR_CORES, TensorCore, tensor_core

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jchop import math
    from jchop._attention.attention import dot_product_attention
    from jchop._attention.kv_cache import KVCache
    from jchop._compare import Comparison, compare
    from jchop._emulate import Blame, SignificantDigits, blame, emulate, significant_digits
    from jchop._probe import Probe, probe
    from jchop._products.dots import dot, einsum, ragged_dot
    from jchop._products.quantize_fn import quantize_fn
    from jchop._products.rotation import Hadamard
    from jchop._products.rule import Rule
    from jchop._products.scale_from import LSQ, DelayedScaling, MovingAverage
    from jchop._products.scales.sites import Scales
    from jchop._round_file import round_file
    from jchop._tune import Tuning, tune

__getattr__, __dir__ = on_demand(
    __name__,
    ("compat", "distributed", "math", "matlab", "nn", "optim", "plot", "ptq", "sparsity", "study", "torch"),
    {
        "jchop._attention.attention": ("dot_product_attention",),
        "jchop._attention.kv_cache": ("KVCache",),
        "jchop._compare": ("Comparison", "compare"),
        "jchop._emulate": ("Blame", "SignificantDigits", "blame", "emulate", "significant_digits"),
        "jchop._probe": ("Probe", "probe"),
        "jchop._products.dots": ("dot", "einsum", "ragged_dot"),
        "jchop._products.quantize_fn": ("quantize_fn",),
        "jchop._products.rotation": ("Hadamard",),
        "jchop._products.rule": ("Rule",),
        "jchop._products.scale_from": ("LSQ", "DelayedScaling", "MovingAverage"),
        "jchop._products.scales.sites": ("Scales",),
        "jchop._round_file": ("round_file",),
        "jchop._tune": ("Tuning", "tune"),
    },
)

__all__ = [
    "LSQ",
    "TENSOR_CORES",
    "Blame",
    "CodebookFormat",
    "Comparison",
    "DelayedScaling",
    "ElementFormat",
    "FixedFormat",
    "FloatFormat",
    "Gradient",
    "Hadamard",
    "HiFloat8Format",
    "IntegerFormat",
    "KVCache",
    "LogTakumFormat",
    "MatmulSpec",
    "MovingAverage",
    "Order",
    "Overflow",
    "PositFormat",
    "Probe",
    "QArray",
    "Rounding",
    "Rule",
    "ScaledFormat",
    "Scales",
    "SignificantDigits",
    "Spec",
    "TakumFormat",
    "TensorCore",
    "Tuning",
    "bfloat16",
    "bfp",
    "binary16",
    "binary32",
    "binary64",
    "blame",
    "compare",
    "dequantize",
    "dot",
    "dot_product_attention",
    "dynamic4",
    "dynamic8",
    "einsum",
    "emulate",
    "finfo",
    "fit_scale",
    "flip_bits",
    "float4_e2m1fn",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "formats",
    "from_qwix",
    "hif4",
    "int2",
    "int3",
    "int4",
    "int8",
    "load_safetensors",
    "math",
    "mxfp4",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "mxint8",
    "nf4",
    "nvfp4",
    "nvfp4_e5m3",
    "p3109",
    "parse",
    "probe",
    "quantize",
    "quantize_fn",
    "ragged_dot",
    "random_bits",
    "round_file",
    "round_to_format",
    "save_safetensors",
    "significant_digits",
    "storage",
    "tensor_core",
    "tf32",
    "to_qwix",
    "tune",
    "udynamic8",
    "udynamic8nz",
    "uint4",
    "uint8",
]
