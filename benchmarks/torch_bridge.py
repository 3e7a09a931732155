"""Speed of `jchop.torch.round_to_format` on the CPU, beside pychop's, QPyTorch's and a copy, and its overhead.

    python benchmarks/torch_bridge.py [--size 4194304] [--repeats 9] [--pause 0.05]

All are run in turn in one process, each after a pause: threads of the one before, which wait for more to do by asking
again and again, would take its cores. Figures are of the fastest call, which says most on a busy machine, and of the
median. pychop and qtorch are left out where they are not installed; qtorch compiles its extension when it is imported,
which takes a C++ compiler and ninja.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import torch

import jchop as jc

Run = Callable[[], object]


def pychop_runs(x: torch.Tensor) -> dict[str, Run]:
    """pychop's Chop, to nearest and stochastic."""
    if importlib.util.find_spec("pychop") is None:
        return {}
    import pychop

    pychop.backend("torch")
    nearest, stochastic = (pychop.Chop(exp_bits=5, sig_bits=2, rmode=mode) for mode in (1, 5))
    return {"pychop nearest": lambda: nearest(x), "pychop stochastic": lambda: stochastic(x)}


def qtorch_runs(x: torch.Tensor) -> dict[str, Run]:
    """QPyTorch's float_quantize, as it is shipped."""
    if importlib.util.find_spec("qtorch") is None:
        return {}
    from qtorch.quant import float_quantize

    return {
        f"qtorch {how}": partial(float_quantize, x, exp=5, man=2, rounding=how) for how in ("nearest", "stochastic")
    }


def seconds(runs: dict[str, Run], repeats: int, calls: int, pause: float) -> dict[str, list[float]]:
    """The times of a call, each taken as the mean of several after a pause."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            time.sleep(pause)
            start = time.perf_counter()
            for _ in range(calls):
                run()
            taken[name].append((time.perf_counter() - start) / calls)
    return taken


def ours(x: torch.Tensor) -> dict[str, Run]:
    return {
        "jchop nearest": lambda: jc.torch.round_to_format(x, "float8_e5m2"),
        "jchop stochastic": lambda: jc.torch.round_to_format(x, "float8_e5m2:stochastic", seed=1),
    }


def on_jax(x: torch.Tensor) -> dict[str, Callable[[], jax.Array]]:
    """The same on a JAX array, each waited for."""
    array, key = jnp.asarray(x.numpy()), jax.random.key(1)
    return {
        "JAX nearest": lambda: jc.round_to_format(array, "float8_e5m2").block_until_ready(),
        "JAX stochastic": lambda: jc.round_to_format(array, "float8_e5m2:stochastic", key).block_until_ready(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1 << 22)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds before each measurement")
    options = parser.parse_args()
    x = torch.randn(options.size)
    runs = {"copy": x.clone} | ours(x) | pychop_runs(x) | qtorch_runs(x)
    print(f"{options.size} float32 elements, {torch.get_num_threads()} threads, Melem/s")
    for name, times in seconds(runs, options.repeats, 1, options.pause).items():
        fastest, median = (options.size / t / 1e6 for t in (min(times), statistics.median(times)))
        print(f"{name:20}{fastest:12.0f}{median:12.0f}")
    small = torch.randn(1000)
    bridged, direct = ours(small), on_jax(small)
    together = seconds(bridged | direct, options.repeats, 100, options.pause)
    print("a call on 1000 elements, µs: on a tensor, on a JAX array, and the difference: what the bridge takes")
    for name, other in zip(bridged, direct, strict=True):
        for what, pick in (("fastest", min), ("median", statistics.median)):
            whole, without = (1e6 * pick(together[key]) for key in (name, other))
            print(f"{name:20}{what:10}{whole:10.0f}{without:10.0f}{whole - without:10.0f}")


if __name__ == "__main__":
    main()
