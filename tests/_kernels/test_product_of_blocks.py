"""The kernels of the product of codes whose scales change along the sum, interpreted, beside the body and NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels.quickly import compiled

import jchop as jc
from jchop._kernels.products import product_of_blocks_tpu
from jchop._kernels.products.product_of_blocks import HOPPER_KERNEL, TPU_KERNEL, HopperTiling, ProductOfBlocksTpuTiling
from jchop._kernels.products.product_of_blocks_hopper import hopper_product_of_blocks
from jchop._quantized.products.codes import product_of_blocks_op

#: batch, m, n, k. Nothing divides anything.
SHAPES = [(2, 5, 7, 100), (1, 37, 45, 300), (1, 1, 20, 50), (2, 17, 9, 1100), (1, 70, 130, 64)]
#: The lengths of their blocks: whole ones fill a step.
BLOCKS = [32, 128, 16, 512, 8]


def data(rng: np.random.Generator, shape: tuple[int, ...], within: Mapping[str, bool], kinds: tuple[str, str]) -> Any:
    """Elements, and scales and zero points of blocks (`within`) or of rows."""
    batch, m, n, k, block = shape
    elements = []
    for rows, kind in zip((m, n), kinds, strict=True):
        most = 127 if kind == "int8" else 4  # sums of few small numbers of float8 are exact
        elements.append(rng.integers(-most - 1, most + 1, (batch, rows, k)).astype(jnp.dtype(kind)))
    parts = {}
    for name, changes in within.items():
        size = batch, m if name.startswith("x") else n, -(-k // block) if changes else 1
        parts[name] = (
            rng.integers(-128, 128, size).astype(np.int32)
            if name.endswith("zero")
            else np.exp(rng.normal(0, 3, size)).astype(np.float32)
        )
    return elements, parts


def reference(elements: Any, parts: Mapping[str, np.ndarray], block: int) -> np.ndarray:
    """By whole numbers of NumPy; each scaled sum and each addition is rounded to float32."""
    x, w = (np.asarray(v, np.float64).astype(np.int64) for v in elements)
    k = x.shape[-1]

    def of(name: str, default: Any, g: int) -> Any:
        return parts[name][..., g % parts[name].shape[-1]] if name in parts else default

    total = np.zeros((*x.shape[:2], w.shape[1]), np.float32)
    for g, start in enumerate(range(0, k, block)):
        a, b = (
            v[..., start : start + block] - np.asarray(of(f"{side}_zero", np.int64(0), g))[..., None]
            for side, v in (("x", x), ("w", w))
        )
        term = (a @ np.swapaxes(b, 1, 2)).astype(np.float32)
        if "x_scale" in parts and parts["x_scale"].shape[-1] > 1:
            term = term * of("x_scale", None, g)[..., None]
        if "w_scale" in parts and parts["w_scale"].shape[-1] > 1:
            term = term * of("w_scale", None, g)[:, None, :]
        total = total + term
    if "x_scale" in parts and parts["x_scale"].shape[-1] == 1:
        total = total * parts["x_scale"]
    if "w_scale" in parts and parts["w_scale"].shape[-1] == 1:
        total = total * np.swapaxes(parts["w_scale"], 1, 2)
    return total


def check(rng: np.random.Generator, shape: Any, within: Any, kinds: Any, tiling: Any = None) -> None:
    elements, parts = data(rng, shape, within, kinds)
    static: Any = {"names": tuple(parts), "block": shape[-1], "dtype": "float32"}
    arrays = [jnp.asarray(v) for v in (*elements, *parts.values())]
    kernel = partial(product_of_blocks_tpu.tpu_product_of_blocks, **static, tiling=tiling, interpret=True)
    expected = reference(elements, parts, shape[-1])
    np.testing.assert_array_equal(product_of_blocks_op(*arrays, **static, impl="xla"), expected, strict=True)
    np.testing.assert_array_equal(compiled(kernel)(*arrays), expected, strict=True)


#: Which scales and zero points there are, and whether they change along the sum.
PARTS: list[dict[str, bool]] = [
    {"x_scale": True, "w_scale": True},
    {"x_scale": False, "w_scale": True},
    {"w_scale": True},
    {"x_scale": True, "w_scale": False, "x_zero": True},
    {"x_scale": False, "w_scale": True, "x_zero": False, "w_zero": True},
    {"x_scale": True, "w_scale": True, "x_zero": True, "w_zero": True},
]


def some(rows: list[Any], *default: int) -> list[Any]:
    """Rows for the default run, and the others for the slow one."""
    return [row if i in default else pytest.param(row, marks=pytest.mark.slow) for i, row in enumerate(rows)]


#: Every shape and all parts, the shapes of which each part meets in turn; the smallest one first.
ROWS = [(2, 5), *((3 * i % 5, i) for i in range(len(PARTS))), *((number, 5) for number in (1, 3, 4))]


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("number", "part"), ROWS)
def test_integers_with_scales_and_zero_points(number, part, rng):
    check(rng, (*SHAPES[number], BLOCKS[number]), PARTS[part], ("int8", "int8"))


def test_a_tpu_multiplies_by_the_scales_of_blocks_and_of_rows(rng):
    for within in ({"w_scale": True}, {"x_scale": True, "w_scale": False}):
        elements, parts = data(rng, (1, 2, 3, 256, 128), within, ("int8", "int8"))
        static: Any = {"names": tuple(parts), "block": 128, "dtype": "float32", "interpret": True}
        y = compiled(partial(product_of_blocks_tpu.tpu_product_of_blocks, **static))(*elements, *parts.values())
        np.testing.assert_array_equal(y, reference(elements, parts, 128), strict=True)


_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("number", "kinds"), [(0, (_E4M3, _E5M2)), (3, (_E5M2, _E5M2)), (0, (_E4M3, _E4M3))], ids=str)
def test_float8(number, kinds, rng):
    check(rng, (*SHAPES[number], BLOCKS[number]), {"x_scale": True, "w_scale": True}, kinds)


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(
    "tiling", [ProductOfBlocksTpuTiling(32, 40, 128), ProductOfBlocksTpuTiling(150, 40, 384)], ids=str
)
def test_tilings(tiling, rng):
    check(rng, (2, 150, 40, 300, 64), PARTS[0], ("int8", "int8"), tiling)


def test_nan_and_infinity_stay_in_their_rows():
    """Also beyond the end of a block, where zeros fill up a step."""
    x, w = jnp.ones((1, 3, 40), jnp.float8_e5m2), jnp.ones((1, 4, 40), jnp.float8_e5m2)
    x, w = x.at[0, 1, 20].set(jnp.nan), w.at[0, 2, 39].set(jnp.inf)
    scales = jnp.ones((1, 3, 3)), jnp.ones((1, 4, 3))
    static: Any = {"names": ("x_scale", "w_scale"), "block": 16, "dtype": "float32"}
    y = product_of_blocks_tpu.tpu_product_of_blocks(x, w, *scales, **static, interpret=True)
    np.testing.assert_array_equal(y[0, [0, 2]], [[40, 40, np.inf, 40]] * 2)
    assert np.isnan(y[0, 1]).all()


def test_vmap(rng):
    elements, parts = data(rng, (3, 5, 7, 100, 32), PARTS[0], ("int8", "int8"))
    static: Any = {"names": tuple(parts), "block": 32, "dtype": "float32"}
    x, *others = (jnp.asarray(v) for v in (*elements, *parts.values()))
    kernel = partial(product_of_blocks_tpu.tpu_product_of_blocks, **static, interpret=True)
    w, *scales = (v[:1] for v in others)
    y = compiled(jax.vmap(kernel, (0, None, None, None)))(x[:, None], w, *scales)
    each = [reference((v[None], w), {name: part[:1] for name, part in parts.items()}, 32) for v in x]
    np.testing.assert_array_equal(y, each)


def test_what_is_refused():
    x = w = jax.ShapeDtypeStruct((1, 8, 4 * 10**5), jnp.int8)
    static: Any = {"names": (), "dtype": "float32"}
    assert TPU_KERNEL.refuse(x, w, block=128, **static) is None
    assert "blocks of 48 are no power of two from 8 to 512" in str(TPU_KERNEL.refuse(x, w, block=48, **static))
    assert "blocks of 1024" in str(TPU_KERNEL.refuse(x, w, block=1024, **static))
    assert "dtype float64" in str(TPU_KERNEL.refuse(x, w, names=(), block=128, dtype="float64"))
    wide = jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn)
    assert "float8_e4m3fn and int8" in str(TPU_KERNEL.refuse(x, wide, block=128, **static))


# -- the kernel of Hopper ----------------------------------------------------------------------------------------------

_WITHOUT = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this JAX does not interpret Mosaic GPU")
#: (batch, m, n, k, block), the dtype of the elements, and the scales: tiles that fill the arrays, and that do not.
OF_HOPPER: list[Any] = [
    ((1, 256, 128, 384, 384), "int8", {"x_scale": False, "w_scale": False}),
    ((1, 264, 192, 384, 128), "int8", {"x_scale": False, "w_scale": True}),
    ((2, 8, 64, 256, 128), "float8_e5m2", {"x_scale": True, "w_scale": True}),
    ((1, 136, 64, 640, 640), "float8_e4m3fn", {"w_scale": False}),
    ((1, 16, 64, 96, 32), "float8_e4m3fn", {"x_scale": True, "w_scale": True}),
    ((1, 8, 64, 192, 64), "int8", {"x_scale": False, "w_scale": True, "x_zero": False, "w_zero": True}),
    ((1, 8, 192, 512, 256), "int8", PARTS[5]),
    ((1, 136, 64, 256, 256), "int8", {"x_scale": False, "w_scale": False, "x_zero": False, "w_zero": False}),
]


@_WITHOUT
@pytest.mark.parametrize("case", some(OF_HOPPER, 1, 5), ids=str)
def test_the_kernel_of_hopper(case, rng):
    from jax.experimental.pallas import mosaic_gpu

    mosaic: Any = mosaic_gpu
    shape, kind, within = case
    elements, parts = data(rng, shape, within, (kind, kind))
    static: Any = {"names": tuple(parts), "block": shape[-1], "dtype": "float32"}
    with mosaic.force_gpu_interpret_mode(mosaic.InterpretGPUParams()):
        y = hopper_product_of_blocks(*(jnp.asarray(v) for v in (*elements, *parts.values())), **static)
    np.testing.assert_array_equal(y, reference(elements, parts, shape[-1]), strict=True)


def test_a_warpgroup_of_hopper_writes_its_whole_part():
    """In copies of 64 rows of 128 bytes, which the traced program has one after the other."""
    x, w = (jax.ShapeDtypeStruct((1, rows, 256), "int8") for rows in (264, 192))
    for rows, dtype in ((64, "float32"), (128, "bfloat16")):
        how: Any = {"names": (), "block": 128, "dtype": dtype, "tiling": HopperTiling(rows, 128, 128, 2)}
        copies = str(jax.make_jaxpr(partial(hopper_product_of_blocks, **how))(x, w)).count("copy_smem_to_gmem")
        assert copies * 64 * 128 == rows * 128 * jnp.dtype(dtype).itemsize


def test_what_the_kernel_of_hopper_refuses():
    def why(m: int, n: int, k: int, block: int, kinds: Any = ("int8", "int8"), **static: Any) -> str:
        x, w = (jax.ShapeDtypeStruct((1, rows, k), kind) for rows, kind in zip((m, n), kinds, strict=True))
        return str(HOPPER_KERNEL.refuse(x, w, **{"names": ("x_scale",), "block": block, "dtype": "float32", **static}))

    assert why(8, 64, 256, 128) == why(8, 64, 256, 256) == why(8, 64, 128, 128, ["float8_e5m2"] * 2) == "None"
    assert "m=9 is no multiple of 8" in why(9, 64, 256, 128)
    assert "n=32 is no multiple of 64" in why(8, 32, 256, 128)
    assert why(8, 64, 192, 64) == why(8, 64, 512, 256) == why(8, 64, 256, 128, names=("x_scale", "x_zero")) == "None"
    assert "k=192 is no multiple of 128" in why(8, 64, 192, 192)
    assert "k=192 is not divided into blocks of 128" in why(8, 64, 192, 128)
    assert "k=1024 is not divided into blocks of 512" in why(8, 64, 1024, 512)
    assert "float8_e5m2 and float8_e4m3fn" in why(8, 64, 256, 128, ("float8_e5m2", "float8_e4m3fn"))
    assert "y has 4294967296 elements" in why(2**16, 2**16, 128, 128)
    assert "int32" in why(8, 64, 2**18, 2**18) and "float64" in why(8, 64, 256, 128, dtype="float64")
    with pytest.raises(ValueError, match="rows=96 must be a multiple of 64"):
        HopperTiling(96, 128, 128, 4)


def test_the_kernel_of_hopper_pays_for_many_rows_and_for_blocks_of_few_numbers():
    static: Any = {"names": (), "dtype": "float32"}
    for rows, block, pays in ((128, 512, True), (64, 512, False), (16, 128, True), (8, 128, False), (8, 32, True)):
        x = jax.ShapeDtypeStruct((1, rows, 512), jnp.int8)
        assert HOPPER_KERNEL.profitable(x, x, block=block, **static) == pays, (rows, block)
    assert (HOPPER_KERNEL.capability(), HOPPER_KERNEL.below) == (9.0, 10.0)


# -- dispatch ----------------------------------------------------------------------------------------------------------


def test_steps_of_a_tpu_hold_whole_blocks():
    for k, block in itertools.product((8, 100, 256, 512, 768, 4096), (8, 64, 128, 256, 512)):
        tiling = ProductOfBlocksTpuTiling.for_shape(300, 1000, k, block)
        assert tiling.block_m % 32 == tiling.block_n % 128 == tiling.block_k % block == 0, (k, block)


def test_products_of_stored_arrays_are_this_operation(rng):
    """What `jc.dot` traces for blocks; for scales of whole sums on GPUs alone."""
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((5, 96), (96, 7)))
    a = jc.quantize(x, "int8(group=32)")
    b = jc.quantize(w, "int8(group=32,axis=0)")
    assert jc.dot(a, b).shape == (5, 7)
    assert "jchop_product_of_blocks" in str(jax.make_jaxpr(jc.dot)(a, b))
    whole = [jc.quantize(v, "int8(group=all)" if v is x else "int8(group=all,axis=0)") for v in (x, w)]
    for platform, count in (("cpu", 0), ("cuda", 1)):
        exported = jax.export.export(jax.jit(jc.dot), platforms=[platform])(*whole)
        assert str(exported.mlir_module()).count("call @jchop_product_of_blocks") == count
