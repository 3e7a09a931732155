"""The backward error of LU, QR and Cholesky factorizations against the number format.

    python examples/backward_error.py --plot backward_error.png

Every operation is rounded. The script prints ‖A - product of the factors‖ / ‖A‖ in the maximum norm, in units of the
format's unit roundoff u, the largest over some random matrices of order n. The theory bounds it by a multiple of n u
times the growth of the elements (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., theorems 9.3,
10.3 and 19.4); here it is at most some twenty u in every format. With `--small` it takes some 15 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

FORMATS = {"float8_e4m3": 2.0**-4, "e6m5": 2.0**-6, "bfloat16": 2.0**-8, "binary16": 2.0**-11, "e8m16": 2.0**-17}
linalg = jc.math.linalg


def lu(a: jax.Array, text: str) -> tuple[jax.Array, jax.Array]:
    """The factored matrix, and the product of its factors."""
    factors, p = linalg.lu(a, text)
    return a[p], (jnp.tril(factors, -1) + jnp.eye(len(a))) @ jnp.triu(factors)


def qr(a: jax.Array, text: str) -> tuple[jax.Array, jax.Array]:
    q, r = linalg.qr(a, text)
    return a, q @ r


def cholesky(a: jax.Array, text: str) -> tuple[jax.Array, jax.Array]:
    definite = jc.round_to_format(a @ a.T + jnp.eye(len(a)), text)
    factor = linalg.cholesky(definite, text)
    return definite, factor @ factor.T


FACTORIZATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {"LU": lu, "QR": qr, "Cholesky": cholesky}


def errors(n: int, count: int, formats: dict[str, float]) -> dict[str, list[float]]:
    """By factorization: the largest relative error in each format."""
    rng = np.random.default_rng(0)
    a = rng.uniform(-1, 1, (count, n, n)) / np.sqrt(n)
    table: dict[str, list[float]] = {}
    with jax.enable_x64(True):
        for name, factor in FACTORIZATIONS.items():
            for text in formats:
                print(f"{name} of {count} matrices of order {n} in {text}", file=sys.stderr, flush=True)
                rounded = jc.round_to_format(a, text)
                exact, product = jax.jit(jax.vmap(lambda a, f=factor, text=text: f(a, text)))(jnp.asarray(rounded))
                relative = jnp.abs(exact - product).max((1, 2)) / jnp.abs(exact).max((1, 2))
                table.setdefault(name, []).append(float(relative.max()))
    return table


def draw(table: dict[str, list[float]], formats: dict[str, float], path: Path) -> None:
    """The errors against the unit roundoff, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    units = list(formats.values())
    for name, values in table.items():
        axes.loglog(units, values, "-o", label=name)
    axes.loglog(units, units, "k:", linewidth=0.8, label="u")
    axes.set(title="Backward error of factorizations", xlabel="unit roundoff u", ylabel="‖A - product‖ / ‖A‖")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few and small matrices")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the errors into")
    options = parser.parse_args()
    formats = {text: FORMATS[text] for text in ("float8_e4m3", "bfloat16", "binary16")} if options.small else FORMATS
    table = errors(*((4, 2) if options.small else (30, 5)), formats)
    print(f"{'':10}" + "".join(f"{text:>14}" for text in formats))
    for name, values in table.items():
        print(f"{name:10}" + "".join(f"{e / u:12.2f} u" for e, u in zip(values, formats.values(), strict=True)))
    if options.plot:
        draw(table, formats, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
