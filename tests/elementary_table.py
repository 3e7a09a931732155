"""Counts of wrong results of the elementary functions, over every argument of a format and every mode.

`python tests/elementary_table.py` writes the table of docs/measurements/math.md to stdout, in some minutes.
"""

from __future__ import annotations

import sys
from functools import cache, partial

import jax
import numpy as np
import oracle_elementary as exact

import jchop as jc
from jchop._core.elementary.functions import UNARY_FUNCTIONS, elementary_function

#: By name: exponent and fraction bits.
FORMATS = {"bfloat16": (8, 7), "binary16": (5, 10), "float8_e5m2": (5, 2), "float8_e4m3": (4, 3)}
#: The names of primitives, by those of NumPy.
NAMES = {"a" + name[3:] if name.startswith("arc") else name: name for name in exact.EXACT}


@cache
def arguments(text: str) -> np.ndarray:
    """Every number of a format."""
    width = 1 + sum(FORMATS[text])
    codes = np.arange(1 << width).astype(np.uint16 if width > 8 else np.uint8)
    return np.asarray(jc.Spec(text).format.decode(codes), np.float32)


@cache
def words(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 2**32, count, dtype=np.uint32)


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers, one NaN for all."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.int32)


def wrong(name: str, text: str, step: int = 1) -> dict[str, int]:
    """How many results differ from the true ones, by mode."""
    x = arguments(text)[::step]
    word = words(len(x))
    exponent, fraction = FORMATS[text]
    rows = [
        partial(exact.round_array, exponent_bits=exponent, fraction_bits=fraction, mode=mode, word=word)
        for mode in exact.MODES
    ]
    y = exact.values(NAMES[name], x.astype(float), lambda v: np.stack([row(v) for row in rows]))

    @jax.jit
    def every_mode(x: jax.Array, word: jax.Array) -> list[jax.Array]:
        specs = [jc.Spec(f"{text}:{mode}") for mode in exact.MODES]
        return [elementary_function(x, *([word] if s.rounding.stochastic else []), name=name, spec=s) for s in specs]

    counts = {}
    for mode, row, got in zip(exact.MODES, rows, every_mode(x, word), strict=True):
        bad = bits(np.asarray(got)) != bits(row(y).astype(np.float32))
        counts[mode] = int(bad.sum())
        if bad.any():
            print(name, text, mode, x[bad][:3], np.asarray(got)[bad][:3], y[bad][:3])
    return counts


def main() -> None:
    print("| function | " + " | ".join(FORMATS) + " |")
    print("|---|" + "---|" * len(FORMATS))
    for name in UNARY_FUNCTIONS:
        counts = [sum(wrong(name, text).values()) for text in FORMATS]
        print(f"| `{NAMES[name]}` | " + " | ".join(map(str, counts)) + " |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
