"""The kernels of the matrix product, run without their chips, against the portable body bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels.compile_round import KINDS, MODES
from _kernels.quickly import compiled
from jax.experimental.pallas import mosaic_gpu
from jax.experimental.pallas import tpu as pltpu

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.matmul.matmul import MatmulPlan, matmul_body
from jchop._core.rounding.random_bits import seed_words
from jchop._kernels.products import matmul_gpu, matmul_hopper, matmul_tpu
from jchop._kernels.products.matmul import MatmulGpuTiling, MatmulTpuTiling, hopper_dot_tiling, matmul_op, refuse_dots
from jchop._kernels.products.product_of_blocks import HopperTiling
from jchop._spec.accumulation import MatmulSpec

mosaic: Any = mosaic_gpu


def on_gpu(*arrays: Any, spec: MatmulSpec, tiling: Any = None, **more: Any) -> jax.Array:
    """The kernel of the order; that of units is interpreted as on a GPU."""
    if spec.order.kind != "matrix_unit":
        return matmul_gpu.gpu_matmul(*arrays, spec=spec, tiling=tiling, **more)
    if jax.__version_info__ < (0, 11):
        pytest.skip("this JAX does not interpret Mosaic GPU")
    with mosaic.force_gpu_interpret_mode(mosaic.InterpretGPUParams()):
        return matmul_hopper.hopper_matmul_of_dots(*arrays, spec=spec)


KERNELS: dict[str, Callable[..., jax.Array]] = {"tpu": matmul_tpu.tpu_matmul, "gpu": on_gpu}
#: Tilings that cut even small products into several tiles along every axis.
SMALL: dict[str, Any] = {"tpu": MatmulTpuTiling(16, 128, 128, 8), "gpu": MatmulGpuTiling(8, 4)}
ORDERS = ("sequential", "blocked(8)", "pairwise", "matrix_unit(16)")
Shape = tuple[int, int, int, int]  # batch, m, k, n
SEEDS = jnp.stack([*seed_words(jax.random.key(1)), *seed_words(jax.random.key(2))])


def spread(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> np.ndarray:
    """Numbers of many magnitudes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-5, 6, shape))).astype(dtype)


def small_integers(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> np.ndarray:
    """Integers whose products sum up exactly, in whatever order, and none of which is a zero with a sign."""
    rng = np.random.default_rng(seed)
    return (rng.integers(1, 9, shape) * rng.choice([-1, 1], shape)).astype(dtype)


def operands(spec: MatmulSpec, shape: Shape, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    batch, m, k, n = shape
    draw = small_integers if spec.order.kind == "matrix_unit" else spread
    both = draw((batch, m, k), 1, dtype), draw((batch, k, n), 2, dtype)
    return both if spec.operands is None else tuple(jc.round_to_format(x, spec.operands) for x in both)  # type: ignore


def seeds(spec: MatmulSpec) -> tuple[jax.Array, ...]:
    return (SEEDS,) if MatmulPlan(spec, CARRIERS["float32"], 1).draws else ()


@lru_cache
def expected(spec: MatmulSpec, shape: Shape, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(compiled(partial(matmul_body, spec=spec))(*operands(spec, shape, dtype), *seeds(spec)))


def run(kernel: str, spec: MatmulSpec, a: Any, b: Any, *drawn: Any, tiling: Any = None) -> np.ndarray:
    fun = partial(KERNELS[kernel], spec=spec, tiling=tiling, interpret=True)
    return np.asarray(compiled(fun)(*map(jnp.asarray, (a, b, *drawn))))


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """Equal dtypes, shapes and bits, but for the bits of NaN."""
    unsigned = f"uint{8 * x.dtype.itemsize}"
    bits = [np.where(np.isnan(v), -1, v.view(unsigned).astype(object)) for v in (x, y)]
    return x.dtype == y.dtype and x.shape == y.shape and bool((bits[0] == bits[1]).all())


def assert_equal_to_body(
    kernel: str, spec: MatmulSpec, shape: Shape, dtype: Any = np.float32, tiling: Any = None
) -> None:
    result = run(kernel, spec, *operands(spec, shape, dtype), *seeds(spec), tiling=tiling)
    want = expected(spec, shape, dtype)
    assert same_bits(result, want), f"{(result != want).sum()} of {want.size} differ under {spec}, {shape}"


# -- the table ---------------------------------------------------------------------------------------------------------

#: Several tiles along every axis, each cut off, under `SMALL`.
CUT: Shape = (2, 67, 133, 35)
#: How products (but in the orders that have none) and sums are rounded.
ROUNDINGS = (
    ("e5m7", "e5m5"),
    ("e5m7:down", "e5m5:up"),
    ("e5m7:toward_zero", "e4m5:saturate:odd"),
    ("e5m7:stochastic", "e5m5:stochastic"),
)


def arithmetic(order: str, product: str | None, accumulate: str | None) -> MatmulSpec:
    unit = order.startswith("matrix_unit")
    return MatmulSpec("e4m3", None if unit else product, accumulate, order)


#: Each order and each rounding on both kernels; half of the rest.
TABLE = [
    (ROUNDINGS[(i + j) % 4], order, kernel)
    for i, order in enumerate(ORDERS)
    for j in range(4)
    for k, kernel in enumerate(KERNELS)
    if (j + k) % 2 == 0
]


#: The heuristic's tilings, of which each shape fills a part.
SHAPES: tuple[Shape, ...] = ((1, 1, 1, 1), (3, 7, 5, 3), (1, 16, 16, 33), (1, 129, 65, 37))


WHOLE = [(SHAPES[(i + j) % 4], order, kernel) for i, order in enumerate(ORDERS) for j, kernel in enumerate(KERNELS)]


#: Ways through the kernels that the table does not take.
OTHERS: dict[str, tuple[MatmulSpec, Shape]] = {
    "sums of the carrier": (MatmulSpec("e4m3"), (1, 9, 21, 5)),
    "operands of the carrier": (MatmulSpec(None, "e8m15:up", "e8m15:odd"), (1, 9, 21, 5)),
    "fused": (MatmulSpec(None, None, "e8m9:stochastic", fused=True), (1, 9, 21, 5)),
    "fused in blocks": (MatmulSpec("e5m10", None, "fixed8.4", "blocked(5)", fused=True), (1, 9, 21, 5)),
    "a block longer than a part": (MatmulSpec("e4m3", "e5m7", "e5m5", "blocked(200)"), (1, 9, 270, 5)),
    "blocks across parts": (MatmulSpec("e4m3", "e5m7", "e5m5:stochastic", "blocked(100)"), (1, 9, 270, 5)),
    "several column tiles": (MatmulSpec("e4m3", "e5m7", "e5m5:stochastic", "pairwise"), (2, 9, 6, 130)),
    "pairwise, a power of two": (MatmulSpec("e4m3", None, "e5m5", "pairwise"), (1, 3, 256, 3)),
    "pairwise, two": (MatmulSpec("e4m3", None, "e5m5", "pairwise"), (1, 3, 2, 3)),
    "short blocks of a unit": (MatmulSpec("e4m3", None, "e5m5", "matrix_unit(5)"), (2, 9, 133, 5)),
    "single products in a unit": (MatmulSpec("e4m3", None, "e5m5:up", "matrix_unit(1)"), (1, 9, 20, 5)),
    "a unit's block in a part": (MatmulSpec("e4m3", None, "e5m5", "matrix_unit(100)"), (1, 9, 270, 5)),
    "a unit's block of parts": (MatmulSpec("e4m3", None, "e5m5:stochastic", "matrix_unit(200)"), (1, 9, 470, 5)),
    "a unit's block beyond k": (MatmulSpec("e4m3", None, "e5m5", "matrix_unit(1000)"), (1, 9, 20, 5)),
    "a unit with operands of 11 bits": (MatmulSpec("e5m10", None, "e5m5", "matrix_unit(16)"), (1, 9, 20, 5)),
    "a unit with operands of tf32": (MatmulSpec("tf32", None, "e5m5", "matrix_unit(16)"), (1, 9, 20, 5)),
    "a unit with operands of the carrier": (MatmulSpec(None, None, "e5m5", "matrix_unit(16)"), (1, 9, 20, 5)),
    "a unit with several tiles": (MatmulSpec("e5m10", None, "e5m5:stochastic", "matrix_unit(32)"), (2, 133, 70, 70)),
    "aligned, several tiles": (jc.tensor_core("volta", "fp16"), (2, 19, 133, 35)),
    "aligned, in two words": (jc.tensor_core("ampere", "bf16"), (1, 9, 20, 5)),
    "aligned, cut to fewer bits": (MatmulSpec("e4m3", None, "e5m5:down", "aligned(4, 10)"), (1, 9, 10, 5)),
    "aligned, a block longer than k": (jc.tensor_core("hopper", "fp16"), (1, 9, 3, 5)),
    "aligned and promoted": (jc.tensor_core("volta", "fp16", promote_every=8), (1, 9, 21, 5)),
    "aligned and promoted across parts": (jc.tensor_core("volta", "fp16", promote_every=100), (1, 9, 270, 5)),
    "aligned and drawn": (MatmulSpec("e4m3", None, "e5m5:stochastic", "aligned(4, 20)"), (2, 9, 133, 5)),
    "aligned apart": (jc.tensor_core("cdna3", "bf16"), (1, 9, 21, 5)),
    "aligned in halves": (jc.tensor_core("cdna3", "fp8"), (1, 9, 20, 5)),
}


#: Sums in parts, which TPUs have, and units, of which GPUs have their own, on both kernels; of the others one.
ON_BOTH = ("fused in blocks", "blocks across parts", "a unit's block of parts", "aligned and promoted across parts")
#: GPUs have units for tf32 at most.
OF_TPU = ("a unit with operands of the carrier",)
WAYS = [
    (name, kernel)
    for i, name in enumerate(OTHERS)
    for j, kernel in enumerate(KERNELS)
    if name in ON_BOTH or (kernel == "tpu" if name in OF_TPU else (i + j) % 2 == 0)
]


def test_a_unit_leaves_out_the_products_of_other_blocks() -> None:
    """Several blocks in one part of the inner dimension, the last one short."""
    assert_equal_to_body("tpu", MatmulSpec("e4m3", None, "e5m5", "matrix_unit(2)"), (1, 2, 5, 2))


@pytest.mark.parametrize("kernel", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_a_unit_that_aligns_takes_the_products_of_each_block_in_turn(kernel: str) -> None:
    """Two products each, and the last one alone; all sums are exact."""
    a, b = np.array([[[1, 2, 3, 4, 5], [-6, 7, 0, 9, 1]]], np.float32), np.array([[[3], [5], [-7], [11], [13]]])
    got = run(kernel, MatmulSpec("e4m3", order="aligned(2, 20)"), a, b.astype(np.float32))
    assert same_bits(got, (a @ b).astype(np.float32))


DRAWN = ("e5m7:stochastic", "e5m5:stochastic")
#: Names, and: kernel, spec, shape, tiling, and whether in 64-bit mode.
ROWS: dict[str, tuple] = {
    **{
        f"{order}-{rounding}-{kernel}": (kernel, arithmetic(order, *rounding), CUT, SMALL[kernel])
        for rounding, order, kernel in TABLE
    },
    **{f"{order}-{shape}-{kernel}": (kernel, arithmetic(order, None, "e5m5"), shape) for shape, order, kernel in WHOLE},
    **{f"{name}-{kernel}": (kernel, *OTHERS[name], SMALL[kernel]) for name, kernel in WAYS},
    **{
        f"{order}-x64-{kernel}": (kernel, arithmetic(order, *DRAWN), CUT, SMALL[kernel], True)
        for order, kernel in (("sequential", "gpu"), ("pairwise", "tpu"))
    },
}


@pytest.mark.in_turn(64)
@pytest.mark.parametrize("name", ROWS)
def test_equals_the_body(name: str) -> None:
    row: tuple[Any, ...] = (*ROWS[name], *(None, False)[len(ROWS[name]) - 3 :])
    kernel, spec, shape, tiling, x64 = row
    with jax.enable_x64(x64):
        assert_equal_to_body(kernel, spec, shape, tiling=tiling)


@pytest.mark.smoke
def test_the_table_rounds_the_sums_of_units() -> None:
    """The integers above are exact in a block but not in the accumulator, or the tests would show nothing."""
    spec = arithmetic("matrix_unit(16)", None, "e5m5")
    a, b = operands(spec, CUT)
    assert np.mean(expected(spec, CUT) != a @ b) > 0.5


#: Operands of which the sums have the lengths of the table of rounding.
LENGTHS: tuple[Shape, ...] = (
    (1, 1, 1, 1), (1, 7, 7, 7), (1, 2, 127, 3), (1, 3, 128, 2), (2, 1, 129, 2), (1, 2, 1025, 1), (1, 37, 101, 2),
    (1, 8, 128, 17), (3, 5, 257, 1), (1, 3, 0, 2),
)  # fmt: skip
#: Each kind with one kernel, one shape and one order; each row has a third of the modes. No operation has a codebook
#: for its results.
SUMMED = [kind for kind in KINDS if not kind.startswith("codebook")]
KINDS_IN_TURN = [
    pytest.param(
        ("tpu", "gpu")[(i + 1) % 3 > 0], kind, LENGTHS[3 * i % 10], ORDERS[(i + i // 4) % 4], MODES[i % 3 :: 3], id=kind
    )
    for i, kind in enumerate(SUMMED)
]


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("kernel", "kind", "shape", "order", "modes"), KINDS_IN_TURN)
def test_every_kind_and_mode(kernel: str, kind: str, shape: Shape, order: str, modes: tuple[str, ...]) -> None:
    """Products and sums of one kind of format, in one compiled function for some modes."""
    specs = [arithmetic(order, f"{kind}:{mode}", f"{kind}:{mode}") for mode in modes]
    a, b = map(jnp.asarray, operands(specs[0], shape))

    @compiled
    def kernels(a: jax.Array, b: jax.Array) -> list[jax.Array]:
        return [KERNELS[kernel](a, b, *seeds(spec), spec=spec, interpret=True) for spec in specs]

    @compiled
    def bodies(a: jax.Array, b: jax.Array) -> list[jax.Array]:
        return [matmul_body(a, b, *seeds(spec), spec=spec) for spec in specs]

    for spec, got, want in zip(specs, kernels(a, b), bodies(a, b), strict=True):
        assert same_bits(np.asarray(got), np.asarray(want)), spec


@pytest.mark.in_turn(64)
@pytest.mark.parametrize("order", [*ORDERS, "matrix_unit(200)"])
def test_a_simulated_tpu(order: str) -> None:
    """Memory that nothing has been written to is NaN there, and what lies outside an array cannot be read."""
    spec = arithmetic(order, "e5m7:stochastic", "e5m5:stochastic")
    fun = partial(matmul_tpu.tpu_matmul, spec=spec, tiling=SMALL["tpu"], interpret=pltpu.InterpretParams())
    result = compiled(fun)(*map(jnp.asarray, operands(spec, CUT)), *seeds(spec))
    assert same_bits(np.asarray(result), expected(spec, CUT))


@pytest.mark.parametrize("kernel", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_special_values(kernel: str) -> None:
    """Infinities, NaN, zeros of both signs and subnormals of the carrier, beside ordinary numbers."""
    rng = np.random.default_rng(3)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, -1.5, 1.0], np.float32)
    weights = np.array([15, 15, 1, 1, 1, 10, 10, 5, 21, 21]) / 100
    a, b = (rng.choice(special, shape, p=weights) for shape in ((1, 24, 12), (1, 12, 24)))
    for spec in (MatmulSpec(None, None, "bfloat16:down"), MatmulSpec("e5m10", "e5m10", "e5m10")):
        if spec.operands is not None:
            a, b = (jc.round_to_format(x, spec.operands) for x in (a, b))
        want = np.asarray(compiled(partial(matmul_body, spec=spec))(a, b))
        assert {np.isnan(want).any(), np.isinf(want).any(), (want == 0).any()} == {True}
        assert same_bits(run(kernel, spec, a, b), want), spec


# -- matrix units whose sums are not exact -----------------------------------------------------------------------------


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("form", "kernel"), [("bfloat16", "gpu"), (None, "tpu")])
def test_inexact_sums_of_units_stay_within_their_bound(form: str | None, kernel: str) -> None:
    """Each of k products is in at most k sums of the carrier: an error of k u of it (Higham 2002, section 3.1)."""
    k = 270
    spec = MatmulSpec(form, order="matrix_unit(100)")
    a, b = (spread(shape, seed) for shape, seed in (((1, 20, k), 4), ((1, k, 20), 5)))
    if form:
        a, b = jc.round_to_format(a, form), jc.round_to_format(b, form)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = 1.01 * (k + 1) * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64))
    error = np.abs(run(kernel, spec, a, b, tiling=SMALL[kernel]) - exact)
    assert (error <= bound).all() and error.max() > 0


# -- transformations, empty products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_vmap_over_operands_and_seeds(kernel: str) -> None:
    spec = arithmetic("sequential", "e5m7:stochastic", "e5m5:stochastic")
    a, b = operands(spec, (3, 9, 6, 5))
    keys = jnp.stack([SEEDS, SEEDS + jnp.uint32(1), SEEDS + jnp.uint32(2)])
    fun = partial(KERNELS[kernel], spec=spec, tiling=SMALL[kernel], interpret=True)
    mapped = compiled(jax.vmap(fun, in_axes=(0, None, 0)))(jnp.asarray(a)[:, None], jnp.asarray(b)[:1], keys)
    body = compiled(partial(matmul_body, spec=spec))
    for i in range(3):
        assert same_bits(np.asarray(mapped[i]), np.asarray(body(a[i : i + 1], b[:1], keys[i])))


@pytest.mark.parametrize("kernel", KERNELS)
def test_empty_products_and_sums(kernel: str) -> None:
    shapes = ((1, 3, 0, 4), (0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 2, 0), (0, 0, 0, 0))
    for (batch, m, k, n), order in itertools.product(shapes, ORDERS):
        spec = arithmetic(order, None, "e5m5")
        result = KERNELS[kernel](jnp.ones((batch, m, k)), jnp.ones((batch, k, n)), spec=spec, interpret=True)
        assert same_bits(np.asarray(result), np.zeros((batch, m, n), np.float32)), (batch, m, k, n, order)


# -- tilings -----------------------------------------------------------------------------------------------------------

SIZES = (1, 7, 8, 100, 128, 129, 1000, 4096, 70_000)


def test_tpu_tilings_fit_on_chip() -> None:
    for order in (*ORDERS, "matrix_unit(4096)", "aligned(32, 25)", "aligned(56, 25, promote_every=112)"):
        check_tilings(order)


def check_tilings(order: str) -> None:
    spec = MatmulSpec("e4m3", accumulate="e5m5", order=order)
    for m in SIZES:
        for k in SIZES:
            tiling = MatmulTpuTiling.for_shape(m, 4096, k, spec)
            scratch = matmul_tpu.matmul_scratch(MatmulPlan(spec, CARRIERS["float32"], k), tiling)
            parts = 2 if spec.order.aligned else 1  # significands and exponents
            moved = parts * tiling.block_k * (tiling.block_m + tiling.block_n) + tiling.block_m * tiling.block_n
            assert 4 * (2 * moved + sum(int(np.prod(shape)) for shape in scratch)) <= 12 << 20, (m, k, tiling)
            assert tiling.block_m < m + max(8, tiling.rows)


def test_a_step_of_dots_is_a_block_in_whole_rows_of_shared_memory() -> None:
    for form, block in itertools.product(("e4m3", "e5m10", "tf32"), (1, 5, 16, 32, 100, 128, 129, 256)):
        plan = MatmulPlan(MatmulSpec(form, accumulate="e5m5", order=f"matrix_unit({block})"), CARRIERS["float32"], 4096)
        tiling, itemsize = hopper_dot_tiling(plan), 4 if form == "tf32" else 2
        if tiling is None:
            assert block * itemsize > 256
            continue
        size = tiling.depth * itemsize
        assert tiling.depth >= block and (size in (32, 64) or size % 128 == 0)
        assert tiling.stages >= 2 and tiling.stages * size * (2 * tiling.rows + tiling.columns) <= 200 << 10


def test_what_the_kernel_of_units_refuses() -> None:
    def why(spec: MatmulSpec, dtype: str = "float32") -> str:
        return str(refuse_dots(*(jax.ShapeDtypeStruct((1, 300, 300), dtype),) * 2, spec=spec))

    assert (
        why(MatmulSpec("tf32", order="matrix_unit(128)")) == why(MatmulSpec("e4m3", order="matrix_unit(256)")) == "None"
    )
    assert "two blocks at a time" in why(MatmulSpec("tf32", order="matrix_unit(256)"))
    assert "operands=None" in why(MatmulSpec(order="matrix_unit(16)"))
    assert "dtype float64" in why(MatmulSpec("e4m3", order="matrix_unit(16)"), "float64")
    assert "not summed by matrix units" in why(MatmulSpec("e4m3"))


def test_tilings_are_checked() -> None:
    for make, message in (
        (lambda: MatmulTpuTiling(12, 128, 128, 8), "block_m=12 must be a multiple of 8"),
        (lambda: MatmulTpuTiling(16, 100, 128, 8), "block_n=100 must be a multiple of 128"),
        (lambda: MatmulTpuTiling(16, 128, 128, 0), "rows=0 must be"),
        (lambda: MatmulGpuTiling(12, 4), "block_n=12 must be a multiple of 8"),
        (lambda: HopperTiling(96, 128, 128, 4), "rows=96 must be a multiple of 64"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


# -- the operation -----------------------------------------------------------------------------------------------------


def lowered_for_tpu(dtype: str = "float32", k: int = 5, **static: Any) -> str:
    spec = static.pop("spec", MatmulSpec("e4m3", accumulate="e5m5"))
    a, b = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in ((1, 4, k), (1, k, 3)))
    with jax.enable_x64(dtype == "float64"):
        fun = jax.jit(partial(matmul_op, spec=spec, **static))
        return fun.trace(a, b).lower(lowering_platforms=("tpu",)).as_text()


def test_the_operation_takes_the_kernel_where_it_can() -> None:
    assert "tpu_custom_call" in lowered_for_tpu()
    assert "tpu_custom_call" in lowered_for_tpu(impl="pallas")
    assert "tpu_custom_call" not in lowered_for_tpu(impl="xla")
    assert "tpu_custom_call" not in lowered_for_tpu("float64")


def test_the_operation_says_why_it_cannot() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "float64"}, "dtype float64, and the TPU kernel takes float32"),
        ({"k": 1 << 30}, "inner dimension is 1073741824"),
    ]
    for arguments, message in refused:
        with pytest.raises(NotImplementedError, match=message):
            lowered_for_tpu(impl="pallas", **arguments)


def test_what_kernels_of_aligned_sums_refuse() -> None:
    from jchop._kernels.products import matmul

    for spec, dtype, kernels, reason in (
        (jc.tensor_core("blackwell", "mxfp8"), "float32", "tpu gpu", "have scales"),
        (jc.tensor_core("blackwell", "nvfp4"), "float32", "tpu gpu", "has no kernel"),
        (MatmulSpec(None, order="aligned(8, 25)"), "float32", "tpu gpu", "products of more than 24 bits"),
        (jc.tensor_core("volta", "fp16"), "float64", "tpu gpu", "float64"),
        (MatmulSpec("e4m3", order="aligned(33, 25)"), "float32", "tpu", "blocks of 33 products do not fill parts"),
        (jc.tensor_core("hopper", "fp8"), "float32", "", ""),
        (jc.tensor_core("cdna3", "fp8", promote_every=128), "float32", "", ""),
    ):
        a = jax.ShapeDtypeStruct((1, 4, 200), dtype)
        for kernel, refuse in (("tpu", matmul._refuse_tpu_matmul), ("gpu", matmul._refuse_gpu_matmul)):
            found = refuse(a, a, spec=spec)
            assert (found is None) if kernel not in kernels else (reason in str(found)), (spec, kernel)


def test_empty_sums_of_aligned_blocks_have_a_kernel() -> None:
    from jchop._kernels.products.matmul import _refuse_tpu_matmul

    empty, spec = jax.ShapeDtypeStruct((1, 4, 0), "float32"), MatmulSpec("e4m3", order="aligned(24, 25)")
    assert _refuse_tpu_matmul(empty, empty, spec=spec) is None
