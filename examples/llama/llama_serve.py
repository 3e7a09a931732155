"""Serving: a prompt and tokens by one compiled function each, with a packed cache, live or exported."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export
from llama_model import Caches, Config

import jchop as jc

Array = jax.Array


def empty_caches(config: Config, batch: int, length: int, spec: str | None) -> Caches:
    """A cache for each layer, for sequences of some tokens."""
    shape = (batch, length, config.num_key_value_heads, config.head_dim)
    return [jc.KVCache.full(shape, keys=spec, values=spec) for _ in range(config.num_hidden_layers)]


class Served(NamedTuple):
    """Logits of the prompts, the new tokens, tokens per second, and bytes of weights and caches."""

    logits: np.ndarray
    tokens: np.ndarray
    prefilled: float
    decoded: float
    weights: int
    cache: int


class Server:
    """A model as two compiled functions of flat lists of arrays, which `jax.export` takes as they are.

    `prefill` reads prompts, shape (batch, tokens). `decode` takes one token of each sequence and gives the next one.
    """

    def __init__(self, model: Any, caches: Caches) -> None:
        graph, state = nnx.split(model)
        self.weights, structure = jax.tree.flatten(state)
        self.caches, form = jax.tree.flatten(caches)

        def run(weights: Any, caches: Any, tokens: Array, start: Array) -> tuple[Array, list[Array]]:
            whole = nnx.merge(graph, jax.tree.unflatten(structure, weights))
            positions = start[:, None] + jnp.arange(tokens.shape[1])
            logits, after = whole.step(tokens, positions, jax.tree.unflatten(form, caches))
            return logits, jax.tree.leaves(after)

        def decode(weights: Any, caches: Any, token: Array, start: Array) -> tuple[Array, list[Array]]:
            logits, caches = run(weights, caches, token[:, None], start)
            return jnp.argmax(logits[:, 0], axis=-1), caches

        self.prefill, self.decode = jax.jit(run), jax.jit(decode, donate_argnums=1)

    def exported(self, prompt: Array) -> tuple[bytearray, bytearray]:
        """Both functions as data of `jax.export`, without weights, for prompts of this shape."""
        start = jnp.zeros(len(prompt), jnp.int32)
        token = jnp.zeros(len(prompt), jnp.int32)
        prefill = export.export(self.prefill)(self.weights, self.caches, prompt, start)
        return prefill.serialize(), export.export(self.decode)(self.weights, self.caches, token, start).serialize()

    def load(self, prefill: bytes | bytearray, decode: bytes | bytearray) -> None:
        """Run exported functions in place of the live ones."""
        self.prefill = jax.jit(export.deserialize(bytearray(prefill)).call)
        self.decode = jax.jit(export.deserialize(bytearray(decode)).call, donate_argnums=1)

    def serve(self, prompt: Array, count: int) -> Served:
        """Read prompts and continue each of them by some tokens."""
        position = jnp.zeros(len(prompt), jnp.int32)
        jax.block_until_ready(self.prefill(self.weights, self.caches, prompt, position))  # compiled
        start = time.perf_counter()
        logits, caches = jax.block_until_ready(self.prefill(self.weights, self.caches, prompt, position))
        read = time.perf_counter() - start
        token, position = jnp.argmax(logits[:, -1], axis=-1), position + prompt.shape[1]
        found, start = [token], 0.0
        for turn in range(count - 1):
            token, caches = self.decode(self.weights, caches, token, position)
            found.append(token)
            position = position + 1
            if turn == 0:  # compiled
                token.block_until_ready()
                start = time.perf_counter()
        jax.block_until_ready(token)
        written = time.perf_counter() - start
        return Served(
            np.asarray(logits),
            np.stack(found, axis=1),
            prompt.size / read,
            len(prompt) * (count - 2) / written,
            sum(leaf.nbytes for leaf in self.weights),
            sum(leaf.nbytes for leaf in self.caches),
        )
