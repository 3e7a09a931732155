"""Perplexity of a small transformer with weights, and activations, in few bits, rounded to nearest and with data.

    python examples/perplexity.py [--small] [--steps 400] [--plot perplexity.png]

Four blocks in plain JAX, a scan over stacked parameters, continue text letter by letter. The text is that of NumPy's
docstrings, so nothing is loaded. Every tenth one is kept for the table: neither training nor rounding sees it. With
`--small` it takes some 55 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

BATCH, LENGTH, HEADS, DEPTH = 16, 64, 4, 4
FORMATS = ("int4(group=32)", "nvfp4", "mxfp4", "nf4(group=32)", "int3(group=32)")
METHODS: dict[str, list[Any]] = {
    "nearest": [],
    "gptq": [jc.ptq.gptq()],
    "correct_error, gptq": [jc.ptq.correct_error(), jc.ptq.gptq()],
}
LOW_FORMATS = ("int4(group=all)", "int4(group=32)", "nvfp4")  # of weights and activations
#: Inputs that are rotated when the network runs: of the heads together, and after gelu.
ONLINE = jc.Hadamard("all", products="forward")
LOW_METHODS: dict[str, list[Any]] = {  # weights one after the other, by inputs that are rounded
    "nearest": [],
    "gptq": [jc.ptq.gptq()],
    "rotate": [jc.ptq.rotate()],
    "rotate, gptq": [jc.ptq.rotate(), jc.ptq.gptq()],
}
CALIBRATION = 4  # batches of training text that the rounding sees


def texts() -> tuple[Any, Any, int]:
    """Text for training and for the table, as numbers of letters, and how many letters there are."""
    found = [inspect.getdoc(getattr(np, name)) or "" for name in sorted(np.__all__)]
    letters, numbers = np.unique([ord(c) for c in "".join(found)], return_inverse=True)
    parts = np.split(numbers, np.cumsum([len(doc) for doc in found])[:-1])
    kept = np.concatenate(parts[::10])
    rest = np.concatenate([part for i, part in enumerate(parts) if i % 10])
    return jnp.asarray(rest), jnp.asarray(kept), len(letters)


def make(letters: int, width: int, seed: int = 0) -> dict[str, Any]:
    """Parameters; those of the blocks are stacked, and their weights of one shape, which are compiled once."""
    keys = iter(jax.random.split(jax.random.key(seed), 9))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    blocks = {name: normal(DEPTH, width, width) for name in ("q", "k", "v", "out", "up", "down")}
    blocks |= {
        "up_bias": jnp.zeros((DEPTH, width)),
        "before": jnp.ones((DEPTH, width)),
        "between": jnp.ones((DEPTH, width)),
    }
    ends = {"letters": normal(letters, width), "places": normal(LENGTH, width) / 8, "head": normal(width, letters)}
    return {"blocks": blocks, **ends}


def norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def block(x: Any, p: dict[str, Any]) -> Any:
    """Attention and two layers, each after a norm."""
    batch, length, width = x.shape
    h = norm(x, p["before"])
    q, k, v = ((h @ p[name]).reshape(batch, length, HEADS, width // HEADS) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // HEADS) ** 0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + mixed @ p["out"]
    hidden = jax.nn.gelu(norm(x, p["between"]) @ p["up"] + p["up_bias"])
    return x + hidden @ p["down"]


def network(p: dict[str, Any], letters: Any) -> Any:
    """The scores of the next letter, for letters (batch, length)."""
    x = p["letters"][letters] + p["places"][: letters.shape[1]]
    x, _ = jax.lax.scan(lambda x, own: (block(x, own), None), x, p["blocks"])
    return norm(x, 1.0) @ p["head"]


def pieces(text: Any, starts: Any) -> Any:
    """Pieces of text, one letter longer than the input of the network."""
    return text[starts[:, None] + jnp.arange(LENGTH + 1)]


def loss(run: Any, p: Any, some: Any) -> Any:
    """Mean cross-entropy of the next letter, in nats."""
    scores = jax.nn.log_softmax(run(p, some[:, :-1]))
    return -jnp.take_along_axis(scores, some[:, 1:, None], axis=-1).mean()


@partial(jax.jit, static_argnames="steps")
def train(p: Any, text: Any, *, steps: int) -> Any:
    """The parameters after steps of Adam, whose rate rises, and then falls to zero."""

    def step(state: Any, i: Any) -> Any:
        p, mean, square = state
        starts = jax.random.randint(jax.random.fold_in(jax.random.key(1), i), (BATCH,), 0, len(text) - LENGTH - 1)
        slope = jax.grad(partial(loss, network))(p, pieces(text, starts))
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, slope)
        rate = 4e-3 * jnp.minimum((i + 1) / 50, 1 - i / steps)
        new = [(1 - 0.9 ** (i + 1)), (1 - 0.99 ** (i + 1))]
        p = jax.tree.map(lambda w, m, s: w - rate * (m / new[0]) / (jnp.sqrt(s / new[1]) + 1e-8), p, mean, square)
        return (p, mean, square), None

    zeros = jax.tree.map(jnp.zeros_like, p)
    return jax.lax.scan(step, (p, zeros, zeros), jnp.arange(steps))[0][0]


@partial(jax.jit, static_argnames="function")
def _perplexity(p: Any, text: Any, function: Any) -> Any:
    starts = jnp.arange(0, len(text) - LENGTH - 1, LENGTH)
    some = pieces(text, starts[: len(starts) // BATCH * BATCH]).reshape(-1, BATCH, LENGTH + 1)
    return jnp.exp(jax.lax.map(partial(loss, function, p), some).mean())


def perplexity(p: Any, text: Any, function: Any = network, most: int = 40_000) -> float:
    """The perplexity on text of a function of parameters."""
    return float(_perplexity(p, text[:most], function))


def run(
    params: Any, text: Any, kept: Any, formats: tuple[str, ...], methods: dict[str, list[Any]], low: bool = False
) -> dict[str, dict[str, float]]:
    """The perplexity of each format and method, and that of the parameters in float32; `low`: activations, too."""
    starts = jax.random.randint(jax.random.key(2), (CALIBRATION, BATCH), 0, len(text) - LENGTH - 1)
    data = [pieces(text, some)[:, :-1] for some in starts]
    table = {"float32": {"nearest": perplexity(params, kept)}}
    for fmt in formats:
        table[fmt] = {}
        for name, steps in methods.items():
            print(f"rounding to {fmt}: {name}", file=sys.stderr, flush=True)
            how: dict[str, Any] = {"weight": fmt, "activation": fmt if low else None}
            online = [jc.Rule("blocks/{out,down}", **how, rotation=ONLINE)] if jc.ptq.rotate() in steps else []
            function = jc.quantize_fn(network, [*online, jc.Rule("blocks", **how)])
            if steps:
                in_order = [jc.ptq.sequential()] if low and steps[-1] == jc.ptq.gptq() else []
                packed = function.pack(params, batches=data, steps=[*in_order, *steps])
            else:
                packed = function.pack(params, data[0])
            table[fmt][name] = perplexity(packed, kept, function)
    return table


def trained(steps: int, width: int) -> tuple[Any, Any, Any]:
    """Parameters in float32, the text that they were trained on, and the text for the table."""
    text, kept, letters = texts()
    print(f"training {steps} steps in float32", file=sys.stderr, flush=True)
    return train(make(letters, width), text, steps=steps), text, kept


def show(table: dict[str, dict[str, float]], what: str, last: str) -> None:
    """Print a table."""
    methods = max(table.values(), key=len)
    print(f"{what:18}" + "".join(f"{name:>22}" for name in methods) + f"{'closed by ' + last:>26}")
    for fmt, row in table.items():
        cells = "".join(f"{row[name]:22.3f}" if name in row else " " * 22 for name in methods)
        share = f"{100 * closed(table, fmt, last):24.0f} %" if len(row) > 1 else ""
        print(f"{fmt:18}{cells}{share}")


def closed(table: dict[str, dict[str, float]], fmt: str, method: str) -> float:
    """Which share of the loss in perplexity that rounding to nearest costs a method avoids."""
    best, row = table["float32"]["nearest"], table[fmt]
    return (row["nearest"] - row[method]) / (row["nearest"] - best)


def draw(table: dict[str, dict[str, float]], path: str) -> None:
    """How much each format and method adds to the perplexity of float32."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    formats, best = [fmt for fmt in table if fmt != "float32"], table["float32"]["nearest"]
    methods = list(table[formats[0]])
    width = 0.8 / len(methods)
    for i, name in enumerate(methods):
        places = np.arange(len(formats)) + width * (i - (len(methods) - 1) / 2)
        bars = axes.bar(places, [table[fmt][name] - best for fmt in formats], 0.92 * width, label=name)
        axes.bar_label(bars, fmt="%.3f", fontsize=8)
    axes.set_xticks(range(len(formats)), formats, fontsize=8)
    axes.set(ylabel=f"perplexity above that of float32, {best:.2f}", title="a transformer, weights rounded")
    axes.margins(y=0.12)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer steps, a narrower network, one format, one method")
    parser.add_argument("--steps", type=int, help="default 400, with --small 60")
    parser.add_argument("--width", type=int, help="default 96, with --small 32")
    parser.add_argument("--plot", help="a PNG to draw the table into")
    chosen = parser.parse_args()
    steps, width = (60, 32) if chosen.small else (400, 96)
    some = slice(1 if chosen.small else None)
    methods = dict(list(METHODS.items())[:2]) if chosen.small else METHODS
    low_methods = {name: LOW_METHODS[name] for name in ("nearest", "rotate, gptq")} if chosen.small else LOW_METHODS
    given = trained(chosen.steps or steps, chosen.width or width)
    table = run(*given, FORMATS[some], methods)
    show(table, "weights", "gptq")
    show(run(*given, LOW_FORMATS[some], low_methods, low=True), "and activations", "rotate, gptq")
    if chosen.plot:
        draw(table, chosen.plot)


if __name__ == "__main__":
    main()
