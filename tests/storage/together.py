"""One of several processes that save, restore or keep saving a tree that spans them.

python tests/storage/together.py PORT PROCESSES NUMBER DEVICES FOLDER ACTIONS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

SPECS = {"int4": "int4(group=16,scale=bfloat16)", "nvfp4": "nvfp4", "fp8": "e4m3fn(group=tensor)"}
SHAPE = (16, 64)
#: The peak of memory is read with leaves of 16 MiB.
LEAVES, LARGE = 8, (1 << 12, 1 << 10)


def whole() -> dict[str, Any]:
    """The tree in one process."""
    import jchop as jc

    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    tree: dict[str, Any] = {name: jc.quantize(x, spec) for name, spec in SPECS.items()}
    return tree | {"rows": x, "columns": x, "half": x.astype(np.float16), "step": np.int32(3), "bias": x[0]}


def places(mesh: Any) -> dict[str, Any]:
    """For each leaf the axes of the mesh that cut it."""
    from jax.sharding import PartitionSpec as P

    both = tuple(mesh.axis_names)
    cut = {"int4": P(both), "nvfp4": P(None, both[-1]), "fp8": P(both[0], both[-1]), "rows": P(both)}
    return cut | {"columns": P(None, both), "half": P(both[-1], both[0]), "bias": P()}


def like(mesh: Any) -> dict[str, Any]:
    """The tree as shapes with shardings."""
    import jax
    from jax.sharding import NamedSharding

    import jchop as jc

    def shape(leaf: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    found: dict[str, Any] = dict(whole())
    for name, spec in places(mesh).items():
        leaf, sharding = found[name], NamedSharding(mesh, spec)
        where = leaf.shardings(sharding) if isinstance(leaf, jc.QArray) else sharding
        found[name] = jax.tree.map(shape, leaf, where)
    return found


def placed(mesh: Any) -> dict[str, Any]:
    """The tree on the devices of all processes."""
    import jax

    def place(leaf: Any, wanted: Any) -> Any:
        sharding = getattr(wanted, "sharding", None)
        return leaf if sharding is None else jax.make_array_from_callback(leaf.shape, sharding, lambda i: leaf[i])

    return jax.tree.map(place, whole(), like(mesh))


def check(found: Any, wanted: Any) -> None:
    """Compares the parts that are in this process."""
    import jax

    for got, want, tree in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), jax.tree.leaves(whole()), strict=True):
        assert getattr(want, "sharding", None) in (None, got.sharding)
        for shard in got.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(tree)[shard.index].tobytes()


def peak() -> int:
    """The most bytes that this process held so far."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def numbered(mesh: Any, shape: tuple[int, int], count: int, start: int) -> dict[str, Any]:
    """Arrays of one number each, cut along their rows by all devices."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    rows = NamedSharding(mesh, P(mesh.axis_names))
    part = (shape[0] // mesh.size, shape[1])

    def one(number: int) -> Any:
        return jax.make_array_from_callback(shape, rows, lambda _: np.full(part, number, np.float32))

    return {str(number): one(start + number) for number in range(count)}


def save(mesh: Any, folder: Path) -> None:
    import jchop as jc

    jc.save(folder / "tree.safetensors", placed(mesh), metadata={"by": "all"})


def load(mesh: Any, folder: Path) -> None:
    import jchop as jc

    check(jc.load(folder / "tree.safetensors", like=like(mesh)), like(mesh))


def fail(mesh: Any, folder: Path) -> None:
    import jax

    import jchop as jc

    try:
        jc.save(folder / "missing" / "tree.safetensors", placed(mesh))
    except OSError as error:
        assert jax.process_index() == 0 or "failed in the processes 0" in str(error), error
        return
    raise SystemExit("it was saved")


def large(mesh: Any, folder: Path) -> None:
    """Prints how much a process grew while it made, saved and restored a tree, and the bytes of the tree."""
    import jax

    import jchop as jc

    start, path = peak(), folder / "large.safetensors"
    tree = numbered(mesh, LARGE, LEAVES, 0)
    wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in tree.items()}
    jc.save(path, tree)
    del tree
    for name, x in jc.load(path, like=wanted).items():
        assert (np.asarray(x.addressable_shards[0].data) == int(name)).all()
    print("PEAK", peak() - start, LEAVES * 4 * LARGE[0] * LARGE[1], flush=True)


def forever(mesh: Any, folder: Path) -> None:
    import itertools

    import jchop as jc

    for version in itertools.count():
        tree = numbered(mesh, (64, 1 << 14), 4, 0)
        jc.save(folder / "tree.safetensors", {name: x * 0 + version for name, x in tree.items()})


def orbax_save(mesh: Any, folder: Path) -> None:
    import orbax.checkpoint as ocp

    tree = placed(mesh)
    del tree["step"]  # a number of one process
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", tree)
        checkpointer.wait_until_finished()


def orbax_load(mesh: Any, folder: Path) -> None:
    import jax
    import orbax.checkpoint as ocp

    wanted = like(mesh)
    del wanted["step"]
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(folder / "orbax", wanted)
    check({**found, "step": jax.numpy.int32(3)}, {**wanted, "step": np.int32(3)})


ACTIONS = {each.__name__: each for each in (save, load, fail, large, forever, orbax_save, orbax_load)}


def main(port: str, processes: int, number: int, devices: int, folder: Path, actions: str) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import jax
    from jax.sharding import AxisType

    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=number)
    mesh = jax.make_mesh((processes, devices), ("process", "device"), axis_types=(AxisType.Auto,) * 2)
    for action in actions.split(","):
        ACTIONS[action](mesh, folder)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5]), sys.argv[6])  # type: ignore[misc]
