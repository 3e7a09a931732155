"""How far ahead the Lorenz system can be computed: each bit buys the same time, and only one operation needs it.

    python examples/lorenz_horizon.py [--small] [--plot lorenz_horizon.png]

In a chaotic system errors grow like exp(0.906 t), with the Lyapunov exponent of this one (E. N. Lorenz, J. Atmos. Sci.
20 (1963) 130-141), so each bit of precision should keep the state right for another log(2) / 0.906 units of time.
`low.blame` of a run by the classical Runge-Kutta method tells which errors count, and when they are made: those of the
first turns, which have time to grow, and most of all those of the sum that makes the next state, because the time step
makes those of the slopes small. `jc.tune` then finds formats that keep 32 or 64 states within a tolerance: fewer bits
for the slopes than for the state. Other states, held out, tell whether those were enough. With `--small` it takes some
45 seconds of CPU time.
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

SIGMA, RHO, BETA = 10.0, 28.0, 8.0 / 3.0
DT, LYAPUNOV, LOST = 1 / 64, 0.906, 1.0
PRECISIONS, LONG = (8, 12, 16, 20, 24), 1400
MENU = ("e8m7", "e8m11", "e8m15", "e8m19", "e8m23")


def slope(state: jax.Array) -> jax.Array:
    x, y, z = state
    return jnp.stack([SIGMA * (y - x), x * (RHO - z) - y, x * y - BETA * z])


def integrate(steps: int) -> Callable[[jax.Array], jax.Array]:
    """A function of the state at the beginning: the states after each step of the method of order 4, [steps, 3]."""

    def turn(state: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("slopes"):
            k1 = slope(state)
        with jax.named_scope("stages"):
            at2 = state + DT / 2 * k1
        with jax.named_scope("slopes"):
            k2 = slope(at2)
        with jax.named_scope("stages"):
            at3 = state + DT / 2 * k2
        with jax.named_scope("slopes"):
            k3 = slope(at3)
        with jax.named_scope("stages"):
            at4 = state + DT * k3
        with jax.named_scope("slopes"):
            k4 = slope(at4)
        with jax.named_scope("increment"):
            increment = DT / 6 * (k1 + 2 * (k2 + k3) + k4)
        with jax.named_scope("state"):
            state = state + increment
        return state, state

    return lambda state: jax.lax.scan(turn, state, length=steps)[1]


def starts(count: int) -> np.ndarray:
    """States on the attractor, [3, count]."""
    states = np.asarray(jax.jit(integrate(4000))(jnp.array([1.0, 1.0, 20.0])))
    return states[1000 :: 3000 // count][:count].T


def horizon(precision: int, steps: int, states: jax.Array) -> float:
    """The mean time up to which a state is right to within LOST, with every operation in `precision` bits."""
    low = jc.emulate(integrate(steps), jc.formats.FloatFormat(11, precision - 1))
    lost = np.linalg.norm(np.asarray(low(states)) - np.asarray(integrate(steps)(states)), axis=1) > LOST
    return float(np.mean(DT * np.where(lost.any(0), lost.argmax(0), steps)))


def last_error(low: jax.Array, exact: jax.Array) -> jax.Array:
    """The largest error of a state at the end."""
    return jnp.max(jnp.linalg.norm(low[-1] - exact[-1], axis=0))


def draw(found: jc.Blame, tuned: jc.Tuning, horizons: dict[int, float], path: Path) -> None:
    """The horizon of each precision, the growth of early errors, and the tuned formats, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    bits = np.array(list(horizons))
    left.plot(bits, list(horizons.values()), "o-", color="#31688e", label="measured")
    guess = np.log(2) / LYAPUNOV * (bits - bits[0]) + horizons[int(bits[0])]
    left.plot(bits, guess, "--", color="black", linewidth=0.8, label="one bit is log 2 / 0.906")
    left.set(title="time until the state is lost", xlabel="bits of precision", ylabel="time")
    left.legend(frameon=False)
    sums: dict[str, np.ndarray] = {}
    for row in (row for row in found.rows if row.turns):
        name = "state" if row.scope == "state" else "all other operations"
        sums[name] = sums.get(name, 0.0) + np.pad(row.turns, (0, steps_of(found) - len(row.turns)))
    for name, turns in sorted(sums.items(), reverse=True):
        middle.plot(DT * np.arange(len(turns)), np.cumsum(turns), label=name)
    middle.axhline(found.error, color="black", linewidth=0.8, linestyle="--", label="the error at the end")
    middle.set(title="blame: errors made up to a time", xlabel="time at which they were made", ylabel="their part")
    middle.legend(frameon=False)
    rows = tuned.rows[::-1]
    right.barh([row.path for row in rows], [row.bits for row in rows], color="#d95f02")
    for place, row in enumerate(rows):
        right.annotate(row.spec, (row.bits, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    right.set(title=f"formats for an error of {tuned.tolerance:g}", xlabel="bits", xlim=(0, 44))
    figure.savefig(path, dpi=150)


def steps_of(found: jc.Blame) -> int:
    return max(len(row.turns) for row in found.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="shorter runs from fewer states")
    parser.add_argument("--plot", type=Path, help="a PNG to draw horizons, parts and formats into")
    options = parser.parse_args()
    steps, count, precisions = (192, 32, PRECISIONS[::2]) if options.small else (320, 64, PRECISIONS)
    print(f"integrating {LONG} steps in {len(precisions)} precisions", file=sys.stderr, flush=True)
    states = starts(2 * count)
    with jax.enable_x64(True):
        wide = jnp.asarray(states, jnp.float64)
        horizons = {p: horizon(p, LONG, wide) for p in precisions}
        print("bits  horizon")
        for precision, time in horizons.items():
            print(f"{precision:4}  {time:7.2f}")
        print(f"blaming {steps} steps", file=sys.stderr, flush=True)
        found = jc.emulate(lambda x: integrate(steps)(x)[-1, 0], "binary32").blame(wide[:, 0])
        state = sum(row.contribution for row in found.rows if row.scope == "state")
        print(f"error of x in binary32: {found.error:.3g}, of the state's updates {state:.3g}")
        for row in found.rows[:4]:
            half = sum(row.turns[: len(row.turns) // 2])
            print(f"  {row.scope:10} {row.primitive:6} {row.contribution:10.3g}  first half of the turns {half:10.3g}")

    def progress(stage: str, done: int, most: int, text: str) -> None:
        if done % 50 == 0:
            print(f"{stage} {done}: {text}", file=sys.stderr, flush=True)

    tuned = jc.tune(
        integrate(steps),
        MENU,
        [(jnp.asarray(states[:, ::2]),)],
        0.1,
        metric=last_error,
        held_out=[(jnp.asarray(states[:, 1::2]),)],
        progress=progress,
    )
    print(tuned)
    if options.plot:
        draw(found, tuned, horizons, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
