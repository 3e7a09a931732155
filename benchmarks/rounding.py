"""How fast rounding is, beside a two-thread copy of the same bytes, `jax.random.bits`, and pychop.

    python benchmarks/rounding.py                    # 27,264,000, 2^20 and 2^16 float32 elements, and one eager call
    python benchmarks/rounding.py --size 1048576 --repeat 21
    pip install pychop                               # adds pychop's Chop, jitted, to the table

Everything is timed in one process, in turn, and quoted as a ratio of medians: machines are noisy, and an absolute time
proves nothing. Output buffers are donated and so reused: on a CPU, writing to fresh pages costs more than the rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.rounding.elements import round_to_spec

FORMATS = ("binary16", "float8_e4m3fn", "float8_e5m2", "bfloat16")
MODES = ("nearest_even", "nearest_away", "nearest_zero", "up", "down", "toward_zero", "odd")
STOCHASTIC = ("float8_e4m3fn:stochastic", "bfloat16:stochastic", "float8_e5m2:stochastic_equal")
SIZES = (27_264_000, 1 << 20, 1 << 16)

Case = Callable[[], object]


def reusing(function: Callable[[jax.Array], jax.Array], x: jax.Array, buffers: list[jax.Array]) -> Case:
    """`function` of `x`, jitted, writing into the one donated buffer that all cases pass on."""
    jitted = jax.jit(lambda x, out: function(x), donate_argnums=1, keep_unused=True)

    def case() -> None:
        buffers[0] = jitted(x, buffers[0])
        buffers[0].block_until_ready()

    return case


def thread_copy(x: jax.Array) -> Case:
    """A plain memory copy by two threads, a half each."""
    source, target = np.asarray(x), np.empty(x.shape, np.float32)
    middle, pool = x.size // 2, ThreadPoolExecutor(2)
    halves = (slice(0, middle), slice(middle, None))

    def case() -> None:
        list(pool.map(lambda half: np.copyto(target[half], source[half]), halves))

    return case


def fed_by_jax_random(spec: str, key: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """The same rounding body, its words from `jax.random.bits`."""
    return lambda x: round_to_spec(x, jc.Spec(spec), CARRIERS["float32"], jax.random.bits(key, x.shape))


def pychop_cases(x: jax.Array, buffers: list[jax.Array]) -> dict[str, Case]:
    """pychop's Chop (5 exponent and 10 fraction bits) under jit, where it is installed."""
    if importlib.util.find_spec("pychop") is None:
        return {}
    import pychop  # type: ignore[import-not-found]

    pychop.backend("jax")
    names = {"pychop Chop(5, 10), nearest": 1, "pychop Chop(5, 10), stochastic": 5}
    return {name: reusing(pychop.Chop(5, 10, rmode=mode), x, buffers) for name, mode in names.items()}


def measure(cases: dict[str, Case], repeat: int, calls: int = 1) -> dict[str, float]:
    """Median seconds of a call of each case, the cases in turn, in another order each time.

    What ran before a case, and what it left in the caches, moves its time by half; no case shall have it always.
    """
    order, shuffle = list(cases.items()), random.Random(0).shuffle
    for case in cases.values():
        case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeat):
        print(f"\r  run {turn + 1} of {repeat}", end="", file=sys.stderr, flush=True)
        shuffle(order)
        for name, case in order:
            case()  # its own data and threads come first
            start = time.perf_counter()
            for _ in range(calls):
                case()
            seconds[name].append((time.perf_counter() - start) / calls)
    print("\r" + " " * 30 + "\r", end="", file=sys.stderr)
    return {name: float(np.median(times)) for name, times in seconds.items()}


def table(title: str, medians: dict[str, float], base: str, size: int) -> None:
    print(f"\n### {title}\n\n| case | µs | ns an element | ratio to {base} |\n| --- | ---: | ---: | ---: |")
    for name, seconds in medians.items():
        print(f"| {name} | {seconds * 1e6:.1f} | {seconds / size * 1e9:.3f} | {seconds / medians[base]:.2f} |")


def large(size: int, repeat: int) -> None:
    x = jax.random.normal(jax.random.key(1), (size,), jnp.float32)
    key, buffers = jax.random.key(0), [jnp.zeros_like(x)]
    cases = {"two-thread copy": thread_copy(x), "jitted x * 2": reusing(lambda x: x * 2, x, buffers)}
    for fmt in FORMATS:
        for mode in MODES:
            spec = jc.Spec(fmt, rounding=mode)
            cases[f"{fmt}:{mode}"] = reusing(lambda x, s=spec: jc.round_to_format(x, s), x, buffers)
    for text in STOCHASTIC:
        cases[text] = reusing(lambda x, s=text: jc.round_to_format(x, s, key), x, buffers)
    for text in STOCHASTIC[:2]:
        cases[f"{text}, jax.random.bits"] = reusing(fed_by_jax_random(text, key), x, buffers)
    cases |= pychop_cases(x, buffers)
    calls = max(1, (1 << 23) // size)  # a sample is of 8M elements at the least
    medians = measure(cases, repeat, calls)
    table(f"{size:,} float32 elements", medians, "two-thread copy", size)
    for text in STOCHASTIC[:2]:
        print(f"\n{text}: {medians[f'{text}, jax.random.bits'] / medians[text]:.1f} x faster than with jax.random.bits")
    for name, ours in (("nearest", "binary16:nearest_even"), ("stochastic", "bfloat16:stochastic")):
        if theirs := medians.get(f"pychop Chop(5, 10), {name}"):
            print(f"\n{ours}: {theirs / medians[ours]:.1f} x faster than pychop's Chop under jit")


def pages(repeat: int, size: int = SIZES[0]) -> None:
    """The same rounding into fresh memory, into a donated buffer, and in place."""
    x, spec = jax.random.normal(jax.random.key(1), (size,), jnp.float32), jc.Spec("binary16")
    fresh = jax.jit(lambda x: jc.round_to_format(x, spec))
    in_place, held = jax.jit(lambda x: jc.round_to_format(x, spec), donate_argnums=0), [jnp.array(x)]

    def rounded_in_place() -> None:
        held[0] = in_place(held[0]).block_until_ready()

    cases: dict[str, Case] = {
        "fresh output": lambda: fresh(x).block_until_ready(),
        "donated buffer": reusing(lambda x: jc.round_to_format(x, spec), x, [jnp.zeros_like(x)]),
        "in place": rounded_in_place,
    }
    table(f"Fresh pages, {size:,} float32 elements to binary16", measure(cases, repeat), "donated buffer", size)


def eager(repeat: int, size: int = 1000) -> None:
    x, key = jnp.ones(size), jax.random.key(0)
    add = jax.jit(lambda x: x + 1)
    nearest, stochastic = jc.Spec("float8_e4m3fn"), jc.Spec("float8_e4m3fn:stochastic")
    array = np.ones(size, np.float32)
    cases: dict[str, Case] = {
        "jitted x + 1": lambda: add(x).block_until_ready(),
        "nearest, a Spec": lambda: jc.round_to_format(x, nearest).block_until_ready(),
        "nearest, text": lambda: jc.round_to_format(x, "float8_e4m3fn").block_until_ready(),
        "stochastic": lambda: jc.round_to_format(x, stochastic, key).block_until_ready(),
        "nearest, NumPy array": lambda: jc.round_to_format(array, nearest),
    }
    table(f"One eager call on {size:,} elements", measure(cases, repeat, calls=50), "jitted x + 1", size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, action="append", help=f"elements; may be repeated (default {SIZES})")
    parser.add_argument("--repeat", type=int, default=11, help="timed runs of each case (default 11)")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}, {jc.__name__} {jc.__version__}")
    for size in arguments.size or SIZES:
        large(size, arguments.repeat)
    pages(arguments.repeat)
    eager(arguments.repeat)


if __name__ == "__main__":
    main()
