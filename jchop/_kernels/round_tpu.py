"""Rounding of elements with random bits of the TPU's own generator (Mosaic).

They are cheaper than bits of the counter-based stream, but not reproducible. Each block is read, rounded a few
registers at a time, and written.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jchop._common.bit_ops import CARRIERS
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.random_bits import SEEDS, STREAM_START, StreamOffset, random_words
from jchop._kernels.pallas import SCALARS, TpuGrid, call_on_tpu
from jchop._kernels.tiles import LANES, SUBLANES, next_multiple
from jchop._spec.spec import Spec


def tpu_round_with_hardware_bits(
    x: Array, *seeds: Array, spec: Spec, place: StreamOffset = STREAM_START, interpret: Any = False
) -> Array:
    """`x` rounded with random bits of the TPU's own generator; each block seeds it with words of the stream.

    The bits depend on the blocks and on the chip: they are reproducible only on one kind of chip with one version of
    this package. In interpret mode all bits are 0.

    Args:
        x: float32 or bfloat16, any shape.
        seeds: the six words of `seed_words`.
        spec: a specification with a stochastic mode that the dtype of `x` holds, of at most 32 levels if it is a
            codebook.
        place: used by the body only.
        interpret: as in `pallas_call`; only the interpreter of `pltpu.InterpretParams` has the generator.
    """
    del place
    if not x.size:
        return x
    # Rows of the last axis, or of one register. On a TPU this moves no data if rows fill it.
    row = x if x.ndim > 1 else jnp.pad(x.reshape(-1), (0, -x.size % LANES))
    matrix = row.reshape(-1, x.shape[-1] if x.ndim > 1 else LANES)
    tall, wide, chunk = _block_sides(matrix.shape, x.dtype.itemsize)
    tiles = {"i": pl.cdiv(matrix.shape[0], tall), "j": pl.cdiv(matrix.shape[1], wide)}

    def round_block(words: Any, numbers: Any, out: Any) -> None:
        block = (pl.program_id(0) * tiles["j"] + pl.program_id(1)).astype(jnp.uint32)
        stream = [words[0, i] for i in range(SEEDS)]
        pltpu.prng_seed(*(random_words(stream, block, lane=lane).astype(jnp.int32) for lane in (0, 1)))

        def round_chunk(i: Array, _: None) -> None:
            rows = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
            bits = lax.bitcast_convert_type(pltpu.prng_random_bits((chunk, wide)), jnp.uint32)
            out[rows, :] = round_to_spec(numbers[rows, :], spec, CARRIERS[x.dtype.name], bits)

        lax.fori_loop(0, tall // chunk, round_chunk, None)

    grid = TpuGrid(tiles)
    blocks = grid.blocks("ij", tall, wide)
    (result,) = call_on_tpu(
        round_block,
        grid,
        [(jnp.stack(seeds)[None], SCALARS), (matrix, blocks)],
        [((matrix.shape, x.dtype), blocks)],
        name="round_with_hardware_bits",
        interpret=interpret,
    )
    return result.reshape(-1)[: x.size].reshape(x.shape)


_CHUNK_ELEMENTS, _BLOCK_BYTES = 8 * SUBLANES * LANES, 1 << 20


def _block_sides(shape: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
    """Rows and columns of a block, and rows that are in registers at a time.

    A block of 1 MiB amortises the cost of a grid step. Two input blocks and two output blocks take 4 of 16 MiB. A
    smaller array has 8 blocks, so that copies and arithmetic overlap. A chunk of 8 registers gives the vector units
    independent work, and leaves room for intermediate results.
    """
    (rows, columns), least = shape, 4 * SUBLANES // itemsize
    area = min(max(rows * columns // 8, _CHUNK_ELEMENTS), _BLOCK_BYTES // itemsize)
    wide = min(next_multiple(columns, LANES), _CHUNK_ELEMENTS // least)
    chunk = min(_CHUNK_ELEMENTS // wide // least * least, next_multiple(rows, least))
    return min(next_multiple(rows, chunk), area // wide // chunk * chunk), wide, chunk
