"""One of several processes that sum and gather over all their devices, and write the results of their devices.

python tests/distributed/process.py PORT PROCESSES NUMBER DEVICES FOLDER CASES
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = (5, 37)


def pieces_of(x: Any, ranks: int) -> Any:
    """A piece for each rank: numbers times powers of two, which are exact."""
    return x[None] * (2.0 ** np.arange(ranks, dtype=np.float32)).reshape(ranks, *[1] * x.ndim)


def turned(ranks: int) -> list[tuple[int, int]]:
    """Each rank sends to the next one but two; the last rank sends nothing."""
    return [(rank, (rank + 3) % ranks) for rank in range(ranks - 1)]


def main(port: str, processes: int, number: int, devices: int, folder: str, cases: str) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=number)
    shards: dict[str, Any] = shards_of(processes, devices, cases)
    np.savez(Path(folder) / f"{number}.npz", **shards)


def shards_of(processes: int, devices: int, cases: str) -> dict[str, np.ndarray]:
    """The results of the devices of this process."""
    import jax
    from distributed.replay import STOCHASTIC
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jchop as jc

    every, ranks = ("process", "device"), processes * devices
    mesh = jax.make_mesh((processes, devices), every, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:ranks])
    rows = NamedSharding(mesh, P(every))
    whole = np.random.default_rng(0).standard_normal((processes * devices, *SHAPE)).astype(np.float32)
    x = jax.make_array_from_callback(whole.shape, rows, lambda index: whole[index])
    d, key = jc.distributed, jax.random.key(7)

    def both(x: jax.Array) -> dict[str, jax.Array]:
        x = x[0]
        levels = d.Hierarchical("device", "process")
        known = {
            "two_shot": lambda: d.psum(x, every, STOCHASTIC, key),
            "ring": lambda: d.psum(x, every, STOCHASTIC, key, algorithm="ring"),
            "hierarchical": lambda: d.psum(x, every, STOCHASTIC, key, algorithm=levels),
            "gather": lambda: d.all_gather(x, every, STOCHASTIC, key),
            "scatter": lambda: d.psum_scatter(pieces_of(x, ranks), every, STOCHASTIC, key),
            "exchange": lambda: d.all_to_all(pieces_of(x, ranks), every, STOCHASTIC, key),
            "permute": lambda: d.ppermute(x, every, STOCHASTIC, key, perm=turned(ranks)),
        }
        return {name: known[name]()[None] for name in cases.split(",")}

    found = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P(every), out_specs=P(every)))(x)
    return {
        f"{name} {shard.index[0].start or 0}": np.asarray(shard.data)[0]
        for name, value in found.items()
        for shard in value.addressable_shards
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5], sys.argv[6])  # type: ignore[misc]
