"""The fields of the named scaled formats, each with the document that defines it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jchop.formats._base import ElementFormat
from jchop.formats._catalogue import (
    float4_e2m1fn,
    float6_e2m3fn,
    float6_e3m2fn,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
)
from jchop.formats._codebook import CodebookFormat
from jchop.formats._codebook_tables import dynamic_levels, nf4_levels
from jchop.formats._fixed import FixedFormat
from jchop.formats._float import FloatFormat


def _mx_fields(element: ElementFormat) -> dict[str, Any]:
    """OCP Microscaling Formats (MX) specification 1.0: 32 elements under a power of two."""
    return {"element": element, "group": 32, "scale": float8_e8m0fnu, "rule": "floor"}


#: The element of scales that double.
_ONE_OR_TWO = CodebookFormat((1.0, 2.0))

#: The fields; those of a scaled format of scales in turn are a mapping.
SCALED_FORMAT_FIELDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mxfp8_e4m3": _mx_fields(float8_e4m3fn),
        "mxfp8_e5m2": _mx_fields(float8_e5m2),
        "mxfp6_e3m2": _mx_fields(float6_e3m2fn),
        "mxfp6_e2m3": _mx_fields(float6_e2m3fn),
        "mxfp4": _mx_fields(float4_e2m1fn),
        # A sign, an integer bit and six fraction bits, without -2.
        "mxint8": _mx_fields(FixedFormat(2, 6, symmetric=True)),
        # e2m1 in groups of 16, e4m3 scales from 2^-6 on, under a binary32 scale of the tensor (NVIDIA, 2025).
        "nvfp4": {
            "element": float4_e2m1fn,
            "group": 16,
            "scale": replace(float8_e4m3fn, subnormals=False),
            "rule": "two_level",
        },
        # Under e5m3 scales without a sign, whose range needs no scale of the tensor (AutoRound, nvfp4_e5m3.md).
        "nvfp4_e5m3": {
            "element": float4_e2m1fn,
            "group": 16,
            "scale": FloatFormat(5, 3, infinities=False, nans="top", signed=False),
            "rule": "absmax",
        },
        # HiF4 (arXiv 2602.11287): e1m2 in groups of 64, whose scale doubles for each 8 and again for each 4 if they are
        # large. The scales are 2^-48 to 1.5 2^15.
        "hif4": {
            "element": FloatFormat(1, 2, bias=1, infinities=False, nans="none"),
            "group": 4,
            "scale": {
                "element": _ONE_OR_TWO,
                "group": 2,
                "scale": {
                    "element": _ONE_OR_TWO,
                    "group": 8,
                    "scale": FloatFormat(6, 2, bias=48, infinities=False, nans="top", signed=False, zero=False),
                },
            },
            "rule": "levels",
        },
        # NormalFloat4 in groups of 64 (Dettmers et al., arXiv 2305.14314).
        "nf4": {"element": nf4_levels(), "group": 64},
        # The dynamic maps of 8-bit optimizers in groups of 256 (Dettmers et al., arXiv 2110.02861); the unsigned ones
        # are for second moments, and that without a zero for those which are divisors.
        "dynamic8": {"element": dynamic_levels(8), "group": 256},
        "dynamic4": {"element": dynamic_levels(4), "group": 256},
        "udynamic8": {"element": dynamic_levels(8, signed=False), "group": 256},
        "udynamic8nz": {"element": dynamic_levels(8, signed=False, zero=False), "group": 256},
    }
)
