"""Solvers of other packages in low precision: a stiff equation, a least-squares problem, a nonlinear system.

    python examples/packages.py [--small] [--plot packages.png]

diffrax integrates y' = -40 (y - cos t) by implicit Euler steps; optimistix fits a decay by Levenberg and Marquardt's
method, whose linear systems lineax solves, and finds a root by Newton's method. Each runs in float32, tf32, bfloat16
and binary16 rounded stochastically, and every operation of it is rounded. Prints the largest difference from float32.
Needs `pip install diffrax lineax optimistix`; without them it says so and stops.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

SPECS = ("binary32", "tf32", "bfloat16", "e5m10:stochastic")
KEY = jax.random.key(0)
TIMES = jnp.linspace(0.0, 2.0, 17)


def stiff(y0: jax.Array) -> jax.Array:
    """y' = -40 (y - cos t), whose fast part dies out at once, by implicit Euler steps of 1/8."""
    import diffrax
    import optimistix

    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, _: -40.0 * (y - jnp.cos(t))),
        diffrax.ImplicitEuler(root_finder=optimistix.Newton(rtol=1e-2, atol=1e-2)),
        t0=0.0,
        t1=2.0,
        dt0=None,
        y0=y0,
        stepsize_controller=diffrax.StepTo(ts=TIMES),
        saveat=diffrax.SaveAt(steps=True),
        max_steps=16,
        throw=False,
    ).ys


def fit(data: jax.Array) -> jax.Array:
    """Amplitude and rate of a decay, by Levenberg and Marquardt's method, whose linear systems lineax solves."""
    import optimistix

    def residual(y: jax.Array, data: jax.Array) -> jax.Array:
        return y[0] * jnp.exp(-y[1] * TIMES) - data

    solver = optimistix.LevenbergMarquardt(rtol=1e-2, atol=1e-2)
    start = jnp.array([0.5, 0.5])
    return optimistix.least_squares(residual, solver, start, data, max_steps=32, throw=False).value


def system(target: jax.Array) -> jax.Array:
    """The root of three equations, each with its neighbour, by Newton's method."""
    import optimistix

    def residual(y: jax.Array, target: jax.Array) -> jax.Array:
        return y + 0.25 * jnp.sin(jnp.roll(y, 1)) * y - target

    solver = optimistix.Newton(rtol=1e-2, atol=1e-2)
    return optimistix.root_find(residual, solver, target, target, max_steps=16, throw=False).value


#: diffrax goes to the end from the last hundred numbers before it, which are far from it in a low format.
RULES = {"stiff equation": {"nextafter": None}}


def problems() -> dict[str, tuple[Callable[..., jax.Array], jax.Array]]:
    """Each solver and its argument; the data of the fit have noise."""
    noise = np.random.default_rng(0).normal(0, 0.01, TIMES.size)
    data = jnp.asarray(0.8 * np.exp(-1.5 * np.asarray(TIMES)) + noise, jnp.float32)
    return {
        "stiff equation": (stiff, jnp.float32(0.0)),
        "least squares": (fit, data),
        "nonlinear system": (system, jnp.array([0.5, 1.0, 1.5])),
    }


def solve(specs: tuple[str, ...] = SPECS) -> dict[str, dict[str, np.ndarray]]:
    """The solution of each problem in each format."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, (fun, given) in problems().items():
        low = {spec: jc.emulate(fun, spec, key=KEY, rules=RULES.get(name)) for spec in specs}
        found[name] = {spec: np.asarray(jax.jit(low[spec])(given)) for spec in specs}
        print(f"{name:18}" + "".join(f"{spec:>18}" for spec in specs[1:]))
        errors = [np.max(np.abs(found[name][spec] - found[name]["binary32"])) for spec in specs[1:]]
        print(f"{'largest error':18}" + "".join(f"{error:18.2g}" for error in errors), flush=True)
    return found


def draw(found: dict[str, dict[str, np.ndarray]], path: str) -> None:
    """The solutions, a panel for each problem."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6))
    for axis, (name, by_spec) in zip(axes, found.items(), strict=True):
        for spec, y in by_spec.items():
            if name == "stiff equation":
                axis.plot(TIMES[1:], y, ".-", label=spec)
            elif name == "least squares":
                axis.plot(TIMES, y[0] * np.exp(-y[1] * np.asarray(TIMES)), label=spec)
            else:
                axis.plot(y, "o", label=spec)
        axis.set_title(name)
    axes[0].plot(TIMES, np.cos(TIMES), "k:", label="cos t")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Solve, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="in bfloat16 alone, beside float32")
    parser.add_argument("--plot", metavar="FILE", help="draw the solutions; needs matplotlib")
    options = parser.parse_args()
    specs = ("binary32", "bfloat16") if options.small else SPECS
    print(f"solving 3 problems in {len(specs)} formats", file=sys.stderr, flush=True)
    missing = [name for name in ("diffrax", "lineax", "optimistix") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: needs {', '.join(missing)}")
        return
    found = solve(specs)
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
