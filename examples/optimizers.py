"""Optimizers with packed state: loss curves and bytes of AdamW in 32, 8 and 4 bits.

    python examples/optimizers.py --plot optimizers.png

A 256-1024-256 network learns from a network of fixed random weights, with a new batch in each step. The script prints
the bytes of optimizer state for each parameter, counted on the arrays, the last loss, and the largest deviation of the
loss from that of `optax.adamw`. With `--small` it takes some 20 seconds of CPU time.
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

RATE = 1e-3
OPTIMIZERS = {
    "optax.adamw": optax.adamw(RATE, weight_decay=1e-2),
    "adamw8bit": jc.optim.adamw8bit(RATE),
    "adamw_fp8": jc.optim.adamw_fp8(RATE),
    "adamw4bit": jc.optim.adamw4bit(RATE),
}


def start(wide: int, hidden: int) -> dict[str, jax.Array]:
    """Matrices of (outputs, inputs), so that the groups of packed moments lie within an output."""
    first, second = jax.random.split(jax.random.key(1))
    return {
        "in": jax.random.uniform(first, (hidden, wide), minval=-1, maxval=1) * wide**-0.5,
        "out": jax.random.uniform(second, (wide, hidden), minval=-1, maxval=1) * hidden**-0.5,
        "bias": jnp.zeros(hidden),
    }


def loss_of(params: Any, key: jax.Array) -> jax.Array:
    wide = params["in"].shape[1]
    x = jax.random.normal(key, (256, wide))
    teacher = jax.random.normal(jax.random.key(2), (2, wide, wide)) * wide**-0.5
    wanted = jax.nn.relu(x @ teacher[0]) @ teacher[1] * 2**0.5
    return ((jax.nn.relu(x @ params["in"].T + params["bias"]) @ params["out"].T - wanted) ** 2).mean()


def train(tx: Any, params: Any, steps: int) -> tuple[np.ndarray, int]:
    """The loss before each step, and the bytes of the state."""

    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_of)(params, key)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    keys = jax.random.split(jax.random.key(3), steps)
    state = jax.jit(tx.init)(params)
    (_, after), losses = jax.jit(lambda p, s: jax.lax.scan(step, (p, s), keys))(params, state)
    return np.asarray(losses), jc.optim.state_report(after).nbytes


def draw(losses: dict[str, np.ndarray], file: Path) -> None:
    """The losses, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for i, (name, values) in enumerate(losses.items()):
        panel.plot(values, label=name, linestyle=("-", "--", ":", "-.")[i % 4])
    panel.set(xlabel="step", ylabel="loss", title="AdamW with a packed state")
    panel.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a smaller network, fewer steps and optimizers")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the losses into")
    options = parser.parse_args()
    names = ("optax.adamw", "adamw_fp8", "adamw4bit") if options.small else tuple(OPTIMIZERS)
    params = start(64, 128) if options.small else start(256, 1024)
    count = sum(p.size for p in params.values())
    steps, found = 20 if options.small else 100, {}
    for name in names:
        print(f"training {steps} steps by {name}", file=sys.stderr, flush=True)
        found[name] = train(OPTIMIZERS[name], params, steps)
    reference = found["optax.adamw"][0]
    print(f"{'optimizer':12}  bytes a parameter   last loss  strays by at most")
    for name, (losses, size) in found.items():
        far = np.abs(losses / reference - 1).max()
        print(f"{name:12}  {size / count:17.3f}  {losses[-1]:10.5f}  {far:17.2%}")
    if options.plot:
        draw({name: losses for name, (losses, _) in found.items()}, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
