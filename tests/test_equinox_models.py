"""Models of Equinox: quantized, trained as they round, packed, saved and loaded; no part of jchop knows the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import Further

import jchop as jc

eqx = pytest.importorskip("equinox")

further = Further()

RULE = jc.Rule(weight="int4(group=16)")


def case(name: str) -> tuple[Any, Any, Any, Any]:
    """A model, what it takes, what it is trained to give, and a loss of both."""
    from zoo.equinox_models import Decoder

    key, data = jax.random.split(jax.random.key(0))
    if name == "transformer":
        tokens = jax.random.randint(data, (4, 9), 0, 64)
        cross = optax.softmax_cross_entropy_with_integer_labels
        return Decoder(key), tokens[:, :-1], tokens[:, 1:], lambda y, wanted: cross(y, wanted).mean()
    squares = lambda y, wanted: ((y - wanted) ** 2).mean()  # noqa: E731
    return eqx.nn.MLP(16, 4, 32, 2, key=key), jax.random.normal(data, (8, 16)), jnp.ones((8, 4)), squares


def in_numpy(model: Any, x: Any) -> Any:
    """An MLP by the definition: groups of 16 inputs, a scale of their largest magnitude over 7, ties to even."""
    h = np.asarray(x, np.float64)
    for layer in model.layers:
        groups = np.asarray(layer.weight, np.float32).reshape(layer.out_features, -1, 16)
        scale = np.abs(groups).max(-1, keepdims=True) / np.float32(7)
        weight = (np.rint(np.clip(groups / scale, -8, 7)) * scale).reshape(layer.weight.shape)
        h = h @ weight.T.astype(np.float64) + np.asarray(layer.bias, np.float64)
        h = h if layer is model.layers[-1] else np.maximum(h, 0)
    return h


@further.first
@pytest.mark.parametrize("name", ["mlp", pytest.param("transformer", marks=pytest.mark.slow)])
def quantized_trained_saved_loaded(name: str, tmp_path: Path) -> None:
    model, x, wanted, measure = case(name)
    run = (lambda model, x: model(x)) if name == "transformer" else (lambda model, x: jax.vmap(model)(x))
    low = jc.quantize_fn(run, RULE)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model: Any, state: Any) -> tuple[Any, Any, Any]:
        loss, gradient = eqx.filter_value_and_grad(lambda model: measure(low(model, x), wanted))(model)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for _ in range(12):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]

    packed = low.pack(model, x)
    low_jit = eqx.filter_jit(low)
    y = low_jit(packed, x)
    np.testing.assert_array_equal(y, low_jit(model, x))
    if name == "mlp":
        np.testing.assert_allclose(y, in_numpy(model, x), rtol=1e-4, atol=1e-5)
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))  # noqa: E731
    assert size(packed) < 0.45 * size(model)

    # In a file of safetensors, and by the package's own functions.
    arrays, rest = eqx.partition(packed, eqx.is_array)
    jc.save(tmp_path / "model.safetensors", arrays)
    loaded = eqx.combine(jc.load(tmp_path / "model.safetensors", like=arrays), rest)
    np.testing.assert_array_equal(low_jit(loaded, x), y)
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", packed)
    again = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", jax.tree.map(lambda leaf: leaf, packed))
    np.testing.assert_array_equal(low_jit(again, x), y)


test_further = further.test()
