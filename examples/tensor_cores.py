"""The error of a dot on tensor cores against its length: Hopper's fp8 accumulator, promotion, and Blackwell's.

    python examples/tensor_cores.py --plot tensor_cores.png

Operands are float8_e4m3fn numbers, of one sign or of both. Hopper adds 32 products and its accumulator with 13 fraction
bits, all cut toward zero, so the error of a sum of positive numbers grows with its length. Sums of 128 products that
are promoted to a float32 total, as DeepSeek-V3 does (arXiv 2412.19437, 3.3.2), keep it small. With `--small` it takes
some 20 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import jchop as jc

UNITS = {
    "Hopper": jc.tensor_core("hopper", "fp8"),
    "Hopper, promoted every 512": jc.tensor_core("hopper", "fp8", promote_every=512),
    "Hopper, promoted every 128": jc.tensor_core("hopper", "fp8", promote_every=128),
    "Blackwell": jc.tensor_core("blackwell", "fp8"),
}


def operands(k: int, positive: bool) -> tuple[np.ndarray, np.ndarray]:
    """Matrices of 16 rows, and of 16 columns, of e4m3fn numbers."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((16, k)), rng.standard_normal((k, 16))
    if positive:
        a, b = abs(a), abs(b)
    return tuple(jc.round_to_format(x.astype(np.float32), "float8_e4m3fn") for x in (a, b))  # type: ignore[return-value]


def errors(lengths: Sequence[int], positive: bool) -> dict[str, list[float]]:
    """By unit: the error for each length, as a root mean square over that of the exact results."""
    table: dict[str, list[float]] = {name: [] for name in UNITS}
    for k in lengths:
        print(f"adding {k} products on {len(UNITS)} units", file=sys.stderr, flush=True)
        a, b = operands(k, positive)
        exact = a.astype(np.float64) @ b.astype(np.float64)
        for name, spec in UNITS.items():
            off = np.asarray(jc.math.matmul(a, b, spec), np.float64) - exact
            relative = off / exact if positive else off / np.sqrt(np.mean(exact**2))
            table[name].append(float(np.sqrt(np.mean(relative**2))))
    return table


def draw(lengths: Sequence[int], tables: dict[str, dict[str, list[float]]], path: Path) -> None:
    """The errors against the length, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (title, table) in zip(figure.subplots(1, 2, sharey=True), tables.items(), strict=True):
        for name, values in table.items():
            axes.loglog(lengths, values, "-o", label=name)
        axes.set(title=title, xlabel="products in a sum", ylabel="relative error")
    figure.axes[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="a PNG to write")
    parser.add_argument("--small", action="store_true", help="short sums, to try the script")
    args = parser.parse_args()
    lengths = [128, 512] if args.small else [128, 256, 512, 1024, 2048, 4096, 8192]
    tables = {"positive": errors(lengths, True), "of both signs": errors(lengths, False)}
    for title, table in tables.items():
        print(f"{title}\n{'products':28}" + "".join(f"{k:>10}" for k in lengths))
        for name, values in table.items():
            print(f"{name:28}" + "".join(f"{value:10.2g}" for value in values))
    if args.plot is not None:
        draw(lengths, tables, args.plot)
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
