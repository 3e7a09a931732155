"""A network of diffusion: down, across and up again, with the time in every block and skips by joining."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.case import expand, floats, nnx_case

TIME = 32


def time_features(t: Any) -> Any:
    """Sines and cosines (batch, width) of times (batch,)."""
    rates = jnp.exp(-jnp.log(1e4) * jnp.arange(TIME // 2) / (TIME // 2))
    return jnp.concatenate([jnp.sin(t[:, None] * rates), jnp.cos(t[:, None] * rates)], axis=-1)


class ResBlock(nnx.Module):
    def __init__(self, before: int, after: int, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.GroupNorm(before, 4, rngs=rngs), nnx.GroupNorm(after, 4, rngs=rngs)
        self.conv1 = nnx.Conv(before, after, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(after, after, (3, 3), rngs=rngs)
        self.time = nnx.Linear(TIME, 2 * after, rngs=rngs)
        self.skip = nnx.Conv(before, after, (1, 1), use_bias=False, rngs=rngs) if before != after else lambda x: x

    def __call__(self, x: Any, time: Any) -> Any:
        y = self.conv1(nnx.swish(self.norm1(x)))
        scale, shift = jnp.split(self.time(nnx.swish(time))[:, None, None, :], 2, axis=-1)
        y = self.conv2(nnx.swish(self.norm2(y) * (1 + scale) + shift))
        return self.skip(x) + y


class SpatialAttention(nnx.Module):
    """Attention between the places of an image, with projections that are convolutions of one place."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.GroupNorm(width, 4, rngs=rngs)
        self.qkv = nnx.Conv(width, 3 * width, (1, 1), rngs=rngs)
        self.proj = nnx.Conv(width, width, (1, 1), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        b, h, w, c = x.shape
        q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(b, h * w, 3 * c), 3, axis=-1)
        weights = jax.nn.softmax(jnp.einsum("bic,bjc->bij", q, k) * c**-0.5, axis=-1)
        return x + self.proj(jnp.einsum("bij,bjc->bic", weights, v).reshape(b, h, w, c))


class UNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.time1, self.time2 = nnx.Linear(TIME, 64, rngs=rngs), nnx.Linear(64, TIME, rngs=rngs)
        self.first = nnx.Conv(3, 32, (3, 3), rngs=rngs)
        self.down = ResBlock(32, 32, rngs)
        self.shrink = nnx.Conv(32, 64, (3, 3), strides=(2, 2), rngs=rngs)
        self.middle, self.attention = ResBlock(64, 64, rngs), SpatialAttention(64, rngs)
        self.grow = nnx.ConvTranspose(64, 32, (2, 2), strides=(2, 2), rngs=rngs)
        self.up = ResBlock(64, 32, rngs)
        self.last = nnx.Conv(32, 3, (3, 3), rngs=rngs)

    def __call__(self, x: Any, t: Any) -> Any:
        time = self.time2(nnx.swish(self.time1(time_features(t))))
        high = self.down(self.first(x), time)
        low = self.attention(self.middle(self.shrink(high), time))
        return self.last(self.up(jnp.concatenate([self.grow(low), high], axis=-1), time))


CASES = [
    nnx_case(
        "diffusion_unet",
        UNet,
        lambda: (floats(2, 8, 8, 3), jnp.array([3.0, 40.0])),
        expand(
            "{time1,time2,first,shrink,grow,last}/kernel",
            "{down,middle,up}/{conv1,conv2,time}/kernel",
            "up/skip/kernel",
            "attention/{qkv,proj}/kernel",
        ),
        expand(
            "{time1,time2,first,shrink,grow,last}/bias",
            "{down,middle,up}/{conv1,conv2,time}/bias",
            "{down,middle,up}/{norm1,norm2}/{scale,bias}",
            "attention/{qkv,proj}/bias",
            "attention/norm/{scale,bias}",
        ),
    )
]
