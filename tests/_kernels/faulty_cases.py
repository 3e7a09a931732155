"""Cases with faults, and sound ones between them: what proves that compiling.py reports each."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from _kernels.compiling import LARGE_TILE, Case, is_tpu
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jchop._kernels import warpgroups

Array = jax.Array


def cases(target: str) -> Iterator[Case]:
    odd, even, large = (jax.ShapeDtypeStruct((size,), jnp.float32) for size in (1001, 1024, 2**17))
    yield Case("sound", lambda x: x + 1, (odd,))
    if target == "a100":
        yield Case("hangs", lambda x: time.sleep(1000), (odd,))
        yield Case("never reached", lambda x: x - 2, (odd,))
        return
    yield Case("raises", _raise, (odd,))
    yield Case("dies", lambda x: os.abort(), (odd,))
    if is_tpu(target):
        yield Case("modest", _tpu(None), (odd,), checks=("vmem",))
        yield Case("greedy", _tpu(50_000_000), (odd,), checks=("vmem",))
    else:
        yield Case("vectors", _copy(4), (even,), checks=("ptx",))
        yield Case("scalar loads", _copy(1), (even,), checks=("ptx",))
        yield Case("spills", _spill, (large,), checks=("spills",))
        yield Case("no kernel", lambda x: x + 1, (odd,), checks=("ptx",))
        square = jax.ShapeDtypeStruct((128, 128), jnp.float8_e4m3fn)
        for precision in (lax.Precision.HIGH, lax.Precision.HIGHEST):
            product = functools.partial(lax.dot, precision=precision, preferred_element_type=jnp.float32)
            checks = ("float8 machine code",)
            yield Case(f"float8, {precision.name}", product, (square, square), checks=checks, tile=LARGE_TILE)
        yield Case("float8, small tile", lax.dot, (square, square), checks=checks)
    yield Case("sound again", lambda x: x - 1, (odd,))


def _raise(x: Array) -> Array:
    raise ValueError("this is why")


def _tpu(vmem: int | None) -> Callable[[Array], Array]:
    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    params = pltpu.CompilerParams() if vmem is None else pltpu.CompilerParams(vmem_limit_bytes=vmem)
    return lambda x: pl.pallas_call(double, out_shape=jax.typeof(x), compiler_params=params)(x)


def _copy(numbers: int) -> Callable[[Array], Array]:
    """A copy in words of some numbers of each thread."""
    return lambda x: _run(lambda x, tile: x, x, (4, numbers))


def _spill(x: Array) -> Array:
    """512 numbers for each thread, needed again after their maximum; a thread has 255 registers at most."""
    return _run(lambda x, tile: x * tile.maximum(x, (0, 1, 2)), x, (512, 4))


def _run(fun: Callable[[Array, warpgroups.RegisterTile], Array], x: Array, size: tuple[int, int]) -> Array:
    """`fun` of tiles of some rows, and words of some numbers."""
    rows, numbers = size
    tile = warpgroups.RegisterTile((rows, 32, numbers), 32, False)
    shape = x.size // (32 * numbers), 32, numbers

    def kernel(program: Array, x: Any, out: Any) -> None:
        place = pl.ds(program * rows, rows)
        tile.store(out.at[place, :, :], fun(tile.load(x.at[place, :, :]), tile))

    (out,) = warpgroups.call_on_warpgroups(
        kernel, shape[0] // rows, [x.reshape(shape)], [(shape, x.dtype)], name="tile"
    )
    return out
