"""An encoder and a decoder as in Whisper: convolutions over time, sinusoidal positions, attention across."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from zoo.case import expand, floats, nnx_case, tokens

MELS, VOCAB, WIDTH, HEADS = 16, 64, 32, 2


def sinusoids(length: int) -> np.ndarray:
    """Positions (length, width): sines, then cosines."""
    rates = np.exp(-np.log(10000.0) * np.arange(WIDTH // 2) / (WIDTH // 2 - 1))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class Attention(nnx.Module):
    """To itself, or to `source`; the key has no bias."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query, self.value = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.key = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any, source: Any = None, mask: Any = None) -> Any:
        def heads(y: Any) -> Any:
            return y.reshape(*y.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)

        source = x if source is None else source
        q, k, v = heads(self.query(x)), heads(self.key(source)), heads(self.value(source))
        scores = (q * q.shape[-1] ** -0.25) @ (k * q.shape[-1] ** -0.25).swapaxes(-1, -2)
        if mask is not None:
            scores = scores + mask
        y = jax.nn.softmax(scores, axis=-1) @ v
        return self.out(y.transpose(0, 2, 1, 3).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, across: bool, rngs: nnx.Rngs) -> None:
        self.attn, self.attn_ln = Attention(rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.cross_attn = Attention(rngs) if across else None
        self.cross_attn_ln = nnx.LayerNorm(WIDTH, rngs=rngs) if across else None
        self.mlp_ln = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mlp1, self.mlp2 = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)

    def __call__(self, x: Any, source: Any = None, mask: Any = None) -> Any:
        x = x + self.attn(self.attn_ln(x), mask=mask)
        if self.cross_attn is not None and self.cross_attn_ln is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), source)
        return x + self.mlp2(nnx.gelu(self.mlp1(self.mlp_ln(x)), approximate=False))


class Whisper(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(MELS, WIDTH, (3,), padding=1, rngs=rngs)
        self.conv2 = nnx.Conv(WIDTH, WIDTH, (3,), strides=2, padding=1, rngs=rngs)
        self.encoder, self.decoder = nnx.List([Block(False, rngs)]), nnx.List([Block(True, rngs)])
        self.ln_post, self.ln = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.token_embedding = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positional_embedding = nnx.Param(nnx.initializers.normal()(rngs.params(), (16, WIDTH)))

    def encode(self, mel: Any) -> Any:
        x = nnx.gelu(self.conv2(nnx.gelu(self.conv1(mel))))
        x = x + sinusoids(x.shape[1])
        for block in self.encoder:
            x = block(x)
        return self.ln_post(x)

    def __call__(self, mel: Any, tokens: Any) -> Any:
        source, length = self.encode(mel), tokens.shape[1]
        x = self.token_embedding(tokens) + self.positional_embedding[...][:length]
        mask = jnp.triu(jnp.full((length, length), -1e9), 1)
        for block in self.decoder:
            x = block(x, source, mask)
        return self.ln(x) @ jnp.transpose(self.token_embedding.embedding[...])


BLOCK, ACROSS = "{encoder,decoder}/0", "decoder/0/cross_attn"
CASES = [
    nnx_case(
        "whisper",
        Whisper,
        lambda: (floats(2, 16, MELS), tokens(2, 6)),
        expand(
            "{conv1,conv2}/kernel",
            BLOCK + "/attn/{query,key,value,out}/kernel",
            ACROSS + "/{query,key,value,out}/kernel",
            BLOCK + "/{mlp1,mlp2}/kernel",
            "token_embedding/embedding",
        ),
        expand(
            "{conv1,conv2}/bias",
            BLOCK + "/attn/{query,value,out}/bias",
            ACROSS + "/{query,value,out}/bias",
            BLOCK + "/{mlp1,mlp2}/bias",
            BLOCK + "/{attn_ln,mlp_ln}/{scale,bias}",
            "decoder/0/cross_attn_ln/{scale,bias}",
            "{ln_post,ln}/{scale,bias}",
            "positional_embedding",
        ),
        methods={"encode": lambda: (floats(2, 16, MELS),)},
    )
]
