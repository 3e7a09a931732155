"""A transformer of Llama's shape in Flax NNX, whose attributes have the names of Hugging Face's files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jchop as jc

Array = jax.Array
Caches = list[jc.KVCache]


@dataclass(frozen=True)
class Config:
    """The fields of config.json that the model needs."""

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 7
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def as_json(self) -> dict[str, Any]:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **asdict(self)}


#: Of `--small`.
SMALL = Config(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


def rotated(x: Array, positions: Array, theta: float) -> Array:
    """Rotary positions (Su et al., 2021) of heads, shape (batch, tokens, heads, head_dim)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * theta ** (-jnp.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [left * jnp.cos(angle) - right * jnp.sin(angle), right * jnp.cos(angle) + left * jnp.sin(angle)], axis=-1
    )


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    """Grouped-query attention: several heads of queries share one of keys and values."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        width, size, self.theta = config.hidden_size, config.head_dim, config.rope_theta
        self.size = size
        self.q_proj = linear(width, config.num_attention_heads * size, rngs)
        self.k_proj = linear(width, config.num_key_value_heads * size, rngs)
        self.v_proj = linear(width, config.num_key_value_heads * size, rngs)
        self.o_proj = linear(config.num_attention_heads * size, width, rngs)

    def __call__(self, x: Array, positions: Array, cache: jc.KVCache | None) -> tuple[Array, jc.KVCache | None]:
        query, key, value = (
            project(x).reshape(*x.shape[:-1], -1, self.size) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotated(query, positions, self.theta), rotated(key, positions, self.theta)
        if cache is None:
            y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        else:
            cache = cache.update(key, value, positions)
            y = jc.dot_product_attention(query, cache, positions=positions)
        return self.o_proj(y.reshape(*x.shape[:-1], -1)), cache


class Mlp(nnx.Module):
    """A gated layer (SwiGLU)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, rngs)
        self.up_proj = linear(config.hidden_size, config.intermediate_size, rngs)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, rngs)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention and a gated layer, each after a norm."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.input_layernorm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x: Array, positions: Array, cache: jc.KVCache | None) -> tuple[Array, jc.KVCache | None]:
        y, cache = self.self_attn(self.input_layernorm(x), positions, cache)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
    """Everything but the head."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)

    def __call__(self, tokens: Array, positions: Array, caches: Caches | None) -> tuple[Array, Caches]:
        x, after = self.embed_tokens(tokens), []
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x, cache = layer(x, positions, cache)
            after.append(cache)
        return self.norm(x), after


class Llama(nnx.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.model = Decoder(config, rngs=rngs)
        self.lm_head = None if config.tie_word_embeddings else linear(config.hidden_size, config.vocab_size, rngs)

    def __call__(self, tokens: Array) -> Array:
        """Logits of whole sequences, shape (batch, tokens, vocabulary)."""
        return self._run(tokens, jnp.arange(tokens.shape[1])[None], None)[0]

    def step(self, tokens: Array, positions: Array, caches: Caches) -> tuple[Array, Caches]:
        """Logits of new tokens, and the caches with them; a token at position -1 is padding."""
        return self._run(tokens, positions, caches)

    def _run(self, tokens: Array, positions: Array, caches: Caches | None) -> tuple[Array, Caches]:
        x, caches = self.model(tokens, positions, caches)
        return self.model.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x), caches
