"""Which part of an iterative solver needs the digits: blame, and the cheapest formats that keep six digits.

    python examples/tuned_solver.py [--small] [--plot tuned_solver.png]

A linear system is solved by LU factors and iterative refinement. `low.blame` of the solver in binary16 gives each part
its contribution to the error of the solution. Nearly all of it comes from the residuals, and from the rounded matrix in
them; the factors, with most of the work, have next to none, because refinement repairs their errors. `jc.tune` then
searches the cheapest format for each part, at the bits of all its multiplications. It finds the rule of numerical
analysis (E. Carson and N. J. Higham, SIAM J. Sci. Comput. 40 (2018) A817-A847): factors and corrections in few bits,
residuals and updates in the precision of the result. With `--small` it takes some 15 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

MENU = ("float8_e4m3", "bfloat16", "binary16", "tf32", None)
LOW, STEPS, TOLERANCE = "binary16", 6, 1e-6


def solve(a: jax.Array, b: jax.Array) -> jax.Array:
    """The solutions after each step, float32[STEPS + 1, n]."""
    with jax.named_scope("factor"):
        factors, _, order = jax.lax.linalg.lu(a)

    def turn(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("residual"):
            r = b - a @ x
        with jax.named_scope("correct"):
            y = jax.lax.linalg.triangular_solve(
                factors, r[order][:, None], left_side=True, lower=True, unit_diagonal=True
            )
            d = jax.lax.linalg.triangular_solve(factors, y, left_side=True)[:, 0]
        with jax.named_scope("update"):
            x = x + d
        return x, x

    return jax.lax.scan(turn, jnp.zeros_like(b), length=STEPS + 1)[1]


def last_error(low: jax.Array, exact: jax.Array) -> jax.Array:
    """The relative error of the last solution."""
    return jnp.linalg.norm(low[-1] - exact[-1]) / jnp.linalg.norm(exact[-1])


def systems(n: int, count: int) -> list[tuple[jax.Array, jax.Array]]:
    """Matrices of condition 20, with solutions of random numbers."""
    draw, found = np.random.default_rng(0), []
    for _ in range(count):
        left, right = (np.linalg.qr(draw.standard_normal((n, n)))[0] for _ in range(2))
        a = (left * np.geomspace(1, 1 / 20, n)) @ right
        found.append((jnp.asarray(a, jnp.float32), jnp.asarray(a @ draw.standard_normal(n), jnp.float32)))
    return found


def work(n: int) -> dict[str, float]:
    """Multiplications, divisions and additions that stand alone, of each part."""
    steps = STEPS + 1
    return {"factor": n**3 / 3, "residual": n * n * steps, "correct": n * n * steps, "update": n * steps}


def bits_of_work(n: int) -> object:
    """A cost for `jc.tune`: the mean bits of an operation."""
    counts = work(n)

    def mean_bits(specs: Mapping[str, jc.Spec | None]) -> float:
        bits = {path: 32 if spec is None else spec.format.bits for path, spec in specs.items()}
        return sum(counts[path] * bits[path] for path in counts) / sum(counts.values())

    return mean_bits


def errors(low: object, args: tuple[jax.Array, jax.Array]) -> np.ndarray:
    """The error of each step against the solution in float64."""
    right = np.linalg.solve(*(np.asarray(x, np.float64) for x in args))
    return np.linalg.norm(np.asarray(low(*args)) - right, axis=1) / np.linalg.norm(right)  # type: ignore[operator]


def parts(found: jc.Blame) -> dict[str, float]:
    """The contribution of each part; that of the arguments, which are rounded on entry, is a part of its own."""
    sums: dict[str, float] = {}
    for row in found.rows:
        name = row.scope or "arguments"
        sums[name] = sums.get(name, 0.0) + row.contribution
    return sums


def draw(shares: dict[str, float], tuned: jc.Tuning, curves: dict[str, np.ndarray], path: Path) -> None:
    """The parts of the error, their tuned formats, and the error of each step, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.barh(list(shares)[::-1], list(shares.values())[::-1], color="#d95f02")
    left.axvline(0, color="black", linewidth=0.8)
    left.set(title=f"blame of the solver in {LOW}", xlabel="contribution to the error of the solution")
    names, bits = [row.path for row in tuned.rows][::-1], [row.bits for row in tuned.rows][::-1]
    middle.barh(names, bits, color="#31688e")
    for place, row in enumerate(tuned.rows[::-1]):
        middle.annotate(row.spec, (row.bits, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    middle.set(title=f"formats for an error of {tuned.tolerance:.0e}", xlabel="bits", xlim=(0, 44))
    for name, values in curves.items():
        right.semilogy(range(len(values)), values, marker="o", label=name)
    right.axhline(tuned.tolerance, color="black", linewidth=0.8, linestyle="--")
    right.set(title="error after each step", xlabel="steps of refinement")
    right.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="systems of 16 unknowns in place of 48")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the parts and formats into")
    options = parser.parse_args()
    n, count = (16, 4) if options.small else (48, 8)
    print(f"solving {count} systems of {n} unknowns", file=sys.stderr, flush=True)
    every = systems(n, count)
    inputs, held_out = every[:-1], every[-1:]
    low = jc.emulate(solve, LOW)
    found = jc.emulate(lambda a, b: solve(a, b)[-1], LOW).blame(*held_out[0])
    shares = parts(found)
    print(f"in {LOW}, parts of the error of the solution")
    for name, value in shares.items():
        print(f"  {name:10} {value:10.5f}  {value / found.error:7.1%}")

    def progress(stage: str, done: int, most: int, text: str) -> None:
        if done % 50 == 0:
            print(f"{stage} {done}: {text}", file=sys.stderr, flush=True)

    tuned = jc.tune(
        solve,
        MENU,
        inputs,
        TOLERANCE,
        cost=bits_of_work(n),  # type: ignore[arg-type]
        metric=last_error,
        held_out=held_out,
        progress=progress,
    )
    print(tuned)
    curves = {
        "float32": errors(solve, held_out[0]),
        "tuned": errors(jc.emulate(solve, None, rules=tuned.rules), held_out[0]),
        LOW: errors(low, held_out[0]),
    }
    print("error after each step", *(f"{step:8}" for step in range(STEPS + 1)))
    for name, values in curves.items():
        print(f"{name:21}", *(f"{value:8.1e}" for value in values))
    if options.plot:
        draw(shares, tuned, curves, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
