"""Networks of images: a vision transformer, a residual network with batch statistics, a mixer of patches."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from zoo.case import expand, floats, nnx_case

WIDTH, CLASSES = 32, 10


class EncoderBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, WIDTH, 64, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(WIDTH, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, WIDTH, rngs=rngs))

    def __call__(self, x: Any) -> Any:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, WIDTH, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.cls_token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.position = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, 5, WIDTH)))
        self.encoder = nnx.Sequential(*[EncoderBlock(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        x = self.patches(images).reshape(images.shape[0], -1, WIDTH)
        first = jnp.broadcast_to(self.cls_token[...], (x.shape[0], 1, WIDTH))
        x = self.encoder(jnp.concatenate([first, x], axis=1) + self.position[...])
        return self.head(self.norm(x)[:, 0])


class Residual(nnx.Module):
    def __init__(self, before: int, after: int, stride: int, rngs: nnx.Rngs) -> None:
        more: dict[str, Any] = {"use_bias": False, "rngs": rngs}
        self.conv1 = nnx.Conv(before, after, (3, 3), strides=(stride, stride), **more)
        self.conv2 = nnx.Conv(after, after, (3, 3), **more)
        self.bn1 = nnx.BatchNorm(after, use_running_average=False, rngs=rngs)
        self.bn2 = nnx.BatchNorm(after, use_running_average=False, rngs=rngs)
        self.shortcut = nnx.Conv(before, after, (1, 1), strides=(stride, stride), **more) if stride > 1 else None

    def __call__(self, x: Any) -> Any:
        y = self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(x)))))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 32, (3, 3), use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(32, use_running_average=False, rngs=rngs)
        self.stages = nnx.List([Residual(32, 32, 1, rngs), Residual(32, 64, 2, rngs)])
        self.fc = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        x = nnx.relu(self.bn(self.stem(images)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage in self.stages:
            x = stage(x)
        return self.fc(jnp.mean(x, axis=(1, 2)))


class MixerBlock(nnx.Module):
    def __init__(self, tokens: int, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.tokens_in, self.tokens_out = nnx.Linear(tokens, 64, rngs=rngs), nnx.Linear(64, tokens, rngs=rngs)
        self.channels_in, self.channels_out = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = jnp.swapaxes(self.norm1(x), 1, 2)
        x = x + jnp.swapaxes(self.tokens_out(nnx.gelu(self.tokens_in(y))), 1, 2)
        return x + self.channels_out(nnx.gelu(self.channels_in(self.norm2(x))))


class Mixer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Linear(32, WIDTH, rngs=rngs)
        self.blocks = nnx.List([MixerBlock(32, rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        x = images.reshape(-1, 4, 2, 8, 2, 8).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 32, 32)
        for block in (self.stem, *self.blocks):
            x = block(x)
        return self.head(x.mean(axis=1))


def images() -> tuple[Any, ...]:
    return (floats(2, 8, 8, 3),)


MIXED = "blocks/{0,1}/{tokens_in,tokens_out,channels_in,channels_out}"
CASES = [
    nnx_case(
        "vit",
        VisionTransformer,
        images,
        expand(
            "patches/kernel",
            "encoder/layers/{0,1}/attn/{query,key,value,out}/kernel",
            "encoder/layers/{0,1}/mlp/layers/{0,2}/kernel",
            "head/kernel",
        ),
        expand(
            "{patches,head}/bias",
            "{cls_token,position}",
            "encoder/layers/{0,1}/attn/{query,key,value,out}/bias",
            "encoder/layers/{0,1}/mlp/layers/{0,2}/bias",
            "{encoder/layers/0/norm1,encoder/layers/0/norm2,encoder/layers/1/norm1,encoder/layers/1/norm2,norm}/{scale,bias}",
        ),
    ),
    nnx_case(
        "resnet",
        ResNet,
        images,
        expand("stem/kernel", "stages/{0,1}/{conv1,conv2}/kernel", "stages/1/shortcut/kernel", "fc/kernel"),
        expand("{bn,stages/0/bn1,stages/0/bn2,stages/1/bn1,stages/1/bn2}/{scale,bias}", "fc/bias"),
    ),
    nnx_case(
        "mlp_mixer",
        Mixer,
        lambda: (floats(2, 8, 16, 8),),
        expand("{stem,head}/kernel", MIXED + "/kernel"),
        expand("{stem,head}/bias", MIXED + "/bias", "blocks/{0,1}/{norm1,norm2}/{scale,bias}"),
    ),
]
