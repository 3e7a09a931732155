"""The cases of products of codes whose scales change along the sum, by their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
from _kernels.compiling import Case, is_tpu

from jchop._kernels.products.product_of_blocks import HOPPER_KERNEL, TPU_KERNEL
from jchop._quantized.products.codes import product_of_blocks_op

#: Of the elements, m, n, k, block, and what has zero points.
CASES = {
    "int8 with zero points, blocks of 128": (("int8", "int8"), (1024, 1024, 1024), 128, ("x", "w")),
    "int8 with zero points, one block": (("int8", "int8"), (1024, 1024, 1024), 1024, ("x", "w")),
    "int8, blocks of 256": (("int8", "int8"), (1024, 1024, 1024), 256, ()),
    "int8, blocks of 512": (("int8", "int8"), (1024, 1024, 1024), 512, ()),
    "int8, one row": (("int8", "int8"), (1, 4096, 4096), 128, ()),
    "int8, blocks of 128": (("int8", "int8"), (1000, 1088, 1024), 128, ()),
    "int8, one block": (("int8", "int8"), (4096, 4096, 4096), 4096, ()),
    "e4m3, one block": (("float8_e4m3fn", "float8_e4m3fn"), (1000, 1088, 1152), 1152, ()),
    "e4m3, blocks of 128": (("float8_e4m3fn", "float8_e4m3fn"), (1024, 1024, 1024), 128, ()),
    "int8, odd shapes": (("int8", "int8"), (37, 45, 300), 64, ("x",)),
    "e4m3, blocks of 32": (("float8_e4m3fn", "float8_e4m3fn"), (1024, 1024, 1024), 32, ()),
    "e4m3, blocks of 64": (("float8_e4m3fn", "float8_e4m3fn"), (128, 1024, 192), 64, ()),
    "e4m3, blocks of 512": (("float8_e4m3fn", "float8_e4m3fn"), (1024, 1024, 1024), 512, ()),
    "e5m2 × e4m3, blocks of 128": (("float8_e5m2", "float8_e4m3fn"), (1024, 1024, 1024), 128, ()),
}


def cases(target: str) -> Iterator[Case]:
    """Each that a kernel takes: of Hopper GPUs, and of TPUs. On other GPUs the body runs."""
    for name, (kinds, (m, n, k), block, shifted) in CASES.items():
        is_integer = kinds[0] == "int8"
        arrays = {side: (1, rows, k) for side, rows in (("x", m), ("w", n))}
        parts = {f"{side}_scale": (1, rows, -(-k // block)) for side, rows in (("x", m), ("w", n))}
        parts |= {f"{side}_zero": parts[f"{side}_scale"] for side in shifted}
        given = [jax.ShapeDtypeStruct(arrays[side], kind) for side, kind in zip("xw", kinds, strict=True)]
        kernel = TPU_KERNEL if is_tpu(target) else HOPPER_KERNEL
        if kernel.refuse(*given, names=tuple(parts), block=block, dtype="bfloat16"):
            continue
        given += [jax.ShapeDtypeStruct(size, "int32" if "zero" in part else "float32") for part, size in parts.items()]
        fun = partial(product_of_blocks_op, names=tuple(parts), block=block, dtype="bfloat16")
        checks: tuple[str, ...] = ("vmem",) if is_tpu(target) else ("body",)
        if is_tpu(target) or target == "h200":
            fun = partial(fun, impl="pallas")
        if target == "h200":  # the integer sums of zero points may be contracted, which is exact
            checks = ("separate", f"{'integer' if is_integer else 'float8'} machine code", "spills")
        yield Case(name, fun, tuple(given), x64="odd" in name, checks=checks)
