"""What a step of quantization-aware training costs beside one in float32: a network of convolutions, a transformer.

    python benchmarks/nn.py [--repeat 9] [--batch 64]

All steps run in one process, in turn, and are quoted as ratios of medians.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rounding import Case, measure, table

import jchop as jc

RULES = {
    "int8 weights": jc.nn.Rule(weight="int8(group=all)"),
    "int8 weights and activations": jc.nn.Rule(weight="int8(group=all)", activation="int8(group=tensor)"),
    "e4m3 weights and activations": jc.nn.Rule(weight="e4m3", activation="e4m3"),
    "float8_tensorwise": jc.nn.recipe("float8_tensorwise"),
    "mxfp8": jc.nn.recipe("mxfp8"),
}


class Images(nnx.Module):
    """Two convolutions and two layers, for images of 8 x 8."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(512, 64, rngs=rngs)
        self.output = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.conv2(nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))))
        return self.output(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


class Transformer(nnx.Module):
    """Two blocks of width 128 on sequences of 32."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.attention = nnx.List([nnx.MultiHeadAttention(4, 128, decode=False, rngs=rngs) for _ in range(2)])
        self.up = nnx.List([nnx.Linear(128, 512, rngs=rngs) for _ in range(2)])
        self.down = nnx.List([nnx.Linear(512, 128, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            x = x + attention(x)
            x = x + down(nnx.gelu(up(x)))
        return x


def step_of(model: Any, x: Any) -> Case:
    """A step of Adam on the mean square of the output."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradient)
        return loss

    return lambda: jax.block_until_ready(step(model, optimizer, x))


def cases_of(make: Any, x: Any) -> dict[str, Case]:
    cases = {"float32": step_of(make(rngs=nnx.Rngs(0)), x)}
    for name, rule in RULES.items():
        cases[name] = step_of(jc.nn.quantize(make(rngs=nnx.Rngs(0)), rule), x)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--batch", type=int, default=64)
    chosen = parser.parse_args()
    for make, shape in ((Images, (chosen.batch, 8, 8, 1)), (Transformer, (chosen.batch, 32, 128))):
        x = jax.random.normal(jax.random.key(0), shape)
        table(f"{make.__name__}, input {shape}", measure(cases_of(make, x), chosen.repeat), "float32", x.size)


if __name__ == "__main__":
    main()
