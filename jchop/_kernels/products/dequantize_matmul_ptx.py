"""PTX of the product of one row with a matrix of codes, in half of the instructions that Triton makes.

An instance takes four bytes of codes ($4), four numbers ($5 to $8) and four sums ($9 to $12), and gives four sums.
"""

from __future__ import annotations

import numpy as np

from jchop.formats import ElementFormat, IntegerFormat
from jchop.formats._catalogue import float4_e2m1fn, float8_e4m3fn

#: Of LLVM: four float32 results, written before all arguments are read, and the arguments.
PTX_CONSTRAINTS = "=&f,=&f,=&f,=&f,r,f,f,f,f,f,f,f,f"

_PTX_BODY = "{{\n.reg .b32 c, d, s;\n.reg .f32 v, m;\n.reg .pred p;\n{lines}\n}}"
_PTX_FMA = "fma.rn.f32 ${0}, v, ${1}, ${2};"


def ptx_of_format(format: ElementFormat) -> tuple[str, ...] | None:
    """The PTX for each code in a byte; None for a format without one.

    An integer u is the last bits of 2^23 + u, or the bits before them of 2^23 + 2^8 u; one multiply-add gives its
    value. The magnitude of a code of e2m1 or e4m3 is the last bits of the exponent, and the first of the fraction, of
    a number that is smaller by a power of two.
    """
    if isinstance(format, IntegerFormat) and format.bits in (4, 8) and not format.narrow:
        make = _ptx_int4 if format.bits == 4 else _ptx_int8
        return tuple(make(part, format.signed) for part in range(8 // format.bits))
    if format == float8_e4m3fn:
        return (_ptx_e4m3(),)
    return tuple(map(_ptx_e2m1, range(2))) if format == float4_e2m1fn else None


def _ptx_instance(before: str, values: list[str]) -> str:
    """Lines before, and those that give each value in v."""
    lines = [before, *(f"{value} {_PTX_FMA.format(i, 5 + i, 9 + i)}" for i, value in enumerate(values))]
    return _PTX_BODY.format(lines="\n".join(filter(None, lines)))


#: The table of `lop3` for (a & b) | c. As two operations they stay two: an instruction has one constant.
_LOP3_AND_OR = 0xEA


def _ptx_int4(part: int, signed: bool) -> str:
    """Codes are left where they are, up to the bits before 2^20; those beyond are moved by 12 bits, all at once."""
    before = f"xor.b32 c, $4, {0x88888888 if signed else 0:#x}; shr.b32 d, c, 12;"
    values = []
    for i in range(4):
        bit = 8 * i + 4 * part
        word, bit = ("c", bit) if bit <= 16 else ("d", bit - 12)
        less = _ptx_float(-(2.0 ** (23 - bit)) - (8 if signed else 0))
        step = f"fma.rn.f32 v, v, {_ptx_float(2.0**-bit)}, {less};" if bit else f"add.f32 v, v, {less};"
        values.append(f"lop3.b32 s, {word}, {0xF << bit:#x}, 0x4B000000, {_LOP3_AND_OR:#x}; mov.b32 v, s; {step}")
    return _ptx_instance(before, values)


def _ptx_int8(part: int, signed: bool) -> str:
    del part
    before = f"xor.b32 c, $4, {0x80808080 if signed else 0:#x};"
    less = _ptx_float(-(2**23) - (128 if signed else 0))
    values = [f"prmt.b32 s, c, 0x4B000000, {0x7440 + i:#x}; mov.b32 v, s; add.f32 v, v, {less};" for i in range(4)]
    return _ptx_instance(before, values)


def _ptx_e2m1(part: int) -> str:
    values = []
    for i in range(4):
        shift = 28 - 8 * i - 4 * part
        # The sign is repeated over the bits to its right, which a mask then clears.
        values.append(
            f"shl.b32 s, $4, {shift}; shr.s32 s, s, 6; and.b32 s, s, 0x81C00000; mov.b32 v, s; "
            f"mul.f32 v, v, {_ptx_float(2.0**126)};"
        )
    return _ptx_instance("", values)


def _ptx_e4m3() -> str:
    values = [
        f"prmt.b32 s, $4, 0, {(i << 12) | 0x444:#x}; shr.s32 s, s, 4; and.b32 s, s, 0x87F00000; mov.b32 v, s; "
        f"mul.f32 v, v, {_ptx_float(2.0**120)}; abs.f32 m, v; setp.gt.f32 p, m, {_ptx_float(448)}; "
        f"selp.f32 v, {_ptx_float(np.nan)}, v, p;"
        for i in range(4)
    ]
    return _ptx_instance("", values)


def _ptx_float(number: float) -> str:
    """A float32 constant of PTX."""
    return f"0f{np.float32(number).view(np.uint32):08X}"
