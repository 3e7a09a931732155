"""Files, functions and calls of jchop that eight first calls pass through: `python benchmarks/traces.py [NAME ...]`.

Each call runs once in a process of its own, after the import and after the arrays were made, under `sys.setprofile`.
`climbs` counts how often the text or the format of a spec is resolved again (`as_spec`) within the call.
"""

from __future__ import annotations

import collections
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = (
    *("round", "stochastic", "quantize", "emulated matmul", "NNX Linear qat", "quantize_fn"),
    *("adamw8bit init", "adamw8bit update", "load GPTQ"),
)


def program(name: str) -> Callable[[], Any]:
    """A call without arguments, with its arrays made."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jchop as jc

    x = jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)
    if name == "round":
        return lambda: jc.round_to_format(x, "e4m3fn")
    if name == "stochastic":
        return lambda: jc.round_to_format(x, "e4m3fn:stochastic", jax.random.key(0))
    if name == "quantize":
        return lambda: jc.quantize(x, "int4(group=32)")
    if name == "emulated matmul":
        low = jc.emulate(lambda a, b: a @ b, "bfloat16")
        return lambda: low(x, x)
    if name == "quantize_fn":
        low = jc.quantize_fn(lambda p, a: a @ p["w"], jc.Rule(weight="int8", activation="int8"))
        return lambda: low({"w": x}, x)
    if name == "NNX Linear qat":
        from flax import nnx

        model = jc.nn.quantize(nnx.Linear(256, 64, rngs=nnx.Rngs(0)), jc.Rule(weight="int4(group=32)"), mode="qat")
        return lambda: model(x)
    if name.startswith("adamw8bit"):
        tx = jc.optim.adamw8bit(1e-3)
        params = {"w": x}
        if name.endswith("init"):
            return lambda: tx.init(params)
        state = tx.init(params)
        return lambda: tx.update(params, state, params)
    folder = Path(tempfile.mkdtemp())
    jc.save_checkpoint(folder, {"a.weight": jc.quantize(x, "int4(group=32,scale=float16)")}, layout="gptq")
    return lambda: jc.load_checkpoint(folder)


def trace(name: str) -> None:
    import jchop

    root = str(Path(jchop.__file__).parent)
    call = program(name)
    calls: collections.Counter[tuple[str, str, int]] = collections.Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            calls[code.co_filename, code.co_name, code.co_firstlineno] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    files = {file for file, _, _ in calls}
    climbs = sum(count for (_, function, _), count in calls.items() if function == "as_spec")
    print(f"| {name} | {len(files)} | {len(calls)} | {calls.total()} | {climbs} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        trace(sys.argv[2])
    else:
        print("| call | files | functions | calls | climbs |\n|---|---|---|---|---|")
        for name in sys.argv[1:] or NAMES:
            sys.stdout.flush()
            subprocess.run([sys.executable, __file__, "--one", name], check=True)
