"""A quantized all-reduce beside `jax.lax.psum`, on eight devices that share the processor.

    python benchmarks/all_reduce.py [LOG2_OF_NUMBERS]

prints the fastest and the median time of interleaved calls.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc

RANKS, CALLS = 8, 5


def main(log2: int) -> None:
    mesh = jax.make_mesh((RANKS,), ("d",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("d"))
    x = jax.device_put(np.random.default_rng(0).standard_normal((RANKS, 1 << log2)).astype(np.float32), rows)
    ways = {
        "lax.psum, float32": lambda x: jax.lax.psum(x, "d"),
        "int8, two_shot": lambda x: jc.distributed.psum(x, "d", "int8(group=256,scale=bfloat16)"),
        "int8, ring": lambda x: jc.distributed.psum(x, "d", "int8(group=256,scale=bfloat16)", algorithm="ring"),
        "int4, two_shot": lambda x: jc.distributed.psum(x, "d", "int4(group=256,scale=bfloat16)"),
    }
    compiled = {
        name: jax.jit(jax.shard_map(lambda x, f=f: f(x[0])[None], mesh=mesh, in_specs=P("d"), out_specs=P("d")))
        for name, f in ways.items()
    }
    for f in compiled.values():
        jax.block_until_ready(f(x))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(CALLS):
        for name, f in compiled.items():
            begun = time.perf_counter()
            jax.block_until_ready(f(x))
            times[name].append(time.perf_counter() - begun)
    print(f"{RANKS} devices, 2^{log2} numbers on each, jax {jax.__version__}, {os.cpu_count()} cores")
    for name, seconds in times.items():
        print(f"{name:20} fastest {min(seconds):6.3f} s, median {float(jnp.median(jnp.array(seconds))):6.3f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 24)
