"""A small transformer that learns to continue source code, letter by letter, in 8-bit and 4-bit arithmetic.

    python examples/transformer_training.py [--small] [--steps 300] [--plot training.png]

The same network is trained in float32, with all products in bfloat16, with e4m3fn forward and stochastic e5m2
gradients, and by the recipes mxfp8, nvfp4, nvfp4_quartet2, mxfp4 and mxfp4_quartet, whose blocks share scales; "mxfp4
backward" has its forward products in bfloat16. `--formats float32,nvfp4` trains some of them. The text is the
source of a few modules of Python's library. Needs `pip install ".[flax,optax]"`. With `--small` it takes some 20
seconds of CPU time.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jchop as jc

BATCH, LENGTH = 16, 32
PRODUCTS = "blocks"  # embeddings and the last layer stay in float32
ARITHMETICS: dict[str, jc.Rule | None] = {
    "float32": None,
    "bfloat16": jc.Rule(PRODUCTS, weight="bfloat16", activation="bfloat16", gradient="bfloat16"),
    "e4m3fn and stochastic e5m2": jc.Rule(
        PRODUCTS, weight="float8_e4m3fn:saturate", activation="float8_e4m3fn:saturate", gradient="e5m2:stochastic"
    ),
    **{name: jc.nn.recipe(name, PRODUCTS) for name in ("mxfp8", "nvfp4", "nvfp4_quartet2", "mxfp4", "mxfp4_quartet")},
    "mxfp4 backward": jc.nn.recipe("mxfp4", PRODUCTS, weight="bfloat16", activation="bfloat16"),
}


class Block(nnx.Module):
    """Attention and two layers, each after a norm."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Letters in, scores of the next letter out."""

    def __init__(self, letters: int, width: int, depth: int, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(letters, width, rngs=rngs)
        self.places = nnx.Embed(LENGTH, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, letters, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> tuple[Any, int]:
    """Source code as indices of letters, and the number of letters."""
    source = "".join(map(inspect.getsource, (argparse, textwrap)))
    letters, tokens = np.unique(list(source), return_inverse=True)
    return jnp.asarray(tokens), len(letters)


def windows(tokens: Any, starts: Any) -> Any:
    """Pieces of the text, one letter longer than the input of the network."""
    return tokens[starts[:, None] + jnp.arange(LENGTH + 1)]


def loss_of(model: Any, pieces: Any) -> Any:
    """Mean cross-entropy of the next letter, in nats."""
    scores = model(pieces[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, pieces[:, 1:]).mean()


@partial(jax.jit, static_argnames=("graph", "steps"))
def _train(graph: Any, params: Any, rest: Any, tokens: Any, key: Any, *, steps: int) -> Any:
    optimizer = optax.adam(2e-3)

    def loss(params: Any, rest: Any, pieces: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        return loss_of(model, pieces), nnx.state(model, nnx.Not(nnx.Param))  # the streams of keys advance

    def step(carry: Any, key: Any) -> Any:
        params, rest, state = carry
        pieces = windows(tokens, jax.random.randint(key, (BATCH,), 0, len(tokens) - LENGTH - 1))
        (value, rest), gradient = jax.value_and_grad(loss, has_aux=True)(params, rest, pieces)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), rest, state), value

    start = (params, rest, optimizer.init(params))
    (params, rest, _), losses = jax.lax.scan(step, start, jax.random.split(key, steps))
    return params, rest, losses


def train(model: Any, tokens: Any, *, steps: int, seed: int = 0) -> np.ndarray:
    """Train a model in place; the loss of each step."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    params, rest, losses = _train(graph, params, rest, tokens, jax.random.key(seed), steps=steps)
    nnx.update(model, params, rest)
    return np.asarray(losses)


def make(letters: int, *, width: int, depth: int) -> Transformer:
    return Transformer(letters, width, depth, rngs=nnx.Rngs(0))


def run(names: Iterable[str] = ARITHMETICS, *, steps: int, width: int, depth: int) -> dict[str, np.ndarray]:
    """The losses of each arithmetic, from the same start on the same pieces."""
    tokens, letters = text()
    losses = {}
    for name in names:
        print(f"training {steps} steps in {name}", file=sys.stderr, flush=True)
        model, rule = make(letters, width=width, depth=depth), ARITHMETICS[name]
        if rule is not None:
            inputs = (tokens[None, :LENGTH],) if rule.rotation and rule.rotation.forward else None  # of programs
            model = jc.nn.quantize(model, rule, inputs=inputs, rngs=nnx.Rngs(rounding=1))
        losses[name] = train(model, tokens, steps=steps)
    return losses


def draw(losses: dict[str, np.ndarray], path: str) -> None:
    """The curves of the losses, smoothed over twenty steps, and what they are above the first."""
    import matplotlib.pyplot as plt

    figure, (whole, above) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    first = next(iter(losses))
    for name, values in losses.items():
        window = np.ones(min(20, len(values))) / min(20, len(values))
        whole.plot(np.convolve(values, window, "valid"), label=name)
        above.plot(np.convolve(values - losses[first], window, "valid"))
    whole.set(xlabel="step", ylabel="cross-entropy in nats", title="a transformer on source code")
    above.set(xlabel="step", title=f"above {first}")
    whole.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer steps, a smaller network, without the recipes")
    parser.add_argument("--steps", type=int, help="default 300, with --small 60")
    parser.add_argument("--width", type=int, help="default 64, with --small 16")
    parser.add_argument("--depth", type=int, help="default 2, with --small 1")
    parser.add_argument("--formats", help="some of the arithmetics, with commas; default all, with --small two")
    parser.add_argument("--plot", help="a PNG to draw the curves into")
    chosen = parser.parse_args()
    steps, width, depth = (60, 16, 1) if chosen.small else (300, 64, 2)
    few = ("float32", "e4m3fn and stochastic e5m2") if chosen.small else tuple(ARITHMETICS)
    names = chosen.formats.split(",") if chosen.formats else few
    unknown = [name for name in names if name not in ARITHMETICS]
    if unknown:
        parser.error(f"--formats {','.join(unknown)}: known are {', '.join(ARITHMETICS)}")
    losses = run(names, steps=chosen.steps or steps, width=chosen.width or width, depth=chosen.depth or depth)
    for name, values in losses.items():
        print(f"{name:24} first {values[0]:.3f}  last {values[-20:].mean():.3f}")
    if chosen.plot:
        draw(losses, chosen.plot)


if __name__ == "__main__":
    main()
