"""The cases of products of codes: which units they reach."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from _kernels.compiling import Case, is_tpu
from jax import lax

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
            checks = ("integer units",) if is_tpu(target) else ("integer units", "integer machine code")
        elif activation and target != "a100":  # which has no units for float8
            checks = ("float8 units",)
        if gradient is None:
            yield Case(name, low, (low.pack(w, x), x), checks=checks)
        else:
            yield Case(name, jax.grad(lambda w, x, low=low: (low(w, x) ** 2).sum(), (0, 1)), (w, x), checks=checks)
    yield from convolutions(target)
    yield from experts(target)
    yield from weights_alone(target)
    pair = tuple(jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32) for _ in range(2))
    yield Case("double from int8", jc.math.matmul_double, (pair, pair), checks=("integer units",))
    yield from one_token(target)


def convolutions(target: str) -> Iterator[Case]:
    """Of images; a GPU multiplies matrices of their windows."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 16, 16, 128), (3, 3, 128, 128)))

    def conv(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    for name in ("int8", "uint8 with zero points", "int8 backward", "fp8"):
        weight, activation, gradient = RULES[name]
        low = jc.quantize_fn(conv, jc.Rule(weight=weight, activation=activation, gradient=gradient, product="codes"))
        checks = ("float8 units" if name == "fp8" else "integer units",)
        if name == "fp8" and target == "a100":
            checks = ()
        if gradient is None:
            yield Case(f"convolution {name}", low, (low.pack(w, x), x), checks=checks)
        else:
            back = jax.grad(lambda w, x, low=low: (low(w, x) ** 2).sum(), (0, 1))
            yield Case(f"convolution {name}", back, (w, x), checks=checks)


def experts(target: str) -> Iterator[Case]:
    """Rows of four experts. A TPU has one operation for all of it, in which no product is seen."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, INPUTS), (4, INPUTS, OUTPUTS)))
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    rule = jc.Rule(weight="int8(group=all)", activation="int8(group=all)", product="codes")
    low = jc.quantize_fn(lambda w, x, sizes: lax.ragged_dot(x, w, sizes), rule)
    checks = () if is_tpu(target) else ("integer units",)
    yield Case("experts int8", low, (low.pack(w, x, sizes), x, sizes), checks=checks)


def weights_alone(target: str) -> Iterator[Case]:
    """Four bits under scales of 128, one row and many: by the kernel, whose checks are those of its own cases."""
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight="int4(group=128)", product="codes"))
    for rows in (1, 64):
        x = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)
        checks = ("vmem",) if is_tpu(target) else ("masked", "spills")
        yield Case(f"int4 weights alone, {rows} rows", low, (low.pack(w, x), x), checks=checks)


def one_token(target: str) -> Iterator[Case]:
    """A step of decoding."""
    w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 4096), (1, 4096)))
    for weight in ("int4(group=128)", "nf4(group=128)"):
        low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=weight, product="codes"))
        checks = ("vmem",) if is_tpu(target) else ("masked", "spills")
        yield Case(f"{weight} weights alone, one row of 4096", low, (low.pack(w, x), x), checks=checks)
