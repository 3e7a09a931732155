"""The cases of the kernels of scaled blocks: every kind of block format, both axes, every dtype, odd shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
from _kernels.compiling import Case, checks_of, is_tpu

from jchop._kernels import scaled
from jchop.scaling import BlockScaling, integer_groups, mx, nvfp4

#: Block formats that differ in the kernels' code: element kinds and widths, rules, scale formats, block lengths.
SCALINGS: dict[str, BlockScaling] = {
    "mxfp8 e4m3": mx("e4m3fn"),
    "mxfp8 e5m2, rceil": mx("e5m2", rule="rceil"),
    "mxfp6 e3m2, ceil": mx("e3m2fn", rule="ceil"),
    "mxfp4, even": mx("e2m1fn", rule="even"),
    "mxint8": mx("integer8"),
    "nvfp4": nvfp4(),
    "int4 of 32, half range": integer_groups(4, 32, rule="half_range"),
    "int4 of 128, bfloat16": integer_groups(4, 128, scale="bfloat16"),
    "int3 of 16, no clip": integer_groups(3, 16, scale="e4m3fn", rule="no_clip"),
    "e5m2 of 8, NaN blocks": BlockScaling("e5m2", 8, scale="e8m0fnu", rule="absmax", nan_block=True),
    "codebook of 64": BlockScaling("codebook(-1,-0.25,0,0.3125,1)", 64, scale="float32", rule="absmax"),
    "mxfp4, stochastic": BlockScaling("e2m1fn:stochastic:saturate", 32),
    "int4 of 32, stochastic": BlockScaling("integer4:stochastic", 32, scale="float32", rule="absmax"),
}
TPU_DTYPES = ("float32", "bfloat16")
GPU_DTYPES = ("float32", "bfloat16", "float16", "float64")
SHAPES = ((256, 512), (37, 101), (3, 5, 257), (1, 1000), (129,))
WORDS = jax.ShapeDtypeStruct((1, 9), jnp.uint32)


def kernels(target: str) -> ModuleType:
    if is_tpu(target):
        from jchop._kernels import scaled_tpu as module
    else:
        from jchop._kernels import scaled_gpu as module
    return module


def cases(target: str) -> Iterator[Case]:
    dtypes = TPU_DTYPES if is_tpu(target) else GPU_DTYPES
    for number, (name, scaling) in enumerate(SCALINGS.items()):
        for axis in (-1, -2):
            turn = 2 * number + (axis == -2)
            dtype = dtypes[turn % len(dtypes)]
            shape = SHAPES[turn % 3]
            kernel = ("quantize_blocks", "round_blocks")[(turn + number // 3) % 2]
            yield case(target, kernel, name, replace(scaling, axis=axis), dtype, shape, number % 2 == 0)
    for shape in SHAPES[3:]:
        yield case(target, "quantize_blocks", "mxfp4, even", SCALINGS["mxfp4, even"], "bfloat16", shape)
    for axis in (-1, -2):
        for kernel in ("quantize_blocks", "round_blocks"):
            yield case(target, kernel, "mxfp8 e4m3", mx("e4m3fn", axis=axis), "float32", (4096, 4096))


def case(
    target: str,
    kernel: str,
    name: str,
    scaling: BlockScaling,
    dtype: str,
    shape: tuple[int, ...],
    x64: bool = False,
) -> Case:
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    platform = "tpu" if is_tpu(target) else "gpu"
    refuse = {
        "quantize_blocks": {"tpu": scaled.refuse_codes_tpu, "gpu": scaled.refuse_codes_gpu},
        "round_blocks": {"tpu": scaled.refuse_tpu, "gpu": scaled.refuse_gpu},
    }[kernel][platform]
    why = refuse(x, scaling=scaling)
    assert why is None, f"{name} on {target}: {why}"
    text = f"{kernel} {name} axis {scaling.axis} {dtype}{list(shape)}{' x64' * x64}"
    run = partial(getattr(kernels(target), kernel), scaling=scaling)
    return Case(text, run, (x, WORDS), x64 or dtype == "float64", checks_of(target, shape[-1] % 16 == 0))
