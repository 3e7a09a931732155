"""A trained network under rounding: its accuracy and cross-entropy for each specification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.flatten_util import ravel_pytree

from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec
from jchop.study._datasets import Dataset
from jchop.study._model import cross_entropy

Array = jax.Array


class Evaluator:
    """A trained network as a function of one flat vector of parameters, with measurements under rounding.

    The network is compiled once, the rounding for each specification; with rounded activations the network is, too.
    """

    def __init__(self, graph: Any, params: Any, data: Dataset):
        self.flat, unravel = ravel_pytree(jax.tree.map(_outputs_first, params))
        self._unravel = lambda flat: jax.tree.map(_outputs_last, unravel(flat))
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


def _outputs_first(parameter: Array) -> Array:
    """The weights with those of each output consecutive, for the groups of a scaled format."""
    return jnp.moveaxis(parameter, -1, 0)


def _outputs_last(parameter: Array) -> Array:
    return jnp.moveaxis(parameter, 0, -1)


def _activation_rounding(spec: Spec, key: Any) -> Callable[[Array], Array]:
    """A function that rounds the activations of successive layers, each with a different key."""
    layer = 0

    def after(activations: Array) -> Array:
        nonlocal layer
        layer += 1
        return round_to_format(activations, spec, jax.random.fold_in(key, layer) if spec.rounding.stochastic else None)

    return after
