"""Which values exist: number formats as frozen, hashable values that know nothing of JAX."""

from jchop.formats._base import ElementFormat
from jchop.formats._catalogue import (
    ALIASES,
    CATALOGUE,
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
from jchop.formats._codebook import CodebookFormat
from jchop.formats._fixed import FixedFormat, IntegerFormat, UniformFormat
from jchop.formats._float import FloatFormat
from jchop.formats._text import parse_format

__all__ = [
    "ALIASES",
    "CATALOGUE",
    "CodebookFormat",
    "ElementFormat",
    "FixedFormat",
    "FloatFormat",
    "IntegerFormat",
    "UniformFormat",
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
    "p3109",
    "parse_format",
    "tf32",
]
