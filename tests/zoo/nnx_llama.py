"""A decoder as in Llama and Qwen: rotary positions, grouped queries, a gated feed-forward, tied embeddings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.case import expand, nnx_case, tokens

VOCAB, WIDTH, HEADS, GROUPS, HEAD, HIDDEN, LONGEST = 64, 32, 4, 2, 16, 64, 16


class RMSNorm(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: Any) -> Any:
        x32 = x.astype(jnp.float32)
        y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)
        return (y * self.scale[...]).astype(x.dtype)


def rotate(x: Any, positions: Any) -> Any:
    """Rotary positions of (batch, length, heads, head)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


class Attention(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.q = nnx.Linear(WIDTH, HEADS * HEAD, use_bias=True, rngs=rngs)  # Qwen 2 has these biases
        self.k = nnx.Linear(WIDTH, GROUPS * HEAD, use_bias=True, rngs=rngs)
        self.v = nnx.Linear(WIDTH, GROUPS * HEAD, use_bias=True, rngs=rngs)
        self.o = nnx.Linear(HEADS * HEAD, WIDTH, use_bias=False, rngs=rngs)

    def init_cache(self, batch: int) -> None:
        self.keys = nnx.Cache(jnp.zeros((batch, LONGEST, GROUPS, HEAD)))
        self.values = nnx.Cache(jnp.zeros((batch, LONGEST, GROUPS, HEAD)))

    def __call__(self, x: Any, positions: Any, mask: Any, start: Any = None) -> Any:
        batch, length, _ = x.shape
        q = rotate(self.q(x).reshape(batch, length, HEADS, HEAD), positions)
        k = rotate(self.k(x).reshape(batch, length, GROUPS, HEAD), positions)
        v = self.v(x).reshape(batch, length, GROUPS, HEAD)
        if start is not None:
            self.keys[...] = k = jax.lax.dynamic_update_slice(self.keys[...], k, (0, start, 0, 0))
            self.values[...] = v = jax.lax.dynamic_update_slice(self.values[...], v, (0, start, 0, 0))
        q = q.reshape(batch, length, GROUPS, HEADS // GROUPS, HEAD)
        scores = jnp.einsum("btghd,bsgd->bghts", q, k) * HEAD**-0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
        return self.o(jnp.einsum("bghts,bsgd->btghd", weights, v).reshape(batch, length, -1))


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.attn_norm, self.mlp_norm = RMSNorm(WIDTH, rngs=rngs), RMSNorm(WIDTH, rngs=rngs)
        self.attn = Attention(rngs=rngs)
        self.gate = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Any, positions: Any, mask: Any, start: Any = None) -> Any:
        x = x + self.attn(self.attn_norm(x), positions, mask, start)
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs=rngs) for _ in range(2)])
        self.norm = RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        length = tokens.shape[1]
        return self._run(tokens, jnp.arange(length)[None], jnp.tril(jnp.ones((length, length), bool)), None)

    def decode(self, tokens: Any, start: Any) -> Any:
        """The logits of one more token, at a place in the cache."""
        for layer in self.layers:
            if not hasattr(layer.attn, "keys"):
                layer.attn.init_cache(tokens.shape[0])
        return self._run(tokens, jnp.full((1, 1), start), jnp.arange(LONGEST)[None, :] <= start, start)

    def _run(self, tokens: Any, positions: Any, mask: Any, start: Any) -> Any:
        x = self.embed.embedding[...][tokens]
        for layer in self.layers:
            x = layer(x, positions, mask, start)
        return self.norm(x) @ self.embed.embedding[...].T


CASES = [
    nnx_case(
        "llama",
        Llama,
        lambda: (tokens(2, 8),),
        expand("embed/embedding", "layers/{0,1}/attn/{q,k,v,o}/kernel", "layers/{0,1}/{gate,up,down}/kernel"),
        expand("layers/{0,1}/attn/{q,k,v}/bias", "layers/{0,1}/{attn_norm,mlp_norm}/scale", "norm/scale"),
        methods={"decode": lambda: (tokens(2, 1), jnp.int32(0))},
    )
]
