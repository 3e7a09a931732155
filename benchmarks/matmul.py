"""How fast the matrix product with an emulated accumulator is, beside a jitted float32 `jnp.dot` of the same matrices.

    python benchmarks/matmul.py                      # 256^3, 512^3, 1024^3; operands, products and sums in e5m10
    python benchmarks/matmul.py --size 256 --repeat 41 --only sequential
    python benchmarks/matmul.py --size 256 --cores --only volta     # the sums of tensor cores instead

Everything is timed in one process, in turn, and quoted as a ratio of medians: machines are noisy, and an absolute time
proves nothing. A rate counts m n k multiply-adds, each of which is rounded twice in all but `fused` and `matrix_unit`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

FORMAT = "e5m10"
DRAWN = "e5m10:stochastic"
SPECS = {
    "sequential, nearest": jc.MatmulSpec(FORMAT, FORMAT, FORMAT),
    "sequential, stochastic": jc.MatmulSpec(FORMAT, DRAWN, DRAWN),
    "sequential, fused": jc.MatmulSpec(FORMAT, None, FORMAT, fused=True),
    "pairwise": jc.MatmulSpec(FORMAT, FORMAT, FORMAT, "pairwise"),
    "blocked(8)": jc.MatmulSpec(FORMAT, FORMAT, FORMAT, "blocked(8)"),
    "matrix_unit(32)": jc.MatmulSpec(FORMAT, None, FORMAT, "matrix_unit(32)"),
}
#: The arithmetics of `jc.tensor_core`: operands of float32 are rounded to the unit's type in each call.
CORES = {f"{unit} {dtype}": row.spec for unit, types in jc.TENSOR_CORES.items() for dtype, row in types.items()}
#: At 256^3, the most times as long as `jnp.dot` that an order should take.
TARGETS = {"sequential, nearest": 25, "sequential, stochastic": 100, "matrix_unit(32)": 6, **dict.fromkeys(CORES, 40)}
DOT = "jnp.dot"
SIZES = (256, 512, 1024)

Case = Callable[[], object]


def make_cases(size: int, only: str, specs: Mapping[str, jc.MatmulSpec]) -> dict[str, Case]:
    """A call of each case, compiled. The operands are in the format already; rounding them again is a small part."""
    a, b = (
        jc.round_to_format(jax.random.normal(jax.random.key(seed), (size, size), jnp.float32), FORMAT)
        for seed in (1, 2)
    )
    key, dot = jax.random.key(0), jax.jit(jnp.dot)
    cases: dict[str, Case] = {DOT: lambda: dot(a, b).block_until_ready()}
    for name, spec in specs.items():
        if only in name:
            product = jax.jit(partial(jc.math.matmul, spec=spec))
            cases[name] = lambda product=product: product(a, b, key=key).block_until_ready()
    return cases


def measure(cases: dict[str, Case], repeat: int) -> dict[str, np.ndarray]:
    """Seconds of each run of each case, the cases in turn, in another order each time."""
    order, shuffle = list(cases.items()), random.Random(0).shuffle
    for case in cases.values():
        case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeat):
        print(f"\r  run {turn + 1} of {repeat}", end="", file=sys.stderr, flush=True)
        shuffle(order)
        for name, case in order:
            case()  # its own data and threads come first
            calls = 1 if name != DOT else 5  # it is short
            start = time.perf_counter()
            for _ in range(calls):
                case()
            seconds[name].append((time.perf_counter() - start) / calls)
    print("\r" + " " * 30 + "\r", end="", file=sys.stderr)
    return {name: np.array(times) for name, times in seconds.items()}


def table(size: int, seconds: dict[str, np.ndarray]) -> dict[str, float]:
    """Prints one size; gives the G multiply-adds per second of each case."""
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    print(f"\n### {size}^3\n")
    print("| case | ms, median | quartiles | least | G multiply-adds/s | times as long as jnp.dot | target |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, times in seconds.items():
        low, high = np.percentile(times, [25, 75]) * 1e3
        rate, ratio = size**3 / medians[name] / 1e9, medians[name] / medians[DOT]
        target = f"≤ {TARGETS[name]}" if name in TARGETS and size == SIZES[0] else ""
        print(
            f"| {name} | {medians[name] * 1e3:.2f} | {low:.2f}–{high:.2f} | {times.min() * 1e3:.2f} | {rate:.2f} | "
            f"{ratio:.1f} | {target} |"
        )
    return {name: size**3 / median / 1e9 for name, median in medians.items()}


def growth(rates: dict[int, dict[str, float]]) -> None:
    """Prints the rates of all sizes, each as a share of that of the smallest."""
    first = min(rates)
    print("\n### Growth: G multiply-adds/s (relative to the smallest size)\n")
    print("| case | " + " | ".join(f"{size}^3" for size in rates) + " |")
    print("| --- |" + " ---: |" * len(rates))
    for name in rates[first]:
        cells = [f"{rate[name]:.2f} ({rate[name] / rates[first][name]:.2f})" for rate in rates.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, action="append", help=f"m = n = k; may be repeated (default {SIZES})")
    parser.add_argument("--repeat", type=int, default=21, help="timed runs of each case at 256^3 (default 21)")
    parser.add_argument("--only", default="", help="only the cases whose name holds this text")
    parser.add_argument("--cores", action="store_true", help="the sums of tensor cores")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}, {jc.__name__} {jc.__version__}, {FORMAT}")
    rates = {}
    for size in arguments.size or SIZES:
        repeat = max(5, min(arguments.repeat, arguments.repeat * SIZES[0] ** 3 // size**3))
        rates[size] = table(
            size, measure(make_cases(size, arguments.only, CORES if arguments.cores else SPECS), repeat)
        )
    if len(rates) > 1:
        growth(rates)


if __name__ == "__main__":
    main()
