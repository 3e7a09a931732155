"""The sums of tensor cores as jchop runs them, by a kernel or by XLA: every preset, and bodies that no preset has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
from _kernels.compile_matmul import checks, kernel
from _kernels.compiling import Case, has_mosaic

from jchop import TENSOR_CORES, MatmulSpec, tensor_core
from jchop._kernels.products.matmul import matmul_op

SPECS = {
    "long products": MatmulSpec(accumulate="binary32:toward_zero", order="aligned(8, 25)"),
    "promoted": tensor_core("volta", "fp16", promote_every=16),
    "float16": tensor_core("volta", "fp16", out="binary16"),
    "drawn": MatmulSpec("e5m10", accumulate="e5m10:stochastic", order="aligned(4, 20)"),
}
#: The kernels by themselves: a large one, and one whose tiles are cut off along every axis.
KERNELS = (("volta", "fp16", (1, 4096, 4096, 4096)), ("cdna3", "bf16", (3, 129, 301, 37)))


def presets() -> dict[str, MatmulSpec]:
    """The presets by name. Those that differ in operands alone, all with scales or all without, share a case.

    Their bodies are equal but for constants, and for the care of products that are too large or too small. The last one
    of a case takes it: bfloat16 comes after float16, and float8_e5m2 after float8_e4m3fn.
    """
    named: dict[tuple, list[str]] = {}
    last: dict[tuple, MatmulSpec] = {}
    for unit, types in TENSOR_CORES.items():
        for dtype in types:
            spec = tensor_core(unit, dtype)
            key = spec.product, spec.accumulate, spec.order, spec.group > 0
            named.setdefault(key, []).append(f"{unit} {dtype}")
            last[key] = spec
    return {", ".join(names): last[key] for key, names in named.items()}


def cases(target: str) -> Iterator[Case]:
    for name, spec in (SPECS | presets()).items():
        batch, m, n, k = 1, 128, 64, 3 * (spec.order.promote_every or spec.order.block or 1)
        groups = k // spec.group if spec.group else 0
        sizes = [(batch, m, k), (batch, k, n), *[(batch, m, groups), (batch, groups, n)] * (groups > 0)]
        avals = [jax.ShapeDtypeStruct(s, "float32") for s in sizes] + [
            jax.ShapeDtypeStruct((12,), "uint32")
        ] * spec.stochastic
        yield Case(name, partial(matmul_op, spec=spec), tuple(avals))
    for unit, dtype, shape in KERNELS:
        spec, (batch, m, k, n) = tensor_core(unit, dtype), shape
        avals = tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((batch, m, k), (batch, k, n)))
        if has_mosaic(target):
            yield Case(f"kernel of {unit} {dtype}, {shape}", kernel(target, spec), avals, True, checks(target))
