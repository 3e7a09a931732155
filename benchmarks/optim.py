"""How long a step of an optimizer with packed state takes, beside `optax.adamw` in the same run.

    python benchmarks/optim.py                                   # 2^24 parameters
    python benchmarks/optim.py --size 22 --repeat 5 --only adamw8bit

Everything is timed in one process, in turn, and quoted as a ratio of medians. A step updates the parameters; they and
the state are donated. Bytes are those that the compiler's cost analysis counts; of a loop it counts one turn, and of a
branch both sides. Temporary bytes are those that the compiled step allocates while it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rounding import Case, measure, table

import jchop as jc

REFERENCE = "optax.adamw"
#: Elements of a chunk.
PIECE = 1 << 18
#: Of the number of chunks.
OPTIMIZERS: dict[str, Callable[[int], Any]] = {
    REFERENCE: lambda _: optax.adamw(1e-3, weight_decay=1e-2),
    "adamw8bit": lambda _: jc.optim.adamw8bit(1e-3),
    "adamw8bit in chunks": lambda chunks: jc.optim.adamw8bit(1e-3, chunks=chunks),
    "adamw_fp8": lambda _: jc.optim.adamw_fp8(1e-3),
    "adamw_fp8 in chunks": lambda chunks: jc.optim.adamw_fp8(1e-3, chunks=chunks),
    "adamw4bit": lambda _: jc.optim.adamw4bit(1e-3),
    "adamw4bit in chunks": lambda chunks: jc.optim.adamw4bit(1e-3, chunks=chunks),
    "adamw, state in bfloat16": lambda _: jc.optim.quantize_state(optax.adamw(1e-3), "bfloat16"),
    "adamw, parameters in bfloat16": lambda _: optax.chain(
        optax.adamw(1e-3), jc.optim.round_params("bfloat16:stochastic", jax.random.key(0))
    ),
}


def stepping(tx: Any, size: int) -> tuple[Case, float, int, int]:
    """A step that donates parameters and state; the bytes that it moves, its temporary ones, and those of the state."""
    params = jnp.ones((size // 4096, 4096))
    grads = jax.random.normal(jax.random.key(1), params.shape)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    held = [params, jax.jit(tx.init)(params)]
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*held, grads).compile()
    moved = float((compiled.cost_analysis() or {}).get("bytes accessed", float("nan")))

    def case() -> None:
        held[:] = jax.block_until_ready(compiled(*held, grads))

    return (
        case,
        moved,
        getattr(compiled.memory_analysis(), "temp_size_in_bytes", -1),
        jc.optim.state_report(held[1]).nbytes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=24, help="2 to this power parameters")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", nargs="*", choices=tuple(OPTIMIZERS), help="beside optax.adamw")
    options = parser.parse_args()
    names = tuple(OPTIMIZERS) if options.only is None else (REFERENCE, *options.only)
    count = 1 << options.size
    made = {name: stepping(OPTIMIZERS[name](max(1, count // PIECE)), count) for name in names}
    table(f"2^{options.size} parameters", measure({n: c[0] for n, c in made.items()}, options.repeat), REFERENCE, count)
    for name, (_, moved, held, size) in made.items():
        print(
            f"{name:32} {moved / count:8.1f} bytes moved, {held / count:6.1f} temporary, {size / count:6.3f} of state"
        )


if __name__ == "__main__":
    main()
