"""Rounding of elements for NVIDIA GPUs (Pallas on Triton): each program loads, rounds and stores one stretch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jchop._kernels.round_tile import (
    KernelStream,
    RoundGpuTiling,
    elementwise_under_vmap,
    result_like,
    round_array_tile,
)
from jchop._spec.spec import Spec

Array = jax.Array


def gpu_round_elements(
    x: Array,
    seeds: Array | None = None,
    start: Array | None = None,
    *,
    spec: Spec,
    tiling: RoundGpuTiling | None = None,
    interpret: Any = False,
) -> Array:
    """The result of `jchop._core.rounding.elements.round_to_spec`, with the words of the random stream.

    Args:
        x: a carrier's values, any shape, fewer than 2^31 elements.
        seeds: for the stochastic modes, the six uint32 words of `seed_words`.
        start: uint32 (2,): low and high word of the stream's index for the first element of `x`. Default 0.
        spec: a specification that the dtype of `x` holds, of at most 32 levels if it is a codebook.
        tiling: the tiles, which do not change the result. Default: the heuristic's.
        interpret: as in `pallas_call`, to run it on any device.
    """
    run = partial(_call_gpu_round, spec=spec, tiling=tiling, interpret=interpret)
    if seeds is None:
        return elementwise_under_vmap(run)(x)
    return run(x, seeds) if start is None else run(x, seeds, start)


def _call_gpu_round(
    x: Array, *seeds_and_starts: Array, spec: Spec, tiling: RoundGpuTiling | None, interpret: Any
) -> Array:
    if not x.size:
        return x
    tiling = tiling or RoundGpuTiling.for_size(x.size, x.dtype.itemsize)
    # 64-bit types are on only if x has 64 bits; otherwise some Python numbers would become 64-bit numbers.
    with jax.enable_x64(x.dtype.itemsize == 8):
        flat = x.reshape(x.size)
        out = pl.pallas_call(
            _RoundGpuStretch(spec, tiling, x.size, x.dtype.itemsize).kernel,
            out_shape=result_like(flat, seeds_and_starts),
            grid=(pl.cdiv(x.size, tiling.block),),
            compiler_params=plt.CompilerParams(num_warps=tiling.num_warps),
            interpret=interpret,
            name="round",
        )(*seeds_and_starts, flat)
        return out.reshape(x.shape)


#: Bytes of the longest loads and stores.
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class _RoundGpuStretch:
    """The kernel of one stretch of a flat array, and its static data."""

    spec: Spec
    tiling: RoundGpuTiling
    size: int
    itemsize: int

    def kernel(self, *refs: Any) -> None:
        *stream_refs, x, out = refs
        block = self.tiling.block
        first = pl.program_id(0) * np.int32(block)
        local = lax.iota(jnp.int32, block)
        index, rest = pl.ds(first, block), np.int32(self.size) - first
        tile = self._with_mask(rest, local, lambda mask: plt.load(x.at[index], mask=mask, other=0))
        rounded_tile = round_array_tile(
            tile, self.spec, KernelStream.read(stream_refs), first.astype(jnp.uint32), local.astype(jnp.uint32)
        )
        self._with_mask(rest, local, lambda mask: plt.store(out.at[index], rounded_tile, mask=mask))

    def _with_mask(self, rest: Array, local: Array, access: Callable[[Array], Any]) -> Any:
        """`access` to the existing elements of the stretch: `rest` of them, or all.

        If the array ends within a vector, a mask of elements would prevent vector access in every program; so only the
        last program uses it.
        """
        if self.size * self.itemsize % _VECTOR_BYTES == 0:
            return access(local < rest)
        whole = rest >= self.tiling.block
        return lax.cond(whole, lambda: access(jnp.broadcast_to(whole, local.shape)), lambda: access(local < rest))
