"""Handwritten digits in 8 bits and fewer: the FP8 recipe of Wang et al., and averages of weights in few bits (SWALP).

    python examples/swalp.py --plot swalp.png       # needs scikit-learn

A network 64-128-10 is trained by SGD with momentum, with weights, gradients, momentum and accumulator rounded as in
each row. The column "average" has the error of the average of few-bit weights over the second half of the run, stored
in float32 (Yang et al., arXiv 1904.11943). With `--small` it takes some 25 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jchop as jc

BATCH = 64
RATE = 0.05
#: The specs of each recipe; that of the paper is arXiv 1812.08011.
RECIPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "FP8 recipe": {
        "weight": "e5m2",
        "gradient": "e5m2",
        "momentum": "e6m9:stochastic",
        "accumulator": "e6m9:stochastic",
        "gradient_scale": 1 / 1000,
    },
    "e5m2, nearest": {"weight": "e5m2", "gradient": "e5m2", "momentum": "e5m2"},
    "e5m2, stochastic": {"weight": "e5m2:stochastic", "gradient": "e5m2:stochastic", "momentum": "e5m2:stochastic"},
    "bfp8, stochastic": {"weight": "bfp8:stochastic", "gradient": "bfp8:stochastic", "momentum": "bfp8:stochastic"},
    "bfp5, stochastic": {"weight": "bfp5:stochastic", "gradient": "bfp8:stochastic", "momentum": "bfp8:stochastic"},
}


def data() -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """(images, digits) to train on and to test with."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = jnp.asarray(digits.data[order] / 16, jnp.float32), jnp.asarray(digits.target[order])
    return (x[:1408], y[:1408]), (x[1408:], y[1408:])


def start() -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(1))
    return {
        "in": jax.random.normal(first, (64, 128)) * 64**-0.5,
        "a": jnp.zeros(128),
        "out": jax.random.normal(second, (128, 10)) * 128**-0.5,
        "b": jnp.zeros(10),
    }


def logits(params: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["in"] + params["a"]) @ params["out"] + params["b"]


def train(recipe: dict[str, Any], epochs: int) -> np.ndarray:
    """Errors on test data after each epoch, of the weights and of their average: float[epochs, 2]."""
    (x, y), (test_x, test_y) = data()
    batches = len(x) // BATCH
    scale = 1 / recipe.get("gradient_scale", 1)
    low = jc.optim.low_precision(optax.sgd(RATE, 0.9), **recipe, key=jax.random.key(0))
    tx = optax.chain(low, jc.optim.average_params(epochs // 2 * batches))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return scale * optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

    def step(carry: Any, batch: jax.Array) -> Any:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, x[batch], y[batch]), state, params)
        return (optax.apply_updates(params, updates), state), None

    def epoch(carry: Any, key: jax.Array) -> Any:
        order = jax.random.permutation(key, len(x)).reshape(batches, BATCH)
        params, state = jax.lax.scan(step, carry, order)[0]
        both = (params, jc.optim.averaged_params(state, params))
        wrong = jnp.stack([(logits(p, test_x).argmax(-1) != test_y).mean() for p in both])
        return (params, state), wrong

    keys = jax.random.split(jax.random.key(2), epochs)
    params = start()
    return np.asarray(jax.jit(lambda p: jax.lax.scan(epoch, (p, tx.init(p)), keys)[1])(params))


def draw(errors: dict[str, np.ndarray], file: Path) -> None:
    """Errors of weights (thin) and of their averages (thick), in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for i, (name, each) in enumerate(errors.items()):
        epochs = np.arange(1, len(each) + 1)
        panel.plot(epochs, 100 * each[:, 0], color=f"C{i}", linewidth=0.9, linestyle="--")
        panel.plot(epochs, 100 * each[:, 1], color=f"C{i}", linewidth=2, label=name)
    panel.set(
        xlabel="epoch", ylabel="error on test data (%)", title="weights (dashed) and their averages", ylim=(0, None)
    )
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a short run")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the errors into")
    options = parser.parse_args()
    names = ("float32", "FP8 recipe", "bfp5, stochastic") if options.small else tuple(RECIPES)
    epochs, errors = 4 if options.small else 30, {}
    for name in names:
        print(f"training {epochs} epochs, rounded to {name}", file=sys.stderr, flush=True)
        errors[name] = train(RECIPES[name], epochs)
    print(f"{'rounded to':18}  error  average")
    for name, each in errors.items():
        print(f"{name:18}  {each[-1, 0]:5.1%}  {each[-1, 1]:7.1%}")
    if options.plot:
        draw(errors, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
