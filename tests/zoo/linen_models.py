"""Models of Linen: a boxed and scanned transformer, a convolutional network, parameters of one's own in an einsum."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zoo.case import Case, draw, expand, floats, tokens

VOCAB, WIDTH, HEADS, HEAD, HIDDEN, DEPTH = 64, 32, 2, 32, 64, 2


def boxed(*names: str | None) -> Any:
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


class Layer(nn.Module):
    """A layer of a decoder, as a step of a scan; its kernels are in boxes with the names of their axes."""

    @nn.compact
    def __call__(self, x: Any, _: None) -> tuple[Any, None]:
        y = nn.RMSNorm(name="attn_norm")(x)
        project = functools.partial(nn.DenseGeneral, (HEADS, HEAD), use_bias=False)
        q = project(kernel_init=boxed("embed", "heads", None), name="q")(y)
        k = project(kernel_init=boxed("embed", "heads", None), name="k")(y)
        v = project(kernel_init=boxed("embed", "heads", None), name="v")(y)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        y = nn.DenseGeneral(WIDTH, (-2, -1), use_bias=False, kernel_init=boxed("heads", None, "embed"), name="o")(y)
        x = nn.with_logical_constraint(x + y, ("batch", "length", "embed"))  # pyright: ignore[reportPrivateImportUsage]
        y = nn.RMSNorm(name="mlp_norm")(x)
        y = nn.gelu(nn.Dense(HIDDEN, kernel_init=boxed("embed", "mlp"), name="wi")(y))
        return x + nn.Dense(WIDTH, kernel_init=boxed("mlp", "embed"), name="wo")(y), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCAB, WIDTH, embedding_init=boxed("vocab", "embed"), name="embed")
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=DEPTH,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(name="layers")
        x, _ = layers(embed(tokens), None)
        return embed.attend(nn.RMSNorm(name="norm")(x))


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        for width in (32, 64):
            x = nn.Conv(width, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


class TwoTowers(nn.Module):
    """Vectors of texts and images in one space; the parameters are its own."""

    def setup(self) -> None:
        init = nn.initializers.lecun_normal()
        self.words = self.param("words", init, (VOCAB, WIDTH))
        self.text = self.param("text", init, (2, WIDTH, HEAD))
        self.image = self.param("image", init, (2, 2, WIDTH, HEAD * 2))
        self.temperature = self.param("temperature", nn.initializers.zeros, ())

    def encode_text(self, tokens: Any) -> Any:
        y = jnp.einsum("bsd,ndh->bsnh", jnp.take(self.words, tokens, axis=0), self.text)
        return y.max(axis=1).reshape(tokens.shape[0], -1)

    def encode_image(self, image: Any) -> Any:
        return jnp.einsum("bhwc,hwce->be", image, self.image)

    def score(self, tokens: Any, image: Any) -> Any:
        text, picture = self.encode_text(tokens), self.encode_image(image)
        return jnp.exp(self.temperature) * text @ picture.T


def linen_case(
    name: str,
    module: nn.Module,
    args: Callable[[], tuple[Any, ...]],
    products: tuple[str, ...],
    others: tuple[str, ...],
    method: str = "__call__",
) -> Case:
    @functools.cache
    def variables() -> Any:
        return draw(jax.eval_shape(functools.partial(module.init, method=method), jax.random.key(0), *args()))

    def rest() -> dict[str, Any]:
        return {name: tree for name, tree in variables().items() if name != "params"}

    def run(module: nn.Module, params: Any, *args: Any) -> Any:
        return module.apply({"params": params, **rest()}, *args, method=method, mutable=list(rest()))[0]

    build = lambda: (variables()["params"], args())  # noqa: E731
    more: dict[str, Any] = {"module": module, "method": method, "rest": rest, "run": run}
    return Case(name, "linen", build, functools.partial(run, module), products, others, **more)


CASES = [
    linen_case(
        "linen_boxed",
        Transformer(),
        lambda: (tokens(2, 8),),
        expand("embed/embedding/value", "layers/{q,k,v,o,wi,wo}/kernel/value"),
        expand("layers/{attn_norm,mlp_norm}/scale", "layers/{wi,wo}/bias", "norm/scale"),
    ),
    linen_case(
        "linen_cnn",
        Cnn(),
        lambda: (floats(2, 8, 8, 3),),
        expand("{Conv_0,Conv_1,Dense_0}/kernel"),
        expand("{BatchNorm_0,BatchNorm_1}/{scale,bias}", "Dense_0/bias"),
    ),
    linen_case(
        "linen_two_towers",
        TwoTowers(),
        lambda: (tokens(4, 6), floats(4, 2, 2, WIDTH)),
        ("words", "text", "image"),
        ("temperature",),
        "score",
    ),
]
