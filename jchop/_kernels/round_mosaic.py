"""Rounding of elements for NVIDIA GPUs from Hopper on, in the direct form of Pallas on Mosaic GPU.

JAX names Mosaic GPU as the successor of Triton, which it has deprecated. XLA's and Triton's kernels serve until then:
nothing takes this one by itself. Importing it needs absl-py. Only integer operations touch the values, since Mosaic GPU
may fuse a multiplication and an addition.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jchop._kernels.round_tile import RoundGpuTiling, Stream, result_like, round_tile
from jchop.spec import Spec

Array = jax.Array

#: Bytes of the longest loads and stores; stretches begin at multiples of them.
_VECTOR = 16
_WARPGROUP = 4  # warps


def round_elements(
    x: Array,
    seeds: Array | None = None,
    start: Array | None = None,
    *,
    spec: Spec,
    tiling: RoundGpuTiling | None = None,
    interpret: Any = None,
) -> Array:
    """What `jchop._core.rounding.elements.round_elements` gives, with the words of the random stream.

    Args:
        x: float16, bfloat16 or float32, any shape, fewer than 2^31 elements.
        seeds: for the stochastic modes, the six uint32 words of `seed_words`.
        start: uint32 (2,): low and high word of the stream's index for the first element of `x`. Default 0.
        spec: a specification that the dtype of `x` holds, of at most 32 levels if it is a codebook.
        tiling: default: the heuristic's, and 4 warps in any case. It does not change the result.
        interpret: `plgpu.InterpretGPUParams` (JAX 0.11) to run it on any device.
    """
    if not x.size:
        return x
    tiling = tiling or RoundGpuTiling.for_size(x.size, x.dtype.itemsize)
    if tiling.num_warps != _WARPGROUP:
        raise ValueError(f"tiling: num_warps={tiling.num_warps} must be {_WARPGROUP}, one warpgroup")
    drawn = [] if seeds is None else [seeds] if start is None else [seeds, start]
    with jax.enable_x64(False):
        flat = x.reshape(x.size)
        if x.size < tiling.block:
            padded = jnp.pad(flat, (0, tiling.block - x.size))
            return _round_most(padded, drawn, spec, tiling, interpret)[: x.size].reshape(x.shape)
        out = _round_most(flat, drawn, spec, tiling, interpret)
        done = x.size - x.size % (_VECTOR // x.dtype.itemsize)
        if done < x.size:
            out = lax.dynamic_update_slice(out, _rounded(flat[done:], spec, drawn, np.uint32(done)), (done,))
        return out.reshape(x.shape)


def _rounded(tile: Array, spec: Spec, drawn: list[Any], first: Any) -> Array:
    return round_tile(tile, spec, Stream.read(drawn), first, lax.iota(jnp.uint32, tile.shape[0]))


def _round_most(x: Array, drawn: list[Array], spec: Spec, tiling: RoundGpuTiling, interpret: Any) -> Array:
    """All but what follows the last whole vector of a flat array, which holds a stretch at least.

    There are no masks here: the last stretch is moved back to end with the array, and so overlaps the one before.
    """
    block = tiling.block
    end = x.size - x.size % (_VECTOR // x.dtype.itemsize)

    def kernel(*refs: Any) -> None:
        *parts, source, out = refs
        first = lax.min(lax.axis_index("stretch") * np.int32(block), np.int32(end - block))
        place = pl.ds(first, block)
        out[place] = _rounded(source[place], spec, parts, first.astype(jnp.uint32))

    return plgpu.kernel(
        kernel,
        out_type=result_like(x, drawn),
        grid=(pl.cdiv(end, block),),
        grid_names=("stretch",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(*drawn, x)
