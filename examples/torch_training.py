"""A PyTorch network trained in 8 bits by a published recipe, and by parts of the recipe.

    python examples/torch_training.py [--small] [--epochs 20] [--hidden 128]

The recipe is that of Wang et al. (arXiv 1812.08011) as in QPyTorch: weights, activations, errors and gradients in e5m2,
momentum and an accumulator of the weights in e6m9 with stochastic rounding, the loss multiplied by 1000. Without the
accumulator, e5m2 weights lose small updates, unless they are rounded stochastically. The data are scikit-learn's
digits. Needs `pip install ".[torch,study]"`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import jchop as jc

LOSS_SCALE = 1000.0
BATCH = 64
SIGNALS = jc.Rule(activation="float8_e5m2", gradient="float8_e5m2")
IBM: dict[str, Any] = {
    "weight": "float8_e5m2",
    "gradient": "float8_e5m2",
    "momentum": "e6m9:stochastic",
    "accumulator": "e6m9:stochastic",
}
#: The arguments of the optimizer; None trains in float32.
RECIPES: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "e5m2, accumulator in e6m9": IBM,
    "e5m2 alone, to nearest": {"weight": "float8_e5m2", "gradient": "float8_e5m2", "momentum": "float8_e5m2"},
    "e5m2 alone, stochastic": dict.fromkeys(("weight", "gradient", "momentum"), "float8_e5m2:stochastic"),
}


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training and test images and labels: 1297 and 500."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    images, labels = torch.tensor(x[order] / 16, dtype=torch.float32), torch.tensor(y[order])
    return images[:1297], labels[:1297], images[1297:], labels[1297:]


def batches(count: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """The indices of the samples, in a new order each time."""
    yield from torch.randperm(count, generator=generator).split(BATCH)


def train(recipe: dict[str, Any] | None, epochs: int, hidden: int, seed: int = 0) -> float:
    """The accuracy on the test images after training by a recipe."""
    x, y, test_x, test_y = data()
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    scale = 1.0 if recipe is None else LOSS_SCALE
    if recipe is not None:
        model = jc.torch.quantize(model, SIGNALS, seed=seed)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if recipe is not None:
        optimizer = jc.torch.OptimLP(optimizer, **recipe, gradient_scale=1 / scale, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in batches(len(x), generator):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
            (scale * loss).backward()
            optimizer.step()
    with torch.no_grad():
        return (model(test_x).argmax(-1) == test_y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer epochs and a smaller network")
    parser.add_argument("--epochs", type=int, help="default 20, with --small 6")
    parser.add_argument("--hidden", type=int, help="width of the hidden layer; default 128, with --small 32")
    options = parser.parse_args()
    epochs = options.epochs if options.epochs is not None else 6 if options.small else 20
    hidden = options.hidden or (32 if options.small else 128)
    for name, recipe in RECIPES.items():
        print(f"training {epochs} epochs: {name}", file=sys.stderr, flush=True)
        print(f"{name:28}{train(recipe, epochs, hidden):8.3f}", flush=True)


if __name__ == "__main__":
    main()
