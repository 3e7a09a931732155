"""The product of codes whose scales change along the sum, for TPU (Mosaic).

The grid runs over rows, columns and, innermost, steps along the sum; the sums of a tile stay in scratch until they are
complete. A step takes several whole blocks. A block of fewer numbers than a register has lanes is multiplied with zeros
in place of its neighbours. This takes the matrix unit no longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jchop._kernels.pallas import TpuGrid, call_on_tpu
from jchop._kernels.products.product_of_blocks import (
    ProductOfBlocksTpuTiling,
    multiply_scales,
    named_parts,
    subtract_zero_points,
)
from jchop._kernels.tiles import LANES


def tpu_product_of_blocks(
    x: Array,
    w: Array,
    *parts: Array,
    names: tuple[str, ...],
    block: int,
    dtype: str,
    apart: bool = False,
    tiling: ProductOfBlocksTpuTiling | None = None,
    interpret: Any = False,
) -> Array:
    """The result of the body in `jchop/_quantized/products/codes.py`: the same bits for int8.

    Args:
        x: (batch, m, k), int8 or float8.
        w: (batch, n, k), likewise.
        parts: of each operand the scales and the zero points, (batch, rows, blocks), or (batch, rows, 1) if they are
            one along the sum.
        names: the name of each part, of "x_scale", "w_scale", "x_zero", "w_zero".
        block: the length of a block, a power of two.
        dtype: of the result.
        apart: used by the body only.
        tiling: the tiles. Default: the heuristic's.
        interpret: as in `pallas_call`, to run it on any device.
    """
    del apart
    (batch, m, k), n = x.shape, w.shape[1]
    tiling = tiling or ProductOfBlocksTpuTiling.for_shape(m, n, k, block)
    parts_by_name = named_parts(x, w, names, parts, block)
    changes = {name: part.shape[2] > 1 for name, part in parts_by_name.items()}  # along the sum
    missing = -k % tiling.block_k
    x, w = (jnp.pad(v, ((0, 0), (0, 0), (0, missing))) if missing else v for v in (x, w))
    steps, blocks = x.shape[2] // tiling.block_k, tiling.block_k // block

    def kernel(x: Any, w: Any, parts: Mapping[str, Any], out: Any, total: Any) -> None:
        step = pl.program_id(3)

        @pl.when(step == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        def parts_of(i: int) -> dict[str, Array]:
            """Columns and rows: of block number `i` of the step, or of all."""
            places = {name: slice(i, i + 1) if changing else slice(0, 1) for name, changing in changes.items()}
            return {n: parts[n][:, one] if n.startswith("x") else parts[n][one, :] for n, one in places.items()}

        for i in range(blocks):
            now = parts_of(i)
            term = subtract_zero_points(_product_of_block(x, w, i, block), now)
            changing = [name for name in ("x_scale", "w_scale") if changes.get(name)]
            total[...] += multiply_scales(term, now, changing, bool(interpret))

        @pl.when(step == steps - 1)
        def _() -> None:
            once = [name for name in ("x_scale", "w_scale") if not changes.get(name, True)]
            out[...] = multiply_scales(total[...], parts_of(0), once, bool(interpret)).astype(out.dtype)

    grid = TpuGrid({"b": batch, "i": pl.cdiv(m, tiling.block_m), "j": pl.cdiv(n, tiling.block_n), "t": steps}, "t")
    inputs = [
        (x, grid.blocks("bit", None, tiling.block_m, tiling.block_k)),
        (w, grid.blocks("bjt", None, tiling.block_n, tiling.block_k)),
    ]
    for name, part in parts_by_name.items():
        # (batch, steps, m, blocks) of x, (batch, steps, blocks, n) of w; one along the sum is as for a single step.
        step, count = ("t", steps) if changes[name] else ("one", 1)
        if changes[name]:
            part = jnp.pad(part, ((0, 0), (0, 0), (0, steps * blocks - part.shape[2])))
        of_steps = part.reshape(*part.shape[:2], count, -1)
        of_steps = of_steps.transpose((0, 2, 1, 3) if name.startswith("x") else (0, 2, 3, 1))
        if name.startswith("x"):
            spec = grid.blocks(("b", step, "i", "all"), None, None, tiling.block_m, of_steps.shape[3])
        else:
            spec = grid.blocks(("b", step, "all", "j"), None, None, of_steps.shape[2], tiling.block_n)
        inputs.append((of_steps, spec))
    (result,) = call_on_tpu(
        lambda x, w, *refs: kernel(x, w, dict(zip(parts_by_name, refs[:-2], strict=True)), *refs[-2:]),
        grid,
        inputs,
        [(((batch, m, n), dtype), grid.blocks("bij", None, tiling.block_m, tiling.block_n))],
        name="product_of_blocks",
        scratch=[((tiling.block_m, tiling.block_n), jnp.float32)],
        interpret=interpret,
    )
    return result


def _product_of_block(x: Any, w: Any, i: int, block: int) -> Array:
    """The sum of the products of elements of block number `i` of the step."""
    start = i * block
    begin = start // LANES * LANES
    columns = slice(begin, max(begin + LANES, start + block))
    a, b = _alone(x[:, columns], start - begin, block), w[:, columns]
    if a.dtype == jnp.int8:
        return lax.dot_general(a, b, _CONTRACT_LAST_AXES, preferred_element_type=jnp.int32)
    b = _alone(b, start - begin, block)  # zero times infinity is NaN
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return lax.dot_general(a, b, _CONTRACT_LAST_AXES, preferred_element_type=jnp.float32)


def _alone(elements: Array, first: int, block: int) -> Array:
    """Elements with zeros in place of the neighbours of a block."""
    if block >= LANES:
        return elements
    lane = lax.broadcasted_iota(jnp.int32, elements.shape, 1)
    return jnp.where((lane >= first) & (lane < first + block), elements, jnp.zeros_like(elements))


#: Both operands have the sum along their last axis.
_CONTRACT_LAST_AXES = (((1,), (1,)), ((), ()))
