"""The kernels of the product with a matrix of codes and group scales, interpreted, and the operation around them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _core.matmul.test_dequantize_matmul import DTYPES, FORMATS, FOUR, exact_data, random_data, rounded, within
from _kernels.fragments import array_of, call_in_turn, mma, registers_of
from _kernels.quickly import compiled

from jchop._kernels.products import dequantize_matmul_gpu, dequantize_matmul_tpu
from jchop._kernels.products.dequantize_matmul import (
    GPU_KERNEL,
    DequantizeMatmulGpuTiling,
    DequantizeMatmulProblem,
    DequantizeMatmulTpuTiling,
    dequantize_matmul,
    dequantize_matmul_op,
)
from jchop._spec.spec import as_spec
from jchop.formats import CodebookFormat

Shape = tuple[int, int, int, int]
KERNELS: dict[str, Callable[..., jax.Array]] = {
    "tpu": dequantize_matmul_tpu.tpu_dequantize_matmul,
    "gpu": dequantize_matmul_gpu.gpu_dequantize_matmul,
}
#: m, k, n, group, for TPUs. Nothing divides anything, or a group lasts for several steps, or there is but one.
SHAPES: list[Shape] = [(3, 100, 7, 32), (17, 1100, 300, 48), (1, 1300, 5, 640), (2, 1500, 9, 2000)]
#: For GPUs: tiles that overlap, rows that are not divided by tiles, several spans of a group, several loads of a span.
GPU_SHAPES: list[Shape] = [(3, 96, 520, 32), (17, 192, 312, 48), (1, 768, 256, 384), (2, 512, 528, 512)]
SHAPES_OF = {"tpu": SHAPES, "gpu": GPU_SHAPES}


def interpret(platform: str, name: str, group: int, *arrays: Any, tiling: Any = None) -> np.ndarray:
    fun = partial(KERNELS[platform], format=FORMATS[name], group=group, tiling=tiling, interpret=True)
    return np.asarray(compiled(fun)(*arrays))


def check_exact(
    platform: str,
    name: str,
    shape: Shape,
    dtype: str,
    rng: np.random.Generator,
    scale_dtype: str = "float32",
    **more: Any,
) -> None:
    x, codes, scales, exact = exact_data(rng, name, shape)
    arrays = jnp.asarray(x, dtype), jnp.asarray(codes), jnp.asarray(scales, scale_dtype)
    body = dequantize_matmul(*arrays, format=FORMATS[name], group=shape[3], impl="xla")
    np.testing.assert_array_equal(body, rounded(exact, dtype))
    y = interpret(platform, name, shape[3], *arrays, **more)
    np.testing.assert_array_equal(y, body, strict=True)


EXACT = [
    *((name, dtype, 0) for name in FOUR for dtype in DTYPES),
    *((name, "bfloat16", 0) for name in ("int2", "float4_e2m1fn")),
    *(("int4", "bfloat16", number) for number in (1, 2, 3)),
    ("int8", "float32", 2),
    ("float8_e4m3fn", "bfloat16", 2),
    ("float8_e5m2", "float32", 3),
]


#: The formats and dtypes on one kernel each, but those that GPUs decode in their own way; the shapes on both.
ON_KERNELS = [(row, list(KERNELS)[::-1][i % 2]) for i, row in enumerate(EXACT[:10])]
ON_KERNELS += [(("int2", "bfloat16", 0), "gpu"), (("float4_e2m1fn", "bfloat16", 2), "gpu")]
ON_KERNELS += list(itertools.product(EXACT[10:13], KERNELS))
ON_KERNELS += list(zip(EXACT[13:], ("gpu", "tpu", "gpu"), strict=True))


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("row", "platform"), ON_KERNELS, ids=str)
def test_bit_equal_to_the_body_where_sums_are_exact(platform, row, rng):
    name, dtype, number = row
    shape = SHAPES_OF[platform][number]
    check_exact(platform, name, shape if name != "int2" or platform == "tpu" else (1, 64, 512, 16), dtype, rng, dtype)


TPU_TILINGS = [
    ((40, 2100, 300, 32), DequantizeMatmulTpuTiling(8, 128, 256)),  # several groups in a step
    ((9, 1100, 20, 512), DequantizeMatmulTpuTiling(9, 10, 128)),  # several steps in a group
    ((9, 1100, 20, 256), DequantizeMatmulTpuTiling(9, 10, 256)),  # one group in a step
    ((9, 500, 20, 700), DequantizeMatmulTpuTiling(8, 10, 128)),  # several steps in the only group
    ((9, 60, 20, 7), DequantizeMatmulTpuTiling(9, 10, 60)),  # all groups in one step
]


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("shape", "tiling"), TPU_TILINGS[::-1], ids=str)
def test_tpu_tilings(shape, tiling, rng):
    check_exact("tpu", "int4", shape, "bfloat16", rng, scale_dtype="bfloat16", tiling=tiling)


GPU_TILINGS = [
    ((9, 96, 320, 32), DequantizeMatmulGpuTiling(32, 1, 3)),  # a stretch for each group, and rows that overlap
    ((2, 160, 256, 32), DequantizeMatmulGpuTiling(16, 2, 3)),  # stretches of unequal length, two spans of a group
    ((1, 128, 512, 128), DequantizeMatmulGpuTiling(64)),  # several steps of a group
]


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("shape", "tiling"), GPU_TILINGS[::-1], ids=str)
def test_gpu_tilings(shape, tiling, rng):
    check_exact("gpu", "int4", shape, "bfloat16", rng, tiling=tiling)


def multiply_by_threads(tile: Any, sums: Any, pairs: Any, xs: Any) -> Any:
    """The sums after a span by the registers of each thread, and the order in which the kernel gives them to units."""

    def by_thread(layout: Any, numbers: Any) -> list[np.ndarray]:
        """The pairs of each register of a word."""
        registers = registers_of(layout, np.asarray(numbers).view(np.complex64)[..., 0]).reshape(4, 32, -1, 1)
        return list(np.moveaxis(np.ascontiguousarray(registers).view(np.float32), 2, 0))

    terms = [[by_thread(tile.words, dequantize_matmul_gpu._numbers(term)) for term in each] for each in pairs]
    out = []
    for c, x in zip(sums, xs, strict=True):
        numbers = by_thread(tile.numbers, dequantize_matmul_gpu._numbers(x))
        before = list(np.moveaxis(registers_of(tile.sums, c), 2, 0))
        after = dequantize_matmul_gpu.multiply_registers(before, terms, numbers, mma)
        out.append(jnp.asarray(array_of(tile.sums, np.stack(after, 2))))
    return tuple(out)


#: One row, several, and more than the units take at once; codes of 2, 4 and 8 bits, floats, and numbers of three terms.
BY_THREADS = [
    ("int4", (1, 64, 256, 64), "bfloat16"),
    ("int4", (3, 64, 272, 32), "bfloat16"),
    ("int4", (16, 32, 256, 16), "bfloat16"),
    ("int8", (11, 32, 132, 32), "bfloat16"),
    ("int2", (1, 32, 512, 16), "float32"),
    ("float8_e4m3fn", (2, 32, 128, 32), "bfloat16"),
    ("float8_e5m2", (8, 32, 128, 32), "bfloat16"),
    ("float4_e2m1fn", (2, 32, 256, 32), "float32"),
    ("fixed2.2", (9, 32, 256, 16), "bfloat16"),
    ("uint8", (2, 32, 128, 32), "bfloat16"),
]


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("name", "shape", "dtype"), BY_THREADS, ids=str)
def test_registers_of_threads_give_the_product(name, shape, dtype, rng, monkeypatch):
    """The product of the fragments of `mma.m16n8k16`, which a thread's words and numbers of x become."""
    x, codes, scales, exact = exact_data(rng, name, shape)
    arrays = jnp.asarray(x, dtype), jnp.asarray(codes), jnp.asarray(scales, dtype)
    monkeypatch.setattr(dequantize_matmul_gpu, "call_on_warpgroups", call_in_turn)
    monkeypatch.setattr(dequantize_matmul_gpu._FewRowsTile, "_multiply", multiply_by_threads)
    y = KERNELS["gpu"](*arrays, format=FORMATS[name], group=shape[3], interpret=True)
    np.testing.assert_array_equal(y, rounded(exact, dtype), strict=True)


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(
    ("platform", "name", "dtype"),
    [("gpu", "int8", "float32"), ("tpu", "int4", "bfloat16"), ("gpu", "float8_e4m3fn", "bfloat16")],
)
def test_random_data_within_the_bound(platform, name, dtype, rng):
    shape = (3, 70, 5, 32) if platform == "tpu" else (3, 64, 256, 32)
    arrays, exact, bound = random_data(rng, name, shape, dtype)
    assert within(interpret(platform, name, shape[3], *arrays), exact, bound)


@pytest.mark.parametrize("platform", KERNELS)
def test_infinite_and_nan_codes_stay_in_their_columns(platform):
    """Also in the tile that reaches beyond the arrays, whose excess counts for nothing."""
    k, n = (70, 3) if platform == "tpu" else (64, 132)
    codes = np.zeros((k, n), np.uint8)
    codes[-1, -3:] = [0x7C, 0x7E, 0x3C]  # inf, NaN, 1 of e5m2
    y = interpret(
        platform, "float8_e5m2", 32, np.ones((2, k), np.float32), codes, np.ones((-(-k // 32), n), np.float32)
    )
    np.testing.assert_array_equal(y[:, -3:], [[np.inf, np.nan, 1]] * 2)
    assert not y[:, :-3].any()


@pytest.mark.parametrize("platform", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_vmap(platform, rng):
    both = [exact_data(rng, "int4", (3, 70, 9, 32) if platform == "tpu" else (3, 64, 264, 32)) for _ in range(2)]
    x, codes, scales, exact = (np.stack(two) for two in zip(*both, strict=True))
    kernel = partial(KERNELS[platform], format=FORMATS["int4"], group=32, interpret=True)
    np.testing.assert_array_equal(jax.vmap(kernel)(x, codes, scales), exact.astype(np.float32))
    op = partial(dequantize_matmul_op, format=FORMATS["int4"], group=32)
    np.testing.assert_array_equal(jax.vmap(op)(x, codes, scales), exact.astype(np.float32))


@pytest.mark.parametrize("platform", KERNELS)
def test_empty(platform):
    for shape in ((0, 8, 4, 4), (2, 0, 4, 4), (2, 8, 0, 4)):
        check_empty(platform, shape)


def check_empty(platform, shape):
    m, k, n, group = shape
    arrays = np.ones((m, k), np.float32), np.zeros((k, -(-n // 2)), np.uint8), np.ones((-(-k // group), n), np.float32)
    np.testing.assert_array_equal(
        interpret(platform, "int4", group, *arrays), np.zeros((m, n), np.float32), strict=True
    )


# -- the operation -----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_leading_axes(rng):
    x, codes, scales, exact = exact_data(rng, "int8", (12, 70, 9, 32))
    op = jax.jit(partial(dequantize_matmul, format=FORMATS["int8"], group=32))
    for leading in ((3, 4), (2, 3, 2), (12,)):
        y = op(x.reshape(*leading, 70), codes, scales)
        np.testing.assert_array_equal(y, exact.reshape(*leading, 9).astype(np.float32), strict=True)
    np.testing.assert_array_equal(op(x[0], codes, scales), exact[0].astype(np.float32))


def test_codebooks_of_few_levels_have_kernels() -> None:
    fmt = as_spec("nf4(group=32)", "", scaled=True).element
    assert isinstance(fmt, CodebookFormat)
    draw = np.random.default_rng(3)
    codes, scales = draw.integers(0, 256, (64, 132)).astype(np.uint8), draw.uniform(0.5, 2, (2, 264)).astype(np.float32)
    x = jnp.asarray(draw.normal(size=(3, 64)), jnp.float32)
    numbers = np.asarray(fmt.levels)[np.stack([codes & 15, codes >> 4], -1).reshape(64, 264)] * scales.repeat(32, 0)
    for kernel in KERNELS.values():
        y = kernel(x, jnp.asarray(codes), jnp.asarray(scales), format=fmt, group=32, interpret=True)
        np.testing.assert_allclose(y, np.asarray(x, np.float64) @ numbers, rtol=1e-5, atol=1e-5)


def test_refused_tilings():
    for make, message in (
        (lambda: DequantizeMatmulTpuTiling(0, 128, 128), "block_m=0 must be an integer >= 1"),
        (lambda: DequantizeMatmulGpuTiling(12), "depth=12 must be a multiple of 16"),
        (lambda: DequantizeMatmulGpuTiling(16, splits=0), "splits=0 must be an integer >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def fits(tiling: DequantizeMatmulTpuTiling, problem: DequantizeMatmulProblem) -> bool:
    """Whether blocks are whole axes or whole registers, and a step has whole groups, or a part of one."""
    whole_rows = tiling.block_m == problem.m or tiling.block_m % 8 == 0
    whole_columns = tiling.block_n == problem.width or tiling.block_n % 128 == 0
    divides = tiling.divides(problem) and (problem.groups == 1 or problem.group % tiling.block_k == 0)
    whole_groups = divides or tiling.block_k % (8 * problem.group) == 0
    steps = tiling.block_k == problem.k or (tiling.block_k % 128 == 0 and whole_groups)
    return whole_rows and whole_columns and steps and -(-tiling.block_k // problem.group) <= 32


def problems() -> list[DequantizeMatmulProblem]:
    return [
        DequantizeMatmulProblem(m, k, width, min(group, k), parts, itemsize)
        for m in (1, 16, 300, 4096)
        for k in (1, 100, 1000, 4096, 20000)
        for width in (1, 300, 4096)
        for group in (1, 16, 32, 100, 128, 4128, 20000)
        for parts, itemsize in ((1, 4), (2, 2))
    ]


def test_tpu_heuristic():
    """It fits, within the memory. There is none for hundreds of tiny groups, nor for large ones of odd size."""
    without = set()
    for problem in problems():
        tiling = DequantizeMatmulTpuTiling.for_shape(problem)
        if tiling is None:
            without.add((problem.k, problem.group))
            continue
        assert fits(tiling, problem), (problem, tiling)
        assert tiling._bytes(problem) <= 10 << 20
    assert without == {(100, 1), (1000, 1), (4096, 1), (20000, 1), (20000, 4128)}


def test_gpu_heuristic():
    """Whole words, spans and steps; none for narrow or odd matrices, and for groups of few rows."""
    for problem in problems():
        tiling = DequantizeMatmulGpuTiling.for_shape(problem)
        if tiling is None:
            assert problem.width < 300 or problem.group % 16 or problem.k % problem.group, problem
            continue
        rows = tiling.depth * tiling.loads
        assert problem.width % 4 == 0 and problem.width >= 128
        assert problem.group % tiling.depth == problem.k % problem.group == problem.k % rows == 0
        assert rows <= 128 and tiling.splits <= problem.k // rows


def test_the_kernel_of_gpus_is_for_few_rows_of_whole_words():
    def why(x: tuple[int, int], n: int, group: int, dtype: str = "float32") -> str:
        arrays = [((x[1], n // 2), "uint8"), ((x[1] // group, n), "float32")]
        avals = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in ((x, dtype), *arrays)]
        assert GPU_KERNEL.profitable(*avals) == (x[0] <= 16)
        return str(GPU_KERNEL.refuse(*avals, format=FORMATS["int4"], group=group))

    assert why((1, 256), 512, 32) == why((17, 256), 512, 32) == "None"
    for n, group in ((511, 32), (64, 32), (512, 2)):
        assert "no tile of whole words" in why((1, 256), n, group)
    assert "dtype float64" in why((1, 256), 512, 32, "float64")


def test_a_row_of_float32_is_the_sum_of_three():
    """Also with numbers of 24 bits, and at the end of float32."""
    x = np.zeros((1, 64), np.float32)
    x[0, :2] = 1 + 2.0**-23, np.finfo(np.float32).max
    codes, ones = np.zeros((64, 128), np.uint8), np.ones((2, 128), np.float32)
    codes[range(2), range(2)] = 1
    np.testing.assert_array_equal(interpret("gpu", "int8", 32, x, codes, ones)[0, :2], x[0, :2])
