"""GPTQ and AWQ of qwix beside those of `jchop.ptq`: the time of one matrix, and the perplexity of a transformer.

    python benchmarks/ptq_qwix.py time [--size 512] [--without qwix]
    python benchmarks/ptq_qwix.py perplexity [--steps 400] [--width 96]

The transformer is that of examples/perplexity.py, a scan over stacked parameters. qwix's providers intercept the
products of Flax modules that are not in a scan, so its functions for one matrix are given the statistics of each turn:
the sum of x x^T or the mean of abs(x), of the same data. Needs qwix, and SciPy for the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

GROUP = 128


def seconds(start: float) -> float:
    return time.perf_counter() - start


def problem(size: int) -> tuple[jax.Array, jax.Array]:
    """A square weight (inputs, outputs) and the sum of x x^T over twice as many rows, inputs of different sizes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2 * size, size)) * np.exp(rng.normal(size=size))
    wide = jnp.asarray(x, jnp.float32)
    return jnp.asarray(rng.normal(size=(size, size)), jnp.float32), wide.T @ wide


def time_qwix(weight: jax.Array, gram: jax.Array) -> None:
    from qwix._src.core import qarray
    from qwix.contrib import gptq_core

    how = qarray.HowToQuantize(qtype="int4", channelwise_axes=(0,), tiled_axes={1: GROUP})
    for call in ("first", "second"):
        start = time.perf_counter()
        jax.block_until_ready(gptq_core.quantize_weight(weight.T, gram, how)[0].qvalue)
        print(f"qwix, {call} call: {seconds(start):.2f} s", flush=True)


def time_jchop(weight: jax.Array, gram: jax.Array) -> None:
    from jchop.ptq._data.sites import find_sites
    from jchop.ptq._steps.round import round_parameter
    from jchop.ptq._steps.steps import as_steps

    low = jc.quantize_fn(lambda p, x: x @ p, jc.Rule(weight=f"int4(group={GROUP})"))
    program, _ = low.traced(weight, weight)
    layout = find_sites(program).by_leaf[0].layout
    how: Any = {"placement": program.placements[0][0], "layout": layout, "steps": as_steps(jc.ptq.gptq())}
    start = time.perf_counter()
    lowered = jax.jit(lambda w, h: round_parameter(w, h[None], None, None, **how)).lower(weight, gram)
    traced = seconds(start)
    start = time.perf_counter()
    run = lowered.compile()
    print(f"jchop: traced in {traced:.2f} s, compiled in {seconds(start):.2f} s", flush=True)
    for call in ("first", "second"):
        start = time.perf_counter()
        jax.block_until_ready(run(weight, gram))
        print(f"jchop, {call} run: {seconds(start):.2f} s", flush=True)


def time_scipy(weight: jax.Array, gram: jax.Array) -> None:
    """The blocked algorithm of the paper in float64, with the order by activation and groups that stay."""
    from scipy import linalg

    w, h = np.asarray(weight, np.float64).T, np.asarray(gram, np.float64)
    size = len(h)
    start = time.perf_counter()
    order = np.argsort(-np.diag(h), kind="stable")
    scale = np.repeat(np.abs(w.reshape(len(w), -1, GROUP)).max(2) / 7, GROUP, 1)[:, order]
    rest, h = w[:, order].copy(), h[order][:, order] + 0.01 * np.diag(h).mean() * np.eye(size)
    upper = linalg.cholesky(linalg.cho_solve(linalg.cho_factor(h, lower=True), np.eye(size)))
    for a in range(0, size, 128):
        b = min(a + 128, size)
        errors, part = np.zeros((len(w), b - a)), rest[:, a:b].copy()
        for i in range(b - a):
            number = np.clip(np.rint(part[:, i] / scale[:, a + i]), -8, 7) * scale[:, a + i]
            errors[:, i] = (part[:, i] - number) / upper[a + i, a + i]
            part[:, i:] -= np.outer(errors[:, i], upper[a + i, a + i : b])
        rest[:, b:] -= errors @ upper[a:b, b:]
    print(f"SciPy, float64: {seconds(start):.2f} s", flush=True)


def by_qwix(params: Any, text: Any, data: list[Any], method: str, qtype: str, group: int) -> Any:
    """The parameters with the weights of the blocks as numbers that qwix has rounded."""
    import perplexity as example
    from qwix._src.core import qarray
    from qwix.contrib import awq_core, gptq_core

    found = jc.ptq.statistics(example.network, params, data)
    how = qarray.HowToQuantize(qtype=qtype, channelwise_axes=(0,), tiled_axes={1: group})
    blocks = dict(params["blocks"])
    for path, own in found.items():
        name = path.rpartition("/")[2]
        if not path.startswith("blocks/"):
            continue
        turns = []
        for i, w in enumerate(blocks[name]):
            rows = float(own.count[i, 0])
            if method == "gptq":
                low = qarray.dequantize(gptq_core.quantize_weight(w.T, own.gram[i, 0] * rows, how)[0])
            elif method == "awq":
                made, scales = awq_core.quantize_weight(w.T, own.mean_abs[i, 0], how)
                low = qarray.dequantize(made) / scales
            else:
                low = qarray.dequantize(qarray.quantize(w.T, how))
            turns.append(low.T)
        blocks[name] = jnp.stack(turns)
    return params | {"blocks": blocks}


def perplexities(steps: int, width: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import perplexity as example

    params, text, kept = example.trained(steps, width)
    starts = jax.random.randint(jax.random.key(2), (4, example.BATCH), 0, len(text) - example.LENGTH - 1)
    data = [example.pieces(text, some)[:, :-1] for some in starts]
    print(f"float32: {example.perplexity(params, kept):.3f}", flush=True)
    ours: dict[str, list[Any]] = {
        "nearest": [],
        "awq()": [jc.ptq.awq()],
        "gptq()": [jc.ptq.gptq()],
        "clip(), gptq()": [jc.ptq.clip(), jc.ptq.gptq()],
        "correct_error(), clip(), gptq()": [jc.ptq.correct_error(), jc.ptq.clip(), jc.ptq.gptq()],
    }
    for fmt, qtype, group in (("int4(group=32)", "int4", 32), ("nf4(group=32)", "nf4", 32), ("mxfp4", "mxfp4", 32)):
        for method in ("nearest", "awq", "gptq"):
            try:
                value = f"{example.perplexity(by_qwix(params, text, data, method, qtype, group), kept):.3f}"
            except Exception as error:
                value = f"{type(error).__name__}: {str(error)[:80]!r}"
            print(f"{fmt} qwix {method}: {value}", flush=True)
        function = jc.quantize_fn(example.network, [jc.Rule("blocks", weight=fmt)])
        for name, some in ours.items():
            packed = jc.quantize_fn(example.network, function.rules).pack(params, batches=data, steps=some)
            print(f"{fmt} jchop {name}: {example.perplexity(packed, kept, function):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("time")
    timed.add_argument("--size", type=int, default=512)
    timed.add_argument("--without", default="", help="programs that are not timed, as qwix,scipy")
    shown = commands.add_parser("perplexity")
    shown.add_argument("--steps", type=int, default=400)
    shown.add_argument("--width", type=int, default=96)
    chosen = parser.parse_args()
    if chosen.command == "perplexity":
        perplexities(chosen.steps, chosen.width)
        return
    given = problem(chosen.size)
    for name, run in (("qwix", time_qwix), ("jchop", time_jchop), ("scipy", time_scipy)):
        if name not in chosen.without.split(","):
            run(*given)


if __name__ == "__main__":
    main()
