"""Fully sharded training of a small transformer on eight devices: each holds an eighth of weights and of packed Adam.

A step gathers the weights as floats, as int4 codes, or as fp8 codes under scales from one all-reduce of maxima.
Gradients are summed as floats or int8 codes, so that each device gets its part. Prints the loss of each run, and the
bytes that one device sends in a step.

    python examples/fsdp.py [--small]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import data_parallel
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data_parallel import RANKS
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jchop as jc

GROUP = 32
INT4, INT8 = (f"int{bits}(group={GROUP},scale=bfloat16)" for bits in (4, 8))
FP8 = "e4m3fn(group=tensor)"
_Tree = dict[str, jax.Array]


@dataclass(frozen=True)
class Way:
    """How weights and gradients travel.

    Args:
        gather: the weights of all ranks, from the parts of one.
        scatter: the part of one rank of the sum of gradients.
        sizes: the bytes of a weight and of a gradient on the wire.
    """

    gather: Callable[[_Tree], _Tree]
    scatter: Callable[[_Tree], _Tree]
    sizes: tuple[float, float]


def in_int8(gradients: _Tree) -> _Tree:
    return jc.distributed.psum_scatter(gradients, "rank", INT8, tiled=True)


def in_fp8(parts: _Tree) -> _Tree:
    codes = jc.distributed.unshard(jc.distributed.quantize_parts(parts, "rank", FP8), "rank")
    return jc.dequantize(codes)


WAYS = {
    "floats": Way(
        lambda parts: jax.tree.map(lambda p: jax.lax.all_gather(p, "rank", tiled=True), parts),
        lambda gradients: jax.lax.psum_scatter(gradients, "rank", tiled=True),
        (4, 4),
    ),
    "weights int4, gradients int8": Way(
        lambda parts: jc.distributed.all_gather(parts, "rank", INT4, tiled=True),
        in_int8,
        (0.5 + 2 / GROUP, 1 + 2 / GROUP),
    ),
    "weights fp8, gradients int8": Way(in_fp8, in_int8, (1, 1 + 2 / GROUP)),
}


def train(name: str, way: Way, steps: int) -> float:
    """The mean loss of the last steps."""
    print(f"training {steps} steps with {name} on the wire", file=sys.stderr, flush=True)
    optimizer = jc.optim.adamw8bit(3e-3, weight_decay=0.0, min_size=256)

    def local(parts: _Tree) -> jax.Array:
        def step(carry: Any, at: jax.Array) -> Any:
            parts, state = carry
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), jax.lax.axis_index("rank")), at)
            value, gradients = jax.value_and_grad(data_parallel.loss)(way.gather(parts), key)
            own = jax.tree.map(lambda g: g / RANKS, way.scatter(gradients))
            updates, state = optimizer.update(own, state, parts)
            return (optax.apply_updates(parts, updates), state), jax.lax.pmean(value, "rank")

        return jax.lax.scan(step, (parts, optimizer.init(parts)), jnp.arange(steps))[1][-20:].mean()

    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("rank",), axis_types=(AxisType.Auto,))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("rank"), out_specs=P(), check_vma=False))
    return float(run(data_parallel.parameters(jax.random.key(0))))


def main() -> None:
    parser = argparse.ArgumentParser(description="fully sharded training with codes on the wire")
    parser.add_argument("--small", action="store_true", help="40 steps in place of 400")
    steps = 40 if parser.parse_args().small else 400
    numbers = sum(p.size for p in data_parallel.parameters(jax.random.key(0)).values())
    exact = None
    for name, way in WAYS.items():
        found = train(name, way, steps)
        exact = found if exact is None else exact
        sent = (RANKS - 1) / RANKS * numbers * sum(way.sizes)
        print(f"{name}: loss {found:.4f} ({found / exact - 1:+.2%}), {sent:.0f} bytes sent in a step", flush=True)


if __name__ == "__main__":
    main()
