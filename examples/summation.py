"""The error of a sum against its length: the order of the additions, and stochastic rounding.

    python examples/summation.py --plot summation.png

n numbers, uniform in [0, 1), are added in bfloat16 (u = 2^-8). The script prints the relative error, as a root mean
square over some sums. In sequential order with rounding to nearest, the sum stagnates at 256, because half the gap to
the next number is 1 there. Stochastic rounding keeps the error below √n u (M. P. Connolly, N. J. Higham and T. Mary,
SIAM J. Sci. Comput. 43 (2021) A566-A585); blocked and pairwise orders keep it small with rounding to nearest. With
`--small` it takes some 25 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

WAYS = {
    "sequential": ("bfloat16", "sequential"),
    "blocked(32)": ("bfloat16", "blocked(32)"),
    "pairwise": ("bfloat16", "pairwise"),
    "stochastic": ("bfloat16:stochastic", "sequential"),
    "stochastic, pairwise": ("bfloat16:stochastic", "pairwise"),
}


def errors(lengths: list[int], count: int) -> dict[str, list[float]]:
    """By order of addition: the relative error for each length."""
    table: dict[str, list[float]] = {name: [] for name in WAYS}
    for n in lengths:
        print(f"adding {n} numbers in {len(WAYS)} ways, {count} times", file=sys.stderr, flush=True)
        x = jc.round_to_format(np.random.default_rng(n).uniform(size=(count, n)).astype(np.float32), "bfloat16")
        exact = x.astype(np.float64).sum(1)
        for name, (accumulate, order) in WAYS.items():
            spec = jc.MatmulSpec(accumulate=accumulate, order=order)
            got = np.asarray(jc.math.sum(jnp.asarray(x), spec, jax.random.key(0), axis=1), np.float64)
            table[name].append(float(np.sqrt(np.mean((got / exact - 1) ** 2))))
    return table


def draw(lengths: list[int], table: dict[str, list[float]], path: Path) -> None:
    """The errors against the length, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, values in table.items():
        axes.loglog(lengths, values, ":o" if "stoch" in name else "-o", label=name)
    n, u = np.array(lengths), 2.0**-8
    axes.loglog(n, np.sqrt(n) * u, "k-.", linewidth=0.7, label="√n u")
    axes.set(title="Sums in bfloat16", xlabel="length n", ylabel="relative error")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="short sums")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the errors into")
    options = parser.parse_args()
    lengths = [2**k for k in ((6, 9, 12) if options.small else range(6, 15, 2))]
    table = errors(lengths, 10 if options.small else 30)
    print(f"{'n':22}" + "".join(f"{n:>10}" for n in lengths))
    print(f"{'√n u':22}" + "".join(f"{n**0.5 * 2.0**-8:10.1e}" for n in lengths))
    for name, values in table.items():
        print(f"{name:22}" + "".join(f"{e:10.1e}" for e in values))
    if options.plot:
        draw(lengths, table, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
