"""A decoder as in Gemma: an einsum module of its own, gains of one plus a parameter, capped logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.case import expand, nnx_case, tokens
from zoo.nnx_llama import rotate

VOCAB, WIDTH, HEADS, GROUPS, HEAD, HIDDEN, LONGEST = 64, 32, 4, 2, 32, 64, 16


class Einsum(nnx.Module):
    """A weight and an einsum of it; the caller writes the subscripts."""

    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.w[...].shape

    def __call__(self, subscripts: str, x: Any) -> Any:
        return jnp.einsum(subscripts, x, self.w[...])


class RMSNorm(nnx.RMSNorm):
    """Flax's, but that its gain is one plus the parameter."""

    def __call__(self, x: Any) -> Any:
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        assert self.scale is not None
        return x * jax.lax.rsqrt(variance + 1e-6) * (1 + self.scale[...])


class ScaledEmbed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.input_embedding = nnx.Param(nnx.initializers.normal()(rngs.params(), (VOCAB, WIDTH)))

    def encode(self, tokens: Any) -> Any:
        return self.input_embedding[...][(tokens,)] * jnp.sqrt(WIDTH).astype(jnp.float32)

    def decode(self, x: Any) -> Any:
        return jnp.dot(x, self.input_embedding[...].T)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q_einsum = Einsum((HEADS, WIDTH, HEAD), rngs)
        self.kv_einsum = Einsum((2, GROUPS, WIDTH, HEAD), rngs)
        self.attn_vec_einsum = Einsum((HEADS, HEAD, WIDTH), rngs)

    @property
    def head_dim(self) -> int:
        return self.attn_vec_einsum.shape[1]

    def __call__(self, x: Any, positions: Any, cache: Any, mask: Any) -> tuple[Any, Any]:
        q = rotate(self.q_einsum("BTD,NDH->BTNH", x), positions) * self.head_dim**-0.5
        k, v = self.kv_einsum("BSD,CKDH->CBSKH", x)
        k = rotate(k, positions)
        if cache is not None:
            place = cache["end"] % LONGEST
            k = jax.lax.dynamic_update_slice(cache["k"], k, (0, place, 0, 0))
            v = jax.lax.dynamic_update_slice(cache["v"], v, (0, place, 0, 0))
            cache = {"k": k, "v": v, "end": cache["end"] + x.shape[1]}
        q = q.reshape(*q.shape[:2], GROUPS, HEADS // GROUPS, self.head_dim)
        logits = jnp.einsum("BTKGH,BSKH->BTKGS", q, k)
        logits = jnp.tanh(logits / 50.0) * 50.0
        probabilities = jax.nn.softmax(jnp.where(mask[:, :, None, None, :], logits, -2.4e38), axis=-1)
        encoded = jnp.einsum("BTKGS,BSKH->BTKGH", probabilities, v).reshape(*x.shape[:2], HEADS, self.head_dim)
        return self.attn_vec_einsum("BTNH,NHD->BTD", encoded), cache


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.pre_attention_norm, self.post_attention_norm = RMSNorm(WIDTH, rngs=rngs), RMSNorm(WIDTH, rngs=rngs)
        self.pre_ffw_norm = RMSNorm(WIDTH, rngs=rngs)
        self.attn = Attention(rngs)
        self.gating_einsum = nnx.Param(nnx.initializers.normal()(rngs.params(), (2, HIDDEN, WIDTH)))
        self.linear = nnx.Param(nnx.initializers.normal()(rngs.params(), (HIDDEN, WIDTH)))

    def __call__(self, x: Any, positions: Any, cache: Any, mask: Any) -> tuple[Any, Any]:
        y, cache = self.attn(self.pre_attention_norm(x), positions, cache, mask)
        x = x + self.post_attention_norm(y)
        gate, up = jnp.einsum("BTF,NHF->NBTH", self.pre_ffw_norm(x), self.gating_einsum[...])
        return x + (jax.nn.gelu(gate) * up) @ self.linear[...], cache


class Gemma(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedder = ScaledEmbed(rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.final_norm = RMSNorm(WIDTH, rngs=rngs)

    def embed(self, tokens: Any) -> Any:
        return self.embedder.encode(tokens)

    def decode(self, tokens: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        """Logits and the next cache, of tokens at positions."""
        mask = jnp.arange(LONGEST)[None, None, :] <= positions[:, :, None]
        return self._run(self.embed(tokens), positions, cache, mask)

    def __call__(self, tokens: Any) -> Any:
        length = tokens.shape[1]
        mask = jnp.tril(jnp.ones((1, length, length), bool))
        return self._run(self.embed(tokens), jnp.arange(length)[None], {}, mask)[0]

    def _run(self, x: Any, positions: Any, cache: Any, mask: Any) -> tuple[Any, Any]:
        new = {}
        for number, layer in enumerate(self.layers):
            x, new[f"layer_{number}"] = layer(x, positions, cache.get(f"layer_{number}"), mask)
        logits = self.embedder.decode(self.final_norm(x))
        return jnp.tanh(logits / 30.0) * 30.0, new


def empty_cache() -> dict[str, Any]:
    zeros = jnp.zeros((2, LONGEST, GROUPS, HEAD))
    return {f"layer_{number}": {"k": zeros, "v": zeros, "end": jnp.int32(0)} for number in range(2)}


CASES = [
    nnx_case(
        "gemma",
        Gemma,
        lambda: (tokens(2, 8),),
        expand(
            "embedder/input_embedding",
            "layers/{0,1}/attn/{q_einsum,kv_einsum,attn_vec_einsum}/w",
            "layers/{0,1}/{gating_einsum,linear}",
        ),
        expand("layers/{0,1}/{pre_attention_norm,post_attention_norm,pre_ffw_norm}/scale", "final_norm/scale"),
        methods={
            "embed": lambda: (tokens(2, 8),),
            "decode": lambda: (tokens(2, 1), jnp.zeros((2, 1), jnp.int32), empty_cache()),
        },
    )
]
