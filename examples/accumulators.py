"""Training with the sums of every matrix product in few bits, rounded to nearest and stochastically.

    python examples/accumulators.py [--small] [--steps 200] [--plot accumulators.png]

A network of two layers learns scikit-learn's digits. Its weights, activations and gradients are float8_e5m2; the sums
of all three products of each layer, forward and backward, are formed sequentially in the accumulator of each line. In
e5m2, rounded to nearest, a sum stops growing when it is eight times its next term, and the network makes far more
errors. Rounded stochastically, a sum is right in the mean. Needs `pip install ".[flax,optax,study]"`. With `--small` it
takes some 35 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from flax import nnx
from qat_digits import accuracy, data, train

import jchop as jc

ACCUMULATORS = ("binary32", "e5m10", "e6m5", "float8_e5m2", "float8_e5m2:stochastic")


class Network(nnx.Module):
    """64 pixels, a hidden layer, ten digits."""

    def __init__(self, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.hidden, self.output = nnx.Linear(64, hidden, rngs=rngs), nnx.Linear(hidden, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.output(nnx.relu(self.hidden(x)))


def rule_of(accumulator: str) -> jc.Rule:
    """Operands in e5m2, sums in an accumulator."""
    low = "float8_e5m2"
    return jc.Rule(weight=low, activation=low, gradient=low, matmul=jc.MatmulSpec(accumulate=accumulator))


def run(accumulators: tuple[str, ...] = ACCUMULATORS, *, steps: int, hidden: int, seed: int = 0) -> dict[str, float]:
    """Accuracy on the test images after training with each accumulator."""
    x, y, test_x, test_y = data()
    table = {}
    for accumulator in accumulators:
        print(f"training {steps} steps, sums in {accumulator}", file=sys.stderr, flush=True)
        rngs = nnx.Rngs(seed, rounding=seed + 1)
        model = jc.nn.quantize(Network(hidden, rngs=rngs), rule_of(accumulator), rngs=rngs)
        train(model, x, y, steps=steps, rate=3e-3, seed=seed)
        table[accumulator] = accuracy(model, test_x, test_y)
    return table


def draw(table: dict[str, float], path: str) -> None:
    """A bar for each accumulator."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3))
    axes.barh(list(table)[::-1], list(table.values())[::-1])
    axes.set(xlim=(0, 1), xlabel="accuracy", title="digits, operands in e5m2, sums in")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer steps, a smaller network, two accumulators")
    parser.add_argument("--steps", type=int, help="default 200, with --small 60")
    parser.add_argument("--hidden", type=int, help="default 128, with --small 64")
    parser.add_argument("--plot", help="a PNG to draw the table into")
    chosen = parser.parse_args()
    steps, hidden = (60, 64) if chosen.small else (200, 128)
    names = ACCUMULATORS[-2:] if chosen.small else ACCUMULATORS
    table = run(names, steps=chosen.steps or steps, hidden=chosen.hidden or hidden)
    print(f"{'accumulator':28}{'accuracy':>10}")
    for name, value in table.items():
        print(f"{name:28}{value:10.3f}")
    if chosen.plot:
        draw(table, chosen.plot)


if __name__ == "__main__":
    main()
