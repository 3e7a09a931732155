"""The cases of products of codes: which units they reach."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from _kernels.compiling import Case, is_tpu

import jchop as jc

#: Weight, activation, gradient.
RULES = {
    "int8": ("int8(group=all)", "int8(group=all)", None),
    "int4 weights of 128": ("int4(group=128)", "int8(group=all)", None),
    "uint8 with zero points": ("int8(group=all)", "uint8(group=all,zero_point=integer)", None),
    "int8 backward": ("int8(group=all)", "int8(group=all)", "int8(group=all)"),
    "fp8": ("e4m3fn(group=all)", "e4m3fn(group=all)", None),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3", None),
    "int8 weights alone": ("int8(group=all)", None, None),
}
ROWS, INPUTS, OUTPUTS = 256, 512, 256


def cases(target: str) -> Iterator[Case]:
    """Layers with packed weights; backward also with their own."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, INPUTS), (INPUTS, OUTPUTS)))
    for name, (weight, activation, gradient) in RULES.items():
        rule = jc.Rule(weight=weight, activation=activation, gradient=gradient, product="codes")
        low = jc.quantize_fn(lambda w, x: x @ w, rule)
        checks: tuple[str, ...] = ()
        if activation and "int8" in activation:
            checks = ("integer units",)
        elif activation and (is_tpu(target) or target == "h200"):  # an A100 has no units for float8
            checks = ("float8 units",)
        if gradient is None:
            yield Case(name, low, (low.pack(w, x), x), checks=checks)
        else:
            yield Case(name, jax.grad(lambda w, x, low=low: (low(w, x) ** 2).sum(), (0, 1)), (w, x), checks=checks)
