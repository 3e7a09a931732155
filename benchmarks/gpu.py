"""Every kernel and its XLA body on an NVIDIA GPU, beside a device copy and a bf16 matrix product.

    python benchmarks/gpu.py                         # checks the bits against the CPU first, then times
    python benchmarks/gpu.py --table table.md        # and writes the table there, for docs/measurements/gpu.md
    python benchmarks/gpu.py --small                 # small sizes: a rehearsal of every row
    python benchmarks/gpu.py --device tpu            # on a TPU, whose rows without a kernel say so

Needs a GPU of compute capability 8.0 or more. Every row is timed in the same process, in random order, by its median;
what is quoted beside the time is bytes that must move (each input read once, each output written once) over that time,
as a share of what the copy reaches, or multiply-adds over it, as a share of the bf16 product's.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc
import jchop.math
from jchop._common.files import write_atomically
from jchop._kernels.products.dequantize_matmul import dequantize_matmul
from jchop._kernels.scaled import quantize_scaled, round_scaled
from jchop._quantized.products.codes import product_of_blocks_op
from jchop.formats import parse_format

IMPLS = ("xla", "pallas")


@dataclass(frozen=True)
class Row:
    """One operation at one size.

    Args:
        name: what the table calls it.
        fun: of the arrays and the keyword `impl`.
        args: NumPy arrays, and keys.
        macs: multiply-adds, where it is a product; else bytes count.
        exact: whether kernel, body and CPU give equal bits; else they are compared to a tolerance.
        small: the arguments of the comparison with the CPU.
        target: the least share of the copy's bandwidth, or of the bf16 product's rate, or T-MAC/s.
        impls: which are measured; the second one, if any, is a kernel.
    """

    name: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    small: tuple[Any, ...]
    macs: int = 0
    exact: bool = True
    target: str = ""
    impls: tuple[str, ...] = IMPLS


@dataclass
class Timing:
    samples: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return float(np.median(self.samples[name]))


# -- what is measured --------------------------------------------------------------------------------------------------


def rows(side: int, product: int) -> list[Row]:
    """Elementwise operations on a side x side array, products of product^3 multiply-adds."""
    rng = np.random.default_rng(0)
    key = jax.random.key(0)

    def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    wide, little = normal(side, side), normal(257, 384)
    found = []
    for text, target in (
        ("float8_e4m3fn", ">= 90 % of copy"),
        ("binary16:up", ">= 90 % of copy"),
        ("float8_e4m3fn:stochastic", ">= 75 % of copy"),
        ("bfloat16:stochastic", ">= 75 % of copy"),
    ):
        found.append(
            Row(
                f"round to {text}",
                lambda x, key, impl, text=text: jc.round_to_format(x, text, key, impl=impl),
                (wide, key),
                (little, key),
                target=target,
                impls=("xla",),
            )
        )
    half = jnp.bfloat16
    found.append(
        Row(
            "round bfloat16 data to float8_e4m3fn",
            lambda x, impl: jc.round_to_format(x, "float8_e4m3fn", impl=impl),
            (wide.astype(half),),
            (little.astype(half),),
            impls=("xla",),
        )
    )
    for name, text in (
        ("mxfp8 e4m3", "mxfp8_e4m3"),
        ("mxfp8 e4m3, axis -2", "mxfp8_e4m3(axis=-2)"),
        ("mxfp6 e2m3", "mxfp6_e2m3"),
        ("mxfp4", "mxfp4"),
        ("nvfp4", "nvfp4"),
        ("int4, groups of 128", "int4(group=128,scale=bfloat16)"),
    ):
        found += [scaled_row(f"{name}: quantize", quantize_scaled, text, wide, little)]
        found += [scaled_row(f"{name}: quantize and dequantize", round_scaled, text, wide, little)]
    e5m10 = {"operands": "e5m10", "product": "e5m10", "accumulate": "e5m10"}
    for name, spec, size, target in (
        ("e5m10, sequential", jc.MatmulSpec(**e5m10), product // 2, ">= 0.5 T-MAC/s"),
        ("e5m10, sequential, fused", jc.MatmulSpec("e5m10", None, "e5m10", fused=True), product // 2, ">= 0.5 T-MAC/s"),
        ("e5m10, pairwise", jc.MatmulSpec(**e5m10, order="pairwise"), product // 2, ""),
        ("e5m10, stochastic sums", jc.MatmulSpec("e5m10", "e5m10", "e5m10:stochastic"), product // 2, ""),
        ("bfloat16, e8m13 sums, matrix_unit(32)", matrix_unit("bfloat16", "e8m13"), product, ">= 20 % of bf16"),
        ("e4m3fn, e8m13 sums, matrix_unit(32)", matrix_unit("e4m3fn", "e8m13"), product, ">= 20 % of bf16"),
        ("e5m10, e5m10 sums, matrix_unit(32)", matrix_unit("e5m10", "e5m10"), product, ""),
    ):
        # Small integers: the sum of a block is exact, so that matrix_unit gives the same bits everywhere.
        whole = [rng.integers(-4, 5, shape).astype(np.float32) for shape in ((65, 97), (97, 71))]
        found.append(
            Row(
                f"matmul {name}, {size}^3",
                lambda a, b, key, impl, spec=spec: jc.math.matmul(a, b, spec, key, impl=impl),
                (normal(size, size), normal(size, size), key),
                (*whole, key),
                macs=size**3,
                target=target,
            )
        )
    for kind, block in (("int8", 128), ("int8", 32), ("float8_e4m3fn", 128), ("float8_e4m3fn", 32)):
        found.append(blocks_row(kind, block, product))
    for m in (1, 16, product):
        found += dequantize_rows(m, 2 * product, normal)
    return found


def matrix_unit(operands: str, accumulate: str) -> jc.MatmulSpec:
    return jc.MatmulSpec(operands, accumulate=accumulate, order="matrix_unit(32)")


def scaled_row(name: str, op: Callable[..., Any], text: str, wide: Any, little: Any) -> Row:
    return Row(
        name,
        lambda x, impl: op(x, spec=jc.Spec(text), impl=impl),
        (wide,),
        (little,),
        target=">= 80 % of copy" if name.startswith("mxfp8") else "",
    )


def blocks_row(kind: str, block: int, size: int) -> Row:
    """Codes whose scales change along the sum; small integers, so that sums of float8 are exact, too."""
    rng = np.random.default_rng(2)

    def inputs(m: int, n: int, k: int) -> tuple[Any, ...]:
        codes = [rng.integers(-4, 5, (1, rows, k)).astype(jnp.dtype(kind)) for rows in (m, n)]
        scales = [np.exp(rng.standard_normal((1, rows, -(-k // block)), np.float32)) for rows in (m, n)]
        return *codes, *scales

    static: Any = {"names": ("x_scale", "w_scale"), "block": block, "dtype": "bfloat16"}
    return Row(
        f"{kind} in blocks of {block}, {size}^3",
        lambda *args, impl: product_of_blocks_op(*args, **static, impl=impl),
        inputs(size, size, size),
        inputs(65, 71, 388),
        macs=size**3,
    )


def dequantize_rows(m: int, side: int, normal: Callable[..., Any]) -> list[Row]:
    def row(text: str, group: int) -> Row:
        fmt = parse_format(text)

        def inputs(m: int, k: int, n: int) -> tuple[Any, ...]:
            rng = np.random.default_rng(1)
            codes = rng.integers(0, 120, (k, n * fmt.bits // 8)).astype(np.uint8)
            return normal(m, k, dtype=jnp.bfloat16), codes, np.abs(normal(-(-k // group), n)) + 0.5

        return Row(
            f"{m} x {side} times {text} in groups of {group}",
            lambda x, codes, scales, impl: dequantize_matmul(x, codes, scales, format=fmt, group=group, impl=impl),
            inputs(m, side, side),
            inputs(17, 256, 384),
            macs=m * side * side,
            exact=False,
        )

    return [row("integer4", 128), row("integer8", 128), row("float8_e4m3fn", 128)]


# -- bits first --------------------------------------------------------------------------------------------------------


def compare(row: Row, gpu: Any, cpu: Any) -> str:
    """Whether the kernel and the body on the GPU give what the body gives on the CPU."""
    expected = jax.tree.leaves(on(cpu, row, row.small, "xla")())
    verdicts = []
    for impl in row.impls:
        got = jax.tree.leaves(on(gpu, row, row.small, impl)())
        for want, have in zip(expected, got, strict=True):
            want, have = np.asarray(want), np.asarray(have)
            if row.exact:
                word = np.dtype(f"uint{8 * want.dtype.itemsize}")
                equal = np.array_equal(want.view(word), have.view(word))
                verdicts.append("equal bits" if equal else f"{impl} DIFFERS in {np.sum(want != have)} of {want.size}")
            else:
                worst = np.max(np.abs(want.astype(np.float64) - have.astype(np.float64)))
                error = worst / np.max(np.abs(want.astype(np.float64)))
                verdicts.append("close" if error < 2.0**-6 else f"{impl} DIFFERS by {error:.1e} of the largest")
    return ", ".join(dict.fromkeys(verdicts))


def on(device: Any, row: Row, args: Sequence[Any], impl: str, placed: dict | None = None) -> Callable[[], Any]:
    """A call of the row's function, compiled for a device, on arguments that lie there; it does not wait.

    `placed` holds the arguments that lie there already, by their identity.
    """
    placed = {} if placed is None else placed
    for arg in args:
        if id(arg) not in placed:
            placed[id(arg)] = jax.device_put(arg, device)
    there = [placed[id(arg)] for arg in args]
    with jax.default_device(device):
        run = jax.jit(lambda *args: row.fun(*args, impl=impl)).lower(*there).compile()
    return lambda: run(*there)


def in_parallel(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """The results for all items: XLA compiles on all cores."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, items))


# -- then time ---------------------------------------------------------------------------------------------------------


def measure(cases: dict[str, Callable[[], Any]], repeat: int) -> Timing:
    """Seconds of a call of each case, in random order; a sample is of as many calls as take about 20 ms."""
    timing = Timing({name: [] for name in cases})
    calls = {}
    for name, case in cases.items():
        jax.block_until_ready(case())
        start = time.perf_counter()
        jax.block_until_ready(case())
        calls[name] = int(min(max(0.02 / (time.perf_counter() - start), 1), 100))
    order, shuffle = list(cases), random.Random(0).shuffle
    for turn in range(repeat):
        print(f"\r  run {turn + 1} of {repeat}", end="", file=sys.stderr, flush=True)
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            for _ in range(calls[name] - 1):
                cases[name]()
            jax.block_until_ready(cases[name]())  # one after the other on the device, so the last ends them all
            timing.samples[name].append((time.perf_counter() - start) / calls[name])
    print("\r" + " " * 30 + "\r", end="", file=sys.stderr)
    return timing


def moved(row: Row) -> int:
    """Bytes of the arrays read, and of those written."""
    out = jax.eval_shape(lambda *args: row.fun(*args, impl="xla"), *row.args)
    arrays = [
        leaf for leaf in (*row.args, *jax.tree.leaves(out)) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)


def report(found: Sequence[Row], verdicts: dict[str, str], timing: Timing, copied: int, product: int) -> str:
    bandwidth, rate = copied / timing.median("copy"), product**3 / timing.median("bf16 matmul")
    lines = [
        f"Device copy: {bandwidth / 1e9:,.0f} GB/s (read and written). "
        f"bf16 product, {product}^3: {rate / 1e12:.1f} T-MAC/s.",
        "",
        "| operation | bits | XLA, µs | kernel, µs | XLA / kernel | kernel, or XLA | share | target |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in found:
        xla, *kernels = (timing.median(f"{row.name}, {impl}") for impl in row.impls)
        best = kernels[0] if kernels else xla
        if row.macs:
            figure, share = f"{row.macs / best / 1e12:.2f} T-MAC/s", row.macs / best / rate
        else:
            figure, share = f"{moved(row) / best / 1e9:,.0f} GB/s", moved(row) / best / bandwidth
        compared = f"{best * 1e6:,.0f} | {xla / best:.2f}" if kernels else "– | –"
        lines.append(
            f"| {row.name} | {verdicts[row.name]} | {xla * 1e6:,.0f} | {compared} | "
            f"{figure} | {100 * share:.0f} % | {row.target} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", type=Path, help="a file that the table is written to")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that every row runs")
    parser.add_argument("--bits", action="store_true", help="only compare the bits")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--device", choices=("cuda", "tpu", "cpu"), default="cuda", help="cpu: a rehearsal of bits")
    options = parser.parse_args()
    try:
        gpu, cpu = jax.devices(options.device)[0], jax.devices("cpu")[0]
    except RuntimeError:
        sys.exit("benchmarks/gpu.py needs an NVIDIA GPU or a TPU, and JAX with it: pip install 'jax[cuda13]'")
    side, product = (1024, 512) if options.small else (8192, 4096)
    found = rows(side, product)
    print(f"{gpu.device_kind}, JAX {jax.__version__}; {len(found)} operations: bits", file=sys.stderr)

    def verdict(row: Row) -> str:
        try:
            found = compare(row, gpu, cpu)
        except Exception as error:  # one that fails shall not cost the others their figures
            found = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
        print(f"  {row.name}: {found}", file=sys.stderr)
        return found

    verdicts = dict(zip([row.name for row in found], in_parallel(verdict, found), strict=True))
    if options.bits:
        sys.exit(any("DIFFERS" in verdict or "FAILED" in verdict for verdict in verdicts.values()))
    able = [row for row in found if not verdicts[row.name].startswith("FAILED")]
    x = jax.device_put(np.ones((side, side), np.float32), gpu)
    a = jax.device_put(np.ones((product, product), np.float32).astype(jnp.bfloat16), gpu)
    copy, multiply = jax.jit(jnp.copy), jax.jit(lambda a: jnp.matmul(a, a))
    cases: dict[str, Callable[[], Any]] = {"copy": lambda: copy(x), "bf16 matmul": lambda: multiply(a)}
    placed: dict = {}
    pairs = [(row, impl) for row in able for impl in row.impls]
    calls = in_parallel(lambda pair: on(gpu, pair[0], pair[0].args, pair[1], placed), pairs)
    cases |= {f"{row.name}, {impl}": call for (row, impl), call in zip(pairs, calls, strict=True)}
    timing = measure(cases, options.repeat)
    table = f"{gpu.device_kind}, JAX {jax.__version__}.\n\n" + report(able, verdicts, timing, 2 * x.nbytes, product)
    failed = [f"* {row.name}: {verdicts[row.name]}" for row in found if row not in able]
    table += "\n\n" + "\n".join(failed) if failed else ""
    print(table)
    if options.table is not None:
        write_atomically(options.table, lambda file: file.write(f"# Kernels on a GPU\n\n{table}\n".encode()))
    if any("DIFFERS" in verdict or "FAILED" in verdict for verdict in verdicts.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
