"""Texts as tokens, losses, and training of all parameters or of adapters alone."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Iterator
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Array = jax.Array
BATCH, LENGTH = 8, 64


def texts() -> tuple[Array, Array]:
    """Two texts of Python's library, a byte a token: source code, and prose of its handbook."""
    code = "".join(map(inspect.getsource, (argparse, inspect, textwrap)))
    prose = "".join(topics[name] for name in sorted(topics))
    return tuple(jnp.asarray(np.frombuffer(text.encode("ascii", "replace"), np.uint8)) for text in (code, prose))  # type: ignore[return-value]


def pieces(text: Array, key: Array, count: int = BATCH) -> Array:
    """Random pieces of a text, one token longer than the input of the model."""
    starts = jax.random.randint(key, (count, 1), 0, len(text) - LENGTH)
    return text[starts + jnp.arange(LENGTH + 1)].astype(jnp.int32)


def batches(text: Array, count: int, seed: int) -> Iterator[Array]:
    """Inputs of the model, for GPTQ."""
    for key in jax.random.split(jax.random.key(seed), count):
        yield pieces(text, key)[:, :-1]


def loss_of(model: Any, given: Array) -> Array:
    """Mean cross-entropy of the next token, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(model(given[:, :-1]), given[:, 1:]).mean()


@nnx.jit
def evaluate(model: Any, given: Array) -> tuple[Array, Array]:
    """The loss and the logits on fixed pieces."""
    return loss_of(model, given), model(given[:, :-1])


@partial(jax.jit, static_argnames=("graph", "optimizer", "steps"))
def _train(graph: Any, optimizer: Any, params: Any, rest: Any, text: Array, key: Array, *, steps: int) -> Any:
    def step(carry: Any, key: Array) -> Any:
        params, state = carry
        loss, gradient = jax.value_and_grad(lambda params: loss_of(nnx.merge(graph, params, rest), pieces(text, key)))(
            params
        )
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), loss

    (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, steps))
    return params, losses


def train(model: Any, text: Array, optimizer: Any, *, wrt: Any, steps: int, seed: int) -> float:
    """Train the variables of a class in place; the mean loss of the last steps."""
    graph, params, rest = nnx.split(model, wrt, ...)
    params, losses = _train(graph, optimizer, params, rest, text, jax.random.key(seed), steps=steps)
    nnx.update(model, params)
    return float(losses[-10:].mean())
