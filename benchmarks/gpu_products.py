"""Layers with products of codes on an NVIDIA GPU, beside layers in bfloat16.

    python benchmarks/gpu_products.py
    python benchmarks/gpu_products.py --side 1024    # smaller matrices
    python benchmarks/gpu_products.py --modules DIR  # and writes the compiled modules there

Activations are bfloat16 and are quantized by the layer; weights are packed before, and lie in memory as the compiler
chooses. A program has several layers, one after the other, so that the GPU is never idle; a time is that of one. A step
of decoding multiplies one token by one matrix after another, so many that no cache holds them. Errors are relative to
the bfloat16 program. All rows are timed in one process, in random order, by their median.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu import in_parallel, measure
from jax import lax
from jax.experimental.layout import Format, Layout

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
#: Layers of a program, and how often a program of decoding passes all its matrices.
LAYERS_OF_PROGRAM, PASSES = 8, 6
TRAINED = ("int8", "float8_rowwise", "float8_tensorwise")


def layer(weight: str, activation: str | None) -> Any:
    return jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=weight, activation=activation, product="codes"))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@dataclass(frozen=True)
class Case:
    """A program, its arguments, how many times it does the work of a row, and whether its arguments lie row by row."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    count: int = 1
    by_rows: bool = False

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        """The compiled program, and the arguments as they lie for it."""
        if self.by_rows:
            return jax.jit(self.fun).lower(*self.args).compile(), self.args
        program = jax.jit(self.fun, in_shardings=Format(Layout.AUTO)).lower(*self.args).compile()
        return program, jax.device_put(self.args, program.input_formats[0])


Cases = dict[str, Case]


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


def chain(fun: Callable[..., Any]) -> Callable[..., Any]:
    """One layer after the other."""

    def run(ws: list[Any], x: jax.Array) -> jax.Array:
        for w in ws:
            x = fun(w, x)
        return x

    return run


def layers(side: int) -> Cases:
    """Layers of side x side for side rows; products of bare operands, for comparison; qwix's layers."""
    x, *ws = (normal(i, side, side) for i in range(LAYERS_OF_PROGRAM + 1))
    ws = [w * jnp.bfloat16(side**-0.5) for w in ws]
    count = LAYERS_OF_PROGRAM

    def dot(kind: Any) -> Callable[..., Any]:
        return lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=kind)

    cases = {
        "bfloat16": Case(chain(lambda w, x: x @ w), (ws, x), count),
        "bare int8 product": Case(dot(jnp.int32), tuple((10 * v).astype(jnp.int8) for v in (x, ws[0]))),
        "bare e4m3 product": Case(dot(jnp.bfloat16), tuple(v.astype(jnp.float8_e4m3fn) for v in (x, ws[0]))),
    }
    for name, text in (("int8", "int8(group=all)"), ("e4m3", "e4m3fn(group=all)"), ("mxfp8", "mxfp8_e4m3")):
        each = partial(jax.tree.map, partial(jc.quantize, spec=text))
        cases[f"activations to {name}"] = Case(each, (ws,), count)
    for name, (weight, activation) in LAYERS.items():
        low = layer(weight, activation)
        packed = [jax.jit(low.pack)(w, x) for w in ws]
        cases[name] = Case(chain(low), (packed, x), count)
        if name in list(LAYERS)[::2][:2]:
            cases[f"{name}, weights by rows"] = Case(chain(low), (packed, x), count, by_rows=True)
    if importlib.util.find_spec("qwix") and importlib.util.find_spec("flax"):
        import qwix
        from flax import nnx

        for name, kind in (("int8", "int8"), ("e4m3", "float8_e4m3fn")):
            bf = jnp.bfloat16
            model = nnx.Linear(side, side, use_bias=False, param_dtype=bf, dtype=bf, rngs=nnx.Rngs(0))
            provider = qwix.PtqProvider([qwix.QtRule(weight_qtype=kind, act_qtype=kind)])
            graph, state = nnx.split(qwix.quantize_model(model, provider, x))
            run = chain(lambda state, x, graph=graph: nnx.merge(graph, state)(x))
            cases[f"qwix {name}"] = Case(run, ([jax.tree.map(jnp.copy, state) for _ in ws], x), count)
    return cases


def decoding(side: int, depth: int) -> Cases:
    """`depth` matrices, one after the other, times 1 row, and times 16; several times."""
    cases: Cases = {}
    scale = jnp.bfloat16(side**-0.5)
    weights = [normal(i, side, side) * scale for i in range(depth)]
    once = chain(lambda w, x: x @ w)

    def passes(fun: Callable[..., Any]) -> Callable[..., Any]:
        def run(ws: list[Any], x: jax.Array) -> jax.Array:
            return lax.fori_loop(0, PASSES, lambda _, y: x + fun(ws, y) * jnp.bfloat16(1e-3), x)

        return run

    for text in ("bfloat16", *DECODED):
        low, packed = once, weights
        if text != "bfloat16":
            low = jc.quantize_fn(once, jc.Rule(weight=text, product="codes"))
            packed = [jax.jit(layer(text, None).pack)(w, weights[0][:1]) for w in weights]
        for rows in (1, 16):
            name = f"{side}², {rows} row{'s' * (rows > 1)}: {text}"
            cases[name] = Case(passes(low), (packed, normal(99, rows, side)), depth * PASSES, by_rows=True)
    return dict(sorted(cases.items(), key=lambda case: case[0].split(":")[0] + str("bfloat16" not in case[0])))


def training(side: int) -> Cases:
    """Forward, dgrad and wgrad of one layer."""
    x, w, g = normal(0, side, side), normal(1, side, side), normal(2, side, side)

    def step(fun: Callable[..., Any]) -> Callable[..., Any]:
        def run(w: jax.Array, x: jax.Array, g: jax.Array) -> Any:
            y, back = jax.vjp(fun, w, x)
            return y, back(g)

        return run

    cases = {"training, bfloat16": Case(step(lambda w, x: x @ w), (w, x, g))}
    for name in TRAINED:
        low = jc.quantize_fn(lambda w, x: x @ w, jc.nn.recipe(name, product="codes"))
        given = partial(low, key=jax.random.key(0)) if any(map(draws, low.rules)) else low
        cases[f"training, {name}"] = Case(step(given), (w, x, g))
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

    built = dict(zip(cases, in_parallel(Case.build, list(cases.values())), strict=True))
    programs = {name: program for name, (program, _) in built.items()}
    calls = {name: partial(program, *args) for name, (program, args) in built.items()}
    timing = measure(calls, options.repeat)
    took = {name: timing.median(name) / case.count for name, case in cases.items()}
    print(f"{device.device_kind}, JAX {jax.__version__}; layers of {options.side}² for {options.side} rows\n")
    print(
        "| program | µs | bfloat16's time / this | temporary MB | error, % | products |\n|---|---:|---:|---:|---:|---|"
    )
    base, wanted = 0.0, None
    for name, call in calls.items():
        result = jax.tree.leaves(call())[0]
        if name.endswith("bfloat16"):
            base, wanted = took[name], result
        apart = not name.startswith(("bare", "activations", "qwix")) and not name.endswith("bfloat16")
        cells = (
            f"{1e6 * took[name]:,.1f}",
            f"{base / took[name]:.2f}",
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
