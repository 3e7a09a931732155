"""How fast arrays become codes and numbers again, beside pi-quant and a jitted `x * 2`.

    python benchmarks/storage.py                       # 27,264,000 and 4096 x 4096 float32 elements
    python benchmarks/storage.py --size 4194304 --side 1024 --repeat 5
    pip install pypiquant                              # adds pi-quant, two threads, to the first table

Everything is timed in one process, in turn, and quoted as a ratio of medians: machines are noisy, and an absolute time
proves nothing. Outputs go to donated buffers, for pi-quant to one array. Its scale and zero point are given, and so are
ours.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rounding import Case, measure, table

import jchop as jc

SIZE, SIDE = 27_264_000, 4096
GROUPED = ("mxfp8_e4m3", "mxfp4", "nf4", "nvfp4", "int4(group=128,scale=bfloat16)", "int8(channel=0)", "dynamic8")


def reusing(function: Callable[..., Any], *arguments: Any) -> Case:
    """`function` of the arguments, jitted, writing into the buffers of its own last result."""
    jitted = jax.jit(lambda arguments, out: function(*arguments), donate_argnums=1, keep_unused=True)
    held = [jax.jit(function)(*arguments)]

    def case() -> None:
        held[0] = jax.block_until_ready(jitted(arguments, held[0]))

    return case


def whole_tensors(size: int, repeat: int) -> None:
    x, key = jax.random.uniform(jax.random.key(1), (size,), jnp.float32, -1, 1), jax.random.key(0)
    cases: dict[str, Case] = {"jitted x * 2": reusing(lambda x: x * 2, x)}
    for bits in (8, 4):
        spec = jc.Spec(f"uint{bits}(group=tensor,zero_point=integer)")
        scale, zero_point = jc.fit_scale(x, spec)

        def stored(x: jax.Array, spec: Any = spec, given: Any = (scale, zero_point)) -> jc.QArray:
            return jc.quantize(x, spec, key, scale=given[0], zero_point=given[1])

        cases[f"quantize, uint{bits}"] = reusing(stored, x)
        draws = jc.Spec(f"uint{bits}(group=tensor,zero_point=integer):stochastic")
        cases[f"quantize, uint{bits}, stochastic"] = reusing(lambda x, s=stored, d=draws: s(x, d), x)
        cases[f"dequantize, uint{bits}"] = reusing(jc.dequantize, stored(x))
        cases |= piquant_cases(np.asarray(x), bits, float(scale[0]), int(zero_point[0]))
    table(f"{size:,} float32 elements, scales given", measure(cases, repeat), "jitted x * 2", size)


def piquant_cases(x: np.ndarray, bits: int, scale: float, zero_point: int) -> dict[str, Case]:
    """pi-quant on two threads, where it is installed."""
    if importlib.util.find_spec("piquant") is None:
        return {}
    from piquant import Context, DataType, ReduceOp, RoundMode  # type: ignore[import-not-found]

    context, kind = Context(2), {8: DataType.UINT8, 4: DataType.UINT4}[bits]
    codes, numbers = np.zeros(-(-x.size * bits // 8), np.uint8), np.zeros_like(x)
    read, packed, out = x.ctypes.data, codes.ctypes.data, numbers.ctypes.data

    def quantize(mode: Any) -> Case:
        return lambda: context.quantize_ptr(read, DataType.F32, packed, kind, x.size, scale, zero_point, mode)

    def dequantize() -> None:
        # `x`, `codes` and `numbers` are held by this function: pi-quant sees their addresses alone.
        assert x.size and codes.size and numbers.size
        context.dequantize_ptr(packed, kind, out, DataType.F32, x.size, scale, zero_point, ReduceOp.SET)

    return {
        f"pi-quant quantize, uint{bits}": quantize(RoundMode.NEAREST),
        f"pi-quant quantize, uint{bits}, stochastic": quantize(RoundMode.STOCHASTIC),
        f"pi-quant dequantize, uint{bits}": dequantize,
    }


def groups(side: int, repeat: int) -> None:
    x = jax.random.normal(jax.random.key(1), (side, side), jnp.float32)
    cases: dict[str, Case] = {"jitted x * 2": reusing(lambda x: x * 2, x)}
    for text in GROUPED:
        cases[f"quantize, {text}"] = reusing(lambda x, t=text: jc.quantize(x, t), x)
        cases[f"dequantize, {text}"] = reusing(jc.dequantize, jc.quantize(x, text))
    table(f"{side} x {side} float32 elements", measure(cases, repeat), "jitted x * 2", side * side)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=SIZE, help=f"elements of the first table (default {SIZE})")
    parser.add_argument("--side", type=int, default=SIDE, help=f"rows and columns of the second (default {SIDE})")
    parser.add_argument("--repeat", type=int, default=11, help="timed runs of each case (default 11)")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}, {jc.__name__} {jc.__version__}")
    whole_tensors(arguments.size, arguments.repeat)
    groups(arguments.side, arguments.repeat)


if __name__ == "__main__":
    main()
