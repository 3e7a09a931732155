"""The products of an NVIDIA GPU beside `jc.tensor_core`, bit for bit.

    python benchmarks/gpu_tensor_cores.py                # the unit of the GPU at hand
    python benchmarks/gpu_tensor_cores.py --unit ampere  # compared with another one

Each product runs through XLA, through PyTorch, and in one warp by `mma.sync` (CuPy), where these are installed. A table
says what `jc.probe` finds, and how many results are not the model's, for each length of the sum: of normal numbers, and
of numbers of very different magnitudes.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jchop as jc

Matmul = Callable[[np.ndarray, np.ndarray], np.ndarray]
UNITS = {8: {0: "ampere", 6: "ampere", 9: "ada"}, 9: {0: "hopper"}, 10: {0: "blackwell"}}
FORMATS = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn", "tf32": "float32"}
LENGTHS = (32, 64, 128, 256, 1024)
SIDE = 128

#: One warp for 16 x 8 results: LENGTH numbers of the sum at a time, of BYTES bytes each.
MMA = r"""
extern "C" __global__ void product(const unsigned char* A, const unsigned char* B, float* D, int N, int K) {
  const int per = 4 / BYTES, g = threadIdx.x >> 2, t = threadIdx.x & 3, r = 16 * blockIdx.y, c = 8 * blockIdx.x;
  float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
  for (int k = 0; k < K; k += LENGTH) {
    auto a = [&](int i, int j) {
      return *(const unsigned*)(A + BYTES * ((r + i) * K + k + per * (t + j)));
    };
    auto b = [&](int j) {
      unsigned word = 0;
      for (int i = 0; i < per; i++)
        for (int n = 0; n < BYTES; n++)
          word |= (unsigned)B[BYTES * ((k + per * (t + j) + i) * N + c + g) + n] << 8 * (BYTES * i + n);
      return word;
    };
    asm volatile("mma.sync.aligned.SHAPE.row.col.f32.TYPE.TYPE.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a(g, 0)), "r"(a(g + 8, 0)), "r"(a(g, 4)), "r"(a(g + 8, 4)), "r"(b(0)), "r"(b(4)));
  }
  float* p = D + (r + g) * N + c + 2 * t;
  p[0] = d0; p[1] = d1; p[8 * N] = d2; p[8 * N + 1] = d3;
}
"""
KERNELS = {
    "fp16": ("m16n8k16", "f16"),
    "bf16": ("m16n8k16", "bf16"),
    "tf32": ("m16n8k8", "tf32"),
    "fp8": ("m16n8k32", "e4m3"),
}


def by_xla(dtype: str) -> Iterator[tuple[str, Matmul]]:
    """Of the default precision, and of the highest where that is another product."""
    for precision in ("default", "highest") if dtype == "fp8" else ("default",):

        def product(a: Any, b: Any, precision: str = precision) -> Any:
            a, b = (v.astype(FORMATS[dtype]) for v in (a, b))
            how = "tensorfloat32" if dtype == "tf32" else precision
            return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=how, preferred_element_type=jnp.float32)

        compiled = jax.jit(product)
        yield f"XLA, {precision}" if dtype == "fp8" else "XLA", lambda a, b, f=compiled: np.asarray(f(a, b))


def by_torch(dtype: str) -> Iterator[tuple[str, Matmul]]:
    """Of cuBLAS; fp8 with and without its fast sums."""
    if not importlib.util.find_spec("torch"):
        return
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = (torch.from_numpy(v).cuda().to(getattr(torch, FORMATS[dtype])) for v in (a, b))
        return torch.mm(x, y, out_dtype=torch.float32).cpu().numpy() if dtype != "tf32" else (x @ y).cpu().numpy()

    def scaled(a: np.ndarray, b: np.ndarray, fast: bool) -> np.ndarray:
        x = torch.from_numpy(a).cuda().to(torch.float8_e4m3fn)
        y = torch.from_numpy(np.ascontiguousarray(b.T)).cuda().to(torch.float8_e4m3fn).t()
        one = torch.ones((), device="cuda")
        kinds = {"scale_a": one, "scale_b": one, "out_dtype": torch.float32, "use_fast_accum": fast}
        return torch._scaled_mm(x, y, **kinds).cpu().numpy()

    if dtype == "fp8":
        yield "PyTorch, fast sums", partial(scaled, fast=True)
        yield "PyTorch", partial(scaled, fast=False)
    else:
        yield "PyTorch", product


def by_mma(dtype: str) -> Iterator[tuple[str, Matmul]]:
    """One warp for each 16 x 8 results."""
    if not importlib.util.find_spec("cupy"):
        return
    import cupy

    (shape, operand), kind = KERNELS[dtype], jnp.dtype(FORMATS[dtype])
    source = MMA.replace("SHAPE", shape).replace("TYPE", operand).replace("BYTES", str(kind.itemsize))
    kernel = cupy.RawKernel(source.replace("LENGTH", shape.split("k")[1]), "product")

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = (cupy.asarray(np.ascontiguousarray(v.astype(kind)).view(np.uint8)) for v in (a, b))
        out = cupy.zeros((a.shape[0], b.shape[1]), np.float32)
        grid = (b.shape[1] // 8, a.shape[0] // 16)
        kernel(grid, (32,), (x, y, out, np.int32(b.shape[1]), np.int32(a.shape[1])))
        return cupy.asnumpy(out)

    yield "mma.sync", product


def data(dtype: str, kind: str, length: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two matrices of numbers that the operands' type holds; the wide ones are within 2^-6 and 2^6."""

    def draw(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape)
        if kind == "wide":
            x *= np.exp2(rng.integers(-6, 7, shape))
        x = np.clip(x, -400, 400).astype(np.float32)
        return jc.round_to_format(x, "tf32" if dtype == "tf32" else FORMATS[dtype])

    return draw(SIDE, length), draw(length, SIDE)


def differences(product: Matmul, spec: jc.MatmulSpec, dtype: str) -> str:
    """For each length the share of results that are not the model's, for both kinds of data."""
    rng, cpu, found = np.random.default_rng(0), jax.devices("cpu")[0], []
    for length in LENGTHS:
        unequal = []
        for kind in ("normal", "wide"):
            a, b = data(dtype, kind, length, rng)
            with jax.default_device(cpu):
                wanted = np.asarray(jc.math.matmul(jax.device_put(a, cpu), jax.device_put(b, cpu), spec))
            unequal.append(int((product(a, b).view(np.uint32) != wanted.view(np.uint32)).sum()))
        found.append("/".join(map(str, unequal)))
    return " | ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", help="default: that of the GPU's compute capability")
    parser.add_argument("--dtypes", nargs="+", choices=[*FORMATS], default=[*FORMATS])
    options = parser.parse_args()
    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:
        sys.exit("benchmarks/gpu_tensor_cores.py needs an NVIDIA GPU, and JAX with CUDA: pip install 'jax[cuda13]'")
    major, minor = map(int, str(gpu.compute_capability).split("."))
    unit = options.unit or UNITS.get(major, {}).get(minor) or sys.exit(f"no unit is known for {gpu.device_kind}")
    print(f"{gpu.device_kind}, `jc.tensor_core({unit!r}, ...)`; results that differ, of {SIDE}², normal/wide\n")
    print("| type | product | order | k | bits | cut | sums kept | out | rounding | promoted |", end=" ")
    print(*LENGTHS, "", sep=" | ")
    print("|---|" + "---|" * (9 + len(LENGTHS)))
    for dtype in options.dtypes:
        spec = jc.tensor_core(unit, dtype)
        for by in (by_xla, by_torch, by_mma):
            try:
                for name, product in by(dtype):
                    p = jc.probe(product)
                    rows = p.order, p.k, p.bits, p.cut, p.sum_bits, p.out_bits, p.rounding, p.promote_every
                    print(
                        "|",
                        dtype,
                        "|",
                        name,
                        "|",
                        *(f"{v} |" for v in rows),
                        differences(product, spec, dtype),
                        "|",
                        flush=True,
                    )
            except Exception as error:  # the other products shall run
                print(f"{dtype}, {by.__name__}: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main()
