"""Layers with products of codes on an NVIDIA GPU, beside the layer in bfloat16.

    python benchmarks/gpu_products.py
    python benchmarks/gpu_products.py --side 1024    # smaller matrices
    python benchmarks/gpu_products.py --modules DIR  # and writes the compiled modules there

Activations are bfloat16 and are quantized by the layer; weights are packed before. A step of decoding multiplies one
token by one matrix after another, so many that no cache holds them. Errors are relative to the bfloat16 program.
All rows are timed in one process, in random order,
by their median.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu import in_parallel, measure
from jax import lax

import jchop as jc
from jchop._kernels.products.product_of_blocks_gpu import product_of_blocks
from jchop._kernels.products.product_of_blocks_tile import ProductOfBlocksGpuTiling
from jchop._products.codes import parts_of

Call = Callable[[], Any]

#: Weight and activation.
LAYERS = {
    "int8 × int8, row and channel": ("int8(group=all)", "int8(group=all)"),
    "int4 in groups of 128 × int8": ("int4(group=128)", "int8(group=all)"),
    "e4m3 × e4m3, row and channel": ("e4m3fn(group=all)", "e4m3fn(group=all)"),
    "e4m3 × e4m3, 1 × 128 and 128 × 128": ("float8_e4m3fn(group=(128,128))", "float8_e4m3fn(group=128)"),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3"),
}
DECODED = ("int8(group=all)", "int4(group=128)", "e4m3fn(group=all)", "mxfp4", "nf4(group=128)")
#: For sums of int8 that one kernel scales before it writes them.
ONE_KERNEL = ((128, 128, 128, 8, 4), (128, 256, 128, 8, 3), (256, 128, 128, 8, 3))
TRAINED = ("int8", "float8_rowwise", "float8_tensorwise")


def layer(weight: str, activation: str | None) -> Any:
    return jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=weight, activation=activation, product="codes"))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


Cases = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


def operands(text: str) -> str:
    """The types at the products of a compiled module, and how many of each, by library or by kernel."""
    names = re.findall(r'custom_call_target="([^"]+)"|kind":"(__triton[^"]*)"|= \S+ (dot)\(([^)]*)\)', text)
    found: dict[str, int] = {}
    for target, triton, dot, _ in names:
        name = target or triton or dot
        if any(word in name for word in ("cublas", "triton", "dot", "cudnn", "cutlass")):
            found[name] = found.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in found.items()) or "-"


def error(got: Any, wanted: Any) -> float:
    got, wanted = (np.asarray(v.astype(jnp.float32), np.float64) for v in (got, wanted))
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def layers(side: int) -> Cases:
    """One layer of side x side for side rows; products of bare operands, for comparison; qwix's layer."""
    x, w = normal(0, side, side), normal(1, side, side)

    def dot(kind: Any) -> Callable[..., Any]:
        return lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=kind)

    cases: Cases = {
        "bfloat16": (lambda w, x: x @ w, (w, x)),
        "bare int8 product": (dot(jnp.int32), tuple((10 * v).astype(jnp.int8) for v in (x, w))),
        "bare e4m3 product": (dot(jnp.bfloat16), tuple(v.astype(jnp.float8_e4m3fn) for v in (x, w))),
        "activations to int8": (lambda x: jc.quantize(x, "int8(group=all)"), (x,)),
        "activations to e4m3": (lambda x: jc.quantize(x, "e4m3fn(group=all)"), (x,)),
    }
    cases |= scaled_products(side)
    for name, (weight, activation) in LAYERS.items():
        low = layer(weight, activation)
        cases[name] = low, (jax.jit(low.pack)(w, x), x)
    if importlib.util.find_spec("qwix") and importlib.util.find_spec("flax"):
        import qwix
        from flax import nnx

        for name, kind in (("int8", "int8"), ("e4m3", "float8_e4m3fn")):
            bf = jnp.bfloat16
            model = nnx.Linear(side, side, use_bias=False, param_dtype=bf, dtype=bf, rngs=nnx.Rngs(0))
            provider = qwix.PtqProvider([qwix.QtRule(weight_qtype=kind, act_qtype=kind)])
            graph, state = nnx.split(qwix.quantize_model(model, provider, x))
            cases[f"qwix {name}"] = (lambda state, x, graph=graph: nnx.merge(graph, state)(x)), (state, x)
    return cases


def scaled_products(side: int) -> Cases:
    """An int8 product and its scales: by XLA, whose sums pass through memory, and by a kernel that keeps them."""
    x, w = (jc.quantize(v, "int8(group=all)") for v in (normal(0, side, side), normal(1, side, side).T))
    cases: Cases = {"scaled int8 product": (partial(jc.einsum, "mk,nk->mn"), (x, w))}
    parts = [parts_of(q) for q in (x, w)]
    given = tuple(part.elements[None] for part in parts) + tuple(part.scale[None, :, :1] for part in parts)
    for tiling in ONE_KERNEL:
        kernel = partial(
            product_of_blocks,
            names=("x_scale", "w_scale"),
            block=side,
            dtype="bfloat16",
            tiling=ProductOfBlocksGpuTiling(*tiling),
            interpret=jax.devices()[0].platform != "gpu",  # a rehearsal
        )
        cases[f"scaled int8 product, one kernel {tiling}"] = kernel, given
    return cases


def decoding(side: int, depth: int) -> Cases:
    """`depth` matrices, one after the other, times 1 row, and times 16."""
    cases: Cases = {}
    scale = jnp.bfloat16(side**-0.5)
    weights = [normal(i, side, side) * scale for i in range(depth)]

    def chain(ws: list[Any], x: jax.Array) -> jax.Array:
        for w in ws:
            x = x @ w
        return x

    for text in ("bfloat16", *DECODED):
        low, packed = chain, weights
        if text != "bfloat16":
            low = jc.quantize_fn(chain, jc.Rule(weight=text, product="codes"))
            packed = [jax.jit(layer(text, None).pack)(w, weights[0][:1]) for w in weights]
        for rows in (1, 16):
            cases[f"{side}², {rows} row{'s' * (rows > 1)}: {text}"] = low, (packed, normal(99, rows, side))
    return dict(sorted(cases.items(), key=lambda case: case[0].split(":")[0] + str("bfloat16" not in case[0])))


def training(side: int) -> Cases:
    """Forward, dgrad and wgrad of one layer."""
    x, w, g = normal(0, side, side), normal(1, side, side), normal(2, side, side)

    def step(fun: Callable[..., Any]) -> Callable[..., Any]:
        def run(w: jax.Array, x: jax.Array, g: jax.Array) -> Any:
            y, back = jax.vjp(fun, w, x)
            return y, back(g)

        return run

    cases: Cases = {"training, bfloat16": (step(lambda w, x: x @ w), (w, x, g))}
    for name in TRAINED:
        low = jc.quantize_fn(lambda w, x: x @ w, jc.nn.recipe(name, product="codes"))
        given = partial(low, key=jax.random.key(0)) if any(map(draws, low.rules)) else low
        cases[f"training, {name}"] = step(given), (w, x, g)
    return cases


def draws(rule: jc.Rule) -> bool:
    return "stochastic" in str(rule)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument(
        "--decode", type=int, nargs="*", default=[4096, 8192], help="sides of matrices that are decoded"
    )
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of programs; also bfloat16 ones")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--modules", type=Path, help="a folder for the compiled modules")
    parser.add_argument("--any-device", action="store_true", help="a rehearsal without a GPU")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.any_device:
        sys.exit("benchmarks/gpu_products.py needs an NVIDIA GPU, and JAX with CUDA: pip install 'jax[cuda13]'")
    cases = layers(options.side) | training(options.side)
    for side in options.decode:
        cases |= decoding(side, options.depth)

    cases = {name: case for name, case in cases.items() if any(part in name for part in (*options.only, "bfloat16"))}

    def build(case: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        fun, args = case
        return jax.jit(fun).lower(*args).compile()

    programs = dict(zip(cases, in_parallel(build, list(cases.values())), strict=True))
    calls = {name: partial(program, *cases[name][1]) for name, program in programs.items()}
    timing = measure(calls, options.repeat)
    print(f"{device.device_kind}, JAX {jax.__version__}; layers of {options.side}² for {options.side} rows\n")
    print(
        "| program | µs | bfloat16's time / this | temporary MB | error, % | products |\n|---|---:|---:|---:|---:|---|"
    )
    base, wanted = 0.0, None
    for name, call in calls.items():
        result = jax.tree.leaves(call())[0]
        if name.endswith("bfloat16"):
            base, wanted = timing.median(name), result
        apart = not name.startswith(("bare", "activations", "qwix")) and not name.endswith("bfloat16")
        cells = (
            f"{1e6 * timing.median(name):,.0f}",
            f"{base / timing.median(name):.2f}",
            f"{programs[name].memory_analysis().temp_size_in_bytes / 1e6:,.1f}",
            f"{100 * error(result, wanted):.2f}" if apart else "",
            operands(programs[name].as_text()),
        )
        print("|", name, "|", *(f"{cell} |" for cell in cells))
    if options.modules is not None:
        options.modules.mkdir(parents=True, exist_ok=True)
        for i, (name, program) in enumerate(programs.items()):
            (options.modules / f"{i:02d}.txt").write_text(f"// {name}\n{program.as_text()}")


if __name__ == "__main__":
    main()
