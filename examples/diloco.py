"""Training with few exchanges (DiLoCo): four ranks take steps of their own, and sum what they changed in int8 or int4.

Prints the loss of each run, and the bytes that one rank sends in a step. The ranks are four devices of one process, or
with --processes four processes that talk over the loopback device.

    python examples/diloco.py [--small] [--processes]

With `--small` it takes some 55 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from typing import Any

import data_parallel
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jchop as jc

RANKS, EVERY, GROUP = 4, 8, 64
#: The formats of the exchanges, with the bytes of a number; None: floats.
FORMATS = {None: 4.0} | {f"int{bits}(group={GROUP},scale=bfloat16)": bits / 8 + 2 / GROUP for bits in (8, 4)}


def summed(spec: str | None) -> Any:
    """The sum over ranks as a link of an Optax chain; codes keep their errors for the next exchange."""
    if spec is None:
        return optax.stateless(lambda updates, _: jax.lax.psum(updates, "rank"))
    return jc.distributed.psum_with_feedback("rank", spec)


def train(tx: Any, steps: int, anchored: bool) -> float:
    """The loss of the trained parameters on other data."""

    def local() -> jax.Array:
        own = jax.random.fold_in(jax.random.key(1), jax.lax.axis_index("rank"))
        start = data_parallel.parameters(jax.random.key(0))

        def step(carry: Any, at: jax.Array) -> Any:
            params, state = carry
            gradient = jax.grad(data_parallel.loss)(params, jax.random.fold_in(own, at))
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        varying = jax.tree.map(lambda p: jax.lax.pcast(p, "rank", to="varying"), start)
        (params, state), _ = jax.lax.scan(step, (varying, tx.init(varying)), jnp.arange(steps))
        found = state.anchor if anchored else params
        keys = jax.random.split(jax.random.key(2), 64)
        return jax.lax.pmean(jax.lax.map(lambda key: data_parallel.loss(found, key), keys).mean(), "rank")

    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("rank",), axis_types=(AxisType.Auto,))
    return float(jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P()))())


def report(small: bool) -> None:
    steps = 48 if small else 480
    say = jax.process_index() == 0
    numbers = sum(p.size for p in data_parallel.parameters(jax.random.key(0)).values())
    share = 2 * (RANKS - 1) / RANKS * numbers  # numbers that a rank sends in an all-reduce
    mean, inner = optax.scale(1 / RANKS), optax.adam(3e-3)
    runs = [("every step, float32", optax.chain(summed(None), mean, inner), 4.0, False)]
    for spec, size in FORMATS.items():
        outer = optax.chain(summed(spec), mean, optax.sgd(0.7, momentum=0.9, nesterov=True))
        name = f"every {EVERY} steps, {spec or 'float32'}"
        runs.append((name, jc.distributed.diloco(inner, outer, EVERY), size / EVERY, True))
    for name, tx, size, anchored in runs:
        if say:
            print(f"training {steps} steps with an exchange {name}", file=sys.stderr, flush=True)
        found = train(tx, steps, anchored)
        if say:
            print(f"{name}: loss {found:.4f}, {share * size:.0f} bytes sent in a step", flush=True)


def start_processes(small: bool) -> None:
    """Runs this script once for each rank, with one device each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    command = [sys.executable, __file__, *(["--small"] if small else []), "--port", port]
    started = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(RANKS)]
    failed = [each.wait() for each in started]
    if any(failed):
        raise SystemExit(f"exit statuses of the processes: {failed}")


def main() -> None:
    parser = argparse.ArgumentParser(description="training with few exchanges")
    parser.add_argument("--small", action="store_true", help="48 steps in place of 480")
    parser.add_argument("--processes", action="store_true", help="a process for each rank")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.processes:
        start_processes(options.small)
        return
    if options.port is not None:
        jax.distributed.initialize(f"127.0.0.1:{options.port}", RANKS, options.rank)
    report(options.small)


if __name__ == "__main__":
    main()
