"""Serving a small transformer with packed weights and a packed cache of keys and values.

    python examples/serving.py [--small] [--kind full|rolling|paged] [--tokens 64]

The transformer is plain JAX: grouped-query attention, rotary positions, gated layers, random weights. Prompts of
several lengths are read in chunks, and then each sequence is continued token by token; prefill and decoding are one
compiled function each. Every row is another choice of weights, activations and cache. Decibels are those of the logits
of the prompts against the float32 model, and bytes those of the packed arrays. With `--small` it takes some 25 seconds
of CPU time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

Array = jax.Array
#: Tokens that prefill reads at once.
CHUNK = 16
#: What rules are for: the embedding and the last layer stay in float32.
BLOCKS = "blocks"


class Sizes(NamedTuple):
    """Sizes of a transformer, and of what it serves."""

    width: int = 512
    depth: int = 4
    heads: int = 8
    kv_heads: int = 2
    letters: int = 256
    batch: int = 4
    prompt: int = 128
    window: int = 64

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


#: Of `--small`, and of the test of the decibels.
SMALL = Sizes(width=128, depth=2, heads=4, letters=128, prompt=48, window=24)


class Choice(NamedTuple):
    """What is packed: rules of weights and activations, and the spec of keys and values."""

    rule: jc.Rule | None = None
    cache: str | None = None


def by_codes(weight: str, activation: str | None = None) -> jc.Rule:
    """A rule whose products are those of codes."""
    return jc.Rule(BLOCKS, weight=weight, activation=activation, product="codes")


CHOICES = {
    "float32": Choice(),
    "int8 × int8": Choice(by_codes("int8(group=all)", "int8(group=all)")),
    "int8 × int8, 128": Choice(by_codes("int8(group=128)", "int8(group=128)")),
    "e4m3fn × e4m3fn": Choice(jc.Rule(BLOCKS, weight="e4m3fn(group=all)", activation="e4m3fn(group=all)")),
    "cache int8": Choice(cache="int8(group=all)"),
    "cache e4m3fn": Choice(cache="float8_e4m3fn"),
    "int4, cache int8": Choice(by_codes("int4(group=32,scale=bfloat16)"), "int8(group=all)"),
    "int4, cache e4m3fn": Choice(by_codes("int4(group=32,scale=bfloat16)"), "float8_e4m3fn"),
}


# -- the transformer ---------------------------------------------------------------------------------------------------
def make(sizes: Sizes, seed: int = 0) -> dict[str, Any]:
    """Parameters: random numbers of variance 1 / inputs, divided by 2 depth where they are added to the residual."""
    key = iter(jax.random.split(jax.random.key(seed), 2 + 6 * sizes.depth))
    width, size = sizes.width, sizes.head_dim

    def kernel(inputs: int, outputs: int, divisor: int = 1) -> Array:
        return jax.random.normal(next(key), (inputs, outputs)) / (divisor * inputs) ** 0.5

    def block() -> dict[str, Array]:
        return {
            "norm1": jnp.ones(width),
            "query": kernel(width, sizes.heads * size),
            "key_value": kernel(width, 2 * sizes.kv_heads * size),
            "out": kernel(sizes.heads * size, width, 2 * sizes.depth),
            "norm2": jnp.ones(width),
            "gate": kernel(width, 3 * width),
            "up": kernel(width, 3 * width),
            "down": kernel(3 * width, width, 2 * sizes.depth),
        }

    blocks = [block() for _ in range(sizes.depth)]
    embed = jax.random.normal(next(key), (sizes.letters, width))
    return {"embed": embed, "blocks": blocks, "norm": jnp.ones(width), "head": kernel(width, sizes.letters)}


def normed(x: Array, scale: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def rotated(x: Array, positions: Array) -> Array:
    """Rotary positions (Su et al., 2021) of heads, shape (batch, tokens, heads, head_dim)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [left * jnp.cos(angle) - right * jnp.sin(angle), right * jnp.cos(angle) + left * jnp.sin(angle)], axis=-1
    )


def forward(
    params: Any, tokens: Array, positions: Array, caches: list[jc.KVCache], *, sizes: Sizes
) -> tuple[Array, list[jc.KVCache]]:
    """Logits of tokens, shape (batch, tokens), and the caches with them. A token at position -1 is padding."""
    x, after = params["embed"][tokens], []
    for block, cache in zip(params["blocks"], caches, strict=True):
        y = normed(x, block["norm1"])
        query = (y @ block["query"]).reshape(*y.shape[:-1], sizes.heads, sizes.head_dim)
        key, value = jnp.split((y @ block["key_value"]).reshape(*y.shape[:-1], -1, sizes.head_dim), 2, axis=-2)
        cache = cache.update(rotated(key, positions), value, positions)
        y = jc.dot_product_attention(rotated(query, positions), cache, positions=positions)
        x = x + y.reshape(*y.shape[:-2], -1) @ block["out"]
        y = normed(x, block["norm2"])
        x = x + (jax.nn.silu(y @ block["gate"]) * (y @ block["up"])) @ block["down"]
        after.append(cache)
    return normed(x, params["norm"]) @ params["head"], after


def caches_of(sizes: Sizes, kind: str, spec: str | None, lengths: np.ndarray) -> list[jc.KVCache]:
    """An empty cache for each layer, for sequences of some lengths; there are as many pages as these need."""
    shape = (sizes.batch, int(lengths.max()), sizes.kv_heads, sizes.head_dim)
    specs: dict[str, Any] = {"keys": spec, "values": spec}
    if kind == "rolling":
        return [jc.KVCache.rolling((shape[0], sizes.window, *shape[2:]), chunk=CHUNK, **specs)] * sizes.depth
    if kind == "paged":
        pages = int(np.sum(-(-lengths // CHUNK)))
        return [jc.KVCache.paged(shape, pages=pages, page_size=CHUNK, **specs)] * sizes.depth
    return [jc.KVCache.full(shape, **specs)] * sizes.depth


# -- serving -----------------------------------------------------------------------------------------------------------
class Server:
    """A model with one compiled function for prompts and one for tokens."""

    def __init__(self, params: Any, choice: Choice, sizes: Sizes, caches: list[jc.KVCache]) -> None:
        self.params, model = params, partial(forward, sizes=sizes)
        if choice.rule is not None:
            low = jc.quantize_fn(model, choice.rule)
            tokens = jax.ShapeDtypeStruct((sizes.batch, 1), jnp.int32)
            self.params, model = low.pack(params, tokens, tokens, caches), low

        def prefill(params: Any, tokens: Array, positions: Array, caches: Any) -> tuple[Array, Any]:
            def chunks(x: Array) -> Array:
                return jnp.swapaxes(x.reshape(x.shape[0], -1, CHUNK), 0, 1)

            def chunk(caches: Any, part: tuple[Array, Array]) -> tuple[Any, Array]:
                logits, caches = model(params, *part, caches)
                return caches, logits

            caches, logits = jax.lax.scan(chunk, caches, (chunks(tokens), chunks(positions)))
            return jnp.moveaxis(logits, 0, 1).reshape(*tokens.shape, -1), caches

        def decode(params: Any, token: Array, position: Array, caches: Any) -> tuple[Array, Any]:
            logits, caches = model(params, token[:, None], position[:, None], caches)
            return jnp.argmax(logits[:, 0], axis=-1), caches

        self.prefill = jax.jit(prefill)
        self.decode = jax.jit(decode, donate_argnums=3)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))


def prompts(sizes: Sizes, seed: int = 1) -> tuple[Array, Array]:
    """Tokens and positions of prompts, the first full, the others shorter; each padded at its end."""
    draw = np.random.default_rng(seed)
    length = -(-sizes.prompt // CHUNK) * CHUNK
    lengths = np.asarray([sizes.prompt, *draw.integers(sizes.prompt // 4, sizes.prompt // 2, sizes.batch - 1)])
    positions = np.where(np.arange(length) < lengths[:, None], np.arange(length), -1)
    return jnp.asarray(draw.integers(0, sizes.letters, positions.shape)), jnp.asarray(positions)


def decibels(y: Any, exact: Any) -> float:
    """Signal to noise."""
    y, exact = np.asarray(y, np.float64), np.asarray(exact, np.float64)
    noise = np.sum((y - exact) ** 2)
    return float(10 * np.log10(np.sum(exact**2) / noise)) if noise else float("inf")


class Served(NamedTuple):
    """What one choice gave: logits of the prompts, new tokens, tokens per second, and bytes."""

    logits: np.ndarray
    tokens: np.ndarray
    prefilled: float
    decoded: float
    weights: int
    cache: int


def serve(params: Any, choice: Choice, sizes: Sizes, kind: str, count: int) -> Served:
    """Read the prompts and continue each of them by `count` tokens."""
    tokens, positions = prompts(sizes)
    given = np.asarray(positions) >= 0
    caches = caches_of(sizes, kind, choice.cache, given.sum(axis=1) + count)
    server = Server(params, choice, sizes, caches)
    jax.block_until_ready(server.prefill(server.params, tokens, positions, caches))  # compiled
    start = time.perf_counter()
    logits, caches = jax.block_until_ready(server.prefill(server.params, tokens, positions, caches))
    read = time.perf_counter() - start
    position = jnp.max(positions, axis=1) + 1
    token = jnp.argmax(jnp.take_along_axis(logits, position[:, None, None] - 1, axis=1)[:, 0], axis=-1)
    found, start = [token], 0.0
    for turn in range(count - 1):
        token, caches = server.decode(server.params, token, position, caches)
        position = position + 1
        found.append(token)
        if turn == 0:  # compiled
            start = time.perf_counter() if token.block_until_ready() is not None else 0.0
    jax.block_until_ready(caches)
    written = time.perf_counter() - start
    assert not any(bool(cache.overflowed.any()) for cache in caches)
    return Served(
        np.asarray(logits)[given],
        np.stack(found, axis=1),
        int(given.sum()) / read,
        sizes.batch * max(count - 2, 1) / written,
        server.nbytes,
        sum(cache.nbytes for cache in caches),
    )


def table(
    sizes: Sizes, kind: str, count: int, names: tuple[str, ...] = tuple(CHOICES)
) -> Iterator[tuple[str, float, Served]]:
    """Of each choice: its name, decibels against the first, and what it gave."""
    params = make(sizes)
    exact: np.ndarray | None = None
    for name in names:
        served = serve(params, CHOICES[name], sizes, kind, count)
        exact = served.logits if exact is None else exact
        yield name, decibels(served.logits, exact), served


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a smaller transformer and fewer choices")
    parser.add_argument("--kind", choices=("full", "rolling", "paged"), default="paged", help="of cache; default paged")
    parser.add_argument("--tokens", type=int, help="that each sequence is continued by; default 64, with --small 16")
    chosen = parser.parse_args()
    sizes, count = (SMALL, 16) if chosen.small else (Sizes(), 64)
    names = ("float32", "int4, cache int8") if chosen.small else tuple(CHOICES)
    count = chosen.tokens or count
    print(
        f"serving {sizes.batch} sequences of up to {sizes.prompt} + {count} tokens by a transformer of width "
        f"{sizes.width} and depth {sizes.depth}, {chosen.kind} cache",
        file=sys.stderr,
        flush=True,
    )
    print(f"{'':18}{'dB':>7}{'prefill/s':>11}{'decode/s':>10}{'weights':>12}{'cache':>10}   first tokens")
    for name, snr, served in table(sizes, chosen.kind, count, names):
        first = " ".join(map(str, served.tokens[0, :6]))
        rates = f"{served.prefilled:11.0f}{served.decoded:10.0f}"
        print(f"{name:18}{snr:7.1f}{rates}{served.weights:12d}{served.cache:10d}   {first}", flush=True)


if __name__ == "__main__":
    main()
