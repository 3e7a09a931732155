"""Models of Equinox: layers of the library, arrays of one's own, an ensemble under `eqx.filter_vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from zoo.case import Case, draw, expand, floats, tokens

VOCAB, WIDTH, HIDDEN, MEMBERS = 64, 32, 64, 3


class Block(eqx.Module):
    """A layer of a transformer for one sequence."""

    attention: eqx.nn.MultiheadAttention
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        a, b, c = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=a)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.up, self.down = eqx.nn.Linear(WIDTH, HIDDEN, key=b), eqx.nn.Linear(HIDDEN, WIDTH, key=c)

    def __call__(self, x: Any) -> Any:
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(len(x), dtype=bool))
        y = jax.vmap(self.norm2)(x)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y)))


class Decoder(eqx.Module):
    embedding: eqx.nn.Embedding
    position: jax.Array
    blocks: list[Block]
    head: jax.Array

    def __init__(self, key: Any) -> None:
        a, b, c, *keys = jax.random.split(key, 5)
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, key=a)
        self.position = 0.02 * jax.random.normal(b, (16, WIDTH))
        self.head = jax.random.normal(c, (VOCAB, WIDTH)) / WIDTH**0.5
        self.blocks = [Block(key) for key in keys]

    def __call__(self, tokens: Any) -> Any:
        def one(tokens: Any) -> Any:
            x = jax.vmap(self.embedding)(tokens) + self.position[: len(tokens)]
            for block in self.blocks:
                x = block(x)
            return jnp.einsum("td,vd->tv", x, self.head)

        return jax.vmap(one)(tokens)


class Cnn(eqx.Module):
    """For one image with its channels first."""

    layers: list[Any]

    def __init__(self, key: Any) -> None:
        a, b, c = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(3, 32, 3, padding=1, key=a),
            jax.nn.relu,
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=4, key=b),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(128, 10, key=c),
        ]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def members(key: Any) -> Any:
    """Networks whose arrays have a first axis."""
    return eqx.filter_vmap(lambda key: eqx.nn.MLP(WIDTH, 8, HIDDEN, 2, key=key))(jax.random.split(key, MEMBERS))


def ensemble(models: Any, x: Any) -> Any:
    """The mean over members of their outputs (batch, out)."""
    return eqx.filter_vmap(lambda model, x: jax.vmap(model)(x), in_axes=(eqx.if_array(0), None))(models, x).mean(axis=0)


def equinox_case(
    name: str,
    make: Callable[[Any], Any],
    run: Callable[..., Any],
    args: Callable[[], tuple[Any, ...]],
    products: tuple[str, ...],
    others: tuple[str, ...],
) -> Case:
    """The parameters are the arrays of a model; the rest of it has none."""
    shape = lambda: eqx.partition(eqx.filter_eval_shape(make, jax.random.key(0)), is_shape)  # noqa: E731
    build = lambda: (draw(shape()[0]), args())  # noqa: E731
    apply = lambda params, *args: run(eqx.combine(params, shape()[1]), *args)  # noqa: E731
    return Case(name, "equinox", build, apply, products, others)


def is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


CASES = [
    equinox_case(
        "equinox_decoder",
        Decoder,
        lambda model, tokens: model(tokens),
        lambda: (tokens(2, 8),),
        expand(
            "embedding/weight",
            "head",
            "blocks/{0,1}/attention/{query,key,value,output}_proj/weight",
            "blocks/{0,1}/{up,down}/weight",
        ),
        expand("position", "blocks/{0,1}/{up,down}/bias", "blocks/{0,1}/{norm1,norm2}/{weight,bias}"),
    ),
    equinox_case(
        "equinox_cnn",
        Cnn,
        lambda model, images: jax.vmap(model)(images),
        lambda: (floats(2, 3, 8, 8),),
        expand("layers/{0,3,6}/weight"),
        expand("layers/{0,3,6}/bias"),
    ),
    equinox_case(
        "equinox_ensemble",
        members,
        ensemble,
        lambda: (floats(4, WIDTH),),
        expand("layers/{0,1,2}/weight"),
        expand("layers/{0,1,2}/bias"),
    ),
]
