"""What few-bit weights cost a trained transformer: perplexity and bytes, format by format, without further training.

    python examples/ptq_transformer.py [--steps 300] [--plot ptq.png]

The network and text are those of transformer_training.py. Every weight of a layer or an embedding is packed.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformer_training import LENGTH, loss_of, make, text, train, windows

import jchop as jc

FORMATS = ("int8(group=all)", "mxfp8_e4m3", "nf4(group=32)", "mxfp4", "nvfp4", "int4(group=32,scale=bfloat16)")
PIECES = 256


def perplexity(model: Any, tokens: Any) -> float:
    """Of pieces spread over the text."""
    starts = jnp.linspace(0, len(tokens) - LENGTH - 1, PIECES).astype(int)
    return math.exp(float(nnx.jit(loss_of)(model, windows(tokens, starts))))


def bytes_of(model: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def run(*, steps: int, width: int, depth: int) -> dict[str, tuple[float, int]]:
    """Perplexity and bytes of each format, float32 first."""
    tokens, letters = text()
    model = make(letters, width=width, depth=depth)
    train(model, tokens, steps=steps)
    table = {"float32": (perplexity(model, tokens), bytes_of(model))}
    for fmt in FORMATS:
        packed = jc.nn.quantize(model, [jc.nn.Rule("*norm*"), jc.nn.Rule(weight=fmt)], mode="weight_only")
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
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--plot", help="where to draw the table")
    chosen = parser.parse_args()
    table = run(steps=chosen.steps, width=chosen.width, depth=chosen.depth)
    print(f"{'weights':32}{'perplexity':>12}{'bytes':>10}")
    for name, (value, size) in table.items():
        print(f"{name:32}{value:12.3f}{size:10d}")
    if chosen.plot:
        draw(table, chosen.plot)


if __name__ == "__main__":
    main()
