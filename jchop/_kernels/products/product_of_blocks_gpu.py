"""The product of codes whose scales change along the sum, for NVIDIA GPUs (Triton).

A program computes one tile of the product: it goes along the sum block by block, multiplies the codes of a block by the
matrix units, and scales and adds the result in registers. So no sum of a block passes through memory. The scales of the
next block are loaded while a block is multiplied. Every load and store is masked.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jchop._kernels.pallas import call_on_gpu, divmod_int32, load_tile
from jchop._kernels.products import product_of_blocks

#: Rows of tiles that follow one another, so that caches hold what they share.
_GROUP_ROWS = 8


def gpu_product_of_blocks(
    x: Array,
    w: Array,
    *parts: Array,
    names: tuple[str, ...],
    block: int,
    dtype: str,
    apart: bool = False,
    tiling: product_of_blocks.ProductOfBlocksGpuTiling | None = None,
    interpret: Any = False,
) -> Array:
    """The result of the body in `jchop/_quantized/products/codes.py`: the same bits for int8.

    Args:
        x: (batch, m, k), int8 or float8.
        w: (batch, n, k), likewise.
        parts: of each operand the scales and the zero points, (batch, rows, blocks), or (batch, rows, 1) if they are
            one along the sum.
        names: what they are, of "x_scale", "w_scale", "x_zero", "w_zero".
        block: the length of a block.
        dtype: of the result.
        apart: used by the body only.
        tiling: the tiles. Default: the heuristic's.
        interpret: as in `pallas_call`, to run it on any device.
    """
    del apart
    (batch, m, k), n = x.shape, w.shape[1]
    if tiling is None:
        extra_registers = any(name.endswith("zero") for name in names) or (
            x.dtype != jnp.int8 and block > product_of_blocks.LONGEST_PRODUCT_STEP
        )
        tiling = product_of_blocks.ProductOfBlocksGpuTiling.for_shape(m, n, block, extra_registers=extra_registers)
    tall, wide, deep = tiling.block_m, tiling.block_n, tiling.block_k
    down, across, blocks = pl.cdiv(m, tall), pl.cdiv(n, wide), pl.cdiv(k, block)

    def kernel(x: Any, w: Any, parts: dict[str, Any], out: Any) -> None:
        # The row and the column of this program's tile among tiles.
        group, within = divmod_int32(pl.program_id(0), _GROUP_ROWS * across)
        height = jnp.minimum(np.int32(down) - group * np.int32(_GROUP_ROWS), np.int32(_GROUP_ROWS))
        i, j = group * np.int32(_GROUP_ROWS) + lax.rem(within, height), lax.div(within, height)
        batch_index = pl.program_id(1)
        rows = i * np.int32(tall) + lax.iota(jnp.int32, tall)
        columns = j * np.int32(wide) + lax.iota(jnp.int32, wide)

        def load(name: str, number: Any) -> Array:
            """What a part has for the rows or columns of the tile, in block `number`."""
            if name.startswith("x"):
                return plt.load(parts[name].at[batch_index, rows, number], mask=rows < m, other=0)[:, None]
            return plt.load(parts[name].at[batch_index, number, columns], mask=columns < n, other=0)[None, :]

        along = {name: parts[name].shape[2 if name.startswith("x") else 1] for name in parts}
        once = {name: load(name, np.int32(0)) for name in parts if along[name] == 1}
        changing = [name for name in parts if name not in once]

        def product_of_block(number: Array) -> Array:
            """The sum of the products of elements of a block."""
            begin = number * np.int32(block)
            stop: Any = np.int32(k)
            if block % deep:
                stop = jnp.minimum(begin + np.int32(block), stop)
            kind = jnp.int32 if x.dtype == jnp.int8 else jnp.float32

            def step(start: Any) -> Array:
                along = start + lax.iota(jnp.int32, deep)
                a = load_tile(x, rows, along, m, stop, (batch_index,))
                b = load_tile(w, columns, along, n, stop, (batch_index,))
                if kind == jnp.float32:
                    return dot_float8(a, b)
                return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=kind)

            steps = pl.cdiv(block, deep)
            if steps == 1:
                return step(begin)
            sums = jnp.zeros((tall, wide), kind)
            return lax.fori_loop(
                np.int32(0), np.int32(steps), lambda t, sums: sums + step(begin + t * np.int32(deep)), sums
            )

        def add_block(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            total, *now = carry
            following = jnp.minimum(number + np.int32(1), np.int32(blocks - 1))
            then = [load(name, following) for name in changing]
            values = once | dict(zip(changing, now, strict=True))
            term = product_of_blocks.subtract_zero_points(product_of_block(number), values)
            return total + product_of_blocks.multiply_scales(term, values, changing, bool(interpret)), *then

        first = [load(name, np.int32(0)) for name in changing]
        zeros = jnp.zeros((tall, wide), jnp.float32)
        total, *_ = lax.fori_loop(np.int32(0), np.int32(blocks), add_block, (zeros, *first))
        total = product_of_blocks.multiply_scales(total, once, once, bool(interpret))
        place = out.at[batch_index, rows[:, None], columns[None, :]]
        plt.store(place, total.astype(out.dtype), mask=(rows < m)[:, None] & (columns < n)[None, :])

    # As activations and packed weights (k, n) have them. Another order would reach back to x through XLA's layouts.
    parts_by_name = {
        name: part if name.startswith("x") else jnp.swapaxes(part, 1, 2)
        for name, part in product_of_blocks.named_parts(x, w, names, parts, block).items()
    }
    (result,) = call_on_gpu(
        lambda x, w, *refs: kernel(x, w, dict(zip(parts_by_name, refs[:-1], strict=True)), refs[-1]),
        (down * across, batch),
        [x, w, *parts_by_name.values()],
        [((batch, m, n), dtype)],
        name="product_of_blocks",
        tiling=tiling,
        interpret=interpret,
    )
    return result


# == products of float8 ================================================================================================
# Quirk `float8_of_pallas_without_units` of `_core/xla/gpu.py`. Only a rule of JAX's own can tell Triton how exact a
# product has to be, and JAX has no public names for rules. This file alone uses the private ones. Without them float8
# is multiplied as by Pallas: right, and slower.


#: How many products the units may sum before they add in float32: all of a tile.
_MAX_IMPRECISE_PRODUCTS = 1 << 30


def dot_float8(a: Array, b: Array) -> Array:
    """The sums of products of float8 (m, k) and (n, k), of one dtype or two, as the unit sums them, float32 (m, n)."""
    if not _register_float8_rule():
        return _portable_float8_dot(a, b, None)
    return _float8_dot_p.bind(a, b, jnp.zeros((a.shape[0], b.shape[0]), jnp.float32))


def _portable_float8_dot(a: Array, b: Array, zeros: Array | None) -> Array:
    del zeros
    if a.dtype != b.dtype:  # which Pallas refuses
        a, b = a.astype(jnp.float16), b.astype(jnp.float16)
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


_float8_dot_p = Primitive("jchop_float8_dot")
_float8_dot_p.def_impl(_portable_float8_dot)
_float8_dot_p.def_abstract_eval(lambda a, b, zeros: zeros)
mlir.register_lowering(_float8_dot_p, mlir.lower_fun(_portable_float8_dot, multiple_results=False))


@lru_cache(maxsize=1)
def _register_float8_rule() -> bool:
    """Registers the rule with Pallas; False if its names are gone."""
    try:
        lowering = importlib.import_module("jax._src.pallas.triton.lowering")
        dialect = importlib.import_module("jax._src.lib.triton").dialect
        register, dot, transpose = lowering.register_lowering, dialect.dot, dialect.trans
    except (ImportError, AttributeError):
        return False

    def lower(ctx: Any, a: Any, b: Any, zeros: Any) -> Any:
        return dot(a, transpose(b, (1, 0)), zeros, max_num_imprecise_acc=_MAX_IMPRECISE_PRODUCTS)

    register(_float8_dot_p)(lower)
    return True
