"""The named scaled formats, each with the document that defines it.

A name is written here alone: `jchop`, `jchop.formats` and the text grammar take it from this file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jchop.formats import _catalogue
from jchop.formats._base import ElementFormat
from jchop.formats._binary import FixedFormat, FloatFormat, IntegerFormat
from jchop.formats._codebook import CodebookFormat, dynamic_levels, nf4_levels, normal_levels, softsign_levels
from jchop.formats.scaled.scaled import ScaledFormat, add_to_catalogue


def _catalogued(name: str, *fields: Any, **options: Any) -> ScaledFormat:
    return add_to_catalogue(ScaledFormat(*fields, **options).named(name))


def _mx_format(name: str, element: ElementFormat) -> ScaledFormat:
    """OCP Microscaling Formats (MX) specification 1.0: 32 elements under a power of two."""
    return _catalogued(name, element, 32, scale=_catalogue.float8_e8m0fnu, rule="floor")


mxfp8_e4m3 = _mx_format("mxfp8_e4m3", _catalogue.float8_e4m3fn)
mxfp8_e5m2 = _mx_format("mxfp8_e5m2", _catalogue.float8_e5m2)
mxfp6_e3m2 = _mx_format("mxfp6_e3m2", _catalogue.float6_e3m2fn)
mxfp6_e2m3 = _mx_format("mxfp6_e2m3", _catalogue.float6_e2m3fn)
mxfp4 = _mx_format("mxfp4", _catalogue.float4_e2m1fn)
#: A sign, an integer bit and six fraction bits, without -2.
mxint8 = _mx_format("mxint8", FixedFormat(2, 6, symmetric=True))
#: e2m1 in groups of 16, e4m3 scales from 2^-6 on, under a binary32 scale of the tensor (NVIDIA, 2025).
nvfp4 = _catalogued(
    "nvfp4", _catalogue.float4_e2m1fn, 16, scale=replace(_catalogue.float8_e4m3fn, subnormals=False), rule="two_level"
)
#: Under e5m3 scales without a sign, whose range needs no scale of the tensor (AutoRound, nvfp4_e5m3.md).
nvfp4_e5m3 = _catalogued(
    "nvfp4_e5m3", _catalogue.float4_e2m1fn, 16, scale=FloatFormat(5, 3, infinities=False, nans="top", signed=False)
)

_ONE_OR_TWO = CodebookFormat((1.0, 2.0))
_HIF4_SCALE = FloatFormat(6, 2, bias=48, infinities=False, nans="top", signed=False, zero=False)
#: HiF4 (arXiv 2602.11287): e1m2 in groups of 64, whose scale doubles for each 8 and again for each 4 if they are large.
#: The scales are 2^-48 to 1.5 2^15.
hif4 = _catalogued(
    "hif4",
    FloatFormat(1, 2, bias=1, infinities=False, nans="none"),
    4,
    scale=ScaledFormat(_ONE_OR_TWO, 2, scale=ScaledFormat(_ONE_OR_TWO, 8, scale=_HIF4_SCALE)),
    rule="levels",
)
#: Integers under one binary32 scale of the whole tensor, until a call says otherwise. Their texts match a pattern.
int2, int3, int4, int8 = (ScaledFormat(IntegerFormat(bits)) for bits in (2, 3, 4, 8))
uint4, uint8 = (ScaledFormat(IntegerFormat(bits, signed=False)) for bits in (4, 8))

#: NormalFloat4 in groups of 64 (Dettmers et al., arXiv 2305.14314).
nf4 = _catalogued("nf4", nf4_levels(), 64)
#: The levels of Lloyd and Max for normal numbers under their root of the mean square: for rotated numbers, as in the
#: first stage of TurboQuant (arXiv 2504.19874).
normal2, normal3, normal4 = (
    _catalogued(f"normal{bits}", normal_levels(bits), "all", scale="bfloat16", rule="rms") for bits in (2, 3, 4)
)
#: The dynamic maps of 8-bit optimizers in groups of 256 (Dettmers et al., arXiv 2110.02861); the unsigned ones are for
#: second moments, and that without a zero for those which are divisors.
dynamic8 = _catalogued("dynamic8", dynamic_levels(8), 256)
dynamic4 = _catalogued("dynamic4", dynamic_levels(4), 256)
udynamic8 = _catalogued("udynamic8", dynamic_levels(8, signed=False), 256)
udynamic8nz = _catalogued("udynamic8nz", dynamic_levels(8, signed=False, zero=False), 256)
#: Levels of companded moments in groups of 32 (FlashOptim, arXiv 2602.23349): the inverse of 2 x / (1 + |x|) at i / 127
#: for a first moment, in binary32; (i / 256)^2 from 1 to 256, without a zero, for a second one.
softsign8 = _catalogued("softsign8", softsign_levels(), 32)
usquare8nz = _catalogued("usquare8nz", CodebookFormat(tuple((i / 256) ** 2 for i in range(1, 257))), 32)

__all__ = [name for name, value in list(globals().items()) if isinstance(value, ScaledFormat)]  # pyright: ignore[reportUnsupportedDunderAll]
