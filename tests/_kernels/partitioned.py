"""Programs over four chips that are not there: does a kernel stand in them, and does data move between the chips?

    python tests/_kernels/partitioned.py TARGET

compiles each of `PROGRAMS` for a mesh of four of the target's chips and prints a JSON object: for each program whether
it holds a kernel, the collectives in what was compiled, or the error. test_partitioned.py starts it, in a process of
its own, since a fault in a compiler can end the process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
SHAPE = (512, 1024)


def chips(target: str) -> list[Any]:
    from _kernels.compiling import TPUS
    from jax.experimental import topologies

    if target in TPUS:
        return list(topologies.get_topology_desc(TPUS[target], "tpu").devices)
    config = (HERE / "targets" / f"{target}.txtpb").read_text()
    return list(topologies.get_topology_desc("", "cuda", target_config=config, topology="1x1x4").devices)


def report(target: str) -> dict[str, dict[str, Any]]:
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
    from jax.sharding import PartitionSpec as P

    import jchop as jc

    devices = chips(target)[:4]

    def taken(x: Any) -> Any:
        return jc.round_to_format(x, "mxfp8_e4m3")

    def drawn(x: Any, key: Any) -> Any:
        return jc.round_to_format(x, "mxfp8_e4m3:stochastic", key, impl="pallas")

    def mesh(kind: AxisType) -> Mesh:
        return Mesh(np.array(devices), ("a",), axis_types=(kind,))

    def over(fun: Callable[..., Any], kind: AxisType, **more: Any) -> Callable[..., Any]:
        return jax.shard_map(fun, mesh=mesh(kind), out_specs=P("a"), **more)

    key = jax.eval_shape(lambda: jax.random.key(0))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), SHAPE[0]))

    def lower(fun: Callable[..., Any], kind: AxisType | None, *more: Any) -> Any:
        """Of x, its rows spread over the mesh, and of keys that every chip has."""
        with jax.default_device(devices[0]):
            if kind is None:
                one = SingleDeviceSharding(devices[0])
                args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one) for a in (whole, *more)]
                return jax.jit(fun).lower(*args)
            shardings = [NamedSharding(mesh(kind), P("a")), *[NamedSharding(mesh(kind), P())] * len(more)]
            args = [
                jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
                for a, sharding in zip((whole, *more), shardings, strict=True)
            ]
            with jax.set_mesh(mesh(kind)):
                return jax.jit(fun).lower(*args)

    whole = jax.ShapeDtypeStruct(SHAPE, np.float32)
    auto, explicit = AxisType.Auto, AxisType.Explicit
    programs: dict[str, Callable[[], Any]] = {
        "one chip": lambda: lower(taken, None),
        "one chip, vmap": lambda: lower(jax.vmap(taken), None),
        "one chip, vmap of keys": lambda: lower(jax.vmap(drawn), None, keys),
        "one chip, keys": lambda: lower(drawn, None, key),
        "auto mesh": lambda: lower(taken, auto),
        "explicit mesh": lambda: lower(taken, explicit),
        "shard_map": lambda: lower(over(taken, auto, in_specs=P("a")), auto),
        "shard_map, explicit mesh": lambda: lower(over(taken, explicit, in_specs=P("a")), explicit),
        "shard_map, unchecked": lambda: lower(over(taken, auto, in_specs=P("a"), check_vma=False), auto),
        "shard_map, keys": lambda: lower(over(drawn, auto, in_specs=(P("a"), P())), auto, key),
        "pallas, auto mesh": lambda: lower(drawn, auto, key),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, program in programs.items():
        try:
            compiled = program().compile().as_text()
        except NotImplementedError as error:
            found[name] = {"error": str(error)}
            continue
        calls = ("tpu_custom_call", "mosaic_gpu", "__gpu$xla.gpu.triton", "triton_kernel_call")
        found[name] = {
            "kernel": any(call in compiled for call in calls),
            "collectives": [name for name in COLLECTIVES if name in compiled],
        }
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    from _kernels.compiling import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    print(json.dumps(report(sys.argv[1])))
