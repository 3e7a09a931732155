"""Iterative refinement in three precisions: which condition numbers can low-precision factors bear?

    python examples/refinement.py                     # the table of docs/math.md
    python examples/refinement.py --small --plot refinement.png

Random matrices of order n have singular values that fall geometrically from 1 to 1/κ. Factors are computed in one
format, x is held in binary32, residuals are in binary64; the corrections come from the factors ("lu") or from GMRES
preconditioned by them ("gmres"). Each entry is the backward error ‖b - A x‖ / (‖A‖ ‖x‖ + ‖b‖) in the maximum norm after
the last step, the largest over some matrices; binary32's unit roundoff is 6.0e-08. The theory (E. Carson and N. J.
Higham, SIAM J. Sci. Comput. 40 (2018), table 5.1) has limits for κ in the maximum norm: 10^4 with factors in binary16,
10^8 with GMRES.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import jax
import numpy as np

import jchop as jc

FACTORS = ("binary16", "bfloat16", "float8_e4m3")
METHODS = ("lu", "gmres")
LIMIT = 2.0**-23  # a backward error of a few binary32 roundings counts as convergence


def matrices(n: int, condition: float, count: int) -> np.ndarray:
    """Random matrices with geometric singular values, rounded to binary32, float64[count, n, n]."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(count, n, n)))[0] for _ in range(2))
    values = condition ** -np.linspace(0, 1, n)
    return (left * values @ right).astype(np.float32).astype(np.float64)


def backward_errors(a: np.ndarray, x: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of each system; infinite where x is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        residual = np.abs(np.einsum("...ij,...j->...i", a, x) - b).max(-1)
        errors = residual / (np.abs(a).sum(-1).max(-1) * np.abs(x).max(-1) + np.abs(b).max(-1))
    return np.where(np.isfinite(errors), errors, np.inf)


def table(
    conditions: list[float], n: int, count: int, steps: int, factors: tuple[str, ...] = FACTORS
) -> dict[tuple[str, str], np.ndarray]:
    """By factors and method: the largest backward error for each condition number."""
    systems = np.stack([matrices(n, condition, count) for condition in conditions])
    flat, b = systems.reshape(-1, n, n), np.ones(n)
    errors = {}
    with jax.enable_x64(True):
        for factor in factors:
            for method in METHODS:
                solve = partial(
                    jc.math.linalg.refine,
                    factor=factor,
                    working="binary32",
                    residual="binary64",
                    method=method,
                    steps=steps,
                    inner=n,
                )
                x = np.asarray(jax.jit(jax.vmap(lambda a, solve=solve: solve(a, jax.numpy.asarray(b))[-1]))(flat))
                errors[factor, method] = backward_errors(flat, x, b).reshape(len(conditions), count).max(1)
    return errors


def draw(conditions: list[float], errors: dict[tuple[str, str], np.ndarray], path: Path) -> None:
    """The errors against the condition number, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (factor, method), values in errors.items():
        style = "-o" if method == "gmres" else ":s"
        axes.loglog(conditions, np.minimum(values, 1e2), style, label=f"{factor}, {method}")
    axes.axhline(2.0**-24, color="black", linewidth=0.5)
    axes.set(title="Refinement: binary32 solutions", xlabel="condition number", ylabel="backward error")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few and small systems")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the errors into")
    options = parser.parse_args()
    powers = (1, 5) if options.small else range(1, 10)
    conditions = [10.0**power for power in powers]
    errors = table(conditions, *((6, 1, 4, FACTORS[:1]) if options.small else (20, 4, 10)))
    print("| κ | " + " | ".join(f"{factor}, {method}" for factor, method in errors) + " |")
    print("|---" * (1 + len(errors)) + "|")
    for i, power in enumerate(powers):
        cells = (f"{e[i]:.0e}" if e[i] > LIMIT else f"**{e[i]:.0e}**" for e in errors.values())
        print(f"| 10^{power} | " + " | ".join(cells) + " |")
    if options.plot:
        draw(conditions, errors, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
