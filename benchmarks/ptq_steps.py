"""The tables of docs/ptq.md: signal-to-noise ratios of a layer on fresh data, in decibels, after steps of rounding.

    python benchmarks/ptq_steps.py [--formats mxfp4 nvfp4]

The layer has 128 outputs and 256 dependent inputs, 8 of them ten times larger; 1,024 rows are data, 1,024 are fresh.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

STEPS = {
    "nearest": [],
    "`sign_round()`": [jc.ptq.sign_round()],
    "`hqq()`": [jc.ptq.hqq()],
    "`clip()`": [jc.ptq.clip()],
    '`gptq("plain")`': [jc.ptq.gptq("plain")],
    "`gptq()`": [jc.ptq.gptq()],
    "`hqq()`, `gptq()`": [jc.ptq.hqq(), jc.ptq.gptq()],
    "`clip()`, `gptq()`": [jc.ptq.clip(), jc.ptq.gptq()],
}
INTEGERS, FLOATS = ["int4(group=128)", "int4(group=32)"], ["mxfp4(rule=rceil)", "float8_e4m3fn(group=all)"]
#: The steps of each table, and its formats.
TABLES = [
    (["nearest", "`sign_round()`", '`gptq("plain")`', "`gptq()`"], [*INTEGERS, "nf4(group=32)", *FLOATS]),
    (
        ["nearest", "`clip()`", "`gptq()`", "`clip()`, `gptq()`"],
        [*INTEGERS, "int3(group=128)", "uint4(group=32,zero_point=integer)", "nf4(group=32)", "nvfp4", *FLOATS],
    ),
    (
        ["nearest", "`hqq()`", "`clip()`", "`gptq()`", "`hqq()`, `gptq()`", "`clip()`, `gptq()`"],
        [f"uint{bits}(group=64,zero_point=float)" for bits in (4, 3)],
    ),
]


def layer() -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weight, (inputs, outputs), data, and fresh data."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2048, 64)) @ rng.normal(size=(64, 256)) / 8 + 0.3 * rng.normal(size=(2048, 256))
    x[:, rng.choice(256, 8, replace=False)] *= 10
    w, x = (jnp.asarray(each, jnp.float32) for each in (rng.normal(size=(256, 128)) / 16, x))
    return w, x[:1024], x[1024:]


def decibels(text: str, steps: list[object]) -> float:
    w, x, fresh = layer()
    low = jc.quantize_fn(lambda p, x: x @ p["w"], {"w": text})
    packed = low.pack({"w": w}, batches=[x], steps=steps) if steps else low.pack({"w": w}, x)
    exact = np.asarray(fresh @ w, np.float64)
    error = exact - np.asarray(fresh @ jc.dequantize(packed["w"]), np.float64)
    return float(10 * np.log10((exact**2).sum() / (error**2).sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="*", default=[""], help="parts of the names of formats")
    given = parser.parse_args()
    for names, formats in TABLES:
        print(f"| format | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
        for text in formats:
            if any(part in text for part in given.formats):
                print(
                    f"| `{text}` | {' | '.join(f'{decibels(text, STEPS[name]):.1f}' for name in names)} |", flush=True
                )
        print()


if __name__ == "__main__":
    main()
