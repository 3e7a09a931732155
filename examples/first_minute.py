"""Three results in one picture: a variance that is lost, a network in four bits, an optimizer in a quarter.

    python examples/first_minute.py [--small] [--steps 600] [--plot results.png]

The variance runs in bfloat16, and `low.blame` divides its error among the lines. A classifier of scikit-learn's digits
is trained by Adam with states of 32 and of 8 bits, and its weights are then stored in fewer bits. Needs
`pip install ".[flax,optax,study]"`. With `--small` it takes some 20 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from qat_digits import Network, accuracy, data

import jchop as jc

FORMATS = ("int8(group=all)", "int4(group=32)", "nvfp4", "int3(group=32)", "int2(group=32)")
BATCH = 128


def variance(x: Any) -> Any:
    mean = jnp.mean(x)
    square = jnp.mean(x**2)
    return square - mean**2


def lost_variance() -> tuple[float, float, dict[str, float]]:
    """The variance in float32 and in bfloat16, and the part of its error that each line has made."""
    x = jax.random.uniform(jax.random.key(0), (64,), minval=10, maxval=11)
    low = jc.emulate(variance, "bfloat16")
    lines, start = inspect.getsourcelines(variance)
    parts: Counter[str] = Counter()
    for row in low.blame(x).rows:
        parts[lines[int(row.source.rpartition(":")[2]) - start].strip()] += row.contribution
    return float(variance(x)), float(low(x)), {line: parts[line] for line in parts if "def" not in line}


def train(optimizer: Any, steps: int, hidden: int) -> tuple[Any, Any, int]:
    """A classifier of digits, its loss at each step, and the bytes of the optimizer's state."""
    x, y, _, _ = data()
    graph, params = nnx.split(Network(hidden, rngs=nnx.Rngs(0)), nnx.Param)

    def loss(params: Any, chosen: Any) -> Any:
        logits = nnx.merge(graph, params)(x[chosen])
        return optax.softmax_cross_entropy_with_integer_labels(logits, y[chosen]).mean()

    def step(carry: Any, key: Any) -> Any:
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, jax.random.randint(key, (BATCH,), 0, len(x)))
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    state = optimizer.init(params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    (params, _), losses = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys))(
        (params, state), jax.random.split(jax.random.key(1), steps)
    )
    return nnx.merge(graph, params), losses, size


def pack(model: Any) -> dict[str, tuple[float, int]]:
    """The accuracy on test images and the bytes of the parameters, for each format of the weights."""
    _, _, x, y = data()
    table = {"float32": (accuracy(model, x, y), _bytes(model))}
    for fmt in FORMATS:
        packed = jc.nn.quantize(model, fmt, "weight_only")
        table[fmt] = accuracy(packed, x, y), _bytes(packed)
    return table


def _bytes(model: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def draw(lost: Any, table: Any, curves: Any, path: str) -> None:
    """The three results side by side."""
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    exact, low, parts = lost
    bars = left.barh([*parts], [abs(part) for part in parts.values()], color="tab:red")
    left.bar_label(bars, [f"{part:+.2f}" for part in parts.values()], padding=3, fontsize=8)
    left.invert_yaxis()
    left.set(title=f"variance {exact:.3f}, in bfloat16 {low:.3f}", xlabel="part of the error, by line")
    left.margins(x=0.2)
    left.tick_params(axis="y", labelsize=8, labelfontfamily="monospace")
    names = [name.partition("(")[0] for name in table]
    middle.plot([size / 1024 for _, size in table.values()], [100 * right for right, _ in table.values()], "o")
    for number, (name, (share, size)) in enumerate(zip(names, table.values(), strict=True)):
        middle.annotate(
            name,
            (size / 1024, 100 * share),
            xytext=(3, 5 if number % 2 else -12),
            textcoords="offset points",
            fontsize=8,
        )
    middle.set(
        title="a classifier in fewer bits",
        xlabel="KiB of parameters",
        ylabel="accuracy (%)",
        xscale="log",
        ylim=(88, 100),
    )
    middle.margins(x=0.25)
    middle.set_xticks([32, 64, 128, 256], [32, 64, 128, 256], minor=False)
    middle.minorticks_off()
    for name, (losses, size) in curves.items():
        style = {"linewidth": 1} if "8bit" in name else {"linewidth": 3, "alpha": 0.4}
        right.plot(losses, label=f"{name}: {size / 1024:.0f} KiB of state", **style)
    right.set(title="AdamW, 32- and 8-bit states", xlabel="step", ylabel="loss", yscale="log")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer steps, a smaller network")
    parser.add_argument("--steps", type=int, help="steps of training; default 600, with --small 200")
    parser.add_argument("--plot", help="a PNG to draw the results into")
    chosen = parser.parse_args()
    steps, hidden = chosen.steps or (200 if chosen.small else 600), 64 if chosen.small else 256
    lost = exact, low, parts = lost_variance()
    print(f"variance {exact:.4f}, in bfloat16 {low:.4f}; of the error", end=" ")
    print(", ".join(f"{part:+.3f} in `{line}`" for line, part in parts.items()))
    curves, model = {}, None
    for name, optimizer in {"adamw": optax.adamw(1e-3), "adamw8bit": jc.optim.adamw8bit(1e-3)}.items():
        print(f"training {steps} steps with {name}", file=sys.stderr, flush=True)
        trained, losses, size = train(optimizer, steps, hidden)
        model = model or trained
        curves[name] = losses, size
        print(f"{name:10} {size:8d} bytes of state, loss at the end {float(losses[-20:].mean()):.4f}")
    table = pack(model)
    for name, (share, size) in table.items():
        print(f"{name:18} accuracy {share:.3f} {size:8d} bytes")
    if chosen.plot:
        draw(lost, table, curves, chosen.plot)


if __name__ == "__main__":
    main()
