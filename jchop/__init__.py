"""Low-precision arithmetic in JAX: what happens to a computation in *this* number format?

Which values (format), which neighbour (rounding, overflow): each question is answered by a frozen value, and
`round_to_format` applies the answer, exactly.
"""

from jchop import formats, math
from jchop._round import random_bits, round_to_format
from jchop.accumulation import MatmulSpec, Order
from jchop.formats import (
    CodebookFormat,
    FixedFormat,
    FloatFormat,
    IntegerFormat,
    bfloat16,
    binary16,
    binary32,
    binary64,
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
    p3109,
    tf32,
)
from jchop.rounding import Overflow, Rounding
from jchop.spec import Gradient, Spec, parse

__version__ = "0.1.0"

__all__ = [
    "CodebookFormat",
    "FixedFormat",
    "FloatFormat",
    "Gradient",
    "IntegerFormat",
    "MatmulSpec",
    "Order",
    "Overflow",
    "Rounding",
    "Spec",
    "bfloat16",
    "binary16",
    "binary32",
    "binary64",
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
    "math",
    "p3109",
    "parse",
    "random_bits",
    "round_to_format",
    "tf32",
]
