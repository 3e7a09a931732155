"""Reconstruction of blocks beside GPTQ, for weights of 2 and 3 bits: the perplexity of a transformer.

    python benchmarks/ptq_blocks.py [--steps 400] [--width 96] [--iterations 200]

The transformer is that of examples/perplexity.py. In the column "of blocks" each block is rounded as a function of its
own, with inputs from the rounded blocks before it; "of the network" rounds the whole function at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jchop as jc

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
FORMATS = ("int2(group=32,rule=half_range)", "int3(group=32)")


def steps_of(iterations: int) -> dict[str, list[Any]]:
    """The steps of each column."""
    results = jc.ptq.sign_round(iterations, loss="results")
    return {
        "nearest": [],
        "gptq": [jc.ptq.gptq()],
        "clip, gptq": [jc.ptq.clip(), jc.ptq.gptq()],
        "clip, sign_round": [jc.ptq.clip(), jc.ptq.sign_round(iterations)],
        "of the network": [jc.ptq.clip(), results],
    }


def numbers_of(v: Any) -> Any:
    return jc.dequantize(v) if isinstance(v, jc.QArray) else v


def of_blocks(params: Any, data: list[Any], fmt: str, steps: list[Any]) -> Any:
    """The parameters with the numbers of blocks that were rounded one after the other."""
    import perplexity

    low = jc.quantize_fn(lambda p, x: perplexity.block(x, p), {"{q,k,v,out,up,down}": fmt})
    inputs = [params["letters"][some] + params["places"][: some.shape[1]] for some in data]
    blocks = []
    for i in range(perplexity.DEPTH):
        packed = low.pack(jax.tree.map(lambda v, i=i: v[i], params["blocks"]), batches=inputs, steps=steps)
        inputs = [low(packed, x) for x in inputs]
        blocks.append(jax.tree.map(numbers_of, packed, is_leaf=lambda v: isinstance(v, jc.QArray)))
    return {**params, "blocks": jax.tree.map(lambda *each: jnp.stack(each), *blocks)}


def transformer(steps: int, width: int, iterations: int) -> None:
    import perplexity

    params, text, kept = perplexity.trained(steps, width)
    print("| weights | " + " | ".join([*steps_of(1), "of blocks"]) + " |", flush=True)
    starts = jax.random.randint(
        jax.random.key(2), (perplexity.CALIBRATION, perplexity.BATCH), 0, len(text) - perplexity.LENGTH - 1
    )
    data = [perplexity.pieces(text, some)[:, :-1] for some in starts]
    for fmt in FORMATS:
        table = perplexity.run(params, text, kept, (fmt,), steps_of(iterations))[fmt]
        last = of_blocks(params, data, fmt, steps_of(iterations)["of the network"])
        cells = [f"{v:.3f}" for v in (*table.values(), perplexity.perplexity(last, kept))]
        print(f"| `{fmt}` | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--iterations", type=int, default=200)
    given = parser.parse_args()
    transformer(given.steps, given.width, given.iterations)


if __name__ == "__main__":
    main()
