"""The Lorenz system in low precision: rounding to nearest stagnates, stochastic rounding follows the climate.

    python examples/lorenz.py --plot lorenz.png

The equations (E. N. Lorenz, J. Atmos. Sci. 20 (1963) 130-141) are integrated by Euler's method with a small time step,
every operation rounded. In bfloat16 rounded to nearest, increments of less than half a gap are lost, and the state
stops after some 2,700 steps. Rounded stochastically, they count on average, even in 8 bits: the state jumps between the
few numbers of e5m2, and its mean is right, roughly. The script prints the mean and the standard
deviation of z over the second half of the run, and the number of the last 100 steps that changed the state. With
`--small` it takes some 15 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

SPECS = ("binary32", "binary16", "binary16:stochastic", "float8_e5m2:stochastic", "bfloat16", "bfloat16:stochastic")
SIGMA, RHO, BETA = 10.0, 28.0, 2.6640625  # 8/3 in bfloat16, so that all solve the same equations
START = (1.0, 1.0, 20.0)


def step(state: jax.Array, dt: float, spec: str, key: jax.Array) -> jax.Array:
    """One step of Euler's method, float32[3]."""
    keys = iter(jax.random.split(key, 12))
    x, y, z = state

    def op(name: str, a: jax.Array | float, b: jax.Array | float) -> jax.Array:
        return getattr(jc.math, name)(a, b, spec, next(keys))

    dx = op("multiply", SIGMA, op("subtract", y, x))
    dy = op("subtract", op("multiply", x, op("subtract", RHO, z)), y)
    dz = op("subtract", op("multiply", x, y), op("multiply", BETA, z))
    slopes = jnp.stack([dx, dy, dz])
    return op("add", state, op("multiply", slopes, dt))


def run(spec: str, steps: int, dt: float, seed: int = 0) -> jax.Array:
    """The states after each step, float32[steps, 3]."""

    @jax.jit
    def whole(key: jax.Array) -> jax.Array:
        def turn(state: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = step(state, dt, spec, jax.random.fold_in(key, i))
            return state, state

        return jax.lax.scan(turn, jnp.array(START, jnp.float32), jnp.arange(steps))[1]

    return whole(jax.random.key(seed))


def draw(paths: dict[str, np.ndarray], dt: float, file: Path) -> None:
    """z against time, a panel for each arithmetic, in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.6 * len(paths)), layout="constrained")
    panels = figure.subplots(len(paths), 1, sharex=True, sharey=True)
    for panel, (spec, states) in zip(panels, paths.items(), strict=True):
        panel.plot(dt * np.arange(len(states)), states[:, 2], linewidth=0.6)
        panel.set(ylabel="z", title=spec)
    panels[-1].set(xlabel="time")
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a short run")
    parser.add_argument("--plot", type=Path, help="a PNG to draw z into")
    options = parser.parse_args()
    steps, dt = (4000, 2.0**-9) if options.small else (40_000, 2.0**-9)
    specs = SPECS[-3:] if options.small else SPECS
    paths = {}
    for spec in specs:
        print(f"integrating {steps} steps in {spec}", file=sys.stderr, flush=True)
        paths[spec] = np.asarray(run(spec, steps, dt))
    print(f"{'arithmetic':22}  mean of z  deviation  steps that move")
    for spec, states in paths.items():
        z, last = states[steps // 2 :, 2], states[-101:]
        moving = int(np.any(last[1:] != last[:-1], axis=1).sum())
        print(f"{spec:22}  {z.mean():9.3f}  {z.std():9.3f}  {moving:4} of 100")
    if options.plot:
        draw(paths, dt, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
