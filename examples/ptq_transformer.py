"""Perplexity and bytes of a trained transformer with weights in few bits, for each format, without further training.

    python examples/ptq_transformer.py [--small] [--steps 300] [--plot ptq.png]

The network and text are those of transformer_training.py. Every weight of a layer or an embedding is packed. With
`--small` it takes some 25 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformer_training import LENGTH, loss_of, make, text, train, windows

import jchop as jc

FORMATS = ("int8(group=all)", "mxfp8_e4m3", "nf4(group=32)", "mxfp4", "nvfp4", "int4(group=32,scale=bfloat16)")
PIECES = 256


def perplexity(model: Any, tokens: Any) -> float:
    """The perplexity on samples of the text."""
    starts = jnp.linspace(0, len(tokens) - LENGTH - 1, PIECES).astype(int)
    return math.exp(float(nnx.jit(loss_of)(model, windows(tokens, starts))))


def bytes_of(model: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def run(formats: tuple[str, ...] = FORMATS, *, steps: int, width: int, depth: int) -> dict[str, tuple[float, int]]:
    """Perplexity and bytes of each format, float32 first."""
    tokens, letters = text()
    model = make(letters, width=width, depth=depth)
    print(f"training {steps} steps in float32", file=sys.stderr, flush=True)
    train(model, tokens, steps=steps)
    table = {"float32": (perplexity(model, tokens), bytes_of(model))}
    for fmt in formats:
        print(f"packing the weights in {fmt}", file=sys.stderr, flush=True)
        packed = jc.nn.quantize(model, [jc.Rule("*norm*"), jc.Rule(weight=fmt)], mode="weight_only")
        table[fmt] = (perplexity(packed, tokens), bytes_of(packed))
    return table


def draw(table: dict[str, tuple[float, int]], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, (value, size) in table.items():
        axes.plot(size / 1024, value, "o")
        axes.annotate(name, (size / 1024, value), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set(xscale="log", xlabel="KiB of parameters", ylabel="perplexity", title="a transformer, weights rounded")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer steps, a smaller network, two formats")
    parser.add_argument("--steps", type=int, help="default 300, with --small 60")
    parser.add_argument("--width", type=int, help="default 64, with --small 32")
    parser.add_argument("--depth", type=int, help="default 2, with --small 1")
    parser.add_argument("--plot", help="a PNG to draw the table into")
    chosen = parser.parse_args()
    steps, width, depth = (60, 32, 1) if chosen.small else (300, 64, 2)
    formats = ("mxfp8_e4m3", "mxfp4") if chosen.small else FORMATS
    table = run(formats, steps=chosen.steps or steps, width=chosen.width or width, depth=chosen.depth or depth)
    print(f"{'weights':32}{'perplexity':>12}{'bytes':>10}")
    for name, (value, size) in table.items():
        print(f"{name:32}{value:12.3f}{size:10d}")
    if chosen.plot:
        draw(table, chosen.plot)


if __name__ == "__main__":
    main()
