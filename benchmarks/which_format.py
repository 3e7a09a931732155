"""How well formats keep arrays of several kinds: the table of docs/which_format.md.

    python benchmarks/which_format.py                 # the table, to stdout
    python benchmarks/which_format.py --plot out.png  # bits against signal-to-noise ratio, as a picture

The signal-to-noise ratio is 10 log10(Σ x² / Σ (x - y)²) in decibels; 6 dB more is about one bit more.
"""

from __future__ import annotations

import argparse

import numpy as np

import jchop as jc

FORMATS = [
    "bfloat16", "binary16", "int8(channel=0)", "int8(group=128)", "mxint8", "float8_e4m3fn(channel=0)", "mxfp8_e4m3",
    "mxfp8_e5m2", "float8_e4m3fn", "float8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "int4(channel=0)", "int4(group=128)",
    "int4(group=32)", "int4(group=32,zero_point=integer)", "nf4(group=64)", "nvfp4", "mxfp4",
]  # fmt: skip
ROWS, COLUMNS = 512, 4096


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of three kinds."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(ROWS, COLUMNS))
    outliers = normal.copy()
    outliers[:, rng.choice(COLUMNS, COLUMNS // 256, replace=False)] *= 50
    kinds = {"normal": normal, "Laplace": rng.laplace(size=(ROWS, COLUMNS)) / np.sqrt(2), "outlier columns": outliers}
    return {name: x.astype(np.float32) for name, x in kinds.items()}


def wide(seed: int = 0) -> np.ndarray:
    """Numbers over about 30 binades, log-normal: gradients often are of this kind."""
    return np.exp(np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)) * 4).astype(np.float32)


def lost(text: str) -> str:
    """The share of the wide numbers that become zero, or that a result overflowed."""
    y = jc.round_to_format(wide(), text)
    return f"{100 * float(np.mean(y == 0)):.0f} %" if np.isfinite(y).all() else "overflow"


def ratio(x: np.ndarray, y: np.ndarray) -> float:
    """The signal-to-noise ratio in decibels."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    return 10 * float(np.log10(np.sum(x**2) / np.sum((x - y) ** 2)))


def bits(text: str) -> float:
    """Bits for each number, its share of the scales included."""
    fmt = jc.Spec(text).format
    return fmt.bits_per_element((ROWS, COLUMNS)) if isinstance(fmt, jc.formats.ScaledFormat) else fmt.bits


def table() -> list[tuple[str, float, dict[str, float]]]:
    """For each format its bits and the ratio for each kind of array."""
    kinds = arrays()
    return [
        (text, bits(text), {kind: ratio(x, jc.round_to_format(x, text)) for kind, x in kinds.items()})
        for text in FORMATS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    rows = table()
    kinds = list(rows[0][2])
    print(f"| format | bits | {' | '.join(kinds)} | zeros |")
    print(f"|---|--:|{'--:|' * len(kinds)}--:|")
    for text, width, ratios in rows:
        cells = (f"{ratios[kind]:.1f}" for kind in kinds)
        print(f"| `{text}` | {width:.3g} | {' | '.join(cells)} | {lost(text)} |")
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 6), layout="constrained")
        axes = figure.subplots()
        rows.sort(key=lambda row: (-row[1], -row[2]["normal"]))
        for kind, mark in zip(kinds, "osD", strict=True):
            axes.scatter([ratios[kind] for *_, ratios in rows], range(len(rows)), marker=mark, s=28, label=kind)
        axes.set_yticks(range(len(rows)), [f"{text}   {width:.3g} bits" for text, width, _ in rows])
        axes.invert_yaxis()
        axes.set_xlabel("signal-to-noise ratio (dB): more is better")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    main()
