"""The data sets, the networks (Flax NNX), their training (Optax adam), and their accuracy under rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.flatten_util import ravel_pytree
from sklearn import datasets

from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec

#: Share of the samples kept for testing.
TEST_SHARE = 0.3


class Dataset(NamedTuple):
    """Standardised inputs as float32, labels as int32."""

    train_x: np.ndarray  # (samples, 8, 8, 1) images or (samples, features)
    train_y: np.ndarray  # (samples,)
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int


_DATASET_LOADERS = {
    "digits": datasets.load_digits,  # 1,797 images of 8 x 8 pixels (UCI optdigits)
    "breast-cancer": datasets.load_breast_cancer,  # 569 samples, 30 features (UCI WDBC)
    "wine": datasets.load_wine,  # 178 samples, 13 features (UCI wine)
}


def load_dataset(dataset: str, seed: int) -> Dataset:
    """A data set, split by a permutation from `seed` and standardised by mean and deviation of the training part.

    Images share one mean and deviation, so that pixels remain comparable; other features have one each.
    """
    bunch = _DATASET_LOADERS[dataset]()
    x, y = np.asarray(bunch.data, np.float64), np.asarray(bunch.target, np.int32)  # type: ignore[union-attr]
    order = np.random.default_rng(seed).permutation(len(x))
    count = round(TEST_SHARE * len(x))
    test, train = order[:count], order[count:]
    images = dataset == "digits"
    axis = None if images else 0
    deviation = x[train].std(axis=axis)
    x = (x - x[train].mean(axis=axis)) / np.where(deviation > 0, deviation, 1.0)
    x = (x.reshape(-1, 8, 8, 1) if images else x).astype(np.float32)
    return Dataset(x[train], y[train], x[test], y[test], int(y.max()) + 1)


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


class Evaluator:
    """A trained network as a function of one flat vector of parameters, with measurements under rounding.

    The network is compiled once, the rounding for each specification; with rounded activations the network is, too.
    """

    def __init__(self, graph: Any, params: Any, data: Dataset):
        # The weights with the weights of each output consecutive, for the groups of a scaled format.
        self.flat, unravel = ravel_pytree(jax.tree.map(lambda parameter: jnp.moveaxis(parameter, -1, 0), params))
        self._unravel = lambda flat: jax.tree.map(lambda parameter: jnp.moveaxis(parameter, 0, -1), unravel(flat))
        self._graph, self._x, self._y = graph, jnp.asarray(data.test_x), jnp.asarray(data.test_y)
        self._plain = jax.jit(lambda flat: self._measure(flat, None, None))

    def evaluate(self, flat: Array) -> tuple[float, float]:
        """(accuracy, cross-entropy) with the parameters `flat`."""
        accuracy, entropy = self._as_floats([self._plain(flat)])
        return float(accuracy[0]), float(entropy[0])

    def cell(self, spec: Spec, keys: Array, activations: bool) -> np.ndarray:
        """(accuracy, cross-entropy) of every run, one column each."""
        if spec.rounding.stochastic:
            vectors = jax.vmap(lambda key: round_to_format(self.flat, spec, jax.random.fold_in(key, 0)))(keys)
        else:
            vectors, keys = round_to_format(self.flat, spec)[None], keys[:1]
        if activations:
            measure = jax.jit(lambda flat, key: self._measure(flat, spec, key))
            runs = [measure(flat, key) for flat, key in zip(vectors, keys, strict=True)]
        else:
            runs = [self._plain(flat) for flat in vectors]
        return self._as_floats(runs)

    def _as_floats(self, runs: list[tuple[Array, Array]]) -> np.ndarray:
        """(accuracy, cross-entropy), a column for each run; the share of correct answers is computed in float64."""
        correct, entropy = np.asarray(jax.device_get(runs), np.float64).T
        return np.stack([correct / len(self._y), entropy])

    def _measure(self, flat: Array, spec: Spec | None, key: Array | None) -> tuple[Array, Array]:
        """(number of correct answers, mean cross-entropy) on the test set."""
        model = nnx.merge(self._graph, self._unravel(flat))
        logits = model(self._x) if spec is None else model(self._x, _activation_rounding(spec, key))
        is_correct = (logits.argmax(-1) == self._y) & ~jnp.isnan(logits).any(-1)
        return is_correct.sum(), cross_entropy(logits, self._y)


def _activation_rounding(spec: Spec, key: Any) -> Callable[[Array], Array]:
    """A function that rounds the activations of successive layers, each with a different key."""
    layer = 0

    def after(activations: Array) -> Array:
        nonlocal layer
        layer += 1
        return round_to_format(activations, spec, jax.random.fold_in(key, layer) if spec.rounding.stochastic else None)

    return after
