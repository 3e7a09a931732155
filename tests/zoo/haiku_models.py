"""Models of Haiku: modules under `hk.transform`, parameters of one's own in an einsum, layers by `hk.layer_stack`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from zoo.case import Case, draw, expand, floats, tokens

VOCAB, WIDTH, HIDDEN = 64, 32, 64


class Attention(hk.Module):
    """Heads by an einsum over parameters of its own."""

    def __call__(self, x: Any) -> Any:
        init = hk.initializers.VarianceScaling()
        qkv = hk.get_parameter("qkv", (3, WIDTH, 2, 16), x.dtype, init)
        out = hk.get_parameter("out", (2, 16, WIDTH), x.dtype, init)
        q, k, v = jnp.einsum("btd,cdhk->cbthk", x, qkv)
        weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / 4, axis=-1)
        return jnp.einsum("bhts,bshk,hkd->btd", weights, v, out)


def block(x: Any) -> Any:
    norm = lambda x: hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)  # noqa: E731
    x = x + Attention(name="attention")(norm(x))
    return x + hk.Linear(WIDTH, name="down")(jax.nn.gelu(hk.Linear(HIDDEN, name="up")(norm(x))))


def transformer(tokens: Any) -> Any:
    embed = hk.Embed(VOCAB, WIDTH, name="embed")
    x = hk.experimental.layer_stack(2)(block)(embed(tokens))  # pyright: ignore[reportPrivateImportUsage]
    return x @ embed.embeddings.T


def cnn(images: Any) -> Any:
    x = jax.nn.relu(hk.Conv2D(32, 3, name="conv")(images))
    x = jax.nn.relu(hk.DepthwiseConv2D(1, 3, name="depthwise")(x))
    x = jax.nn.relu(hk.Conv2DTranspose(32, 3, stride=2, name="grow")(x))
    return hk.nets.MLP([HIDDEN, 8], name="mlp")(x.mean(axis=(1, 2)))


def recurrent(x: Any) -> Any:
    core = hk.LSTM(WIDTH, name="lstm")
    y, _ = hk.dynamic_unroll(core, jnp.swapaxes(x, 0, 1), core.initial_state(x.shape[0]))
    return hk.Linear(8, with_bias=False, name="head")(y[-1])


def haiku_case(
    name: str,
    function: Callable[..., Any],
    args: Callable[[], tuple[Any, ...]],
    products: tuple[str, ...],
    others: tuple[str, ...],
) -> Case:
    pair = hk.without_apply_rng(hk.transform(function))
    build = lambda: (draw(jax.eval_shape(pair.init, jax.random.key(0), *args())), args())  # noqa: E731
    return Case(name, "haiku", build, pair.apply, products, others)


STACK = "__layer_stack_no_per_layer"
CASES = [
    haiku_case(
        "haiku_transformer",
        transformer,
        lambda: (tokens(2, 8),),
        expand("embed/embeddings", STACK + "/attention/{qkv,out}", STACK + "/{up,down}/w"),
        expand(STACK + "/{up,down}/b", STACK + "/{layer_norm,layer_norm_1}/{scale,offset}"),
    ),
    haiku_case(
        "haiku_cnn",
        cnn,
        lambda: (floats(2, 8, 8, 3),),
        expand("{conv,depthwise,grow,mlp/~/linear_0,mlp/~/linear_1}/w"),
        expand("{conv,depthwise,grow,mlp/~/linear_0,mlp/~/linear_1}/b"),
    ),
    haiku_case(
        "haiku_lstm", recurrent, lambda: (floats(2, 6, WIDTH),), ("lstm/linear/w", "head/w"), ("lstm/linear/b",)
    ),
]
