"""The sums of tensor cores, which XLA compiles: every preset, and bodies that no preset has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
from _kernels.compiling import Case

from jchop import TENSOR_CORES, MatmulSpec, tensor_core
from jchop._kernels.products.matmul import matmul_op

SPECS = {
    "long products": MatmulSpec(accumulate="binary32:toward_zero", order="aligned(8, 25)"),
    "promoted": tensor_core("blackwell", "fp8", promote_every=64),
    "float16": tensor_core("hopper", "fp16", out="binary16"),
}


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
        yield Case(name, partial(matmul_op, spec=spec), tuple(jax.ShapeDtypeStruct(s, "float32") for s in sizes))
