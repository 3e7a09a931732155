"""Experts trained in the 4 bits that they are stored in: int4 as in Kimi-K2, MXFP4 as in gpt-oss and DeepSeek-V4.

    python examples/experts.py [--small]

A layer of four experts, one for each token, learns the numbers of another such layer in float32. It is trained for more
steps, in float32 and then rounded (PTQ), or with rounded experts (QAT). All other products are in bfloat16. The experts
are written to a checkpoint in the layout of each model family, and read again: the numbers are those of training, bit
for bit. With `--small` it takes some 20 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jchop as jc

EXPERTS, WIDTH, HIDDEN, ROWS = 4, 64, 96, 256
#: The format of experts, and the layout of checkpoints: groups of 32 of a row share a scale.
FAMILIES = {"int4(group=32,scale=bfloat16)": "compressed-tensors", "mxfp4": "mxfp4"}


def rules(experts: str) -> dict[str, dict[str, str]]:
    """Experts in a format, all else in bfloat16: the first pattern that matches applies."""
    return {
        "experts": {"weight": experts, "activation": "bfloat16"},
        "*": {"weight": "bfloat16", "activation": "bfloat16"},
    }


def layer(params: Any, x: jax.Array) -> jax.Array:
    """Rows (tokens, WIDTH) through the expert with the highest score; weights have the axes (experts, out, in)."""
    chance = jax.nn.softmax(x @ params["router"].T)
    expert = chance.argmax(-1)
    order, counts = jnp.argsort(expert), jnp.bincount(expert, length=EXPERTS)

    def multiply(rows: jax.Array, name: str) -> jax.Array:
        return jax.lax.ragged_dot(rows, params["experts"][name].swapaxes(1, 2), counts)

    rows = multiply(jax.nn.gelu(multiply(x[order], "up")), "down")
    return rows[jnp.argsort(order)] * chance.max(-1, keepdims=True)


def start(key: jax.Array) -> Any:
    """Weights of normal numbers."""
    router, up, down = jax.random.split(key, 3)
    return {
        "router": jax.random.normal(router, (EXPERTS, WIDTH)) / WIDTH**0.5,
        "experts": {
            "up": jax.random.normal(up, (EXPERTS, HIDDEN, WIDTH)) / WIDTH**0.5,
            "down": jax.random.normal(down, (EXPERTS, WIDTH, HIDDEN)) / HIDDEN**0.5,
        },
    }


def loss(params: Any, x: jax.Array, model: Any, teacher: Any) -> jax.Array:
    """Mean square error, relative to the numbers of the teacher."""
    wanted = layer(teacher, x)
    return ((model(params, x) - wanted) ** 2).mean() / (wanted**2).mean()


@partial(jax.jit, static_argnames=("model", "steps", "rate"))
def train(params: Any, teacher: Any, key: jax.Array, *, model: Any, steps: int, rate: float) -> Any:
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        gradient = jax.grad(loss)(params, jax.random.normal(key, (ROWS, WIDTH)), model, teacher)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, steps))
    return params


def export(packed: Any, folder: Path, layout: str) -> Any:
    """The packed experts, written to a checkpoint and read again: one array for each expert, or one for all of them."""
    names = packed["experts"]
    if layout == "mxfp4":
        stored = {f"experts.{name}_proj": q for name, q in names.items()}
    else:
        stored = {f"experts.{i}.{name}_proj.weight": q[i] for name, q in names.items() for i in range(EXPERTS)}
    jc.save_checkpoint(folder, stored, layout)
    read = jc.load_checkpoint(folder)
    if layout == "mxfp4":
        return {name: jc.dequantize(read[f"experts.{name}_proj"]) for name in names}
    return {
        name: jnp.stack([jc.dequantize(read[f"experts.{i}.{name}_proj.weight"]) for i in range(EXPERTS)])
        for name in names
    }


def run(families: Any = FAMILIES, *, steps: int, tuning: int) -> list[tuple[str, float, float, float, bool]]:
    """For each format the losses in float32, after PTQ and after QAT, and whether the exported numbers are equal."""
    teacher, params = start(jax.random.key(0)), start(jax.random.key(1))
    params["router"] = teacher["router"]  # which expert a token has is known; what it does is learned
    x = jax.random.normal(jax.random.key(2), (2048, WIDTH))
    print(f"training {steps} steps in float32", file=sys.stderr, flush=True)
    params = train(params, teacher, jax.random.key(3), model=layer, steps=steps, rate=3e-3)
    exact, table = train(params, teacher, jax.random.key(4), model=layer, steps=tuning, rate=1e-3), []
    for weights, layout in families.items():
        print(f"training {tuning} more steps, experts in {weights}", file=sys.stderr, flush=True)
        low = jc.quantize_fn(layer, rules(weights))
        tuned = train(params, teacher, jax.random.key(4), model=low, steps=tuning, rate=1e-3)
        with tempfile.TemporaryDirectory() as folder:
            served = export(low.pack(tuned, x), Path(folder) / "checkpoint", layout)
        trained = {name: jc.round_to_format(w, weights) for name, w in tuned["experts"].items()}
        same = all(np.array_equal(served[name], trained[name]) for name in trained)
        # The checkpoint's numbers do not change when they are rounded again, so the trained program serves them.
        same = same and np.array_equal(low(tuned | {"experts": served}, x), low(tuned, x))
        losses = (float(loss(p, x, model, teacher)) for p, model in ((exact, layer), (exact, low), (tuned, low)))
        table.append((weights, *losses, same))
    return table  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="fewer steps")
    steps, tuning = (300, 200) if parser.parse_args().small else (2000, 1000)
    table = run(steps=steps, tuning=tuning)
    print(f"{'experts':32}{'float32':>9}{'PTQ':>9}{'QAT':>9}  exported numbers")
    for weights, exact, rounded, tuned, same in table:
        print(f"{weights:32}{exact:9.4f}{rounded:9.4f}{tuned:9.4f}  {'equal' if same else 'different'}")


if __name__ == "__main__":
    main()
