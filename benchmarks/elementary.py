"""How fast elementary functions are that are rounded once, beside the carrier's function and then a rounding.

    python benchmarks/elementary.py                  # 10^7 float32 numbers, bfloat16
    python benchmarks/elementary.py exp tanh --size 1000000 --spec bfloat16:up

Both are jitted and timed in turn; quoted are the medians, their ratio, and the ratio if the output is written into a
donated buffer, as fresh pages of memory cost more than either.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

NAMES = ("exp", "exp2", "expm1", "log", "log1p", "tanh", "sin", "arctan", "cbrt")


def median_times(cases: list[Callable[[], jax.Array]], repeat: int) -> list[float]:
    """Seconds of each case, run in turn."""
    times = [[0.0] * repeat for _ in cases]
    for turn in range(repeat + 1):
        for case, row in zip(cases, times, strict=True):
            start = time.perf_counter()
            case().block_until_ready()
            row[max(turn - 1, 0)] = time.perf_counter() - start  # the first turn compiles
    return [float(np.median(row)) for row in times]


def reusing(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[[], jax.Array]:
    """`function` of `x`, written into the same buffer every time."""
    jitted = jax.jit(lambda x, out: function(x), donate_argnums=1, keep_unused=True)
    buffers = [jnp.zeros_like(x)]

    def case() -> jax.Array:
        buffers[0] = jitted(x, buffers[0])
        return buffers[0]

    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--size", type=int, default=10**7)
    parser.add_argument("--spec", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    x = jnp.asarray(np.random.default_rng(0).uniform(0.01, 0.99, options.size), jnp.float32)
    print("| function | carrier's, rounded (ms) | rounded once (ms) | ratio | ratio, buffers donated |")
    print("|---|---|---|---|---|")
    for name in options.names:

        def by_hand(x: jax.Array, name: str = name) -> jax.Array:
            return jc.round_to_format(getattr(jnp, name)(x), options.spec)

        def once(x: jax.Array, name: str = name) -> jax.Array:
            return getattr(jc.math, name)(x, options.spec)

        plain = [jax.jit(by_hand), jax.jit(once)]
        first, second = median_times([lambda f=f: f(x) for f in plain], options.repeat)
        third, fourth = median_times([reusing(f, x) for f in (by_hand, once)], options.repeat)
        print(f"| `{name}` | {1e3 * first:.0f} | {1e3 * second:.0f} | {second / first:.1f} | {fourth / third:.1f} |")


if __name__ == "__main__":
    main()
