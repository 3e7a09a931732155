"""What `jc.emulate` costs: a chain of 20 elementwise operations against the same rounded by hand, and compile times.

    python benchmarks/emulate.py [--size N] [--repeats R] [--specs SPEC ...]

"By hand" is the carrier's operation with `round_to_format` around it. That rounds twice where emulate rounds the exact
result once, so in the directed modes it is cheaper and wrong.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

import jchop as jc

STEPS = 20
SPECS = ("binary16", "e5m2", "bfloat16", "binary16:up", "bfloat16:up", "binary16:stochastic", "bfloat16:stochastic")


def chain(x: jax.Array, y: jax.Array, rounded: Callable[[Any], Any] = lambda v: v) -> jax.Array:
    """Twenty operations: sums, differences and products in turn."""
    for i in range(STEPS):
        x = rounded((x + y, x * y, x - y, x * 0.5)[i % 4])
    return x


def by_hand(spec: str, key: jax.Array) -> Callable[..., jax.Array]:
    """The chain with every operation rounded."""

    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        keys = iter(jax.random.split(key, STEPS + 2))
        rounded = lambda v: jc.round_to_format(v, spec, next(keys))  # noqa: E731
        return chain(rounded(x), rounded(y), rounded)

    return run


def seconds(runs: list[Callable[[], jax.Array]], repeats: int) -> list[list[float]]:
    """The seconds of the processor of each of several runs, taken in turn; other programs change them little."""
    taken: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run().block_until_ready()
    for _ in range(repeats):
        for times, run in zip(taken, runs, strict=True):
            start = time.process_time()
            run().block_until_ready()
            times.append(time.process_time() - start)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1 << 20)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--specs", nargs="+", default=SPECS)
    options = parser.parse_args()
    key = jax.random.key(0)
    x, y = (jax.random.normal(k, (options.size,)) for k in jax.random.split(key))
    print(f"{'spec':<24}{'by hand, ms':>12}{'emulate, ms':>12}{'ratio':>8}{'quartiles':>16}{'compile, s':>12}")
    for spec in options.specs:
        hand, low = jax.jit(by_hand(spec, key)), jax.jit(jc.emulate(chain, spec, key=key))
        start = time.process_time()
        low(x, y).block_until_ready()
        compiled = time.process_time() - start
        a, b = seconds([lambda hand=hand: hand(x, y), lambda low=low: low(x, y)], options.repeats)
        low_quartile, ratio, high_quartile = statistics.quantiles([v / u for u, v in zip(a, b, strict=True)], n=4)
        spread = f"{low_quartile:.2f} to {high_quartile:.2f}"
        each = f"{1e3 * statistics.median(a):>12.2f}{1e3 * statistics.median(b):>12.2f}"
        print(f"{spec:<24}{each}{ratio:>8.2f}{spread:>16}{compiled:>12.2f}", flush=True)


if __name__ == "__main__":
    main()
