"""How often a small trained model recalls the value of a key from a packed cache, and the bytes of the cache.

    python benchmarks/recall.py

A sequence has 16 pairs of a key and a value, and then asks for each key once. One layer of attention learns the task in
1,000 steps. Then it decodes 256 new sequences token by token, with each cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jchop as jc

WORDS, PAIRS, WIDTH, HEADS, HEAD_DIM = 32, 16, 64, 2, 32
ASKED = 2 * PAIRS
ROTATED = {"rotation": jc.Hadamard("all")}


def both(spec: str, **options: Any) -> dict[str, Any]:
    return {"keys": spec, "values": spec, **options}


CACHES: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": both("int8(group=all)"),
    "int4": both("int4(group=all,scale=bfloat16)"),
    "uint2, keys by channel": {
        "keys": "uint2(group=16,axis=1,zero_point=integer,scale=bfloat16)",
        "values": "uint2(group=32,zero_point=integer,scale=bfloat16)",
        "recent": 16,
    },
    "int2 in groups of 32": both("int2(group=32,scale=bfloat16)"),
    **{f"normal{bits}": both(f"normal{bits}") for bits in (2, 3, 4)},
    **{f"normal{bits}, rotated": both(f"normal{bits}", **ROTATED) for bits in (2, 3, 4)},
}


def sequences(key: jax.Array, count: int) -> jax.Array:
    keys, values, asked = jax.random.split(key, 3)
    first = jax.vmap(lambda k: jax.random.permutation(k, WORDS)[:PAIRS])(jax.random.split(keys, count))
    second = jax.random.randint(values, (count, PAIRS), 0, WORDS) + WORDS
    order = jax.vmap(lambda k: jax.random.permutation(k, PAIRS))(jax.random.split(asked, count))
    questions = (jnp.take_along_axis(words, order, 1) for words in (first, second))
    return jnp.concatenate([jnp.stack([*p], -1).reshape(count, -1) for p in ((first, second), questions)], 1)


def initial(key: jax.Array) -> dict[str, jax.Array]:
    shapes = dict.fromkeys("qkvp", (WIDTH, WIDTH))
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "out": (WIDTH, 2 * WORDS)}
    shapes |= {"word": (2 * WORDS, WIDTH), "before": (2 * WORDS, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, s) * s[0] ** -0.5 for k, (name, s) in zip(keys, shapes.items(), strict=True)}


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def turned(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions."""
    angle = positions[..., None, None] * 10000.0 ** (-jnp.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def model(p: dict[str, jax.Array], tokens: jax.Array, before: jax.Array, cache: Any = None) -> tuple[jax.Array, Any]:
    x = p["word"][tokens] + p["before"][before]
    q, k, v = ((normed(x) @ p[name]).reshape(*tokens.shape, HEADS, HEAD_DIM) for name in "qkv")
    start = jnp.zeros(len(tokens), jnp.int32) if cache is None else cache.lengths
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    q, k = turned(q, positions), turned(k, positions)
    if cache is None:
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    else:
        cache = cache.update(k, v)
        y = jc.dot_product_attention(q, cache)
    x = x + y.reshape(x.shape) @ p["p"]
    return normed(x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"]) @ p["out"], cache


def loss(p: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    logits, _ = model(p, tokens, jnp.pad(tokens[:, :-1], ((0, 0), (1, 0))))
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, ASKED:-1:2], tokens[:, ASKED + 1 :: 2]).mean()


def trained(steps: int = 1000) -> dict[str, jax.Array]:
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0, 2e-3, 100, steps), weight_decay=0.01)
    p = initial(jax.random.key(0))

    @jax.jit
    def step(p: Any, state: Any, key: jax.Array) -> Any:
        updates, state = tx.update(jax.grad(loss)(p, sequences(key, 32)), state, p)
        return optax.apply_updates(p, updates), state

    state = tx.init(p)
    for i in range(steps):
        p, state = step(p, state, jax.random.fold_in(jax.random.key(1), i))
    return p


def recalled(p: dict[str, jax.Array], cache: Any, tokens: jax.Array) -> float:
    """The share of questions with the right answer."""
    run, before = jax.jit(model), jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    _, cache = run(p, tokens[:, :ASKED], before[:, :ASKED], cache)
    right = []
    for i in range(ASKED, 2 * ASKED - 1):
        logits, cache = run(p, tokens[:, i : i + 1], before[:, i : i + 1], cache)
        if i % 2 == 0:
            right.append(float((logits[:, -1].argmax(-1) == tokens[:, i + 1]).mean()))
    return float(np.mean(right))


def main() -> None:
    p, tokens = trained(), sequences(jax.random.key(9), 256)
    for name, options in CACHES.items():
        cache = jc.KVCache.full((len(tokens), 2 * ASKED, HEADS, HEAD_DIM), **options)
        print(f"{name:24}{100 * recalled(p, cache, tokens):8.2f} %{cache.nbytes / len(tokens) / 2 / ASKED:8.1f} bytes")


if __name__ == "__main__":
    main()
