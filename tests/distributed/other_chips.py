"""Quantized sums over four chips that are not there: the bytes that they send, as JSON.

python tests/distributed/other_chips.py TARGET
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SIZE = 1 << 16


def report(target: str) -> dict[str, dict[str, float]]:
    import jax
    import numpy as np
    from _kernels.partitioned import chips
    from distributed.hlo import wire_bytes
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jchop as jc

    mesh = Mesh(np.array(chips(target)[:4]), ("d",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((4, SIZE), np.float32, sharding=NamedSharding(mesh, P("d")))
    found = {}
    for name in ("int8", "int4"):

        def total(x: jax.Array, spec: str = f"{name}(group=256,scale=bfloat16)") -> jax.Array:
            return jc.distributed.psum(x[0], "d", spec)

        with jax.default_device(mesh.devices.flat[0]):
            mapped = jax.shard_map(total, mesh=mesh, in_specs=P("d"), out_specs=P())
            text = jax.jit(mapped).lower(x).compile().as_text()
        found[name] = wire_bytes(text or "", 4)
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from _kernels.compiling import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    print(json.dumps([SIZE, report(sys.argv[1])]))
