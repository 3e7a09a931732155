"""The cases of rounding with hardware bits: every format kind, every mode that draws, option, dtype and shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

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
DRAWING = tuple(mode.value for mode in Rounding if mode.stochastic)
#: What else a specification may say; the last has subnormals of the carrier as normal values.
OPTIONS = (
    "e5m2:flush:stochastic", "e4m3fn:saturate:stochastic", "e4m3:propagate:stochastic", "fixed4.4:wrap:stochastic",
    "e4m3:stochastic:random_bits=5", "e4m3:stochastic_b:random_bits=1", "integer8:stochastic_c:random_bits=5",
    "e8m3(bias=130,infinities=false,nans=none):stochastic",
)  # fmt: skip
SHAPES = ((), (1,), (7,), (127,), (128,), (129,), (1025,), (37, 101), (8, 128), (3, 5, 257))
LARGE = ((1 << 20,), (512, 2049))
SHAPE = (37, 101)
DTYPES = ("float32", "bfloat16")


def cases(target: str) -> Iterator[Case]:
    if not is_tpu(target):
        return
    texts = (*(f"{kind}:{mode}" for kind, mode in zip(KINDS, itertools.cycle(DRAWING), strict=False)), *OPTIONS)
    for number, text in enumerate(texts):
        yield _case(text, DTYPES[number % 2], SHAPE, number % 4 > 1)
    for number, shape in enumerate((*SHAPES, *LARGE)):
        yield _case("e5m2:stochastic", DTYPES[number % 2], shape, number % 4 > 1)
    for drawn in (None, 0):
        yield _case("e4m3fn:stochastic", "float32", (6, 1025), mapped=(0, *(drawn,) * 6))


def _case(
    text: str, dtype: str, shape: tuple[int, ...], x64: bool = False, mapped: tuple[int | None, ...] | None = None
) -> Case:
    """Rounding under the specification `text`; `mapped` are the axes of a vmap over the array and the seeds."""
    from jchop._kernels.round_tpu import tpu_round_with_hardware_bits

    fun = partial(tpu_round_with_hardware_bits, spec=jc.Spec(text))
    seed = jax.ShapeDtypeStruct((shape[0],) if mapped and mapped[1] == 0 else (), jnp.uint32)
    words = ["hardware bits", text, f"{dtype}{list(shape)}", *["x64"] * x64, *[f"vmap{mapped}"] * bool(mapped)]
    fun = jax.vmap(fun, in_axes=mapped) if mapped else fun
    return Case(" ".join(words), fun, (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), *[seed] * 6), x64, ("vmem",))
