"""Named formats, each with the document that defines it.

A name is written here alone, but for other names of it: `jchop` and `jchop.formats` take it from this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jchop._common.checks import check_bool, check_int
from jchop.formats._binary import FloatFormat

#: IEEE 754-2019 binary16.
binary16 = FloatFormat(5, 10).named("binary16")
#: IEEE 754-2019 binary32.
binary32 = FloatFormat(8, 23).named("binary32")
#: IEEE 754-2019 binary64.
binary64 = FloatFormat(11, 52).named("binary64")
#: bfloat16: the upper half of binary32 (Intel, "BFLOAT16 - Hardware Numerics Definition", 2018).
bfloat16 = FloatFormat(8, 7).named("bfloat16")
#: TF32, the operand format of NVIDIA tensor cores (NVIDIA A100 architecture white paper, 2020).
tf32 = FloatFormat(8, 10).named("tf32")
#: FP8 E5M2 (OCP 8-bit Floating Point Specification 1.0; Micikevicius et al., arXiv 2209.05433).
float8_e5m2 = FloatFormat(5, 2).named("float8_e5m2")
#: IEEE-like E4M3 with infinities, largest value 240 (ml_dtypes).
float8_e4m3 = FloatFormat(4, 3).named("float8_e4m3")
#: FP8 E4M3 without infinities, largest value 448 (OCP 8-bit Floating Point Specification 1.0).
float8_e4m3fn = FloatFormat(4, 3, infinities=False, nans="top").named("float8_e4m3fn")
#: E5M2 with bias 16, no infinities and no -0 (Noune et al., arXiv 2206.02915).
float8_e5m2fnuz = FloatFormat(5, 2, bias=16, infinities=False, nans="negative_zero").named("float8_e5m2fnuz")
#: E4M3 with bias 8, no infinities and no -0 (Noune et al., arXiv 2206.02915).
float8_e4m3fnuz = FloatFormat(4, 3, bias=8, infinities=False, nans="negative_zero").named("float8_e4m3fnuz")
#: E4M3 with bias 11, no infinities and no -0 (ml_dtypes).
float8_e4m3b11fnuz = FloatFormat(4, 3, bias=11, infinities=False, nans="negative_zero").named("float8_e4m3b11fnuz")
#: IEEE-like E3M4 (ml_dtypes).
float8_e3m4 = FloatFormat(3, 4).named("float8_e3m4")
#: Powers of two 2^-127 to 2^127, unsigned, no zero: the scale of OCP Microscaling Formats (MX) 1.0.
float8_e8m0fnu = FloatFormat(8, 0, infinities=False, nans="top", signed=False, zero=False).named("float8_e8m0fnu")
#: FP6 E3M2, finite values only (OCP MX 1.0).
float6_e3m2fn = FloatFormat(3, 2, infinities=False, nans="none").named("float6_e3m2fn")
#: FP6 E2M3, finite values only (OCP MX 1.0).
float6_e2m3fn = FloatFormat(2, 3, infinities=False, nans="none").named("float6_e2m3fn")
#: FP4 E2M1, finite values only (OCP MX 1.0).
float4_e2m1fn = FloatFormat(2, 1, infinities=False, nans="none").named("float4_e2m1fn")

#: The named formats by their one canonical name.
CATALOGUE: Mapping[str, FloatFormat] = MappingProxyType(
    {name: value for name, value in list(globals().items()) if isinstance(value, FloatFormat)}
)

#: Other names for them: IEEE and NumPy words, MATLAB chop's letters.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "float16": "binary16", "half": "binary16", "fp16": "binary16", "h": "binary16",
        "float32": "binary32", "single": "binary32", "fp32": "binary32", "s": "binary32",
        "float64": "binary64", "double": "binary64", "fp64": "binary64", "d": "binary64",
        "bf16": "bfloat16", "b": "bfloat16", "t": "tf32",
        "q52": "float8_e5m2", "q43": "float8_e4m3", "fp8_e5m2": "float8_e5m2",
        "fp4": "float4_e2m1fn", "float4": "float4_e2m1fn",
    }
    | {name.split("_")[1]: name for name in CATALOGUE if "_" in name}
)  # fmt: skip


def p3109(bits: int, precision: int, signed: bool = True, extended: bool = True) -> FloatFormat:
    """The format ``Binary{K}p{P}{s,u}{e,f}`` of the IEEE P3109 draft (version 4.0).

    One NaN, no -0; infinities if extended; bias 2^(K-P-1) signed, 2^(K-P) unsigned. `Overflow.IEEE`, `SATURATE` and
    `PROPAGATE` are SatNone, SatFinite and SatPropagate: a format without infinities overflows to its largest value.

    Args:
        bits: width K of a code, 2 to 16.
        precision: significand bits P, the leading one included: 1 to K - 1, or to K if unsigned.
        signed: with a sign bit.
        extended: with infinities.

    Raises:
        TypeError, ValueError: for a field out of range, or a format left without a positive finite value.

    Example:
        >>> import jchop as jc
        >>> fmt = jc.formats.p3109(8, 3)
        >>> str(fmt), fmt.max, fmt.bias
        ('binary8p3se', 49152.0, 16)
    """
    check_int("bits", bits, 2, 16)
    check_bool("signed", signed)
    check_bool("extended", extended)
    check_int("precision", precision, 1, bits - signed)
    fmt = FloatFormat(
        bits - precision + (not signed),
        precision - 1,
        bias=1 << (bits - precision - signed),
        infinities=extended,
        nans="negative_zero" if signed else "top",
        signed=signed,
        p3109=True,
    )
    return fmt.named(f"binary{bits}p{precision}{'s' if signed else 'u'}{'e' if extended else 'f'}")


__all__ = [*CATALOGUE, "p3109"]  # pyright: ignore[reportUnsupportedDunderAll]
