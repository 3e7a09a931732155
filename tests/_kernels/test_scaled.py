"""The kernels of scaled blocks, interpreted: bit for bit what the portable body gives, for one table of cases.

The body's values are proven against exact rationals by tests/_core/scaled/test_elements.py. The table of formats and
shapes is that of compile_scaled.py, where the same kernels are compiled.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels.compile_round import MODES
from _kernels.compile_scaled import GPU_DTYPES, GPU_SHAPES, SCALINGS, SHAPES, TPU_DTYPES, along, plan_of, refused
from _kernels.quickly import compiled
from cases_scaled import blocks, integer_groups, mx
from further import Further

import jchop as jc
from jchop._common import bit_ops
from jchop._core.rounding.random_bits import STREAM_START, StreamOffset, seed_words
from jchop._core.scaled import elements as reference
from jchop._core.scaled import tiles
from jchop._core.scaled.elements import ScaledPlan, tensor_scale
from jchop._core.scaled_bodies import dequantize_body, flatten_scales, quantize_body, round_body
from jchop._core.xla.backend import DECODE_ON_GPU
from jchop._kernels import scaled, scaled_gpu, scaled_tpu
from jchop._kernels.scaled_tile import ScaledBlocksProblem, ScaledGpuTiling, ScaledTpuTiling
from jchop._spec.spec import Spec
from jchop.formats import ScaledFormat

further = Further()

Array = jax.Array

KERNELS: dict[str, Any] = {"tpu": scaled_tpu, "gpu": scaled_gpu}
KEY = 11


def numbers(shape: tuple[int, ...], dtype: str) -> dict[str, np.ndarray]:
    """Two arrays: one that kernels treat the short way, one with every kind of number, blocks of each magnitude."""
    rng = np.random.default_rng(len(shape) + math.prod(shape))
    kind, carrier = cases.DTYPES[dtype], bit_ops.CARRIERS[dtype]
    plain = (rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(kind)
    exponents = rng.integers(carrier.tiny_exponent, carrier.bias, (*shape[:-1], 1))
    with np.errstate(over="ignore"):
        wild = np.ldexp(rng.standard_normal(shape), exponents).astype(kind)
    for special in (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0):
        if wild.size:
            wild.reshape(-1)[rng.integers(0, wild.size)] = special
    return {"plain": plain, "wild": wild}


def operands(spec: Spec, start: int = 0) -> tuple[tuple[Array, ...], StreamOffset]:
    """What an operation takes beside the array, its random words from `start` on."""
    if not spec.rounding.stochastic:
        return (), STREAM_START
    seeds = seed_words(jax.random.key(KEY))
    return ((*seeds, jnp.uint32(start)), StreamOffset((None,))) if start else (tuple(seeds), STREAM_START)


def same_bits(got: Any, expected: Any, what: str) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    wrong = np.argwhere(cases.bits(got) != cases.bits(expected))
    assert not len(wrong), f"{what}: {len(wrong)} of {got.size} differ, first at {wrong[:4].tolist()}"


def check(platform: str, operation: str, spec: Spec, dtype: str, shape: tuple[int, ...], **more: Any) -> None:
    """A kernel against the body, each compiled once and run on all arrays."""
    module = KERNELS[platform]
    tiling, start = more.get("tiling"), more.get("start", 0)
    body = {"round_blocks": round_body, "quantize_blocks": quantize_body}[operation]
    with jax.enable_x64(dtype == "float64"):
        arrays = {name: jnp.asarray(x) for name, x in numbers(shape, dtype).items()}
        drawn, place = operands(spec, start)
        plan = plan_of(spec, dtype)

        @(jax.jit if dtype == "bfloat16" else compiled)  # subnormal numbers are kept
        def both(x: Array, *drawn: Array) -> tuple[Any, Any]:
            tensor = tensor_scale(reference.widen_16_bit(x, plan.carrier), plan) if plan.rule.tensor_scale else None
            words = scaled.kernel_words(tensor, drawn, place)
            run = getattr(module, f"{platform}_{operation}")
            return run(x, words, plan=plan, tiling=tiling, interpret=True), body(x, *drawn, plan=plan, place=place)

        for name, x in arrays.items():
            got, expected = both(x, *drawn)
            what = f"{operation} {spec} {dtype}{list(shape)}, {name} numbers"
            for part, (one, other) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(expected)[:2], strict=True)):
                same_bits(one, other, f"{what}, result {part}")


def small(platform: str, spec: Spec, dtype: str, shape: tuple[int, ...]) -> Any:
    """The smallest tiles, so that there are several."""
    if platform == "gpu":
        return None
    problem = problem_of(spec, dtype, shape)
    lanes = 128 * (1 if problem.last else problem.codes_of_whole_bytes)
    return ScaledTpuTiling(ScaledTpuTiling(1, lanes).unit(problem), lanes)


#: Every block format once on each platform, axes, dtypes, shapes and operations in turn.
TABLE = [
    (platform, ("quantize_blocks", "round_blocks")[(number + number // 4) % 2], name, (-1, -2)[number // 2 % 2],
     dtypes[number % len(dtypes)], shapes[number % 3])
    for platform, dtypes, shapes in (
        ("tpu", TPU_DTYPES, ((37, 101), (3, 5, 257), (64, 128))), ("gpu", GPU_DTYPES, GPU_SHAPES)
    )
    for number, name in enumerate(SCALINGS)
]  # fmt: skip


def problem_of(spec: Spec, dtype: str, shape: tuple[int, ...]) -> ScaledBlocksProblem:
    return ScaledBlocksProblem.of(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), plan_of(spec, dtype))


def refused_on_gpu(x: Any, plan: ScaledPlan, **more: Any) -> str | None:
    """Why a GPU does not quantize by a kernel, or None."""
    return scaled.refuse_grouping(x, plan, rows=True) or scaled.refuse_blocks(x, plan, "gpu", quantizes=True, **more)


def check_row(platform, operation, name, axis, dtype, shape):
    spec = along(SCALINGS[name], axis)
    if platform == "gpu":
        operation, spec, shape = on_gpu(operation, spec, dtype, shape)
    dtype = "float32" if refused(platform, operation, spec, dtype, shape) else dtype
    tiling = small(platform, spec, dtype, shape) if shape != (37, 101) else None
    start = (1 << 32) - 700 if spec.rounding.stochastic else 0
    check(platform, operation, spec, dtype, shape, tiling=tiling, start=start)


def on_gpu(operation: str, spec: Spec, dtype: str, shape: tuple[int, ...]) -> tuple[str, Spec, tuple[int, ...]]:
    """An operation, a format and a shape that the kernel of a GPU takes, the given ones if they can be."""
    rows = itertools.product((spec, along(spec, -1)), (operation, "quantize_blocks"), (shape, *GPU_SHAPES))
    return next((each, fmt, size) for fmt, each, size in rows if refused("gpu", each, fmt, dtype, size) is None)


#: Every block format under a mode, and every mode; the rest take turns.
REST = list(itertools.product(KERNELS, ("quantize_blocks", "round_blocks"), (-1, -2), range(4), SHAPES[1:3]))
EVERY_MODE = [
    (list(SCALINGS)[number], MODES[(number + 2) % len(MODES)], *REST[27 * number % len(REST)])
    for number in range(len(SCALINGS))
]


def check_mode(name, mode, platform, operation, axis, dtype, shape):
    spec = along(SCALINGS[name], axis)
    spec = replace(spec, rounding=mode, random_bits=None)
    dtypes = TPU_DTYPES if platform == "tpu" else GPU_DTYPES
    dtype = dtypes[dtype % len(dtypes)]
    if platform == "gpu":
        operation, spec, shape = on_gpu(operation, spec, dtype, shape)
    dtype = "float32" if refused(platform, operation, spec, dtype, shape) else dtype
    check(platform, operation, spec, dtype, shape)


ALL_SHAPES = [*SHAPES, (1, 1), (7,), (127,), (128,), (1025,), (8, 128), (2, 64, 1, 32)]
#: Platform, operation, format, shape: every shape and format once, the smallest shapes first.
IN_TURN = [
    (list(KERNELS)[k % 2], ("quantize_blocks", "round_blocks")[k // 2 % 2], name, ALL_SHAPES[(5 * k + k // 12) % 12])
    for k, name in enumerate(SCALINGS)
]
IN_TURN.sort(key=lambda row: math.prod(row[3]))


def check_axes(platform, operation, name, shape):
    """Every shape of the table of rounding, and every axis; dtypes and tiles in turn."""
    shape = GPU_SHAPES[len(name) % 3] if platform == "gpu" else shape
    for axis in range(-len(shape), 0):
        spec = along(SCALINGS[name], axis)
        dtypes = GPU_DTYPES if platform == "gpu" else TPU_DTYPES
        dtype = dtypes[(axis + len(name)) % len(dtypes)]
        if refused(platform, operation, spec, dtype, shape) is None:
            check(platform, operation, spec, dtype, shape, tiling=small(platform, spec, dtype, shape))


#: Two levels under scales of few bits and of many; each platform, rule and operation with both.
LEVELS_5 = "codebook(-1,-0.30000001192092896,0,0.699999988079071,1)"
WIDE_SCALES = [
    ("gpu", "quantize_blocks", "two_level", "float32", "e8m0fnu", "e2m1fn"),
    ("tpu", "round_blocks", "two_level", "bfloat16", "e8m0fnu", "e2m1fn"),
    ("gpu", "round_blocks", "floor_unclipped", "bfloat16", "e8m0fnu", "e2m1fn"),
    ("tpu", "quantize_blocks", "floor_unclipped", "float32", "e8m0fnu", "e2m1fn"),
    ("gpu", "round_blocks", "two_level", "float32", "e8m3", LEVELS_5),
    ("tpu", "quantize_blocks", "two_level", "float32", "e8m3", LEVELS_5),
    ("gpu", "quantize_blocks", "floor_unclipped", "bfloat16", "e8m3", LEVELS_5),
    ("tpu", "round_blocks", "floor_unclipped", "bfloat16", "e8m3", LEVELS_5),
]


def check_two_levels(platform, operation, rule, dtype, scale, element):
    """The product of the two scales is no number of float32; numbers of every magnitude, to the ends of the carrier."""
    spec = Spec(ScaledFormat(element, group=16, scale=scale, rule=rule))
    check(platform, operation, spec, dtype, (3, 64, 64) if platform == "gpu" else (3, 5, 64))


#: Lengths that are no power of two, or longer than a row; packed codes of six bits with other axes merged.
LENGTHS = [
    ("gpu", "quantize_blocks", "e3m2fn", 20, -1, (20, 9, 60)),  # the last tile overlaps another
    ("gpu", "round_blocks", "e4m3fn", 12, -2, (48, 132)),
    ("gpu", "quantize_blocks", "e3m2fn", 20, -3, (40, 20, 8)),
    ("gpu", "quantize_blocks", "e5m2", 6, -1, (131, 6)),  # a thread has a block
    ("tpu", "quantize_blocks", "e3m2fn", 256, -1, (2, 3, 60)),
    ("tpu", "round_blocks", "e4m3fn", 96, -2, (150, 33)),
    ("tpu", "quantize_blocks", "e3m2fn", 256, -3, (40, 3, 8)),
]


def check_length(platform, operation, element, block, axis, shape):
    check(platform, operation, mx(element, block=block, axis=axis), "float32", shape)


TABLES = ((check_row, TABLE), (check_mode, EVERY_MODE), (check_axes, IN_TURN), (check_two_levels, WIDE_SCALES),
          (check_length, LENGTHS))  # fmt: skip
ROWS = [
    pytest.param(run, row, id=f"{run.__name__.removeprefix('check_')}-{'-'.join(map(str, row))}")
    for run, table in TABLES
    for row in table
]


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("run", "row"), ROWS)
def test_equals_the_body(run, row):
    run(*row)


def test_empty_arrays():
    """The operation has no numbers, and asks no kernel."""
    for shape, axis in (((0,), -1), ((3, 0), -1), ((3, 0), -2), ((0, 32), -1)):
        spec, x = mx("e2m1fn", axis=axis), jnp.zeros(shape)
        run = jax.jit(lambda x, spec=spec: (scaled.round_scaled(x, spec=spec), scaled.quantize_scaled(x, spec=spec)))
        assert "custom_call" not in run.trace(x).lower(lowering_platforms=("tpu",)).as_text()
        got, (codes, scales, _) = run(x)
        assert got.shape == shape
        for one, other in zip((codes, scales), scaled.code_and_scale_shapes(spec, shape)[:2], strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_results_have_the_shapes_and_dtypes_of_the_body():
    x, words = jnp.ones((3, 64, 64)), scaled.kernel_words(None, (), STREAM_START)
    for scale in ("float32", "bfloat16"):
        plan = plan_of(integer_groups(4, 32, scale=scale), "float32")
        expected = jax.eval_shape(functools.partial(quantize_body, plan=plan), x)
        for kernel in (scaled_tpu.tpu_quantize_blocks, scaled_gpu.gpu_quantize_blocks):
            got = jax.eval_shape(functools.partial(kernel, plan=plan, interpret=True), x, words)
            assert [(v.shape, v.dtype) for v in got] == [(v.shape, v.dtype) for v in expected], (kernel, scale)


# -- the short way -----------------------------------------------------------------------------------------------------

SHORT = [mx(element, rule=rule) for element in ("e4m3fn", "e5m2", "e3m2fn", "e2m3fn", "e2m1fn", "integer8", "integer4")
         for rule in ("floor", "rceil")]  # fmt: skip


def test_the_short_way_is_taken_where_it_may_be():
    for spec in SHORT:
        assert tiles.supports_plain_power_tiles(plan_of(spec, "bfloat16")), spec
    for spec in (
        mx("float8_e4m3fnuz"),  # no -0
        blocks("e4m3fn", 32),  # overflows to NaN
        blocks("e4m3fn:up:saturate", 32),
        blocks("e4m3fn:stochastic:saturate", 32),
        blocks("e4m3fn:saturate", 32, scale="float32", rule="absmax"),
        blocks("e4m3fn:saturate", 32, scale="e5m2"),
        blocks("e4m3fn:flush:saturate", 32),
        blocks("uinteger4", 32),
        blocks("integer8", 32, rule="absmax"),
        blocks("codebook(-1,0,1)", 32),
    ):
        assert not tiles.supports_plain_power_tiles(plan_of(spec, "float32")), spec
    assert not tiles.supports_plain_power_tiles(plan_of(mx("e4m3fn"), "float64"))


#: Whole rows, and blocks under scales that are no powers of two, or that are no exponents of the largest numbers.
UNDER_ANY = [
    ("int8(group=all)", "bfloat16", (6, 1024)),
    ("int8(channel=(0,1),narrow=true)", "float16", (2, 64, 36)),
    ("int4(group=all)", "float32", (5, 2048)),
    ("e4m3fn(group=all)", "bfloat16", (3, 4096)),
    ("e5m2(group=all)", "float32", (2, 70, 6)),
    ("e3m2fn(group=all)", "float32", (3, 50, 20)),
    ("e4m3fn(group=16)", "float32", (14, 80)),
    ("int4(group=128,scale=bfloat16)", "bfloat16", (24, 384)),
    ("int8(group=48,axis=0,scale=e4m3fn)", "float32", (96, 132)),
    ("e2m1fn(group=16,axis=0)", "bfloat16", (32, 160)),
    ("nvfp4", "bfloat16", (18, 80)),
    ("int8(group=32,scale=e8m0fnu)", "float32", (35, 64)),
    ("mxfp8_e4m3(group=all)", "float32", (131, 40)),
    ("mxfp4(group=64)", "float32", (3, 11, 128)),
    ("int8(group=32,nan_block=true)", "float32", (64, 64)),
]


@pytest.mark.in_turn(16)
@pytest.mark.parametrize(("text", "dtype", "shape"), UNDER_ANY, ids=str)
def test_rows_and_blocks_under_any_scales_equal_the_body(text, dtype, shape):
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    assert refused_on_gpu(x, plan_of(jc.Spec(text), dtype)) is None
    check("gpu", "quantize_blocks", jc.Spec(text), dtype, shape)
    if refused("gpu", "round_blocks", jc.Spec(text), dtype, shape) is None:
        check("gpu", "round_blocks", jc.Spec(text), dtype, shape)


@pytest.mark.parametrize("shape", [(2, 70, 52), (3, 1024)], ids=str)
def test_rounded_rows_equal_the_body(shape):
    check("gpu", "round_blocks", jc.Spec("mxfp8_e4m3(group=all)"), "bfloat16", shape)


@pytest.mark.parametrize("text", ["nvfp4", "mxfp4", "int4(group=32,scale=bfloat16)", "nf4(group=64)"])
def test_decoding_on_gpus_gives_the_bits_of_the_body(text, rng):
    """Of all codes, under scales of all sizes."""
    x = rng.standard_normal((16, 256)) * 10.0 ** rng.integers(-38, 38, (16, 1))
    q = jc.quantize(jnp.asarray(x, "bfloat16"), text)
    codes = jnp.asarray(rng.integers(0, 256, q.qvalue.shape), "uint8")
    decode = functools.partial(dequantize_body, plan=plan_of(q.spec, "bfloat16"), shape=(16, 256))
    scales = flatten_scales(q.scale, q.zero_point)
    on_gpu = jax.jit(functools.partial(decode, backend=DECODE_ON_GPU))
    same_bits(on_gpu(codes, *scales), jax.jit(decode)(codes, *scales), text)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="has no public interpreter of Mosaic GPU")
@pytest.mark.parametrize(("text", "shape"), [("mxfp4", (64, 128)), ("int8(group=all)", (2, 1024))])
def test_the_interpreter_of_mosaic_gives_the_bits_of_the_body(text, shape):
    mosaic: Any = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    x, plan = jnp.asarray(numbers(shape, "float32")["wild"]), plan_of(jc.Spec(text), "float32")
    words = scaled.kernel_words(None, (), STREAM_START)
    got = scaled_gpu.gpu_quantize_blocks(x, words, plan=plan, interpret=mosaic.InterpretGPUParams())
    for one, other in zip(got, jax.jit(functools.partial(quantize_body, plan=plan))(x), strict=True):
        same_bits(one, other, text)


def ties(plan: ScaledPlan, rng: np.random.Generator) -> np.ndarray:
    """Blocks of grid points and the numbers halfway, one unit in the last place about, from 2^-62 to 2^62."""
    fmt = plan.element.format
    values = fmt.values() if fmt.bits <= 8 else np.zeros(1)
    grid = np.concatenate([values, (values[1:] + values[:-1]) / 2, 1.1 * values])
    count = 4 * 125
    x = rng.choice(grid, (count, 32)).astype(np.float32)
    largest = float(fmt.max)
    x[:, 0] = rng.choice([largest, 1.0, 1.06 * largest, 0.49 * largest], count)
    x *= 2.0 ** np.repeat(np.arange(-62, 63), 4)[:, None].astype(np.float32)
    bits = cases.bits(x).astype(np.int64) + rng.integers(-1, 2, x.shape) * (x != 0)
    x = bits.astype(np.uint32).view(np.float32)
    x[::17] = 0
    x[:, 1] = -0.0
    return np.where(np.abs(x) > np.abs(x[:, :1]), x[:, :1], x)


@pytest.mark.in_turn(21)
@pytest.mark.parametrize("spec", [*SHORT[::4], *SHORT[3::4]], ids=str)
def test_the_short_way_gives_the_same_bits(spec, rng):
    """Each block by itself, so that each takes the way that it may: against the general way on ties."""
    plan = plan_of(spec, "float32")
    x = ties(plan, rng)

    @jax.jit
    def both(x: Array) -> tuple[Any, Any]:
        def tile(row: Array) -> tuple[Array, ...]:
            rounded = tiles.round_tile_by_powers(row[None], 1, plan)[0]
            return rounded, *tiles.quantize_tile_by_powers(row[None], 1, plan)

        short = jax.lax.map(tile, x)
        return short, (reference.round_block_tile(x, 1, plan), *reference.quantize_block_tile(x, 1, plan))

    (rounded, codes, scales), expected = both(x)
    got = (rounded, codes[:, 0], scales[:, 0])
    for name, one, other in zip(("rounded", "codes", "scales"), got, expected, strict=True):
        same_bits(one, other, name)


# -- tilings -----------------------------------------------------------------------------------------------------------


@further.first
def heuristics_fit():
    for shape in (*SHAPES, (4096, 4096), (1, 1), (8, 8, 8)):
        check_heuristics(shape)


def check_heuristics(shape):
    rows = itertools.product(SCALINGS, {-1, -min(2, len(shape))}, ("float32", "bfloat16"))
    for name, axis, dtype in rows:
        problem = problem_of(along(SCALINGS[name], axis), dtype, shape)
        for quantizes, bits in ((True, problem.bits), (False, 8)):
            gpu = ScaledGpuTiling.for_shape(problem, quantizes)
            if gpu is not None:
                assert gpu.numbers * bits in (8, 16, 24, 32), (name, shape, axis, dtype)
                assert gpu.rows * gpu.words * gpu.numbers <= 48 * 128, (name, shape, axis, dtype)
                assert gpu.rows % (128 // gpu.lanes) == gpu.words % gpu.lanes == 0, (name, shape, axis, dtype)
        tpu = ScaledTpuTiling.for_shape(problem)
        assert problem.last or tpu.lanes % problem.codes_of_whole_bytes == 0, (name, shape, axis, dtype)
        assert tpu.blocks % tpu.unit(problem) == 0, (name, shape, axis, dtype)
        assert tpu.blocks * problem.block * 4 * 1024 <= 1 << 24, (name, shape, axis, dtype)


def test_tiles_are_checked():
    for wrong, message in (
        (lambda: ScaledTpuTiling(1, 100), "lanes=100 must be a multiple of 128"),
        (lambda: ScaledTpuTiling(0, 128), "blocks=0 must be"),
        (lambda: ScaledGpuTiling(32, 32, 3, 32), "numbers=3 must be a power of two"),
        (lambda: ScaledGpuTiling(0, 32, 4, 32), "rows=0 must be"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


# -- what kernels refuse -----------------------------------------------------------------------------------------------

MANY = f"codebook({','.join(map(str, range(33)))})"


def test_refusals_say_why():
    for platform, operation, spec, shape, dtype, message in (
        ("tpu", "round_blocks", mx("e4m3fn"), (64,), "float16", "x has dtype float16"),
        ("tpu", "round_blocks", mx("e4m3fn", block=24), (64,), "float32", "group=24 is not 8, 16 or a multiple of 32"),
        ("tpu", "round_blocks", mx("e4m3fn", block=2048), (64,), "float32", "group=2048"),
        ("tpu", "quantize_blocks", integer_groups(4, 32, scale="float16"), (64,), "float32", "dtype float16"),
        ("gpu", "round_blocks", mx("e4m3fn", block=1 << 15), (1 << 15,), "float32", "whole groups of 32768 numbers"),
        ("gpu", "round_blocks", mx("e4m3fn", block=512, axis=0), (1024, 64), "float32", "whole groups of 512 numbers"),
        ("gpu", "quantize_blocks", integer_groups(5, 32), (64, 64), "float32", "whole groups of 32 numbers"),
        ("gpu", "quantize_blocks", mx("e3m2fn", block=6), (64, 60), "float32", "whole groups of 6 numbers"),
        ("gpu", "quantize_blocks", mx("e2m1fn", axis=0), (64, 30, 5), "float32", "last axis of length 5"),
        ("gpu", "quantize_blocks", mx("e2m1fn"), (64, 60), "float32", "whole groups of 32 numbers of shape (64, 60)"),
        ("gpu", "quantize_blocks", mx("e2m1fn"), (64, 64), "float64", "at most 32 bits"),
        ("gpu", "round_blocks", jc.Spec("int4(group=32):stochastic"), (64, 64), "float32", "no powers of two"),
        ("gpu", "round_blocks", blocks(MANY, 8), (64, 64), "float32", "more than 32 levels"),
        ("gpu", "round_blocks", mx("e4m3fn"), (1 << 16, 1 << 15), "float32", "fewer than 2^31"),
    ):
        assert message in str(refused(platform, operation, spec, dtype, shape)), message


def test_tiles_of_larger_arrays_are_refused():
    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    plan = plan_of(blocks("integer4:stochastic", 8), "float32")
    place = StreamOffset((0,), (128,))
    assert "tile of a larger array" in str(scaled.refuse_blocks(x, plan, "gpu", quantizes=False, place=place))


def test_operations_take_kernels_for_blocks_within_one_axis():
    texts = [
        "int8(channel=0)", "mxfp4(group=all)", "mxfp4(group=64)", "mxfp4(group=(2,4))", "int4(group=1)",
        "uint4(group=8,zero_point=integer)", "int4(group=8,rule=mse)", "nf4(group=8,scale=int8(group=2))",
    ]  # fmt: skip
    for text in texts:
        x, plan = jax.ShapeDtypeStruct((4, 64), jnp.float32), plan_of(jc.Spec(text), "float32")
        why = str(scaled.refuse_grouping(x, plan, rows=False))
        assert "no blocks within one axis" in why or "depend on more than the ends" in why, text


WHOLE_ROWS = (
    [("int8(group=all)", (64, 64), True), ("int8(channel=(0,1))", (40, 2, 64), True),
     ("int8(channel=0)", (64, 64), True), ("int4(group=128)", (64, 128), True), ("int8(group=tensor)", (1024,), True),
     ("int8(group=tensor)", (1, 1024), True),
     ("int8(group=tensor)", (4, 64), False), ("int8(group=tensor)", (), False), ("int8(channel=0)", (4, 2, 64), False),
     ("int8(channel=1)", (4, 64), False), ("int8(group=(2,4))", (2, 64), False),
     ("int8(group=all)", (2, 1 << 15), False),
     ("int4(group=all)", (2, 63), False), ("int4(group=all,rule=mse)", (2, 64), False)]
)  # fmt: skip


def test_operations_take_kernels_of_gpus_for_whole_rows():
    for text, shape, takes in WHOLE_ROWS:
        x, plan = jax.ShapeDtypeStruct(shape, jnp.float32), plan_of(jc.Spec(text), "float32")
        assert (refused_on_gpu(x, plan) is None) is takes, (text, shape)


def test_operations_take_kernels_that_fit_and_encode():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    takes = functools.partial(refused_on_gpu, x, plan_of(mx("e2m1fn"), "float32"))
    assert takes() is None
    assert "fit scales" in str(takes(given=1)) and "fit scales" in str(takes(as_dtype=None))


# -- joined axes -------------------------------------------------------------------------------------------------------

JOINED = [
    ("int8(group=all)", (3, 2, 8)),
    ("int8(group=all,axis=1)", (2, 6, 1, 4)),
    ("int8(channel=(0,2))", (2, 3, 4, 5)),
    ("int4(group=4)", (3, 2, 8)),
    ("int4(group=(2,4),axis=(-2,-1))", (2, 4, 8)),
    ("int3(group=8)", (2, 2, 16)),
    ("uint4(group=4,zero_point=integer)", (2, 2, 8)),
    ("nvfp4", (2, 3, 32)),
    ("mxfp4(axis=-2)", (2, 64, 3)),
    ("int8(group=4):stochastic", (2, 3, 8)),
]


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("text", "shape"), JOINED)
def joined_axes_change_no_bit(text: str, shape: tuple[int, ...]) -> None:
    """Operations in a program for one CPU, whose axes are joined, against their bodies with the axes as they are."""
    spec = jc.Spec(text)
    drawn = seed_words(jax.random.key(KEY)) if spec.rounding.stochastic else ()
    plan = scaled.require_scaled_plan(spec, shape, "float32")
    for x in map(jnp.asarray, numbers(shape, "float32").values()):
        want = jax.jit(functools.partial(round_body, plan=plan))(x, *drawn)
        got = jax.jit(functools.partial(scaled.round_scaled, spec=spec))(x, *drawn)
        np.testing.assert_array_equal(bits_of(got), bits_of(want))
        codes, *parts = jax.jit(functools.partial(quantize_body, plan=plan))(x, *drawn)
        stored = jax.jit(functools.partial(scaled.quantize_scaled, spec=spec))(x, *drawn)
        for have, part in zip(jax.tree.leaves(stored), (codes, *parts), strict=True):
            assert have.shape == part.shape
            np.testing.assert_array_equal(bits_of(have), bits_of(part))
        back = functools.partial(scaled.dequantize_scaled, spec=spec, shape=shape, dtype="float32")
        np.testing.assert_array_equal(bits_of(jax.jit(back)(*stored)), bits_of(want))


def bits_of(x: Any) -> np.ndarray:
    return np.atleast_1d(np.asarray(x)).view(np.uint8)


def test_roundings_with_joined_axes_share_a_function() -> None:
    """Six shapes and groupings are two: rows of 16 in groups, and columns of 8."""

    def run(x: Array) -> Array:
        total = jnp.float32(0)
        for shape in ((8, 16), (2, 4, 16), (8, 4, 4)):
            axes = "axis=(-2,-1),group=(all,all)" if shape[-1] == 4 else "group=all"
            total += jc.round_to_format(x.reshape(shape), f"int8({axes})").sum()
        for shape, axes in (((8, 16), "0"), ((8, 4, 4), "0"), ((8, 2, 8), "0")):
            total += jc.round_to_format(x.reshape(shape), f"int8(group=all,axis={axes})").sum()
        return total

    text = jax.jit(run).lower(jnp.ones(128)).as_text()
    assert text.count("func.func private @jchop_round_scaled") == 2


def test_stored_arrays_with_joined_axes_share_functions() -> None:
    """Unless the codes of a row end within a byte: the last shape of three."""

    def run(x: Array) -> list[Array]:
        shapes = ((24,), (2, 12), (24, 1))
        return [jc.dequantize(jc.quantize(x.reshape(shape), "int4(group=tensor)")) for shape in shapes]

    program = jax.jit(run).lower(jnp.ones(24)).as_text()
    for name in ("quantize_scaled", "dequantize_scaled"):
        assert program.count(f"func.func private @jchop_{name}") == 2, name


test_further = further.test()
