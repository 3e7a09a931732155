"""What the tools of insight cost: a transformer block of 8 × 64 tokens, and a solver of 966 equations.

    python benchmarks/insight.py [--only TOOL ...] [--spec bfloat16]
    python benchmarks/insight.py --native [--spec bfloat16]

A row is a tool. Seconds are those of the processor, of the first call and of the second one; the ratio is of the second
call and one of the plain program, compiled. `lines` are those of XLA's program for a CPU, of tools that are one
program. `--native` gives the time of `emulate` and of `native`, relative to the plain function, of 200,000 numbers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compile_cost import LanguageModel, runge_kutta
from flax import nnx
from jax import lax

import jchop as jc

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def block() -> Program:
    """A block of width 64 on 8 × 64 tokens: the norm, attention and the network, without the embedding."""
    graph, state = nnx.split(LanguageModel(rngs=nnx.Rngs(0), blocks=1))
    x = jax.random.normal(jax.random.key(0), (8, 64, 64))

    def run(state: Any, x: Any) -> Any:
        model = nnx.merge(graph, state)
        mask = nnx.make_causal_mask(jnp.zeros((8, 64)))
        x = x + model.attention[0](model.norms[0](x), mask=mask)
        return x + model.down[0](jax.nn.gelu(model.up[0](model.norms[1](x))))

    return run, (state, x)


def programs(run: Callable[..., Any], args: tuple[Any, ...], spec: str) -> dict[str, Any]:
    """The tools that are one program, compiled."""
    low = jc.emulate(run, spec)
    return {name: jax.jit(fun) for name, fun in {"plain": run, "emulate": low, "native": low.native(*args)}.items()}


def runs(run: Callable[..., Any], args: tuple[Any, ...], spec: str) -> dict[str, Callable[[], Any]]:
    """The tools that run operation by operation."""
    low, key = jc.emulate(run, spec), jax.random.key(0)
    return {
        "report": lambda: low.report(*args, trace_values=True),
        "ranges": lambda: low.ranges([args]),
        "blame": lambda: low.blame(*args),
        "what_if": lambda: low.what_if(*args, by="line"),
        "significant_digits": lambda: jc.significant_digits(run, *args, key=key, narrow="carrier"),
        "compare": lambda: jc.compare(low, jc.emulate(run, "binary16"), *args),
    }


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.process_time()
    jax.block_until_ready(jax.tree.leaves(call()))
    return time.process_time() - start


def normal_cdf(x: Any) -> Any:
    return 0.5 * (1 + lax.erf(x * 0.70710678))


def call_price(x: Any) -> Any:
    """A call of Black and Scholes, at a volatility of .3, on stocks of price 100 + 10 x."""
    d = (jnp.log(1 + x / 10) + 0.0538) / 0.26
    return (100 + 10 * x) * normal_cdf(d) - 98.5 * normal_cdf(d - 0.26)


#: Functions of numbers between -2 and 2.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "x * x": lambda x: x * x,
    "sin": jnp.sin,
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "erf": lax.erf,
    "swish": lambda x: x * jax.nn.sigmoid(x),
    "normal CDF": normal_cdf,
    "gelu": lambda x: x * normal_cdf(x),
    "a call of Black and Scholes": call_price,
}


def native_rows(spec: str) -> None:
    print("| function | `emulate` | `native` | quotient | equal bits |\n|---|---:|---:|---:|---|")
    x = jax.random.uniform(jax.random.key(0), 200_000, minval=-2, maxval=2)
    for name, fun in FUNCTIONS.items():
        compiled = programs(fun, (x,), spec)
        results = {tool: np.asarray(run(x)) for tool, run in compiled.items()}
        times = np.array([[seconds_of(partial(run, x)) for run in compiled.values()] for _ in range(31)])
        plain, low, native = np.median(times, axis=0)
        equal = "yes" if np.array_equal(results["emulate"], results["native"]) else "no"
        print(f"| {name} | {low / plain:.1f} | {native / plain:.1f} | {low / native:.1f} | {equal} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of tools")
    parser.add_argument("--spec", default="bfloat16")
    parser.add_argument("--native", action="store_true", help="emulated functions beside those of dtypes")
    options = parser.parse_args()
    if options.native:
        return native_rows(options.spec)
    print("| program | tool | first, s | second, s | ratio to plain | lines |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for name, (run, args) in {"block": block(), "Runge-Kutta": runge_kutta()}.items():
        compiled = programs(run, args, options.spec)
        calls = {tool: partial(fun, *args) for tool, fun in compiled.items()} | runs(run, args, options.spec)
        calls["plain"]()
        plain = float(np.median([seconds_of(calls["plain"]) for _ in range(20)]))
        for tool in options.only or calls:
            jax.clear_caches()
            first = seconds_of(calls[tool])
            second = float(np.median([seconds_of(calls[tool]) for _ in range(20 if tool in compiled else 1)]))
            text = str(compiled[tool].lower(*args).compile().as_text()) if tool in compiled else ""
            lines = f"{len(text.splitlines()):,}" if text else ""
            print(f"| {name} | {tool} | {first:.2f} | {second:.4g} | {second / plain:,.1f} | {lines} |", flush=True)


if __name__ == "__main__":
    main()
