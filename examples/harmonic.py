"""The harmonic series in low precision: the term at which the sum 1 + 1/2 + 1/3 + ... stops growing.

    python examples/harmonic.py                       # prints the table
    python examples/harmonic.py --terms 20000 --plot harmonic.png

In exact arithmetic the sum diverges. Rounded to nearest after every addition, it stops when 1/k is less than half the
distance to the next number; rounded stochastically, it grows on, right on average. Every term and every partial sum is
rounded to the format. JAX adds in float32, which is wide enough for formats of at most 11 bits: to nearest, its sum
rounds to the same number as the exact sum. The chance of a stochastic rounding differs from that of the exact sum by
at most 2^-14. It takes some 7 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jchop as jc

SPECS = (
    "float8_e5m2",
    "float8_e4m3fn",
    "bfloat16",
    "binary16",
    "float8_e5m2:stochastic",
    "bfloat16:stochastic",
    "binary16:stochastic",
)


def partial_sums(spec: jc.Spec, terms: int, key: jax.Array) -> jax.Array:
    """The partial sums of the harmonic series, float32[terms], each rounded under `spec`."""

    def add(total: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        k, step_key = step
        term_key, sum_key = jax.random.split(step_key)
        term = jc.round_to_format(1 / k, spec, term_key)
        total = jc.round_to_format(total + term, spec, sum_key)
        return total, total

    ks = jnp.arange(1, terms + 1, dtype=jnp.float32)
    return jax.lax.scan(add, jnp.float32(0), (ks, jax.random.split(key, terms)))[1]


def table(terms: int, seed: int = 0) -> dict[str, jax.Array]:
    """Partial sums by spec, and in float32 arithmetic under the name "float32"."""
    run = jax.jit(partial_sums, static_argnames=("spec", "terms"))
    key = jax.random.key(seed)
    sums = {}
    for text in SPECS:
        print(f"adding {terms} terms in {text}", file=sys.stderr, flush=True)
        sums[text] = jax.block_until_ready(run(jc.Spec(text), terms, key))
    return {"float32": jnp.cumsum(1 / jnp.arange(1, terms + 1, dtype=jnp.float32))} | sums


def draw(sums: dict[str, jax.Array], path: Path) -> None:
    """The partial sums as curves, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, (name, values) in enumerate(sums.items()):
        style = ":" if "stoch" in name else "-"
        axes.semilogx(jnp.arange(1, len(values) + 1), values, label=name, linestyle=style, color=f"C{i}")
    axes.set(title="Harmonic series, every operation rounded", xlabel="terms", ylabel="partial sum")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--terms", type=int, help="default 10000, with --small 2000")
    parser.add_argument("--small", action="store_true", help="fewer terms")
    parser.add_argument("--seed", type=int, default=0, help="seed of the stochastic modes; default 0")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the curves into")
    options = parser.parse_args()
    terms = options.terms or (2000 if options.small else 10_000)
    sums = table(terms, options.seed)
    print(f"{'arithmetic':24}  {'sum':>9}  last change at term")
    for name, values in sums.items():
        last = int(jnp.argmax(values == values[-1])) + 1
        print(f"{name:24}  {float(values[-1]):9.4f}  {last if last < terms else '-'}")
    if options.plot:
        draw(sums, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
