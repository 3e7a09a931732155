"""Posits and takums beside floats: the digits at each magnitude, and the error of dot products.

    python examples/posits.py --plot posits.png

A float has as many digits at 1 as near its largest value. A posit or a takum has most at 1, and fewer the farther a
number is from 1. So it gains if the numbers lie around 1, and loses if they do not. The first table and the picture
show the signal-to-noise ratio of normal numbers whose standard deviation σ is a power of two. The second table shows it
for dot products of such numbers, with every product and sum rounded: their results lie near σ² √n.

In the tables -inf means that a result is infinite: a product or a sum overflowed in binary16. About 0 dB means that the
errors are as large as the numbers: nearly all of these became 0, or they saturated far below their values. With
`--small` it takes some 10 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

import jchop as jc

FORMATS = {
    16: ("binary16", "bfloat16", "posit16", "takum_linear16"),
    8: ("float8_e4m3fn:saturate", "float8_e5m2:saturate", "posit8", "takum_linear8"),
}


def decibels(signal: np.ndarray, rounded: np.ndarray) -> float:
    """The signal-to-noise ratio; -inf if a result is infinite or NaN."""
    with np.errstate(invalid="ignore"):
        error = np.sum((rounded - signal) ** 2)
    return 10 * float(np.log10(np.sum(signal**2) / error)) if np.isfinite(error) else -np.inf


def digits(spec: str, exponents: np.ndarray, count: int) -> np.ndarray:
    """The decimal digits that `count` numbers from 2^e to 2^(e+1) keep, in the root mean square, for each e."""
    x = 2.0 ** exponents[:, None] * np.linspace(1, 2, count, endpoint=False)
    with np.errstate(invalid="ignore"):
        error = jc.round_to_format(x, spec) / x - 1
        kept = -np.log10(np.sqrt(np.mean(error**2, axis=1)))
    return np.where(np.isfinite(kept), np.maximum(kept, 0), np.nan)


def normal_numbers(spec: str, exponents: np.ndarray, count: int) -> list[float]:
    """The signal-to-noise ratio of normal numbers for each standard deviation 2^e."""
    x = np.random.default_rng(0).standard_normal(count)
    return [decibels(x * 2.0**e, jc.round_to_format(x * 2.0**e, spec)) for e in exponents]


def dots(spec: str, exponents: np.ndarray, length: int) -> list[float]:
    """The same of 16 × 16 dot products, with every product and sum rounded to the format."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((16, length)), rng.standard_normal((length, 16))
    unit = jc.MatmulSpec(operands=spec, product=spec, accumulate=spec, order="pairwise")
    scales = 2.0**exponents
    return [decibels((s * a) @ (s * b), np.asarray(jc.math.matmul(s * a, s * b, unit))) for s in scales]


def draw(count: int, path: Path) -> None:
    """Digits against the magnitude, and the signal-to-noise ratio against σ, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    for row, (bits, specs) in zip(figure.subplots(2, 2), FORMATS.items(), strict=True):
        reach = np.arange(-40, 41) if bits == 16 else np.arange(-20, 21)
        for spec in specs:
            style = "-" if "float" in spec or "binary" in spec else "--"
            name = spec.partition(":")[0]
            row[0].plot(reach, digits(spec, reach, count), style, label=name)
            row[1].plot(reach, np.maximum(normal_numbers(spec, reach, 20 * count), 0), style, label=name)
        row[0].set(title=f"{bits} bits: numbers from 2^e to 2^(e+1)", xlabel="e", ylabel="decimal digits kept", ylim=0)
        row[1].set(title=f"{bits} bits: normal numbers", xlabel="log₂ σ", ylabel="signal-to-noise ratio, dB", ylim=0)
        row[0].legend(fontsize="small", loc="lower center")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="a PNG to write")
    parser.add_argument("--small", action="store_true", help="fewer numbers, to try the script")
    args = parser.parse_args()
    count, length = (200, 64) if args.small else (2000, 1024)
    exponents = np.array([-12, -6, -3, 0, 3, 6, 12])
    print(f"adding {length} products in {sum(map(len, FORMATS.values()))} formats", file=sys.stderr, flush=True)
    every = [spec for specs in FORMATS.values() for spec in specs]
    for title, measure, size in (("normal numbers", normal_numbers, 20 * count), (f"dots of {length}", dots, length)):
        print(f"{title}, dB by log2 of σ\n{'':24}" + "".join(f"{e:8}" for e in exponents))
        for spec in every:
            print(f"{spec:24}" + "".join(f"{value:8.1f}" for value in measure(spec, exponents, size)), flush=True)
    if args.plot is not None:
        draw(count, args.plot)
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
