"""Quirks of XLA's CPU compiler that no program shows: only the time tells whether they are still there.

    python benchmarks/quirks.py

prints, for the quirks of `jchop/_core/xla/cpu.py` that no test shows, the time of a plain program divided by that of
the program with the workaround: the median of interleaved pairs. A quotient near 1 means that the quirk is gone on this
version of jaxlib, and its workaround may go.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic.double_word import divisor_of
from jchop._core.scaled.zero_points import _quotient_of_difference

PAIRS = 5


def seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start


def tall_integers_read_in_columns() -> float:
    """A product of int8 with 16,384 rows of weights, beside its parts of 512 rows. Measured: 1.6 to 6, and 1 to 1.3."""
    depth, columns = 16384, 2048

    def product(parts: int) -> Callable[[], Any]:
        x, w = np.ones((parts, 4, depth // parts), np.int8), np.ones((parts, depth // parts, columns), np.int8)
        dims = (((2,), (1,)), ((0,), (0,)))
        compiled = jax.jit(lambda x, w: lax.dot_general(x, w, dims, preferred_element_type=jnp.int32))
        given = jnp.asarray(x), jnp.asarray(w)
        jax.block_until_ready(compiled(*given))
        return lambda: compiled(*given)

    whole, parts = product(1), product(depth // 512)
    return float(np.median([min(map(seconds, [whole] * 5)) / min(map(seconds, [parts] * 5)) for _ in range(PAIRS)]))


def long_fusion_compiled_for_minutes() -> float:
    """The compile time of a quotient in one fusion, beside that in stages. Measured: 10 and more, and 1 to 1.5."""
    carrier = CARRIERS["float32"]
    divisor = divisor_of(jnp.full((64, 1, 1), np.float32(255).view(np.int32)), carrier)
    x = jnp.ones((64, 1, 1))

    def compiling(stage: Callable[[Any], Any]) -> float:
        def quotient(x: jax.Array, y: jax.Array) -> Any:
            value, some = _quotient_of_difference(x, y, divisor, carrier, stage)
            return value.magnitude, value.rest, value.sticky, some

        lowered = jax.jit(quotient).lower(x, x)
        start = time.process_time()
        lowered.compile()
        return time.process_time() - start

    return compiling(lambda values: values) / compiling(lax.optimization_barrier)


if __name__ == "__main__":
    print("jaxlib", importlib.metadata.version("jaxlib"))
    for quirk, without in ((tall_integers_read_in_columns, "0.12"), (long_fusion_compiled_for_minutes, "0.10")):
        print(f"{quirk.__name__}: {quirk():.2f} (not on {without})")
