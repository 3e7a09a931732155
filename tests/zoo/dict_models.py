"""Models in plain JAX: dictionaries of arrays and functions of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from zoo.case import Case, draw, floats, paths, tokens

VOCAB, WIDTH, HEADS, HIDDEN, DEPTH = 64, 32, 2, 64, 2


def shapes(dtype: Any = jnp.float32, **shape: Any) -> Any:
    """A tree of shapes."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), shape, is_leaf=lambda s: isinstance(s, tuple))


def dict_case(
    name: str,
    apply: Callable[..., Any],
    tree: Any,
    args: Callable[[], tuple[Any, ...]],
    others: tuple[str, ...] = (),
    **more: Any,
) -> Case:
    """A function of a tree of parameters, which products read but for `others`."""
    products = tuple(path for path in paths(tree) if path not in others)
    return Case(name, "dict", lambda: (draw(tree), args()), apply, products, others, **more)


def mlp(params: Any, x: Any) -> Any:
    *hidden, last = params["layers"]
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def norm(x: Any, gain: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * gain


def layer(x: Any, p: Any) -> Any:
    """A layer of a decoder: one product for queries, keys and values."""
    batch, length, _ = x.shape
    qkv = jnp.einsum("btd,dchk->cbthk", norm(x, p["norm1"]), p["wqkv"])
    y = jax.nn.dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
    x = x + y.reshape(batch, length, -1) @ p["wo"]
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def transformer(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Tied embeddings around a scan over stacked layers."""

    def apply(params: Any, tokens: Any) -> Any:
        x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
        x, _ = jax.lax.scan(lambda x, p: (step(x, p), None), x, params["layers"])
        return jax.lax.dot_general(norm(x, params["norm"]), params["embed"], (((2,), (1,)), ((), ())))

    return apply


TRANSFORMER = shapes(
    embed=(VOCAB, WIDTH),
    position=(16, WIDTH),
    norm=(WIDTH,),
    layers={
        "norm1": (DEPTH, WIDTH),
        "wqkv": (DEPTH, WIDTH, 3, HEADS, WIDTH // HEADS),
        "wo": (DEPTH, WIDTH, WIDTH),
        "norm2": (DEPTH, WIDTH),
        "up": (DEPTH, WIDTH, HIDDEN),
        "down": (DEPTH, HIDDEN, WIDTH),
    },
)
REST = ("position", "norm", "layers/norm1", "layers/norm2")


@jax.custom_vjp
def quick_gelu(x: Any) -> Any:
    return x * jax.nn.sigmoid(1.702 * x)


def quick_gelu_forward(x: Any) -> tuple[Any, Any]:
    gate = jax.nn.sigmoid(1.702 * x)
    return x * gate, (x, gate)


def quick_gelu_backward(kept: Any, g: Any) -> tuple[Any]:
    x, gate = kept
    return (g * gate * (1 + 1.702 * x * (1 - gate)),)


quick_gelu.defvjp(quick_gelu_forward, quick_gelu_backward)


@jax.custom_vjp
def clipped_product(x: Any, w: Any) -> Any:
    """A product whose cotangent is clipped: the weight is inside the function with the rule of its own."""
    return x @ w


clipped_product.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, g: (jnp.clip(g, -1, 1) @ kept[1].T, kept[0].T @ jnp.clip(g, -1, 1))
)


def custom(params: Any, x: Any) -> Any:
    return clipped_product(quick_gelu(x @ params["up"]), params["down"])


def tensor_parallel(params: Any, x: Any) -> Any:
    """Columns of the first weight and rows of the second on each device, and one sum between devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    columns, rows, whole = PartitionSpec(None, "model"), PartitionSpec("model"), PartitionSpec()

    def local(up: Any, down: Any, x: Any) -> Any:
        return jax.lax.psum(jax.nn.relu(x @ up) @ down, "model")

    return jax.shard_map(local, mesh=mesh, in_specs=(columns, rows, whole), out_specs=whole)(
        params["up"], params["down"], x
    )


SIZES = ((WIDTH, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 8))
LAYERS = [{"w": (before, after), "b": (after,)} for before, after in SIZES]
TWO = shapes(up=(WIDTH, HIDDEN), down=(HIDDEN, WIDTH))


def inputs() -> tuple[Any, ...]:
    return (floats(4, WIDTH),)


BIASES = ("layers/0/b", "layers/1/b", "layers/2/b")
CASES = [
    dict_case("dict_mlp", mlp, shapes(layers=LAYERS), inputs, BIASES),
    dict_case(
        "dict_bfloat16",
        mlp,
        shapes(jnp.bfloat16, layers=LAYERS),
        lambda: (floats(4, WIDTH).astype(jnp.bfloat16),),
        BIASES,
    ),
    dict_case("dict_transformer", transformer(layer), TRANSFORMER, lambda: (tokens(2, 8),), REST),
    dict_case("dict_checkpoint", transformer(jax.checkpoint(layer)), TRANSFORMER, lambda: (tokens(2, 8),), REST),
    dict_case("dict_custom_vjp", custom, TWO, inputs),
    dict_case("dict_shard_map", tensor_parallel, TWO, inputs),
]
