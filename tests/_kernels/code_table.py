"""The machine code of kernels of GPUs: registers, spills, bytes, instructions, and the instruction of the matrix units.

    PYTHONPATH=tests python tests/_kernels/code_table.py docs/kernels.md

writes the table of that page, if `ptxas` and `nvdisasm` are at hand. JAX 0.12 is needed for kernels of the A100.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from _kernels import compile_dequantize_matmul, compile_matmul, compile_product_of_blocks, compile_scaled
from _kernels.compiling import CODE, Case, Result, run

import jchop as jc
from jchop._kernels.products.dequantize_matmul import (
    DEQUANTIZE_BYTES,
    DequantizeMatmulGpuTiling,
    DequantizeMatmulProblem,
)
from jchop._kernels.scaled_tile import ScaledBlocksProblem, ScaledGpuTiling
from jchop._kernels.tiles import WARP_LANES, WARPS, next_multiple

#: Bytes, instructions of threads and products of 8-bit numbers each second.
RATES = {
    "h200": (4.8e12, 132 * 128 * 1.98e9, 0.99e15),
    "b200": (8.0e12, 148 * 128 * 1.96e9, 2.25e15),
    "a100": (2.0e12, 108 * 128 * 1.41e9, 0.31e15),
}
_THREADS, _SIZE, _REGISTERS = WARPS * WARP_LANES, 4096, 1 << 16


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        case: part of the name of the case.
        name: of the kernel.
        numbers: how many a thread quantizes, decodes or multiplies in a pass of its loop.
        passes: of the loop.
        count: numbers in all.
        on_units: whether the matrix units multiply all of them as 8-bit numbers.
        loaded: bytes that a warpgroup loads before it decodes them.
    """

    case: str
    name: str
    numbers: float
    passes: int
    count: int
    on_units: bool = False
    loaded: int = 0

    def instructions(self, every: int, loops: list[int]) -> float:
        """For each number, by the count of all instructions and of the loops, of which the longest has the passes."""
        longest = max(loops, default=0) if self.passes > 1 else 0
        return (every + longest * (self.passes - 1)) / (self.numbers * self.passes)


def of_blocks(case: str, name: str, spec: str, axis: int, dtype: str) -> Row:
    plan = compile_scaled.plan_of(compile_scaled.along(jc.Spec(spec), axis), dtype)
    problem = ScaledBlocksProblem.of(jax.ShapeDtypeStruct((_SIZE, _SIZE), jnp.dtype(dtype)), plan)
    tiling = ScaledGpuTiling.for_shape(problem, True)
    assert tiling is not None
    numbers = tiling.rows * tiling.words * tiling.numbers / _THREADS
    return Row(
        f"quantize_blocks {case} axis {axis} {dtype}[4096, 4096]", f"{name}, quantize, 4096²", numbers, 1, _SIZE**2
    )


def of_products(
    case: str, name: str, rows: int, columns: int, depth: int, size: int = _SIZE, on_units: bool = False
) -> Row:
    """A product of two square matrices, by the tile of a warpgroup in a pass."""
    return Row(case, f"{name}, {size}³", rows * columns * depth / _THREADS, size // depth, size**3, on_units)


def of_few_rows(name: str, bits: int, rows: int, group: int) -> Row:
    problem = DequantizeMatmulProblem(rows, _SIZE, _SIZE * bits // 8, group, 8 // bits, 2)
    tiling = DequantizeMatmulGpuTiling.for_shape(problem)
    assert tiling is not None
    step = tiling.depth * tiling.loads
    numbers, passes = DEQUANTIZE_BYTES * 8 // bits * step / _THREADS, -(-_SIZE // step // tiling.splits)
    case = f"dequantize_matmul {name} ({rows}, 4096, 4096, {group}) bfloat16"
    title = f"{name} of {group}, {rows} row{'s' * (rows > 1)}, 4096²"
    return Row(case, title, numbers, passes, _SIZE**2, loaded=DEQUANTIZE_BYTES * step)


_SUMS = "accumulate=e5m10:stochastic, order="
ROWS = [
    of_blocks("mxfp8 e4m3", "mxfp8 e4m3", "mxfp8_e4m3", -1, "float32"),
    of_blocks("mxfp8 e4m3", "mxfp8 e4m3 along axis -2", "mxfp8_e4m3", -2, "float32"),
    of_blocks("int8(group=all)", "int8 rows", "int8(group=all)", -1, "bfloat16"),
    of_products(f"{_SUMS}sequential, (1, 4096", "matmul e5m10, stochastic sums", 64, 16, 4),
    of_products(f"{_SUMS}pairwise, (1, 4096", "matmul e5m10, pairwise", 64, 8, 4),
    of_products(f"{_SUMS}matrix_unit(32), (1, 4096", "matmul e4m3, matrix_unit(32)", 64, 64, 32),
    of_products("int8, one block", "int8 × int8", 128, 128, 128, on_units=True),
    of_products("e4m3, blocks of 128", "e4m3 × e4m3, blocks of 128", 64, 128, 128, 1024, True),
    of_products("e4m3, blocks of 32", "e4m3 × e4m3, blocks of 32", 64, 128, 32, 1024, True),
    *(of_few_rows("int4", 4, rows, 128) for rows in (1, 8, 16)),
    *(of_few_rows("int8", 8, rows, 128) for rows in (1, 16)),
    *(of_few_rows("float8_e4m3fn", 8, rows, 128) for rows in (1, 16)),
    *(of_few_rows("float4_e2m1fn", 4, *sizes) for sizes in ((1, 32), (16, 32), (1, 16), (16, 16))),
    *(of_few_rows("nf4", 4, rows, 64) for rows in (1, 16)),
]
_FILES = (compile_scaled, compile_matmul, compile_product_of_blocks, compile_dequantize_matmul)


def cases(target: str) -> Iterator[Case]:
    """The cases of the rows that have a kernel on a chip."""
    every = [case for file in _FILES for case in file.cases(target) if "body" not in case.checks]
    every += compile_dequantize_matmul.few_rows(target, of_table=True)
    for row in ROWS:
        yield from [replace(case, checks=("code",)) for case in every if row.case in case.name][:1]


def cells(row: Row, target: str, results: list[Result]) -> str:
    """The cells of a row."""
    found = next((result for result in results if row.case in result.name), None)
    if found is None:
        return "XLA's body | | | | | | |"
    assert found.fault is None, found
    told = next(text.removeprefix(CODE) for text in found.findings if text.startswith(CODE))
    registers, spilled, names, every, loops = json.loads(told)
    each, moved = row.instructions(every, loops), found.memory["argument"] + found.memory["output"]
    bandwidth, issued, products = RATES[target]
    seconds = max(moved / bandwidth, each * row.count / issued, row.on_units * row.count / products)
    warpgroups = _REGISTERS // (_THREADS * next_multiple(registers, 8))
    numbers = (
        registers,
        spilled,
        ", ".join(f"`{name}`" for name in names) or "none",
        f"{moved / 1e6:.1f}",
        f"{row.loaded * warpgroups / 1024:.0f}" if row.loaded else "",
        f"{each:.3g}",
        f"{float(f'{1e6 * seconds:.3g}'):,.7g}",
    )
    return " | ".join(map(str, numbers)) + " |"


def main() -> None:
    page = Path(sys.argv[1])
    found = {target: run(target, Path(__file__)) for target in RATES}
    head = "kernel", "chip", "registers", "bytes spilled", "matrix instruction", "MB", "kB in flight"
    lines = [
        f"| {' | '.join(head)} | instructions for each number | µs |",
        "|---|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    lines += [f"| {row.name} | {target} | {cells(row, target, found[target])}" for row in ROWS for target in RATES]
    begin, end = f"<!-- table of code, JAX {jax.__version__} -->", "<!-- end of the table of code -->"
    new = "\n".join((begin, "", *lines, "", end))
    text, count = re.subn(
        r"<!-- table of code, .*?end of the table of code -->", lambda _: new, page.read_text(), flags=re.S
    )
    assert count == 1, "the page has no place for the table"
    page.write_text(text)


if __name__ == "__main__":
    main()
