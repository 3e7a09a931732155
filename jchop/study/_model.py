"""The networks (Flax NNX) and their training (Optax adam)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jchop.study._datasets import Dataset

Array = jax.Array
#: A function of the network's input and of each layer's output: rounding, or the identity.
ActivationHook = Callable[[Array], Array]

BATCH_SIZE = 64
LEARNING_RATE = 2e-3


def _keep_activations(activations: Array) -> Array:
    return activations


class ConvNet(nnx.Module):
    """Two 3 x 3 convolutions with max pooling between them, one hidden layer; for 8 x 8 images."""

    def __init__(self, classes: int, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(4 * 4 * 32, 64, rngs=rngs)
        self.output = nnx.Linear(64, classes, rngs=rngs)

    def __call__(self, x: Array, after: ActivationHook = _keep_activations) -> Array:
        x = after(nnx.relu(self.conv1(after(x))))
        x = after(nnx.relu(self.conv2(nnx.max_pool(x, (2, 2), (2, 2)))))
        x = after(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))
        return after(self.output(x))


class MLP(nnx.Module):
    """Two hidden layers; for feature vectors."""

    def __init__(self, features: int, classes: int, *, rngs: nnx.Rngs):
        self.hidden1 = nnx.Linear(features, 64, rngs=rngs)
        self.hidden2 = nnx.Linear(64, 32, rngs=rngs)
        self.output = nnx.Linear(32, classes, rngs=rngs)

    def __call__(self, x: Array, after: ActivationHook = _keep_activations) -> Array:
        x = after(nnx.relu(self.hidden1(after(x))))
        return after(self.output(after(nnx.relu(self.hidden2(x)))))


def make_model(data: Dataset, seed: int) -> tuple[Any, Any]:
    """(graph definition, parameters) of a fresh network that fits the data."""
    rngs = nnx.Rngs(seed)
    images = data.train_x.ndim == 4
    model = ConvNet(data.classes, rngs=rngs) if images else MLP(data.train_x.shape[1], data.classes, rngs=rngs)
    return nnx.split(model)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean over the samples, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(
    graph: Any, params: Any, data: Dataset, *, epochs: int, seed: int, report: Callable[[int, float], None]
) -> Any:
    """The parameters after `epochs` passes; `report` is called with the number of each and its mean loss."""
    optimizer = optax.adam(LEARNING_RATE)
    x, y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    batch = min(BATCH_SIZE, len(x))
    steps = len(x) // batch

    def loss(params: Any, samples: Array) -> Array:
        return cross_entropy(nnx.merge(graph, params)(x[samples]), y[samples])

    def step(carry: tuple[Any, Any], samples: Array) -> tuple[tuple[Any, Any], Array]:
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, samples)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    @partial(jax.jit, donate_argnums=(0, 1))
    def epoch(params: Any, state: Any, key: Array) -> tuple[Any, Any, Array]:
        order = jax.random.permutation(key, len(x))[: steps * batch].reshape(steps, batch)
        (params, state), losses = jax.lax.scan(step, (params, state), order)
        return params, state, losses.mean()

    state = optimizer.init(params)
    for epoch_index, key in enumerate(jax.random.split(jax.random.key(seed), epochs), start=1):
        params, state, mean = epoch(params, state, key)
        report(epoch_index, float(mean))
    return params
