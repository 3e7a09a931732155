"""The cases of the elementwise rounding kernels: every format kind, mode, option, dtype and shape at least once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from _kernels.compiling import Case, is_tpu

import jchop as jc
from jchop.formats.rounding import Rounding

#: One format of each kind that the rounding tells apart.
KINDS = (
    "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn", "binary8p1ue", "bfloat16",
    "e5m2(subnormals=false)", "fixed4.4", "ufixed0.8", "integer8", "integer4(narrow=true)",
    "codebook(-1,-0.5,0,0.25,1)", "hif8", "posit16",
)  # fmt: skip
MODES = tuple(mode.value for mode in Rounding)
#: What else a specification may say; the last has subnormals of the carrier as normal values.
OPTIONS = (
    "e5m2:flush", "e4m3fn:saturate", "e4m3:propagate:up", "fixed4.4:wrap", "uinteger4:up:wrap",
    "e4m3:stochastic:random_bits=5", "e4m3:stochastic_b:random_bits=1", "integer8:stochastic_c:random_bits=5",
    "e8m3(bias=130,infinities=false,nans=none)",
)  # fmt: skip
SHAPES = ((), (1,), (7,), (127,), (128,), (129,), (1025,), (37, 101), (8, 128), (3, 5, 257))
LARGE = ((1 << 20,), (512, 2049))
SHAPE = (37, 101)

TPU_DTYPES = ("float32", "bfloat16")
GPU_DTYPES = ("float32", "bfloat16", "float16", "float64")


def narrow(text: str, dtype: str) -> bool:
    """Whether a dtype holds a specification of the tables above."""
    wide = ("bfloat16", "e8m0", "binary8p1", "e8m3")
    return dtype != "float16" or not any(name in text for name in wide)


def cases(target: str) -> Iterator[Case]:
    if is_tpu(target):
        from jchop._kernels import round_tpu

        yield from _every_kind(round_tpu.tpu_round_elements, TPU_DTYPES, ("vmem",))
        yield from _hardware_bits()
    else:
        from jchop._kernels import round_gpu

        yield from _every_kind(round_gpu.gpu_round_elements, GPU_DTYPES, ("masked", "ptx"))


def _every_kind(kernel: Callable[..., Any], dtypes: tuple[str, ...], checks: tuple[str, ...]) -> Iterator[Case]:
    case = partial(_case, kernel, checks)
    flags = itertools.cycle(itertools.product((True, False), (False, True)))  # x64, from a start
    for number, (text, (x64, start)) in enumerate(
        zip((*KINDS, *(f"e4m3fn:{mode}" for mode in MODES), *OPTIONS), flags, strict=False)
    ):
        yield case(text, dtypes[number % 2], SHAPE, x64, start)
    for dtype, (x64, start) in itertools.product(dtypes, itertools.islice(flags, 4)):
        if x64 or dtype != "float64":
            text = "e4m3fn:stochastic_c" if start else "e4m3fn:odd"
            yield case(text, dtype, SHAPE, x64, start)
    for number, (shape, (x64, start)) in enumerate(zip((*SHAPES, *LARGE), flags, strict=False)):
        yield case("e4m3fn", dtypes[number % 2], shape, x64)
        yield case("e5m2:stochastic", dtypes[(number + 1) % 2], shape, x64, start)
    for shape, drawn in itertools.product(((6, 1025), (6, 37, 101)), (None, 0)):
        yield case("e4m3fn:stochastic", "float32", shape, mapped=(0, drawn))
    yield case("e4m3fn", "bfloat16", (6, 1025), mapped=(0,))


def _case(
    kernel: Callable[..., Any],
    checks: tuple[str, ...],
    text: str,
    dtype: str,
    shape: tuple[int, ...],
    x64: bool = False,
    start: bool = False,
    mapped: tuple[int | None, ...] | None = None,
) -> Case:
    """Rounding under the specification `text`; `mapped` are the axes of a vmap over the array and the seeds."""
    spec = jc.parse(text)
    start = start and spec.rounding.stochastic
    avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))]
    avals += [jax.ShapeDtypeStruct((length,), jnp.uint32) for length in [6, 2][: spec.rounding.stochastic + start]]
    fun = partial(kernel, spec=spec)
    if mapped:
        fun = jax.vmap(fun, in_axes=mapped)
        if mapped[1:] == (0,):
            avals[1] = jax.ShapeDtypeStruct((shape[0], 6), jnp.uint32)
    # Rows under vmap may begin anywhere, and of a small array no program has all of its elements.
    if mapped or math.prod(shape) * avals[0].dtype.itemsize < 4096:
        checks = tuple("spills" if check == "ptx" else check for check in checks)
    words = [kernel.__module__.split(".")[-1], text, f"{dtype}{list(shape)}"]
    words += ["from a start"] * start + ["x64"] * x64 + [f"vmap{mapped}"] * bool(mapped)
    return Case(" ".join(words), fun, tuple(avals), x64, checks)


def _hardware_bits() -> Iterator[Case]:
    from jchop._kernels.round_tpu import tpu_round_with_hardware_bits

    for text, dtype, x64 in (("e4m3fn:stochastic", "float32", False), ("integer8:stochastic_equal", "bfloat16", True)):
        for shape in (SHAPE, (1 << 20,)):
            avals = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), jax.ShapeDtypeStruct((6,), jnp.uint32))
            fun = partial(tpu_round_with_hardware_bits, spec=jc.parse(text))
            yield Case(f"hardware bits {text} {dtype}{list(shape)}", fun, avals, x64, ("vmem",))
