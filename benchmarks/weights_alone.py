"""Floats times packed weights: `jc.dot`, which never writes the weights out, beside dequantizing them and a product.

    python benchmarks/weights_alone.py [--size 4096] [--rows 1 64] [--repeat 25]

Both programs are timed in turn. Bytes are XLA's, of all temporary arrays.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

FORMATS = ("int8(group=all,axis=0)", "int4(group=128,axis=0)", "int4(group=32,axis=0)")


def dequantized(x: jax.Array, w: jc.QArray) -> jax.Array:
    """The weights written out."""
    return x @ jc.dequantize(w)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--repeat", type=int, default=25)
    options = parser.parse_args()
    weights = jax.random.normal(jax.random.key(0), (options.size, options.size))
    print("weight                    rows  codes ms  (least)  dequantized ms  (least)  ratio  (least)  MB  MB")
    for text in FORMATS:
        stored = jc.quantize(weights, text)
        for rows in options.rows:
            x = jax.random.normal(jax.random.key(1), (rows, options.size))
            print(f"{text:24s} {rows:5d} ", *_compare(x, stored, options.repeat))


def _compare(x: jax.Array, w: jc.QArray, repeat: int) -> list[str]:
    programs: list[Any] = [jax.jit(f).lower(x, w).compile() for f in (jc.dot, dequantized)]
    results = [np.asarray(program(x, w)) for program in programs]
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-3 * float(jnp.abs(results[1]).max()))
    times: list[list[float]] = [[], []]
    for _ in range(repeat):
        for program, own in zip(programs, times, strict=True):
            begun = time.perf_counter()
            jax.block_until_ready(program(x, w))
            own.append(1e3 * (time.perf_counter() - begun))
    middle, least = ([float(of(own)) for own in times] for of in (np.median, np.min))
    sizes = [program.memory_analysis().temp_size_in_bytes / 1e6 for program in programs]
    return [
        f"{middle[0]:8.2f} {least[0]:8.2f} {middle[1]:15.2f} {least[1]:8.2f}",
        f"{middle[0] / middle[1]:6.2f} {least[0] / least[1]:8.2f} {sizes[0]:6.1f} {sizes[1]:5.1f}",
    ]


if __name__ == "__main__":
    main()
