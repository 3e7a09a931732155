"""Quantization-aware training on scikit-learn's digits: the accuracy of few-bit weights before and after it.

    python examples/qat_digits.py [--small] [--steps 600] [--tuning 300] [--plot digits.png]

A network of three layers is trained in float32. Its weights are rounded to a few bits (PTQ), and then the rounded
network is trained for more steps (QAT) and packed. The last column trains with the outputs of the float32 network as
targets in place of labels, and learns the scales, too (LSQ). Needs `pip install ".[flax,optax,study]"`. With `--small`
it takes some 20 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jchop as jc

FORMATS = ("int4(group=all)", "float4_e2m1fn(group=all)", "int2(group=all,rule=half_range)")
BATCH = 128


class Network(nnx.Module):
    """64 pixels, two hidden layers, ten digits."""

    def __init__(self, hidden: int, *, rngs: nnx.Rngs) -> None:
        sizes = (64, hidden, hidden, 10)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in zip(sizes, sizes[1:], strict=False)])  # noqa: RUF007

    def __call__(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def data() -> tuple[Any, Any, Any, Any]:
    """Training and test images and labels: 1297 and 500."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = jnp.asarray(x[order] / 16, "float32"), jnp.asarray(y[order])
    return x[:1297], y[:1297], x[1297:], y[1297:]


@partial(jax.jit, static_argnames=("graph", "steps", "rate"))
def _train(graph: Any, params: Any, rest: Any, x: Any, y: Any, key: Any, *, steps: int, rate: float) -> Any:
    optimizer = optax.adam(rate)

    def loss(params: Any, rest: Any, chosen: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        labels = y.ndim == 1
        error = optax.softmax_cross_entropy_with_integer_labels if labels else optax.softmax_cross_entropy
        value = error(model(x[chosen]), y[chosen]).mean()
        return value, nnx.state(model, nnx.Not(nnx.Param))  # the streams of keys advance

    def step(carry: Any, key: Any) -> Any:
        params, rest, state = carry
        chosen = jax.random.randint(key, (BATCH,), 0, len(x))
        (value, rest), gradient = jax.value_and_grad(loss, has_aux=True)(params, rest, chosen)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), rest, state), value

    (params, rest, _), _ = jax.lax.scan(step, (params, rest, optimizer.init(params)), jax.random.split(key, steps))
    return params, rest


def train(model: Any, x: Any, y: Any, *, steps: int, rate: float, seed: int) -> None:
    """Train a model in place; `y` are the labels, or the chances of ten digits for each image."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    nnx.update(model, *_train(graph, params, rest, x, y, jax.random.key(seed), steps=steps, rate=rate))


def accuracy(model: Any, x: Any, y: Any) -> float:
    """The share of correctly classified images."""
    return float((nnx.jit(lambda model, x: model(x))(model, x).argmax(-1) == y).mean())


def run(
    formats: tuple[str, ...] = FORMATS, *, steps: int, tuning: int, hidden: int = 256, seed: int = 0
) -> dict[str, tuple[float, float, float, int]]:
    """For each format the accuracy after PTQ, QAT and distillation, and the bytes of the parameters; float32 first."""
    x, y, test_x, test_y = data()
    model = Network(hidden, rngs=nnx.Rngs(seed))
    print(f"training {steps} steps in float32", file=sys.stderr, flush=True)
    train(model, x, y, steps=steps, rate=1e-3, seed=seed)
    exact, outputs = accuracy(model, test_x, test_y), jax.nn.softmax(model(x))
    table = {"float32": (exact, exact, exact, _bytes(model))}
    for fmt in formats:
        print(f"training {tuning} more steps, weights in {fmt}", file=sys.stderr, flush=True)
        before, results = accuracy(jc.nn.quantize(model, jc.Rule(weight=fmt)), test_x, test_y), []
        for targets, scales in ((y, None), (outputs, jc.LSQ())):
            rule = jc.Rule(weight=fmt, scale_from=scales)
            tuned = jc.nn.quantize(model, rule)
            train(tuned, x, targets, steps=tuning, rate=3e-4, seed=seed + 1)
            packed = jc.nn.quantize(tuned, rule, mode="ptq")
            results.append(accuracy(packed, test_x, test_y))
        after, distilled = results
        table[fmt] = (before, after, distilled, _bytes(packed))
    return table


def _bytes(model: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def draw(table: dict[str, tuple[float, float, float, int]], path: str) -> None:
    """Accuracy before and after training with rounded weights, a pair of bars for each format."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6))
    places = np.arange(len(table))[::-1]
    for number, label in enumerate(("rounded (PTQ)", "trained on (QAT)", "distilled")):
        bars = axes.barh(places + 0.26 * (1 - number), [row[number] for row in table.values()], 0.25, label=label)
        axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
    axes.set_yticks(places, [f"{name.split('(')[0]}\n{row[3] / 1024:.1f} KiB" for name, row in table.items()])
    axes.set(xlim=(0, 1.1), xlabel="accuracy on test images")
    axes.set_title("digits, weights of few bits", pad=26)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer steps, a smaller network, two formats")
    parser.add_argument("--steps", type=int, help="steps in float32; default 600, with --small 300")
    parser.add_argument("--tuning", type=int, help="steps with rounded weights; default 300, with --small 150")
    parser.add_argument("--hidden", type=int, help="width of the hidden layers; default 256, with --small 64")
    parser.add_argument("--plot", help="a PNG to draw the table into")
    chosen = parser.parse_args()
    steps, tuning, hidden = (300, 150, 64) if chosen.small else (600, 300, 256)
    formats = (FORMATS[0], FORMATS[-1]) if chosen.small else FORMATS
    table = run(formats, steps=chosen.steps or steps, tuning=chosen.tuning or tuning, hidden=chosen.hidden or hidden)
    print(f"{'weights':34}{'PTQ':>8}{'QAT':>8}{'distilled':>11}{'bytes':>10}")
    for name, (before, after, distilled, size) in table.items():
        print(f"{name:34}{before:8.3f}{after:8.3f}{distilled:11.3f}{size:10d}")
    if chosen.plot:
        draw(table, chosen.plot)


if __name__ == "__main__":
    main()
