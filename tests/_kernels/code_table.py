"""The machine code of kernels of GPUs: registers, spills, bytes and the instruction of the matrix units.

    PYTHONPATH=tests python tests/_kernels/code_table.py docs/kernels.md

writes the table of that page, if `ptxas` is at hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
from _kernels import compile_dequantize_matmul, compile_matmul, compile_product_of_blocks, compile_scaled
from _kernels.compiling import CODE, Case, Result, run

TARGETS = ("h200", "b200")
#: Rows of the table: parts of the names of cases.
ROWS = {
    "quantize_blocks mxfp8 e4m3 axis -1 float32[4096, 4096]": "mxfp8 e4m3, quantize, 4096²",
    "quantize_blocks mxfp8 e4m3 axis -2 float32[4096, 4096]": "the same, axis -2",
    "quantize_blocks int8(group=all) axis -1 bfloat16[4096, 4096]": "int8 rows, quantize, 4096²",
    "accumulate=e5m10:stochastic, order=sequential, (1, 4096": "matmul e5m10, stochastic sums, 4096³",
    "accumulate=e5m10:stochastic, order=pairwise, (1, 4096": "matmul e5m10, pairwise, 4096³",
    "accumulate=e5m10:stochastic, order=matrix_unit(32), (1, 4096": "matmul e4m3, matrix_unit(32), 4096³",
    "int8, one block": "int8 × int8, 4096³",
    "e4m3, blocks of 128": "e4m3 × e4m3, blocks of 128, 1024³",
    "e4m3, blocks of 32": "e4m3 × e4m3, blocks of 32, 1024³",
    "dequantize_matmul int4 (1, 4096, 4096, 128)": "int4 of 128, 1 row, 4096²",
    "dequantize_matmul int4 (16, 4096, 4096, 128)": "int4 of 128, 16 rows, 4096²",
    "dequantize_matmul float8_e4m3fn (1, 4096, 4096, 128)": "e4m3 of 128, 1 row, 4096²",
}
_FILES = (compile_scaled, compile_matmul, compile_product_of_blocks, compile_dequantize_matmul)


def cases(target: str) -> Iterator[Case]:
    every = [case for file in _FILES for case in file.cases(target)]
    for part in ROWS:
        yield from [replace(case, checks=("code",)) for case in every if part in case.name][:1]


def cells(result: Result) -> tuple[str, str]:
    """The row, and its cells."""
    row = next(row for part, row in ROWS.items() if part in result.name)
    found = [text.removeprefix(CODE) for text in result.findings if text.startswith(CODE)]
    moved = result.memory["argument"] + result.memory["output"]
    return row, " | ".join((*found[0].split("; "), f"{moved / 1e6:.1f}"))


def main() -> None:
    page = Path(sys.argv[1])
    lines = ["| kernel | chip | registers | bytes spilled | matrix instruction | MB |", "|---|---|---:|---:|---|---:|"]
    found = {target: dict(map(cells, run(target, Path(__file__)))) for target in TARGETS}
    lines += [f"| {row} | {target} | {found[target][row]} |"
              for row in ROWS.values() for target in TARGETS if row in found[target]]  # fmt: skip
    begin, end = f"<!-- table of code, JAX {jax.__version__} -->", "<!-- end of the table of code -->"
    new = "\n".join((begin, "", *lines, "", end))
    text, count = re.subn(
        r"<!-- table of code, .*?end of the table of code -->", lambda _: new, page.read_text(), flags=re.S
    )
    assert count == 1, "the page has no place for the table"
    page.write_text(text)


if __name__ == "__main__":
    main()
