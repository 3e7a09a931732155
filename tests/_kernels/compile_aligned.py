"""The sums of tensor cores, which XLA compiles: one case for each body. Of these there is no kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
from _kernels.compiling import Case

from jchop import MatmulSpec, tensor_core
from jchop._kernels.products.matmul import matmul_op

SHAPE = (1, 128, 192, 64)  # batch, m, k, n
SPECS = {
    "one word": tensor_core("volta", "fp16"),
    "two words": tensor_core("blackwell", "fp8", promote_every=64),
    "long products": MatmulSpec(accumulate="binary32:toward_zero", order="aligned(8, 25)"),
    "halves": tensor_core("cdna3", "fp8"),
    "sums under scales": tensor_core("blackwell", "nvfp4"),
    "pairs": tensor_core("cdna2", "bf16"),
}


def cases(target: str) -> Iterator[Case]:
    batch, m, k, n = SHAPE
    for name, spec in SPECS.items():
        groups = k // spec.group if spec.group else 0
        sizes = [(batch, m, k), (batch, k, n), *[(batch, m, groups), (batch, groups, n)] * (groups > 0)]
        yield Case(name, partial(matmul_op, spec=spec), tuple(jax.ShapeDtypeStruct(s, "float32") for s in sizes))
