"""PTX that decodes and multiplies codes, run by a small interpreter: every code of every place in a word."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

import numpy as np

from jchop._kernels.products.dequantize_matmul_gpu import PTX_CONSTRAINTS, ptx_of_format
from jchop.formats import FloatFormat, IntegerFormat
from jchop.formats._catalogue import float4_e2m1fn, float8_e4m3fn, float8_e5m2

FORMATS = [IntegerFormat(4), IntegerFormat(8), IntegerFormat(4, signed=False), IntegerFormat(8, signed=False)]


def real(bits: int) -> np.float64:
    """The number with the bits of a float32 number."""
    return np.float64(np.uint32(bits).view(np.float32))


#: Products of these numbers, and their sums, are exact in float64.
REAL: dict[str, Callable[..., np.float64]] = {
    "add.f32": operator.add,
    "mul.f32": operator.mul,
    "fma.rn.f32": lambda a, b, c: a * b + c,
    "abs.f32": lambda a: np.abs(a),
}
WHOLE: dict[str, Callable[..., int]] = {
    "mov.b32": int,
    "xor.b32": operator.xor,
    "and.b32": operator.and_,
    "or.b32": operator.or_,
    "shr.b32": operator.rshift,
    "shr.s32": lambda a, n: (a - (a >> 31 << 32) >> n) & 0xFFFFFFFF,
    "setp.gt.f32": lambda a, b: int(real(a) > real(b)),
    "selp.f32": lambda a, b, p: a if p else b,
    "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
}


def permuted(low: int, high: int, choice: int) -> int:
    """The bytes of two words that the digits of a choice number."""
    every = (high << 32 | low).to_bytes(8, "little")
    return int.from_bytes(bytes(every[choice >> 4 * i & 7] for i in range(4)), "little")


def chosen(a: int, b: int, c: int, table: int) -> int:
    """The bits that a table has for three bits each."""
    places = range(32)
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in places)


def run(assembly: str, word: int, xs: Sequence[float], sums: Sequence[float]) -> list[float]:
    """The four sums: integers of 32 bits and float32 numbers, each rounded once."""
    registers: dict[str, int] = {"$4": word}
    for i, value in enumerate((*xs, *sums)):
        registers[f"${5 + i}"] = int(np.float32(value).view(np.uint32))

    def read(name: str) -> int:
        if name in registers:
            return registers[name]
        return int(name[2:], 16) if name.startswith("0f") else int(name, 0)

    for name, operands in re.findall(r"([a-z0-9.]+) ([^;{}]+);", assembly):
        to, *given = (part.strip() for part in operands.split(","))
        if name in REAL:
            registers[to] = int(np.float32(REAL[name](*(real(read(v)) for v in given))).view(np.uint32))
        elif name != ".reg":
            registers[to] = {"prmt.b32": permuted, "lop3.b32": chosen, **WHOLE}[name](*map(read, given))
    return [float(real(registers[f"${i}"])) for i in range(4)]


def test_values() -> None:
    for fmt in (*FORMATS, float4_e2m1fn, float8_e4m3fn):
        check(fmt)


def check(fmt: IntegerFormat | FloatFormat) -> None:
    assemblies, bits = ptx_of_format(fmt), fmt.bits
    assert assemblies is not None and len(assemblies) == 8 // bits
    rng = np.random.default_rng(0)
    for first in range(256):
        word = [first, *rng.integers(0, 256, 3)]
        word = word[first % 4 :] + word[: first % 4]  # so that each byte has each value
        xs, sums = rng.integers(-99, 100, 4), rng.integers(-99, 100, 4)
        for part, assembly in enumerate(assemblies):
            codes = [int(byte) >> bits * part & (1 << bits) - 1 for byte in word]
            wanted = [c + x * float(fmt.decode(code)) for code, x, c in zip(codes, xs, sums, strict=True)]
            packed = int.from_bytes(bytes(map(int, word)), "little")
            found = run(assembly, packed, list(map(float, xs)), list(map(float, sums)))
            np.testing.assert_array_equal(found, wanted, str(fmt))  # NaN too


def test_zeros_have_their_signs() -> None:
    (low, _) = ptx_of_format(float4_e2m1fn) or ("", "")
    assert np.signbit(run(low, 0x08000800, [1] * 4, [-0.0] * 4)).tolist() == [False, True, False, True]


def test_other_formats_have_none() -> None:
    assert ptx_of_format(float8_e5m2) is None and ptx_of_format(IntegerFormat(4, narrow=True)) is None


def test_results_are_written_before_all_arguments_are_read() -> None:
    assert PTX_CONSTRAINTS.split(",")[:4] == ["=&f"] * 4 and len(PTX_CONSTRAINTS.split(",")) == 13
