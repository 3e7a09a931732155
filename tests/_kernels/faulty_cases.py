"""Cases with faults, and sound ones between them: what proves that compiling.py reports each."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from _kernels.compiling import LARGE_TILE, Case, is_tpu
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

Array = jax.Array


def cases(target: str) -> Iterator[Case]:
    odd, even = (jax.ShapeDtypeStruct((size,), jnp.float32) for size in (1001, 1000))
    large = jax.ShapeDtypeStruct((100_000,), jnp.float32)
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
        yield Case("masked", _triton(_copy), (even,), checks=("masked", "ptx"))
        yield Case("masked odd", _triton(_copy), (odd,), x64=True, checks=("masked",))
        yield Case("unmasked", _triton(_copy_unmasked), (even,), checks=("masked",))
        yield Case("unmasked store", _triton(_copy_storing_unmasked), (even,), checks=("masked",))
        yield Case("scalar loads", _triton(_copy), (odd,), checks=("ptx",))
        yield Case("spills", _triton(_spill, block=8192, num_warps=1), (large,), checks=("masked", "ptx"))
        yield Case("spills alone", _triton(_spill, block=8192, num_warps=1), (large,), checks=("spills",))
        yield Case("no kernel", lambda x: x + 1, (even,), checks=("masked", "ptx"))
        square = jax.ShapeDtypeStruct((128, 128), jnp.float8_e4m3fn)
        for precision in (lax.Precision.HIGH, lax.Precision.HIGHEST):
            product = functools.partial(lax.dot, precision=precision, preferred_element_type=jnp.float32)
            checks = ("float8 machine code",)
            yield Case(f"float8, {precision.name}", product, (square, square), checks=checks, tile=LARGE_TILE)
        yield Case("float8, small tile", lax.dot, (square, square), checks=checks)
        yield Case("float8, Pallas", _dot_of_pallas, (square, square), checks=checks)
    yield Case("sound again", lambda x: x - 1, (odd,))


def _raise(x: Array) -> Array:
    raise ValueError("this is why")


def _tpu(vmem: int | None) -> Callable[[Array], Array]:
    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    params = pltpu.CompilerParams() if vmem is None else pltpu.CompilerParams(vmem_limit_bytes=vmem)
    return lambda x: pl.pallas_call(double, out_shape=jax.typeof(x), compiler_params=params)(x)


def _triton(kernel: Callable[..., None], block: int = 512, num_warps: int = 4) -> Callable[..., Array]:
    """`kernel` on blocks of one-dimensional arrays; it gets the block's place and which of its elements exist."""

    def body(*refs):
        start = pl.program_id(0) * block
        place = pl.ds(start, block)
        kernel(*(ref.at[place] for ref in refs), start + jnp.arange(block, dtype=jnp.int32) < refs[0].shape[0])

    def call(*arrays: Array) -> Array:
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype),
            grid=(pl.cdiv(arrays[0].size, block),),
            compiler_params=plt.CompilerParams(num_warps=num_warps),
        )(*arrays)

    return call


def _dot_of_pallas(x: Array, w: Array) -> Array:
    def dot(x, w, out):
        out[...] = lax.dot_general(x[...], w[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return pl.pallas_call(dot, out_shape=shape, compiler_params=plt.CompilerParams(num_warps=8))(x, w)


def _copy(x, out, mask):
    plt.store(out, plt.load(x, mask=mask, other=0), mask=mask)


def _copy_unmasked(x, out, mask):
    plt.store(out, plt.load(x))


def _copy_storing_unmasked(x, out, mask):
    plt.store(out, plt.load(x, mask=mask, other=0))


def _spill(x, out, mask):
    """512 numbers for each thread, needed again after their sum; a thread has 255 registers at most."""
    values = plt.load(x, mask=mask, other=0)
    plt.store(out, values * jnp.sum(values), mask=mask)
