"""Speed of the random generators that were considered for stochastic rounding, against a copy of the same bytes.

Every generator is fused with two simple bit-level roundings of float32: to bfloat16, and to the e4m3 grid with its
subnormals and saturation. All calls are interleaved in one process, and outputs go into donated buffers, since
fresh pages would cost more than the work. The copies are a jitted multiplication into a donated buffer and NumPy's copy
in two threads. Ratios are to the jitted copy: of medians, and of the fastest calls, which say more on a busy machine.

    python benchmarks/generators.py --size 27264000 --repeat 9
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from jchop._core.rounding.random_bits import seed_words, stream_words

COLUMNS = 1024
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
Generator = Callable[[Array, tuple[int, ...]], Array]  # key and shape to words


def u(value: int) -> np.uint32:
    return np.uint32(value)


def index(shape: tuple[int, ...]) -> Array:
    low = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return low if len(shape) == 1 else low + lax.broadcasted_iota(jnp.uint32, shape, 0) * u(shape[1])


def stream(key: Array, shape: tuple[int, ...]) -> Array:
    return stream_words(seed_words(key), shape)


def stream_64(key: Array, shape: tuple[int, ...]) -> Array:
    """The stream at an offset that makes a high word of the index vary from element to element."""
    return stream_words(seed_words(key), shape, 2**32 - 1000)


def mix3(key: Array, shape: tuple[int, ...]) -> Array:
    k0, k1, *_ = seed_words(key)
    x = index(shape) ^ k0
    x = (x ^ (x >> u(17))) * u(0xED5AD4BB)
    x = x ^ k1
    x = (x ^ (x >> u(11))) * u(0xAC4C1B51)
    x = (x ^ (x >> u(15))) * u(0x31848BAB)
    return x ^ (x >> u(14))


def fmix32_weyl(key: Array, shape: tuple[int, ...]) -> Array:
    k0, k1, *_ = seed_words(key)
    x = index(shape) * u(0x9E3779B9) + k0
    x = (x ^ (x >> u(16))) * u(0x85EBCA6B) ^ k1
    x = (x ^ (x >> u(13))) * u(0xC2B2AE35)
    return x ^ (x >> u(16))


def one_multiply(key: Array, shape: tuple[int, ...]) -> Array:
    return index(shape) * u(0x9E3779B9) ^ seed_words(key)[0]


def threefry(rounds: int) -> Generator:
    def generate(key: Array, shape: tuple[int, ...]) -> Array:
        k0, k1, *_ = seed_words(key)
        keys = (k0, k1, k0 ^ k1 ^ u(0x1BD11BDA))
        a, b = jnp.zeros(shape, jnp.uint32) + keys[0], index(shape) + keys[1]
        for i in range(rounds):
            a = a + b
            r = ROTATIONS[i % 8]
            b = ((b << u(r)) | (b >> u(32 - r))) ^ a
            if i % 4 == 3:
                n = i // 4 + 1
                a, b = a + keys[n % 3], b + keys[(n + 1) % 3] + u(n)
        return a ^ b

    return generate


def half(key: Array, shape: tuple[int, ...]) -> Array:
    """No generator: a constant word, which rounds to nearest, for the cost of the rounding alone."""
    return jnp.full(shape, 0x80000000, jnp.uint32)


GENERATORS: dict[str, Generator] = {
    "no generator": half,
    "jchop stream": stream,
    "jchop stream, 64-bit index": stream_64,
    "mix3, two keys": mix3,
    "fmix32 on a Weyl counter": fmix32_weyl,
    "one multiplication (poor)": one_multiply,
    "threefry, 13 rounds": threefry(13),
    "threefry, 20 rounds": threefry(20),
    "jax.random.bits": lambda key, shape: jax.random.bits(key, shape, jnp.uint32),
}


def to_bfloat16(x: Array, word: Array) -> Array:
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type((bits + (word >> u(16))) & u(0xFFFF0000), jnp.float32)


def to_e4m3(x: Array, word: Array) -> Array:
    """Three significand bits; adding 2**-6 brings subnormals to the binade in which three bits are their spacing."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = lax.bitcast_convert_type(bits & u(0x7FFFFFFF), jnp.float32)
    smallest_normal = np.float32(2.0**-6)
    subnormal = magnitude < smallest_normal
    shifted = lax.bitcast_convert_type(jnp.where(subnormal, magnitude + smallest_normal, magnitude), jnp.uint32)
    rounded = lax.bitcast_convert_type((shifted + (word >> u(12))) & u(0xFFF00000), jnp.float32)
    rounded = jnp.where(subnormal, rounded - smallest_normal, rounded)
    rounded = jnp.where(rounded > np.float32(448), np.float32(448), rounded)
    signed = lax.bitcast_convert_type(lax.bitcast_convert_type(rounded, jnp.uint32) | (bits & u(1 << 31)), jnp.float32)
    return jnp.where(jnp.isnan(x), x, signed)


ROUNDINGS = {"bf16": to_bfloat16, "e4m3": to_e4m3}


def numpy_copy(size: int) -> Callable[[], object]:
    source, target = np.ones(size, np.float32), np.zeros(size, np.float32)
    halves = [slice(0, size // 2), slice(size // 2, size)]
    pool = ThreadPoolExecutor(2)
    return lambda: list(pool.map(lambda part: np.copyto(target[part], source[part]), halves))


def jitted(function: Callable[[Array, Array], Array], buffers: dict[tuple[int, ...], Array], shape: tuple[int, ...]):
    """A call that rounds a buffer of its shape in place and waits for it."""
    compiled, key = jax.jit(function, donate_argnums=0), jax.random.key(0)

    def call() -> None:
        buffers[shape] = compiled(buffers[shape], key).block_until_ready()

    return call


def cases(size: int) -> dict[tuple[str, str], Callable[[], object]]:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(size, dtype=np.float32)
    shapes = {"flat": (size,), "rows": (size // COLUMNS, COLUMNS)}
    buffers = {shape: jnp.array(values.reshape(shape)) for shape in shapes.values()}
    calls: dict[tuple[str, str], Callable[[], object]] = {
        ("copy", "jitted, in place"): jitted(lambda x, key: x * np.float32(-1), buffers, shapes["flat"]),
        ("copy", "NumPy, two threads"): numpy_copy(size),
    }
    for name, generator in GENERATORS.items():
        for target, rounding in ROUNDINGS.items():
            for layout, shape in shapes.items():

                def step(
                    x: Array, key: Array, generator: Generator = generator, rounding: Callable = rounding
                ) -> Array:
                    return rounding(x, generator(key, x.shape))

                calls[name, f"{target} {layout}"] = jitted(step, buffers, shape)
    return calls


def measure(
    calls: dict[tuple[str, str], Callable[[], object]], repeat: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Median and least seconds of each call; they take turns, and the first turn, which compiles, does not count."""
    times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    for _ in range(repeat + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(taken[1:]), min(taken[1:])) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of random generators fused with stochastic rounding.")
    parser.add_argument("--size", type=int, default=27_264_000, help="elements, cut to a multiple of 1024")
    parser.add_argument("--repeat", type=int, default=9, help="timed turns (the median counts)")
    arguments = parser.parse_args()
    if arguments.size < COLUMNS or arguments.repeat < 1:
        parser.error(f"--size must be at least {COLUMNS} and --repeat at least 1")
    size = arguments.size // COLUMNS * COLUMNS
    taken = measure(cases(size), arguments.repeat)
    median, least = taken["copy", "jitted, in place"]
    print(
        f"{size} float32 elements, {arguments.repeat} turns: ratio to the jitted copy of medians / of fastest calls\n"
    )
    columns = [f"{target} {layout}" for target in ROUNDINGS for layout in ("flat", "rows")]
    print("| generator | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in GENERATORS:
        cells = [f"{taken[name, c][0] / median:.2f} / {taken[name, c][1] / least:.2f}" for c in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for kind in ("jitted, in place", "NumPy, two threads"):
        cell = " / ".join(f"{seconds * 1e9 / size:.2f}" for seconds in taken["copy", kind])
        print(f"\ncopy, {kind}: {cell} ns per element")


if __name__ == "__main__":
    main()
