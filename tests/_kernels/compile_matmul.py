"""The cases of the matrix product with an emulated accumulator: every order, ragged sizes and large ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from _kernels.compiling import Case, checks_of, has_mosaic, is_tpu

from jchop._kernels.products.matmul import matmul_op, refuse_dots
from jchop._spec.accumulation import MatmulSpec

Shape = tuple[int, int, int, int]  # batch, m, k, n
RAGGED: Shape = (3, 129, 301, 37)
LARGE: Shape = (1, 4096, 4096, 4096)

#: Spec, shape, whether x64 is on.
COMMON: tuple[tuple[MatmulSpec, Shape, bool], ...] = (
    (MatmulSpec("e4m3", accumulate="e5m10"), RAGGED, True),
    (MatmulSpec("e4m3", accumulate="e5m10"), (1, 1, 1, 1), False),
    (MatmulSpec("e5m10", product="e5m10:stochastic", accumulate="e5m10:stochastic"), LARGE, True),
    (MatmulSpec(None, product="e8m15:up", accumulate="e8m15:odd", order="blocked(8)"), RAGGED, False),
    (MatmulSpec("bfloat16", accumulate="fixed8.8", order="blocked(300)", fused=True), RAGGED, True),
    (MatmulSpec(), LARGE, False),
    (MatmulSpec("e5m10", product="e5m10", accumulate="e6m9:down", order="pairwise"), RAGGED, True),
    (MatmulSpec("e5m10", product="e5m10", accumulate="e5m10:stochastic", order="pairwise"), LARGE, False),
    (MatmulSpec("e4m3", accumulate="e4m3fn:saturate", order="pairwise"), (1, 7, 1, 3), False),
    (MatmulSpec("e4m3", accumulate="e5m10:stochastic", order="matrix_unit(32)"), LARGE, False),
    (MatmulSpec("bfloat16", accumulate="e5m10", order="matrix_unit(256)"), LARGE, True),
    (MatmulSpec("e4m3", accumulate="e5m10", order="matrix_unit(24)"), RAGGED, True),
    (MatmulSpec(None, accumulate="bfloat16", order="matrix_unit(100)"), RAGGED, False),
    (MatmulSpec(None, accumulate="e8m15:up", order="matrix_unit(2000)"), (1, 300, 4100, 300), False),
)


def arguments(spec: MatmulSpec, shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    batch, m, k, n = shape
    sizes = [((batch, m, k), "float32"), ((batch, k, n), "float32"), *[((12,), "uint32")] * spec.stochastic]
    return tuple(jax.ShapeDtypeStruct(size, jnp.dtype(name)) for size, name in sizes)


def kernel(target: str, spec: MatmulSpec) -> Any:
    """The kernel of an order."""
    if is_tpu(target):
        from jchop._kernels.products.matmul_tpu import tpu_matmul as run
    elif spec.order.kind == "matrix_unit":
        from jchop._kernels.products.matmul_hopper import hopper_matmul_of_dots as run
    else:
        from jchop._kernels.products.matmul_gpu import gpu_matmul as run
    return partial(run, spec=spec)


def checks(target: str) -> tuple[str, ...]:
    """Those of `checks_of`; a warpgroup loads a column number by number."""
    return checks_of(target) if is_tpu(target) else ("spills",) if target == "h200" else ()


def refused(target: str, spec: MatmulSpec, shape: Shape) -> bool:
    """Whether the body runs on a GPU."""
    if is_tpu(target):
        return False
    if spec.order.kind != "matrix_unit":
        return not has_mosaic(target)
    return target != "h200" or refuse_dots(*arguments(spec, shape)[:2], spec=spec) is not None


def cases(target: str) -> Iterator[Case]:
    for spec, shape, x64 in COMMON:
        name = f"matmul {spec}, {shape}{', x64' if x64 else ''}"
        if refused(target, spec, shape):
            yield Case(name, partial(matmul_op, spec=spec), arguments(spec, shape), x64, ("body",))
            continue
        yield Case(name, kernel(target, spec), arguments(spec, shape), x64, checks(target))
    if not has_mosaic(target):
        return
    spec = COMMON[2][0]
    mapped = jax.vmap(kernel(target, spec), in_axes=(0, None, 0))
    a, b, seeds = arguments(spec, RAGGED)
    batched = [jax.ShapeDtypeStruct((5, *aval.shape), aval.dtype) for aval in (a, seeds)]
    yield Case(f"matmul {spec}, {RAGGED}, vmap", mapped, (batched[0], b, batched[1]), True, checks(target))
