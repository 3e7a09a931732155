"""Iterative refinement in three precisions: convergence with low-precision factors by condition number.

    python examples/refinement.py --plot refinement.png
    python examples/refinement.py --full                     # the tables of docs/measurements/math.md, eight minutes
    python examples/refinement.py --full --working binary64  # the second one

Random matrices of order n have singular values that fall geometrically, from 1 to 10^-1 ... 10^-9; rows are labelled by
the condition number in the maximum norm. Factors are computed in one format, of the matrix scaled by a power of two
into its range (N. J. Higham, S. Pranesh and M. Zounon, SIAM J. Sci. Comput. 41 (2019) A2536-A2551); x is held in
binary32 or binary64, residuals are in binary64. The corrections are computed with the factors ("lu") or by steps of
GMRES preconditioned by them ("gmres"). The table shows the backward error ‖b - A x‖ / (‖A‖ ‖x‖ + ‖b‖) in the maximum
norm after the last step, the largest over some matrices. The unit roundoffs of binary32 and binary64 are 6.0e-08 and
1.1e-16. The theory (E. Carson and N. J. Higham, SIAM J. Sci. Comput. 40 (2018), table 5.1) has limits for κ in the
maximum norm: 10^4 with factors in binary16, 10^8 with GMRES. With `--small` it takes some 15
seconds of CPU time, without it some 40.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import jchop as jc

FACTORS = ("binary16", "bfloat16", "float8_e4m3")


class Sizes(NamedTuple):
    """The systems: condition numbers, in the 2-norm, of matrices of order n, the number of each, and the steps."""

    conditions: tuple[float, ...]
    n: int
    count: int
    steps: int
    inner: tuple[int, ...]  # steps of GMRES; 0 for the factors alone
    factors: tuple[str, ...] = FACTORS
    working: str = "binary32"  # precision of x


FULL = Sizes(tuple(10.0**power for power in range(1, 10)), 100, 2, 10, (0, 20, 100))
DEFAULT = Sizes((1e1, 1e3, 1e5, 1e7, 1e9), 24, 2, 10, (0, 24), FACTORS)
SMALL = Sizes((10.0, 1e3, 1e5, 1e7), 6, 1, 4, (0, 6), FACTORS[:1])


def matrices(n: int, condition: float, count: int) -> np.ndarray:
    """Random matrices with geometric singular values, rounded to binary32, float64[count, n, n]."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(count, n, n)))[0] for _ in range(2))
    values = condition ** -np.linspace(0, 1, n)
    return (left * values @ right).astype(np.float32).astype(np.float64)


def backward_errors(a: np.ndarray, x: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The backward error of each system; infinite if x is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        residual = np.abs(np.einsum("...ij,...j->...i", a, x) - b).max(-1)
        errors = residual / (np.abs(a).sum(-1).max(-1) * np.abs(x).max(-1) + np.abs(b).max(-1))
    return np.where(np.isfinite(errors), errors, np.inf)


def scale_into(factor: str, a: np.ndarray) -> float:
    """A power of two that scales elements to a tenth of the largest number of a format, or of 2^16."""
    room = 0.1 * min(float(jc.Spec(factor).format.max), 2.0**16) / np.abs(a).max()
    return 2.0 ** np.floor(np.log2(room))


def solutions(systems: np.ndarray, b: np.ndarray, factor: str, inner: int, sizes: Sizes) -> np.ndarray:
    """The last iterates for some matrices."""
    solve = partial(
        jc.math.linalg.refine,
        factor=factor,
        working=sizes.working,
        residual="binary64",
        method="gmres" if inner else "lu",
        steps=sizes.steps,
        inner=max(inner, 1),
    )
    with jax.enable_x64(True):
        return np.asarray(jax.jit(jax.vmap(lambda a: solve(a, jax.numpy.asarray(b))[-1]))(systems))


def table(sizes: Sizes) -> tuple[np.ndarray, dict[tuple[str, int], np.ndarray]]:
    """Condition numbers in the maximum norm; by factors and steps of GMRES, the largest backward error for each."""
    systems = np.stack([matrices(sizes.n, condition, sizes.count) for condition in sizes.conditions])
    flat, b = systems.reshape(-1, sizes.n, sizes.n), np.ones(sizes.n)
    errors = {}
    for factor in sizes.factors:
        scale = scale_into(factor, flat)
        for inner in sizes.inner:
            print(f"solving {len(flat)} systems: {label(factor, inner)}", file=sys.stderr, flush=True)
            x = solutions(flat * scale, b * scale, factor, inner, sizes)
            errors[factor, inner] = backward_errors(flat, x, b).reshape(systems.shape[:2]).max(1)
    return np.linalg.cond(systems, np.inf).max(1), errors


def label(factor: str, inner: int) -> str:
    """The head of a column."""
    return f"{factor}, gmres({inner})" if inner else f"{factor}, lu"


def converged(working: str) -> float:
    """Two unit roundoffs: a backward error that counts as convergence."""
    fmt = jc.Spec(working).format
    assert isinstance(fmt, jc.formats.FloatFormat)
    return 2.0**-fmt.frac_bits


def draw(conditions: np.ndarray, errors: dict[tuple[str, int], np.ndarray], working: str, path: Path) -> None:
    """The errors against the condition number, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (factor, inner), values in errors.items():
        axes.loglog(conditions, np.minimum(values, 1e2), "-o" if inner else ":s", label=label(factor, inner))
    axes.axhline(converged(working) / 2, color="black", linewidth=0.8, label=f"unit roundoff of {working}")
    axes.set(title=f"Refinement: {working} solutions", xlabel="condition number", ylabel="backward error")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", action="store_true", help="few and small systems")
    sizes.add_argument("--full", action="store_true", help="the systems of the documentation: some eight minutes")
    parser.add_argument("--working", default="binary32", choices=("binary32", "binary64"), help="the precision of x")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the errors into")
    options = parser.parse_args()
    size = SMALL if options.small else FULL if options.full else DEFAULT
    conditions, errors = table(size._replace(working=options.working))
    limit = converged(options.working)
    print("| κ | " + " | ".join(label(*column) for column in errors) + " |")
    print("|---" * (1 + len(errors)) + "|")
    for i, condition in enumerate(conditions):
        cells = (f"{e[i]:.0e}" if e[i] > limit else f"**{e[i]:.0e}**" for e in errors.values())
        print(f"| {condition:.0e} | " + " | ".join(cells) + " |")
    if options.plot:
        draw(conditions, errors, options.working, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
