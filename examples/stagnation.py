"""Training in bfloat16 at a small learning rate: nearest rounding hardly moves, stochastic rounding follows float32.

    python examples/stagnation.py --plot stagnation.png

A network with one hidden layer learns a linear map by AdamW at a learning rate of 1e-5. Its parameters are in bfloat16,
whose numbers near 0.05 are 2^-12 apart: most updates are less than half of that. Rounded to nearest they are lost;
rounded stochastically they count on average; with compensation (Kahan) they accumulate until they are large enough.
With `--small` it takes some 10 seconds of CPU time.
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

WIDE = 64
KEY = jax.random.key(0)
LAST = {
    "bfloat16, nearest": jc.optim.round_params("bfloat16"),
    "bfloat16, stochastic": jc.optim.round_params("bfloat16:stochastic", KEY),
    "bfloat16, compensated": jc.optim.compensate("bfloat16"),
}


def start(hidden: int) -> dict[str, jax.Array]:
    """Parameters of the network, in float32."""
    first, second = jax.random.split(jax.random.key(1))
    return {
        "in": jax.random.uniform(first, (WIDE, hidden), minval=-1, maxval=1) * WIDE**-0.5,
        "out": jax.random.uniform(second, (hidden, WIDE), minval=-1, maxval=1) * hidden**-0.5,
    }


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    """The mean squared error against a fixed linear map."""
    wanted = x @ (jax.random.normal(jax.random.key(2), (WIDE, WIDE)) * WIDE**-0.5)
    return ((jax.nn.relu(x @ params["in"]) @ params["out"] - wanted) ** 2).mean()


def train(last: Any, hidden: int, steps: int, learning_rate: float) -> np.ndarray:
    """The loss before each step; `last` rounds parameters, None keeps them in float32."""
    adamw = optax.adamw(learning_rate)
    params = start(hidden)
    dtype = jnp.float32 if last is None else jnp.bfloat16
    tx = adamw if last is None else optax.chain(adamw, last)
    x = jax.random.normal(jax.random.key(3), (512, WIDE))

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        loss, grads = jax.value_and_grad(loss_of)(wide, x)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    state = tx.init(params)  # moments in float32
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    if last is not None:
        state = (state[0], last.init(params))
    return np.asarray(jax.jit(lambda c: jax.lax.scan(step, c, None, length=steps)[1])((params, state)))


def curves(hidden: int, steps: int, learning_rate: float) -> dict[str, np.ndarray]:
    """The losses for each storage of the parameters."""
    kept = {"float32": None} | LAST
    losses = {}
    for name, last in kept.items():
        print(f"training {steps} steps, parameters in {name}", file=sys.stderr, flush=True)
        losses[name] = train(last, hidden, steps, learning_rate)
    return losses


def draw(losses: dict[str, np.ndarray], file: Path) -> None:
    """The losses, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for name, values in losses.items():
        panel.plot(values, label=name, linestyle="--" if name == "float32" else "-")
    panel.set(xlabel="step", ylabel="loss", title="Parameters in bfloat16, learning rate 1e-5")
    panel.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a short run")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the losses into")
    options = parser.parse_args()
    losses = curves(128, 60, 1e-5) if options.small else curves(1024, 1000, 1e-5)
    print(f"{'parameters':22}  first loss   last loss")
    for name, values in losses.items():
        print(f"{name:22}  {values[0]:10.5f}  {values[-1]:10.5f}")
    if options.plot:
        draw(losses, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
