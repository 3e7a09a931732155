"""Data parallel training of a small transformer on eight devices: gradients are summed as floats, int8 and fp8 codes.

Prints the last loss of each run, and the bytes that one device sends in a step.

    python examples/data_parallel.py [--small] [--plot all_reduce.png]

With `--small` it takes some 30 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jchop as jc

RANKS, BATCH, LENGTH, VOCABULARY, WIDTH = 8, 4, 8, 16, 32
GROUP = 64
FORMATS = (f"int8(group={GROUP},scale=bfloat16)", f"e4m3fn(group={GROUP},scale=bfloat16)")


def parameters(key: jax.Array) -> dict[str, jax.Array]:
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "place": (LENGTH, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shapes[name]) * WIDTH**-0.5 for k, name in zip(keys, shapes, strict=True)}


def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens, and their targets: to repeat the token before; 30 % of them are drawn."""
    tokens, other = jax.random.randint(key, (2, BATCH, LENGTH), 0, VOCABULARY)
    drawn = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.3, tokens.shape)
    return tokens, jnp.where(drawn, other, jnp.roll(tokens, 1, -1))


def block(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Of a transformer: attention to earlier places, and two layers."""
    q, k, v = jnp.split(x @ params["qkv"], 3, -1)
    scores = q @ k.swapaxes(-1, -2) * WIDTH**-0.5 + jnp.where(jnp.tri(LENGTH), 0, -1e9)
    x = x + jax.nn.softmax(scores) @ v
    return x + jax.nn.relu(x @ params["up"]) @ params["down"]


def surprise(params: dict[str, jax.Array], x: jax.Array, target: jax.Array) -> jax.Array:
    """The mean of -log p of the targets; the first place has none."""
    logits = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.take_along_axis(logits[:, 1:], target[:, 1:, None], -1).mean()


def loss(params: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    tokens, target = batch(key)
    return surprise(params, block(params, params["embed"][tokens] + params["place"]), target)


def train(name: str, summed: Callable[[Any], Any], steps: int) -> np.ndarray:
    """The loss of each step, if gradients are summed over ranks by a function."""
    print(f"training {steps} steps with gradients summed as {name}", file=sys.stderr, flush=True)
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("data",), axis_types=(AxisType.Auto,))
    optimizer = optax.adam(3e-3)

    def local(params: Any, keys: jax.Array) -> jax.Array:
        def step(carry: Any, at: jax.Array) -> Any:
            params, state = carry
            own = jax.lax.pcast(params, "data", to="varying")  # so that the sum of gradients is ours to write
            value, gradient = jax.value_and_grad(loss)(own, jax.random.fold_in(keys[0], at))
            updates, state = optimizer.update(jax.tree.map(lambda g: g / RANKS, summed(gradient)), state)
            return (optax.apply_updates(params, updates), state), jax.lax.pmean(value, "data")

        return jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(steps))[1]

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    return np.asarray(run(parameters(jax.random.key(0)), jax.random.split(jax.random.key(1), RANKS)))


def draw(losses: dict[str, np.ndarray], sent: dict[str, float], file: Path) -> None:
    """The losses, and the bytes of a step, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for i, (name, values) in enumerate(losses.items()):
        left.plot(values, label=name.split("(")[0], linestyle=("-", "--", ":")[i % 3])
    left.set(xlabel="step", ylabel="loss", title="Gradients summed over eight devices")
    left.legend()
    right.bar([name.split("(")[0] for name in sent], [size / 1000 for size in sent.values()])
    right.set(ylabel="kilobytes sent in a step")
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="data parallel training with quantized gradients")
    parser.add_argument("--small", action="store_true", help="40 steps in place of 400")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the losses and the bytes into")
    options = parser.parse_args()
    steps = 40 if options.small else 400
    numbers = sum(p.size for p in parameters(jax.random.key(0)).values())
    share = 2 * (RANKS - 1) / RANKS * numbers  # numbers that a device sends in an all-reduce
    losses = {"float32": train("float32", lambda gradient: jax.lax.psum(gradient, "data"), steps)}
    exact, sent = losses["float32"][-20:].mean(), {"float32": 4 * share}
    print(f"{numbers} parameters, {RANKS} devices, {steps} steps")
    print(f"float32: loss {exact:.4f}, {sent['float32']:.0f} bytes sent in a step")
    for name in FORMATS:
        losses[name] = train(name, lambda gradient, name=name: jc.distributed.psum(gradient, "data", name), steps)
        found, sent[name] = losses[name][-20:].mean(), share * (1 + 2 / GROUP)
        print(f"{name}: loss {found:.4f} ({found / exact - 1:+.2%}), {sent[name]:.0f} bytes")
    if options.plot:
        draw(losses, sent, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
