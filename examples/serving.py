"""Serving a small transformer with packed weights and a packed cache of keys and values.

    python examples/serving.py [--small] [--kind full|rolling|paged] [--tokens 64]

The transformer is plain JAX: grouped-query attention, rotary positions, gated layers, random weights. Prompts of
several lengths are read in chunks, and then each sequence is continued token by token; prefill and decoding are one
compiled function each. Every row is another choice of weights, activations and cache. In the last row, a packed model
drafts tokens, and the float model checks them: its own tokens in fewer steps (arXiv 2211.17192). Decibels are those of
the logits of the prompts against the float32 model, and bytes those of all weights and caches. With `--small` it takes
some 35 seconds of CPU time.
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
#: Tokens that the packed model drafts before the float model checks them.
DRAFTS = 4
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
    """What is packed: rules of weights and activations, and the spec of keys and values; the choice that drafts."""

    rule: jc.Rule | None = None
    cache: str | None = None
    draft: str | None = None


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
    "int8 drafts": Choice(draft="int8 × int8"),
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

        self.model, self.prefill = model, jax.jit(prefill)
        self.decode = jax.jit(decode, donate_argnums=3)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))


def speculative(model: Any, draft: Any, count: int) -> Any:
    """A compiled function that continues sequences by `count` tokens of a model, of which another one drafts most.

    It takes, as pairs of both models, parameters and caches. It returns tokens, caches, and the steps of the model.
    """

    def generate(params: Any, token: Array, position: Array, caches: Any) -> tuple[Array, Any, Array]:
        row, end = jnp.arange(len(token))[:, None], position + count - 1

        def step(state: Any) -> Any:
            token, position, found, (caches, rough_caches), steps = state
            goes_on = position < end
            places = jnp.where(goes_on, position + jnp.arange(DRAFTS + 1)[:, None], -1)  # or padding

            def draw(carry: tuple[Array, Any], place: Array) -> tuple[Any, Array]:
                logits, rough_caches = draft(params[1], carry[0][:, None], place[:, None], carry[1])
                return (jnp.argmax(logits[:, 0], axis=-1), rough_caches), carry[0]

            (_, rough_caches), given = jax.lax.scan(draw, (token, rough_caches), places)
            logits, caches = model(params[0], given.T, places.T, caches)
            best = jnp.argmax(logits, axis=-1)
            right = jnp.cumprod(best[:, :-1] == given.T[:, 1:], axis=1).sum(axis=1)
            place = jnp.where(goes_on[:, None], places.T + count - end[:, None], count)
            found = found.at[row, place].set(best, mode="drop")
            token = jnp.where(goes_on, best[row[:, 0], right], token)
            position = jnp.where(goes_on, position + right + 1, position)
            both = [[cache.truncate(position) for cache in some] for some in (caches, rough_caches)]
            return token, position, found, both, steps + 1

        found = jnp.zeros((len(token), count), token.dtype).at[:, 0].set(token)
        state = token, position, found, caches, jnp.int32(0)
        _, _, found, caches, steps = jax.lax.while_loop(lambda state: (state[1] < end).any(), step, state)
        return found, caches, steps

    return jax.jit(generate)


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
    """What one choice gave: logits of the prompts, new tokens, tokens per second, bytes, and steps of the model."""

    logits: np.ndarray
    tokens: np.ndarray
    prefilled: float
    decoded: float
    weights: int
    cache: int
    steps: int


def timed(function: Any, *args: Any) -> tuple[Any, float]:
    """The results of a compiled function, and seconds of its second call."""
    jax.block_until_ready(function(*args))
    start = time.perf_counter()
    return jax.block_until_ready(function(*args)), time.perf_counter() - start


def serve(params: Any, choice: Choice, sizes: Sizes, kind: str, count: int) -> Served:
    """Read the prompts and continue each of them by `count` tokens."""
    tokens, positions = prompts(sizes)
    given = np.asarray(positions) >= 0
    choices = [choice] if choice.draft is None else [choice, CHOICES[choice.draft]]
    room = given.sum(axis=1) + count + (DRAFTS if choice.draft else 0)
    empty = [caches_of(sizes, kind, one.cache, room) for one in choices]
    servers = [Server(params, one, sizes, caches) for one, caches in zip(choices, empty, strict=True)]
    results = [timed(s.prefill, s.params, tokens, positions, c) for s, c in zip(servers, empty, strict=True)]
    read, caches, logits = sum(r[1] for r in results), [r[0][1] for r in results], results[0][0][0]
    position = jnp.max(positions, axis=1) + 1
    token = jnp.argmax(jnp.take_along_axis(logits, position[:, None, None] - 1, axis=1)[:, 0], axis=-1)
    if choice.draft is None:
        (server,), (of_layers,), found, start = servers, caches, [token], 0.0
        for turn in range(count - 1):
            token, of_layers = server.decode(server.params, token, position, of_layers)
            position = position + 1
            found.append(token)
            if turn == 0:  # compiled
                start = time.perf_counter() if token.block_until_ready() is not None else 0.0
        caches = jax.block_until_ready([of_layers])
        written, steps, made = time.perf_counter() - start, count - 1, np.stack(found, axis=1)
    else:
        run = speculative(servers[0].model, servers[1].model, count)
        (made, caches, steps), written = timed(run, [s.params for s in servers], token, position, caches)
    assert not any(bool(cache.overflowed.any()) for of_layers in caches for cache in of_layers)
    return Served(
        np.asarray(logits)[given],
        np.asarray(made),
        int(given.sum()) / read,
        sizes.batch * max(count - 2, 1) / written,
        sum(server.nbytes for server in servers),
        sum(cache.nbytes for of_layers in caches for cache in of_layers),
        int(steps),
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
    names = ("float32", "int4, cache int8", "int8 drafts") if chosen.small else tuple(CHOICES)
    count = chosen.tokens or count
    print(
        f"serving {sizes.batch} sequences of up to {sizes.prompt} + {count} tokens by a transformer of width "
        f"{sizes.width} and depth {sizes.depth}, {chosen.kind} cache",
        file=sys.stderr,
        flush=True,
    )
    print(f"{'':18}{'dB':>7}{'prefill/s':>11}{'decode/s':>10}{'weights':>12}{'cache':>10}{'steps':>7}   first tokens")
    for name, snr, served in table(sizes, chosen.kind, count, names):
        first = " ".join(map(str, served.tokens[0, :6]))
        rates = f"{served.prefilled:11.0f}{served.decoded:10.0f}"
        print(
            f"{name:18}{snr:7.1f}{rates}{served.weights:12d}{served.cache:10d}{served.steps:7d}   {first}", flush=True
        )


if __name__ == "__main__":
    main()
