"""The cases of the kernels of scaled blocks: every kind of format, both axes, every dtype, odd shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
from _kernels.compiling import Case, checks_of, has_mosaic, is_tpu

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.scaled.elements import ScaledPlan, make_scaled_plan
from jchop._kernels import scaled
from jchop._spec.spec import Spec

#: Formats of blocks that differ in the kernels' code: element kinds and widths, rules, scale formats, block lengths.
SCALINGS: dict[str, Spec] = {
    name: jc.Spec(text)
    for name, text in {
        "mxfp8 e4m3": "mxfp8_e4m3",
        "mxfp8 e5m2, rceil": "mxfp8_e5m2(rule=rceil)",
        "mxfp6 e3m2, ceil": "mxfp6_e3m2(rule=ceil)",
        "mxfp4, even": "mxfp4(rule=even)",
        "mxint8": "mxint8",
        "nvfp4": "nvfp4",
        "int4 of 32, half range": "int4(group=32,rule=half_range)",
        "int4 of 128, bfloat16": "int4(group=128,scale=bfloat16)",
        "int3 of 16, no clip": "int3(group=16,scale=e4m3fn,rule=no_clip)",
        "e5m2 of 8, NaN blocks": "e5m2(group=8,scale=e8m0fnu,nan_block=true):ieee",
        "codebook of 64": "codebook(-1,-0.25,0,0.3125,1,group=64)",
        "mxfp4, stochastic": "mxfp4:stochastic",
        "int4 of 32, stochastic": "int4(group=32):stochastic",
    }.items()
}
TPU_DTYPES = ("float32", "bfloat16")
GPU_DTYPES = ("float32", "bfloat16", "float16")
SHAPES = ((256, 512), (37, 101), (3, 5, 257), (1, 1000), (129,))
#: Of which a GPU's tiles have whole blocks.
GPU_SHAPES = ((256, 512), (3, 128, 384), (2, 3, 128, 320))
#: Whole rows, and blocks of floating-point elements, under scales that are no powers of two.
ROWS = (
    ("int8(group=all)", "bfloat16", (4096, 4096)),
    ("e4m3fn(group=all)", "float32", (4, 3, 5120)),
    ("int4(group=all)", "bfloat16", (64, 6144)),
    ("e4m3fn(group=128)", "bfloat16", (4096, 4096)),
    ("nvfp4", "float32", (4096, 4096)),
    ("int4(group=128,scale=bfloat16)", "float32", (4096, 4096)),
)
WORDS = jax.ShapeDtypeStruct((1, 9), jnp.uint32)


def along(spec: Spec, axis: int) -> Spec:
    """The same blocks along another axis."""
    assert spec.scaled is not None
    return replace(spec, format=spec.scaled(axis=axis))


def plan_of(spec: Spec, dtype: str) -> ScaledPlan:
    return make_scaled_plan(spec, CARRIERS[dtype])


def refused(platform: str, kernel: str, spec: Spec, dtype: str, shape: tuple[int, ...]) -> str | None:
    """Why a kernel does not take an array, or None."""
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return scaled.refuse_blocks(x, plan_of(spec, dtype), platform, quantizes=kernel == "quantize_blocks")


def kernels(target: str) -> ModuleType:
    if is_tpu(target):
        from jchop._kernels import scaled_tpu as module
    else:
        from jchop._kernels import scaled_gpu as module
    return module


def cases(target: str) -> Iterator[Case]:
    dtypes = TPU_DTYPES if is_tpu(target) else GPU_DTYPES
    for number, (name, spec) in enumerate(SCALINGS.items()):
        for axis in (-1, -2):
            turn = 2 * number + (axis == -2)
            dtype = dtypes[turn % len(dtypes)]
            kernel = ("quantize_blocks", "round_blocks")[(turn + number // 3) % 2]
            row = kernel, name, along(spec, axis), dtype
            if is_tpu(target):
                yield case(target, *row, SHAPES[turn % 3], number % 2 == 0)
                continue
            shapes = (*GPU_SHAPES[turn % 3 :], *GPU_SHAPES)
            for shape in [shape for shape in shapes if refused("gpu", kernel, *row[2:], shape) is None][:1]:
                yield case(target, *row, shape, number % 2 == 0)
    for shape in SHAPES[3:] if is_tpu(target) else ():
        yield case(target, "quantize_blocks", "mxfp4, even", SCALINGS["mxfp4, even"], "bfloat16", shape)
    unclipped = jc.Spec("mxfp4(rule=floor_unclipped):stochastic")
    for axis in (-1, -2):
        for kernel in ("quantize_blocks", "round_blocks"):
            if is_tpu(target) or kernel == "quantize_blocks":
                yield case(target, kernel, "mxfp4, unclipped", along(unclipped, axis), "float32", (256, 512))
            yield case(target, kernel, "mxfp8 e4m3", along(jc.Spec("mxfp8_e4m3"), axis), "float32", (4096, 4096))
    if not is_tpu(target):
        for text, dtype, shape in ROWS:
            for kernel in ("quantize_blocks", "round_blocks"):
                yield case(target, kernel, text, jc.Spec(text), dtype, shape)
        yield case(target, "round_blocks", "rows", jc.Spec("mxfp8_e4m3(group=all)"), "bfloat16", (4, 3, 5120))


def case(
    target: str, kernel: str, name: str, spec: Spec, dtype: str, shape: tuple[int, ...], x64: bool = False
) -> Case:
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    platform = "tpu" if is_tpu(target) else "gpu"
    plan = plan_of(spec, dtype)
    why = refused(platform, kernel, spec, dtype, shape)
    assert why is None, f"{name} on {target}: {why}"
    text = f"{kernel} {name} axis {plan.fmt.axis} {dtype}{list(shape)}{' x64' * x64}"
    if not has_mosaic(target):
        public = jc.quantize if kernel == "quantize_blocks" else jc.round_to_format
        return Case(text, lambda x: public(x, spec, jax.random.key(0)), (x,), x64, ("body",))
    run = partial(getattr(kernels(target), f"{platform}_{kernel}"), plan=plan)
    return Case(text, run, (x, WORDS), x64, checks_of(target))
