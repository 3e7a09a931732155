"""PTX of the product of one row with a matrix of codes, in half of the instructions that Triton makes.

An instance takes four bytes of codes ($4), four numbers ($5 to $8) and four sums ($9 to $12), and gives four sums.
"""

from __future__ import annotations

import numpy as np

from jchop.formats import ElementFormat, IntegerFormat, float4_e2m1fn

__all__ = ["OPERANDS", "assembly_of"]

#: Of LLVM: four float32 results, written before all arguments are read, and the arguments.
OPERANDS = "=&f,=&f,=&f,=&f,r,f,f,f,f,f,f,f,f"

_BODY = "{{\n.reg .b32 c, s;\n.reg .f32 v;\n{lines}\n}}"
_ADD = "fma.rn.f32 ${0}, v, ${1}, ${2};"


def assembly_of(format: ElementFormat) -> tuple[str, ...] | None:
    """The PTX for each code in a byte; None for a format without one.

    An integer u is the last bits of 2^23 + u, or the bits before them of 2^23 + 2^8 u; one multiply-add gives its
    value. A code of e2m1 is the last bits of the exponent, and the first of the fraction, of a number that is 2^126
    times smaller.
    """
    if isinstance(format, IntegerFormat) and format.bits in (4, 8) and not format.narrow:
        make = _four_bits if format.bits == 4 else _eight_bits
        return tuple(make(part, format.signed) for part in range(8 // format.bits))
    return tuple(map(_e2m1, range(2))) if format == float4_e2m1fn else None


def _instance(before: str, values: list[str]) -> str:
    """Lines before, and those that give each value in v."""
    lines = [before, *(f"{value} {_ADD.format(i, 5 + i, 9 + i)}" for i, value in enumerate(values))]
    return _BODY.format(lines="\n".join(filter(None, lines)))


def _four_bits(part: int, signed: bool) -> str:
    before = f"xor.b32 c, $4, {0x88888888 if signed else 0:#x}; shr.b32 c, c, {4 * part};"
    values = []
    for i, (mask, factor, summand) in enumerate(_PLACES):
        value = f"and.b32 s, c, {mask:#x}; or.b32 s, s, 0x4B000000; mov.b32 v, s;"
        less = _bits(-summand - (8 if signed else 0))
        step = f"add.f32 v, v, {less};" if factor == 1 else f"fma.rn.f32 v, v, {_bits(factor)}, {less};"
        values.append(f"{'shr.b32 c, c, 24; ' if i == 3 else ''}{value} {step}")
    return _instance(before, values)


#: Of each byte: the bits of its code, and the factor and summand that take 2^23 and the place away.
_PLACES = ((0xF, 1, 2**23), (0xF00, 2.0**-8, 2**15), (0xF0000, 2.0**-16, 2**7), (0xF, 1, 2**23))


def _eight_bits(part: int, signed: bool) -> str:
    del part
    before = f"xor.b32 c, $4, {0x80808080 if signed else 0:#x};"
    less = _bits(-(2**23) - (128 if signed else 0))
    values = [f"prmt.b32 s, c, 0x4B000000, {0x7440 + i:#x}; mov.b32 v, s; add.f32 v, v, {less};" for i in range(4)]
    return _instance(before, values)


def _e2m1(part: int) -> str:
    values = []
    for i in range(4):
        left = 28 - 8 * i - 4 * part
        move = f"shl.b32 s, $4, {left};" if left >= 0 else f"shr.b32 s, $4, {-left};"
        values.append(
            f"{move} and.b32 c, s, 0x80000000; shr.b32 s, s, 6; and.b32 s, s, 0x1C00000; or.b32 s, s, c; "
            f"mov.b32 v, s; mul.f32 v, v, {_bits(2.0**126)};"
        )
    return _instance("", values)


def _bits(number: float) -> str:
    """A float32 constant of PTX."""
    return f"0f{np.float32(number).view(np.uint32):08X}"
