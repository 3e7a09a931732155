"""Layers with products of codes on an NVIDIA GPU, beside the layer in bfloat16.

    python benchmarks/gpu_products.py                # checks the numbers first, then times
    python benchmarks/gpu_products.py --side 1024    # smaller matrices
    python benchmarks/gpu_products.py --modules DIR  # and writes the compiled modules there

Activations are bfloat16 and are quantized by the layer; weights are packed before. A step of decoding multiplies one
token by one matrix after another, so many that no cache holds them. All rows are timed in one process, in random order,
by their median.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu import measure
from jax import lax

import jchop as jc

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
TRAINED = ("int8", "float8_rowwise", "float8_tensorwise")


def layer(weight: str, activation: str | None) -> Any:
    return jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=weight, activation=activation, product="codes"))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def compiled(fun: Callable[..., Any], *args: Any) -> tuple[Any, Call]:
    """A program, and a call of it; it does not wait."""
    program = jax.jit(fun).lower(*args).compile()
    return program, lambda: program(*args)


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


def layers(side: int, programs: dict[str, Any]) -> dict[str, Call]:
    """One layer of side x side for side rows; products of bare operands, for comparison; qwix's layer."""
    x, w = normal(0, side, side), normal(1, side, side)
    calls: dict[str, Call] = {}

    def add(name: str, fun: Callable[..., Any], *args: Any) -> Any:
        programs[name], calls[name] = compiled(fun, *args)
        return calls[name]()

    def dot(a: jax.Array, b: jax.Array, kind: Any) -> jax.Array:
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=kind)

    wanted = add("bfloat16", lambda w, x: x @ w, w, x)
    small = [(10 * v).astype(jnp.int8) for v in (x, w)]
    add("bare int8 product", lambda a, b: dot(a, b, jnp.int32), *small)
    small = [v.astype(jnp.float8_e4m3fn) for v in (x, w)]
    add("bare e4m3 product, fast sums", lambda a, b: dot(a, b, jnp.float32).astype(jnp.bfloat16), *small)
    add("quantize activations to int8", lambda x: jc.quantize(x, "int8(group=all)"), x)
    for name, (weight, activation) in LAYERS.items():
        low = layer(weight, activation)
        got = add(name, low, jax.jit(low.pack)(w, x), x)
        print(f"  {name}: error {100 * error(got, wanted):.2f} %", file=sys.stderr)
    if importlib.util.find_spec("qwix") and importlib.util.find_spec("flax"):
        import qwix
        from flax import nnx

        for name, kind in (("int8", "int8"), ("e4m3", "float8_e4m3fn")):
            model = nnx.Linear(
                side, side, use_bias=False, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
            )
            provider = qwix.PtqProvider([qwix.QtRule(weight_qtype=kind, act_qtype=kind)])
            graph, state = nnx.split(qwix.quantize_model(model, provider, x))
            add(f"qwix {name}", lambda state, x, graph=graph: nnx.merge(graph, state)(x), state, x)
    return calls


def decoding(side: int, depth: int, programs: dict[str, Any]) -> dict[str, Call]:
    """`depth` matrices, one after the other, times 1 row, and times 16."""
    calls: dict[str, Call] = {}
    scale = jnp.bfloat16(side**-0.5)
    weights = [normal(i, side, side) * scale for i in range(depth)]

    def chain(ws: list[Any], x: jax.Array) -> jax.Array:
        for w in ws:
            x = x @ w
        return x

    for rows in (1, 16):
        x = normal(99, rows, side)
        name = f"{depth} matrices, {rows} row{'s' * (rows > 1)}: "
        programs[name + "bfloat16"], calls[name + "bfloat16"] = compiled(chain, weights, x)
        for text in DECODED:
            low = jc.quantize_fn(chain, jc.Rule(weight=text, product="codes"))
            packed = jax.jit(low.pack)(weights, x)
            programs[name + text], calls[name + text] = compiled(low, packed, x)
            # By the body, from the same codes: one matrix, or errors of earlier ones would count.
            one = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=text))
            pair = [
                jax.jit(low)(jax.jit(low.pack)(w, x), x)
                for low, w in ((one, weights[0]), (layer(text, None), weights[0]))
            ]
            print(f"  {name}{text}: beside float {error(pair[1], pair[0]):.1e}", file=sys.stderr)
    return calls


def training(side: int, programs: dict[str, Any]) -> dict[str, Call]:
    """Forward, dgrad and wgrad of one layer."""
    calls: dict[str, Call] = {}
    x, w, g = normal(0, side, side), normal(1, side, side), normal(2, side, side)

    def step(fun: Callable[..., Any]) -> Callable[..., Any]:
        def run(w: jax.Array, x: jax.Array, g: jax.Array) -> Any:
            y, back = jax.vjp(fun, w, x)
            return y, back(g)

        return run

    programs["training, bfloat16"], calls["training, bfloat16"] = compiled(step(lambda w, x: x @ w), w, x, g)
    for name in TRAINED:
        low = jc.quantize_fn(lambda w, x: x @ w, jc.nn.recipe(name, product="codes"))
        given = (lambda w, x, low=low: low(w, x, key=jax.random.key(0))) if low_needs_key(low, w, x) else low
        programs[f"training, {name}"], calls[f"training, {name}"] = compiled(step(given), w, x, g)
    return calls


def low_needs_key(low: Any, *args: Any) -> bool:
    try:
        jax.eval_shape(low, *args)
    except Exception:
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--modules", type=Path, help="a folder for the compiled modules")
    parser.add_argument("--any-device", action="store_true", help="a rehearsal without a GPU")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.any_device:
        sys.exit("benchmarks/gpu_products.py needs an NVIDIA GPU, and JAX with CUDA: pip install 'jax[cuda13]'")
    programs: dict[str, Any] = {}
    parts = {
        "bfloat16": layers(options.side, programs),
        f"{options.depth} matrices, ": decoding(options.side, options.depth, programs),
        "training, bfloat16": training(options.side, programs),
    }
    timing = measure({name: call for calls in parts.values() for name, call in calls.items()}, options.repeat)
    print(f"{device.device_kind}, JAX {jax.__version__}, matrices of {options.side}²\n")
    print("| layer | µs | bfloat16's time / this | temporary MB | products |\n|---|---:|---:|---:|---|")
    base = 0.0
    for calls in parts.values():
        for name in calls:
            base = timing.median(name) if name.endswith("bfloat16") else base
            temporary = programs[name].memory_analysis().temp_size_in_bytes / 1e6
            kinds = operands(programs[name].as_text())
            print(
                f"| {name} | {1e6 * timing.median(name):,.0f} | {base / timing.median(name):.2f} | {temporary:,.1f} | {kinds} |"
            )
    if options.modules is not None:
        options.modules.mkdir(parents=True, exist_ok=True)
        for i, (name, program) in enumerate(programs.items()):
            (options.modules / f"{i:02d}.txt").write_text(f"// {name}\n{program.as_text()}")


if __name__ == "__main__":
    main()
