"""Which operation loses the digits: the error of a variance, divided among its operations, and mended.

    python examples/lost_digits.py [--small] [--plot lost_digits.png]

The variance of numbers near 10 is computed as E[x²] - E[x]² in bfloat16. `low.blame` runs the program twice, with every
operation rounded and without, and gives each operation its part of the error of the result; the parts add up to the
error. The subtraction, in which the digits vanish, has no part: its operands have lost them before. Then the parts are
kept in float32 one after the other, the worst first, until the result is right. An operation in bfloat16 rounds its
operands, so the subtraction is kept in float32 from the beginning. With `--small` it takes some 5 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

FORMAT = "bfloat16"


def variance(x: jax.Array) -> jax.Array:
    """The textbook formula; each part has a name, so that rules can find it."""
    with jax.named_scope("squares"):
        squares = x * x
    with jax.named_scope("mean_of_squares"):
        first = jnp.mean(squares)
    with jax.named_scope("mean"):
        mean = jnp.mean(x)
    with jax.named_scope("square_of_mean"):
        second = mean * mean
    with jax.named_scope("difference"):
        return first - second


def numbers(count: int) -> np.ndarray:
    """Numbers near 10, values of the format already."""
    x = 10 + np.random.default_rng(0).normal(size=count)
    return np.asarray(jc.round_to_format(x.astype(np.float32), FORMAT))


def mend(x: np.ndarray) -> dict[str, float]:
    """The errors of the program with none, one, two and more of its parts in float32, the worst parts first."""
    right = float(variance(x))
    worst = dict.fromkeys(row.scope for row in jc.emulate(variance, FORMAT).blame(x).rows)
    order = ["difference", *(scope for scope in worst if scope != "difference")]
    errors = {}
    for count in range(len(order) + 1):
        low = jc.emulate(variance, FORMAT, rules=dict.fromkeys(order[:count]))
        name = f"+ {order[count - 1]}" if count else "nothing"
        errors[name] = abs(float(low(x)) / right - 1)
    return errors


def draw(found: jc.Blame, errors: dict[str, float], path: Path) -> None:
    """The parts of the error, and the error with more and more parts in float32, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    parts = [(f"{row.scope}\n{row.primitive}", row.contribution) for row in found.rows]
    left.barh([name for name, _ in parts][::-1], [value for _, value in parts][::-1], color="#31688e")
    left.axvline(0, color="black", linewidth=0.8)
    left.set(title=f"parts of the error, together {found.error:.3f}", xlabel="contribution")
    right.barh(list(errors)[::-1], [100 * value for value in errors.values()][::-1], color="#d95f02")
    right.set(title="with parts in float32, one after the other", xlabel="relative error of the variance (%)")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="64 numbers in place of 1024")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the parts into")
    options = parser.parse_args()
    x = numbers(64 if options.small else 1024)
    print(f"adding {x.size} numbers in {FORMAT}", file=sys.stderr, flush=True)
    found = jc.emulate(variance, FORMAT).blame(x)
    print(found)
    errors = mend(x)
    print(f"\n{'in float32':24}  relative error")
    for name, value in errors.items():
        print(f"{name:24}  {value:14.2%}")
    if options.plot:
        draw(found, errors, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
