"""A pipeline of two stages, four times beside each other: activations go to the next stage as floats or int8 codes.

Each stage holds one block of a small transformer. A batch passes in parts, so that both stages work at once. Cotangents
go back in the same format. Prints the loss of each run, and the bytes that a device of the first stage sends in a step.

    python examples/pipeline.py [--small]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import data_parallel
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data_parallel import BATCH, LENGTH, WIDTH
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jchop as jc

STAGES, COPIES, PARTS = 2, 4, 4
INT8 = f"int8(group={WIDTH},scale=bfloat16)"
FORMATS = {None: 4.0, INT8: 1 + 2 / WIDTH}
#: The arrays of a block, which every stage has for itself; both stages share the others.
BLOCK = ("qkv", "up", "down")


def sent(x: jax.Array, spec: str | None) -> jax.Array:
    """What the first stage sent, on the second one."""
    if spec is None:
        return jax.lax.ppermute(x, "stage", [(0, 1)])
    return jc.distributed.ppermute(x, "stage", f"{spec}:gradient=[{spec}]", perm=[(0, 1)])


def local_loss(blocks: Any, shared: Any, keys: jax.Array, spec: str | None) -> jax.Array:
    """The mean loss of all parts of a batch. In turn t the first stage has part t, and the second one part t - 1."""
    params = shared | {name: blocks[name][0] for name in BLOCK}
    stage = jax.lax.axis_index("stage")
    tokens, targets = jax.vmap(data_parallel.batch)(keys[0])

    def turn(arrived: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = params["embed"][tokens[at % PARTS]] + params["place"]
        made = data_parallel.block(params, jnp.where(stage == 0, new, arrived))
        value = data_parallel.surprise(params, made, targets[(at - 1) % PARTS])
        return sent(made, spec), jnp.where((stage == 1) & (at > 0), value, 0.0)

    start = jax.lax.pcast(jnp.zeros((BATCH, LENGTH, WIDTH)), ("stage", "copy"), to="varying")
    values = jax.lax.scan(turn, start, jnp.arange(PARTS + 1))[1]
    return jax.lax.psum(values.sum(), ("stage", "copy")) / (PARTS * COPIES)


def train(spec: str | None, steps: int) -> float:
    """The mean loss of the last steps."""
    print(f"training {steps} steps with {spec or 'floats'} between the stages", file=sys.stderr, flush=True)
    devices = np.array(jax.devices()[: STAGES * COPIES]).reshape(STAGES, COPIES)
    mesh = Mesh(devices, ("stage", "copy"), axis_types=(AxisType.Auto,) * 2)

    def local(blocks: Any, shared: Any, keys: jax.Array) -> jax.Array:
        return local_loss(blocks, shared, keys, spec)

    loss = jax.shard_map(local, mesh=mesh, in_specs=(P("stage"), P(), P("copy")), out_specs=P())
    optimizer = optax.adam(3e-3)
    first, second = (data_parallel.parameters(jax.random.key(number)) for number in range(STAGES))
    shared = {name: array for name, array in first.items() if name not in BLOCK}
    params = {name: jnp.stack([first[name], second[name]]) for name in BLOCK}, shared

    def step(carry: Any, at: jax.Array) -> Any:
        params, state = carry
        keys = jax.random.split(jax.random.fold_in(jax.random.key(9), at), (COPIES, PARTS))
        value, gradient = jax.value_and_grad(lambda both: loss(both[0], both[1], keys))(params)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), value

    run = jax.jit(lambda params: jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(steps))[1])
    return float(run(params)[-20:].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="a pipeline with codes between its stages")
    parser.add_argument("--small", action="store_true", help="30 steps in place of 300")
    steps = 30 if parser.parse_args().small else 300
    exact = None
    for spec, size in FORMATS.items():
        found = train(spec, steps)
        exact = found if exact is None else exact
        count = (PARTS + 1) * BATCH * LENGTH * WIDTH
        print(
            f"{spec or 'floats'}: loss {found:.4f} ({found / exact - 1:+.2%}), {count * size:.0f} bytes sent in a step"
        )


if __name__ == "__main__":
    main()
